"""Discovery documents: groups, versions and resources, and the part of OpenAPI that kubectl requests."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from ktrain_embedded.objects import openapi
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj

VERSION = {
    "major": "1", "minor": "36", "gitVersion": "v1.36.2+ktrain", "gitCommit": "", "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z", "goVersion": f"python{platform.python_version()}", "compiler": "cpython",
    "platform": "linux/amd64",
}  # fmt: skip

NOT_DESCRIBED = (
    "The embedded cluster doesn't describe the fields of built-in types. See "
    "https://kubernetes.io/docs/reference/kubernetes-api/"
)
READ_WRITE = ["get", "patch", "update"]
#: Verbs of each subresource, and its kind, group and version if they differ from the resource's.
SUBRESOURCES: dict[str, Obj] = {
    "status": {"verbs": READ_WRITE},
    "scale": {"verbs": READ_WRITE, "kind": "Scale", "group": "autoscaling", "version": "v1"},
    "log": {"verbs": ["get"]},
    "exec": {"verbs": ["create", "get"], "kind": "PodExecOptions"},
    "eviction": {"verbs": ["create"], "kind": "Eviction", "group": "policy", "version": "v1"},
    "token": {"verbs": ["create"], "kind": "TokenRequest", "group": "authentication.k8s.io", "version": "v1"},
}


def documents(resources: Iterable[Resource], address: str) -> dict[str, Obj]:
    """Return the discovery documents by path. `address` is host:port of the server."""
    listed: dict[str, list[Obj]] = {}
    schemas: dict[str, Obj] = {}
    for resource in resources:
        schemas.setdefault(resource.api_version, {})[openapi.component(resource)] = _schema(resource)
        head = {"namespaced": resource.namespaced, "kind": resource.kind}
        itself = {
            **head, "name": resource.plural, "singularName": resource.singular, "verbs": list(resource.verbs),
            "shortNames": list(resource.short_names), "categories": list(resource.categories),
        }  # fmt: skip
        subresources = (
            {**head, "name": f"{resource.plural}/{name}", "singularName": "", **SUBRESOURCES[name]}
            for name in resource.subresources
        )
        listed.setdefault(resource.api_version, []).extend((itself, *subresources))
    cidrs = [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}]
    made: dict[str, Obj] = {
        "/version": VERSION,
        "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": cidrs},
    }
    groups: dict[str, list[Obj]] = {}
    for api_version, entries in listed.items():
        group, _, version = api_version.rpartition("/")
        path = f"apis/{api_version}" if group else f"api/{version}"
        head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version}
        made[f"/{path}"] = {**head, "resources": entries}
        made[f"/openapi/v3/{path}"] = _openapi(path, group, version, entries, schemas.get(api_version, {}))
        if group:
            groups.setdefault(group, []).append({"groupVersion": api_version, "version": version})
    described = [{"name": name, "versions": v, "preferredVersion": v[0]} for name, v in groups.items()]
    for entry in described:
        made[f"/apis/{entry['name']}"] = {"kind": "APIGroup", "apiVersion": "v1", **entry}
    made["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": described}
    specs = (path.removeprefix("/openapi/v3/") for path in made if path.startswith("/openapi"))
    made["/openapi/v3"] = {"paths": {spec: {"serverRelativeURL": f"/openapi/v3/{spec}"} for spec in specs}}
    made["/"] = {"paths": sorted(path for path in (*made, "/healthz", "/livez", "/readyz") if "/v3/" not in path)}
    return made


def _schema(resource: Resource) -> Obj:
    """The schema of a type. Without the fields of a built-in one, `kubectl explain` names Kubernetes' documentation."""
    kind = {"group": resource.group, "kind": resource.kind, "version": resource.version}
    known = openapi.schema_of(resource) if resource.custom else {"type": "object", "description": NOT_DESCRIBED}
    return {**known, "x-kubernetes-group-version-kind": [kind]}


def _openapi(prefix: str, group: str, version: str, entries: list[Obj], schemas: Obj) -> Obj:
    """Return an OpenAPI document: paths that support field validation, and schemas."""
    validation = {"name": "fieldValidation", "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    paths = {
        f"/{prefix}/{entry['name']}": {
            "patch": {
                "parameters": [validation],
                "responses": {"200": {"description": "OK"}},
                "x-kubernetes-group-version-kind": {"group": group, "kind": entry["kind"], "version": version},
            }
        }
        for entry in entries
        if "/" not in entry["name"]
    }
    info = {"title": "Kubernetes", "version": VERSION["gitVersion"]}
    components = {"components": {"schemas": schemas}} if schemas else {}
    return {"openapi": "3.0.0", "info": info, "paths": paths, **components}
