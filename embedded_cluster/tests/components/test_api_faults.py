"""Each fault switch has the given effect, for the given time, and affects nothing else."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from typing import Any

import pytest

from components.raw_client import Client, eventually
from ktrain_embedded.cluster import EmbeddedCluster

MAPS = "/api/v1/namespaces/default/configmaps"
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture(scope="module")
def faulty() -> Iterator[EmbeddedCluster]:
    """A cluster of its own: what goes wrong here must not disturb others."""
    with EmbeddedCluster(images={"busybox": None}, nodes=2) as cluster:
        yield cluster


@pytest.fixture
def api(faulty: EmbeddedCluster) -> Iterator[Client]:
    yield Client(faulty)
    faulty.admin("clear")


def pod(name: str, script: str, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "busybox", "command": ["sh", "-c", script]}
    return {
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], **spec},
    }


def phase(api: Client, name: str) -> str:
    return str(api("GET", f"{PODS}/{name}").json.get("status", {}).get("phase"))


def test_error_status_lasts_for_the_given_seconds(faulty: EmbeddedCluster, api: Client) -> None:
    faulty.admin("status", seconds=4, status=500)
    assert api("GET", MAPS).status == 500
    eventually(lambda: api("GET", MAPS).status == 200)


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_error_status_is_that_of_kubernetes(faulty: EmbeddedCluster, api: Client, status: int) -> None:
    faulty.admin("status", count=1, status=status)
    answer = api("GET", MAPS)
    assert (answer.status, answer.body["code"]) == (status, status)
    assert bool(answer.header("Retry-After")) == (status in (429, 503))
    assert api("GET", MAPS).status == 200


def test_error_status_is_limited_by_verb_path_and_count(faulty: EmbeddedCluster, api: Client) -> None:
    faulty.admin("status", status=500, verb="list,delete", path="configmaps", count=2)
    assert api("GET", PODS).status == 200
    assert api("GET", f"{MAPS}/kube-root-ca.crt").status == 200
    assert [api("GET", MAPS).status for _ in range(3)] == [500, 500, 200]


def test_pods_continue_while_connections_are_refused(faulty: EmbeddedCluster, api: Client) -> None:
    api("POST", PODS, pod("steady", "sleep 600"))
    eventually(lambda: phase(api, "steady") == "Running")
    before = api("GET", f"{PODS}/steady").json
    faulty.admin("refuse", seconds=5)

    def refused() -> bool:
        try:
            api("GET", "/healthz")
        except ConnectionRefusedError:
            return True
        except ConnectionError:
            return False
        return False

    eventually(refused)

    def back() -> bool:
        try:
            return api("GET", "/healthz").status == 200
        except ConnectionError:
            return False

    eventually(back)
    after = api("GET", f"{PODS}/steady").json
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]


def test_dropped_connections_end_streams(faulty: EmbeddedCluster, api: Client) -> None:
    with api.open("GET", f"{MAPS}?watch=true&timeoutSeconds=60") as watch:
        watch.readline()
        faulty.admin("drop", seconds=0.5)
        with pytest.raises((http.client.IncompleteRead, OSError)):  # it does not end, it breaks off
            watch.read()

    def back() -> bool:
        try:
            return api("GET", MAPS).status == 200
        except (ConnectionError, OSError):
            return False

    eventually(back)


def test_log_is_cut_after_the_given_bytes(faulty: EmbeddedCluster, api: Client) -> None:
    api("POST", PODS, pod("talk", "for i in 1 2 3 4 5 6 7 8 9; do echo line $i; done"))
    eventually(lambda: phase(api, "talk") == "Succeeded")
    assert len(api("GET", f"{PODS}/talk/log").data) == 63
    faulty.admin("cut_logs", bytes=10, path="talk", count=1)
    read = b""
    cut = contextlib.suppress(http.client.IncompleteRead, OSError)
    with api.open("GET", f"{PODS}/talk/log") as log, cut:
        while data := log.read1(100):
            read += data
    assert read == b"line 1\nlin"
    assert len(api("GET", f"{PODS}/talk/log").data) == 63


def test_expired_versions_get_410(faulty: EmbeddedCluster, api: Client) -> None:
    listed = api("GET", f"{MAPS}?limit=1").json["metadata"]
    version = listed["resourceVersion"]
    api("POST", MAPS, {"metadata": {"name": "newer"}})
    faulty.admin("expire")
    (event,) = api.lines(f"{MAPS}?watch=true&resourceVersion={version}&timeoutSeconds=5")
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert api("GET", f"{MAPS}?resourceVersion={version}&resourceVersionMatch=Exact").status == 410
    fresh = api("GET", MAPS).json["metadata"]["resourceVersion"]
    assert list(api.lines(f"{MAPS}?watch=true&resourceVersion={fresh}&timeoutSeconds=1")) == []


def test_watch_events_are_delayed(faulty: EmbeddedCluster, api: Client) -> None:
    version = api("GET", MAPS).json["metadata"]["resourceVersion"]
    faulty.admin("delay_watch", delay=60, path="configmaps", seconds=1)
    api("POST", MAPS, {"metadata": {"name": "late"}})
    path = f"{MAPS}?watch=true&resourceVersion={version}&timeoutSeconds=30"
    with api.open("GET", path) as watch:
        api("POST", MAPS, {"metadata": {"name": "later"}})
        # what history held comes at once, what happens meanwhile when the fault has ended
        assert b"late" in watch.readline()
        assert b"later" in watch.readline()


def test_evicted_pod_fails(faulty: EmbeddedCluster, api: Client) -> None:
    api("POST", PODS, pod("heavy", "sleep 600"))
    eventually(lambda: phase(api, "heavy") == "Running")
    faulty.admin("evict", pod="heavy", message="The node was low on resource: memory.")
    status = eventually(lambda: s if (s := api("GET", f"{PODS}/heavy").json["status"])["phase"] == "Failed" else None)
    assert (status["reason"], status["message"]) == ("Evicted", "The node was low on resource: memory.")


def test_lost_node_is_unknown_until_it_returns(faulty: EmbeddedCluster, api: Client) -> None:
    def ready() -> str:
        node = api("GET", "/api/v1/nodes/ktrain-node-1").json
        return str(next(c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready"))

    faulty.admin("lose", node="ktrain-node-1")
    assert ready() == "Unknown"
    faulty.admin("recover", node="ktrain-node-1")
    assert ready() == "True"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"fault": "nonsense"}, "fault"),
        ({}, "fault"),
        ({"fault": "status", "status": 200}, "status"),
        ({"fault": "status", "status": 500, "seconds": -1}, "seconds"),
        ({"fault": "status", "status": 500, "count": 0}, "count"),
        ({"fault": "status", "status": 500, "path": "("}, "path"),
        ({"fault": "refuse"}, "seconds"),
        ({"fault": "cut_logs", "bytes": "many"}, "bytes"),
        ({"fault": "lose", "node": "nosuch"}, "node"),
        ({"fault": "evict", "pod": "nosuch"}, "pod"),
    ],
)
def test_invalid_faults_are_refused(api: Client, fault: dict[str, Any], named: str) -> None:
    answer = api("POST", "/ktrain/faults", fault)
    assert answer.status in (400, 404)
    assert named in answer.body["message"]
    assert api("GET", MAPS).status == 200
