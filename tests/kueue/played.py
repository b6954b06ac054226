"""The jobs of the provider in the replay of a recording."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import KINDS, Kind
from airflow_provider_ktrain.engine import job_control as operations
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests.apiserver import Object, serving
from tests.engine.tasks import Task, release_job

from .recording import Recording, Write
from .script import Script


@dataclass
class RecordedTask(Task):
    """A task whose manifest is a recorded job, with its name."""

    body: Object = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    def manifest(self, number: int, submission: str, *_: Any, **__: Any) -> Object:
        return self.stamped(self.body, number, submission)


def task_of(api: Api, namespace: str, body: Object) -> RecordedTask:
    class OfKind(RecordedTask):
        kind: ClassVar[Kind] = KINDS[body["kind"]]
        version: ClassVar[str] = body["apiVersion"].partition("/")[2]

    return OfKind(api, namespace, body=body)


@dataclass
class Played:
    """One job of the provider during a replay."""

    task: RecordedTask
    ref: JobRef
    stop: StopSignal
    following: asyncio.Task[Any]


Perform = Callable[[Played, Write], Coroutine[Any, Any, object]]


def by_hand(recording: Recording) -> list[str]:
    """The titles of the writes to jobs that the provider never makes, such as a manual suspension."""
    writes = [step.write for step in recording.steps if step.write is not None and step.write.verb == "patch"]
    return [write.title for write in writes if write.job and "active" not in (write.body.get("spec") or {})]


async def perform(one: Played, write: Write) -> None:
    """A write of the recorded client to a job that exists, as the provider makes it."""
    if write.verb == "delete" and one.following.done():
        await release_job(one.task.api, one.ref)
    elif write.verb == "delete":
        one.stop.request("deleted as recorded")
    elif write.body["spec"]["active"]:
        await operations.resume(one.task.api, one.ref, timeout=60)
    else:
        await operations.suspend(one.task.api, one.ref, timeout=60)


@contextlib.asynccontextmanager
async def playing(
    recording: Recording, *, by_others: Collection[str], instead: Mapping[str, Perform] | None = None
) -> AsyncIterator[tuple[Script, dict[str, Played]]]:
    """A script, and the jobs that the provider has submitted and follows.

    :param by_others: titles of writes that the recording makes.
    :param instead: what the provider does in place of a write with this title.
    """
    played: dict[str, Played] = {}
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:

        async def make(write: Write) -> None:
            if write.verb == "create":
                task, stop = task_of(api, recording.namespace, write.body), StopSignal()
                ref = (await task.submit()).ref
                played[write.job] = Played(task, ref, stop, asyncio.create_task(task.follow(ref, stop=stop)))
            else:
                one, act = played[write.job], (instead or {}).get(write.title, perform)
                tasks.create_task(act(one, write))

        script = Script(recording, make, by_others=by_others)
        api = await stack.enter_async_context(serving(script))
        try:
            yield script, played
        finally:
            following = [one.following for one in played.values()]
            for one in following:
                one.cancel()
            await asyncio.gather(*following, return_exceptions=True)
