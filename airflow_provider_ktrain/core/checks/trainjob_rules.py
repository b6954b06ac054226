"""Rules for TrainJobs only. What depends on the runtime is in `runtime_rules.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from airflow_provider_ktrain.core.checks.job import Field, Finding, Job, rule
from airflow_provider_ktrain.core.checks.problem import ERROR, WARNING
from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.kinds.trainjob.patches import (
    ENV_FIELDS,
    OVERRIDES,
    PATCHES,
    SINCE,
)
from airflow_provider_ktrain.core.kinds.trainjob.runtime import (
    CLUSTER_RUNTIME,
    DEFAULT_RUNTIME,
    RESERVED_ENVIRONMENT,
    RUNTIME_GROUP,
    RUNTIMES,
    python_without_torchrun,
)
from airflow_provider_ktrain.core.manifest.schema import compiled

#: `<job>-node-0-<index>-xxxxx` has at most 63 characters (recording 55b)
MAX_NAME = 48
_MANAGER = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/.+")
#: what to do about fields of a pod or container that a patch can't set; others belong to the runtime's author
_INSTEAD = {
    "command": "for container node, set spec.trainer.command",
    "args": "for container node, set spec.trainer.args",
    "image": "for container node, set spec.trainer.image",
    "resources": "for container node, set spec.trainer.resourcesPerNode",
    "priorityClassName": "set it in the runtime; under Kueue, use the label kueue.x-k8s.io/priority-class",
}


@rule("node-count", ERROR, TRAINJOB)
def node_count(job: Job) -> Iterator[Finding]:
    """There is at least one node, with at least one process.

    Recording 55d: with 0 nodes the job is Complete at once without a pod; with fewer it never starts.
    """
    for name in ("numNodes", "numProcPerNode"):
        field = job.spec["trainer"][name]
        if _is_below_one(field):
            succeeds = name == "numNodes" and field.value == 0
            message = "no nodes: the job would succeed at once without a pod" if succeeds else f"invalid {name}"
            yield Finding(field, message, str(field.value), "at least 1", "correct the number")


@rule("nproc-text", WARNING, TRAINJOB)
def processes_are_a_number(job: Job) -> Iterator[Finding]:
    """The number of processes per node is a number."""
    field = job.spec["trainer"]["numProcPerNode"]
    if field.text:
        hint = "remove it for one process for each GPU, or each CPU if there are none" if field.text == "auto" else ""
        yield Finding(field, f"{SINCE} takes numbers only", repr(field.text), "a number", hint or "write a number")


@rule("runtime-ref", ERROR, TRAINJOB)
def runtime_kind(job: Job) -> Iterator[Finding]:
    """The runtime is of a kind that the Trainer knows."""
    ref = job.spec["runtimeRef"]
    if ref["kind"].text and ref["kind"].text not in RUNTIMES:
        found = ref["kind"].text
        yield Finding(
            ref["kind"], "unsupported kind of runtime", found, " or ".join(RUNTIMES), f"use {CLUSTER_RUNTIME}"
        )
    if ref["apiGroup"].text not in ("", RUNTIME_GROUP):
        message, found = "unsupported API group of a runtime", ref["apiGroup"].text
        yield Finding(ref["apiGroup"], message, found, RUNTIME_GROUP, "remove it")


@rule("reserved-env", WARNING, TRAINJOB)
def reserved_env(job: Job) -> Iterator[Finding]:
    """No variable is set that runtimes reserve; which ones depends on the runtime."""
    policy_of = {name: policy for policy, names in RESERVED_ENVIRONMENT.items() for name in names}
    for env in job.spec["trainer"]["env"]:
        if policy := policy_of.get(env["name"].text):
            message = f"{env['name'].text} is reserved: the Trainer refuses the job on runtimes for {policy}"
            yield Finding(env, message, env["name"].text, "the Trainer's value", "remove it")


@rule("torchrun", WARNING, TRAINJOB)
def torchrun(job: Job) -> Iterator[Finding]:
    """Several nodes of a torch runtime are started by torchrun. Only a cluster shows whether the runtime is for torch.

    The Trainer sets PET_* variables, which only torchrun reads (recording 50c).
    """
    trainer = job.spec["trainer"]
    if job.spec["runtimeRef"]["name"].text == DEFAULT_RUNTIME and (trainer["numNodes"].number or 1) > 1:
        yield from without_torchrun(trainer["command"], trainer["args"].value)


def without_torchrun(command: Field, args: object) -> Iterator[Finding]:
    """A finding for a command that starts Python on each node by itself.

    :param command: of the container, with its path in the manifest.
    """
    words = [*command] if isinstance(command.value, list) else []
    if program := python_without_torchrun([*(w.value for w in words), *(args if isinstance(args, list) else ())]):
        message = (
            "each node would run its own training: Python reads none of the variables by which nodes find each other"
        )
        yield Finding(
            command, message, program, "torchrun", f"start it by torchrun: [torchrun, ...] instead of [{program}, ...]"
        )


@rule("deadline", ERROR, TRAINJOB)
def deadline(job: Job) -> Iterator[Finding]:
    """The activeDeadlineSeconds are at least 1."""
    field = job.spec["activeDeadlineSeconds"]
    if _is_below_one(field):
        yield Finding(field, "invalid deadline", str(field.value), "at least 1", "remove it, or raise it")


def _is_below_one(field: Field) -> bool:
    return isinstance(field.value, int) and not isinstance(field.value, bool) and field.value < 1


@rule("name-length", WARNING, TRAINJOB)
def name_length(job: Job) -> Iterator[Finding]:
    """The job's name leaves room for the names of its pods; tasks choose a shorter name themselves."""
    name = job.root["metadata"]["name"]
    if len(name.text) > MAX_NAME:
        found = f"{len(name.text)} characters"
        message = "the job's name is too long: JobSet refuses it, and the job never starts"
        yield Finding(name, message, found, f"at most {MAX_NAME}, for some runtimes 33", "shorten it")


@rule("old-overrides", WARNING, TRAINJOB)
def old_overrides(job: Job) -> Iterator[Finding]:
    """Pods are overridden by runtimePatches, and not by the fields of older Trainers."""
    for name in (*OVERRIDES, "labels", "annotations"):
        if name != PATCHES and job.spec[name].present:
            message = f"{SINCE} refuses spec.{name}"
            yield Finding(job.spec[name], message, name, PATCHES, f"use {PATCHES}, unless the Trainer is older")


@rule("runtime-patch", ERROR, TRAINJOB)
def runtime_patches(job: Job) -> Iterator[Finding]:
    """A runtime patch has a manager, and sets only what patches can set.

    A patch can't set program and resources of a container, or how pods are restarted and scheduled: the schema doesn't
    have these fields (facts of trainjob_types.go 2.3). The webhook refuses some variables (recording 55).
    """
    for entry in job.spec[PATCHES]:
        manager = entry["manager"]
        if manager.text and not _MANAGER.fullmatch(manager.text):
            hint = "prefix it by a domain: example.com/me"
            yield Finding(manager, "invalid manager of a patch", repr(manager.text), "domain.name/path", hint)
        for replicated in entry["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            yield from _patched_pod(replicated["template"]["spec"]["template"]["spec"])


def _patched_pod(pod: Field) -> Iterator[Finding]:
    """A patch of a pod has only what the Trainer accepts."""
    yield from _only(pod, "PodPatchSpec", "a pod")
    for container in (*pod["containers"], *pod["initContainers"]):
        name = container["name"].text
        yield from _only(container, "ContainerPatch", f"container {name}")
        if container["env"].value and name in ENV_FIELDS:
            message = f"the Trainer refuses patches of the environment of container {name}"
            yield Finding(container["env"], message, "env", ENV_FIELDS[name], f"move it to {ENV_FIELDS[name]}")


def _only(holder: Field, schema: str, what: str) -> Iterator[Finding]:
    """A patch has only fields that the Trainer accepts."""
    for key, value in holder.members():
        if key not in compiled(schema)["properties"] and value.present:
            hint = _INSTEAD.get(key, "set it in the runtime")
            yield Finding(value, f"a TrainJob can't set {key} of {what}", key, "a field that patches have", hint)
