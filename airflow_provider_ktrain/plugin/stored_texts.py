"""Texts and numbers of what is stored about a training, where any task can store anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from airflow_provider_ktrain.core.formats import is_step, mapping
from airflow_provider_ktrain.core.reporting.status_document import MAX_LINE_CHARS
from airflow_provider_ktrain.core.state.accelerators import GPU, described, read_stored
from airflow_provider_ktrain.core.state.pods.pod_state import RUNNING
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text.output import ends_of, format_duration, masked

LARGEST = 1e15  #: A limit above all times, numbers of steps and GPU-seconds.
#: Terminal control sequences (ECMA-48: CSI, OSC and two-character ones), which a browser can't show.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
#: How much of each end of a text is kept, more than any of ours has: to hide secrets in megabytes takes long.
MAX_TEXT_CHARS = 16_384
STATE_WORDS = {"success": "succeeded", "": "none"}  #: Other states are shown as Airflow names them.
HIDDEN_CAUSE = "It failed. The cause may quote the log, which you have no right to read."


class Ticking(str):
    """A duration that the browser lets run on: at a time in epoch seconds it has a length, and a rate of growth."""

    _html: str

    @classmethod
    def of(cls, now: float, at: float, *, seconds: float = 0.0, rate: float = 1.0) -> Ticking:
        """The duration at the time `now`."""
        self = cls(format_duration(max(seconds + rate * (now - at), 0)))
        self._html = f'<span data-at="{at:.1f}" data-seconds="{seconds:.1f}" data-rate="{rate:g}">{self}</span>'
        return self

    def __html__(self) -> str:
        return self._html


def overlaid(found: Sequence[Mapping[str, Sequence[Sequence[Any]]]]) -> dict[str, list[list[Any]]]:
    """Curves of several trainings over each other: by name all steps, then the values of each, None where it has none.

    :param found: of each training, by name `[steps, values]`.
    """
    lines = {}
    for name in dict.fromkeys(name for one in found for name in one):
        values = [dict(zip(*one.get(name, ((), ())), strict=True)) for one in found]
        steps = sorted({step for one in values for step in one})
        if len(steps) > 1:
            lines[name] = [steps, *([one.get(step) for step in steps] for one in values)]
    return lines


def accelerators_of(fields: Mapping[str, Any]) -> str:
    """An amount of the status: a number of GPUs, or as text what else it is."""
    amounts = read_stored(fields)
    return str(amounts[GPU]) if amounts.keys() <= {GPU} else text_of(described(amounts, "0"))


def running_on(held: float, read: Mapping[str, Any], now: float | None) -> str:
    """The accelerator time of a job: it grows as long as all of its replicas run, or all have nodes and start.

    :param now: epoch seconds; None if the task has ended.
    """
    replicas, written_at = mapping(read.get("replicas")), number(read.get("written_at"))
    all_hold = mapping(replicas.get("states")).keys() == {RUNNING} or read.get("phase") == Phase.STARTING
    gpus = number(replicas.get("gpus")) if all_hold else None
    same = replicas.get("resource") == mapping(read.get("usage")).get("resource")
    if now is None or not gpus or not same or written_at is None or now < written_at:
        return format_duration(held)
    return Ticking.of(now, written_at, seconds=held, rate=gpus)


def series_of(read: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """Points for the curves: `[steps, values]` of each metric; values that are not finite stay text."""
    found = {}
    for name, points in mapping(read.get("series")).items():
        pairs = [pair for pair in pairs_of(points) if is_step(pair[0])]
        found[text_of(name)] = [[step for step, _ in pairs], [value for _, value in pairs]]
    return found


def clock(at: float | None) -> str:
    """A time in UTC, to the second; empty for none."""
    if at is None or not 0 <= at < 1e11:
        return ""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def value_of(value: Any, digits: int = 6) -> str:
    """A number with so many significant digits, or a text."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return text_of(value)


def step_of(value: Any) -> str:
    """A step's number with separators."""
    known = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    return f"{value:,}" if known else value_of(value)


def minute_of(now: float) -> int:
    """The minute of a time: views of trainings that run show durations, also while nothing else changes."""
    return int(now // 60)


def text_of(value: Any) -> str:
    """The value as a text that a browser can show; empty for None."""
    return "" if value is None else printable(ends_of(str(value), MAX_TEXT_CHARS))


def number(value: Any) -> float | None:
    """The value if it is a number that isn't absurdly large; else None."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if known else None


def printable(text: str) -> str:
    """The text as it is `masked`, without terminal control sequences; U+FFFD for what a browser can't show."""
    return CONTROLS.sub("\ufffd", masked(ESCAPES.sub("", text)))


def line_of(value: Any) -> str:
    """A log line; the status has its first MAX_LINE_CHARS characters."""
    cut = isinstance(value, str) and len(value) >= MAX_LINE_CHARS
    return text_of(value) + ("…" if cut else "")


def pairs_of(value: Any) -> list[Sequence[Any]]:
    """The pairs in a list; empty if the value is none."""
    return [pair for pair in list_of(value) if isinstance(pair, list | tuple) and len(pair) == 2]


def list_of(value: Any) -> Sequence[Any]:
    """The value if it is a list; else an empty one."""
    return value if isinstance(value, list | tuple) else ()
