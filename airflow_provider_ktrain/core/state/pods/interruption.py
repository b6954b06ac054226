"""Finds the replicas of a job that were stopped from outside although their end counts as success.

A program that handles SIGTERM by saving a checkpoint and exiting with 0 ends like one that is complete: if its pod is
evicted, preempted or deleted, the job succeeds in the middle of the training (recordings 100b, 107c). Its pods show
that: the condition DisruptionTarget, or a deletion that was requested before the container ended. The operator deletes
them, so each is judged as last seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.kinds.conditions import ended_at
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json, created, labels_of, node_of, uid_of
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

Replica = tuple[str, int]
#: the end of a container is the node's time, and the condition DisruptionTarget the API server's
MAX_CLOCK_SKEW_SECONDS = 5.0
DEFAULT_GRACE_SECONDS = 30  #: Kubernetes' terminationGracePeriodSeconds
MAX_LAG_SECONDS = 60.0  #: in which a job's status shows that its program has ended
#: reasons of the condition DisruptionTarget: what happened to the pod, and whether its node is to blame
#: (https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions)
REASONS = {
    "PreemptionByScheduler": ("it was preempted by a pod of higher priority", False),
    "EvictionByEvictionAPI": ("it was evicted from {node}", False),
    "TerminationByKubelet": ("it was evicted from {node}", True),
    "DeletionByTaintManager": ("it lost its node", True),
    "DeletionByPodGC": ("it lost its node", True),
}


@dataclass(frozen=True)
class Interruption:
    """The end of a replica's newest pod, which was stopped from outside. Its fields are a stored format.

    :param role: for example `Master`.
    :param index: the replica's index.
    :param uid: of the pod.
    :param created: when it was created.
    :param text: what happened, for example `Master 0 ended with exit code 0 after it was evicted from gpu-7`.
    :param node: the node, if it is the reason. Default: "".
    :param ends_by: when a program that had not ended has ended at the latest, in epoch seconds. Default: 0, it had
        ended.
    """

    role: str
    index: int
    uid: str
    created: str
    text: str
    node: str = ""
    ends_by: float = 0.0


def pods_until_end(kind: Kind, job: Json, pods: Iterable[Json], earlier: Iterable[Interruption] = ()) -> list[Json]:
    """The pods without those that replace another one after the job has ended.

    The operator may create a Master just after it has reported the end (recordings 103, 105c, 107c). What becomes of
    that one is not the training's end.

    :param kind: of the job.
    :param job: as last seen.
    :param pods: all pods, each as last seen.
    :param earlier: of replicas whose pods an earlier process has seen. Default: none.
    """
    known, end = sorted(pods, key=created), ended_at(job)
    if not end:
        return known
    seen: set[Replica] = {(one.role, one.index) for one in earlier}
    found = []
    for pod in known:
        replica = kind.pod_role(labels_of(pod))
        if replica not in seen or created(pod) < end:
            found.append(pod)
        seen.add(replica)
    return found


def find_interruptions(
    kind: Kind, job: Json, pods: Iterable[Json], requested: Mapping[str, float], earlier: Sequence[Interruption] = ()
) -> list[Interruption]:
    """The interruptions of replicas on which the job's success depends, and whose pod was not replaced.

    :param kind: of the job.
    :param job: as last seen.
    :param pods: its pods, each as last seen, deleted ones included.
    :param requested: when the deletion of pods was requested, by uid, in epoch seconds.
    :param earlier: what an earlier process knew of pods that may be gone. Default: nothing.
    """
    end = epoch_seconds(ended_at(job))
    # a job that succeeds long after that has done so by a pod that nobody saw
    known_before = (one for one in earlier if end is None or not one.ends_by or end <= one.ends_by)
    found: dict[Replica, Interruption] = {(one.role, one.index): one for one in known_before}
    for pod in pods_until_end(kind, job, pods, earlier):
        replica = kind.pod_role(labels_of(pod))
        known = found.pop(replica, None)
        interruption = _interruption_of(kind, job, pod, requested.get(uid_of(pod)))
        if interruption is None and known is not None and (known.uid == uid_of(pod) or known.created > created(pod)):
            interruption = known
        if interruption is not None:
            found[replica] = interruption
    return [one for replica, one in sorted(found.items()) if kind.completes(job, *replica)]


def _interruption_of(kind: Kind, job: Json, pod: Json, requested: float | None) -> Interruption | None:
    """None if the program ended by itself, failed, or was stopped after the end of the job."""
    role, index = kind.pod_role(labels_of(pod))
    ended = objects.state_of(objects.container_status(pod, kind.main_container_name(job, pod)), "terminated")
    disrupted = _disrupted_at(pod)
    at = min((time for time in (disrupted, requested) if time is not None), default=None)
    finished, job_end = epoch_seconds(ended.get("finishedAt")), epoch_seconds(ended_at(job))
    if at is None or objects.run_failed(ended) or (job_end is not None and at >= job_end):
        return None
    suspension = objects.condition_of(job, "Suspended")
    if suspension.get("status") == "False" and at <= (epoch_seconds(suspension.get("lastTransitionTime")) or 0.0):
        return None  # the job was resumed after that, and has other pods
    skew = 0.0 if disrupted is None else MAX_CLOCK_SKEW_SECONDS
    if finished is not None and finished < at - skew:
        return None
    reason = str(objects.condition_of(pod, "DisruptionTarget").get("reason")) if disrupted is not None else ""
    why, blames_node = REASONS.get(reason, ("its pod was deleted", False))
    node = node_of(pod)
    replica = kind.replica_name(role, index)
    how = f"ended with exit code {ended['exitCode']} after" if ended else "had not ended when"
    text = f"{replica} {how} {why.format(node=node)}"
    grace = (pod.get("spec") or {}).get("terminationGracePeriodSeconds") or DEFAULT_GRACE_SECONDS
    ends_by = 0.0 if ended else at + grace + MAX_LAG_SECONDS
    return Interruption(role, index, uid_of(pod), created(pod), text, node if blames_node else "", ends_by)


def _disrupted_at(pod: Json) -> float | None:
    """Since when the pod has the condition DisruptionTarget; None if it hasn't."""
    if not objects.has_condition(pod, "DisruptionTarget"):
        return None
    return epoch_seconds(objects.condition_of(pod, "DisruptionTarget").get("lastTransitionTime")) or 0.0


def requested_at(pod: Mapping[str, Any]) -> float | None:
    """When the deletion of a pod was requested, in epoch seconds; None if it was not.

    When the kubelet removes a pod, its grace period becomes 0, and a later time would be computed: the earliest counts.
    """
    at = objects.deletion_requested_at(pod)
    return None if at is None else at.timestamp()
