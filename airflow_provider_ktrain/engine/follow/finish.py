"""Ends the following of a job: reads the rest of the logs, diagnoses, releases the job, and returns the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from airflow_provider_ktrain.core.diagnosis import job_rules as diagnosis
from airflow_provider_ktrain.core.diagnosis.exit_code import primary_exit_code
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause, Limit
from airflow_provider_ktrain.core.state.crash_loop import CrashLoop
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.success_summary import summary_of_success
from airflow_provider_ktrain.core.text import counted
from airflow_provider_ktrain.core.timestamps import parse_timestamp
from airflow_provider_ktrain.engine.api import Api
from airflow_provider_ktrain.engine.follow.messages import Handover, Options, Outcome, StopSignal
from airflow_provider_ktrain.engine.follow.observer import Observer
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.queueing import requested_gpus
from airflow_provider_ktrain.engine.follow.state import JobState, utc_now
from airflow_provider_ktrain.engine.job_requests import Log
from airflow_provider_ktrain.engine.logs.report import DrainReport, Tally
from airflow_provider_ktrain.engine.release import Mode, ReleaseError, mode_of, release
from airflow_provider_ktrain.engine.threads import in_thread

Object = dict[str, Any]
MAX_DRAIN_SECONDS = 300.0  #: for the rest of the logs of a job that has ended, as long as lines come
SHORT_DRAIN_SECONDS = 5.0  #: for the rest of the logs after a limit has passed, and where the deadline is near
MAX_REST_SECONDS = 30.0  #: after the release, for lines of replicas that outlived the job
SUSPEND_SECONDS = 10.0  #: to suspend a failed job that would train again
MAX_NAMED_CONTAINERS = 3  #: in one message


class Finisher:
    """Ends the following in one of several ways; the loop decides which and when.

    :param api: client for the cluster.
    :param state: the job as last observed.
    :param output: its logs, restarts and result line.
    :param observer: brings the state up to date after the logs were read.
    :param options: of the task.
    :param stop: how the host requests an early end, and what then happens to the job.
    :param take_status: takes the training's last status: see `StatusReporter.take`.
    :param waits_after_timeout: whether the release waits for the pods to stop after a TIMEOUT. False in a worker:
        there Airflow's own timeout would interrupt that.
    :param watches_before: number of watch requests that the client had made when the following began.
    :param log: where causes, gaps in logs and releases are logged.
    """

    def __init__(
        self,
        api: Api,
        state: JobState,
        output: JobOutput,
        observer: Observer,
        options: Options,
        stop: StopSignal,
        *,
        take_status: Callable[..., Callable[[], dict[str, Any]]],
        waits_after_timeout: bool,
        watches_before: int,
        log: Log,
    ) -> None:
        self._api, self._state, self._output, self._observer = api, state, output, observer
        self._options, self._stop, self._log, self._take_status = options, stop, log, take_status
        self._waits_after_timeout, self._watches_before = waits_after_timeout, watches_before
        self._warned_of: dict[tuple[str, str], Tally] = {}  # what was missing of each log at the last warning
        self._unread: set[tuple[str, str]] = set()  # logs that a warning has named as not read to their end
        self._keeps_open = False  # whether replicas that outlive the job are followed until the release ends them
        self.releasing = False  #: whether a release has begun: from then on nothing may cut it off

    async def hand_over(self) -> Handover:
        """Stop following; the next process continues from this point."""
        await self._output.close()
        self._count()
        return Handover(
            cursor=self._output.cursor.to_dict(),
            metrics=self._state.metrics,
            result_line=self._output.result_line,
            pod_history={**self._state.pods.handover(utc_now()), "crashes": self._output.restarts.handover()},
            queue=self._state.queue,
            handed_over_at=time.time(),
            training_metrics=self._output.training_metrics.handover(),
            phases=[[name, at] for name, at in self._state.phases],
        )

    def let_go(self) -> Outcome:
        """Stop following a job that belongs to another try of the task. Nothing is released."""
        self._log.warning(f"{self._state.ref} belongs to another try of this task now. This try stops following it.")
        return Outcome(self._phase, False, superseded=True)

    async def conditions_met(self, conditions: set[str]) -> Outcome:
        """The job has a condition that the task waits for."""
        if self._state.ended:
            await self._drain_to_the_end()
        self._log.info(f"{self._state.ref} has the condition {' and '.join(sorted(conditions))}")
        return Outcome(self._phase, True)

    async def ended(self) -> Outcome:
        """The job succeeded, failed or was deleted: read the logs, find the cause, release; in this order."""
        if self._state.phase is Phase.FAILED and self._state.kind.restarts_failed_jobs and self._options.release:
            await self._keep_from_restarting()
        self._keeps_open = self._will_release()
        await self._drain_to_the_end()
        await self._observer.update()  # pods may have changed while the logs were read
        state = self._state
        if state.phase is Phase.SUCCEEDED and self._options.conditions:
            return Outcome(state.phase, False)
        if state.phase is Phase.SUCCEEDED:
            await self._output.find_result_line(self._unread)
            return await self._release(None)
        gone = state.phase is Phase.GONE
        return await self.failed(
            diagnosis.diagnose(state.known_job, state.pods.all, *await self._evidence(), gone=gone)
        )

    def _will_release(self) -> bool:
        """Whether a job that has ended is released after its logs were read."""
        kept = self._state.phase is Phase.SUCCEEDED and self._options.conditions
        return bool(self._options.release and self._state.ref.uid and not kept)

    async def _keep_from_restarting(self) -> None:
        """Suspend a failed job before its logs are read, which may take minutes. Its finished pods stay."""
        try:
            await release(self._api, self._state.ref, Mode.SUSPEND, verify=False, timeout=SUSPEND_SECONDS)
        except ReleaseError as e:  # the release after the logs tries again
            self._log.warning(f"{self._state.ref} has failed, but could not be suspended and may train again.\n{e}")

    async def failed(self, cause: Cause) -> Outcome:
        """Log the cause with the end of the failed replica's log, and release the job.

        This is logged before the release because a deferred task must wait for a worker before it can log it.
        """
        self._output.restarts.report(at_once=True)
        self._log.error("\n".join(filter(None, (cause.summary, cause.resolution))))
        if cause.last_lines:
            lines = "\n".join(f"  {line}" for line in cause.last_lines)
            self._log.error(f"Last log lines of {cause.replica}:\n{lines}", logger=cause.replica)
        return await self._release(cause)

    async def killed(self) -> Outcome:
        """After a kill there are only seconds: release first, everything else if time allows."""
        self.releasing = True
        self._keeps_open = False
        decision = await self._stop.decision()
        cause = Cause(Category.KILLED, decision.reason)
        if decision.keep:
            self._count()
            return Outcome(self._phase, False, cause=cause.as_dict(), metrics=self._state.metrics)
        return await self._release(cause, verify=False, timeout=self._stop.release_timeout)

    async def diagnose_limit(self, limit: Limit, amount: float) -> Cause:
        """The cause of a job that passed a limit, with its last log lines."""
        await self._drain(min(self._options.drain_timeout, SHORT_DRAIN_SECONDS))
        state = self._state
        seen = state.known_job, state.pods.all, *await self._evidence()
        return diagnosis.diagnose_limit(limit, amount, *seen, step=self._output.training_metrics.step)

    async def diagnose_crash_loop(self, loop: CrashLoop) -> Cause:
        """The cause of a job with a replica that fails again and again, with its last log lines."""
        await self._drain(min(self._options.drain_timeout, SHORT_DRAIN_SECONDS))
        seen = self._state.known_job, self._state.pods.all, *await self._evidence()
        return diagnosis.diagnose_crash_loop(loop.replica, loop.failures, *seen)

    @property
    def _phase(self) -> Phase:
        return self._state.phase or Phase.PENDING

    async def _evidence(self) -> tuple[list[Object], dict[str, list[str]]]:
        pods = self._state.pods
        return await self._output.evidence.gather(
            self._state.ref, self._state.known_job, pods.all, pods.uids, self._unread
        )

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
        return max(min(seconds, self._options.deadline - time.time()), SHORT_DRAIN_SECONDS)

    async def _drain(self, timeout: float, longest: float | None = None) -> None:
        """Read the rest of the logs, and log what is missing: see `LogFollower.drain`."""
        began = time.monotonic()
        report = await self._output.follower.drain(timeout, longest, keep_open=self._keeps_open)
        self._warn_about_missing_lines(report, time.monotonic() - began)

    async def _drain_rest(self, *, deleted: bool) -> None:
        """Read what replicas have written after the end of the job: a PyTorchJob ends with its Master.

        :param deleted: whether their pods are gone.
        """
        if not self._keeps_open:
            return
        began, follower, longest = time.monotonic(), self._output.follower, self._until_deadline(MAX_REST_SECONDS)
        drain = follower.drain_deleted if deleted else follower.drain
        report = await drain(SHORT_DRAIN_SECONDS, longest)
        self._warn_about_missing_lines(report, time.monotonic() - began)

    def _warn_about_missing_lines(self, report: DrainReport, seconds: float) -> None:
        """Log what of the logs is missing, each part once.

        :param report: of the logs so far.
        :param seconds: for which the rest was read.
        """
        late = 0
        incomplete: list[tuple[str, str]] = []
        for key, tally in report.containers.items():
            earlier = self._warned_of.get(key, Tally())
            self._warned_of[key] = tally
            self._warn_about_gaps(key, tally, earlier)
            late += tally.late - earlier.late
            if tally.late > earlier.late:
                incomplete.append(key)
        if self._state.ended:  # a job that still runs when a limit ends it always has unread lines
            unread = [key for key in report.unread if key not in self._unread]
            self._unread.update(unread)
            incomplete = list(dict.fromkeys([*incomplete, *unread]))
        else:
            unread = []
        if incomplete:
            lines = f"{'at least ' * bool(unread)}{counted(late, 'line')}" if late else "the last lines"
            self._log.warning(
                f"Logs are incomplete: reading them was stopped after {seconds:.0f} s.\n"
                f"Missing: {lines} of {_named(incomplete)}."
            )

    def _warn_about_gaps(self, key: tuple[str, str], tally: Tally, earlier: Tally) -> None:
        """Log where lines of a container may be missing and how many the rate limit dropped, since `earlier`."""
        pod, container = key
        for gap in tally.gaps[len(earlier.gaps) :]:
            self._log.warning(f"The log of {pod}/{container} may be incomplete.\n{gap}")
        if dropped := tally.dropped - earlier.dropped:
            size = counted(tally.dropped_bytes - earlier.dropped_bytes, "byte")
            self._log.warning(
                f"The rate limit dropped {counted(dropped, 'line')} ({size}) of the log of {pod}/{container}."
            )

    # release

    async def _release(self, cause: Cause | None, *, verify: bool = True, timeout: float | None = None) -> Outcome:
        """Release the job, log what it used, and return the outcome. `cause` is None after a success."""
        self.releasing = True
        self._output.restarts.report(at_once=True)
        if cause and cause.category is Category.TIMEOUT and not self._waits_after_timeout:
            verify = False
        released = error = ""
        kept: dict[str, str] | None = None
        if self._options.release and self._state.ref.uid:
            released, error, kept = await self._request_release(cause is None, verify, timeout)
        state, job, now = self._state, self._state.job or {}, utc_now()
        in_queue = requested_gpus(state) * state.seconds_in(Phase.QUEUED)
        spent = state.pods.usage(now, parse_timestamp(job.get("status", {}).get("completionTime")), in_queue)
        if cause is None:
            self._log.info(summary_of_success(state.ref, state.kind, job, now))
        self._log.info(str(spent))
        steps = self._output.training_metrics.steps
        repeated = steps.usage(spent.gpus, spent.held)
        if line := steps.describe(repeated):
            self._log.info(line)
        self._count()
        result, result_error, has_result = self._output.result()
        return Outcome(
            self._phase,
            cause is None,
            cause=None if cause is None else cause.as_dict(),
            released=released,
            release_error=error,
            kept=kept,
            usage={**spent.as_dict(), **repeated},
            result=result,
            result_error=result_error,
            has_result=has_result,
            metrics=state.metrics,
            exit_code=primary_exit_code(state.kind, job, state.pods.all) if state.phase is Phase.FAILED else None,
            training_metrics=self._output.training_metrics.summary(),
            status=await self._last_status(cause),
            step=steps.highest,
        )

    async def _last_status(self, cause: Cause | None) -> dict[str, Any]:
        """The last status for the training page. The outcome must not be lost because of it."""
        try:
            return await in_thread(self._take_status(cause, ended=True))
        except Exception as e:
            self._log.warning(f"The training page shows an earlier status: the last one can't be built.\n{e}")
            return {}

    async def _request_release(
        self, succeeded: bool, verify: bool, timeout: float | None
    ) -> tuple[str, str, dict[str, str] | None]:
        """The fields `released`, `release_error` and `kept` of the outcome."""
        state, ended = self._state, self._state.ended
        began, done, error = time.monotonic(), None, ""
        try:
            done = await release(
                self._api,
                state.ref,
                mode_of(self._options.on_finish_action, succeeded=succeeded, ended=ended),
                verify=verify,
                timeout=timeout or self._options.release_timeout,
                spare_ended=True,
            )
        except ReleaseError as e:
            error = str(e)
            self._log.warning(error)
        state.metrics["seconds.release"] = round(time.monotonic() - began, 3)
        await self._drain_rest(deleted=verify and done is not None and done.done)
        if done is None:
            return "", error, None
        self._log.info(done.text)
        # after a kill, an ended job stays: the next try may need its status to see how it ended
        return done.text, "", state.ref.to_dict() if done.kept and ended and self._stop.reason is None else None

    def _count(self) -> None:
        """Add what this host has done to the metrics; once, at its end."""
        self._state.count_phase()
        report, metrics = self._output.follower.report(), self._state.metrics
        watches = self._api.stats["watches"] - self._watches_before
        done = {"log.lines": report.lines, "log.bytes": report.bytes, "watch.requests": watches}
        metrics.update({name: metrics.get(name, 0) + number for name, number in done.items()})


def _named(containers: list[tuple[str, str]]) -> str:
    """The first containers, by pod and name, and the number of others."""
    names = ", ".join(f"{pod}/{container}" for pod, container in containers[:MAX_NAMED_CONTAINERS])
    others = len(containers) - MAX_NAMED_CONTAINERS
    return f"{names} and {others:,} more" if others > 0 else names
