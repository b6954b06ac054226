"""Rules for TrainJobs only: by the manifest, and by its runtime, which the engine reads (`submit/preflight.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from airflow_provider_ktrain.core.checks.job import Field, Finding, Job, rule
from airflow_provider_ktrain.core.checks.problem import ERROR, WARNING, Problem
from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.kinds.trainjob.form import TRAINER_FIELDS
from airflow_provider_ktrain.core.kinds.trainjob.kind import LAUNCHER
from airflow_provider_ktrain.core.kinds.trainjob.patches import (
    ENV_FIELDS,
    NODE,
    PATCHES,
    mismatches,
    node_container,
    patched_template,
    pod_of,
    replicated_jobs,
)
from airflow_provider_ktrain.core.kinds.trainjob.runtime import (
    CLUSTER_RUNTIME,
    DEFAULT_RUNTIME,
    DEPRECATED,
    RESERVED_ENVIRONMENT,
    RUNTIME_GROUP,
    RUNTIMES,
    SUPPORT_LABEL,
    TORCH,
    node_count,
    policy_of,
    python_without_torchrun,
)
from airflow_provider_ktrain.core.manifest.schema import compiled
from airflow_provider_ktrain.core.text.output import counted

#: `<job>-node-0-<index>-xxxxx` has at most 63 characters (recording 55b).
MAX_NAME = 48
_MANAGER = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/.+")
#: What to do about fields of a pod or container that a patch can't set; others belong to the runtime's author.
_INSTEAD = {
    **{key: f"for container {NODE}, set spec.trainer.{field}" for key, field in TRAINER_FIELDS.items()},
    "priorityClassName": "set it in the runtime; under Kueue, use the label kueue.x-k8s.io/priority-class",
}
SLOW_SECONDS = 60  #: A program that fails at once, but whose job takes longer to fail, is reported.
_FIRST_DELAY, _MAX_DELAY = 10, 300  #: Seconds between restarts, doubled each time: of the kubelet and of batch Jobs.
_BACKOFF_LIMIT = 6  #: The limit of a batch Job that sets none.


@rule("node-count", ERROR, TRAINJOB)
def nodes(job: Job) -> Iterator[Finding]:
    """There is at least one node, with at least one process.

    Recording 55d: with 0 nodes the job is Complete at once without a pod; with fewer it never starts.
    """
    for name in ("numNodes", "numProcPerNode"):
        field = job.spec["trainer"][name]
        if isinstance(field.value, int) and not isinstance(field.value, bool) and field.value < 1:
            succeeds = name == "numNodes" and field.value == 0
            message = "no nodes: the job would succeed at once without a pod" if succeeds else f"invalid {name}"
            yield Finding(field, message, str(field.value), "at least 1", "correct the number")


@rule("nproc-text", WARNING, TRAINJOB)
def processes_are_a_number(job: Job) -> Iterator[Finding]:
    """The number of processes per node is a number."""
    field = job.spec["trainer"]["numProcPerNode"]
    if field.text:
        hint = "remove it for one process for each GPU, or each CPU if there are none" if field.text == "auto" else ""
        yield Finding(
            field, "Kubeflow Trainer takes numbers only", repr(field.text), "a number", hint or "write a number"
        )


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


@rule("mpirun-env", WARNING, TRAINJOB)
def mpirun_env(job: Job) -> Iterator[Finding]:
    """A shell's mpirun gets the variables of `env` by -x."""
    trainer = job.spec["trainer"]
    words = [word.text for word in (*trainer["command"], *trainer["args"])]
    line = next((word for word in words if re.search(r"\b(?:mpirun|mpiexec)\s", word)), "")
    unset = [n for e in trainer["env"] if (n := e["name"].text) and not re.search(rf"\b{re.escape(n)}\b", line)]
    if line and unset:
        message = "rank 0 doesn't get these variables: the launcher's node, on which it runs, has no `env`"
        hint = "write -x NAME=value in the command, or a command that begins with mpirun, without a shell"
        yield Finding(trainer["env"], message, ", ".join(unset), "mpirun -x", hint)


@rule("torchrun", WARNING, TRAINJOB)
def torchrun(job: Job) -> Iterator[Finding]:
    """Several nodes of a torch runtime are started by torchrun. Only a cluster shows whether the runtime is for torch.

    The Trainer sets PET_* variables, which only torchrun reads (recording 50c).
    """
    trainer = job.spec["trainer"]
    if job.spec["runtimeRef"]["name"].text == DEFAULT_RUNTIME and (trainer["numNodes"].number or 1) > 1:
        yield from _without_torchrun(trainer["command"], trainer["args"].value)


def _without_torchrun(command: Field, args: object) -> Iterator[Finding]:
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


@rule("name-length", WARNING, TRAINJOB)
def name_length(job: Job) -> Iterator[Finding]:
    """The job's name leaves room for the names of its pods; tasks choose a shorter name themselves."""
    name = job.root["metadata"]["name"]
    if len(name.text) > MAX_NAME:
        found = f"{len(name.text)} characters"
        message = "the job's name is too long: JobSet refuses it, and the job never starts"
        yield Finding(name, message, found, f"at most {MAX_NAME}, for some runtimes 33", "shorten it")


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


# by the runtime


def judge_runtime(manifest: Mapping[str, Any], runtime: Mapping[str, Any], name_length: int) -> Iterator[Problem]:
    """The problems that a job would have on its runtime.

    :param manifest: of the job, before our own patches.
    """
    for error in mismatches(manifest, runtime, name_length):
        yield Problem.of("runtime-patch" if error.where else "name-length", error, "$.spec.runtimeRef")
    template = patched_template(manifest, runtime)
    spec = Field(manifest)["spec"]
    yield from _reserved_by_runtime(spec, runtime)
    yield from _nodes(spec, runtime, template)
    yield from _torchrun(spec, manifest, runtime, template)
    yield from _unreached(spec, template)
    yield from _deprecated(spec["runtimeRef"], runtime)
    yield from _slow_failure(spec["runtimeRef"], template)
    yield from _time_to_live(spec["runtimeRef"], template)


def _reserved_by_runtime(spec: Field, runtime: Mapping[str, Any]) -> Iterator[Problem]:
    """No variable is set that the Trainer sets."""
    policy = policy_of(runtime)
    names = {name for source, reserved in RESERVED_ENVIRONMENT.items() if source in policy for name in reserved}
    for env in spec["trainer"]["env"]:
        if env["name"].text in names:
            message = f"{env['name'].text} is reserved: the Trainer refuses the job"
            yield Problem(
                ERROR, "reserved-env", env.path, message, env["name"].text, "the Trainer's value", "remove it"
            )


def _nodes(spec: Field, runtime: Mapping[str, Any], template: Mapping[str, Any]) -> Iterator[Problem]:
    """MPI runtimes: numNodes counts the pods of job `node` and, with runLauncherAsNode, the launcher."""
    policy = policy_of(runtime).get("mpi")
    nodes = spec["trainer"]["numNodes"]
    if policy is None or nodes.number is None:
        return
    names = {str(r.get("name")) for r in replicated_jobs(template)}
    as_node = bool(policy.get("runLauncherAsNode"))
    if as_node and nodes.number > 1 and not {NODE, LAUNCHER} <= names:
        message = f"this MPI runtime has no jobs {NODE} and {LAUNCHER}: the Trainer refuses more than one node"
        yield Problem(ERROR, "node-count", nodes.path, message, str(nodes.value), "1", "use another runtime")
    elif NODE not in names:
        message = f"numNodes has no effect: this MPI runtime has no job {NODE}"
        found, expected = ", ".join(sorted(names)), f"a job {NODE}"
        yield Problem(WARNING, "node-count", nodes.path, message, found, expected, "use another runtime")
    elif as_node and nodes.number == 1:
        message = "this MPI runtime starts two pods: the launcher, which is a node, and at least one other node"
        yield Problem(WARNING, "node-count", nodes.path, message, "1", "at least 2", "set the number of nodes to 2")


def _torchrun(
    spec: Field, manifest: Mapping[str, Any], runtime: Mapping[str, Any], template: Mapping[str, Any]
) -> Iterator[Problem]:
    """Several nodes of a runtime with the policy torch are started by torchrun."""
    if TORCH not in policy_of(runtime) or (node_count(manifest, runtime) or 1) < 2:
        return
    nodes = (node_container(r) for r in replicated_jobs(template))
    node = next((container for container in nodes if container is not None), {})
    command, args = spec["trainer"]["command"], spec["trainer"]["args"].value
    at = command if command.value else Field(node.get("command"), spec["runtimeRef"].path)
    for found in _without_torchrun(at, args or node.get("args")):
        yield Problem(WARNING, "torchrun", found.at.path, found.message, found.found, found.expected, found.hint)


def _unreached(spec: Field, template: Mapping[str, Any]) -> Iterator[Problem]:
    """The Trainer changes container `node` only in jobs whose Job template has a label (builder.go 2.3)."""
    jobs = [r for r in replicated_jobs(template) if node_container(r) is not None]
    without = [r for r in jobs if not ((r.get("template") or {}).get("metadata") or {}).get("labels")]
    if not without or len(without) == len(jobs):
        return
    names = " and ".join(str(r.get("name")) for r in without)
    for key in ("image", "resourcesPerNode"):
        if (field := spec["trainer"][key]).value:
            message = f"{key} has no effect on the pods of job {names}: they keep the runtime's"
            hint = f"set it in the runtime's job {names}"
            yield Problem(WARNING, "trainer-scope", field.path, message, key, "the same in all nodes", hint)


def _deprecated(at: Field, runtime: Mapping[str, Any]) -> Iterator[Problem]:
    """A release of the Trainer will no longer have this runtime (trainingruntime_webhook.go 2.3)."""
    if ((runtime.get("metadata") or {}).get("labels") or {}).get(SUPPORT_LABEL) == DEPRECATED:
        message = "the runtime is deprecated: a future release of Kubeflow Trainer will not have it"
        found, hint = f"label {SUPPORT_LABEL}: {DEPRECATED}", "use another runtime"
        yield Problem(WARNING, "deprecated-runtime", at.path, message, found, "a supported runtime", hint)


def _slow_failure(at: Field, template: Mapping[str, Any]) -> Iterator[Problem]:
    """By default a failing program is restarted for 5.5 minutes before the job fails (recording 51i).

    A node may be configured to restart containers sooner: a job needed 2 minutes on Kubernetes 1.36.
    """
    for replicated in replicated_jobs(template):
        job = (replicated.get("template") or {}).get("spec") or {}
        limit = job.get("backoffLimit")
        limit = limit if isinstance(limit, int) else _BACKOFF_LIMIT
        seconds = sum(min(_FIRST_DELAY * 2**i, _MAX_DELAY) for i in range(max(limit - 1, 0)))
        if seconds < SLOW_SECONDS or node_container(replicated) is None:
            continue
        policy = pod_of(replicated).get("restartPolicy") or "OnFailure by default"
        duration = counted(round(seconds / 60), "minute")
        message = f"a failing program is restarted for up to {duration} before the job fails"
        by_default = "" if "backoffLimit" in job else " by default"
        found = f"restartPolicy {policy}, backoffLimit {limit}{by_default} in job {replicated.get('name')}"
        hint = "set restartPolicy: Never and backoffLimit: 0 in the runtime, or max_restarts of the task"
        yield Problem(WARNING, "slow-failure", at.path, message, found, "backoffLimit 0", hint)


def _time_to_live(at: Field, template: Mapping[str, Any]) -> Iterator[Problem]:
    """When the JobSet of a failed job is deleted, the Trainer creates it again (recording 60b)."""
    ttl = (template.get("spec") or {}).get("ttlSecondsAfterFinished")
    if ttl is not None:
        message = "the runtime deletes an ended JobSet: a failed job would then train again"
        hint = "remove ttlSecondsAfterFinished from the runtime: the task deletes the job"
        yield Problem(WARNING, "ttl", at.path, message, f"ttlSecondsAfterFinished {ttl}", "no TTL", hint)
