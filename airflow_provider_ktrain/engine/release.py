"""Release the GPUs of a job: however a task ends, it calls `release`.

It may run any number of times, in several processes at once, and while the next try adopts the job. So it reads the
job, checks its owner, and sends a delete or patch with the uid and resourceVersion of that read. If the job has changed
in between, the API server answers 409, and the release reads and decides again. If the job has another owner by then,
the release ends without any change. Then the release waits until the job and all its pods are gone: after a deletion in
the foreground the job is gone last, after one in the background (TrainJob) its pods are.

If this process watches the job, it uses what the watches show instead of reads (`job_view`): a write is fenced by the
resourceVersion that the watch has delivered, and the watch's events prove that job and pods are gone. The pods of a job
that is kept are listed if there may be one that the watch hasn't shown yet, because nothing would remove it.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity import JobRef, OnFinishAction, Owner
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.manifest.resources import pod_gpus
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.core.text import counted
from airflow_provider_ktrain.engine import api_paths, kueue
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.job_requests import (
    delete_fenced,
    has_ended,
    is_terminating,
    job_pods,
    pod_owner_exists,
    read_job,
    set_suspended,
)
from airflow_provider_ktrain.engine.job_view import JobView, job_view
from airflow_provider_ktrain.engine.request_errors import retry_transient

Object = dict[str, Any]
T = TypeVar("T")
NAMED_PODS = 5  #: how many pods an error names
MAX_POLL_SECONDS = 0.5  #: longest pause between two checks whether the pods are gone
CONFLICT_PAUSE_SECONDS = 0.05  #: pause after the second conflict of a write with other writers, doubled after each
MAX_CONFLICT_PAUSE_SECONDS = 0.5
COUNT_TIMEOUT_SECONDS = 1.0  #: limit for the count of GPUs before a deletion, which must not wait for it
WATCH_LAG_SECONDS = 5.0  #: time beyond their grace period after which the pods are listed, even if watches run
REFUSED_SECONDS = 15.0  #: in which a refused request (401, 403) is repeated: the API server may just have started
GRACE_MARGIN_SECONDS = 30.0  #: time beyond their grace period in which pods must be gone
UNANSWERED_REQUEST_SECONDS = 0.2  #: time beyond the timeout after which a pending request is canceled


class ReleaseError(KtrainError):
    """The job could not be released, or its pods are still there at the timeout."""


class Mode(enum.Enum):
    """How a job is released."""

    DELETE = "delete"  #: delete the job and everything that it owns
    SUSPEND = "suspend"  #: keep an unfinished job without its pods; of a job of a Kueue queue, deactivate the Workload
    DELETE_PODS = "delete pods"  #: keep a finished job and its finished pods; delete running pods


KUEUE_RESUMES = "It was not suspended, because Kueue would resume it, and {why}."
STILL_DELETED = "The API server has accepted the deletion of the job, but something keeps it, such as a finalizer."
_PAUSED = "paused by its Workload"
_OUTCOMES = {Mode.DELETE: "deleted", Mode.SUSPEND: "suspended", Mode.DELETE_PODS: "kept without running pods"}


@dataclass(frozen=True)
class Released:
    """Result of a release.

    :param done: False if the job has another owner now, or none. Then nothing was changed.
    :param pods: number of pods that are gone or have finished.
    :param gpus: number of GPUs that these pods held: pods on a node that hadn't finished.
    :param seconds: time from the first request until all pods were gone.
    :param text: message for the log.
    :param kept: True if the job had ended and was kept without running pods. Default: False.
    """

    done: bool
    pods: int
    gpus: int
    seconds: float
    text: str
    kept: bool = False

    def to_dict(self) -> dict[str, Any]:
        """A form that fits into events and XComs."""
        return asdict(self)


def mode_of(on_finish_action: OnFinishAction, *, succeeded: bool, ended: bool) -> Mode:
    """The mode that `on_finish_action` requires for a job in this state.

    :param on_finish_action: of the task that owns the job.
    :param succeeded: whether the job succeeded.
    :param ended: whether it has ended.
    """
    if on_finish_action.deletes(succeeded=succeeded):
        return Mode.DELETE
    return Mode.DELETE_PODS if ended else Mode.SUSPEND


async def release(
    api: Api,
    ref: JobRef,
    mode: Mode = Mode.DELETE,
    *,
    timeout: float = 60,
    verify: bool = True,
    margin: float = GRACE_MARGIN_SECONDS,
    before: list[Object] | None = None,
    spare_ended: bool = False,
) -> Released:
    """Release the job's GPUs, and wait until its pods are gone.

    :param ref: the job.
    :param mode: how to release it. Default: delete it.
    :param timeout: limit for everything, in seconds; requests to an unreachable API server are repeated until then, and
        refused ones (401, 403) for 15 s. With `verify`, it is at least the longest terminationGracePeriodSeconds of the
        pods plus `margin`. Default: 60.
    :param verify: wait until the pods are gone. False: return when the API server has accepted. Default: True.
    :param margin: time beyond their grace period that pods may take to end, in seconds. Default: 30.
    :param before: the pods as they were before, if the deletion was already requested. Default: read them.
    :param spare_ended: keep a job that has ended and delete only its running pods, because its status is the only proof
        of how it ended until Airflow has stored that. Default: False.
    :raises ReleaseError: pods are still there at the timeout, or the API server rejects a request.
    """
    began = time.monotonic()
    end = began + timeout

    async def count_and_ask() -> tuple[Mode, str] | None:
        nonlocal before
        if before is None:
            before = (view.pods if view else None) or await pods_before(api, ref)
        if view and verify and spare_ended and mode is Mode.DELETE and await _needs_no_deletion(view, ref):
            return Mode.DELETE_PODS, "has ended"
        return await _request_release(api, ref, mode, before or [], spare_ended, view.job if view else None, end)

    try:
        async with job_view(api, ref) as view, asyncio.timeout(timeout + UNANSWERED_REQUEST_SECONDS) as limit:
            while asked := await retry_transient(count_and_ask, end, refused_until=began + REFUSED_SECONDS):
                done, what = asked
                if verify and before:
                    timeout = max(timeout, max(map(_grace, before)) + margin)
                    end = began + timeout
                    limit.reschedule(
                        asyncio.get_running_loop().time() + end - time.monotonic() + UNANSWERED_REQUEST_SECONDS
                    )
                shown = verify and view and mode is Mode.DELETE and await _shows_end(view, done, before or [], end)
                proven = shown and view and _proves_end(view, ref, done)
                left, deleted = await _wait_gone(api, ref, done, end) if verify and not proven else ([], True)
                last = time.monotonic() + MAX_POLL_SECONDS > end
                if done is not Mode.DELETE_PODS or not any(map(_runs, left)) or last:
                    break
                before, view = _merged(before or [], left), None  # nobody deletes these pods: the watch was behind
                await asyncio.sleep(MAX_POLL_SECONDS)
            else:
                return Released(False, 0, 0, 0.0, f"{ref} belongs to another try now. Nothing was released.")
    except ApiStatusError as e:
        raise ReleaseError(f"{ref} could not be released.\n{e}") from None
    except (ApiUnavailable, TimeoutError) as e:
        raise ReleaseError(
            f"{ref} could not be released within {timeout:.0f} s: the API server cannot be reached.\n"
            f"{str(e) or 'It did not respond.'}\n"
            f"Its pods may hold GPUs: run `kubectl delete -n {ref.namespace} {ref.kind.lower()} {ref.name}`"
        ) from None
    seconds = time.monotonic() - began
    if left:
        names = ", ".join(p["metadata"]["name"] for p in left[:NAMED_PODS])
        more = f" and {len(left) - NAMED_PODS:,} more" if len(left) > NAMED_PODS else ""
        raise ReleaseError(
            f"{ref}: {counted(len(left), 'pod')} with {counted(_held_gpus(left), 'GPU')} still present "
            f"{seconds:.0f} s after the deletion was requested.\n"
            f"These are {names}{more}. See `kubectl get pods -n {ref.namespace} -l {ref.pod_selector}`"
        )
    kept = mode is Mode.DELETE and done is not mode
    pods = [p for p in before or () if kept or done is not Mode.DELETE_PODS or not has_ended(p)]
    what, _, why = what.partition("\n")
    text = f"{ref} {what}. {describe_freed(before, pods, verify)}{f' ({seconds:.1f} s)' * verify}"
    text += f"\n{why}" * bool(why)
    text += f"\n{STILL_DELETED}" * (not deleted)
    return Released(True, len(pods), _held_gpus(pods), round(seconds, 3), text, kept)


def describe_freed(before: list[Object] | None, pods: list[Object], verified: bool) -> str:
    """Sentence on the pods and GPUs that were released, as far as they are known."""
    if before is None:
        return "Its pods are gone; their GPUs were not counted." if verified else "Its pods are being terminated."
    gpus, unfinished = _held_gpus(pods), counted(sum(not has_ended(p) for p in pods), "pod")
    if not pods:
        return "No pods were left."
    if all(map(has_ended, pods)):
        return f"{counted(len(pods), 'pod')} had ended, no GPUs were left to release."
    if not verified:
        return (
            f"{counted(gpus, 'GPU')} will be released when {unfinished} terminate{'s' * unfinished.startswith('1 ')}."
        )
    released = f"{counted(gpus, 'GPU')} released" if gpus else "No GPUs were held"
    return f"{released}, {unfinished} deleted."


async def pods_before(api: Api, ref: JobRef) -> list[Object] | None:
    """The job's pods, to count what is released. None: they can't be read in time, and the deletion must not wait."""
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_SECONDS):
            return await job_pods(api, ref)
    except (ApiUnavailable, ApiStatusError, TimeoutError):
        return None


def _held_gpus(pods: Iterable[Mapping[str, Any]]) -> int:
    """Number of GPUs that pods hold: pods on a node that haven't finished."""
    specs = (pod.get("spec") or {} for pod in pods if not has_ended(pod))
    return sum(pod_gpus(spec) for spec in specs if spec.get("nodeName"))


def _merged(before: list[Object], after: list[Object]) -> list[Object]:
    """All pods of both lists; those in both as they were before."""
    return list({pod["metadata"]["uid"]: pod for pod in [*after, *before]}.values())


def _runs(pod: Mapping[str, Any]) -> bool:
    """Whether the pod has not finished and isn't being deleted."""
    return not has_ended(pod) and not is_terminating(pod)


def _grace(pod: Mapping[str, Any]) -> float:
    """Grace period of a pod, in seconds. 0: it has finished."""
    return 0 if has_ended(pod) else float((pod.get("spec") or {}).get("terminationGracePeriodSeconds", 30))


async def _request_release(
    api: Api, ref: JobRef, mode: Mode, pods: list[Object], spare_ended: bool, watched: Object | None, end: float
) -> tuple[Mode, str] | None:
    """Send the request that fits the job as it is, until it is accepted.

    :param watched: the job as a watch shows it; used once, and only for a write that its resourceVersion fences.
    :param end: value of `time.monotonic()` from which a conflict is raised instead of trying again.
    :return: the mode that was used, and its description. None: another try owns the job.
    :raises ApiStatusError: the API server rejects a request, or the job changed before each write until `end`.
    """
    pause = 0.0  # usually one write of the operator lies between read and write
    while True:
        fresh = watched is None
        job, watched = watched or await read_job(api, ref), None
        if job is None:
            await _delete_pods(
                api, ref, pods or await job_pods(api, ref)
            )  # pods that a deletion with propagationPolicy Orphan has left
            return Mode.DELETE, "is gone"
        owner = Owner.of(job)
        if ref.owner and (owner is None or owner.ti_id != ref.owner):
            if fresh:
                return None
            continue
        if spare_ended and phase_of(job).ended:
            fitting, what = _fitting_mode(ref, job, Mode.DELETE_PODS)[0], "has ended"
        else:
            fitting, what = _fitting_mode(ref, job, mode)
        if fitting is Mode.DELETE_PODS and not fresh:  # the deletion of a pod isn't fenced by the job's version
            continue
        try:
            if fitting is Mode.SUSPEND and kueue.queue_of(job) and not phase_of(job).ended:
                fitting, what = await _pause(api, ref, job)
            if fitting is Mode.DELETE and "deletionTimestamp" not in job["metadata"]:
                await delete_fenced(api, kind_of(ref.kind), api_paths.job(ref), job)
            elif fitting is Mode.SUSPEND and what != _PAUSED:
                await set_suspended(api, ref, job, True, by=ref.owner)
            elif fitting is Mode.DELETE_PODS:
                await _delete_pods(api, ref, [p for p in await job_pods(api, ref) if not has_ended(p)])
            return fitting, what
        except ApiStatusError as e:
            if e.status not in (404, 409) or time.monotonic() + pause > end:
                raise
            # The job has changed since it was read; operators often write its status. Read and decide again.
            await asyncio.sleep(pause)
            pause = min(pause * 2 or CONFLICT_PAUSE_SECONDS, MAX_CONFLICT_PAUSE_SECONDS)


async def _needs_no_deletion(view: JobView, ref: JobRef) -> bool:
    """Whether the job has ended, is this owner's, and its pods have ended or are being deleted by the operator.

    The watch of the pods may be behind that of the job: the pods are listed afterwards, if a further one is possible.
    """
    job = view.job
    if job is None or not phase_of(job).ended or _fitting_mode(ref, job, Mode.DELETE_PODS)[0] is not Mode.DELETE_PODS:
        return False
    owner = Owner.of(job)
    mine = not ref.owner or (owner is not None and owner.ti_id == ref.owner)
    return mine and await view.is_left_to_operator(job)


async def _pause(api: Api, ref: JobRef, job: Mapping[str, Any]) -> tuple[Mode, str]:
    """Pause an unfinished job of a Kueue queue; if that isn't possible, it must be deleted.

    A failed TrainJob that trains again is unfinished although its Workload is finished. Kueue doesn't resume it.

    :return: the mode, and its description; why a job is deleted follows on a line of its own.
    """
    try:
        await kueue.pause(api, ref, job, by=ref.owner)
    except kueue.WorkloadFinishedError:
        return Mode.SUSPEND, _OUTCOMES[Mode.SUSPEND]
    except kueue.NotPausableError as e:
        return Mode.DELETE, f"{_OUTCOMES[Mode.DELETE]}\n{KUEUE_RESUMES.format(why=e)}"
    return Mode.SUSPEND, _PAUSED


def _fitting_mode(ref: JobRef, job: Mapping[str, Any], mode: Mode) -> tuple[Mode, str]:
    """The mode that releases this job for good: neither its operator nor its queue may start pods again."""
    if mode is Mode.DELETE:
        return mode, _OUTCOMES[mode]
    if phase_of(job).ended:  # operators ignore `suspend` of an ended job, except those that recreate its pods
        mode = Mode.SUSPEND if recreates_deleted_pods(ref, job) else Mode.DELETE_PODS
        return mode, _OUTCOMES[mode]
    return Mode.SUSPEND, _OUTCOMES[Mode.SUSPEND]  # also if it had ended: a TrainJob can lose its condition Failed


def recreates_deleted_pods(ref: JobRef, job: Mapping[str, Any] | None) -> bool:
    """Whether the operator recreates deleted pods of this ended job."""
    if job is None or not kind_of(ref.kind).recreates_pods(ref.version):
        return False
    return phase_of(job) is Phase.FAILED and not (job.get("status") or {}).get("completionTime")


async def _delete_pods(api: Api, ref: JobRef, pods: list[Object]) -> None:
    for pod in pods:
        path = api_paths.core(ref.namespace, "pods", pod["metadata"]["name"])
        try:
            await api.request("DELETE", path, body={"preconditions": {"uid": pod["metadata"]["uid"]}})
        except ApiStatusError as e:
            if e.status not in (404, 409):  # it is gone, or a new pod has its name
                raise


async def _shows_end(view: JobView, done: Mode, pods: list[Object], end: float) -> bool:
    """Whether the watches show in time that the pods that must go are gone and, with Mode.DELETE, the job.

    False also if no pod was known: only events of pods show that the watch of the pods has reached the deletion.

    :param pods: the pods before the deletion; their grace periods decide how long to wait for the watches.
    """
    if not view.is_complete or done is Mode.SUSPEND:
        return False
    patience = time.monotonic() + max(map(_grace, pods), default=0) + WATCH_LAG_SECONDS
    return await view.wait(lambda view: view.is_deleted if done is Mode.DELETE else view.is_idle, min(end, patience))


def _proves_end(view: JobView, ref: JobRef, done: Mode) -> bool:
    """Whether no pod can be left after what the watches have shown, so that the pods need not be listed."""
    return view.has_final_pods if done is Mode.DELETE_PODS else not kind_of(ref.kind).pods_outlive_job


async def _wait_gone(api: Api, ref: JobRef, mode: Mode, end: float) -> tuple[list[Object], bool]:
    """Wait until the pods that must go are gone and, with Mode.DELETE, the job.

    The pods are listed only when nothing can create pods anymore: an earlier list may miss one that is created later.

    :return: the pods left at `end`, and whether the job is gone if it must be. With Mode.DELETE_PODS, the pods left
        when there is one that isn't being deleted.
    """
    delay = 0.05
    deleted = mode is not Mode.DELETE
    while True:
        deleted = deleted or await retry_transient(lambda: _is_deleted(api, ref), end)
        last = time.monotonic() + delay > end
        if deleted or last:
            pods = await retry_transient(lambda: job_pods(api, ref), end)
            left = [p for p in pods if mode is Mode.DELETE or not has_ended(p) or is_terminating(p)]
            if last or not left or (mode is Mode.DELETE_PODS and any(map(_runs, left))):
                return left, deleted
        await asyncio.sleep(delay)
        delay = min(delay * 2, MAX_POLL_SECONDS)


async def _is_deleted(api: Api, ref: JobRef) -> bool:
    """Whether the job is gone, and with it what creates its pods: a JobSet may be created shortly before that."""
    return await read_job(api, ref) is None and not await pod_owner_exists(api, ref)
