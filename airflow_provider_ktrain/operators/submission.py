"""One submission of a job request: the job's cluster, namespace and name, the attempt, and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.checks import check, raise_errors
from airflow_provider_ktrain.core.errors import KtrainError, ManifestError
from airflow_provider_ktrain.core.formats import SUBMISSION_STATE, VERSION, mapping
from airflow_provider_ktrain.core.identity.names import JobRef, code_hash, delete_command
from airflow_provider_ktrain.core.kinds import Manifest
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.reporting.announcement import describe_job, manifest_text
from airflow_provider_ktrain.core.reporting.asset_events import checkpoint_dir
from airflow_provider_ktrain.core.reporting.redaction import redacted
from airflow_provider_ktrain.core.text.output import Verbatim, counted
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import Log, check_cluster, served_version
from airflow_provider_ktrain.engine.submit.create_or_adopt import Posting, Submitted, find_own, submit
from airflow_provider_ktrain.engine.submit.preflight import preflight
from airflow_provider_ktrain.engine.submit.runtimes import read_served
from airflow_provider_ktrain.operators import task_store
from airflow_provider_ktrain.operators.checkpoint_listing import CheckpointListing

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.hooks.training import TrainingHook

DISCOVERY_PATIENCE = 15.0  #: Seconds to retry discovery; short, so that an unreachable cluster is reported soon.
CREATE_PATIENCE = 120.0  #: Seconds to retry the create and other requests about the job.


class TaskSubmission:
    """A submission, prepared before the event loop runs: `carry_out` sends no requests to Airflow.

    The job's place (connection, cluster, namespace, name) is stored in the task store *before* the job is created, so
    that a retry whose connection has changed doesn't start a second job on another cluster.

    If the request is invalid, its error is raised, unless an earlier try has submitted a job: with reattach='always'
    that job is adopted, with 'if_unchanged' it is released and the error is raised afterwards.

    :param patience: seconds to retry an unreachable or overloaded API server where an earlier try may have left a job.
    :raises ManifestError: the request is invalid, and no earlier try has submitted a job.
    :raises KtrainError: the connection or namespace has changed since the previous try.
    :raises AccessError: the connection points to another cluster than in the previous try.
    """

    def __init__(self, request: JobRequest, context: Context, hook: TrainingHook, *, patience: float) -> None:
        self._patience = patience
        self.version: str | None = None
        self._sent: Manifest = {}  # the manifest of the job that this try creates
        state = mapping(compat.recall(context, SUBMISSION_STATE))
        self._has_submitted = bool(state) or not compat.has_task_store(context)
        same_life = state.get("max_tries") == request.owner.max_tries
        self._before: Mapping[str, str] = mapping(state.get("place")) if same_life else {}
        known = {"name", "namespace"} <= self._before.keys()
        if request.invalid is not None and (request.dry_run or not (known or _may_have_job(request, context))):
            raise request.invalid
        hook.load()
        if request.invalid is not None and known:
            self.name, self.namespace = self._before["name"], self._before["namespace"]
        else:
            self.name, self.namespace = request.job_name, request.namespace_or(hook.namespace or "default")
        self.delete_command = delete_command(request.kind, self.namespace, self.name)
        if same_life:  # `retries` may have been changed since
            request = replace(request, first_try=state.get("first_try", request.first_try))
        self._request = request
        self._previous = int(state.get("attempt", 0)) if same_life or request.resume_on_clear else 0
        self._earlier_step: float | None = None  # the highest step of earlier tries
        self._checkpoints: CheckpointListing | None = None  # what they left
        if self.is_retry and not request.dry_run:
            first = 1 if request.resume_on_clear else request.first_try
            self._earlier_step = task_store.read_earlier_step(context, first)
            if request.checkpoint_location is not None:
                self._checkpoints = CheckpointListing(request.checkpoint_location)

    async def cluster(self, api: Api, earlier: JobRef | None, log: Log) -> str:
        """The identity of the connection's cluster.

        :param earlier: the job of an earlier try. None: there is none.
        :raises AccessError: the earlier job is in another cluster.
        """
        if earlier is not None:
            await check_cluster(api, earlier, patience=self.patience(DISCOVERY_PATIENCE), log=log)
        return await api.cluster()

    def settle(self, context: Context, ask_cluster: Callable[[JobRef | None], str], log: Log) -> None:
        """Store the job's place in the task store.

        :param ask_cluster: calls `cluster`.
        """
        request, before = self._request, self._before
        place = {
            "kubernetes_conn_id": request.kubernetes_conn_id,
            "cluster_context": request.cluster_context or "",
            "namespace": self.namespace,
            "name": self.name,
        }
        _same_place(before, place)
        job = task_store.read_job(context) if before else None
        place["cluster"] = ask_cluster(job)
        if compat.is_common_deployment_id():
            # a cluster on this machine is rarely shared
            write = log.info if urlsplit(place["cluster"]).hostname in compat.LOOPBACK else log.warning
            write(
                "Set [ktrain] deployment_id: another Airflow that runs this DAG on this cluster would use the same job "
                "names.\n[api] base_url is not set or is localhost, so it does not identify this Airflow. Set "
                "AIRFLOW__KTRAIN__DEPLOYMENT_ID to the same value in all components of each Airflow."
            )
        if not job:  # else the clusters were compared
            _same_place(before, place)
        life = {"max_tries": request.owner.max_tries, "first_try": request.first_try}
        self._state, self._place = {"version": VERSION, **life, "place": place}, place
        is_stored = compat.remember(context, SUBMISSION_STATE, {**self._state, "attempt": self.attempt})
        self._request = replace(request, owner=replace(request.owner, is_stored=is_stored))

    def described(self) -> dict[str, str]:
        """The job that is submitted, after `settle`."""
        place = {name: self._place[name] for name in ("namespace", "name", "cluster")}
        return {"kind": self._request.kind.name, **place}

    @property
    def is_retry(self) -> bool:
        """Whether an earlier try may have left a job."""
        return self._request.owner.try_number > 1

    def patience(self, of_first_try: float) -> float:
        """Seconds to retry an unreachable or overloaded API server."""
        return max(of_first_try, self._patience) if self.is_retry else of_first_try

    @property
    def attempt(self) -> int:
        """The number of this submission since the task was last cleared, from 1: KTRAIN_ATTEMPT."""
        return self._previous + 1

    async def carry_out(self, api: Api, log: Log, *, posting: Posting) -> Submitted:
        """Discover the served API version, then create or adopt the job."""
        request = self._request
        kind, owner = request.kind, request.owner
        discovery, patience = self.patience(DISCOVERY_PATIENCE), self.patience(CREATE_PATIENCE)
        self.version = await served_version(api, kind, patience=discovery, log=log)
        try:
            fitted = request.fitted(f"{kind.group}/{self.version}")
            served = await read_served(api, kind, self.version, fitted, self.namespace, patience=discovery, log=log)
            submitted = await submit(
                api, kind, self.version, lambda submission: self._stamped(fitted, submission, served), owner,
                request.first_try, reattach=request.reattach, patience=patience,
                quota_patience=request.schedule_seconds or 0, code=request.code,
                has_submitted=self._has_submitted, posting=posting, log=log,
            )  # fmt: skip
        except ManifestError as invalid:
            if not self.is_retry:
                raise
            annotations = request.annotations(None, now=timing.epoch())
            metadata = {"name": self.name, "namespace": self.namespace, "annotations": annotations}
            return await submit(
                api, kind, self.version, lambda _: {"metadata": metadata}, owner, request.first_try,
                reattach=request.reattach, patience=patience, invalid=invalid, has_submitted=self._has_submitted,
                posting=posting, log=log,
            )  # fmt: skip
        if submitted.created:
            self._log_avoided_nodes(served, log)
        return submitted

    def _log_avoided_nodes(self, served: Served | None, log: Log) -> None:
        """Log which nodes the new job avoids, and why."""
        nodes = self._request.avoid_nodes
        if nodes and not self._request.can_avoid_nodes(served):
            log.warning("avoid_failed_nodes has no effect: on this cluster, the pods of this job can't be patched.")
        elif nodes:
            reasons = "\n".join(f"{name}: {reason}" for name, reason in nodes.items())
            log.info(f"The job avoids {counted(len(nodes), 'node')} on which earlier tries failed.\n{reasons}")

    def _stamped(self, fitted: Manifest, submission: str, served: Served | None) -> Manifest:
        """The manifest to send."""
        self._sent = self._request.stamped(
            fitted, self.namespace, submission, attempt=self.attempt, now=timing.epoch(), served=served
        )
        return self._sent

    async def try_out(self, api: Api, log: Log) -> str:
        """Run all checks that create nothing; returns a line for the log."""
        problems = await preflight(api, self._request, self.namespace, patience=DISCOVERY_PATIENCE, log=log)
        raise_errors(problems)
        logged = {problem.code for problem in check(self._request.manifest or {})}
        for problem in problems:
            if problem.code not in logged:  # when the manifest was built
                log.warning(f"Manifest: {problem.text}")
        return (
            f"Dry run: no errors found in {self._request.kind.name} {self.namespace}/{self.name}; nothing was created."
        )

    def announce(self, submitted: Submitted, log: Log) -> None:
        """Log what this try follows, how to look at it, and the manifest if this try has sent it, without secrets."""
        kind = self._request.kind
        log.info(describe_job(submitted.ref, kind, submitted.job, created=submitted.created))
        if submitted.created:
            # the UI folds what is between these two lines
            log.info("::group::Submitted manifest, without secrets")
            log.info(Verbatim(manifest_text(redacted(self._sent, hides=compat.hides))))
            log.info("::endgroup::")
            if self._checkpoints is not None:
                log.info(self._checkpoints.describe())

    def steps_to_hand_over(self, submitted: Submitted) -> dict[str, Any]:
        """What the follower of a new job needs to count its repeated steps: see `core.state.steps.reported_steps`."""
        known = submitted.created and self._earlier_step is not None
        return {"steps": {"before": self._earlier_step}} if known else {}

    def remember(self, context: Context, submitted: Submitted) -> None:
        """Store the job in the task store. An adopted job doesn't count as another attempt."""
        job = submitted.job
        directory = checkpoint_dir(self._request.kind, job)
        task_store.write_job(context, submitted.ref, code=code_hash(job), checkpoint_dir=directory)
        if not submitted.created and self._previous:
            compat.remember(context, SUBMISSION_STATE, {**self._state, "attempt": self._previous})

    async def find(self, api: Api) -> Submitted | None:
        """The job that this or an earlier try has created; None if there is none or another task owns it."""
        if self.version is None and not self.is_retry:
            return None  # `carry_out` has sent nothing
        kind = self._request.kind
        version = self.version or await served_version(api, kind)
        return await find_own(api, kind, version, self.namespace, self.name, self._request.owner)


def _same_place(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """A retry submits to the same place as the try before it."""
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    if changed:
        raise KtrainError(
            f"{', '.join(changed)} changed since the previous try, whose job may still run. Undo the change, or delete "
            f"that job and clear the task.\nFound {now}, expected {dict(before)}"
        )


def _may_have_job(request: JobRequest, context: Context) -> bool:
    """Whether an earlier try may have left a job, of which nothing is stored: below Airflow 3.3."""
    return request.owner.try_number > 1 and not compat.has_task_store(context)
