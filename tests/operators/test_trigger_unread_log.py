"""A trigger ends only when Airflow's supervisor has read its lines: later ones would not be in the task's log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TextIO

import pytest
import structlog
from airflow.sdk import TaskInstanceState
from airflow.triggers.base import TriggerEvent

from airflow_provider_ktrain.compat import EARLIEST_EVENT, log_socket_size, unread_log
from airflow_provider_ktrain.core.state.status import phase_of
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.engine.tasks import until
from tests.operators.task_instance import Instance, Supervisor, of_each_kind, supervised

MANY_LINES = 3000  # more than the socket holds
LINE = "a line that the supervisor has not read\n"
AIRFLOWS_CHANNEL = """
import os, socket, structlog
from airflow.sdk.execution_time.supervisor import _configure_logs_over_json_channel
from airflow_provider_ktrain.compat import unread_log

supervisor, runner = socket.socketpair()
_configure_logs_over_json_channel(runner.detach())
structlog.get_logger("a trigger").info("a line")
assert unread_log() > 0
supervisor.recv(65536)
os._exit(unread_log())
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what is unread")


#: What happens until a trigger's log is read, while the trigger runs.
Unread = Callable[[asyncio.Future[TriggerEvent]], Awaitable[None]]


class ReadLate(Protocol):
    """The result of the fixture `read_late`."""

    def __call__(self, script: str, unread: Unread, *, full: bool = False) -> bytes: ...


class LoggerFactory:
    """As Airflow's: it has the stream to which its loggers write."""

    def __init__(self, io: TextIO) -> None:
        self.io = io

    def __call__(self, *_: object) -> structlog.WriteLogger:
        return structlog.WriteLogger(self.io)


@pytest.fixture
def supervisor() -> Iterator[socket.socket]:
    """The supervisor's end of the socket to which a triggerer's process logs. One line in it is unread."""
    end, runner = socket.socketpair()
    before = structlog.get_config()["logger_factory"]
    with end, os.fdopen(runner.detach(), "w", buffering=1) as output:
        structlog.configure(logger_factory=LoggerFactory(output))
        output.write(LINE)
        yield end
        structlog.configure(logger_factory=before)


def fill() -> None:
    """Write to the log until its socket is full."""
    output = structlog.get_config()["logger_factory"].io
    with socket.socket(fileno=os.dup(output.fileno())) as runner, contextlib.suppress(BlockingIOError):
        while True:
            runner.send(LINE.encode(), socket.MSG_DONTWAIT)


@pytest.mark.thorough
def test_lines_that_airflows_supervisor_has_not_read_are_counted() -> None:
    done = subprocess.run([sys.executable, "-c", AIRFLOWS_CHANNEL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@of_each_kind
def test_event_waits_until_the_supervisor_has_read_the_log(instance: Instance, supervisor: socket.socket) -> None:
    with supervised(Supervisor(TaskInstanceState.DEFERRED)):
        trigger = instance.trigger(instance.execute(command=["sh", "-c", "sleep 5"]))

        async def unread_until_after_the_earliest_event() -> bool:
            following = asyncio.ensure_future(anext(aiter(trigger.run())))
            await asyncio.sleep(EARLIEST_EVENT + 2)
            assert not following.done()
            supervisor.recv(65536)
            return bool((await following).payload["outcome"]["succeeded"])

        assert asyncio.run(unread_until_after_the_earliest_event())


@pytest.fixture
def read_late(instance: Instance, request: pytest.FixtureRequest) -> ReadLate:
    """Run a job whose trigger's log is read only after `unread` has returned; returns what the trigger has logged.

    If `full`, the log's socket is full from the start.
    """

    async def follow(trigger: TrainingJobTrigger, unread: Unread, full: bool) -> bytes:
        supervisor: socket.socket = request.getfixturevalue("supervisor")  # the worker has not written to it
        supervisor.setblocking(False)
        loop, read = asyncio.get_running_loop(), bytearray()
        if full:
            fill()
        following = asyncio.ensure_future(anext(aiter(trigger.run())))
        await unread(following)
        while not following.done() or unread_log():
            with contextlib.suppress(TimeoutError):
                read += await asyncio.wait_for(loop.sock_recv(supervisor, 65536), 0.1)
        assert following.result().payload["outcome"]["succeeded"]
        return bytes(read)

    def run(script: str, unread: Unread, *, full: bool = False) -> bytes:
        with supervised(Supervisor(TaskInstanceState.DEFERRED)):
            trigger = instance.trigger(instance.execute(command=["sh", "-c", script]))
            return asyncio.run(follow(trigger, unread, full))

    return run


@of_each_kind
def test_unread_lines_do_not_block_the_event_loop(read_late: ReadLate) -> None:
    async def many_passes_of_the_loop(_: asyncio.Future[TriggerEvent]) -> None:
        while unread_log() <= log_socket_size() // 3:  # noqa: ASYNC110 - the trigger writes
            await asyncio.sleep(0.01)
        for _passes in range(300):  # a write to the full socket would never return
            await asyncio.sleep(0.01)

    count = f"i=1; while [ $i -le {MANY_LINES} ]; do echo line $i; i=$((i+1)); done"
    script = f"sleep 5; {count}"  # after the worker has deferred
    read = read_late(script, many_passes_of_the_loop)
    numbers = [int(number) for number in re.findall(rb"\[(?:Master|node) 0\] line (\d+)", read)]
    assert numbers == list(range(1, MANY_LINES + 1)), read[:500]


@of_each_kind
def test_lines_of_the_trigger_itself_do_not_block_the_event_loop(instance: Instance, read_late: ReadLate) -> None:
    """Those of some hundred triggers that start together fill the socket."""

    async def until_the_job_has_ended(following: asyncio.Future[TriggerEvent]) -> None:
        full = unread_log()

        async def ended() -> bool:
            return following.done() or all(phase_of(job).ended for job in instance.jobs())

        await until(ended)  # a write to the full socket would never return
        assert unread_log() == full

    read = read_late("sleep 5", until_the_job_has_ended, full=True)
    assert read.count(b" is Succeeded") == 1, read[-2000:]


def test_kill_ends_although_the_log_is_never_read(instance: Instance, supervisor: socket.socket) -> None:
    with supervised(Supervisor(TaskInstanceState.FAILED)):
        trigger = instance.trigger(instance.execute())
        asyncio.run(trigger.on_kill())
    assert unread_log()
    assert not instance.jobs()
