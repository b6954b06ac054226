"""Restarts of a job's containers, each with its reason, and crash loops.

In a crash loop, one container fails again and again, each time after a short run. Restarts by the kubelet and pods that
the operator recreates (restartPolicy ExitCode, a batch Job) count alike. All times come from the cluster: `startedAt`
and `finishedAt` of containers.

Only the container in which the operator trains counts, if its name is known: a failing sidecar does not end a training.
Failures count only after every replica has run at least once: until then, workers may fail because the master still
pulls its image. Those of a master count before that if all workers wait for it in their init container. When a replica
loses its pod to an eviction, a preemption, a lost node or a deletion, its peers fail too, so all counts start again
when that replica runs again. Elastic jobs expect failures and are exempt.

Pods that their node rejects or evicts count apart, from the beginning: an operator replaces them at once and without
end (recordings 101d, 107, 107d: up to 3 pods a second).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from airflow_provider_ktrain.core.diagnosis import failure_patterns
from airflow_provider_ktrain.core.diagnosis.log_parser import read_tail
from airflow_provider_ktrain.core.diagnosis.pod_failures import describe_exit_code
from airflow_provider_ktrain.core.formats import known_fields
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.kinds.conditions import true_conditions
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json, created, name_of, uid_of
from airflow_provider_ktrain.core.state.status import wants_suspension
from airflow_provider_ktrain.core.text.output import with_short_first_line
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

POD_DELETED = "its pod was deleted"  #: why a replica lost its pod
SHORT_RUN_SECONDS = 600.0  #: a failed run that took at least as long does not belong to a crash loop
MAX_CLOCK_SKEW_SECONDS = 60.0  #: by which a node's clock may be behind the API server's
MAX_KNOWN_OUSTED = 100  #: pods that were rejected or evicted, so that none counts twice
#: Containers in a handover: those closest to a crash loop. The others count from 0 again.
MAX_HANDED_OVER_CONTAINERS = 20


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
    """The counts of one container of a replica, over all pods of that replica. Its fields are a stored format.

    Pods that their node rejected or evicted count for a container without a name.

    :param uid: uid of the pod that is counted now.
    :param restarts: `restartCount` in that pod, as far as it was reported.
    :param earlier: restarts before that pod, its own creation included.
    :param ended: number of that pod's last run that has ended; -1 if none has.
    :param failures: short failed runs in a row.
    :param last: end of the last failed run, in epoch seconds.
    """

    uid: str = ""
    restarts: int = 0
    earlier: int = 0
    ended: int = -1
    failures: int = 0
    last: float = 0.0

    def move_to(self, uid: str) -> None:
        """Count in another pod from now on: its creation is a restart."""
        self.earlier += self.restarts + 1
        self.uid, self.restarts, self.ended = uid, 0, -1


class RestartHistory:
    """The restarts of a job, as far as one process has seen them."""

    def __init__(self, kind: Kind, handed_over: Mapping[str, Any] | None = None) -> None:
        self._kind = kind
        given = handed_over or {}
        # from when failures count, in epoch seconds: when this process knows that every replica has run
        self._since: float | None = None
        self._since_before: float | None = given.get("since")  # the same of the previous process
        # end of the last run whose restart was reported, in epoch seconds
        self._reported = float(given.get("reported") or 0.0)
        self._reported_before = self._reported
        self._partial = bool(given.get("partial"))  # whether a handover left out containers
        containers = given.get("containers") or {}
        self._inherited: dict[str, None] = dict.fromkeys(containers)
        self._containers = {str(key): _Container(**known_fields(_Container, c)) for key, c in containers.items()}
        self._pods: dict[str, Json] = {}  # the current pod of each replica
        self._running_since: dict[str, float] = {}  # by replica, in epoch seconds
        self._lost: set[str] = set()  # replicas whose current pod was disrupted or deleted
        self._is_elastic = False
        self._expected = 0  # replicas; 0 if the job is elastic
        self._ousted: dict[str, None] = {}  # uids of pods that count as rejected or evicted by their node
        self._last_run: dict[str, tuple[int, Json]] = {}  # the last ended run of each container, with its number

    def update(self, job: Json, pods: Mapping[str, Json], removed: Iterable[str] = ()) -> list[Restart]:
        """Record changes of the pods that exist.

        :param pods: its new pods, and those that have changed, by uid.
        :param removed: uids of pods that no longer exist. Default: none.
        :return: restarts that were not returned before.
        """
        if wants_suspension(job) or "Suspended" in true_conditions(job):
            self._reset()
            return []
        gone = set(removed)
        for pod in self._pods.values() if gone else ():
            if uid_of(pod) in gone:
                self._note_loss(pod, gone=True)
        changed = sorted(pods.values(), key=created)
        self._is_elastic = self._kind.scaling.is_elastic(job)
        self._expected = 0 if self._is_elastic else self._kind.size(job)
        for pod in changed:
            self._count_ousted(pod)
        restarts = [restart for pod in changed for restart in self._replace(pod)]
        for pod in changed:
            self._note_loss(pod)
            self._note_first_run(pod)
        self._start_counting()
        for pod in changed:
            restarts += self._note_runs(pod)
        return restarts

    def mark_deleted(self, pod: Json) -> list[Restart]:
        """Record that a pod was deleted. `pod` is its last state. Returns the new restarts that it shows."""
        self._count_ousted(pod)
        if not self._is_current(pod):
            return []
        self._note_loss(pod, gone=True)
        restarts = self._note_runs(pod)
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
        """For the next process: what the status of existing pods does not show."""

        def closest(key: str) -> tuple[int, int]:
            container = self._containers[key]
            return -container.failures, -container.earlier - container.restarts

        kept = sorted(self._containers, key=closest)[:MAX_HANDED_OVER_CONTAINERS]
        return {
            "since": self._since if self._since is not None else self._since_before,
            "reported": self._reported,
            "partial": self._partial or len(kept) < len(self._containers),
            "containers": {key: asdict(self._containers[key]) for key in kept},
        }

    # pods

    def _replace(self, pod: Json) -> list[Restart]:
        """Make a pod the current one of its replica if it is newer, which is a restart."""
        replica = self._kind.replica(pod)
        before = self._pods.get(replica)
        if before is None or uid_of(before) == uid_of(pod):
            self._pods[replica] = pod
            return []
        if created(pod) < created(before):
            return []
        restarts = self._note_runs(before)
        self._pods[replica] = pod
        self._lost.discard(replica)
        if (restart := self._restart_in_new_pod(replica, before, pod)) is not None:
            restarts.append(restart)
        return restarts

    def _restart_in_new_pod(self, replica: str, before: Json, pod: Json) -> Restart | None:
        """None if the previous pod had succeeded, or an earlier process reported the restart."""
        status = before.get("status") or {}
        names = [str(container.get("name")) for container in (pod.get("spec") or {}).get("containers") or ()]
        known = [self._containers.setdefault(f"{replica}/{name}", _Container(uid_of(before))) for name in names]
        if status.get("phase") == "Succeeded" or any(container.uid == uid_of(pod) for container in known):
            return None
        for name, container in zip(names, known, strict=True):
            container.move_to(uid_of(pod))
            self._last_run.pop(f"{replica}/{name}", None)
        number = None if self._partial else max((container.earlier for container in known), default=1)
        lost, at = _why_lost(before, gone=True), _may_run_on(before)
        failed = [
            (str(end.get("finishedAt")), int(c.get("restartCount") or 0), str(c.get("name")), end)
            for c in objects.main_containers(before)
            if (end := objects.state_of(c, "terminated")) and objects.run_failed(end)
        ]
        if lost or not failed:
            who = replica, "", False, name_of(before), uid_of(before)
            return Restart(*who, number, 0, {}, lost or POD_DELETED, at)
        _, run, name, end = max(failed, key=lambda found: found[:3])
        finished = epoch_seconds(end.get("finishedAt")) or 0.0
        self._reported = max(self._reported, finished)
        if finished <= self._reported_before:
            return None
        return Restart(replica, name, False, name_of(before), uid_of(before), number, run, end)

    def _note_loss(self, pod: Json, *, gone: bool = False) -> None:
        """If a replica lost its pod, its peers fail too: start all counts again when it runs again.

        The same may have happened while no process followed the job. So the previous process's counts continue only
        once every replica has run in its current pod.
        """
        replica, why = self._kind.replica(pod), _why_lost(pod, gone=gone)
        if not why or replica in self._lost or not self._is_current(pod):
            return
        if why == POD_DELETED and self._kind.behavior.failure_deletes_peers:
            ends = ((end, other) for other in self._pods.values() for end in _failures(other))
            if any(not _ended_around_deletion(end, other) for end, other in ends):
                return  # the deletion is the effect of that failure, which is counted
        self._lost.add(replica)
        self._running_since.pop(replica, None)
        self._restart_counts_from(None)

    def _restart_counts_from(self, since: float | None) -> None:
        self._since, self._since_before = since, None
        for key, container in self._containers.items():
            container.failures = container.failures if key.endswith("/") else 0

    def _note_first_run(self, pod: Json) -> None:
        replica = self._kind.replica(pod)
        if replica in self._running_since or replica in self._lost or not self._is_current(pod):
            return
        runs = [run for c in objects.main_containers(pod) for run in objects.runs_of(c)]
        began = [at for run in runs if (at := epoch_seconds(run.get("startedAt")))]
        if began:
            before = self._since_before
            if before is not None and (objects.created_at(pod) or 0.0) <= before:  # it ran when counting began
                began.append(before)
            self._running_since[replica] = min(began)

    def _start_counting(self) -> None:
        if self._since is None and 0 < self._expected <= len(self._running_since):
            self._since = max(self._running_since.values())

    def _is_awaited(self, pod: Json) -> bool:
        """Whether all other replicas wait for this one, so that it doesn't fail because of them."""
        init_container = self._kind.behavior.waiting_container
        waiting = {name for name, other in self._pods.items() if objects.only_waits(other, init_container)}
        return bool(waiting) and 0 < self._expected <= len({self._kind.replica(pod), *waiting})

    def _reset(self) -> None:
        """The job is suspended: its pods are deleted, and created again when it is resumed."""
        self._since = self._since_before = None
        self._containers.clear()
        self._last_run.clear()
        self._pods.clear()
        self._running_since.clear()
        self._lost.clear()

    # runs

    def _note_runs(self, pod: Json) -> list[Restart]:
        restarts: list[Restart] = []
        for is_init, status in objects.with_init(pod) if self._is_current(pod) else ():
            key = f"{self._kind.replica(pod)}/{status.get('name')}"
            container = self._container(key, pod, status)
            if container is None:
                continue
            for number, run in _ended_runs(status):
                if number > container.ended:
                    container.ended = number
                    if not is_init and self._kind.is_main_container(status.get("name")):
                        self._count(container, pod, run)
            if restart := self._restart_in_place(key, pod, is_init, status):
                restarts.append(restart)
            self._last_run[key] = max(_ended_runs(status), key=lambda found: found[0], default=(-1, {}))
        return restarts

    def _container(self, key: str, pod: Json, status: Json) -> _Container | None:
        """The counts of a container; None if none of its runs has ended yet."""
        known = self._containers.get(key)
        if known is None:
            ends = [epoch_seconds(run.get("finishedAt")) or 0.0 for _, run in _ended_runs(status)]
            if not ends:
                return None
            reported = int(status.get("restartCount") or 0) if max(ends) <= self._reported_before else 0
            known = self._containers[key] = _Container(uid_of(pod), reported)
        elif known.uid != uid_of(pod):
            known.move_to(uid_of(pod))
            self._last_run.pop(key, None)
        return known

    def _restart_in_place(self, key: str, pod: Json, is_init: bool, status: Json) -> Restart | None:
        """The latest restart, if it was not reported yet. Earlier ones between two observations are not reported."""
        container, count = self._containers[key], int(status.get("restartCount") or 0)
        if count <= container.restarts:
            return None
        container.restarts = count
        runs = dict([self._last_run.get(key, (-1, {})), *_ended_runs(status)])
        run = runs.get(count - 1, {})
        finished = epoch_seconds(run.get("finishedAt")) or 0.0
        self._reported = max(self._reported, finished)
        started = epoch_seconds(objects.state_of(status, "running").get("startedAt"))
        back_off_seconds = started - finished if started and finished else None
        number = None if self._partial and key not in self._inherited else container.earlier + count
        replica, _, name = key.partition("/")
        return Restart(
            replica, name, is_init, name_of(pod), uid_of(pod), number, count - 1, run, back_off_seconds=back_off_seconds
        )

    def _count(self, container: _Container, pod: Json, run: Json) -> None:
        """Count a run that failed early. A longer run or a success resets the count."""
        started, finished = epoch_seconds(run.get("startedAt")), epoch_seconds(run.get("finishedAt"))
        since = 0.0 if self._since is None and self._is_awaited(pod) else self._since
        if since is None or finished is None or finished < since:
            return
        if objects.was_ended_by_deletion(run, pod) or _ended_around_deletion(run, pod):
            return
        # a negative run time: the node's clock was set back
        if not objects.run_failed(run) or started is None or not 0 <= finished - started < SHORT_RUN_SECONDS:
            container.failures = 0
            return
        if failure_patterns.first_match(failure_patterns.DISRUPTIONS, str(run.get("reason"))):  # the node restarted
            self._restart_counts_from(finished)
            return
        if started - container.last >= SHORT_RUN_SECONDS:  # a gap: runs may have been missed
            container.failures = 0
        container.failures += 1
        container.last = finished

    def _count_ousted(self, pod: Json) -> None:
        """Count a pod that its node has rejected, or evicted after a short run."""
        uid = uid_of(pod)
        times = _ousted_at(pod)
        if times is None or uid in self._ousted or self._is_elastic:
            return
        count = self._containers.setdefault(f"{self._kind.replica(pod)}/", _Container())
        began, ended = times
        if count.uid == uid or ended < count.last:  # counted by the process before
            return
        self._ousted[uid] = None
        if len(self._ousted) > MAX_KNOWN_OUSTED:
            del self._ousted[next(iter(self._ousted))]
        is_short, is_next = ended - began < SHORT_RUN_SECONDS, began - count.last < SHORT_RUN_SECONDS
        count.failures = (count.failures if is_next else 0) + 1 if is_short else 0
        count.uid, count.last = uid, ended

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
    count, state, last = int(status.get("restartCount") or 0), status.get("state") or {}, status.get("lastState") or {}
    if before := last.get("terminated"):
        yield (count if state.get("waiting") else count - 1), before
    if now := state.get("terminated"):
        yield count, now


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
