"""The ConfigMap with a job's code: created after the job, owned by it, and never left behind."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.errors import NoRightError, UnreachableError
from airflow_provider_ktrain.core.identity.names import CODE_ANNOTATION, SUBMISSION_LABEL, JobRef
from airflow_provider_ktrain.core.manifest.code import ARCHIVE, Code, CodeFile, config_map_name, pack
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from airflow_provider_ktrain.engine.submit.runtimes import read_served
from tests import clusters
from tests.clusters import TestCluster
from tests.engine import scripted
from tests.engine.tasks import (
    TRAINS,
    AnyCluster,
    MeddledApi,
    Task,
    api_of,
    create_runtime,
    of_each_kind,
    release_job,
    submit,
    torch_runtime,
    until,
)
from tests.engine.test_rbac import token_with
from tests.virtual import VirtualLoop

Object = dict[str, Any]
cluster, task = scripted.cluster, scripted.task
pytestmark = pytest.mark.scripted


def code_of(program: str) -> Code:
    return pack([CodeFile("train.sh", program.encode())])


async def run(task: Task, number: int, code: Code | None, *, api: Api | None = None, **how: Any) -> Submitted:
    """Submit a job whose program is a file of its code."""
    options = JobOptions(image=clusters.IMAGE, command=["sh", "train.sh"])
    if task.kind.runtimes:
        if isinstance(asyncio.get_running_loop(), VirtualLoop):
            pytest.skip("the scripted API server has no schema of TrainJob")
        options = replace(options, runtime={"kind": "TrainingRuntime", "name": task.name})
        await create_runtime(task.api, task.namespace, torch_runtime(task.name, "Never", 1, {}))
    asked = JobRequest(task.kind, task.owner(number), 1, build(task.kind.name, options), code=code)
    fitted = asked.fitted(f"{task.kind.group}/{task.version}")
    served = await read_served(task.api, task.kind, task.version, fitted, task.namespace)
    return await submit(
        api or task.api, task.kind, task.version,
        lambda submission: asked.stamped(fitted, task.namespace, submission, attempt=1, now=1.0, served=served),
        asked.owner, 1, code=code, log=task.log, **{"patience": 30, **how},
    )  # fmt: skip


async def config_map(task: Task, submitted: Submitted) -> Object | None:
    name = config_map_name(submitted.ref.name, submitted.ref.submission)
    try:
        return await task.api.request("GET", api_paths.core(task.namespace, "configmaps", name))
    except ApiStatusError as e:
        if e.status == 404:
            return None
        raise


async def gone(task: Task, submitted: Submitted) -> None:
    async def is_gone() -> bool:
        return await config_map(task, submitted) is None

    await until(is_gone)


class WithoutConfigMaps(MeddledApi):
    """Creates no ConfigMap: each request fails as if the worker were killed before it."""

    async def before(self, method: str, path: str) -> None:
        if method == "POST" and path.endswith("/configmaps"):
            raise ApiUnavailable("the worker is killed here")


async def killed_before_the_code(cluster: AnyCluster, task: Task, code: Code) -> Submitted:
    """Create a job as a worker does that is killed before it creates the ConfigMap."""
    async with api_of(cluster, WithoutConfigMaps) as api:
        with pytest.raises(UnreachableError):
            await run(task, 1, code, api=api, patience=0)
    job = await task.job()
    assert job is not None
    meta = job["metadata"]
    ref = JobRef(
        "PyTorchJob", "v1", task.namespace, task.name, meta["uid"], submission=meta["labels"][SUBMISSION_LABEL]
    )
    submitted = Submitted(ref, job, created=True)
    assert await config_map(task, submitted) is None
    return submitted


async def test_config_map_is_owned_by_the_job_and_deleted_with_it(task: Task) -> None:
    code = code_of("echo trained by $0; cat train.sh")
    submitted = await run(task, 1, code)
    made = await config_map(task, submitted)
    assert made is not None
    assert base64.b64decode(made["binaryData"][ARCHIVE]) == code.archive
    assert made["metadata"]["labels"] == submitted.job["metadata"]["labels"]
    assert made["metadata"]["annotations"][CODE_ANNOTATION] == code.hash
    assert submitted.job["metadata"]["annotations"][CODE_ANNOTATION] == code.hash
    assert f"Code: {code}." in task.log.messages
    outcome = await task.ended(submitted.ref)
    assert outcome.succeeded, outcome.cause
    assert "[Master 0] trained by train.sh" in task.log.messages
    assert base64.b64encode(code.archive).decode() not in str(task.log)
    await gone(task, submitted)


async def test_config_map_of_a_kept_job_stays(task: Task) -> None:
    submitted = await run(task, 1, code_of(TRAINS))
    await task.running(submitted.ref)
    await release_job(task.api, submitted.ref, Mode.SUSPEND)
    assert await config_map(task, submitted) is not None
    again = await run(task, 2, code_of(TRAINS))
    assert again.ref.uid == submitted.ref.uid
    await task.running(again.ref)
    await release_job(task.api, again.ref, Mode.DELETE)
    await gone(task, submitted)


@of_each_kind
async def test_retry_creates_the_config_map_of_a_killed_worker(cluster: AnyCluster, task: Task) -> None:
    code = code_of("echo trained")
    first = await killed_before_the_code(cluster, task, code)
    second = await run(task, 2, code)
    assert second.ref.uid == first.ref.uid
    assert (await task.ended(second.ref)).succeeded


@of_each_kind
async def test_retry_replaces_a_job_that_waits_for_code_that_has_changed(cluster: AnyCluster, task: Task) -> None:
    first = await killed_before_the_code(cluster, task, code_of("echo old"))
    second = await run(task, 2, code_of("echo new"))
    assert second.created
    assert second.ref.uid != first.ref.uid
    assert "exists: its code was never sent, and has changed since. Replacing it.\nNo pod has started." in str(task.log)
    assert (await task.ended(second.ref)).succeeded
    assert f"[{task.kind.replica_name(task.kind.roles[0], 0)}] new" in task.log.messages


async def test_retry_adopts_a_job_with_the_code_it_began_with(task: Task) -> None:
    first = await run(task, 1, code_of(TRAINS))
    await task.running(first.ref)
    second = await run(task, 2, code_of("echo new"))
    assert second.ref.uid == first.ref.uid
    old, new = code_of(TRAINS).hash, code_of("echo new").hash
    assert f"Changed: code (hash {old}, now {new})" in str(task.log)
    third = await run(task, 3, code_of("echo new"), reattach="if_unchanged")
    assert third.created, "changed code is a changed job"


async def test_running_job_whose_config_map_was_deleted_is_kept(task: Task) -> None:
    """This does not prove that the job has not begun."""
    first = await run(task, 1, code_of(TRAINS))
    await task.running(first.ref)
    name = config_map_name(first.ref.name, first.ref.submission)
    await task.api.request("DELETE", api_paths.core(task.namespace, "configmaps", name))
    second = await run(task, 2, code_of("echo new"))
    assert second.ref.uid == first.ref.uid
    assert "is missing. This try can't send it.\nPods that start from now on wait for the code" in str(task.log)
    third = await run(task, 3, code_of(TRAINS))
    assert third.ref.uid == first.ref.uid
    assert await config_map(task, third) is not None


async def test_create_of_the_config_map_is_repeated(cluster: AnyCluster, task: Task) -> None:
    """Also after a create whose response was lost."""
    failures = [False, True, False]

    class Flaky(MeddledApi):
        async def before(self, method: str, path: str) -> None:
            if method == "POST" and path.endswith("/configmaps") and failures and not failures[-1]:
                failures.pop()
                raise ApiUnavailable("not sent")

        async def after(self, method: str, path: str) -> None:
            if method == "POST" and path.endswith("/configmaps") and failures:
                failures.pop()
                raise ApiUnavailable("response lost")

    async with api_of(cluster, Flaky) as api:
        submitted = await run(task, 1, code_of("echo trained"), api=api)
    assert not failures
    assert (await task.ended(submitted.ref)).succeeded


async def test_refusal_after_a_lost_create_of_the_config_map_does_not_release_the_job(
    cluster: AnyCluster, task: Task
) -> None:
    """The ConfigMap itself may have used up a quota."""
    creates = 0

    class Refusing(MeddledApi):
        async def before(self, method: str, path: str) -> None:
            nonlocal creates
            if method == "POST" and path.endswith("/configmaps"):
                creates += 1
                if creates > 1:
                    raise ApiStatusError(403, "Forbidden", 'configmaps "train" is forbidden: exceeded quota: one')

        async def after(self, method: str, path: str) -> None:
            if method == "POST" and path.endswith("/configmaps"):
                raise ApiUnavailable("response lost")

    async with api_of(cluster, Refusing) as api:
        submitted = await run(task, 1, code_of("echo trained"), api=api)
    assert creates == 2
    assert (await task.ended(submitted.ref)).succeeded


async def test_job_that_cannot_get_its_code_is_released(cluster: AnyCluster, task: Task) -> None:
    """Its connection has the Role that `ktrain rbac` prints without `--code`."""
    token = ""
    if isinstance(cluster, TestCluster):
        token = await token_with(cluster, "without-code")
    else:
        cluster.admin("status", status=403, verb="create", path="/configmaps")
    async with api_of(cluster, token=token) as api:
        with pytest.raises(NoRightError) as error:
            await run(task, 1, code_of("echo never"), api=api)
    missing = f"no right to create configmaps in namespace {task.namespace!r} (403). `ktrain rbac --code "
    assert missing in str(error.value)
    assert f"{task.name} deleted." in str(error.value)
    assert await task.job() is None
