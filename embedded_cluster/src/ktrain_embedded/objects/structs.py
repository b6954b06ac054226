"""The notation for the types of custom resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Struct:
    """The type of a JSON object: its fields and their types, required fields, defaults, enums and minimums."""

    fields: Mapping[str, str]
    required: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    enums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    minimums: Mapping[str, int] = field(default_factory=dict)
    go_name: str = ""


def struct_of(fields: str, required: str = "", **more: Any) -> Struct:
    """Return the struct with the fields in `fields`: `name:type` pairs, separated by spaces.

    :param required: the names of the required fields, separated by spaces.
    """
    return Struct(dict(pair.split(":") for pair in fields.split()), frozenset(required.split()), **more)
