"""Following a job to its end: every outcome, every limit, and what is left of the job afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_ktrain.core.end_rules import Event
from airflow_provider_ktrain.core.errors import AccessError
from airflow_provider_ktrain.core.identity.names import DEPLOYMENT_LABEL, OWNER_ANNOTATION, OnFinishAction, Owner
from airflow_provider_ktrain.core.kinds import TRAINJOB, Kind
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.auth_client import AuthClient
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.logs.log_socket import log_socket
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests.apiserver import Request, Response, stamp
from tests.apiserver.http import make_client
from tests.engine.staged import NAME, Staged, of_each_kind, staged
from tests.engine.tasks import Call, Handover, Lines, Sink, host_of, owner_in
from tests.until import until
from tests.virtual import VirtualLoop

pytestmark = pytest.mark.virtual_time

BOTH = ("Master", "Worker")
RESULT = 'KTRAIN_RESULT {"loss": 0.5}'
KEY_ERROR = "KeyError: 'label_map'"


def lines(training: Staged) -> list[str]:
    """What the primary has printed as `line ...`."""
    return [one[1] for text in training.log.messages if (one := re.match(rf"\[{training.role} 0\] line (.*)", text))]


def messages(training: Staged, part: str) -> list[str]:
    return [line for line in training.log.messages if part in line]


def cause(outcome: Outcome) -> dict[str, Any]:
    assert outcome.cause is not None
    return dict(outcome.cause)


def succeed(training: Staged) -> None:
    training.start("line 0", "line 1")
    training.end()


def fail(training: Staged) -> None:
    training.start("broken")
    training.end(3)


async def is_running(training: Staged) -> None:
    await until(lambda: " is Running" in str(training.log))


# outcomes


@of_each_kind
async def test_succeeded_job_is_logged_and_released(kind: Kind) -> None:
    """It is deleted when Airflow has stored the outcome."""
    async with staged(kind) as training:
        succeed(training)
        outcome = await training.follow(shared=False)
        assert (outcome.succeeded, outcome.cause, outcome.release_error) == (True, None, "")
        assert lines(training) == ["0", "1"]
        assert outcome.kept == training.ref.to_dict()
        assert not training.holding


@of_each_kind
async def test_failed_job_has_a_cause_and_is_released(kind: Kind) -> None:
    async with staged(kind) as training:
        fail(training)
        outcome = await training.follow(shared=False)
        assert not outcome.succeeded
        assert cause(outcome)["category"] == "user code"
        assert "exit code 3" in cause(outcome)["summary"]
        assert outcome.exit_code == 3
        assert outcome.released
        assert not training.holding
        (position,) = [n for n, line in enumerate(training.log.messages) if line.startswith(cause(outcome)["summary"])]
        (summary,) = [n for n, line in enumerate(training.log.messages) if "GPU time: " in line]
        assert position < summary, "the cause is logged before the release"


class BrokenSink(Sink):
    """A host whose status can be neither published nor built."""

    @property
    def try_number(self) -> int:  # type: ignore[override]
        raise RuntimeError("no try")

    def offer(self, build: object, *, urgent: bool) -> None:
        raise RuntimeError("no page")


async def test_status_that_fails_does_not_end_the_training() -> None:
    async with staged() as training:
        succeed(training)
        sink: Any = BrokenSink()
        outcome = await training.follow(sink=sink)
        assert (outcome.succeeded, outcome.status) == (True, {})


async def test_success_is_summarized_in_one_message() -> None:
    """It also says what was released: the GPU of a Worker that runs on after its Master."""
    async with staged(roles=BOTH) as training:
        succeed(training)
        await training.follow()
        (text,) = messages(training, f"{training.ref} succeeded")
        summary = r".* succeeded after .* s with 2 replicas\.\n1 GPU released, .*\nGPU time: .* on 2 GPUs .*"
        assert re.fullmatch(summary, text)
        assert not messages(training, "kept without running pods")


async def test_result_and_cause_are_found_in_a_flood_of_lines() -> None:
    """The rate limit drops lines, possibly those that contain the result or the cause."""
    async with staged(TRAINJOB) as training:
        flood = ["x" * 250_000] * 150
        training.start(*flood, RESULT, *flood[:10], KEY_ERROR)
        training.end(3)
        outcome = await training.follow()
        assert messages(training, "The rate limit dropped ")
        assert not messages(training, f"] {KEY_ERROR}")
        assert KEY_ERROR in cause(outcome)["summary"]
        assert outcome.result == {"loss": 0.5}


@pytest.mark.sampled(5)
@of_each_kind
@pytest.mark.parametrize("action", list(OnFinishAction))
@pytest.mark.parametrize("end", [succeed, fail])
async def test_kept_job_holds_no_gpu(kind: Kind, action: OnFinishAction, end: Callable[[Staged], None]) -> None:
    async with staged(kind) as training:
        end(training)
        training.pod(1)
        outcome = await training.follow(Options(on_finish_action=action))
        assert outcome.released
        assert not training.holding
        kept = action is OnFinishAction.KEEP_JOB or (action is not OnFinishAction.DELETE_JOB and end is fail)
        assert outcome.kept == (None if kept else training.ref.to_dict())  # the worker deletes the others
        assert training.exists


@of_each_kind
@pytest.mark.parametrize("end", [succeed, fail])
async def test_next_follower_gets_the_same_outcome(kind: Kind, end: Callable[[Staged], None]) -> None:
    """The outcome of the first follower may be lost, because its triggerer was killed with it."""
    async with staged(kind) as training:
        end(training)
        training.pod(1)
        for outcome in (await training.follow(), await training.follow()):
            assert outcome.succeeded is (end is succeed)
            assert (outcome.cause or {}).get("category") == (None if outcome.succeeded else "user code")
            assert outcome.kept == training.ref.to_dict()
            assert not outcome.release_error
            assert not training.holding


@pytest.mark.parametrize("policy", ["None", "Running", "All"])
@pytest.mark.parametrize("each", [600.0, 2.0], ids=["one host", "many hosts"])
async def test_complete_logs_give_no_warning(policy: str, each: float) -> None:
    """The operator deletes the running Worker when the Master has succeeded; with `All`, the Master's pod, too."""

    def end() -> None:
        training.line("line 0")
        training.end()
        for name in list(training.api.pods):
            if policy == "All" or (policy == "Running" and name in training.holding):
                training.api.remove("pods", name)

    async with staged(roles=BOTH) as training:
        training.spec(runPolicy={"cleanPodPolicy": policy})
        training.start()
        training.line("started", role="Worker")
        training.after(5.0, end)
        handover, outcome = Handover(), None
        async with asyncio.timeout(600):
            while outcome is None:
                async with training.owner() as owner:
                    owner.handover = handover
                    found = await owner.follow(training.ref, Options(), until=timing.now() + each)
                handover, outcome = (found, None) if isinstance(found, Handover) else (handover, found)
        assert outcome.succeeded
        assert lines(training) == ["0"]
        assert not [line for line in training.log.messages if line.startswith(("Log of", "The logs of"))]


# takeovers


@pytest.mark.parametrize(
    ("age", "start", "marked"),
    [(1, None, False), (60, None, True), (60, 59, False)],
    ids=["soon", "late", "soon, but its client took long"],
)
async def test_takeover_marks_lines_that_may_be_repeated(age: float, start: float | None, marked: bool) -> None:
    async with staged(TRAINJOB) as training:
        succeed(training)
        at = timing.epoch() - age
        await training.follow(None, Handover(handed_over_at=at), began_at=start and timing.epoch() - start)
        since = datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%H:%M:%S")
        assert len(messages(training, f"Up to 10,000 lines since {since} may be repeated: another triggerer")) == marked


async def test_outcome_after_a_takeover_waits_shortly_for_earlier_lines() -> None:
    """Nobody reads Airflow's log, and all lines are from before the takeover."""
    async with staged() as training:
        training.start(*(f"line {number}" for number in range(100)))
        training.end()
        log_socket().connect(lambda: 100_000, 100_000)
        at, began = timing.epoch(), timing.now()
        handover = Handover(handed_over_at=at)
        outcome = await training.follow(Options(drain_timeout=3600), handover, began_at=at + 3600)
        assert outcome.succeeded
        (counted,) = messages(training, "are not logged again.")
        assert counted.startswith("100 lines of ")
        assert timing.now() - began < 10.0


async def test_containers_without_a_log_position_are_reported() -> None:
    async with staged() as training:
        succeed(training)
        cursor = Cursor(since="2026-11-21T12:04:31.000000000Z", omitted=2900).to_dict()
        await training.follow(None, Handover(cursor=cursor, handed_over_at=timing.epoch()))
        assert messages(training, "Lines since 12:04:31 of 2,900 containers may be repeated")


async def test_logs_continue_after_a_handover() -> None:
    """The next process continues at the cursor: no line is lost or repeated."""
    async with staged(TRAINJOB) as training:
        training.start()
        training.prints((f"line {number}" for number in range(10)), every=0.4)
        training.after(4.0, training.end)
        handover = await training.hand_over(0.9)
        handover = await training.hand_over(0.9, None, handover)
        outcome = await training.follow(None, handover)
        assert outcome.succeeded
        assert lines(training) == [str(number) for number in range(10)]
        assert outcome.metrics["log.lines"] == 10
        assert outcome.metrics["seconds.running"] > 1


async def test_result_is_kept_by_a_handover() -> None:
    async with staged() as training:
        training.start(RESULT)
        handover = await training.hand_over(1.0)
        training.api.logs.files.clear()
        training.end()
        assert (await training.follow(None, handover)).result == {"loss": 0.5}


# limits


def queued(training: Staged) -> None:
    training.spec(**training.kind.form.suspension(True))
    training.condition("Suspended", since=0.0)


def unscheduled(training: Staged) -> None:
    training.condition("Created")
    training.pod(0, "Pending", node="", since=0.0)


def pulling(training: Staged) -> None:
    training.condition("Created")
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    training.pod(0, "Pending", state=waiting, since=0.0)


def silent(training: Staged) -> None:
    training.start("started", since=0.0)


@pytest.mark.parametrize(
    ("state", "limits", "category"),
    [
        (queued, {"queue": 20}, "queue"),
        (unscheduled, {"schedule": 20}, "scheduling"),
        (pulling, {"startup": 20}, "image"),
        (silent, {"log_stall": 20}, "hang"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@of_each_kind
async def test_each_limit_ends_the_job(
    kind: Kind, state: Callable[[Staged], None], limits: dict[str, Any], category: str
) -> None:
    async with staged(kind, since=0.0) as training:
        state(training)
        outcome = await training.follow(Options(limits=Limits(**limits)))
        assert 20.0 <= training.decided_after <= 20.2
        assert cause(outcome)["category"] == category
        assert f"{next(iter(limits))}_timeout" in str(outcome.cause)
        assert outcome.released
        assert not training.exists


@of_each_kind
async def test_partially_scheduled_job_is_released_after_a_warning(kind: Kind) -> None:
    async with staged(kind, since=0.0) as training:
        training.condition("Created")
        training.pod(0, limits={"nvidia.com/gpu": "8"}, since=0.0)
        training.pod(1, "Pending", node="", since=0.0)
        outcome = await training.follow(Options(limits=Limits(partial_start=20)))
        assert 20.0 <= training.decided_after <= 20.2
        assert cause(outcome)["category"] == "scheduling"
        assert "partial_start_timeout" in cause(outcome)["summary"]
        (warned,) = messages(training, "holds 8 GPUs in 1 pod, but")
        assert "has no node" in warned
        (released,) = messages(training, outcome.released)
        assert training.log.messages.index(warned) < training.log.messages.index(released)
        assert not training.exists


async def test_sensor_ignores_a_partial_allocation() -> None:
    async with staged() as training:
        training.pod(0)
        training.pod(1, "Pending", node="")
        await training.hand_over(60.0, Options(limits=Limits(partial_start=200), release=False))
        assert not messages(training, "in 1 pod, but")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("state", [queued, unscheduled, silent])
@pytest.mark.parametrize("seconds", [-1.0, 5.0], ids=["passed", "in 5 s"])
@of_each_kind
async def test_unfinished_job_is_deleted_at_its_deadline(
    kind: Kind, state: Callable[[Staged], None], seconds: float
) -> None:
    """It is absolute: the try that submitted the job may have set it long ago."""
    async with staged(kind) as training:
        state(training)
        outcome = await training.follow(Options(deadline=timing.epoch() + seconds))
        assert cause(outcome)["category"] == "timeout"
        assert training.decided_after == max(seconds, 0.0)
        assert outcome.kept is None
        assert not training.exists


async def test_success_before_a_passed_deadline_is_a_success() -> None:
    """Nobody followed the job for a while: it succeeded in time, and the deadline has passed since."""
    async with staged() as training:
        succeed(training)
        assert (await training.follow(Options(deadline=timing.epoch() - 1))).succeeded


@of_each_kind
async def test_worker_does_not_wait_for_pods_at_its_deadline(kind: Kind) -> None:
    """Airflow's alarm follows soon. It would interrupt the wait, and the cause would be lost."""
    async with staged(kind) as training:
        training.start(grace=20)
        outcome = await training.follow(Options(deadline=timing.epoch() - 1), shared=False)
        assert cause(outcome)["category"] == "timeout"
        assert "will be released" in outcome.released
        assert training.holding


class SlowLines(Lines):
    """A sink that needs time for each line, as on a loaded machine."""

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.advance(0.02)
        super().info(event, *args, **kw)


async def test_lines_missing_from_the_final_read_are_counted_in_one_line() -> None:
    """The deadline stops the final read; the result is found nevertheless."""
    async with staged(TRAINJOB) as training:
        training.log = SlowLines()
        training.start(*(f"line {number}" for number in range(20_000)), RESULT)
        training.end()
        outcome = await training.follow(Options(deadline=timing.epoch() - 1), shared=False)
        (warning,) = messages(training, "Logs are incomplete: ")
        assert (match := re.search(r"Missing: ([\d,]+) lines of train-node-0/node\.$", warning)), warning
        assert len(lines(training)) + int(match[1].replace(",", "")) == 20_001
        assert outcome.result == {"loss": 0.5}


async def test_queued_job_is_not_ended_by_other_clocks() -> None:
    async with staged() as training:
        queued(training)
        await training.hand_over(60.0, Options(limits=Limits(schedule=1, startup=1, log_stall=1, progress=1)))
        assert training.exists


async def test_log_stall_clock_starts_when_the_job_runs() -> None:
    async with staged() as training:
        queued(training)
        following = asyncio.ensure_future(training.follow(Options(limits=Limits(log_stall=15))))
        await asyncio.sleep(60)
        training.spec(**training.kind.form.suspension(False))
        training.start(since=0.0)
        training.after(14.0, training.line, "line 0")
        training.after(28.0, training.end)
        assert (await following).succeeded


async def test_job_that_ended_unseen_did_not_stall() -> None:
    """Its pod is silent because it has ended; the watches show that later."""
    async with staged() as training:
        training.start("line 0")
        following = asyncio.ensure_future(training.follow(Options(limits=Limits(log_stall=6))))
        await is_running(training)
        training.api.freeze("pods", training.kind.plural)
        training.after(4.0, training.end)
        training.after(12.0, training.api.thaw)
        assert (await following).succeeded


async def test_clock_of_a_deleted_pod_stops() -> None:
    """A Worker that found no node is scaled down. No watch event reports it: it is missing from the next list."""
    async with staged(roles=BOTH) as training:
        training.start(since=0.0)
        lost = training.pod(1, "Pending", role="Worker", node="", since=0.0)
        following = asyncio.ensure_future(training.hand_over(60.0, Options(limits=Limits(schedule=30))))
        await is_running(training)
        training.api.freeze("pods")
        training.api.remove("pods", lost)
        training.api.expire()
        training.api.cut()
        await following


async def test_reason_for_a_pending_job_is_logged() -> None:
    async with staged() as training:
        unscheduled(training)
        training.event("FailedScheduling", "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
                       about=training.pod_name())  # fmt: skip
        await training.hand_over(60.0, Options(limits=Limits(schedule=600)))
        (line,) = [one for one in messages(training, "is still Pending") if "Insufficient nvidia.com/gpu" in one]
        assert len(line.splitlines()[0]) < 200


async def test_reason_for_a_pending_job_names_the_nodes_that_it_avoids() -> None:
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("gpu-1", "gpu-2")]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": excluded}]}}
    async with staged() as training:
        training.condition("Created")
        pod = training.pod(0, "Pending", node="", since=0.0, affinity={"nodeAffinity": required})
        training.event("FailedScheduling", "0/2 nodes are available: 2 node(s) didn't match.", about=pod)
        await training.hand_over(60.0)
        (line,) = [one for one in messages(training, "is still Pending") if "avoid_failed_nodes" in one]
        assert "(avoid_failed_nodes): gpu-1, gpu-2." in line


# restarts


def crashed(training: Staged, times: int, *, code: int = 1, role: str = "", **spec: Any) -> None:
    """The container waits to run again after this many failures, each 2 s after its start."""
    end = {"exitCode": code, "reason": "Error", "startedAt": stamp(4.0), "finishedAt": stamp(2.0)}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "Back-off restarting failed container"}}
    training.pod(0, role=role, state=waiting, last={"terminated": end}, restarts=times - 1, **spec)
    training.line(KEY_ERROR, restart=times - 1, role=role, since=2.0)
    training.running()


@of_each_kind
async def test_restarts_are_counted(kind: Kind) -> None:
    """The container runs again and its log is still empty: the log of the previous run contains the cause."""
    async with staged(kind) as training:
        crashed(training, 1)
        end = training.api.pods[training.pod_name()]["status"]["containerStatuses"][0]["lastState"]
        training.pod(0, state={"running": {"startedAt": stamp()}}, last=end, restarts=1)
        outcome = await training.follow(Options(limits=Limits(max_restarts=0), logs="none"))
        assert "max_restarts" in cause(outcome)["summary"]
        assert KEY_ERROR in cause(outcome)["summary"]
        assert not training.exists


@of_each_kind
async def test_a_crash_loop_ends_the_job(kind: Kind) -> None:
    """The job remains Running. Each restart is reported with its reason."""
    async with staged(kind) as training:
        replica = kind.replica_name(training.role, 0)
        training.start()
        for number in range(1, 4):
            training.after(10.0 * number, crashed, training, number)
        outcome = await training.follow(Options(limits=Limits(crash_loop=3)))
        assert (outcome.phase, cause(outcome)["category"]) == ("Running", "user code")
        assert cause(outcome)["summary"] == (
            f"{replica} failed 3 times in a row, each within 10 minutes of its start (crash_loop_limit): "
            f"{KEY_ERROR} (exit code 1)"
        )
        assert 30.0 <= training.decided_after <= 31.0
        restarts = [line.partition(" Back-off")[0] for line in messages(training, "restarted")]
        assert restarts == [f"{replica} restarted ({n} time) after {KEY_ERROR}." for n in ("1st", "2nd")]
        warnings = [line for line in training.log.messages if "restarted" in line or line.startswith(f"{replica} fail")]
        assert warnings[-1].startswith(f"{replica} failed"), "the restarts come before the end"
        assert not training.exists


async def test_a_master_that_fails_while_its_worker_waits_is_a_crash_loop() -> None:
    """The Worker looks for its Master, whose name does not resolve between two runs, in an init container."""
    async with staged(roles=BOTH) as training:
        training.condition("Created")
        pod = training.pod(0, "Pending", role="Worker", state={"waiting": {"reason": "PodInitializing"}})
        waits = {"name": "init-pytorch", "restartCount": 0, "state": {"running": {"startedAt": stamp(60.0)}}}
        training.api.change("pods", pod, lambda pod: pod["status"].update(initContainerStatuses=[waits]))
        crashed(training, 1, role="Master")
        training.after(10.0, crashed, training, 2)
        outcome = await training.follow(Options(limits=Limits(crash_loop=2)))
        assert cause(outcome)["summary"].startswith("Master 0 failed 2 times in a row")


def recreated(training: Staged) -> None:
    """Under ExitCode the operator deletes pods that fail with 128 and above, so their containers never restart."""
    training.pod(0, "Failed", code=130)
    training.after(0.5, training.api.remove, "pods", training.pod_name())
    training.after(1.0, training.pod, 0)


@pytest.mark.parametrize("limits", [{"max_restarts": 2}, {"crash_loop": 3}], ids=str)
async def test_recreated_pods_count_as_restarts(limits: dict[str, Any]) -> None:
    async with staged() as training:
        training.start()
        for number in range(3):
            training.after(10.0 * (number + 1), recreated, training)
        outcome = await training.follow(Options(limits=Limits(**limits), logs="none"))
        assert next(iter(limits)) in str(outcome.cause)
        assert not training.exists
        for line in (restarts := messages(training, " restarted (")):
            assert re.fullmatch(r"Worker 0 restarted \(.*\) after exit code 130, SIGINT\.", line)
        assert len(restarts) == 3
        if "crash_loop" in limits:
            named = "Worker 0 failed 3 times in a row, each within 10 minutes of its start (crash_loop_limit): "
            assert cause(outcome)["summary"] == f"{named}exit code 130, SIGINT and wrote no output"


@of_each_kind
async def test_next_process_counts_what_restart_count_proves(kind: Kind) -> None:
    async with staged(kind) as training:
        training.start()
        for number in range(1, 4):
            training.after(10.0 * number, crashed, training, number)
        options = Options(limits=Limits(crash_loop=3))
        handover = await training.hand_over(15.0, options)
        outcome = await training.follow(options, handover)
        assert "failed 3 times in a row" in cause(outcome)["summary"]
        assert [len(messages(training, f"({n} time)")) for n in ("1st", "2nd")] == [1, 1]


# changes by others


@of_each_kind
async def test_job_deleted_by_somebody_else_is_gone(kind: Kind) -> None:
    async with staged(kind) as training:
        training.start()
        training.after(5.0, training.api.remove, kind.plural, NAME)
        outcome = await training.follow()
        assert (outcome.phase, cause(outcome)["category"]) == ("Gone", "infrastructure")
        assert f"{training.ref} is gone." in outcome.released


async def test_job_deleted_before_it_was_observed_is_gone() -> None:
    async with staged() as training:
        training.api.remove(training.kind.plural, NAME)
        assert (await training.follow()).phase == "Gone"


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (3, "Failed")])
async def test_outcome_is_known_with_a_ttl_of_zero(code: int, phase: str) -> None:
    """The operator deletes the job as it ends (recording 12b): the DELETED event contains its last state."""

    def end() -> None:
        training.end(code)
        training.api.remove(training.kind.plural, NAME)

    async with staged() as training:
        training.start("line 0")
        training.after(5.0, end)
        outcome = await training.follow()
        assert (outcome.phase, outcome.succeeded) == (phase, code == 0)


async def test_a_job_that_lost_its_label_is_not_gone() -> None:
    """A watch with a selector reports the removal of the label as a deletion."""
    async with staged() as training:
        training.start()
        following = asyncio.ensure_future(training.follow(Options(deadline=timing.epoch() + 60)))
        await is_running(training)
        training.api.change(training.kind.plural, NAME, lambda job: job["metadata"]["labels"].pop(DEPLOYMENT_LABEL))
        assert cause(await following)["category"] == "timeout", "it was followed on"
        assert training.decided_after == 60.0


@of_each_kind
async def test_new_job_of_the_same_name_is_not_followed(kind: Kind) -> None:
    """The next life of the task deletes the job and creates it again: the first is gone, and the second continues."""
    async with staged(kind) as training:
        training.start()
        following = asyncio.ensure_future(training.follow())
        await is_running(training)
        training.api.remove(kind.plural, NAME)
        after = Staged(training.api, kind, submission="after")
        after.start()
        assert (await following).phase == "Gone"
        assert after.job["metadata"]["uid"] == after.ref.uid
        assert after.holding


def adopt(training: Staged) -> None:
    """Another try adopts the job."""
    owner = Owner.of(training.job)
    assert isinstance(owner, Owner)
    annotations = {OWNER_ANNOTATION: replace(owner, try_number=2, ti_id="ti-2").annotation()}
    training.api.change(training.kind.plural, NAME, lambda job: job["metadata"]["annotations"].update(annotations))


async def test_follower_stops_when_another_try_adopts_the_job() -> None:
    async with staged() as training:
        training.start()
        training.after(5.0, adopt, training)
        outcome = await training.follow()
        assert outcome.superseded
        assert not outcome.released
        assert not training.api.writes()


async def test_lagging_watch_does_not_give_up_the_job() -> None:
    """The watch shows the previous try as the owner; the API server has the current one."""
    async with staged() as training:
        training.start()
        adopt(training)
        before = asyncio.ensure_future(training.follow())
        await is_running(training)
        training.api.freeze(training.kind.plural)
        owner = Owner.of(training.job)
        assert isinstance(owner, Owner)
        training.ref = replace(training.ref, owner="ti-2")
        await training.hand_over(0.5)
        before.cancel()


@pytest.mark.parametrize("end", [succeed, fail])
async def test_pods_observed_late_have_logs_and_a_cause(end: Callable[[Staged], None]) -> None:
    """Jobs and pods come from two watches, in any order."""
    async with staged() as training:
        training.condition("Created")
        following = asyncio.ensure_future(training.follow())
        await until(lambda: training.api.watched("pods"))
        training.api.freeze("pods")
        end(training)
        training.after(2.0, training.api.thaw)
        outcome = await following
        assert messages(training, "] line 0" if end is succeed else "] broken")
        assert outcome.succeeded or cause(outcome)["category"] == "user code"


# the API server


async def test_403_is_tolerated_for_a_job_that_was_followed_before() -> None:
    """An API server that restarts may reject requests until it has loaded its RBAC rules."""
    async with staged() as training:
        training.start()
        training.api.fail("GET", "resourceVersion|limit", 403, math.inf)
        training.after(60.0, training.api.clear_failures)
        training.after(90.0, training.end)
        assert (await training.follow()).succeeded


async def test_403_ends_a_job_that_was_just_created() -> None:
    """A missing right is detected immediately, and holds no GPUs for ten minutes."""

    async def created(api: object, **_: Any) -> Submitted:
        return Submitted(training.ref, training.job, created=True)

    async with staged() as training, training.owner() as owner:
        training.start()
        await owner.submit(Call(created))
        training.api.fail("GET", "resourceVersion|limit", 403, math.inf)
        began = timing.now()
        with pytest.raises(AccessError, match="no right to watch"):
            await owner.follow(training.ref, Options())
        assert timing.now() - began < 30.0


@pytest.mark.parametrize(("event", "deleted"), [(Event.ERROR, False), (Event.NO_RIGHT, True)])
async def test_error_of_the_last_try_deletes_a_followed_job_only_without_the_right_to_watch(
    event: Event, deleted: bool
) -> None:
    """The job was created just now, but it has been followed since: its program may already have done something."""

    async def created(api: object, **_: Any) -> Submitted:
        return Submitted(training.ref, training.job, created=True)

    async with staged() as training, training.owner(shared=False) as owner:
        training.start()
        await owner.submit(Call(created))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await owner.follow(training.ref, Options())
        await owner.interrupted(event)
        assert training.exists is not deleted


async def test_401_to_a_read_does_not_end_a_job_that_was_just_created() -> None:
    """The create was accepted with these credentials. The watch shows whether they are refused for good."""

    async def created(api: object, **_: Any) -> Submitted:
        return Submitted(training.ref, training.job, created=True)

    def without_jobs(request: Request, true: Response | None) -> Response:
        assert true is not None
        return Response(true.status, {**true.body, "items": []})

    async with staged() as training, training.owner() as owner:
        training.start()
        await owner.submit(Call(created))
        training.api.replace("GET", "/pytorchjobs.*limit", without_jobs)
        training.api.fail("GET", f"/pytorchjobs/{NAME}", 401, 2)  # the client repeats the request once
        training.after(30.0, training.end)
        outcome = await owner.follow(training.ref, Options())
        assert isinstance(outcome, Outcome)
        assert outcome.succeeded
        assert training.api.refused == 2


async def test_client_that_cannot_be_renewed_for_a_moment_does_not_end_a_job_that_was_just_created() -> None:
    """The token has expired, and the exec plugin that renews it is throttled. No right is missing."""
    builds = 0

    async def created(api: object, **_: Any) -> Submitted:
        return Submitted(training.ref, training.job, created=True)

    async def build() -> AuthClient:
        nonlocal builds
        builds += 1
        if builds == 2:
            raise AccessError("throttled")
        return await make_client(training.url)

    async with staged() as training, contextlib.AsyncExitStack() as stack:
        training.start()
        api = Api(build)
        stack.push_async_callback(api.close)
        owner = await stack.enter_async_context(owner_in(api, host_of(), training.log))
        await owner.submit(Call(created))
        training.api.fail("GET", "watch=true", 401)
        training.after(30.0, training.end)
        outcome = await owner.follow(training.ref, Options())
        assert isinstance(outcome, Outcome)
        assert outcome.succeeded
        assert builds == 2


async def test_follower_continues_after_an_outage_of_the_api_server() -> None:
    async with staged(TRAINJOB) as training:
        training.start()
        training.prints((f"line {number}" for number in range(20)), every=3.0)
        training.after(10.0, setattr, training.api, "away", True)
        training.after(50.0, setattr, training.api, "away", False)
        training.after(60.0, training.end)
        outcome = await training.follow()
        assert outcome.succeeded
        assert outcome.released
        assert lines(training) == [str(number) for number in range(20)]


# kills


async def killed(training: Staged, *, before: bool = False, **options: Any) -> Outcome:
    """Follow the job in a worker that is asked to stop when it runs, or before it follows."""
    stop = StopSignal()
    if before:
        stop.request("The task was killed")
    following = asyncio.ensure_future(training.follow(Options(**options), stop=stop, shared=False))
    if not before:
        await is_running(training)
        stop.request("The task was killed")
    return await following


@of_each_kind
async def test_kill_deletes_the_job_and_does_not_wait_for_pods(kind: Kind) -> None:
    async with staged(kind) as training:
        training.start("line 0", grace=20)
        outcome = await killed(training)
        assert cause(outcome)["category"] == "killed"
        assert cause(outcome)["summary"] == f"The task was killed (failed): {training.ref} is released."
        assert cause(outcome)["detail"] == f"{training.ref} deleted. Its pods are being terminated."
        assert training.holding
        assert training.exists is not kind.behavior.pods_outlive_job, "in the foreground, the job is gone last"


async def test_kill_before_the_start_releases_the_job() -> None:
    async with staged() as training:
        training.start()
        outcome = await killed(training, before=True)
        assert cause(outcome)["detail"] == f"{training.ref} deleted. Its pods are being terminated."
        assert not outcome.release_error
        assert not training.exists


@of_each_kind
async def test_kill_keeps_an_ended_job_for_the_next_try(kind: Kind) -> None:
    """The logs of the job are still read when the worker hands over."""
    async with staged(kind) as training:
        succeed(training)
        training.pod(1)
        outcome = await killed(training, before=True)
        assert cause(outcome)["category"] == "killed"
        assert outcome.kept is None
        assert training.exists
        assert not training.holding


async def test_kill_stops_a_request_that_hangs() -> None:
    """A kill has only a few seconds; an API server that doesn't answer must not use them up.

    The job has ended: its status is the only proof of how, so it is kept for the next try.
    """
    async with staged() as training:
        fail(training)
        training.pod(1)
        training.api.pause("before GET .*/events")
        stop = StopSignal()
        following = asyncio.ensure_future(training.follow(stop=stop, shared=False))
        await training.api.paused.wait()
        stop.request("The task was killed")
        outcome = await following
        assert cause(outcome)["summary"].startswith(f"{training.ref} had ended before. It is kept")
        assert training.exists
        assert not training.holding


@pytest.mark.parametrize(("event", "kept"), [(Event.DEADLINE, True), (Event.INTERRUPT, False)])
async def test_interrupted_worker_frees_the_pods_of_a_job_that_has_ended(event: Event, kept: bool) -> None:
    """A Worker has outlived its Master. A worker process has seconds after Airflow's timeout, and after Ctrl-C."""
    async with staged(roles=BOTH) as training, training.owner(shared=False) as owner:
        succeed(training)
        assert training.holding
        owner.job.ref = training.ref
        await owner.interrupted(event)
        assert not training.holding
        assert training.exists is kept


async def test_cancelled_follower_changes_nothing() -> None:
    """A triggerer that stops doesn't end a training."""
    async with staged() as training:
        training.start()
        following = asyncio.ensure_future(training.follow())
        await is_running(training)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert not training.api.writes()


async def test_failed_release_keeps_the_cause_of_the_job() -> None:
    """A Worker continues to run with its GPU and can't be deleted."""
    async with staged(roles=BOTH) as training:
        fail(training)
        training.api.fail("DELETE", "/pods/", 403, math.inf)
        outcome = await training.follow()
        assert outcome.kept == training.ref.to_dict(), "the worker tries again when Airflow has stored the outcome"
        assert "exit code 3" in cause(outcome)["summary"]
        assert "could not be released. To delete it, run: kubectl" in outcome.release_error
        assert outcome.release_error in training.log.messages


def test_options_are_restored_from_json() -> None:
    options = Options(limits=Limits(queue=3), deadline=12.5, conditions=("Running",), logs={"Worker": [0]})
    assert Options.from_dict(json.loads(json.dumps(options.to_dict()))) == options
