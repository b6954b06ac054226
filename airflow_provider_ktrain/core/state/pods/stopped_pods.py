"""Finds the replicas of a job that were stopped from outside although their end counts as success.

A program that handles SIGTERM by saving a checkpoint and exiting with 0 ends like one that is complete: if its pod is
evicted, preempted or deleted, the job succeeds in the middle of the training (recordings 100b, 107c). Its pods show
that: see `pod_changes`. The operator deletes them, so an annotation of the job records what may make a success
incomplete. If the end of a pod was not seen, its changes are read again, and where the API server has forgotten them,
the kubelet's events. If no state of it is known, the conditions of a PyTorchJob show it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.kinds.conditions import ended_at, true_conditions
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json, created, grace_of, node_of, uid_of
from airflow_provider_ktrain.core.state.pods.pod_changes import (
    MAX_CLOCK_SKEW_SECONDS,
    MAX_LAG_SECONDS,
    First,
    PodChanges,
    PodEnd,
    Verdict,
    end_of,
    version_before_end,
)
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

Replica = tuple[str, int]
#: The job's stopped pods that may make its success incomplete: see `stopped_pods_annotation`.
STOPPED_PODS_ANNOTATION = "ktrain.airflow/stopped-pods"
MAX_STOPPED_PODS = 8  #: How many stopped pods the next process is told of: one is enough to make a success incomplete.
#: Reasons of the condition DisruptionTarget: what happened to the pod, and whether its node is to blame
#: (https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions).
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


def annotated_stopped_pods(job: Json) -> list[StoppedPod]:
    """The stopped pods in the annotation of this job, by an earlier process."""
    return StoppedPod.all_of(_annotated(job))


def _annotated(job: Json) -> object:
    """The pods in the annotation; None if there is none. That of a job from which this one was copied says nothing."""
    try:
        recorded = mapping(json.loads((objects.metadata_of(job).get("annotations") or {})[STOPPED_PODS_ANNOTATION]))
    except (KeyError, TypeError, ValueError):
        return None
    return recorded.get("pods") if recorded.get("job") == uid_of(job) else None


def annotation_of_proof(job: Json) -> str:
    """The value of STOPPED_PODS_ANNOTATION that says: pods were stopped, and a result proves the training complete."""
    return json.dumps({"job": uid_of(job), "pods": []})


def stopped_pods_annotation(job: Json, found: Sequence[StoppedPod]) -> str | None:
    """The new value of STOPPED_PODS_ANNOTATION; None if what the job has says the same.

    A stopped pod is recorded when it is first seen, and once more when the program has ended with exit code 0 and the
    job goes on: that counts until the job ends. One of a pod that was replaced is only removed for such a reason.
    """
    known, found = annotated_stopped_pods(job), [one for one in found if one.uid][:MAX_STOPPED_PODS]
    before, now = ({(one.uid, one.has_ended) for one in ones} for ones in (known, found))
    if now <= before and not any(has_ended for _, has_ended in before - now):
        return None
    return json.dumps({"job": uid_of(job), "pods": [asdict(one) for one in found]}) if found else ""


def pods_until_end(kind: Kind, job: Json, pods: Iterable[Json]) -> list[Json]:
    """The pods without those that replace another one after the job has ended.

    The operator may create a Master just after it has reported the end (recordings 103, 105c, 107c). What becomes of
    that one is not the training's end.
    """
    known, end = sorted(pods, key=created), ended_at(job)
    if not end:
        return known
    seen: set[Replica] = set()
    found = []
    for pod in known:
        replica = kind.role_of(pod)
        if replica not in seen or created(pod) < end:
            found.append(pod)
        seen.add(replica)
    return found


@dataclass(frozen=True)
class Ends:
    """How the replicas ended on which the success of a job depends.

    :param stopped: the pods because of which a success is incomplete.
    :param unknown: replicas whose end isn't known. A success is one all the same.
    :param unread: from which resourceVersion the changes show more of a pod's end, by replica and uid; "" where that,
        or the pod, isn't known.
    """

    stopped: list[StoppedPod]
    unknown: set[Replica]
    unread: dict[tuple[Replica, str], str]


def find_ends(
    kind: Kind,
    job: Json,
    pods: Sequence[Json],
    changes: Mapping[str, PodChanges],
    *,
    existing: Collection[str] = (),
    deleted: Collection[str] = (),
    earlier: Sequence[StoppedPod] = (),
    expected: Collection[Replica] = (),
    by_itself: Collection[Replica] = (),
) -> Ends:
    """How the newest pods of these replicas ended.

    :param pods: each as last seen.
    :param changes: what is kept of their changes, by uid.
    :param existing: uids of those that exist. Default: none.
    :param deleted: uids of those of which all changes until their deletion are known. Default: none.
    :param earlier: what an earlier process knew of pods that may be gone. Default: nothing.
    :param expected: replicas that have had a pod. Default: those of `pods`.
    :param by_itself: replicas whose unseen pods ended by themselves, as events show. Default: none.
    """
    if _annotated(job) == []:
        return Ends([], set(), {})
    known = sorted((one for one in earlier if _counts(job, one)), key=lambda one: (one.created, one.has_ended))
    recorded: dict[Replica, StoppedPod] = {(one.role, one.index): one for one in known}
    end_text = ended_at(job)
    takes_a_second = created(job) == end_text
    newest = {
        kind.role_of(pod): pod
        for pod in sorted(pods, key=created)
        if not end_text or created(pod) < end_text or takes_a_second
    }
    job_end, resumed = epoch_seconds(ended_at(job)), objects.resumed_at(job) or 0.0
    succeeded = not true_conditions(job).keys().isdisjoint(("Succeeded", "Complete"))
    is_elastic = kind.scaling.is_elastic(job)
    found, completed, unread, unknown = [], set(by_itself), dict[tuple[Replica, str], str](), set[Replica]()
    for replica in sorted({*recorded, *newest, *expected}):
        if not kind.completes(job, *replica):
            continue
        pod, stop = newest.get(replica, {}), recorded.get(replica)
        uid, of_pod = uid_of(pod), changes.get(uid_of(pod))
        if stop is not None and (not pod or stop.created > created(pod)):
            found.append(stop)
            continue
        container = kind.main_container_name(job, pod)
        if stop is not None and stop.uid == uid:
            of_pod = (of_pod or PodChanges()).requested_before_end(stop.at, container)
        end = end_of(pod, of_pod, container, exists=uid in existing)
        verdict = end.verdict(job_end)
        if not pod or (end.requested is not None and end.requested <= resumed):  # the job has other pods since
            verdict = Verdict.UNKNOWN
        elif verdict in (Verdict.FAILED, Verdict.RUNS) and succeeded and not is_elastic:
            verdict = Verdict.UNKNOWN  # another pod has succeeded
        if verdict is Verdict.UNKNOWN and stop is not None and not stop.uid:  # events show more than the pod
            found.append(stop)
        elif verdict is Verdict.UNKNOWN:
            unknown.add(replica)
        elif verdict is Verdict.STOPPED:
            found.append(_stopped_pod(kind, replica, pod, end))
        elif verdict is Verdict.BY_ITSELF and not _is_later(end, job_end):
            completed.add(replica)
        if uid not in deleted and (verdict is Verdict.UNKNOWN or _lacks_changes(end, verdict)):
            unread[replica, uid if pod else ""] = version_before_end(pod, of_pod)
    unknown -= completed
    if is_elastic and succeeded:  # with the first Worker that ended with exit code 0, and the others train on
        if not (completed or unknown or found):  # a Worker that the job no longer has
            unknown = {(kind.primary(job), kind.count(job, kind.primary(job)))}
            unread |= {(replica, ""): "" for replica in unknown}
        if completed or unknown:
            return Ends([], set() if completed else unknown, unread)
        found = sorted(found, key=lambda one: one.at)[:1]
    shown = None if found or completed else _shown_by_conditions(kind, job, pods)
    return Ends(found if shown is None else [shown], unknown, unread)


def _is_later(end: PodEnd, job_end: float | None) -> bool:
    """Whether a program ended after the job."""
    return job_end is not None and end.finished is not None and end.finished > job_end + MAX_CLOCK_SKEW_SECONDS


def _lacks_changes(end: PodEnd, verdict: Verdict) -> bool:
    """Whether the changes of the pod may show more: it is gone before its end was seen, or only its last state was."""
    if verdict not in (Verdict.STOPPED, Verdict.BY_ITSELF):
        return False
    return end.first is First.UNKNOWN and end.requested is not None if end.ended else not end.exists


def ends_in_events(
    kind: Kind, job: Json, events: Iterable[Json], lost: Iterable[Replica]
) -> dict[Replica, StoppedPod | None]:
    """How the last containers of replicas ended whose pods nobody has seen, by the kubelet's events about them.

    The kubelet reports with the reason Killing that it stops a container (recordings 100b and 107c). It reports nothing
    about a container that ends by itself. So if it stops the one of a replica on which the success depends, it does so
    before the end of the job. An elastic job ends with its first Worker, and the operator stops the others: without a
    stop before that, the events of a Worker prove nothing (recordings 111 to 111f). The clock of a node may differ from
    that of the API server, which says when an event was posted: a node's times only order the events of one pod.

    :param events: with the reasons Started and Killing, also about pods of other jobs.
    :return: None for one that nobody stopped; without the replicas of which events prove nothing.
    """
    resumed, job_end = objects.resumed_at(job) or 0.0, epoch_seconds(ended_at(job)) or math.inf
    wanted, job_began = set(lost), objects.created_at(job) or 0.0
    main = {
        role: kind.main_container_name(job, spec.get("template") or {}) for role, spec in kind.replicas(job).items()
    }
    stops_others = {role for role in main if kind.scaling.is_elastic(job) and kind.count(job, role) > 1}
    by_pod: dict[tuple[Replica, str], list[Json]] = {}
    for event in events:
        about = event["involvedObject"]
        replica = kind.replica_of(job, str(about.get("name")))
        if replica not in wanted or about.get("fieldPath") != f"spec.containers{{{main[replica[0]]}}}":
            continue
        if _starts(event) or replica[0] not in stops_others or _posted_at(event) < job_end:
            by_pod.setdefault((replica, str(about.get("uid"))), []).append(event)
    newest: dict[Replica, tuple[float, StoppedPod | None]] = {}
    for (replica, _), of_pod in by_pod.items():
        first = min(of_pod, key=lambda event: (_posted_at(event), not _starts(event)))
        # in one second, a container is stopped (by a liveness probe) and started again
        last = max(of_pod, key=lambda event: (objects.event_time(event), _starts(event)))
        began = _posted_at(first)
        if began < job_began or (began, _starts(first)) <= (resumed, False) or began > job_end:
            continue  # of an earlier job of this name, before a queue resumed this one, or created after its end
        found = began, None if _starts(last) else _stopped_by(kind, replica, of_pod)
        newest[replica] = max(found, newest.get(replica, (0.0, None)), key=lambda one: (one[0], one[1] is not None))
    return {replica: stop for replica, (_, stop) in newest.items() if stop or replica[0] not in stops_others}


def _stopped_by(kind: Kind, replica: Replica, events: Sequence[Json]) -> StoppedPod:
    """The stopped pod that events show, with the earliest time of its stop: a kubelet may report it late or repeatedly.

    :param events: of one pod, whose last run was stopped.
    """
    started = max((objects.event_time(event) for event in events if _starts(event)), default=-math.inf)
    stops = [event for event in events if not _starts(event) and objects.event_time(event) >= started]
    node = str((stops[-1].get("source") or {}).get("host") or "its node")
    text = f"{kind.replica_name(*replica)} ended with exit code 0 after it was stopped on {node}"
    times = [(epoch_seconds(one.get("firstTimestamp")), objects.event_time(one), _posted_at(one)) for one in stops]
    at = min(time for of_one in times for time in of_one if time is not None)
    return StoppedPod(*replica, uid="", created="", text=text, at=at)


def _starts(event: Json) -> bool:
    return event.get("reason") == "Started"


def _posted_at(event: Json) -> float:
    """When the API server got the first one of these events, by its own clock."""
    return objects.created_at(event) or objects.event_time(event)


def _shown_by_conditions(kind: Kind, job: Json, pods: Iterable[Json]) -> StoppedPod | None:
    """The stopped pod of a primary of which no state is known, if the job's conditions show it.

    A success long after that has come by another pod that nobody saw.
    """
    primary, since, end = (kind.primary(job), 0), kind.stopped_primary(job), ended_at(job)
    at, ended = epoch_seconds(since), epoch_seconds(end)
    if at is None or ended is None:
        return None
    seen = any(kind.role_of(pod)[0] == primary[0] and created(pod) < end for pod in pods)
    template = (kind.replicas(job).get(primary[0]) or {}).get("template") or {}
    if seen or ended - at > grace_of(template) + MAX_LAG_SECONDS:
        return None
    text = f"{kind.replica_name(*primary)} ended with exit code 0 after its pod was stopped (condition Restarting)"
    return StoppedPod(*primary, uid="", created="", text=text, at=at)


def _counts(job: Json, earlier: StoppedPod) -> bool:
    """Whether what an earlier process saw says something about the end of the job."""
    if not earlier.uid:
        return True  # events have shown it, of a job that has succeeded
    if earlier.at and earlier.at <= (objects.resumed_at(job) or 0.0):
        return False  # the job has other pods since
    end = epoch_seconds(ended_at(job))
    # a job that succeeds long after that has done so by a pod that nobody saw
    requested_by = math.inf if end is None else end + MAX_CLOCK_SKEW_SECONDS
    return earlier.at <= requested_by and (earlier.has_ended or end is None or end <= earlier.ends_by)


def _stopped_pod(kind: Kind, replica: Replica, pod: Json, end: PodEnd) -> StoppedPod:
    reason = str(objects.condition_of(pod, "DisruptionTarget").get("reason")) if end.disrupted else ""
    why, blames_node = REASONS.get(reason, ("its pod was deleted", False))
    node, at = node_of(pod), end.requested or 0.0
    how = "ended with exit code 0 after" if end.ended else "had not ended when"
    text = f"{kind.replica_name(*replica)} {how} {why.format(node=node)}"
    ends_by = 0.0 if end.ended else at + end.grace + MAX_LAG_SECONDS
    return StoppedPod(*replica, uid_of(pod), created(pod), text, node if blames_node else "", ends_by, at)
