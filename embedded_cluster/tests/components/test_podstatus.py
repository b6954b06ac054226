"""A pod's status from its containers' states: every status that recordings of a real kubelet show, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktrain_embedded.node import podstatus
from ktrain_embedded.node.podstatus import ContainerFacts, PodFacts
from ktrain_embedded.objects.pods import qos_class
from ktrain_embedded.objects.store import Obj

DATA = Path(__file__).parent / "data" / "podstatuses.jsonl"
RECORDED = [json.loads(line) for line in DATA.read_text().splitlines()]
TERMINAL = ("Succeeded", "Failed")


def container(status: Obj) -> ContainerFacts:
    return ContainerFacts(
        {"name": status["name"], "image": "i"}, status["state"], {"terminated": {}} if status["last"] else {},
        container_id="containerd://x" if status["id"] else "",
    )  # fmt: skip


def ids(recorded: Obj) -> str:
    return f"{recorded['scenario']}-{recorded['phase']}"


@pytest.mark.parametrize("recorded", RECORDED, ids=ids)
def test_statuses_match_the_recordings(recorded: dict[str, Any]) -> None:
    """Given phase, states and why the kubelet ended the pod: the same phase and conditions, in the same order."""
    sandbox = recorded["conditions"][0][1] == "True"
    facts = PodFacts(
        "2026-11-21T10:00:00Z", "10.0.0.1", [container(c) for c in recorded["init"]],
        [container(c) for c in recorded["main"]], sandbox=sandbox, finished=recorded["phase"] in TERMINAL,
        reason=recorded["reason"],
    )  # fmt: skip
    if any("running" in c.state for c in facts.containers) and recorded["conditions"][2][2] == "PodFailed":
        facts.reason = "DeadlineExceeded"  # which the status tells only when the containers have ended
    before = recorded["phase"] if recorded["phase"] not in TERMINAL else "Running"
    pod = {
        "metadata": {"generation": 1},
        "spec": {"restartPolicy": recorded["policy"], "containers": [c.spec for c in facts.containers]},
        "status": {"phase": before},
    }
    built = podstatus.build(pod, facts, "2026-11-21T10:00:01Z")
    conditions = [[c["type"], c["status"], c.get("reason", ""), c.get("message", "")] for c in built["conditions"]]
    assert (built["phase"], conditions) == (recorded["phase"], recorded["conditions"])


def test_transition_times_change_only_with_their_condition() -> None:
    pod: Obj = {"metadata": {}, "spec": {"containers": [{"name": "c", "image": "i"}]}, "status": {}}
    facts = podstatus.new(pod, "2026-11-21T10:00:00Z", "10.0.0.1")
    pod["status"] = podstatus.build(pod, facts, "2026-11-21T10:00:01Z")
    facts.sandbox = True
    again = podstatus.build(pod, facts, "2026-11-21T10:00:02Z")
    times = {c["type"]: c["lastTransitionTime"][-3:] for c in again["conditions"]}
    assert times == {
        "PodReadyToStartContainers": "02Z", "Initialized": "01Z", "Ready": "01Z", "ContainersReady": "01Z",
        "PodScheduled": "01Z",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ([{}], "BestEffort"),
        ([{"limits": {"nvidia.com/gpu": 1}}], "BestEffort"),
        ([{"requests": {"cpu": "1"}}], "Burstable"),
        ([{"limits": {"cpu": "1", "memory": "1Gi"}}], "Guaranteed"),
        ([{"limits": {"cpu": "1", "memory": "1Gi"}}, {}], "Burstable"),
        ([{"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}}], "Burstable"),
    ],
)
def test_quality_of_service(resources: list[Obj], expected: str) -> None:
    assert qos_class({"spec": {"containers": [{"resources": r} for r in resources]}}) == expected
