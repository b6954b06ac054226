"""The notation in which the types of custom resources are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Struct:
    """A JSON object with known fields: the type of each, which must be there, defaults, and values that are allowed."""

    fields: Mapping[str, str]
    required: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    enums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    minimums: Mapping[str, int] = field(default_factory=dict)
    go_name: str = ""


def struct_of(fields: str, required: str = "", **more: Any) -> Struct:
    """The struct of `name:type` pairs; `required` names those of its fields that must be there."""
    return Struct(dict(pair.split(":") for pair in fields.split()), frozenset(required.split()), **more)
