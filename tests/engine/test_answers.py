"""What counts as an answer of the API server, over HTTP. The bodies are those of recordings 27, 29, 30 and 30b."""

from __future__ import annotations

import math
from typing import Any

import pytest

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.errors import OperatorMissingError, UnreachableError
from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.engine.api import kueue
from airflow_provider_ktrain.engine.api.client import AbsentError, Api, ApiStatusError, ApiUnavailable, get
from airflow_provider_ktrain.engine.api.job_calls import list_objects, list_pods, served_version
from airflow_provider_ktrain.engine.submit.runtimes import read_served
from tests.apiserver import PODS, PodServer, Response, failure, serving

pytestmark = pytest.mark.virtual_time
JOBS = "/apis/kubeflow.org/v1/namespaces/ns/pytorchjobs"
NOT_FOUND = {"kind": "pytorchjobs", "name": "a", "group": "kubeflow.org"}
PAGE = b"<html><title>Sign in</title></html>"
CAUSE = [{"reason": "UnexpectedServerResponse", "message": "404 page not found"}]
#: Responses to any request that are no answer to it.
LIES = {
    "text 404": Response(404, b"404 page not found\n"),
    "page 403": Response(403, PAGE),
    "page 502": Response(502, PAGE),
    "login page": Response(200, PAGE),
    "empty 200": Response(200, b""),
    "empty object": Response(200, {}),
    "half body": Response(200, b'{"kind": "PyTorchJob", "apiVersion": "kubeflow.org/v1", "meta'),
    "another object": Response(
        200, {"kind": "PyTorchJob", "apiVersion": "kubeflow.org/v1", "metadata": {"name": "b", "uid": "u"}}
    ),
    "object of another kind": Response(
        200,
        {"kind": "MPIJob", "apiVersion": "kubeflow.org/v1", "metadata": {"name": "a", "namespace": "ns", "uid": "u"}},
    ),
    "success of another object": Response(
        200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": {"name": "b", "uid": "u"}}
    ),
    "404 of another object": failure(404, 'pytorchjobs.kubeflow.org "b" not found', **{**NOT_FOUND, "name": "b"}),
    "404 of another kind": failure(404, 'pods "a" not found', name="a", kind="pods"),
    "404 of another resource": failure(404, 'mpijobs.kubeflow.org "a" not found', **{**NOT_FOUND, "kind": "mpijobs"}),
    "404 of another group": failure(404, 'pytorchjobs.x.io "a" not found', **{**NOT_FOUND, "group": "x.io"}),
    "404 of a client library": failure(404, "the server could not find it", **NOT_FOUND, causes=CAUSE),
    "403 of another object": failure(403, "forbidden", **{**NOT_FOUND, "name": "b"}),
}


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
@pytest.mark.parametrize("lie", LIES)
async def test_lie_proves_nothing(lie: str, method: str) -> None:
    kube = PodServer()
    kube.put("pytorchjobs", {"metadata": {"name": "a"}})
    kube.replace(method, "/pytorchjobs/a", LIES[lie], processed=False)
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable):
            await api.request(method, f"{JOBS}/a", body=None if method == "GET" else {})
        assert await api.request(method, f"{JOBS}/a", body=None if method == "GET" else {})


@pytest.mark.parametrize("lie", LIES)
async def test_lie_is_no_empty_list(lie: str) -> None:
    kube = PodServer()
    kube.pod("p")
    kube.replace("GET", "/pods", LIES[lie], processed=False)
    async with serving(kube) as api:
        with pytest.raises((ApiUnavailable, ApiStatusError)):
            await list_pods(api, "ns", "")
        assert len(await list_pods(api, "ns", "")) == 1


@pytest.mark.parametrize(
    ("kind", "meta"),
    [("MPIJobList", {"resourceVersion": "1"}), ("PyTorchJobList", {}), ("PyTorchJobList", {"resourceVersion": ""})],
    ids=["of another kind", "without a version", "of an empty version"],
)
async def test_list_that_is_none_of_these_jobs_is_no_empty_list(kind: str, meta: dict[str, str]) -> None:
    kube = PodServer()
    other = {"kind": kind, "apiVersion": "kubeflow.org/v1", "metadata": meta, "items": []}
    kube.replace("GET", "/pytorchjobs", Response(200, other), processed=False)
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable):
            await list_objects(api, JOBS, keep=dict)


async def test_create_that_is_not_answered_by_its_object_may_have_been_processed() -> None:
    kube = PodServer()
    kube.replace("POST", "/pytorchjobs", LIES["login page"])
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"}}
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable, match="may have been processed"):
            await api.request("POST", JOBS, body=body)
        assert await get(api, f"{JOBS}/a") is not ABSENT


@pytest.mark.parametrize("lie", [lie for lie in LIES if "404" in lie])
async def test_404_of_something_else_does_not_refuse_a_create(lie: str) -> None:
    kube = PodServer()
    kube.replace("POST", "/pytorchjobs", LIES[lie], processed=False)
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"}}
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable, match="may have been processed"):
            await api.request("POST", JOBS, body=body)
        with pytest.raises(ApiStatusError, match='namespaces "other" not found'):
            await api.request("POST", JOBS.replace("/ns/", "/other/"), body=body)


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
async def test_status_that_names_the_object_proves_its_absence(method: str) -> None:
    async with serving(PodServer()) as api:
        with pytest.raises(AbsentError):
            await api.request(method, f"{JOBS}/a", body={})
        assert await get(api, f"{PODS}/p") is ABSENT


@pytest.mark.parametrize("uid", ["another", None])
async def test_deletion_of_another_object_of_that_name_is_no_answer(uid: str | None) -> None:
    kube = PodServer()
    kube.put("pytorchjobs", {"metadata": {"name": "a", "uid": "mine"}})
    details = {**NOT_FOUND, "uid": uid}
    kube.replace("DELETE", "", Response(200, {"kind": "Status", "status": "Success", "details": details}))
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable):
            await api.request("DELETE", f"{JOBS}/a", body={"preconditions": {"uid": "mine"}})


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE", "POST"])
async def test_redirect_is_never_followed(method: str, status: int) -> None:
    kube = PodServer()
    kube.put("pytorchjobs", {"metadata": {"name": "a"}})
    kube.replace(method, "/pytorchjobs/a", Response(status, b"", {"Location": "/login"}), processed=False)
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable):
            await api.request(method, f"{JOBS}/a", body={})
    assert not any("/login" in line for line in kube.requests)


async def stream(api: Api, path: str, **query: str) -> None:
    async with api.stream(path, query=query, pool="logs") as response:
        await response.content.read()


async def test_log_that_is_a_page_is_no_log() -> None:
    kube = PodServer()
    kube.pod("p")
    page = Response(200, PAGE)
    page.content_type = "text/html"
    kube.replace("GET", "/log", page, processed=False)
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable, match="a page of HTML"):
            await stream(api, f"{PODS}/p/log")


async def test_subresource_that_is_not_found_does_not_prove_that_the_object_is_absent() -> None:
    async with serving(PodServer()) as api:
        with pytest.raises(ApiStatusError) as caught:
            await stream(api, f"{PODS}/p/log")
    assert (caught.value.status, isinstance(caught.value, AbsentError)) == (404, False)


@pytest.mark.parametrize("served", [True, False])
async def test_only_a_list_of_the_groups_shows_that_a_kind_is_not_served(served: bool) -> None:
    kube = PodServer()
    kube.replace("GET", "/apis/kubeflow.org", LIES["text 404"], 9, processed=False)
    if not served:
        groups = {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
        kube.replace("GET", "/apis$", Response(200, groups), processed=False)
    expected: Any = (UnreachableError, "404 page not found") if served else (OperatorMissingError, "doesn't serve")
    async with serving(kube) as api:
        with pytest.raises(expected[0], match=expected[1]):
            await served_version(api, PYTORCHJOB)


async def test_page_does_not_show_that_kueue_is_not_served() -> None:
    kube = PodServer()
    kube.replace("GET", "/apis", LIES["text 404"], processed=False)
    async with serving(kube) as api:
        with pytest.raises(ApiUnavailable):
            await kueue.served_version(api)
        assert await kueue.served_version(api) == ""


BUSY = Response(429, b"Too many requests, please try again later.\n", {"Retry-After": "2"})


async def test_text_429_is_an_overloaded_api_server() -> None:
    """kube-apiserver's own, of priority and fairness, is no Status."""
    kube = PodServer()
    kube.replace("GET", "/pytorchjobs/a", BUSY, processed=False)
    async with serving(kube) as api:
        with pytest.raises(ApiStatusError, match="Too many requests") as caught:
            await get(api, f"{JOBS}/a")
    assert (caught.value.transient, caught.value.retry_after) == (True, 2)


async def test_text_errors_of_the_schema_are_no_reason_not_to_submit() -> None:
    kube = PodServer()
    kube.replace("GET", "/openapi/|/customresourcedefinitions/", Response(503, b""), math.inf, processed=False)
    async with serving(kube) as api:
        served = await read_served(api, TRAINJOB, "v1alpha1", {"spec": {}}, "ns", patience=60)
    assert served is not None
    assert not served.supported
