"""The client is rebuilt when it is rejected, unreachable or outdated; errors contain the server's message."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest
from kubernetes_asyncio.client import ApiClient

from airflow_provider_ktrain.core.errors import AccessError
from airflow_provider_ktrain.engine.api.client import REBUILD_AFTER_FAILURES, Api, ApiStatusError, ApiUnavailable
from tests.apiserver import PODS, PodServer, clients, serving

pytestmark = pytest.mark.virtual_time


async def test_request_returns_the_object() -> None:
    kube = PodServer()
    kube.put_pod("a")
    async with serving(kube) as api:
        assert (await api.request("GET", f"{PODS}/a"))["metadata"]["name"] == "a"


async def test_error_status_raises_api_status_error() -> None:
    async with serving(PodServer()) as api:
        with pytest.raises(ApiStatusError) as caught:
            await api.request("GET", f"{PODS}/nosuch")
    assert caught.value.status == 404
    assert not caught.value.transient
    assert caught.value.reason == "NotFound"


async def test_401_rebuilds_the_client_and_repeats_the_request() -> None:
    kube = PodServer()
    kube.put_pod("a")
    async with serving(kube) as api:
        await api.request("GET", f"{PODS}/a")
        kube.token = "t1"
        assert await api.request("GET", f"{PODS}/a")
        assert api.stats["rebuilt"] == 1
        await api.request("GET", f"{PODS}/a")
        assert api.stats["rebuilt"] == 1


async def test_401_fails_if_the_connection_now_leads_to_another_cluster() -> None:
    """In another cluster, informers would find no job and report it as deleted."""
    here, there = PodServer(), PodServer()
    async with clients(here) as first, clients(there) as second:
        make = iter([first, second, second])
        api = Api(lambda: next(make)())
        await api.request("GET", PODS)
        here.token = "t1"
        for _ in range(2):
            with pytest.raises(ApiStatusError, match=r"401 .*http://127.* refused .* means http://127") as refused:
                await api.request("GET", PODS)
            assert refused.value.message.count(await api.cluster()) == 1
        assert api.stats["rebuilt"] == 0
        await api.close()


async def test_401_with_new_credentials_fails() -> None:
    kube = PodServer()
    kube.refuse(401)
    async with serving(kube) as api:
        with pytest.raises(ApiStatusError, match="401"):
            await api.request("GET", f"{PODS}/a")
        assert api.stats["requests"] == 2


async def test_stream_continues_after_its_client_is_replaced() -> None:
    kube = PodServer()
    kube.pod("p")
    log = kube.log("p")
    async with (
        serving(kube) as api,
        api.stream(
            f"{PODS}/p/log", query={"container": "main", "follow": "true", "timestamps": "true"}, pool="logs"
        ) as response,
    ):
        kube.token = "t1"
        await api.request("GET", f"{PODS}/p")
        log.write("2026-11-21T10:00:00.000000000Z", "still here")
        log.end()
        assert b"still here" in await response.content.read()


async def test_missing_response_raises_api_unavailable() -> None:
    kube = PodServer()
    kube.away = True
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable, match=f"GET {PODS}/a"):
            await api.request("GET", f"{PODS}/a")


async def test_cut_stream_raises_api_unavailable() -> None:
    kube = PodServer()
    kube.pod("p")
    kube.log("p").write("2026-11-21T10:00:00.000000000Z", "x" * 1000)
    kube.cut_after = lambda: 500
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable):
            async with api.stream(f"{PODS}/p/log", query={"container": "main"}, pool="logs") as response:
                await response.content.read()


async def test_close_ends_informers_and_streams() -> None:
    ended: list[str] = []

    async def end(name: str) -> None:
        ended.append(name)

    async with serving(PodServer()) as api:
        api.at_close(lambda: end("kept"))
        unsubscribe = api.at_close(lambda: end("taken back"))
        unsubscribe()
        await api.close()
    assert ended[0] == "kept"
    assert "taken back" not in ended


# rebuilt clients


@contextlib.asynccontextmanager
async def moving(
    kube: PodServer, **options: Any
) -> AsyncIterator[tuple[Api, Callable[[], Awaitable[None]], list[str]]]:
    """An Api whose server can be moved to another port, and its notices."""
    notices: list[str] = []
    async with contextlib.AsyncExitStack() as first, clients(kube) as second:
        make = [await first.enter_async_context(clients(kube))]
        api = Api(lambda: make[-1](), **options)
        api.on_notice(notices.append)

        async def move() -> None:
            await first.aclose()
            make.append(second)

        yield api, move, notices
        await api.close()


async def test_client_is_rebuilt_after_failed_connection_attempts() -> None:
    kube = PodServer()
    path, uid = f"{PODS}/a", kube.put_pod("a")["metadata"]["uid"]
    async with moving(kube) as (api, move, notices):
        api.add_known_object(path, uid)
        before = await api.cluster()
        await move()
        for _ in range(REBUILD_AFTER_FAILURES):
            with pytest.raises(ApiUnavailable):
                await api.request("GET", path)
        assert await api.request("GET", path)
        after = await api.cluster()
    (notice,) = notices
    assert notice == (
        f"The Kubernetes client was rebuilt: 3 connection attempts in a row failed; {before} is now {after}"
    )


async def test_client_is_rebuilt_when_a_file_changes() -> None:
    kube, changed = PodServer(), asyncio.Event()
    path, uid = f"{PODS}/a", kube.put_pod("a")["metadata"]["uid"]

    async def look() -> bool:
        return changed.is_set()

    async with moving(kube, changed=look) as (api, move, notices):
        api.add_known_object(path, uid)
        await api.cluster()
        await move()
        changed.set()
        assert await api.request("GET", path)
    assert "rebuilt: the files of the connection changed; http://127" in notices[0]


async def test_client_of_another_cluster_is_not_used() -> None:
    """A changed file leads to a cluster without the known job; the current client stays in use."""
    here, there = PodServer(), PodServer()
    uid = here.put_pod("a")["metadata"]["uid"]
    there.put_pod("other")
    there.put_pod("a")
    notices: list[str] = []

    async def changed() -> bool:
        return True

    async with clients(here) as first, clients(there) as second:
        make = iter([first, second])
        api = Api(lambda: next(make)(), changed)
        api.on_notice(notices.append)
        api.add_known_object(f"{PODS}/a", uid)
        for _ in range(2):
            assert (await api.request("GET", f"{PODS}/a"))["metadata"]["uid"] == uid
        await api.close()
    assert there.verbs["get"] == 1
    (notice,) = notices
    assert "could not be rebuilt (the files of the connection changed)" in notice
    assert "could not be recognized as the same cluster. Nothing was deleted" in notice


async def test_unknown_cluster_at_a_new_address_is_an_error() -> None:
    """Otherwise, a task would wait forever for a job in a cluster that is gone."""
    kube = PodServer()
    kube.put_pod("a")
    async with moving(kube) as (api, move, _):
        api.add_known_object(f"{PODS}/a", "of-another-job")
        await api.cluster()
        await move()
        for _ in range(REBUILD_AFTER_FAILURES):
            with pytest.raises(ApiUnavailable):
                await api.request("GET", f"{PODS}/a")
        with pytest.raises(ApiStatusError, match="could not be recognized as the same cluster"):
            await api.request("GET", f"{PODS}/a")


async def test_slow_client_build_counts_against_the_request_timeout() -> None:
    kube, built, release = PodServer(), Counter[str](), asyncio.Event()
    kube.put_pod("a")
    async with clients(kube) as make_client:

        async def make() -> ApiClient:
            built["clients"] += 1
            await release.wait()
            return await make_client()

        api = Api(make)
        for _ in range(2):
            with pytest.raises(ApiUnavailable, match=r"no response within 0.1 s"):
                await api.request("GET", f"{PODS}/a", timeout=0.1)
        release.set()
        assert await api.request("GET", f"{PODS}/a")
        assert built["clients"] == 1
        await api.close()


async def test_failed_client_build_is_not_repeated_for_each_request() -> None:
    """An exec plugin may be slow or expensive."""
    tried = Counter[str]()

    async def make() -> ApiClient:
        tried["clients"] += 1
        raise AccessError("no role today")

    api = Api(make)
    for _ in range(5):
        with pytest.raises(AccessError, match="no role today"):
            await api.request("GET", PODS)
    assert tried["clients"] == 1


async def test_retired_client_is_closed() -> None:
    kube = PodServer()
    kube.put_pod("a")
    made: list[weakref.ref[ApiClient]] = []
    sessions: list[Any] = []
    async with clients(kube) as make_client:

        async def make() -> ApiClient:
            client = ApiClient((await make_client()).configuration)
            made.append(weakref.ref(client))
            sessions.append(client.rest_client.pool_manager)
            return client

        api = Api(make)
        for number in range(3):
            kube.token = f"t{number}"
            await api.request("GET", f"{PODS}/a")
        gc.collect()
        assert [client() is not None for client in made] == [False, False, True]
        assert [session.closed for session in sessions] == [True, True, False]
        await api.close()


async def test_notice_runs_in_the_context_of_its_subscriber() -> None:
    """In a triggerer, the context determines which task's log gets a line."""
    task: ContextVar[str] = ContextVar("task", default="none")
    kube = PodServer()
    kube.put_pod("a")
    notices: list[tuple[str, str]] = []

    async def changed() -> bool:
        return True

    async with clients(kube) as make_client:
        api = Api(make_client, changed)
        for name in ("first", "second", "left"):
            task.set(name)
            stop = api.on_notice(lambda text: notices.append((task.get(), text)))
        stop()
        await api.cluster()
        task.set("other")
        await api.request("GET", f"{PODS}/a")
        await api.close()
    text = "The Kubernetes client was rebuilt: the files of the connection changed"
    assert notices == [("first", text), ("second", text)]


async def test_expired_token_gives_no_notice() -> None:
    kube = PodServer()
    kube.put_pod("a")
    notices: list[str] = []
    async with serving(kube) as api:
        api.on_notice(notices.append)
        await api.cluster()
        kube.token = "t1"
        await api.request("GET", f"{PODS}/a")
        assert api.stats["rebuilt"] == 1
    assert not notices
