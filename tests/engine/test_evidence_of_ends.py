"""What an end is decided on, where the review of the owner found that it isn't what the rules assume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.end_rules import Action, Event, Mode, Ownership, Situation, Successor, decide
from airflow_provider_ktrain.core.formats import STATUS_XCOM
from airflow_provider_ktrain.core.identity.names import (
    OWNER_ANNOTATION,
    SUSPENDED_ANNOTATION,
    JobRef,
    OnFinishAction,
    Owner,
)
from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.kinds.conditions import INCOMPLETE_ANNOTATION
from airflow_provider_ktrain.core.reporting.conclusion import Conclusion
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.state.status import Seen
from airflow_provider_ktrain.engine.api.job_calls import JobChanged, Observed, read_training
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.release import DecidedEnd, HurriedKill, release
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted, find_own
from airflow_provider_ktrain.status_writer import WORKER, TaskStatusSink
from tests.apiserver import Lost, Request, Response, connected, stamp
from tests.engine.staged import NAME, Memory, Staged, staged
from tests.engine.tasks import host_of, owner_in
from tests.until import until

pytestmark = pytest.mark.virtual_time


class Ti:
    """A worker's task instance, whose XComs the processes of one try share."""

    dag_id, run_id, task_id, map_index, try_number = "dag", "run", "task", -1, 1

    def __init__(self, xcoms: dict[str, Any]) -> None:
        self.xcoms = xcoms

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcoms[key] = value

    def xcom_pull(self, task_ids: str, key: str, map_indexes: int) -> Any:
        return self.xcoms.get(key)


def conclusion(ref: JobRef) -> dict[str, Any]:
    cause = Cause(Category.HANG, "no log line for 60 s")
    return Conclusion(ref.uid, ref.owner, ref.submission, cause, event="limit").to_dict()


async def test_first_status_of_the_next_process_does_not_replace_the_stored_cause() -> None:
    """A triggerer dies after a limit's release. The next one could write a status before it has read anything."""
    async with staged() as training:
        xcoms = dict[str, Any]()
        assert await TaskStatusSink(Ti(xcoms), WORKER).store_conclusion(conclusion(training.ref))
        training.api.remove(training.kind.plural, NAME)
        training.api.slow("before GET", 3.0)  # a status takes one second
        outcome = await training.follow(sink=TaskStatusSink(Ti(xcoms), WORKER), shared=False)
        assert (outcome.cause or {})["category"] == "hang"


async def test_status_of_a_running_job_does_not_replace_the_stored_cause() -> None:
    """A triggerer dies while the API server works on its deletion. The next one still sees the job running."""
    async with staged() as training:
        xcoms = dict[str, Any]()
        assert await TaskStatusSink(Ti(xcoms), WORKER).store_conclusion(conclusion(training.ref))
        training.start("trains")
        training.after(30.0, training.api.remove, training.kind.plural, NAME)
        outcome = await training.follow(sink=TaskStatusSink(Ti(xcoms), WORKER), shared=False)
        assert xcoms[STATUS_XCOM]["phases"], "a status was written meanwhile"
        assert (outcome.cause or {})["category"] == "hang"


async def test_stored_cause_is_read_again_after_a_failed_read() -> None:
    """None of `stored_conclusion` also means that Airflow didn't answer within 10 s: that proves nothing."""
    async with staged() as training:
        training.memory = AnswersAtTheSecondTime()
        training.start()
        training.memory.stored = conclusion(training.ref)
        training.api.remove(training.kind.plural, NAME)
        outcome = await training.follow()
        assert (outcome.cause or {})["category"] == "hang"


async def test_silence_of_an_ended_primary_does_not_end_replicas_that_write() -> None:
    """Node 0 has ended, and node 1, which is not followed, writes a line a second until it succeeds."""
    async with staged(TRAINJOB) as training:
        training.start("begun")
        training.pod(1)
        training.prints((f"line {number}" for number in range(45)), every=1.0, index=1)
        training.after(2.0, training.pod, 0, "Succeeded")
        training.after(45.0, training.pod, 1, "Succeeded")
        training.after(46.0, training.ended)
        outcome = await training.follow(Options(logs="primary", limits=Limits(log_stall=5)))
        assert outcome.succeeded, outcome.cause


async def test_sensor_reports_the_cause_of_a_job_that_is_being_deleted() -> None:
    """The job has a deletionTimestamp for some seconds before it is gone."""
    async with staged() as training:
        training.start(grace=10)
        training.ref = replace(training.ref, owner="", deployment="", submission="")
        training.after(5.0, training.api.change, training.kind.plural, NAME, being_deleted)
        training.after(15.0, training.api.remove, training.kind.plural, NAME)
        outcome = await training.follow(Options(release=False, conditions=("Succeeded",)))
        assert not outcome.superseded, "a sensor's job has no tries"
        assert (outcome.cause or {})["category"] == "infrastructure"


def being_deleted(job: dict[str, Any]) -> None:
    job["metadata"].update(deletionTimestamp=stamp())


@pytest.mark.parametrize("event", [Event.STARTUP_RULE, Event.BEING_DELETED])
def test_sensor_does_not_let_go_of_a_job_without_a_cause(event: Event) -> None:
    """`Following` notices both for a sensor, too. LET_GO fails the sensor with 'is Pending, not Succeeded'."""
    assert decide(Situation(event, owner=Ownership.FOREIGN)).action is not Action.LET_GO


async def test_success_of_a_job_that_lost_its_owner_annotation_is_a_success() -> None:
    """A missing annotation doesn't show that another try owns the job, whose uid is the one that was followed."""

    def disown(job: dict[str, Any]) -> None:
        del job["metadata"]["annotations"][OWNER_ANNOTATION]

    async with staged() as training:
        training.start()
        training.after(5.0, training.api.change, training.kind.plural, NAME, disown)
        training.after(10.0, training.end)
        outcome = await training.follow()
        assert (outcome.succeeded, outcome.superseded) == (True, False)


@pytest.mark.parametrize("event", [Event.DEADLINE, Event.FINAL_ERROR, Event.INTERRUPT])
async def test_process_that_ends_reads_again_after_a_failed_read(event: Event) -> None:
    """No retry is left, and the process has seconds: one lost connection must not leak the job's GPUs."""

    def lose(request: Request, answer: Response | None) -> Response:
        raise Lost("connection reset")

    async with staged() as training, training.owner(shared=False) as owner:
        training.start()
        owner.job.take(await owner.job.api(), Submitted(training.ref, training.job, created=False))
        training.api.replace("GET", "", lose)
        await owner.interrupted(event)
        assert not training.holding, str(training.log)
        assert not training.exists


@pytest.mark.parametrize("successor", [Successor.NEXT_TRY, Successor.NOBODY])
async def test_nobody_comes_after_an_error_that_fails_the_task_for_good(successor: Successor) -> None:
    """Airflow doesn't retry after it, although retries are left: the API server is asked for longer than 5 s."""

    def lose(request: Request, answer: Response | None) -> Response:
        raise Lost("connection reset")

    async with staged() as training, training.owner(shared=False, successor=successor) as owner:
        training.start()
        owner.job.take(await owner.job.api(), Submitted(training.ref, training.job, created=False))
        training.api.replace("GET", "", lose, 10**6)
        training.after(10.0, training.api.clear_failures)
        await owner.interrupted(Event.FINAL_ERROR)
        assert not training.exists, str(training.log)


def test_final_error_without_a_read_names_the_command() -> None:
    """A retry is left by its number, but Airflow doesn't retry after this error."""
    rule = decide(Situation(Event.FINAL_ERROR, Seen.NOTHING, successor=Successor.NEXT_TRY, may_wait=False))
    assert "{command}" in rule.text


async def test_success_during_a_suspension_that_an_earlier_process_began() -> None:
    """The job has succeeded by the time at which the suspension of the killed triggerer is completed."""
    async with staged() as training:
        training.pod(0)
        training.running()
        training.memory.stored = conclusion(training.ref)
        annotations = {SUSPENDED_ANNOTATION: training.ref.owner}
        training.api.change("pytorchjobs", NAME, lambda job: job["metadata"]["annotations"].update(annotations))

        def on_request(line: str) -> None:
            if line.startswith("PATCH") and not ended:
                ended.append(training.pod(0, "Succeeded"))
                training.ended()

        ended: list[str] = []
        training.api.on_request = on_request
        outcome = await training.follow(Options(on_finish_action=OnFinishAction.KEEP_JOB, drain_timeout=0.5))
        assert outcome.succeeded, outcome.cause
        assert "hang" not in str(training.log)


class AnswersAtTheSecondTime(Memory):
    """Airflow doesn't answer the first read of the conclusion."""

    reads = 0

    async def stored_conclusion(self) -> Mapping[str, Any] | None:
        self.reads += 1
        return self.stored if self.reads > 1 else None


@pytest.mark.parametrize(
    ("unread", "category"), [("Airflow", "hang"), ("API server", "hang"), ("nothing stored", "unknown")]
)
async def test_suspension_that_an_earlier_process_began_is_completed(unread: str, category: str) -> None:
    """Nobody resumes the job, so the next process would follow it forever."""
    async with staged() as training:
        training.memory = AnswersAtTheSecondTime() if unread == "Airflow" else Memory()
        training.memory.stored = {} if unread == "nothing stored" else conclusion(training.ref)
        if unread == "API server":
            training.api.fail("GET", "/pytorchjobs/train", 500)
        annotations = {SUSPENDED_ANNOTATION: training.ref.owner}
        training.api.change("pytorchjobs", NAME, lambda job: job["metadata"]["annotations"].update(annotations))
        training.spec(**training.kind.form.suspension(True))
        training.condition("Suspended")
        async with asyncio.timeout(60):
            outcome = await training.follow(Options(on_finish_action=OnFinishAction.KEEP_JOB, drain_timeout=0.5))
        assert not outcome.succeeded
        assert (outcome.cause or {})["category"] == category
        assert not [line for line in training.api.writes() if line.startswith("DELETE")]


@pytest.mark.parametrize("action", [OnFinishAction.DELETE_JOB, OnFinishAction.KEEP_JOB])
async def test_limit_is_the_cause_if_the_response_to_its_release_is_lost(action: OnFinishAction) -> None:
    """`airflow dags test` and `ktrain run` store no conclusion: what this process has done, it knows itself."""
    async with staged() as training:
        training.condition("Created")
        training.pod(0, "Pending", since=40.0)
        training.api.pause("after (DELETE|PATCH) .*/pytorchjobs/")
        host = Host(seconds=3.5)
        async with connected(training.url) as api, owner_in(api, host, training.log) as owner:
            options = Options(limits=Limits(startup=30.0), on_finish_action=action, drain_timeout=0.5)
            following = asyncio.ensure_future(owner.follow(training.ref, options))
            await training.api.paused.wait()
            training.api.pause("")
            training.api.away = True
            training.api.away = False
            if action is OnFinishAction.KEEP_JOB:
                training.api.remove("pods", f"{NAME}-worker-0")  # as the operator does
            async with asyncio.timeout(120):
                outcome = await following
        assert isinstance(outcome, Outcome)
        assert "startup_timeout" in (outcome.cause or {})["summary"]
        assert not outcome.release_error


async def test_job_that_was_resumed_after_a_suspension_is_followed() -> None:
    """A user has resumed it, and the annotation is left: no cause is stored, and it trains."""
    async with staged() as training:
        annotations = {SUSPENDED_ANNOTATION: training.ref.owner}
        training.api.change("pytorchjobs", NAME, lambda job: job["metadata"]["annotations"].update(annotations))
        training.pod(0)
        training.running()
        following = asyncio.ensure_future(training.follow(Options(drain_timeout=0.5)))
        await until(lambda: " is Running" in str(training.log))
        await until(lambda: any("/pytorchjobs/train" in line for line in training.api.requests))
        assert training.api.writes() == []
        training.pod(0, "Succeeded")
        training.ended()
        assert (await following).succeeded


async def test_job_that_somebody_else_suspends_is_followed_to_its_end() -> None:
    """A user or a queue may suspend a running job: nothing is changed, and it succeeds after it was resumed."""
    async with staged() as training:
        pod = training.pod(0)
        training.running()
        training.api.change(training.kind.plural, NAME, lambda job: job["status"].update(startTime=stamp(50.0)))
        following = asyncio.ensure_future(training.follow(Options(drain_timeout=0.5)))
        await until(lambda: " is Running" in str(training.log))
        training.spec(**training.kind.form.suspension(True))
        training.api.remove("pods", pod)
        training.condition("Suspended")
        await until(lambda: " is Suspended" in str(training.log))
        training.spec(**training.kind.form.suspension(False))
        training.pod(0)
        training.running()
        await until(lambda: str(training.log).count(" is Running") == 2)
        assert training.api.writes() == []
        assert not following.done()
        training.pod(0, "Succeeded")
        training.ended()
        outcome = await following
    assert outcome.succeeded
    assert not outcome.cause


def with_broken_diagnosis(training: Staged) -> None:
    """The conditions of this node stand for any error of the diagnosis, which alone reads nodes of an ended job."""
    training.api.put("nodes", {"metadata": {"name": "node-1"}, "spec": {}, "status": {"conditions": ["none"]}})
    training.pod(0, "Failed", state={"terminated": {"exitCode": 137, "finishedAt": stamp()}})


@pytest.mark.parametrize(("how", "category"), [("Failed", "unknown"), ("Running", "timeout")])
async def test_error_of_the_diagnosis_does_not_keep_a_job_from_its_end(how: str, category: str) -> None:
    """A failure is taken as the end, and a job whose limit has passed is released with its category."""
    async with staged() as training:
        with_broken_diagnosis(training)
        training.pod(1, node="node-2")
        training.condition(how)
        async with asyncio.timeout(60):
            outcome = await training.follow(Options(drain_timeout=0.5, deadline=time.time()))
        assert (outcome.phase, outcome.succeeded) == (how, False)
        cause = outcome.cause or {}
        known = "is Failed" if how == "Failed" else "is ended by execution_timeout"
        assert cause["category"] == category
        assert cause["summary"].startswith(f"PyTorchJob ns/train {known}; the cause is unknown")
        assert str(training.log).count("Traceback") == 1
        assert "can't be followed" not in str(training.log)
        assert outcome.released or outcome.kept


async def test_limit_keeps_its_category_without_a_diagnosis() -> None:
    """So a `retry_policy` is obeyed."""
    async with staged() as training:
        with_broken_diagnosis(training)
        training.condition("Created")
        training.pod(1, "Pending", since=40.0)
        async with asyncio.timeout(120):
            outcome = await training.follow(Options(limits=Limits(startup=30.0), drain_timeout=0.5))
        assert "The diagnosis has failed. Please report this." in str(training.log)
        assert (outcome.succeeded, (outcome.cause or {})["category"]) == (False, "infrastructure")


async def test_success_is_taken_without_a_diagnosis() -> None:
    async with staged() as training:
        with_broken_diagnosis(training)
        training.ended("Succeeded")
        assert (await training.follow(Options(drain_timeout=0.5))).succeeded


def another_try(training: Staged) -> None:
    """A later try adopts the job."""

    def adopt(job: dict[str, Any]) -> None:
        annotations = job["metadata"]["annotations"]
        owner = Owner.of(job)
        assert isinstance(owner, Owner)
        annotations[OWNER_ANNOTATION] = replace(owner, try_number=2, ti_id="ti-2").annotation()

    training.api.change(training.kind.plural, NAME, adopt)


@pytest.mark.parametrize("in_seconds", [False, True], ids=["with time", "in seconds"])
async def test_queued_job_that_another_try_has_adopted_is_not_paused(in_seconds: bool) -> None:
    """The Workload doesn't change when a try adopts the job: the mark on the job is what is fenced."""
    async with staged() as training, connected(training.url) as api:
        training.pod(0)
        training.running()
        training.workload(Admitted=("True", "Admitted", ""))
        read = await read_training(api, training.ref)
        assert read.job is not ABSENT
        (workload,) = training.api.objects["workloads"].values()
        another_try(training)
        kill = HurriedKill(Mode.SUSPEND, Observed(read.job, workload))
        late = release(api, training.ref, kill, timeout=60.0)
        with pytest.raises(JobChanged):
            await (late if in_seconds else release(api, training.ref, DecidedEnd(Mode.SUSPEND, read)))
        late.close()
        assert [one["spec"]["active"] for one in training.api.objects["workloads"].values()] == [True]
        (job,) = training.api.objects[training.kind.plural].values()
        assert SUSPENDED_ANNOTATION not in job["metadata"]["annotations"]


async def test_job_that_another_try_has_adopted_gets_no_annotation() -> None:
    """An annotation that its success is incomplete would let the later try train again."""
    async with staged() as training, training.owner() as owner:
        owner.job.ref = training.ref
        read = await owner.job.read()
        another_try(training)
        _, why = await owner.job.annotate(read.job, {INCOMPLETE_ANNOTATION: "Worker 0 was evicted"}, 60.0)
        assert "409" in why
        (job,) = training.api.objects[training.kind.plural].values()
        assert INCOMPLETE_ANNOTATION not in job["metadata"]["annotations"]


async def test_kill_after_the_end_leaves_the_job_to_the_try_that_has_adopted_it() -> None:
    """This process has seen that the job failed. A later try owns it now, in which it may train again."""
    async with staged() as training, connected(training.url) as api:
        training.pod(0)
        training.ended("Failed")
        read = await read_training(api, training.ref)
        assert read.job is not ABSENT
        async with owner_in(api, host_of(state="failed"), training.log) as owner:
            owner.job.take(api, Submitted(training.ref, read.job, created=False))
            another_try(training)
            await owner.stop()
        assert training.api.writes() == []


@pytest.mark.parametrize(
    ("number", "key", "found"),
    [
        (1, {}, False),  # it has the id of another task instance: another Airflow submits the same DAG
        (2, {}, True),
        (2, {"deployment": "staging"}, False),
        (2, {"run_id": "another"}, False),
    ],
)
async def test_interrupted_submission_finds_no_job_of_another_task(
    number: int, key: Mapping[str, Any], found: bool
) -> None:
    """A kill during the submission releases the job that it finds under the name."""
    async with staged() as training, connected(training.url) as api:
        (job,) = training.api.objects[training.kind.plural].values()
        owner = Owner.of(job)
        assert isinstance(owner, Owner)
        me = Owner(replace(owner.key, **key), number, "ti-of-the-killed-try")
        ref = training.ref
        own = await find_own(api, training.kind, ref.version, ref.namespace, ref.name, me)
        assert (own is not None) is found


async def test_cause_of_a_release_that_was_not_made_is_not_the_cause_of_the_end() -> None:
    """The pod starts while the release is sent: the job is followed on, and somebody else deletes it later."""
    async with staged() as training:
        training.condition("Created")
        training.pod(0, "Pending", since=40.0)
        stored = list[bool]()

        def on_request(line: str) -> None:
            if line.startswith("DELETE") and not stored:
                stored.append(bool(training.memory.stored))
                training.pod(0)
                training.running()

        training.api.on_request = on_request
        following = asyncio.ensure_future(training.follow(Options(limits=Limits(startup=30.0), drain_timeout=0.5)))
        await until(lambda: stored and training.memory.stored is None)
        training.memory.stored = {}  # Airflow answers that there is none
        training.api.remove("pytorchjobs", NAME)
        outcome = await following
        assert stored == [True]
        assert "startup_timeout" not in (outcome.cause or {})["summary"]
