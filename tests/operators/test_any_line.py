"""An exception at any moment of a task: no job is leaked, doubled or deleted alive, and no result is lost.

Airflow's next minor version raises an exception into the task on SIGTERM, besides calling `on_kill`
(apache/airflow#73395). So here a signal handler raises at the n-th request that the API server receives, and at the
n-th call of Airflow: a push of an XCom, or a write to the task store. n grows until a run ends without an exception.
In a triggerer, nothing raises into a trigger: there the process dies, and another triggerer runs the trigger again.
Then a retry runs, if Airflow would start one, or else the reaper finds what is left. Each run takes the next kind of
exception, so that all runs together cover all moments in reasonable time; EVERY=1 in the environment runs all
combinations.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowFailException, AirflowTaskTerminated, TaskDeferred

from airflow_provider_ktrain.core.identity.reaping import judge
from tests.clusters import TestCluster
from tests.engine.small_api import Object
from tests.operators.conftest import set_connection
from tests.operators.small_cluster import JOBS, RESULT, Operator, event_of_trigger, small_cluster
from tests.operators.task_instance import Instance, Store, Supervisor, supervised

pytestmark = pytest.mark.timed

EVERY = bool(os.environ.get("EVERY"))
STRIDE = 1 if EVERY else 13


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Operator, TestCluster]]:
    with small_cluster(tmp_path_factory.mktemp("small")) as made:
        yield made


# the exception


@dataclass(frozen=True)
class Kind:
    """An exception, and what goes with it.

    :param error: what the signal handler raises. None: the API server cuts the connection, or Airflow's API fails.
    :param kills: whether `on_kill` is called before.
    :param state: of the task, as Airflow answers.
    """

    name: str
    error: type[BaseException] | None
    kills: bool = False
    state: TaskInstanceState = TaskInstanceState.RUNNING

    @property
    def stops(self) -> bool:
        """Whether the process is stopped. Without a retry, that ends the job."""
        return self.error is not None and not issubclass(self.error, ValueError)


KINDS = (
    Kind("error", ValueError),
    Kind("stopped", AirflowTaskTerminated, kills=True),
    Kind("killed", AirflowTaskTerminated, kills=True, state=TaskInstanceState.FAILED),
    Kind("terminated", AirflowTaskTerminated),
    Kind("exit", SystemExit),
    Kind("failure", None),
)


class Moments:
    """Counts the moments of a run, and raises at the n-th one.

    :param number: from 1. 0: never.
    """

    def __init__(self) -> None:
        self.number = self.count = 0
        self.kind = KINDS[0]
        self.hit = ""  # where it was raised
        self.in_worker = False  # whether a worker runs; else signals are ignored
        self.triggerer: asyncio.AbstractEventLoop | None = None  # while it runs a trigger
        self.in_triggerer = False  # whether the moment came while it did
        self.followed = False  # whether the job was followed before
        self.requests: list[str] = []  # that the API server has received

    @contextlib.contextmanager
    def worker(self) -> Iterator[None]:
        """A worker runs."""
        self.in_worker = True
        try:
            yield
        finally:
            self.in_worker = False

    def start(self, number: int, kind: Kind) -> None:
        self.number, self.kind, self.count, self.hit, self.in_triggerer = number, kind, 0, "", False

    def passes(self, what: str, *, inside: bool) -> bool:
        """A moment has come. Returns whether this is the one at which the request or call itself fails.

        :param inside: whether this is called in the thread that runs the task.
        """
        self.count += 1
        if self.count != self.number or self.hit:
            return False
        self.hit, self.followed = what, any("watch=true" in line for line in self.requests)
        if self.kind.error is None:
            return True
        if self.triggerer is not None:
            self.in_triggerer = True
            self.triggerer.call_soon_threadsafe(sys.exit)
        elif inside:
            signal.raise_signal(signal.SIGUSR1)
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return False


class RaisingStore(Store):
    """The task store."""

    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self._moments = moments

    def set(self, key: str, value: Any) -> None:
        inside = threading.current_thread() is threading.main_thread()
        if self._moments.passes(f"before state {key}", inside=inside):
            raise ConnectionError("Airflow's API fails")
        super().set(key, value)
        if self._moments.passes(f"after state {key}", inside=inside):
            raise ConnectionError("Airflow's response is lost")


class RaisingInstance(Instance):
    """A task instance whose pushes of XComs are moments, too."""

    moments: Moments

    def jobs(self) -> list[Object]:
        """Called by each push of an XCom, after the value is stored."""
        inside = threading.current_thread() is threading.main_thread()
        if self.moments.passes("after an XCom", inside=inside):
            raise ConnectionError("Airflow's response is lost")
        return []

    def delete(self) -> None: ...


@dataclass
class Run:
    """One life of a task with an exception at one moment."""

    operator: Operator
    instance: RaisingInstance
    moments: Moments
    capsys: pytest.CaptureFixture[str]
    deferrable: bool
    retries: int

    def task(self, number: int) -> Any:
        """Run a try as Airflow does, the trigger included. Returns the result, or raises."""
        worker = self.moments.worker
        with worker():
            ended = self.instance.execute(
                number=number, retries=self.retries, deferrable=self.deferrable, command=["train"]
            )
        while isinstance(ended, TaskDeferred):
            event = self.trigger(ended)
            with worker():
                ended = self.instance.resume(event)
        return ended

    def trigger(self, deferred: Any) -> Object:
        """The event of the trigger, which follows the job without Airflow's 10 s. A triggerer that dies is replaced."""
        arguments = deferred.trigger.serialize()[1]
        assert self.instance.operator is not None
        log = self.instance.operator.log

        async def triggerer() -> Object:
            self.moments.triggerer = asyncio.get_running_loop()
            try:
                return await event_of_trigger(arguments, str(TaskInstanceState.DEFERRED), log)
            finally:
                self.moments.triggerer = None

        try:
            return asyncio.run(triggerer())
        except SystemExit:
            return asyncio.run(triggerer())

    def check(self) -> str:
        """What is wrong after an exception; empty if nothing is."""
        kind, error, result = self.moments.kind, None, None
        try:
            result = self.task(1)
        except BaseException as e:
            error = e
        if not self.moments.hit:
            assert result == RESULT, error
            return "end"
        text = self.capsys.readouterr().out + str(error)
        killed = kind.state is TaskInstanceState.FAILED and not self.moments.in_triggerer
        final = isinstance(error, AirflowFailException | AirflowTaskTerminated)
        if error is None:
            return "" if result == RESULT else f"another result: {result}"
        if final and not killed:
            return f"a retry is forbidden: {error!r}"
        if killed:
            return self._left(text)
        moments = self.moments
        gives_up = (kind.stops and not moments.in_triggerer) or not moments.followed
        if self.operator.deleted_alive and (self.retries or not gives_up):
            return f"deleted alive: {error!r}"
        if not self.retries:
            return self._left(text)
        self.moments.start(0, KINDS[0])
        result = self.task(2)
        if result != RESULT:
            return f"the result is lost: {result}"
        return "" if self.operator.created == 1 else f"{self.operator.created} jobs"

    def _left(self, text: str) -> str:
        """What is wrong with what is left of a task that has failed: the reaper must find it, and the log name it."""
        api = self.operator.api
        held = sum(pod["status"]["phase"] == "Running" for pod in api.objects["pods"].values())
        for job in api.objects[JOBS].values():
            verdict = judge(job, "tests", "failed", held)
            if held and not verdict.orphan:
                return f"the reaper leaves it: {verdict.reason}"
        if held and not api.objects[JOBS]:
            return "a pod has no job"
        return f"leaked: {text[-1500:]}" if self.operator.alive() and "kubectl delete" not in text else ""


@pytest.mark.parametrize("retries", [1, 0], ids=["a retry is left", "no retry is left"])
@pytest.mark.parametrize("deferrable", [False, True], ids=["worker", "deferrable"])
def test_exception_at_any_moment(
    operator: tuple[Operator, TestCluster], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    deferrable: bool, retries: int,
) -> None:  # fmt: skip
    made, cluster = operator
    set_connection(cluster, monkeypatch)
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "0")
    moments, found = Moments(), {}
    moments.requests = made.api.requests
    current: list[RaisingInstance] = []

    def on_request(line: str) -> None:
        if moments.passes(line, inside=False):
            raise ConnectionError("cut")

    def on_signal(*_: object) -> None:
        if not moments.in_worker:
            return
        if moments.kind.kills and current[0].operator is not None:
            current[0].operator.on_kill()
        assert moments.kind.error is not None
        raise moments.kind.error("raised by a signal handler")

    before = signal.signal(signal.SIGUSR1, on_signal)
    made.api.on_request = on_request
    try:
        for offset, kind in enumerate(KINDS):
            number = 1 + (4 * offset + 2 * deferrable + retries) % STRIDE
            while True:
                made.created = made.deleted_alive = 0
                made.api.objects.clear()
                made.api.requests.clear()
                capsys.readouterr()
                instance = RaisingInstance(cluster)
                instance.moments, instance.store, current[:] = moments, RaisingStore(moments), [instance]
                moments.start(number, kind)
                with supervised(Supervisor(kind.state)):
                    problem = Run(made, instance, moments, capsys, deferrable, retries).check()
                if problem == "end":
                    break
                if problem:
                    found[f"{kind.name} at {number}: {moments.hit}"] = problem
                number += STRIDE
    finally:
        made.api.on_request = lambda line: None
        signal.signal(signal.SIGUSR1, before)
    assert not found, "\n".join(f"{when}: {problem}" for when, problem in found.items())
