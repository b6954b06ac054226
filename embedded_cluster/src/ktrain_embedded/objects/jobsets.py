"""The defaulting and validating webhooks of JobSet 0.12."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects import schema
from ktrain_embedded.objects.errors import Problem, denied, invalid, wrong
from ktrain_embedded.objects.resources import Obj

WEBHOOK = "vjobset.kb.io"
LONGEST = 63  # characters in the name of a Job or a pod
SUFFIX = "-xxxxx"  # the suffix that generateName adds to a pod's name, after the completion index
MUTABLE_METADATA = ("labels", "annotations")
MUTABLE_SPEC = ("nodeSelector", "tolerations", "schedulingGates")  # fields in the pod templates of a suspended JobSet


def complete(jobset: Obj) -> None:
    """Set the defaults of JobSet's defaulting webhook."""
    spec = jobset.setdefault("spec", {})
    spec.setdefault("successPolicy", {"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    for replicated in spec.get("replicatedJobs") or ():
        replicated.setdefault("groupName", "default")
        replicated.setdefault("replicas", 1)
        job = replicated["template"].setdefault("spec", {})
        job.setdefault("completionMode", "Indexed")
        job.setdefault("template", {}).setdefault("spec", {}).setdefault("restartPolicy", "OnFailure")


def validate(jobset: Obj, old: Obj | None) -> list[str]:
    """Validate a JobSet that is created or replaces `old`.

    :return: warnings for the client: none.
    :raises ApiError: 422 if the schema doesn't allow it, 403 if the validating webhook denies it.
    """
    name = jobset["metadata"]["name"]
    missing = list(_missing_containers(jobset))
    if missing:
        raise invalid("JobSet", [*missing, schema.INCOMPLETE], name, r.JOBSET.group)
    problems = list(_names(jobset) if old is None else _changed(jobset, old))
    if problems:
        raise denied(WEBHOOK, [invalid("JobSet", problems, name, r.JOBSET.group).message])
    return []


def _missing_containers(jobset: Obj) -> Iterator[Problem]:
    for i, replicated in enumerate(jobset["spec"].get("replicatedJobs") or ()):
        path = f"spec.replicatedJobs[{i}].template.spec.template.spec.containers"
        if "containers" not in replicated["template"]["spec"]["template"]["spec"]:
            why = f'Invalid value: "null": {path} in body must be of type array: "null"'
            yield "FieldValueTypeInvalid", why, path


def _names(jobset: Obj) -> Iterator[Problem]:
    """Yield a problem for each generated Job or pod name that would be too long."""
    for i, replicated in enumerate(jobset["spec"].get("replicatedJobs") or ()):
        field = f"spec.replicatedJobs[{i}].name"
        last = max(int(replicated.get("replicas", 1)) - 1, 0)
        job = f"{jobset['metadata']['name']}-{replicated['name']}-{last}"
        if len(job) > LONGEST:
            yield _too_long(field, job, "job")
        completions = replicated["template"]["spec"].get("completions")
        if completions is not None and len(f"{job}-{max(completions - 1, 0)}{SUFFIX}") > LONGEST:
            yield _too_long(field, job, "pod")


def _too_long(field: str, name: str, what: str) -> Problem:
    why = f"JobSet name is too long, {what} names generated for this JobSet will exceed {LONGEST} characters"
    return wrong(field, name, why)


def _changed(jobset: Obj, old: Obj) -> Iterator[Problem]:
    """Yield a problem if an immutable field changes. Parts of a suspended JobSet's pod templates are mutable."""
    suspended = bool(jobset["spec"].get("suspend") or old["spec"].get("suspend"))
    before, after = (_fixed(spec, suspended) for spec in (old["spec"], jobset["spec"]))
    if before != after:
        named = [
            {key: x[key] for key in ("name", "groupName", *x)} for x in jobset["spec"].get("replicatedJobs") or ()
        ]  # in the order of the Go struct
        shown = json.dumps(named, separators=(",", ":"))
        yield "FieldValueInvalid", f"Invalid value: {shown}: field is immutable", "spec.replicatedJobs"


def _fixed(spec: Obj, suspended: bool) -> list[Obj]:
    fixed: list[Obj] = copy.deepcopy(spec.get("replicatedJobs") or [])
    for replicated in fixed if suspended else ():
        template = replicated["template"]["spec"]["template"]
        for key in MUTABLE_METADATA:
            template.get("metadata", {}).pop(key, None)
        if not template.get("metadata"):
            template.pop("metadata", None)
        for key in MUTABLE_SPEC:
            template["spec"].pop(key, None)
    return fixed
