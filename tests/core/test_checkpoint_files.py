"""What the log of a retry contains about a checkpoint directory in object storage."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from airflow_provider_ktrain.core.manifest.job_request import without_connection
from airflow_provider_ktrain.core.reporting.checkpoint_files import describe_files, is_url

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("directory", "url"),
    [
        ("s3://bucket/checkpoints", True),
        ("abfs://container@account.dfs.core.windows.net/c", True),
        ("/checkpoints", False),
        ("checkpoints", False),
        ("file:///checkpoints", False),
    ],
)
def test_paths_in_pods_are_no_urls(directory: str, url: bool) -> None:
    assert is_url(directory) is url


@pytest.mark.parametrize(
    ("directory", "program"),
    [
        ("s3://storage@bucket/a@b", "s3://bucket/a@b"),
        ("gs://storage@bucket/c", "gs://bucket/c"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("abfs://container@account.dfs.core.windows.net/c", "abfs://container@account.dfs.core.windows.net/c"),
        ("/checkpoints/a@b", "/checkpoints/a@b"),
    ],
)
def test_program_gets_the_directory_without_the_connection(directory: str, program: str) -> None:
    assert without_connection(directory) == program


@pytest.mark.parametrize("key", ["LastModified", "mtime", "last_modified", "updated"])
def test_newest_file_is_named(key: str) -> None:
    files: dict[str, dict[str, Any]] = {
        "bucket/run/step_2/model.pt": {"size": 5 << 19, key: NOON + timedelta(hours=1)},
        "bucket/run/step_1/model.pt": {"size": 1_000, key: NOON},
    }
    newest = "the newest is step_2/model.pt (2.5 MiB, 2026-11-22 13:00:00 UTC)"
    assert describe_files(files, "bucket/run/") == f"has 2 files (2.5 MiB), {newest}"


@pytest.mark.parametrize(
    "at", [NOON.timestamp(), NOON.replace(tzinfo=None), NOON.astimezone(timezone(timedelta(hours=2)))]
)
def test_times_are_shown_in_utc(at: Any) -> None:
    shown = describe_files({"run/last.pt": {"size": 12, "mtime": at}}, "run")
    assert shown == "has 1 file (12 bytes), the newest is last.pt (12 bytes, 2026-11-22 12:00:00 UTC)"


def test_files_without_times() -> None:
    assert describe_files({"run/last.pt": {"size": None}}, "run") == "has 1 file (0 bytes)"


def test_empty_directory() -> None:
    assert describe_files({}, "run") == "has no files"
