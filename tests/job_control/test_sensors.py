"""Sensors wait for jobs that others submitted, and don't delete them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
from airflow.sdk.exceptions import AirflowException, AirflowSensorTimeout, AirflowSkipException, TaskDeferred

from airflow_provider_ktrain.exceptions import TrainingJobError, TrainingUserCodeError
from airflow_provider_ktrain.sensors.training import MPIJobSensor, PyTorchJobSensor
from tests.apiserver import Object
from tests.job_control.virtual_jobs import VirtualJobs
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Store
from tests.operators.virtual_cluster import virtual_cluster

FAILS = ["sh", "-c", "echo no data >&2; exit 3"]


def sensor(job: Object, **arguments: Any) -> Any:
    """A sensor for a job; it isn't deferrable by default."""
    of = MPIJobSensor if job["kind"] == "MPIJob" else PyTorchJobSensor
    arguments = {"task_id": "wait", "job_name": job["metadata"]["name"], "deferrable": False} | arguments
    return of(timeout=240, **arguments)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualJobs]:
    """Jobs in virtual time, in the namespace of the connection `kubernetes_default`."""
    with virtual_cluster(tmp_path) as cluster, VirtualJobs(cluster) as made:
        set_connection(cluster, monkeypatch)
        yield made


def test_sensor_waits_for_success_and_keeps_the_job(jobs: VirtualJobs) -> None:
    job = jobs.submit(command=["true"])
    sensor(job).execute({})
    assert jobs.condition(job, "Succeeded")


def test_sensor_waits_for_a_missing_job(jobs: VirtualJobs, capfd: pytest.CaptureFixture[str]) -> None:
    manifest = jobs.build(command=["true"])
    name = f"PyTorchJob {jobs.namespace}/{manifest['metadata']['name']}"
    with pytest.raises(TaskDeferred):
        sensor(manifest, deferrable=True).execute({})
    assert f"Waiting until {name} is Succeeded. Currently it doesn't exist" in "".join(capfd.readouterr())
    jobs.world.after(100, jobs.submit, manifest)
    sensor(manifest).execute({})
    assert jobs.condition(jobs.submitted(manifest), "Succeeded")
    sensor(manifest).execute({})
    assert f"Waiting until {name} is Succeeded. Currently it is Succeeded" in "".join(capfd.readouterr())


@pytest.mark.parametrize("conditions", ["Running", ["Running", "Succeeded"]])
def test_sensor_waits_for_one_of_several_conditions(jobs: VirtualJobs, conditions: str | list[str]) -> None:
    job = jobs.submit(kind="MPIJob", workers=1)
    sensor(job, conditions=conditions).execute({})
    assert jobs.condition(job, "Running")
    assert not jobs.condition(job, "Succeeded")


def test_sensor_fails_with_the_cause_and_keeps_the_job(jobs: VirtualJobs) -> None:
    job = jobs.submit(command=FAILS)
    with pytest.raises(TrainingUserCodeError) as error:
        sensor(job).execute({})
    assert str(error.value).splitlines()[0] == "Master 0 failed with exit code 3. Last log line: no data"
    assert jobs.read(job)
    assert jobs.pods(job)
    sensor(job, conditions=["Failed"]).execute({})  # unless the sensor waits for this condition


def test_sensor_fails_if_the_job_is_deleted(jobs: VirtualJobs) -> None:
    """It is deleted only after the sensor has seen it, because a sensor waits for a missing job."""
    job = jobs.submit()
    jobs.wait(job, "Running")
    jobs.world.after(100, jobs.delete, job)
    with pytest.raises(AirflowException, match="was deleted by someone else before it ended"):
        sensor(job).execute({})


def test_poke_mode_retries_while_credentials_are_refused(jobs: VirtualJobs, capfd: pytest.CaptureFixture[str]) -> None:
    job = jobs.submit()
    jobs.wait(job, "Running")

    def refuse_for_a_moment() -> None:
        jobs.cluster.admin("status", status=401, path="/pytorchjobs|/pods", seconds=8)
        jobs.cluster.admin("drop", seconds=0.01)

    jobs.world.after(50, refuse_for_a_moment)
    jobs.world.after(100, jobs.patch, job, {"spec": {"runPolicy": {"suspend": True}}})
    began = jobs.world.now
    sensor(job, conditions=["Suspended"]).execute(context())
    assert jobs.world.now - began == pytest.approx(100, abs=1)
    assert "can't be watched. Retrying" in "".join(capfd.readouterr())


def test_sensor_timeout_keeps_the_job(jobs: VirtualJobs) -> None:
    job = jobs.submit()
    jobs.wait(job, "Running")
    began = jobs.world.now
    with pytest.raises(AirflowException, match=r"is not Succeeded after 240 s"):
        sensor(job).execute({})
    assert jobs.world.now - began == pytest.approx(240, abs=0.1)
    with pytest.raises(AirflowSkipException):
        sensor(job, soft_fail=True).execute({})
    assert jobs.condition(job, "Running")


@pytest.mark.parametrize(
    ("lenient", "error", "prefix"),
    [
        ({}, AirflowSensorTimeout, ""),
        ({"soft_fail": True}, AirflowSkipException, "Skipped instead of failed.\n"),
        ({"never_fail": True}, AirflowSkipException, "Skipped instead of failed.\n"),
    ],
    ids=["fails", "soft_fail", "never_fail"],
)
def test_timeout_in_the_triggerer_names_the_awaited_condition(
    lenient: dict[str, Any], error: type[AirflowException], prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = MPIJobSensor(task_id="wait", job_name="train", conditions=["Running"], timeout=600, **lenient)
    with pytest.raises(error) as raised:
        waiting.resume_execution(TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_TIMEOUT}, {})
    assert str(raised.value) == f"{prefix}MPIJob train is not Running after 600 s"
    assert ("Skipped instead of failed.\nMPIJob train" in "".join(capfd.readouterr())) is bool(lenient)


def test_sensor_forwards_logs_on_request(jobs: VirtualJobs, capfd: pytest.CaptureFixture[str]) -> None:
    job = jobs.submit(command=["sh", "-c", "echo lesson one"])
    sensor(job).execute({})
    assert "lesson one" not in "".join(capfd.readouterr())
    sensor(job, logs="all").execute({})
    assert "[Master 0] lesson one" in "".join(capfd.readouterr())


def test_reschedule_mode_checks_once_per_run(jobs: VirtualJobs) -> None:
    job = jobs.build()
    looks = sensor(job, mode="reschedule", conditions=["Running"])
    assert looks.poke({}) is False
    jobs.submit(job)
    jobs.wait(jobs.submitted(job), "Running")
    assert looks.poke({}) is True
    failed = jobs.submit(command=FAILS)
    jobs.wait(failed, "Failed")
    with pytest.raises(TrainingUserCodeError, match="no data"):
        sensor(failed, mode="reschedule").poke({})


def test_deferred_sensor_holds_no_worker(jobs: VirtualJobs) -> None:
    job = jobs.submit(command=["true"])
    waiting = sensor(job, deferrable=True)
    with pytest.raises(TaskDeferred) as deferred:
        waiting.execute({})
    trigger = deferred.value.trigger
    path, arguments = trigger.serialize()
    assert path == "airflow_provider_ktrain.triggers.training.TrainingJobTrigger"
    assert "manifest" not in arguments
    assert arguments["options"]["release"] is False

    async def event() -> Any:
        return await anext(type(trigger)(**arguments).run())

    payload = asyncio.run(event()).payload
    waiting.execute_complete({}, payload)
    assert jobs.read(job)
    cause = {"category": "user code", "summary": "Master 0 failed"}
    outcome = {**payload["outcome"], "phase": "Failed", "cause": cause, "succeeded": False}
    with pytest.raises(TrainingUserCodeError, match="Master 0 failed"):
        waiting.execute_complete({}, {**payload, "outcome": outcome})


# failures that contain no information about the job


class Patient(PyTorchJobSensor):
    """Waits in the worker for a minute after a trigger's first failure, then for a long time."""

    seconds_in_worker = (60.0, 240.0)


def context(try_number: int = 1, max_tries: int = 0) -> Any:
    return {"ti": SimpleNamespace(try_number=try_number, max_tries=max_tries), "task_state_store": Store()}


def unreachable(jobs: VirtualJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    content = yaml.safe_load(jobs.kubeconfig.read_text())
    content["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    extra = {"kube_config": json.dumps(content), "namespace": jobs.namespace}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))


FAILURES: list[tuple[str, dict[str, Any]]] = [
    (TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_FAILURE, "traceback": ["ImportError: no such module"]}),
    ("execute_complete", {"event": {"version": 1, "error": "ImportError: no such module"}}),
]


@pytest.mark.parametrize(("method", "arguments"), FAILURES, ids=["no trigger", "event"])
def test_failed_trigger_is_replaced(
    jobs: VirtualJobs, capfd: pytest.CaptureFixture[str], method: str, arguments: dict[str, Any]
) -> None:
    job, here = jobs.submit(), context()
    waiting = Patient(task_id="wait", job_name=job["metadata"]["name"], timeout=240)
    with pytest.raises(TaskDeferred):
        waiting.execute(here)
    with pytest.raises(TaskDeferred) as again:
        waiting.resume_execution(method, arguments, here)
    assert re.search(r"The trigger failed\. .*\nImportError: no such module", "".join(capfd.readouterr()))
    assert again.value.trigger.serialize()[1]["job"]["name"] == job["metadata"]["name"]
    assert again.value.timeout.total_seconds() < 240, "the timeout of the sensor goes on"
    waiting.conditions = ["Running"]
    waiting.resume_execution(method, arguments, here)  # the second wait in the worker is longer
    assert jobs.condition(job, "Running")


def test_repeatedly_failing_trigger_ends_at_the_timeout(jobs: VirtualJobs) -> None:
    job, here = jobs.submit(), context()
    waiting = Patient(task_id="wait", job_name=job["metadata"]["name"], timeout=600)
    began = jobs.world.now
    with pytest.raises(TaskDeferred):
        waiting.execute(here)
    here["task_state_store"]["ktrain_sensor"]["failures"] = 5
    with pytest.raises(AirflowSensorTimeout, match="is not Succeeded after 600 s"):
        waiting.resume_execution(*FAILURES[0], here)
    assert jobs.world.now - began == pytest.approx(600, abs=0.1)


def test_sensor_retries_while_the_cluster_is_unreachable(
    jobs: VirtualJobs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job, here = jobs.submit(), context()
    waiting = Patient(task_id="wait", job_name=job["metadata"]["name"], timeout=240)
    with pytest.raises(TaskDeferred):
        waiting.execute(here)
    unreachable(jobs, monkeypatch)
    with pytest.raises(TaskDeferred):
        waiting.resume_execution(*FAILURES[0], here)
    assert f"PyTorchJob {job['metadata']['name']} can't be watched. Retrying." in "".join(capfd.readouterr())


def test_soft_fail_skips_for_an_unreachable_cluster_only_without_retries(
    jobs: VirtualJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable(jobs, monkeypatch)
    for deferrable in (True, False):
        waiting = sensor(jobs.build(), deferrable=deferrable, soft_fail=True)
        with pytest.raises(TrainingJobError, match="can't be reached"):
            waiting.execute(context(try_number=1, max_tries=1))
        with pytest.raises(AirflowSkipException, match="can't be reached"):
            waiting.execute(context(try_number=2, max_tries=1))


def test_soft_fail_skips_after_a_failure_while_deferred(jobs: VirtualJobs) -> None:
    cause = {"category": "user code", "summary": "Master 0 failed"}
    event = {"version": 1, "outcome": {"phase": "Failed", "succeeded": False, "cause": cause}}
    waiting = sensor(jobs.build(), deferrable=True, soft_fail=True)
    with pytest.raises(AirflowSkipException, match="Master 0 failed"):
        waiting.resume_execution("execute_complete", {"event": event}, context(try_number=1, max_tries=1))


def test_soft_fail_skips_after_a_failed_trigger(jobs: VirtualJobs) -> None:
    job = jobs.submit(command=["true"])
    jobs.wait(job, "Succeeded")
    waiting = Patient(
        task_id="wait", job_name=job["metadata"]["name"], conditions=["Restarting"], soft_fail=True, timeout=240
    )
    with pytest.raises(AirflowSkipException, match="is Succeeded, not Restarting"):
        waiting.resume_execution(*FAILURES[0], context())


def test_reschedule_mode_retries_while_the_cluster_is_unreachable(
    jobs: VirtualJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable(jobs, monkeypatch)
    assert sensor(jobs.build(), mode="reschedule").poke(context()) is False


def test_unknown_condition_is_refused(jobs: VirtualJobs) -> None:
    for wrong, first, last in (
        ("Done", "", "; remedy: write one of these"),
        ("running", r"did you mean 'Running'\? ", ""),
    ):
        found = rf"found '{wrong}'; expected some of Created, Running, .*Failed"
        expected = rf"^conditions\[0\]: {first}invalid parameter; {found}{last}\nTask: "
        with pytest.raises(ValueError, match=expected):
            sensor(jobs.build(), conditions=[wrong])
