"""The formats that travel between processes and releases: a reader ignores unknown fields and fills in missing ones.

docs/reference/formats.md describes each format. Fields are added, never renamed and never given another meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

VERSION = 1  #: of all formats of this release; it is written, and a reader accepts any


def known_fields(cls: type, data: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of `data` that the dataclass `cls` has; its own defaults stand for those that are missing."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in (data or {}).items() if name in names}
