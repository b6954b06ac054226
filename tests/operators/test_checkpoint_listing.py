"""What the log of a retry contains about its checkpoint directory: listed by ObjectStoragePath, in a thread."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from airflow.sdk.io import attach
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from airflow_provider_ktrain.core.text import output as text
from airflow_provider_ktrain.operators.checkpoint_listing import CheckpointListing
from tests.operators.task_instance import Instance

SECRET = "hunter2"


class Storage:
    """A file system in memory that is walked through, in the place of one on a server.

    :param error: with which each listing of a directory fails. Default: None, none does.
    """

    async_impl = False

    def __init__(self, error: BaseException | None = None) -> None:
        self.files = MemoryFileSystem()
        self.error, self.waits = error, threading.Event()
        self.waits.set()
        self.directories = 0  # that were listed

    def walk(self, path: str, **options: Any) -> Iterator[Any]:
        if self.error is not None and options["on_error"] == "raise":
            raise self.error
        self.waits.wait(600)
        for found in self.files.walk(path, **options):
            self.directories += 1
            yield found


class EndlessStorage(Storage):
    """A file system with any number of directories, each with 1,000 files."""

    def walk(self, path: str, **options: Any) -> Iterator[Any]:
        for directory in itertools.count():
            self.directories += 1
            yield path, {}, {f"{n}": {"name": f"{path}/{directory}/{n}", "size": 1} for n in range(1000)}


class AsyncStorage(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that lists all levels with one request, as that of S3.

    :param slow: whether the response never comes. Default: False.
    """

    cachable = False

    def __init__(self, slow: bool = False) -> None:
        super().__init__(asynchronous=False)
        self.slow, self.requests, self.cancelled = slow, 0, threading.Event()

    async def _find(self, path: str, **options: Any) -> dict[str, Any]:
        self.requests += 1
        try:
            await asyncio.sleep(3600 if self.slow else 0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return {f"{path}/step_{n}/model.pt": {"size": 5} for n in range(3)}


@pytest.fixture
def connection(request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of a connection to a storage; the fixture's parameter is the error of each listing."""
    name = f"storage-{uuid.uuid4().hex}"
    storage = Storage(getattr(request, "param", None))
    attach("s3", name, fs=storage)
    yield name
    storage.waits.set()


@pytest.fixture(params=[False, True])
def async_storage(request: pytest.FixtureRequest) -> tuple[str, AsyncStorage]:
    """The id of a connection to a storage, and the storage."""
    name, storage = f"storage-{uuid.uuid4().hex}", AsyncStorage(request.param)
    attach("s3", name, fs=storage)
    return name, storage


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
    shown = CheckpointListing(f"s3://{connection}@bucket/c", patience=0.01).describe()
    assert shown == "Checkpoints: s3://bucket/c was not listed within 0 s."


def test_listing_of_directories_ends_when_nobody_waits_for_it(connection: str) -> None:
    storage = storage_of(connection)
    for number in range(5):
        storage.files.pipe(f"/{connection}/step_{number}/model.pt", b"1")
    storage.waits.clear()
    listing = CheckpointListing(f"s3://{connection}@{connection}", patience=0.01)
    assert "was not listed within 0 s" in listing.describe()
    storage.waits.set()
    listing._thread.join(240)
    assert storage.directories == 1


def test_listing_of_directories_ends_after_many_files() -> None:
    name, storage = f"storage-{uuid.uuid4().hex}", EndlessStorage()
    attach("s3", name, fs=storage)
    shown = CheckpointListing(f"s3://{name}@bucket/c", patience=240).describe()
    assert shown == "Checkpoints: s3://bucket/c has more than 10,000 files."
    assert storage.directories == 11


def test_asynchronous_storage_gets_one_request_with_a_timeout(async_storage: tuple[str, AsyncStorage]) -> None:
    name, storage = async_storage
    listing = CheckpointListing(f"s3://{name}@bucket/c", patience=0.5 if storage.slow else 240)
    found = "was not listed within 0 s" if storage.slow else "has 3 files (15 bytes)"
    assert listing.describe() == f"Checkpoints: s3://bucket/c {found}."
    assert storage.requests == 1
    assert not storage.slow or storage.cancelled.wait(240)


def test_password_in_the_url_is_hidden() -> None:
    description = CheckpointListing(f"unknown://me:{SECRET}@host/c").describe()
    assert text.masked(description).startswith("Checkpoints: unknown://me:***@host/c can't be listed")


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
