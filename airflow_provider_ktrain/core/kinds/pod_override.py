"""The form of the parameter `pod_override`: a pod template, or pod templates by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds.strategic_merge import member

POD_OVERRIDE = "pod_override"  #: name of the parameter, with which paths in it begin
POD_TEMPLATE_FIELDS = {"metadata", "spec"}  #: other keys of a `pod_override` are roles


def all_patches(override: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Role, path and content of each pod template; the role of one for all roles is empty."""
    for role in ("",) if override.keys() <= POD_TEMPLATE_FIELDS else tuple(override):
        for path, patch in pod_patches(override, role):
            yield role, path, patch


def pod_patches(override: Mapping[str, Any], role: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Path and content of what a `pod_override` has for a role: one template or none."""
    if override.keys() <= POD_TEMPLATE_FIELDS:
        yield POD_OVERRIDE, override
    elif isinstance(patch := override.get(role), Mapping):
        yield member(POD_OVERRIDE, role), patch
