"""Secrets in the Launcher's log: horovodrun passes all variables in a command line, which kubexec.sh prints."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB
from airflow_provider_ktrain.exceptions import TrainingJobError
from tests.core.manifests import replica
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")

TRACE = "[1]<stderr>:+ /opt/kube/kubectl exec w-1 -- /bin/sh -c cd / ; env RANK=1 DB=hunter2 last-part A=b python x.py"


def horovod(*lines: str, api_version: str = "kubeflow.org/v1") -> dict[str, Any]:
    """A job whose Launcher writes these lines and fails. Its variable DB is from a Secret."""
    launcher, worker = replica(name="mpi"), replica(name="mpi")
    program = "; ".join([*(f"echo '{line}'" for line in lines), "exit 1"])
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
