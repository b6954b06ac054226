"""What a runtime means for a TrainJob that isn't created yet. The engine reads it (`engine/submit/preflight.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from airflow_provider_ktrain.core.checks.job import Field
from airflow_provider_ktrain.core.checks.problem import ERROR, WARNING, Problem
from airflow_provider_ktrain.core.checks.trainjob_rules import without_torchrun
from airflow_provider_ktrain.core.kinds.trainjob.patches import (
    NODE,
    mismatches,
    node_container,
    patched_template,
    pod_of,
    replicated_jobs,
)
from airflow_provider_ktrain.core.kinds.trainjob.runtime import (
    DEPRECATED,
    RESERVED_ENVIRONMENT,
    SUPPORT_LABEL,
    TORCH,
    node_count,
    policy_of,
)
from airflow_provider_ktrain.core.text.output import counted

LAUNCHER = "launcher"
SLOW_SECONDS = 60  #: a program that fails at once, but whose job takes longer to fail, is reported
_FIRST_DELAY, _MAX_DELAY = 10, 300  #: seconds between restarts, doubled each time: of the kubelet and of batch Jobs
_BACKOFF_LIMIT = 6  #: of a batch Job that sets none


def judge_runtime(manifest: Mapping[str, Any], runtime: Mapping[str, Any], name_length: int) -> Iterator[Problem]:
    """The problems that a job would have on its runtime.

    :param manifest: of the job, before our own patches.
    :param name_length: number of characters of the job's name.
    """
    for error in mismatches(manifest, runtime, name_length):
        yield Problem.of("runtime-patch" if error.where else "name-length", error, "$.spec.runtimeRef")
    template = patched_template(manifest, runtime)
    spec = Field(manifest)["spec"]
    yield from _reserved(spec, runtime)
    yield from _nodes(spec, runtime, template)
    yield from _torchrun(spec, manifest, runtime, template)
    yield from _unreached(spec, template)
    yield from _deprecated(spec["runtimeRef"], runtime)
    yield from _slow_failure(spec["runtimeRef"], template)
    yield from _time_to_live(spec["runtimeRef"], template)


def _reserved(spec: Field, runtime: Mapping[str, Any]) -> Iterator[Problem]:
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
    for found in without_torchrun(at, args or node.get("args")):
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
