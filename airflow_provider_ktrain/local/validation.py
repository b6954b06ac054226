"""Rules that objects of all types keep (metadata), and those of the built-in types that people write by hand."""

from __future__ import annotations

from collections.abc import Iterator

from airflow_provider_ktrain.local import names
from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.names import Rule
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.schema import INCOMPLETE, Problem
from airflow_provider_ktrain.local.store import Obj

NAME_RULES: dict[Resource, Rule] = {r.NAMESPACE: names.LABEL, r.SERVICE: names.DNS_1035}
UNRULED = (r.ROLE, r.ROLE_BINDING, r.CLUSTER_ROLE, r.CLUSTER_ROLE_BINDING)  # any path segment
RESTART_POLICIES = ("Always", "OnFailure", "Never")
POD_UPDATES = (
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def wrong(field: str, value: object, why: str) -> Problem:
    return "FieldValueInvalid", f'Invalid value: "{value}": {why}', field


def required(field: str, why: str = "") -> Problem:
    return "FieldValueRequired", f"Required value{': ' if why else ''}{why}", field


def metadata(resource: Resource, obj: Obj, old: Obj | None) -> Iterator[Problem]:
    """Problems of an object's metadata, alone and against the object that it replaces."""
    meta = obj["metadata"]
    name = meta.get("name") or ""
    if not name and not meta.get("generateName"):
        yield required("metadata.name", "name or generateName is required")
        if resource in (r.PYTORCHJOB, r.MPIJOB_V1):
            yield INCOMPLETE
    elif name and resource not in UNRULED:
        rule = NAME_RULES.get(resource, names.SUBDOMAIN)
        yield from (wrong("metadata.name", name, why) for why in rule.breaches(name))
    elif any(c in name for c in "/%") or name in (".", ".."):
        yield wrong("metadata.name", name, "may not contain '/' or '%'")
    for key, value in (meta.get("labels") or {}).items():
        yield from (wrong("metadata.labels", key, why) for why in names.qualified(key))
        yield from (wrong("metadata.labels", value, why) for why in names.LABEL_VALUE.breaches(value))
    for key in meta.get("annotations") or {}:
        yield from (wrong("metadata.annotations", key, why) for why in names.qualified(key.lower()))
    if old is not None:
        # custom resources are looked at by two validators
        yield from [*_against(meta, old["metadata"])] * (2 if resource.custom else 1)


def _against(meta: Obj, old: Obj) -> Iterator[Problem]:
    for key in ("uid", "creationTimestamp"):
        if meta.get(key) and meta[key] != old.get(key):
            yield wrong(f"metadata.{key}", meta[key], "field is immutable")
    added = [f for f in meta.get("finalizers") or () if f not in (old.get("finalizers") or ())]
    if added and "deletionTimestamp" in old:
        told = ", ".join(f'"{f}"' for f in added)
        why = "no new finalizers can be added if the object is being deleted, found new finalizers"
        yield "FieldValueForbidden", f"Forbidden: {why} []string{{{told}}}", "metadata.finalizers"


def built_in(resource: Resource, obj: Obj, old: Obj | None) -> list[Problem]:
    """Problems of an object of a built-in type."""
    if resource == r.POD:
        return list(pod_spec(obj.get("spec") or {}, "spec") if old is None else _pod_update(obj, old))
    if resource == r.BATCH_JOB:
        template = ((obj.get("spec") or {}).get("template") or {}).get("spec") or {}
        return list(pod_spec(template, "spec.template.spec", job=True) if old is None else _job_update(obj, old))
    if (
        old is not None
        and resource in (r.ROLE_BINDING, r.CLUSTER_ROLE_BINDING)
        and obj.get("roleRef") != old.get("roleRef")
    ):
        return [wrong("roleRef", obj.get("roleRef"), "cannot change roleRef")]
    if old is not None and old.get("immutable"):
        changed = [k for k in ("data", "binaryData") if obj.get(k) != old.get(k)]
        why = "Forbidden: field is immutable when `immutable` is set"
        return [("FieldValueForbidden", why, key) for key in changed]
    return []


def pod_spec(spec: Obj, path: str, *, job: bool = False) -> Iterator[Problem]:
    """Problems of a pod's spec; that of a Job must not say restartPolicy Always."""
    policy, allowed = spec.get("restartPolicy"), RESTART_POLICIES[1:] if job else RESTART_POLICIES
    if not spec.get("containers"):
        yield required(f"{path}.containers")
    if policy not in (*allowed, *(() if job else (None,))):
        supported = ", ".join(f'"{p}"' for p in sorted(allowed))
        why = f'Unsupported value: "{policy or ("Always" if job else "")}": supported values: {supported}'
        yield "FieldValueNotSupported", why, f"{path}.restartPolicy"
    volumes = {v.get("name") for v in spec.get("volumes") or ()}
    seen: set[str] = set()
    for key in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(key) or ()):
            yield from _container(container, f"{path}.{key}[{i}]", volumes, seen)


def _container(container: Obj, path: str, volumes: set[str | None], seen: set[str]) -> Iterator[Problem]:
    name = container.get("name") or ""
    if not name:
        yield required(f"{path}.name")
    elif name in seen:
        yield "FieldValueDuplicate", f'Duplicate value: "{name}"', f"{path}.name"
    else:
        yield from (wrong(f"{path}.name", name, why) for why in names.LABEL.breaches(name))
    seen.add(name)
    if not container.get("image"):
        yield required(f"{path}.image")
    for i, variable in enumerate(container.get("env") or ()):
        if not variable.get("name"):
            yield required(f"{path}.env[{i}].name")
    for i, mount in enumerate(container.get("volumeMounts") or ()):
        place = f"{path}.volumeMounts[{i}]"
        if not mount.get("name"):
            yield required(f"{place}.name")
        elif mount["name"] not in volumes:
            yield "FieldValueNotFound", f'Not found: "{mount["name"]}"', f"{place}.name"
        if not mount.get("mountPath"):
            yield required(f"{place}.mountPath")


def _pod_update(pod: Obj, old: Obj) -> Iterator[Problem]:
    """Only a few fields of a running pod's spec may change."""

    def fixed(spec: Obj) -> Obj:
        kept = {k: v for k, v in spec.items() if k not in ("activeDeadlineSeconds", "tolerations")}
        for key in ("initContainers", "containers"):
            kept[key] = [{k: v for k, v in c.items() if k != "image"} for c in spec.get(key) or ()]
        return kept

    if fixed(pod.get("spec") or {}) != fixed(old["spec"]):
        yield "FieldValueForbidden", POD_UPDATES, "spec"


def _job_update(job: Obj, old: Obj) -> Iterator[Problem]:
    for key in ("completions", "selector", "template"):
        if (job.get("spec") or {}).get(key) != old["spec"].get(key) and not (
            key == "template" and old["spec"].get("suspend")
        ):
            yield wrong(f"spec.{key}", "", "field is immutable")
