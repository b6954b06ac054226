"""Kubernetes quantities as numbers."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_UNITS = {unit: Decimal(1000) ** power for power, unit in enumerate(("n", "u", "m", "", "k", *"MGTPE"), -3)} | {
    f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)
}


def parse_quantity(value: object) -> Decimal | None:
    """A Kubernetes quantity, such as `200m` or `2Gi`, as a number; None if it is invalid."""
    match = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", str(value))
    try:
        return Decimal(match[1]) * _UNITS[match[2]] if match else None
    except (InvalidOperation, KeyError):
        return None
