"""One execution of a training task in a worker: submit, follow, defer, resume, finish."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

from airflow.sdk.exceptions import AirflowSkipException

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.end_rules import Action, Event, Situation, Successor, decide
from airflow_provider_ktrain.core.errors import AccessError, KtrainError
from airflow_provider_ktrain.core.formats import ALL_TRIES
from airflow_provider_ktrain.core.identity.names import JobRef, OnFinishAction, TaskInstanceId, code_hash
from airflow_provider_ktrain.core.logs.repetition import repetition_of
from airflow_provider_ktrain.core.manifest.deadline import deferral_timeout, run_seconds
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.text.output import clipped, format_duration
from airflow_provider_ktrain.engine.api.threads import LoopThread
from airflow_provider_ktrain.engine.follow.deferral import Deferral, Handover, seconds_in_worker
from airflow_provider_ktrain.engine.follow.following import Noticed
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import UNKNOWN_CAUSE, Outcome, cause_of, read_event
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from airflow_provider_ktrain.engine.training_owner import RETRY_SECONDS
from airflow_provider_ktrain.exceptions import (
    TrainingJobError,
    TrainingReleaseError,
    TrainingRequirementError,
    TrainingSupersededError,
    failure,
)
from airflow_provider_ktrain.hooks.training import TrainingHook
from airflow_provider_ktrain.links.training import TrainingJobLink, TrainingPageLink, page_url, url_of
from airflow_provider_ktrain.operators import airflow_settings, asset_events, summaries, task_outputs, task_store
from airflow_provider_ktrain.operators.job_parameters import JobParameters
from airflow_provider_ktrain.operators.submission import TaskSubmission
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from airflow_provider_ktrain.worker_host import WorkerHost

if TYPE_CHECKING:
    from airflow.sdk import Context

KILLED = "the task received SIGTERM"
MAX_REPEAT_SECONDS = 15.0  #: Time to repeat the lines of a trigger: see also `execution_timeout`.


class TaskRun:
    """What one process does for a task: from the submission to the deferral, or from a resume to the end.

    A context manager.
    """

    def __init__(self, operator: JobParameters, context: Context) -> None:
        self._operator, self._context, self._log = operator, context, operator.log
        self._ti = context["ti"]
        self._host: WorkerHost | None = None
        self._loop = LoopThread()  # of all hosts, and the clock of this thread
        seconds = run_seconds(operator.execution_timeout)
        #: When this process ends the training, before Airflow would. It counts from the start of `execute` or a resume.
        self._deadline = math.inf if seconds is None else self._loop.epoch() + seconds
        self._killed = False
        self._end_of_job: tuple[bool, bool] | None = None  # `_job_end` of a training that has an outcome
        self._repeats_lines = False  # whether only a trigger has logged how the training went on after the deferral
        # what this process knows about the training, for OpenLineage; a deferral ends the process
        self.job: Mapping[str, str] = {}  #: The XCom `job`, if this process has pushed it.
        self.outcome: Outcome | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def kill(self) -> None:
        """Handle SIGTERM, in a signal handler. Whether it is a kill depends on the task's state in Airflow."""
        self._killed = True
        if self._host is not None:
            self._host.kill(KILLED)

    def _reachable_by_kill(self, host: WorkerHost) -> WorkerHost:
        """The host, to which `kill` passes kills from now on, also one that has come before."""
        self._host = host
        if self._killed:
            host.kill(KILLED)
        return host

    def execute(self) -> Any:
        """Submit or adopt the job, then follow it: to its end, or for some seconds before the task defers."""
        with summaries.explained(self._context, self._log, self._job_end):
            return self._execute()

    def _execute(self) -> Any:
        operator, context, log = self._operator, self._context, self._log
        if not operator.server_dry_run and (earlier := self._earlier_success()):
            return self._report(earlier, Event.SUCCESS_FOUND)
        request = operator._request(context)
        hook = TrainingHook(operator.kubernetes_conn_id, operator.cluster_context)
        submission = TaskSubmission(request, context, hook, patience=operator.patience)
        with self._reachable_by_kill(WorkerHost(hook, log, self._ti, self._loop)) as host:
            if operator.server_dry_run:
                log.info(host.call(lambda api, _: submission.try_out(api, log)))
                operator.outlets = []  # nothing was trained: the assets get no event
                return None
            host.expect(submission, request.on_finish_action)
            submission.settle(context, lambda job: host.call(lambda api, _: submission.cluster(api, job, log)), log)
            # Airflow or the XCom backend rejects it
            with self._only_logged("The list of trainings doesn't show this one: its summary was not stored."):
                summaries.push_begun(operator, context, submission.described(), request.checkpoint_dir or "")
            submitted = host.submit(submission)
            self._record_submission(submission, submitted)
            airflow_settings.check(operator, submitted.ref)
            host.handover.training_metrics.update(submission.steps_to_hand_over(submitted))
            options = operator._options(submitted.job)
            until = self._loop.now() + compat.worker_seconds() if operator.deferrable else None
            patience = 0.0 if compat.has_retry(context) else operator.patience
            outcome = host.follow(submitted.ref, self._in_this_process(options), until, patience=patience)
            if outcome is not None:
                return self._finish(outcome, host)
            self._defer(self._deferral(submitted.ref, options, host.handover), host)

    def _job_end(self) -> tuple[bool, bool]:
        """Whether a job of this try may still hold accelerators, and whether this process has deleted it."""
        if self._end_of_job is not None:
            return self._end_of_job
        return (True, False) if self._host is None else (self._host.has_left_job, self._host.has_deleted_job)

    def _in_this_process(self, options: Options) -> Options:
        """The options with the deadline of this process. It comes before the job's after a slow submission."""
        deadline = min(self._deadline, options.deadline or math.inf)
        return options if deadline == math.inf else replace(options, deadline=deadline)

    def _record_submission(self, submission: TaskSubmission, submitted: Submitted) -> None:
        """Describe the job, store and push its identity. A failure is only logged: it is also found by its name."""
        with self._only_logged(f"{submitted.ref} is followed, but could not be described in the log."):
            submission.announce(submitted, self._log)
        with self._only_logged(f"{submitted.ref} is followed, but its identity could not be stored in Airflow."):
            submission.remember(self._context, submitted)
            self._push_job(submitted.ref.described(code_hash(submitted.job)))

    @contextlib.contextmanager
    def _only_logged(self, what: str) -> Iterator[None]:
        """Log an error of the body, below the line `what`: it must not hide how the training ended."""
        try:
            yield
        except Exception as e:
            self._log.warning("%s\n%s", what, e)

    def _push_job(self, job: dict[str, str]) -> None:
        """Push the job's identity and its links, which users see while the job runs."""
        self.job = job
        compat.push(self._context, "job", job)
        compat.push(self._context, TrainingPageLink().xcom_key, page_url(TaskInstanceId.of(self._ti)))
        compat.push(self._context, TrainingJobLink().xcom_key, url_of(job))

    # deferral and resume

    def _deferral(self, ref: JobRef, options: Options, handover: Handover) -> Deferral:
        return Deferral(ref, options, handover, self._operator.kubernetes_conn_id, self._operator.cluster_context)

    def _defer(self, deferral: Deferral, host: WorkerHost | None = None) -> NoReturn:
        """Defer: a trigger follows the job from now on.

        :param host: the host that is responsible for the job until Airflow's TaskDeferred leaves it. Default: None.
        """
        with self._only_logged(
            f"Lines of {deferral.job} may be repeated if its trigger fails: its arguments were not stored."
        ):
            task_store.write_deferral(self._context, deferral)
        if hint := compat.trigger_log_hint():
            self._log.info(hint)
        trigger = TrainingJobTrigger(**deferral.to_dict())
        timeout = deferral_timeout(deferral.options.deadline, self._loop.epoch(), self._operator.defer_padding)
        if host is not None:
            host.check()
        self._log.info("Deferred: the triggerer now follows %s.", deferral.job)
        self._operator.defer(trigger=trigger, method_name="execute_complete", timeout=timeout)

    def resume(self, event: Mapping[str, Any]) -> Any:
        """Return the result, raise the cause, or follow the job if its trigger failed."""
        with summaries.explained(self._context, self._log, self._job_end):
            ended = read_event(event)
            if not isinstance(ended, Outcome):
                return self._follow_in_worker(ended)
            outcome = self._with_release(ended)
            self._repeats_lines = outcome is ended
            return self._finish(outcome)

    def resume_after_failure(self, next_kwargs: Mapping[str, Any] | None, otherwise: Callable[[], Any]) -> Any:
        """Resume after a trigger that failed, or whose deferral timed out.

        :param otherwise: what Airflow does; called after a timeout if this try has no job.
        """
        reason = compat.trigger_failure(next_kwargs)
        with summaries.explained(self._context, self._log, self._job_end):
            if reason is None:
                found = self._deferral_of_this_try()
                return otherwise() if found is None else self._end_after_deferral(found[0])
            if trace := compat.trigger_traceback(next_kwargs):
                self._log.warning("Traceback of the trigger:\n%s", trace)
            return self._follow_in_worker(reason)

    def _end_after_deferral(self, deferral: Deferral) -> Any:
        """Airflow's timeout of the deferral has expired: take the end of a job that has ended, or release the job."""
        limit = self._operator.execution_timeout
        expired = Noticed(Event.DEFERRAL_EXPIRED, Limit.EXECUTION, limit.total_seconds() if limit is not None else 0.0)
        with self._patient_host(self._operator.patience) as host:
            return self._finish(self._followed_to_the_end(host, deferral, expired), host)

    def _follow_in_worker(self, reason: str) -> Any:
        """Follow a job whose trigger failed, for longer after each failure, and then defer again.

        Nothing is released: a failed trigger proves nothing about its job. Logs are read from the position stored when
        the task deferred, because Airflow overwrites the failed trigger's log with that of the next trigger.
        """
        found, log = self._deferral_of_this_try(), self._log
        if found is None:
            raise KtrainError(
                f"the trigger failed ({clipped(reason, 80)}), and the task store contains no job to follow. A retry "
                "adopts the job; without a retry, release it with ReapTrainingJobsOperator"
            )
        deferral, since = found
        log.warning("Lines since %s may be repeated: the trigger failed.", since)
        deferral = replace(deferral, failures=deferral.failures + 1)
        seconds = seconds_in_worker(deferral.failures, self._operator.seconds_in_worker)
        log.warning("The trigger failed: %s. The job is not affected.", clipped(reason, 150))
        how_long = "to its end" if seconds is None else f"for {seconds:.0f} s and then defers again"
        log.info("This worker follows %s %s (trigger failure %d).", deferral.job, how_long, deferral.failures)
        until = None if seconds is None else self._loop.now() + seconds
        patience = self._operator.patience if seconds is None else seconds
        try:
            host = self._patient_host(patience)
        except AccessError:
            if seconds is None:
                raise
            self._defer(deferral)
        here = replace(deferral, options=self._in_this_process(deferral.options))
        with host:
            try:
                outcome = host.follow_on(here, until, patience=patience, first=Noticed(Event.TRIGGER_FAILED))
            except Exception:
                host.check()
                if seconds is None:
                    raise
                outcome = None
            if outcome is not None:
                return self._finish(outcome, host)
            self._defer(replace(deferral, handover=host.handover), host)

    def _followed_to_the_end(self, host: WorkerHost, deferral: Deferral, first: Noticed) -> Outcome:
        here = replace(deferral, options=self._in_this_process(deferral.options))
        outcome = host.follow_on(here, None, patience=self._operator.patience, first=first)
        assert outcome is not None  # only with `until`
        return outcome

    def _connected(self) -> WorkerHost:
        return WorkerHost.connected(self._operator, self._ti, self._loop)

    def _patient_host(self, patience: float) -> WorkerHost:
        """A host for an existing job. A connection that can't be read is retried: its secrets backend may be down.

        :raises AccessError: it still can't be read.
        """
        until = self._loop.now() + patience
        while True:
            try:
                return self._reachable_by_kill(self._connected())
            except AccessError as e:
                if self._killed or self._loop.now() + RETRY_SECONDS > until:
                    raise
                self._log.warning("The connection can't be read. Retrying in %.0f s.\n%s", RETRY_SECONDS, e)
                self._loop.run(asyncio.sleep(RETRY_SECONDS))

    def _deferral_of_this_try(self) -> tuple[Deferral, str] | None:
        """The deferral of this try's last trigger, and since when its lines may be repeated.

        If only the job of this try is stored, the deferral has defaults. None if that isn't stored either.
        """
        if found := task_store.read_deferral(self._context):
            return found
        job = task_store.read_job(self._context)
        if job is None or job.owner != str(self._ti.id):
            return None
        return self._deferral(job, self._operator._options({}), Handover()), "the job's start"

    def _with_release(self, outcome: Outcome) -> Outcome:
        """Complete the release of a job that has not ended, if the trigger could not: it may have ended since."""
        if not outcome.release_error or outcome.succeeded or outcome.kept:
            return outcome
        if (found := self._deferral_of_this_try()) is None:
            return outcome
        failed = Noticed(Event.RELEASE_FAILED, cause=cause_of(outcome))
        try:
            with self._patient_host(self._operator.patience) as host:
                return self._followed_to_the_end(host, found[0], failed)
        except KtrainError as e:  # must not hide how the training ended
            command = found[0].job.delete_command
            self._log.error("The release could not be completed. To delete the job, run: %s\n%s", command, e)
            return outcome

    # the end

    def _earlier_success(self) -> Outcome | None:
        """The outcome of an earlier try, since the last clear, that succeeded; None if there is none."""
        outcome = task_store.read_earlier_success(self._context)
        if outcome is not None:
            self._log.info("An earlier try succeeded: its result is returned and nothing is submitted.")
            with self._only_logged("The identity of the job could not be pushed to Airflow."):
                if job := task_store.read_job_description(self._context).get("job"):
                    self._push_job(job)
            # Airflow has deleted the one of the earlier try
            with self._only_logged("The list of trainings doesn't show this one: its summary was not stored."):
                summaries.push_found(self._operator, self._context)
        return outcome

    def _finish(self, outcome: Outcome, host: WorkerHost | None = None) -> Any:
        """Store the outcome, so that no later try repeats the training; then report it.

        :param host: which has followed it in this process. Default: None, another process did.
        """
        context, stored = self._context, False
        self._end_of_job = _is_left(outcome), False
        outcome = self._judged(outcome)
        with self._only_logged("The outcome could not be stored in the task store."):
            stored = outcome.superseded or task_store.write_outcome(context, outcome)
        with self._only_logged("The failed nodes could not be stored in the task store."):
            nodes = (outcome.cause or {}).get("failed_nodes")
            if nodes and self._operator.avoid_failed_nodes and task_store.add_failed_nodes(context, nodes):
                self._log.info("Later tries avoid %s (avoid_failed_nodes).", ", ".join(nodes))
        with self._only_logged("The end of the training could not be counted in Airflow's metrics."):
            task_outputs.count(outcome, context)
        proven = stored or not outcome.succeeded
        return self._report(outcome, Event.OUTCOME_STORED if proven else Event.OUTCOME_NOT_STORED, host)

    def _judged(self, outcome: Outcome) -> Outcome:
        """The outcome, by the rules failed if it lacks what `require` asks for.

        :raises TrainingJobError: it isn't proved whether it does, and a retry reads the logs again.
        """
        if (found := task_outputs.lacking(outcome, self._operator.require or {})) is None:
            return outcome
        event, lack = found
        successor = Successor.NEXT_TRY if compat.has_retry(self._context) else Successor.NOBODY
        rule = decide(Situation(event, successor=successor))
        if rule.action is not Action.FAIL_FOR_GOOD:
            raise TrainingJobError(f"{lack}\n{rule.text}")
        return task_outputs.with_lack(outcome, lack, rule.text)

    def _report(self, outcome: Outcome, event: Event, host: WorkerHost | None = None) -> Any:
        """Push the outcome to Airflow, delete the job, and return the result or raise the cause.

        :param event: what is known about the outcome: OUTCOME_STORED, OUTCOME_NOT_STORED or SUCCESS_FOUND.
        """
        operator, context, log = self._operator, self._context, self._log
        self.outcome = outcome = operator._with_fit_result(outcome)
        if outcome.superseded:
            raise TrainingSupersededError("another try of this task now owns the job; this try deletes nothing")
        self._end_of_job = _is_left(outcome), False
        used: dict[str, Any] = {}
        is_stored = event is not Event.OUTCOME_NOT_STORED
        deletes = is_stored and OnFinishAction.of(operator.on_finish_action).deletes(succeeded=outcome.succeeded)
        with self._only_logged("The usage of earlier tries could not be read from the task store."):
            used = task_store.read_total_usage(context, None if event is Event.SUCCESS_FOUND else outcome.usage)
        with self._only_logged("Usage, metrics or the last status could not be pushed to Airflow."):
            # of another try may be known only a part, which `tries` doesn't count
            if used.get("tries", 0) > 1 or used.get("held", 0) > round(outcome.usage.get("held", 0), 1):
                # a try that returns an earlier success has trained nothing
                training_tries = context["ti"].try_number - (event is Event.SUCCESS_FOUND)
                bound = "at least " if used["tries"] < training_tries else ""
                held, wasted = bound + format_duration(used["held"]), format_duration(used["wasted"])
                # a retry, from Airflow 3.3 on
                log.info("Accelerators of all tries together: held for %s, wasted for %s.", held, wasted)
                outcome = replace(outcome, usage={**outcome.usage, ALL_TRIES: used})
            freed = not outcome.release_error
            outcome = task_outputs.with_job_end(outcome, context, deleted=deletes and freed, freed=freed)
            task_outputs.push(outcome, context, all_xcoms=operator.do_xcom_push)
        with self._only_logged("The summary of the training could not be pushed to Airflow."):
            summaries.push_ended(context, outcome, used)
        if outcome.succeeded and not outcome.unmet:
            compat.push_return_value(context, operator, outcome.result)
            if operator.outlets:
                with self._only_logged("The asset events of the outlets do not contain the training's result."):
                    asset_events.add_training(context, operator.outlets, outcome, log)
        if not outcome.release_error:
            self._repeat_lines()
        unreleased = "" if outcome.succeeded and outcome.kept else outcome.release_error
        if outcome.kept:
            left = self._release_ended_job(JobRef.from_dict(outcome.kept), event, host)
            unreleased = left if outcome.release_error else ""
            deletes = deletes and not left
        elif outcome.unreleased:
            unreleased = self._release_ended_job(JobRef.from_dict(outcome.unreleased), Event.KEPT_UNRELEASED, host)
        if outcome.kept or outcome.unreleased:
            self._end_of_job = bool(unreleased), deletes
            with self._only_logged("The training page doesn't show what has become of the job."):
                ended = task_outputs.with_job_end(outcome, context, deleted=deletes, freed=not unreleased)
                if ended.status != outcome.status:
                    task_outputs.push(ended, context, all_xcoms=False)
        self._repeat_lines()  # if its pods may have held accelerators until now
        if outcome.succeeded:
            if unreleased and compat.has_retry(context):
                raise TrainingReleaseError(f"the training succeeded, but its pods may hold accelerators: {unreleased}")
            if outcome.unmet:
                raise TrainingRequirementError(f"{outcome.unmet}\n{outcome.released}".rstrip())
            return operator._returned(outcome)
        codes = operator.skip_on_exit_code
        if not unreleased and outcome.exit_code in ([codes] if isinstance(codes, int) else codes or ()):
            raise AirflowSkipException(f"the job ended with exit code {outcome.exit_code} (skip_on_exit_code)")
        raise failure(outcome.cause or UNKNOWN_CAUSE, unreleased or outcome.released)

    def _repeat_lines(self) -> None:
        """Log the lines of the trigger again, once, if Airflow doesn't show them: see `core/logs/repetition.py`."""
        repeats, self._repeats_lines = self._repeats_lines, False
        if not repeats or compat.is_inline():
            return
        with self._only_logged("The training's lines since the deferral can't be logged again."):
            found = self._deferral_of_this_try()
            if found is None or found[0].options.logs == "none":
                return
            deferral, limit = found[0], self._operator.execution_timeout
            storage, deferred_at = compat.log_storage(self._ti), deferral.handover.handed_over_at
            decided = repetition_of(compat.repeat_logs(), storage, deferred_at)
            if isinstance(decided, str):
                if decided:
                    self._log.info(decided)
                return
            seconds = min(MAX_REPEAT_SECONDS, math.inf if limit is None else limit.total_seconds() / 4)
            with self._reachable_by_kill(self._connected()) as host:
                host.repeat_lines(deferral, decided, seconds)

    def _release_ended_job(self, job: JobRef, event: Event, host: WorkerHost | None) -> str:
        """Delete the job, unless its status is the only proof of its success; returns why that failed, or "".

        Of a job that is kept by `on_finish_action`, delete the running pods.
        """
        if event is Event.OUTCOME_NOT_STORED:
            if compat.has_task_store(self._context):
                self._log.warning("The succeeded job is kept, without running pods: its outcome could not be stored.")
            else:
                self._log.info(
                    "The succeeded job is kept for a retry, without running pods.\n%s: %s",
                    compat.WHO_DELETES_IT,
                    job.delete_command,
                )
        try:
            with contextlib.nullcontext(host) if host else self._connected() as used:
                error = used.outcome_stored(job, event)
        except Exception as e:  # must not hide how the training ended
            self._log.error("%s", e)
            error = str(e)
        if error and event is Event.KEPT_UNRELEASED:
            self._log.warning("Pods of the job could not be deleted. To delete them, run: %s", job.delete_pods_command)
        elif error and event is not Event.OUTCOME_NOT_STORED:
            self._log.warning("The job could not be deleted. To delete it, run: %s", job.delete_command)
        return error


def _is_left(outcome: Outcome) -> bool:
    """Whether the job may hold accelerators: its release failed, or a killed worker has left it to a retry."""
    return bool(outcome.release_error) or outcome.status.get("ended") is False
