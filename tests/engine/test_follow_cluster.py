"""Following a job on a cluster: real programs, kubelets and operators. test_follow.py has all scenarios."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine import job_control
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests import clusters
from tests.clusters import REAL, TestCluster
from tests.engine.tasks import (
    STUBBORN,
    TRAINS,
    Task,
    of_each_kind,
    soon,
)
from tests.engine.test_nodes import condition
from tests.until import until

pytestmark = pytest.mark.thorough

COUNTS = "trap 'exit 143' TERM; for i in 0 1 2 3 4 5 6 7 8 9; do echo line $i; sleep 0.4; done"


def lines(task: Task) -> list[str]:
    return [found[1] for line in task.log.messages if (found := re.match(r"\[(?:Master|node) 0\] line (.*)", line))]


WRITES_UNTIL_STOPPED = """
trap 'echo "line $i, the last one"; exit 0' TERM
i=0; while :; do echo "line $i"; i=$((i+1)); sleep 0.05; done
"""


@pytest.mark.parametrize(("code", "shared"), [(0, False), (3, True)], ids=["worker", "triggerer"])
async def test_worker_that_outlives_the_master_is_read_to_its_end(task: Task, code: int, shared: bool) -> None:
    program = f'if [ "$RANK" = 0 ]; then sleep 3; exit {code}; fi; {WRITES_UNTIL_STOPPED}'
    ref = (await task.submit(1, program, workers=1, grace=20)).ref
    outcome = await task.ended(ref, shared=shared)
    assert outcome.succeeded == (code == 0)
    written = [line.removeprefix("[Worker 0] ") for line in task.log.messages if line.startswith("[Worker 0] line")]
    *numbered, last = written
    assert numbered == [f"line {n}" for n in range(len(numbered))]
    assert re.fullmatch(r"line \d+, the last one", last)
    assert not [line for line in task.log.messages if "may be incomplete" in line or "are incomplete" in line]


@of_each_kind
@pytest.mark.parametrize("program", ["true", "exit 3"])
async def test_next_follower_gets_the_same_outcome(task: Task, program: str) -> None:
    """The outcome of the first follower may be lost, because its triggerer was killed with it."""
    beside = program.replace("exit 3", "sleep 600")  # a worker that continues after its master's end
    ref = (await task.submit(1, f"test $RANK = 1 && {beside}; {program}", workers=1)).ref
    first = await task.ended(ref, deleted=False)
    assert not await task.holding(ref)
    second = await task.ended(ref, deleted=False)
    for outcome in (first, second):
        assert outcome.succeeded is (program == "true")
        assert (outcome.cause or {}).get("category") == (None if outcome.succeeded else "user code")
        assert outcome.kept == ref.to_dict()
        assert not outcome.release_error


@pytest.mark.parametrize(("policy", "each"), [("Running", 600), ("All", 600), ("All", 2)])
async def test_complete_logs_give_no_warning(task: Task, policy: str, each: float) -> None:
    """The operator deletes the running Worker when the Master has succeeded.

    With `All`, the Master's pod and log are deleted as soon as it has ended: some seconds after its line, because a new
    host begins to read the log later.
    """
    rest = 20 if policy == "All" else 1
    worker = "echo started; trap 'exit 143' TERM; sleep 600 & wait"
    program = f"case $RANK in 0) sleep 5; echo line 0; sleep {rest};; *) {worker};; esac"
    ref = (await task.submit(1, program, workers=1, run_policy={"cleanPodPolicy": policy})).ref
    outcome: Outcome | Handover = Handover()
    while isinstance(outcome, Handover):
        outcome = await task.follow(ref, handover=outcome, until=soon(each))
    assert outcome.succeeded
    assert lines(task) == ["0"]
    assert [line for line in task.log.messages if line.startswith(("Log of", "The logs of"))] == []


# limits


@pytest.mark.parametrize(
    ("submitted", "limits", "category", "parameter"),
    [
        ({"run_policy": {"suspend": True}}, {"queue": 1}, "queue", "queue_timeout"),
        ({"gpus": 1000}, {"schedule": 1}, "scheduling", "schedule_timeout"),
        # a real kubelet needs seconds to detect that the registry doesn't exist
        ({"image": "registry.example/none:1"}, {"startup": 30 if REAL else 1}, "image", "startup_timeout"),
        ({"program": TRAINS}, {"log_stall": 1}, "hang", "log_stall_timeout"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@of_each_kind
async def test_each_limit_ends_the_job(
    task: Task, submitted: dict[str, Any], limits: dict[str, Any], category: str, parameter: str
) -> None:
    ref = (await task.submit(**submitted)).ref
    outcome = await task.ended(ref, limits=Limits(**limits))
    assert outcome.cause is not None
    assert outcome.cause["category"] == category
    assert parameter in " ".join(str(value) for value in outcome.cause.values())
    assert outcome.released
    assert await task.job() is None


@of_each_kind
async def test_partially_scheduled_job_is_released_after_a_warning(task: Task, cluster: TestCluster) -> None:
    most = clusters.most_gpus(cluster, pods=1)
    ref = (await task.submit(1, TRAINS, gpus=most, workers=1)).ref
    outcome = await task.ended(ref, limits=Limits(partial_start=20))
    assert outcome.cause is not None
    assert outcome.cause["category"] == "scheduling"
    assert "partial_start_timeout" in outcome.cause["summary"]
    (warned,) = [line for line in task.log.messages if f"holds {most} GPUs in 1 pod, but" in line]
    assert "has no node" in warned
    (released,) = [line for line in task.log.messages if outcome.released in line]
    assert task.log.messages.index(warned) < task.log.messages.index(released)
    assert await task.job() is None


CRASHES = "echo starting; echo \"KeyError: 'label_map'\" >&2; exit 1"


@of_each_kind
async def test_a_crash_loop_ends_the_job(task: Task) -> None:
    """The job remains Running. Each restart is reported with its reason."""
    replica = task.kind.replica_name(task.kind.primary({}), 0)
    ref = (await task.submit(1, CRASHES, restart_policy="OnFailure")).ref
    outcome = await task.ended(ref, limits=Limits(crash_loop=3))
    assert outcome.cause is not None
    assert (outcome.phase, outcome.cause["category"]) == ("Running", "user code")
    assert outcome.cause["summary"] == (
        f"{replica} failed 3 times in a row, each within 10 minutes of its start (crash_loop_limit): "
        "KeyError: 'label_map' (exit code 1)"
    )
    # without its reason, or with the exit code alone, if the line could not be read in time
    restart = re.compile(rf"{replica} restarted \((\d)\w\w time\)(?:\.| after (?:KeyError: 'label_map'|exit code 1)\.)")
    restarts = [line for line in task.log.messages if "restarted" in line]
    numbers = [found[1] for line in restarts if (found := restart.match(line))]
    assert len(numbers) == len(restarts)
    assert numbers in (["1", "2"], ["1", "2", "3"]), "the kubelet may start it once more before the job is released"
    warnings = [line for line in task.log.messages if "restarted" in line or line.startswith(f"{replica} failed")]
    assert warnings[-1].startswith(f"{replica} failed"), "the restarts come before the end"
    assert await task.job() is None


async def test_a_master_that_fails_while_its_worker_waits_is_a_crash_loop(task: Task) -> None:
    ref = (await task.submit(1, CRASHES, workers=1, restart_policy="OnFailure")).ref
    outcome = await task.ended(ref, limits=Limits(crash_loop=2))
    assert outcome.cause is not None
    assert outcome.cause["summary"].startswith("Master 0 failed 2 times in a row")


async def test_pods_that_the_operator_recreates_are_a_crash_loop(task: Task) -> None:
    ref = (await task.submit(1, "exit 130", restart_policy="ExitCode")).ref
    outcome = await task.ended(ref, limits=Limits(crash_loop=3), logs="none")
    assert outcome.cause is not None
    assert re.match(
        r"Master 0 failed \d times in a row, each within 10 minutes of its start \(\w+\): "
        r"(exit code 130, SIGINT|its last failure is no longer visible)",  # the operator may delete the pod before
        outcome.cause["summary"],
    )
    restarts = [line for line in task.log.messages if "restarted" in line]
    assert restarts
    for line in restarts:  # one line for two restarts that were seen together
        # the reason isn't known of a pod whose end was not seen, nor the number after following has begun again
        assert re.fullmatch(r"Master 0 restarted( \(.*\))? after (exit code 130, SIGINT|its pod was deleted)\.", line)


# changes by others


@pytest.mark.parametrize(
    ("program", "phase"), [("echo line 0", "Succeeded"), ("echo line 0; exit 3", "Failed")], ids=["success", "failure"]
)
async def test_outcome_is_known_with_a_ttl_of_zero(task: Task, program: str, phase: str) -> None:
    """The operator deletes the job as it ends (recording 12b): the DELETED event contains its last state."""
    ref = (await task.submit(1, f"sleep 4; {program}")).ref
    following = asyncio.create_task(task.ended(ref))
    await task.running(ref)
    await task.patch({"spec": {"runPolicy": {"ttlSecondsAfterFinished": 0}}})
    outcome = await following
    assert outcome.phase == phase
    assert outcome.succeeded is (phase == "Succeeded")
    assert await task.job() is None


# kills


@of_each_kind
async def test_kill_deletes_the_job_and_does_not_wait_for_pods(task: Task) -> None:
    ref = (await task.submit(1, STUBBORN, grace=20)).ref
    stop = StopSignal()
    following = asyncio.create_task(task.ended(ref, stop=stop))
    await task.started(ref)
    stop.request("The task was killed")
    outcome = await following
    assert outcome.cause is not None
    assert outcome.cause["category"] == "killed"
    assert outcome.cause["summary"] == f"The task was killed (failed): {ref} is released."
    assert outcome.cause["detail"] == f"{ref} deleted. Its pods are being terminated."
    assert await task.pods(ref)
    job = await task.job()
    if task.kind.behavior.pods_outlive_job:
        assert job is None
    else:
        assert job is not None
        assert job["metadata"]["deletionTimestamp"]


# handover


@of_each_kind
async def test_logs_continue_after_a_handover(task: Task) -> None:
    """The next process continues at the cursor: no line is lost or repeated."""
    ref = (await task.submit(1, COUNTS)).ref
    handover, handovers = Handover(), 0
    while True:
        ended = await task.follow(ref, handover=handover, until=soon(0.8) if handovers < 2 else None)
        if not isinstance(ended, Handover):
            break
        handover, handovers = ended, handovers + 1
    assert handovers  # on a loaded machine the job may have ended before the second one
    assert ended.succeeded
    assert lines(task) == [str(i) for i in range(10)]
    assert ended.metrics["log.lines"] == 10
    assert ended.metrics["seconds.running"] > 1


@of_each_kind
async def test_program_that_exits_with_0_when_it_is_paused_has_not_succeeded(task: Task) -> None:
    """Somebody suspends the job. Either it waits, and trains on when it is resumed, or its success is doubtful."""
    ref = (await task.submit(1, "trap 'exit 0' TERM; sleep 600 & wait")).ref
    following = asyncio.create_task(task.ended(ref, deleted=False))
    await until(lambda: "is Running" in str(task.log))
    await job_control.suspend(task.api, ref, timeout=60)
    await until(lambda: "is Suspended" in str(task.log) or "is Succeeded" in str(task.log))
    if "is Succeeded" not in str(task.log):
        await job_control.resume(task.api, ref, timeout=60)
        await task.running(ref)
        await task.delete()
    assert not (await following).succeeded, str(task.log)


@of_each_kind
@pytest.mark.embedded("its program sees the files of this machine")
async def test_patched_node_is_named_by_the_warning_and_the_cause(task: Task, tmp_path: Path) -> None:
    """A program that ends itself by SIGKILL after its node was patched."""
    ends = tmp_path / "ends"
    ref = (await task.submit(1, f"until [ -e {ends} ]; do sleep 0.2; done; kill -9 $$$$")).ref
    following = asyncio.create_task(task.ended(ref, node_seconds=0.2))
    await task.running(ref)
    selector = {"fieldSelector": "status.phase=Running"}
    pods = await task.api.request("GET", f"/api/v1/namespaces/{task.namespace}/pods", query=selector)
    (name,) = {pod["spec"]["nodeName"] for pod in pods["items"]}
    path = f"/api/v1/nodes/{name}"
    before = (await task.api.request("GET", path))["status"]["conditions"]
    broken = [*before, condition(since=0)]
    await task.api.request("PATCH", f"{path}/status", body={"status": {"conditions": broken}})
    try:
        await until(lambda: f"Node {name}: AcceleratedHardwareReady is False since" in str(task.log), 30)
        ends.touch()
        cause = (await following).cause or {}
    finally:
        await task.api.request("PATCH", f"{path}/status", body={"status": {"conditions": before}})
    assert cause["summary"].startswith(f"Node {name}: AcceleratedHardwareReady is False since"), cause
    assert "was killed from outside by SIGKILL" in cause["summary"]
    assert (cause["category"], list(cause["failed_nodes"])) == ("infrastructure", [name])
    assert str(task.log).count("AcceleratedHardwareReady is False") == 2, "the warning, and the cause"
