"""Restarts of a job's containers, each with its reason, and crash loops.

A crash loop is one container that fails again and again, each time after a short run. Restarts by the kubelet and pods
that the operator recreates (restartPolicy ExitCode, a batch Job) count alike. All times are the cluster's own:
`startedAt` and `finishedAt` of containers.

Only the container that the operator trains in counts, where its name is known: a sidecar that fails ends no training.
Failures count from the moment when every replica has run at least once: until then workers may fail because the master
still pulls its image. When a replica loses its pod to an eviction, a preemption, a lost node or a deletion, all counts
start again when that replica runs again: its peers fail meanwhile. Elastic jobs expect failures and are exempt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from airflow_provider_ktrain.core.diagnosis import failure_patterns as words
from airflow_provider_ktrain.core.diagnosis.log_parser import read_tail
from airflow_provider_ktrain.core.diagnosis.pod_failures import (
    deletion_of,
    is_collateral,
    moment,
    run_failed,
    signal_name,
    taken_away,
)
from airflow_provider_ktrain.core.formats import known_fields
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.status import true_conditions, wants_suspension

Json = Mapping[str, Any]
SHORT = 600.0  #: seconds; a failed run that took longer does not belong to a crash loop
SKEW = 60.0  #: seconds by which the clock of a node may be behind the API server's
KEPT = 20  #: containers that a handover describes: those closest to a crash loop. The others count from 0 again


@dataclass(frozen=True)
class Restart:
    """One restart of a container, in place or in a new pod.

    :param replica: `Master 0`.
    :param container: its name; empty where the pod was lost as a whole.
    :param is_init: whether it is an init container.
    :param pod: the name of the pod of the run before.
    :param number: how many restarts of this container there were, this one included; None where that is not known.
    :param run: the number of the run before, within its pod.
    :param ended: the terminated state of the run before; empty where the pod was lost.
    :param lost: why the pod was lost; empty where the container failed.
    :param back_off: seconds between the two runs; None where the next one has not started.
    """

    replica: str
    container: str
    is_init: bool
    pod: str
    number: int | None
    run: int
    ended: Json
    lost: str = ""
    back_off: float | None = None

    def describe(self, lines: Sequence[str] | None) -> str:
        """One line for the log.

        :param lines: the last lines that the run before wrote; None where its log is not followed.
        """
        times = "" if self.number is None else f" ({_ordinal(self.number)} time)"
        who = f"Init container {self.container} of {self.replica}" if self.is_init else self.replica
        back_off = f" Back-off {self.back_off:.0f} s." if self.back_off and self.back_off >= 1 else ""
        reason = self._reason(lines)
        return f"{who} restarted{times}{f' after {reason}' if reason else ''}.{back_off}"

    def _reason(self, lines: Sequence[str] | None) -> str:
        """Empty where nobody knows: the status of a container tells its last two runs only."""
        if self.lost:
            return self.lost
        code, reason = self.ended.get("exitCode"), str(self.ended.get("reason") or "")
        tail = read_tail(lines, str(self.ended.get("message") or ""))
        if tail.exception and reason != "OOMKilled":
            return tail.exception.rstrip(".")
        said = [] if reason in ("", "Error", "Completed") else [reason]
        if code is not None:
            name = signal_name(code)
            said.append(f"exit code {code}" + (f" ({name})" if name else ""))
        last = f"its last line: {tail.last.rstrip('.')}" if tail.last else ""
        return "; ".join(text for text in (", ".join(said), last) if text)


@dataclass(frozen=True)
class CrashLoop:
    """A container that failed `failures` times in a row, each time after a run shorter than `SHORT`."""

    replica: str
    failures: int


@dataclass
class _Container:
    """What is known of one container of a replica, over all pods of that replica.

    :param uid: of the pod that is counted now.
    :param restarts: `restartCount` in that pod, as far as it was reported.
    :param earlier: restarts before that pod, its own creation included.
    :param ended: the number of the last run of that pod that has ended, -1 where none has.
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
        """Count in another pod from now on."""
        self.earlier += self.restarts + 1
        self.uid, self.restarts, self.ended = uid, 0, -1


class RestartHistory:
    """What one host knows of the restarts of a job.

    :param kind: of the job.
    :param past: what an earlier host knew: see `past`.
    """

    def __init__(self, kind: Kind, past: Mapping[str, Any] | None = None) -> None:
        self._kind = kind
        given = past or {}
        self._since: float | None = None  # from when failures count: when every replica is known to have run here
        self._since_before: float | None = given.get("since")  # the same of an earlier host
        self._reported = float(given.get("reported") or 0.0)  # end of the last run whose restart was reported
        self._reported_before = self._reported
        self._partial = bool(given.get("partial"))  # whether more containers had restarted than are described
        containers = given.get("containers") or {}
        self._inherited = set(containers)
        self._containers = {str(key): _Container(**known_fields(_Container, c)) for key, c in containers.items()}
        self._pods: dict[str, Json] = {}  # the present pod of each replica
        self._running_since: dict[str, float] = {}  # by replica
        self._lost: set[str] = set()  # uids of present pods that were taken away
        self._seen: dict[str, Json] = {}  # by uid
        self._last_run: dict[str, tuple[int, Json]] = {}  # of each container, with its number, that ended last

    def see(self, job: Json, pods: Mapping[str, Json]) -> list[Restart]:
        """Restarts that are new.

        :param job: as it is now.
        :param pods: those that are there now, by uid, and no others.
        """
        if wants_suspension(job) or "Suspended" in true_conditions(job):
            self._start_again()
            self._seen = dict(pods)
            return []
        changed = sorted((p for uid, p in pods.items() if self._seen.get(uid) is not p), key=_created)
        vanished = [pod for uid, pod in self._seen.items() if uid not in pods]
        self._seen = dict(pods)
        for pod in vanished:
            self._note_loss(pod, gone=True)
        restarts = [restart for pod in changed for restart in self._replace(pod)]
        for pod in changed:
            self._note_loss(pod)
            self._note_first_run(pod)
        self._start_counting(job)
        for pod in changed:
            restarts += self._note_runs(pod)
        return restarts

    def see_deleted(self, pod: Json) -> list[Restart]:
        """Restarts that the last state of a deleted pod shows."""
        uid = _uid(pod)
        if self._seen.pop(uid, None) is None and uid not in map(_uid, self._pods.values()):
            return []
        self._note_loss(pod, gone=True)
        restarts = self._note_runs(pod)
        if uid == _uid(self._pods.get(self._place(pod), {})):
            self._pods[self._place(pod)] = pod
        return restarts

    def crash_loop(self, limit: int | None) -> CrashLoop | None:
        """The crash loop of the container that failed most often, if it failed `limit` times; None: no limit."""
        key = max(self._containers, key=lambda k: self._containers[k].failures, default=None)
        if limit is None or key is None or self._containers[key].failures < max(limit, 1):
            return None
        return CrashLoop(key.partition("/")[0], self._containers[key].failures)

    def past(self) -> dict[str, Any]:
        """For the next host: what the status of live pods does not tell. At most `KEPT` containers."""

        def closest(key: str) -> tuple[int, int]:
            container = self._containers[key]
            return -container.failures, -container.earlier - container.restarts

        kept = sorted(self._containers, key=closest)[:KEPT]
        return {
            "since": self._since if self._since is not None else self._since_before,
            "reported": self._reported,
            "partial": self._partial or len(kept) < len(self._containers),
            "containers": {key: asdict(self._containers[key]) for key in kept},
        }

    # pods

    def _replace(self, pod: Json) -> list[Restart]:
        """Make a pod the present one of its replica, if it is newer: a restart."""
        place = self._place(pod)
        before = self._pods.get(place)
        if before is None or _uid(before) == _uid(pod):
            self._pods[place] = pod
        if before is None or _uid(before) == _uid(pod) or _created(pod) < _created(before):
            return []
        restarts = self._note_runs(before)
        self._pods[place] = pod
        if (restart := self._restart_in_new_pod(place, before, pod)) is not None:
            restarts.append(restart)
        return restarts

    def _restart_in_new_pod(self, place: str, before: Json, pod: Json) -> Restart | None:
        """None where the pod before had ended well, or an earlier host has reported the restart."""
        status = before.get("status") or {}
        names = [str(container.get("name")) for container in (pod.get("spec") or {}).get("containers") or ()]
        known = [self._containers.setdefault(f"{place}/{name}", _Container(_uid(before))) for name in names]
        if status.get("phase") == "Succeeded" or any(container.uid == _uid(pod) for container in known):
            return None
        for name, container in zip(names, known, strict=True):
            container.move_to(_uid(pod))
            self._last_run.pop(f"{place}/{name}", None)
        number = None if self._partial else max((container.earlier for container in known), default=1)
        lost = _why_lost(before, gone=True)
        failed = [
            (str(end.get("finishedAt")), int(c.get("restartCount") or 0), str(c.get("name")), end)
            for _, c in _containers(before, init=False)
            if (end := (c.get("state") or {}).get("terminated")) and run_failed(end)
        ]
        if lost or not failed:
            return Restart(place, "", False, _name(before), number, 0, {}, lost or "its pod was deleted")
        _, run, name, end = max(failed, key=lambda found: found[:3])
        finished = _epoch(end, "finishedAt") or 0.0
        self._reported = max(self._reported, finished)
        return (
            Restart(place, name, False, _name(before), number, run, end) if finished > self._reported_before else None
        )

    def _note_loss(self, pod: Json, *, gone: bool = False) -> None:
        """A replica that loses its pod takes its peers with it: count again when it runs again.

        What happened while nobody followed the job is not known. So an earlier host's count goes on only when every
        replica has run in its present pod.
        """
        place, uid = self._place(pod), _uid(pod)
        present = self._pods.get(place)
        if present is None or _uid(present) != uid or uid in self._lost or not _why_lost(pod, gone=gone):
            return
        self._lost.add(uid)
        self._lost &= {uid, *map(_uid, self._pods.values())}
        self._running_since.pop(place, None)
        self._count_again_from(None)

    def _count_again_from(self, since: float | None) -> None:
        self._since, self._since_before = since, None
        for container in self._containers.values():
            container.failures = 0

    def _note_first_run(self, pod: Json) -> None:
        place = self._place(pod)
        if place in self._running_since or _uid(pod) in self._lost or self._pods.get(place) is not pod:
            return
        began = [
            at for _, c in _containers(pod, init=False) for run in _known_runs(c) if (at := _epoch(run, "startedAt"))
        ]
        if began:
            before = self._since_before
            if before is not None and (_created_at(pod) or 0.0) <= before:  # it had run when the last host counted
                began.append(before)
            self._running_since[place] = min(began)

    def _start_counting(self, job: Json) -> None:
        if self._since is None and not self._kind.is_elastic(job):
            expected = sum(self._kind.count(job, role) for role in self._kind.replicas(job))
            if expected and len(self._running_since) >= expected:
                self._since = max(self._running_since.values())

    def _start_again(self) -> None:
        """The job is suspended: its pods go, and come again when it is resumed."""
        self._since = self._since_before = None
        self._containers.clear()
        self._last_run.clear()
        self._pods.clear()
        self._running_since.clear()
        self._lost.clear()

    # runs

    def _note_runs(self, pod: Json) -> list[Restart]:
        place = self._place(pod)
        present = self._pods.get(place)
        if present is None or _uid(present) != _uid(pod):
            return []
        restarts: list[Restart] = []
        for is_init, status in _containers(pod):
            key = f"{place}/{status.get('name')}"
            container = self._container(key, pod, status)
            if container is None:
                continue
            for number, run in _ended_runs(status):
                if number > container.ended:
                    container.ended = number
                    if not is_init and self._kind.container in (None, status.get("name")):
                        self._count(container, pod, run)
            if restart := self._restart_in_place(key, pod, is_init, status):
                restarts.append(restart)
            self._last_run[key] = max(_ended_runs(status), key=lambda found: found[0], default=(-1, {}))
        return restarts

    def _container(self, key: str, pod: Json, status: Json) -> _Container | None:
        """What is known of a container; None where nothing has ended yet."""
        known = self._containers.get(key)
        if known is None:
            ends = [_epoch(run, "finishedAt") or 0.0 for _, run in _ended_runs(status)]
            if not ends:
                return None
            reported = int(status.get("restartCount") or 0) if max(ends) <= self._reported_before else 0
            known = self._containers[key] = _Container(_uid(pod), reported)
        elif known.uid != _uid(pod):
            known.move_to(_uid(pod))
            self._last_run.pop(key, None)
        return known

    def _restart_in_place(self, key: str, pod: Json, is_init: bool, status: Json) -> Restart | None:
        """The last of the restarts that were not reported."""
        container, count = self._containers[key], int(status.get("restartCount") or 0)
        if count <= container.restarts:
            return None
        container.restarts = count
        runs = dict([self._last_run.get(key, (-1, {})), *_ended_runs(status)])
        run = runs.get(count - 1, {})
        finished = _epoch(run, "finishedAt") or 0.0
        self._reported = max(self._reported, finished)
        started = _epoch((status.get("state") or {}).get("running") or {}, "startedAt")
        back_off = started - finished if started and finished else None
        number = None if self._partial and key not in self._inherited else container.earlier + count
        place, _, name = key.partition("/")
        return Restart(place, name, is_init, _name(pod), number, count - 1, run, back_off=back_off)

    def _count(self, container: _Container, pod: Json, run: Json) -> None:
        """Count a run that has ended, if it failed early; a run of another kind ends the row."""
        started, finished = _epoch(run, "startedAt"), _epoch(run, "finishedAt")
        if self._since is None or finished is None or finished < self._since or _ended_by_deletion(run, pod):
            return
        if not run_failed(run) or started is None or not 0 <= finished - started < SHORT:  # < 0: the clock was set
            container.failures = 0
            return
        if any(re.search(known.pattern, str(run.get("reason"))) for known in words.TAKEN):  # its node was restarted
            self._count_again_from(finished)
            return
        if started - container.last >= SHORT:  # nobody knows what was between: runs may have been missed
            container.failures = 0
        container.failures += 1
        container.last = finished

    def _place(self, pod: Json) -> str:
        """The replica; each Launcher of a batch Job has a name of its own."""
        role, index = self._kind.pod_role(_meta(pod).get("labels") or {})
        return role if role == "Launcher" else f"{role} {index}"


def _why_lost(pod: Json, *, gone: bool = False) -> str:
    """Why a replica lost its pod other than by a failure of its own; empty where it did not.

    :param gone: whether the pod is not there any more.
    """
    status = pod.get("status") or {}
    if taken := taken_away(status)[0]:
        what = next((known.what for known in words.TAKEN if re.search(known.pattern, taken)), "was taken away")
        return f"its pod {what} ({taken})"
    if not gone and not _meta(pod).get("deletionTimestamp"):
        return ""
    ends = [end for _, c in _containers(pod) if (end := (c.get("state") or {}).get("terminated")) and run_failed(end)]
    killed = ends and all(_may_be_killed(end, pod) for end in ends)
    ended = status.get("phase") in ("Succeeded", "Failed")
    return "its pod was deleted" if killed or not (ends or ended) else ""


def _ended_by_deletion(run: Json, pod: Json) -> bool:
    return is_collateral(run, pod) or _may_be_killed(run, pod)


def _may_be_killed(run: Json, pod: Json) -> bool:
    """Whether a run can have been ended by the deletion of its pod, where two clocks don't agree: the kubelet says when
    it ended, the API server when the deletion was requested. Not known of a pod that had ended before: it has no grace
    period.
    """
    asked, at = deletion_of(pod), _epoch(run, "finishedAt")
    if not _meta(pod).get("deletionGracePeriodSeconds") or run.get("reason") == "OOMKilled":
        return False
    return asked is not None and at is not None and at >= asked.timestamp() - SKEW


def _containers(pod: Json, *, init: bool = True) -> Iterator[tuple[bool, Json]]:
    status = pod.get("status") or {}
    for key in ("initContainerStatuses", "containerStatuses") if init else ("containerStatuses",):
        for container in status.get(key) or ():
            yield key.startswith("init"), container


def _ended_runs(status: Json) -> Iterator[tuple[int, Json]]:
    """The ended runs that a container's status still tells, oldest first, each with its number from 0.

    While a container waits for its restart, `restartCount` is still that of the run before, which stands in lastState
    (recording 06-pt-onfailure-retry).
    """
    count, state, last = int(status.get("restartCount") or 0), status.get("state") or {}, status.get("lastState") or {}
    if before := last.get("terminated"):
        yield (count if state.get("waiting") else count - 1), before
    if now := state.get("terminated"):
        yield count, now


def _known_runs(status: Json) -> Iterator[Json]:
    for state in (status.get("lastState") or {}, status.get("state") or {}):
        yield from (run for key in ("terminated", "running") if (run := state.get(key)))


def _epoch(run: Json, key: str) -> float | None:
    at = moment(run.get(key))
    return at.timestamp() if at else None


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def _created_at(pod: Json) -> float | None:
    return _epoch(_meta(pod), "creationTimestamp")


def _created(pod: Json) -> str:
    return str(_meta(pod).get("creationTimestamp"))


def _meta(pod: Json) -> Json:
    return pod.get("metadata") or {}


def _uid(pod: Json) -> str:
    return str(_meta(pod).get("uid"))


def _name(pod: Json) -> str:
    return str(_meta(pod).get("name"))
