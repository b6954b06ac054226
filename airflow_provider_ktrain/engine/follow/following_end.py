"""The end of following a job: the rest of the logs, the cause, and the outcome or the handover."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

from airflow_provider_ktrain.core.diagnosis.evidence import Evidence, make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause, advice_of
from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.reporting.announcement import summary_of_success
from airflow_provider_ktrain.core.state.accelerators import unit_of
from airflow_provider_ktrain.core.state.pods.exit_code import primary_exit_code
from airflow_provider_ktrain.core.state.status import Phase, shown_conditions
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp, utc
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.observer import Observer
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.status_reporter import StatusReporter, last_status
from airflow_provider_ktrain.engine.logs.emitter import Tally
from airflow_provider_ktrain.engine.logs.follower import DrainReport, names_of

MAX_DRAIN_SECONDS = 300.0  #: How long to read the remaining logs of a job that has ended, as long as lines come.
#: How long to read the remaining logs after a limit has passed or near the deadline, and the lines before a takeover.
SHORT_DRAIN_SECONDS = 5.0
MAX_REMAINDER_SECONDS = 30.0  #: How long to read, after the release, lines of replicas that outlived the job.


class FollowingEnd:
    """Reads the rest of one job's logs, finds and logs the cause, and makes the outcome or the handover."""

    def __init__(self, context: FollowContext, output: JobOutput, observer: Observer, reporter: StatusReporter) -> None:
        self._api, self._state, self._options, self._log = context.api, context.state, context.options, context.log
        self._output, self._observer, self._reporter = output, observer, reporter
        self._watches_before = self._api.stats["watches"]
        self._warned_of: dict[tuple[str, str], Tally] = {}  # what was missing of each log at the last warning
        self._unread: set[tuple[str, str]] = set()  # logs that a warning has named as not read to their end
        self._keeps_open = False  # whether replicas that outlive the job are followed until the release ends them

    async def hand_over(self) -> Handover:
        """Stop following; the next process continues from this point."""
        await self._output.follower.close()
        self._warn_about_earlier_lines(self._output.follower.earlier_report())
        self._warn_about_unseen_logs()
        self._count()
        pods = self._state.pods.handover(self._state.known_job, timing.utc_now(), self._state.spans_in(Phase.QUEUED))
        return Handover(
            cursor=self._output.cursor.to_dict(),
            metrics=self._state.metrics,
            result_line=self._output.result.line,
            result_from=self._output.result.origin,
            pod_history={
                **pods,
                "crashes": self._output.restarts.handover(),
                "existing": self._state.existing_pods,
            },
            handed_over_at=timing.epoch(),
            training_metrics=self._output.training_metrics.handover(),
            phases=[[name, at] for name, at in self._state.phases],
            generation=self._state.generation,
            spec_since=self._state.spec_since,
        )

    async def read_remainder_of_ended_job(self, *, releases: bool) -> None:
        """Read the logs of a job that has ended, and wait for what explains its end.

        :param releases: whether the job is released afterwards: replicas that outlive it are followed until then.
        """
        self._keeps_open = releases
        await self._observer.wait_for_explaining_pod()
        await self._drain_to_the_end()
        await self._observer.update()  # pods may have changed while the logs were read
        self._output.restarts.report(at_once=True)
        self._warn_about_unseen_logs()
        if self._state.phase is Phase.SUCCEEDED and not self._options.conditions:
            result = self._output.result
            await result.complete(self._unread, self._output.follower.earlier_report().unread)
            if names := set(self._options.require) - mapping(result.find()[0]).keys():
                await result.read_metrics(names, self._unread)

    async def outcome_of_condition(self) -> Outcome:
        """The job has a condition that the task waits for."""
        state = self._state
        if state.ended:
            await self._drain_to_the_end()
        met = set(self._options.conditions) & shown_conditions(state.known_job, self._phase)
        self._log.info(f"{state.ref} has the condition {' and '.join(sorted(met))}")
        return Outcome(self._phase, True)

    async def cause_of_end(self) -> Cause:
        """Why the job failed or is gone, or is taken for incomplete although its status shows a success."""
        return await self.diagnosed(self._cause_of_end(), f"{self._state.ref} is {self._phase}")

    async def diagnosed(self, finding: Awaitable[Cause], known: str, category: Category = Category.UNKNOWN) -> Cause:
        """The cause that a diagnosis finds; an unknown one if the diagnosis itself fails: the job ends all the same.

        :param known: what is certain without the diagnosis.
        :param category: likewise: a `retry_policy` depends on it. Default: UNKNOWN.
        """
        try:
            return await finding
        except Exception as e:
            self._log.error(f"The diagnosis has failed. Please report this.\n{traceback.format_exc()}")
            why = f"the cause is unknown because the diagnosis has failed ({type(e).__name__})"
            return Cause(category, f"{known}; {why}", resolution="Check the job's log and events.")

    async def _cause_of_end(self) -> Cause:
        if self._state.phase is Phase.SUCCEEDED:
            return self._cause_of_incomplete_success()
        return diagnose(await self._evidence())

    def _cause_of_incomplete_success(self) -> Cause:
        """The job's status shows a success, and a pod on which it depends was stopped from outside."""
        found = self._state.pods.stopped(self._state.known_job)
        first = next((one for one in found if one.text == self._state.why_incomplete), None)
        return Cause(
            Category.INFRASTRUCTURE,
            f"{self._state.why_incomplete}: the training is probably incomplete",
            resolution="Retry: a program that saves checkpoints continues from the last one. A program that prints a "
            "result at its end (KTRAIN_RESULT) proves that it is complete.",
            replica="" if first is None else self._state.kind.replica_name(first.role, first.index),
            failed_nodes={first.node: first.text} if first is not None and first.node else {},
        ).with_short_summary()

    async def evidence_of_running_job(self) -> Evidence:
        """What a diagnosis needs of a job that a limit ends. Reading of logs ends with this."""
        await self._drain(min(self._options.drain_timeout, SHORT_DRAIN_SECONDS))
        return await self._evidence()

    def report_failure(self, cause: Cause, stacks: Sequence[str] = ()) -> None:
        """Log the cause with the end of the failed replica's log.

        This is logged before or during the release because a deferred task must wait for a worker before it can log it.

        :param stacks: lines about where the processes of a hung job were. Default: none.
        """
        self._output.restarts.report(at_once=True)
        if stacks:
            text = "\n".join(stacks)
            self._log.error(f"The stacks of the processes when the job was released:\n{text}")
        self._log.error("\n".join(filter(None, (cause.summary, advice_of(cause.as_dict())))))
        if cause.last_lines:
            lines = "\n".join(f"  {line}" for line in cause.last_lines)
            self._log.error(f"Last log lines of {cause.replica}:\n{lines}", logger=cause.replica)

    @property
    def _phase(self) -> Phase:
        return self._state.phase or Phase.PENDING

    async def _evidence(self) -> Evidence:
        state, pods = self._state, self._state.pods_of_training
        # after a takeover, the last lines of a replica may be older than what was read of it
        taken_over = self._output.follower.earlier_report().containers
        found = await self._output.evidence.gather({*self._unread, *taken_over}, pods)
        return make_evidence(state.known_job, pods, **found, gone=state.phase is Phase.GONE)

    # logs

    async def _drain_to_the_end(self) -> None:
        """Read the rest of the logs of a job that has ended.

        This ends after `drain_timeout` seconds without a line. While lines come, it continues for MAX_DRAIN_SECONDS at
        most and not past the deadline: the last lines show why a training failed, and the release deletes them.
        """
        longest = self._until_deadline(MAX_DRAIN_SECONDS)
        await self._drain(min(self._options.drain_timeout, longest), longest)

    def _until_deadline(self, seconds: float) -> float:
        """At most that many seconds, and not past the deadline, but at least SHORT_DRAIN_SECONDS."""
        if self._options.deadline is None:
            return seconds
        return max(min(seconds, self._options.deadline - timing.epoch()), SHORT_DRAIN_SECONDS)

    async def _log_remainder(self) -> None:
        """Wait until what was read is logged, as long as lines are logged, and count what is not.

        Lines since the handover, after a takeover, have SHORT_DRAIN_SECONDS: Airflow hears of the end afterwards.
        """
        began, follower, longest = timing.now(), self._output.follower, self._until_deadline(MAX_DRAIN_SECONDS)
        timeout = min(self._options.drain_timeout, longest)
        report = await follower.log_remainder(timeout, longest, min(timeout, SHORT_DRAIN_SECONDS))
        seconds = timing.now() - began
        self._warn_about_missing_lines(report, seconds)
        unlogged = {key: tally.unlogged for key, tally in report.containers.items() if tally.unlogged}
        if unlogged:
            self._log.warning(
                f"Logs are incomplete: Airflow did not take all lines within {seconds:.0f} s.\n"
                f"Missing: {counted(sum(unlogged.values()), 'line')} of {names_of(unlogged)}."
            )
        self._warn_about_earlier_lines(follower.earlier_report())

    def _warn_about_earlier_lines(self, report: DrainReport) -> None:
        """Log how many lines since the handover are not logged again after a takeover, and between which times."""
        since, until = (utc(at or 0.0) for at in (self._state.handover.handed_over_at, self._output.taken_over_at))
        for key, tally in report.containers.items():
            self._warn_about_gaps(key, tally, Tally())
            if tally.unlogged or not tally.complete:
                number = f"{'' if tally.complete else 'at least '}{counted(tally.unlogged, 'line')}"
                self._log.warning(
                    f"{number if tally.unlogged else 'Some lines'} of {names_of([key])} between {since:%H:%M:%S} and "
                    f"{until:%H:%M:%S} are not logged again.\nIf the log of the earlier process is lost, only "
                    "`kubectl logs` has them until the release."
                )

    async def _drain(self, timeout: float, longest: float | None = None) -> None:
        began = timing.now()
        report = await self._output.follower.drain(timeout, longest, keep_open=self._keeps_open)
        self._warn_about_missing_lines(report, timing.now() - began)

    def _warn_about_missing_lines(self, report: DrainReport, seconds: float) -> None:
        """Log what of the logs was not read, each part once. The rest was read for that many seconds."""
        for key, tally in report.containers.items():
            self._warn_about_gaps(key, tally, self._warned_of.get(key, Tally()))
            self._warned_of[key] = tally
        if not self._state.ended:
            return  # a job that still runs when a limit ends it always has unread lines
        if unread := [key for key in report.unread if key not in self._unread]:
            self._unread.update(unread)
            self._log.warning(
                f"Logs are incomplete: reading them was stopped after {seconds:.0f} s.\n"
                f"Missing: the last lines of {names_of(unread)}."
            )

    def _warn_about_unseen_logs(self) -> None:
        """Log which logs are lost because a container started and its pod was deleted while nobody could see it."""
        if unseen := self._output.unseen_logs():
            self._log.warning(
                f"Logs are incomplete: pods were deleted before they were seen to run.\n"
                f"Missing: all lines of {names_of(unseen)}, if they ran."
            )

    def _warn_about_gaps(self, key: tuple[str, str], tally: Tally, earlier: Tally) -> None:
        """Log what is missing since `earlier`: gaps of which the log has no notice, and lines over the rate limit."""
        pod, container = key
        for gap in tally.unsaid[len(earlier.unsaid) :]:
            self._log.warning(f"The log of {pod}/{container} may be incomplete.\n{gap}")
        if dropped := tally.dropped - earlier.dropped:
            size = counted(tally.dropped_bytes - earlier.dropped_bytes, "byte")
            self._log.warning(
                f"The rate limit dropped {counted(dropped, 'line')} ({size}) of the log of {pod}/{container}."
            )

    # outcome

    async def read_remainder_after_release(self, *, deleted: bool) -> None:
        """Read what replicas have written after the end of the job: a PyTorchJob ends with its Master."""
        if not self._keeps_open:
            return
        began, follower, longest = timing.now(), self._output.follower, self._until_deadline(MAX_REMAINDER_SECONDS)
        drain = follower.drain_deleted if deleted else follower.drain
        report = await drain(SHORT_DRAIN_SECONDS, longest)
        self._warn_about_missing_lines(report, timing.now() - began)

    async def outcome(self, cause: Cause | None, *, full: bool = True, released: str = "") -> Outcome:
        """How the training ended; the log gets one summary. The owner adds what was released.

        :param cause: why it failed. None: it succeeded.
        :param released: what the summary says about the release. Default: nothing.
        :param full: with usage, result and last status; False after a kill, which leaves no time. Default: True.
        """
        state, job, now = self._state, self._state.job or {}, timing.utc_now()
        brief = Outcome(self._phase, cause is None, cause=None if cause is None else cause.as_dict())
        if not full:
            self._count()
            return replace(brief, metrics=state.metrics)
        await self._reporter.complete_usage()
        completed = parse_timestamp(job.get("status", {}).get("completionTime"))
        spent = state.pods.usage(now, completed, state.queued_seconds(), state.spans_in(Phase.QUEUED))
        summary = f"{summary_of_success(state.ref, state.kind, job, now)}\n" if cause is None else ""
        freed = f"{released}\n" if released else ""
        self._log.info(f"{summary}{freed}{spent}")
        steps = self._output.training_metrics.steps
        repeated = steps.usage(spent.gpus, spent.held)
        if line := steps.describe(repeated, unit_of(spent.resource)[0]):
            self._log.info(line)
        await self._log_remainder()
        self._count()
        result, result_error, has_result = self._output.result.find()
        return replace(
            brief,
            usage={**spent.as_dict(), **repeated},
            result=result,
            result_error=result_error,
            has_result=has_result,
            metrics=state.metrics,
            exit_code=primary_exit_code(state.kind, job, state.pods_of_training)
            if state.phase is Phase.FAILED
            else None,
            training_metrics=self._output.training_metrics.summary() | self._output.result.metrics,
            status=await self.last_status(cause),
            step=steps.highest,
            require=dict(self._options.require),
        )

    async def last_status(self, cause: Cause | None) -> dict[str, Any]:
        """The last status for the training page; empty if it can't be built."""
        return await last_status(lambda: self._reporter.take(cause, ended=True), self._log)

    def _count(self) -> None:
        """Add what this host has done to the metrics; once, at its end."""
        self._state.count_phase()
        report, metrics = self._output.follower.report(), self._state.metrics
        watches = self._api.stats["watches"] - self._watches_before
        done = {"log.lines": report.total.lines, "log.bytes": report.total.bytes, "watch.requests": watches}
        metrics.update({name: metrics.get(name, 0) + number for name, number in done.items()})
