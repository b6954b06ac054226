"""The evidence that a diagnosis uses: the job, its pods, events and the last lines of logs."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from airflow_provider_ktrain.core.diagnosis.node_conditions import NodeProblem, node_problems
from airflow_provider_ktrain.core.diagnosis.pod_failures import Failure, find_failures, likely_causes
from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.kinds.conditions import Condition, true_conditions
from airflow_provider_ktrain.core.state.pods.objects import Json, created, metadata_of, name_of


@dataclass(frozen=True)
class Evidence:
    """What is known of a job. Use `make_evidence`, which sorts it.

    :param job: the job as last seen; of a job that was never seen its kind and name.
    :param pods: its pods, each as last seen, deleted and replaced ones included.
    :param logs: last lines of containers, by `log_key`.
    :param now: current time; None if it doesn't matter.
    :param include_recovered: whether failures count of containers that run again or have succeeded since.
    :param waited_seconds: since the job's phase last changed: what keeps it from starting counts only after a time of
        grace. None: it counts at once.
    :param nodes: Node objects, in the order in which they may explain the failure. Default: none were read.
    :param spec_since: since when the job has its specification. Default: None, no change of it is known.
    :param existing: kinds and names of objects that events say were refused, and that a read has shown. Default: none.
    """

    job: Json
    pods: Sequence[Json]
    events: Sequence[Json]
    logs: Mapping[str, Sequence[str]]
    now: datetime | None = None
    gone: bool = False
    include_recovered: bool = False
    waited_seconds: float | None = None
    nodes: Sequence[Json] = ()
    spec_since: datetime | None = None
    existing: Collection[tuple[str, str]] = ()

    @property
    def kind(self) -> Kind:
        """The job's kind; PyTorchJob if it is unknown."""
        return kind_of(self.job.get("kind"))

    @property
    def operators(self) -> str:
        """The operators that may serve the kind."""
        return " or ".join(operator.name for operator in self.kind.operators)

    @property
    def title(self) -> str:
        """Kind and name, for example `PyTorchJob train`."""
        return f"{self.kind.name} {metadata_of(self.job).get('name', '')}".strip()

    @property
    def conditions(self) -> Mapping[str, Condition]:
        """The job's true conditions, by type."""
        return true_conditions(self.job)

    @property
    def failed_condition(self) -> Condition | None:
        """The condition by which the operator ended the job; None if it has not failed."""
        return self.conditions.get("Failed")

    @functools.cached_property
    def all_failures(self) -> list[Failure]:
        """All failures of the containers, found once: see `find_failures`."""
        return find_failures(self.kind, self.pods, self.logs, include_recovered=self.include_recovered)

    @property
    def failures(self) -> list[Failure]:
        """The failures that can be the cause, the most likely first."""
        return likely_causes(self.all_failures, self.kind.launchers)

    @functools.cached_property
    def node_problems(self) -> list[NodeProblem]:
        """What is wrong with the nodes that were read, in their order."""
        return [problem for node in self.nodes for problem in node_problems(node, self.pods)]


def reached_backoff_limit(failed: Condition) -> bool:
    """Whether the operator ended the job because of its `backoffLimit`.

    :param failed: the condition Failed.
    """
    return failed.reason.startswith("BackoffLimitExceeded") or "backoff limit" in failed.message


def make_evidence(
    job: Json,
    pods: Sequence[Json],
    events: Sequence[Json] = (),
    logs: Mapping[str, Sequence[str]] | None = None,
    now: datetime | None = None,
    gone: bool = False,
    nodes: Sequence[Json] = (),
) -> Evidence:
    """Evidence sorted by name and time, so that a diagnosis doesn't depend on the order in which it arrived."""
    pods = sorted(pods, key=lambda pod: (name_of(pod), created(pod)))
    events = sorted(
        events, key=lambda e: (str(e.get("lastTimestamp") or e.get("eventTime") or ""), str(e.get("message")))
    )
    return Evidence(job, pods, events, logs or {}, now, gone, nodes=nodes)
