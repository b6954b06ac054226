"""What the API server fills in where a manifest says nothing."""

from __future__ import annotations

from typing import Any

from airflow_provider_ktrain.local.resources import Resource


def apply(resource: Resource, obj: dict[str, Any]) -> dict[str, Any]:
    """The object with the defaults of its type; changes and returns `obj`."""
    return obj
