"""Keep a job's pods away from nodes on which an earlier try failed: a required node affinity by the nodes' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.kinds import Manifest, kind_of
from airflow_provider_ktrain.core.kinds.manifest_fields import add_to_node_terms, mapping_at
from airflow_provider_ktrain.core.manifest.loader import plain
from airflow_provider_ktrain.core.state.pods.objects import NODE_NAME


def avoid_nodes(manifest: Mapping[str, Any], names: Sequence[str]) -> Manifest:
    """The manifest with a node affinity against these nodes in each pod template.

    The affinity of a TrainJob is added to that of its runtime later, by `trainjob/patches.py: expand`.
    """
    result: Manifest = plain(manifest)
    kind = kind_of(result.get("kind"))
    # an entry of matchFields has one value (ValidateNodeFieldSelectorRequirement in Kubernetes' core/validation)
    entries = [{"key": NODE_NAME, "operator": "NotIn", "values": [name]} for name in names]
    for _, template in kind.form.option_templates(result):
        add_to_node_terms(mapping_at(template, "spec"), "matchFields", entries)
    return result
