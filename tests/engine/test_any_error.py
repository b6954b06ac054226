"""A kill and a release end in a decision, whatever is raised, and by whichever request."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from airflow_provider_ktrain.core.ending import Mode
from airflow_provider_ktrain.core.errors import AccessError, KtrainError
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import read_training
from airflow_provider_ktrain.engine.api.threads import LoopThread, in_thread
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.release import release
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from airflow_provider_ktrain.engine.training import Training
from tests.apiserver import PODS, PodServer, Request, Response, clients, connected, failure
from tests.engine.staged import NAME, staged
from tests.engine.tasks import host_of
from tests.engine.test_answers import LIES
from tests.until import until

virtual = pytest.mark.virtual_time
ERRORS = {
    **LIES,
    "redirect": Response(307, b"", {"Location": "/login"}),
    "401": failure(401, "Unauthorized"),
    "403": failure(403, "forbidden"),
    "500": failure(500, "etcd"),
}


@virtual
@pytest.mark.parametrize("in_trigger", [True, False])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_job_is_released_after_any_error(error: str, method: str, in_trigger: bool) -> None:
    async with staged() as training, connected(training.url) as api:
        training.start(grace=2)
        owner = Training(lambda: contextlib.nullcontext(api), host_of(shared=in_trigger), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        training.api.replace(method, "", ERRORS[error], 4, processed=False)
        await owner.stop()
        await owner.close()
        await until(lambda: not training.exists, 10)  # a worker doesn't wait for the pods
        assert not training.exists, training.log


@virtual
@pytest.mark.parametrize("in_trigger", [True, False])
@pytest.mark.parametrize("error", [AccessError("throttled"), RuntimeError("odd"), asyncio.CancelledError()], ids=repr)
async def test_job_is_released_if_the_client_cannot_be_opened_at_first(error: BaseException, in_trigger: bool) -> None:
    async with staged() as training, connected(training.url) as api:
        training.start(grace=2)
        left = 3

        @contextlib.asynccontextmanager
        async def connect() -> Any:
            nonlocal left
            if left:
                left -= 1
                raise error
            yield api

        owner = Training(connect, host_of(shared=in_trigger), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        await owner.stop()
        await owner.close()
        await until(lambda: not training.exists, 10)  # a worker doesn't wait for the pods
        assert not training.exists, training.log


@virtual
async def test_last_line_names_the_command_if_errors_outlast_the_time() -> None:
    async with staged() as training, connected(training.url) as api:
        training.start()
        owner = Training(lambda: contextlib.nullcontext(api), host_of(shared=True), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        training.api.replace("", "/pytorchjobs/", LIES["text 404"], 10_000, processed=False)
        began = timing.now()
        outcome = await owner.stop()
        await owner.close()
        assert training.holding
        assert 290 < timing.now() - began < 310
        assert f"kubectl delete pods -n ns -l {training.ref.pod_selector}" in outcome.release_error


@virtual
async def test_page_404_does_not_end_a_healthy_training() -> None:
    async with staged() as training:
        training.start()
        training.after(5, training.api.replace, "GET", f"/pytorchjobs/{NAME}$", LIES["text 404"], 3)
        training.after(10, training.api.change, "pytorchjobs", NAME, lambda job: job["metadata"]["labels"].clear())
        training.after(60, training.end)
        outcome = await training.follow(Options(drain_timeout=0.5))
        assert outcome.succeeded, training.log


@virtual
async def test_end_of_a_job_is_noticed_after_a_restore_of_etcd() -> None:
    async with staged() as training:
        training.start()

        def restore() -> None:
            training.api.history.clear()
            training.api.version = 5
            training.end()
            training.api.cut()

        training.after(5, restore)
        outcome = await training.follow(Options(drain_timeout=0.5))
        assert outcome.succeeded, training.log


@virtual
async def test_pod_that_a_list_lacks_is_read_by_its_name() -> None:
    def lacking(request: Request, true: Response | None) -> Response:
        assert true is not None
        return Response(200, {**true.body, "items": []})

    async with staged() as training, connected(training.url) as api:
        training.start(grace=20)
        training.condition("Succeeded")
        read = await read_training(api, training.ref)
        training.api.replace("GET", r"/pods\?", lacking, math.inf)
        await release(api, training.ref, Mode.DELETE_PODS, read)
        assert not training.holding


@virtual
async def test_close_of_a_shared_client_does_not_end_the_requests_of_others() -> None:
    kube = PodServer()
    kube.pod("p")
    building = asyncio.Event()
    async with clients(kube) as make:

        async def slowly() -> Any:
            building.set()
            await asyncio.sleep(1)
            return await make()

        api = Api(slowly)
        reading = asyncio.ensure_future(api.request("GET", f"{PODS}/p"))
        await until(building.is_set)
        await api.close()
        assert (await reading)["metadata"]["name"] == "p"
        await api.close()


async def test_call_that_ends_its_thread_is_an_error() -> None:
    with pytest.raises(KtrainError, match="SystemExit"):
        await in_thread(sys.exit)


async def _exit() -> None:
    sys.exit(3)


async def _exit_in_a_task() -> None:
    await asyncio.create_task(_exit())


@pytest.mark.parametrize("work", [_exit, _exit_in_a_task])
def test_loop_survives_an_exit(work: Callable[[], Any]) -> None:
    loop = LoopThread()
    with pytest.raises(SystemExit):
        loop.run(work())
    assert loop.run(asyncio.sleep(0, "works")) == "works"
    loop.close()
