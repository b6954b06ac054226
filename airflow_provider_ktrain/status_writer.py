"""Writes trainings' statuses as XComs while their tasks run or are deferred.

In a triggerer, each write occupies Airflow's supervisor, which handles the events and kills of all triggers
sequentially: 30 ms of CPU, and some seconds for the first write of a process (it builds an API client). So all tasks of
a process share one writer, with one write in flight and at most one a second. Statuses with a new phase are written
first. Only the latest status of each task is written. A write that is slow or fails never delays a training: it is
logged once, and the page shows how old its data is.

Before a job that has not ended is released, its conclusion (`core.reporting.conclusion`) becomes a part of the status.
Such a status is written first and without the interval, and the task waits some seconds for it. A status of another
process of the same try, which begins or is late, must not replace it: that process reads it before it writes.

Airflow handles the requests of a process sequentially. So no write begins while a kill waits for the task's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.formats import (
    NEXT_DUE,
    STATUS_XCOM,
    SUMMARY_XCOM,
    VERSION,
    mapping,
)
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.core.reporting.status_document import with_earlier
from airflow_provider_ktrain.core.reporting.summary import killed_summary
from airflow_provider_ktrain.core.text.output import masked, masked_log
from airflow_provider_ktrain.core.text.xcom_values import transportable
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.api.threads import in_thread
from airflow_provider_ktrain.engine.host import REFRESH_SECONDS, UNSHARED_SECONDS

log = masked_log(__name__)

Build = Callable[[], Callable[[], Mapping[str, Any]]]
Prepare = Callable[[], Awaitable[object]]
Write = Callable[[Mapping[str, Any]], object]
WORKER, TRIGGER = "worker", "trigger"
SECONDS_BETWEEN_WRITES = 1.0
TRIGGER_REFRESH_SECONDS = 10.0  #: Shortest time between two statuses of a training that a trigger follows.
SLOW_SECONDS = 10.0  #: How long a write may take before it counts as slow.
LAST_WRITE_SECONDS = 5.0  #: How long to wait for the write in flight when a task's following ends.
#: How long to wait for Airflow's answer when a conclusion is stored or read: pods hold GPUs until the release that
#: follows.
CONCLUSION_SECONDS = 10.0
CONCLUSION = "conclusion"  #: Field of the status.
_FIRST, _URGENT, _OTHER = range(3)  #: Ranks of what waits to be written: conclusions, new phases, the rest.


async def _nothing() -> None: ...


@dataclass(frozen=True)
class _Waiting:
    """A status that waits to be written, or is.

    :param prepare: is awaited before `build` is called.
    :param stored: of a conclusion: gets whether the write succeeded. Default: None, nobody waits for it.
    """

    build: Build
    write: Write
    rank: int
    prepare: Prepare
    stored: asyncio.Future[bool] | None = None


class StatusWriter:
    """Writes the statuses of all tasks that are followed in one event loop."""

    def __init__(self, interval: float = SECONDS_BETWEEN_WRITES, slow_after: float = SLOW_SECONDS) -> None:
        self._interval, self._slow_after = interval, slow_after
        self.followed: set[TaskInstanceId] = set()  #: Tasks whose statuses are written.
        self._questions = 0  # that wait for Airflow's answer
        self._unasked = asyncio.Event()  # set while there is none
        self._unasked.set()
        self._waiting: dict[TaskInstanceId, _Waiting] = {}  # the oldest first
        self._concluding = asyncio.Event()  # set while a conclusion waits to be written
        self._working: asyncio.Task[None] | None = None
        self._in_flight: tuple[TaskInstanceId, asyncio.Future[object]] | None = None
        self._slow = self._failed = False  # whether that was logged

    def offer(
        self, key: TaskInstanceId, build: Build, write: Write, *, urgent: bool, prepare: Prepare = _nothing
    ) -> None:
        """Write the task's status as soon as the budget allows, instead of one that was offered before.

        :param build: takes the status right before the write. It returns a function that makes the document, which is
            called in a thread.
        :param urgent: write it before those that are not. A task that was urgent stays so until it is written.
        :param prepare: is awaited right before `build`. Default: nothing.
        """
        before = self._waiting.get(key)
        if before is None or before.rank != _FIRST:  # a conclusion is written with the latest status
            is_urgent = urgent or (before is not None and before.rank == _URGENT)
            self._waiting[key] = _Waiting(build, write, _URGENT if is_urgent else _OTHER, prepare)
        self._start()

    async def store_conclusion(self, key: TaskInstanceId, build: Build, write: Write) -> bool:
        """Write the task's status before all others and without the interval, instead of one that was offered.

        It waits at most CONCLUSION_SECONDS. What isn't written by then is offered as an urgent status, so that it
        doesn't delay conclusions that are still waited for.

        :return: whether it was written in time.
        """
        self.withdraw(key)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[key] = _Waiting(build, write, _FIRST, _nothing, answer)
        self._concluding.set()
        self._start()
        await asyncio.wait([answer], timeout=CONCLUSION_SECONDS)
        stored = answer.done() and answer.result()
        if not stored:
            self.withdraw(key)
            self.offer(key, build, write, urgent=True)
        return stored

    def _start(self) -> None:
        if self._working is None or self._working.done():
            # not in the context of the trigger that happens to be first: its logger is bound there
            context = contextvars.Context()
            self._working = asyncio.get_running_loop().create_task(self._work(), context=context)

    def withdraw(self, key: TaskInstanceId) -> None:
        """Write nothing more for the task. A write in flight goes on."""
        self._waiting.pop(key, None)

    async def written(self, key: TaskInstanceId) -> None:
        """Wait some seconds for the task's write in flight, so that it can't replace a later one."""
        if self._in_flight is not None and self._in_flight[0] == key:
            await asyncio.wait([self._in_flight[1]], timeout=LAST_WRITE_SECONDS)

    @contextlib.contextmanager
    def question(self) -> Iterator[None]:
        """Begin no write while the body of the `with` waits for an answer of Airflow. A write in flight goes on."""
        self._questions += 1
        self._unasked.clear()
        try:
            yield
        finally:
            self._questions -= 1
            if not self._questions:
                self._unasked.set()

    async def _work(self) -> None:
        while self._waiting:
            await self._unasked.wait()
            began = timing.now()
            await self._write_next()
            if all(status.rank != _FIRST for status in self._waiting.values()):
                self._concluding.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval - (timing.now() - began)):
                        await self._concluding.wait()

    async def _write_next(self) -> None:
        """Write the most urgent status. Log the first write that is slow and the first one that fails."""
        if not self._waiting:  # withdrawn meanwhile
            return
        key = min(self._waiting, key=lambda key: self._waiting[key].rank)
        status = self._waiting.pop(key)
        stored = False
        try:
            writing: asyncio.Future[object] = asyncio.ensure_future(self._write_one(status))
            self._in_flight = key, writing
            await asyncio.wait([writing], timeout=self._slow_after)
            if not writing.done():
                if not self._slow:
                    log.warning(
                        "Writing a training's status to Airflow takes over %.0f s. Its page may show old data.",
                        self._slow_after,
                    )
                self._slow = True
                await asyncio.wait([writing])
            writing.result()
            stored = True
        except Exception as e:
            if not self._failed:
                log.warning("A training's status can't be written to Airflow: its page shows old data.\n%s", e)
            self._failed = True
        finally:
            self._in_flight = None
            if status.stored is not None and not status.stored.done():
                status.stored.set_result(stored)

    async def _write_one(self, status: _Waiting) -> object:
        await status.prepare()
        make = status.build()
        # the others are written before the next status of this task, which is offered within REFRESH_SECONDS
        due = round(timing.epoch() + REFRESH_SECONDS + len(self._waiting) * self._interval, 1)
        return await in_thread(lambda: status.write({**make(), NEXT_DUE: due}))


_writers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, StatusWriter] = weakref.WeakKeyDictionary()


class TaskStatusSink:
    """Takes the statuses of one task: a `StatusSink`."""

    def __init__(self, ti: Any, host: str) -> None:
        self.host = host
        self.try_number = int(ti.try_number)
        self.earlier: Mapping[str, Any] | None = None  #: See `StatusSink`.
        self._key = TaskInstanceId.of(ti)
        self._ti = ti
        self._build: Build | None = None  # that was offered last
        self._conclusion: Mapping[str, Any] = {}  # part of each status from now on
        self._stored: Mapping[str, Any] = {}  # by another process of this try
        self._retracted: Mapping[str, Any] = {}
        self._has_written = False  # whether this process has begun to write a status
        self._began_at = 0.0  # of the last write, by timing.now
        self._written_at = -math.inf  # when the last write began that succeeded

    @classmethod
    def of(cls, ti: Any, host: str) -> TaskStatusSink | None:
        """The sink of a task instance; None if it lacks what identifies it, as in `airflow dags test`."""
        try:
            return cls(ti, host)
        except (AttributeError, TypeError, ValueError):
            return None

    def offer(self, build: Build, *, urgent: bool) -> None:
        """Publish a status soon: see `StatusSink`."""
        self._build = build
        with contextlib.suppress(Exception):  # it must not disturb the training
            _writer().offer(self._key, self._begin, self._write, urgent=urgent, prepare=self.read_earlier)

    async def store_conclusion(self, document: Mapping[str, Any]) -> bool:
        """Store the conclusion in the task's status, before a job that has not ended is released.

        It is a part of each status that this process writes from now on. It replaces an earlier conclusion.
        """
        self._conclusion = dict(document)
        try:
            return await _writer().store_conclusion(self._key, self._begin_conclusion, self._write)
        except Exception as e:
            log.warning("The cause can't be stored in Airflow.\n%s: %s", type(e).__name__, e)
            return False

    def retract(self) -> None:
        """Leave the conclusion out of later statuses: see `StatusSink`."""
        self._stored, self._retracted = {}, self._conclusion
        self._conclusion = {}

    async def stored_conclusion(self) -> Mapping[str, Any] | None:
        """The conclusion that this process or an earlier one of the same try has stored: see `StatusSink`."""
        if self._conclusion:
            return self._conclusion
        try:
            with question():
                async with asyncio.timeout(CONCLUSION_SECONDS):
                    status = dict(mapping(await in_thread(self._read)))
        except Exception as e:
            log.warning("The cause that was stored in Airflow can't be read.\n%s: %s", type(e).__name__, e)
            return None
        self._keep_earlier(status)
        self._conclusion = mapping(status.pop(CONCLUSION, None))
        if self._build is None:
            self._build = lambda: lambda: status
        return self._conclusion

    async def read_earlier(self) -> None:
        """Read the status of an earlier process: see `StatusSink`. No conclusion waits for it: it is no `question`."""
        if self.earlier is None and not self._has_written:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CONCLUSION_SECONDS):
                    self._keep_earlier(await in_thread(self._read))

    def _keep_earlier(self, status: Any) -> None:
        """Keep what was stored before this process has written anything."""
        if self.earlier is None and not self._has_written:
            read = mapping(status)
            self.earlier = read if read.get("try_number") == self.try_number else {}

    async def store_end(self, status: Mapping[str, Any]) -> None:
        """Store the last status of a try that a trigger has ended, and its summary: no worker does. It never raises."""
        self._build = lambda: lambda: status
        with contextlib.suppress(Exception):
            await _writer().store_conclusion(self._key, self._begin_conclusion, self._write_end)

    def _begin(self) -> Callable[[], Mapping[str, Any]]:
        self._began_at = timing.now()
        assert self._build is not None
        return self._build()

    def _begin_conclusion(self) -> Callable[[], Mapping[str, Any]]:
        self._began_at = timing.now()
        return self._status()

    def _status(self) -> Callable[[], Mapping[str, Any]]:
        """The latest status, as it is now. A conclusion is stored also if there is none."""
        make: Callable[[], Mapping[str, Any]] = dict
        with contextlib.suppress(Exception):
            make = self._build() if self._build is not None else dict

        def made() -> Mapping[str, Any]:
            known = {"version": VERSION, "try_number": self.try_number, "written_at": timing.epoch(), "host": self.host}
            with contextlib.suppress(Exception):
                known |= make()
            return known

        return made

    def _write(self, status: Mapping[str, Any]) -> None:
        """Write it as it is `masked`. A trigger's task instance has no `xcom_push`."""
        if not self._conclusion and self._began_at > self._written_at + UNSHARED_SECONDS:
            stored = mapping(mapping(self._read()).get(CONCLUSION))
            self._stored = {} if stored == self._retracted else stored
        conclusion = self._conclusion or self._stored
        value = {**masked(dict(status)), **({CONCLUSION: conclusion} if conclusion else {})}
        self._has_written = True
        if self.host == WORKER:
            self._ti.xcom_push(key=STATUS_XCOM, value=transportable(value, STATUS_XCOM))
        else:
            compat.set_xcom(self._key, STATUS_XCOM, value)
        self._written_at = self._began_at

    def _write_end(self, status: Mapping[str, Any]) -> None:
        """Write status and summary, unless the next try has begun: then the summary is its own, or deleted.

        Nothing is written either if the end is stored already: another process of this try has stored it, or a slow
        write of this one has ended after all.
        """
        before = mapping(compat.xcom_of(self._key, SUMMARY_XCOM))
        if before.get("try_number") == self.try_number and before.get("state") == "running":
            status = with_earlier(status, mapping(self._read()), self.try_number)
            self._write(status)
            compat.set_xcom(self._key, SUMMARY_XCOM, killed_summary(before, status))

    def _read(self) -> Any:
        return compat.own_xcom(self._ti, STATUS_XCOM) if self.host == WORKER else compat.xcom_of(self._key, STATUS_XCOM)

    async def __aenter__(self) -> Self:
        _writer().followed.add(self._key)
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Publish nothing more. A trigger waits for its write in flight, unless it ends by an error or a kill.

        A worker doesn't wait: Airflow serializes its requests, so its later ones come after the write. During a wait it
        would not react to a kill.
        """
        _writer().withdraw(self._key)
        _writer().followed.discard(self._key)
        if error is None and self.host == TRIGGER:
            await _writer().written(self._key)


def _writer() -> StatusWriter:
    return _writers.setdefault(asyncio.get_running_loop(), StatusWriter())


def refresh_seconds() -> float:
    """Between two statuses of a training that runs, in a triggerer, which writes one a second of all its trainings."""
    return min(max(TRIGGER_REFRESH_SECONDS, len(_writer().followed) * SECONDS_BETWEEN_WRITES), REFRESH_SECONDS)


def question() -> contextlib.AbstractContextManager[None]:
    """While the body of the `with` waits for an answer of Airflow, the running event loop begins no status write."""
    return _writer().question()


async def ask_state(ti: Any, log: Log, seconds: float, *, slow_after: float | None = None) -> str:
    """The state of a task instance; empty if it can't be read within `seconds`.

    A slow answer is waited for: a triggerer's supervisor may be busy for minutes. It answers the requests of all
    triggers one after another, so a request that is given up and sent again waits behind all others once more.

    :param slow_after: seconds in which an answer may always arrive, and after which a trigger logs that it still waits.
        Default: None, as in a worker, which has few seconds.
    """
    end = timing.now() + seconds
    try:
        with question():
            asking = in_thread(functools.partial(compat.task_state, ti))
            if slow_after is not None:
                await asyncio.wait([asking], timeout=slow_after)
                if not asking.done():
                    log.warning(
                        "The trigger was canceled, and Airflow has not reported the task's state for "
                        f"{slow_after:.0f} s.\n"
                        "Still waiting for it, because it decides whether the job is released."
                    )
            async with asyncio.timeout(end - timing.now()):
                return await asking
    except Exception as e:
        log.warning(f"The task's state can't be read from Airflow.\n{type(e).__name__}: {e}")
        return ""
