"""What a training must reach to count as good enough: the parameter `require`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from airflow_provider_ktrain.core.text.output import clipped, listed, masked
from airflow_provider_ktrain.core.text.xcom_values import is_number_as_text

FINITE = "finite"
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_BOUND = re.compile(r"\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*\Z", re.ASCII)
MAX_NAMES = 10  #: How many values an error names.
MAX_CHARS = 60  #: Length of a value or name in an error.


def is_bound(value: Any) -> bool:
    """Whether a requirement is `finite`, or a comparison with a finite number."""
    found = _BOUND.match(value) if isinstance(value, str) else None
    return math.isfinite(float(found[2])) if found else isinstance(value, str) and value.strip() == FINITE


def judge(required: Mapping[str, str], result: Any, metrics: Mapping[str, Any]) -> list[str]:
    """What a training lacks of what is required: a phrase for each; empty if it is good enough.

    A value is that of the result, else the last one of the metric with its name.

    :param required: bounds by name, for which `is_bound` is true.
    :param result: what the program has reported or the function has returned.
    :param metrics: `TrainingMetrics.summary`.
    """
    values = {name: one["last"] for name, one in metrics.items() if isinstance(one, Mapping) and "last" in one}
    if isinstance(result, Mapping):
        values |= result
    unmet = []
    for name, bound in required.items():
        label = clipped(name, MAX_CHARS)
        if name not in values:
            unmet.append(f"{label} is missing, required {bound}")
        elif not _is_met(values[name], bound):
            unmet.append(f"{label} is {_shown(values[name])}, required {bound}")
    if required.keys() - values.keys():
        names = [clipped(str(name), MAX_CHARS) for name in values]
        unmet.append(f"the training reported {listed(names, MAX_NAMES) or 'no value'}")
    return unmet


def _is_met(value: Any, bound: str) -> bool:
    number = _number(value)
    if number is None or math.isnan(number):
        return False
    if bound.strip() == FINITE:
        return math.isfinite(number)
    found = _BOUND.match(bound)
    return found is not None and _COMPARE[found[1]](number, float(found[2]))


def _number(value: Any) -> float | None:
    """The number that a value is, also as the text that is stored in its place; None if it is none."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or is_number_as_text(value)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _shown(value: Any) -> str:
    text = str(_number(value)) if is_number_as_text(value) else repr(value)
    return clipped(masked(text), MAX_CHARS)
