"""Operators for jobs that run: scale, suspend, resume, delete; what people do by `kubectl edit` and `delete`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_provider_ktrain.compat import StorableLog
from airflow_provider_ktrain.core.checks import parameters
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.text import clean
from airflow_provider_ktrain.hooks.training import TrainingHook

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.core.identity import JobRef
    from airflow_provider_ktrain.engine.api import Api


class _JobControlOperator(StorableLog, BaseOperator):
    """Base of the verbs: find a job by kind and name, act on it, wait for the effect.

    :param job_name: name of the job. Of a job that a task `train` of the same DAG submits: `train.job_name`, which is
        known before there is a job and makes this task no successor of `train`. Templated.
    :param kind: PyTorchJob (default) or MPIJob.
    :param namespace: Default: the connection's, else `default`.
    :param timeout: how long the effect may take; seconds or timedelta. Default: 5 minutes.
    :param kubernetes_conn_id: connection of type `kubernetes`.
    :param cluster_context: context of its kubeconfig. Default: its current one.
    :raises TrainingJobError: there is no such job, it has ended, or the effect does not show in time.
    :raises TrainingConfigurationError: a parameter is wrong; never retried.
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

    def execute(self, context: Context) -> str:
        """Returns the line that it logs."""
        from airflow_provider_ktrain.worker_host import WorkerHost, as_airflow_errors

        with as_airflow_errors():
            kind_of(self.kind)
            for name, value in parameters.validated(vars(self), "workers").items():
                setattr(self, name, value)
            hook = TrainingHook(self.kubernetes_conn_id, self.cluster_context)
            hook.load()
            with WorkerHost(hook, self.log) as host:
                done: str = host.call(self._act_on_job)
        self.log.info(done)
        return clean(done)

    async def _act_on_job(self, api: Api, default_namespace: str) -> str:
        from airflow_provider_ktrain.engine.jobs import find, served_version

        kind = kind_of(self.kind)
        namespace = self.namespace or default_namespace
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout
        version = await served_version(api, kind)
        found = await find(api, kind, version, namespace, self.job_name, timeout=seconds)
        if found is None:
            missing = f"{kind.name} {namespace}/{self.job_name} does not exist"
            if self.missing_ok:
                return missing
            raise KtrainError(f"job_name: {missing}. See: kubectl get {kind.plural} -n {namespace}")
        return await self.act(api, found[0], seconds)

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        """Do it; returns a line for the log."""
        raise NotImplementedError


class ScaleTrainingJobOperator(_JobControlOperator):
    """Patch the number of Workers of a running job, within its elastic bounds, and wait until that many run.

    :param workers: how many. Templated.
    """

    template_fields: Sequence[str] = (*_JobControlOperator.template_fields, "workers")
    __doc__ = f"{__doc__}\n{_JobControlOperator.__doc__}"

    def __init__(self, *, workers: int | str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.workers: Any = workers  # text of a template, until `execute` reads it

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        from airflow_provider_ktrain.engine.operations import scale

        return await scale(api, ref, self.workers, timeout=timeout)


class SuspendTrainingJobOperator(_JobControlOperator):
    """Suspend a running job and wait until its pods are gone: its GPUs are free, the job stays."""

    __doc__ = f"{__doc__}\n{_JobControlOperator.__doc__}"

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        from airflow_provider_ktrain.engine.operations import suspend

        return await suspend(api, ref, timeout=timeout)


class ResumeTrainingJobOperator(_JobControlOperator):
    """Resume a suspended job and wait until its pods appear."""

    __doc__ = f"{__doc__}\n{_JobControlOperator.__doc__}"

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        from airflow_provider_ktrain.engine.operations import resume

        return await resume(api, ref, timeout=timeout)


class DeleteTrainingJobOperator(_JobControlOperator):
    """Delete a job and wait until its pods are gone.

    :param missing_ok: whether a job that does not exist is a success. Default: True.
    :param force: delete it also where a task of ours owns it and it has not ended. Default: False.
    """

    __doc__ = f"{__doc__}\n{_JobControlOperator.__doc__}"

    def __init__(self, *, missing_ok: bool = True, force: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.missing_ok = missing_ok
        self.force = force

    async def act(self, api: Api, ref: JobRef, timeout: float) -> str:
        from airflow_provider_ktrain.engine.operations import delete

        return (await delete(api, ref, force=self.force, timeout=timeout)).text
