"""What a job's pods show of its nodes and lost replicas while the training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.replica_rules import diagnose_replica
from airflow_provider_ktrain.core.state.pods.objects import Json, node_of, silent_since


def silent_nodes(pods: Iterable[Json]) -> dict[str, str]:
    """The nodes that don't report, each with the time since when, as RFC 3339."""
    since: dict[str, str] = {}
    for pod in pods:
        if at := silent_since(pod):
            node = node_of(pod)
            since[node] = min(at, since.get(node, at))
    return dict(sorted(since.items()))


def describe_silence(node: str, since: str) -> str:
    """A sentence about a node that doesn't report. Tolerations may postpone the eviction of its pods.

    :param since: of `silent_nodes`.
    """
    return f"Node {node} has not reported since {since[11:16]} UTC. Kubernetes evicts its pods after 5 minutes."


def lost_replica(job: Mapping[str, Any], pods: Sequence[Json]) -> str:
    """Which replica is lost for good of a job that has failed and runs on, and what that means."""
    evidence = make_evidence(job, pods)
    cause, primary = diagnose_replica(evidence), evidence.kind.primary(job)
    return (
        f"{evidence.title} has lost a replica for good. Its {primary} runs on.\n"
        f"{'No pod shows why.' if cause is None else cause.summary}\nThe job fails after 5 minutes without a log line."
    )
