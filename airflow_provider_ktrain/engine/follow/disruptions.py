"""Logs disruptions of a job that goes on: nodes that don't report, and replicas that are lost for good."""

from __future__ import annotations

from airflow_provider_ktrain.core.diagnosis.disruptions import describe_silence, lost_replica, silent_nodes
from airflow_provider_ktrain.engine.follow.context import FollowContext


class DisruptionReporter:
    """Logs a warning for each disruption, once."""

    def __init__(self, context: FollowContext) -> None:
        self._state, self._log = context.state, context.log
        self._looked_at = -1  # version of the pods' states
        self._silent: dict[str, str] = {}  # nodes that don't report, and since when
        self._runs_on = False  # whether a lost replica was reported

    def update(self) -> None:
        """Look at the pods that have changed, and log what is new."""
        state, pods = self._state, self._state.pods
        if state.phase is None or state.ended:
            return
        if pods.groups.shown_version != self._looked_at:
            self._looked_at = pods.groups.shown_version
            before, self._silent = self._silent, silent_nodes(pods.groups.silent.values())
            for node in self._silent.keys() - before:
                self._log.warning(describe_silence(node, self._silent[node]))
        if not self._runs_on and state.kind.runs_on(state.known_job):
            self._runs_on = True
            self._log.warning(lost_replica(state.known_job, pods.all))

    @property
    def notice(self) -> str:
        """For the training page: which nodes don't report; empty if all do."""
        return " ".join(describe_silence(node, since) for node, since in self._silent.items())
