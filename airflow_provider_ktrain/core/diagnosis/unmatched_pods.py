"""Pods that no node can match: their node selector or affinity, or a resource that no node has.

The scheduler's words show which pods may be such pods. Only a read of all nodes shows that none matches.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from airflow_provider_ktrain.core.diagnosis.evidence import Evidence
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.startup_rules import describe_avoided
from airflow_provider_ktrain.core.state import nodes as known_nodes
from airflow_provider_ktrain.core.state.nodes import Node
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.text.output import counted

#: How long to wait for nodes to be labelled or added, or for a device plugin to report its resource.
GRACE_SECONDS = 600.0
_MAX_VALUES = 10  #: How many values of a label, or how many resources, one text names.
_NO_MATCH = "didn't match Pod's node affinity/selector"


def suspects(evidence: Evidence) -> list[Json]:
    """The pods without a node of which the scheduler says that a selector doesn't match, or a resource is missing."""
    return [pod for pod in evidence.pods if _selects_none(pod) or _insufficient(pod)]


def find_unmatched_pod(evidence: Evidence, nodes: Sequence[Node], waited_seconds: float) -> Cause | None:
    """Why no node can take one of the suspects; None if a node can, or may be created on demand.

    :param waited_seconds: since the first read that has shown this.
    """
    if not nodes or any(node.is_of_pool for node in nodes):
        return None
    for pod in suspects(evidence):
        lacking = [name for name in known_nodes.unknown_resources(pod, nodes) if name in _insufficient(pod)]
        if lacking:
            why, there, resolution = _missing_resource(lacking, nodes)
        elif _selects_none(pod) and not any(known_nodes.selects(pod, node) for node in nodes):
            why, there, resolution = _no_match(pod, nodes)
        else:
            continue
        replica, message = evidence.kind.replica(pod), str(objects.scheduling(pod).get("message"))
        summary = f"{replica} can't be scheduled: {why}. Giving up after waiting {waited_seconds:.0f} s."
        detail = "\n".join((f"The cluster has {counted(len(nodes), 'node')}{there}.", message))
        return Cause(Category.SCHEDULING, summary, detail, resolution, replica).with_short_summary()
    return None


def _missing_resource(names: Sequence[str], nodes: Sequence[Node]) -> tuple[str, str, str]:
    known = sorted({name for node in nodes for name in node.resources if "/" in name})
    near = difflib.get_close_matches(names[0], known, n=1)
    correct = f"Did you mean {near[0]}? " if near else ""
    there = f" with the resources {', '.join(known[:_MAX_VALUES])}" if known else " without other resources"
    resolution = f"{correct}Correct the resource's name, or install the device plugin that reports it."
    return f"no node has the resource {' or '.join(names)}", there, resolution


def _no_match(pod: Json, nodes: Sequence[Node]) -> tuple[str, str, str]:
    selection = known_nodes.describe_selection(pod)
    texts = []
    for key in dict.fromkeys(known_nodes.selected_keys(pod)):
        values = sorted({node.labels[key] for node in nodes if key in node.labels})
        texts.append(f"{key}: {', '.join(values[:_MAX_VALUES])}" if values else f"no label {key}")
    there = f" with {'; '.join(texts)}" if texts else ""
    hints = ("Correct hosts, node_selector or affinity, or label the nodes.", describe_avoided(pod))
    return f"no node matches {selection}", there, " ".join(filter(None, hints))


def _unschedulable(pod: Json) -> str:
    """The scheduler's message about a pod without a node; empty if it has none."""
    condition = objects.scheduling(pod)
    waits = condition.get("status") == "False" and condition.get("reason") == "Unschedulable"
    return str(condition.get("message") or "") if waits and not objects.is_being_deleted(pod) else ""


def _selects_none(pod: Json) -> bool:
    """Whether the scheduler may have found no node that the pod's selector matches: no other node lacks resources."""
    message = _unschedulable(pod)
    return _NO_MATCH in message and "Insufficient" not in message


def _insufficient(pod: Json) -> set[str]:
    """The extended resources of which the scheduler says that nodes have too little."""
    return {name for name in re.findall(r"Insufficient ([\w./-]*\w)", _unschedulable(pod)) if "/" in name}
