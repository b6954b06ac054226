"""TrainJob: the CEL rules of its schema, and the defaulting and validating webhooks of Trainer 2.3."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ktrain_embedded.objects import names
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.crds_trainer import MANAGERS
from ktrain_embedded.objects.errors import Problem, denied, wrong
from ktrain_embedded.objects.pods import containers
from ktrain_embedded.objects.resources import Obj, Resource
from ktrain_embedded.objects.trainingruntimes import deprecation, step_of

if TYPE_CHECKING:  # only the type hints need it
    from ktrain_embedded.objects.store import Store


WEBHOOK = "validator.trainjob.trainer.kubeflow.org"
RUNTIMES = {x.kind: x for x in (r.CLUSTER_TRAINING_RUNTIME, r.TRAINING_RUNTIME)}
INITIALIZERS = {"dataset": "dataset-initializer", "model": "model-initializer"}
WITHOUT_PATCHED_ENV = ("dataset-initializer", "model-initializer", "node")
RESERVED = {  # environment variables that are set by a policy
    "torch": ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    "mpi": (
        "OMPI_MCA_orte_default_hostfile", "OMPI_MCA_orte_keep_fqdn_hostnames", "OMPI_MCA_orte_set_default_slots",
        "OMPI_MCA_plm_rsh_args",
    ),
}  # fmt: skip
IMMUTABLE = ("runtimeRef", "trainer", "initializer", "activeDeadlineSeconds", "managedBy")
PLAIN_VALUES = (str, int)
URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://.+")


def complete(job: Obj, old: Obj | None) -> None:
    """Set the time of each new or changed runtime patch to the current time."""
    from ktrain_embedded.objects.store import now

    known = {p["manager"]: p for p in ((old or {}).get("spec") or {}).get("runtimePatches") or () if "manager" in p}
    patches = (job.get("spec") or {}).get("runtimePatches")
    for patch in patches if isinstance(patches, list) else ():
        if isinstance(patch, dict):
            before = known.get(patch.get("manager", ""), {})
            same = {**before, "time": None} == {**patch, "time": None}
            changes = patch.pop("trainingRuntimeSpec", None)
            patch["time"] = before.get("time") if same and before.get("time") else now()
            if changes is not None:  # the last field of the Go struct; messages show fields in this order
                patch["trainingRuntimeSpec"] = changes


def rules(job: Obj, old: Obj | None) -> list[Problem]:
    """Return the violations of the schema's CEL rules by a TrainJob that is created or replaces `old`."""
    return [*_name(job["metadata"].get("name") or ""), *_spec(job["spec"]), *_immutable(job, old or job)]


def _name(name: str) -> Iterator[Problem]:
    if name and not re.fullmatch(names.DNS_1035.pattern, name):
        yield "FieldValueInvalid", "Invalid value: metadata.name must match RFC 1035 DNS label format", "<nil>"
    if len(name) > names.DNS_1035.longest:
        yield "FieldValueInvalid", "Invalid value: metadata.name must be no more than 63 characters", "<nil>"


def _spec(spec: Obj) -> Iterator[Problem]:
    manager = spec.get("managedBy")
    if manager not in (None, *MANAGERS):
        why = f"ManagedBy must be {' or '.join(MANAGERS)} if set"
        yield wrong("spec.managedBy", manager, why)
    for part, source in (spec.get("initializer") or {}).items():
        uri = source.get("storageUri")
        if uri and not URI.fullmatch(uri):
            why = "storageUri may be empty, or it must be a valid URI (scheme://...)"
            yield wrong(f"spec.initializer.{part}.storageUri", uri, why)


def _immutable(job: Obj, old: Obj) -> Iterator[Problem]:
    for field in IMMUTABLE:
        new, before = job["spec"].get(field), old["spec"].get(field)
        if new is not None and before is not None and new != before:
            shown = f"{json.dumps(new)}: " if isinstance(new, PLAIN_VALUES) else ""
            yield "FieldValueInvalid", f"Invalid value: {shown}field is immutable", f"spec.{field}"


def runtime_of(job: Obj) -> Resource | None:
    """Return the resource of the runtime that a TrainJob refers to, None if the kind of runtime doesn't exist."""
    ref = job["spec"]["runtimeRef"]
    return RUNTIMES.get(ref["kind"]) if ref["apiGroup"] == r.TRAINER else None


def validate(store: Store, job: Obj, old: Obj | None) -> list[str]:
    """Validate a TrainJob that is created or replaces `old`, as the Trainer's webhook does.

    :return: warnings for the client.
    :raises ApiError: 403 if the webhook denies the TrainJob.
    """
    if "deletionTimestamp" in job["metadata"]:
        return []
    ref, kind = job["spec"]["runtimeRef"], runtime_of(job)
    if kind is None:
        raise denied(WEBHOOK, [f"unsupported runtime: {ref['kind']}.{ref['apiGroup']}"])
    shown = _as_go({key: ref[key] for key in ("name", "apiGroup", "kind")})
    runtime = store.find(kind, job["metadata"]["namespace"] if kind.namespaced else None, ref["name"])
    if runtime is None and old is not None:
        return []  # the controller continues to use its snapshot of the runtime
    if runtime is None:
        field = "spec.runtimeRef" if kind.namespaced else "spec.RuntimeRef"
        what = f"{kind.kind[0].lower()}{kind.kind[1:]}"
        raise denied(WEBHOOK, [
            f'{field}: Invalid value: {shown}: {kind.group_kind} "{ref["name"]}" not found: specified {what} must be '
            "created before the TrainJob is created"
        ])  # fmt: skip
    problems = [*_initializers(job, runtime, shown), *_mpi_nodes(job, runtime), *_environment(job, runtime)]
    problems += _patches(store, job, old)
    if problems:
        raise denied(WEBHOOK, problems)
    return deprecation(f"Referenced {kind.kind}", runtime)


def _initializers(job: Obj, runtime: Obj, shown: str) -> Iterator[str]:
    replicated = runtime["spec"]["template"].get("spec", {}).get("replicatedJobs") or ()
    steps = set(map(step_of, replicated))
    for part, step in INITIALIZERS.items():
        if (job["spec"].get("initializer") or {}).get(part) is not None and step not in steps:
            why = f"must have {step} job when trainJob is configured with input {part}Config"
            yield f"spec.runtimeRef: Invalid value: {shown}: {why}"


def _mpi_nodes(job: Obj, runtime: Obj) -> Iterator[str]:
    """The launcher of an MPI runtime is a node only beside a job `node` (mpi.go 2.3, not recorded)."""
    nodes = (job["spec"].get("trainer") or {}).get("numNodes")
    mpi = (runtime["spec"].get("mlPolicy") or {}).get("mpi") or {}
    names = {x["name"] for x in runtime["spec"]["template"].get("spec", {}).get("replicatedJobs") or ()}
    if nodes is not None and nodes >= 2 and mpi.get("runLauncherAsNode") and not {"launcher", "node"} <= names:
        why = (
            "must have 1 when MPI trainingRuntime with enabled runLauncherAsNode does not have either launcher and node"
        )
        yield f"spec.trainer.numNodes: Invalid value: {nodes}: {why}"


def _environment(job: Obj, runtime: Obj) -> Iterator[str]:
    env = (job["spec"].get("trainer") or {}).get("env") or []
    for policy, reserved in RESERVED.items():
        found = sorted({e["name"] for e in env} & set(reserved))
        if found and policy in (runtime["spec"].get("mlPolicy") or {}):
            why = f"must not have reserved envs, invalid envs configured: [{' '.join(found)}]"
            yield f"spec.trainer.env: Invalid value: {_as_go(env)}: {why}"


def _patches(store: Store, job: Obj, old: Obj | None) -> Iterator[str]:
    patches = job["spec"].get("runtimePatches") or []
    for patch in patches:
        prefix, slash, path = patch["manager"].partition("/")
        if not (slash and path) or list(names.SUBDOMAIN.breaches(prefix)):
            why = 'must be a domain-prefixed path (such as "acme.io/foo")'
            yield f'spec.runtimePatches.manager: Invalid value: "{patch["manager"]}": {why}'
    if any(c.get("env") and c["name"] in WITHOUT_PATCHED_ENV for c in _patched_containers(patches)):
        why = f"must not have envs for the {', '.join(WITHOUT_PATCHED_ENV)} containers"
        yield f"spec.runtimePatches: Invalid value: {_as_go(patches)}: {why}"
    before = (old or job)["spec"]
    if patches == (before.get("runtimePatches") or []):
        return
    if not (job["spec"].get("suspend") or before.get("suspend")):
        why = "RuntimePatches can only be modified when the TrainJob is suspended before or after the update"
        yield f"spec.runtimePatches: Forbidden: {why}"
        return
    jobset = store.find(r.JOBSET, job["metadata"]["namespace"], job["metadata"]["name"]) or {}
    for replicated in (jobset.get("status") or {}).get("replicatedJobsStatus") or ():
        if replicated.get("active"):  # jobset.go, not recorded
            why = f"cannot be modified when the JobSet's ReplicatedJob {replicated['name']} is still active"
            yield f"spec.runtimePatches: Forbidden: RuntimePatches {why}"


def _patched_containers(patches: list[Obj]) -> Iterator[Obj]:
    for patch in patches:
        template = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
        for replicated in (template.get("spec") or {}).get("replicatedJobs") or ():
            pod = ((replicated.get("template") or {}).get("spec") or {}).get("template") or {}
            yield from containers(pod.get("spec") or {})


def _as_go(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
