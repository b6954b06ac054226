"""Tables of cases in YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

#: The loader of libyaml is ten times as fast: each process of pytest-xdist loads all tables when it collects the tests.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def table(path: Path) -> Any:
    return yaml.load(path.read_text(), LOADER)
