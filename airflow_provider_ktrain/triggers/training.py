"""The trigger of a deferred training: it runs the same `follow` as the worker, with the logs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.compat import EARLIEST_EVENT, StorableLog, supervisor_connection
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.formats import VERSION, mapping
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.kills import UNKNOWN, KillAction, action_for_trigger
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.text import clean
from airflow_provider_ktrain.hooks.training import TrainingHook

if TYPE_CHECKING:
    from airflow_provider_ktrain.engine.api import Api
    from airflow_provider_ktrain.engine.follow.messages import Outcome

KILL_PATIENCE = 300.0  #: seconds that a kill asks an API server which is away, and waits for pods to go
INTERRUPTED = 4.0  #: seconds for the request that frees the GPUs after Ctrl-C
STATE_TIMEOUT = 60.0  #: seconds for one answer of Airflow about the task's state
STATE_INTERVAL = 5.0  #: seconds between two such questions


class TrainingJobTrigger(StorableLog, BaseTrigger):
    """Follows one job to its end, brings its logs, frees its GPUs, and fires one event: an outcome or an error.

    A job that has ended is deleted by `execute_complete`, when the event has arrived.

    Its arguments hold no manifest and no credentials. They are `engine.terms.Deferral` as a dict, maybe of another
    release: unknown ones are ignored, missing ones have defaults. None of them can keep the trigger from being built,
    as Airflow would fail the task then; without a job its event is an error.

    :param job: `core.identity.JobRef` as a dict.
    :param options: `engine.terms.Options` as a dict. Default: the defaults of its fields.
    :param handover: `engine.terms.Handover` of the worker as a dict. Default: nothing was followed before.
    :param kubernetes_conn_id: connection of type `kubernetes`. Default: `kubernetes_default`.
    :param cluster_context: context of its kubeconfig. Default: its current one.
    :param failures: how many triggers of this try have failed before. Default: 0.
    :param version: of the format of these arguments. Default: this release's.
    :param unknown: arguments of newer releases; ignored.
    """

    state_patience: ClassVar[float] = 300.0  #: seconds in which a task that is scheduled or queued may show what it is

    def __init__(
        self,
        *,
        job: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        handover: Mapping[str, Any] | None = None,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        failures: int = 0,
        version: int = VERSION,
        **unknown: Any,
    ) -> None:
        from airflow_provider_ktrain.engine.follow.messages import Options

        super().__init__()
        self.job = dict(mapping(job))
        read = Options.from_dict(options)
        if not self.job.get("owner"):  # without an owner no deletion is fenced, and the job is not a task's
            read = replace(read, release=False)
        self.options = read.to_dict()
        self.handover = dict(mapping(handover))
        self.kubernetes_conn_id = kubernetes_conn_id
        self.cluster_context = cluster_context
        self.failures = failures
        self.version = version
        self._killing: asyncio.Future[None] | None = None
        self._cursor: Cursor | None = None  # where the logs stand, for what is written after a kill

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = ("version", "job", "options", "handover", "kubernetes_conn_id", "cluster_context", "failures")
        arguments = {name: getattr(self, name) for name in names}
        return f"{type(self).__module__}.{type(self).__qualname__}", clean(arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from airflow_provider_ktrain.engine.follow.messages import event_of

        started = time.monotonic()
        self._warm_up()
        try:
            try:
                event = event_of(await self._follow(JobRef.from_dict(self.job)))
            except Exception as e:
                # never raise: Airflow hands only a traceback to the worker then
                self.log.exception("Following %s failed", self.job.get("name", "a job without a name"))
                event = event_of(f"{type(e).__name__}: {e}")
            await asyncio.sleep(EARLIEST_EVENT - (time.monotonic() - started))
        except asyncio.CancelledError:
            if self.task_instance is None:  # `airflow dags test` runs triggers inline: after Ctrl-C nobody is left
                await self._release(JobRef.from_dict(self.job), timeout=INTERRUPTED, verify=False)
            elif not compat.calls_on_kill():
                await self.on_kill()
            raise
        yield TriggerEvent(clean(event))

    async def _follow(self, ref: JobRef) -> Outcome:
        from airflow_provider_ktrain.engine.follow.loop import follow
        from airflow_provider_ktrain.engine.follow.messages import Handover, HostPolicy, Options, Stop

        handover = Handover.from_dict(self.handover)
        self._cursor = Cursor.from_dict(handover.cursor)

        async with TrainingHook(self.kubernetes_conn_id, self.cluster_context).api(ref) as api:
            outcome = await follow(
                ref,
                api,
                Options.from_dict(self.options),
                log=self.log,
                stop=Stop(),
                handover=handover,
                host=HostPolicy(fail_fast_on_forbidden=not self.options["release"], shared=True),
                cursor=self._cursor,
            )
        assert not isinstance(outcome, Handover)  # only with `until`
        return outcome

    async def on_kill(self) -> None:
        """Release the job if its task was really killed.

        Airflow also calls this where a stalled triggerer comes back after another took its triggers, and after a clear
        when the new try may own the job already. So the task's state is asked first (`core.kills.action_for_trigger`),
        and the release is fenced by the owner.

        A triggerer of Airflow 3.3 cancels what it has cancelled again every second, and after 30 s (on_kill_timeout):
        it would cut the release off. So that is a task of its own, waited for here and, where this is cut off, in
        `cleanup`; it ends with the triggerer.
        """
        self._killing = asyncio.ensure_future(self._release_if_killed())
        await self._killed()

    async def cleanup(self) -> None:
        """Wait for a kill that still runs; a triggerer that only stops has none."""
        await self._killed()

    async def _killed(self) -> None:
        while self._killing is not None and not self._killing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(self._killing)

    async def _release_if_killed(self) -> None:
        ref = JobRef.from_dict(self.job)
        if not self.options["release"]:
            return
        state, action = await self._kill_action()
        if action is not KillAction.RELEASE:
            self.log.warning(
                "%s is kept: its task is %s. Whoever has the task next goes on with it, or the reaper takes it",
                ref,
                state,
            )
            return
        self.log.info("The task is %s. Releasing its job %s", state, ref)
        await self._release(ref, timeout=KILL_PATIENCE)

    async def _kill_action(self) -> tuple[str, KillAction]:
        """The task's state, and what follows from it; asked again while that is not decided."""
        end = time.monotonic() + self.state_patience
        state = ""
        while True:
            before, state = state, await self._task_state()
            action = action_for_trigger(state)
            if action is not KillAction.ASK_AGAIN or self.task_instance is None or time.monotonic() >= end:
                return state, action
            if state != before:
                self.log.info("A kill of a task that is %s: its state is asked again until it is decided", state)
            await asyncio.sleep(min(STATE_INTERVAL, self.state_patience))

    async def _release(self, ref: JobRef, *, timeout: float, verify: bool = True) -> None:
        from airflow_provider_ktrain.engine.release import mode_of, release

        if not self.options["release"]:
            return
        mode = mode_of(self.options["on_finish_action"], succeeded=False, ended=False)
        try:
            async with (
                TrainingHook(self.kubernetes_conn_id, self.cluster_context).api(ref) as api,
                self._last_lines(api, ref) if verify else contextlib.nullcontext(),
            ):
                released = await release(api, ref, mode, timeout=timeout, verify=verify)
            self.log.info(released.text)
        except KtrainError as e:
            self.log.error("%s", e)

    def _last_lines(self, api: Api, ref: JobRef) -> contextlib.AbstractAsyncContextManager[None]:
        """What logs the lines between a kill and the end of the pods."""
        from airflow_provider_ktrain.engine.follow.last_lines import last_lines
        from airflow_provider_ktrain.engine.follow.messages import Handover, Options

        cursor = self._cursor or Cursor.from_dict(Handover.from_dict(self.handover).cursor)
        return last_lines(api, ref, Options.from_dict(self.options).logs, cursor, self.log)

    async def _task_state(self) -> str:
        """The state of our task instance, of `compat.task_state`; UNKNOWN where it cannot be read."""
        if self.task_instance is None:
            return UNKNOWN
        try:
            return await _ask_state(self.task_instance)
        except Exception as e:
            self.log.warning("The state of the task cannot be read: %s: %s", type(e).__name__, e)
            return UNKNOWN

    def _warm_up(self) -> None:
        """Ask Airflow one harmless question, once in a process, and wait for no answer.

        The triggerer's supervisor loads Airflow's API when its first request arrives, which takes 7 s and more: a kill
        should not have to wait for that.
        """
        global _warmed_up
        connection = supervisor_connection()
        if self.task_instance is None or connection is None or connection is _warmed_up:
            return
        _warmed_up = connection
        asking = asyncio.ensure_future(_ask_state(self.task_instance))
        _warming_up.add(asking)
        asking.add_done_callback(_warmed)


async def _ask_state(ti: Any) -> str:
    from airflow_provider_ktrain.compat import task_state

    asking = asyncio.to_thread(task_state, ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
    return await asyncio.wait_for(asking, STATE_TIMEOUT)


_warmed_up: object | None = None  # the connection to the supervisor over which a question was asked
_warming_up: set[asyncio.Future[str]] = set()


def _warmed(asking: asyncio.Future[str]) -> None:
    _warming_up.discard(asking)
    if not asking.cancelled():
        asking.exception()  # whatever it is, a kill asks again
