"""Placeholder until the types are read: everything is known."""

from __future__ import annotations

from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj


def decode(resource: Resource, value: Obj) -> tuple[Obj, list[str]]:
    return value, []


def validate_status(resource: Resource, obj: Obj) -> None:
    pass
