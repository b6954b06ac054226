"""The message at a task's deferral about the place where the trigger's log lines will be visible."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ktrain.compat import trigger_log_hint
from tests.operators.task_instance import Instance, Ti

LOGGING = "AIRFLOW__LOGGING__"
UPLOADED = "Log lines from the trigger appear here when the trigger ends"


def set_remote(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv(f"{LOGGING}REMOTE_LOGGING", "True")
    monkeypatch.setenv(f"{LOGGING}REMOTE_BASE_LOG_FOLDER", folder)


def hint(map_index: int = -1) -> str:
    return trigger_log_hint(Ti(run_id="manual__2026-11-22T08:00:00", try_number=2, max_tries=2, map_index=map_index))


def test_local_logs_need_no_hint() -> None:
    assert hint() == ""


@pytest.mark.parametrize("folder", ["s3://bucket/logs", "gs://bucket/logs", "wasb-logs"])
def test_uploaded_logs_appear_when_the_trigger_ends(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    set_remote(monkeypatch, folder)
    assert hint().startswith(UPLOADED)


@pytest.mark.parametrize("folder", ["stackdriver://logs", ""])
def test_storage_that_is_written_live_needs_no_hint(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    set_remote(monkeypatch, folder)
    assert hint() == ""


@pytest.mark.parametrize(("map_index", "directory"), [(-1, ""), (3, "map_index=3/")])
def test_cloudwatch_hint_names_the_stream(monkeypatch: pytest.MonkeyPatch, map_index: int, directory: str) -> None:
    set_remote(monkeypatch, "cloudwatch://arn:aws:logs:eu-west-1:1:log-group:airflow")
    first, stream = hint(map_index).splitlines()
    assert "apache/airflow#70317" in first
    path = f"dag_id=dag/run_id=manual__2026-11-22T08_00_00/task_id=train/{directory}attempt=2.log"
    assert stream == f"{path}.trigger.<id>.log"
    assert len(first) < 200


def test_the_hint_is_logged_at_the_deferral(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_remote(monkeypatch, "s3://bucket/logs")
    assert isinstance(instance.execute(), TaskDeferred)
    assert UPLOADED in capsys.readouterr().out
