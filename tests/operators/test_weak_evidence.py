"""Failures between the task and the cluster or Airflow prove nothing about a training: its job is kept."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ktrain.decorators.pytorchjob import _PyTorchJobDecoratedOperator
from airflow_provider_ktrain.exceptions import TrainingClusterError, TrainingConfigurationError, TrainingTimeoutError
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from tests.operators.task_instance import DefersSoon, Instance, Store, of_each_kind


class Impatient(PyTorchJobOperator):
    """Follows a job whose trigger failed to its end, and gives up immediately if this isn't possible."""

    seconds_in_worker = ()
    patience = 0.0


class Seen:
    """What was logged until now. Called with a text, it says whether that was logged."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._log = capsys, ""

    @property
    def log(self) -> str:
        self._log += self._capsys.readouterr().out
        return self._log

    def __call__(self, text: str) -> bool:
        return text in self.log


def alive(instance: Instance) -> list[str]:
    return [job["metadata"]["uid"] for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]


def without_airflow(key: str) -> Store:
    """A task store that can't be written."""

    class Unwell(Store):
        def set(self, name: str, value: Any) -> None:
            if name == key:
                raise OSError("Airflow is unwell")
            super().set(name, value)

    return Unwell()


@of_each_kind
@pytest.mark.parametrize("retries", [1, 0], ids=["a retry is left", "no retry is left"])
def test_failed_xcom_push_does_not_end_the_training(
    instance: Instance, capsys: pytest.CaptureFixture[str], retries: int
) -> None:
    """The XCom shows people which job it is; the job is followed without it."""
    assert isinstance(instance.execute(retries=retries, refuses="job"), TaskDeferred)
    assert alive(instance)
    assert (
        "is followed, but its identity could not be stored in Airflow.\nAirflow rejects job" in capsys.readouterr().out
    )


def test_failed_write_of_task_state_does_not_end_the_training(instance: Instance) -> None:
    instance.store = without_airflow("ktrain_job")
    assert isinstance(instance.execute(), TaskDeferred)
    assert alive(instance)


def test_timeout_of_a_deferral_releases_a_job_that_could_not_be_stored(instance: Instance) -> None:
    """The arguments of the trigger also contain the reference to the job."""
    instance.store = without_airflow("ktrain_job")
    instance.execute()
    with pytest.raises(TrainingTimeoutError):
        instance.fail("Trigger timeout")
    assert not instance.jobs()


class Breaks(PyTorchJobOperator):
    """Following fails immediately, with an error of our own."""

    patience = 0.0

    def _options(self, job: Any) -> Any:
        broken: Any = None
        return replace(super()._options(job), limits=broken)


def test_unexpected_error_does_not_end_the_training(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """No retry is left: the job continues, and the reaper releases it if no other process does."""
    with pytest.raises(AttributeError):
        instance.execute(operator=Breaks, deferrable=False)
    assert alive(instance)
    assert "nobody follows it now.\nTo delete it, run: kubectl delete" in capsys.readouterr().out


@of_each_kind
@pytest.mark.embedded("sets fault switches")
def test_rejected_credentials_at_the_last_adoption_do_not_end_the_training(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are rejected (401) while the job of the previous try is alive; no retry is left."""
    instance.execute(number=1, retries=1)
    (before,) = alive(instance)
    instance.cluster.admin("status", status=401, verb="patch", path=f"/{instance.kind.plural}")
    try:
        with pytest.raises(TrainingClusterError):
            instance.execute(number=2, retries=1)
    finally:
        instance.cluster.admin("clear")
    assert alive(instance) == [before]
    assert "nobody follows it now.\nTo delete it, run: kubectl delete" in capsys.readouterr().out


@pytest.mark.sampled(5)
@of_each_kind
@pytest.mark.embedded("sets fault switches")
@pytest.mark.parametrize("outage", [{"fault": "drop", "seconds": 600}, {"fault": "status", "status": 503}], ids=str)
@pytest.mark.parametrize(
    ("number", "retries", "seconds"), [(1, 0, 15), (2, 0, 900), (2, 1, 900)], ids=["first", "cleared", "retry"]
)
def test_submission_waits_for_the_api_server(
    instance: Instance, capsys: pytest.CaptureFixture[str], outage: dict[str, Any], number: int, retries: int,
    seconds: int,
) -> None:  # fmt: skip
    """As long as following where an earlier try may have left a job, whether or not a retry is left."""
    if number > 1:
        instance.execute(number=1, retries=retries)
    before = alive(instance)
    seen = Seen(capsys)
    instance.cluster.admin(**outage)
    instance.when(lambda: seen("Trying again for"), lambda: instance.cluster.admin("clear"))
    assert isinstance(instance.execute(number=number, retries=retries, max_tries=number - 1), TaskDeferred)
    log = seen.log
    (patience,) = re.findall(r"The API server can't be reached or is overloaded. Trying again for (\d+) s\.", log)
    assert seconds / 2 < int(patience) <= seconds
    assert len(alive(instance)) == 1
    assert (alive(instance) == before) == (retries > 0)


RESULT_THEN_LINES = """echo 'KTRAIN_RESULT {"loss": 0.5}'
i=0; while [ $i -lt 20 ]; do echo line $i; i=$((i+1)); sleep 0.5; done"""


@pytest.mark.embedded("sets fault switches")
def test_following_resumes_at_the_newest_line_after_a_failure(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    """The credentials are rejected for a moment: no line is logged twice, and the result that was read is kept."""
    seen = Seen(capsys)

    def disturb() -> None:
        instance.cluster.admin("status", status=401, path="/pytorchjobs|/pods")
        instance.cluster.admin("drop", seconds=0.01)
        instance.when(lambda: seen("Retrying in"), lambda: instance.cluster.admin("clear"))

    instance.when(lambda: seen("line 3"), disturb)
    result = instance.execute(deferrable=False, command=["sh", "-c", RESULT_THEN_LINES])
    log = seen.log
    assert "Retrying in" in log, "following didn't fail"
    assert re.findall(r"\[Master 0\] line (\d+)", log) == [str(number) for number in range(20)]
    assert result == {"loss": 0.5}


def connection(instance: Instance, **extra: Any) -> str:
    extra = {"kube_config_path": str(instance.cluster.kubeconfig), "namespace": instance.cluster.namespace, **extra}
    return json.dumps({"conn_type": "kubernetes", "extra": extra})


@of_each_kind
def test_unreadable_connection_does_not_fail_the_task(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unavailable secrets backend looks like a missing connection."""
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", connection(instance))
    first = instance.execute(operator=DefersSoon, kubernetes_conn_id="other")
    monkeypatch.delenv("AIRFLOW_CONN_OTHER")
    again = instance.fail("Trigger failure", traceback=["ImportError: no module\n"])
    assert isinstance(again, TaskDeferred)
    assert again.trigger.serialize()[1]["job"] == first.trigger.serialize()[1]["job"]
    assert alive(instance)


def elsewhere(instance: Instance) -> str:
    config = yaml.safe_load(instance.cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    return connection(instance, kube_config=json.dumps(config), kube_config_path=None)


def test_last_failure_of_a_trigger_keeps_a_job_that_cannot_be_reached(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No retry is left, and the state of the training is unknown."""
    instance.execute(operator=Impatient)
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", elsewhere(instance))
    with pytest.raises(TrainingClusterError):
        instance.fail("Trigger failure", traceback=["ImportError: no module\n"])
    assert alive(instance)
    output = capsys.readouterr().out
    assert "no retry is left.\nTo delete it, run: kubectl delete" in output
    assert "could not be released" not in output, "nothing tries to"


# the end of a training


def returns_a_set() -> Any:
    return {1}


@pytest.mark.programs("runs a Python function")
def test_lost_return_value_fails_the_next_try_too(instance: Instance) -> None:
    """The worker was lost between the outcome and the failure: the retry doesn't succeed without a result."""
    function: Any = {"operator": _PyTorchJobDecoratedOperator, "python_callable": returns_a_set, "deferrable": False}
    for number in (1, 2):
        with pytest.raises(TrainingConfigurationError, match="its return value is not JSON"):
            instance.execute(number=number, retries=1, **function)
    assert len([one for one in instance.store["ktrain_tries"]["tries"] if "usage" in one]) == 1, "it trained once"


def test_unusable_log_filename_template_does_not_end_the_training(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template is only needed to name a CloudWatch stream."""
    monkeypatch.setenv("AIRFLOW__LOGGING__REMOTE_LOGGING", "True")
    monkeypatch.setenv("AIRFLOW__LOGGING__REMOTE_BASE_LOG_FOLDER", "cloudwatch://group")
    monkeypatch.setenv("AIRFLOW__LOGGING__LOG_FILENAME_TEMPLATE", "{{ dag_run.logical_date.isoformat() }}.log")
    assert isinstance(instance.execute(), TaskDeferred)


@of_each_kind
def test_success_of_a_job_that_is_being_deleted_is_not_repeated(instance: Instance) -> None:
    """The worker was lost, and somebody deletes the job when the retry begins."""
    parameters: dict[str, Any] = {"retries": 1, "on_finish_action": "keep_job"}
    command = ["sh", "-c", """echo 'KTRAIN_RESULT {"loss": 0.5}'; sleep 1"""]
    instance.execute(number=1, command=command, deferrable=True, **parameters)
    instance.wait_ended()
    instance.set_finalizers("ktrain.airflow/test")
    instance.delete()
    try:
        assert instance.execute(number=2, command=command, deferrable=False, **parameters) == {"loss": 0.5}
        assert len(instance.jobs()) == 1
    finally:
        instance.set_finalizers()
