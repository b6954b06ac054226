"""What the cluster says it serves: groups and resources (plain and aggregated), as much OpenAPI as kubectl asks."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from airflow_provider_ktrain.local.negotiation import Form
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj

VERSION = {
    "major": "1", "minor": "36", "emulationMajor": "1", "emulationMinor": "36", "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35", "gitVersion": "v1.36.2+ktrain", "gitCommit": "", "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z", "goVersion": f"python{platform.python_version()}", "compiler": "cpython",
    "platform": "linux/amd64",
}  # fmt: skip

#: subresource: its kind, the group and version of that kind (None: the resource's own), and its verbs
SUBRESOURCES: dict[str, tuple[str, str | None, str | None, list[str]]] = {
    "status": ("", None, None, ["get", "patch", "update"]),
    "scale": ("Scale", "autoscaling", "v1", ["get", "patch", "update"]),
    "log": ("", None, None, ["get"]),
    "eviction": ("Eviction", "policy", "v1", ["create"]),
    "exec": ("PodExecOptions", None, None, ["create", "get"]),
    "token": ("TokenRequest", "authentication.k8s.io", "v1", ["create"]),
    "finalize": ("", None, None, ["update"]),
}
#: group and version: plural and kind of what can only be created
REVIEWS = {
    ("authentication.k8s.io", "v1"): [("selfsubjectreviews", "SelfSubjectReview")],
    ("authorization.k8s.io", "v1"): [
        ("selfsubjectaccessreviews", "SelfSubjectAccessReview"),
        ("selfsubjectrulesreviews", "SelfSubjectRulesReview"),
    ],
}


class Discovery:
    """Discovery documents by path."""

    def __init__(self, resources: Iterable[Resource], address: str) -> None:
        """:param address: host:port of the server, for /api."""
        self._address = address
        self._groups: dict[str, dict[str, list[Obj]]] = {"": {}}
        self._gvks: dict[tuple[str, str], list[str]] = {}
        for resource in resources:
            listed = self._groups.setdefault(resource.group, {}).setdefault(resource.version, [])
            listed += [_described(resource), *(_subresource(resource, s) for s in resource.subresources)]
            self._gvks.setdefault((resource.group, resource.version), []).append(resource.kind)
        for (group, version), reviews in REVIEWS.items():
            self._groups.setdefault(group, {})[version] = [
                {"name": plural, "singularName": kind.lower(), "namespaced": False, "kind": kind, "verbs": ["create"]}
                for plural, kind in reviews
            ]

    def document(self, path: str, form: Form) -> Obj | None:
        """The document at a path, or None where there is none."""
        parts = path.strip("/").split("/")
        match parts:
            case [""]:
                return {"paths": self._paths()}
            case ["version"]:
                return dict(VERSION)
            case ["api" | "apis"] if form.kind == "APIGroupDiscoveryList":
                return self._aggregated("" if parts[0] == "api" else None, form.version)
            case ["api"]:
                cidrs = [{"clientCIDR": "0.0.0.0/0", "serverAddress": self._address}]
                return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": cidrs}
            case ["apis"]:
                return {
                    "kind": "APIGroupList",
                    "apiVersion": "v1",
                    "groups": [self._group(g) for g in self._groups if g],
                }
            case ["apis", group] if group and group in self._groups:
                return {"kind": "APIGroup", "apiVersion": "v1", **self._group(group)}
            case ["api", version] if version in self._groups[""]:
                return self._resources("", version)
            case ["apis", group, version] if group and version in self._groups.get(group, {}):
                return self._resources(group, version)
            case ["openapi", "v3"]:
                return {"paths": {p: {"serverRelativeURL": f"/openapi/v3/{p}"} for p in map(_prefix, self._gvks)}}
            case ["openapi", "v3", *prefix]:
                return self._openapi("/".join(prefix))
        return None

    def _paths(self) -> list[str]:
        groups = [
            path
            for g, versions in self._groups.items()
            if g
            for path in (f"/apis/{g}", *(f"/apis/{g}/{v}" for v in versions))
        ]
        return ["/api", "/api/v1", "/apis", *sorted(groups), "/healthz", "/livez", "/openapi/v3", "/readyz", "/version"]

    def _group(self, group: str) -> Obj:
        versions = [{"groupVersion": f"{group}/{v}", "version": v} for v in sorted(self._groups[group])]
        return {"name": group, "versions": versions, "preferredVersion": versions[0]}

    def _resources(self, group: str, version: str) -> Obj:
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": f"{group}/{version}" if group else version,
            "resources": self._groups[group][version],
        }

    def _aggregated(self, only: str | None, version: str) -> Obj:
        groups = [""] if only == "" else [g for g in self._groups if g]
        items = [
            {
                "metadata": {"name": group, "creationTimestamp": None},
                "versions": [
                    {"version": v, "resources": _nested(group, v, listed), "freshness": "Current"}
                    for v, listed in sorted(self._groups[group].items())
                ],
            }
            for group in groups
        ]
        return {
            "kind": "APIGroupDiscoveryList",
            "apiVersion": f"apidiscovery.k8s.io/{version}",
            "metadata": {},
            "items": items,
        }

    def _openapi(self, prefix: str) -> Obj | None:
        """Just enough for a client to learn that fields are validated by the server."""
        found = next((gv for gv in self._gvks if _prefix(gv) == prefix), None)
        if found is None:
            return None
        group, version = found
        validation = {"name": "fieldValidation", "in": "query", "schema": {"type": "string", "uniqueItems": True}}
        paths = {
            f"/{prefix}/{kind.lower()}": {
                "patch": {
                    "parameters": [validation],
                    "responses": {"200": {"description": "OK"}},
                    "x-kubernetes-group-version-kind": {"group": group, "kind": kind, "version": version},
                }
            }
            for kind in self._gvks[found]
        }
        return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]}, "paths": paths}


def _prefix(group_version: tuple[str, str]) -> str:
    group, version = group_version
    return f"apis/{group}/{version}" if group else f"api/{version}"


def _described(resource: Resource) -> Obj:
    return {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
        **({"shortNames": list(resource.short_names)} if resource.short_names else {}),
        **({"categories": list(resource.categories)} if resource.categories else {}),
    }


def _subresource(resource: Resource, name: str) -> Obj:
    kind, group, version, verbs = SUBRESOURCES[name]
    return {
        "name": f"{resource.plural}/{name}",
        "singularName": "",
        "namespaced": resource.namespaced,
        **({"group": group, "version": version} if group else {}),
        "kind": kind or resource.kind,
        "verbs": verbs,
    }


def _nested(group: str, version: str, listed: list[Obj]) -> list[Obj]:
    """The resources of a version in the aggregated form: subresources inside of their resource."""
    made: dict[str, Obj] = {}
    for entry in listed:
        kind = {"group": entry.get("group", group), "version": entry.get("version", version), "kind": entry["kind"]}
        plural, _, subresource = entry["name"].partition("/")
        if subresource:
            nested = {"subresource": subresource, "responseKind": kind, "verbs": entry["verbs"]}
            made[plural].setdefault("subresources", []).append(nested)
            continue
        made[plural] = {
            "resource": plural,
            "responseKind": kind,
            "scope": "Namespaced" if entry["namespaced"] else "Cluster",
            "singularResource": entry["singularName"],
            "verbs": entry["verbs"],
            **{k: entry[k] for k in ("shortNames", "categories") if k in entry},
        }
    return list(made.values())
