"""The cause of a failure, wherever it stands in the logs: see docs/contributing/causes.md."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from airflow_provider_ktrain.exceptions import TrainingJobError
from tests.clusters import IMAGE
from tests.core.manifests import replica
from tests.operators.task_instance import Instance

pytestmark = pytest.mark.embedded("needs the scripted API server")

KINDS = yaml.safe_load((Path(__file__).parent / "causes" / "kinds.yaml").read_text())
CASES = {f"{kind} {n}": case for kind, cases in KINDS.items() for n, case in enumerate(cases, 1)}


def program(log: str) -> str:
    """A shell's program that prints the log and ends as it says."""
    steps = ["sleep 0.5"]
    for line in log.splitlines():
        steps.append(line[1:] if line.startswith("#") else f"echo {shlex.quote(line)}")
    return "; ".join(steps if steps[-1].startswith("exit ") else [*steps, "sleep 0.5", "exit 1"])


def manifest(case: dict[str, Any]) -> dict[str, Any]:
    """The job of a case."""
    specs = {}
    for name, log in case["logs"].items():
        role = name.partition(" ")[0]
        specs[role] = replica()
        specs[role]["template"]["spec"]["containers"][0] |= {"command": ["sh", "-c", program(log)], "image": IMAGE}
    spec = {"pytorchReplicaSpecs": specs, "runPolicy": {"cleanPodPolicy": case.get("clean", "None")}}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {}, "spec": spec}


def check(case: dict[str, Any], instance: Instance) -> None:
    with pytest.raises(TrainingJobError) as failed:
        instance.execute(manifest=manifest(case), deferrable=False)
    assert str(failed.value).splitlines()[0].startswith(" ".join(case["first"].split()))
    assert failed.value.cause["category"] == case["category"]


@pytest.mark.parametrize("name", CASES)
def test_cause_is_found_wherever_it_stands(name: str, instance: Instance) -> None:
    check(CASES[name], instance)


@pytest.mark.thorough
@pytest.mark.programs("the same lines through pipes of processes")
@pytest.mark.parametrize("name", CASES)
def test_cause_of_processes_is_found(name: str, instance: Instance) -> None:
    check(CASES[name], instance)
