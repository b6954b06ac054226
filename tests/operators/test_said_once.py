"""What a failure says, it says once: in the log of the task, and in the text of its exception."""

from __future__ import annotations

import pytest
from airflow.sdk import TaskInstanceState

from airflow_provider_ktrain.exceptions import TrainingJobError, TrainingKilledError
from tests.operators.task_instance import Instance, Supervisor, supervised
from tests.operators.test_causes import OF_PROGRAM, manifest, run

pytestmark = pytest.mark.embedded("needs the scripted API server")


@pytest.mark.parametrize("deferrable", [False, True])
@pytest.mark.parametrize(
    ("log", "advice"),
    [
        (OF_PROGRAM, ""),
        ("loading\n#sleep 1\n#exit 3", ""),
        ("#exit 3", "Check its command, and whether it buffers its output (python -u, or PYTHONUNBUFFERED=1)."),
    ],
    ids=["a traceback", "a line", "nothing"],
)
def test_advice_to_read_a_log_does_not_follow_its_lines(
    instance: Instance, capsys: pytest.CaptureFixture[str], deferrable: bool, log: str, advice: str
) -> None:
    with pytest.raises(TrainingJobError) as failed:
        run(instance, manifest=manifest({"logs": {"Master 0": log}}), deferrable=deferrable)
    for text in (str(failed.value), capsys.readouterr().out):
        assert "Read the log of" not in text
        assert advice in text


@pytest.mark.parametrize("deferrable", [False, True])
def test_restarts_and_lost_lines_are_said_once(
    instance: Instance, capsys: pytest.CaptureFixture[str], deferrable: bool
) -> None:
    """The kubelet keeps the log of one earlier run: lines of others are lost, and the log says so in their place."""
    job = manifest({"logs": {"Master 0": OF_PROGRAM}})
    job["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] = "OnFailure"
    job["spec"]["runPolicy"] = {}
    with pytest.raises(TrainingJobError, match="crash_loop_limit"):
        run(instance, manifest=job, deferrable=deferrable)
    log = capsys.readouterr().out
    assert [log.count(f"restarted ({often} time)") for often in ("1st", "2nd", "3rd")] == [1, 1, 1]
    assert log.count("lines of run 1 may be missing") == 1


def test_task_that_a_user_ends_has_no_errors_of_ours(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    with supervised(Supervisor(TaskInstanceState.FAILED)):
        instance.kill_when(instance.running)
        with pytest.raises(TrainingKilledError):
            instance.execute(deferrable=False)
    log = capsys.readouterr().out
    assert "[error" not in log
    assert log.count("The task was killed") == 1
