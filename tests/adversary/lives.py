"""A training's life, from the first try of its task to the last process and one pass of the reaper."""

from __future__ import annotations

import asyncio
import datetime
import functools
import random
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowException, TaskDeferred
from airflow.sdk.execution_time.comms import GetTaskStates, GetXCom, SetXCom, XComResult

from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.operators.reaper import ReapTrainingJobsOperator
from tests.adversary.lies import LIES, Lie
from tests.adversary.server import Liar, Plan
from tests.adversary.truth import OVER, REAPER, Truth
from tests.apiserver import Object
from tests.operators.task_instance import Supervisor, supervised
from tests.operators.virtual_cluster import VirtualCluster, virtual_cluster
from tests.operators.virtual_instance import VirtualInstance

HOROVODRUN = ("horovodrun", "--min-np", "1", "--max-np", "2", "--slots", "1")
RESULT = """KTRAIN_RESULT {"loss": 0.5}"""
REAP_SECONDS = 300.0  #: Time between the two looks of the reaper.
LONGEST = 12  #: Processes of a life.


class Killed(SystemExit):
    """SIGKILL to the worker. Nothing that it sends from now on arrives."""


@dataclass(frozen=True)
class Disturbance:
    """What happens at a time of a life, besides the training.

    :param what: lost (SIGKILL to the process that follows), stopped (SIGTERM to it, for its task goes on), mark failed,
        mark success, clear, evict, delete (a user deletes the job), fail trigger, expire, compact (the changes so far
        can't be watched any more), scale (a user changes the number of Workers).
    :param at: seconds after its beginning.
    """

    what: str
    at: float


@dataclass(frozen=True)
class Life:
    """What a life is like.

    :param seconds: for which its program runs.
    :param code: with which it ends.
    :param on_term: with which it ends after SIGTERM.
    :param clear_after: whether a user clears the task after its end, once.
    :param elastic: whether the job is, with 2 Workers.
    :param is_checked: whether a reaper runs between the processes, too.
    :param node_ahead: seconds by which the clock of the node is ahead of the API server's.
    :param host_ahead: seconds by which the clock of Airflow's hosts is.
    """

    kind: str = "PyTorchJob"
    size: int = 1
    seconds: float = 20.0
    code: int = 0
    on_term: int = 143
    result: bool = True
    deferrable: bool = True
    retries: int = 1
    action: str = "delete_job"
    timeout: float | None = None
    max_restarts: int | None = None
    restarts: str = ""  # restart policy
    disturbances: tuple[Disturbance, ...] = ()
    clear_after: bool = False
    elastic: bool = False
    is_checked: bool = False
    node_ahead: float = 0.0
    host_ahead: float = 0.0

    @classmethod
    def random(cls, rng: random.Random) -> Life:
        kind = rng.choice(["PyTorchJob", "MPIJob", "TrainJob"])
        whats = ["lost", "lost", "stopped", "mark failed", "mark success", "clear", "evict", "delete", "fail trigger",
                 "expire", "compact", "scale"]  # fmt: skip
        seconds = rng.choice([0.0, 1.0, 3.0, 8.0, 20.0, 20.0, 45.0])
        count = rng.choice([0, 1, 1, 1, 2])
        happens = [
            Disturbance(rng.choice(whats), round(rng.uniform(0.1, max(seconds + 4.0, 4.0)), 2)) for _ in range(count)
        ]
        restarts = kind == "PyTorchJob" and rng.random() < 0.2
        return cls(
            kind=kind,
            size=rng.choice([1, 1, 2]),
            seconds=seconds,
            code=rng.choice([0, 0, 0, 1]),
            on_term=rng.choice([143, 0]),
            result=rng.random() < 0.3,
            deferrable=rng.random() < 0.6,
            retries=rng.choice([0, 1, 1, 2]),
            action=rng.choice(["delete_job", "delete_job", "keep_job"]),
            timeout=rng.choice([None, None, None, 10.0, 30.0]),
            max_restarts=1 if restarts else None,
            restarts="OnFailure" if restarts else "",
            disturbances=tuple(sorted(happens, key=lambda one: one.at)),
            clear_after=rng.random() < 0.15,
            elastic=kind != "TrainJob" and not restarts and rng.random() < 0.3,
            is_checked=rng.random() < 0.3,
            node_ahead=rng.choice([0.0, 0.0, -5.0, 5.0]),
            host_ahead=rng.choice([0.0, 0.0, -5.0, 5.0]),
        )

    @property
    def program(self) -> list[str]:
        result = f"echo '{RESULT}'; " if self.result else ""
        trap = f"trap 'exit {self.on_term}' TERM; "
        staggered = self.elastic and self.kind == "PyTorchJob"
        wait = f"sleep $(({int(self.seconds)} + $RANK))" if staggered else f"sleep {self.seconds}"
        horovodrun = [*HOROVODRUN] if self.elastic and not staggered else []
        return ["sh", "-c", f"{trap}{wait}; {result}exit {self.code}", *horovodrun]

    @property
    def parameters(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "command": self.program,
            "deferrable": self.deferrable,
            "on_finish_action": self.action,
        }
        if self.kind == "TrainJob":
            found["nodes"] = self.size
        elif self.kind == "MPIJob":
            found["workers"] = 2 if self.elastic else 1
        elif self.size > 1:
            found["workers"] = self.size - 1
        if self.kind == "PyTorchJob" and (self.elastic or self.restarts):
            del found["command"]
            found.pop("workers", None)
            found["manifest"] = self._manifest
        if self.timeout is not None:
            found["execution_timeout"] = datetime.timedelta(seconds=self.timeout)
        if self.max_restarts is not None:
            found["max_restarts"] = self.max_restarts
        return found

    @property
    def _manifest(self) -> Object:
        container = {"name": "pytorch", "image": "image:1", "command": self.program}
        roles = {"Worker": 2} if self.elastic else {"Master": 1, "Worker": self.size - 1}
        replica = {"restartPolicy": self.restarts or "Never", "template": {"spec": {"containers": [container]}}}
        replicas = {role: {"replicas": count, **replica} for role, count in roles.items() if count}
        elastic = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 2}} if self.elastic else {}
        spec = {**elastic, "pytorchReplicaSpecs": replicas}
        return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {}, "spec": spec}


class Answers(Supervisor):
    """Airflow's supervisor, which knows the state of the task.

    :param xcoms: the XComs of the try.
    """

    def __init__(self, truth: Truth, xcoms: Callable[[], dict[str, Any]]) -> None:
        super().__init__(None)
        self._truth, self._xcoms = truth, xcoms

    def send(self, message: Any) -> Any:
        if isinstance(message, SetXCom):
            self._xcoms()[message.key] = message.value
            return None
        if isinstance(message, GetXCom):
            return XComResult(key=message.key, value=self._xcoms().get(message.key))
        if not isinstance(message, GetTaskStates):
            return None
        state = self._truth.state
        self.states = [None if state == "none" else TaskInstanceState(state)]
        return super().send(message)


@dataclass
class Airflow:
    """Runs the processes of a life, one after the other."""

    life: Life
    instance: VirtualInstance
    truth: Truth
    server: Liar
    number: int = 0
    max_tries: int = 0
    process: str = ""  # the present one: worker, trigger or none
    request: str = ""  # what is asked of the trigger
    wake: asyncio.Event | None = None
    happened: list[str] = field(default_factory=list)

    def run(self) -> None:
        life, truth = self.life, self.truth
        world = self.instance.world
        self.max_tries = life.retries
        for one in life.disturbances:
            world.after(one.at, self._disturb, one.what)
        self.instance.on_interrupt(self._signaled)
        cleared_after = not life.clear_after
        for _ in range(LONGEST):
            self._try()
            self._check()
            if truth.state in ("none", "restarting", "up_for_retry"):
                continue
            if cleared_after:
                break
            cleared_after = True
            self._clear()
        world.pass_time(35.0)  # pods have their grace period
        truth.watch_clock()
        if truth.state not in OVER:
            truth.object(f"the task does not end: {truth.state}")
        self._reap(REAP_SECONDS)
        self.server.plan = lambda purpose, count: None
        self._reap(REAP_SECONDS)
        world.pass_time(35.0)
        truth.over()

    def _clear(self) -> None:
        self.truth.tell("a user clears the task")
        if self.truth.state not in ("running", "deferred"):
            self.max_tries = self.number + self.life.retries
            self.truth.clears += 1
        self.truth.marked = self.truth.worker_stopped = False
        self.truth.killed_at = None
        self.truth.set_state("none")

    # what happens

    def _disturb(self, what: str) -> None:
        truth = self.truth
        if what == "evict":
            pods = [name for name, pod in self.server.pods.items() if pod["status"].get("phase") == "Running"
                    and "deletionTimestamp" not in pod["metadata"]]  # fmt: skip
            if pods:
                truth.tell(f"  {sorted(pods)[0]} is evicted")
                self.server.evict(sorted(pods)[0])
            return
        if what == "compact":
            truth.tell("  older changes can't be watched any more")
            self.server.compact()
            return
        if what == "scale":
            if self.life.elastic:
                truth.tell("  a user changes the number of Workers")
                self.server.scale()
            return
        if what == "delete":
            for job in self.instance.jobs():
                truth.tell(f"  a user deletes {job['metadata']['uid']}")
                truth.jobs[job["metadata"]["uid"]].deleted_by_user = True
                self.server.remove(self.instance.kind.plural, job["metadata"]["name"])
            return
        if self.process == "" or truth.state not in ("running", "deferred"):
            return
        if self.process == "worker" and what in ("fail trigger", "expire"):
            return
        if what == "stopped" and self.process == "trigger":
            what = "lost"
        truth.tell(f"{self.process}: {what}")
        if what == "mark failed":
            truth.kill("failed")
        elif what == "mark success":
            truth.kill("success")
        elif what == "clear":
            truth.kill("restarting" if self.process == "worker" else "none")
        elif what == "stopped":
            truth.worker_stopped = True
        elif what == "expire":
            truth.expired = True
        self.request = what
        if self.process == "worker":
            if what == "lost":
                self.server.is_cut_off = True
                self.server.break_connections()
            self.instance.world.signal_main_thread(signal.SIGUSR1)
        elif self.wake is not None:
            self.wake.set()

    def _signaled(self) -> None:
        if self.process != "worker" or self.instance.operator is None:
            return
        if self.request == "lost":
            raise Killed
        self.instance.operator.on_kill()

    # a try

    def _try(self) -> None:
        """Run all processes of one try."""
        truth = self.truth
        self.number += 1
        truth.start_try(f"try {self.number}", self.number, self.number <= self.max_tries)
        self.request = ""
        ended = self._worker(self._execute)
        while isinstance(ended, TaskDeferred):
            if truth.state == "running":
                truth.set_state("deferred")
            elif truth.state in OVER or truth.state == "restarting":
                break  # Airflow doesn't accept the deferral
            self._check()
            event = self._trigger(ended)
            if truth.state not in ("deferred",):
                break
            truth.set_state("running")
            self.request = ""
            if event == "fail trigger":
                ended = self._worker(lambda: self.instance.fail("Trigger failure", traceback=["ImportError: no\n"]))
            elif event == "expire":
                ended = self._worker(lambda: self.instance.fail("Trigger timeout"))
            else:
                ended = self._worker(functools.partial(self.instance.resume, event))
        self._ended(ended)

    def _ended(self, ended: Any) -> None:
        truth = self.truth
        lost = isinstance(ended, Killed)
        if isinstance(ended, Exception) and not isinstance(ended, (AirflowException, TaskDeferred)):
            truth.object(f"the worker raises {type(ended).__name__}: {ended}")
        if not lost and not isinstance(ended, TaskDeferred):
            truth.try_ended(not isinstance(ended, BaseException), f"{type(ended).__name__}: {ended}")
        truth.watch_clock()
        if truth.state == "restarting":
            truth.set_state("none")
            truth.killed_at, truth.marked = None, False
        elif truth.state == "none":
            truth.killed_at, truth.marked = None, False
        elif truth.state not in OVER:
            final = type(ended).__name__ in ("TrainingConfigurationError",)
            if not isinstance(ended, BaseException):
                truth.set_state("success")
            else:
                truth.set_state("up_for_retry" if truth.has_retry and not final else "failed")

    def _execute(self) -> Any:
        return self.instance.execute(
            number=self.number, retries=self.life.retries, max_tries=self.max_tries, **self.life.parameters
        )

    def _worker(self, work: Callable[[], Any]) -> Any:
        truth = self.truth
        truth.actor = f"worker of try {self.number}"
        truth.tell(f"{truth.actor} begins")
        self.process = "worker"
        try:
            ended = work()
        except TaskDeferred as e:
            ended = e
        except Killed as e:
            ended = e
        except Exception as e:
            ended = e
        finally:
            self.process = ""
        if self.server.is_cut_off:
            ended = Killed()
        self.instance.world.settle()
        self.server.is_cut_off = False
        truth.tell(f"{truth.actor} ends: {type(ended).__name__}")
        return ended

    def _trigger(self, deferred: TaskDeferred) -> Any:
        """Run triggers until one has an event, or the task is over; returns the event, or why there is none."""
        for _ in range(LONGEST):
            self.request = ""
            event = asyncio.run(self._triggered(deferred))
            self.server.is_cut_off = False
            if event != "lost":
                return event
        raise AssertionError("too many triggers")

    async def _triggered(self, deferred: TaskDeferred) -> Any:
        truth, self.wake = self.truth, asyncio.Event()
        truth.actor = f"trigger of try {self.number}"
        truth.tell(f"{truth.actor} begins")
        trigger = self.instance.trigger(deferred)
        running = asyncio.ensure_future(anext(aiter(trigger.run())))
        waking = asyncio.ensure_future(self.wake.wait())
        self.process = "trigger"
        try:
            await asyncio.wait([running, waking], return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not self.wake.is_set():
                truth.tell(f"{truth.actor} sends its event")
                return running.result().payload
            what = self.request
            if what == "lost":
                self.server.is_cut_off = True
                self.server.break_connections()
            running.cancel("user-action" if truth.state != "deferred" else "")
            await asyncio.gather(running, return_exceptions=True)
            if truth.state != "deferred":
                (error,) = await asyncio.gather(trigger.on_kill(), return_exceptions=True)
                if error is not None:  # Airflow logs it
                    truth.tell(f"on_kill raises {type(error).__name__}: {error}")
            await trigger.cleanup()
            truth.tell(f"{truth.actor} is over: {what}")
            return what
        finally:
            self.process = ""
            waking.cancel()
            self.wake = None

    # the reaper

    def _check(self) -> None:
        """Let a reaper run between two processes of a task that goes on."""
        if self.life.is_checked and self.truth.state not in OVER:
            self._reap(1.0)

    def _reap(self, seconds: float) -> None:
        """Let a reaper run. It may fail because of a lie.

        :param seconds: between its two looks.
        """
        truth, before = self.truth, self.truth.actor
        truth.actor = REAPER
        truth.tell("the reaper begins")
        reaper = ReapTrainingJobsOperator(task_id="reap", dry_run=False, confirm_after=seconds)
        try:
            try:
                reaper.execute(self.instance.context)
            except TaskDeferred as deferred:
                self.instance.world.pass_time(seconds)
                found = {"version": 1, "candidates": deferred.trigger.candidates}
                if reaper.second_look(self.instance.context, found):
                    truth.reaped()
        except AirflowException as e:
            truth.tell(f"the reaper fails: {e}")
        truth.actor = before


def plan_at_random(rng: random.Random, lies: Sequence[Lie] = LIES) -> Plan:
    """Lies at random requests, some of them close together.

    :param lies: those to choose from.
    """
    rate, most = rng.choice([(0.0, 0), (0.02, 3), (0.1, 8), (0.3, 12)])
    chosen = rng.sample(lies, rng.choice([1, min(3, len(lies)), len(lies)]))

    def plan(purpose: str, count: int) -> Lie | None:
        return rng.choice(chosen) if count < most and rng.random() < rate else None

    return plan


def live(life: Life, plan: Plan, seed: int, connect: Callable[[VirtualCluster], object]) -> Truth:
    """Live one life; returns its truth, which says what was wrong.

    :param connect: points the default connection to the cluster.
    """
    random.seed(seed)
    kind = KINDS[life.kind]
    with tempfile.TemporaryDirectory() as directory, virtual_cluster(Path(directory), Liar) as cluster:
        server = cluster.api
        assert isinstance(server, Liar)
        truth = server.truth = Truth(lambda: cluster.world.now, life.timeout, life.max_restarts)
        server.plan, server.rng, server.node_ahead = plan, random.Random(seed), life.node_ahead
        cluster.world.ahead = life.host_ahead
        truth.tell(str(life))
        connect(cluster)
        with (
            VirtualInstance(cluster, kind) as instance,
            supervised(Answers(truth, lambda: instance.ti.xcoms if instance.ti else {})),
        ):
            instance.run_id = f"life-{seed}"
            Airflow(life, instance, truth, server).run()
    return truth
