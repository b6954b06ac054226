"""Fails a test that leaves something behind for the tests after it.

`nothing_is_left_behind` looks before and after each test. What a fixture of a wider scope holds is allowed: it was set
up before the first look, or its set-up during the test, by `request.getfixturevalue`, is taken into account.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.isolation import own_directories

PATIENCE = 2.0  #: Seconds in which threads, child processes and files may end.
OUR_THREADS = "ktrain-"  #: Begins the names of our threads.
CHANGED_BY_PYTEST = ("PYTEST_CURRENT_TEST",)  #: Environment variables.
SHARED_MEMORY = Path("/dev/shm")
SIGNALS = sorted(signal.valid_signals())
TASKS = Path("/proc/self/task")
#: They set up logging and the configuration when a test imports them first.
AIRFLOW = ("airflow.configuration", "airflow.settings", "airflow.sdk.configuration", "airflow.sdk.log")
CLIENTS = ("kubernetes.config.kube_config", "kubernetes_asyncio.config.kube_config")
LOGGERS = ("airflow", "ktrain", "task", "tests")  #: Begin the names of the loggers whose handlers are compared.
ABSENT: Any = object()

Found = dict[Any, Any]  #: A thing -> its value.


def _signals() -> Found:
    """The handlers. pytest-timeout takes its own back when a test fails."""
    found = {number: signal.getsignal(number) for number in SIGNALS}
    return {n: h if getattr(h, "__module__", "") != "pytest_timeout" else signal.SIG_DFL for n, h in found.items()}


def _environment() -> Found:
    return {name: value for name, value in os.environ.items() if name not in CHANGED_BY_PYTEST}


def _directory() -> Found:
    return {"": os.getcwd()}


def _event_loop() -> Found:
    """The current one of this thread, which is not made. None is none: `asyncio.run` sets it at its end."""
    policy: Any = getattr(asyncio.events, "_event_loop_policy", None)
    loop = getattr(getattr(policy, "_local", None), "_loop", None)
    return {} if loop is None else {"": loop}


def _configuration() -> Found:
    """Of Airflow, if it is imported."""
    found: dict[Any, Any] = {}
    for name in ("airflow.configuration", "airflow.sdk.configuration"):
        if (conf := vars(sys.modules.get(name, object)).get("conf")) is not None:
            for section, values in vars(conf).get("_sections", {}).items():
                found[name, section] = dict(values)
    return found


def _logging() -> Found:
    """Handlers of the root and of our loggers. Those of pytest are other ones in each phase of a test."""
    root = logging.root
    found: dict[Any, Any] = {"level": root.level, "disabled level": root.manager.disable}
    for name, logger in [("root", root), *root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger) and logger.handlers and name.startswith(("root", *LOGGERS)):
            handlers = tuple(h for h in logger.handlers if not type(h).__module__.startswith("_pytest"))
            if handlers:
                found[f"handlers of {name}"] = handlers
    return found


def _threads() -> Found:
    return {thread: None for thread in threading.enumerate() if thread.name.startswith(OUR_THREADS)}


def _processes() -> Found:
    """The child processes, also those that have ended and were not waited for. Without /proc, none is found."""
    found: list[str] = []
    for task in os.listdir(TASKS) if TASKS.exists() else ():
        try:
            found += (TASKS / task / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
    return dict.fromkeys(map(int, found))


def _files() -> Found:
    """Those in the directory of this process, without what clients of Kubernetes keep until its end, by content."""
    kept: set[str] = set()
    for name in CLIENTS:
        kept |= {os.path.basename(path) for path in vars(sys.modules.get(name, object)).get("_temp_files", {}).values()}
    return dict.fromkeys(name for name in os.listdir(own_directories()) if name not in kept)


def _memory() -> Found:
    """Files that tests name after this process. All processes of the machine, and all pods, share the directory."""
    try:
        return dict.fromkeys(name for name in os.listdir(SHARED_MEMORY) if name.startswith(memory_name()))
    except OSError:
        return {}


def memory_name(what: str = "") -> str:
    """A name for a file in /dev/shm, which is missed when a test leaves it there."""
    return f"ktrain-test-{os.getpid()}-{what}"


#: What is compared, and how it is found. What is gone after a test is a change of the first ones only.
KEPT: dict[str, Callable[[], Found]] = {
    "signal handler": _signals,
    "environment variable": _environment,
    "working directory": _directory,
    "Airflow's configuration": _configuration,
    "logging": _logging,
}
ADDED: dict[str, Callable[[], Found]] = {"current event loop": _event_loop}
#: They may still be ending.
ENDING: dict[str, Callable[[], Found]] = {
    "thread": _threads,
    "child process": _processes,
    f"file in {SHARED_MEMORY}": _memory,
    "temporary file": _files,
}
LOOKS = KEPT | ADDED | ENDING
State = dict[str, Found]


def look() -> State:
    return {what: find() for what, find in LOOKS.items()}


class Watch:
    """What must be as before at the end of one test."""

    def __init__(self) -> None:
        self._airflow = _imported()
        self._before = look()

    def allow(self, before: State, after: State) -> None:
        """Take into account what a fixture of a wider scope has changed."""
        for what, found in after.items():
            for thing, _, new in _changes(what, before.get(what, {}), found):
                if new is ABSENT:
                    self._before[what].pop(thing, None)
                else:
                    self._before[what][thing] = new

    def left(self) -> list[str]:
        """A line for each thing that the test left behind. Signal handlers and the like are restored."""
        lines = []
        for what in (*KEPT, *ADDED):
            if what in ("Airflow's configuration", "logging") and _imported() != self._airflow:
                continue
            for thing, old, new in _changes(what, self._before[what], LOOKS[what]()):
                lines.append(
                    " ".join(filter(None, (what, _name(thing)))) + f": {_text(old)} before, {_text(new)} after"
                )
                _restore(what, thing, old)
        until = time.monotonic() + PATIENCE
        for what, find in ENDING.items():
            while added := _changes(what, self._before[what], find()):
                if time.monotonic() > until:
                    lines += [f"{what} {_described(what, thing)}" for thing, _, _ in added]
                    break
                time.sleep(0.005)
        return lines


def _imported() -> list[bool]:
    return [name in sys.modules for name in AIRFLOW]


def _changes(what: str, before: Found, after: Found) -> list[tuple[Any, Any, Any]]:
    """Each thing that is another one than before, with both values."""
    if before == after:
        return []
    found = [(thing, old, new) for thing, new in after.items() if (old := before.get(thing, ABSENT)) != new]
    gone = [(thing, before[thing], ABSENT) for thing in before.keys() - after.keys()] if what in KEPT else []
    return found + gone


def _name(thing: Any) -> str:
    match thing:
        case signal.Signals():
            return thing.name
        case tuple():
            return ", ".join(map(str, thing))
    return str(thing)


def _text(value: Any) -> str:
    return "none" if value is ABSENT else repr(value)[:200]


def _described(what: str, thing: Any) -> str:
    if isinstance(thing, threading.Thread):
        return repr(thing)
    if what != "child process":
        return str(thing)
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{thing}/status").read_text().splitlines())
    except OSError:
        return f"{thing}, which has ended now"
    command = Path(f"/proc/{thing}/cmdline")
    words = command.read_bytes().decode(errors="replace").split("\0") if command.exists() else []
    return f"{thing}, {status['State']}: {' '.join(words).strip() or status['Name']}"[:300]


def _restore(what: str, thing: Any, old: Any) -> None:
    match what:
        case "signal handler" if old is not None:
            signal.signal(thing, old)
        case "environment variable" if old is ABSENT:
            del os.environ[thing]
        case "environment variable":
            os.environ[thing] = old
        case "working directory":
            os.chdir(old)
        case "current event loop":
            asyncio.set_event_loop(None if old is ABSENT else old)


@contextlib.contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the handlers of signals: Airflow's DagBag leaves its own."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


_watches: list[Watch] = []


def allow_process(pid: int) -> None:
    """A test has restarted a process of a wider fixture."""
    for watch in _watches:
        watch.allow({}, {"child process": {pid: None}})


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the test that leaves something behind."""
    watch = Watch()
    _watches.append(watch)
    yield
    _watches.remove(watch)
    if lines := watch.left():
        pytest.fail("The test has left something behind:\n" + "\n".join(lines), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    if fixturedef.scope == "function" or not _watches:
        return (yield)
    before = look()
    try:
        return (yield)
    finally:
        after = look()
        for watch in _watches:
            watch.allow(before, after)


def register(config: pytest.Config) -> None:
    """Make this module a plugin, which each `conftest.py` may ask for."""
    module = sys.modules[__name__]
    if not config.pluginmanager.is_registered(module):
        config.pluginmanager.register(module)
