"""Logs a line when replicas change their state, and warns of a job that holds GPUs while pods have no node."""

from __future__ import annotations

from airflow_provider_ktrain.core.state.pods.partial_start import find_partial_start, warning_due
from airflow_provider_ktrain.core.state.pods.pod_groups import partial_start_since
from airflow_provider_ktrain.core.state.pods.replica_status import replica_status
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.context import FollowContext, Part
from airflow_provider_ktrain.engine.follow.state import phase_of_pod

MIN_INTERVAL_SECONDS = 10.0  #: Shortest time between two lines, unless all replicas run.
MAX_LOOKED_AT_ALWAYS = 64  #: Pods of a job that are looked at after each change, if no line was logged before.
_SHOWN_PHASES = (Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)


class ReplicaReporter(Part):
    """Logs how many replicas run and what the others wait for, at a bounded rate.

    :param context: of the job. A process that followed it before has logged that all replicas run.
    """

    def __init__(self, context: FollowContext) -> None:
        self._state, self._log = context.state, context.log
        self._logged: object = None  # states of the last line
        self._next = 0.0  # timing.now() from which the replicas are looked at again
        self._pending = False  # whether there may be a change then
        self._looked_at: tuple[int, int] | None = None  # version of the pods' states, and the size of the job
        self._all_run = False  # whether the last line reported that all replicas run

    @property
    def due(self) -> float | None:
        """When a change is to be logged, by `timing.now`; None if there is none."""
        return self._next if self._pending else None

    @property
    def line(self) -> str:
        """The state of the replicas now; empty if there are none."""
        state, pods = self._state, self._state.pods.groups
        return replica_status(state.kind, state.known_job, pods, timing.utc_now()).line if pods.pods else ""

    async def observe(self) -> None:
        """Log the state of the replicas if it has changed since the last line."""
        state, pods = self._state, self._state.pods.groups
        if state.phase not in _SHOWN_PHASES or not pods.pods:
            self._pending = False
            return
        now = pods.shown_version, state.kind.size(state.known_job)
        if not self._pending and self._looked_at == now:
            return
        self._pending = timing.now() < self._next and (self._all_run or not self._may_all_run)
        if self._pending:
            return
        self._looked_at = now
        status = replica_status(state.kind, state.known_job, pods, timing.utc_now())
        if status.states == self._logged:
            if len(pods.pods) > MAX_LOOKED_AT_ALWAYS:
                self._next = timing.now() + MIN_INTERVAL_SECONDS
            return
        known = self._logged is None and state.handover.handed_over_at and status.all_run
        self._pending = not known and timing.now() < self._next and not status.all_run
        if self._pending:
            return
        if not known:
            self._log.info(status.line)
        self._logged, self._all_run = status.states, status.all_run
        self._next = timing.now() + MIN_INTERVAL_SECONDS

    @property
    def _may_all_run(self) -> bool:
        """Whether all pods run. Their containers may still wait for something."""
        return all(phase_of_pod(pod) in ("Running", "Succeeded") for pod in self._state.pods.groups.examples())


class PartialStartWarning(Part):
    """Logs one warning for each partial start: see `core/state/pods/partial_start.py`.

    :param context: of the job. One that isn't released by the task gets no warning.
    """

    def __init__(self, context: FollowContext) -> None:
        self._state, self._log = context.state, context.log
        self._limit, self._wanted = context.options.limits.partial_start, context.options.release
        self._since: float | None = None  # in epoch seconds
        self._warned_since: float | None = None  # `since` of the one that was warned about

    async def observe(self) -> None:
        """Look at the pods, and log the warning if it is due."""
        state = self._state
        idle = state.phase is None or state.ended or state.phase in (Phase.QUEUED, Phase.SUSPENDED)
        self._since = None if idle or not self._wanted else partial_start_since(state.job or {}, state.pods.groups)
        if self.due is None or self.due > timing.now():
            return
        self._warned_since = self._since
        if partial := find_partial_start(state.known_job, state.pods.live):
            self._log.warning(partial.describe_partial_start(str(state.ref), self._limit))

    @property
    def due(self) -> float | None:
        """When to warn, by `timing.now`; None if there is nothing to warn about."""
        if self._since is None or self._since == self._warned_since:
            return None
        return timing.now() + warning_due(self._since, self._limit) - timing.epoch()
