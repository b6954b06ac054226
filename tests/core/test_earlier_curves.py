"""The curves of earlier tries that the task store keeps."""

from __future__ import annotations

import json
from typing import Any

from airflow_provider_ktrain.core.reporting.earlier_curves import MAX_BYTES, with_bounded_curves


def entry(number: int, points: int, names: int = 4) -> dict[str, Any]:
    values = [[step, 100.0 if step == 33 else -5.0 if step == 77 else step / 7] for step in range(points)]
    return {"try_number": number, "series": {f"metric {n}": values for n in range(names)}}


def test_small_curves_stay_as_they_are() -> None:
    tries = [entry(1, 3), {"try_number": 2, "cause": "c"}]
    assert with_bounded_curves(tries) == tries


def test_all_tries_together_have_a_bound_and_keep_extremes() -> None:
    bounded = with_bounded_curves([entry(number, 200) for number in range(10)])
    assert len(json.dumps([one["series"] for one in bounded])) <= MAX_BYTES + 100
    for one in bounded:
        for points in one["series"].values():
            assert 4 <= len(points) < 200
            assert {(0, 0.0), (33, 100.0), (77, -5.0), (199, 199 / 7)} <= {(step, value) for step, value in points}


def test_what_cannot_be_thinned_is_left_out() -> None:
    many = {"try_number": 1, "series": {f"{n}{'x' * 60}": [[0, "NaN"]] for n in range(1000)}}
    (one,) = with_bounded_curves([many])
    assert 0 < len(one["series"]) < 1000
    assert with_bounded_curves([{"try_number": 1, "series": {"odd": 3}}]) == [{"try_number": 1, "series": {}}]
