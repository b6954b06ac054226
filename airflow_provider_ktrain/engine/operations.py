"""What people do to running jobs by kubectl: scale, suspend, resume, delete. Fenced, and waited for.

Each verb reads the job, decides, and writes with the resourceVersion of that read; where it changed meanwhile, it reads
and decides again. The owner is left alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from airflow_provider_ktrain.core.errors import KtrainError, ManifestError
from airflow_provider_ktrain.core.identity import JobRef, Owner
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.errors import explain, retry_transient, unreachable
from airflow_provider_ktrain.engine.jobs import MERGE_PATCH, is_terminating, job_pods, read_job, set_suspended
from airflow_provider_ktrain.engine.release import Mode, Released, release

Object = dict[str, Any]
T = TypeVar("T")
STARTS_WHEN_RESUMED = "; it is suspended, they start when it is resumed"
KEEPS_WORLD_SIZE = (
    "; it has a Master and no elasticPolicy: pods that ran before keep their WORLD_SIZE, and a program that reads it "
    "does not grow or shrink"
)


async def scale(api: Api, ref: JobRef, workers: int, *, timeout: float) -> str:
    """Patch the number of Workers, and wait until that many run and no others are left; returns a line for the log.

    A suspended job is not waited for.

    :raises KtrainError: the job has ended, or they do not run in time.
    :raises ManifestError: `workers` is outside its elastic bounds, or it has no Workers.
    """
    kind = kind_of(ref.kind)
    end = time.monotonic() + timeout

    async def write(job: Object) -> tuple[int, str]:
        _require_unended(ref, job, "scaled")
        if "Worker" not in kind.replicas(job):
            have = ", ".join(kind.replicas(job))
            raise ManifestError(
                f"{ref} has no Worker replicas", found=f"{kind.replica_specs} {have}", expected="Worker"
            )
        low, high = kind.worker_bounds(job)
        if workers < low or (high is not None and workers > high):
            expected = f"at least {low}" if high is None else f"{low} to {high}, the elastic bounds of {ref}"
            raise ManifestError("the job cannot have so many", where="workers", found=str(workers), expected=expected)
        before = kind.count(job, "Worker")
        if before != workers:
            await _patch(api, ref, job, {"spec": {kind.replica_specs: {"Worker": {"replicas": workers}}}})
        if phase_of(job) in (Phase.QUEUED, Phase.SUSPENDED):
            return before, STARTS_WHEN_RESUMED
        return before, KEEPS_WORLD_SIZE if before != workers and kind.keeps_world_size(job) else ""

    before, remark = await _fenced(api, ref, write, end)
    done = f"{ref} is scaled from {before} to {workers} Workers{remark}"
    if remark == STARTS_WHEN_RESUMED:
        return done

    async def scaled() -> bool:
        pods = [p for p in await job_pods(api, ref) if kind.pod_role(p["metadata"]["labels"])[0] == "Worker"]
        running = [p for p in pods if (p.get("status") or {}).get("phase") == "Running"]
        if len(pods) == len(running) == workers:
            return True
        _require_unended(ref, await read_job(api, ref), f"seen to run with {workers} Workers")
        return False

    await _wait_until(
        scaled, end, f"{ref} has been scaled to {workers} Workers, but not just these run after {timeout:.0f} s"
    )
    return done


async def suspend(api: Api, ref: JobRef, *, timeout: float) -> str:
    """Suspend the job and wait until its pods are gone."""
    end = time.monotonic() + timeout

    async def write(job: Object) -> None:
        _require_unended(ref, job, "suspended")
        await set_suspended(api, ref, job, True)

    await _fenced(api, ref, write, end)

    async def gone() -> bool:
        return not await job_pods(api, ref)

    await _wait_until(gone, end, f"{ref} is suspended, but pods are still there after {timeout:.0f} s")
    return f"{ref} is suspended; its pods are gone"


async def resume(api: Api, ref: JobRef, *, timeout: float) -> str:
    """Resume a suspended job and wait until its operator has taken it up.

    It is resumed once the pods that its suspension deletes are gone: operators would count them as failures.
    """
    end = time.monotonic() + timeout

    async def settled() -> bool:
        return not any(map(is_terminating, await job_pods(api, ref)))

    await _wait_until(settled, end, f"{ref} is not resumed: pods of it are still being deleted after {timeout:.0f} s")

    async def write(job: Object) -> None:
        _require_unended(ref, job, "resumed")
        await set_suspended(api, ref, job, False)

    await _fenced(api, ref, write, end)

    async def taken_up() -> bool:
        return bool(await job_pods(api, ref)) or phase_of(await read_job(api, ref)).ended

    await _wait_until(taken_up, end, f"{ref} is resumed, but no pod of it has appeared after {timeout:.0f} s")
    return f"{ref} is resumed"


async def delete(api: Api, ref: JobRef, *, force: bool, timeout: float) -> Released:
    """Delete the job and wait until its pods are gone.

    :param force: delete it also where a task of ours owns it and it has not ended.
    :raises KtrainError: such an owner, without `force`.
    """
    job = await retry_transient(lambda: read_job(api, ref), time.monotonic() + timeout)
    owner = Owner.of(job or {})
    if job is not None and owner is not None and not force and not phase_of(job).ended:
        raise KtrainError(
            f"{ref} belongs to {owner.key}, try {owner.try_number}, and is {phase_of(job)}: its task would fail. Mark "
            "that task failed, or pass force=True"
        )
    return await release(api, ref, Mode.DELETE, timeout=timeout)


def _require_unended(ref: JobRef, job: Object | None, what: str) -> None:
    if (phase := phase_of(job)).ended:
        raise KtrainError(f"{ref} is {phase}: it cannot be {what} any more")


async def _patch(api: Api, ref: JobRef, job: Mapping[str, Any], patch: Object) -> None:
    fenced = {"metadata": {"resourceVersion": job["metadata"]["resourceVersion"]}, **patch}
    await api.request("PATCH", paths.job(ref), body=fenced, content_type=MERGE_PATCH)


async def _fenced(api: Api, ref: JobRef, write: Callable[[Object], Awaitable[T]], end: float) -> T:
    """Read, decide and write; again where the job changed between."""

    async def attempt() -> T:
        while True:
            job = await read_job(api, ref)
            if job is None:
                raise KtrainError(f"{ref} (uid {ref.uid}) does not exist any more")
            try:
                return await write(job)
            except ApiStatusError as e:
                if not (e.conflict or e.not_found):
                    raise

    try:
        return await retry_transient(attempt, end)
    except ApiStatusError as e:
        raise explain(e, "patch", kind_of(ref.kind).plural, ref.namespace) from e
    except ApiUnavailable as e:
        raise unreachable(e) from e


async def _wait_until(done: Callable[[], Awaitable[bool]], end: float, problem: str) -> None:
    """Look again and again, less and less often, until it is done; KtrainError with the problem at `end`."""
    delay = 0.1
    while not await retry_transient(done, end):
        if time.monotonic() + delay > end:
            raise KtrainError(problem)
        await asyncio.sleep(delay)
        delay = min(delay * 2, 1)
