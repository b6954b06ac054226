"""The provider submits and follows each recorded job of a queue: its reports agree with the recording.

The tests compare the outcome, the numbers of evictions and preemptions, and the log lines about the queue. The replay
itself compares each write that the recorded client made to the job. The provider doesn't make manual suspensions: the
driver makes them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from airflow_provider_ktrain.core.kinds import KINDS, Kind
from airflow_provider_ktrain.core.state.kueue_messages import QueuePhase
from airflow_provider_ktrain.core.state.kueue_status import queue_status
from airflow_provider_ktrain.engine import operations
from airflow_provider_ktrain.engine.api import Api
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.kueue import queue_of
from airflow_provider_ktrain.engine.wakeup import StopSignal
from tests.engine.tasks import Task, release_job

from . import library
from .conftest import Replay, with_test_image
from .driver import Driver
from .recording import JOBS, Actor, Obj, Recording, Step

SLOW = os.environ.get("KTRAIN_TEST_SLOW") == "1"
SOME = {("70f-kueue-fails", "bad"), ("71-kueue-mpijob", "second"), ("74-kueue-resume-by-hand", "second")}
LEAST_SECONDS = 1.0  #: minimum duration of a state of the recorded Workload for which a log line is expected
UNSHOWN = (QueuePhase.EVICTING, QueuePhase.FINISHED)


def client_steps(recording: Recording, job: str) -> list[Step]:
    """The writes of the recorded client to a job or its Workload."""
    steps = (step for step in recording.steps if step.actor is Actor.CLIENT)
    return [s for s in steps if (s.about[0] in JOBS and s.about[1] == job) or workload_is_of(s.about, job)]


def workload_is_of(about: tuple[str, str], job: str) -> bool:
    return about[0] == "workloads" and about[1].partition("-")[2].rpartition("-")[0] == job


def cases() -> list[tuple[str, str]]:
    found = []
    for name in library.names():
        created = (s for s in library.recording(name).steps if s.actor is Actor.CLIENT and s.verb == "create")
        found += [(name, s.about[1]) for s in created if s.about[0] in JOBS and queue_of(s.body)]
    every = SLOW or library.FOLDER != library.KEPT
    return [case for case in found if every or case in SOME]


@dataclass
class RecordedTask(Task):
    """A task whose manifest is a recorded job."""

    body: Obj = field(default_factory=dict)

    def manifest(self, number: int, submission: str, *_: Any, **__: Any) -> Obj:
        return self.stamped(with_test_image(self.body), number, submission)


def task_of(api: Api, driver: Driver, body: Obj) -> RecordedTask:
    class OfKind(RecordedTask):
        kind: ClassVar[Kind] = KINDS[body["kind"]]
        version: ClassVar[str] = body["apiVersion"].partition("/")[2]

    return OfKind(api, driver.namespace, body=body)


@pytest.mark.parametrize(("name", "job"), cases())
async def test_provider_reports_the_recorded_course(
    api: Api, replay: Replay, name: str, job: str, record_property: Callable[[str, object], None]
) -> None:
    recording = library.recording(name)
    steps = client_steps(recording, job)
    by_hand = [s.title for s in steps if s.verb == "patch" and "active" not in (s.body.get("spec") or {})]
    with replay(name, ours={job: None}, by_others=by_hand) as driver:
        await asyncio.to_thread(driver.until, lambda: driver.awaited is not None)
        task = task_of(api, driver, steps[0].body)
        ref = (await task.submit()).ref
        outcome = await play(api, task, driver, ref)
        if outcome.kept:
            await release_job(api, ref)
        await asyncio.to_thread(driver.finish)
    differing = list(differences(outcome, task.log.messages, expected(recording, job, ref.name)))
    facts = 3 + len(expected(recording, job, ref.name).lines) + len(steps)
    record_property("kueue", [facts, len(differing)])
    assert not differing, "\n".join([*differing, *task.log.messages])


async def play(api: Api, task: RecordedTask, driver: Driver, ref: Any) -> Outcome:
    """Follow the job, and repeat each write of the recorded client at its place in the sequence."""
    stop = StopSignal()
    following = asyncio.create_task(task.follow(ref, stop=stop))
    done: list[Step] = []
    while not following.done():
        step = driver.awaited
        if step is not None and step not in done and step.verb != "create":
            done.append(step)
            await write(api, ref, step, stop)
        await asyncio.sleep(0.05)
    outcome = await following
    assert isinstance(outcome, Outcome)
    return outcome


async def write(api: Api, ref: Any, step: Step, stop: StopSignal) -> None:
    if step.verb == "delete":
        stop.request("deleted as recorded")
    elif step.body["spec"]["active"]:
        await operations.resume(api, ref, timeout=60)
    else:
        await operations.suspend(api, ref, timeout=60)


@dataclass(frozen=True)
class Expected:
    """The expected reports for one job, from a recording."""

    outcome: str
    evictions: int
    preemptions: int
    lines: list[str]


def expected(recording: Recording, job: str, name: str) -> Expected:
    shown = [(at, queue_status(obj)) for at, obj in workloads(library.FOLDER / recording.name, job)]
    ends = [at for at, _ in shown[1:]] + [shown[-1][0] + LEAST_SECONDS]
    lasting = [
        status.line
        for (at, status), end in zip(shown, ends, strict=True)
        if end - at >= LEAST_SECONDS and status.phase not in UNSHOWN
    ]
    lines = [line for i, line in enumerate(lasting) if lasting[i - 1 : i] != [line]]
    most = max((status for _, status in shown), key=lambda status: status.evictions)
    return Expected(outcome_of(recording, job), most.evictions, most.preemptions, lines)


def workloads(folder: Path, job: str) -> list[tuple[float, Obj]]:
    """The states of a job's Workload, each with its time; changes of other fields are omitted."""
    found: list[tuple[float, Obj]] = []
    for line in (folder / "events.jsonl").read_text().splitlines():
        change = json.loads(line)
        obj = change["object"]
        if change["watch"] == "workloads" and workload_is_of(("workloads", obj["metadata"]["name"]), job):
            if not found or queue_status(obj).line != queue_status(found[-1][1]).line:
                found.append((change["t"], obj))
            else:
                found[-1] = (found[-1][0], obj)
    return found


def outcome_of(recording: Recording, job: str) -> str:
    """The outcome of a job for the client: deleted by the client, succeeded or failed."""
    if any(step.verb == "delete" for step in client_steps(recording, job)):
        return "deleted"
    reached = {s.body.get("type") for s in recording.steps if s.about[0] in JOBS and s.about[1] == job}
    return "succeeded" if {"Succeeded", "Complete"} & reached else "failed"


def logged(messages: list[str], what: str) -> int:
    """How often a killed job lost its admission, by its log: a kill leaves no time for metrics."""
    lines = [line for line in messages if "lost its admission" in line]
    return sum("\npreempted" in line for line in lines) if what == "preemptions" else len(lines)


def differences(outcome: Outcome, messages: list[str], expected_course: Expected) -> list[str]:
    killed = (outcome.cause or {}).get("category") == "killed"
    ended = "succeeded" if outcome.succeeded else "deleted" if killed else "failed"
    found = [] if ended == expected_course.outcome else [f"outcome: expected {expected_course.outcome}, found {ended}"]
    for what in ("evictions", "preemptions"):
        number = logged(messages, what) if killed else int(outcome.metrics.get(f"queue.{what}", 0))
        if number != getattr(expected_course, what):
            found.append(f"{what}: expected {getattr(expected_course, what)}, found {number}")
    rest = iter(messages)
    return found + [
        f"log: expected {line!r} after the lines before" for line in expected_course.lines if line not in rest
    ]
