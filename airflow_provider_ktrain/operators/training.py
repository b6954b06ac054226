"""Operators that run a training job as a task: PyTorchJobOperator and MPIJobOperator."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from airflow.sdk import BaseOperator

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.checks import check, parameters
from airflow_provider_ktrain.core.errors import AccessError, KtrainError, ManifestError, ManifestUnreadableError
from airflow_provider_ktrain.core.identity import (
    DEADLINE_ANNOTATION,
    MANIFEST_ANNOTATION,
    OWNER_ANNOTATION,
    JobRef,
    OnFinishAction,
    Owner,
    Reattach,
    TaskKey,
    first_try_since_clear,
)
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, Kind, Manifest
from airflow_provider_ktrain.core.logs.selection import LogChoice, check_choice
from airflow_provider_ktrain.core.manifest import transform as manifests
from airflow_provider_ktrain.core.manifest.loader import load_documents, the_job
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build, overlay
from airflow_provider_ktrain.core.manifest.volumes import Volume
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.storable import storable_outputs
from airflow_provider_ktrain.core.text import clipped
from airflow_provider_ktrain.hooks.training import TrainingHook
from airflow_provider_ktrain.links.training import TrainingJobLink, url_of

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.engine.follow.messages import Deferral, Handover, Options, Outcome
    from airflow_provider_ktrain.engine.submit import Submitted
    from airflow_provider_ktrain.operators.submission import Submission
    from airflow_provider_ktrain.worker_host import WorkerHost

BACKSTOP_PADDING = 300.0  #: seconds from the task's deadline to the job's activeDeadlineSeconds
KILLED = "the task received SIGTERM"


class TrainingJobOperator(compat.StorableLog, BaseOperator):
    """Base of PyTorchJobOperator and MPIJobOperator: submits a job, follows it to its end and releases its GPUs.

    The parameters are documented in each of the two operators.
    """

    kind: ClassVar[Kind]
    defer_padding: ClassVar[float] = 900.0  #: seconds from the task's deadline to the timeout of the deferral
    #: seconds that the worker follows the job after the 1st, 2nd and 3rd failed trigger of a try; then to its end
    seconds_in_worker: ClassVar[Sequence[float]] = (60.0, 300.0, 900.0)
    #: seconds to retry an unreachable API server when neither a trigger nor a retry can take over
    patience: ClassVar[float] = 900.0

    template_fields: Sequence[str] = (
        "manifest", "name", "namespace", "image", "command", "args", "env", "workers", "replicas", "gpus",
        "container_resources", "nproc_per_node", "hosts", "node_selector", "tolerations", "affinity",
        "priority_class_name", "queue_name", "volumes", "checkpoint_dir", "labels", "annotations",
        "kubernetes_conn_id", "cluster_context",
    )  # fmt: skip
    template_fields_renderers: ClassVar[dict[str, str]] = {"manifest": "yaml"}
    operator_extra_links = (TrainingJobLink(),)
    ui_color = "#e8f0fe"

    def __init__(
        self,
        *,
        manifest: Mapping[str, Any] | str | None = None,
        name: str | None = None,
        namespace: str | None = None,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        deferrable: bool = True,
        on_finish_action: Literal["delete_job", "keep_job", "delete_succeeded_job"] = "delete_job",
        reattach: Reattach = "always",
        logs: LogChoice = "auto",
        queue_timeout: timedelta | float | None = None,
        schedule_timeout: timedelta | float | None = None,
        startup_timeout: timedelta | float | None = timedelta(hours=1),
        log_stall_timeout: timedelta | float | None = None,
        max_restarts: int | None = None,
        crash_loop_limit: int | None = 6,
        image: str | None = None,
        command: Sequence[str] | None = None,
        args: Sequence[str] | None = None,
        env: Mapping[str, Any] | None = None,
        workers: int | str | None = None,
        replicas: Mapping[str, int | str] | None = None,
        gpus: int | str | None = None,
        container_resources: Mapping[str, str | int] | None = None,
        nproc_per_node: int | str | None = None,
        hosts: Sequence[str] = (),
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] = (),
        affinity: Mapping[str, Any] | None = None,
        priority_class_name: str | None = None,
        queue_name: str | None = None,
        volumes: Sequence[Volume] = (),
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        checkpoint_dir: str | None = None,
        resume_on_clear: bool = False,
        dry_run: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.manifest = manifest
        self.name = name
        self.namespace = namespace
        self.kubernetes_conn_id = kubernetes_conn_id
        self.cluster_context = cluster_context
        self.deferrable = deferrable
        self.on_finish_action = on_finish_action
        self.reattach = reattach
        self.logs = logs
        self.queue_timeout = queue_timeout
        self.schedule_timeout = schedule_timeout
        self.startup_timeout = startup_timeout
        self.log_stall_timeout = log_stall_timeout
        self.max_restarts = max_restarts
        self.crash_loop_limit = crash_loop_limit
        self.image = image
        self.command = command
        self.args = args
        self.env = env
        self.workers: Any = workers  # also text of a template, which `_check_parameters` converts; likewise below
        self.replicas: Any = replicas
        self.gpus: Any = gpus
        self.container_resources = container_resources
        self.nproc_per_node = nproc_per_node
        self.hosts = hosts
        self.node_selector = node_selector
        self.tolerations = tolerations
        self.affinity = affinity
        self.priority_class_name = priority_class_name
        self.queue_name = queue_name
        self.volumes = volumes
        self.labels = labels
        self.annotations = annotations
        self.checkpoint_dir = checkpoint_dir
        self.resume_on_clear = resume_on_clear
        self.server_dry_run = dry_run  # `dry_run` is a method of every operator
        self._host: WorkerHost | None = None
        self._killed = False

    # the manifest

    def resolve_template_files(self) -> None:
        """Read a manifest file, so that its text is templated and appears in the rendered fields.

        `template_ext` is not used: Airflow would also read every program argument that ends in `.yaml`.
        """
        if (path := _path_of(self.manifest)) and "{{" not in path:
            with contextlib.suppress(ManifestError):  # execute raises it: here it would break the whole DAG
                self.manifest = self._source(path)
        super().resolve_template_files()

    def render_template(
        self, content: Any, context: Context, jinja_env: Any = None, seen_oids: set[int] | None = None
    ) -> Any:
        """Render as Airflow does, but copy volumes instead of changing them: several tasks may share one."""
        if is_dataclass(content) and not isinstance(content, type) and isinstance(content, Volume):
            return replace(content, **super().render_template(vars(content), context, jinja_env, seen_oids))
        return super().render_template(content, context, jinja_env, seen_oids)

    def _source(self, path: str) -> str:
        """The text of a manifest file, found as Airflow finds template files.

        :raises ManifestUnreadableError: it can't be read.
        """
        env = self.get_template_env()
        try:
            if os.path.isabs(path):
                with open(path, encoding="utf-8") as file:
                    return file.read()
            assert env.loader is not None
            return str(env.loader.get_source(env, path)[0])
        except Exception as e:
            searched = getattr(env.loader, "searchpath", [])
            raise ManifestUnreadableError(
                f"manifest: the file {path!r} cannot be read ({type(e).__name__})",
                expected=f"a YAML file, absolute or below {' or '.join(map(str, searched)) or 'the DAG folder'}",
                remedy="correct the path, or pass the manifest as a dict or YAML text",
            ) from None

    def _rendered(self, context: Context) -> Mapping[str, Any] | str | None:
        """The manifest after templating. A file whose path is a template or mapped is only read now."""
        if path := _path_of(self.manifest):
            return str(self.render_template(self._source(path), context))
        return self.manifest

    def _overlay(self, **more: Any) -> JobOptions:
        return JobOptions(
            image=self.image,
            command=self.command,
            args=self.args,
            env=self.env or {},
            workers=self.workers,
            replicas=self.replicas or {},
            gpus=self.gpus,
            resources=self.container_resources or {},
            nproc_per_node=self.nproc_per_node,
            hosts=self.hosts or (),
            node_selector=self.node_selector or {},
            tolerations=self.tolerations or (),
            affinity=self.affinity,
            priority_class=self.priority_class_name,
            queue=self.queue_name,
            volumes=self.volumes or (),
            labels=self.labels or {},
            annotations=self.annotations or {},
            **more,
        )

    def build_manifest(
        self, source: Mapping[str, Any] | str | None, served: str | None = None, *, quiet: bool = False, **more: Any
    ) -> Manifest:
        """Load or build the manifest, apply the options and check the result.

        :param source: the rendered manifest; None builds one from the options.
        :param served: API version to convert the manifest to, such as `kubeflow.org/v1`. Default: no conversion.
        :param quiet: log no warnings. Default: False.
        :param more: further fields of `core.manifest.overlay.JobOptions`.
        :raises ManifestError: listing all errors.
        """
        if source is None:
            built = build(self.kind.name, self._overlay(**more), served)
        else:
            document = the_job(load_documents(source))
            loaded, moved = manifests.modernize(document.content)
            for text in () if quiet else (*document.left_out, *moved):
                self.log.warning("Manifest: %s", text)
            built = overlay(loaded, self._overlay(**more))
        if isinstance(metadata := built.get("metadata"), dict):
            metadata.pop("name", None)  # the job's name is derived from the task's identity
        problems = check(built, self.kind.name)
        for problem in problems:
            if problem.level == "warning" and not quiet:
                self.log.warning("Manifest: %s", problem)
        if errors := [str(p) for p in problems if p.level == "error"]:
            raise ManifestError("the manifest is invalid: " + "\n".join(errors))
        return manifests.fit(built, served) if served else built

    # the task

    def execute(self, context: Context) -> Any:
        """Submit or adopt the job, then follow it: to its end, or for some seconds before the task defers."""
        from airflow_provider_ktrain.operators.submission import Submission
        from airflow_provider_ktrain.worker_host import Try, WorkerHost, as_airflow_errors

        with as_airflow_errors():
            if not self.server_dry_run and (earlier := self._earlier_success(context)):
                return self._conclude(earlier, context)
            source, offline, invalid = self._prepared(context)
            hook = TrainingHook(self.kubernetes_conn_id, self.cluster_context)
            submission = Submission(self, context, source, offline, hook, invalid)
            self._host = host = WorkerHost(hook, self.log, Try.of(context["ti"]))
            if self._killed:  # before there was a host
                host.kill(KILLED)
            with host:
                if self.server_dry_run:
                    self.log.info(host.call(lambda api, _: submission.try_out(api, self.log)))
                    return None
                submitted = host.submit(submission, OnFinishAction.of(self.on_finish_action))
                self._note(context, submission, submitted)
                options = self._options(submitted.job)
                until = time.monotonic() + compat.worker_seconds() if self.deferrable else None
                patience = 0.0 if compat.has_retry(context) else self.patience
                outcome = host.follow(submitted.ref, options, until, patience=patience)
            if outcome is not None:
                return self._finish(outcome, context)
            self._defer(self._deferral(submitted.ref, options, host.handover), context, host)

    def _prepared(
        self, context: Context
    ) -> tuple[Mapping[str, Any] | str | None, Manifest | None, ManifestError | None]:
        """The rendered manifest and the job as built offline; or the error that makes them invalid."""
        try:
            self._check_parameters()
            source = self._rendered(context)
            return source, self.build_manifest(source), None
        except ManifestError as invalid:
            return None, None, invalid

    def _note(self, context: Context, submission: Submission, submitted: Submitted) -> None:
        """Store and push the job's identity. A failure is only logged: the job is also found by its name."""
        try:
            submission.remember(context, submitted)
            self._push_job(context, submitted.ref)
        except Exception as e:
            self.log.warning(
                "The job's identity could not be stored in Airflow (%s). %s is followed anyway", e, submitted.ref
            )

    def _push_job(self, context: Context, ref: JobRef) -> None:
        """Push the job's identity and its links, which users see while the job runs."""
        job = {"kind": ref.kind, "namespace": ref.namespace, "name": ref.name, "uid": ref.uid}
        compat.push(context, "job", job)
        for link in self.operator_extra_links:
            compat.push(context, link.xcom_key, url_of(job))

    def _deferral(self, ref: JobRef, options: Options, handover: Handover) -> Deferral:
        from airflow_provider_ktrain.engine.follow.messages import Deferral

        return Deferral(ref, options, handover, self.kubernetes_conn_id, self.cluster_context)

    def _defer(self, deferral: Deferral, context: Context, host: WorkerHost | None = None) -> NoReturn:
        """Defer: a trigger follows the job from now on.

        :param host: the host that followed the job and handles a kill until the task defers. Default: None.
        """
        from airflow_provider_ktrain.operators import task_state
        from airflow_provider_ktrain.triggers.training import TrainingJobTrigger

        try:
            task_state.write_deferral(context, deferral)
        except Exception as e:  # only needed if the trigger fails
            self.log.warning(
                "The deferral of %s could not be stored (%s). If the trigger fails, lines may be repeated",
                deferral.job,
                e,
            )
        if hint := compat.trigger_log_hint(context["ti"]):
            self.log.info(hint)
        if host is not None:
            host.hand_over()
        self.log.info("Deferred: the triggerer now follows %s.", deferral.job)
        self.defer(
            trigger=TrainingJobTrigger(**deferral.to_dict()),
            method_name="execute_complete",
            timeout=self._until_timeout(deferral.options),
        )

    def _until_timeout(self, options: Options) -> timedelta | None:
        """The timeout of the deferral, which expires after the task's own deadline."""
        if options.deadline is None:
            return None
        return timedelta(seconds=max(options.deadline - time.time(), 0) + self.defer_padding)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Resume after the trigger: return the result, raise the cause, or follow the job if the trigger failed."""
        from airflow_provider_ktrain.engine.follow.messages import Outcome, read_event
        from airflow_provider_ktrain.worker_host import as_airflow_errors

        with as_airflow_errors():
            ended = read_event(event)
            if isinstance(ended, Outcome):
                return self._finish(ended, context)
            return self._follow_in_worker(ended, context)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume a deferred task; called by Airflow.

        If the deferral timed out, the GPUs are released before the task fails. If the trigger failed, the worker
        follows the job: a trigger that can't be loaded proves nothing about the training.
        """
        if next_method != compat.TRIGGER_FAILED:
            return super().resume_execution(next_method, next_kwargs, context)
        from airflow_provider_ktrain.worker_host import as_airflow_errors

        reason = compat.trigger_failure(next_kwargs)
        with as_airflow_errors():
            if reason is not None:
                if traceback := compat.trigger_traceback(next_kwargs):
                    self.log.warning("Traceback of the trigger:\n%s", traceback)
                return self._follow_in_worker(reason, context)
            if outcome := self._end_or_release(context):
                return self._finish(outcome, context)
        return super().resume_execution(next_method, next_kwargs, context)

    def _follow_in_worker(self, reason: str, context: Context) -> Any:
        """Follow a job whose trigger failed, for longer after each failure, and then defer again.

        Nothing is released: a failed trigger proves nothing about its job. Logs are read from the position stored when
        the task deferred, because Airflow overwrites the failed trigger's log with that of the next trigger.

        :param reason: why the trigger failed.
        """
        from airflow_provider_ktrain.engine.follow.messages import seconds_in_worker

        deferral = self._stored_deferral(reason, context)
        deferral = replace(deferral, failures=deferral.failures + 1)
        ref, options = deferral.job, deferral.options
        seconds = seconds_in_worker(deferral.failures, self.seconds_in_worker)
        self.log.warning("The trigger failed: %s. The job is not affected", clipped(reason, 150))
        how_long = "to its end" if seconds is None else f"for {seconds:.0f} s and then defers again"
        self.log.info("Trigger failure %d: this worker follows %s %s", deferral.failures, ref, how_long)
        until = None if seconds is None else time.monotonic() + seconds
        patience = self.patience if seconds is None else seconds
        try:
            self._host = host = self._patient_host(context, time.monotonic() + patience)
        except AccessError:
            if seconds is None:
                raise
            self._defer(deferral, context)
        if self._killed:  # before there was a host
            host.kill(KILLED)
        with host:
            host.take_over(ref, options.on_finish_action, deferral.handover)
            try:
                outcome = host.follow(ref, options, until, patience=patience)
            except Exception:
                host.check()
                if seconds is None:
                    raise
                outcome = None
        if outcome is not None:
            return self._finish(outcome, context)
        self._defer(replace(deferral, handover=host.handover), context, host)

    def _patient_host(self, context: Context, until: float) -> WorkerHost:
        """A host for an existing job. A connection that can't be read is retried: its secrets backend may be down.

        :param until: of `time.monotonic`.
        :raises AccessError: it still can't be read at `until`.
        """
        from airflow_provider_ktrain.worker_host import RETRY_SECONDS

        while True:
            try:
                return self._host_for_existing_job(context)
            except AccessError as e:
                if time.monotonic() + RETRY_SECONDS > until:
                    raise
                self.log.warning("The connection can't be read, retrying in %.0f s: %s", RETRY_SECONDS, e)
                time.sleep(RETRY_SECONDS)

    def _stored_deferral(self, reason: str, context: Context) -> Deferral:
        """The deferral of this try's last trigger.

        :raises KtrainError: the task's state contains no job of this try.
        """
        from airflow_provider_ktrain.engine.follow.messages import Handover
        from airflow_provider_ktrain.operators import task_state

        if found := task_state.read_deferral(context):
            deferral, since = found
            self.log.warning("Lines since %s may be repeated: the trigger failed", since or "the deferral")
            return deferral
        job = task_state.read_job(context)
        if job is not None and job.owner == str(context["ti"].id):
            self.log.warning("All lines of %s may be repeated: the task's state contains no log position", job)
            return self._deferral(job, self._options({"metadata": {}}), Handover())
        raise KtrainError(
            f"the trigger failed ({clipped(reason, 80)}), and the task's state contains no job to follow. A retry "
            "adopts the job; without a retry, the reaper releases it"
        )

    def on_kill(self) -> None:
        """Handle SIGTERM, in a signal handler. Whether it is a kill depends on the task's state in Airflow."""
        self._killed = True
        if self._host is not None:
            self._host.kill(KILLED)

    def _earlier_success(self, context: Context) -> Outcome | None:
        """The outcome of an earlier try, since the last clear, that succeeded; None if there is none."""
        from airflow_provider_ktrain.operators import task_state

        try:
            outcome = task_state.read_earlier_success(context)
        except ValueError as e:  # the job's status has it as well, if the job still exists
            self.log.warning("The stored outcome of an earlier try cannot be read: %s", e)
            return None
        if outcome is not None:
            self.log.info("An earlier try succeeded: its result is returned and nothing is submitted")
            if job := task_state.read_job(context):
                self._push_job(context, job)
        return outcome

    def _finish(self, outcome: Outcome, context: Context) -> Any:
        """Store the outcome, so that no later try repeats the training; then conclude."""
        from airflow_provider_ktrain.operators import task_state

        stored = False
        try:
            stored = outcome.superseded or task_state.write_outcome(context, outcome)
        except Exception as e:  # must not hide how the training ended
            self.log.warning("The outcome could not be stored in the task's state: %s", e)
        return self._conclude(outcome, context, stored=stored)

    def _conclude(self, outcome: Outcome, context: Context, *, stored: bool = True) -> Any:
        """Push the outcome to Airflow, delete the job, and return the result or raise the cause.

        :param stored: whether the outcome is in the task's state. If not, a succeeded job is kept for a retry.
        """
        from airflow_provider_ktrain.engine.follow.messages import UNKNOWN_CAUSE
        from airflow_provider_ktrain.exceptions import TrainingReleaseError, TrainingSupersededError, failure

        ti = context["ti"]
        if outcome.superseded:
            raise TrainingSupersededError("another try of this task now owns the job; this try deletes nothing")
        outcome = self._with_fit_result(outcome)
        late = bool(outcome.release_error)
        unreleased = self._delete_or_release(context, spare_ended=outcome.succeeded) if late else ""
        if outcome.usage:
            compat.push(context, "usage", outcome.usage)
        for name, value in {**_usage_metrics(outcome.usage), **outcome.metrics}.items():
            compat.gauge(f"ktrain.{name}", value, dag_id=ti.dag_id, task_id=ti.task_id)
        if outcome.succeeded:
            compat.push_return_value(context, self, outcome.result)
        if unreleased and outcome.succeeded:  # the release failed, not the training
            raise TrainingReleaseError(f"the training succeeded, but its pods may still hold GPUs: {unreleased}")
        left = bool(outcome.kept) or (late and outcome.succeeded)
        if left and outcome.succeeded and not stored:
            if compat.has_task_state(context):
                self.log.warning("The succeeded job is kept, without running pods: its outcome could not be stored")
            else:
                self.log.info("The succeeded job is kept for a retry, without running pods. %s", compat.WHO_DELETES_IT)
        elif left and self._delete_or_release(context, outcome.kept):
            self.log.warning("The job could not be deleted. It has no running pods and holds no GPUs")
        if not outcome.succeeded:
            raise failure(outcome.cause or UNKNOWN_CAUSE, unreleased or outcome.released)
        return outcome.result

    def _with_fit_result(self, outcome: Outcome) -> Outcome:
        """The outcome with a result that Airflow can store: a bad result doesn't fail a successful training."""
        if not outcome.succeeded:
            return outcome
        for line in outcome.result_error.splitlines():
            self.log.warning("The training succeeded. %s", line)
        if not self.multiple_outputs or outcome.result is None:
            return outcome
        if not isinstance(outcome.result, dict):
            kind = type(outcome.result).__name__
            self.log.warning("multiple_outputs: found a %s, expected a dict. Only return_value is pushed", kind)
            self.multiple_outputs = False
            return outcome
        result, warnings = storable_outputs(outcome.result)
        for warning in warnings:
            self.log.warning("The training succeeded. Of its result, %s", warning)
        return replace(outcome, result=result)

    def _delete_or_release(
        self, context: Context, job: Mapping[str, str] | None = None, *, spare_ended: bool = False
    ) -> str:
        """Release this try's job by `on_finish_action`; returns the error, or an empty string.

        :param job: a `JobRef` as a dict. Default: the one in the task's state.
        :param spare_ended: keep a job that has ended and delete only its running pods. Default: False.
        """
        from airflow_provider_ktrain.operators import task_state

        try:
            ref = JobRef.from_dict(job) if job else task_state.read_job_of_this_try(context)
            if ref is None:
                return ""
            with self._host_for_existing_job(context) as host:
                self.log.info(host.release(ref, OnFinishAction.of(self.on_finish_action), spare_ended=spare_ended).text)
        except Exception as e:  # must not hide how the training ended
            self.log.error("%s", e)
            return str(e)
        return ""

    def _end_or_release(self, context: Context) -> Outcome | None:
        """After the deferral timed out: the outcome of this try's job if it has ended, else release the job."""
        from airflow_provider_ktrain.operators import task_state

        if ref := task_state.read_job_of_this_try(context):
            with self._host_for_existing_job(context) as host:
                if job := host.ended(ref):
                    return host.follow(ref, self._options(job), None)
        self._delete_or_release(context)
        return None

    def _host_for_existing_job(self, context: Context) -> WorkerHost:
        from airflow_provider_ktrain.worker_host import Try, WorkerHost

        hook = TrainingHook(self.kubernetes_conn_id, self.cluster_context)
        hook.load()
        return WorkerHost(hook, self.log, Try.of(context["ti"]))

    # what is submitted

    @property
    def job_name(self) -> str:
        """A template of the job's name, for other tasks: `ScaleTrainingJobOperator(job_name=train.job_name)`.

        The name is known before the job exists, so such a task doesn't have to run after this one.
        """
        return f"{{{{ dag.get_task({self.task_id!r}).job_name_of(ti) }}}}"

    def job_name_of(self, ti: Any) -> str:
        """The job's name in the DAG run of `ti`. Not for mapped tasks.

        :param ti: a task instance of any task of this DAG.
        """
        prefix = self.render_template(self.name, ti.get_template_context())
        key = TaskKey(compat.deployment_id(), self.dag_id, self.task_id, ti.run_id)
        return key.job_name(prefix, self.kind.name_length)

    def job_owner(self, context: Context) -> tuple[Owner, int]:
        """This try as an owner, and the first try since the task was last cleared."""
        ti = context["ti"]
        index = -1 if ti.map_index is None else ti.map_index
        key = TaskKey(compat.deployment_id(), ti.dag_id, ti.task_id, ti.run_id, index)
        first = first_try_since_clear(ti.max_tries, self.retries or 0)
        return Owner(key, ti.try_number, str(ti.id), ti.max_tries), min(first, ti.try_number)

    def stamped(
        self, built: Manifest, owner: Owner, name: str, namespace: str, submission: str, hashed: str
    ) -> Manifest:
        """The manifest as it is sent: with name, labels, owner, and a deadline that the cluster enforces."""
        notes = {OWNER_ANNOTATION: owner.annotation(), MANIFEST_ANNOTATION: hashed}
        if (seconds := self._seconds_to_run()) is not None:
            notes[DEADLINE_ANNOTATION] = f"{time.time() + seconds:.0f}"
            built = manifests.backstop(built, seconds + BACKSTOP_PADDING)
        return manifests.stamp(built, name, namespace, owner.key.labels(submission), notes)

    def _seconds_to_run(self) -> float | None:
        """Seconds from submission to the task's deadline, shortly before Airflow's own execution_timeout."""
        if self.execution_timeout is None:
            return None
        whole = self.execution_timeout.total_seconds()
        return whole - min(30.0, whole / 10)

    def _options(self, job: Mapping[str, Any]) -> Options:
        from airflow_provider_ktrain.engine.follow.messages import Options

        deadline = (job["metadata"].get("annotations") or {}).get(DEADLINE_ANNOTATION)
        return Options(
            logs=self.logs if isinstance(self.logs, str) else {role: list(at) for role, at in self.logs.items()},
            limits=Limits(
                queue=_seconds(self.queue_timeout),
                schedule=_seconds(self.schedule_timeout),
                startup=_seconds(self.startup_timeout),
                log_stall=_seconds(self.log_stall_timeout),
                max_restarts=self.max_restarts,
                crash_loop=self.crash_loop_limit,
            ),
            deadline=float(deadline) if deadline else None,
            on_finish_action=OnFinishAction.of(self.on_finish_action),
        )

    def _check_parameters(self) -> None:
        for name, value in parameters.validated(vars(self)).items():
            setattr(self, name, value)
        check_choice(self.logs, self.kind)
        if self.logs == "none" and self.log_stall_timeout is not None:
            raise ManifestError(
                "log_stall_timeout",
                found=f"{self.log_stall_timeout!r} with logs='none'",
                expected="followed logs: without them, every job appears to stall",
                remedy="follow a replica, such as logs='primary', or remove log_stall_timeout",
            )


class PyTorchJobOperator(TrainingJobOperator):
    """Run a PyTorchJob of the training-operator: a Master and Workers, or only Workers.

    The job's name is derived from the task's identity, so that a retry finds and adopts the job of an earlier try. A
    cleared task submits a new job. However the task ends, the job's pods are released. Options such as `image` and
    `gpus` override fields of the manifest; the other fields keep the manifest's values.

    A template renders to text. The text of a whole number is converted; a list or a mapping needs
    `render_template_as_native_obj=True` on the DAG.

    :param manifest: the job: a dict, YAML text, or the path of a YAML file (absolute, or relative to the DAG's
        folder). Templated. Default: None, a job is built from `image`, `command`, `workers` and `gpus`.
    :param name: prefix of the job's name. Templated. Default: the task's id.
    :param namespace: namespace of the job. Templated. Default: the manifest's, else the connection's, else
        `default`.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param deferrable: wait in the triggerer, without a worker slot; logs are still live. Default: True.
    :param on_finish_action: what happens to the job at the end: `delete_job` (default), `keep_job` or
        `delete_succeeded_job`. A kept job holds no GPUs: an unfinished job is suspended, and the running pods of a
        finished job are deleted. An unfinished job with a Kueue queue is deleted instead of kept, because Kueue
        would resume it.
    :param reattach: what a retry does with the job of an earlier try: `always` (default) adopts it, even if the
        manifest has changed; `if_unchanged` replaces it if the manifest has changed.
    :param logs: whose logs to follow: `auto` (default: all replicas of a job with up to 16, else the primary
        replica), `all`, `primary`, `none`, or replica indexes by role: `{"Worker": [0, 1]}`.
    :param queue_timeout: how long a queue may suspend the job, in seconds or as a timedelta. Default: None, no
        limit.
    :param schedule_timeout: how long a pod may wait for a node, in seconds or as a timedelta. Default: None, no
        limit.
    :param startup_timeout: how long a scheduled pod may take until its containers run, in seconds or as a
        timedelta; None means no limit. Default: one hour.
    :param log_stall_timeout: how long a running job may log nothing in all followed replicas, in seconds or as a
        timedelta. Default: None, no limit.
    :param max_restarts: maximum number of container restarts and replaced pods (restart policy ExitCode), over all
        pods. Default: None, no limit.
    :param crash_loop_limit: number of consecutive failures of one container, each less than 10 minutes after its
        start, after which the job fails. Failures count once every replica has run; elastic jobs are exempt. None
        means no limit. Default: 6.
    :param image: image of the container `pytorch` in every role. Templated. Default: the manifest's.
    :param command: command of the container `pytorch` in every role. Templated. Default: the manifest's.
    :param args: arguments of the container `pytorch` in every role. Templated. Default: the manifest's.
    :param env: environment variables of every role, by name; they replace the manifest's. A mapping as value
        becomes `valueFrom`. Templated. Default: None.
    :param workers: number of Workers; the Master is not counted. Templated. Default: the manifest's.
    :param replicas: number of replicas by role, such as `{"Worker": 3}`; takes precedence over `workers`.
        Templated. Default: the manifest's.
    :param gpus: GPUs of each replica, as limit and request (`nvidia.com/gpu`); 0 removes the manifest's. Templated.
        Default: the manifest's.
    :param container_resources: other resources of each replica, as limits and requests, such as `{"rdma/hca": 1}`.
        Templated. Default: the manifest's.
    :param nproc_per_node: processes per replica: a number, `auto`, `gpu` or `cpu` (`nprocPerNode`;
        training-operator 1.7 and newer). Templated. Default: the manifest's.
    :param hosts: names of the nodes that may run the replicas (label `kubernetes.io/hostname`). Templated. Default:
        any node.
    :param node_selector: labels that a node must have, added to the manifest's. Templated. Default: None.
    :param tolerations: tolerations of the pods, added to the manifest's. Templated. Default: none.
    :param affinity: affinity of the pods, in place of the manifest's; `hosts` is added to it. Templated. Default:
        the manifest's.
    :param priority_class_name: a PriorityClass of the cluster. Templated. Default: the manifest's.
    :param queue_name: a Kueue LocalQueue of the namespace, set as a label of the job. (`queue` is Airflow's own
        parameter.) Templated. Default: the manifest's.
    :param volumes: volumes (`SharedMemory`, `ClaimVolume`, `HostPath`) to mount into the main container of every
        role; each replaces a mount at the same path. Templated. Default: none.
    :param labels: labels added to the job and its pods. Templated. Default: None.
    :param annotations: annotations added to the job and its pods. Templated. Default: None.
    :param checkpoint_dir: base directory of the environment variable KTRAIN_CHECKPOINT_DIR. Its value is the same
        for all tries of one run of the task, and different for each run, each mapped task and, without
        `resume_on_clear`, each clear. Templated. Default: None, the variable is not set.
    :param resume_on_clear: whether a cleared task keeps its checkpoint directory and continues to count
        KTRAIN_ATTEMPT. Default: False, it trains from the beginning.
    :param dry_run: create nothing; run the checks of `ktrain check --server`: served versions, namespace, rights,
        queue, schema, and a dry run on the API server. Default: False.
    :param kwargs: parameters of `BaseOperator`. `execution_timeout` counts from the submission of the job, also
        while deferred and over retries that adopt it; it restarts when a kept job is resumed. The job is released a
        little before it ends.
    :raises TrainingJobError: the job did not succeed; a subclass for each category of causes (see `exceptions`).
    :raises TrainingConfigurationError: the manifest or a parameter is invalid; never retried.
    :raises TrainingClusterError: the cluster can't run the job now: missing access, a quota, a missing object.
    """

    kind = PYTORCHJOB


class MPIJobOperator(TrainingJobOperator):
    """Run an MPIJob: v1 (training-operator) or v2beta1 (mpi-operator), whichever version the cluster serves.

    The job's name is derived from the task's identity, so that a retry finds and adopts the job of an earlier try. A
    cleared task submits a new job. However the task ends, the job's pods are released. Options such as `image` and
    `gpus` override fields of the manifest; the other fields keep the manifest's values.

    A template renders to text. The text of a whole number is converted; a list or a mapping needs
    `render_template_as_native_obj=True` on the DAG.

    :param manifest: the job: a dict, YAML text, or the path of a YAML file (absolute, or relative to the DAG's
        folder). Templated. Default: None, a job is built from `image`, `command`, `workers` and `gpus`.
    :param name: prefix of the job's name. Templated. Default: the task's id.
    :param namespace: namespace of the job. Templated. Default: the manifest's, else the connection's, else
        `default`.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param deferrable: wait in the triggerer, without a worker slot; logs are still live. Default: True.
    :param on_finish_action: what happens to the job at the end: `delete_job` (default), `keep_job` or
        `delete_succeeded_job`. A kept job holds no GPUs: an unfinished job is suspended, and the running pods of a
        finished job are deleted. An unfinished job with a Kueue queue is deleted instead of kept, because Kueue
        would resume it.
    :param reattach: what a retry does with the job of an earlier try: `always` (default) adopts it, even if the
        manifest has changed; `if_unchanged` replaces it if the manifest has changed.
    :param logs: whose logs to follow: `auto` (default: all replicas of a job with up to 16, else the primary
        replica), `all`, `primary`, `none`, or replica indexes by role: `{"Worker": [0, 1]}`.
    :param queue_timeout: how long a queue may suspend the job, in seconds or as a timedelta. Default: None, no
        limit.
    :param schedule_timeout: how long a pod may wait for a node, in seconds or as a timedelta. Default: None, no
        limit.
    :param startup_timeout: how long a scheduled pod may take until its containers run, in seconds or as a
        timedelta; None means no limit. Default: one hour.
    :param log_stall_timeout: how long a running job may log nothing in all followed replicas, in seconds or as a
        timedelta. Default: None, no limit.
    :param max_restarts: maximum number of container restarts and replaced pods (restart policy ExitCode), over all
        pods. Default: None, no limit.
    :param crash_loop_limit: number of consecutive failures of one container, each less than 10 minutes after its
        start, after which the job fails. Failures count once every replica has run; elastic jobs are exempt. None
        means no limit. Default: 6.
    :param image: image of the main container (`spec.mainContainer`, else the first one) in every role. Templated.
        Default: the manifest's.
    :param command: command of the Launcher's main container. Templated. Default: the manifest's.
    :param args: arguments of the Launcher's main container. Templated. Default: the manifest's.
    :param env: environment variables of every role, by name; they replace the manifest's. A mapping as value
        becomes `valueFrom`. Templated. Default: None.
    :param workers: number of Workers; the Launcher is not counted. Templated. Default: the manifest's.
    :param replicas: number of replicas by role, such as `{"Worker": 3}`; takes precedence over `workers`.
        Templated. Default: the manifest's.
    :param gpus: GPUs of each Worker, as limit and request (`nvidia.com/gpu`); 0 removes the manifest's. Templated.
        Default: the manifest's.
    :param container_resources: other resources of each Worker, as limits and requests, such as `{"rdma/hca": 1}`.
        Templated. Default: the manifest's.
    :param nproc_per_node: processes per Worker: a number (`slotsPerWorker`). Templated. Default: the manifest's.
    :param hosts: names of the nodes that may run the replicas (label `kubernetes.io/hostname`). Templated. Default:
        any node.
    :param node_selector: labels that a node must have, added to the manifest's. Templated. Default: None.
    :param tolerations: tolerations of the pods, added to the manifest's. Templated. Default: none.
    :param affinity: affinity of the pods, in place of the manifest's; `hosts` is added to it. Templated. Default:
        the manifest's.
    :param priority_class_name: a PriorityClass of the cluster. Templated. Default: the manifest's.
    :param queue_name: a Kueue LocalQueue of the namespace, set as a label of the job. (`queue` is Airflow's own
        parameter.) Templated. Default: the manifest's.
    :param volumes: volumes (`SharedMemory`, `ClaimVolume`, `HostPath`) to mount into the main container of every
        role; each replaces a mount at the same path. Templated. Default: none.
    :param labels: labels added to the job and its pods. Templated. Default: None.
    :param annotations: annotations added to the job and its pods. Templated. Default: None.
    :param checkpoint_dir: base directory of the environment variable KTRAIN_CHECKPOINT_DIR. Its value is the same
        for all tries of one run of the task, and different for each run, each mapped task and, without
        `resume_on_clear`, each clear. Templated. Default: None, the variable is not set.
    :param resume_on_clear: whether a cleared task keeps its checkpoint directory and continues to count
        KTRAIN_ATTEMPT. Default: False, it trains from the beginning.
    :param dry_run: create nothing; run the checks of `ktrain check --server`: served versions, namespace, rights,
        queue, schema, and a dry run on the API server. Default: False.
    :param kwargs: parameters of `BaseOperator`. `execution_timeout` counts from the submission of the job, also
        while deferred and over retries that adopt it; it restarts when a kept job is resumed. The job is released a
        little before it ends.
    :raises TrainingJobError: the job did not succeed; a subclass for each category of causes (see `exceptions`).
    :raises TrainingConfigurationError: the manifest or a parameter is invalid; never retried.
    :raises TrainingClusterError: the cluster can't run the job now: missing access, a quota, a missing object.
    """

    kind = MPIJOB


def _path_of(manifest: Any) -> str | None:
    """The path in a manifest parameter; None if the parameter is the manifest itself."""
    if isinstance(manifest, str) and "\n" not in manifest and manifest.strip().endswith((".yaml", ".yml", ".json")):
        return manifest.strip()
    return None


def _seconds(limit: timedelta | float | None) -> float | None:
    return limit.total_seconds() if isinstance(limit, timedelta) else limit


def _usage_metrics(usage: Mapping[str, float]) -> dict[str, float]:
    return {name if name == "gpus" else f"gpu_seconds.{name}": value for name, value in usage.items()}
