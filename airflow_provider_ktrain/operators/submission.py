"""One submission of one try: where the job goes, which attempt it is, what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.checks import check, raise_errors
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.formats import SUBMISSION_STATE, VERSION, mapping
from airflow_provider_ktrain.core.identity import FINISH_ANNOTATION, SUBMISSION_LABEL, JobRef, Owner
from airflow_provider_ktrain.core.manifest import expire
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError
from airflow_provider_ktrain.engine.preflight import preflight
from airflow_provider_ktrain.engine.submit import Log, Submitted, served_version, submit
from airflow_provider_ktrain.operators import task_state
from airflow_provider_ktrain.operators.training import source_hash

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.core.kinds import Manifest
    from airflow_provider_ktrain.hooks.training import TrainingHook
    from airflow_provider_ktrain.operators.training import TrainingJobOperator


DISCOVERY_PATIENCE = 15.0  #: seconds; a cluster that is not there at all should be told soon


class Submission:
    """Prepared in the worker before an event loop runs; `carry_out` is then free of questions to Airflow.

    Where the job goes is written into the task's state *before* it is created: a retry that would go elsewhere must
    not start a second job there.

    :raises ManifestError: this try resolves to another place than the one before.
    :raises AccessError: its connection means another cluster than it did then.
    """

    def __init__(
        self,
        operator: TrainingJobOperator,
        context: Context,
        source: Mapping[str, Any] | str | None,
        offline: Manifest,
        hook: TrainingHook,
    ) -> None:
        self._operator = operator
        self._source = source
        self.owner, self.first_try = operator.job_owner(context)
        if compat.is_common_deployment_id():
            operator.log.warning(
                "[ktrain] deployment_id is not set, and [api] base_url tells this Airflow from no other one: where "
                "another runs the same DAGs on this cluster, set AIRFLOW__KTRAIN__DEPLOYMENT_ID in all parts of each"
            )
        self.name = self.owner.key.job_name(operator.name)
        self.namespace = (
            operator.namespace or (offline.get("metadata") or {}).get("namespace") or hook.namespace or "default"
        )
        self.version: str | None = None
        self._expires = not compat.has_task_state(context) and operator.on_finish_action == "delete_job"
        state = mapping(compat.recall(context, SUBMISSION_STATE))
        same_life = state.get("max_tries") == self.owner.max_tries
        if same_life:  # `retries` may have been changed since
            self.first_try = state.get("first_try", self.first_try)
        self._previous = int(state.get("attempt", 0)) if same_life or operator.resume_on_clear else 0
        if not operator.server_dry_run:
            self._settle(context, mapping(state.get("place")) if same_life else {}, hook)

    def _settle(self, context: Context, before: Mapping[str, str], hook: TrainingHook) -> None:
        place = {
            "kubernetes_conn_id": self._operator.kubernetes_conn_id,
            "cluster_context": self._operator.cluster_context or "",
            "namespace": self.namespace,
            "name": self.name,
        }
        _same_place(before, place)
        job = task_state.read_job(context) if before else None
        place["cluster"] = asyncio.run(_cluster(hook, job))
        if not job:  # else it was found there
            _same_place(before, place)
        life = {"max_tries": self.owner.max_tries, "first_try": self.first_try}
        self._state = {"version": VERSION, **life, "place": place}
        compat.remember(context, SUBMISSION_STATE, {**self._state, "attempt": self.attempt})

    @property
    def attempt(self) -> int:
        """Which submission of this life of the task it is, from 1: KTRAIN_ATTEMPT."""
        return self._previous + 1

    @property
    def checkpoint_dir(self) -> str | None:
        """The same for all tries of this life; a clear begins another one unless `resume_on_clear`."""
        if self._operator.checkpoint_dir is None:
            return None
        directory = f"{self._operator.checkpoint_dir.rstrip('/')}/{self.owner.key.job_name(self._operator.task_id)}"
        cleared = self.first_try > 1 and not self._operator.resume_on_clear
        return f"{directory}/from-try-{self.first_try}" if cleared else directory

    async def carry_out(self, api: Api, log: Log) -> Submitted:
        """Find out what the cluster serves; create or adopt."""
        operator = self._operator
        self.version = await served_version(api, operator.kind, patience=DISCOVERY_PATIENCE)
        served = f"{operator.kind.group}/{self.version}"
        built = operator.build_manifest(self._source, served, quiet=True, checkpoint_dir=self.checkpoint_dir)
        hashed = source_hash(built)
        sent = operator.build_manifest(
            self._source, served, quiet=True, checkpoint_dir=self.checkpoint_dir, attempt=self.attempt
        )

        def stamped(submission: str) -> Manifest:
            manifest = operator.stamped(sent, self.owner, self.name, self.namespace, submission, hashed)
            manifest["metadata"]["annotations"][FINISH_ANNOTATION] = operator.on_finish_action
            if self._expires:
                manifest = expire(manifest, compat.SUCCEEDED_JOB_TTL)
            return manifest

        return await submit(
            api, operator.kind, self.version, stamped, self.owner, self.first_try, reattach=operator.reattach, log=log
        )

    async def try_out(self, api: Api, log: Log) -> str:
        """Ask all that can be asked without creating anything; returns a line for the log.

        :raises ManifestError: naming all that speaks against the job.
        """
        operator = self._operator
        version = await served_version(api, operator.kind, patience=DISCOVERY_PATIENCE)
        built = operator.build_manifest(
            self._source, f"{operator.kind.group}/{version}", quiet=True, checkpoint_dir=self.checkpoint_dir,
            attempt=self.attempt,
        )  # fmt: skip
        sent = operator.stamped(built, self.owner, self.name, self.namespace, "dry-run", source_hash(built))
        problems = await preflight(api, sent, self.namespace)
        raise_errors(problems)
        told = {problem.code for problem in check(built)}
        for problem in problems:
            if problem.code not in told:  # build_manifest has logged those
                log.warning(f"Manifest: {problem}")
        return f"Dry run: nothing speaks against {operator.kind.name} {self.namespace}/{self.name}; nothing was created"

    def remember(self, context: Context, submitted: Submitted) -> None:
        """Note the job for later segments of the task; an adopted job is not another attempt."""
        if not submitted.created and self._previous:
            compat.remember(context, SUBMISSION_STATE, {**self._state, "attempt": self._previous})
        task_state.write_job(context, submitted.ref)

    async def find(self, api: Api) -> JobRef | None:
        """The job that a submission which was cut off has created, if it has."""
        if self.version is None:
            return None
        kind = self._operator.kind
        try:
            job = await api.request("GET", paths.jobs(kind, self.version, self.namespace, self.name), timeout=1)
        except ApiStatusError as e:
            if e.not_found:
                return None
            raise
        if Owner.of(job) != self.owner:  # that there is one is no proof that it is ours
            return None
        meta = job["metadata"]
        return JobRef(
            kind.name, self.version, self.namespace, self.name, meta["uid"], self.owner.ti_id,
            self.owner.key.deployment, (meta.get("labels") or {}).get(SUBMISSION_LABEL, ""), await api.cluster(),
        )  # fmt: skip


def _same_place(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    if changed:
        raise ManifestError(
            f"this try would submit to another place than the one before: {', '.join(changed)} changed",
            found=str(now),
            expected=str(dict(before)),
            remedy="put it back, or clear the task to start anew once the job there is gone",
        )


async def _cluster(hook: TrainingHook, job: JobRef | None) -> str:
    """Which cluster the connection means; AccessError where it is not the one that this job is in."""
    async with hook.api(job) as api:
        return await api.cluster()
