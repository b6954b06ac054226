"""The reaper: an operator that releases jobs whose task is over."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperator

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.checks import parameters
from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.errors import ClusterError, KtrainError, ManifestError, OperatorMissingError
from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.identity.names import DEPLOYMENT_LABEL, JobRef, Owner, Unreadable, label_value
from airflow_provider_ktrain.core.identity.reaping import ENDED_TASK_STATES, is_kept, judge
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.core.state.pods.objects import has_ended
from airflow_provider_ktrain.core.state.status import Seen, phase_of, seen_in
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.exceptions import as_airflow_errors
from airflow_provider_ktrain.parse_checks import ParseChecks

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.engine.api.client import Api, Object
    from airflow_provider_ktrain.engine.api.job_calls import JobRead, Log
    from airflow_provider_ktrain.engine.release import Released
    from airflow_provider_ktrain.worker_host import WorkerHost


class ReapTrainingJobsOperator(ParseChecks, compat.StorableLog, BaseOperator):
    """Release jobs of this deployment whose task is over: success, failed, skipped, removed or deleted.

    ```python
    ReapTrainingJobsOperator(task_id="reap", namespaces="training", dry_run=False)
    ```

    Guide: docs/how-to/reaper.md.

    A task releases its job itself, however it ends. The reaper releases the jobs of tasks that could not, for example
    because a worker and its node were lost together. It releases a job only if two checks, `confirm_after` apart, find
    that its task is over and that its owner hasn't changed. It never changes jobs of tasks that are running, deferred,
    queued, scheduled, restarting, up for retry or cleared. A job that has ended is deleted or kept as the
    `on_finish_action` of its task requires. Releases are fenced, so two reapers may run at once. The task's XCom is the
    list of the released jobs; with `dry_run`, of the jobs that would be released.

    :param namespaces: one or several namespaces to check; each must exist. Templated. Default: the connection's,
        else `default`.
    :param dry_run: only log what would be released. Default: True.
    :param max_jobs: how many jobs one run may release. Default: 20.
    :param confirm_after: time between the two checks, in seconds or as a timedelta. Default: 5 minutes.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param kwargs: parameters of `BaseOperator`.
    :raises ValueError: when the DAG is parsed: a parameter without a template is invalid.
    :raises TrainingConfigurationError: a namespace is an empty string, or `[ktrain] deployment_id` is not set: another
        Airflow can have the same default, and its jobs would look left over.
    :raises TrainingJobError: a namespace does not exist or can't be read.
    """

    template_fields: Sequence[str] = ("namespaces", "kubernetes_conn_id", "cluster_context")

    def __init__(
        self,
        *,
        namespaces: str | Sequence[str] = (),
        dry_run: bool = True,
        max_jobs: int = 20,
        confirm_after: timedelta | float = timedelta(minutes=5),
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.namespaces = namespaces
        self.dry_run_only = dry_run  # every operator has a method `dry_run`
        self.max_jobs = max_jobs
        self.confirm_after = confirm_after
        self.kubernetes_conn_id = kubernetes_conn_id
        self.cluster_context = cluster_context

    def _check_literals(self, given: Mapping[str, Any]) -> None:
        parameters.validated(given)

    def execute(self, context: Context) -> list[str]:
        """First check. A trigger starts the second one later, so that no worker waits."""
        from airflow_provider_ktrain.triggers.reaper import SecondLookTrigger

        candidates = {ref.uid: ref.owner for ref in self._look()}
        if not candidates:
            return []
        pause = self.confirm_after
        seconds = pause.total_seconds() if isinstance(pause, timedelta) else pause
        self.log.info("Left over: %s. A second check follows after %.0f s.", counted(len(candidates), "job"), seconds)
        self.defer(
            trigger=SecondLookTrigger(candidates=candidates, due=timing.epoch() + seconds), method_name="second_look"
        )

    def second_look(self, context: Context, event: Mapping[str, Any]) -> list[str]:
        """Second check: release the jobs that both checks found."""
        candidates = mapping(mapping(event).get("candidates"))
        again = [(ref, owner) for ref, owner in self._look().items() if candidates.get(ref.uid) == ref.owner]
        if len(again) > self.max_jobs:
            self.log.warning(
                "Left over: %s. This run releases only %d (max_jobs).", counted(len(again), "job"), self.max_jobs
            )
        done = []
        with as_airflow_errors(), self._host() as host:
            for ref, owner in again[: self.max_jobs]:
                if self.dry_run_only:
                    self.log.info("Dry run: %s would be released.", ref)
                    done.append(str(ref))
                    continue
                state = _task_state(owner)  # it may have changed while other jobs were released
                if state not in ENDED_TASK_STATES:
                    self.log.info("%s is kept: its task is %s now.", ref, state)
                    continue
                try:
                    if state != "success":
                        with contextlib.suppress(KtrainError):  # the release reads the job again
                            host.call(functools.partial(_report_success, ref, state, self.log))
                    released = host.call(functools.partial(_release, ref))
                    if released is None:
                        self.log.info("%s belongs to another try now. Nothing was released.", ref)
                        continue
                    self.log.info(released.text)
                    done.append(str(ref))
                except KtrainError as e:  # must not keep the other jobs from being released
                    self.log.error("%s was not released. The next run tries again.\n%s", ref, e)
        return done

    def _host(self) -> WorkerHost:
        from airflow_provider_ktrain.worker_host import WorkerHost

        return WorkerHost.connected(self)

    def _look(self) -> dict[JobRef, Owner]:
        """The jobs that are left over now, by their state in the cluster and in Airflow. Each decision is logged."""
        with as_airflow_errors():
            deployment = compat.explicit_deployment_id()
            if not deployment:
                raise ManifestError(
                    "[ktrain] deployment_id is not set",
                    expected="an id that is unique to this Airflow and the same on all its hosts",
                    remedy="set AIRFLOW__KTRAIN__DEPLOYMENT_ID",
                )
            orphans = {}
            with self._host() as host:
                jobs, where = host.call(functools.partial(self._find, deployment))
                for ref, job in jobs:
                    owner = Owner.of(job)
                    if owner is Unreadable.OWNER:
                        self.log.warning("%s is kept: %s.\nTo delete it, run: %s", ref, owner.value, ref.delete_command)
                    if not isinstance(owner, Owner):
                        continue
                    state = _task_state(owner)
                    held = host.call(functools.partial(_active_pods, ref)) if state in ENDED_TASK_STATES else 0
                    verdict = judge(job, deployment, state, held)
                    self.log.info("%s %s: %s.", ref, "is left over" if verdict.orphan else "is kept", verdict.reason)
                    if verdict.orphan:
                        orphans[ref] = owner
            checked = counted(len(jobs), "job")
            self.log.info("Checked %s of deployment %r in %s: %d left over.", checked, deployment, where, len(orphans))
            return orphans

    async def _find(self, deployment: str, api: Api, default: str) -> tuple[list[tuple[JobRef, Object]], str]:
        """The jobs of the deployment, and a text that names the namespaces: `default` if the parameter is empty."""
        from airflow_provider_ktrain.engine.api import api_paths
        from airflow_provider_ktrain.engine.api.job_calls import list_objects, served_version

        given = [self.namespaces] if isinstance(self.namespaces, str) and self.namespaces else list(self.namespaces)
        namespaces = list(dict.fromkeys(given or [default]))
        if not all(namespaces):
            raise ManifestError(
                "invalid parameter", where="namespaces", found=repr(given), expected="names of namespaces"
            )
        selector = f"{DEPLOYMENT_LABEL}={label_value(deployment)}"
        found = []
        for namespace in namespaces:
            await self._check_namespace(api, namespace)
            for kind in KINDS.values():
                try:
                    version = await served_version(api, kind)
                except OperatorMissingError:
                    continue
                jobs = await list_objects(api, api_paths.jobs(kind, version, namespace), selector, keep=dict)
                found += [(JobRef.of(kind, version, job, _owner(job)), job) for job in jobs]
        return found, f"namespace{'s' if len(namespaces) > 1 else ''} {', '.join(map(repr, namespaces))}"

    async def _check_namespace(self, api: Api, namespace: str) -> None:
        """Fail if the namespace doesn't exist. A misspelled namespace would look as if no job were left over there."""
        from airflow_provider_ktrain.engine.api.client import AbsentError, ApiStatusError

        try:
            await api.request("GET", f"/api/v1/namespaces/{quote(namespace, safe='')}")
        except AbsentError:
            raise ClusterError(
                f"Namespace {namespace!r} does not exist. No job was checked. Check `namespaces` and the "
                f"connection, which leads to {await api.cluster()}"
            ) from None
        except ApiStatusError as e:
            if e.status != 403:
                raise
            self.log.info("Can't check that namespace %r exists: no right to get namespaces.", namespace)


def _owner(job: Object) -> Owner | None:
    owner = Owner.of(job)
    return owner if isinstance(owner, Owner) else None


def _task_state(owner: Owner) -> str:
    """State of the task that owns a job. It starts with `unknown` if Airflow can't be asked."""
    try:
        return compat.task_state(owner.key)
    except Exception as e:
        return f"unknown ({e})"


async def _active_pods(ref: JobRef, api: Api, namespace: str) -> int:
    from airflow_provider_ktrain.engine.api.job_calls import job_pods

    return sum(not has_ended(pod) for pod in await job_pods(api, ref))


async def _report_success(ref: JobRef, state: str, log: Log, api: Api, namespace: str) -> None:
    """Log what the task of a job that has succeeded would have returned.

    Airflow may fail a task whose training has succeeded, such as when no worker could resume it.
    """
    from airflow_provider_ktrain.engine.api.job_calls import read_training
    from airflow_provider_ktrain.engine.follow.primary_result import PrimaryResult

    read = await read_training(api, ref)
    if read.job is ABSENT or seen_in(read.job, read.pods) is not Seen.SUCCEEDED:
        return
    try:
        value, error, reported = await PrimaryResult.read(api, ref, read, log)
        found = f"KTRAIN_RESULT {json.dumps(value)}" if reported else "It has reported no result."
        result = f"{found}\n{error}" if error and value is not None else error or found
    except Exception as e:
        result = f"Its result can't be read.\n{e}"
    log.warning(f"{ref} succeeded, but its task is {state}.\nIf you clear the task, it trains again.\n{result}")


async def _release(ref: JobRef, api: Api, namespace: str) -> Released | None:
    """Delete the job. Of a finished job that should be kept, delete only running pods.

    A finished job whose operator recreates its pods is deleted all the same.

    :return: None: the job belongs to another try now.
    """
    from airflow_provider_ktrain.engine.release import DecisionOnRead, fitting_mode, release

    def mode_for(read: JobRead) -> Mode | None:
        owner = None if read.job is ABSENT else _owner(read.job)
        if read.job is not ABSENT and (owner is None or owner.ti_id != ref.owner):
            return None
        kept = read.job is not ABSENT and phase_of(read.job).ended and is_kept(read.job)
        keeps = kept and fitting_mode(ref, read.job, Mode.DELETE_PODS) is Mode.DELETE_PODS
        return Mode.DELETE_PODS if keeps else Mode.DELETE

    return await release(api, ref, DecisionOnRead(mode_for))
