"""Types of command-line arguments. Each raises an ArgumentTypeError that contains what was found and expected."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from airflow_provider_ktrain.core.checks.problem import NAMESPACE, NAMESPACE_FORMAT
from airflow_provider_ktrain.core.state.accelerators import DEFAULT_RESOURCE

#: Environment variables of `[ktrain] accelerators` and `[ktrain] default_accelerator`.
ACCELERATORS, DEFAULT_ACCELERATOR = "AIRFLOW__KTRAIN__ACCELERATORS", "AIRFLOW__KTRAIN__DEFAULT_ACCELERATOR"
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def default_accelerator() -> str:
    """The resource that `--gpus` requests."""
    return os.environ.get(DEFAULT_ACCELERATOR) or DEFAULT_RESOURCE


def duration(text: str) -> float:
    """Seconds of a duration such as `90`, `90s`, `15m`, `2h` or `1h30m`; more than 0."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not seconds or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a duration such as 90s, 15m, 2h or 1h30m")
    return seconds


def namespace(text: str) -> str:
    """The name of a namespace."""
    if not re.fullmatch(NAMESPACE, text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected the name of a namespace: {NAMESPACE_FORMAT}")
    return text


def service_account(text: str) -> str:
    """The name of a ServiceAccount, which may follow its namespace and a colon.

    :raises ArgumentTypeError: it is neither. The API server would accept a binding to it, which grants nothing.
    """
    where, colon, name = text.rpartition(":")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) or (colon and not re.fullmatch(NAMESPACE, where)):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME or NAMESPACE:NAME, such as airflow:worker")
    return text


def count(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number, 0 or more")
    return int(text)


def image(text: str) -> tuple[str, str]:
    """The two parts of NAME or NAME=DIR; DIR is absolute, or empty.

    :raises ArgumentTypeError: there is no name, or DIR isn't a directory.
    """
    name, _, directory = text.partition("=")
    if directory and not Path(directory).is_dir():
        raise argparse.ArgumentTypeError(f"{directory!r} is not a directory")
    if not name:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME or NAME=DIR")
    return name, str(Path(directory).resolve()) if directory else ""
