"""Each test that leaves something behind fails; one that restores it, or whose wider fixture holds it, does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = """
from tests import leaks
from tests.isolation import own_directories

leaks.PATIENCE = 0.3
own_directories()


def pytest_configure(config):
    leaks.register(config)
"""
TESTS = """
import asyncio
import logging
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest

from tests.leaks import memory_name

sys.modules["airflow.configuration"] = SimpleNamespace(conf=SimpleNamespace(_sections={}))
conf = sys.modules["airflow.configuration"].conf
ended = threading.Event()
started = []
shared_memory = pathlib.Path("/dev/shm", memory_name("left"))


@pytest.fixture(scope="session", autouse=True)
def at_the_end():
    yield
    for process in started:
        process.kill()
        process.wait()
    ended.set()
    shared_memory.unlink(missing_ok=True)


def start(seconds):
    process = subprocess.Popen(["sleep", str(seconds)])
    started.append(process)
    return process


def leaves_a_signal_handler():
    signal.signal(signal.SIGUSR2, lambda *_: None)


def leaves_an_environment_variable():
    os.environ["LEFT"] = "1"


def leaves_a_removed_environment_variable():
    del os.environ["HOME"]


def leaves_a_working_directory():
    os.chdir("/")


def leaves_a_current_event_loop():
    asyncio.set_event_loop(asyncio.new_event_loop())


def leaves_a_thread():
    threading.Thread(target=ended.wait, name="ktrain-call", daemon=True).start()


def leaves_a_child_process():
    start(30)


def leaves_a_process_that_nobody_waited_for():
    start(0)


def leaves_a_temporary_file():
    tempfile.mkstemp()


def leaves_shared_memory():
    shared_memory.touch()


def leaves_configuration():
    conf._sections["core"] = {"parallelism": "1"}


def leaves_a_logging_handler():
    logging.getLogger("airflow.task").addHandler(logging.NullHandler())


def leaves_a_level():
    logging.getLogger().setLevel(logging.CRITICAL)


LEAVES = [value for name, value in list(globals().items()) if name.startswith("leaves_")]


@pytest.mark.parametrize("leave", LEAVES, ids=[leave.__name__ for leave in LEAVES])
def test_that(leave):
    leave()


def test_after_all_others():
    assert os.getcwd() != "/"
    assert "HOME" in os.environ
    assert "LEFT" not in os.environ
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_that_restores(monkeypatch, tmp_path):
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.chdir(tmp_path)
    threading.Thread(target=time.sleep, args=(0.05,), name="ktrain-call").start()
    with tempfile.NamedTemporaryFile(), tempfile.TemporaryDirectory():
        asyncio.run(asyncio.sleep(0))
    with start(0):
        pass


@pytest.fixture(scope="module")
def wide():
    os.environ["WIDE"] = tempfile.mkdtemp()
    with start(30) as process:
        yield process
        process.kill()
    del os.environ["WIDE"]


def test_of_a_wider_fixture(request):
    request.getfixturevalue("wide")


def test_of_a_wider_fixture_in_its_arguments(wide):
    assert wide.poll() is None
"""
REPORT = re.compile(r"_ ERROR at teardown of (\S+?) _.*?something behind:\n(.*?)\n(?:_|Order|=)", re.DOTALL)


@pytest.mark.thorough
def test_what_a_test_leaves_behind_fails_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "test_it.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = dict(REPORT.findall(done.stdout))
    expected = {
        "a_signal_handler": "signal handler SIGUSR2: <Handlers.SIG_DFL: 0> before, <function .*",
        "an_environment_variable": "environment variable LEFT: none before, '1' after",
        "a_removed_environment_variable": "environment variable HOME: .* before, none after",
        "a_working_directory": "working directory: .* before, '/' after",
        "a_current_event_loop": "current event loop: none before, <_UnixSelectorEventLoop .*",
        "a_thread": r"thread <Thread\(ktrain-call, started daemon .*",
        "a_child_process": r"child process \d+, S \(sleeping\): sleep 30",
        "a_process_that_nobody_waited_for": r"child process \d+, Z \(zombie\): sleep",
        "a_temporary_file": "temporary file tmp.*",
        "shared_memory": r"file in /dev/shm ktrain-test-\d+-left",
        "configuration": r"Airflow's configuration airflow.configuration, core: none before, {'parallelism'.*",
        "a_logging_handler": r"logging handlers of airflow\.task: none before, \(<NullHandler .*",
        "a_level": "logging level: 30 before, 50 after",
    }
    assert found.keys() == {f"test_that[leaves_{name}]" for name in expected}, done.stdout + done.stderr
    for name, line in expected.items():
        assert re.fullmatch(line, found[f"test_that[leaves_{name}]"]), found
    assert f"{len(expected) + 4} passed, {len(expected)} errors" in done.stdout, done.stdout
