"""One client, rebuilt when its credentials are refused; errors that say what the server said."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable

from .fakekube import PODS, FakeKube, clients, serving


async def test_request_gives_the_object() -> None:
    kube = FakeKube()
    kube.put("a")
    async with serving(kube) as api:
        assert (await api.request("GET", f"{PODS}/a"))["metadata"]["name"] == "a"


async def test_a_status_becomes_an_error() -> None:
    async with serving(FakeKube()) as api:
        with pytest.raises(ApiStatusError) as caught:
            await api.request("GET", f"{PODS}/nosuch")
    assert caught.value.not_found
    assert not caught.value.conflict
    assert not caught.value.transient
    assert caught.value.reason == "NotFound"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (503, b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (500, b'"text"', '"text"'),
        (409, b'{"reason": "AlreadyExists", "message": "it is there", "details": null}', "it is there"),
    ],
)
def test_errors_of_whatever_answers(status: int, body: bytes, message: str) -> None:
    error = ApiStatusError.of(status, body, "7")
    assert (error.status, error.message, error.retry_after) == (status, message, 7.0)
    assert error.transient == (status >= 500)


async def test_401_rebuilds_the_client_and_repeats_the_request() -> None:
    kube = FakeKube()
    kube.put("a")
    async with serving(kube) as api:
        await api.request("GET", f"{PODS}/a")
        kube.token = "t1"
        assert await api.request("GET", f"{PODS}/a")
        assert api.stats["rebuilt"] == 1
        await api.request("GET", f"{PODS}/a")
        assert api.stats["rebuilt"] == 1


async def test_401_after_which_the_connection_means_another_cluster_is_an_error() -> None:
    """What lives on this Api would find nothing there, and call it deleted."""
    here, there = FakeKube(), FakeKube()
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


async def test_401_with_new_credentials_is_an_error() -> None:
    kube = FakeKube()
    kube.refusal = (401, "Unauthorized")
    async with serving(kube) as api:
        with pytest.raises(ApiStatusError, match="401"):
            await api.request("GET", f"{PODS}/a")
        assert api.stats["requests"] == 2


async def test_a_stream_outlives_the_client_that_it_came_with() -> None:
    kube = FakeKube()
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


async def test_no_answer_is_unavailable() -> None:
    kube = FakeKube()
    kube.away = True
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable, match=f"GET {PODS}/a"):
            await api.request("GET", f"{PODS}/a")


async def test_a_cut_stream_is_unavailable() -> None:
    kube = FakeKube()
    kube.pod("p")
    kube.log("p").write("2026-11-21T10:00:00.000000000Z", "x" * 1000)
    kube.cut_after = lambda: 500
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable):
            async with api.stream(f"{PODS}/p/log", query={"container": "main"}, pool="logs") as response:
                await response.content.read()


async def test_closing_ends_what_lives_on_it() -> None:
    ended: list[str] = []

    async def end(name: str) -> None:
        ended.append(name)

    async with serving(FakeKube()) as api:
        api.at_close(lambda: end("kept"))
        take_back = api.at_close(lambda: end("taken back"))
        take_back()
        await api.close()
    assert ended[0] == "kept"
    assert "taken back" not in ended
