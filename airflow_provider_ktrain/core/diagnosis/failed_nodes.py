"""The nodes on which a job failed by infrastructure: a broken GPU, a lost node, an eviction because of a shortage.

Also the nodes whose conditions say that they broke while the job ran. Not the nodes of preempted or drained pods, nor
of pods that exceeded a limit of their own. What a program logs about its GPU counts only for the failure that is the
cause.
"""

from __future__ import annotations

from collections.abc import Iterator

from airflow_provider_ktrain.core.diagnosis import failure_patterns
from airflow_provider_ktrain.core.diagnosis.evidence import Evidence
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.node_rules import broken_nodes
from airflow_provider_ktrain.core.diagnosis.replica_rules import find_known_message
from airflow_provider_ktrain.core.diagnosis.startup_rules import find_start_error
from airflow_provider_ktrain.core.state.pods.objects import main_containers, node_of, state_of


def find_failed_nodes(evidence: Evidence, cause: Cause) -> dict[str, str]:
    """The names of the nodes, each with the reason; empty if the cause isn't one of infrastructure."""
    found: dict[str, str] = {}
    if cause.category is Category.INFRASTRUCTURE:
        for node, reason in (*broken_nodes(evidence), *_of_failures(evidence), *_of_blocked_pods(evidence)):
            found.setdefault(node, reason)
    return found


def _of_failures(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for at, failure in enumerate(evidence.failures):
        found = [(failure_patterns.explain_disruption(failure.reason, failure.message), f" ({failure.reason})")]
        if at == 0:
            message = find_known_message(failure)
            known = find_start_error(failure.reason, failure.message) or (message[0] if message else None)
            found.append((known, ""))
        why = next((f"{known.description}{reason}" for known, reason in found if known and known.blames_node), "")
        if failure.node and why:
            yield failure.node, f"{failure.replica} {why}"


def _of_blocked_pods(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Pods whose containers the node can't start."""
    for pod in evidence.pods:
        for container in main_containers(pod):
            waiting = state_of(container, "waiting")
            known = find_start_error(str(waiting.get("reason")), str(waiting.get("message") or ""))
            if known and known.blames_node and (node := node_of(pod)):
                yield node, f"{evidence.kind.replica(pod)} {known.description}"
