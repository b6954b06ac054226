"""A triggerer that is killed while it ends a training: the next one reports the same cause, and no GPU is left.

And a task that is marked failed between the trigger's event and a worker: no worker runs, so the trigger has freed the
pods.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import OnFinishAction
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.apiserver import Object, stamp
from tests.engine.staged import NAME, Memory, Staged, staged
from tests.until import until

pytestmark = pytest.mark.virtual_time

LIMIT = 30.0
JOB = f"/.*/pytorchjobs/{NAME}"


class Pausing(Memory):
    """Stops while it stores a conclusion."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.after, self.paused = after, asyncio.Event()

    async def store_conclusion(self, document: Mapping[str, Any]) -> bool:
        if self.after:
            self.stored = document
        self.paused.set()
        await asyncio.Event().wait()
        return True


def pending(training: Staged) -> Options:
    """A job whose startup_timeout passes in two seconds, and that holds a GPU."""
    training.condition("Created")
    training.pod(0, "Pending", since=LIMIT - 2)
    return Options(limits=Limits(startup=LIMIT), drain_timeout=0.5)


def overdue(training: Staged) -> Options:
    """A running job whose deadline passes in two seconds."""
    training.pod(0)
    training.running()
    return Options(deadline=timing.epoch() + 2, drain_timeout=0.5)


STEPS = {
    "before the conclusion is stored": "before conclusion",
    "after the conclusion is stored": "after conclusion",
    "before the DELETE": f"before DELETE {JOB}",
    "after the DELETE": f"after DELETE {JOB}",
    "before the event": r"after GET /api/v1/namespaces/ns/pods\?(?!.*watch)",
}


async def killed_at(training: Staged, options: Options, step: str) -> None:
    """Follow the job in a trigger, and cancel it at a step, as a triggerer that dies."""
    pausing = Pausing(after=step.startswith("after")) if step.endswith("conclusion") else None
    training.memory = pausing or training.memory
    following = asyncio.ensure_future(training.follow(options))
    if pausing is not None:
        await asyncio.wait_for(pausing.paused.wait(), 60)
    elif "GET" in step:
        await until(lambda: NAME not in training.api.objects["pytorchjobs"], 60)
        training.api.pause(step)
        await asyncio.wait_for(training.api.paused.wait(), 60)
    else:
        training.api.pause(step)
        await asyncio.wait_for(training.api.paused.wait(), 60)
    following.cancel()
    await asyncio.wait([following])
    assert following.cancelled()
    training.api.pause("")
    training.memory, stored = Memory(), training.memory.stored
    training.memory.stored = stored


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("step", "finalizer"), [*((step, False) for step in STEPS), ("after the DELETE", True)], ids=str
)
@pytest.mark.parametrize("rule", [pending, overdue])
async def test_next_triggerer_reports_the_same_cause(rule: Any, step: str, finalizer: bool) -> None:
    """With a finalizer, the job is still being deleted when the next one begins."""
    async with staged() as undisturbed:
        expected = (await undisturbed.follow(rule(undisturbed))).cause or {}
    async with staged() as training:
        options = rule(training)
        if finalizer:
            training.api.change("pytorchjobs", NAME, lambda job: job["metadata"].update(finalizers=["test"]))
        await killed_at(training, options, STEPS[step])
        if finalizer:
            loop = asyncio.get_running_loop()
            loop.call_later(1.0, training.api.remove, "pytorchjobs", NAME)
        outcome = await asyncio.wait_for(training.follow(options), 60)
        cause = outcome.cause or {}
        assert cause["category"] == expected["category"], cause
        assert _without_numbers(cause["summary"]) == _without_numbers(expected["summary"])
        assert not outcome.release_error
        assert not training.api.objects["pods"]
        assert not training.api.objects["pytorchjobs"]


def _without_numbers(text: str) -> str:
    """Seconds since the creation, of which Kubernetes stores no fractions, may differ by one."""
    return re.sub(r"\d+", "N", text)


def crashing(training: Staged, **limits: int) -> Options:
    """A replica whose second failure a limit doesn't allow, with an exception in its log."""
    end = {"terminated": {"exitCode": 1, "startedAt": stamp(8), "finishedAt": stamp(6)}}
    training.pod(0, state={"running": {"startedAt": stamp(5)}}, restarts=2, last=end)
    for line in ("Traceback (most recent call last):", "ValueError: row 7 of /data/customers.csv"):
        training.line(line, restart=1)
    training.running()
    return Options(limits=Limits(**limits), drain_timeout=0.5)


@pytest.mark.parametrize(
    ("event", "limit"), [("crash_loop", "crash_loop_limit"), ("restarts", "max_restarts")], ids=["loop", "restarts"]
)
async def test_next_triggerer_reports_a_failing_replica_without_its_log(event: str, limit: str) -> None:
    """The log of the deleted pod is in the task's log. What Airflow stores about the job quotes none of it."""
    async with staged() as training:
        options = crashing(training, **{limit.removesuffix("_limit"): 1})
        await killed_at(training, options, STEPS["after the DELETE"])
        assert "customers.csv" in str(training.log), "the first process has read the log"
        stored = dict(training.memory.stored or {})
        assert "customers.csv" not in str(stored)
        assert (stored["event"], stored["limit"]) == (event, limit)
        cause = (await asyncio.wait_for(training.follow(options), 60)).cause or {}
        assert (cause["category"], cause["replica"]) == ("user code", "Worker 0")
        assert limit in cause["summary"]
        assert "exit code 1" in cause["summary"]


async def test_two_triggerers_report_the_same_cause() -> None:
    """A stalled triggerer and the one that has taken over its triggers follow the job at the same time."""
    async with staged() as training:
        options = pending(training)
        outcomes = await asyncio.gather(training.follow(options), training.follow(options))
        causes = {(outcome.cause or {})["summary"] for outcome in outcomes}
        assert len(causes) == 1, causes
        assert "startup_timeout" in causes.pop()
        assert not training.api.objects["pods"]


def suspends(training: Staged) -> None:
    """Do what an operator does with a suspended job: delete its running pods."""

    def on_request(line: str) -> None:
        if line.startswith("PATCH"):
            asyncio.get_running_loop().call_later(0.1, delete_pods)

    def delete_pods() -> None:
        for name in list(training.api.objects["pods"]):
            training.api.remove("pods", name)

    training.api.on_request = on_request


def holding(training: Staged) -> list[Object]:
    pods = training.api.objects["pods"].values()
    return [pod for pod in pods if pod["status"]["phase"] not in ("Succeeded", "Failed")]


@pytest.mark.parametrize("action", list(OnFinishAction))
@pytest.mark.parametrize("how", ["Succeeded", "Failed", "limit"])
async def test_no_gpu_is_held_if_no_worker_runs_after_the_event(action: OnFinishAction, how: str) -> None:
    """The task is marked failed after the event: no worker deletes the job."""
    async with staged() as training:
        suspends(training)
        options = pending(training)
        if how != "limit":
            training.pod(0, how)
            training.pod(1)
            training.ended(how)
        outcome = await training.follow(Options(options.logs, options.limits, None, action, drain_timeout=0.5))
        assert isinstance(outcome, Outcome)
        assert not outcome.release_error
        assert not holding(training)
