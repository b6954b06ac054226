"""Types of command-line arguments. Each raises an ArgumentTypeError that contains what was found and expected."""

from __future__ import annotations

import argparse
import re

from airflow_provider_ktrain.core.checks.problem import NAMESPACE, NAMESPACE_FORMAT

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Seconds of a duration such as `90`, `90s`, `15m`, `2h` or `1h30m`; more than 0.

    :raises ArgumentTypeError: it isn't one.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not seconds or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a duration such as 90s, 15m, 2h or 1h30m")
    return seconds


def namespace(text: str) -> str:
    """The name of a namespace.

    :raises ArgumentTypeError: it isn't a valid one.
    """
    if not re.fullmatch(NAMESPACE, text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected the name of a namespace: {NAMESPACE_FORMAT}")
    return text
