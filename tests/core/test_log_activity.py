"""Whose logs are read before a limit of silence or progress acts, in which order, and what a response contains."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.logs.activity import containers_to_read, timed_lines
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from tests.factories import replica_pod

T0 = epoch_seconds("2026-11-21T10:00:00Z") or 0.0
RUNNING = {"running": {"startedAt": "2026-11-21T09:00:00Z"}}
ENDED = {"terminated": {"startedAt": "2026-11-21T09:00:00Z", "finishedAt": "2026-11-21T10:00:00Z", "exitCode": 0}}


def pod(role: str, index: int, state: dict[str, Any] = RUNNING, **status: Any) -> dict[str, Any]:
    spec = {"containers": [{"name": "sidecar"}, {"name": "pytorch"}], "initContainers": [{"name": "fetch"}]}
    states = [{"name": "sidecar", "state": RUNNING}, {"name": "pytorch", "state": state}]
    return replica_pod(role, index, spec=spec, **{"phase": "Running", "containerStatuses": states, **status})


def selected(pods: list[dict[str, Any]], since: float = T0) -> list[str]:
    return [container.replica for container in containers_to_read(PYTORCHJOB, {}, pods, since).containers]


def test_primary_is_read_first_and_then_the_highest_index() -> None:
    pods = [pod("Worker", 0), pod("Master", 0), pod("Worker", 1), pod("Worker", 2)]
    assert selected(pods) == ["Master 0", "Worker 2", "Worker 1", "Worker 0"]


def test_sidecars_are_not_read() -> None:
    (container,) = containers_to_read(PYTORCHJOB, {}, [pod("Master", 0)], T0).containers
    assert (container.name, container.ended, container.started) == ("pytorch", False, T0 - 3600)


def test_init_container_that_runs_is_read() -> None:
    waiting = {"waiting": {"reason": "PodInitializing"}}
    starting = pod("Worker", 1, waiting, initContainerStatuses=[{"name": "fetch", "state": RUNNING}])
    (container,) = containers_to_read(PYTORCHJOB, {}, [starting], T0).containers
    assert container.name == "fetch"


@pytest.mark.parametrize(("since", "replicas"), [(T0 - 1, ["Worker 0"]), (T0 + 0.5, ["Worker 0"]), (T0 + 1, [])])
def test_container_is_read_unless_it_ended_before(since: float, replicas: list[str]) -> None:
    ended = pod("Worker", 0, ENDED)
    assert selected([ended], since) == replicas


def test_container_between_two_runs_counts_as_ended() -> None:
    waiting = pod("Worker", 0)
    waiting["status"]["containerStatuses"][1] = {
        "name": "pytorch", "restartCount": 1, "state": {"waiting": {}}, "lastState": ENDED
    }  # fmt: skip
    (container,) = containers_to_read(PYTORCHJOB, {}, [waiting], T0).containers
    assert container.ended


def test_container_that_has_not_started_is_not_read() -> None:
    assert selected([pod("Worker", 0, {"waiting": {"reason": "ContainerCreating"}})]) == []


def test_last_start_is_the_newest_of_all_containers() -> None:
    again = pod("Worker", 0, {"running": {"startedAt": "2026-11-21T10:00:30Z"}})
    assert containers_to_read(PYTORCHJOB, {}, [pod("Master", 0), again], T0).last_start == T0 + 30
    assert containers_to_read(PYTORCHJOB, {}, [], T0).last_start == 0


@pytest.mark.parametrize(
    ("kind", "primary", "role"),
    [(PYTORCHJOB, "Master", "Worker"), (MPIJOB, "Launcher", "Worker"), (TRAINJOB, "node", "node")],
    ids=["pytorchjob", "mpijob", "trainjob"],
)
def test_of_300_replicas_the_primary_and_the_256_with_the_highest_index_are_read(
    kind: Kind, primary: str, role: str
) -> None:
    def of_kind(name: str, index: int) -> dict[str, Any]:
        made = pod(name, index)
        if kind is TRAINJOB:
            made["metadata"]["labels"] = {
                "jobset.sigs.k8s.io/replicatedjob-name": name,
                "batch.kubernetes.io/job-completion-index": str(index),
            }
        made["spec"]["containers"] = [{"name": kind.form.container or "trainer"}]
        made["status"]["containerStatuses"] = [{"name": kind.form.container or "trainer", "state": RUNNING}]
        return made

    pods = [of_kind(primary, 0), *(of_kind(role, index) for index in range(primary == role, 300))]
    selection = containers_to_read(kind, {}, pods, T0)
    names = [container.replica for container in selection.containers]
    assert names == [kind.replica_name(primary, 0), *(f"{role} {index}" for index in range(299, 43, -1))]
    assert selection.left_out == (
        f"Of {len(pods)} replicas, only the logs of {names[0]} and of the 256 with the highest index were read."
    )
    assert containers_to_read(kind, {}, pods[:257], T0).left_out == ""
    for ended in pods[257:]:
        ended["status"]["containerStatuses"][0]["state"] = ENDED
    assert containers_to_read(kind, {}, pods, T0 + 60).left_out == "", "pods that ended before don't count"


def test_lines_of_a_response_have_times_and_texts() -> None:
    block = b"tail of a cut line\n2026-11-21T10:00:01.500000000Z one\n2026-11-21T12:00:02+02:00 two\n2026-11-2"
    assert list(timed_lines(block)) == [(T0 + 1.5, "one"), (T0 + 2, "two")]
    assert list(timed_lines(b"")) == []
