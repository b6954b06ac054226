"""avoid_failed_nodes: a node on which a try failed by infrastructure is excluded from the jobs of later tries."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.state.pods.objects import avoided_nodes
from airflow_provider_ktrain.exceptions import TrainingInfrastructureError, TrainingUserCodeError
from tests.operators.task_instance import Instance

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
FAILS_ONCE = f"""[ $KTRAIN_ATTEMPT != 1 ] || {{ echo '{ECC}' >&2; exit 1; }}; trap 'exit 143' TERM; sleep 600 & wait"""
BROKEN_GPU = ["sh", "-c", FAILS_ONCE]
STATE = "ktrain_failed_nodes"


def avoided(instance: Instance) -> list[str]:
    (job,) = instance.jobs()
    return avoided_nodes(job["spec"]["pytorchReplicaSpecs"]["Master"]["template"])


def fail(instance: Instance, **parameters: Any) -> None:
    with pytest.raises(TrainingInfrastructureError, match="broken GPU"):
        instance.execute(command=BROKEN_GPU, deferrable=False, retries=2, **parameters)


def test_later_try_avoids_the_node_and_an_adopted_job_is_not_changed(instance: Instance) -> None:
    fail(instance, avoid_failed_nodes=True)
    (node,) = instance.store[STATE]["nodes"]
    assert instance.store[STATE]["nodes"][node] == "Master 0 has a broken GPU"
    instance.execute(number=2, command=BROKEN_GPU, retries=2, avoid_failed_nodes=True)
    assert avoided(instance) == [node]
    (job,) = instance.jobs()
    instance.store[STATE]["nodes"]["another-node"] = "Master 0 lost its node"
    instance.execute(number=3, command=BROKEN_GPU, retries=2, avoid_failed_nodes=True)
    assert avoided(instance) == [node]
    assert [j["metadata"]["uid"] for j in instance.jobs()] == [job["metadata"]["uid"]]


def test_clear_removes_the_stored_nodes(instance: Instance) -> None:
    fail(instance, avoid_failed_nodes=True)
    instance.execute(number=2, max_tries=3, retries=2, avoid_failed_nodes=True)
    assert avoided(instance) == []


def test_without_the_parameter_no_node_is_stored(instance: Instance) -> None:
    fail(instance)
    assert STATE not in instance.store


def test_failure_of_the_program_avoids_no_node(instance: Instance) -> None:
    with pytest.raises(TrainingUserCodeError):
        instance.execute(command=["sh", "-c", "exit 3"], deferrable=False, retries=1, avoid_failed_nodes=True)
    assert STATE not in instance.store


def test_avoid_failed_nodes_has_no_effect_below_airflow_3_3(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.has_state = False
    fail(instance, avoid_failed_nodes=True)
    instance.execute(number=2, retries=2, avoid_failed_nodes=True)
    assert avoided(instance) == []
    assert capsys.readouterr().out.count("avoid_failed_nodes has no effect") == 2  # once for each try
