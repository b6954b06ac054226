"""Finds the replicas of a job that were stopped from outside although their end counts as success.

A program that handles SIGTERM by saving a checkpoint and exiting with 0 ends like one that is complete: if its pod is
evicted, preempted or deleted, the job succeeds in the middle of the training (recordings 100b, 107c). Its pods show
that: the condition DisruptionTarget, or a deletion that was requested before the container ended. The operator deletes
them, so each is judged as last seen, and what may make a success incomplete is noted on the job for the next process.
If nobody has seen a pod, the kubelet's events show it, and the conditions of a PyTorchJob with a Master.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.kinds.conditions import ended_at
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json, created, node_of, uid_of
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

Replica = tuple[str, int]
#: the end of a container is the node's time, and the condition DisruptionTarget the API server's
MAX_CLOCK_SKEW_SECONDS = 5.0
DEFAULT_GRACE_SECONDS = 30  #: Kubernetes' terminationGracePeriodSeconds
MAX_LAG_SECONDS = 60.0  #: in which a job's status shows that its program has ended
#: the job's stopped pods that may make its success incomplete: see `note`
STOPPED_PODS_ANNOTATION = "ktrain.airflow/stopped-pods"
MAX_STOPPED_PODS = 8  #: for the next process: one is enough to make a success incomplete
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
class StoppedPod:
    """The end of a replica's newest pod, which was stopped from outside. Its fields are a stored format.

    :param text: what happened, for example `Master 0 ended with exit code 0 after it was evicted from gpu-7`.
    :param node: the node, if it is the reason. Default: "".
    :param ends_by: when a program that had not ended has ended at the latest, in epoch seconds. Default: 0, it had
        ended.
    :param at: when it was stopped, in epoch seconds. Default: 0, not known.
    """

    role: str
    index: int
    uid: str
    created: str
    text: str
    node: str = ""
    ends_by: float = 0.0
    at: float = 0.0

    @classmethod
    def all_of(cls, stored: object) -> list[Self]:
        """The stopped pods of a list of stored ones; what can't be read is left out."""
        found = []
        for one in map(mapping, stored if isinstance(stored, list) else ()):
            try:
                uid, created, text = (str(one[name]) for name in ("uid", "created", "text"))
                ends_by, at = (float(one.get(name) or 0.0) for name in ("ends_by", "at"))
                node = str(one.get("node") or "")
                found.append(cls(str(one["role"]), int(one["index"]), uid, created, text, node, ends_by, at))
            except (KeyError, TypeError, ValueError):
                continue
        return found

    @property
    def has_ended(self) -> bool:
        """Whether the program had ended."""
        return not self.ends_by


def noted_stopped_pods(job: Json) -> list[StoppedPod]:
    """What an earlier process has noted on this job."""
    return StoppedPod.all_of(_noted(job))


def _noted(job: Json) -> object:
    """The noted pods; None without a note. That of another job, from which the job was copied, says nothing."""
    try:
        noted = mapping(json.loads((objects.metadata_of(job).get("annotations") or {})[STOPPED_PODS_ANNOTATION]))
    except (KeyError, TypeError, ValueError):
        return None
    return noted.get("pods") if noted.get("job") == uid_of(job) else None


def note_of_proof(job: Json) -> str:
    """The value of STOPPED_PODS_ANNOTATION that says: pods were stopped, and a result proves the training complete."""
    return json.dumps({"job": uid_of(job), "pods": []})


def note(job: Json, found: Sequence[StoppedPod]) -> str | None:
    """The new value of STOPPED_PODS_ANNOTATION; None if what the job has says the same.

    A stopped pod is noted when it is first seen, and once more when the program has ended with exit code 0 and the
    job goes on: that counts until the job ends. One of a pod that was replaced is only removed for such a reason.
    """
    noted, found = noted_stopped_pods(job), [one for one in found if one.uid][:MAX_STOPPED_PODS]
    before, now = ({(one.uid, one.has_ended) for one in ones} for ones in (noted, found))
    if now <= before and not any(has_ended for _, has_ended in before - now):
        return None
    return json.dumps({"job": uid_of(job), "pods": [asdict(one) for one in found]}) if found else ""


def pods_until_end(kind: Kind, job: Json, pods: Iterable[Json], earlier: Iterable[StoppedPod] = ()) -> list[Json]:
    """The pods without those that replace another one after the job has ended.

    The operator may create a Master just after it has reported the end (recordings 103, 105c, 107c). What becomes of
    that one is not the training's end.

    :param earlier: of replicas whose pods an earlier process has seen. Default: none.
    """
    known, end = sorted(pods, key=created), ended_at(job)
    if not end:
        return known
    seen: set[Replica] = {(one.role, one.index) for one in earlier}
    found = []
    for pod in known:
        replica = kind.role_of(pod)
        if replica not in seen or created(pod) < end:
            found.append(pod)
        seen.add(replica)
    return found


def find_stopped_pods(
    kind: Kind, job: Json, pods: Sequence[Json], requested: Mapping[str, float], earlier: Sequence[StoppedPod] = ()
) -> list[StoppedPod]:
    """The stopped pods of replicas on which the job's success depends, and whose pod was not replaced.

    :param requested: when the deletion of pods was requested, by uid, in epoch seconds.
    :param earlier: what an earlier process knew of pods that may be gone. Default: nothing.
    """
    if _noted(job) == []:
        return []
    known_before = sorted(earlier, key=lambda one: (one.created, one.has_ended))
    found: dict[Replica, StoppedPod] = {(one.role, one.index): one for one in known_before if _counts(job, one)}
    for pod in pods_until_end(kind, job, pods, earlier):
        replica = kind.role_of(pod)
        known = found.pop(replica, None)
        stopped = _stopped_pod_of(kind, job, pod, requested.get(uid_of(pod)))
        if stopped is None and known is not None:
            is_same = known.uid == uid_of(pod) and not _has_failed(kind, job, pod)
            stopped = known if is_same or known.created > created(pod) else None
        if stopped is not None:
            found[replica] = stopped
    matter = [one for replica, one in sorted(found.items()) if kind.completes(job, *replica)]
    shown = None if matter else _shown_by_conditions(kind, job, pods)
    return matter if shown is None else [shown]


def ends_in_events(kind: Kind, job: Json, events: Iterable[Json], lost: Iterable[Replica]) -> dict[Replica, str]:
    """How the last containers of replicas ended whose pods nobody has seen, by the kubelet's events about them.

    The kubelet reports with the reason Killing that it stops a container (recordings 100b and 107c). It reports nothing
    about a container that ends by itself. So if it stops the one of a replica on which the success depends, it does so
    before the end of the job. The clock of a node may differ from that of the API server, which says when an event was
    posted: a node's times only order the events of one pod.

    :param events: with the reasons Started and Killing, also about pods of other jobs.
    :return: the text of a `StoppedPod`, or "" if nobody stopped it; without the replicas that have no events.
    """
    resumed, job_end = objects.resumed_at(job) or 0.0, epoch_seconds(ended_at(job)) or math.inf
    wanted, job_began = set(lost), objects.created_at(job) or 0.0
    main = {
        role: kind.main_container_name(job, spec.get("template") or {}) for role, spec in kind.replicas(job).items()
    }
    by_pod: dict[tuple[Replica, str], list[Json]] = {}
    for event in events:
        about = event["involvedObject"]
        replica = kind.replica_of(job, str(about.get("name")))
        if replica not in wanted or about.get("fieldPath") != f"spec.containers{{{main[replica[0]]}}}":
            continue
        # an elastic job ends with its first Worker, and the operator stops the others
        stops_others = kind.scaling.is_elastic(job) and kind.count(job, replica[0]) > 1
        if _starts(event) or not stops_others or _posted_at(event) < job_end:
            by_pod.setdefault((replica, str(about.get("uid"))), []).append(event)
    newest: dict[Replica, tuple[float, str]] = {}
    for (replica, _), of_pod in by_pod.items():
        first = min(of_pod, key=lambda event: (_posted_at(event), not _starts(event)))
        # in one second, a container is stopped (by a liveness probe) and started again
        last = max(of_pod, key=lambda event: (objects.event_time(event), _starts(event)))
        began = _posted_at(first)
        if began < job_began or (began, _starts(first)) <= (resumed, False) or began > job_end:
            continue  # of an earlier job of this name, before a queue resumed this one, or created after its end
        node = str((last.get("source") or {}).get("host") or "its node")
        stopped = f"{kind.replica_name(*replica)} ended with exit code 0 after it was stopped on {node}"
        newest[replica] = max((began, "" if _starts(last) else stopped), newest.get(replica, (0.0, "")))
    return {replica: text for replica, (_, text) in newest.items()}


def _starts(event: Json) -> bool:
    return event.get("reason") == "Started"


def _posted_at(event: Json) -> float:
    """When the API server got the first one of these events, by its own clock."""
    return objects.created_at(event) or objects.event_time(event)


def deciding_replicas(kind: Kind, job: Json, pods: Iterable[Json]) -> set[Replica]:
    """The replicas of these pods on which the job's success depends."""
    return {replica for pod in pods if kind.completes(job, *(replica := kind.role_of(pod)))}


def _shown_by_conditions(kind: Kind, job: Json, pods: Iterable[Json]) -> StoppedPod | None:
    """The stopped pod of a primary that nobody has seen, if the job's conditions show it.

    A pod that was seen shows more. A success long after that has come by another pod that nobody saw.
    """
    primary, since, end = (kind.primary(job), 0), kind.stopped_primary(job), ended_at(job)
    at, ended = epoch_seconds(since), epoch_seconds(end)
    if at is None or ended is None:
        return None
    seen = any(kind.role_of(pod) == primary and created(pod) < end for pod in pods)
    template = (kind.replicas(job).get(primary[0]) or {}).get("template") or {}
    if seen or ended - at > _grace_of(template) + MAX_LAG_SECONDS:
        return None
    text = f"{kind.replica_name(*primary)} ended with exit code 0 after its pod was stopped (condition Restarting)"
    return StoppedPod(*primary, uid="", created="", text=text, at=at)


def _counts(job: Json, earlier: StoppedPod) -> bool:
    """Whether what an earlier process saw says something about the end of the job."""
    if earlier.at and earlier.at <= (objects.resumed_at(job) or 0.0):
        return False  # the job has other pods since
    end = epoch_seconds(ended_at(job))
    # a job that succeeds long after that has done so by a pod that nobody saw
    return end is None or (earlier.at < end and (earlier.has_ended or end <= earlier.ends_by))


def _end_of(kind: Kind, job: Json, pod: Json) -> Json:
    """The terminated state of the pod's main container; empty if it has not ended."""
    return objects.state_of(objects.container_status(pod, kind.main_container_name(job, pod)), "terminated")


def _has_failed(kind: Kind, job: Json, pod: Json) -> bool:
    """Whether no operator takes the end of the pod for a success."""
    return (pod.get("status") or {}).get("phase") == "Failed" or objects.run_failed(_end_of(kind, job, pod))


def _stopped_pod_of(kind: Kind, job: Json, pod: Json, requested: float | None) -> StoppedPod | None:
    """None if the program ended by itself, failed, or was stopped after the end of the job."""
    role, index = kind.role_of(pod)
    ended, disrupted = _end_of(kind, job, pod), _disrupted_at(pod)
    at = min((time for time in (disrupted, requested) if time is not None), default=None)
    finished, job_end = epoch_seconds(ended.get("finishedAt")), epoch_seconds(ended_at(job))
    if at is None or _has_failed(kind, job, pod) or (job_end is not None and at >= job_end):
        return None
    if at <= (objects.resumed_at(job) or 0.0):
        return None
    skew = 0.0 if disrupted is None else MAX_CLOCK_SKEW_SECONDS
    if finished is not None and finished < at - skew:
        return None
    reason = str(objects.condition_of(pod, "DisruptionTarget").get("reason")) if disrupted is not None else ""
    why, blames_node = REASONS.get(reason, ("its pod was deleted", False))
    node = node_of(pod)
    replica = kind.replica_name(role, index)
    how = f"ended with exit code {ended['exitCode']} after" if ended else "had not ended when"
    text = f"{replica} {how} {why.format(node=node)}"
    ends_by = 0.0 if ended else at + _grace_of(pod) + MAX_LAG_SECONDS
    return StoppedPod(role, index, uid_of(pod), created(pod), text, node if blames_node else "", ends_by, at)


def was_stopped(kind: Kind, job: Json, pod: Json) -> bool:
    """Whether the pod, as it is now, was stopped from outside although its end counts as success."""
    return _stopped_pod_of(kind, job, pod, requested_at(pod)) is not None


def _grace_of(pod: Json) -> float:
    """The grace period of a pod, or of a template of pods, in seconds."""
    return float((pod.get("spec") or {}).get("terminationGracePeriodSeconds") or DEFAULT_GRACE_SECONDS)


def _disrupted_at(pod: Json) -> float | None:
    """Since when the pod has the condition DisruptionTarget, at the earliest; None if it hasn't.

    Only a pod that has not ended gets it. So if the job's end has the same time, it came afterwards.
    """
    if not objects.has_condition(pod, "DisruptionTarget"):
        return None
    at = epoch_seconds(objects.condition_of(pod, "DisruptionTarget").get("lastTransitionTime")) or 0.0
    return at - objects.TIMESTAMP_RESOLUTION.total_seconds()


def requested_at(pod: Mapping[str, Any]) -> float | None:
    """When the deletion of a pod was requested, in epoch seconds; None if it was not.

    When the kubelet removes a pod, its grace period becomes 0, and a later time is computed: an earlier one counts. If
    only that last state was seen, it still shows whether the kubelet knew of the request when it reported the end of
    the containers (Kubernetes 1.34 and newer, recordings 107c and 11): then it was made before they had ended.
    """
    at = objects.deletion_requested_at(pod)
    if at is None:
        return None
    meta, status = objects.metadata_of(pod), pod.get("status") or {}
    ends = [epoch_seconds(objects.state_of(c, "terminated").get("finishedAt")) for c in objects.main_containers(pod)]
    is_last = not meta.get("deletionGracePeriodSeconds") and status.get("observedGeneration") == meta.get("generation")
    if not is_last or not meta.get("generation") or not ends or None in ends:
        return at.timestamp()
    return min(at.timestamp(), max(end for end in ends if end) - objects.TIMESTAMP_RESOLUTION.total_seconds())
