"""The API server's validation of pod specs and batch Jobs."""

from __future__ import annotations

from collections.abc import Iterator

from ktrain_embedded.objects import names, quantity
from ktrain_embedded.objects.errors import Problem, unsupported, wrong
from ktrain_embedded.objects.resources import Obj

RESTART_POLICIES = ("Always", "Never", "OnFailure")
NO_CONTAINERS: Obj = {"containers": []}


def job_problems(job: Obj) -> Iterator[Problem]:
    """Validate a new batch Job."""
    spec = job.get("spec", {})
    for key in ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if (number := spec.get(key)) is not None and number < 0:
            why = f"Invalid value: {number}: must be greater than or equal to 0"
            yield "FieldValueInvalid", why, f"spec.{key}"
    mode = spec.get("completionMode")
    if mode not in (None, "Indexed", "NonIndexed"):
        yield unsupported("spec.completionMode", mode, ("Indexed", "NonIndexed"))
    if mode == "Indexed" and spec.get("completions") is None:
        why = "Required value: when completion mode is Indexed"
        yield "FieldValueRequired", why, "spec.completions"
    template = spec.get("template", {}).get("spec", NO_CONTAINERS)
    yield from problems(template, "spec.template.spec", RESTART_POLICIES[1:])


def problems(spec: Obj, path: str, policies: tuple[str, ...]) -> Iterator[Problem]:
    """Validate the pod spec at `path`. The restart policy must be one of `policies`."""
    if spec.get("containers") == []:
        yield "FieldValueRequired", "Required value", f"{path}.containers"
    if (policy := spec.get("restartPolicy", "Always")) not in policies:
        yield unsupported(f"{path}.restartPolicy", policy, policies)
    yield from _node_affinity(spec, path)
    volumes = {v.get("name") for v in spec.get("volumes", ())}
    seen: set[str] = set()
    for key in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(key, ())):
            yield from _container(container, f"{path}.{key}[{i}]", volumes, seen)


def _node_affinity(spec: Obj, path: str) -> Iterator[Problem]:
    """Validate matchFields: In and NotIn take one value, and only the name of a node can be matched."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    node = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    for i, term in enumerate((node.get(required) or {}).get("nodeSelectorTerms") or ()):
        for j, field in enumerate(term.get("matchFields") or ()):
            at = f"{path}.affinity.nodeAffinity.{required}.nodeSelectorTerms[{i}].matchFields[{j}]"
            if field.get("operator") not in ("In", "NotIn"):
                yield wrong(f"{at}.operator", field.get("operator", ""), "not a valid selector operator")
            elif len(field.get("values") or ()) != 1:
                why = "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"
                yield "FieldValueRequired", f"Required value: {why}", f"{at}.values"
            if field.get("key") != "metadata.name":
                yield wrong(f"{at}.key", field.get("key", ""), "not a valid field selector key")


def _container(container: Obj, path: str, volumes: set[str | None], seen: set[str]) -> Iterator[Problem]:
    name = container.get("name", "")
    if name and name in seen:
        yield "FieldValueDuplicate", f'Duplicate value: "{name}"', f"{path}.name"
    elif name:
        yield from (wrong(f"{path}.name", name, why) for why in names.LABEL.breaches(name))
    seen.add(name)
    if not container.get("image"):
        yield "FieldValueRequired", "Required value", f"{path}.image"
    for i, mount in enumerate(container.get("volumeMounts", ())):
        if mount.get("name", "") not in {"", *volumes}:
            yield "FieldValueNotFound", f'Not found: "{mount["name"]}"', f"{path}.volumeMounts[{i}].name"
    amounts = container.get("resources") or {}
    limits = amounts.get("limits") or {}
    for resource, amount in (amounts.get("requests") or {}).items():
        if resource in limits and quantity.parse(amount) > quantity.parse(limits[resource]):
            why = f"must be less than or equal to {resource} limit of {limits[resource]}"
            yield wrong(f"{path}.resources.requests", amount, why)
