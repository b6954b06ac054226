"""One submission of one try: the job's cluster, namespace and name, the attempt, and the manifest that is sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.checks import check, parameters, raise_errors
from airflow_provider_ktrain.core.errors import ManifestError, PlaceChangedError
from airflow_provider_ktrain.core.formats import SUBMISSION_STATE, VERSION, mapping
from airflow_provider_ktrain.core.identity import FINISH_ANNOTATION, SUBMISSION_LABEL, JobRef, Owner, Reattach
from airflow_provider_ktrain.core.logs.selection import check_choice
from airflow_provider_ktrain.core.manifest.transform import expire
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError
from airflow_provider_ktrain.engine.jobs import Log, served_version
from airflow_provider_ktrain.engine.preflight import preflight
from airflow_provider_ktrain.engine.submit import Submitted, adopt, submit
from airflow_provider_ktrain.operators import task_state

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.core.kinds import Kind, Manifest
    from airflow_provider_ktrain.core.logs.selection import LogChoice
    from airflow_provider_ktrain.hooks.training import TrainingHook

DISCOVERY_PATIENCE = 15.0  #: seconds to retry discovery; short, so that an unreachable cluster is reported soon


class SubmittingOperator(Protocol):
    """What a submission needs of the operator that it works for: `operators.training.TrainingJobOperator`."""

    kind: ClassVar[Kind]
    task_id: str
    name: str | None
    namespace: str | None
    kubernetes_conn_id: str
    cluster_context: str | None
    on_finish_action: Literal["delete_job", "keep_job", "delete_succeeded_job"]
    reattach: Reattach
    logs: LogChoice
    checkpoint_dir: str | None
    resume_on_clear: bool
    server_dry_run: bool

    @property
    def log(self) -> Any:
        """The task's logger."""
        ...

    def job_owner(self, context: Context) -> tuple[Owner, int]:
        """This try as an owner, and the first try since the task was last cleared."""
        ...

    def build_manifest(
        self, source: Mapping[str, Any] | str | None, served: str | None = None, *, quiet: bool = False, **more: Any
    ) -> Manifest:
        """The job's manifest before it gets a name and an owner."""
        ...

    def stamped(
        self, built: Manifest, owner: Owner, name: str, namespace: str, submission: str, hashed: str
    ) -> Manifest:
        """The manifest as it is sent to the API server."""
        ...


class Submission:
    """A submission, prepared before the event loop runs: `carry_out` sends no requests to Airflow.

    The job's place (connection, cluster, namespace, name) is stored in the task's state *before* the job is created, so
    that a retry whose connection has changed doesn't start a second job on another cluster.

    :param source: the rendered manifest.
    :param offline: the manifest as built without a cluster; None if it is invalid.
    :param invalid: why it is invalid. It is raised, unless an earlier try has submitted a job: with
        reattach='always' that job is adopted, with 'if_unchanged' it is released and `invalid` is raised afterwards.
    :raises PlaceChangedError: the connection or namespace has changed since the previous try.
    :raises AccessError: the connection points to another cluster than in the previous try.
    """

    def __init__(
        self,
        operator: SubmittingOperator,
        context: Context,
        source: Mapping[str, Any] | str | None,
        offline: Manifest | None,
        hook: TrainingHook,
        invalid: ManifestError | None = None,
    ) -> None:
        self._operator = operator
        self._source = source
        self._invalid = invalid
        self.owner, self.first_try = operator.job_owner(context)
        if compat.is_common_deployment_id():
            operator.log.warning(
                "Set [ktrain] deployment_id: another Airflow that runs this DAG on this cluster would use the same job "
                "names.\n[api] base_url is not set or is localhost, so it does not identify this Airflow. Set "
                "AIRFLOW__KTRAIN__DEPLOYMENT_ID to the same value in all components of each Airflow."
            )
        self.version: str | None = None
        self._submission = ""  # value of the submission label of the job that this try creates
        self._expires = not compat.has_task_state(context) and operator.on_finish_action == "delete_job"
        state = mapping(compat.recall(context, SUBMISSION_STATE))
        same_life = state.get("max_tries") == self.owner.max_tries
        before: Mapping[str, str] = mapping(state.get("place")) if same_life else {}
        if invalid is not None and (not {"name", "namespace"} <= before.keys() or operator.server_dry_run):
            raise invalid
        hook.load()
        if invalid is not None or offline is None:
            self.name, self.namespace = before["name"], before["namespace"]
        else:
            self.name = self.owner.key.job_name(operator.name, operator.kind.name_length)
            own = (offline.get("metadata") or {}).get("namespace")
            self.namespace = operator.namespace or own or hook.namespace or "default"
        self._reattach: Reattach = operator.reattach if invalid is None or followable(operator) else "if_unchanged"
        if same_life:  # `retries` may have been changed since
            self.first_try = state.get("first_try", self.first_try)
        self._previous = int(state.get("attempt", 0)) if same_life or operator.resume_on_clear else 0
        if not operator.server_dry_run:
            self._settle(context, before, hook)

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
        if not job:  # else the hook has already compared the clusters
            _same_place(before, place)
        life = {"max_tries": self.owner.max_tries, "first_try": self.first_try}
        self._state = {"version": VERSION, **life, "place": place}
        compat.remember(context, SUBMISSION_STATE, {**self._state, "attempt": self.attempt})

    @property
    def is_retry(self) -> bool:
        """Whether an earlier try may have left a job."""
        return self.owner.try_number > 1

    @property
    def attempt(self) -> int:
        """The number of this submission since the task was last cleared, from 1: KTRAIN_ATTEMPT."""
        return self._previous + 1

    @property
    def checkpoint_dir(self) -> str | None:
        """The checkpoint directory: the same for all tries. A clear changes it, unless `resume_on_clear` is set."""
        if self._operator.checkpoint_dir is None:
            return None
        directory = f"{self._operator.checkpoint_dir.rstrip('/')}/{self.owner.key.job_name(self._operator.task_id)}"
        cleared = self.first_try > 1 and not self._operator.resume_on_clear
        return f"{directory}/from-try-{self.first_try}" if cleared else directory

    async def carry_out(self, api: Api, log: Log) -> Submitted:
        """Discover the served API version, then create or adopt the job."""
        operator = self._operator
        self.version = await served_version(api, operator.kind, patience=DISCOVERY_PATIENCE)
        try:
            if self._invalid is not None:
                raise self._invalid
            build = self._builder(f"{operator.kind.group}/{self.version}")
            return await submit(
                api, operator.kind, self.version, build, self.owner, self.first_try, reattach=operator.reattach, log=log
            )
        except ManifestError as invalid:
            if self.owner.try_number == 1:
                raise
            metadata = self._stamp({"kind": operator.kind.name}, "", "")["metadata"]
            return await adopt(
                api, operator.kind, self.version, metadata, self.owner, self.first_try,
                reattach=self._reattach, invalid=invalid, log=log,
            )  # fmt: skip

    def _builder(self, served: str) -> Callable[[str], Manifest]:
        """A function that returns the manifest to send, given the value of its submission label."""
        operator = self._operator
        built = operator.build_manifest(self._source, served, quiet=True, checkpoint_dir=self.checkpoint_dir)
        hashed = source_hash(built)
        sent = operator.build_manifest(
            self._source, served, quiet=True, checkpoint_dir=self.checkpoint_dir, attempt=self.attempt
        )

        return lambda submission: self._stamp(sent, submission, hashed)

    def _stamp(self, manifest: Manifest, submission: str, hashed: str) -> Manifest:
        operator = self._operator
        self._submission = submission
        stamped = operator.stamped(manifest, self.owner, self.name, self.namespace, submission, hashed)
        stamped["metadata"]["annotations"][FINISH_ANNOTATION] = operator.on_finish_action
        return expire(stamped, compat.SUCCEEDED_JOB_TTL) if self._expires else stamped

    async def try_out(self, api: Api, log: Log) -> str:
        """Run all checks that create nothing; returns a line for the log.

        :raises ManifestError: listing all errors.
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
        logged = {problem.code for problem in check(built)}
        for problem in problems:
            if problem.code not in logged:  # by build_manifest
                log.warning(f"Manifest: {problem}")
        return f"Dry run: no errors found in {operator.kind.name} {self.namespace}/{self.name}; nothing was created"

    def remember(self, context: Context, submitted: Submitted) -> None:
        """Store the job in the task's state. An adopted job doesn't count as another attempt."""
        task_state.write_job(context, submitted.ref)
        if not submitted.created and self._previous:
            compat.remember(context, SUBMISSION_STATE, {**self._state, "attempt": self._previous})

    async def find(self, api: Api, *, created: bool = False) -> JobRef | None:
        """The job that this or an earlier try has created; None if there is none or another task owns it.

        :param created: only a job that this try has created. Default: False.
        """
        kind = self._operator.kind
        version = self.version or await served_version(api, kind)
        try:
            job = await api.request("GET", paths.jobs(kind, version, self.namespace, self.name), timeout=1)
        except ApiStatusError as e:
            if e.not_found:
                return None
            raise
        owner = Owner.of(job)
        mine = owner == self.owner
        if owner is None or not (mine or (owner.key == self.owner.key and owner.try_number < self.owner.try_number)):
            return None  # the name alone doesn't prove that the job is ours
        meta = job["metadata"]
        submission = (meta.get("labels") or {}).get(SUBMISSION_LABEL, "")
        if created and not (mine and submission and submission == self._submission):
            return None
        return JobRef(
            kind.name, version, self.namespace, self.name, meta["uid"], owner.ti_id,
            owner.key.deployment, submission, await api.cluster(),
        )  # fmt: skip


def _same_place(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    if changed:
        raise PlaceChangedError(
            f"{', '.join(changed)} changed since the previous try, whose job may still run; found {now}; "
            f"expected {dict(before)}; remedy: undo the change, or delete that job and clear the task"
        )


#: the parameters needed to follow and release an existing job, without its manifest
FOLLOWING = (
    "deferrable", "on_finish_action", "reattach", "queue_timeout", "schedule_timeout", "startup_timeout",
    "log_stall_timeout", "max_restarts",
)  # fmt: skip


def followable(operator: SubmittingOperator) -> bool:
    """Whether the job of an earlier try can be followed although the manifest or another parameter is invalid."""
    try:
        for name, value in parameters.validated({name: getattr(operator, name) for name in FOLLOWING}).items():
            setattr(operator, name, value)
        check_choice(operator.logs, operator.kind)
    except ManifestError:
        return False
    return True


async def _cluster(hook: TrainingHook, job: JobRef | None) -> str:
    """The identity of the connection's cluster.

    :raises AccessError: `job` is in another cluster.
    """
    async with hook.api(job) as api:
        return await api.cluster()


def source_hash(built: Manifest) -> str:
    """A hash of the manifest before names, labels, attempt and deadline are added: `reattach` compares it."""
    return hashlib.sha256(json.dumps(built, sort_keys=True, default=str).encode()).hexdigest()[:16]
