"""Operators that scale, suspend, resume or delete a training job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_provider_ktrain.compat import StorableLog
from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.checks import parameters
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.text.output import clean
from airflow_provider_ktrain.exceptions import as_airflow_errors
from airflow_provider_ktrain.parse_checks import ParseChecks

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.core.identity.names import JobRef
    from airflow_provider_ktrain.engine.api.client import Api


class JobControlOperator(ParseChecks, StorableLog, BaseOperator):
    """Base of the operators that find a job by kind and name, change it and wait for the effect.

    With `job_name=train.job_name`, a task can run before or while `train` runs: the name is known before the job
    exists, and the parameter doesn't make the task a successor of `train`.

    :param job_name: name of the job; `train.job_name` for the job of a task `train` of the same DAG. Templated.
    :param kind: PyTorchJob, MPIJob or TrainJob. Templated. Default: PyTorchJob.
    :param namespace: namespace of the job. Templated. Default: the connection's, else `default`.
    :param timeout: limit for the effect, in seconds or as a timedelta. Default: 300 seconds.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param kwargs: parameters of `BaseOperator`.
    :raises TrainingJobError: the job doesn't exist, or the effect doesn't come in time.
    :raises ValueError: when the DAG is parsed: a parameter without a template is invalid.
    :raises TrainingConfigurationError: a parameter is invalid; never retried.
    """

    template_fields: Sequence[str] = ("job_name", "kind", "namespace", "kubernetes_conn_id", "cluster_context")
    missing_ok = False

    def __init__(
        self,
        *,
        job_name: str,
        kind: str = "PyTorchJob",
        namespace: str | None = None,
        timeout: timedelta | float = 300,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job_name = job_name
        self.kind = kind
        self.namespace = namespace
        self.timeout = timeout
        self.kubernetes_conn_id = kubernetes_conn_id
        self.cluster_context = cluster_context

    def _check_literals(self, given: Mapping[str, Any]) -> None:
        if "kind" in given:
            kind_of(self.kind)
        parameters.validated(given, "workers")

    def execute(self, context: Context) -> str:
        """Change the job. The result is also logged."""
        from airflow_provider_ktrain.worker_host import WorkerHost

        with as_airflow_errors():
            kind_of(self.kind)
            for name, value in parameters.validated(vars(self), "workers").items():
                setattr(self, name, value)
            with WorkerHost.connected(self) as host:
                done: str = host.call(self._act_on_job)
        self.log.info(done)
        return clean(done)

    async def _act_on_job(self, api: Api, default_namespace: str) -> str:
        """Find the job by its name and change it."""
        from airflow_provider_ktrain.engine.api.job_calls import find

        kind = kind_of(self.kind)
        namespace = self.namespace or default_namespace
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout
        ref, job = await find(api, kind, namespace, self.job_name, timeout=seconds)
        if job is ABSENT:
            missing = f"{ref} does not exist"
            if self.missing_ok:
                return missing
            raise KtrainError(f"{missing}. See: kubectl get {kind.plural} -n {namespace}")
        return await self.act(api, replace(ref, uid=job["metadata"]["uid"]), seconds)

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        """Change the job and wait for the effect. Returns a line for the log."""
        raise NotImplementedError


class ScaleTrainingJobOperator(JobControlOperator):
    """Change the number of Workers of a running job, within its elastic bounds, and wait until that many Workers run.

    ```python
    ScaleTrainingJobOperator(task_id="grow", job_name="background", workers=3)
    ```

    Guide: docs/how-to/elastic.md. In an MPIJob, the Launcher decides whether ranks run in them.

    :param workers: new number of Workers. Templated.
    :raises TrainingJobError: the job doesn't exist or has ended, or the Workers don't run in time.
    """

    template_fields: Sequence[str] = (*JobControlOperator.template_fields, "workers")

    def __init__(
        self,
        *,
        workers: int | str,
        # of JobControlOperator: scripts/signatures.py
        job_name: str,
        kind: str = "PyTorchJob",
        namespace: str | None = None,
        timeout: timedelta | float = 300,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            # of JobControlOperator: scripts/signatures.py
            job_name=job_name, kind=kind, namespace=namespace, timeout=timeout, kubernetes_conn_id=kubernetes_conn_id,
            cluster_context=cluster_context,
            **kwargs,
        )  # fmt: skip
        self.workers: Any = workers  # a rendered template is text until `execute` converts it

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        """Return when exactly `workers` Workers run."""
        from airflow_provider_ktrain.engine.job_control import scale

        return await scale(api, ref, self.workers, timeout=timeout)


class SuspendTrainingJobOperator(JobControlOperator):
    """Suspend a running job and wait until its pods are gone. Its GPUs are then free; the job remains.

    ```python
    SuspendTrainingJobOperator(task_id="suspend", job_name="background", namespace="training")
    ```

    Guide: docs/how-to/sensors-and-job-control.md.

    :raises TrainingJobError: the job doesn't exist or has ended, or its pods aren't gone in time.
    """

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        """Return when the job's pods are gone."""
        from airflow_provider_ktrain.engine.job_control import suspend

        return await suspend(api, ref, timeout=timeout)


class ResumeTrainingJobOperator(JobControlOperator):
    """Resume a suspended job and wait until its pods appear.

    ```python
    ResumeTrainingJobOperator(task_id="resume", job_name="background", namespace="training")
    ```

    Guide: docs/how-to/sensors-and-job-control.md.

    :raises TrainingJobError: the job doesn't exist or has ended, or no pod appears in time.
    """

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        """Return when the operator has created pods again."""
        from airflow_provider_ktrain.engine.job_control import resume

        return await resume(api, ref, timeout=timeout)


class DeleteTrainingJobOperator(JobControlOperator):
    """Delete a job and wait until its pods are gone.

    ```python
    DeleteTrainingJobOperator(task_id="delete", job_name="background", namespace="training")
    ```

    Guide: docs/how-to/sensors-and-job-control.md.

    :param missing_ok: succeed if the job doesn't exist. Default: True.
    :param force: delete also an unfinished job that a task owns. That task then fails. Default: False.
    :raises TrainingJobError: the job doesn't exist and `missing_ok` is False, a task owns it and `force` is False, or
        its pods aren't gone in time.
    """

    def __init__(
        self,
        *,
        missing_ok: bool = True,
        force: bool = False,
        # of JobControlOperator: scripts/signatures.py
        job_name: str,
        kind: str = "PyTorchJob",
        namespace: str | None = None,
        timeout: timedelta | float = 300,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            # of JobControlOperator: scripts/signatures.py
            job_name=job_name, kind=kind, namespace=namespace, timeout=timeout, kubernetes_conn_id=kubernetes_conn_id,
            cluster_context=cluster_context,
            **kwargs,
        )  # fmt: skip
        self.missing_ok = missing_ok
        self.force = force

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        """Return when the job and its pods are gone; with `force`, also delete a job that a task owns."""
        from airflow_provider_ktrain.engine.job_control import delete

        return (await delete(api, ref, force=self.force, timeout=timeout)).text
