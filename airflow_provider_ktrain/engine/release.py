"""Release: the one function that gives a job's GPUs back, for every way out of a task.

Idempotent, fenced (uid *and* resourceVersion of the read that checked the owner), foreground, verified.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity import JobRef, Owner
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.manifest.overlay import QUEUE_LABEL
from airflow_provider_ktrain.core.manifest.resources import pod_gpus
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.core.text import counted
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.errors import retry_transient
from airflow_provider_ktrain.engine.jobs import delete_fenced, is_terminating, job_pods, read_job, set_suspended

Object = dict[str, Any]
T = TypeVar("T")
NAMED_PODS = 5  # pods that an error names
MAX_POLL_SECONDS = 0.5  # seconds between looks at what is going away
COUNT_TIMEOUT_SECONDS = 1.0  # seconds that counting a job's pods may hold up its deletion
GRACE_MARGIN_SECONDS = 30.0  # seconds beyond the pods' own grace period in which they must be gone
UNANSWERED_REQUEST_SECONDS = 0.2  # seconds beyond the timeout at which a request without an answer is given up


class ReleaseError(KtrainError):
    """The job's pods could not be released, or not be seen to go."""


class Mode(enum.Enum):
    """How a job is released."""

    DELETE = "delete"  #: the job and all that it owns
    SUSPEND = "suspend"  #: keep an unfinished job, without its pods; one of a Kueue queue is deleted
    DELETE_PODS = "delete pods"  #: keep a finished job and its ended pods; pods that still run go


_OUTCOMES = {Mode.DELETE: "deleted", Mode.SUSPEND: "suspended", Mode.DELETE_PODS: "kept without running pods"}


@dataclass(frozen=True)
class Released:
    """What a release did.

    :param done: False where the job has another owner by now, or none: nothing was touched.
    :param pods: pods that are gone or have ended.
    :param gpus: GPUs of those that held some: they had a node and had not ended.
    :param seconds: from the first request until the last pod was seen to be gone.
    :param text: one line for the log.
    :param kept: the job had ended and was spared: it is still there, without running pods.
    """

    done: bool
    pods: int
    gpus: int
    seconds: float
    text: str
    kept: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def mode_of(on_finish_action: str, *, succeeded: bool, ended: bool) -> Mode:
    """The mode that `on_finish_action` (delete_job, keep_job, delete_succeeded_job) means for a job in this state."""
    if on_finish_action == "delete_job" or (on_finish_action == "delete_succeeded_job" and succeeded):
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
    """Give back what the job holds, and see that it is gone.

    :param timeout: seconds for all of it; an API server that is away is asked again until then. With `verify` it is at
        least the longest terminationGracePeriodSeconds of the job's pods plus `margin`: they have a right to it.
    :param verify: False returns as soon as the API server accepted the request.
    :param margin: seconds that pods may take beyond their grace period.
    :param before: the job's pods as they were, where its deletion was asked for already.
    :param spare_ended: do not delete a job that has ended, only its pods that still run: its status is the one proof of
        how it ended, until Airflow knows.
    :raises ReleaseError: pods are still there after that time, or the API server refuses.
    """
    began = time.monotonic()
    end = began + timeout

    async def count_and_ask() -> tuple[Mode, str] | None:
        nonlocal before
        before = before if before is not None else await pods_before(api, ref)
        return await _request_release(api, ref, mode, before or [], spare_ended)

    try:
        async with asyncio.timeout(timeout + UNANSWERED_REQUEST_SECONDS) as limit:
            asked = await retry_transient(count_and_ask, end)
            if asked is None:
                return Released(False, 0, 0, 0.0, f"{ref} belongs to another try now. Nothing was released.")
            done, what = asked
            if verify and before:
                timeout = max(timeout, max(map(_grace, before)) + margin)
                end = began + timeout
                limit.reschedule(
                    asyncio.get_running_loop().time() + end - time.monotonic() + UNANSWERED_REQUEST_SECONDS
                )
            left = await _wait_gone(api, ref, done, end) if verify else []
    except ApiStatusError as e:
        raise ReleaseError(f"{ref} could not be released: {e}") from e
    except (ApiUnavailable, TimeoutError) as e:
        raise ReleaseError(
            f"{ref} could not be released within {timeout:.0f} s: the API server cannot be reached.\n"
            f"{e or 'It does not answer'}\n"
            f"Its pods may hold GPUs: run `kubectl delete -n {ref.namespace} {ref.kind.lower()} {ref.name}`"
        ) from e
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
    pods = [p for p in before or () if kept or done is not Mode.DELETE_PODS or not _ended(p)]
    text = f"{ref} {what}. {_result(before, pods, verify)} ({seconds:.1f} s)"
    return Released(True, len(pods), _held_gpus(pods), round(seconds, 3), text, kept)


def _result(before: list[Object] | None, pods: list[Object], verified: bool) -> str:
    """What came of a release: how many GPUs, as far as that is known."""
    if before is None:
        return "Its pods are gone; their GPUs were not counted." if verified else "Its pods are being terminated."
    gpus, unfinished = _held_gpus(pods), counted(sum(not _ended(p) for p in pods), "pod")
    if not pods:
        return "No pods were left."
    if all(map(_ended, pods)):
        return f"{counted(len(pods), 'pod')} had ended, no GPUs were left to release."
    if not verified:
        return (
            f"{counted(gpus, 'GPU')} will be released when {unfinished} terminate{'s' * unfinished.startswith('1 ')}."
        )
    released = f"{counted(gpus, 'GPU')} released" if gpus else "No GPUs were held"
    return f"{released}, {unfinished} deleted."


async def pods_before(api: Api, ref: JobRef) -> list[Object] | None:
    """The job's pods, for the count of what is freed; None where they cannot be read: the deletion must not wait."""
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_SECONDS):
            return await job_pods(api, ref)
    except (ApiUnavailable, ApiStatusError, TimeoutError):
        return None


def _held_gpus(pods: Iterable[Mapping[str, Any]]) -> int:
    """GPUs that pods hold: those that have a node and have not ended."""
    specs = (pod.get("spec") or {} for pod in pods if not _ended(pod))
    return sum(pod_gpus(spec) for spec in specs if spec.get("nodeName"))


def _grace(pod: Mapping[str, Any]) -> float:
    """Seconds that a pod may take to end."""
    return 0 if _ended(pod) else float((pod.get("spec") or {}).get("terminationGracePeriodSeconds", 30))


def _ended(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


async def _request_release(
    api: Api, ref: JobRef, mode: Mode, pods: list[Object], spare_ended: bool
) -> tuple[Mode, str] | None:
    """Make the request until it is accepted; the mode that fitted the job, in words too; None: another try owns it."""
    while True:
        job = await read_job(api, ref)
        if job is None:
            await _delete_pods(api, ref, pods or await job_pods(api, ref))  # what an orphaning deletion left
            return Mode.DELETE, "is gone"
        owner = Owner.of(job)
        if ref.owner and (owner is None or owner.ti_id != ref.owner):
            return None
        if spare_ended and phase_of(job).ended:
            fitting, what = _fitting_mode(ref, job, Mode.DELETE_PODS)[0], "has ended"
        else:
            fitting, what = _fitting_mode(ref, job, mode)
        try:
            if fitting is Mode.DELETE and "deletionTimestamp" not in job["metadata"]:
                await delete_fenced(api, paths.job(ref), job)
            elif fitting is Mode.SUSPEND:
                await set_suspended(api, ref, job, True, by=ref.owner)
            elif fitting is Mode.DELETE_PODS:
                await _delete_pods(api, ref, [p for p in await job_pods(api, ref) if not _ended(p)])
            return fitting, what
        except ApiStatusError as e:
            if e.status not in (404, 409):
                raise
            # it changed since the read (operators write often): read and decide again


def _fitting_mode(ref: JobRef, job: Mapping[str, Any], mode: Mode) -> tuple[Mode, str]:
    """The mode that frees what the job as it stands holds, and does not let its operator or queue take it again."""
    if mode is Mode.DELETE:
        return mode, _OUTCOMES[mode]
    if phase_of(job).ended:  # suspending frees nothing where an operator is done with the job, and all where it is not
        mode = Mode.SUSPEND if recreates_deleted_pods(ref, job) else Mode.DELETE_PODS
    elif mode is Mode.SUSPEND and QUEUE_LABEL in (job["metadata"].get("labels") or {}):
        return Mode.DELETE, f"{_OUTCOMES[Mode.DELETE]}, as Kueue would resume a suspended job of its queue"
    return mode, _OUTCOMES[mode]


def recreates_deleted_pods(ref: JobRef, job: Mapping[str, Any] | None) -> bool:
    """Whether the operator recreates deleted pods of this ended job."""
    if job is None or not kind_of(ref.kind).recreates_pods(ref.version):
        return False
    return phase_of(job) is Phase.FAILED and not (job.get("status") or {}).get("completionTime")


async def _delete_pods(api: Api, ref: JobRef, pods: list[Object]) -> None:
    for pod in pods:
        path = paths.core(ref.namespace, "pods", pod["metadata"]["name"])
        try:
            await api.request("DELETE", path, body={"preconditions": {"uid": pod["metadata"]["uid"]}})
        except ApiStatusError as e:
            if e.status not in (404, 409):  # gone, or a namesake: not ours
                raise


async def _wait_gone(api: Api, ref: JobRef, mode: Mode, end: float) -> list[Object]:
    """Wait until no pod is left that must go (and, where it is deleted, no job); what is left at `end`."""
    delay = 0.05
    while True:
        pods = await retry_transient(lambda: job_pods(api, ref), end)
        left = [p for p in pods if mode is Mode.DELETE or not _ended(p) or is_terminating(p)]
        if not left and (mode is not Mode.DELETE or await retry_transient(lambda: read_job(api, ref), end) is None):
            return []
        if time.monotonic() + delay > end:
            return left
        await asyncio.sleep(delay)
        delay = min(delay * 2, MAX_POLL_SECONDS)
