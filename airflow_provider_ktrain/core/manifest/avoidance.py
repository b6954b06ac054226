"""Keep a job's pods away from nodes on which an earlier try failed: a required node affinity by the nodes' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.kinds import Manifest, kind_of
from airflow_provider_ktrain.core.kinds.manifest_fields import REQUIRED_NODES, add_to_node_terms, mapping_at
from airflow_provider_ktrain.core.manifest.loader import plain

NODE_NAME = "metadata.name"  #: the only field that matchFields may name


def avoid_nodes(manifest: Mapping[str, Any], names: Sequence[str]) -> Manifest:
    """The manifest with a node affinity against these nodes in each pod template.

    The affinity of a TrainJob is added to that of its runtime later, by `trainjob/patches.py: expand`.

    :param names: of the nodes.
    """
    result: Manifest = plain(manifest)
    kind = kind_of(result.get("kind"))
    # an entry of matchFields has one value (ValidateNodeFieldSelectorRequirement in Kubernetes' core/validation)
    entries = [{"key": NODE_NAME, "operator": "NotIn", "values": [name]} for name in names]
    for _, template in kind.option_templates(result):
        add_to_node_terms(mapping_at(template, "spec"), "matchFields", entries)
    return result


def avoided_nodes(pod: Mapping[str, Any]) -> list[str]:
    """The names of the nodes that every term of a pod's required node affinity excludes, sorted.

    :param pod: a pod.
    """
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get(REQUIRED_NODES) or {}).get("nodeSelectorTerms") or ()
    excluded = [
        {
            str(name)
            for field in term.get("matchFields") or ()
            if avoids_node(field)
            for name in field.get("values") or ()
        }
        for term in terms
    ]
    return sorted(set.intersection(*excluded)) if excluded else []


def avoids_node(field: Mapping[str, Any]) -> bool:
    """Whether an entry of matchFields excludes nodes by their names."""
    return field.get("key") == NODE_NAME and field.get("operator") == "NotIn"
