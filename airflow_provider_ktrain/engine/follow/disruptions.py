"""Logs disruptions of a job that goes on: unhealthy nodes, nodes that don't report, replicas that are lost for good."""

from __future__ import annotations

import math

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.diagnosis.job_rules import lost_replica
from airflow_provider_ktrain.core.diagnosis.node_conditions import NodeProblem, node_problems
from airflow_provider_ktrain.core.diagnosis.node_rules import describe_silence, silent_nodes
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.state.pods.objects import node_of, silent_since
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import ApiStatusError, get
from airflow_provider_ktrain.engine.follow.context import FollowContext, Part

READ_TIMEOUT_SECONDS = 5.0  #: Timeout of the read of a node.


class DisruptionReporter(Part):
    """Logs a warning for each disruption, once.

    While the job runs, one of its nodes is read every `node_seconds`, in turn. A process without the right to get nodes
    tries it once for each job.
    """

    def __init__(self, context: FollowContext) -> None:
        self._api, self._state, self._log = context.api, context.state, context.log
        self._looked_at = -1  # version of the pods' states
        self._silent: dict[str, str] = {}  # nodes that don't report, and since when
        self._runs_on = False  # whether a lost replica was reported
        self._seconds = context.host.node_seconds
        self._read_next = timing.now() + self._seconds
        self._read_at: dict[str, float] = {}  # when each node was read, by `timing.now`
        self._unhealthy: dict[str, NodeProblem] = {}  # by node

    @property
    def due(self) -> float | None:
        """When to read the next node, by `timing.now`; None: not at all."""
        return self._read_next if self._state.phase is Phase.RUNNING and self._read_next < math.inf else None

    async def observe(self) -> None:
        """Read a node if one is due, look at the pods that have changed, and log what is new."""
        await self._read_node()
        self._look_at_pods()

    async def _read_node(self) -> None:
        """Read the node that wasn't read for the longest time, if one is due, and log what is new there."""
        if self.due is None or timing.now() < self.due:
            return
        self._read_next, pods = timing.now() + self._seconds, self._state.pods.live
        names = {name for pod in pods if (name := node_of(pod))}
        if not names:
            return
        name = min(names, key=lambda name: (self._read_at.get(name, 0.0), name))
        self._read_at = {name: at for name, at in self._read_at.items() if name in names} | {name: timing.now()}
        try:
            node = await get(self._api, api_paths.nodes(name), timeout=READ_TIMEOUT_SECONDS)
        except KtrainError as e:  # credentials that can't be renewed, too: nothing depends on this read
            if isinstance(e, ApiStatusError) and e.status == 403:
                self._read_next = math.inf
            return
        known = {name: problem for name, problem in self._unhealthy.items() if name in names}
        before = known.pop(name, None)
        for problem in node_problems({} if node is ABSENT else node, pods):
            if problem.is_new and not (problem.name == "Ready" and name in self._silent):
                known[name] = problem
                if before is None or before.name != problem.name:
                    self._log.warning(f"{problem}. The job may fail.")
                break
        self._unhealthy = known

    def _look_at_pods(self) -> None:
        """Look at the pods that have changed, and log what is new."""
        state, pods = self._state, self._state.pods
        if state.phase is None or state.ended:
            return
        if pods.groups.shown_version != self._looked_at:
            self._looked_at = pods.groups.shown_version
            before, self._silent = self._silent, silent_nodes(pods.groups.silent.values())
            for node in self._silent.keys() - before:
                self._log.warning(describe_silence(node, self._silent[node]))
            if ended := before.keys() - self._silent.keys():
                heard = {node_of(pod) for pod in pods.live if not silent_since(pod)}
                for node in sorted(ended & heard):
                    self._log.info(f"Node {node} reports again.")
        if not self._runs_on and state.kind.runs_on(state.known_job):
            self._runs_on = True
            self._log.warning(lost_replica(state.known_job, pods.all))

    @property
    def notice(self) -> str:
        """For the training page: which nodes don't report or are unhealthy; empty if there are none."""
        silent = (describe_silence(node, since) for node, since in self._silent.items())
        return " ".join([*silent, *(f"{problem}." for _, problem in sorted(self._unhealthy.items()))])
