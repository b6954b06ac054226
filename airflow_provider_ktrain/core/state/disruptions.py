"""What a job's pods show of its nodes and lost replicas while the training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.replica_rules import diagnose_replica
from airflow_provider_ktrain.core.objects import Json, node_of, silent_since


def silent_nodes(pods: Iterable[Json]) -> dict[str, str]:
    """The nodes that don't report, each with a sentence about it.

    Kubernetes evicts the pods of such a node after 300 s, unless their tolerations say otherwise.

    :param pods: that exist.
    """
    since: dict[str, str] = {}
    for pod in pods:
        if at := silent_since(pod):
            node = node_of(pod)
            since[node] = min(at, since.get(node, at))
    return {
        node: f"Node {node} has not reported since {at[11:16]} UTC. Kubernetes evicts its pods after 5 minutes."
        for node, at in sorted(since.items())
    }


def lost_replica(job: Mapping[str, Any], pods: Sequence[Json]) -> str:
    """Which replica is lost for good of a job that has failed and runs on, and what that means.

    :param job: as last seen.
    :param pods: each as last seen.
    """
    evidence = make_evidence(job, pods)
    cause = diagnose_replica(evidence)
    failed, primary = evidence.failed_condition, evidence.kind.primary(job)
    lost = cause.summary if cause is not None else failed.message if failed is not None else ""
    return (
        f"{lost}\nThe operator does not replace it. {evidence.title} is followed on, because its {primary} still runs: "
        "it fails after 5 minutes without a log line."
    )
