"""`on_kill` in the worker's signal handler, at any moment: the job goes within Airflow's 5 seconds, and it raises."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import Manifest
from airflow_provider_ktrain.exceptions import TrainingKilledError
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from tests.operators.instance import Instance

Kill = Callable[[Callable[[], object]], None]
AIRFLOWS_PATIENCE = 5.0  # seconds from the signal to SIGKILL


@pytest.fixture
def kill(instance: Instance) -> Iterator[Kill]:
    """Have the task killed, as Airflow does it, once a condition holds."""
    before = signal.signal(signal.SIGUSR1, lambda *_: instance.operator and instance.operator.on_kill())
    over = threading.Event()
    threads = []

    def kill_when(condition: Callable[[], object]) -> None:
        def wait() -> None:
            while not over.wait(0.05):
                if condition():
                    instance.killed_at = time.monotonic()
                    os.kill(os.getpid(), signal.SIGUSR1)
                    return

        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield kill_when
    over.set()
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGUSR1, before)


def check_killed(instance: Instance, **parameters: object) -> str:
    with pytest.raises(TrainingKilledError, match="the task was killed") as error:
        instance.execute(**parameters)
    # a loaded machine is given more: tests/e2e/test_kills.py has Airflow's own SIGKILL
    assert time.monotonic() - instance.killed_at < 4 * AIRFLOWS_PATIENCE
    return str(error.value)


@pytest.mark.parametrize("deferrable", [False, True])
def test_while_it_follows(instance: Instance, kill: Kill, monkeypatch: pytest.MonkeyPatch, deferrable: bool) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "60")
    kill(instance.running)
    said = check_killed(instance, deferrable=deferrable)
    assert "1 GPU will be released when 1 pod terminates." in said
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


def test_before_it_has_asked_anybody(instance: Instance) -> None:
    """Airflow lets `execute` go on after `on_kill`."""

    class KilledEarly(PyTorchJobOperator):
        def build_manifest(self, *args: Any, **kwargs: Any) -> Manifest:
            self.on_kill()
            return super().build_manifest(*args, **kwargs)

    with pytest.raises(TrainingKilledError, match="the task was killed"):
        instance.execute(operator=KilledEarly)
    assert not instance.jobs()


def test_what_is_kept_is_suspended(instance: Instance, kill: Kill) -> None:
    kill(instance.running)
    check_killed(instance, deferrable=False, on_finish_action="keep_job")
    (job,) = instance.jobs()
    assert job["spec"]["runPolicy"]["suspend"] is True


def test_as_its_job_appears(instance: Instance, kill: Kill) -> None:
    """It is killed about when the answer to its create arrives."""
    kill(instance.jobs)
    check_killed(instance, deferrable=False)
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


@pytest.mark.embedded
def test_while_it_submits(instance: Instance, kill: Kill) -> None:
    instance.cluster.admin("status", status=503, verb="create", path="/pytorchjobs", seconds=60)
    try:
        kill(lambda: "ktrain_submission" in instance.store)
        check_killed(instance, deferrable=False)
    finally:
        instance.cluster.admin("clear")
    assert not instance.jobs()


@pytest.mark.embedded
def test_while_the_api_server_is_away(instance: Instance, kill: Kill) -> None:
    """It goes on asking for as long as Airflow lets it; a kill's own seconds are not all it has."""
    fault = threading.Event()

    def away() -> bool:
        if instance.running() and not fault.is_set():
            instance.cluster.admin("status", status=503, path="/pytorchjobs", seconds=AIRFLOWS_PATIENCE)
            fault.set()
        return fault.is_set()

    kill(away)
    with pytest.raises(TrainingKilledError, match="the task was killed"):
        instance.execute(deferrable=False)
    assert not instance.jobs()
