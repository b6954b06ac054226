"""The starter of a container's program, run as a pod runs it: signals, exit codes, and stacks at SIGTERM."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.logs.stacks import MARK, End, Stack, own_text, read_record
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.manifest.start import is_starter, run_with_code, runs_function, without_start
from tests.factories import wait_for

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="stacks need /proc")
NAME = f"ktrain-test-{os.getpid()}"
READY = "print('ready', flush=True)"
#: Spins in C, without a look at Python's signals, as in the multiplication of large numbers.
SPINS = (
    "import collections, itertools, os\ndef spin():\n    print('ready', os.getpid(), flush=True)\n"
    "    collections.deque(itertools.repeat(0), 0)\nspin()\n"
)
SLEEPS = f"import time\ndef next_batch():\n    {READY}\n    time.sleep(600)\nnext_batch()\n"


def default_signals() -> None:
    """A shell that starts the tests in the background ignores some signals, and a program can't trap these."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Container:
    """A program that the starter runs, with the output that a pod's log has."""

    def __init__(
        self, *command: str, grace: float = 30, stacks: str | None = NAME, python: str = sys.executable,
        env: Mapping[str, str] | None = None, launcher: bool = False,
    ) -> None:  # fmt: skip
        kind = "MPIJob" if launcher else "PyTorchJob"
        manifest = build(kind, JobOptions(image="i", command=command, workers=1))
        role = "Launcher" if launcher else "Master"
        specs = manifest["spec"]["mpiReplicaSpecs" if launcher else "pytorchReplicaSpecs"]
        specs[role]["template"]["spec"]["terminationGracePeriodSeconds"] = grace
        made = run_with_code(manifest, None, stacks=f"{stacks}-{uuid.uuid4().hex[:8]}" if stacks else "")
        specs = made["spec"]["mpiReplicaSpecs" if launcher else "pytorchReplicaSpecs"]
        words = specs[role]["template"]["spec"]["containers"][0]["command"]
        self.stacks_name = words[7]
        self.process = subprocess.Popen(
            [python, *words[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})}, start_new_session=True, preexec_fn=default_signals,
        )  # fmt: skip
        self.seconds = 0.0  # from the last signal to the end
        self._stopped = time.monotonic()

    def wait_for(self, text: str = "ready", times: int = 1) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            times -= text in line
            if not times:
                return line
        raise AssertionError(f"{text!r} was not printed: {self.process.stderr and self.process.stderr.read()}")

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._stopped = time.monotonic()
        self.process.send_signal(number)

    def stopped(self) -> int:
        """Stop it by SIGTERM when it is ready. Returns its exit code."""
        self.wait_for()
        self.stop()
        return self.end()

    def end(self, timeout: float = 60) -> int:
        """Wait for the end; `out` and `err` have the rest of the output, `stacks` the records."""
        self.out, err = self.process.communicate(timeout=timeout)
        self.seconds = time.monotonic() - self._stopped
        found = [record for line in err.splitlines() if (record := read_record(line)) is not None]
        self.stacks = [record for record in found if isinstance(record, Stack)]
        self.ends = [record for record in found if isinstance(record, End)]
        records = (line.partition(MARK)[2] for line in err.splitlines() if MARK in line)
        self.recorded = [record["seconds"] for record in map(json.loads, records) if record.get("end")]
        self.err = "\n".join(text for line in err.splitlines() if (text := own_text(line)) is not None)
        return self.process.returncode

    def main_of(self, rank: str = "") -> Stack:
        (found,) = [stack for stack in self.stacks if stack.main and stack.part == "rank" and stack.rank == rank]
        return found

    def kill(self) -> None:
        children = subprocess.run(
            ["ps", "-s", str(self.process.pid), "-o", "pid="], capture_output=True, text=True, check=False
        ).stdout.split()
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Container] = []

    def run(*command: str, **options: Any) -> Container:
        environment = dict.fromkeys(("RANK", "LOCAL_RANK"), "") | {"TMPDIR": temporary} | options.pop("env", {})
        started.append(Container(*command, env=environment, **options))
        return started[-1]

    with tempfile.TemporaryDirectory(prefix="st") as temporary:  # of killed programs
        yield run
        for container in started:
            container.kill()
            if container.stacks_name:  # without it, this would be the whole /dev/shm of the machine
                shutil.rmtree(f"/dev/shm/{container.stacks_name}", ignore_errors=True)


def functions(stack: Stack) -> list[str]:
    return [frame.function for frame in stack.frames]


def python(program: str) -> tuple[str, str, str]:
    return sys.executable, "-c", program


# ---- what the container's program must not notice


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("kill -SEGV $$", 139)],
)
def test_exit_code_is_the_programs(start: Any, script: str, code: int) -> None:
    assert start("sh", "-c", script).end() == code


@pytest.mark.parametrize(("command", "code"), [("no-such-program", 127), ("/etc/passwd", 126)])
def test_command_that_cannot_be_executed(start: Any, command: str, code: int) -> None:
    container = start(command)
    assert container.end() == code
    assert container.err.startswith(f"{command}: ")


def test_streams_arguments_and_signals_are_those_of_the_pod(start: Any) -> None:
    # the process that starts the tests may ignore a signal that Python can't reset, such as 32
    inherited = subprocess.run(
        ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"], capture_output=True, text=True, check=True,
        preexec_fn=default_signals,
    ).stdout.splitlines()  # fmt: skip
    container = start(
        "sh",
        "-c",
        'echo "$0|$1"; echo wrong >&2; (sleep 0.2; grep -E "Sig(Blk|Ign)" /proc/$$/status); cat',
        "a b",
        "$(x)",
    )
    container.process.stdin.write("given")
    assert container.end() == 0
    assert container.out.splitlines() == ["a b|$(x)", *inherited, "given"]
    assert (container.err, container.stacks, container.ends) == ("wrong", [], [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT])
def test_other_signals_reach_the_program(start: Any, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    container = start("sh", "-c", f"trap 'echo got {name}; exit 3' {name}; echo ready; while :; do sleep 0.05; done")
    container.wait_for()
    container.stop(number)
    assert container.end() == 3
    assert container.out == f"got {name}\n"


def test_orphans_are_reaped_and_kill_0_does_not_reach_the_starter(start: Any) -> None:
    container = start("sh", "-c", "trap '' TERM; kill -TERM 0; echo done; exit 4")
    assert container.end() == 4
    assert container.out == "done\n"
    assert container.ends == []


def test_directory_is_removed_at_the_end(start: Any) -> None:
    container = start(*python("print(1)"))
    assert container.end() == 0
    assert not Path("/dev/shm", container.stacks_name).exists()


@pytest.mark.thorough
def test_program_is_not_harmed_by_2000_questions(start: Any) -> None:
    """It computes in threads, and asks itself all the time, as the starter would."""
    program = (
        "import os, signal, threading, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), os._exit(0)))\n"
        "def work():\n    while True: sum(range(200))\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "for n in range(2000):\n    os.kill(os.getpid(), signal.SIGRTMIN + 7); sum(range(200))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    container = start(*python(program))
    assert container.stopped() == 0
    assert container.out == "saved\n"


def test_without_stacks_the_program_replaces_the_starter(start: Any) -> None:
    container = start("sh", "-c", "echo $$", stacks=None)
    assert container.end() == 0
    assert int(container.out) == container.process.pid


# ---- stacks


def test_sleeping_process_shows_its_stack(start: Any) -> None:
    container = start(*python(SLEEPS), env={"RANK": "3"})
    assert container.stopped() == 143
    assert functions(container.main_of("3")) == ["next_batch", "<module>"]
    assert container.main_of("3").frames[0].line in (3, 4), "it may not have begun to sleep"
    assert container.seconds < 20, "the grace period is 30 s"
    assert container.ends == [End(0)]


def test_own_handler_runs_after_the_stacks(start: Any) -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(9)))\n" + SLEEPS
    )
    container = start(*python(program))
    assert container.stopped() == 9
    assert container.out == "saved\n"
    assert functions(container.main_of())[0] == "next_batch"


def test_decorator_of_a_collective_operation_is_named_like_the_operation(start: Any, tmp_path: Path) -> None:
    """As in torch/distributed/c10d_logger.py, after the peers of a rank have ended."""
    (tmp_path / "c10d_logger.py").write_text(
        "import time\n"
        f"def _get_msg_dict():\n    {READY}\n    time.sleep(600)\n"
        "def logged(func):\n    def wrapper():\n        _get_msg_dict()\n        return func()\n    return wrapper\n"
    )
    (tmp_path / "train.py").write_text(
        "from c10d_logger import logged\n@logged\ndef all_reduce():\n    pass\nall_reduce()\n"
    )
    container = start(sys.executable, str(tmp_path / "train.py"))
    assert container.stopped() == 143
    assert functions(container.main_of()) == ["_get_msg_dict", "all_reduce", "<module>"]


def test_deadlock_of_two_locks_shows_both_threads(start: Any) -> None:
    program = (
        "import threading\n"
        "a, b, both = threading.Lock(), threading.Lock(), threading.Barrier(2)\n"
        "def writer():\n    with b:\n        both.wait()\n        with a: pass\n"
        "def train_step():\n    with a:\n        both.wait()\n        print('ready', flush=True)\n"
        "        with b: pass\n"
        "threading.Thread(target=writer, daemon=True).start()\n"
        "train_step()\n"
    )
    container = start(*python(program))
    assert container.stopped() == 143
    assert functions(container.main_of())[0] == "train_step"
    (other,) = [stack for stack in container.stacks if not stack.main]
    assert "writer" in functions(other)


def test_loop_in_c_that_holds_the_gil_is_dumped_by_faulthandler(start: Any) -> None:
    """On a loaded machine, where the loop gets little CPU, it may be in the middle of anything, and is not dumped."""
    shares = []
    for _ in range(10):
        container = start(*python(SPINS))
        shares.append(start_spinning(container))
        container.stop()
        assert container.end() == 143
        assert container.seconds < 20, "the grace period is 30 s"
        stack = container.main_of()
        if not stack.why:
            assert functions(stack)[0] == "spin"
            return
        assert (stack.why, stack.frames) == ("no answer, state R", ())
    assert max(shares) < 0.5, "it has got enough CPU to be dumped"
    pytest.skip(f"the machine is too loaded: the loop has got {max(shares):.0%} of a CPU at most")


def start_spinning(container: Container) -> float:
    """Wait until the loop in C has run for 0.2 CPU seconds; returns its share of a CPU."""
    stat, began = Path(f"/proc/{container.wait_for().split()[-1]}/stat"), time.monotonic()

    def cpu() -> float:
        return sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    before = cpu()
    wait_for("it has run", lambda: cpu() > before + 0.2)
    return (cpu() - before) / (time.monotonic() - began)


def test_stopped_process_answers_before_it_goes_on(start: Any) -> None:
    container = start(*python(f"import os\nprint(os.getpid(), flush=True)\n{SLEEPS}"))
    assert container.process.stdout is not None
    pid = int(container.process.stdout.readline())
    container.wait_for()
    os.kill(pid, signal.SIGSTOP)
    wait_for("the process is stopped", lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text())
    container.stop()
    assert container.end() == 143
    assert functions(container.main_of())[0] == "next_batch"


def test_shell_that_does_not_pass_the_signal_on(start: Any) -> None:
    """Its children get SIGTERM and the time to handle it, although the shell ends at once."""
    program = (
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(1); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n" + SLEEPS
    )
    container = start("sh", "-c", f'{sys.executable} -c "$PROGRAM"; true', env={"PROGRAM": program})
    assert container.stopped() == 143
    assert container.out == "saved\n"
    assert functions(container.main_of())[0] == "next_batch"


def test_data_loader_outlives_the_checkpoint_of_a_program_below_a_shell(start: Any) -> None:
    """Each process gets SIGTERM when its parent has ended, and not together with it."""
    program = (
        "import signal, subprocess, sys, time\n"
        "loader = subprocess.Popen(['sleep', '600'])\n"
        "def save(*_):\n    time.sleep(1); print('loader', loader.poll(), flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n" + SLEEPS
    )
    container = start("sh", "-c", f'{sys.executable} -c "$PROGRAM"; true', env={"PROGRAM": program})
    assert container.stopped() == 143
    assert container.out == "loader None\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_workers_are_told_from_the_rank(start: Any, tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, time\n"
        "def read_shard(ready):\n    ready.set()\n    time.sleep(600)\n"
        "def train():\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    ready = context.Event()\n"
        "    worker = context.Process(target=read_shard, args=(ready,), daemon=True)\n"
        "    worker.start()\n    ready.wait()\n    print('ready', flush=True)\n    worker.join()\n"
        "if __name__ == '__main__':\n    train()\n"
    )
    container = start(sys.executable, str(script), env={"RANK": "1", "LOCAL_RANK": "1"})
    container.stopped()
    assert "train" in functions(container.main_of("1"))
    workers = [stack for stack in container.stacks if stack.part == "worker" and stack.main]
    assert any("read_shard" in functions(stack) for stack in workers)


def test_150_threads_keep_the_main_thread(start: Any) -> None:
    program = (
        "import threading, time\n"
        "for _ in range(150): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "lock = threading.Lock()\nlock.acquire()\n"
        "def stuck():\n    print('ready', flush=True)\n    lock.acquire()\nstuck()\n"
    )
    container = start(*python(program))
    assert container.stopped() == 143
    assert functions(container.main_of())[0] == "stuck"


def test_size_of_the_stacks_is_bounded(start: Any) -> None:
    """Of 101 threads, most with deep stacks, 64 KiB are printed, the main thread first. The others are counted."""
    program = (
        "import threading, time\n"
        "def recursive_call_with_a_long_name(depth):\n"
        "    recursive_call_with_a_long_name(depth - 1) if depth else time.sleep(600)\n"
        "for _ in range(100):\n"
        "    threading.Thread(target=recursive_call_with_a_long_name, args=(60,), daemon=True).start()\n" + SLEEPS
    )
    container = start(*python(program))
    assert container.stopped() == 143
    (end,) = container.ends
    assert len(container.stacks) + end.left_out == 101
    assert end.left_out > 50
    assert functions(container.main_of())[0] == "next_batch"


def test_process_that_cannot_write_is_not_dumped_by_faulthandler(start: Any) -> None:
    """A full /dev/shm: it runs Python, which faulthandler could crash while it saves its checkpoint."""
    program = (
        "import os, resource, signal, sys, time\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), os._exit(0)))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n" + SLEEPS
    )
    container = start(*python(program))
    assert container.stopped() == 0
    assert container.out == "saved\n"
    assert container.main_of().why.startswith("no answer, state ")  # R while it still writes, or S


def test_others_can_write_only_below_the_directory_of_the_path(start: Any) -> None:
    """Python imports from it, so another user of the machine must not be able to put modules there."""
    container = start(*python(SLEEPS))
    container.wait_for()
    directory = Path("/dev/shm", container.stacks_name)
    assert directory.stat().st_mode & 0o777 == 0o755
    assert (directory / "files").stat().st_mode & 0o7777 == 0o1777
    container.stop()
    assert container.end() == 143


def test_process_that_has_executed_another_program_is_not_asked(start: Any) -> None:
    container = start(*python("import os; os.execvp('sh', ['sh', '-c', 'echo ready; exec sleep 600'])"))
    assert container.stopped() == 143
    assert (container.stacks, container.err) == ([], "")


def test_program_without_python(start: Any) -> None:
    container = start("sh", "-c", "echo ready; exec sleep 600")
    assert container.stopped() == 143
    assert (container.stacks, container.ends, container.err) == ([], [], "")


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_isolated_python_changes_nothing_but_the_stacks(start: Any, option: str) -> None:
    container = start(sys.executable, option, "-c", SLEEPS)
    assert container.stopped() == 143
    assert (container.stacks, container.ends, container.err) == ([], [], "")


def test_rank_that_has_left_is_reported(start: Any, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] != '1':\n    print('ready', flush=True)\n    time.sleep(600)\n"
    )
    launch = (
        "import os, subprocess, sys, time\n"
        "ranks = [subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, 'RANK': str(n), "
        "'LOCAL_RANK': str(n)}) for n in range(3)]\n"
        "ranks[1].wait()\nprint('left', flush=True)\ntime.sleep(600)\n"
    )
    container = start(sys.executable, "-c", launch, str(script))
    printed = ""  # by three processes at the same time, so that lines may be joined
    while printed.count("ready") < 2 or "left" not in printed:
        printed += container.wait_for("")
    container.stop()
    container.end()
    mains = {stack.rank: stack.why for stack in container.stacks if stack.main and stack.part == "rank"}
    assert mains == {"0": "", "1": "gone", "2": ""}
    assert [stack.part for stack in container.stacks if not stack.rank] == ["launcher"]


def test_grace_period_below_5_s_bounds_the_time(start: Any) -> None:
    """A fifth of a second is too short for faulthandler, which is asked after half a second."""
    container = start(*python(SPINS), grace=1)
    start_spinning(container)
    container.stop()
    assert container.end() == 143
    assert (container.main_of().why, container.main_of().frames) == ("no answer, state R", ())


@pytest.mark.parametrize("grace", [30, 5])
def test_stacks_are_over_in_time_with_many_processes_and_threads_under_load(start: Any, grace: float) -> None:
    """By what the starter itself records. If this machine is too slow, the last record is missing."""
    program = (
        "import os, threading, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n        while True: sum(range(200))\n"
        "for _ in range(150): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n" + SLEEPS
    )
    container = start(*python(program), grace=grace)
    assert container.stopped() == 143
    assert all(seconds <= grace / 5 for seconds in container.recorded)


def test_stacks_that_can_not_be_read_do_not_keep_the_signal_from_the_program(start: Any) -> None:
    """Whatever blocks the starter, it passes the signal on after a fifth of the grace period."""
    program = (
        "import os\n"
        "files = os.path.join(os.environ['PYTHONPATH'].split(os.pathsep)[0], 'files')\n"
        "namespace = ''.join(filter(str.isdigit, os.readlink('/proc/self/ns/pid')))\n"
        "os.mkfifo(os.path.join(files, '%d.%s.fifo' % (os.getpid(), namespace)))\n" + SLEEPS
    )
    container = start(*python(program), grace=5)
    assert container.stopped() == 143
    assert container.stacks == []


def test_output_that_nobody_reads_does_not_keep_the_signal_from_the_program(start: Any, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w').close(), os._exit(0)))\n"
        "os.set_blocking(2, False)\n"
        "try:\n    while True: os.write(2, bytes(4096))\n"
        "except BlockingIOError: os.set_blocking(2, True)\n" + SLEEPS
    )
    container = start("sh", "-c", f'cd {tmp_path}; exec {sys.executable} -c "$PROGRAM"', env={"PROGRAM": program})
    container.wait_for()
    container.stop()
    wait_for("the program has got the signal", (tmp_path / "saved").exists)
    assert container.end() == 0
    assert container.stacks == []


@pytest.mark.parametrize("config_map", ["config-map", None])
@pytest.mark.parametrize(("own", "of_runtime", "expected"), [(None, 4, "4"), (None, None, "30"), (8, 4, "8")])
def test_grace_period_of_a_trainjob_is_that_of_its_runtime(
    own: int | None, of_runtime: int | None, expected: str, config_map: str | None
) -> None:
    manifest = build("TrainJob", JobOptions(image="i", command=["python3", "train.py"], runtime="torch-distributed"))
    if own is not None:
        (template,) = [template for _, template in TRAINJOB.form.option_templates(manifest)]
        template["spec"] = {"terminationGracePeriodSeconds": own}
    pods: list[dict[str, Any]] = [{"containers": []}, {"terminationGracePeriodSeconds": of_runtime, "containers": []}]
    jobs = [{"template": {"spec": {"template": {"spec": pod}}}} for pod in pods[: 1 + (of_runtime is not None)]]
    runtime = {"spec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    made = run_with_code(manifest, config_map, stacks=NAME, runtime=runtime)
    assert made["spec"]["trainer"]["command"][8] == expected


@pytest.mark.parametrize(("runtime_grace", "patched", "expected"), [(4, 6, "6"), (60, 6, "6"), (4, "6", "4")])
def test_grace_period_of_a_trainjob_is_that_of_a_patch_in_its_manifest(
    runtime_grace: int, patched: int | str, expected: str
) -> None:
    """Here the entry of another manager, for one job of the runtime. A text is refused by the API server."""

    def of_node(seconds: int | str) -> dict[str, Any]:
        pod = {"template": {"spec": {"terminationGracePeriodSeconds": seconds}}}
        return {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": pod}}]}}}

    manifest = build("TrainJob", JobOptions(image="i", command=["python3", "train.py"], runtime="torch-distributed"))
    manifest["spec"]["runtimePatches"] = [{"manager": "team", "trainingRuntimeSpec": of_node(patched)}]
    made = run_with_code(manifest, None, stacks=NAME, runtime={"spec": of_node(runtime_grace)})
    assert made["spec"]["trainer"]["command"][8] == expected


def test_launcher_of_mpi_holds_the_signal_back(start: Any) -> None:
    container = start("sh", "-c", "echo ready; exec sleep 600", launcher=True)
    assert container.stopped() == 143
    assert container.seconds > 1.5


def test_next_sitecustomize_runs_as_without_ours(start: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\nVALUE = 5\n")
    program = "import sitecustomize, sys; print(sitecustomize.VALUE, [p for p in sys.path if 'ktrain-test' in p])"
    container = start(*python(program), env={"PYTHONPATH": str(tmp_path)})
    assert container.end() == 0
    assert container.out == "mine\n5 []\n"


def test_error_of_the_next_sitecustomize_is_reported_as_without_ours(start: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    without = subprocess.run(
        [*python("print(1)")], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    container = start(*python("print(1)"), env=environment)
    assert container.end() == 0
    assert (container.out, container.err) == (without.stdout, without.stderr.rstrip("\n"))


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.12", "3.13", "3.14"])
def test_other_pythons_show_their_stacks(start: Any, version: str) -> None:
    found = [f"python{version}", *glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python3"))]
    runs = (path for path in map(shutil.which, found) if path and not subprocess.run([path, "-c", ""]).returncode)
    other = next(runs, None)
    if other is None:
        pytest.skip(f"there is no Python {version}")
    container = start(other, "-c", SLEEPS, python=other)
    assert container.stopped() == 143
    assert functions(container.main_of()) == ["next_batch", "<module>"]


# ---- in the manifest


def test_command_is_recognized() -> None:
    made = run_with_code(build("PyTorchJob", JobOptions(image="i", command=["a", "b"])), None, stacks="name")
    (container,) = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert without_start(container["command"]) == ["a", "b"]
    assert is_starter(container["command"][4])
    assert not runs_function(made)
