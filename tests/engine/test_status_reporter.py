"""The status of a job is taken in the event loop, and made into a document in a thread."""

from __future__ import annotations

import json
import time
from typing import Any, ClassVar

import pytest

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.identity.names import CODE_ANNOTATION, JobRef
from airflow_provider_ktrain.core.reporting.status_document import MAX_LINE_CHARS, MAX_TEXT_CHARS
from airflow_provider_ktrain.core.state.accelerators import GPU, Amounts
from airflow_provider_ktrain.core.state.limits import Clock, Limit
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.state.steps.reported_steps import ReportedSteps
from airflow_provider_ktrain.core.state.steps.training_metrics import TrainingMetrics
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.disruptions import DisruptionReporter
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.follow.status_reporter import StatusReporter
from airflow_provider_ktrain.engine.host import Host
from tests.engine.staged import Memory, staged
from tests.engine.tasks import Lines
from tests.factories import replica_pod

REPLICAS = 1000
SECRET = " token=hunter2-is-mine "
LINE = f"{'x' * (MAX_LINE_CHARS - 16)}{SECRET}{'x' * 80}"  # the end of what the page shows is inside the secret
MAX_SLICE_SECONDS = 0.01  # of the event loop; taking the status needs 2 ms on a slow machine


class Output:
    """What a reporter needs of the job's output."""

    def __init__(self) -> None:
        self.training_metrics = TrainingMetrics()
        self.evidence = self

    def newest_lines(self) -> dict[str, str]:
        return {f"train-worker-{index}": LINE for index in range(REPLICAS)}


class Queue:
    status = None


class NotStarting:
    notice = ""
    limit = None


def pod(index: int, phase: str) -> dict[str, Any]:
    container = {"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": 8}}}
    state = {"running": {"startedAt": "2026-11-22T10:00:06Z"}}
    return replica_pod(
        "worker", index, meta={"uid": str(index), "creationTimestamp": "2026-11-22T10:00:00Z"},
        spec={"nodeName": f"node-{index // 8}", "containers": [container]}, phase=phase,
        startTime="2026-11-22T10:00:05Z", containerStatuses=[{"name": "pytorch", "restartCount": 0, "state": state}],
    )  # fmt: skip


def reporter_of_a_large_job(sink: Any = None) -> tuple[StatusReporter, JobState, TrainingMetrics]:
    state = JobState(JobRef("PyTorchJob", "v1", "default", "train", "u"), Handover())
    state.job = {"kind": "PyTorchJob", "metadata": {"name": "train"}, "spec": {}}
    update(state, "Running")
    state.enter(Phase.RUNNING)
    output: Any = Output()
    queue: Any = Queue()
    for step in range(400):
        line = json.dumps({"step": step, **{f"metric-{number}": step / 7 for number in range(32)}})
        output.training_metrics.read_line("Worker 0", f"KTRAIN_METRIC {line}", float(step))
    startup: Any = NotStarting()
    clocks = [Clock(Limit.PROGRESS, 200.0, 60.0), Clock(Limit.PROGRESS, 160.0, 60.0)]
    api: Any = None
    context = FollowContext(api, state, Lines(), host=Host(status_sink=sink, refresh_seconds=lambda: 10.0))
    return (
        StatusReporter(context, output, queue, DisruptionReporter(context), startup, lambda: clocks),
        state,
        output.training_metrics,
    )


def update(state: JobState, phase: str) -> None:
    state.pods.update({str(index): pod(index, phase) for index in range(REPLICAS)}, (), timing.utc_now())


async def test_status_of_1000_replicas_takes_no_long_slice_of_the_event_loop() -> None:
    reporter, _, _ = reporter_of_a_large_job()
    slices = []
    for _ in range(5):
        began = time.thread_time()
        reporter.take()
        slices.append(time.thread_time() - began)
    assert min(slices) < MAX_SLICE_SECONDS


async def test_document_shows_the_moment_at_which_the_status_was_taken() -> None:
    reporter, state, metrics = reporter_of_a_large_job()
    make = reporter.take()
    before = make()
    update(state, "Failed")
    state.enter(Phase.FAILED)
    metrics.read_line("Worker 0", 'KTRAIN_METRIC {"step": 1000, "metric-1": 0.5}', 500.0)
    assert make() == before
    assert before["replicas"]["states"] == {"Running": REPLICAS}
    assert before["usage"]["gpus"] == 8 * REPLICAS
    assert before["limits"] == [{"name": "progress_timeout", "due": 160.0, "seconds": 60.0}]
    after = reporter.take()()
    assert (after["phase"], after["replicas"]["states"]) == ("Failed", {"Failed": REPLICAS})
    assert after["metrics"]["metric-1"]["step"] == 1000


async def test_secret_is_masked_before_a_text_is_cut() -> None:
    """A part of it would not be recognized."""
    reporter, _, _ = reporter_of_a_large_job()
    cut = f"{'x' * (MAX_TEXT_CHARS - 16)}{SECRET}"
    status = reporter.take(Cause(Category.USER_CODE, cut, detail=f"{SECRET}{'x' * (3 * MAX_TEXT_CHARS - 10)}"))()
    assert status["last_lines"]
    assert "hunter2" not in json.dumps(status)
    assert "is-mine" not in json.dumps(status)


async def test_status_has_the_hash_of_the_code() -> None:
    reporter, state, _ = reporter_of_a_large_job()
    assert "code" not in reporter.take()()["job"]
    state.job = {**(state.job or {}), "metadata": {"annotations": {CODE_ANNOTATION: "c0de"}}}
    assert reporter.take()()["job"]["code"] == "c0de"


async def test_gpu_time_has_what_the_end_of_the_try_reports() -> None:
    """The time in a queue, during which there are no pods, and the steps that an earlier try had trained."""
    reporter, state, metrics = reporter_of_a_large_job()
    metrics.steps = ReportedSteps(before=99)
    for step in (90, 95, 101):
        metrics.steps.record(step, 1000.0 + step)
    state.requested_by_workload = Amounts({GPU: 16})
    state.metrics["seconds.queued"] = 100.0
    status = reporter.take()()
    assert status["requested_gpus"] == 16
    assert status["usage"]["queued"] == 16 * 100 + 8 * REPLICAS * 5
    assert status["usage"]["repeated_steps"] == 10
    assert 0 < status["usage"]["repeated"] <= status["usage"]["held"]


async def test_status_is_offered_again_after_the_seconds_of_the_host() -> None:
    class Sink:
        offers: ClassVar[list[bool]] = []

        def offer(self, build: Any, *, urgent: bool) -> None:
            self.offers.append(urgent)

    reporter, _, _ = reporter_of_a_large_job(Sink())
    await reporter.observe()
    assert reporter.due is not None
    assert 9.0 < reporter.due - timing.now() <= 10.0
    await reporter.observe()
    assert Sink.offers == [True], "nothing has changed"


@pytest.mark.virtual_time
@pytest.mark.parametrize(("node", "minutes"), [("node-1", 5), ("", 0)], ids=["it starts", "it waits for a node"])
async def test_training_whose_pods_hold_gpus_has_new_statuses(node: str, minutes: int) -> None:
    class Counting(Memory):
        offers = 0

        def offer(self, build: object, *, urgent: bool) -> None:
            self.offers += not urgent

    async with staged() as training:
        training.pod(0, "Pending", node=node)
        await training.hand_over(330.0, sink=(sink := Counting()))
        assert sink.offers >= minutes
        assert bool(sink.offers) is bool(minutes), "nothing changes while it holds none"
