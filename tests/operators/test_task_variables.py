"""The variables that name the task: what the programs of each kind get, and what a retry does with earlier ones."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.operators.task_instance import TRAINS, Instance, Object, of_each_kind

PRINTS = "echo task $KTRAIN_DAG_ID $KTRAIN_RUN_ID $KTRAIN_TASK_ID $KTRAIN_MAP_INDEX $KTRAIN_TRY"


@of_each_kind
def test_program_has_the_variables(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    instance.execute(number=2, retries=2, command=["sh", "-c", PRINTS], gpus=None, deferrable=False)
    assert f"[{instance.replica}] task dag {instance.run_id} train -1 2" in capsys.readouterr().out


def environment(job: Object) -> dict[str, Any]:
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    return {entry["name"]: entry.get("value") for entry in container["env"]}


@pytest.mark.parametrize("reattach", ["always", "if_unchanged"])
def test_adopted_job_keeps_the_try_that_created_it(
    instance: Instance, capsys: pytest.CaptureFixture[str], reattach: str
) -> None:
    instance.execute(number=1, retries=1, reattach=reattach)
    instance.execute(number=2, retries=1, reattach=reattach)
    (job,) = instance.jobs()
    assert environment(job)["KTRAIN_TRY"] == "1"
    assert "The manifest has changed" not in capsys.readouterr().out


def test_variables_are_not_among_the_changes_of_a_manifest(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.execute(number=1, retries=1)
    instance.execute(number=2, retries=1, command=[*TRAINS, "more"])
    (paths,) = re.findall(r"Changed: (.*?)\. Set reattach", capsys.readouterr().out)
    assert paths == "$.spec.pytorchReplicaSpecs.Master.template.spec.containers[0].command"


def test_own_variable_of_the_same_name_is_replaced_with_a_warning(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.execute(env={"KTRAIN_RUN_ID": "mine", "KTRAIN_REGION": "north"})
    (job,) = instance.jobs()
    assert environment(job).items() >= {"KTRAIN_RUN_ID": instance.run_id, "KTRAIN_REGION": "north"}.items()
    assert capsys.readouterr().out.count("KTRAIN_RUN_ID has no effect: the task sets it") == 1
