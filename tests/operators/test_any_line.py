"""An exception at any moment of a task: no job is leaked, doubled or deleted alive, and no result is lost.

Airflow's next minor version raises an exception into the task on SIGTERM, besides calling `on_kill`
(apache/airflow#73395). So here a signal handler raises at the n-th moment of a run. A moment is a request that the API
server receives or a call of Airflow (a push of an XCom, or a write to the task store); or else the first execution of a
line, in the thread of the event loop, the main thread and all others. In a triggerer, nothing raises into a trigger:
there the process dies, and another triggerer runs the trigger again.
Then a retry runs, if Airflow would start one, or else the reaper finds what is left. Moments are drawn by a seed: SEED
in the environment draws others, and EVERY=1 takes all requests and calls with all kinds of exceptions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import threading
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
from tests.apiserver import Lost, Object
from tests.operators.conftest import set_connection
from tests.operators.operators import has_ended
from tests.operators.task_instance import Store, Supervisor, supervised
from tests.operators.virtual_cluster import World, virtual_cluster
from tests.operators.virtual_instance import VirtualInstance

EVERY = bool(os.environ.get("EVERY"))
SEED = int(os.environ.get("SEED", "40"))
LONGEST_SECONDS = 180.0  # of a run; each of its trainings takes two seconds, and its longest wait 31 s
PACKAGE = str(Path(airflow_provider_ktrain.__file__).parent)
#: The operator's methods that Airflow calls, and what converts errors.
UNGUARDED = (f"{PACKAGE}/operators/base.py:", f"{PACKAGE}/exceptions.py:")
RESULT = {"loss": 0.5}
PROGRAM = ["sh", "-c", """echo 'KTRAIN_RESULT {"loss": 0.5}'; sleep 2"""]


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
        self.world = World()
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
            self.world.settle()

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
        else:
            self.world.signal_main_thread(signal.SIGUSR1)
            assert inside or not self.of_lines or self.raised.wait(60)
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


class RaisingInstance(VirtualInstance):
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
                number=number, retries=self.retries, deferrable=self.deferrable, command=PROGRAM
            )
        while isinstance(ended, TaskDeferred):
            event = self.trigger(ended)
            with worker():
                ended = self.instance.resume(event)
        return ended

    def trigger(self, deferred: TaskDeferred) -> Object:
        """The event of the trigger. A triggerer that dies is replaced."""

        async def triggerer() -> Object:
            self.moments.triggerer = asyncio.get_running_loop()
            try:
                event: Object = (await anext(aiter(self.instance.trigger(deferred).run()))).payload
                return event
            finally:
                self.moments.triggerer = None

        with supervised(Supervisor(TaskInstanceState.DEFERRED)):
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
        # a line that Airflow calls, before errors are converted: no code of ours can change what is raised there
        unguarded = self.moments.hit.startswith(UNGUARDED)
        began = self.instance.api.created or not self.moments.of_lines  # else there may be no host yet
        if final and not killed and began and not unguarded:
            return f"a retry is forbidden: {error!r}"
        if killed:
            return self._left(text)
        moments = self.moments
        gives_up = (kind.stops and not moments.in_triggerer) or not moments.followed
        if self.instance.api.deleted_alive and (self.retries or not gives_up):
            return f"deleted alive: {error!r}"
        if not self.retries:
            return self._left(text)
        self.moments.start(0, KINDS[0])
        result = self.task(2)
        if result != RESULT:
            return f"the result is lost: {result}"
        return "" if self.instance.api.created == 1 else f"{self.instance.api.created} jobs"

    def _left(self, text: str) -> str:
        """What is wrong with what is left of a task that has failed: the reaper must find it, and the log name it."""
        api = self.instance.api
        jobs, held = list(api.objects["pytorchjobs"].values()), self.instance.running()
        for job in jobs:
            verdict = judge(job, "tests", "failed", held)
            if held and not verdict.orphan:
                return f"the reaper leaves it: {verdict.reason}"
        if held and not jobs:
            return "a pod has no job"
        alive = [job for job in jobs if not has_ended(job) and not job["spec"]["runPolicy"].get("suspend")]
        return f"leaked: {text[-1500:]}" if alive and "kubectl delete" not in text else ""


@dataclass
class Sweep:
    """Runs with an exception at one moment after the other."""

    directory: Path
    monkeypatch: pytest.MonkeyPatch
    moments: Moments
    capsys: pytest.CaptureFixture[str]
    deferrable: bool
    retries: int
    count: int = 0  #: Moments of the last run.

    def problems(self, kinds: Sequence[Kind], samples: int) -> Iterator[str]:
        """What is wrong in the runs with an exception at one of the moments, drawn by the seed."""
        assert self.run(0, kinds[0]) in ("", "end")  # none, which imports all modules
        assert self.run(0, kinds[0]) == "end"
        count = self.count
        every = itertools.product(range(1, count + 1), kinds)
        drawn = sorted(random.Random(SEED).sample(range(1, count + 1), min(samples, count)))
        for number, kind in every if EVERY else zip(drawn, itertools.cycle(kinds), strict=False):
            if (problem := self.run(number, kind)) not in ("", "end"):
                yield f"{kind.name}, moment {number} of {count} {problem}"

    def run(self, number: int, kind: Kind) -> str:
        """What is wrong in the run with an exception at this moment."""
        self.capsys.readouterr()
        with virtual_cluster(self.directory) as cluster:
            set_connection(cluster, self.monkeypatch)
            self.monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "0")
            cluster.api.on_request = self._on_request
            self.moments.world, self.moments.requests = cluster.world, cluster.api.requests
            with RaisingInstance(cluster) as instance, supervised(Supervisor(kind.state)):
                instance.moments, instance.store = self.moments, RaisingStore(self.moments)
                instance.on_interrupt(lambda: self._on_signal(instance))
                self.moments.start(number, kind)
                began = instance.clock
                problem = Run(instance, self.moments, self.capsys, self.deferrable, self.retries).check()
                self.count = self.moments.count
                hit = self.moments.hit
                self.moments.start(0, kind)  # whatever ends later is no moment
                seconds = instance.clock - began
                if seconds >= LONGEST_SECONDS:
                    problem = f"{problem} took {seconds:.0f} s"
                return problem if problem in ("", "end") else f"at {hit}: {problem}"

    def _on_request(self, line: str) -> None:
        if self.moments.passes(line, inside=False):
            raise Lost("cut")

    def _on_signal(self, instance: RaisingInstance) -> None:
        moments = self.moments
        moments.raised.set()
        if not moments.in_worker:
            return
        if moments.kind.kills and instance.operator is not None:
            instance.operator.on_kill()
            instance.world.wait_for_main_thread()
        assert moments.kind.error is not None
        raise moments.kind.error("raised by a signal handler")


of_retries = pytest.mark.parametrize("retries", [1, 0], ids=["a retry is left", "no retry is left"])
of_hosts = pytest.mark.parametrize("deferrable", [False, True], ids=["worker", "deferrable"])
of_samples = pytest.mark.parametrize("samples", [6, pytest.param(24, marks=pytest.mark.thorough)])


@pytest.fixture
def sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], deferrable: bool, retries: int
) -> Sweep:
    return Sweep(tmp_path, monkeypatch, Moments(), capsys, deferrable, retries)


@pytest.mark.thorough
@pytest.mark.sampled(3)
@of_retries
@of_hosts
@of_samples
def test_exception_at_any_moment(sweep: Sweep, samples: int) -> None:
    found = list(sweep.problems(KINDS, samples))
    assert not found, "\n".join(found)


@pytest.mark.sampled(3)
@of_retries
@of_hosts
@of_samples
def test_exception_at_any_line(sweep: Sweep, samples: int) -> None:
    """It ends no task, callback or thread beside the task's own main thread. A line costs more than a request."""
    kinds = [kind for kind in KINDS if kind.error is not None]
    with sweep.moments.traced():
        found = list(sweep.problems(kinds, samples // 3))
    assert not found, "\n".join(found)
