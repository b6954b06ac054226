"""A cluster in virtual time: the scripted API server in each event loop of a worker, a trigger or the test.

One loop runs after the other. Time goes on where the last one has stopped, and what is to happen later happens in
whichever loop runs then. While no loop runs, no time passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from aiohttp import web

from tests import apiserver
from tests.clusters import TestCluster
from tests.factories import wait_for
from tests.operators.operators import Operators
from tests.virtual import START, Stuck, VirtualLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
NAMESPACE = "default"
LOOK_SECONDS = 0.05  #: Pause between two looks whether a condition holds.


class ServingLoop(VirtualLoop):
    """Serves the cluster's API while it runs."""

    def __init__(self, world: World) -> None:
        super().__init__(world.now)
        self.ahead = world.ahead
        self._world, self._awaited = world, False
        self._serving = self.create_task(world.serve())

    def wait_for_main_thread(self) -> None:
        """Stop time until the main thread, which receives a signal, has given this loop its next work."""
        self._awaited = True
        if asyncio._get_running_loop() is self:
            self.hold()
        else:
            super().call_soon_threadsafe(self.hold)

    def hold(self) -> None:
        """Stop time for one more thread."""
        self._threads += 1

    def thread_waits(self) -> None:
        """Let time pass although the calling thread has not ended its work."""
        super().call_soon_threadsafe(self._thread_ended)

    def main_thread_works(self) -> None:
        """Continue after `wait_for_main_thread`. Called in the main thread."""
        if self._awaited and not self.is_closed():
            self._awaited = False
            super().call_soon_threadsafe(self._thread_ended)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        if threading.current_thread() is threading.main_thread():
            self.main_thread_works()
        return handle

    def wait(self, select: Callable[[float | None], list[Any]], timeout: float | None) -> list[Any]:
        if self._world.error is not None:
            raise Stuck("the test's cluster has failed") from self._world.error
        return super().wait(select, timeout)

    def close(self) -> None:
        if not self.is_closed():
            self._world.ended(self)
            self.run_until_complete(self._world.stop(self._serving))
        super().close()


class Policy(asyncio.DefaultEventLoopPolicy):
    """Makes loops that serve a cluster."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return self._world.new_loop()


@dataclass
class Later:
    """What happens at a time of the loop."""

    at: float
    work: Callable[[], object]
    done: bool = False


class World:
    """Time, and the API server in all loops.

    :ivar ahead: seconds by which the clock of Airflow's hosts is ahead of the cluster's, in loops that begin later.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        self._time, self._loop = START, None
        self._served: list[tuple[Operators, socket.socket]] = []
        self._agenda: list[Later] = []
        self._blocked: list[threading.Event] = []
        self.error: BaseException | None = None  # of what has happened

    _loop: ServingLoop | None

    # loops

    @property
    def now(self) -> float:
        """The time, as a loop tells it."""
        return self._time if self._loop is None else self._loop.time()

    def new_loop(self) -> ServingLoop:
        self.settle()  # the main thread may have been interrupted while it closed the last one
        loop = ServingLoop(self)
        self._loop, self._agenda = loop, [later for later in self._agenda if not later.done]
        for later in self._agenda:
            loop.call_at(later.at, self._happen, later)
        return loop

    def ended(self, loop: ServingLoop) -> None:
        if self._loop is loop:
            self._time, self._loop = loop.time(), None

    def cluster(self, directory: Path, make: Callable[..., Operators] = Operators) -> VirtualCluster:
        """A cluster, which is served in all loops that begin from now on.

        :param directory: for its kubeconfig.
        :param make: makes its API server, called as `Operators` is.
        """
        api, listening = make(self.after, namespace=NAMESPACE), socket.create_server(("127.0.0.1", 0), backlog=128)
        self._served.append((api, listening))
        directory.mkdir(exist_ok=True)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        api.token = secrets.token_hex(8)
        kubeconfig = apiserver.kubeconfig(directory, url, api.namespace, api.token)
        return VirtualCluster(kubeconfig, api.namespace, None, self, api)

    async def serve(self) -> list[web.ServerRunner]:
        """Begin to serve all clusters in the running loop."""
        runners = []
        for api, listening in self._served:
            runner = web.ServerRunner(web.Server(_handler(api), access_log=None), shutdown_timeout=0.01)
            await runner.setup()
            await web.SockSite(runner, listening.dup()).start()
            runners.append(runner)
        return runners

    async def stop(self, serving: asyncio.Task[list[web.ServerRunner]]) -> None:
        """End what `serve` has begun."""
        for api, _ in self._served:
            api.break_connections()
        for runner in await serving:
            await runner.cleanup()

    def close(self) -> None:
        for over in self._blocked:
            over.set()
        for _, listening in self._served:
            listening.close()

    # what happens

    def after(self, seconds: float, work: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the loop that runs that many seconds from now. May be called in any thread."""
        later = Later(self.now + seconds, lambda: work(*arguments))
        self._agenda.append(later)
        if self._loop is None:
            return
        if self._loop is asyncio._get_running_loop():
            self._loop.call_at(later.at, self._happen, later)
        else:
            self._loop.call_soon_threadsafe(self._loop.call_at, later.at, self._happen, later)

    def _happen(self, later: Later) -> None:
        if later.done:
            return
        later.done = True
        try:
            later.work()
        except BaseException as e:
            self.error = self.error or e

    def when(self, condition: Callable[[], object], work: Callable[[], object]) -> None:
        """Call a function as soon as a condition holds."""

        def look() -> None:
            if condition():
                work()
            else:
                self.after(LOOK_SECONDS, look)

        self.after(0, look)

    def signal_main_thread(self, number: int) -> None:
        """Send a signal to the main thread, from another one; time stands still until it is handled."""
        self.wait_for_main_thread()
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def wait_for_main_thread(self) -> None:
        """Let time stand still until the main thread gives the loop its next work."""
        if self._loop is not None:
            self._loop.wait_for_main_thread()

    def settle(self) -> None:
        """Wait until the event loop of a worker that has ended is closed."""
        if self._loop is not None:
            self._loop.main_thread_works()
            wait_for("the event loop is closed", lambda: self._loop is None, 20)

    def block(self, seconds: float) -> None:
        """Block the calling thread, in which the product waits, for seconds of the loop. It may be the loop's own."""
        loop, over = self._loop, threading.Event()
        assert loop is not None
        if loop is asyncio._get_running_loop():
            loop.advance(seconds)
            return

        def wake() -> None:
            loop.hold()
            over.set()

        self._blocked.append(over)
        self.after(seconds, wake)
        loop.thread_waits()
        over.wait()

    def signal_handled(self) -> None:
        """Called at the end of a signal handler that doesn't raise."""
        if self._loop is not None:
            self._loop.main_thread_works()

    def call(self, work: Callable[[], T]) -> T:
        """Call a function in an event loop, while no process of Airflow runs."""
        if asyncio._get_running_loop() is not None:
            return work()

        async def called() -> T:
            return work()

        return asyncio.run(called())

    def pass_time(self, seconds: float) -> None:
        """Let time pass, while no process of Airflow runs."""
        asyncio.run(asyncio.sleep(seconds))

    def wait(self, what: str, condition: Callable[[], object], seconds: float = 3600.0) -> None:
        """Let time pass until a condition holds."""

        async def wait() -> None:
            end = self.now + seconds
            while not condition():
                assert self.now < end, f"not within {seconds:.0f} s: {what}"
                await asyncio.sleep(LOOK_SECONDS)

        if not condition():
            asyncio.run(wait())


@dataclass(frozen=True)
class VirtualCluster(TestCluster):
    """The cluster of a world, for tests that know other clusters, too."""

    world: World = field(default_factory=World)
    api: Operators = field(default_factory=lambda: Operators(lambda *_: None))

    def admin(self, fault: str, **how: Any) -> None:
        """The fault switches of the embedded cluster that tests use."""
        if fault == "clear":
            self.api.clear_failures()
            self.api.away = False
        elif fault == "drop":
            self.api.away = True
            self.world.after(how["seconds"], setattr, self.api, "away", False)
        else:
            assert fault == "status", fault
            self.api.fail_verbs(how.get("verb"), how.get("path", ""), how["status"], how.get("count", float("inf")))
            if "seconds" in how:
                self.world.after(how["seconds"], self.api.clear_failures)


def _handler(api: Operators) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Answers requests, also while all tasks of the loop are canceled."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if (task := asyncio.current_task()) is not None:
            asyncio._unregister_task(task)
        return await apiserver.http.respond(api, request)

    return answer


@contextlib.contextmanager
def virtual_cluster(directory: Path, make: Callable[..., Operators] = Operators) -> Iterator[VirtualCluster]:
    """A cluster that new event loops of this process serve, and whose time they own.

    :param directory: for its kubeconfig.
    :param make: makes its API server, called as `Operators` is.
    """
    world, before = World(), asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy(world))
    try:
        yield world.cluster(directory, make)
        if world.error is not None:
            raise world.error
    finally:
        asyncio.set_event_loop_policy(before)
        world.close()
