"""What a training must reach: the parameter `require`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from airflow_provider_ktrain.core.requirements import is_bound, judge
from airflow_provider_ktrain.core.text.xcom_values import storable

METRICS = {"loss": {"last": 0.25, "best": 0.1}, "nothing": {}}


@pytest.mark.parametrize(
    ("bound", "valid"),
    [
        (">= 0.9", True), ("<=.5", True), (" > -1e-3 ", True), ("< +2.", True), ("finite", True), (" finite ", True),
        ("", False), ("0.9", False), ("== 1", False), (">= 1e999", False), (">= nan", False), ("<= None", False),
        ("<= ", False), (">= 0.9 or more", False), ("infinite", False), (0.9, False), (None, False),
        ("<= {{ x }}", False), (">= ١", False), (">= 0x10", False),
    ],
)  # fmt: skip
def test_a_bound_is_a_comparison_with_a_number(bound: Any, valid: bool) -> None:
    assert is_bound(bound) is valid


@pytest.mark.parametrize(
    ("value", "bound", "met"),
    [
        (0.9, ">= 0.9", True), (0.9, "<= 0.9", True), (0.9, "> 0.9", False), (0.9, "< 0.9", False),
        (0.87, ">= 0.9", False), (3, "> 2.5", True), (-1, "< 0", True), (10**30, "> 1e29", True),
        (math.inf, "> 1", True), (math.nan, "> 1", False), (math.nan, "< 1", False),
        (0.5, "finite", True), (math.inf, "finite", False), (math.nan, "finite", False),
        (True, "> 0", False), ("0.95", ">= 0.9", False), ("good", "finite", False), (None, "finite", False),
        ([1], "> 0", False), ("1" * 5000, "> 0", False),
        (0.5, "== 0.5", False),  # a bound of another release
    ],
)  # fmt: skip
def test_a_number_meets_a_bound(value: Any, bound: str, met: bool) -> None:
    assert (judge({"x": bound}, {"x": value}, {}) == []) is met


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e20, 10**25, -(10**25), 1e16])
def test_a_number_that_is_stored_as_text_counts_as_the_number(number: float) -> None:
    (stored, _) = storable({"x": number})
    for bound in ("> 1", "< 1", "finite"):
        assert judge({"x": bound}, stored, {}) == [] or judge({"x": bound}, {"x": number}, {})
        assert (judge({"x": bound}, stored, {}) == []) == (judge({"x": bound}, {"x": number}, {}) == [])


def test_an_error_names_value_and_bound() -> None:
    required = {"val_accuracy": ">= 0.9", "loss": "finite", "label": "> 0"}
    result = {"val_accuracy": 0.87, "loss": "nan", "label": "good"}
    assert judge(required, result, {}) == [
        "val_accuracy is 0.87, required >= 0.9", "loss is nan, required finite", "label is 'good', required > 0",
    ]  # fmt: skip


def test_the_result_counts_before_a_metric() -> None:
    assert judge({"loss": "< 0.3"}, {"loss": 0.5}, METRICS) == ["loss is 0.5, required < 0.3"]
    assert judge({"loss": "< 0.3"}, {"model": "m"}, METRICS) == []
    assert judge({"loss": "< 0.3"}, 7, METRICS) == []


def test_a_missing_value_is_unmet_and_the_others_are_named() -> None:
    assert judge({"accuracy": "> 0"}, {"a": 1, "b": 2}, METRICS) == [
        "accuracy is missing, required > 0", "the training reported loss, a, b",
    ]  # fmt: skip
    assert judge({"accuracy": "> 0"}, None, {}) == [
        "accuracy is missing, required > 0",
        "the training reported no value",
    ]


def test_texts_of_an_error_are_short() -> None:
    required = {"x" * 10_000: "> 0", "y": "> 0"}
    text = "; ".join(judge(required, {"y": "z" * 10_000, **{f"name{i}": i for i in range(100)}}, {}))
    assert len(text) < 500
    assert "and 91 more" in text
