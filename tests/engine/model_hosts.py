"""The processes of the model: a worker, a trigger and a terminal, each of which runs the owner of a training.

They do what `operators/task_run.py`, `triggers/training.py` and `cli/run_host.py` do, without Airflow.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, cast

from airflow_provider_ktrain.core.end_rules import Action, Event, Situation, Successor, Task, decide, task_of
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity.names import JobRef, OnFinishAction, Reattach
from airflow_provider_ktrain.core.state.limits import Limit, Limits
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.following import Noticed
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome, cause_of
from airflow_provider_ktrain.engine.host import Host, StatusSink
from airflow_provider_ktrain.engine.submit.create_or_adopt import Posting, Submitted, find_own, submit
from airflow_provider_ktrain.engine.training_owner import Stopped, Training
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests.engine.model_airflow import OVER, Airflow, Deferral, Sink, Try
from tests.engine.model_cluster import NAME, NAMESPACE, Broken, Client, Cluster, manifest


@dataclass
class World:
    """What all processes share.

    :param make_training: the owner's class, or a mutation of it.
    :param judge: called with each outcome that a process reports; raises Broken.
    """

    rng: random.Random
    cluster: Cluster
    airflow: Airflow
    limits: Limits
    action: OnFinishAction
    reattach: Reattach
    cleans_up: bool
    make_training: type[Training]
    judge: Callable[[Process, Outcome], None]
    check_text: Callable[[Process, str], None]
    #: Informers of the triggerer in which all tries run. None: each process has its own.
    informers: dict[tuple[str, str, str], object] | None
    deadline_after: float | None
    faulty: bool = True
    #: What the training of the job with this uid lacks of what the task requires.
    lack: Callable[[str], Event | None] = lambda uid: None
    processes: list[Process] = field(default_factory=list)


class OperatorError(KtrainError):
    """An error in the code around the owner."""


class Texts:
    """A log, which keeps what users read."""

    def __init__(self, record: Callable[[str], None]) -> None:
        self._record = record
        self.texts: list[str] = []

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        self.texts.append(str(event))
        self._record(str(event).replace("\n", " / "))

    warning = error = info


@dataclass
class JobSubmission:
    """What a try submits."""

    world: World
    me: Try

    async def carry_out(self, api: Api, log: Log, *, posting: Posting) -> Submitted:
        world, kind = self.world, self.world.cluster.kind
        changed = world.reattach == "if_unchanged"
        return await submit(
            api, kind, kind.versions[0],
            lambda submission: manifest(self.me.owner, submission, changed, cleans_up=world.cleans_up),
            self.me.owner, self.me.first, reattach=world.reattach, posting=posting, log=log,
        )  # fmt: skip

    @property
    def delete_command(self) -> str:
        return "kubectl delete"

    async def find(self, api: Api) -> Submitted | None:
        kind = self.world.cluster.kind
        return await find_own(api, kind, kind.versions[0], NAMESPACE, NAME, self.me.owner)


class Process:
    """One process of a try. Its attributes are what the rules of the model know about it.

    :param shares: whether it uses the watches of the triggerer.
    """

    host_name = "process"
    shares = False

    def __init__(self, world: World, me: Try) -> None:
        self.world, self.me = world, me
        self.client = Client(world.cluster, me.name, world.informers if self.shares else None)
        self.client.process = self
        self.log = Texts(self._record_text)
        self.stop = StopSignal()
        self.sink = Sink(me, world.rng, lambda: self.client.is_dead)
        self.answer: str | None = None  # Airflow's last answer about the task
        self.ref: JobRef | None = None if me.deferral is None else me.deferral.ref
        self.deadline: float | None = None if me.deferral is None else me.deferral.options.deadline
        self.stopped = self.submitting = self.failed_for_good = self.in_trouble = False
        self.has_stored_outcome = False  # Airflow has the outcome of the job
        self.is_unmet = False  # the training doesn't meet what the task requires: no retry may follow
        self.saw_end: dict[str, tuple[float, str]] = {}  # by uid of a succeeded primary: when it was read, its job
        self.training = world.make_training(self._connect, self.host, cast(Log, self.log), self.signal)
        self.task: asyncio.Task[None] | None = None
        world.processes.append(self)
        me.processes.append(self)

    def __str__(self) -> str:
        return f"{self.host_name} of {self.me.name}"

    def _record_text(self, text: str) -> None:
        self.world.cluster.record(f"  {self}: {text}")
        self.world.check_text(self, text)

    def _check_error(self, error: KtrainError) -> None:
        """While a job is followed, nothing that the API server does in the model ends a try."""
        self.world.cluster.record(f"{self}: {type(error).__name__}: {error}")
        if self.ref is not None and not isinstance(error, OperatorError):
            raise Broken(f"{self} ends because of an error: {error}") from error

    @property
    def signal(self) -> StopSignal | None:
        """How the owner is asked to stop."""
        return self.stop

    @property
    def host(self) -> Host:
        raise NotImplementedError

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def kill_is_proved(self) -> bool:
        """Whether Airflow's last answer after a kill proves that nobody continues with the job."""
        if not self.stopped or self.answer is None:
            return False
        task = task_of(self.answer)
        return task in (Task.OVER, Task.CLEARED)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.world.cluster.record(f"{self} begins")
        self.task = asyncio.get_running_loop().create_task(work, name=str(self))

    def crash(self) -> None:
        """SIGKILL."""
        self.world.cluster.record(f"{self} crashes")
        self.client.is_dead = True
        if self.task is not None:
            self.task.cancel()

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[Api]:
        try:
            yield cast(Api, self.client)
        finally:
            if not self.shares and not self.client.is_dead:
                await self.client.close()

    async def _ask_state(self, seconds: float) -> str:
        """The task's state. Airflow may not answer in time."""
        rng, lost = self.world.rng, self.world.faulty and self.world.rng.random() < 0.2
        await asyncio.sleep(min(rng.choice([0.0, 0.3, 1.0]), seconds))
        self.answer = "" if lost else self.world.airflow.state
        return self.answer

    def _take_over(self, deferral: Deferral) -> None:
        self.training.job.ref, self.training.job.options = deferral.ref, deferral.options
        self.training.handover = deferral.handover

    def _options(self) -> Options:
        after = self.world.deadline_after
        self.deadline = None if after is None else timing.epoch() + after
        return Options(
            logs="auto" if self.world.cluster.has_logs else "none", fail_on_nan=True,
            limits=self.world.limits, deadline=self.deadline, on_finish_action=self.world.action,
            drain_timeout=1,
        )  # fmt: skip


class Worker(Process):
    """A worker: submits and follows, or continues after a trigger."""

    host_name = "worker"

    @property
    def host(self) -> Host:
        retry = self.world.airflow.has_retry(self.me)
        self.successor = Successor.NEXT_TRY if retry else Successor.NOBODY
        return Host(3.5, self._ask_state, self.successor, status_sink=cast(StatusSink, self.sink))

    @property
    def kill_is_proved(self) -> bool:
        nobody = self.successor is Successor.NOBODY and self.stopped
        return super().kill_is_proved or (nobody and self.answer in ("running", ""))

    def kill(self) -> None:
        """SIGTERM."""
        self.world.cluster.record(f"{self} gets SIGTERM")
        self.stopped = True
        self.stop.request("SIGTERM")

    async def execute(self) -> None:
        """The first process of a try."""
        await self._guarded(self._execute())

    async def resume(self) -> None:
        """The process that continues after a trigger."""
        await self._guarded(self._resume())

    async def _guarded(self, work: Coroutine[Any, Any, bool | None]) -> None:
        """Run, and let the owner decide when an error ends the try. None: the task was deferred."""
        succeeded: bool | None = False
        training = self.training
        try:
            succeeded = await work
        except Stopped:
            pass
        except KtrainError as e:
            self._check_error(e)
            if self.stop.reason is not None:
                await training.stop()
            else:
                self.failed_for_good, self.in_trouble = e.final, True
                await training.interrupted(Event.FINAL_ERROR if e.final else Event.ERROR)
        await training.close()
        if succeeded is not None and not self.client.is_dead:
            self.world.cluster.record(f"{self} ends: {'success' if succeeded else 'failure'}")
            self.world.airflow.end(self.me, succeeded, final=self.is_unmet)

    async def _execute(self) -> bool | None:
        world, training, me, rng = self.world, self.training, self.me, self.world.rng
        if (found := world.airflow.earlier_success(me)) is not None:
            return await self._report(*found, Event.SUCCESS_FOUND)
        training.job.options = Options(on_finish_action=world.action)
        self.submitting = True
        submitted = await training.submit(JobSubmission(world, me))
        self.submitting, self.ref = False, submitted.ref
        if rng.random() < 0.06 and world.faulty:
            raise OperatorError("an error of the operator")
        options = self._options()
        until = rng.choice([None, timing.now(), timing.now() + rng.uniform(0.1, 4)])
        ended = await training.follow(submitted.ref, options, until=until, patience=rng.choice([0.0, 60.0]))
        if isinstance(ended, Outcome):
            world.judge(self, ended)
            return await self._finish(ended, submitted.ref)
        if self.stop.reason is not None:
            await training.stop()
            return False
        me.deferral = Deferral(submitted.ref, options, Handover.from_dict(ended.to_dict()))
        me.was_rejected = not world.airflow.move(me, "running", "deferred")
        return False if me.was_rejected else None

    async def _resume(self) -> bool:
        """Continue with the event of the trigger, as `execute_complete` and `resume_execution` do."""
        training, deferral, event = self.training, self.me.deferral, self.me.event
        assert deferral is not None
        outcome = event if isinstance(event, Outcome) else None
        first: Noticed | None = None
        if event is None:
            first = Noticed(Event.DEFERRAL_EXPIRED, Limit.EXECUTION, self.world.deadline_after or 0.0)
        elif outcome is not None and outcome.release_error and not outcome.succeeded and not outcome.kept:
            first = Noticed(Event.RELEASE_FAILED, cause=cause_of(outcome))
        if outcome is None or first is not None:
            training.job.ref, training.job.options, training.handover = (
                deferral.ref,
                deferral.options,
                deferral.handover,
            )
            ended = await training.follow(deferral.ref, deferral.options, patience=60, first=first)
            assert isinstance(ended, Outcome)
            self.world.judge(self, ended)
            outcome = ended
        return await self._finish(outcome, deferral.ref)

    async def _finish(self, outcome: Outcome, ref: JobRef) -> bool:
        """Store the outcome, then delete the job."""
        if (self.stop.reason is not None and not outcome.succeeded) or outcome.superseded:
            return False
        await asyncio.sleep(self.world.rng.choice([0, 0.5]))
        if self.client.is_dead:
            return False
        if outcome.succeeded and (lack := self.world.lack(ref.uid)) is not None:
            if decide(Situation(lack, successor=self.successor)).action is not Action.FAIL_FOR_GOOD:
                return False  # the retry reads the logs again
            outcome = replace(outcome, unmet="loss is nan, required finite")
        stored = not (self.world.faulty and self.world.rng.random() < 0.1)
        if stored:
            self.me.stored, self.me.stored_in_time = (outcome, ref), self.me is self.world.airflow.current
        proven = stored or not outcome.succeeded
        return await self._report(outcome, ref, Event.OUTCOME_STORED if proven else Event.OUTCOME_NOT_STORED)

    async def _report(self, outcome: Outcome, ref: JobRef, event: Event) -> bool:
        left = ""
        if outcome.kept:
            self.has_stored_outcome = event is not Event.OUTCOME_NOT_STORED
            left = await self.training.outcome_stored(JobRef.from_dict(outcome.kept), event)
            if left:
                self.log.warning(f"{left}\n{ref.delete_command}")
        if left and outcome.release_error and self.world.airflow.has_retry(self.me):
            return False
        self.is_unmet = bool(outcome.unmet)
        return outcome.succeeded and not outcome.unmet


class Trigger(Process):
    """A trigger: follows a deferred task's job, beside other triggers of its process."""

    host_name = "trigger"
    shares = True

    @property
    def host(self) -> Host:
        sink = cast(StatusSink, self.sink)
        return Host(None, self._ask_state, Successor.OTHER_PROCESS, patience=30, shared=self.shares, status_sink=sink)

    @property
    def signal(self) -> StopSignal | None:
        return None

    def crash(self) -> None:
        """SIGKILL to the triggerer: all its triggers end, and its watches. The next trigger runs in another one."""
        for process in [p for p in self.world.processes if isinstance(p, Trigger) and p.is_running]:
            if process is self or process.client.informers is self.client.informers:
                Process.crash(process)
        if self.world.informers is not None:
            self.world.informers = {}

    async def run(self) -> None:
        deferral, training = self.me.deferral, self.training
        assert deferral is not None
        self._take_over(deferral)
        event: Outcome | str
        try:
            ended = await training.follow(deferral.ref, deferral.options)
            assert isinstance(ended, Outcome)
            self.world.judge(self, ended)
            event = Outcome.from_dict(ended.to_dict())
        except KtrainError as e:
            self._check_error(e)
            event = str(e)
        await training.close()
        if not self.client.is_dead and self.world.airflow.move(self.me, "deferred", "queued"):
            self.me.event = event
            self.world.cluster.record(f"{self} fires")

    def kill(self) -> None:
        """Cancel the trigger, and call its `on_kill`."""
        self.world.cluster.record(f"{self} is cancelled")
        working, self.stopped = self.task, True
        self.spawn(self._kill(working))

    async def _kill(self, working: asyncio.Task[None] | None) -> None:
        if working is not None:
            while not working.done():
                working.cancel()
                await asyncio.wait([working])
        with contextlib.suppress(KtrainError):
            await self.training.stop()
        await self.training.close()


class Terminal(Process):
    """`ktrain run`: submits, follows and deletes one job."""

    host_name = "terminal"

    @property
    def host(self) -> Host:
        return Host()

    @property
    def kill_is_proved(self) -> bool:
        return self.stopped

    def kill(self) -> None:
        """Ctrl-C."""
        self.world.cluster.record(f"{self} gets SIGINT")
        self.stopped = True
        self.stop.request("Ctrl-C")

    async def execute(self) -> None:
        training, ref = self.training, cast(JobRef | None, None)
        try:
            self.submitting = True
            submitted = await training.submit(JobSubmission(self.world, self.me))
            self.submitting, self.ref = False, submitted.ref
            ref = submitted.ref
            ended = await training.follow(ref, self._options(), patience=math.inf)
            assert isinstance(ended, Outcome)
            self.world.judge(self, ended)
            self.log.info(ended.release_error)
            if ended.kept:
                self.has_stored_outcome = True
                self.log.info(await training.outcome_stored(ref, Event.OUTCOME_STORED))
        except Stopped:
            pass
        except KtrainError as e:
            self._check_error(e)
            self.failed_for_good = self.in_trouble = True
            await training.interrupted(Event.ERROR)
        await training.close()
        if not self.client.is_dead:
            self.world.airflow.state = OVER[0]
