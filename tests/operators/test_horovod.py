"""What horovodrun prints: variables in command lines, which kubexec.sh prints, and ranks that it lost."""

from __future__ import annotations

import re
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB
from airflow_provider_ktrain.engine.follow.evidence_collector import MAX_TAIL_BYTES
from airflow_provider_ktrain.exceptions import TrainingJobError
from tests.core.manifests import replica
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")

COMMAND = "cd / ; env HOROVOD_HOSTNAME=w-1 RANK=1 DB=hunter2 last-part A=b python x.py"
TRACE = f"+ /opt/kube/kubectl exec w-1 -- /bin/sh -c {COMMAND}"
PRINTED = {
    "by kubexec.sh": f"[1]<stderr>:{TRACE}",
    "by kubexec.sh with --prefix-output-with-timestamp": f"Sun Nov 29 08:19:04 2026[1]<stderr>:{TRACE}",
    "by horovodrun --verbose": f"/etc/mpi/kubexec.sh w-1 {COMMAND}",
    "by horovodrun --verbose under v2beta1": f"ssh -o PasswordAuthentication=no w-1 {COMMAND}",
    "in a variable that contains it": f"[1]<stderr>:{TRACE.replace('DB=', 'URL=db://user:')}",
}


def horovod(*lines: str, code: int = 1, api_version: str = "kubeflow.org/v1") -> dict[str, Any]:
    """A job whose Launcher writes these lines and ends with this code. Its variables DB and URL are from a Secret."""
    launcher, worker = replica(name="mpi"), replica(name="mpi")
    program = "; ".join([*(f"echo '{line}'" for line in lines), f"exit {code}"])
    secret = {"secretKeyRef": {"name": "database", "key": "password"}}
    env = [
        {"name": "RANK", "value": "0"},
        {"name": "DB", "valueFrom": secret},
        {"name": "URL", "value": "db://user:$(DB)"},
    ]
    launcher["template"]["spec"]["containers"][0] |= {"command": ["sh", "-c", program], "env": env}
    worker["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", "sleep 1000000"]
    spec = {"mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker}, "runPolicy": {"cleanPodPolicy": "Running"}}
    return {"apiVersion": api_version, "kind": "MPIJob", "metadata": {}, "spec": spec}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("instance", [MPIJOB], indirect=True)
@pytest.mark.parametrize("logs", ["auto", "none"])
@pytest.mark.parametrize("printed", PRINTED.values(), ids=PRINTED)
def test_values_of_secrets_are_masked_in_a_launchers_trace(
    instance: VirtualInstance, printed: str, logs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.api.mpi_version = "v1"
    with pytest.raises(TrainingJobError) as failed:
        instance.execute(manifest=horovod(printed, "DB=shown"), deferrable=False, logs=logs)
    _, submitted, rest = capsys.readouterr().out.partition("; exit 1")  # the manifest in the log contains the program
    assert submitted
    out = rest + str(failed.value)
    assert "hunter2" not in out
    assert "last-part" not in out
    assert re.search(r"RANK=1 (DB|URL)=\*\*\*\s", out)
    assert "DB=shown" in out


@pytest.mark.parametrize("instance", [MPIJOB], indirect=True)
def test_a_line_whose_beginning_is_not_read_is_not_quoted(
    instance: VirtualInstance, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its beginning would show that it is to be masked."""
    instance.api.mpi_version = "v1"
    trace = f"[1]<stderr>:{TRACE.replace('RANK=1', 'A=$LONG')}"
    job = horovod(trace, "the last line")
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    launcher["env"].append({"name": "LONG", "value": "x" * MAX_TAIL_BYTES})
    with pytest.raises(TrainingJobError) as failed:
        instance.execute(manifest=job, deferrable=False, logs="none")
    _, _, rest = capsys.readouterr().out.partition("; exit 1")
    assert "hunter2" not in rest + str(failed.value)
    assert "the last line" in str(failed.value)


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
