"""The curves of earlier tries, which the task store keeps for the training page: small, with their extremes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.formats import json_size, mapping

MAX_BYTES = 32 * 1024  #: Size of the JSON of all tries' curves together.
FEWEST_POINTS = 4  #: First, last, lowest and highest: curves with more are thinned first.


def with_bounded_curves(tries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tries with curves (`series`) of at most MAX_BYTES together.

    :param tries: the entries of `core.formats.with_try`. Those without curves stay as they are.
    """
    share = MAX_BYTES // max(sum(bool(one.get("series")) for one in tries), 1)
    return [
        {**one, "series": _fitted(mapping(one["series"]), share)} if one.get("series") else {**one} for one in tries
    ]


def _fitted(series: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    """The series with fewer points, then fewer series."""
    fitted = {name: points for name, points in series.items() if isinstance(points, list)}
    while json_size(fitted) > max_bytes:
        if any(len(points) > FEWEST_POINTS for points in fitted.values()):
            fitted = {name: _thinned(points) for name, points in fitted.items()}
        else:
            fitted.popitem()
    return fitted


def _thinned(points: Sequence[Any]) -> list[Any]:
    """About half of the points, with the first, the last, the lowest and the highest one."""
    if len(points) <= FEWEST_POINTS:
        return list(points)
    values = {n: pair[1] for n, pair in enumerate(points) if isinstance(pair[1], int | float)}
    extremes = {min(values, key=values.__getitem__), max(values, key=values.__getitem__)} if values else set()
    kept = {*range(0, len(points), 2), len(points) - 1}
    if len(points) <= 2 * FEWEST_POINTS:
        kept = {0, len(points) - 1}
    return [pair for n, pair in enumerate(points) if n in kept | extremes]
