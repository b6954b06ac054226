"""Shortens the arguments of a training's trigger to a size that each of Airflow's databases can store.

MySQL and MariaDB store at most 65,535 bytes. Airflow 3.2 and 3.3 store the arguments as `json.dumps` writes them, with
characters other than ASCII escaped: a Cyrillic letter takes 6 bytes, an emoji 12. Other ways into the same column
encrypt them first (Fernet), which adds a third.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.formats import json_size, mapping
from airflow_provider_ktrain.core.logs.cursor import Cursor

MAX_BYTES = 48_000  #: Size of the arguments' JSON. Encrypted, 49,087 bytes become 65,532.

Handover = dict[str, Any]


def fitted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in at most MAX_BYTES of JSON.

    What makes them larger is removed from the handover, in the order of `_STEPS`: first what costs least. The job and
    the options are never changed.

    :param arguments: `engine.follow.deferral.Deferral` as a dict.
    """
    handover = dict(mapping(arguments.get("handover")))
    for shrink in _STEPS:
        excess = json_size({**arguments, "handover": handover}) - MAX_BYTES
        if excess <= 0:
            break
        handover = shrink(handover, excess)
    return {**arguments, "handover": handover}


def _without_points(handover: Handover, excess: int) -> Handover:
    """Without the points of the metrics: curves on the training page begin again, or with those of the last status."""
    metrics = mapping(handover.get("training_metrics"))
    series = {name: {**mapping(one), "points": []} for name, one in mapping(metrics.get("series")).items()}
    return {**handover, "training_metrics": {**metrics, "series": series}} if series else handover


def _without_result_line(handover: Handover, excess: int) -> Handover:
    """Without the result line if the log has it: the next process reads it there."""
    return {**handover, "result_line": ""} if handover.get("result_from") else handover


def _with_shorter_cursor(handover: Handover, excess: int) -> Handover:
    """With fewer exact log positions: lines of the other containers may be repeated."""
    cursor = handover.get("cursor")
    return {**handover, "cursor": Cursor.from_dict(cursor).to_dict(max(json_size(cursor) - excess, 0))}


def _without_counts(handover: Handover, excess: int) -> Handover:
    """Without what decides nothing but steps: counts, phases and metrics begin again."""
    return {**handover, "metrics": {}, "phases": [], "training_metrics": {}}


def _without_all(handover: Handover, excess: int) -> Handover:
    """Without what a process has seen: all logs are read again."""
    return {"handed_over_at": handover.get("handed_over_at", 0.0)}


_STEPS: Sequence[Callable[[Handover, int], Handover]] = (
    _without_points,
    _without_result_line,
    _with_shorter_cursor,
    _without_counts,
    _without_all,
)
