"""What the log of a retry contains about its checkpoint directory: listed by ObjectStoragePath, in a thread."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from airflow.sdk.io import attach
from fsspec.implementations.memory import MemoryFileSystem

from airflow_provider_ktrain.operators.checkpoint_listing import CheckpointListing
from tests.operators.task_instance import Instance

SECRET = "hunter2"


class Storage:
    """A file system in memory, in the place of S3.

    :param error: with which each listing fails. Default: None, none does.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.files = MemoryFileSystem()
        self.error, self.waits = error, threading.Event()
        self.waits.set()

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        self.waits.wait(600)
        if self.error is not None:
            raise self.error
        return self.files.find(path, *args, **options)


@pytest.fixture
def connection(request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of a connection to a storage; the fixture's parameter is the error of each listing."""
    name = f"storage-{uuid.uuid4().hex}"
    storage = Storage(getattr(request, "param", None))
    attach("s3", name, fs=storage)
    yield name
    storage.waits.set()


def storage_of(connection: str) -> Storage:
    found = attach("s3", connection).fs
    assert isinstance(found, Storage)
    return found


def test_files_are_listed(connection: str) -> None:
    storage_of(connection).files.pipe(f"/{connection}/runs/train/step_2/model.pt", b"12345")
    shown = CheckpointListing(f"s3://{connection}@{connection}/runs/train").describe()
    found = "has 1 file (5 bytes), the newest is step_2/model.pt (5 bytes, "
    assert shown.startswith(f"Checkpoints: s3://{connection}/runs/train {found}")


def test_missing_directory_has_no_files(connection: str) -> None:
    shown = CheckpointListing(f"s3://{connection}@{connection}/missing").describe()
    assert shown == f"Checkpoints: s3://{connection}/missing has no files."


@pytest.mark.parametrize("connection", [PermissionError(SECRET), SystemExit(SECRET)], indirect=True)
def test_error_is_one_line_without_its_message(connection: str) -> None:
    shown = CheckpointListing(f"s3://{connection}@bucket/c").describe()
    name = type(storage_of(connection).error).__name__
    assert shown == f"Checkpoints: s3://bucket/c can't be listed by the worker ({name})."


def test_slow_storage_is_not_waited_for(connection: str) -> None:
    storage_of(connection).waits.clear()
    shown = CheckpointListing(f"s3://{connection}@bucket/c").describe(patience=0.01)
    assert shown == "Checkpoints: s3://bucket/c was not listed within 0 s."


def test_path_in_the_pods_is_not_listed() -> None:
    shown = CheckpointListing("/checkpoints/train").describe()
    assert shown == "Checkpoints: /checkpoints/train is a path in the pods. The worker can't list it."


@pytest.mark.parametrize("connection", [None, ValueError(SECRET)], indirect=True)
def test_retry_with_a_new_job_logs_its_checkpoints(
    instance: Instance, connection: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"retries": 2, "checkpoint_dir": f"s3://{connection}@bucket"}
    instance.execute(number=1, **options)
    instance.execute(number=2, **options)
    assert "Checkpoints: " not in capsys.readouterr().out, "the first try creates a job, the second one adopts it"
    instance.delete()
    instance.execute(number=3, **options)
    log = capsys.readouterr().out
    assert log.count("Checkpoints: s3://bucket/train-") == 1
    assert "(ValueError)" in log or "has no files" in log
    assert SECRET not in log
    (job,) = instance.jobs()
    container = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    (directory,) = [e["value"] for e in container["env"] if e["name"] == "KTRAIN_CHECKPOINT_DIR"]
    assert directory == f"s3://bucket/{instance.job_name}"
