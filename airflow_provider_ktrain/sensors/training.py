"""Sensors for jobs that others submitted: PyTorchJobSensor and MPIJobSensor. They never delete anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferralTimeout,
)

from airflow_provider_ktrain.compat import StorableLog
from airflow_provider_ktrain.core.checks import parameters
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, Kind
from airflow_provider_ktrain.core.selection import LogChoice, check_choice
from airflow_provider_ktrain.core.status import phase_of, true_conditions
from airflow_provider_ktrain.hooks.training import TrainingHook

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.engine.api import Api
    from airflow_provider_ktrain.engine.terms import Options, Outcome


class TrainingJobSensor(StorableLog, BaseSensorOperator):
    """Base of the sensors: wait until a job has one of some conditions.

    The job need not exist yet. Deferred, one watch serves all sensors of a connection and namespace that wait for it,
    and nothing is polled; not deferred, the worker watches (`mode="poke"`) or looks every `poke_interval`
    (`mode="reschedule"`, which brings no logs).

    :param job_name: name of the job.
    :param namespace: Default: the connection's, else `default`.
    :param conditions: the sensor succeeds when one of these is True. Default: Succeeded. It fails when the job ends
        otherwise, or is deleted.
    :param logs: whose logs to bring meanwhile: as TrainingJobOperator's. Default: `none`.
    :param deferrable: wait in the triggerer. Default: True.
    :param kubernetes_conn_id: connection of type `kubernetes`.
    :param cluster_context: context of its kubeconfig. Default: its current one.
    :raises TrainingJobError: the job ended otherwise; a subclass by category of the cause.
    :raises TrainingConfigurationError: a parameter is wrong; never retried.
    """

    kind: ClassVar[Kind]

    template_fields: Sequence[str] = ("job_name", "namespace", "kubernetes_conn_id", "cluster_context")
    ui_color = "#e6f4ea"

    def __init__(
        self,
        *,
        job_name: str,
        namespace: str | None = None,
        conditions: Collection[str] = ("Succeeded",),
        logs: LogChoice = "none",
        deferrable: bool = True,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job_name = job_name
        self.namespace = namespace
        self.conditions = [conditions] if isinstance(conditions, str) else list(conditions)
        self.logs = logs
        self.deferrable = deferrable
        self.kubernetes_conn_id = kubernetes_conn_id
        self.cluster_context = cluster_context

    def execute(self, context: Context) -> Any:
        from airflow_provider_ktrain.hooks.worker import WorkerHost, as_airflow_errors
        from airflow_provider_ktrain.triggers.training import TrainingJobTrigger

        if not self.deferrable:
            return super().execute(context) if self.reschedule else self._watch()
        with as_airflow_errors(), WorkerHost(self._hook(), self.log) as host:
            ref, _ = host.call(self._look)
        self.defer(
            trigger=TrainingJobTrigger(
                job=ref.to_dict(),
                options=self._options().to_dict(),
                kubernetes_conn_id=self.kubernetes_conn_id,
                cluster_context=self.cluster_context,
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )

    def _watch(self) -> None:
        """Wait in this process: one watch instead of looking again and again."""
        from airflow_provider_ktrain.hooks.worker import WorkerHost, as_airflow_errors

        try:
            with as_airflow_errors(), WorkerHost(self._hook(), self.log) as host:
                ref, _ = host.call(self._look)
                self._finish(host.watch(ref, self._options(), self.timeout))
        except TimeoutError:
            self._give_up(self._too_late())
        except AirflowException as e:
            self._give_up(e)

    def _too_late(self) -> AirflowSensorTimeout:
        return AirflowSensorTimeout(f"{self._title} is not {self._wanted} after {self.timeout:.0f} s")

    def _give_up(self, error: AirflowException) -> NoReturn:
        if self.soft_fail or self.never_fail:
            self.log.warning("Skipped instead of failed: %s", error)
            raise AirflowSkipException(f"Skipped instead of failed: {error}") from error
        raise error

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Go on after the trigger. Airflow's own would say of a timeout `Trigger timeout`, and of a skip not why."""
        try:
            return super(BaseSensorOperator, self).resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            self._give_up(self._too_late())
        except AirflowException as e:
            self._give_up(e)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> None:
        """Resume after the trigger."""
        from airflow_provider_ktrain.engine.terms import Outcome, read_event
        from airflow_provider_ktrain.hooks.worker import as_airflow_errors

        with as_airflow_errors():
            ended = read_event(event)
            if not isinstance(ended, Outcome):
                raise KtrainError(f"the trigger failed while it waited for the job: {ended}")
            self._finish(ended)

    def poke(self, context: Context) -> bool:
        """One look, for `mode="reschedule"`."""
        from airflow_provider_ktrain.hooks.worker import WorkerHost, as_airflow_errors

        with as_airflow_errors(), WorkerHost(self._hook(), self.log) as host:
            ref, job = host.call(self._look)
            if job is None:
                return False
            if set(self.conditions) & true_conditions(job).keys():
                return True
            if phase_of(job).ended:  # to say why it did takes a watch
                self._finish(host.watch(ref, self._options(), self.timeout))
            return False

    def _hook(self) -> TrainingHook:
        check_choice(self.logs, self.kind)
        parameters.read(vars(self))
        hook = TrainingHook(self.kubernetes_conn_id, self.cluster_context)
        hook.load()
        return hook

    async def _look(self, api: Api, default_namespace: str) -> tuple[JobRef, dict[str, Any] | None]:
        """The job by its name, and the job if it is there; the log says what is waited for."""
        from airflow_provider_ktrain.engine.submit import served_version
        from airflow_provider_ktrain.engine.verbs import find

        version = await served_version(api, self.kind)
        ref = JobRef(self.kind.name, version, self.namespace or default_namespace, self.job_name, uid="")
        _, job = await find(api, self.kind, ref.version, ref.namespace, ref.name) or (ref, None)
        now = "does not exist yet" if job is None else f"is {phase_of(job)}"
        self.log.info("Waits until %s is %s; now it %s", ref, self._wanted, now)
        return ref, job

    def _options(self) -> Options:
        from airflow_provider_ktrain.engine.terms import Options

        return Options(logs=self.logs, conditions=tuple(self.conditions), release=False)

    def _finish(self, outcome: Outcome) -> None:
        from airflow_provider_ktrain.exceptions import failure

        if outcome.cause is not None:
            raise failure(outcome.cause)
        if not outcome.succeeded:
            raise KtrainError(f"{self._title} is {outcome.phase}, not {self._wanted}")
        self.log.info("%s is %s", self._title, outcome.phase)

    @property
    def _title(self) -> str:
        return f"{self.kind.name} {self.job_name}"

    @property
    def _wanted(self) -> str:
        return " or ".join(self.conditions)


class PyTorchJobSensor(TrainingJobSensor):
    """Wait for a PyTorchJob that somebody else submitted."""

    __doc__ = f"{__doc__}\n{TrainingJobSensor.__doc__}"
    kind = PYTORCHJOB


class MPIJobSensor(TrainingJobSensor):
    """Wait for an MPIJob that somebody else submitted."""

    __doc__ = f"{__doc__}\n{TrainingJobSensor.__doc__}"
    kind = MPIJOB
