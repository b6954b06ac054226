"""The scripted API server answers as recordings of Kubernetes 1.36 show (28, 28b, 29, 29b, 30b, 27)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.apiserver import NAMESPACE, PODS, ApiServer, Object, Request, Response
from tests.apiserver.watches import Watch

JOBS = f"/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs"
JOB = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}
POD_SPEC = {"containers": [{"name": "main"}], "nodeName": "node-1"}


def ask(api: ApiServer, method: str, path: str, body: Any = None, **query: str) -> Response:
    """The answer to one request."""
    answer = api.answer(Request(method, path, query, body))
    assert isinstance(answer, Response)
    return answer


def jobs(*names: str, **meta: Any) -> ApiServer:
    api = ApiServer()
    for name in names:
        api.put("pytorchjobs", {"metadata": {"name": name, **meta}, "spec": {}})
    return api


def with_pod(**status: Any) -> ApiServer:
    api = ApiServer()
    api.put("pods", {"metadata": {"name": "p"}, "spec": dict(POD_SPEC), "status": {"phase": "Running", **status}})
    return api


OF_JOB_A = {"name": "a", "group": "kubeflow.org", "kind": "pytorchjobs"}
MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason", "message", "details"),
    [
        ("GET", f"{JOBS}/x", None, 404, "NotFound", 'pytorchjobs.kubeflow.org "x" not found',
         {**OF_JOB_A, "name": "x"}),
        ("GET", f"{PODS}/x", None, 404, "NotFound", 'pods "x" not found', {"name": "x", "kind": "pods"}),
        ("POST", JOBS, {"metadata": {"name": "a"}}, 409, "AlreadyExists",
         'pytorchjobs.kubeflow.org "a" already exists', OF_JOB_A),
        ("PATCH", f"{JOBS}/a", {"metadata": {"resourceVersion": "5"}}, 409, "Conflict",
         f'Operation cannot be fulfilled on pytorchjobs.kubeflow.org "a": {MODIFIED}', OF_JOB_A),
        ("PATCH", f"{JOBS}/a", {"metadata": {"uid": "x"}}, 422, "Invalid",
         'PyTorchJob.kubeflow.org "a" is invalid: metadata.uid: Invalid value: x: field is immutable',
         {**OF_JOB_A, "kind": "PyTorchJob"}),
        ("DELETE", f"{JOBS}/a", {"preconditions": {"resourceVersion": "5"}}, 409, "Conflict",
         'Operation cannot be fulfilled on PyTorchJob.kubeflow.org "a": the ResourceVersion in the precondition (5) '
         "does not match the ResourceVersion in record (101)", {**OF_JOB_A, "kind": "PyTorchJob"}),
        ("POST", "/apis/kubeflow.org/v1/namespaces/other/pytorchjobs", {"metadata": {"name": "b"}}, 404, "NotFound",
         'namespaces "other" not found', {"name": "other", "kind": "namespaces"}),
    ],
)  # fmt: skip
def test_refused_request_gets_a_status_with_details(
    method: str, path: str, body: Object | None, status: int, reason: str, message: str, details: Object
) -> None:
    answer = ask(jobs("a"), method, path, body)
    assert answer.status == answer.body["code"] == status
    assert answer.body == {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "details": details, "code": status,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ({"fieldSelector": "spec.image=x"}, 400, "field label not supported: spec.image"),
        ({"labelSelector": "=="}, 400, "found '==', expected: !, identifier, or 'end of string'"),
        ({"continue": "nonsense"}, 400, "invalid continue token: continue key is not valid"),
        ({"watch": "true", "resourceVersion": "abc"}, 500, 'resourceVersion: Invalid value: "abc": '),
    ],
)
def test_invalid_query_is_refused(query: dict[str, str], status: int, message: str) -> None:
    answer = ask(with_pod(), "GET", PODS, **query)
    assert (answer.status, answer.body["message"].startswith(message)) == (status, True), answer.body


def test_discovery_shows_what_is_served() -> None:
    api = ApiServer()
    groups = {group["name"] for group in ask(api, "GET", "/apis").body["groups"]}
    assert {"kubeflow.org", "trainer.kubeflow.org", "batch"} <= groups
    assert ask(api, "GET", "/apis/kubeflow.org").body["preferredVersion"] == {
        "groupVersion": "kubeflow.org/v1", "version": "v1",
    }  # fmt: skip
    names = [one["name"] for one in ask(api, "GET", "/apis/kubeflow.org/v2beta1").body["resources"]]
    assert names == ["mpijobs", "mpijobs/status"]
    for path in ("/apis/kueue.x-k8s.io", f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads", "/nosuch"):
        assert (ask(api, "GET", path).status, ask(api, "GET", path).data) == (404, b"404 page not found\n")
    api.put("workloads", {"metadata": {"name": "w"}})
    assert ask(api, "GET", "/apis/kueue.x-k8s.io").body["preferredVersion"]["version"] == "v1beta2"


@pytest.mark.parametrize("propagation", ["Background", "Foreground", "Orphan"])
def test_deleted_job_takes_its_pods_along(propagation: str) -> None:
    api = jobs("a")
    uid = api.objects["pytorchjobs"]["a"]["metadata"]["uid"]
    api.put("pods", {"metadata": {"name": "p", "ownerReferences": [{"uid": uid}]}, "spec": {}, "status": {}})
    answer = ask(api, "DELETE", f"{JOBS}/a", {"propagationPolicy": propagation}).body
    if propagation == "Foreground":
        assert answer["metadata"]["deletionTimestamp"]
        assert answer["metadata"]["finalizers"] == ["foregroundDeletion"]
    else:
        assert answer == {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
            "details": {**OF_JOB_A, "uid": uid},
        }  # fmt: skip
    assert not api.objects["pytorchjobs"]
    assert bool(api.pods) is (propagation == "Orphan")


def test_object_with_finalizers_is_deleted_with_the_last_one() -> None:
    api = jobs("a", finalizers=["example.com/hold"])
    first = ask(api, "DELETE", f"{JOBS}/a").body
    assert first["metadata"]["deletionTimestamp"]
    assert ask(api, "DELETE", f"{JOBS}/a").body == first
    assert ask(api, "PATCH", f"{JOBS}/a", {"metadata": {"finalizers": None}}).status == 200
    assert not api.objects["pytorchjobs"]


@pytest.mark.parametrize(("grace", "stays"), [(30, True), (0, False)])
def test_deleted_pod_stays_for_its_grace_period(grace: int, stays: bool) -> None:
    api = with_pod()
    shown = ask(api, "DELETE", f"{PODS}/p", {"gracePeriodSeconds": grace}).body
    assert (shown["kind"], shown["metadata"]["deletionGracePeriodSeconds"]) == ("Pod", grace)
    assert bool(api.pods) is stays


def test_patch_without_a_change_keeps_the_version_and_status_is_a_resource_of_its_own() -> None:
    api = jobs("a")
    version = ask(api, "GET", f"{JOBS}/a").body["metadata"]["resourceVersion"]
    assert ask(api, "PATCH", f"{JOBS}/a", {"spec": {}}).body["metadata"]["resourceVersion"] == version
    assert "status" not in ask(api, "PATCH", f"{JOBS}/a", {"status": {"x": 1}, "spec": {"y": 1}}).body
    patched = ask(api, "PATCH", f"{JOBS}/a/status", {"status": {"x": 1}, "spec": {"y": 2}}).body
    assert (patched["status"], patched["spec"]) == ({"x": 1}, {"y": 1})


def test_pages_show_the_state_at_the_first_one() -> None:
    api = jobs("a", "b", "c")
    first = ask(api, "GET", JOBS, limit="2").body
    assert (first["kind"], first["metadata"]["remainingItemCount"]) == ("PyTorchJobList", 1)
    api.remove("pytorchjobs", "c")
    second = ask(api, "GET", JOBS, limit="2", **{"continue": first["metadata"]["continue"]}).body
    assert [one["metadata"]["name"] for one in (*first["items"], *second["items"])] == ["a", "b", "c"]
    assert second["metadata"] == {"resourceVersion": first["metadata"]["resourceVersion"]}
    api.expire()
    expired = ask(api, "GET", JOBS, limit="2", **{"continue": first["metadata"]["continue"]})
    assert (expired.status, expired.body["reason"]) == (410, "Expired")


def events(api: ApiServer, **query: str) -> list[tuple[str, str]]:
    """The events that a watch of the jobs gets now."""
    watch = api.answer(Request("GET", JOBS, {"watch": "true", **query}))
    assert isinstance(watch, Watch)
    return [(event["type"], event["object"]["metadata"].get("name", "")) for event in watch.take()]


def test_watch_shows_what_its_selector_matches() -> None:
    api = jobs("a")
    version = str(api.version)
    for labels in ({"team": "x"}, {"team": "x", "more": "1"}, {"team": "y"}):
        api.put("pytorchjobs", {"metadata": {"name": "a", "labels": labels}})
    api.remove("pytorchjobs", "a")
    seen = events(api, resourceVersion=version, labelSelector="team=x")
    assert [event for event, _ in seen] == ["ADDED", "MODIFIED", "DELETED"]
    assert [event for event, _ in events(api, resourceVersion=version)] == ["MODIFIED"] * 3 + ["DELETED"]
    assert events(api) == [], "a watch without a version begins with the present state"


def test_watch_gets_bookmarks_and_410() -> None:
    api = jobs("a")
    version = str(api.version)
    api.bookmark()
    assert events(api, resourceVersion=version) == []
    assert events(api, resourceVersion=version, allowWatchBookmarks="true") == [("BOOKMARK", "")]
    api.expire()
    assert events(api, resourceVersion=version) == [("ERROR", "")]


@pytest.mark.parametrize(
    ("selector", "matched"),
    [
        ("team", "ab"), ("!team", "c"), ("team=x", "a"), ("team==x", "a"), ("team!=x", "bc"), ("team in (x, y)", "ab"),
        ("team notin (x),team", "b"), ("", "abc"),
    ],
)  # fmt: skip
def test_label_selectors(selector: str, matched: str) -> None:
    api = ApiServer()
    for name, labels in (("a", {"team": "x"}), ("b", {"team": "y"}), ("c", {})):
        api.put("pytorchjobs", {"metadata": {"name": name, "labels": labels}})
    found = ask(api, "GET", JOBS, labelSelector=selector).body["items"]
    assert "".join(one["metadata"]["name"] for one in found) == matched


WAITS = {"name": "main", "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull"}}}


@pytest.mark.parametrize(
    ("status", "query", "answered", "message"),
    [
        ({}, {"container": "nosuch"}, 400, "container nosuch is not valid for pod p"),
        ({"containerStatuses": [WAITS]}, {}, 400, 'container "main" in pod "p" is waiting to start: ErrImagePull'),
        ({"containerStatuses": [WAITS]}, {"previous": "true"}, 400,
         'previous terminated container "main" in pod "p" not found'),
    ],
)  # fmt: skip
def test_log_that_does_not_exist_is_refused(status: Object, query: Any, answered: int, message: str) -> None:
    answer = ask(with_pod(**status), "GET", f"{PODS}/p/log", **query)
    assert (answer.status, answer.body["message"]) == (answered, message)


def test_pod_without_a_node_has_no_log() -> None:
    api = ApiServer()
    api.put("pods", {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main"}]}, "status": {}})
    assert (ask(api, "GET", f"{PODS}/p/log").status, ask(api, "GET", f"{PODS}/p/log").data) == (204, b"")


def test_requests_are_named_for_tests() -> None:
    request = Request("GET", PODS, {"labelSelector": "a=b", "watch": "true"})
    assert (request.line, request.verb) == (f"GET {PODS}?labelSelector=a%3Db&watch=true", "watch")
    assert json.loads(json.dumps(request.where.resource)) == "pods"
