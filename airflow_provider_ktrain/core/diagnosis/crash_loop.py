"""Restarts of a job's containers, each with its reason, and crash loops.

In a crash loop, one container fails again and again, each time after a short run. A failed run counts if this process
saw it, or if `restartCount` proves it: see `_count`. Restarts by the kubelet and pods that the operator recreates
(restartPolicy ExitCode, a batch Job) count alike. All times come from the cluster: `startedAt` and `finishedAt` of
containers. The next process counts from 0 again.

Only the container in which the operator trains counts, if its name is known: a failing sidecar does not end a training.
Failures count only after every replica has run at least once: until then, workers may fail because the master still
pulls its image. Those of a master count before that if all workers wait for it in their init container. When a replica
loses its pod to an eviction, a preemption, a lost node or a deletion, its peers fail too, so all counts start again
when that replica runs again. Elastic jobs expect failures and are exempt.

Pods that their node rejects or evicts count apart, from the beginning: an operator replaces them at once and without
end (recordings 101d, 107, 107d: up to 3 pods a second).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.diagnosis import failure_patterns
from airflow_provider_ktrain.core.diagnosis.log_parser import read_tail
from airflow_provider_ktrain.core.diagnosis.pod_failures import describe_exit_code
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.kinds.conditions import true_conditions
from airflow_provider_ktrain.core.logs.container_run import START_ERRORS
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json, created, name_of, uid_of
from airflow_provider_ktrain.core.state.status import wants_suspension
from airflow_provider_ktrain.core.text.output import with_short_first_line
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

POD_DELETED = "its pod was deleted"  #: Why a replica lost its pod.
SHORT_RUN_SECONDS = 600.0  #: A failed run that took at least as long does not belong to a crash loop.
MAX_CLOCK_SKEW_SECONDS = 60.0  #: How much a node's clock may be behind the API server's.
NO_RUN: tuple[int, Json] = (-1, {})  #: Number and terminated state before a container's first run has ended.


@dataclass(frozen=True)
class Restart:
    """One restart of a container, in its pod or in a new one.

    :param container: name of the container; empty if the whole pod was lost.
    :param number: restarts of this container so far, this one included; None if unknown.
    :param run: number of the previous run within its pod, from 0.
    :param terminated: terminated state of the previous run; empty if the pod was lost.
    :param pod_loss: why the pod was lost; empty if the container failed. Default: "".
    :param may_run_on: the node on which the lost pod may still run; empty if it has ended. Default: "".
    :param back_off_seconds: time between the two runs; None if the next run has not started. Default: None.
    """

    replica: str
    container: str
    is_init: bool
    pod: str
    pod_uid: str
    number: int | None
    run: int
    terminated: Json
    pod_loss: str = ""
    may_run_on: str = ""
    back_off_seconds: float | None = None

    @property
    def never_began(self) -> bool:
        """Whether the previous run could not be started, so that it wrote no line."""
        return self.terminated.get("reason") in START_ERRORS

    def describe(self, lines: Sequence[str] | None) -> str:
        """One line for the log.

        :param lines: the last log lines of the previous run; None if its log is not followed.
        """
        times = "" if self.number is None else f" ({_ordinal(self.number)} time)"
        who = f"Init container {self.container} of {self.replica}" if self.is_init else self.replica
        back_off_seconds = self.back_off_seconds or 0
        back_off = f" Back-off {back_off_seconds:.0f} s." if back_off_seconds >= 1 else ""
        reason = self._reason(lines)
        text = with_short_first_line(f"{who} restarted{times}{f' after {reason}' if reason else ''}.{back_off}")
        if self.may_run_on:
            text += f"\nIts earlier pod may still run on {self.may_run_on}: both may write the same checkpoint."
        return text

    def _reason(self, lines: Sequence[str] | None) -> str:
        """Empty if unknown: a container's status describes only its last two runs."""
        if self.pod_loss:
            return self.pod_loss
        code, reason = self.terminated.get("exitCode"), str(self.terminated.get("reason") or "")
        tail = read_tail(lines, str(self.terminated.get("message") or ""))
        if tail.exception and reason != "OOMKilled":
            return tail.exception.rstrip(".")
        reasons = [] if reason in ("", "Error", "Completed") else [reason]
        if code is not None:
            reasons.append(describe_exit_code(code))
        last = f"last log line: {tail.last_line.rstrip('.')}" if tail.last_line else ""
        return "; ".join(text for text in (", ".join(reasons), last) if text)


@dataclass(frozen=True)
class CrashLoop:
    """A container that failed several times in a row, each time after a run shorter than SHORT_RUN_SECONDS.

    :param of_pods: whether its pods were rejected or evicted by their node. Default: False, its program failed.
    """

    replica: str
    failures: int
    of_pods: bool = False


@dataclass
class _Container:
    """One container of a replica, over all pods of that replica.

    :param uid: uid of the pod that is counted now.
    :param restarts: restarts in that pod, as far as they were reported.
    :param earlier: restarts before that pod, its own creation included.
    :param run: that pod's last run that has ended, with its number from 0.
    :param failures: short failed runs in a row; for a container without a name: rejected and evicted pods.
    :param last: end of the last of them, in epoch seconds.
    """

    uid: str = ""
    restarts: int = 0
    earlier: int = 0
    run: tuple[int, Json] = NO_RUN
    failures: int = 0
    last: float = 0.0

    def move_to(self, uid: str) -> None:
        """Count in another pod from now on: its creation is a restart."""
        self.earlier += self.restarts + 1
        self.uid, self.restarts, self.run = uid, 0, NO_RUN

    def add_failure(self, began: float, ended: float) -> None:
        """Count a failure. A long run starts the count again, and so does a gap: runs may have been missed."""
        if began - self.last >= SHORT_RUN_SECONDS:
            self.failures = 0
        # a negative run time: the node's clock was set back
        self.failures = self.failures + 1 if 0 <= ended - began < SHORT_RUN_SECONDS else 0
        self.last = ended


class RestartHistory:
    """The restarts of a job, as far as one process has seen them.

    :param handed_over: which restarts the previous process has reported: see `handover`. Default: none.
    :param earlier_pods: whether there were pods that no longer exist. Their restarts are not known. Default: False.
    """

    def __init__(self, kind: Kind, handed_over: Mapping[str, Any] | None = None, *, earlier_pods: bool = False) -> None:
        self._kind = kind
        given = handed_over or {}
        # start of the last run, and creation of the last pod, that were reported as restarts
        self._reported, self._created = float(given.get("reported") or 0.0), str(given.get("created") or "")
        self._reported_before, self._created_before = self._reported, self._created
        self._earlier_pods = earlier_pods
        self._size = 0  # number of replicas; 0 if the job is elastic
        self._containers: dict[str, _Container] = {}
        self._pods: dict[str, Json] = {}  # the current pod of each replica
        self._ran: dict[str, float] = {}  # when each replica ran first, in epoch seconds; infinity if its pod was lost
        self._all_ran = math.inf  # when the last replica ran first

    def update(self, job: Json, pods: Mapping[str, Json], removed: Iterable[str] = ()) -> list[Restart]:
        """Record changes of the pods that exist.

        :param pods: its new pods, and those that have changed, by uid.
        :param removed: uids of pods that no longer exist. Default: none.
        :return: restarts that were not returned before.
        """
        if wants_suspension(job) or "Suspended" in true_conditions(job):
            for known in (self._containers, self._pods, self._ran):
                known.clear()
            return []
        gone = set(removed)
        for pod in self._pods.values() if gone else ():
            if uid_of(pod) in gone:
                self._record_loss(pod, gone=True)
        changed = sorted(pods.values(), key=created)
        self._size = 0 if self._kind.scaling.is_elastic(job) else self._kind.size(job)
        restarts = [restart for pod in changed for restart in self._replace(pod)]
        for pod in changed:
            self._record_loss(pod)
            self._record_first_run(pod)
        self._all_ran = max(self._ran.values()) if 0 < self._size <= len(self._ran) else math.inf
        for pod in changed:
            restarts += self._record_runs(pod)
        return restarts

    def mark_deleted(self, pod: Json) -> list[Restart]:
        """Record that a pod was deleted. `pod` is its last state. Returns the new restarts that it shows."""
        if not self._is_current(pod):
            if created(pod) > created(self._pods.get(self._kind.replica(pod), {})):
                self._count_ousted(pod)
            return []
        self._record_loss(pod, gone=True)
        restarts = self._record_runs(pod)
        self._pods[self._kind.replica(pod)] = pod
        return restarts

    def crash_loop(self, limit: int | None) -> CrashLoop | None:
        """The crash loop of the container that failed most often in a row; None if that is less than `limit` times."""
        key = max(self._containers, key=lambda k: self._containers[k].failures, default=None)
        if limit is None or key is None or self._containers[key].failures < max(limit, 1):
            return None
        replica, _, name = key.partition("/")
        return CrashLoop(replica, self._containers[key].failures, of_pods=not name)

    def handover(self) -> dict[str, Any]:
        """For the next process: which restarts were reported."""
        return {"reported": self._reported, "created": self._created}

    def _replace(self, pod: Json) -> list[Restart]:
        """Make a pod the current one of its replica if it is newer, which is a restart."""
        replica = self._kind.replica(pod)
        before = self._pods.get(replica)
        if before is not None and created(pod) < created(before):
            return []
        self._count_ousted(pod)
        if before is None or uid_of(before) == uid_of(pod):
            self._pods[replica] = pod
            return []
        restarts = self._record_runs(before)
        self._pods[replica] = pod
        if self._ran.get(replica) == math.inf:
            del self._ran[replica]
        if (restart := self._restart_in_new_pod(replica, before, pod)) is not None:
            restarts.append(restart)
        return restarts

    def _restart_in_new_pod(self, replica: str, before: Json, pod: Json) -> Restart | None:
        """None if an earlier process reported the restart."""
        names = [str(container.get("name")) for container in (pod.get("spec") or {}).get("containers") or ()]
        known = [self._containers.setdefault(f"{replica}/{name}", _Container(uid_of(before))) for name in names]
        for container in known:
            container.move_to(uid_of(pod))
        self._created = max(self._created, created(pod))
        if created(pod) <= self._created_before:
            return None
        number = None if self._earlier_pods else max((container.earlier for container in known), default=1)
        lost, at = _why_lost(before, gone=True), _may_run_on(before)
        failed = [
            (str(end.get("finishedAt")), objects.restart_count(c), str(c.get("name")), end)
            for c in objects.main_containers(before)
            if (end := objects.state_of(c, "terminated")) and objects.run_failed(end)
        ]
        if lost or not failed:
            who = replica, "", False, name_of(before), uid_of(before)
            return Restart(*who, number, 0, {}, lost or POD_DELETED, at)
        _, run, name, end = max(failed, key=lambda found: found[:3])
        return Restart(replica, name, False, name_of(before), uid_of(before), number, run, end)

    def _record_loss(self, pod: Json, *, gone: bool = False) -> None:
        """If a replica lost its pod, its peers fail too: start all counts again when it runs again."""
        replica, why = self._kind.replica(pod), _why_lost(pod, gone=gone)
        if not why or self._ran.get(replica) == math.inf or not self._is_current(pod):
            return
        if why == POD_DELETED and self._kind.behavior.failure_deletes_peers:
            ends = ((end, other) for other in self._pods.values() for end in _failures(other))
            if any(not _ended_around_deletion(end, other) for end, other in ends):
                return  # the deletion is the effect of that failure, which is counted
        self._ran[replica] = self._all_ran = math.inf
        self._start_again()

    def _start_again(self) -> None:
        for key, container in self._containers.items():
            container.failures = container.failures if key.endswith("/") else 0

    def _record_first_run(self, pod: Json) -> None:
        replica = self._kind.replica(pod)
        runs = [run for c in objects.main_containers(pod) for run in objects.runs_of(c)]
        began = [at for run in runs if (at := epoch_seconds(run.get("startedAt")))]
        if began and replica not in self._ran and self._is_current(pod):
            self._ran[replica] = min(began)

    def _is_awaited(self, pod: Json) -> bool:
        """Whether all other replicas wait for this one, so that it doesn't fail because of them."""
        init_container = self._kind.behavior.waiting_container
        waiting = {name for name, other in self._pods.items() if objects.only_waits(other, init_container)}
        return bool(waiting) and 0 < self._size <= len({self._kind.replica(pod), *waiting})

    # runs

    def _record_runs(self, pod: Json) -> list[Restart]:
        restarts: list[Restart] = []
        for is_init, status in objects.with_init(pod) if self._is_current(pod) else ():
            key = f"{self._kind.replica(pod)}/{status.get('name')}"
            container, ended = self._containers.get(key), list(_ended_runs(status))
            if container is None and not ended:
                continue
            if container is None:
                is_reported = _began(status) <= self._reported_before
                reported = objects.restart_count(status) if is_reported else 0
                container = self._containers[key] = _Container(uid_of(pod), reported)
            if container.uid != uid_of(pod):
                container.move_to(uid_of(pod))
            if restart := self._restart_in_place(container, key, pod, is_init, status):
                restarts.append(restart)
            for number, run in ended:
                if number > container.run[0]:
                    if not is_init and self._kind.is_main_container(status.get("name")):
                        self._count(container, pod, number, run)
                    container.run = number, run
        return restarts

    def _restart_in_place(
        self, container: _Container, key: str, pod: Json, is_init: bool, status: Json
    ) -> Restart | None:
        """The latest restart, if it was not reported yet. Earlier ones between two observations are not reported."""
        count = objects.restart_count(status)
        if count <= container.restarts:
            return None
        container.restarts = count
        known = dict([container.run, *_ended_runs(status)])
        newest = known[max(known)]
        never_began = newest.get("reason") in START_ERRORS  # nor did the one before it, which was over in no time
        run = known.get(count - 1) or (newest if never_began else {})
        self._reported = max(self._reported, _began(status))
        started = epoch_seconds(objects.state_of(status, "running").get("startedAt"))
        finished = epoch_seconds(run.get("finishedAt"))
        back_off_seconds = started - finished if started and finished else None
        number = None if self._earlier_pods else container.earlier + count
        replica, _, name = key.partition("/")
        return Restart(
            replica, name, is_init, name_of(pod), uid_of(pod), number, count - 1, run, back_off_seconds=back_off_seconds
        )

    def _count(self, container: _Container, pod: Json, number: int, run: Json) -> None:
        """Count a run that failed early. A longer run or a success starts the count again.

        `restartCount` proves the runs since the last one that was seen, or since the pod started. They were short if
        that time was (a gap starts the count again), and they failed if only failures lead to a restart.
        """
        started, finished = epoch_seconds(run.get("startedAt")), epoch_seconds(run.get("finishedAt"))
        since = 0.0 if self._all_ran == math.inf and self._is_awaited(pod) else self._all_ran
        if finished is None or finished < since:
            return
        if objects.was_ended_by_deletion(run, pod) or _ended_around_deletion(run, pod):
            return
        if not objects.run_failed(run) or started is None:
            container.failures = 0
            return
        if failure_patterns.first_match(failure_patterns.DISRUPTIONS, str(run.get("reason"))):  # the node restarted
            self._start_again()
            return
        last, before = container.run
        if missed := number - last - 1:
            seen = epoch_seconds(before.get("finishedAt") or (pod.get("status") or {}).get("startTime")) or 0.0
            all_ran = self._size == 1 or self._all_ran <= seen
            if all_ran and _only_failures_restart(pod):
                container.failures, container.last = container.failures + missed, seen
            else:
                container.failures = 0
        container.add_failure(started, finished)

    def _count_ousted(self, pod: Json) -> None:
        """Count a pod that its node has rejected, or evicted after a short run."""
        times = _ousted_at(pod) if self._size else None
        container = self._containers.setdefault(f"{self._kind.replica(pod)}/", _Container()) if times else None
        if times and container and container.uid != uid_of(pod):
            container.uid = uid_of(pod)
            container.add_failure(*times)

    def _is_current(self, pod: Json) -> bool:
        return uid_of(self._pods.get(self._kind.replica(pod), {})) == uid_of(pod)


def _why_lost(pod: Json, *, gone: bool) -> str:
    """Why a replica lost its pod, which may no longer exist, for another reason than its own failure; empty if not."""
    disruption, message, _ = objects.disruption_of(pod)
    if disruption:
        known = failure_patterns.explain_disruption(disruption, message)
        return f"its pod {known.description if known else 'was disrupted'} ({disruption})"
    if not gone and not objects.is_being_deleted(pod):
        return ""
    ends = _failures(pod)
    killed = ends and all(_ended_around_deletion(end, pod) for end in ends)
    return POD_DELETED if killed or not (ends or objects.has_ended(pod)) else ""


def _may_run_on(pod: Json) -> str:
    """The node on which a pod may still run that is being deleted or gone, as last seen; empty if its end was seen.

    Whoever removes the object of a pod whose node doesn't report ends nothing (recordings 103, 104b), and a batch Job
    doesn't wait for the end of a pod that it replaces (100f, 104).
    """
    taken = objects.is_being_deleted(pod) or objects.has_condition(pod, "DisruptionTarget")
    runs = any(objects.state_of(container, "running") for container in objects.main_containers(pod))
    return objects.node_of(pod) if taken and runs else ""


def _ousted_at(pod: Json) -> tuple[float, float] | None:
    """When a pod began and ended that its node has rejected or evicted, in epoch seconds; None for other pods.

    A rejected pod has no times of its own but that of its creation.
    """
    status, created = pod.get("status") or {}, objects.created_at(pod) or 0.0
    reason, message, end = objects.disruption_of(pod)
    known = failure_patterns.explain_disruption(reason, message)
    if status.get("phase") != "Failed" or known is None:
        return None
    if known.description == failure_patterns.REJECTED:
        return created, created
    return (created, created if end is None else end.timestamp()) if reason == "Evicted" else None


def _only_failures_restart(pod: Json) -> bool:
    """Whether each restart of its containers proves a failure. A container may have a restart policy of its own."""
    spec = pod.get("spec") or {}
    own_policies = any(container.get("restartPolicy") for container in spec.get("containers") or ())
    return spec.get("restartPolicy") == "OnFailure" and not own_policies


def _failures(pod: Json) -> list[Json]:
    """The terminated states of the containers that have failed, init containers included."""
    ends = (objects.state_of(container, "terminated") for container in objects.containers(pod))
    return [end for end in ends if end and objects.run_failed(end)]


def _ended_around_deletion(run: Json, pod: Json) -> bool:
    """Whether a run ended after its pod's deletion was requested, or so shortly before that the clocks may disagree.

    The kubelet reports when a run ended, and the API server when the deletion was requested. A pod that had ended
    before its deletion has no grace period, so the time of the request is unknown.
    """
    requested, finished = objects.deletion_requested_at(pod), epoch_seconds(run.get("finishedAt"))
    if not objects.metadata_of(pod).get("deletionGracePeriodSeconds") or run.get("reason") == "OOMKilled":
        return False
    if requested is None or finished is None:
        return False
    return finished >= requested.timestamp() - MAX_CLOCK_SKEW_SECONDS


def _ended_runs(status: Json) -> Iterator[tuple[int, Json]]:
    """The ended runs in a container's status, oldest first, each with its number from 0.

    While a container waits for its restart, `restartCount` is still that of the previous run, which is in lastState
    (recording 06-pt-onfailure-retry).
    """
    count, state, last = objects.restart_count(status), status.get("state") or {}, status.get("lastState") or {}
    if before := last.get("terminated"):
        yield (count if state.get("waiting") else count - 1), before
    if now := state.get("terminated"):
        yield count, now


def _began(status: Json) -> float:
    """When the last run of a container began, in epoch seconds; 0 if that isn't known."""
    *_, last = {}, *objects.runs_of(status)
    return epoch_seconds(last.get("startedAt")) or 0.0


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
