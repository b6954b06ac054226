"""A task that resumes logs its trigger's lines again, from the pods, where Airflow doesn't show them any more."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ktrain.core.formats import DEFERRAL_STATE
from airflow_provider_ktrain.core.logs import repetition
from airflow_provider_ktrain.core.logs.repetition import LogFiles, LogStorage, Repetition
from airflow_provider_ktrain.exceptions import TrainingJobError, TrainingTimeoutError
from tests.operators.task_instance import DAG_ID, of_each_kind
from tests.operators.virtual_instance import VirtualInstance
from tests.virtual import EPOCH, START

pytestmark = pytest.mark.embedded("needs the scripted API server")
EARLY, LATE = "first of all", ["a late line", "one more", "one more"]
PRINTS = f"echo {EARLY}; sleep 60; echo {'; echo '.join(LATE)}"
TRAINS = ["sh", "-c", f"""{PRINTS}; echo 'KTRAIN_RESULT {{"loss": 0.5}}'"""]
FAILS = ["sh", "-c", f"{PRINTS}; exit 3"]
RESULT = ['KTRAIN_RESULT {"loss": 0.5}']
AGAIN = "lines are logged again from the pods"
LOST = "Only the triggerer's log has them."


class CloudWatchRemoteLogIO:
    """Stands in for the handler of Airflow's Amazon provider."""


class OfCompany(CloudWatchRemoteLogIO):
    """A company's own handler."""


class S3RemoteLogIO:
    """Stands in for the handler of Airflow's Amazon provider."""


class Elsewhere:
    """A handler that nobody has tried."""


Remote = Callable[[type], None]


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Remote:
    """Sets the class of Airflow's handler of remote logs."""

    def set_remote(handler: type) -> None:
        monkeypatch.setattr("airflow.sdk.log.load_remote_log_handler", handler)

    return set_remote


class Disk:
    """The log folder of a component."""

    def __init__(self, folder: Path, instance: VirtualInstance) -> None:
        self.folder, self._instance = folder, instance

    def write(self, ago: float = 0.0, suffix: str = "") -> None:
        """Write a record to the task's log."""
        name = f"dag_id={DAG_ID}/run_id={self._instance.run_id}/task_id=train/attempt=1.log{suffix}"
        file, at = self.folder / name, EPOCH + self._instance.clock - START - ago
        file.parent.mkdir(parents=True, exist_ok=True)
        time = datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()
        file.write_text(json.dumps({"timestamp": time, "event": "::group::Pre task execution logs"}) + "\n")
        os.utime(file, (at, at))


@pytest.fixture
def disk(instance: VirtualInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The worker's."""
    monkeypatch.setenv("AIRFLOW__LOGGING__BASE_LOG_FOLDER", str(tmp_path / "worker"))
    monkeypatch.setenv("AIRFLOW__KTRAIN__REPEAT_LOGS", "auto")
    return Disk(tmp_path / "worker", instance)


Records = list[Mapping[str, Any]]


def resumed(instance: VirtualInstance, deferred: Any, event: Any = None) -> tuple[Any, Records]:
    """The result of the task, or its error, and the records of the worker in which it has resumed."""
    assert isinstance(deferred, TaskDeferred)
    event = event or instance.event(deferred)
    with structlog.testing.capture_logs() as records:
        try:
            result = instance.resume(event)
        except TrainingJobError as error:
            result = error
    return result, list(records)


def lines(records: Records) -> list[str]:
    """The lines of the container."""
    return [
        text.partition("] ")[2] for one in records if (text := one["event"]).startswith(("[Master 0] ", "[node 0] "))
    ]


def say(records: Records, text: str) -> Records:
    return [one for one in records if text in one["event"]]


@of_each_kind
def test_lines_on_another_disk_are_logged_again(instance: VirtualInstance, disk: Disk) -> None:
    disk.write()
    Disk(disk.folder.parent / "triggerer", instance).write(suffix=".trigger.7.log")
    result, records = resumed(instance, instance.execute(command=TRAINS))
    assert result == {"loss": 0.5}
    assert not instance.jobs()
    assert lines(records) == [*LATE, *RESULT], "those that the worker has not logged, without a mark"
    (why,) = say(records, AGAIN)
    first = next(one for one in records if one["event"].endswith(f"] {LATE[0]}"))
    assert why["timestamp"] == first["timestamp"], "the UI sorts records"
    assert first["logger"] == instance.replica
    assert not say(records, LOST)


def test_all_lines_are_logged_on_another_workers_disk(instance: VirtualInstance, disk: Disk) -> None:
    deferred = instance.execute(command=TRAINS)
    event = instance.event(deferred)
    disk.write()
    _, records = resumed(instance, deferred, event)
    assert lines(records) == [EARLY, *LATE, *RESULT]


def test_lines_on_the_same_disk_are_not(instance: VirtualInstance, disk: Disk) -> None:
    disk.write()
    deferred = instance.execute(command=TRAINS)
    event = instance.event(deferred)
    disk.write(suffix=".trigger.7.log")
    _, records = resumed(instance, deferred, event)
    assert not lines(records)
    assert not say(records, "trigger may be missing")


def test_file_of_an_earlier_trigger_proves_nothing(instance: VirtualInstance, disk: Disk) -> None:
    disk.write()
    disk.write(ago=600.0, suffix=".trigger.7.log")
    _, records = resumed(instance, instance.execute(command=TRAINS))
    assert lines(records) == [*LATE, *RESULT]


def test_failure_is_raised_after_its_lines(instance: VirtualInstance, disk: Disk) -> None:
    disk.write()
    error, records = resumed(instance, instance.execute(command=FAILS))
    assert "exit code 3" in str(error)
    assert lines(records) == LATE
    assert not instance.jobs()


def test_kept_job_has_its_lines_logged_again_too(instance: VirtualInstance, disk: Disk) -> None:
    disk.write()
    _, records = resumed(instance, instance.execute(command=TRAINS, on_finish_action="keep_job"))
    assert lines(records) == [*LATE, *RESULT]
    assert instance.jobs()


def test_job_that_was_released_while_it_ran_has_no_lines_left(instance: VirtualInstance, disk: Disk) -> None:
    disk.write()
    limit = datetime.timedelta(seconds=120)
    command = ["sh", "-c", f"{PRINTS}; sleep 600"]
    error, records = resumed(instance, instance.execute(command=command, execution_timeout=limit))
    assert isinstance(error, TrainingTimeoutError)
    assert not lines(records)
    assert len(say(records, LOST)) == 1


@pytest.mark.parametrize("parameters", [{"logs": "none"}, {}], ids=["no-logs", "never"])
def test_nothing_is_logged_again_if_nobody_wants_it(
    parameters: dict[str, Any], instance: VirtualInstance, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write()
    if not parameters:
        monkeypatch.setenv("AIRFLOW__KTRAIN__REPEAT_LOGS", "never")
    _, records = resumed(instance, instance.execute(command=TRAINS, **parameters))
    assert not lines(records)
    assert not say(records, "again")


def test_log_that_is_not_found_is_named(instance: VirtualInstance, disk: Disk) -> None:
    _, records = resumed(instance, instance.execute(command=TRAINS))
    assert not lines(records)
    assert len(say(records, "log_filename_template")) == 1


def test_only_the_last_lines_are_logged_again(
    instance: VirtualInstance, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_provider_ktrain.engine.logs.follower.AGAIN_LINES", 3)
    disk.write()
    command = ["sh", "-c", f"echo {EARLY}; sleep 60; echo 1; sleep 1; echo 2; sleep 1; echo 3; sleep 1; echo 4"]
    _, records = resumed(instance, instance.execute(command=command))
    assert lines(records) == ["2", "3", "4"]
    (missing,) = say(records, LOST)
    assert missing["event"].startswith(f"Not logged again: 1 line of {instance.job_name}-master-0/pytorch.")


def test_kill_ends_it_and_the_job_is_deleted(
    instance: VirtualInstance, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow lets a task go on after `on_kill`, for 5 s."""
    disk.write()
    deferred = instance.execute(command=TRAINS)
    event = instance.event(deferred)
    instance.api.pause("before GET .*/log")
    began = instance.clock
    instance.kill_when(lambda: instance.clock > began + 1.0)
    result, _ = resumed(instance, deferred, event)
    assert result == {"loss": 0.5}
    assert not instance.jobs()
    assert instance.clock - began < 5.0


@pytest.mark.parametrize(("limit", "seconds"), [(None, 15.0), (36.0, 9.0)])
def test_logs_that_are_not_available_delay_the_end_for_seconds(
    limit: float | None, seconds: float, instance: VirtualInstance, disk: Disk
) -> None:
    """A quarter of `execution_timeout`, at most 15."""
    disk.write()
    timeout = None if limit is None else datetime.timedelta(seconds=limit)
    command = ["sh", "-c", f"echo {EARLY}; sleep 20; echo {LATE[0]}"]
    deferred = instance.execute(command=command, execution_timeout=timeout)
    event = instance.event(deferred)
    instance.api.pause("before GET .*/log")
    began = instance.clock
    _, records = resumed(instance, deferred, event)
    assert not instance.jobs()
    assert instance.clock - began == pytest.approx(seconds, abs=1.0)
    assert len(say(records, LOST)) == 1


# remote logs


@pytest.mark.parametrize("handler", [CloudWatchRemoteLogIO, OfCompany])
def test_cloudwatch_gets_records_of_now(handler: type, instance: VirtualInstance, disk: Disk, remote: Remote) -> None:
    """It rejects a request whose events span over 24 hours, so the kubelet's time is part of the text."""
    remote(handler)
    deferred = instance.execute(command=TRAINS)
    event = instance.event(deferred)
    instance.store[DEFERRAL_STATE]["handover"]["cursor"] = {}  # it did not fit
    (written,) = instance.api.log(f"{instance.job_name}-master-0").files
    for days, record in enumerate(reversed(written)):
        earlier = datetime.datetime.fromisoformat(record.time) - datetime.timedelta(days=days)
        record.time = earlier.strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
    _, records = resumed(instance, deferred, event)
    assert len(say(records, AGAIN)) == 1
    assert lines(records) == [f"{record.time} {record.text.decode()}" for record in written]
    assert not [one for one in records if "timestamp" in one and one["event"].startswith("[Master 0]")]


def test_lines_on_s3_are_shown_anyway(instance: VirtualInstance, disk: Disk, remote: Remote) -> None:
    remote(S3RemoteLogIO)
    _, records = resumed(instance, instance.execute(command=TRAINS))
    assert not lines(records)


def test_handler_that_nobody_has_tried_is_named(instance: VirtualInstance, disk: Disk, remote: Remote) -> None:
    remote(Elsewhere)
    _, records = resumed(instance, instance.execute(command=TRAINS))
    assert not lines(records)
    assert len(say(records, "from Elsewhere.")) == 1


def test_names_of_airflows_handlers() -> None:
    amazon = pytest.importorskip("airflow.providers.amazon.aws.log")
    from airflow.providers.amazon.aws.log.cloudwatch_task_handler import CloudWatchRemoteLogIO as CloudWatch
    from airflow.providers.amazon.aws.log.s3_task_handler import S3RemoteLogIO as S3

    assert amazon
    assert CloudWatch.__name__ in repetition.READ_ONE_FILE
    assert S3.__name__ in repetition.READ_ALL_FILES


HERE = LogFiles(began_at=1000.0, trigger_wrote_at=5000.0)
APART = LogFiles(began_at=1000.0, trigger_wrote_at=None)


@pytest.mark.parametrize(
    ("choice", "handlers", "files", "pod", "repeats"),
    [
        ("auto", (), HERE, False, False),
        ("", (), APART, False, True),
        ("auto", (), APART, True, False),
        ("always", (), APART, True, True),
        ("always", (), HERE, False, True),
        ("always", (), None, False, True),
        ("always", ("S3RemoteLogIO",), None, False, True),
        ("never", ("CloudWatchRemoteLogIO",), None, False, False),
        ("auto", ("CloudWatchRemoteLogIO",), None, True, True),
        ("auto", ("OSSRemoteLogIO",), None, False, True),
        ("auto", ("HdfsRemoteLogIO",), None, False, True),
        ("auto", ("GCSRemoteLogIO",), None, False, False),
        ("auto", ("WasbRemoteLogIO",), None, False, False),
        ("auto", ("ElasticsearchRemoteLogIO",), None, False, False),
    ],
)
def test_decision(choice: str, handlers: tuple[str, ...], files: LogFiles | None, pod: bool, repeats: bool) -> None:
    decided = repetition.repetition_of(choice, LogStorage(handlers, files, pod), 4000.0)
    assert isinstance(decided, Repetition) is repeats
