"""The provider submits and follows each recorded job of a queue: its reports agree with the recording.

The replays run side by side, because each of them mostly waits. `expected.yaml` contains by hand what the provider must
report. Of recordings of another folder, only what their objects say for themselves is compared: how each job ends, how
often it was admitted and lost its admission. The replay itself compares each write that the recorded client made to the
jobs. The provider doesn't make manual suspensions: the driver does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import KINDS, Kind
from airflow_provider_ktrain.engine import job_control as operations
from airflow_provider_ktrain.engine.api import kueue as queue_reads
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.kueue import queue_of
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests.clusters import TestCluster
from tests.engine.tasks import Task, api_of, release_job

from . import library
from .conftest import driver as driver_of
from .conftest import round_trips
from .driver import GRACE, Driver, ReplayError
from .recording import JOBS, Actor, Obj, Recording, Step

SIDE_BY_SIDE = 8  #: replays at the same time
EXPECTED = yaml.safe_load((Path(__file__).parent / "expected.yaml").read_text())


def jobs_of(recording: Recording) -> list[str]:
    """The jobs with a queue that the client has created, in order."""
    created = (s for s in recording.steps if s.actor is Actor.CLIENT and s.verb == "create")
    return [s.about[1] for s in created if s.about[0] in JOBS and queue_of(s.body)]


def client_steps(recording: Recording, job: str) -> list[Step]:
    """The writes of the recorded client to a job or its Workload."""
    steps = (step for step in recording.steps if step.actor is Actor.CLIENT and step.verb != "status")
    return [s for s in steps if (s.about[0] in JOBS and s.about[1] == job) or workload_is_of(s.about, job)]


def workload_is_of(about: tuple[str, str], job: str) -> bool:
    return about[0] == "workloads" and about[1].partition("-")[2].rpartition("-")[0] == job


@dataclass
class RecordedTask(Task):
    """A task whose manifest is a recorded job."""

    body: Obj = field(default_factory=dict)

    def manifest(self, number: int, submission: str, *_: Any, **__: Any) -> Obj:
        return self.stamped(self.body, number, submission)


def task_of(api: Api, driver: Driver, body: Obj) -> RecordedTask:
    class OfKind(RecordedTask):
        kind: ClassVar[Kind] = KINDS[body["kind"]]
        version: ClassVar[str] = body["apiVersion"].partition("/")[2]

    return OfKind(api, driver.namespace, body=driver.prepared(body))


@dataclass
class Played:
    """One job of the provider during a replay."""

    task: RecordedTask
    ref: JobRef
    stop: StopSignal
    following: asyncio.Task[Any]


class Replays:
    """The replays of a test run: those that it selects are played at the first request, side by side.

    :param kueue: the cluster.
    :param names: of the recordings.
    """

    def __init__(self, kueue: TestCluster, names: Collection[str]) -> None:
        self._kueue, self._unplayed = kueue, list(names)
        self._courses: dict[str, dict[str, Played] | BaseException] = {}

    def take(self, name: str) -> dict[str, Played]:
        """The jobs of one replay. It is played again if it was taken before: the test is repeated."""
        if name not in self._courses:
            names = self._unplayed if name in self._unplayed else [name]
            self._courses |= asyncio.run(self._play(sorted(names, key=_seconds, reverse=True)))
            self._unplayed = []
        course = self._courses.pop(name)
        if isinstance(course, BaseException):
            raise course
        return course

    async def _play(self, names: list[str]) -> dict[str, dict[str, Played] | BaseException]:
        places = asyncio.Semaphore(SIDE_BY_SIDE)

        async def one(name: str) -> dict[str, Played]:
            async with places:
                return await played_course(api, self._kueue, library.recording(name))

        async with api_of(self._kueue) as api:
            courses = await asyncio.gather(*map(one, names), return_exceptions=True)
        return dict(zip(names, courses, strict=True))


def _seconds(name: str) -> float:
    return library.recording(name).seconds


@pytest.fixture(scope="module")
def replays(kueue: TestCluster, request: pytest.FixtureRequest) -> Iterator[Replays]:
    selected = [i for i in request.session.items if isinstance(i, pytest.Function) and "replays" in i.fixturenames]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_reads, "QUEUE_SECONDS", 0.0)  # a replay changes a queue more often than an administrator
        yield Replays(kueue, [str(item.callspec.params["name"]) for item in selected])


@pytest.mark.parametrize("name", library.names())
def test_provider_reports_the_recorded_course(
    replays: Replays, name: str, record_property: Callable[[str, object], None]
) -> None:
    recording, played = library.recording(name), replays.take(name)
    jobs = jobs_of(recording)
    differing: list[str] = []
    facts = sum(len(client_steps(recording, job)) for job in jobs)
    for job, one in played.items():
        wanted = expected(recording, job)
        facts += 3 + len(wanted.lines)
        found = list(differences(one.following.result(), one.task.log.messages, wanted))
        differing += [f"{job}: {text}" for text in found] + (one.task.log.messages if found else [])
    record_property("kueue", [facts, len(differing)])
    assert list(played) == jobs
    assert not differing, "\n".join(differing)


async def played_course(api: Api, kueue: TestCluster, recording: Recording) -> dict[str, Played]:
    """The recorded jobs, submitted and followed by the provider until each has ended as recorded."""
    jobs = jobs_of(recording)
    steps = [step for job in jobs for step in client_steps(recording, job)]
    by_hand = [s.title for s in steps if s.verb == "patch" and "active" not in (s.body.get("spec") or {})]
    played: dict[str, Played] = {}
    options: Any = {"ours": dict.fromkeys(jobs), "by_others": by_hand, "settle": round_trips(api)}
    with driver_of(kueue.kubeconfig, recording, **options) as driver:
        try:
            async with asyncio.timeout(recording.seconds + GRACE):
                await play(api, driver, played)
                await finish(api, recording, played)
        except TimeoutError:
            raise ReplayError(f"not within {recording.seconds + GRACE:.0f} s; last step: {driver.done[-1:]}") from None
        finally:
            for one in played.values():
                one.following.cancel()
    return played


async def test_replay_that_does_not_come_about_ends_after_its_recorded_length_and_grace(
    api: Api, kueue: TestCluster
) -> None:
    never = Step(Actor.OPERATOR, "condition", (JOBS[0], "never"), {"type": "Running", "status": "True"})
    stuck = replace(library.recording("75-kueue-granular-quota-pytorchjob"), steps=(never,), seconds=2 - GRACE)
    with pytest.raises(ReplayError, match="not within 2 s"):
        await played_course(api, kueue, stuck)


async def play(api: Api, driver: Driver, played: dict[str, Played]) -> None:
    """Submit and follow the jobs, and repeat each write of the recorded client at its place in the sequence."""
    done: list[Step] = []
    while not driver.finished:
        step = driver.awaited
        if step is not None and step not in done:
            done.append(step)
            job = next((job for job in played if job == step.about[1] or workload_is_of(step.about, job)), "")
            if step.verb == "create":
                task, stop = task_of(api, driver, step.body), StopSignal()
                ref = (await task.submit()).ref
                following = asyncio.create_task(task.follow(ref, stop=stop))
                played[step.about[1]] = Played(task, ref, stop, following)
            else:
                await write(api, played[job], step)
        await asyncio.sleep(0.05)


async def finish(api: Api, recording: Recording, played: dict[str, Played]) -> None:
    """Wait until the provider has reported how each job ended."""
    for job, one in played.items():
        if outcome_of(recording, job) == "deleted":
            one.stop.request("deleted with its namespace, if not before")
        outcome = await one.following
        assert isinstance(outcome, Outcome)
        if outcome.kept:
            await release_job(api, one.ref)


async def write(api: Api, one: Played, step: Step) -> None:
    if step.verb == "delete" and one.following.done():
        await release_job(api, one.ref)
    elif step.verb == "delete":
        one.stop.request("deleted as recorded")
    elif step.body["spec"]["active"]:
        await operations.resume(api, one.ref, timeout=60)
    else:
        await operations.suspend(api, one.ref, timeout=60)


@dataclass(frozen=True)
class Expected:
    """The expected reports for one job."""

    ends: str
    lines: list[str] = field(default_factory=list)
    evictions: int = 0
    preemptions: int = 0


def expected(recording: Recording, job: str) -> Expected:
    """What `expected.yaml` says, or what the recorded objects do."""
    if library.FOLDER == library.KEPT:
        return Expected(**EXPECTED[recording.name][job])
    admissions, evictions = 0, 0
    was_admitted = was_evicted = False
    for workload in workloads(library.FOLDER / recording.name, job):
        conditions = {c["type"]: c["status"] == "True" for c in (workload.get("status") or {}).get("conditions") or ()}
        admitted, evicted = bool(conditions.get("Admitted")), bool(conditions.get("Evicted"))
        admissions += admitted and not was_admitted
        evictions += evicted and admitted and not was_evicted
        was_admitted, was_evicted = admitted, evicted
    preempted = [step for step in recording.steps if workload_is_of(step.about, job) and step.verb == "status"]
    reasons = {
        (c["reason"], c["lastTransitionTime"])
        for step in preempted
        for c in step.body.get("conditions") or ()
        if c["type"] == "Evicted" and c["status"] == "True"
    }
    lines = ["Admitted by ClusterQueue..."] * admissions
    return Expected(outcome_of(recording, job), lines, evictions, sum(why == "Preempted" for why, _ in reasons))


def workloads(folder: Path, job: str) -> Iterator[Obj]:
    """The states of a job's Workload."""
    for line in (folder / "events.jsonl").read_text().splitlines():
        change = json.loads(line)
        if workload_is_of((change["watch"], change["object"]["metadata"]["name"]), job):
            yield change["object"]


def outcome_of(recording: Recording, job: str) -> str:
    """How a job ends for the client: it succeeds, fails, or is deleted, at the latest with its namespace."""
    reached = {s.body.get("type") for s in recording.steps if s.about[0] in JOBS and s.about[1] == job}
    ended = {"Succeeded": "succeeded", "Complete": "succeeded", "Failed": "failed"}
    return next((how for condition, how in ended.items() if condition in reached), "deleted")


def logged(messages: list[str], what: str) -> int:
    """How often a killed job lost its admission, by its log: a kill leaves no time for metrics."""
    lines = [line for line in messages if "lost its admission" in line]
    return sum("\npreempted" in line for line in lines) if what == "preemptions" else len(lines)


def differences(outcome: Outcome, messages: list[str], wanted: Expected) -> list[str]:
    killed = (outcome.cause or {}).get("category") == "killed"
    ends = "succeeded" if outcome.succeeded else "deleted" if killed else "failed"
    found = [] if ends == wanted.ends else [f"ends: expected {wanted.ends}, found {ends}"]
    for what in ("evictions", "preemptions"):
        number = logged(messages, what) if killed else int(outcome.metrics.get(f"queue.{what}", 0))
        if number != getattr(wanted, what):
            found.append(f"{what}: expected {getattr(wanted, what)}, found {number}")
    rest = iter(messages)
    return found + [
        f"log: expected {line!r} after the lines before"
        for line in wanted.lines
        if not any(text == line or (line.endswith("...") and text.startswith(line[:-3])) for text in rest)
    ]
