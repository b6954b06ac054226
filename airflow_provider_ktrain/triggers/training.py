"""The trigger of a deferred training. It runs the same `follow` as the worker, including the logs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.compat import EARLIEST_EVENT, StorableLog, storable_log, supervisor_connection
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.formats import VERSION, mapping
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.text.output import clean
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.threads import in_thread
from airflow_provider_ktrain.hooks.training import TrainingHook
from airflow_provider_ktrain.status_writer import TRIGGER, TaskStatusSink, ask_state, question, refresh_seconds

if TYPE_CHECKING:
    from airflow_provider_ktrain.engine.follow.outcome import Outcome
    from airflow_provider_ktrain.engine.logs.log_socket import LogSocket
    from airflow_provider_ktrain.engine.training_owner import Training

INTERRUPT_SECONDS = 4.0  #: Time to release the job after Ctrl-C in `airflow dags test`.
WARM_UP_TIMEOUT = 60.0  #: Seconds in which the request that warms up the supervisor holds back status writes.


class TrainingJobTrigger(StorableLog, BaseTrigger):
    """Follows one job to its end, logs its lines, releases its GPUs, and fires one event: an outcome or an error.

    `execute_complete` deletes a job that has ended, once it has received the event.

    The arguments contain no manifest and no credentials. They are `engine.follow.deferral.Deferral` as a dict, possibly
    written by another release: unknown arguments are ignored, missing ones have defaults. Invalid arguments don't
    raise, because Airflow would fail the task; without a job, the event is an error.

    :param job: `core.identity.names.JobRef` as a dict.
    :param options: `engine.follow.options.Options` as a dict. Default: the defaults of its fields.
    :param handover: `engine.follow.deferral.Handover` of the worker as a dict. Default: nothing was followed before.
    :param kubernetes_conn_id: connection of type `kubernetes`. Default: `kubernetes_default`.
    :param cluster_context: context of its kubeconfig. Default: its current one.
    :param failures: number of earlier triggers of this try that have failed. Default: 0.
    :param version: version of the format of these arguments. Default: this release's.
    :param unknown: arguments of newer releases; ignored.
    """

    log_source = compat.JOB_SOURCE
    #: Seconds to wait for a scheduled or queued task to change its state, and for Airflow's answers.
    state_patience: ClassVar[float] = 300.0
    #: Seconds after which an answer about the task's state counts as slow, and in which one may always arrive.
    slow_answer: ClassVar[float] = 60.0
    #: Seconds from the last line after a kill to the end of the trigger. When it ends, Airflow's supervisor closes the
    #: task's log, and lines that it hasn't read yet go to the triggerer's own log.
    seconds_after_last_line: ClassVar[float] = 2.0
    log_patience: ClassVar[float] = 10.0  #: Seconds to wait at the end until the supervisor has read the log.

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
        from airflow_provider_ktrain.engine.follow.options import Options

        super().__init__()
        self.job = dict(mapping(job))
        read = Options.from_dict(options)
        if not self.job.get("owner"):  # without an owner, deletions can't be fenced and the job isn't a task's
            read = replace(read, release=False)
        self.options = read.to_dict()
        self.handover = dict(mapping(handover))
        self.kubernetes_conn_id = kubernetes_conn_id
        self.cluster_context = cluster_context
        self.failures = failures
        self.version = version
        self._killing: asyncio.Future[None] | None = None
        self._training: Training | None = None
        self._sink: TaskStatusSink | None = None

    @property
    def log(self) -> Any:
        """Airflow's logger of this trigger. It never blocks the event loop."""
        socket = _log_socket()
        return storable_log(super(StorableLog, self).log, self.log_source, None if socket is None else socket.admit)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Attributes and parameters have the same names; text is cleaned, because Airflow stores it in a database."""
        names = ("version", "job", "options", "handover", "kubernetes_conn_id", "cluster_context", "failures")
        arguments = {name: getattr(self, name) for name in names}
        return f"{type(self).__module__}.{type(self).__qualname__}", clean(arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow the job to its end, and fire one event, not before `EARLIEST_EVENT`."""
        # Airflow 3.3 calls `on_kill` only if the CancelledError has the message with which it canceled the trigger.
        # Code that raises another one drops it: asgiref does, while a thread reads a connection. So the work is an
        # asyncio task of its own, and the cancellation only reaches `asyncio.wait`, which keeps the message.
        working = asyncio.ensure_future(self._event())
        if self.task_instance is None:
            _interrupt_on_sigterm()
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError:
            await _cancel(working)
            if self.task_instance is None:
                await self._stop_owner()
                await self._close()
            elif not compat.calls_on_kill():
                await self.on_kill()
            raise
        await self._close()
        yield TriggerEvent(working.result())

    async def _event(self) -> dict[str, Any]:
        """Follow the job, and return the event not before `EARLIEST_EVENT`."""
        from airflow_provider_ktrain.engine.follow.outcome import event_of

        started, began_at, failed = timing.now(), timing.epoch(), False
        try:
            event = event_of(await self._follow(began_at))
        except Exception as e:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # The error was raised while the cancellation closed what was open. An event would be too late.
                raise asyncio.CancelledError from e
            # The event makes the worker follow the job. An exception would only pass it a traceback.
            self.log.exception(
                "The trigger can't follow %s any longer. A worker follows it from here.",
                self.job.get("name", "a job without a name"),
            )
            event, failed = event_of(f"{type(e).__name__}: {e}"), True
        if failed or self.task_instance is not None:  # `airflow dags test` has no scheduler, which could fail the task
            await asyncio.sleep(EARLIEST_EVENT - (timing.now() - started))
        await self._log_read(lines=failed)  # those of a job that was followed to its end are written or counted
        return dict(clean(event))

    async def _follow(self, began_at: float) -> Outcome:
        from airflow_provider_ktrain.engine.follow.deferral import Handover
        from airflow_provider_ktrain.engine.follow.options import Options

        training = self._owner(began_at)
        await training.job.api()
        self._warm_up()  # not earlier: the hook would wait until the supervisor has answered
        outcome = await training.follow(training.job.known_ref, Options.from_dict(self.options))
        assert not isinstance(outcome, Handover)  # only with `until`
        return outcome

    def _owner(self, began_at: float | None = None) -> Training:
        """The owner of the training's life in this process.

        :param began_at: when this trigger began, in epoch seconds. Default: None, it does not follow the job.
        """
        from airflow_provider_ktrain.core.end_rules import Successor
        from airflow_provider_ktrain.engine.follow.deferral import Handover
        from airflow_provider_ktrain.engine.follow.options import Options
        from airflow_provider_ktrain.engine.host import Host
        from airflow_provider_ktrain.engine.training_owner import Training

        if self._training is None:
            self._sink = TaskStatusSink.of(self.task_instance, TRIGGER) if self.options["release"] else None
            # `airflow dags test` runs triggers inline, without a task instance: after Ctrl-C nothing else runs
            inline = self.task_instance is None
            host = Host(
                seconds=INTERRUPT_SECONDS if inline else None,
                ask_state=None if inline else self._task_state,
                successor=Successor.NOBODY if inline else Successor.OTHER_PROCESS,
                patience=self.state_patience,
                shared=True,
                began_at=began_at,
                status_sink=self._sink,
                refresh_seconds=refresh_seconds,
            )
            hook = TrainingHook(self.kubernetes_conn_id, self.cluster_context)
            training = self._training = Training(hook.api, host, self.log)
            training.job.ref, training.job.options = JobRef.from_dict(self.job), Options.from_dict(self.options)
            training.handover = Handover.from_dict(self.handover)
        return self._training

    async def on_kill(self) -> None:
        """Release the job if its task was really killed.

        Airflow also calls this when a stalled triggerer resumes after another one took over its triggers, and after a
        clear, when the new try may already own the job. So the task's state is read first
        (`core/end_rules.py`), and the release is fenced by the owner.

        A triggerer of Airflow 3.3 repeats its cancellation every second, and again after 30 s (on_kill_timeout), which
        would interrupt the release. So the release runs as an asyncio task of its own. This method waits for it and, if
        canceled, `cleanup` does. It ends with the triggerer.
        """
        if self.task_instance is None:  # its state decides; after Ctrl-C, `run` releases the job
            return
        self._killing = asyncio.ensure_future(self._release_if_killed())
        await self._killed()

    async def cleanup(self) -> None:
        """Wait for the release after a kill. When the triggerer only stops, there is none."""
        await self._killed()
        await self._close()

    async def _killed(self) -> None:
        while self._killing is not None and not self._killing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(self._killing)

    async def _release_if_killed(self) -> None:
        """Release the job after a kill, unless the task's state shows that its training continues."""
        if await self._stop_owner():
            await asyncio.sleep(self.seconds_after_last_line)
            await self._log_read(lines=True)

    async def _stop_owner(self) -> bool:
        """Let the owner decide what happens to the job. False: the job is not this task's."""
        if not self.options["release"]:
            return False
        try:
            status = (await self._owner().stop()).status
            if status and self._sink is not None:
                await self._sink.store_end(status)
        except KtrainError as e:
            self.log.error("%s", e)
        return True

    async def _log_read(self, *, lines: bool) -> None:
        """Wait until the supervisor has read the log: lines after the trigger's end would not be in the task's log."""
        if (socket := _log_socket()) is not None:
            await socket.read(self.log_patience, lines=lines)

    async def _close(self) -> None:
        """Close the client. Triggerers repeat cancellations, which must not leave it half closed."""
        training, self._training = self._training, None
        if training is None:
            return
        closing = asyncio.ensure_future(training.close())
        canceled = False
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError:
                canceled = True
        if closing.exception() is not None:  # as after a lost connection
            self.log.debug("The Kubernetes client was not closed properly", exc_info=closing.exception())
        if canceled:
            raise asyncio.CancelledError

    async def _task_state(self, seconds: float) -> str:
        return await ask_state(self.task_instance, self.log, seconds, slow_after=self.slow_answer)

    def _warm_up(self) -> None:
        """Send Airflow one harmless request per process, without waiting for the response.

        The triggerer's supervisor loads Airflow's API at the first request, which takes 7 s of CPU time, and serves
        nobody else meanwhile. A kill should not have to wait for that.
        """
        global _warmed_up
        connection = supervisor_connection()
        if self.task_instance is None or connection is None or connection is _warmed_up:
            return
        _warmed_up = connection
        asking = asyncio.ensure_future(_warm_up_supervisor(self.task_instance))
        _warming_up.add(asking)
        asking.add_done_callback(_warming_up.discard)


def _log_socket() -> LogSocket | None:
    """What all triggers in this process log through; None outside of an event loop."""
    from airflow_provider_ktrain.engine.logs.log_socket import log_socket

    try:
        socket = log_socket()
    except RuntimeError:
        return None
    if not socket.is_connected:
        socket.connect(compat.unread_log, compat.log_socket_size())
    return socket


def _interrupt_on_sigterm() -> None:
    """Let SIGTERM end `airflow dags test` as Ctrl-C does, while a trigger runs inline.

    Airflow has left the handler of the worker segment: it calls the operator's `on_kill`, which has nothing to end.
    """
    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread, which alone handles signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _interrupt)


def _interrupt() -> None:
    """Interrupt this process as Ctrl-C does, also where SIGINT is ignored, as in the background of a shell."""
    if not callable(signal.getsignal(signal.SIGINT)):
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


async def _cancel(working: asyncio.Future[Any]) -> None:
    """Cancel an asyncio task and wait for its end; again each time when this is cancelled, as triggerers repeat it."""
    while not working.done():
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([working])


async def _warm_up_supervisor(ti: Any) -> None:
    with contextlib.suppress(Exception), question():  # a kill sends its own request
        async with asyncio.timeout(WARM_UP_TIMEOUT):
            await in_thread(functools.partial(compat.task_state, ti))


_warmed_up: object | None = None  # the connection to the supervisor that was used for the request
_warming_up: set[asyncio.Future[None]] = set()
