"""Where the processes of a hung job were: which replica and line the first line names."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from airflow_provider_ktrain.core.diagnosis.hangs import LOOK_FOR_STACKS, explain_hang, find_hang
from airflow_provider_ktrain.core.diagnosis.log_parser import read_tail
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.node_conditions import node_problems
from airflow_provider_ktrain.core.logs.stacks import FUNCTION_FILE, MARK, End, Frame, Stack, own_text, read_record
from airflow_provider_ktrain.core.state.limits import Limit

from .test_diagnosis import pod
from .test_node_conditions import XID, node, on

TORCH = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"
WAITS = (
    Frame(TORCH, 100, "all_reduce"),
    Frame("/usr/lib/python3/dist-packages/torch/distributed/c10d_logger.py", 81, "wrapper"),
    Frame("/ktrain/code/train.py", 88, "train"),
    Frame("/ktrain/code/train.py", 120, "<module>"),
)
LOADS = (
    Frame("/usr/lib/python3.11/threading.py", 320, "wait"),
    Frame("/ktrain/code/data.py", 41, "load_batch"),
    Frame("/ktrain/code/train.py", 80, "train"),
)
HANG = Cause(
    Category.HANG,
    "PyTorchJob train reported no step for 1800 s (progress_timeout)",
    resolution=f"{LOOK_FOR_STACKS} Raise it.",
)


def main(frames: tuple[Frame, ...], rank: str = "", pid: int = 7, why: str = "") -> Stack:
    return Stack(pid, rank, "rank", True, frames, why)


def job(workers: int, odd: int, frames: tuple[Frame, ...] = LOADS) -> dict[str, list[Stack]]:
    names = ["Master 0", *(f"Worker {n}" for n in range(workers))]
    return {name: [main(frames if name == f"Worker {odd}" else WAITS)] for name in names}


def sentence(stacks: dict[str, list[Stack]], replicas: int = 0) -> str:
    hang = find_hang(stacks, replicas)
    assert hang is not None
    return hang.sentence


def test_replica_in_a_data_loader_is_named() -> None:
    hang = find_hang(job(16, 3), 17)
    assert hang is not None
    cause = explain_hang(HANG, Limit.PROGRESS, 1800, hang)
    assert cause.summary == (
        "No step for 30 min: Worker 3 is in load_batch (data.py:41), 16 other replicas wait in all_reduce (train.py:88)"
    )
    assert (cause.category, cause.replica) == (Category.HANG, "Worker 3")
    assert cause.detail.splitlines()[:3] == [
        HANG.summary,
        "Where the processes were (17 of 17 replicas read):",
        "  1: data.py:41 in load_batch [Worker 3]",
    ]


OTHER = (Frame(TORCH, 200, "barrier"), Frame("/ktrain/code/train.py", 95, "train"))


@pytest.mark.parametrize(
    ("odd", "others", "advice"),
    [
        (main(LOADS), WAITS, "Look at the named line: "),
        (main(LOADS), LOADS, "Look at the named line: "),
        (main((), rank="7", why="gone"), WAITS, "Find out why it has left: "),
        (main((), why="no answer, state D"), WAITS, "Check the storage and the drivers of its node."),
        (main((), why="no answer, state R"), WAITS, "It runs no Python code, or blocks signals: py-spy dump --native "),
        (main(OTHER), WAITS, "Let all ranks call the same collective operations in the same order."),
        (main(WAITS), WAITS, "No rank is behind: "),
    ],
)
def test_advice_fits_what_the_stacks_show(odd: Stack, others: tuple[Frame, ...], advice: str) -> None:
    """Without stacks, it says how to get them."""
    hang = find_hang({"Master 0": [main(others)], "Worker 0": [odd], "Worker 1": [main(others)]}, 3)
    assert hang is not None
    resolution = explain_hang(HANG, Limit.PROGRESS, 1800, hang).resolution
    assert resolution.startswith(advice)
    assert resolution.endswith(" Raise it.")
    assert LOOK_FOR_STACKS not in resolution
    assert "py-spy" in HANG.resolution


def test_broken_node_of_the_replica_that_hangs_is_named_and_the_category_stays() -> None:
    hang = find_hang(job(3, 2), 4)
    assert hang is not None
    (problem,) = node_problems(node("gpu-7", XID), [on("gpu-7", pod("Worker", 2))])
    cause = explain_hang(HANG, Limit.PROGRESS, 1800, hang, problem)
    assert cause.summary == (
        "No step for 30 min: Node gpu-7: AcceleratedHardwareReady is False since 10:00 UTC (NvidiaXID79Error). "
        "Worker 2 is in load_batch (data.py:41), 3 other replicas wait in all_reduce (train.py:88)"
    )
    assert (cause.category, cause.replica) == (Category.HANG, "Worker 2")


def test_replicas_that_were_not_read_are_counted() -> None:
    assert sentence(job(63, 3), 200).endswith(
        ", 63 of the 63 other replicas that were read wait in all_reduce (train.py:88)"
    )


def test_all_at_one_line_are_not_named() -> None:
    hang = find_hang(job(3, 99), 4)
    assert hang is not None
    assert (hang.sentence, hang.replica) == ("all 4 replicas wait in all_reduce (train.py:88)", "")


def test_two_groups_of_one_are_both_named() -> None:
    stacks = {
        "Master 0": [main((Frame("/a/train.py", 5, "save"),))],
        "Worker 0": [main((Frame("/a/train.py", 9, "step"),))],
    }
    hang = find_hang(stacks, 2)
    assert hang is not None
    assert (hang.sentence, hang.replica) == ("Master 0 is in save (train.py:5); Worker 0 is in step (train.py:9)", "")


def test_the_one_that_does_not_wait_is_named_of_two() -> None:
    hang = find_hang(job(1, 0), 2)
    assert hang is not None
    assert hang.sentence == "Worker 0 is in load_batch (data.py:41), Master 0 waits in all_reduce (train.py:88)"
    assert hang.replica == "Worker 0"


def test_rank_that_has_left_is_named() -> None:
    ranks = [main(WAITS, rank=str(n), pid=n + 9) for n in (0, 1, 2)]
    stacks = {"Master 0": [main((), "3", 12, "gone"), *ranks, Stack(8, "0", "launcher", True, LOADS)]}
    assert sentence(stacks) == "rank 3 of Master 0 has left, 3 other ranks wait in all_reduce (train.py:88)"


def test_replica_whose_pod_has_ended_has_left() -> None:
    hang = find_hang({"Master 0": [main(WAITS)]}, 2, ["Worker 0"])
    assert hang is not None
    assert hang.sentence == "Worker 0 has left, Master 0 waits in all_reduce (train.py:88)"
    assert (hang.replica, hang.read) == ("Worker 0", 2)


def test_only_replica_that_was_read_is_named() -> None:
    stacks = {"Master 0": [main(WAITS)]}
    assert sentence(stacks, 2) == "Master 0, the only one that was read, waits in all_reduce (train.py:88)"
    assert sentence(stacks, 1) == "Master 0 waits in all_reduce (train.py:88)"


def test_rank_that_lives_elsewhere_has_not_left() -> None:
    """A script of Worker 0 may have run with the pod's own RANK before torchrun."""
    stacks = {"Master 0": [main(WAITS, "1")], "Worker 0": [main((), "1", 3, "gone"), main(WAITS, "2")]}
    assert sentence(stacks) == "both replicas wait in all_reduce (train.py:88)"


def test_process_that_does_not_answer_is_named() -> None:
    stacks = job(3, 9) | {"Worker 1": [main((), why="no answer, state D")]}
    assert sentence(stacks, 4).startswith(
        "Worker 1 does not answer (state D: it waits in the kernel, for a disk, a network file system or a driver), "
    )


def test_single_process_names_its_other_thread() -> None:
    threads = [
        main((Frame("/a/locks.py", 12, "train_step"),)),
        Stack(7, "", "rank", False, (Frame("/a/locks.py", 6, "writer"),)),
    ]
    assert (
        sentence({"Master 0": threads}, 1)
        == "Master 0 is in train_step (locks.py:12) with a thread in writer (locks.py:6)"
    )


def test_data_loader_workers_name_their_line() -> None:
    worker = Stack(30, "3", "worker", True, (Frame("/a/loader.py", 12, "read_shard"),))
    stacks = job(3, 2) | {"Worker 2": [main(LOADS, "3"), worker, worker]}
    assert sentence(stacks, 4).startswith(
        "Worker 2 is in load_batch (data.py:41) with worker processes in read_shard (loader.py:12), "
    )


def test_data_loader_workers_that_wait_for_work_are_not_named() -> None:
    """Of four, one reads. After a fork, all have the frames of the process that has started them."""
    parent = (
        Frame("/usr/lib/python3.11/multiprocessing/process.py", 314, "_bootstrap"),
        Frame("/usr/lib/python3.11/multiprocessing/popen_fork.py", 71, "_launch"),
        Frame("/ktrain/code/data.py", 41, "load_batch"),
    )
    loop = Frame("/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", 240, "_worker_loop")
    frames = [(loop, *parent), (Frame("/ktrain/code/data.py", 12, "read_shard"), loop, *parent)]
    workers = [Stack(30 + n, "3", "worker", True, frames[n == 2]) for n in range(4)]
    stacks = job(3, 2) | {"Worker 2": [main(LOADS, "3"), *workers]}
    assert sentence(stacks, 4).startswith(
        "Worker 2 is in load_batch (data.py:41) with worker processes in read_shard (data.py:12), "
    )


C10D = "/v/lib/python3.11/site-packages/torch/distributed"
LOGGER = f"{C10D}/c10d_logger.py"
FSDP = f"{C10D}/fsdp/fully_sharded_data_parallel.py"
USER = Frame("/ktrain/code/train.py", 88, "train")


@pytest.mark.parametrize(
    ("called", "operation"),
    [
        # the peers have ended first: the operation has failed, and its decorator describes the error
        ([Frame(LOGGER, 55, "_get_msg_dict"), Frame(LOGGER, 84, "all_reduce")], "all_reduce"),
        ([Frame(f"{C10D}/distributed_c10d.py", 9, "get_rank"), Frame(LOGGER, 55, "_get_msg_dict"),
          Frame(LOGGER, 84, "all_reduce")], "all_reduce"),
        ([Frame(f"{C10D}/distributed_c10d.py", 7, "wait"), Frame(f"{C10D}/distributed_c10d.py", 5, "barrier"),
          Frame(LOGGER, 81, "wrapper")], "barrier"),
        ([Frame(f"{C10D}/rendezvous.py", 7, "_create_c10d_store"),
          Frame(f"{C10D}/distributed_c10d.py", 5, "init_process_group"), Frame(LOGGER, 95, "wrapper")],
         "init_process_group"),
        ([Frame(f"{C10D}/distributed_c10d.py", 7, "all_gather_into_tensor"), Frame(LOGGER, 81, "wrapper"),
          Frame(FSDP, 850, "forward"), Frame("/v/lib/python3.11/site-packages/torch/nn/modules/module.py", 1, "_call")],
         "all_gather_into_tensor"),
        ([Frame(FSDP, 850, "forward")], "forward"),
        ([Frame("/v/lib/python3.11/site-packages/horovod/torch/mpi_ops.py", 9, "synchronize"),
          Frame("/v/lib/python3.11/site-packages/horovod/torch/mpi_ops.py", 5, "allreduce")], "allreduce"),
    ],
)  # fmt: skip
def test_operation_that_the_program_called_is_named_and_not_its_helpers(called: list[Frame], operation: str) -> None:
    stacks = {"Master 0": [main((*called, USER))], "Worker 0": [main(LOADS)]}
    assert sentence(stacks) == (f"Worker 0 is in load_batch (data.py:41), Master 0 waits in {operation} (train.py:88)")


def test_program_that_a_library_for_collective_operations_calls_does_not_wait_in_one() -> None:
    frames = (Frame("/ktrain/code/model.py", 7, "forward"), Frame(FSDP, 850, "forward"), USER)
    assert sentence({"Master 0": [main(frames)]}, 1) == "Master 0 is in forward (model.py:7)"


def test_program_that_is_installed_as_a_package() -> None:
    frames = (
        Frame("/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 5, "__next__"),
        Frame("/v/lib/python3.11/site-packages/corpkg/train.py", 10, "next_batch"),
        Frame("/v/bin/torchrun", 8, "<module>"),
    )
    assert sentence({"Master 0": [main(frames)]}, 1) == "Master 0 is in next_batch (train.py:10)"


def test_failure_that_is_known_keeps_the_first_line() -> None:
    known = Cause(Category.HANG, "no step: Worker 1 ran out of memory", replica="Worker 1")
    hang = find_hang(job(3, 2), 4)
    assert hang is not None
    cause = explain_hang(known, Limit.PROGRESS, 60, hang)
    assert (cause.summary, cause.replica) == (known.summary, "Worker 1")
    assert "data.py:41" in cause.detail


def test_no_stacks_explain_nothing() -> None:
    assert find_hang({}, 4) is None
    assert find_hang({"Master 0": [main((), "0", 3, "gone")]}, 1) is None


def test_record_is_read_after_a_line_that_had_not_ended() -> None:
    record = {"pid": 7, "rank": "3", "part": "rank", "main": True, "frames": [["/a/b.py", 4, "f"]], "how": "handler"}
    line = f"loss: 0.{MARK}{json.dumps(record)}"
    assert read_record(line) == Stack(7, "3", "rank", True, (Frame("/a/b.py", 4, "f"),))
    assert own_text(line) == "loss: 0."
    assert own_text(f"{MARK}{json.dumps(record)}") is None
    assert read_record(f'{MARK}{{"end": true, "left_out": 2}}') == End(2)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"pid": "x"}', '{"pid": 1, "frames": [[1]]}', "[" * 9999])
def test_damaged_record_is_no_record(text: str) -> None:
    assert read_record(f"{MARK}{text}") is None
    assert own_text(f"{MARK}{text}") == f"{MARK}{text}"


def test_program_that_prints_the_mark_keeps_its_line() -> None:
    """A list of processes (`ps axww`) shows the text of the starter."""
    line = f"  7 ?  Ss  0:00 python3 -c MARK = '{MARK}' SECONDS = 2.0 python train.py"
    assert own_text(line) == line
    record = json.dumps({"pid": 7, "main": True, "frames": []})
    assert own_text(f"{line}{MARK}{record}") == line
    assert read_tail([f"{MARK}was found: RuntimeError: x"]).last_line == f"{MARK}was found: RuntimeError: x"


def test_records_are_no_lines_of_a_log() -> None:
    tail = read_tail(["ValueError: x", f'{MARK}{{"end": true}}'])
    assert tail.last_line == "ValueError: x"
    assert tail.quoted_lines == ("ValueError: x",)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        pytest.param(
            (*WAITS[:2], Frame("/tmp/ktrain-{}/ktrain_function.py", 14, "train")),
            "both replicas wait in all_reduce (line 12 of the function)",
            id="function, whose file each container has in a directory of its own",
        ),
        pytest.param(
            (
                Frame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"),
                Frame("/opt/venv/lib/python3.11/site-packages/torch/__init__.py", 1900, "<module>"),
                Frame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"),
                Frame("/opt/venv/lib/python3.11/site-packages/corpkg/model.py", 3, "<module>"),
                Frame("<frozen importlib._bootstrap>", 1204, "_gcd_import"),
                Frame("/ktrain/code/train.py", 5, "<module>"),
            ),
            "both replicas import corpkg (train.py:5)",
            id="import of a package",
        ),
        pytest.param(
            (
                Frame("<frozen importlib._bootstrap_external>", 1073, "get_data"),
                Frame("/usr/lib/python3.11/json/__init__.py", 106, "<module>"),
                Frame("<frozen importlib._bootstrap>", 1204, "_gcd_import"),
                Frame("/ktrain/code/train.py", 2, "<module>"),
            ),
            "both replicas import json (train.py:2)",
            id="import of the standard library",
        ),
        pytest.param(
            (
                Frame("<frozen importlib._bootstrap_external>", 1073, "get_data"),
                Frame("/tmp/ktrain-{}/ktrain_function.py", 4, "train"),
            ),
            "both replicas import a module (line 2 of the function)",
            id="module that is being read",
        ),
        pytest.param(
            (
                Frame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"),
                Frame("/usr/lib/python3/dist-packages/torch/__init__.py", 9, "<module>"),
                Frame("<frozen importlib._bootstrap>", 1204, "_gcd_import"),
                Frame("<frozen runpy>", 112, "_get_module_details"),
            ),
            "both replicas import torch",
            id="before the program has a frame",
        ),
    ],
)
def test_processes_at_one_line_are_one_group(frames: tuple[Frame, ...], text: str) -> None:
    named = (tuple(replace(frame, path=frame.path.format(name)) for frame in frames) for name in ("x7", "q2"))
    stacks = {f"Worker {number}": [main(found)] for number, found in enumerate(named)}
    assert sentence(stacks, 2) == text


def test_rank_whose_function_hangs_is_named() -> None:
    stacks = {}
    for number in range(4):
        file = f"/tmp/ktrain-{number}/{FUNCTION_FILE}"
        own = Frame(file, 9, "load") if number == 2 else Frame(file, 14, "train")
        stacks[f"Worker {number}"] = [main((own,) if number == 2 else (*WAITS[:2], own))]
    assert sentence(stacks, 4) == (
        "Worker 2 is in load (line 7 of the function), 3 other replicas wait in all_reduce (line 12 of the function)"
    )
