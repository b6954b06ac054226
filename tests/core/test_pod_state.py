"""The state of a pod in a few words, as kubectl prints it."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.state.pods.pod_state import passes_by_itself, state_of_pod


def container(name: str = "pytorch", **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}


def waits(reason: str, name: str = "pytorch") -> dict[str, Any]:
    return container(name, waiting={"reason": reason})


def ended(name: str, code: int, reason: str = "Completed") -> dict[str, Any]:
    return container(name, terminated={"exitCode": code, "reason": reason})


def pod(phase: str = "Pending", *containers: Any, init: tuple[Any, ...] = (), **more: Any) -> dict[str, Any]:
    status = {"phase": phase, "containerStatuses": list(containers), "initContainerStatuses": list(init)}
    return {
        "metadata": more.pop("metadata", {}),
        "spec": {"nodeName": "n", **more.pop("spec", {})},
        "status": status | more,
    }


def unscheduled(reason: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason}], "spec": {"nodeName": ""}}


DELETED: dict[str, Any] = {"metadata": {"deletionTimestamp": "2026-11-22T10:00:00Z"}}
SIDECAR: dict[str, Any] = {
    "spec": {"initContainers": [{"name": "proxy", "restartPolicy": "Always"}, {"name": "fetch"}]}
}
STARTED = {"startedAt": "2026-11-22T10:00:00Z"}
PROXY = container("proxy", running={}) | {"started": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Pending", {}),
    ("Pending", pod(spec={"nodeName": ""})),
    ("Unschedulable", pod(**unscheduled("Unschedulable"))),
    ("SchedulingGated", pod(**unscheduled("SchedulingGated"))),
    ("ContainerCreating", pod()),
    ("ContainerCreating", pod("Pending", waits("ContainerCreating"))),
    ("ImagePullBackOff", pod("Pending", waits("ImagePullBackOff"))),
    ("ImagePullBackOff", pod("Pending", waits("ErrImagePull"))),
    ("CreateContainerConfigError", pod("Pending", waits("CreateContainerConfigError"))),
    ("Init:0/1", pod("Pending", waits("PodInitializing"), init=(container("fetch", running={}),))),
    ("Init:0/1", pod("Pending", waits("PodInitializing"), init=(waits("PodInitializing", "fetch"),))),
    ("Init:0/1 (waits for Master 0)", pod("Pending", init=(container("init-pytorch", running=STARTED),))),
    ("Init:0/1", pod("Pending", init=(waits("PodInitializing", "init-pytorch"),))),
    ("Init:Error", pod("Pending", init=(ended("init-pytorch", 1, "Error"),))),
    ("Init:1/2", pod("Pending", init=(ended("a", 0), container("b", running={})))),
    ("Init:1/2", pod("Pending", init=(PROXY, container("fetch", running={})), **SIDECAR)),
    ("Init:CrashLoopBackOff", pod("Pending", waits("PodInitializing"), init=(waits("CrashLoopBackOff", "fetch"),))),
    ("Init:Error", pod("Pending", init=(ended("fetch", 1, "Error"),))),
    ("ContainerCreating", pod("Pending", waits("PodInitializing"), init=(ended("fetch", 0),))),
    ("Running", pod("Running", container(running={}))),
    ("CrashLoopBackOff", pod("Running", waits("CrashLoopBackOff"))),
    ("Running", pod("Running", container(running={}), waits("CrashLoopBackOff", "sidecar"))),
    ("Terminating", pod("Running", container(running={}), **DELETED)),
    ("Succeeded", pod("Succeeded", ended("pytorch", 0), **DELETED)),
    ("OOMKilled", pod("Failed", ended("pytorch", 137, "OOMKilled"))),
    ("Error", pod("Failed", ended("pytorch", 1, "Error"))),
    ("Evicted", pod("Failed", reason="Evicted")),
    ("Failed", pod("Failed")),
    ("Unknown", pod("Unknown")),
]  # fmt: skip


@pytest.mark.parametrize(("state", "found"), CASES, ids=[f"{n} {state}" for n, (state, _) in enumerate(CASES)])
def test_state_of_a_pod(state: str, found: dict[str, Any]) -> None:
    assert state_of_pod(found, PYTORCHJOB) == state


def test_only_problems_need_attention() -> None:
    problems = {state for state, _ in CASES if not passes_by_itself(state)}
    assert problems == {
        "Unschedulable", "SchedulingGated", "ImagePullBackOff", "CreateContainerConfigError", "Init:CrashLoopBackOff",
        "Init:Error", "CrashLoopBackOff", "OOMKilled", "Error", "Evicted", "Failed", "Unknown",
    }  # fmt: skip
