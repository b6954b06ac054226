"""A trigger that fails proves nothing about its job: the worker follows the job, and the task defers again."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from airflow.sdk.bases.operator import TriggerFailureReason
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ktrain.engine.follow.deferral import seconds_in_worker
from airflow_provider_ktrain.exceptions import TrainingJobError, TrainingTimeoutError, TrainingUserCodeError
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.operators.task_instance import DefersSoon, FollowsLong, Instance, Object, first_event, of_each_kind

FAILED = TriggerFailureReason.TRIGGER_FAILURE.value  # in the format that Airflow's database returns
TIMED_OUT = TriggerFailureReason.TRIGGER_TIMEOUT.value
TRACEBACK = ["Traceback (most recent call last):\n", "ModuleNotFoundError: No module named 'airflow_provider_ktrain'\n"]
COUNTS = """i=0; while [ $i -lt 8 ]; do echo line $i; i=$((i+1)); sleep 0.5; done; echo 'KTRAIN_RESULT {"loss": 0.5}'"""


def fails_to_load(instance: Instance) -> Any:
    """Airflow's answer to an ImportError, or to a TypeError of the trigger's arguments."""
    return instance.fail(FAILED, traceback=TRACEBACK)


def fails_by_event(instance: Instance) -> Any:
    try:
        return instance.resume({"version": 1, "error": "OSError: no luck"})
    except TaskDeferred as deferred:
        return deferred


def sends_an_unreadable_event(instance: Instance) -> Any:
    try:
        return instance.resume({"version": 99, "outcome": {"shape": "unknown"}})
    except TaskDeferred as deferred:
        return deferred


WAYS = pytest.mark.parametrize("way", [fails_to_load, fails_by_event, sends_an_unreadable_event])


def arguments(deferred: Any) -> Object:
    assert isinstance(deferred, TaskDeferred)
    found: Object = deferred.trigger.serialize()[1]
    return found


@WAYS
def test_running_job_is_followed_and_deferred_again(
    instance: Instance, capsys: pytest.CaptureFixture[str], way: Any
) -> None:
    first = arguments(instance.execute(operator=DefersSoon))
    capsys.readouterr()
    again = arguments(way(instance))
    assert again["failures"] == 1
    assert {**again, "failures": 0, "handover": first["handover"]} == first
    (job,) = instance.jobs()
    assert job["metadata"]["uid"] == first["job"]["uid"]
    assert "deletionTimestamp" not in job["metadata"]
    instance.wait_running()
    output = capsys.readouterr().out
    assert "The trigger failed" in output
    assert output.count("may be repeated: the trigger failed") == 1


@WAYS
def test_ended_job_ends_the_task(instance: Instance, way: Any) -> None:
    instance.execute(operator=FollowsLong, command=["sh", "-c", COUNTS])
    instance.wait_ended()
    assert way(instance) == {"loss": 0.5}
    assert not instance.jobs()


def test_failed_job_raises_its_cause(instance: Instance) -> None:
    instance.execute(operator=FollowsLong, command=["sh", "-c", "sleep 5; exit 3"])
    instance.wait_ended()
    with pytest.raises(TrainingUserCodeError, match="exit code 3"):
        fails_to_load(instance)
    assert not instance.jobs()


def test_worker_follows_to_the_end_after_repeated_failures(instance: Instance) -> None:
    deferrals = [instance.execute(operator=DefersSoon, command=["sh", "-c", f"sleep 60; {COUNTS}"])]
    deferrals += [fails_to_load(instance), fails_to_load(instance)]
    assert [arguments(deferred)["failures"] for deferred in deferrals] == [0, 1, 2]
    assert fails_to_load(instance) == {"loss": 0.5}
    assert not instance.jobs()


def test_worker_continues_logs_from_the_last_deferral(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """Airflow erases the failed trigger's log, so its lines are read again; those of the worker aren't."""
    instance.execute(operator=DefersSoon, command=["sh", "-c", COUNTS])
    while isinstance(fails_to_load(instance), TaskDeferred):
        pass
    lines = re.findall(r"\[Master 0\] line (\d+)", capsys.readouterr().out)
    assert lines == [str(number) for number in range(8)]


def test_worker_follows_longer_after_each_failure() -> None:
    schedule = PyTorchJobOperator.seconds_in_worker
    assert [seconds_in_worker(failures, schedule) for failures in (1, 2, 3, 4, 5)] == [60, 300, 900, None, None]


@of_each_kind
def test_only_a_deferral_timeout_releases_the_job(instance: Instance) -> None:
    instance.execute(operator=DefersSoon)
    assert isinstance(instance.fail("an error of a later Airflow"), TaskDeferred)
    instance.wait_running()
    with pytest.raises(TrainingTimeoutError):
        instance.fail(TIMED_OUT)
    assert not instance.jobs()


def test_without_a_stored_deferral_the_job_is_followed(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    instance.execute(operator=DefersSoon)
    del instance.store["ktrain_deferral"]
    assert isinstance(fails_to_load(instance), TaskDeferred)
    instance.wait_running()
    assert "Lines since the job's start may be repeated" in capsys.readouterr().out


def test_without_any_state_a_retry_adopts_the_job(instance: Instance) -> None:
    instance.execute(operator=DefersSoon, retries=1)
    instance.store.clear()
    with pytest.raises(TrainingJobError, match="A retry adopts the job"):
        fails_to_load(instance)
    instance.wait_running()


def test_deferral_of_another_try_is_not_used(instance: Instance) -> None:
    instance.execute(operator=DefersSoon, retries=1)
    old = instance.store["ktrain_deferral"]
    second = arguments(instance.execute(operator=DefersSoon, number=2, retries=1))
    instance.store["ktrain_deferral"] = old
    assert arguments(fails_to_load(instance))["job"]["owner"] == second["job"]["owner"]


@of_each_kind
@pytest.mark.embedded("sets fault switches")
def test_unavailable_api_server_does_not_release_the_job(instance: Instance) -> None:
    """Nothing can be proved in this state: the task defers again with the same arguments."""
    first = arguments(instance.execute(operator=DefersSoon))
    instance.cluster.admin("status", status=503, path=f"/{instance.kind.plural}|/pods")
    try:
        again = arguments(fails_to_load(instance))
    finally:
        instance.cluster.admin("clear")
    assert again["job"] == first["job"]
    instance.wait_running()


@pytest.mark.parametrize("retries", [0, 1])
def test_failed_connection_does_not_release_the_job(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    instance.execute(operator=DefersSoon, retries=retries)
    config = yaml.safe_load(instance.cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    extra = {"kube_config": json.dumps(config)}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    assert isinstance(fails_to_load(instance), TaskDeferred)
    instance.wait_running()


# the trigger


def test_error_in_the_trigger_is_an_event(instance: Instance) -> None:
    """If a trigger raises, the worker gets only a traceback."""
    kwargs = arguments(instance.execute(operator=DefersSoon))
    trigger = TrainingJobTrigger(**{**kwargs, "job": {**kwargs["job"], "kind": "NoJob"}})
    event = first_event(trigger)
    assert "NoJob" in event["error"]
    with pytest.raises(TaskDeferred) as again:
        instance.resume(event)
    assert again.value.trigger.failures == 1
    instance.wait_running()


@pytest.mark.virtual_time
async def test_trigger_without_a_job_is_built_and_ends_with_an_error() -> None:
    event = (await anext(aiter(TrainingJobTrigger(colour="blue").run()))).payload
    assert event["version"] == 1
    assert "no kind, version, namespace, name, uid" in event["error"]


def test_arguments_of_an_earlier_release_are_followed(instance: Instance) -> None:
    """They were flat before their format was frozen. Without a handover, all lines are read again."""
    kwargs = arguments(instance.execute(operator=DefersSoon, command=["sh", "-c", "sleep 5"]))
    flat = {name: kwargs[name] for name in ("job", "options", "kubernetes_conn_id", "cluster_context", "failures")}
    trigger = TrainingJobTrigger(**flat, cursor={"zlib": "c$}@"}, metrics={"seconds.queued": 1}, marked="", past={})
    ti: Any = SimpleNamespace(dag_id="dag", run_id=instance.run_id, task_id="train", map_index=-1)
    trigger.task_instance = ti
    event = first_event(trigger)
    assert event["outcome"]["succeeded"]
    assert instance.resume(event) is None
    assert not instance.jobs()


def test_job_without_an_owner_is_never_released() -> None:
    """It doesn't belong to a task, and its deletion would not be fenced."""
    assert TrainingJobTrigger(job={"owner": ""}).options["release"] is False
    assert TrainingJobTrigger(job={"owner": "ti-1"}).options["release"] is True
