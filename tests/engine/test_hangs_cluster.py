"""Programs that hang on a cluster and print their stacks: python3, torchrun and mpirun."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB
from airflow_provider_ktrain.core.logs.stacks import MARK
from airflow_provider_ktrain.core.manifest.code import CodeFile, pack
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.manifest.program import MPI, Definition, mpirun_command, program_variable
from airflow_provider_ktrain.core.manifest.program import program as sent
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from tests import clusters
from tests.engine.tasks import Task, api_of, submit, until

pytestmark = [pytest.mark.thorough, pytest.mark.embedded("needs an image with torchrun and mpirun")]
MPIRUN = shutil.which("mpirun", path=Path(sys.executable).parent)
LOADER = """\
import os, time
RANK = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
def next_batch():
    print("started", flush=True)
    time.sleep(600)
def wait_for_peers():
    print("started", flush=True)
    time.sleep(600)
def train():
    next_batch() if RANK == 1 else wait_for_peers()
train()
"""
COLLECTIVE = """\
import time
import torch
import torch.distributed as dist
def next_batch():
    if dist.get_rank() == 1:
        time.sleep(600)
def train():
    next_batch()
    print("started", flush=True)
    dist.all_reduce(torch.ones(1))
dist.init_process_group("gloo")
open("ready", "w").close()
train()
"""
LEAVES = """\
import os, time
def wait_for_peers():
    while not os.path.exists("left"):
        time.sleep(0.1)
    open("ready", "w").close()
    time.sleep(600)
if os.environ["RANK"] != "2":
    wait_for_peers()
open("left", "w").close()
"""


def torchrun(ranks: int) -> list[str]:
    """The command. Its log isn't silent until the ranks are ready."""
    beat = "(until [ -e ready ]; do echo starting; sleep 0.5; done) &"
    return ["sh", "-c", f"{beat} exec torchrun --nproc-per-node {ranks} --standalone train.py"]


class MPITask(Task):
    kind = MPIJOB
    version = "v2beta1"


async def start(task: Task, program: str, command: list[str], grace: int = 10, **options: Any) -> Submitted:
    """Submit a job whose program is a file of its code. Without a program, it is a function in its environment."""
    built = build(task.kind.name, JobOptions(image=clusters.IMAGE, command=command, **options))
    for _, template in task.kind.form.templates(built):
        template["spec"]["terminationGracePeriodSeconds"] = grace
    code = pack([CodeFile("train.py", program.encode())]) if program else None
    asked = JobRequest(task.kind, task.owner(1), 1, built, code=code)
    fitted = asked.fitted(f"{task.kind.group}/{task.version}")
    submitted = await submit(
        task.api, task.kind, task.version,
        lambda submission: asked.stamped(fitted, task.namespace, submission, attempt=1, now=1.0),
        asked.owner, 1, code=code, log=task.log, patience=30,
    )  # fmt: skip
    assert submitted.ref.name == task.name
    return submitted


async def ended(task: Task, submitted: Submitted, limits: Limits, **how: Any) -> Outcome:
    outcome = await task.follow(submitted.ref, created=True, limits=limits, drain_timeout=5, **how)
    assert isinstance(outcome, Outcome)
    assert not outcome.release_error
    assert MARK not in str(task.log)
    return outcome


def cause(outcome: Outcome) -> dict[str, Any]:
    assert outcome.cause is not None
    return dict(outcome.cause)


async def test_replica_in_a_data_loader_is_named(task: Task) -> None:
    submitted = await start(task, LOADER, ["python3", "train.py"], workers=2)
    found = cause(await ended(task, submitted, Limits(log_stall=3)))
    named = (
        "No log line for 3 s: Worker 0 is in next_batch (train.py:5), "
        "2 other replicas are in wait_for_peers (train.py:8)"
    )
    assert (found["summary"], found["category"], found["replica"]) == (named, "hang", "Worker 0")
    assert await task.job() is None


async def test_torchrun_names_the_rank_that_keeps_the_collective_waiting(task: Task) -> None:
    submitted = await start(task, COLLECTIVE, torchrun(4), workers=0)
    found = cause(await ended(task, submitted, Limits(log_stall=10)))
    assert found["summary"] == (
        "No log line for 10 s: rank 1 of Master 0 is in next_batch (train.py:6), "
        "3 other ranks wait in all_reduce (train.py:10)"
    )


async def test_torchrun_names_the_rank_that_has_left(task: Task) -> None:
    submitted = await start(task, LEAVES, torchrun(3), workers=0)
    found = cause(await ended(task, submitted, Limits(log_stall=20)))
    assert found["summary"] == (
        "No log line for 20 s: rank 2 of Master 0 has left, 2 other ranks are in wait_for_peers (train.py:6)"
    )


@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun")
@pytest.mark.parametrize("is_function", [False, True])
async def test_mpirun_names_the_rank_of_a_worker(is_function: bool) -> None:
    """Each Worker prints its own ranks, and the Launcher keeps mpirun from ending them meanwhile."""
    program, options = LOADER, dict[str, Any]()
    command = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-x", "PYTHONPATH", "python3", "train.py"]
    if is_function:
        text = "def train():\n    import os, time\n    rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
        text += "    def next_batch():\n        print('started', flush=True)\n        time.sleep(600)\n"
        text += "    def wait_for_peers():\n        time.sleep(600)\n"
        text += "    next_batch() if rank == '1' else wait_for_peers()\n"
        program, command = "", mpirun_command([])
        options = {"env": program_variable(sent(Definition(text), "train", [], {}, MPI))}
    with clusters.cluster(mpi_api="v2beta1") as cluster:
        async with api_of(cluster) as api:
            task = MPITask(api, cluster.namespace)
            submitted = await start(task, program, command, workers=2, **options)
            found = cause(await ended(task, submitted, Limits(log_stall=15)))
    line = r"line \d+ of the function" if is_function else r"\S+\.py:\d+"
    assert re.search(rf"Worker 1 is in next_batch \({line}\)", found["summary"])


async def test_healthy_training_that_is_stopped_saves_and_shows_no_stacks(task: Task) -> None:
    """Somebody else deletes its pod: no limit of ours has passed, so the stacks are no lines of its log."""
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(3)))\n"
        "print('started', flush=True)\nfor step in range(10000): time.sleep(0.1)\n"
    )
    submitted = await start(task, program, ["python3", "train.py"], workers=0)
    following = asyncio.ensure_future(ended(task, submitted, Limits()))

    async def has_started() -> bool:
        return "started" in str(task.log)

    await until(has_started)
    (name,) = await task.pods(submitted.ref)
    await task.api.request("DELETE", api_paths.core(task.namespace, "pods", name))
    found = cause(await following)
    assert "saved" in str(task.log)
    assert "where the processes were" not in str(task.log).lower()
    assert "train.py:" not in found["detail"]
