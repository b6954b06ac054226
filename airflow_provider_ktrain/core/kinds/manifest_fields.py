"""Reads and changes fields of any manifest, in place."""

from __future__ import annotations

from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError

Manifest = dict[str, Any]

REQUIRED_NODES = "requiredDuringSchedulingIgnoredDuringExecution"  #: Key of a nodeAffinity.
POD_DEADLINE_MARGIN = 20  #: Seconds from the job's own deadline to its pods', which count from each pod's start.
MAX_DEADLINE_SECONDS = 2**31 - 1  #: ActiveDeadlineSeconds of a batch Job is an int32.


def mapping_at(holder: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping at a key, added if the key is missing.

    :raises ManifestError: if another type of value is there.
    """
    if holder.get(key) is None:
        holder[key] = {}
    value = holder[key]
    if not isinstance(value, dict):
        raise ManifestError(f"{key} must be a mapping", found=repr(value)[:80], expected="a mapping")
    return value


def add_to_node_terms(pod: dict[str, Any], key: str, entries: list[Any]) -> None:
    """Add demands to a pod's required node affinity.

    Terms are alternatives, so each gets all demands. An empty one matches no node, and stays empty.

    :param key: `matchExpressions` or `matchFields`.
    """
    required = mapping_at(mapping_at(mapping_at(pod, "affinity"), "nodeAffinity"), REQUIRED_NODES)
    required["nodeSelectorTerms"] = [
        {**term, key: [*(term.get(key) or ()), *entries]} if isinstance(term, dict) and term else term
        for term in required.get("nodeSelectorTerms") or ()
    ] or [{key: entries}]


def lower_deadline(holder: dict[str, Any], seconds: float) -> None:
    """Set activeDeadlineSeconds unless a shorter one is set."""
    ours = max(1, min(int(seconds), MAX_DEADLINE_SECONDS))
    theirs = holder.get("activeDeadlineSeconds")
    holder["activeDeadlineSeconds"] = min(theirs, ours) if isinstance(theirs, int) else ours
