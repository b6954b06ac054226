"""The provider submits and follows each recorded job of a queue: its reports agree with the recording.

`expected.yaml` contains by hand what the provider must report. Of recordings of another folder, only what their objects
say for themselves is compared: how each job ends, how often it was admitted and lost its admission. The replay itself
compares each write that the recorded client made to the jobs. The provider doesn't make manual suspensions: the
recording does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.engine.tasks import release_job
from tests.tables import table

from . import recording as recordings
from .played import Played, by_hand, playing
from .recording import JOBS, Recording
from .script import ReplayError, Script

pytestmark = pytest.mark.virtual_time
EXPECTED = table(Path(__file__).parent / "expected.yaml")


SHORT = (
    "70b-kueue-hold", "70f-kueue-fails", "71-kueue-mpijob", "72b-kueue-trainjob-preemption",
    "74c-kueue-workload-inactive",
)  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
async def test_provider_reports_the_recorded_course(name: str, record_property: Callable[[str, object], None]) -> None:
    """An eviction, a failure, an MPIJob, a preempted TrainJob, and a pause."""
    await check(name, record_property)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted({*recordings.names()} - {*SHORT}))
async def test_provider_reports_each_recorded_course(name: str, record_property: Callable[[str, object], None]) -> None:
    await check(name, record_property)


async def check(name: str, record_property: Callable[[str, object], None]) -> None:
    """What the provider reports about the jobs of a recording is as expected."""
    recording = recordings.recording(name)
    async with playing(recording, by_others=by_hand(recording)) as (script, played):
        await script.play()
        await finish(recording, played)
        left = [name for name, pod in script.pods.items() if pod["status"]["phase"] not in ("Succeeded", "Failed")]
    differing: list[str] = []
    facts = sum(step.write is not None and script.is_ours(step.write) for step in recording.steps)
    for job, one in played.items():
        wanted = expected(recording, job)
        facts += 5 + len(wanted.lines)
        found = list(differences(one.following.result(), one.task.log.messages, wanted))
        differing += [f"{job}: {text}" for text in found] + (one.task.log.messages if found else [])
    record_property("kueue", [facts, len(differing)])
    assert list(played) == recording.jobs
    assert left == [], "pods still run"
    assert not {about for about in played if any(about in script.objects[plural] for plural in JOBS)}
    assert not differing, "\n".join(differing)


async def finish(recording: Recording, played: dict[str, Played]) -> None:
    """Wait until the provider has reported how each job ended."""
    for job, one in played.items():
        if outcome_of(recording, job) == "deleted":
            one.stop.request("deleted with its namespace, if not before")
        outcome = await one.following
        assert isinstance(outcome, Outcome)
        if outcome.kept:
            await release_job(one.task.api, one.ref)


@dataclass(frozen=True)
class Expected:
    """The expected reports for one job."""

    ends: str
    lines: list[str] = field(default_factory=list)
    evictions: int = 0
    preemptions: int = 0
    paused: int = 0


def expected(recording: Recording, job: str) -> Expected:
    """What `expected.yaml` says, or what the recorded objects do."""
    if recordings.FOLDER == recordings.KEPT:
        return Expected(**EXPECTED[recording.name][job])
    admissions, evictions, preempted = 0, 0, set()
    was_admitted = was_evicted = False
    for workload in recording.workloads(job):
        conditions = {c["type"]: c for c in (workload.get("status") or {}).get("conditions") or ()}
        true = {name for name, condition in conditions.items() if condition["status"] == "True"}
        admissions += "Admitted" in true and not was_admitted
        evictions += {"Admitted", "Evicted"} <= true and not was_evicted
        was_admitted, was_evicted = "Admitted" in true, "Evicted" in true
        if was_evicted and conditions["Evicted"]["reason"] == "Preempted":
            preempted.add(conditions["Evicted"]["lastTransitionTime"])
    lines = ["Admitted by ClusterQueue..."] * admissions
    return Expected(outcome_of(recording, job), lines, evictions, len(preempted))


def outcome_of(recording: Recording, job: str) -> str:
    """How a job ends for the client: it succeeds, fails, or is deleted, at the latest with its namespace."""
    conditions = [c for state in recording.states(job) for c in (state.get("status") or {}).get("conditions") or ()]
    reached = {condition["type"] for condition in conditions if condition["status"] == "True"}
    ended = {"Succeeded": "succeeded", "Complete": "succeeded", "Failed": "failed"}
    return next((how for condition, how in ended.items() if condition in reached), "deleted")


def logged(messages: list[str], what: str) -> int:
    """How often a killed job lost its admission, by its log: a kill leaves no time for metrics."""
    lines = [line for line in messages if "lost its admission" in line]
    return sum("\nPreempted" in line for line in lines) if what == "preemptions" else len(lines)


def differences(outcome: Outcome, messages: list[str], wanted: Expected) -> Iterator[str]:
    killed = (outcome.cause or {}).get("category") == "killed"
    ends = "succeeded" if outcome.succeeded else "deleted" if killed else "failed"
    if ends != wanted.ends:
        yield f"ends: expected {wanted.ends}, found {ends}"
    for what in ("evictions", "preemptions"):
        number = logged(messages, what) if killed else int(outcome.metrics.get(f"queue.{what}", 0))
        if number != getattr(wanted, what):
            yield f"{what}: expected {getattr(wanted, what)}, found {number}"
    if outcome.release_error:
        yield f"release: {outcome.release_error}"
    if (paused := sum(line.endswith(" is Suspended") for line in messages)) != wanted.paused:
        yield f"paused: expected {wanted.paused}, found {paused}"
    rest = iter(messages)
    for line in wanted.lines:
        if not any(text == line or (line.endswith("...") and text.startswith(line[:-3])) for text in rest):
            yield f"log: expected {line!r} after the lines before"


async def test_replay_fails_without_the_write_of_the_test() -> None:
    async def perform(_: object) -> None: ...

    script = Script(recordings.recording("75-kueue-granular-quota-pytorchjob"), perform)
    with pytest.raises(ReplayError, match="not made within 60 s: 'create"):
        await script.play()
