"""The command `ktrain` in a process that can't import Airflow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.isolation import directory_of_pods

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join((str(ROOT), str(ROOT / "embedded_cluster" / "src")))  #: The paths of this checkout.
SECONDS = 240  #: How long a command may take to end or to print a line.
WITHOUT_AIRFLOW = """
import sys

class NoAirflow:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "airflow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoAirflow())
from airflow_provider_ktrain.cli import main
try:
    status = main()
finally:
    assert not [name for name in sys.modules if name.partition(".")[0] == "airflow"]
sys.exit(status)
"""


def with_default_signals() -> None:
    """Under nohup and in the background of a shell, signals are ignored, and child processes inherit that."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Ktrain:
    """A running `ktrain` command. Its standard error goes to its standard output.

    :param args: of the command.
    :param cwd: its working directory.
    :param env: more environment variables.
    """

    def __init__(self, *args: object, cwd: Path, env: dict[str, str] | None = None) -> None:
        with directory_of_pods():
            environment = {**os.environ, "PYTHONPATH": PATHS, **(env or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_AIRFLOW, *map(str, args)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
            env=environment, start_new_session=True, preexec_fn=with_default_signals,
        )  # fmt: skip
        self.lines: list[str] = []

    def wait_for(self, text: str) -> str:
        """The first line that contains the text, from the lines that weren't read before."""
        until = time.monotonic() + SECONDS
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
            assert time.monotonic() < until, self.output
        raise AssertionError(f"{text!r} was not printed:\n{self.output}")

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def end(self, stdin: str | None = None) -> int:
        """Wait until the command ends. Returns its exit status."""
        rest, _ = self.process.communicate(stdin, timeout=SECONDS)
        self.lines += rest.splitlines()
        return self.process.returncode

    @property
    def output(self) -> str:
        """What was read so far."""
        return "\n".join(self.lines)


Start = Callable[..., Ktrain]


@pytest.fixture
def ktrain(tmp_path: Path) -> Iterator[Start]:
    """Starts commands in an empty directory. Those that still run at the end are killed."""
    started: list[Ktrain] = []

    def start(*args: object, env: dict[str, str] | None = None) -> Ktrain:
        started.append(Ktrain(*args, cwd=tmp_path, env=env))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
        command.process.wait()
