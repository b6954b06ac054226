"""Processes that torchrun has replaced in the same container are context: only the last ones explain its end.

The logs are those of torchrun with `--max-restarts 1` (PyTorch 2.13). The corpus has the lines of older releases.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose, diagnose_limit
from airflow_provider_ktrain.core.diagnosis.log_parser import count_replaced
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.state.limits import Limit

from .test_diagnosis import failed, logs, pod, written

FIRST = "ValueError: shard 17 is damaged"
REPLACED = written("torchrun-restart-raise").partition("generation 1")[0]
*BEFORE, SENDING, FAILED = REPLACED.splitlines()  #: torchrun stops the peer of a process, and reports its failure.
DEATH = "W1126 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal, shutting down workers"


def cause_of(*texts: str, code: int = 1) -> Cause:
    """Of a job whose Workers ended with these logs."""
    pods = [pod("Worker", n, code=code, at=60) for n, _ in enumerate(texts)]
    return diagnose(make_evidence(failed(), pods, logs=logs(**{f"worker_{n}": t for n, t in enumerate(texts)})))


@pytest.mark.parametrize("lines", [50, 500], ids=["last lines", "all lines"])
def test_error_of_the_last_processes_is_the_cause(lines: int) -> None:
    cause = cause_of("\n".join(written("torchrun-restart-raise").splitlines()[-lines:]))
    assert cause.summary == "Worker 0 ran out of disk space: OSError: [Errno 28] No space left on device (exit code 1)"
    assert FIRST not in str(cause.last_lines)


def test_killed_process_is_the_cause_although_an_earlier_one_raised() -> None:
    cause = cause_of(written("torchrun-restart-kill"))
    assert cause.category is Category.OUT_OF_MEMORY
    assert cause.summary.startswith("Worker 0 failed: SIGKILL ended one of its processes")


def test_replica_that_raised_last_is_the_cause_on_two_nodes() -> None:
    cause = cause_of(written("torchrun-restart-nodes-0"), written("torchrun-restart-nodes-1"))
    assert (cause.replica, "No space left on device" in cause.summary) == ("Worker 1", True)


def test_container_that_is_killed_after_a_restart_is_not_explained_by_the_first_error() -> None:
    cause = cause_of(f"{REPLACED}step 0 loss 0.5\nstep 1 loss 0.5\n", code=137)
    assert cause.summary == "Worker 0 was killed from outside by SIGKILL (exit code 137)"


def test_error_is_the_cause_if_torchrun_could_not_start_others() -> None:
    report = written("torchrun-restart-raise").rpartition("of binary: /opt/venv/bin/python\n")[2]
    traceback = report.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")[0]
    cause = cause_of(f"{REPLACED}{traceback}torch.distributed.elastic.rendezvous.api.RendezvousClosedError\n")
    assert cause.summary == f"Worker 0 failed: {FIRST} (exit code 1)"


def test_late_line_of_stdout_does_not_hide_the_error_that_torchrun_reports() -> None:
    """The node reads stdout and stderr in any order, and torchrun's `--tee` copies lines after it has reported."""
    head, of_binary, report = written("torchrun-restart-raise").rpartition("of binary: /opt/venv/bin/python\n")
    cause = cause_of(f"{head}{of_binary}step 1 loss 0.5\n{report}")
    assert cause.summary == "Worker 0 ran out of disk space: OSError: [Errno 28] No space left on device (exit code 1)"


def test_hang_after_a_restart_is_not_explained_by_the_first_error() -> None:
    running = make_evidence({"kind": "PyTorchJob", "metadata": {"name": "t"}}, [pod("Worker", 0)], (), logs(
        worker_0=f"{REPLACED}step 0 loss 0.5\n"
    ))  # fmt: skip
    cause = diagnose_limit(Limit.PROGRESS, 60, running, step=0)
    assert cause.summary == "PyTorchJob t reported no step higher than 0 for 60 s (progress_timeout)"
    assert FIRST not in cause.detail


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ((), 0),
        (("step 1", "step 2"), 0),
        (REPLACED.splitlines(), 0),
        ((*REPLACED.splitlines(), ""), 0),
        ((*REPLACED.splitlines(), "step 1"), len(REPLACED.splitlines())),
        # stopped without a failure of its own: others have failed or joined
        ((*BEFORE, SENDING), 0),
        ((*BEFORE, SENDING, "step 1"), len(BEFORE) + 1),
        # the peer of the failed process writes when it is stopped
        ((*BEFORE, SENDING, "saving a checkpoint", FAILED), 0),
        ((*BEFORE, SENDING, "saving a checkpoint", FAILED, "step 1"), len(BEFORE) + 3),
        # torchrun itself is stopped
        ((*BEFORE, DEATH, SENDING, "saving a checkpoint"), 0),
        ((*BEFORE, SENDING, FAILED, "step 1", DEATH, SENDING, "saving a checkpoint"), len(BEFORE) + 2),
    ],
)
def test_lines_are_replaced_if_others_follow(log: Sequence[str], expected: int) -> None:
    assert count_replaced(log) == expected
