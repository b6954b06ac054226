"""Scale, suspend, resume or delete a running job, and wait for the effect.

Each operation reads the job, decides, and writes with the resourceVersion of that read. If the job has changed in
between, it reads and decides again. The job's owner doesn't change.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from airflow_provider_ktrain.core.absent import ABSENT, Absent
from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.errors import KtrainError, ManifestError
from airflow_provider_ktrain.core.identity.names import JobRef, Owner, Unreadable
from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.state.pods.objects import has_ended, is_being_deleted
from airflow_provider_ktrain.core.state.queue.kueue_status import QueuePhase, queue_status
from airflow_provider_ktrain.core.state.status import Phase, phase_of, wants_suspension
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths, kueue
from airflow_provider_ktrain.engine.api.client import AbsentError, Api, ApiStatusError, ApiUnavailable, Object
from airflow_provider_ktrain.engine.api.job_calls import (
    ConflictPauses,
    JobRead,
    in_served_version,
    job_pods,
    read_job,
    set_suspended,
)
from airflow_provider_ktrain.engine.api.request_errors import explain, retry_transient
from airflow_provider_ktrain.engine.release import DecisionOnRead, Released, release
from airflow_provider_ktrain.engine.submit.deletion_waiter import pods_before_resumption

T = TypeVar("T")
STARTS_WHEN_RESUMED = ".\nThe job is suspended: its Workers start when it is resumed"
KEEPS_WORLD_SIZE = (
    ".\nIt has a Master and no elasticPolicy: running pods keep their WORLD_SIZE, so a program that reads it doesn't "
    "use the new size"
)
LAUNCHER_DECIDES = ".\nThese Workers run: the Launcher decides whether and when it starts ranks in them"


async def scale(api: Api, ref: JobRef, workers: int, *, timeout: float) -> str:
    """Patch the number of Workers, and wait until exactly these run. Returns a line for the log.

    It doesn't wait for the Workers of a suspended job.

    :raises KtrainError: the job has ended, or the Workers don't run in time.
    :raises ManifestError: `workers` is outside the elastic bounds of the job, the job has no Workers, or jobs of its
        kind have a fixed size.
    """
    kind = kind_of(ref.kind)
    if kind.scaling.fixed_size_reason:
        raise ManifestError(
            f"{ref} can't be scaled: {kind.scaling.fixed_size_reason}",
            remedy=f"clear its task, or submit a new {kind.name} with another number of nodes",
        )
    end = timing.now() + timeout

    async def write(ref: JobRef, job: Object) -> tuple[int, str]:
        _require_unended(ref, job, "scaled")
        if "Worker" not in kind.replicas(job):
            have = ", ".join(kind.replicas(job))
            raise ManifestError(
                f"{ref} has no Worker replicas", found=f"{kind.form.replica_specs} {have}", expected="Worker"
            )
        low, high = kind.scaling.worker_bounds(job)
        if workers < low or (high is not None and workers > high):
            expected = f"at least {low}" if high is None else f"{low} to {high}, the elastic bounds of {ref}"
            raise ManifestError("outside the bounds of the job", where="workers", found=str(workers), expected=expected)
        before = kind.count(job, "Worker")
        if before != workers and not wants_suspension(job) and await _is_queued(api, job):
            raise KtrainError(
                f"{ref} can't be scaled while it runs: Kueue would stop it and queue it again with the new size.\n"
                "Suspend it, scale it, and resume it"
            )
        if before != workers:
            fence = {"resourceVersion": job["metadata"]["resourceVersion"]}
            body = {"metadata": fence, "spec": {kind.form.replica_specs: {"Worker": {"replicas": workers}}}}
            await api.request("PATCH", api_paths.job(ref), body=body)
        if phase_of(job) in (Phase.QUEUED, Phase.SUSPENDED):
            return before, STARTS_WHEN_RESUMED
        if before != workers and kind.launchers:
            return before, LAUNCHER_DECIDES
        return before, KEEPS_WORLD_SIZE if before != workers and keeps_world_size(kind, job) else ""

    before, remark = await _fenced(api, ref, write, end)
    done = f"{ref} scaled from {before} to {counted(workers, 'Worker')}{remark}"
    if remark == STARTS_WHEN_RESUMED:
        return done

    async def scaled() -> bool:
        pods = [p for p in await job_pods(api, ref) if kind.role_of(p)[0] == "Worker"]
        running = [p for p in pods if (p.get("status") or {}).get("phase") == "Running"]
        if len(pods) == len(running) == workers:
            return True
        _require_unended(ref, await _read(api, ref), "scaled")
        return False

    await _wait_until(
        scaled, end, f"{ref}: after {timeout:.0f} s, the number of running Workers is still not {workers}"
    )
    return done


def keeps_world_size(kind: Kind, job: Object) -> bool:
    """Whether running pods keep the number of peers that they were started with when the job is scaled.

    With a Master, the operator sets WORLD_SIZE when it creates a pod, and never updates it. An elastic program does not
    read it; any other program waits for the number of peers that it was started with.
    """
    return "Master" in kind.replicas(job) and not kind.scaling.is_elastic(job)


async def suspend(api: Api, ref: JobRef, *, timeout: float) -> str:
    """Suspend the job and wait until its pods are gone."""
    end = timing.now() + timeout

    async def write(ref: JobRef, job: Object) -> str:
        _require_unended(ref, job, "suspended")
        if not await _is_queued(api, job):
            await set_suspended(api, ref, job, True)
            return "suspended"
        try:
            await kueue.pause(api, ref, job)
        except kueue.NotPausableError as e:
            raise KtrainError(
                f"{ref} can't be suspended: Kueue would resume it within a second, and {e}.\n"
                "`ktrain rbac --kueue --service-account NAMESPACE:NAME` prints the Role and its binding"
            ) from None
        return "paused by its Workload"

    what = await _fenced(api, ref, write, end)

    async def gone() -> bool:
        return all(has_ended(p) and not is_being_deleted(p) for p in await job_pods(api, ref))

    await _wait_until(gone, end, f"{ref} is {what}, but its pods are still there after {timeout:.0f} s")
    return f"{ref} is {what} and its pods are gone"


async def resume(api: Api, ref: JobRef, *, timeout: float) -> str:
    """Resume a suspended job and wait until its operator has created pods.

    It first waits until the pods that the suspension deletes are gone: operators would count them as failed.
    """
    end = timing.now() + timeout

    async def settled() -> bool:
        return not (await in_served_version(api, ref, functools.partial(pods_before_resumption, api)))[1]

    await _wait_until(settled, end, f"{ref} was not resumed: its old pods are still there after {timeout:.0f} s")

    async def write(ref: JobRef, job: Object) -> str:
        _require_unended(ref, job, "resumed")
        if kueue.queue_of(job) and (workload := await kueue.find_workload(api, ref)) is not None:
            return await _requeue(api, ref, workload)
        await set_suspended(api, ref, job, False)
        return ""

    if queued := await _fenced(api, ref, write, end):
        return f"{ref} {queued}"

    async def taken_up() -> bool:
        return bool(await job_pods(api, ref)) or phase_of(await _read(api, ref)).ended

    await _wait_until(taken_up, end, f"{ref} was resumed, but it has no pods after {timeout:.0f} s")
    return f"{ref} is resumed"


async def _is_queued(api: Api, job: Object) -> bool:
    return bool(kueue.queue_of(job) and await kueue.served_version(api))


async def _requeue(api: Api, ref: JobRef, workload: Object) -> str:
    """Activate the Workload; Kueue then queues the job. Refuse to resume a job that waits: Kueue would undo it."""
    status = queue_status(workload)
    if (workload.get("spec") or {}).get("active") is not False:
        if status.phase is QueuePhase.ADMITTED:
            return "is admitted by its queue already"
        raise KtrainError(
            f"{ref} can't be resumed: it isn't admitted by its queue, and Kueue would suspend it again.\n{status.line}"
        )
    await kueue.set_active(api, ref.namespace, workload, True)
    return f"is queued again in LocalQueue {status.queue}: its Workload is active"


async def delete(api: Api, ref: JobRef, *, force: bool, timeout: float) -> Released:
    """Delete the job and wait until its pods are gone.

    :param force: delete also an unfinished job that a task owns, and one whose owner can't be read.
    :raises KtrainError: a task owns the unfinished job, or its owner can't be read, and `force` is False.
    """

    def mode_for(read: JobRead) -> Mode:
        owner, phase = None if read.job is ABSENT else Owner.of(read.job), phase_of(read.job)
        if owner is Unreadable.OWNER and not force:
            raise KtrainError(
                f"{ref} is not deleted: {owner.value}. A task may own it.\nTo delete it all the same, set force=True"
            )
        if isinstance(owner, Owner) and not force and not phase.ended:
            raise KtrainError(
                f"{ref} belongs to {owner.key}, try {owner.try_number}, and is {phase}. Its task would fail.\n"
                "Mark that task failed instead, or set force=True"
            )
        return Mode.DELETE

    released = await release(api, ref, DecisionOnRead(mode_for), timeout=timeout)
    assert released is not None  # `mode_for` never returns None
    return released


def _require_unended(ref: JobRef, job: Object | Absent, what: str) -> None:
    """Raise if the job has ended: then it can't be scaled, suspended or resumed."""
    if (phase := phase_of(job)).ended:
        raise KtrainError(f"{ref} is {phase}: it can't be {what}")


async def _read(api: Api, ref: JobRef) -> Object | Absent:
    """The job, in another version if that of the reference isn't served any more."""
    return (await in_served_version(api, ref, functools.partial(read_job, api)))[1]


async def _fenced(api: Api, ref: JobRef, write: Callable[[JobRef, Object], Awaitable[T]], end: float) -> T:
    """Read the job and call `write`, which decides and writes; repeat if the job has changed in between.

    :param write: gets a reference in a version that is served, and the job.
    """

    async def attempt() -> T:
        pauses = ConflictPauses()
        while True:
            served, job = await in_served_version(api, ref, functools.partial(read_job, api))
            if job is ABSENT:
                raise KtrainError(f"{ref} (uid {ref.uid}) no longer exists")
            try:
                return await write(served, job)
            except ApiStatusError as e:
                if (e.status != 409 and not isinstance(e, AbsentError)) or timing.now() > end:
                    raise
            await pauses.wait()

    try:
        return await retry_transient(attempt, end)
    except (ApiStatusError, ApiUnavailable) as e:
        raise explain(e, "patch", kind_of(ref.kind).plural, ref.namespace) from None


async def _wait_until(done: Callable[[], Awaitable[bool]], end: float, problem: str) -> None:
    """Poll until `done` returns True. At `end`, raise a KtrainError with the text of `problem`."""
    delay = 0.1
    while not await retry_transient(done, end):
        if timing.now() + delay > end:
            raise KtrainError(problem)
        await asyncio.sleep(delay)
        delay = min(delay * 2, 1)
