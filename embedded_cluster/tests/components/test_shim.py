"""Container runs: what is logged, how they end, and that nothing of them survives."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.small_cluster import small
from ktrain_embedded.node import shim
from ktrain_embedded.node.runtime import Ended, Run, RunSpec, StartError

RECORD = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z (stdout|stderr) [FP] ")


def spec(directory: Path, argv: list[str], memory: int | None = None, **env: str) -> RunSpec:
    path = f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return RunSpec(argv, {"PATH": path, **env}, str(directory), str(directory / "0.log"), str(directory), memory)


def shell(directory: Path, command: str, memory: int | None = None) -> RunSpec:
    return spec(directory, ["sh", "-c", command], memory)


def python(directory: Path, program: str, *arguments: str) -> RunSpec:
    return spec(directory, [sys.executable, "-c", program, *arguments])


def records(directory: Path) -> list[bytes]:
    """The records of the log, split only where a record begins on a line of its own."""
    return (directory / "0.log").read_bytes().splitlines(keepends=True)


def content(log: bytes, stream: bytes = b"stdout") -> bytes:
    """What was written to a stream: full records end a line, partial ones do not."""
    out = b""
    for record in log.split(b"\n")[:-1]:
        _, name, tag, data = record.split(b" ", 3)
        if name == stream:
            out += data + (b"\n" if tag == b"F" else b"")
    return out


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def survivors(marker: str) -> list[int]:
    """Processes whose command line has the marker."""
    found = []
    for pid in shim.parents():
        try:
            if marker.encode() in command_line(pid) and pid != os.getpid():
                found.append(pid)
        except OSError:
            continue
    return found


async def until(holds: Callable[[], object], timeout: float = 240) -> None:
    async with asyncio.timeout(timeout):
        while not holds():  # noqa: ASYNC110 (of files and processes)
            await asyncio.sleep(0.005)


async def test_both_streams_are_recorded(tmp_path: Path) -> None:
    assert await Run(shell(tmp_path, "echo one; echo two; echo bad >&2; printf tail")).ended() == Ended(0)
    lines = records(tmp_path)
    assert all(RECORD.match(line) for line in lines)
    assert content(b"".join(lines)) == b"one\ntwo\ntail"
    assert content(b"".join(lines), b"stderr") == b"bad\n"


async def test_times_are_unique_and_in_order(tmp_path: Path) -> None:
    await Run(shell(tmp_path, "seq 100000")).ended()
    times = [line.partition(b" ")[0] for line in records(tmp_path)]
    assert len(times) == 100_000
    assert times == sorted(set(times))


@pytest.mark.parametrize(
    ("size", "tags"), [(0, b"F"), (shim.RECORD, b"F"), (shim.RECORD + 1, b"PF"), (3 * shim.RECORD, b"PPF")]
)
async def test_long_lines_are_split(tmp_path: Path, size: int, tags: bytes) -> None:
    await Run(python(tmp_path, f"print('x' * {size})")).ended()
    lines = records(tmp_path)
    assert b"".join(line.split(b" ", 3)[2] for line in lines) == tags
    assert content(b"".join(lines)) == b"x" * size + b"\n"


@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.builds(lambda n: b"y" * n, st.integers(16_380, 33_000)), st.just(b"\n")),
        max_size=12,
    )
)
def test_log_contains_exactly_the_output(tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("log") / "0.log"
    writer = shim.Log(str(path))
    for chunk in filter(None, chunks):
        writer.feed(b"stdout", chunk)
    writer.feed(b"stdout", b"")
    written = b"".join(chunks)
    log = path.read_bytes()
    assert content(log) == written
    assert all(len(record.split(b" ", 3)[3]) <= shim.RECORD for record in log.split(b"\n")[:-1])


async def test_large_log_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "ROTATE_BYTES", 1000)
    monkeypatch.setattr(shim, "ROTATE_INTERVAL", 0)
    log = shim.Log(str(tmp_path / "0.log"))
    for i in range(100):
        log.feed(b"stdout", b"%099d\n" % i)
    rotated = (tmp_path / "0.log.rotated").read_bytes()
    assert len(rotated) < 1200
    assert content((tmp_path / "0.log").read_bytes()).endswith(b"%099d\n" % 99)


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143), ("sleep 60 & exit 4", 4)],
)
async def test_exit_codes_are_reported(tmp_path: Path, command: str, code: int) -> None:
    assert await Run(shell(tmp_path, command)).ended() == Ended(code)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["/no/such/program"], 'exec: "/no/such/program": stat /no/such/program: no such file or directory'),
        (["nosuchprogram"], 'exec: "nosuchprogram": executable file not found in $PATH'),
        (["/etc/passwd"], 'exec: "/etc/passwd": permission denied'),
    ],
)
async def test_start_errors_have_the_messages_of_containerd(tmp_path: Path, argv: list[str], why: str) -> None:
    run = Run(spec(tmp_path, argv))
    with pytest.raises(StartError, match=re.escape(f"unable to start container process: {why}")):
        await run.started()
    await run.ended()


async def test_stop_sends_sigterm_first(tmp_path: Path) -> None:
    run = Run(shell(tmp_path, "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.05; done"))
    await until(lambda: b"up" in content((tmp_path / "0.log").read_bytes()) if (tmp_path / "0.log").exists() else 0)
    run.stop(60)
    assert await run.ended() == Ended(5)
    assert content((tmp_path / "0.log").read_bytes()) == b"up\nbye\n"


async def test_stop_before_the_start(tmp_path: Path) -> None:
    """The shim finds the stop together with the run."""
    run = Run(spec(tmp_path, ["sleep", "60"]))
    run.stop(0)
    async with asyncio.timeout(240):
        assert await run.ended() == Ended(137)


async def test_command_without_a_handler_ignores_sigterm_like_pid_1(tmp_path: Path) -> None:
    run = Run(spec(tmp_path, ["sleep", "60"]))
    await run.started()
    run.stop(0.1)
    assert await run.ended() == Ended(137)


async def test_sigkill_follows_after_the_grace_period(tmp_path: Path) -> None:
    run = Run(shell(tmp_path, "trap '' TERM; echo up; sleep 60"))
    await run.started()
    run.stop(300)
    run.stop(0.1)  # the grace period got shorter
    assert await run.ended() == Ended(137)


async def test_exceeded_memory_limit_is_an_oom_kill(tmp_path: Path) -> None:
    program = "import time; x = bytearray(200 << 20); time.sleep(60)"
    run = Run(spec(tmp_path, ["sh", "-c", f"{sys.executable} -c '{program}'; exit 0"], memory=64 << 20))
    assert await run.ended() == Ended(137, oom=True)


# a tree as training programs make it: children in sessions of their own, and some whose parent is gone
TREE = """
import os, subprocess, sys, time
marker = sys.argv[1]
sleeper = [sys.executable, "-c", "import time; time.sleep(600)", marker]
subprocess.Popen(sleeper, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [*sleeper, "orphan"])
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
"""


async def grown(directory: Path, marker: str) -> None:
    await until(lambda: len(survivors(marker)) >= 3)
    await until(lambda: (directory / "0.log").exists() and b"ready" in (directory / "0.log").read_bytes())


async def test_nothing_survives_the_end_of_the_command(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    assert await Run(python(tmp_path, TREE, marker, "0")).ended() == Ended(0)
    assert survivors(marker) == []


async def test_nothing_survives_a_kill_of_the_command(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    run = Run(python(tmp_path, TREE, marker, "600"))
    await grown(tmp_path, marker)
    os.kill(await run.started(), signal.SIGKILL)
    assert await run.ended() == Ended(137)
    assert survivors(marker) == []


async def test_nothing_survives_a_kill_of_the_shim(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    run = Run(python(tmp_path, TREE, marker, "600"))
    await grown(tmp_path, marker)
    os.kill(shim.parents()[await run.started()], signal.SIGKILL)
    assert await run.ended() == Ended(137)
    await until(lambda: not survivors(marker))


KUBELET = """
import asyncio, json, sys
from ktrain_embedded.node.runtime import Run, RunSpec

async def main():
    await Run(RunSpec(**json.loads(sys.argv[1]))).ended()

asyncio.run(main())
"""


def kubelet(run: RunSpec) -> subprocess.Popen[bytes]:
    """A process of its own that runs a container, to be killed."""
    return subprocess.Popen([sys.executable, "-c", KUBELET, json.dumps(vars(run))])


async def test_nothing_survives_a_kill_of_the_kubelet(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    with kubelet(python(tmp_path, TREE, marker, "600")) as process:
        await grown(tmp_path, marker)
        process.kill()
    await until(lambda: not survivors(marker))


TRAIN = "import sys, time; print('rank up', flush=True); time.sleep(600)"


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["kubelet", "torchrun"])
async def test_nothing_of_torchrun_survives(tmp_path: Path, victim: str) -> None:
    marker = uuid.uuid4().hex
    script = tmp_path / f"{marker}.py"
    script.write_text(TRAIN)
    run = spec(
        tmp_path,
        ["torchrun", "--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=0", str(script)],
        HOME=os.environ.get("HOME", "/"),
    )
    log = tmp_path / "0.log"
    with kubelet(run) as process:
        await until(lambda: log.exists() and log.read_bytes().count(b"rank up") == 2)
        assert len(survivors(marker)) >= 4  # kubelet's own command line, torchrun and two ranks
        if victim == "kubelet":
            process.kill()
        else:
            torchrun = [p for p in survivors(marker) if b"torchrun" in command_line(p)]
            os.kill(max(torchrun, key=lambda p: p != process.pid), signal.SIGKILL)
    await until(lambda: not survivors(marker))


async def test_end_of_the_kubelet_kills_all_processes(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    async with small(tmp_path) as cluster:
        cluster.create("tree", [sys.executable, "-c", TREE, marker, "600"])
        await until(lambda: len(survivors(marker)) >= 3)
    assert survivors(marker) == []
