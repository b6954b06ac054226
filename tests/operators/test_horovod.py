"""What horovodrun prints: variables in command lines, which kubexec.sh prints, and ranks that it lost."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB
from airflow_provider_ktrain.exceptions import TrainingJobError
from tests.core.manifests import replica
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")

TRACE = "[1]<stderr>:+ /opt/kube/kubectl exec w-1 -- /bin/sh -c cd / ; env RANK=1 DB=hunter2 last-part A=b python x.py"


def horovod(*lines: str, code: int = 1, api_version: str = "kubeflow.org/v1") -> dict[str, Any]:
    """A job whose Launcher writes these lines and ends with this code. Its variable DB is from a Secret."""
    launcher, worker = replica(name="mpi"), replica(name="mpi")
    program = "; ".join([*(f"echo '{line}'" for line in lines), f"exit {code}"])
    secret = {"secretKeyRef": {"name": "database", "key": "password"}}
    env = [{"name": "RANK", "value": "0"}, {"name": "DB", "valueFrom": secret}]
    launcher["template"]["spec"]["containers"][0] |= {"command": ["sh", "-c", program], "env": env}
    worker["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", "sleep 1000000"]
    spec = {"mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker}, "runPolicy": {"cleanPodPolicy": "Running"}}
    return {"apiVersion": api_version, "kind": "MPIJob", "metadata": {}, "spec": spec}


@pytest.mark.parametrize("instance", [MPIJOB], indirect=True)
@pytest.mark.parametrize("logs", ["auto", "none"])
def test_values_of_secrets_are_masked_in_a_launchers_trace(
    instance: VirtualInstance, logs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.api.mpi_version = "v1"
    with pytest.raises(TrainingJobError) as failed:
        instance.execute(manifest=horovod(TRACE, "DB=shown"), deferrable=False, logs=logs)
    _, submitted, rest = capsys.readouterr().out.partition("; exit 1")  # the manifest in the log contains the program
    assert submitted
    out = rest + str(failed.value)
    assert "hunter2" not in out
    assert "last-part" not in out
    assert "env RANK=1 DB=***" in out
    assert "DB=shown" in out


GOES_ON = "[0]<stdout>:rank 0 of 1: from batch 10"


@pytest.mark.parametrize("instance", [MPIJOB], indirect=True)
@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        (["Process 1 exit with status code 1.", GOES_ON], "Horovod goes on without rank 1 (exit code 1)."),
        (
            ["Process 2 exit with status code 137.", "Process 1 exit with status code -9.", "x", GOES_ON],
            "Horovod goes on without rank 1 (exit code -9), rank 2 (exit code 137).",
        ),
        (["[1]<stdout>:Process 1 exit with status code 1.", GOES_ON], ""),
        (["Process 0 exit with status code 1.", GOES_ON, "[1]<stderr>:an error"], ""),
        (["Process 1 exit with status code 1."], ""),
    ],
)
def test_success_without_a_rank_has_a_warning(
    instance: VirtualInstance, lines: list[str], warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.api.mpi_version = "v1"
    instance.execute(manifest=horovod(*lines, code=0), deferrable=False)
    out = capsys.readouterr().out
    assert out.count("Horovod goes on") == bool(warning)
    assert warning in out


@pytest.mark.parametrize("instance", [MPIJOB], indirect=True)
def test_failure_names_the_rank_that_ended_the_job(instance: VirtualInstance) -> None:
    instance.api.mpi_version = "v1"
    lines = [
        "[1]<stderr>:Traceback (most recent call last):",
        "[1]<stderr>:ValueError: sample 17 has no label",
        "Process 1 exit with status code 1.",
        GOES_ON,
        "[0]<stderr>:Traceback (most recent call last):",
        "[0]<stderr>:OSError: [Errno 28] No space left on device",
        "Process 0 exit with status code 1.",
        "Traceback (most recent call last):",
        "RuntimeError: Horovod detected that one or more processes exited with non-zero status, thus causing the job "
        "to be terminated. The first process to do so was:",
        "Process name: w-1[0]",
        "Exit code: 1",
    ]
    with pytest.raises(TrainingJobError) as failed:
        instance.execute(manifest=horovod(*lines), deferrable=False)
    first = str(failed.value).splitlines()[0]
    assert "No space left on device" in first
    assert first.endswith("(exit code 1, rank 0 on w-1)")
