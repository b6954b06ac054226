"""Reports of NaN and infinity in a row, which `fail_on_nan` counts."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from airflow_provider_ktrain.core.state.steps.training_metrics import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    STEP,
    Number,
    parse_metric_line,
)

REPORTS_IN_A_ROW = 3  #: How many reports of NaN or infinity in a row end a training with `fail_on_nan`.


@dataclass
class _Series:
    """What one metric has reported since its last finite value.

    :param step: of the first of these reports; None if it had none.
    """

    reports: int = 0
    step: Number | None = None


class NonFiniteReports:
    """The reports of NaN and infinity of one run of a container.

    :param watched: names of metrics; True: all.
    :param reports_before: of each metric, that may have come before the first line. Default: 0.
    """

    def __init__(self, watched: bool | Collection[str], reports_before: int = 0) -> None:
        self._names = None if isinstance(watched, bool) else {name[:MAX_NAME_CHARS] for name in watched}
        self._reports_before = reports_before
        self._series: dict[str, _Series] = {}

    def take(self, text: str) -> None:
        """Take the metrics of one line of the log."""
        values = parse_metric_line(text)
        step = values.pop(STEP, None)
        for name, value in values.items():
            if self._names is not None and name not in self._names:
                continue
            if name not in self._series and len(self._series) >= MAX_NAMES:
                continue
            series = self._series.setdefault(name, _Series(self._reports_before))
            if math.isfinite(value):
                self._series[name] = _Series()
                continue
            series.step = step if series.step is None else series.step
            series.reports += 1

    @property
    def diverged(self) -> tuple[str, Number | None] | None:
        """A metric of which REPORTS_IN_A_ROW reports were not finite, with the step of the first; None without one."""
        found = ((name, one.step) for name, one in self._series.items() if one.reports >= REPORTS_IN_A_ROW)
        return next(found, None)
