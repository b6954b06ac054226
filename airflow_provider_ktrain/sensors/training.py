"""Sensors for jobs that somebody else submitted, one for each kind. They never delete a job."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowException, AirflowSensorTimeout, AirflowSkipException

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.compat import JOB_SOURCE, StorableLog
from airflow_provider_ktrain.core.absent import Absent
from airflow_provider_ktrain.core.checks import parameters
from airflow_provider_ktrain.core.errors import ClusterError, KtrainError
from airflow_provider_ktrain.core.formats import VERSION, mapping
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.logs.selection import LogChoice, check_choice
from airflow_provider_ktrain.core.state.awaited import Awaited, describe_state, look_for
from airflow_provider_ktrain.engine.api.threads import LoopThread
from airflow_provider_ktrain.exceptions import as_airflow_errors, failure
from airflow_provider_ktrain.parse_checks import ParseChecks

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.engine.api.client import Api
    from airflow_provider_ktrain.engine.follow.options import Options
    from airflow_provider_ktrain.engine.follow.outcome import Outcome
    from airflow_provider_ktrain.worker_host import WorkerHost

STATE_KEY = "ktrain_sensor"  #: Key in the task store: see docs/reference/formats.md.
RETRY_PAUSE = 5.0  #: Seconds between two attempts to watch in the worker.


def read_state(stored: Any) -> tuple[int, float, Mapping[str, Any]]:
    """What a sensor has stored under STATE_KEY: failed triggers of this try, epoch seconds of its timeout, and the job.

    :param stored: by this release or another one; None if there is nothing. What is unknown is 0 or empty.
    """
    read = mapping(stored)
    return read.get("failures", 0), read.get("deadline", 0.0), mapping(read.get("job"))


class TrainingJobSensor(ParseChecks, StorableLog, BaseSensorOperator):
    """Base of the sensors: waits for a condition of a job that somebody else submitted.

    The job doesn't need to exist yet, and the sensor never deletes it.

    With `deferrable=True`, all sensors of a connection and namespace share one watch. With `deferrable=False`, the
    worker watches the job (`mode="poke"`), or looks every `poke_interval` (`mode="reschedule"`, without logs).

    When its trigger fails, the worker waits for one minute and defers again; after further failures it waits for 5 and
    15 minutes, then until the timeout. `soft_fail` skips the task if the job ends otherwise or the timeout expires. An
    error that proves nothing about the job, such as refused credentials, is retried first while retries are left.

    :param job_name: name of the job. Templated.
    :param namespace: namespace of the job. Templated. Default: the connection's, else `default`.
    :param conditions: the sensor succeeds when one of these conditions is True: Created, Running, Restarting,
        Suspended, Succeeded, Failed. It fails if the job ends otherwise or is deleted. Default: Succeeded.
    :param logs: whose logs to follow: `auto`, `all`, `primary`, `none`, or replica indexes by role. Default: `none`.
    :param deferrable: wait in the triggerer, without a worker slot. Default: None, `[operators]
        default_deferrable` where an environment variable sets it, else True.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param kwargs: parameters of `BaseSensorOperator`: `timeout` and `poke_interval` (seconds), `mode`, `soft_fail`, ...
    :raises TrainingJobError: the job ended otherwise; a subclass for each category of causes.
    :raises ValueError: when the DAG is parsed: a parameter without a template is invalid.
    :raises TrainingConfigurationError: a parameter is invalid; never retried.
    """

    log_source = JOB_SOURCE
    kind: ClassVar[Kind]
    #: Seconds that the worker waits after the 1st, 2nd and 3rd failed trigger of a try; then until the timeout.
    seconds_in_worker: ClassVar[Sequence[float]] = (60.0, 300.0, 900.0)

    template_fields: Sequence[str] = ("job_name", "namespace", "kubernetes_conn_id", "cluster_context")
    ui_color = "#e6f4ea"

    def __init__(
        self,
        *,
        job_name: str,
        namespace: str | None = None,
        conditions: Collection[str] = ("Succeeded",),
        logs: LogChoice = "none",
        deferrable: bool | None = None,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job_name = job_name
        self.namespace = namespace
        self.conditions = [conditions] if isinstance(conditions, str) else list(conditions)
        self.logs = logs
        self.deferrable = compat.default_deferrable() if deferrable is None else deferrable
        self.kubernetes_conn_id = kubernetes_conn_id
        self.cluster_context = cluster_context

    def _check_literals(self, given: Mapping[str, Any]) -> None:
        if "logs" in given:
            check_choice(self.logs, self.kind)
        parameters.validated(given)

    def execute(self, context: Context) -> Any:
        """Read the job once in the worker; defer if it must wait."""
        if not self.deferrable:
            return super().execute(context) if self.reschedule else self._watch(context)
        with contextlib.closing(LoopThread()) as loop:
            with self._skipping(context), self._host(loop) as host:
                ref, _ = host.call(self._look)
            now = loop.epoch()
        self._defer(context, ref, failures=0, deadline=now + self.timeout, now=now)

    def _defer(self, context: Context, ref: JobRef, failures: int, deadline: float, now: float) -> NoReturn:
        from airflow_provider_ktrain.triggers.training import TrainingJobTrigger

        state = {"version": VERSION, "failures": failures, "deadline": deadline, "job": ref.to_dict()}
        compat.remember(context, STATE_KEY, state)
        self.defer(
            trigger=TrainingJobTrigger(
                job=ref.to_dict(),
                options=self._options().to_dict(),
                kubernetes_conn_id=self.kubernetes_conn_id,
                cluster_context=self.cluster_context,
                failures=failures,
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=max(1.0, deadline - now)),
        )

    def _watch(self, context: Context) -> None:
        """Wait in this process, with a watch instead of polling.

        As before a deferral, the job is read once at first: an error then fails the try, later ones are retried.
        """
        with contextlib.closing(LoopThread()) as loop, self._skipping(context):
            deadline = loop.epoch() + self.timeout
            with self._host(loop) as host:
                host.call(self._find)
            if not self._watch_until(deadline, loop):
                raise self._too_late()

    def _too_late(self) -> AirflowSensorTimeout:
        """The error at the sensor's timeout."""
        return AirflowSensorTimeout(f"{self._title} is not {self._wanted} after {self.timeout:.0f} s")

    @contextlib.contextmanager
    def _skipping(self, context: Context) -> Iterator[None]:
        """Raise the provider's errors as Airflow's, or skip the task instead (`soft_fail`, `never_fail`).

        An error that proves nothing about the job fails it first, while retries are left.
        """
        try:
            with as_airflow_errors():
                yield
        except AirflowException as e:
            unproven = isinstance(e.__cause__, ClusterError)
            if not (self.soft_fail or self.never_fail) or (unproven and compat.has_retry(context)):
                raise
            self.log.warning("Skipped instead of failed.\n%s", e)
            raise AirflowSkipException(f"Skipped instead of failed.\n{e}") from e

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume after the trigger. Airflow's method would fail the task if the trigger could not be loaded."""
        with self._skipping(context):
            if next_method == compat.TRIGGER_FAILED:
                reason = compat.trigger_failure(next_kwargs)
                if reason is None:
                    raise self._too_late()
                return self._go_on(context, reason)
            return compat.resume_without_sensor(self, next_method, next_kwargs, context)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> None:
        """Resume after the trigger."""
        from airflow_provider_ktrain.engine.follow.outcome import Outcome, read_event

        with as_airflow_errors():
            ended = read_event(event)
            if isinstance(ended, Outcome):
                self._finish(ended)
            else:
                self._go_on(context, ended)

    def _go_on(self, context: Context, reason: str) -> None:
        """Wait in the worker after a failed trigger, longer after each failure, then defer again."""
        from airflow_provider_ktrain.engine.follow.deferral import seconds_in_worker

        failures, deadline, job = read_state(compat.recall(context, STATE_KEY))
        with contextlib.closing(LoopThread()) as loop:
            now = loop.epoch()
            deadline = deadline or now + self.timeout
            until = min(deadline, now + (seconds_in_worker(failures + 1, self.seconds_in_worker) or math.inf))
            self.log.warning(
                "The trigger failed. This worker waits for %s for %.0f s.\n%s", self._title, until - now, reason
            )
            if self._watch_until(until, loop):
                return
            if until >= deadline:
                raise self._too_late()
            ref, now = self._reference(job, loop), loop.epoch()
        self._defer(context, ref, failures + 1, deadline, now)

    def _reference(self, stored: Mapping[str, Any], loop: LoopThread) -> JobRef:
        """The job that the sensor deferred for, or the job as found in the cluster."""
        try:
            return JobRef.from_dict(stored)
        except ValueError:
            with self._host(loop) as host:
                return host.call(self._look)[0]

    def _watch_until(self, until: float, loop: LoopThread) -> bool:
        """Whether the job had one of the conditions before `until` (epoch seconds). A watch that fails is retried."""
        while (left := until - loop.epoch()) > 0:
            try:
                with self._host(loop) as host:
                    ref, _ = host.call(self._look)
                    outcome = host.watch(ref, self._options(), left)
            except TimeoutError:
                return False
            except ClusterError as e:
                self.log.warning("%s can't be watched. Retrying.\n%s", self._title, e)
                loop.run(asyncio.sleep(max(0.0, min(RETRY_PAUSE, until - loop.epoch()))))
            else:
                self._finish(outcome)
                return True
        return False

    def poke(self, context: Context) -> bool:
        """Look once at the job, for `mode="reschedule"`."""
        with as_airflow_errors():
            try:
                with self._host() as host:
                    ref, job = host.call(self._look)
                    found = look_for(job, self.conditions)
                    if found is Awaited.NEVER:  # finding the cause takes a watch
                        self._finish(host.watch(ref, self._options(), self.timeout))
                    return found is Awaited.MET
            except ClusterError as e:
                self.log.warning("%s can't be read. Retrying in %.0f s.\n%s", self._title, self.poke_interval, e)
                return False

    def _host(self, loop: LoopThread | None = None) -> WorkerHost:
        from airflow_provider_ktrain.worker_host import WorkerHost

        check_choice(self.logs, self.kind)
        parameters.validated(vars(self))
        return WorkerHost.connected(self, loop=loop)

    async def _find(self, api: Api, default_namespace: str) -> tuple[JobRef, dict[str, Any] | Absent]:
        """Find the job by its name."""
        from airflow_provider_ktrain.engine.api.job_calls import find

        return await find(api, self.kind, self.namespace or default_namespace, self.job_name)

    async def _look(self, api: Api, default_namespace: str) -> tuple[JobRef, dict[str, Any] | Absent]:
        """Find the job, and log what the sensor waits for."""
        ref, job = await self._find(api, default_namespace)
        self.log.info("Waiting until %s is %s. Currently it %s.", ref, self._wanted, describe_state(job))
        return ref, job

    def _options(self) -> Options:
        from airflow_provider_ktrain.engine.follow.options import Options

        return Options(logs=self.logs, conditions=tuple(self.conditions), release=False)

    def _finish(self, outcome: Outcome) -> None:
        """End the task when the job has one of the conditions, or has ended without one."""
        if outcome.cause is not None:
            raise failure(outcome.cause)
        if not outcome.succeeded:
            raise KtrainError(f"{self._title} is {outcome.phase}, not {self._wanted}")
        self.log.info("%s is %s.", self._title, outcome.phase)

    @property
    def _title(self) -> str:
        return f"{self.kind.name} {self.job_name}"

    @property
    def _wanted(self) -> str:
        return " or ".join(self.conditions)


class PyTorchJobSensor(TrainingJobSensor):
    """Wait for a condition of a PyTorchJob that somebody else submitted.

    ```python
    PyTorchJobSensor(task_id="trained", job_name="nightly", namespace="team-b", timeout=6 * 3600)
    ```

    Guide: docs/how-to/sensors-and-job-control.md.
    """

    kind = PYTORCHJOB


class MPIJobSensor(TrainingJobSensor):
    """Wait for a condition of an MPIJob that somebody else submitted.

    ```python
    MPIJobSensor(task_id="trained", job_name="nightly", namespace="team-b", timeout=6 * 3600)
    ```

    Guide: docs/how-to/sensors-and-job-control.md.
    """

    kind = MPIJOB


class TrainJobSensor(TrainingJobSensor):
    """Wait for a condition of a TrainJob that somebody else submitted.

    ```python
    TrainJobSensor(task_id="trained", job_name="nightly", namespace="team-b", timeout=6 * 3600)
    ```

    Guide: docs/how-to/sensors-and-job-control.md.

    A TrainJob has only the conditions Suspended, Succeeded (its Complete) and Failed. The others are derived from its
    status and pods.
    """

    kind = TRAINJOB
