"""A task instance without Airflow: what the SDK passes to `execute`, for several tries in sequence."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar
from unittest import mock

import pytest
from airflow.sdk import DAG, TaskInstanceState
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.execution_time.context import OutletEventAccessors
from airflow.triggers.base import TriggerEvent
from kubernetes import client, config
from pydantic import JsonValue, TypeAdapter

from airflow_provider_ktrain.core.identity.names import PREFIX, TaskKey, label_value
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.state.status import phase_of
from airflow_provider_ktrain.operators.training import (
    MPIJobOperator,
    PyTorchJobOperator,
    TrainingJobOperator,
    TrainJobOperator,
)
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests import clusters
from tests.clusters import TestCluster

Object = dict[str, Any]
S = TypeVar("S", bound="Supervisor")
DAG_ID = "dag"
TRAINS = ["sh", "-c", "trap 'exit 143' TERM; sleep 600 & wait"]
OPERATORS: dict[str, type[TrainingJobOperator]] = {
    PYTORCHJOB.name: PyTorchJobOperator,
    MPIJOB.name: MPIJobOperator,
    TRAINJOB.name: TrainJobOperator,
}
#: Parametrizes a test over kinds: `instance` has jobs of each. The TrainJob uses the runtime torch-distributed.
of_each_kind = pytest.mark.parametrize(
    "instance",
    [PYTORCHJOB, TRAINJOB],
    indirect=True,
    ids=["pytorchjob", "trainjob"],
)


class Store(dict[str, Any]):
    """`task_state_store`."""

    def set(self, key: str, value: Any) -> None:
        """Accepts only JSON, as Airflow does: no tuple, no StrEnum."""
        assert TypeAdapter(JsonValue).validate_python(value, strict=True) == value
        self[key] = value


@dataclass
class Ti:
    """The part of a task instance that operators use."""

    run_id: str
    try_number: int
    max_tries: int
    dag_id: str = DAG_ID
    task_id: str = "train"
    map_index: int = -1
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    xcoms: dict[str, Any] = field(default_factory=dict)
    refuses: str = ""  # the key of an XCom that Airflow, or an XCom backend, rejects
    jobs: Callable[[], list[Object]] = list  # the jobs in the cluster
    jobs_at: dict[str, int] = field(default_factory=dict)  # number of jobs when an XCom was pushed, by its key

    def xcom_push(self, key: str, value: Any) -> None:
        if key == self.refuses:
            raise ConnectionError(f"Airflow rejects {key}")
        self.xcoms[key] = value
        self.jobs_at[key] = len(self.jobs())

    def xcom_pull(self, task_ids: str, key: str, map_indexes: int) -> Any:
        assert (task_ids, map_indexes) == (self.task_id, self.map_index)
        return self.xcoms.get(key)


class DefersSoon:
    """Extends an operator: follows a job only for a moment after the first two failures of its trigger."""

    seconds_in_worker = (0.5, 1.0)


class FollowsLong:
    """Extends an operator: follows a job after a failure of its trigger for longer than any job of a test runs."""

    seconds_in_worker = (600.0,)


class Instance:
    """Tries of one task in one run. A context manager that deletes its jobs.

    :param kind: of its jobs.
    :param version: API version of its jobs. Default: the newest.
    """

    def __init__(self, cluster: TestCluster, kind: Kind = PYTORCHJOB, version: str | None = None) -> None:
        self.cluster = cluster
        self.kind = kind
        version = version or kind.versions[0]
        clusters.require(cluster, kind, version, runtime="torch-distributed")
        self._resource = kind.group, version, cluster.namespace, kind.plural
        self.run_id = uuid.uuid4().hex[:8]
        self.store = Store()
        self.has_state = True  # False: as in Airflow below 3.3
        self.ti: Ti | None = None
        self.outlet_events = OutletEventAccessors()  # of the process that ran last
        self.operator: TrainingJobOperator | None = None
        self.folder = ""
        self.interrupted_at = 0.0  # by `clock`
        self._ends: list[Callable[[], object]] = []  # called at the end, in reverse order
        self._connect()

    def _connect(self) -> None:
        configuration = client.Configuration()
        config.load_kube_config(str(self.cluster.kubeconfig), client_configuration=configuration)
        api = client.ApiClient(configuration)
        self._custom, self._core = client.CustomObjectsApi(api), client.CoreV1Api(api)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in reversed(self._ends):
            end()
        self.delete()

    # the task

    def execute(
        self, *, number: int = 1, retries: int = 0, max_tries: int | None = None,
        operator: type[Any] | None = None, refuses: str = "",
        rendered: Mapping[str, Any] | None = None, **parameters: Any,
    ) -> Any:  # fmt: skip
        """Run `execute` as try `number`. Returns its result, or the exception with which it defers.

        :param operator: the operator, or a class that extends it. Default: the operator of the kind.
        :param rendered: values that templates of parameters render to. An invalid literal fails the constructor.
        """
        most = retries if max_tries is None else max_tries
        self.outlet_events = OutletEventAccessors()
        self.ti = Ti(self.run_id, number, most, refuses=refuses, jobs=self.jobs)
        if "manifest" not in parameters:
            command = {} if "python_callable" in parameters else {"command": TRAINS}
            parameters = {"image": clusters.IMAGE, **command, "gpus": 1, **parameters}
        start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        with DAG(DAG_ID, schedule=None, start_date=start, template_searchpath=self.folder or None):
            self.operator = self._operator(operator)(task_id="train", retries=retries, **parameters)
        self.operator.resolve_template_files()
        for name, value in (rendered or {}).items():
            setattr(self.operator, name, value)
        try:
            return self.operator.execute(self.context)
        except TaskDeferred as deferred:
            return deferred

    def _operator(self, cls: type[Any] | None) -> type[TrainingJobOperator]:
        of_kind = OPERATORS[self.kind.name]
        if cls is None or issubclass(cls, TrainingJobOperator):
            return cls or of_kind
        return types.new_class(cls.__name__, (cls, of_kind))

    def resume(self, event: Object) -> Any:
        """Resume the task after the trigger's event, as the worker does."""
        assert self.operator is not None
        self.outlet_events = OutletEventAccessors()
        return self.operator.resume_execution("execute_complete", {"event": event}, self.context)

    def trigger(self, deferred: Any, cls: type[TrainingJobTrigger] = TrainingJobTrigger) -> TrainingJobTrigger:
        """The trigger of a deferral as the triggerer has it: built from its serialized form."""
        trigger = cls(**deferred.trigger.serialize()[1])
        ti: Any = types.SimpleNamespace(dag_id=DAG_ID, run_id=self.run_id, task_id="train", map_index=-1, try_number=1)
        trigger.task_instance = ti
        return trigger

    def event(self, deferred: Any) -> Any:
        """The event of the trigger of a deferral, after it has run in a triggerer."""
        return first_event(self.trigger(deferred))

    def fail(self, error: str, **more: Any) -> Any:
        """Resume the task after a failed trigger or a timed-out deferral. Returns its result or its deferral.

        :param error: a value of Airflow's TriggerFailureReason.
        :param more: `traceback`, of a trigger that failed.
        """
        assert self.operator is not None
        self.outlet_events = OutletEventAccessors()
        try:
            return self.operator.resume_execution("__fail__", {"error": error, **more}, self.context)
        except TaskDeferred as deferred:
            return deferred

    def wait_ended(self) -> None:
        """Wait until the job has ended, whoever follows it."""
        deadline = time.monotonic() + 240
        while not any(phase_of(job).ended for job in self.jobs()):
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.1)

    # what happens meanwhile

    @property
    def clock(self) -> float:
        """Seconds, for durations."""
        return time.monotonic()

    def when(self, condition: Callable[[], object], work: Callable[[], object]) -> None:
        """Call a function in another thread as soon as a condition holds, until this ends."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.05):
                if condition():
                    work()
                    return

        looking = threading.Thread(target=look)
        self._ends += [looking.join, over.set]
        looking.start()

    def block(self, seconds: float) -> None:
        """Block the calling thread, in which the product waits."""
        time.sleep(seconds)

    def interrupt(self) -> None:
        """Send a signal to the main thread, whose handler is set by `on_interrupt`. Called in another thread."""
        os.kill(os.getpid(), signal.SIGUSR1)

    def on_interrupt(self, handler: Callable[[], object]) -> None:
        """Set what the signal of `interrupt` does, until this ends."""

        def handle(*_: object) -> None:
            self.interrupted_at = self.clock
            handler()

        before = signal.signal(signal.SIGUSR1, handle)
        self._ends.append(lambda: signal.signal(signal.SIGUSR1, before))

    def kill_when(self, condition: Callable[[], object]) -> None:
        """Kill the task as Airflow does, as soon as a condition holds."""
        self.on_interrupt(lambda: self.operator.on_kill() if self.operator is not None else None)
        self.when(condition, self.interrupt)

    @property
    def context(self) -> Any:
        state = {"task_state_store": self.store} if self.has_state else {}
        return {"ti": self.ti, "outlet_events": self.outlet_events, **state}

    # the cluster

    @property
    def key(self) -> TaskKey:
        return TaskKey("tests", DAG_ID, "train", self.run_id)

    @property
    def job_name(self) -> str:
        return self.key.job_name(max_length=self.kind.name_length)

    @property
    def replica(self) -> str:
        """The name of the first replica in the log."""
        return self.kind.replica_name(self.kind.primary({}), 0)

    def jobs(self) -> list[Object]:
        found = self._custom.list_namespaced_custom_object(*self._resource, label_selector=self.selector)
        return list(found["items"])

    def all_jobs(self) -> set[str]:
        """The uids of all jobs in the namespace of the tests. Some may be on their way out: those of earlier tests."""
        jobs = self._custom.list_namespaced_custom_object(*self._resource)["items"]
        return {job["metadata"]["uid"] for job in jobs}

    @property
    def selector(self) -> str:
        """The label selector of its jobs and pods."""
        return f"{PREFIX}/run-id={label_value(self.run_id)}"

    def running(self) -> int:
        pods = self._core.list_namespaced_pod(self.cluster.namespace, label_selector=self.selector).items
        return [p.status.phase for p in pods].count("Running")

    def wait_pods(self, number: int) -> list[Any]:
        """Wait until it has this number of pods, apart from those that are being deleted."""
        deadline = time.monotonic() + 240
        while True:
            pods = self._core.list_namespaced_pod(self.cluster.namespace, label_selector=self.selector).items
            found = [pod for pod in pods if not pod.metadata.deletion_timestamp]
            if len(found) == number:
                return found
            assert time.monotonic() < deadline, f"there are {len(found)} pods, not {number}"
            time.sleep(0.1)

    def wait_running(self) -> None:
        """Wait until its only pod runs."""
        deadline = time.monotonic() + 240
        while self.running() != 1:
            assert time.monotonic() < deadline, "the pod does not run"
            time.sleep(0.1)

    def set_finalizers(self, *names: str) -> None:
        """Set finalizers: a job with a finalizer stays while it is being deleted."""
        for job in self.jobs():
            self._custom.patch_namespaced_custom_object(
                *self._resource, job["metadata"]["name"], {"metadata": {"finalizers": list(names)}}
            )

    def delete(self) -> None:
        for job in self.jobs():
            try:
                self._custom.delete_namespaced_custom_object(*self._resource, job["metadata"]["name"])
            except client.ApiException as e:
                if e.status != 404:
                    raise


def first_event(trigger: TrainingJobTrigger) -> Any:
    """Run a trigger until its event; returns what it sends."""

    async def first() -> TriggerEvent:
        return await anext(aiter(trigger.run()))

    return asyncio.run(first()).payload


class Supervisor:
    """Airflow's supervisor process as seen by a trigger or a task: it answers with the state of one task.

    :param states: the answers in order; the last one is repeated. `asked` counts the requests for states.
    """

    def __init__(self, *states: TaskInstanceState | Exception | None) -> None:
        self.states: list[TaskInstanceState | Exception | None] = list(states)
        self.asked = 0

    def send(self, message: Any) -> Any:
        from airflow.sdk.execution_time.comms import GetTaskStates, TaskStatesResult

        self.asked += isinstance(message, GetTaskStates)
        more = len(self.states) > 1 and isinstance(message, GetTaskStates)
        state = self.states.pop(0) if more else self.states[0]
        if isinstance(state, Exception):
            raise state
        return TaskStatesResult(task_states={message.run_ids[0]: {message.task_ids[0]: state}})


@contextlib.contextmanager
def supervised(answers: S) -> Iterator[S]:
    """Make `answers` the supervisor of this process."""
    from airflow.sdk.execution_time import task_runner

    with mock.patch.object(task_runner, "SUPERVISOR_COMMS", answers, create=True):
        yield answers
