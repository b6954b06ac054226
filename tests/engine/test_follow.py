"""Following a job against an API server: every outcome, every limit, and the state of the job afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import time
from typing import Any

import pytest

from airflow_provider_ktrain.core.ending import Event
from airflow_provider_ktrain.core.errors import AccessError
from airflow_provider_ktrain.core.identity.names import DEPLOYMENT_LABEL, OnFinishAction, Owner
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.api.job_calls import set_suspended
from airflow_provider_ktrain.engine.follow import closing, startup
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.logs.log_socket import log_socket
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests import clusters
from tests.clusters import REAL, TestCluster
from tests.engine.tasks import (
    STUBBORN,
    TRAINS,
    Lines,
    MeddledApi,
    Sink,
    Task,
    api_of,
    host_of,
    of_each_kind,
    owner_in,
    soon,
    until,
)

COUNTS = "trap 'exit 143' TERM; for i in 0 1 2 3 4 5 6 7 8 9; do echo line $i; sleep 0.4; done"


def lines(task: Task) -> list[str]:
    return [found[1] for line in task.log.messages if (found := re.match(r"\[(?:Master|node) 0\] line (.*)", line))]


@of_each_kind
async def test_succeeded_job_is_logged_and_released(task: Task) -> None:
    ref = (await task.submit(1, "echo line 0; echo line 1")).ref
    outcome = await task.ended(ref)
    assert (outcome.succeeded, outcome.cause, outcome.release_error) == (True, None, "")
    assert lines(task) == ["0", "1"]
    assert await task.job() is None


class BrokenSink(Sink):
    """A host whose status can be neither published nor built."""

    @property
    def try_number(self) -> int:  # type: ignore[override]
        raise RuntimeError("no try")

    def offer(self, build: object, *, urgent: bool) -> None:
        raise RuntimeError("no page")


async def test_status_that_fails_does_not_end_the_training(task: Task) -> None:
    ref = (await task.submit(1, "echo line 0")).ref
    sink: Any = BrokenSink()
    outcome = await task.follow(ref, status_sink=sink)
    assert isinstance(outcome, Outcome)
    assert (outcome.succeeded, outcome.status) == (True, {})


@of_each_kind
async def test_failed_job_has_a_cause_and_is_released(task: Task) -> None:
    ref = (await task.submit(1, "echo broken >&2; exit 3")).ref
    outcome = await task.ended(ref)
    assert not outcome.succeeded
    assert outcome.cause is not None
    assert outcome.cause["category"] == "user code"
    assert "exit code 3" in outcome.cause["summary"]
    assert outcome.exit_code == 3
    assert outcome.released
    assert await task.job() is None


WRITES_UNTIL_STOPPED = """
trap 'echo "line $i, the last one"; exit 0' TERM
i=0; while :; do echo "line $i"; i=$((i+1)); sleep 0.05; done
"""


@pytest.mark.parametrize("shared", [False, True], ids=["worker", "triggerer"])
@pytest.mark.parametrize("code", [0, 3])
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
async def test_the_cause_is_logged_before_the_release(task: Task) -> None:
    ref = (await task.submit(1, "echo broken >&2; exit 3")).ref
    outcome = await task.ended(ref)
    (position,) = [n for n, line in enumerate(task.log.messages) if line.startswith((outcome.cause or {})["summary"])]
    (summary,) = [n for n, line in enumerate(task.log.messages) if "GPU time: " in line]
    assert position < summary


async def test_success_is_summarized_in_one_message(task: Task) -> None:
    """It also says what was released: nothing here, or the Worker's GPU if that ends later than the Master."""
    ref = (await task.submit(1, "true", workers=1)).ref
    await task.ended(ref)
    (text,) = [line for line in task.log.messages if line.startswith(f"{ref} succeeded")]
    summary = r".* succeeded after (\d+ min )?\d+ s with 2 replicas\.\n(1 GPU released, .*\n)?GPU time: .* on 2 GPUs .*"
    assert re.fullmatch(summary, text)
    assert not [line for line in task.log.messages if "kept without running pods" in line]


@of_each_kind
async def test_result_and_cause_are_found_in_a_flood_of_lines(task: Task) -> None:
    """The rate limit drops lines, possibly those that contain the result or the cause."""
    flood = f"yes {'x' * 1000} | head -c 45000000"
    result = """echo 'KTRAIN_RESULT {"loss": 0.5}'"""
    ref = (await task.submit(1, f"{flood}; {result}; {flood} >&2; echo \"KeyError: 'label_map'\" >&2; exit 3")).ref
    outcome = await task.ended(ref)
    assert any(line.startswith("The rate limit dropped ") for line in task.log.messages)
    assert "KeyError: 'label_map'" in (outcome.cause or {})["summary"]
    assert outcome.result == {"loss": 0.5}


@of_each_kind
@pytest.mark.parametrize(
    ("age", "start", "marked"),
    [(1, None, False), (60, None, True), (60, 59, False)],
    ids=["soon", "late", "soon, but its client took long"],
)
async def test_takeover_marks_lines_that_may_be_repeated(
    task: Task, age: float, start: float | None, marked: bool
) -> None:
    ref = (await task.submit(1, "true")).ref
    at = time.time() - age
    began_at = start and time.time() - start
    await task.ended(ref, handover=Handover(handed_over_at=at), shared=True, began_at=began_at)
    since = datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%H:%M:%S")
    warnings = [
        line for line in task.log.messages if line.startswith(f"Lines since {since} may be repeated: another triggerer")
    ]
    assert len(warnings) == marked


async def test_outcome_after_a_takeover_waits_shortly_for_earlier_lines(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads Airflow's log, and all lines are from before the takeover."""
    monkeypatch.setattr(closing, "SHORT_DRAIN_SECONDS", 2.0)
    ref = (await task.submit(1, "for i in $(seq 100); do echo line $i; done")).ref
    log_socket().connect(lambda: 100_000, 100_000)
    at = time.time()
    outcome = await task.ended(
        ref, handover=Handover(handed_over_at=at), shared=True, began_at=at + 3600, drain_timeout=3600
    )
    assert outcome.succeeded
    (counted,) = [line for line in task.log.messages if "are not logged again after the takeover" in line]
    assert "takeover: 100 lines between " in counted


async def test_containers_without_a_log_position_are_reported(task: Task) -> None:
    ref = (await task.submit(1, "true")).ref
    cursor = Cursor(since="2026-11-21T12:04:31.000000000Z", omitted=2900).to_dict()
    await task.ended(ref, handover=Handover(cursor=cursor, handed_over_at=time.time()))
    assert any(
        line.startswith("Lines since 12:04:31 of 2,900 containers may be repeated") for line in task.log.messages
    )


@of_each_kind
@pytest.mark.parametrize(
    ("action", "program", "left"),
    [
        ("keep_job", "true", True),
        ("keep_job", "exit 3", True),
        ("delete_succeeded_job", "true", False),
        ("delete_succeeded_job", "exit 3", True),
    ],
)
async def test_kept_job_holds_no_gpu(task: Task, action: str, program: str, left: bool) -> None:
    ref = (await task.submit(1, program)).ref
    outcome = await task.ended(ref, on_finish_action=OnFinishAction(action))
    assert outcome.released
    assert (await task.job() is not None) is left
    assert not await task.holding(ref)


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


@of_each_kind
async def test_unfinished_job_is_deleted_at_its_deadline(task: Task) -> None:
    ref = (await task.submit(1)).ref
    outcome = await task.ended(ref, deadline=time.time() - 1, shared=True)
    assert outcome.kept is None
    assert await task.job() is None


async def test_success_before_a_passed_deadline_is_a_success(task: Task) -> None:
    """Nobody followed the job for a while: it succeeded in time, and the deadline has passed since."""
    ref = (await task.submit(1, "true")).ref
    await task.condition("Succeeded")
    assert (await task.ended(ref, deadline=time.time() - 1)).succeeded


@pytest.mark.embedded("sets fault switches")
async def test_a_job_that_ended_unseen_did_not_stall(task: Task, cluster: TestCluster) -> None:
    """Its pod is silent because it has ended; the watches show that later."""
    ref = (await task.submit(1, "sleep 4; echo line 0")).ref
    following = asyncio.create_task(task.ended(ref, limits=Limits(log_stall=6)))
    await task.running(ref)
    cluster.admin("delay_watch", delay=12, path="pods|pytorchjobs")
    try:
        assert (await following).succeeded
    finally:
        cluster.admin("clear")


@of_each_kind
async def test_kill_keeps_an_ended_job_for_the_next_try(task: Task, cluster: TestCluster) -> None:
    """The logs of the job are still read when the worker hands over."""
    ref = (await task.submit(1, "true")).ref
    await task.condition("Succeeded")
    stop = StopSignal()
    stop.request("The task was killed")
    outcome = await task.ended(ref, stop=stop)
    assert (outcome.cause or {})["category"] == "killed"
    assert outcome.kept is None
    assert await task.job() is not None
    assert not await task.holding(ref)


@pytest.mark.parametrize("policy", ["None", "Running", "All"])
@pytest.mark.parametrize("each", [600, 2], ids=["one host", "many hosts"])
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


async def test_sensor_ignores_a_partial_allocation(task: Task, cluster: TestCluster) -> None:
    ref = (await task.submit(1, TRAINS, gpus=clusters.most_gpus(cluster, pods=1), workers=1)).ref
    await task.follow(ref, limits=Limits(partial_start=2), release=False, until=soon(1.5))
    assert not [line for line in task.log.messages if "GPUs in 1 pod, but" in line]


class SlowLines(Lines):
    """A sink that needs time for each line, as on a loaded machine."""

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        time.sleep(0.02)
        super().info(event, *args, **kw)


@of_each_kind
async def test_lines_missing_from_the_final_read_are_counted_in_one_line(task: Task) -> None:
    """The deadline stops the final read; the result is found nevertheless."""
    task.log = SlowLines()
    ref = (await task.submit(1, """seq 2000 | sed 's/^/line /'; echo 'KTRAIN_RESULT {"loss": 0.5}'""")).ref
    await task.condition("Succeeded")
    outcome = await task.ended(ref, deadline=time.time() - 1)
    (warning,) = [line for line in task.log.messages if line.startswith("Logs are incomplete: ")]
    container = r"\S+-(?:master-0/pytorch|node-0-0-\w+/node)"
    assert (match := re.search(rf"Missing: ([\d,]+) lines of {container}\.$", warning)), warning
    assert len(lines(task)) + int(match[1].replace(",", "")) == 2001
    assert outcome.result == {"loss": 0.5}


@of_each_kind
async def test_restarts_are_counted(task: Task) -> None:
    """The container runs again and its log is still empty: the log of the previous run contains the cause."""
    program = "sleep 3; echo broken; exit 1"
    ref = (await task.submit(1, program, restart_policy="OnFailure", run_policy={"backoffLimit": 10})).ref
    outcome = await task.ended(ref, limits=Limits(max_restarts=0), logs="none")
    assert outcome.cause is not None
    assert "max_restarts" in outcome.cause["summary"]
    assert "broken" in outcome.cause["summary"]
    assert await task.job() is None


async def test_recreated_pods_count_as_restarts(task: Task) -> None:
    """Under ExitCode the operator deletes pods that fail with 128 and above, so their containers never restart."""
    ref = (await task.submit(1, "exit 130", restart_policy="ExitCode")).ref
    outcome = await task.ended(ref, limits=Limits(max_restarts=2), logs="none")
    assert outcome.cause is not None
    assert "max_restarts" in outcome.cause["summary"]
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
        # of a pod whose end was not seen, the reason is not known
        assert re.fullmatch(r"Master 0 restarted \(.*\) after (exit code 130, SIGINT|its pod was deleted)\.", line)


@of_each_kind
async def test_handover_keeps_the_count_of_a_crash_loop(task: Task) -> None:
    ref = (await task.submit(1, CRASHES, restart_policy="OnFailure")).ref

    async def restarted() -> bool:
        handover = await task.follow(ref, limits=Limits(crash_loop=3), until=soon(1))
        assert isinstance(handover, Handover)
        handovers.append(handover)
        return any("1st time" in line for line in task.log.messages)

    handovers: list[Handover] = []
    await until(restarted)
    outcome = await task.ended(ref, limits=Limits(crash_loop=3), handover=handovers[-1])
    assert outcome.cause is not None
    assert "failed 3 times in a row" in outcome.cause["summary"]
    assert sum("(2nd time)" in line for line in task.log.messages) == 1


@pytest.mark.embedded("sets fault switches")
async def test_clock_of_a_deleted_pod_stops(task: Task, cluster: TestCluster) -> None:
    """A Worker that found no node is scaled down. No watch event reports it: it is missing from the next list."""
    ref = (await task.submit(1, gpus=30, workers=2)).ref
    following = asyncio.create_task(task.follow(ref, limits=Limits(schedule=30), until=soon(31)))
    await task.running(ref, 2)
    cluster.admin("delay_watch", delay=60, path="/pods")
    try:
        await task.patch({"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 1}}}})

        async def scaled() -> bool:
            return len(await task.pods(ref)) == 2

        await until(scaled)
        cluster.admin("expire")
        with contextlib.suppress(OSError):  # including its own answer
            cluster.admin("drop", seconds=0.01)
        assert isinstance(await following, Handover)
    finally:
        cluster.admin("clear")


@of_each_kind
async def test_the_deadline_is_absolute(task: Task) -> None:
    """The try that submitted the job set the deadline long ago."""
    ref = (await task.submit()).ref
    await task.running(ref)
    outcome = await task.ended(ref, deadline=time.time() - 1, shared=True)
    assert outcome.cause is not None
    assert outcome.cause["category"] == "timeout"
    assert await task.job() is None


@of_each_kind
async def test_the_deadline_runs_before_the_job_is_seen(task: Task) -> None:
    ref = (await task.submit(1, run_policy={"suspend": True})).ref
    outcome = await task.ended(ref, deadline=time.time() + 0.5, shared=True)
    assert outcome.cause is not None
    assert outcome.cause["category"] == "timeout"
    assert await task.job() is None


@of_each_kind
async def test_worker_does_not_wait_for_pods_at_its_deadline(task: Task) -> None:
    """Airflow's alarm follows soon. It would interrupt the wait, and the cause would be lost."""
    ref = (await task.submit(1, STUBBORN, grace=20)).ref
    await task.started(ref)
    outcome = await task.ended(ref, deadline=time.time() - 1)
    assert (outcome.cause or {})["category"] == "timeout"
    assert "will be released" in outcome.released
    assert await task.holding(ref)


async def test_reason_for_a_pending_job_is_logged(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "FIRST_INTERVAL_SECONDS", 0.5)
    ref = (await task.submit(gpus=1000)).ref
    following = asyncio.create_task(task.ended(ref, limits=Limits(schedule=600)))

    async def messages() -> list[str]:
        return [
            line for line in task.log.messages if "is still Pending" in line and "Insufficient nvidia.com/gpu" in line
        ]

    (line,) = await until(messages)
    assert len(line.splitlines()[0]) < 200
    following.cancel()


async def test_reason_for_a_pending_job_names_the_nodes_that_it_avoids(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "FIRST_INTERVAL_SECONDS", 0.5)
    nodes = sorted(node["metadata"]["name"] for node in (await task.api.request("GET", "/api/v1/nodes"))["items"])
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": excluded}]}}
    ref = (await task.submit(affinity={"nodeAffinity": required})).ref
    following = asyncio.create_task(task.ended(ref, limits=Limits(schedule=600)))

    async def messages() -> list[str]:
        return [line for line in task.log.messages if "is still Pending" in line and "avoid_failed_nodes" in line]

    (line,) = await until(messages)
    assert f"(avoid_failed_nodes): {', '.join(nodes)}." in line
    following.cancel()


async def test_queued_job_is_not_ended_by_other_clocks(task: Task) -> None:
    """Only the queue's clock runs."""
    ref = (await task.submit(1, run_policy={"suspend": True})).ref
    ended = await task.follow(ref, limits=Limits(schedule=0.1, startup=0.1, log_stall=0.1), until=soon(1.5))
    assert isinstance(ended, Handover)
    assert await task.job() is not None


async def test_log_stall_clock_starts_when_the_job_runs(task: Task) -> None:
    submitted = await task.submit(1, "sleep 1; echo line 0", run_policy={"suspend": True})
    began = time.monotonic()
    following = asyncio.create_task(task.ended(submitted.ref, limits=Limits(log_stall=15)))

    async def silent_for_long() -> bool:
        return time.monotonic() > began + 15.5

    await until(silent_for_long)
    job = await task.job()
    assert job is not None
    await set_suspended(task.api, submitted.ref, job, False)
    assert (await following).succeeded


async def test_result_is_kept_by_a_handover(task: Task) -> None:
    program = """trap 'exit 143' TERM; echo 'KTRAIN_RESULT {"loss": 0.5}'; sleep 3"""
    ref = (await task.submit(1, program)).ref
    outcome: Handover | Outcome = Handover()
    while isinstance(outcome, Handover):  # repeatedly: one of the responses contains the line but not the end
        outcome = await task.follow(ref, handover=outcome, until=soon(0.5))
    assert outcome.result == {"loss": 0.5}


# changes by others


@of_each_kind
async def test_job_deleted_by_somebody_else_is_gone(task: Task) -> None:
    ref = (await task.submit()).ref
    following = asyncio.create_task(task.ended(ref))
    await task.running(ref)
    await task.delete()
    outcome = await following
    assert outcome.phase == "Gone"
    assert outcome.cause is not None
    assert outcome.cause["category"] == "infrastructure"
    assert f"{ref} is gone." in outcome.released
    assert not await task.pods(ref)


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


@of_each_kind
async def test_a_job_that_lost_its_label_is_not_gone(task: Task) -> None:
    """A watch with a selector reports the removal of the label as a deletion."""
    ref = (await task.submit()).ref
    await task.running(ref)
    following = asyncio.create_task(task.ended(ref, shared=True, deadline=time.time() + 4))
    await task.patch({"metadata": {"labels": {DEPLOYMENT_LABEL: None}}})
    outcome = await following
    assert (outcome.cause or {})["category"] == "timeout", "it was followed on"


async def test_job_deleted_before_it_was_observed_is_gone(task: Task) -> None:
    ref = (await task.submit()).ref
    await task.delete()

    async def gone() -> bool:
        return await task.job() is None

    await until(gone)
    assert (await task.ended(ref)).phase == "Gone"


@of_each_kind
async def test_new_job_of_the_same_name_is_not_followed(task: Task) -> None:
    """The next life of the task deletes the job and creates it again: the first is gone, and the second continues."""
    ref = (await task.submit(1)).ref
    following = asyncio.create_task(task.ended(ref))
    await task.running(ref)
    after = (await task.submit(2, first=2)).ref
    assert (await following).phase == "Gone"
    await task.running(after)


@of_each_kind
async def test_follower_stops_when_another_try_adopts_the_job(task: Task) -> None:
    ref = (await task.submit(1)).ref
    following = asyncio.create_task(task.ended(ref))
    await task.running(ref)
    await task.submit(2)
    outcome = await following
    assert outcome.superseded
    assert not outcome.released
    assert list((await task.pods(ref)).values()) == ["Running"]
    assert Owner.of(await task.job() or {}) == task.owner(2)


@pytest.mark.embedded("sets fault switches")
async def test_lagging_watch_does_not_give_up_the_job(task: Task, cluster: TestCluster) -> None:
    """The watch shows the previous try as the owner; the API server has the current one."""
    ref = (await task.submit(1)).ref
    before = asyncio.create_task(task.follow(ref))
    await task.running(ref)
    cluster.admin("delay_watch", delay=60, path="pytorchjobs")
    try:
        taken = (await task.submit(2)).ref
        assert isinstance(await task.follow(taken, until=soon(0.5)), Handover)
    finally:
        before.cancel()
        cluster.admin("clear")


@pytest.mark.embedded("sets fault switches")
@pytest.mark.parametrize("program", ["echo line 0", "echo line 0; exit 3"])
async def test_pods_observed_late_have_logs_and_a_cause(task: Task, cluster: TestCluster, program: str) -> None:
    """Jobs and pods come from two watches, in any order."""
    cluster.admin("delay_watch", delay=2, path="/pods")
    try:
        outcome = await task.ended((await task.submit(1, program)).ref)
    finally:
        cluster.admin("clear")
    assert lines(task) == ["0"]
    assert outcome.succeeded or (outcome.cause or {})["category"] == "user code"


@pytest.mark.embedded("sets fault switches")
async def test_403_is_tolerated_for_a_job_that_was_followed_before(task: Task, cluster: TestCluster) -> None:
    """An API server that restarts may reject requests until it has loaded its RBAC rules."""
    ref = (await task.submit(1, "sleep 1")).ref
    cluster.admin("status", status=403, verb="list,watch", path="pods|pytorchjobs", seconds=2)
    try:
        assert (await task.ended(ref)).succeeded
    finally:
        cluster.admin("clear")


@pytest.mark.embedded("sets fault switches")
async def test_403_ends_a_job_that_was_just_created(task: Task, cluster: TestCluster) -> None:
    """A missing right is detected immediately, and holds no GPUs for ten minutes."""
    ref = (await task.submit(1)).ref
    cluster.admin("status", status=403, verb="list,watch", path="pods|pytorchjobs")
    try:
        with pytest.raises(AccessError, match="no right to watch"):
            await task.ended(ref, created=True)
    finally:
        cluster.admin("clear")


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


async def test_kill_stops_a_request_that_hangs(task: Task, cluster: TestCluster) -> None:
    """A kill has only a few seconds; an API server that doesn't answer must not use them up.

    The job has ended: its status is the only proof of how, so it is kept for the next try.
    """

    class Hangs(MeddledApi):
        asked = asyncio.Event()

        async def before(self, method: str, path: str) -> None:
            if path.endswith("/events"):
                self.asked.set()
                await asyncio.Event().wait()

    async with api_of(cluster, Hangs) as api:
        ref = (await task.submit(1, "exit 3")).ref
        stop = StopSignal()
        following = asyncio.create_task(Task(api, task.namespace, task.key).ended(ref, stop=stop))
        await api.asked.wait()
        stop.request("The task was killed")
        outcome = await following
    assert outcome.cause is not None
    assert outcome.cause["summary"].startswith(f"{ref} had ended before. It is kept")
    assert await task.job() is not None
    assert not await task.holding(ref)


async def test_kill_before_the_start_releases_the_job(task: Task) -> None:
    ref = (await task.submit()).ref
    stop = StopSignal()
    stop.request("The task was killed")
    outcome = await task.ended(ref, stop=stop)
    assert (outcome.cause or {})["detail"] == f"{ref} deleted. Its pods are being terminated."
    assert not outcome.release_error


@pytest.mark.parametrize(("event", "kept"), [(Event.DEADLINE, True), (Event.INTERRUPT, False)])
async def test_interrupted_worker_frees_the_pods_of_a_job_that_has_ended(task: Task, event: Event, kept: bool) -> None:
    """A Worker has outlived its Master. A worker process has seconds after Airflow's timeout, and after Ctrl-C."""
    program = "case $RANK in 0) sleep 8;; *) trap 'exit 143' TERM; sleep 600 & wait;; esac"
    ref = (await task.submit(1, program, workers=1, run_policy={"cleanPodPolicy": "None"})).ref
    await task.condition("Succeeded")
    assert await task.holding(ref)
    async with owner_in(task.api, host_of(), task.log) as training:
        training.job.ref = ref
        await training.interrupted(event)

    async def free() -> bool:
        return not await task.holding(ref) and (await task.job() is not None) is kept

    await until(free)


async def test_cancelled_follower_changes_nothing(task: Task) -> None:
    """A triggerer that stops doesn't end a training."""
    ref = (await task.submit()).ref
    following = asyncio.create_task(task.ended(ref))
    await task.running(ref)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert list((await task.pods(ref)).values()) == ["Running"]


@pytest.mark.embedded("sets fault switches")
async def test_failed_release_keeps_the_cause_of_the_job(task: Task, cluster: TestCluster) -> None:
    """A Worker continues to run with its GPU and can't be deleted."""
    left_behind = {"cleanPodPolicy": "None"}
    ref = (await task.submit(1, "[ $RANK = 0 ] && exit 3; sleep 600", workers=1, run_policy=left_behind)).ref
    cluster.admin("status", status=403, verb="delete", path=ref.name)
    try:
        outcome = await task.ended(ref, deleted=False)
    finally:
        cluster.admin("clear")
    assert outcome.kept == ref.to_dict(), "the worker tries again when Airflow has stored the outcome"
    assert outcome.cause is not None
    assert "exit code 3" in outcome.cause["summary"]
    assert "could not be released.\n403" in outcome.release_error
    assert outcome.release_error in task.log.messages


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
@pytest.mark.embedded("sets fault switches")
async def test_follower_continues_after_an_outage_of_the_api_server(task: Task, cluster: TestCluster) -> None:
    ref = (await task.submit(1, COUNTS)).ref
    following = asyncio.create_task(task.ended(ref))

    async def begun() -> bool:
        return bool(lines(task))

    await until(begun)
    cluster.admin("drop", seconds=3)
    outcome = await following
    assert outcome.succeeded
    assert outcome.released
    assert lines(task) == [str(i) for i in range(10)]


def test_options_are_restored_from_json() -> None:
    import json

    options = Options(limits=Limits(queue=3), deadline=12.5, conditions=("Running",), logs={"Worker": [0]})
    assert Options.from_dict(json.loads(json.dumps(options.to_dict()))) == options
