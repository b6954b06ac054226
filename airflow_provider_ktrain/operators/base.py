"""The life of a training task in Airflow: submit, follow, defer, resume, finish."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow.sdk.exceptions import AirflowSkipException

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.errors import AccessError, KtrainError
from airflow_provider_ktrain.core.identity.names import JobRef, TaskInstanceId, code_hash
from airflow_provider_ktrain.core.text.output import clipped
from airflow_provider_ktrain.links.training import TrainingJobLink, TrainingPageLink, page_url, url_of
from airflow_provider_ktrain.operators.job_parameters import JobParameters

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

    from airflow_provider_ktrain.core.ending import Event
    from airflow_provider_ktrain.engine.follow.deferral import Deferral, Handover
    from airflow_provider_ktrain.engine.follow.options import Options
    from airflow_provider_ktrain.engine.follow.outcome import Outcome
    from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
    from airflow_provider_ktrain.operators.submission import Submission
    from airflow_provider_ktrain.worker_host import WorkerHost

KILLED = "the task received SIGTERM"


class TrainingJobOperator(JobParameters):
    """Base of the operators of all kinds of jobs. It submits a job, follows it to its end and releases its GPUs.

    The job's name is derived from the task's identity, so that a retry finds and adopts the job of an earlier try. A
    cleared task submits a new job. However the task ends, the job's pods are released. Options such as `image` and
    `gpus` override fields of the manifest; the other fields keep the manifest's values.

    A template renders to text. The text of a whole number is converted; a list or a mapping needs
    `render_template_as_native_obj=True` on the DAG.

    The main container is named `pytorch` in a PyTorchJob and `node` in a TrainJob. In an MPIJob it is the one that
    `spec.mainContainer` names, else the first one.

    :param manifest: the job: a dict, YAML text, or the path of a YAML file (absolute, or relative to the DAG's
        folder). Templated. Default: None, a job is built from the other parameters.
    :param name: prefix of the job's name. Templated. Default: the task's id.
    :param namespace: namespace of the job. Templated. Default: the manifest's, else the connection's, else
        `default`.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param deferrable: wait in the triggerer, without a worker slot; logs are still live. Default: None, `[operators]
        default_deferrable` where an environment variable sets it, else True.
    :param on_finish_action: what happens to the job at the end: `delete_job` (default), `keep_job` or
        `delete_succeeded_job`. A finished job that is kept loses its running pods. An unfinished job is deleted, and
        only `keep_job` suspends it instead: a job of a Kueue queue by its Workload, or it is deleted if the right or
        the time to do this is missing.
    :param reattach: what a retry does with the job of an earlier try: `always` (default) adopts it, even if the
        manifest has changed; `if_unchanged` replaces it if the manifest has changed.
    :param logs: whose logs to follow: `auto` (default: all replicas of a job with up to 16, else the primary
        replica), `all`, `primary`, `none`, or indexes by role: `{"Worker": [0, 1]}`.
    :param queue_timeout: how long a queue may suspend the job, in seconds or as a timedelta. Default: None, no
        limit.
    :param schedule_timeout: how long a pod may wait for a node or a ResourceQuota, in seconds or as a timedelta. The
        worker waits as long if the job itself exceeds a quota. Default: None: pods wait without limit, and a job that
        exceeds a quota fails.
    :param startup_timeout: how long a scheduled pod may take until its containers run, in seconds or as a
        timedelta; None means no limit. Default: one hour.
    :param partial_start_timeout: how long some pods may hold GPUs while others have no node, in seconds or as a
        timedelta; None means no limit. Elastic jobs with their minimum of Workers are exempt. Default: one hour.
    :param log_stall_timeout: how long no replica of a running job, followed or not, may log a line, in seconds or as a
        timedelta. Default: None, no limit.
    :param progress_timeout: how long no replica of a running job, followed or not, may report a higher step
        (`KTRAIN_METRIC`) before the job counts as hung, in seconds or as a timedelta. This includes a job that never
        reports a step. Default: None, no limit.
    :param max_restarts: maximum number of container restarts and replaced pods (restart policy ExitCode, or a restart
        of the JobSet), over all pods. Default: None, no limit.
    :param crash_loop_limit: number of consecutive failures of one container, each less than 10 minutes after its
        start, after which the job fails. Failures count once every replica has run; elastic jobs are exempt. None
        means no limit. Default: 6.
    :param image: image of the main container. Templated. Default: the manifest's.
    :param command: command of the main container; for an MPIJob the Launcher's. Templated. Default: the manifest's.
    :param args: arguments of the main container; for an MPIJob the Launcher's. Templated. Default: the manifest's.
    :param code: a directory or file that is sent to the pods, at most 700 KiB packed. Files that match a pattern in its
        `.ktrainignore` are left out. The program runs in the directory. Requires a `command`, and `python3` in the
        image. A relative path is below the DAG file's folder or a `template_searchpath`. Templated. Default: None, the
        program uses the files of the image.
    :param hang_traces: whether a program that is sent as code or as a function prints the stacks of its Python
        processes when its pod is stopped, so that a hang names the replica and the line where it waits. The program
        then isn't process 1 of its container. Default: True.
    :param env: environment variables of the main containers, by name; they replace the manifest's. A mapping as value
        becomes `valueFrom`. Templated. Default: None.
    :param gpus: GPUs of each replica, as limit and request of `[ktrain] default_accelerator`; 0 removes the manifest's.
        In an MPIJob those of each Worker. Templated. Default: the manifest's.
    :param container_resources: other resources of each replica, as limits and requests, such as `{"rdma/hca": 1}`. In
        an MPIJob those of each Worker. Templated. Default: the manifest's.
    :param nproc_per_node: processes per replica. Its values depend on the kind. Templated. Default: the manifest's.
    :param hosts: names of the nodes that may run the replicas (label `kubernetes.io/hostname`). Templated. Default:
        any node.
    :param node_selector: labels that a node must have, added to the manifest's. Templated. Default: None.
    :param tolerations: tolerations of the pods, added to the manifest's. Templated. Default: none.
    :param affinity: affinity of the pods, in place of the manifest's; `hosts` is added to it. Templated. Default:
        the manifest's.
    :param priority_class_name: a PriorityClass of the cluster. Templated. Default: the manifest's.
    :param queue_name: a Kueue LocalQueue of the namespace, set as a label of the job. (`queue` is Airflow's own
        parameter.) Templated. Default: the manifest's.
    :param workload_priority_class: a WorkloadPriorityClass of Kueue, set as a label of the job. It orders the queue;
        `priority_class_name` orders the pods. Templated. Default: the manifest's.
    :param volumes: volumes (`SharedMemory`, `ClaimVolume`, `HostPath`) to mount into the main containers; each
        replaces a mount at the same path. Templated. Default: none.
    :param pod_override: a pod template (`metadata` and `spec`), or one by role, that is merged into every replica's by
        Kubernetes' strategic merge, after all other parameters: service account, pull secrets, security context,
        `envFrom`, init containers, sidecars. Templated. Default: None.
    :param labels: labels added to the job and its pods. Templated. Default: None.
    :param annotations: annotations added to the job and its pods. Templated. Default: None.
    :param checkpoint_dir: base directory of the environment variable KTRAIN_CHECKPOINT_DIR. Its value is the same
        for all tries of one run of the task, and different for each run, each mapped task and, without
        `resume_on_clear`, each clear. It is a path in the pods or a URL. Templated. Default: None, the variable is
        not set.
    :param resume_on_clear: whether a cleared task keeps its checkpoint directory and continues to count
        KTRAIN_ATTEMPT. Default: False, it trains from the beginning.
    :param avoid_failed_nodes: keep new jobs of later tries away from up to 8 nodes on which a try failed
        because of the infrastructure: a broken GPU, a lost node, an eviction because of a shortage. Airflow 3.3 and
        newer. Default: False.
    :param skip_on_exit_code: one or more exit codes of the primary replica's main container for which the task is
        skipped instead of failed. The job is released as after a failure. Default: None, no exit code.
    :param dry_run: create nothing; run the checks of `ktrain check --server`: served versions, namespace, rights,
        queue, schema, and a dry run on the API server. Default: False.
    :param kwargs: parameters of `BaseOperator`. `execution_timeout` counts from the submission of the job, also
        while deferred and over retries that adopt it; it restarts when a kept job is resumed. The job is released
        shortly before this time is over. The asset events of `outlets` contain the job, its result, metrics and
        GPU-seconds; an `AssetAlias` becomes the asset of the result's `model_uri`. Set `retries` to 1 or more: Airflow
        may fail a try by mistake (apache/airflow#72716), and only a retry then returns the result of the training.
    :raises TrainingJobError: the job did not succeed; a subclass for each category of causes (see `exceptions`).
    :raises ValueError: when the DAG is parsed: a parameter without a template is invalid.
    :raises TrainingConfigurationError: the manifest or a parameter is invalid; never retried.
    :raises TrainingClusterError: the cluster can't run the job now: missing access, a quota, a missing object,
        a runtime that doesn't fit the job.
    """

    log_source = compat.JOB_SOURCE
    defer_padding: ClassVar[float] = 900.0  #: seconds from the task's deadline to the timeout of the deferral
    #: seconds that the worker follows the job after the 1st, 2nd and 3rd failed trigger of a try; then to its end
    seconds_in_worker: ClassVar[Sequence[float]] = (60.0, 300.0, 900.0)
    #: seconds to retry an unreachable API server when neither a trigger nor a retry can take over
    patience: ClassVar[float] = 900.0

    operator_extra_links = (TrainingPageLink(), TrainingJobLink())
    ui_color = "#e8f0fe"

    _host: WorkerHost | None = None
    _killed = False
    # what this process knows about the training, for OpenLineage; a deferral ends the process
    _job: Mapping[str, str] = MappingProxyType({})
    _outcome: Outcome | None = None

    def execute(self, context: Context) -> Any:
        """Submit or adopt the job, then follow it: to its end, or for some seconds before the task defers."""
        from airflow_provider_ktrain.core.ending import Event
        from airflow_provider_ktrain.exceptions import as_airflow_errors
        from airflow_provider_ktrain.hooks.training import TrainingHook
        from airflow_provider_ktrain.operators import airflow_settings
        from airflow_provider_ktrain.operators.submission import Submission
        from airflow_provider_ktrain.worker_host import WorkerHost

        with as_airflow_errors():
            if not self.server_dry_run and (earlier := self._earlier_success(context)):
                return self._conclude(earlier, context, Event.SUCCESS_FOUND)
            request = self._request(context)
            hook = TrainingHook(self.kubernetes_conn_id, self.cluster_context)
            submission = Submission(request, context, hook, patience=self.patience)
            with self._reachable_by_kill(WorkerHost(hook, self.log, context["ti"])) as host:
                if self.server_dry_run:
                    self.log.info(host.call(lambda api, _: submission.try_out(api, self.log)))
                    self.outlets = []  # nothing was trained: the assets get no event
                    return None
                host.expect(submission, request.on_finish_action)
                submission.settle(
                    context, lambda job: host.call(lambda api, _: submission.cluster(api, job, self.log)), self.log
                )
                submitted = host.submit(submission)
                self._note(context, submission, submitted)
                airflow_settings.check(self, submitted.ref)
                host.handover.training_metrics.update(submission.steps_to_hand_over(submitted))
                options = self._options(submitted.job)
                until = time.monotonic() + compat.worker_seconds() if self.deferrable else None
                patience = 0.0 if compat.has_retry(context) else self.patience
                outcome = host.follow(submitted.ref, options, until, patience=patience)
                if outcome is not None:
                    return self._finish(outcome, context, host)
                self._defer(self._deferral(submitted.ref, options, host.handover), context, host)

    def _note(self, context: Context, submission: Submission, submitted: Submitted) -> None:
        """Describe the job, store and push its identity. A failure is only logged: it is also found by its name."""
        with self._only_logged(f"{submitted.ref} is followed, but could not be described in the log."):
            submission.announce(submitted, self.log)
        with self._only_logged(f"{submitted.ref} is followed, but its identity could not be stored in Airflow."):
            submission.remember(context, submitted)
            self._push_job(context, submitted.ref.described(code_hash(submitted.job)))

    @contextlib.contextmanager
    def _only_logged(self, what: str) -> Iterator[None]:
        """Log an error of the body, below the line `what`: it must not hide how the training ended."""
        try:
            yield
        except Exception as e:
            self.log.warning("%s\n%s", what, e)

    def _push_job(self, context: Context, job: dict[str, str]) -> None:
        """Push the job's identity and its links, which users see while the job runs."""
        self._job = job
        compat.push(context, "job", job)
        page = page_url(TaskInstanceId.of(context["ti"]))
        compat.push(context, TrainingPageLink().xcom_key, page)
        compat.push(context, TrainingJobLink().xcom_key, url_of(job))

    def _deferral(self, ref: JobRef, options: Options, handover: Handover) -> Deferral:
        from airflow_provider_ktrain.engine.follow.deferral import Deferral

        return Deferral(ref, options, handover, self.kubernetes_conn_id, self.cluster_context)

    def _defer(self, deferral: Deferral, context: Context, host: WorkerHost | None = None) -> NoReturn:
        """Defer: a trigger follows the job from now on.

        :param host: the host that is responsible for the job until Airflow's TaskDeferred leaves it. Default: None.
        """
        from airflow_provider_ktrain.core.manifest.deadline import deferral_timeout
        from airflow_provider_ktrain.operators import task_store
        from airflow_provider_ktrain.triggers.training import TrainingJobTrigger

        with self._only_logged(
            f"Lines of {deferral.job} may be repeated if its trigger fails: its arguments were not stored."
        ):
            task_store.write_deferral(context, deferral)
        if hint := compat.trigger_log_hint():
            self.log.info(hint)
        trigger = TrainingJobTrigger(**deferral.to_dict())
        timeout = deferral_timeout(deferral.options.deadline, time.time(), self.defer_padding)
        if host is not None:
            host.check()
        self.log.info("Deferred: the triggerer now follows %s.", deferral.job)
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timeout)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Resume after the trigger: return the result, raise the cause, or follow the job if the trigger failed."""
        from airflow_provider_ktrain.engine.follow.outcome import Outcome, read_event
        from airflow_provider_ktrain.exceptions import as_airflow_errors

        with as_airflow_errors():
            ended = read_event(event)
            if isinstance(ended, Outcome):
                return self._finish(self._with_release(ended, context), context)
            return self._follow_in_worker(ended, context)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume a deferred task; called by Airflow.

        If the deferral timed out, the GPUs are released before the task fails. If the trigger failed, the worker
        follows the job: a trigger that can't be loaded proves nothing about the training.
        """
        if next_method != compat.TRIGGER_FAILED:
            return super().resume_execution(next_method, next_kwargs, context)
        from airflow_provider_ktrain.exceptions import as_airflow_errors

        reason = compat.trigger_failure(next_kwargs)
        with as_airflow_errors():
            if reason is not None:
                if traceback := compat.trigger_traceback(next_kwargs):
                    self.log.warning("Traceback of the trigger:\n%s", traceback)
                return self._follow_in_worker(reason, context)
            if (found := self._deferral_of_this_try(context)) is not None:
                return self._end_after_deferral(found[0], context)
        return super().resume_execution(next_method, next_kwargs, context)

    def _end_after_deferral(self, deferral: Deferral, context: Context) -> Any:
        """Airflow's timeout of the deferral has expired: conclude a job that has ended, or release it."""
        from airflow_provider_ktrain.core.ending import Event
        from airflow_provider_ktrain.core.state.limits import Limit
        from airflow_provider_ktrain.engine.follow.following import Noticed

        seconds = self.execution_timeout.total_seconds() if self.execution_timeout is not None else 0.0
        expired = Noticed(Event.DEFERRAL_EXPIRED, Limit.EXECUTION, seconds)
        with self._reachable_by_kill(self._patient_host(context, time.monotonic() + self.patience)) as host:
            outcome = host.follow_on(deferral, None, patience=self.patience, first=expired)
            assert outcome is not None  # only with `until`
            return self._finish(outcome, context, host)

    def _follow_in_worker(self, reason: str, context: Context) -> Any:
        """Follow a job whose trigger failed, for longer after each failure, and then defer again.

        Nothing is released: a failed trigger proves nothing about its job. Logs are read from the position stored when
        the task deferred, because Airflow overwrites the failed trigger's log with that of the next trigger.
        """
        from airflow_provider_ktrain.core.ending import Event
        from airflow_provider_ktrain.engine.follow.deferral import seconds_in_worker
        from airflow_provider_ktrain.engine.follow.following import Noticed

        found = self._deferral_of_this_try(context)
        if found is None:
            raise KtrainError(
                f"the trigger failed ({clipped(reason, 80)}), and the task store contains no job to follow. A retry "
                "adopts the job; without a retry, release it with ReapTrainingJobsOperator"
            )
        deferral, since = found
        self.log.warning("Lines since %s may be repeated: the trigger failed.", since)
        deferral = replace(deferral, failures=deferral.failures + 1)
        seconds = seconds_in_worker(deferral.failures, self.seconds_in_worker)
        self.log.warning("The trigger failed: %s. The job is not affected.", clipped(reason, 150))
        how_long = "to its end" if seconds is None else f"for {seconds:.0f} s and then defers again"
        self.log.info("This worker follows %s %s (trigger failure %d).", deferral.job, how_long, deferral.failures)
        until = None if seconds is None else time.monotonic() + seconds
        patience = self.patience if seconds is None else seconds
        try:
            host = self._patient_host(context, time.monotonic() + patience)
        except AccessError:
            if seconds is None:
                raise
            self._defer(deferral, context)
        with self._reachable_by_kill(host):
            try:
                outcome = host.follow_on(deferral, until, patience=patience, first=Noticed(Event.TRIGGER_FAILED))
            except Exception:
                host.check()
                if seconds is None:
                    raise
                outcome = None
            if outcome is not None:
                return self._finish(outcome, context, host)
            self._defer(replace(deferral, handover=host.handover), context, host)

    def _patient_host(self, context: Context, until: float) -> WorkerHost:
        """A host for an existing job. A connection that can't be read is retried: its secrets backend may be down.

        :param until: of `time.monotonic`.
        :raises AccessError: it still can't be read at `until`.
        """
        from airflow_provider_ktrain.engine.training import RETRY_SECONDS

        while True:
            try:
                return self._host_for_existing_job(context)
            except AccessError as e:
                if self._killed or time.monotonic() + RETRY_SECONDS > until:
                    raise
                self.log.warning("The connection can't be read. Retrying in %.0f s.\n%s", RETRY_SECONDS, e)
                time.sleep(RETRY_SECONDS)

    def _deferral_of_this_try(self, context: Context) -> tuple[Deferral, str] | None:
        """The deferral of this try's last trigger, and since when its lines may be repeated.

        If only the job of this try is stored, the deferral has defaults. None if that isn't stored either.
        """
        from airflow_provider_ktrain.engine.follow.deferral import Handover
        from airflow_provider_ktrain.operators import task_store

        if found := task_store.read_deferral(context):
            return found
        job = task_store.read_job(context)
        if job is None or job.owner != str(context["ti"].id):
            return None
        return self._deferral(job, self._options({}), Handover()), "the job's start"

    def _reachable_by_kill(self, host: WorkerHost) -> WorkerHost:
        """Let `on_kill` pass kills to this host, also a kill that has come before. Returns the host."""
        self._host = host
        if self._killed:
            host.kill(KILLED)
        return host

    def on_kill(self) -> None:
        """Handle SIGTERM, in a signal handler. Whether it is a kill depends on the task's state in Airflow."""
        self._killed = True
        if self._host is not None:
            self._host.kill(KILLED)

    def _earlier_success(self, context: Context) -> Outcome | None:
        """The outcome of an earlier try, since the last clear, that succeeded; None if there is none."""
        from airflow_provider_ktrain.operators import task_store

        outcome = task_store.read_earlier_success(context)
        if outcome is not None:
            self.log.info("An earlier try succeeded: its result is returned and nothing is submitted.")
            with self._only_logged("The identity of the job could not be pushed to Airflow."):
                if job := task_store.read_job_description(context).get("job"):
                    self._push_job(context, job)
        return outcome

    def _with_release(self, outcome: Outcome, context: Context) -> Outcome:
        """Complete the release of a job that has not ended, if the trigger could not: it may have ended since."""
        from airflow_provider_ktrain.core.ending import Event
        from airflow_provider_ktrain.engine.follow.following import Noticed
        from airflow_provider_ktrain.engine.follow.outcome import cause_of

        if not outcome.release_error or outcome.succeeded or outcome.kept:
            return outcome
        if (found := self._deferral_of_this_try(context)) is None:
            return outcome
        deferral, _ = found
        failed = Noticed(Event.RELEASE_FAILED, cause=cause_of(outcome))
        try:
            with self._reachable_by_kill(self._patient_host(context, time.monotonic() + self.patience)) as host:
                return host.follow_on(deferral, None, patience=self.patience, first=failed) or outcome
        except KtrainError as e:  # must not hide how the training ended
            command = deferral.job.delete_command
            self.log.error("The release could not be completed. To delete the job, run: %s\n%s", command, e)
            return outcome

    def _finish(self, outcome: Outcome, context: Context, host: WorkerHost | None = None) -> Any:
        """Store the outcome, so that no later try repeats the training; then conclude.

        :param host: which has followed it in this process. Default: None, another process did.
        """
        from airflow_provider_ktrain.core.ending import Event
        from airflow_provider_ktrain.operators import reported_outcome, task_store

        stored = False
        with self._only_logged("The outcome could not be stored in the task store."):
            stored = outcome.superseded or task_store.write_outcome(context, outcome)
        with self._only_logged("The failed nodes could not be stored in the task store."):
            nodes = (outcome.cause or {}).get("failed_nodes")
            if nodes and self.avoid_failed_nodes and task_store.add_failed_nodes(context, nodes):
                self.log.info("Later tries avoid %s (avoid_failed_nodes).", ", ".join(nodes))
        with self._only_logged("The end of the training could not be counted in Airflow's metrics."):
            reported_outcome.count(outcome, context)
        proven = stored or not outcome.succeeded
        return self._conclude(outcome, context, Event.OUTCOME_STORED if proven else Event.OUTCOME_NOT_STORED, host)

    def _conclude(self, outcome: Outcome, context: Context, event: Event, host: WorkerHost | None = None) -> Any:
        """Push the outcome to Airflow, delete the job, and return the result or raise the cause.

        :param event: what is known about the outcome: OUTCOME_STORED, OUTCOME_NOT_STORED or SUCCESS_FOUND.
        :param host: as of `_finish`.
        """
        from airflow_provider_ktrain.engine.follow.outcome import UNKNOWN_CAUSE
        from airflow_provider_ktrain.exceptions import TrainingReleaseError, TrainingSupersededError, failure
        from airflow_provider_ktrain.operators import asset_events, reported_outcome

        self._outcome = outcome = self._with_fit_result(outcome)
        if outcome.superseded:
            raise TrainingSupersededError("another try of this task now owns the job; this try deletes nothing")
        with self._only_logged("Usage, metrics or the last status could not be pushed to Airflow."):
            reported_outcome.push(outcome, context, all_xcoms=self.do_xcom_push)
        if outcome.succeeded:
            compat.push_return_value(context, self, outcome.result)
            if self.outlets:
                with self._only_logged("The asset events of the outlets do not contain the training's result."):
                    asset_events.add_training(context, self.outlets, outcome, self.log)
        unreleased = "" if outcome.succeeded and outcome.kept else outcome.release_error
        if outcome.kept:
            left = self._release_ended_job(JobRef.from_dict(outcome.kept), event, context, host)
            unreleased = left if outcome.release_error else ""
        if outcome.succeeded:
            if unreleased and compat.has_retry(context):
                raise TrainingReleaseError(f"the training succeeded, but its pods may hold accelerators: {unreleased}")
            return self._returned(outcome)
        codes = self.skip_on_exit_code
        if not unreleased and outcome.exit_code in ([codes] if isinstance(codes, int) else codes or ()):
            raise AirflowSkipException(f"the job ended with exit code {outcome.exit_code} (skip_on_exit_code)")
        raise failure(outcome.cause or UNKNOWN_CAUSE, unreleased or outcome.released)

    def _returned(self, outcome: Outcome) -> Any:
        """What the task returns after a training that succeeded."""
        return outcome.result

    def _release_ended_job(self, job: JobRef, event: Event, context: Context, host: WorkerHost | None) -> str:
        """Delete the job, unless its status is the only proof of its success; returns why that failed, or ""."""
        from airflow_provider_ktrain.core.ending import Event

        if event is Event.OUTCOME_NOT_STORED:
            if compat.has_task_store(context):
                self.log.warning("The succeeded job is kept, without running pods: its outcome could not be stored.")
            else:
                self.log.info(
                    "The succeeded job is kept for a retry, without running pods.\n%s: %s",
                    compat.WHO_DELETES_IT,
                    job.delete_command,
                )
        try:
            with contextlib.nullcontext(host) if host is not None else self._host_for_existing_job(context) as ours:
                error = ours.outcome_stored(job, event)
        except Exception as e:  # must not hide how the training ended
            self.log.error("%s", e)
            error = str(e)
        if error and event is not Event.OUTCOME_NOT_STORED:
            self.log.warning("The job could not be deleted. To delete it, run: %s", job.delete_command)
        return error

    def _with_fit_result(self, outcome: Outcome) -> Outcome:
        """The outcome with a result that Airflow can store: a bad result doesn't fail a successful training."""
        from airflow_provider_ktrain.operators import reported_outcome

        return reported_outcome.fit(outcome, self)

    def _host_for_existing_job(self, context: Context) -> WorkerHost:
        from airflow_provider_ktrain.worker_host import WorkerHost

        return WorkerHost.connected(self, context["ti"])

    # OpenLineage: its provider calls these methods in the process that runs the task, or in a fork of it. They make no
    # requests to Airflow: the provider ends a fork at its timeout, and the worker would then read a wrong answer.

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        """The job that the task requests. It is called before `execute` and before each resume."""
        from airflow_provider_ktrain.operators import openlineage

        return openlineage.lineage(self._requested(with_code=True))

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage:
        """What has run, what it used and why it failed. It is called at the end of a try.

        :param task_instance: of this try; not used.
        """
        from airflow_provider_ktrain.operators import openlineage

        declared = bool(self.inlets or self.outlets)
        return openlineage.at_end(
            self._requested(with_code=False), self._job, self._outcome, declares_datasets=declared
        )

    get_openlineage_facets_on_failure = get_openlineage_facets_on_complete
