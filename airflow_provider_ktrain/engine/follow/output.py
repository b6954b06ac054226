"""The job's output: container logs, the result line and restarts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from airflow_provider_ktrain.core.diagnosis.horovod import LostRanks
from airflow_provider_ktrain.core.logs.container_run import run_of
from airflow_provider_ktrain.core.logs.selection import chooser, is_followed
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.state.pods.objects import name_of
from airflow_provider_ktrain.core.state.steps.progress import RunStarts
from airflow_provider_ktrain.core.state.steps.training_metrics import METRIC_MARKER, TrainingMetrics
from airflow_provider_ktrain.core.text.output import clipped, counted
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds, utc
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Object
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.divergence import DivergenceProbe
from airflow_provider_ktrain.engine.follow.evidence_collector import EvidenceCollector
from airflow_provider_ktrain.engine.follow.primary_result import PrimaryResult
from airflow_provider_ktrain.engine.follow.restarts import RestartReporter
from airflow_provider_ktrain.engine.logs.emitter import Inspect
from airflow_provider_ktrain.engine.logs.follower import AGAIN_LINES, LogFollower, Takeover
from airflow_provider_ktrain.engine.logs.line_logger import AGAIN, LineLogger
from airflow_provider_ktrain.engine.logs.log_line import LogLine

#: After this time since the handover, a trigger assumes that another triggerer followed the job in between. A trigger
#: usually starts within 2 s; Airflow needs longer than this to move it from a lost triggerer.
TAKEOVER_SECONDS = 10.0
RESULT = "result"  # what the inspector of result lines collects


class JobOutput:
    """Logs the lines of the job's containers, and keeps what diagnosis and result need of them."""

    def __init__(self, context: FollowContext) -> None:
        self._context, self._state, self.cursor = context, context.state, context.cursor
        self._chosen: Callable[[Mapping[str, Any]], bool] | None = None  # None until the job is known
        self._roles: tuple[str, ...] = ()  # of the job when it was chosen
        self.last_line_at = timing.epoch()  #: Time of the last line in epoch seconds, or when silence starts to count.
        #: What the program reports while it runs.
        self.training_metrics = TrainingMetrics(self._state.handover.training_metrics)
        self._unread_until = 0.0  # until when steps may have been written that nobody can read any more, epoch seconds
        self._starts = RunStarts()
        self._failed_inspectors: set[str] = set()  # whose first error was logged
        self.evidence = EvidenceCollector(context)
        self.restarts = RestartReporter(context, self.evidence.lines_of_run)
        #: Epoch seconds of the takeover. None: no other triggerer followed the job.
        self.taken_over_at = self._taken_over_at()
        self._warn_about_repeated_lines()
        self.follower = LogFollower(
            context.api,
            LineLogger(context.log, self._state.kind),
            kind=self._state.kind,
            cursor=self.cursor,
            chosen=self._is_chosen,
            inspector=self._inspector,
            takeover=self._takeover(),
            job=lambda: self._state.known_job,
            began=context.host.began(),
        )
        self.result = PrimaryResult(context, self.follower.budget)
        self.divergence = DivergenceProbe(context, self.follower.budget)

    def _is_chosen(self, pod: Mapping[str, Any], container: str) -> bool:
        state = self._state
        if self._chosen is None or not self._chosen(pod):
            return False
        return is_followed(state.kind, state.known_job, pod, container)

    def observe(self, pods: Mapping[str, Object], removed: Sequence[str] = ()) -> None:
        """Follow the chosen containers, and report restarts."""
        job = self._state.known_job
        roles = tuple(sorted(self._state.kind.replicas(job)))
        if self._chosen is None or roles != self._roles:  # a TrainJob shows its launcher only in its status
            self._roles = roles
            self._chosen = chooser(self._context.options.logs, self._state.kind, job)
        if removed:
            self.evidence.forget_others()
        self.restarts.update(pods, removed)
        self.training_metrics.read_trainer_status(job)
        for pod in pods.values():
            self.follower.observe(pod)

    async def close(self) -> None:
        """Stop following the logs, and report lines that are not logged."""
        if discarded := await self.follower.close():
            self._context.log.warning(
                f"{counted(discarded, 'line')} not logged: this triggerer was stalled, and the trigger was canceled.\n"
                "If another triggerer follows the job now, it logs them."
            )

    def mark_deleted(self, pod: Object) -> None:
        """Record that a pod was deleted. `pod` is its last state."""
        self.restarts.mark_deleted(pod)
        self.follower.observe(pod, deleted=True)

    def unseen_logs(self) -> list[tuple[str, str]]:
        """Pod and container of each log to follow that nobody can read any more, if the container ran at all.

        It was not seen to start, and the pod is gone: both happened within a cut of the network.
        """
        return [
            (name_of(pod), str(container["name"]))
            for pod in self._state.pods.lost
            for container in (pod.get("spec") or {}).get("containers") or ()
            if not run_of(pod, container["name"]).started and self._is_chosen(pod, container["name"])
        ]

    def progress_since(self) -> float | None:
        """From when on the job makes no progress, in epoch seconds; None while this doesn't count."""
        began = self._starts.last(self._state.job or {}, self._state.pods.live)
        return None if began is None else max(began, self.clock_began(Limit.PROGRESS))

    def clock_began(self, limit: Limit) -> float:
        """When the last line or progress was recorded, in epoch seconds; 0: none was."""
        if limit is Limit.LOG_STALL:
            return self.last_line_at
        return max(self.training_metrics.progress_at or 0.0, self._unread_until)

    def restart_clock(self, limit: Limit, at: float) -> None:
        """Count silence, or time without progress, from `at` on, in epoch seconds, unless it counts from later on."""
        if limit is Limit.LOG_STALL:
            self.last_line_at = max(self.last_line_at, at)
        else:
            self._unread_until = max(self._unread_until, at)

    def _taken_over_at(self) -> float | None:
        """When this process took the job over from another triggerer; None if it did not.

        A trigger can't ask whether another triggerer followed the job before it. The time from the handover to its
        start decides.
        """
        host, handed_over_at = self._context.host, self._state.handover.handed_over_at
        began = host.began_at or timing.epoch()
        taken_over = host.shared and handed_over_at and began - handed_over_at > TAKEOVER_SECONDS
        return began if taken_over and self._context.options.logs != "none" else None

    def _takeover(self) -> Takeover | None:
        """What is read of the logs before a takeover, beside the lines that are written now."""
        if self.taken_over_at is None:
            return None
        cursor, handed_over = self.cursor, replace(self.cursor)
        cursor.positions, cursor.names, cursor.since = {}, {}, ""  # in place: others hold this cursor
        at = utc(self.taken_over_at).replace(tzinfo=None)
        return Takeover(handed_over, f"{at.isoformat(timespec='microseconds')}000Z", self._inspector_of_earlier_lines)

    def _warn_about_repeated_lines(self) -> None:
        """Log which lines may be repeated after a handover."""
        log = self._context.log
        if self._context.options.logs == "none":
            return
        if self.taken_over_at is not None:
            since = utc(self._state.handover.handed_over_at)
            log.warning(
                f"Up to {AGAIN_LINES:,} lines since {since:%H:%M:%S} may be repeated: another triggerer took over, or "
                f"this trigger started late.\nThey come beside the new ones, in blocks that begin with {AGAIN!r}."
            )
        if self.cursor.unreadable:
            log.warning("The log positions that were handed over can't be read: all lines are repeated.")
        elif self.cursor.omitted:
            log.warning(
                f"Lines since {self.cursor.since[11:19]} of {counted(self.cursor.omitted, 'container')} may be "
                "repeated: their log positions don't fit into the trigger's arguments."
            )

    def _inspector(self, source: LogLine) -> Inspect:
        """A function that sees each line of a container before the rate limit drops any.

        Result lines, and lines that show why a replica failed, must not be lost when a container floods its log.
        """
        keep = self._guarded("last lines", self.evidence.recorder(source), source)
        take_report = self._taker_of_reports(source)
        find_lost_ranks = self._guarded("lost ranks", self._finder_of_lost_ranks(source), source)
        count_nan = self._guarded("reports of NaN", self.divergence.inspector(source), source)

        def inspect(text: str, written: str, run: int, is_plain: bool) -> None:
            self.last_line_at = timing.epoch()
            keep(text, written, run, is_plain)
            take_report(text, written)
            find_lost_ranks(text)
            count_nan(text, run)

        return inspect

    def _finder_of_lost_ranks(self, source: LogLine) -> Callable[[str], None]:
        """A function that warns about ranks which Horovod goes on without. It sees each line of a container."""
        ranks, state = LostRanks(), self._state

        def is_scaled_down() -> bool:
            counts = {role: state.kind.count(state.known_job, role) for role in state.kind.replicas(state.known_job)}
            return any(index >= counts.get(role, 0) for role, index in map(state.kind.role_of, state.pods.all))

        def find(text: str) -> None:
            if warning := ranks.lost_by(text, is_scaled_down):
                self._context.log.warning(warning)

        return find if source.role in state.kind.launchers and not source.init else lambda text: None

    def _guarded(self, what: str, inspect: Callable[..., object], source: LogLine) -> Callable[..., None]:
        """The inspector, whose errors never end the reading of a log. The first one of each inspector is logged."""

        def guarded(*line: str | int) -> None:
            try:
                inspect(*line)
            except Exception as e:
                if what not in self._failed_inspectors:
                    self._failed_inspectors.add(what)
                    replica = self._state.kind.replica_name(source.role, source.index)
                    self._context.log.warning(
                        f"The {what} of {replica} may be incomplete: a line could not be inspected.\n"
                        f"{type(e).__name__}: {e}"
                    )
                if what == RESULT:
                    self.result.mark_incomplete(source)

        return guarded

    def _inspector_of_earlier_lines(self, source: LogLine) -> Inspect:
        """Of lines from before a takeover. Later ones may have been read already, so their order counts."""
        take_report = self._taker_of_reports(source, earlier=True)
        return lambda text, written, run, is_plain: take_report(text, written)

    def _taker_of_reports(self, source: LogLine, *, earlier: bool = False) -> Callable[[str, str], None]:
        """A function that takes metrics from the lines of a container, and results if it is the primary's."""
        replica = self._state.kind.replica_name(source.role, source.index)
        primary = (
            not source.init and source.index == 0 and source.role == self._state.kind.primary(self._state.known_job)
        )

        def read_metrics(text: str, written: str) -> None:
            at = epoch_seconds(written) or timing.epoch()
            self.training_metrics.read_line(replica, text, at, earlier=earlier)
            self._report_ignored_step(replica)

        take_metrics = self._guarded("metrics", read_metrics, source)
        take_result = self._guarded(RESULT, partial(self.result.take, source, earlier=earlier), source)

        def take(text: str, written: str) -> None:
            if METRIC_MARKER in text:
                take_metrics(text, written)
            if primary:
                take_result(text, written)

        return take

    def _report_ignored_step(self, replica: str) -> None:
        """Log once for each replica that a step of its metrics counts as none."""
        if (step := self.training_metrics.take_ignored_step(replica)) is not None:
            self._context.log.warning(
                f"KTRAIN_METRIC of {replica}: the step {clipped(str(step), 40)} is ignored.\n"
                "Expected a finite number below 2**53. The number of the report counts as the step of its metrics."
            )
