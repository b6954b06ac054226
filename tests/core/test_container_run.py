"""The newest run of a container, read from a pod's status."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.logs.container_run import Run, run_of

STATES: dict[str, tuple[dict[str, Any], Run]] = {
    "nothing known": ({}, Run()),
    "not started": ({"state": {"waiting": {"reason": "ContainerCreating"}}, "restartCount": 0}, Run()),
    "runs": ({"state": {"running": {}}, "restartCount": 0}, Run(0, started=True)),
    "succeeded": ({"state": {"terminated": {"exitCode": 0}}, "restartCount": 0}, Run(0, started=True, ended=True)),
    "failed": (
        {"state": {"terminated": {"exitCode": 1}}, "restartCount": 0},
        Run(0, started=True, ended=True, restarting=True),
    ),
    "runs again": (
        {"state": {"running": {}}, "lastState": {"terminated": {}}, "restartCount": 1},
        Run(1, started=True),
    ),
    "backs off": (
        {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {}}, "restartCount": 1},
        Run(1, started=True, ended=True, backing_off=True),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_run_of_reads_the_newest_run_from_the_status(name: str) -> None:
    status, run = STATES[name]
    for key in ("containerStatuses", "initContainerStatuses"):
        pod = {
            "spec": {"restartPolicy": "OnFailure"},
            "status": {"phase": "Running", key: [{"name": "other"}, {"name": "main", **status}]},
        }
        assert run_of(pod, "main") == run


@pytest.mark.parametrize(
    ("policy", "container", "code", "restarting"),
    [
        ("Never", "main", 1, False),
        ("OnFailure", "main", 0, False),
        ("OnFailure", "main", 1, True),
        ("Always", "main", 0, True),
        ("Always", "init", 0, False),
        ("Always", "init", 1, True),
        ("Never", "init", 1, False),
    ],
)
def test_restarting_depends_on_policy_and_exit_code(policy: str, container: str, code: int, restarting: bool) -> None:
    pod = {
        "spec": {"restartPolicy": policy, "initContainers": [{"name": "init"}], "containers": [{"name": "main"}]},
        "status": {"containerStatuses": [{"name": container, "state": {"terminated": {"exitCode": code}}}]},
    }
    assert run_of(pod, container).restarting is restarting


def test_evicted_pod_has_no_further_run() -> None:
    assert run_of({"status": {"phase": "Failed", "reason": "Evicted"}}, "main") == Run(ended=True, final=True)
