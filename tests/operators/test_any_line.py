"""An exception at any moment of a task: no job is leaked, doubled or deleted alive, and no result is lost.

Airflow's next minor version raises an exception into the task on SIGTERM, besides calling `on_kill`
(apache/airflow#73395). So here a signal handler raises at the n-th moment of a run; n grows until a run ends without an
exception. A moment is a request that the API server receives or a call of Airflow (a push of an XCom, or a write to the
task store); or else the first execution of a line, in the thread of the event loop, the main thread and all others.
In a triggerer, nothing raises into a trigger: there the process dies, and another triggerer runs the trigger again.
Then a retry runs, if Airflow would start one, or else the reaper finds what is left. Each run takes the next kind of
exception, so that all runs together cover all moments in reasonable time; EVERY=1 in the environment runs all
combinations of requests and calls, and STRIDE sets how many lines are left out between two runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowFailException, AirflowTaskTerminated, TaskDeferred

import airflow_provider_ktrain
from airflow_provider_ktrain.core.identity.reaping import judge
from tests.apiserver import Object
from tests.clusters import TestCluster
from tests.operators.conftest import set_connection
from tests.operators.small_cluster import JOBS, RESULT, Operator, event_of_trigger, small_cluster
from tests.operators.task_instance import Instance, Store, Supervisor, supervised

EVERY = bool(os.environ.get("EVERY"))
STRIDE = 1 if EVERY else 13
LINE_STRIDE = int(os.environ.get("STRIDE") or (13 if EVERY else 499))
LONGEST_SECONDS = 180.0  # of a run; each of its trainings takes less than a second, and its longest wait 31 s
PACKAGE = str(Path(airflow_provider_ktrain.__file__).parent)


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
        self.of_lines = False  # whether lines are moments; else requests and calls are
        self.raised = threading.Event()  # set when the signal handler has run
        self._lines: set[tuple[str, int]] = set()  # that were executed before

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
        self.raised.clear()
        self._lines.clear()
        if self.of_lines:
            sys.settrace(self._trace)  # an exception at a line has ended that

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Lines are moments, in this thread and in those that are started from now on."""
        before, self.of_lines = sys.gettrace(), True
        threading.settrace(self._trace)
        try:
            yield
        finally:
            self.of_lines = False
            sys.settrace(before)
            threading.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        """A trace function. What the signal handler raises appears in the main thread, at the line if it is there."""
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or not (self.in_worker or self.triggerer) or self.hit:
            return None
        if event == "line" and (file, frame.f_lineno) not in self._lines:
            self._lines.add((file, frame.f_lineno))
            inside = threading.current_thread() is threading.main_thread()
            self._passes(f"{file}:{frame.f_lineno}", inside=inside)
        return self._trace

    def passes(self, what: str, *, inside: bool) -> bool:
        """A request or a call of Airflow has come. As `_passes`; False if only lines are moments."""
        return not self.of_lines and self._passes(what, inside=inside)

    def _passes(self, what: str, *, inside: bool) -> bool:
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
            assert not self.of_lines or self.raised.wait(60)
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
        began = self.operator.created or not self.moments.of_lines  # else there may be no host yet
        if final and not killed and began:
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


@dataclass
class Sweep:
    """Runs with an exception at one moment after the other."""

    operator: Operator
    cluster: TestCluster
    moments: Moments
    capsys: pytest.CaptureFixture[str]

    def problems(
        self, kinds: Sequence[Kind], first: int, stride: int, *, deferrable: bool, retries: int
    ) -> Iterator[str]:
        """What is wrong in the runs with an exception at every `stride`-th moment from the first one on."""
        made, moments = self.operator, self.moments
        current: list[RaisingInstance] = []

        def on_signal(*_: object) -> None:
            moments.raised.set()
            if not moments.in_worker:
                return
            if moments.kind.kills and current[0].operator is not None:
                current[0].operator.on_kill()
            assert moments.kind.error is not None
            raise moments.kind.error("raised by a signal handler")

        before = signal.signal(signal.SIGUSR1, on_signal)
        slowest = 0.0
        try:
            numbers = itertools.chain([0], itertools.count(first, stride))  # first none: that imports all modules
            for number, kind in zip(numbers, itertools.cycle(kinds), strict=False):
                made.created = made.deleted_alive = 0
                made.api.objects.clear()
                made.api.requests.clear()
                self.capsys.readouterr()
                instance = RaisingInstance(self.cluster)
                instance.moments, instance.store, current[:] = moments, RaisingStore(moments), [instance]
                moments.start(number, kind)
                with supervised(Supervisor(kind.state)):
                    began = time.monotonic()
                    problem = Run(made, instance, moments, self.capsys, deferrable, retries).check()
                    slowest = max(slowest, time.monotonic() - began)
                if slowest > LONGEST_SECONDS:
                    problem += f" took {slowest:.0f} s"
                if problem == "end" and number:
                    print(f"{moments.count} moments, {number // stride} exceptions, {slowest:.1f} s the slowest run")
                    return
                if problem and number:
                    yield f"{kind.name} at {number}: {moments.hit}: {problem}"
        finally:
            signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def sweep(
    operator: tuple[Operator, TestCluster], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sweep:
    made, cluster = operator
    set_connection(cluster, monkeypatch)
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "0")
    moments = Moments()
    moments.requests = made.api.requests
    return Sweep(made, cluster, moments, capsys)


of_retries = pytest.mark.parametrize("retries", [1, 0], ids=["a retry is left", "no retry is left"])
of_hosts = pytest.mark.parametrize("deferrable", [False, True], ids=["worker", "deferrable"])


@of_retries
@of_hosts
def test_exception_at_any_moment(sweep: Sweep, deferrable: bool, retries: int) -> None:
    found: list[str] = []

    def on_request(line: str) -> None:
        if sweep.moments.passes(line, inside=False):
            raise ConnectionError("cut")

    sweep.operator.api.on_request = on_request
    try:
        for offset, kind in enumerate(KINDS):
            first = 1 + (4 * offset + 2 * deferrable + retries) % STRIDE
            found += sweep.problems([kind], first, STRIDE, deferrable=deferrable, retries=retries)
    finally:
        sweep.operator.api.on_request = lambda line: None
    assert not found, "\n".join(found)


@of_retries
@of_hosts
def test_exception_at_any_line(sweep: Sweep, deferrable: bool, retries: int) -> None:
    """It ends no task, callback or thread beside the task's own main thread."""
    first = 1 + (2 * deferrable + retries) * LINE_STRIDE // 4
    kinds = [kind for kind in KINDS if kind.error is not None]
    with sweep.moments.traced():
        found = list(sweep.problems(kinds, first, LINE_STRIDE, deferrable=deferrable, retries=retries))
    assert not found, "\n".join(found)
