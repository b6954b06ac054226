"""Release the accelerators of a job, by one decision that was made on one read of the job and its pods.

`release` is the one function that releases a job. A request names what it is decided by: a read of the caller
(`DecidedEnd`), what was seen last (`HurriedKill`), or a read that the release makes (`DecisionOnRead`). The write has
the uid and resourceVersion of that. If the job has changed in between, the API server answers 409, nothing is done
(`JobChanged`), and it is read and decided again. So a release may run any number of times, in several processes at
once, and while the next try adopts the job. It ends with a list of pods which shows that none runs: after a deletion in
the foreground the job is gone last, after one in the background (TrainJob) its pods are.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from airflow_provider_ktrain.core.absent import ABSENT, Absent
from airflow_provider_ktrain.core.diagnosis.node_rules import describe_silence, silent_nodes
from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity.names import SUSPENDED_ANNOTATION, JobRef
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.kinds.conditions import true_conditions
from airflow_provider_ktrain.core.state.accelerators import CLAIMS, Amounts, described
from airflow_provider_ktrain.core.state.pods.devices import amounts_of
from airflow_provider_ktrain.core.state.pods.objects import grace_of, has_ended, is_being_deleted, node_of, only_waits
from airflow_provider_ktrain.core.state.pods.usage import NOT_COUNTED
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.core.text.output import counted, listed
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths, kueue
from airflow_provider_ktrain.engine.api.client import AbsentError, Api, ApiStatusError, ApiUnavailable, Object
from airflow_provider_ktrain.engine.api.job_calls import (
    ConflictPauses,
    JobChanged,
    JobRead,
    Observed,
    annotate,
    delete_fenced,
    if_not_served,
    in_served_version,
    job_pods,
    pod_owner_exists,
    read_job,
    read_pod,
    read_training,
    set_suspended,
)
from airflow_provider_ktrain.engine.api.request_errors import is_canceled, retry_transient

Say = Callable[[str], object]  #: Logs one line.
T = TypeVar("T")
NAMED_PODS = 5  #: How many pods an error names.
FIRST_POLL_SECONDS = 0.25  #: Pause before the first check whether the job or its pods are gone, doubled after each.
MAX_POLL_SECONDS = 1.0
#: How long an operator may take to delete the running pods of a job that has ended (cleanPodPolicy).
CLEANUP_SECONDS = 2.0
#: How long an operator may still create a pod of a job that has ended: see `may_create_pods_late`.
LATE_PODS_SECONDS = 2.0
REFUSED_SECONDS = 15.0  #: How long a refused request (401, 403) is repeated: the API server may just have started.
WAIT_NOTICE_SECONDS = 3.0  #: How long to wait for pods before the reason is logged.
WAIT_NOTICE_INTERVAL = 15.0  #: Seconds after which that is logged again.
#: Grace period of a pod whose program hasn't begun: it waits for the Master of a job that has ended or is deleted.
WAITING_POD_OPTIONS = {"gracePeriodSeconds": 1}
WAITING_PODS_SECONDS = 5.0  #: Time to shorten the grace periods of such pods.
GRACE_MARGIN_SECONDS = 30.0  #: Time beyond their grace period in which pods must be gone.
UNANSWERED_REQUEST_SECONDS = 0.2  #: Time beyond the timeout after which a pending request is canceled.


class ReleaseError(KtrainError):
    """The job could not be released, or its pods are still there at the timeout."""


KUEUE_RESUMES = "It was not suspended, because Kueue would resume it, and {why}."
STILL_DELETED = "The API server has accepted the deletion of the job, but something keeps it, such as a finalizer."
_PAUSED = "paused by its Workload"


@dataclass(frozen=True)
class Released:
    """Result of a release.

    :param seconds: time from the first request until all pods were gone.
    :param freed: the part of it about pods and accelerators. Default: empty, all pods had ended, or none was read.
    :param job_deleted: whether the job was deleted, and if its pods were waited for, it was read that it is gone.
        Default: it was not.
    """

    seconds: float
    text: str
    freed: str = ""
    job_deleted: bool = False


def fitting_mode(ref: JobRef, job: Mapping[str, Any] | Absent, wanted: Mode) -> Mode:
    """The mode that releases this job for good: neither its operator nor its queue may start pods again.

    Operators ignore `suspend` of a job that has ended, except those that recreate its pods. A TrainJob that had ended
    is suspended if it has lost its condition Failed. A job that is being deleted can't be kept by a suspension. An
    unfinished job of a Kueue queue is paused by its Workload, or deleted if that isn't possible: `release` finds out.

    :param job: as it was read. If it is gone, the pods that are left are deleted.
    """
    if isinstance(job, Absent) or wanted is Mode.DELETE:
        return Mode.DELETE
    if phase_of(job).ended and not _recreates_deleted_pods(ref, job):
        return Mode.DELETE_PODS
    return Mode.DELETE if is_being_deleted(job) else Mode.SUSPEND


def _recreates_deleted_pods(ref: JobRef, job: Mapping[str, Any]) -> bool:
    recreates = kind_of(ref.kind).operator_of(ref.version).recreates_pods and phase_of(job) is Phase.FAILED
    return recreates and not (job.get("status") or {}).get("completionTime")


@dataclass(frozen=True)
class DecidedEnd:
    """An end that was decided on a read of the job and its pods.

    :param mode: what was decided; carried out as `fitting_mode`.
    :param read: its uid and resourceVersion fence the write. If the job is gone, the pods that are left are deleted.
    :param verify: wait until the job is gone, if it is deleted, and a list shows that no pod runs. False: only until
        the API server has accepted. Default: True.
    """

    mode: Mode
    read: JobRead
    verify: bool = True


@dataclass(frozen=True)
class HurriedKill:
    """A kill by a process that has seconds: one request, and no pod is read, counted or waited for.

    An unfinished job of a Kueue queue takes two: the mark by which the next try activates the Workload, and the
    deactivation. If they aren't answered within half of the time, the job is deleted.

    A job that had ended already and is to be kept is left as it is: a `DecidedEnd` deletes its running pods.

    :param mode: what was decided; carried out as `fitting_mode`.
    :param seen: may be out of date: the job's uid and resourceVersion fence the request. A job of a Kueue queue whose
        Workload isn't known is deleted.
    """

    mode: Mode
    seen: Observed


@dataclass(frozen=True)
class DecisionOnRead:
    """An end that is decided on a read which the release makes, again if the job has changed in between.

    :param mode_for: returns how to release the job, or None to leave it as it is. It may raise.
    """

    mode_for: Callable[[JobRead], Mode | None]


@overload
async def release(
    api: Api, ref: JobRef, request: DecidedEnd | HurriedKill, *, timeout: float = 90, say: Say | None = None
) -> Released: ...
@overload
async def release(
    api: Api, ref: JobRef, request: DecisionOnRead, *, timeout: float = 90, say: Say | None = None
) -> Released | None: ...
async def release(
    api: Api,
    ref: JobRef,
    request: DecidedEnd | HurriedKill | DecisionOnRead,
    *,
    timeout: float = 90,
    say: Say | None = None,
) -> Released | None:
    """Release the job's accelerators, and wait until its pods are gone, as the request says.

    :param timeout: limit for everything, in seconds; requests to an unreachable API server are repeated until then, and
        refused ones (401, 403) for 15 s. A release that waits for pods has at least the longest
        terminationGracePeriodSeconds of the pods plus 30 s. Default: 90.
    :param say: logs why the release waits. Default: None, nobody does.
    :return: None: it was decided on a read that the job is left as it is.
    :raises JobChanged: the job has changed since it was read or seen. Nothing was done.
    :raises ReleaseError: pods are still there at the timeout, the API server rejects a request or doesn't answer in
        time, or the job changed before each write.
    """
    match request:
        case DecidedEnd(mode, read, verify):
            return await _Release(api, ref, read, timeout, say).end(mode, verify=verify)
        case HurriedKill(mode, seen):
            return await _Release(api, ref, seen, timeout).kill(mode, seen.workload)
    began, reading = timing.now(), functools.partial(read_training, api)
    end, pauses = began + timeout, ConflictPauses()  # usually one write of the operator lies between read and write
    while True:
        ref, read = await _ask(ref, functools.partial(in_served_version, api, ref, reading), began, end)
        decided = request.mode_for(read)
        if decided is None:
            return None
        try:
            return await _Release(api, ref, read, max(0.0, end - timing.now()), say).end(decided, verify=True)
        except JobChanged as e:
            if timing.now() + pauses.next > end:
                why = f"{ref} could not be released, because it kept changing. To delete it, run: {ref.delete_command}"
                raise ReleaseError(f"{why}\n{e}") from None
            await pauses.wait()


# a pod whose fields can't be read stops no release


def _held_by(pods: Sequence[Mapping[str, Any]]) -> str:
    try:
        return described(_held(pods), "0 GPUs")
    except Exception:
        return "accelerators"


def _freed(pods: Sequence[Mapping[str, Any]], verified: bool, seconds: float) -> str:
    try:
        return f"{describe_freed(pods, verified)}{f' ({seconds:.1f} s)' * verified}"
    except Exception:
        return ""


def describe_freed(pods: Sequence[Mapping[str, Any]], verified: bool) -> str:
    """Sentence on the pods and accelerators that were released.

    :param pods: the job's pods that the release has seen; at least one has not ended, or there are none.
    """
    held, unfinished = _held(pods), counted(sum(not has_ended(p) for p in pods), "pod")
    if not pods:
        return "No pods were left."
    claims = held.pop(CLAIMS, 0)
    remark = f"; {NOT_COUNTED}" if claims else ""
    if not verified:
        amounts = described(held, "Accelerators" if claims else "0 GPUs")
        return f"{amounts} will be released when {unfinished} terminate{'s' * unfinished.startswith('1 ')}{remark}."
    released = f"{described(held, '')} released, " if held else "" if claims else "No GPUs were held, "
    return f"{released}{unfinished} deleted{remark}."


class _Release:
    """One release: its time limit, its requests, and the pods that it has seen.

    :ivar seen: the pods by uid; each as it was when it was seen holding devices, or else as it was first seen.
    """

    def __init__(
        self, api: Api, ref: JobRef, evidence: JobRead | Observed, timeout: float, say: Say | None = None
    ) -> None:
        self.began = timing.now()
        self._say, self._says_at = say, self.began + WAIT_NOTICE_SECONDS
        self.seen: dict[str, Object] = {}
        self._api, self._ref, self._job = api, ref, evidence.job
        self._pods = evidence.pods if isinstance(evidence, JobRead) else []
        self._left: Sequence[Object] = self._pods  # as last listed
        self._exists = self._job is not ABSENT
        self._end = self.began + timeout
        self._proved: set[str] = set()  # uids of pods that were read by name and are gone
        self._deletes_pods_from = math.inf  # timing.now() from which nobody else deletes running pods
        self._record(self._pods)

    # the requests

    async def end(self, mode: Mode, *, verify: bool) -> Released:
        """Carry out what was decided on a read; see `DecidedEnd`."""
        ref = self._ref
        done, what, why = await self._write(fitting_mode(ref, self._job, mode), verify=verify)
        left, gone = await self.wait(done) if verify else ([], True)
        seconds = timing.now() - self.began
        pods = list(self.seen.values())
        if left:
            names = listed([p["metadata"]["name"] for p in left], NAMED_PODS)
            silent = (f"\n{describe_silence(*one, deleted=True)}" for one in silent_nodes(left).items())
            gpus = _held_by(left)
            raise ReleaseError(
                f"{ref}: {counted(len(left), 'pod')} with {gpus} still present "
                f"{seconds:.0f} s after the deletion was requested.\n"
                f"These are {names}. See `kubectl get pods -n {ref.namespace} -l {ref.pod_selector}`" + "".join(silent)
            )
        ended = bool(pods) and all(map(has_ended, pods))
        freed = "" if ended else _freed(pods, verify, seconds)
        remarks = filter(None, (why, "" if gone else STILL_DELETED))
        text = "\n".join((f"{ref} {what}. {freed}".rstrip(), *remarks))
        return Released(round(seconds, 3), text, freed, job_deleted=gone and done is Mode.DELETE)

    async def kill(self, mode: Mode, workload: Object | None) -> Released:
        """Send the request of a kill; see `HurriedKill`."""
        ref, job = self._ref, self._job
        fitting = fitting_mode(ref, job, mode)
        if fitting is Mode.DELETE_PODS:
            return Released(0.0, f"{ref} has ended and is kept. Its running pods are not deleted.")
        if isinstance(job, dict) and fitting is Mode.SUSPEND and _is_queued(job):
            done, what, why = await self._pause_now(job, workload)
        else:
            done, what, why = await self._write(fitting, verify=False)
        text = f"{ref} {what}. Its pods are being terminated.\n{why}".rstrip()
        return Released(round(timing.now() - self.began, 3), text, job_deleted=done is Mode.DELETE)

    # the write

    async def _write(self, mode: Mode, *, verify: bool) -> tuple[Mode, str, str]:
        """Send the request that the mode requires.

        :param verify: whether `wait` follows: then the operator has time to delete the pods that it cleans up itself.
        :return: the mode that was used, its description, and the reason if it isn't the given one.
        """
        job = self._job
        if isinstance(job, Absent):  # a deletion with propagationPolicy Orphan leaves pods
            self._deletes_pods_from = self.began
            await self._delete_pods(self._pods)
            return mode, "is gone", ""
        if mode is Mode.SUSPEND and _is_queued(job):
            return await self._pause(job)
        if mode is Mode.DELETE_PODS:
            cleans_up = verify and kind_of(self._ref.kind).behavior.cleans_up_pods(job)
            self._deletes_pods_from = self.began + CLEANUP_SECONDS * cleans_up
            await self._delete_pods(self._pods)
            return mode, "kept without running pods", ""
        return await (self._suspend(job) if mode is Mode.SUSPEND else self._delete(job))

    async def _pause_now(self, job: Object, workload: Object | None) -> tuple[Mode, str, str]:
        """Pause an unfinished job of a queue by its Workload within half of the time, or else delete it.

        The Workload may have changed since it was seen: that the job is still ours is proved by the mark on it.
        """
        api, ref, half = self._api, self._ref, (self.began + self._end) / 2
        if workload is not None and "Finished" in true_conditions(workload):  # Kueue doesn't resume it
            return await self._suspend(job)
        why = "its Workload is not known"
        if workload is not None:
            try:
                async with asyncio.timeout(half - timing.now()):
                    if ref.owner:
                        annotations = {SUSPENDED_ANNOTATION: ref.owner}
                        mark = self._fenced(lambda served: annotate(api, served, job, annotations))
                        job = await retry_transient(mark, half)
                    pause = functools.partial(kueue.set_active, api, ref.namespace, workload, False, fenced=False)
                    await retry_transient(pause, half)
                return Mode.SUSPEND, _PAUSED, ""
            except (ApiUnavailable, TimeoutError):
                why = "its Workload could not be deactivated in time"
            except ApiStatusError as e:
                why = f"its Workload could not be deactivated ({e.status} {e.reason})"
        return await self._delete(job, KUEUE_RESUMES.format(why=why))

    async def _pause(self, job: Object) -> tuple[Mode, str, str]:
        """Pause an unfinished job of a queue by its Workload; if that isn't possible, delete it.

        A failed TrainJob that trains again is unfinished although its Workload is finished. Kueue doesn't resume it.
        """
        try:
            await self._ask(self._fenced(lambda ref: kueue.pause(self._api, ref, job, by=ref.owner)))
        except kueue.WorkloadFinishedError:
            return await self._suspend(job)
        except kueue.NotPausableError as e:
            return await self._delete(job, KUEUE_RESUMES.format(why=e))
        return Mode.SUSPEND, _PAUSED, ""

    async def _suspend(self, job: Object) -> tuple[Mode, str, str]:
        await self._ask(self._fenced(lambda ref: set_suspended(self._api, ref, job, True, by=ref.owner)))
        return Mode.SUSPEND, "suspended", ""

    async def _delete(self, job: Object, why: str = "") -> tuple[Mode, str, str]:
        if not is_being_deleted(job):
            await self._ask(self._fenced(lambda ref: delete_fenced(self._api, ref, job)))
        return Mode.DELETE, "deleted", why

    async def _delete_pods(self, pods: Iterable[Object]) -> None:
        """Delete those of the pods that nobody else deletes: running ones, and all pods of a job that is gone.

        A pod that only waits for another one is deleted within a second, also if somebody else has deleted it.
        """
        if timing.now() < self._deletes_pods_from:
            return
        for pod in pods:
            waits = self._only_waits(pod)
            if waits or not (is_being_deleted(pod) or (self._job is not ABSENT and has_ended(pod))):
                options = WAITING_POD_OPTIONS if waits else {}
                await self._ask(functools.partial(_delete_pod, self._api, self._ref.namespace, pod, options))

    def _only_waits(self, pod: Object) -> bool:
        """Whether a pod only waits for another one, and would use a longer grace period for nothing."""
        grace = pod["metadata"].get("deletionGracePeriodSeconds", math.inf)  # a deletion by somebody else sets it
        longer = grace > WAITING_POD_OPTIONS["gracePeriodSeconds"]
        return longer and only_waits(pod, kind_of(self._ref.kind).behavior.waiting_container)

    async def _end_waiting_pods(self) -> None:
        """Shorten the grace period of pods of a deleted job that only wait for another one.

        It may fail, and ends with the first failure, so that the release doesn't take longer for it.
        """
        with contextlib.suppress(ApiStatusError, ApiUnavailable, TimeoutError):
            async with asyncio.timeout(WAITING_PODS_SECONDS):
                for pod in filter(self._only_waits, self._pods):
                    await _delete_pod(self._api, self._ref.namespace, pod, WAITING_POD_OPTIONS)

    # the wait

    async def wait(self, mode: Mode) -> tuple[list[Object], bool]:
        """Wait until the pods that must go are gone and, with Mode.DELETE, the job.

        The pods are listed only when nothing can create pods anymore: an earlier list may miss one that is created
        later. Pods that an operator recreates for a finished job are deleted again.

        :return: the pods left at the end, and whether the job is gone if it must be.
        """
        gone = mode is not Mode.DELETE
        if not gone and self._job is not ABSENT:
            await self._end_waiting_pods()
        job = self._job if isinstance(self._job, dict) else {}
        late = mode is Mode.DELETE_PODS and kind_of(self._ref.kind).behavior.may_create_pods_late(job)
        settled = self.began + LATE_PODS_SECONDS * late
        pause = FIRST_POLL_SECONDS if mode is not Mode.DELETE_PODS or any(map(_is_left, self._pods)) else 0.0
        while True:
            grace = max(map(_grace, self.seen.values()), default=-math.inf)
            self._end = max(self._end, self.began + grace + GRACE_MARGIN_SECONDS)
            await asyncio.sleep(pause)
            self._say_why(grace)
            pause = min(pause * 2 or FIRST_POLL_SECONDS, MAX_POLL_SECONDS)
            gone = gone or await self._ask(self._is_deleted)
            last = timing.now() + pause > self._end
            if gone or last:
                pods = await self._ask(lambda: job_pods(self._api, self._ref))
                self._record(pods)
                left = [p for p in pods if mode is Mode.DELETE or _is_left(p)]
                if not left and (last or timing.now() >= settled):
                    left = await self._ask(lambda: self._missed(pods, mode))  # noqa: B023  # is awaited here
                if last or (not left and timing.now() >= settled):
                    return left, gone
                self._left = left
                await self._delete_pods(left)

    async def _missed(self, listed_pods: Iterable[Object], mode: Mode) -> list[Object]:
        """The pods that were seen running, that a list lacks, and that exist all the same: each is read by its name."""
        there = {pod["metadata"]["uid"] for pod in listed_pods}
        lacking = [pod for uid, pod in self.seen.items() if uid not in there | self._proved and _holds(pod)]
        reads = await asyncio.gather(*(read_pod(self._api, self._ref.namespace, pod) for pod in lacking))
        left = []
        for pod, found in zip(lacking, reads, strict=True):
            if found is ABSENT:
                self._proved.add(pod["metadata"]["uid"])
            elif mode is Mode.DELETE or _is_left(found):
                left.append(found)
        return left

    def _say_why(self, grace: float) -> None:
        """Log at a bounded rate that pods use their grace period."""
        waited = timing.now() - self.began
        if self._say and grace > 0 and timing.now() >= self._says_at:
            self._says_at += WAIT_NOTICE_INTERVAL
            killed = f"A program that ignores SIGTERM is killed when its grace period of {grace:.0f} s is over."
            silent = (describe_silence(*one, deleted=True) for one in silent_nodes(self._left).items())
            why = " ".join(silent) or killed
            self._say(f"Waiting for the pods of {self._ref} to end, for {waited:.0f} s so far. {why}")

    async def _is_deleted(self) -> bool:
        """Whether the job is gone, and with it what creates its pods: a JobSet may be created shortly before that."""
        if self._exists:
            self._ref, job = await in_served_version(self._api, self._ref, lambda ref: read_job(self._api, ref))
            self._exists = job is not ABSENT
        return not self._exists and not await pod_owner_exists(self._api, self._ref)

    def _record(self, pods: Iterable[Object]) -> None:
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if uid not in self.seen or (_holds(pod) and not _holds(self.seen[uid])):
                self.seen[uid] = pod

    # requests

    async def _ask(self, request: Callable[[], Awaitable[T]]) -> T:
        return await _ask(self._ref, request, self.began, self._end)

    def _fenced(self, write: Callable[[JobRef], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        """A write, in a version that is served, that raises JobChanged if the job has changed or is gone."""

        async def attempt() -> T:
            try:
                self._ref, answer = await in_served_version(self._api, self._ref, write)
                return answer
            except ApiStatusError as e:
                if e.status != 409 and not isinstance(e, AbsentError):
                    raise
                raise JobChanged(f"{self._ref} has changed since it was read.\n{e}") from None

        return attempt


async def _ask(ref: JobRef, request: Callable[[], Awaitable[T]], began: float, end: float) -> T:
    """Repeat a request while the API server is unreachable or overloaded, or has just started.

    :param began, end: of the release, by `timing.now`.
    """

    async def attempt() -> T:
        try:
            return await request()
        except (JobChanged, kueue.NotPausableError, ApiStatusError, ApiUnavailable):
            raise
        except (Exception, asyncio.CancelledError) as e:
            if is_canceled(e):
                raise
            raise ApiUnavailable(f"{type(e).__name__}: {e}") from e

    try:
        async with asyncio.timeout(max(0.0, end - timing.now()) + UNANSWERED_REQUEST_SECONDS):
            return await retry_transient(attempt, end, refused_until=began + REFUSED_SECONDS)
    except ApiStatusError as e:
        raise ReleaseError(f"{ref} could not be released. To delete it, run: {ref.delete_command}\n{e}") from None
    except (ApiUnavailable, TimeoutError) as e:
        raise ReleaseError(
            f"{ref} could not be released within {end - began:.0f} s: the API server can't be reached.\n"
            f"{str(e) or 'It did not respond.'}\n"
            f"Its pods may hold accelerators: run `{ref.delete_command}`{if_not_served(ref, e)}"
        ) from None


async def _delete_pod(api: Api, namespace: str, pod: Object, options: Object) -> None:
    path = api_paths.core(namespace, "pods", pod["metadata"]["name"])
    try:
        await api.request("DELETE", path, body={**options, "preconditions": {"uid": pod["metadata"]["uid"]}})
    except ApiStatusError as e:
        if e.status != 409 and not isinstance(e, AbsentError):  # it is gone, or a new pod has its name
            raise


def _is_queued(job: Mapping[str, Any]) -> bool:
    """Whether Kueue may resume the job: an unfinished job of a queue."""
    return bool(kueue.queue_of(job)) and not phase_of(job).ended


def _holds(pod: Mapping[str, Any]) -> bool:
    """Whether a pod holds what it requests: it is on a node and hasn't finished."""
    return bool(node_of(pod)) and not has_ended(pod)


def _held(pods: Iterable[Mapping[str, Any]]) -> Amounts:
    """The accelerators that pods hold."""
    return sum(map(amounts_of, filter(_holds, pods)), Amounts())


def _is_left(pod: Mapping[str, Any]) -> bool:
    return not has_ended(pod) or is_being_deleted(pod)


def _grace(pod: Mapping[str, Any]) -> float:
    """Grace period of a pod, in seconds. 0: it has finished."""
    return 0 if has_ended(pod) else grace_of(pod)
