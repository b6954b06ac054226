"""The XCom `ktrain_summary` of a training, and the cause of a try that has no job."""

from __future__ import annotations

import contextlib
import datetime
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowTaskTimeout

from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM, TRIES_STATE
from airflow_provider_ktrain.core.reporting.summary import MAX_BYTES
from airflow_provider_ktrain.decorators.pytorchjob import _PyTorchJobDecoratedOperator
from airflow_provider_ktrain.exceptions import (
    TrainingClusterError,
    TrainingConfigurationError,
    TrainingJobError,
    TrainingKilledError,
    TrainingUserCodeError,
)
from airflow_provider_ktrain.plugin.views import training_view
from tests.operators.task_instance import TRAINS, Instance, Supervisor, supervised
from tests.operators.test_ends import kept
from tests.operators.test_execution_timeout import time_out_after
from tests.operators.virtual_instance import VirtualInstance
from tests.plugin.test_views import record

GOOD = ["sh", "-c", """echo 'KTRAIN_METRIC {"step": 1, "loss": 0.5}'
echo 'KTRAIN_RESULT {"model_uri": "s3://models/1"}'; sleep 1"""]  # fmt: skip
BAD = ["sh", "-c", "echo 'ValueError: no data'; sleep 1; exit 3"]


def summary_of(instance: Instance) -> dict[str, Any]:
    assert instance.ti is not None
    found: dict[str, Any] = instance.ti.xcoms[SUMMARY_XCOM]
    assert len(json.dumps(found)) <= MAX_BYTES
    return found


def test_deferred_training_has_a_summary_before_and_after_its_end(instance: Instance) -> None:
    args = ["--lr", "0.1", "--layers=4", "--amp", "--password", "hunter2"]
    env = {"DATA": "s3://data", "API_TOKEN": "secret", "LONG": "x" * 5000}
    deferred = instance.execute(command=GOOD, args=args, env=env, do_xcom_push=False)
    begun = summary_of(instance)
    assert instance.ti is not None
    assert instance.ti.jobs_at[SUMMARY_XCOM] == 0, "it was written before the submission"
    assert begun["state"] == "running"
    assert begun["job"]["name"] == instance.job_name
    parameters = begun["parameters"]
    assert {"lr": "0.1", "layers": "4", "amp": "true", "DATA": "s3://data"}.items() <= parameters.items()
    assert parameters["password"] == parameters["API_TOKEN"] == "***"
    instance.resume(instance.event(deferred))
    ended = summary_of(instance)
    assert (ended["state"], ended["cause"], ended["usage"]["tries"]) == ("succeeded", "", 1)
    assert ended["metrics"] == {"loss": [0.5, 0.5]}
    assert ended["model_uri"] == "s3://models/1"
    assert {name: ended[name] for name in ("job", "parameters", "started")} == {
        name: begun[name] for name in ("job", "parameters", "started")
    }


def test_page_of_a_worker_that_was_lost_before_its_first_status_names_the_job(instance: Instance) -> None:
    instance.execute(command=GOOD, args=["--lr", "0.1"])
    lost = replace(record("failed"), summary=summary_of(instance))
    shown = training_view(lost, None, {}, with_logs=True, now=1.0)
    assert shown.facts[0] == ("PyTorchJob", f"default/{instance.job_name}")
    assert dict(shown.facts)["Cluster"] == summary_of(instance)["job"]["cluster"]
    assert dict(shown.facts)["Parameters"] == "lr=0.1"
    assert shown.commands[0].startswith("kubectl delete ")


@pytest.mark.programs("runs a Python function")
def test_arguments_of_a_function_are_parameters(instance: Instance) -> None:
    def train(lr: float, *, token: str, layers: int = 2, **more: int) -> None: ...

    function: dict[str, Any] = {"operator": _PyTorchJobDecoratedOperator, "python_callable": train}
    instance.execute(**function, op_args=[0.1], op_kwargs={"token": "hunter2", "batch": 64})
    parameters = summary_of(instance)["parameters"]
    assert {name: parameters.get(name) for name in ("lr", "token", "layers", "batch")} == {
        "lr": "0.1", "token": "***", "layers": None, "batch": "64"
    }  # fmt: skip


@pytest.mark.parametrize("has_state", [True, False])
def test_usage_is_that_of_all_tries_that_are_stored(instance: Instance, has_state: bool) -> None:
    instance.has_state = has_state
    with pytest.raises(TrainingUserCodeError):
        instance.execute(command=BAD, deferrable=False, retries=2)
    first = summary_of(instance)
    assert (first["state"], first["category"]) == ("failed", "user code")
    assert "exit code 3" in first["cause"]
    instance.execute(command=GOOD, deferrable=False, retries=2, number=2)
    both = summary_of(instance)["usage"]
    assert instance.ti is not None
    usage = instance.ti.xcoms["usage"]
    assert both["tries"] == (2 if has_state else 1)
    assert both["held"] == pytest.approx(usage["held"] + (first["usage"]["held"] if has_state else 0), abs=0.2)
    assert usage.get("all_tries") == (both if has_state else None)
    assert instance.ti.xcoms[STATUS_XCOM]["job_deleted"] is has_state, "below 3.3, a succeeded job is kept"
    if has_state:  # a later try returns the success: it uses nothing
        instance.execute(command=GOOD, deferrable=False, retries=2, number=3)
        assert summary_of(instance)["usage"] == both


def test_try_that_returns_an_earlier_success_has_its_whole_summary(instance: Instance) -> None:
    """Airflow has deleted the XComs of the try before."""
    given: dict[str, Any] = {"args": ["--lr", "0.1"], "checkpoint_dir": "/checkpoints", "deferrable": False}
    instance.execute(command=GOOD, retries=1, **given)
    first = summary_of(instance)
    instance.execute(command=GOOD, retries=1, number=2, **given)
    found = summary_of(instance)
    assert found["try_number"] == 2
    assert found["job"]["cluster"]
    assert found["parameters"]["lr"] == "0.1"
    assert found["checkpoint"].startswith("/checkpoints/")
    assert found["started"] <= found["ended"]
    of_this_try = ("try_number", "started", "ended")
    assert {**found, **dict.fromkeys(of_this_try)} == {**first, **dict.fromkeys(of_this_try)}


def test_total_says_that_the_usage_of_a_try_is_missing(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """A trigger can't store it for later tries: the second try was cleared while it was deferred."""
    with pytest.raises(TrainingUserCodeError):
        instance.execute(command=BAD, deferrable=False, retries=2)
    instance.execute(command=GOOD, deferrable=False, retries=2, number=3)
    assert summary_of(instance)["usage"]["tries"] == 2
    assert "Accelerators of all tries together: held for at least " in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.embedded("sets fault switches")
@pytest.mark.parametrize("refuses", ["", SUMMARY_XCOM], ids=["stored", "no summary is stored"])
def test_try_whose_usage_nobody_knows_does_not_count_as_none(instance: VirtualInstance, refuses: str) -> None:
    instance.when(instance.jobs, lambda: instance.api.refuse(403))
    with pytest.raises(TrainingClusterError):
        instance.execute(command=GOOD, deferrable=False, refuses=refuses)
    if not refuses:
        assert summary_of(instance)["usage"] == {"tries": 0, "held": 0, "wasted": 0, "at_least": True}
    (one,) = instance.store[TRIES_STATE]["tries"]
    assert "usage" not in one


def test_try_that_returns_an_earlier_success_has_used_nothing(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingUserCodeError):
        instance.execute(command=BAD, deferrable=False, retries=3)
    for number in (2, 3):
        instance.execute(command=GOOD, deferrable=False, retries=3, number=number)
    output = capsys.readouterr().out
    assert "returned and nothing is submitted" in output
    assert "at least" not in output
    assert instance.ti is not None
    status, stored = instance.ti.xcoms[STATUS_XCOM], instance.store[TRIES_STATE]
    shown = training_view(record("success", try_number=3), status, stored, with_logs=True, now=1.0)
    assert "at least" not in dict(shown.usage)["Held in all tries"]


def test_try_that_has_no_job_has_a_cause(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingConfigurationError) as raised:
        instance.execute(rendered={"gpus": "many"})
    assert instance.ti is not None
    status = instance.ti.xcoms[STATUS_XCOM]
    assert status["cause"]["category"] == summary_of(instance)["category"] == "configuration"
    assert status["cause"]["summary"] == summary_of(instance)["cause"] == str(raised.value).partition("\n")[0]
    assert status["ended"]
    assert summary_of(instance)["usage"] == {"tries": 1, "held": 0, "wasted": 0}
    (one,) = instance.store[TRIES_STATE]["tries"]
    assert (one["try_number"], one["cause"]) == (1, summary_of(instance)["cause"])
    monkeypatch.setenv("AIRFLOW_CONN_NOWHERE", "kubernetes://?kube_config_path=%2Fmissing")
    with pytest.raises(TrainingClusterError):
        instance.execute(kubernetes_conn_id="nowhere")
    assert summary_of(instance)["category"] == "cluster"


def shown_page(instance: Instance, state: str = "failed", number: int = 1) -> SimpleNamespace:
    """The page of a try, whose task has ended."""
    assert instance.ti is not None
    status, stored = instance.ti.xcoms[STATUS_XCOM], instance.store.get(TRIES_STATE, {})
    return training_view(record(state, try_number=number), status, stored, with_logs=True, now=1.0)


def is_running(instance: Instance) -> bool:
    """Whether the page shows so."""
    return instance.ti is not None and instance.ti.xcoms.get(STATUS_XCOM, {}).get("phase") == "Running"


@pytest.mark.embedded("kills at a moment of virtual time")
@pytest.mark.parametrize("keeps", [False, True], ids=["deleted", "suspended"])
def test_page_of_a_kill_in_a_worker_has_the_cause(instance: VirtualInstance, keeps: bool) -> None:
    action = "keep_job" if keeps else "delete_job"
    instance.kill_when(lambda: is_running(instance))
    with supervised(Supervisor(TaskInstanceState.FAILED)), pytest.raises(TrainingKilledError):
        instance.execute(command=TRAINS, deferrable=False, on_finish_action=action)
    assert instance.ti is not None
    status, shown = instance.ti.xcoms[STATUS_XCOM], shown_page(instance)
    assert status["ended"]
    assert status["job_deleted"] is not keeps
    assert status["job"]["name"] == instance.job_name
    assert status["cause"]["summary"] == shown.cause["summary"] == summary_of(instance)["cause"]
    assert status["cause"]["category"] == "killed"
    assert [name for name, _ in status["phases"]][-1] == "Running"
    assert not shown.notes
    assert bool(shown.commands) is keeps
    assert not any("delete" in command for command in shown.commands)
    usage = summary_of(instance)["usage"]
    assert usage["at_least"]
    assert usage["held"] == pytest.approx(status["usage"]["held"], abs=0.1)


@pytest.mark.embedded("kills at a moment of virtual time")
def test_page_of_a_stopped_worker_says_that_the_job_runs_on(instance: VirtualInstance) -> None:
    instance.kill_when(lambda: is_running(instance))
    with supervised(Supervisor(TaskInstanceState.RUNNING)), pytest.raises(TrainingKilledError):
        instance.execute(command=TRAINS, deferrable=False, retries=1)
    assert len(instance.jobs()) == 1
    (one,) = instance.store[TRIES_STATE]["tries"]
    assert not one["usage"], "the next try counts all that the job has used"
    assert "may still hold GPUs" in shown_page(instance).notes[0]
    assert shown_page(instance).commands[0].startswith("kubectl delete ")
    assert shown_page(instance).cause["category"] == "killed"


@pytest.mark.embedded("kills at a moment of virtual time")
def test_page_of_a_kill_before_the_job_was_read_keeps_what_was_known(instance: VirtualInstance) -> None:
    """After a failure of the trigger; no answer comes before the worker has to end."""
    instance.execute(command=TRAINS)
    assert instance.ti is not None
    before = instance.ti.xcoms[STATUS_XCOM]
    instance.api.slow("before", 500.0)
    instance.on_interrupt(lambda: instance.operator.on_kill() if instance.operator is not None else None)
    instance.world.after(5.0, instance.interrupt)
    with supervised(Supervisor(TaskInstanceState.FAILED)), pytest.raises(TrainingKilledError):
        instance.fail("Trigger failure")
    status = instance.ti.xcoms[STATUS_XCOM]
    assert {name: status[name] for name in ("job", "phases", "replicas")} == {
        name: before[name] for name in ("job", "phases", "replicas")
    }
    assert not status["ended"]
    assert status["cause"]["category"] == "killed"
    assert "its job was not released" in shown_page(instance).notes[0]
    assert shown_page(instance).commands[0].startswith("kubectl delete ")


@pytest.mark.embedded("kills at a moment of virtual time")
def test_page_of_a_kill_during_the_submission_has_the_cause(instance: VirtualInstance) -> None:
    instance.kill_when(instance.jobs)
    instance.api.slow("after POST", 1.0)
    with supervised(Supervisor(TaskInstanceState.FAILED)), pytest.raises(TrainingKilledError):
        instance.execute(command=TRAINS, deferrable=False)
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())
    shown = shown_page(instance)
    assert shown.cause["category"] == summary_of(instance)["category"] == "killed"
    assert not shown.notes
    assert not shown.commands


@pytest.mark.embedded("sets fault switches")
def test_page_of_an_error_says_that_the_job_may_hold_gpus(instance: VirtualInstance) -> None:
    instance.when(instance.jobs, lambda: instance.api.refuse(403))
    with pytest.raises(TrainingClusterError, match="403"):
        instance.execute(command=TRAINS, deferrable=False)
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]
    shown = shown_page(instance)
    assert "may still hold GPUs" in shown.notes[0]
    assert shown.commands[0].startswith(f"kubectl delete pytorchjobs.kubeflow.org {instance.job_name} ")
    assert shown.cause["category"] == "cluster"


@pytest.mark.embedded("sets fault switches")
@pytest.mark.parametrize("state", ["success", "failed"])
@pytest.mark.parametrize(
    ("refused", "has_note", "first_command"),
    [
        ("/pytorchjobs/", False, "kubectl get "),
        ("/pods", False, None),
        ("/pytorchjobs/|/pods", True, "kubectl delete "),
    ],
    ids=["the job, whose pods are gone", "the pods, which go with the job", "the job and its pods"],
)
def test_page_shows_how_the_last_deletion_ended(
    instance: VirtualInstance, state: str, refused: str, has_note: bool, first_command: str | None
) -> None:
    """The status is pushed before the job is deleted, and again if the deletion ended in another way."""
    given = kept(retries=0) | {"on_finish_action": "delete_job"}
    if state == "failed":
        master = given["manifest"]["spec"]["pytorchReplicaSpecs"]["Master"]
        master["template"]["spec"]["containers"][0]["command"][-1] += "; exit 3"
    instance.api.fail("DELETE", refused, 403, count=float("inf"))
    with contextlib.nullcontext() if state == "success" else pytest.raises(TrainingUserCodeError):
        instance.execute(**given)
    assert bool(instance.running()) is has_note
    shown = shown_page(instance, state)
    assert [note for note in shown.notes if "may still hold GPUs" in note] == shown.notes
    assert bool(shown.notes) is has_note
    assert bool(instance.jobs()) is bool(shown.commands) is bool(first_command)
    assert not first_command or shown.commands[0].startswith(first_command)


def execute_retry(instance: VirtualInstance, refused: str, **how: Any) -> str:
    """Run a second try that is refused before it submits; returns its error."""
    connection = "nowhere" if refused == "connection" else "kubernetes_default"
    if refused == "right":
        instance.api.refuse(403)
    with pytest.raises(TrainingJobError) as raised:
        instance.execute(
            command=TRAINS, number=2, deferrable=False, kubernetes_conn_id=connection, **{"retries": 1, **how}
        )
    assert instance.ti is not None
    return str(raised.value)


@pytest.mark.embedded("sets fault switches")
@pytest.mark.parametrize("refused", ["connection", "right"])
def test_retry_that_is_refused_names_the_job_of_a_lost_try(instance: VirtualInstance, refused: str) -> None:
    """Nobody has stored how the try before has ended: its job may run."""
    instance.execute(command=TRAINS, retries=1)
    error = execute_retry(instance, refused)
    (job,) = instance.jobs()
    name = job["metadata"]["name"]
    head, *_, last = error.splitlines()
    assert head == summary_of(instance)["cause"]
    assert last == (
        f"PyTorchJob default/{name} may still hold accelerators. To delete it, run: kubectl delete -n default "
        f"pytorchjobs {name}"
    )
    shown = shown_page(instance, number=2)
    assert "may still hold GPUs: the first command ends it" in shown.notes[0]
    assert shown.commands[0] == f"kubectl delete pytorchjobs.kubeflow.org {name} --namespace default"


@pytest.mark.embedded("sets fault switches")
@pytest.mark.parametrize("before", ["its end is stored", "it was cleared", "below Airflow 3.3"])
def test_retry_that_is_refused_names_no_job_if_none_is_known_to_be_left(instance: VirtualInstance, before: str) -> None:
    instance.has_state = before != "below Airflow 3.3"
    if before == "its end is stored":
        with pytest.raises(TrainingUserCodeError):
            instance.execute(command=BAD, retries=1, deferrable=False)
    else:
        instance.execute(command=TRAINS, retries=1)
    error = execute_retry(instance, "connection", **({"max_tries": 3} if before == "it was cleared" else {}))
    assert "may still hold" not in error
    assert not shown_page(instance, number=2).notes
    assert not shown_page(instance, number=2).commands


@pytest.mark.embedded("sets fault switches")
def test_page_of_a_refused_job_does_not_say_that_it_holds_gpus(instance: VirtualInstance) -> None:
    instance.api.fail("POST", "/pytorchjobs", 422)
    with pytest.raises(TrainingConfigurationError):
        instance.execute(command=TRAINS, deferrable=False)
    assert not instance.jobs()
    assert not shown_page(instance).notes
    assert shown_page(instance).cause["category"] == "configuration"


@pytest.mark.embedded("needs the scripted API server")
@pytest.mark.parametrize("answers", [True, False], ids=["before the submission", "no answer to the release"])
def test_page_of_a_timeout_of_airflow_has_the_cause(instance: VirtualInstance, answers: bool) -> None:
    if answers:
        instance.api.slow("before GET /apis/kubeflow.org/v1$", 50.0)
    else:
        instance.when(instance.jobs, lambda: instance.api.slow("before", 500.0))
    time_out_after(instance, 20.0)
    with pytest.raises(AirflowTaskTimeout):
        instance.execute(command=TRAINS, deferrable=False, execution_timeout=datetime.timedelta(seconds=20))
    shown = shown_page(instance)
    assert shown.cause["category"] == summary_of(instance)["category"] == "timeout"
    assert shown.cause["summary"] == "The task did not finish within its execution_timeout."
    assert bool(shown.notes) is bool(instance.jobs()) is not answers


def test_success_that_could_not_be_stored_is_a_failure_with_a_cause(instance: Instance) -> None:
    with pytest.raises(ConnectionError):
        instance.execute(command=GOOD, deferrable=False, refuses="return_value")
    assert instance.ti is not None
    assert instance.ti.xcoms[STATUS_XCOM]["cause"]["summary"] == "ConnectionError: Airflow rejects return_value"
    assert summary_of(instance)["state"] == "failed"
    (one,) = instance.store[TRIES_STATE]["tries"]
    assert one["cause"].startswith("ConnectionError")
    assert one["series"] == {"loss": [[1, 0.5]]}
    assert one["usage"]["gpus"] == 1
