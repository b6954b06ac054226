"""The message at a task's deferral about the place where the trigger's log lines will be visible."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ktrain.compat import trigger_log_hint
from tests.operators.task_instance import Instance

LOGGING = "AIRFLOW__LOGGING__"
UPLOADED = "Log lines from the trigger appear here when the trigger ends"


def set_remote(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv(f"{LOGGING}REMOTE_LOGGING", "True")
    monkeypatch.setenv(f"{LOGGING}REMOTE_BASE_LOG_FOLDER", folder)


def test_local_logs_need_no_hint() -> None:
    assert trigger_log_hint() == ""


@pytest.mark.parametrize("folder", ["s3://bucket/logs", "gs://bucket/logs", "wasb-logs"])
def test_uploaded_logs_appear_when_the_trigger_ends(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    set_remote(monkeypatch, folder)
    assert trigger_log_hint().startswith(UPLOADED)


@pytest.mark.parametrize("folder", ["stackdriver://logs", ""])
def test_storage_that_is_written_live_needs_no_hint(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    set_remote(monkeypatch, folder)
    assert trigger_log_hint() == ""


@pytest.mark.parametrize(
    "folder", ["cloudwatch://arn:aws:logs:eu-west-1:1:log-group:airflow", "oss://bucket/logs", "hdfs://host/logs"]
)
def test_hint_names_the_file_that_airflow_does_not_show(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    set_remote(monkeypatch, folder)
    assert "apache/airflow#70317" in trigger_log_hint()
    assert ".trigger.<id>.log" in trigger_log_hint()


def test_the_hint_is_logged_at_the_deferral(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_remote(monkeypatch, "s3://bucket/logs")
    assert isinstance(instance.execute(), TaskDeferred)
    assert UPLOADED in capsys.readouterr().out
