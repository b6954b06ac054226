"""Whether a problem of a node explains a failure. Other problems of the nodes that were read are context."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from airflow_provider_ktrain.core.diagnosis.evidence import Evidence
from airflow_provider_ktrain.core.diagnosis.failure_patterns import explain_disruption
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.node_conditions import Fault, NodeProblem
from airflow_provider_ktrain.core.diagnosis.pod_failures import Failure
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json

MAX_NODES = 4  #: How many nodes are read for one diagnosis.
_BROKEN = (Fault.DEVICE, Fault.NODE)
_OF_DEVICES = re.compile(r"(?i)\b(CUDA|cuBLAS|cuDNN|NCCL|NVML|GPU|HIP|ROCm|Xid)")
_RESOLUTION = "Retry on another node (avoid_failed_nodes). Tell the cluster's administrator of the node."
_LEAVING_RESOLUTION = "Retry: the node is going away. Save checkpoints often enough."


def blame_node(cause: Cause, failure: Failure, evidence: Evidence) -> Cause:
    """The cause, or the problem of a node that explains it: of the replica's node, or of the peer's that it lost."""
    if cause.replica:  # that replica is the cause, and not the one that failed
        if cause.category is not Category.INFRASTRUCTURE:
            return cause
        return named(cause, problem_of_hanging(cause.replica, evidence), cause.replica)
    own = first_problem(evidence, lambda p: p.node == failure.node and _explains(p, failure, cause))
    if not failure.tail.is_peer_loss or cause.category is not Category.INFRASTRUCTURE:
        return named(cause, own, failure.replica)
    peers = first_problem(evidence, lambda p: p.node != failure.node and p.fault is not Fault.SHORTAGE)
    if peers is None:
        return named(cause, own, failure.replica)
    pod = next(pod for pod in evidence.pods if objects.node_of(pod) == peers.node)
    return named(cause, peers, evidence.kind.replica(pod))


def problem_of_hanging(replica: str, evidence: Evidence) -> NodeProblem | None:
    """The problem of a node that explains why its replica hangs; None if there is none."""
    nodes = {objects.node_of(pod) for pod in evidence.pods if evidence.kind.replica(pod) == replica}
    return first_problem(evidence, lambda p: p.node in nodes and p.fault in _BROKEN)


def named(cause: Cause, problem: NodeProblem | None, replica: str) -> Cause:
    """The cause with the node's problem before it.

    :param problem: None: the cause stays.
    :param replica: whose node it is.
    """
    if problem is None:
        return cause
    whose = f"Node {problem.node} of {replica}" if replica and not cause.summary.startswith(f"{replica} ") else ""
    begin = f"{whose}: {problem.text}" if whose else str(problem)
    return replace(
        cause.with_summary(lambda summary: f"{begin}. {summary}"),
        category=Category.INFRASTRUCTURE,
        resolution=_LEAVING_RESOLUTION if problem.fault is Fault.LEAVING else _RESOLUTION,
        replica=replica,
    )


def nodes_to_read(pods: Sequence[Json]) -> list[str]:
    """The names of the nodes that may explain a failure, the most likely first: MAX_NODES at most.

    Nodes that don't report come first, then those of the pods that failed first.
    """

    def order(pod: Json) -> tuple[int, str, str]:
        if silent := objects.silent_since(pod):
            return 0, silent, objects.name_of(pod)
        if failed := objects.failures_of(pod, include_recovered=True):
            ended = objects.disruption_of(pod)[2]
            ends = (str(run.get("finishedAt") or "") for _, _, runs in failed for run in runs)
            return 1, ended.isoformat() if ended else min(ends), objects.name_of(pod)
        return 2 + (not objects.is_being_deleted(pod)), "", objects.name_of(pod)

    return list(dict.fromkeys(node for pod in sorted(pods, key=order) if (node := objects.node_of(pod))))[:MAX_NODES]


def silent_nodes(pods: Iterable[Json]) -> dict[str, str]:
    """The nodes that don't report, each with the time since when, as RFC 3339."""
    since: dict[str, str] = {}
    for pod in pods:
        if at := objects.silent_since(pod):
            node = objects.node_of(pod)
            since[node] = min(at, since.get(node, at))
    return dict(sorted(since.items()))


def describe_silence(node: str, since: str, *, deleted: bool = False) -> str:
    """Two sentences about a node that doesn't report. Tolerations may postpone the eviction of its pods.

    :param since: of `silent_nodes`.
    :param deleted: whether its pods are being deleted. Default: False.
    """
    then = "Kubernetes evicts its pods after 5 minutes."
    if deleted:
        then = "Its pods stay until it reports again or is deleted."
    return f"Node {node} has not reported since {since[11:16]} UTC. {then}"


def describe_nodes(evidence: Evidence, failure: Failure) -> Iterator[str]:
    """A line for each problem of the nodes that were read."""
    tail = failure.tail
    unexplained = not (tail.exception or tail.crash_line or tail.record or tail.is_peer_loss)
    for problem in evidence.node_problems:
        message = f": {' '.join(problem.message.split())}" if problem.message else ""
        yield f"{problem}{'' if problem.is_new else ', before the job started'}{message}"
        if unexplained and problem.is_new and problem.fault in _BROKEN and problem.node == failure.node:
            yield f"{failure.replica} ran there, and its log doesn't say why it failed."


def broken_nodes(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """The nodes that broke or ran short while the job ran, each with the reason; not those that go away."""
    for problem in evidence.node_problems:
        if problem.is_new and problem.fault is not Fault.LEAVING:
            yield problem.node, problem.text


def first_problem(evidence: Evidence, wanted: Callable[[NodeProblem], bool]) -> NodeProblem | None:
    """The first problem of a node that is wanted and began while the job ran; None if there is none."""
    return next((problem for problem in evidence.node_problems if problem.is_new and wanted(problem)), None)


def _explains(problem: NodeProblem, f: Failure, cause: Cause) -> bool:
    """Whether a problem of the replica's own node explains its failure.

    What the program says about itself counts more: a Python error has no cause in the node, unless it is one of a GPU.
    """
    if re.search("Preempt", f.reason):
        return False
    if cause.category is Category.INFRASTRUCTURE:
        was_killed = f.exit_code in (objects.SIGKILLED, objects.SIGTERMED)
        return problem.fault in _BROKEN or was_killed or explain_disruption(f.reason, f.message) is not None
    if cause.category is not Category.USER_CODE or problem.fault not in _BROKEN:
        return False
    if problem.fault is Fault.DEVICE and _OF_DEVICES.search(cause.summary):
        return True
    codes = (f.exit_code, f.tail.child_exit_code)
    return not f.tail.exception and any(map(objects.signal_name, codes))
