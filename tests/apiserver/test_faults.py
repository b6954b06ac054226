"""What a test does to requests of the scripted API server, over HTTP and in virtual time."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable
from tests.apiserver import PODS, InThread, PodServer, Request, Response, connected, log_time, served, serving
from tests.until import until

pytestmark = pytest.mark.virtual_time


async def name_of(api: Api, pod: str = "p") -> Any:
    return (await api.request("GET", f"{PODS}/{pod}"))["metadata"]["name"]


async def watch(api: Api) -> None:
    """Watch the pods until the server ends it."""
    async with api.stream(PODS, query={"watch": "true"}) as response:
        await response.content.read()


@pytest.fixture
def kube() -> PodServer:
    kube = PodServer()
    kube.pod("p")
    return kube


async def test_failure_is_for_so_many_matching_requests(kube: PodServer) -> None:
    kube.fail("GET", "/pods/p", 503, 2)
    async with serving(kube) as api:
        for _ in range(2):
            with pytest.raises(ApiStatusError, match="503 ServiceUnavailable"):
                await name_of(api)
        assert await name_of(api) == "p"
    assert (kube.refused, kube.verbs["get"]) == (2, 1)


@pytest.mark.parametrize("processed", [True, False])
async def test_answer_is_replaced_by_any_bytes(kube: PodServer, processed: bool) -> None:
    kube.replace("DELETE", "/pods/p", Response(200, b"<html>", {"X-Proxy": "1"}), processed=processed)
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable, match="<html>"):
            await api.request("DELETE", f"{PODS}/p")
    assert ("p" in kube.pods) is not processed


async def test_answer_is_replaced_by_a_lie_about_the_truth(kube: PodServer) -> None:
    def lie(request: Request, true: Response | None) -> Response:
        assert true is not None
        return Response(true.status, {**true.body, "status": {"phase": "Failed"}})

    kube.replace("GET", "/pods/p", lie)
    async with serving(kube) as api:
        phases = [(await api.request("GET", f"{PODS}/p"))["status"]["phase"] for _ in range(2)]
    assert phases == ["Failed", "Running"]


async def test_slow_answer_takes_its_time(kube: PodServer) -> None:
    kube.slow("after GET", 3600)
    async with serving(kube) as api:
        began = timing.now()
        with pytest.raises(ApiUnavailable, match="no response within 30 s"):
            await name_of(api)
        assert timing.now() - began == pytest.approx(30)
        kube.slow("after GET", 20)
        assert await name_of(api) == "p"
        assert timing.now() - began == pytest.approx(50)


async def test_answers_arrive_in_the_order_of_the_test(kube: PodServer) -> None:
    kube.pod("q")
    kube.hold("after GET")
    arrived: list[str] = []

    async def read(name: str) -> None:
        arrived.append(await name_of(api, name))

    async with serving(kube) as api:
        reading = asyncio.gather(read("p"), read("q"))
        await until(lambda: len(kube.gates) == 2)
        for name in ("q", "p"):
            next(gate for gate in kube.gates if gate.request.where.name == name).open()
            await until(lambda: name in arrived)  # noqa: B023  # is awaited here
        await reading
    assert arrived == ["q", "p"]


async def test_lost_answer_leaves_what_the_request_has_done(kube: PodServer) -> None:
    kube.hold("after DELETE")
    async with serving(kube) as api:
        deleting = asyncio.ensure_future(api.request("DELETE", f"{PODS}/p"))
        await until(lambda: kube.gates)
        kube.gates[0].lose()
        with pytest.raises(ApiUnavailable):
            await deleting
    assert not kube.pods


async def test_one_of_several_clients_is_cut_off(kube: PodServer) -> None:
    async with served(kube) as url, connected(url, "worker") as worker, connected(url, "trigger") as trigger:
        kube.cut_off.add("worker")
        assert await name_of(trigger) == "p"
        with pytest.raises(ApiUnavailable):
            await name_of(worker)
    assert kube.rejected[f"{PODS}/p"]


async def test_outage_breaks_streams_and_waiting_requests(kube: PodServer) -> None:
    kube.pause("before GET .*/pods/p$")
    async with serving(kube) as api:
        reading = asyncio.ensure_future(name_of(api))
        watching = asyncio.ensure_future(watch(api))
        await kube.paused.wait()
        await until(lambda: kube.open)
        kube.away = True
        with pytest.raises(ApiUnavailable):
            await watching
        with pytest.raises(ApiUnavailable):
            await reading
        with pytest.raises(ApiUnavailable):
            await name_of(api)


async def test_frozen_watch_shows_later_what_it_has_missed(kube: PodServer) -> None:
    kube.freeze("pods")
    query = {"watch": "true", "resourceVersion": str(kube.version), "timeoutSeconds": "600"}
    async with serving(kube) as api, api.stream(PODS, query=query) as response:
        kube.remove("pods", "p")
        asyncio.get_running_loop().call_later(300, kube.thaw)
        assert b"DELETED" in await response.content.readany()
        assert timing.now() == 1300


@pytest.mark.parametrize("clean", [False, True])
async def test_stream_is_cut_after_a_number_of_bytes(kube: PodServer, clean: bool) -> None:
    kube.log("p").write(log_time(0), "x" * 100)
    kube.clean_cuts, kube.cut_after = clean, lambda: 50
    async with serving(kube) as api:
        received = b""
        try:
            async with api.stream(f"{PODS}/p/log", pool="logs") as response:
                async for piece in response.content.iter_any():
                    received += piece
            ended = True
        except ApiUnavailable:
            ended = False
    assert (received, ended, kube.cuts) == (b"x" * 50, clean, 1)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "a\nb1 b2\nc"),
        ({"tailLines": "2"}, "b2\nc"),
        ({"limitBytes": "3"}, "a\nb"),
        ({"sinceTime": "2026-11-21T10:00:02Z"}, "c"),
        ({"tailLines": "1", "timestamps": "true"}, "2026-11-21T10:00:02.500000000Z c"),
        ({"previous": "true"}, "before\n"),
    ],
)
async def test_log_is_read_as_the_query_says(kube: PodServer, query: dict[str, str], expected: str) -> None:
    kube.pod("p", restart=1)
    kube.log("p").write(log_time(0), "before")
    log = kube.log("p", restart=1)
    for second, text, partial in ((0, "a", False), (1, "b1 ", True), (1, "b2", False), (2.5, "c", True)):
        log.write(log_time(second), text, partial=partial)
    log.end()
    async with serving(kube) as api, api.stream(f"{PODS}/p/log", query=query, pool="logs") as response:
        assert (await response.content.read()).decode() == expected


@pytest.mark.parametrize("token", ["right", "wrong"])
async def test_token_is_required(kube: PodServer, token: str) -> None:
    kube.token = "right"
    async with served(kube) as url, connected(url, token) as api:
        if token == "right":
            assert await name_of(api) == "p"
        else:
            with pytest.raises(ApiStatusError, match="401"):
                await name_of(api)
    assert math.isclose(kube.verbs["get"], token == "right")


def test_server_in_a_thread_answers_a_blocked_test() -> None:
    with InThread(PodServer) as thread:
        thread.call(lambda: thread.api.put("pods", {"metadata": {"name": "p"}}))

        async def read() -> str:
            async with connected(thread.url) as api:
                return str(await name_of(api))

        assert asyncio.run(read()) == "p"
