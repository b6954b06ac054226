"""The metrics that a training reports while it runs: lines with KTRAIN_METRIC, and a TrainJob's `trainerStatus`.

A program prints `KTRAIN_METRIC {"step": 120, "loss": 0.31}`. Every number in the object, except `step`, is a point of
the series with its name. In a distributed training often every rank prints the same names. A series therefore follows
one replica, the first that reports it, and another one takes over only if that replica has been silent for a while.

A training that restarts from a checkpoint reports earlier steps again. The points after the step at which it goes on
are dropped, so that the series shows the training that counts.

Everything is bounded, because the series travel in XComs and trigger arguments: the number of names, the points of a
series, and the JSON of all series together. Points of a process that was lost are in its last status.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.formats import is_step, mapping
from airflow_provider_ktrain.core.state.steps.reported_steps import ReportedSteps
from airflow_provider_ktrain.core.text.output import clean
from airflow_provider_ktrain.core.text.secret_rules import MASK
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

METRIC_MARKER = "KTRAIN_METRIC "
MAX_NAMES = 32
MAX_NAME_CHARS = 64
MAX_POINTS = 200  #: How many points one series keeps.
MAX_SERIES_BYTES = 10 * 1024  #: JSON of all series in the status.
MAX_HANDOVER_BYTES = 4 * 1024  #: JSON of all series in trigger arguments, which also contain the log positions.
MAX_LINE_CHARS = 16 * 1024  #: A longer line is not parsed.
TAKEOVER_SECONDS = 60.0  #: Silence of a series' replica after which another replica may continue the series.
STEP = "step"
TRAINER_STATUS = "trainerStatus"  #: Stands for the replica of points from a TrainJob's status.
PERCENTAGE = "progress"  #: The series of `trainerStatus.progressPercentage`.
#: A metric with one of these words in its name is better when it is lower.
LOWER_IS_BETTER = ("loss", "error", "perplexity", "ppl", "mae", "mse", "rmse", "wer", "cer", "latency", "time")

Number = float | int


class Point(NamedTuple):
    """One value of a series.

    :param step: the training step, or the number of the report if the program prints none that can be one.
    :param value: a number; NaN and infinities are kept.
    """

    step: Number
    value: Number


@dataclass
class Series:
    """The points of one metric, in the order of their steps.

    :param source: the replica that reports it; empty until one does.
    :param reported_at: when it last did, in epoch seconds.
    :param before: those that an earlier process has read. They count up to the first step that this one has read, as
        the training may have gone back to it.
    :param best_before: the best of them, which may have been thinned out.
    :param points: those that this process has read; at most 2 * MAX_POINTS, the oldest ones thinned out.
    :param best: the best of them.
    :param lowest: the lowest step that `add` was called with. Default: infinity.
    """

    source: str
    reported_at: float
    before: list[Point] = field(default_factory=list)
    best_before: Point | None = None
    points: list[Point] = field(default_factory=list)
    best: Point | None = None
    lowest: Number = math.inf

    def add(self, point: Point, name: str) -> None:
        """Add a point. An earlier step means that the training has gone back to it: later points are dropped."""
        self.lowest = min(self.lowest, point.step)
        if self.points and point.step <= self.points[-1].step:
            self.points = [known for known in self.points if known.step < point.step]
            if self.best is not None and self.best.step >= point.step:
                self.best = best_of(self.points, name)
        self.points.append(point)
        if len(self.points) > 2 * MAX_POINTS:
            self.points = thinned(self.points, MAX_POINTS)
        self.best = best_of([point] if self.best is None else [self.best, point], name)

    def insert(self, point: Point, name: str) -> None:
        """Add a point that was reported before all those that `add` was called with."""
        if point.step < self.lowest:
            later = [known for known in self.points if known.step >= self.lowest]
            points = [*(known for known in self.points if known.step < point.step), point, *later]
            self.points = thinned(points, MAX_POINTS) if len(points) > 2 * MAX_POINTS else points
            self.best = best_of(self.points if self.best is None else [self.best, *self.points], name)

    def whole(self) -> list[Point]:
        """The points of all processes."""
        first = self.points[0].step if self.points else math.inf
        return [*(known for known in self.before if known.step < first), *self.points]

    def best_of_all(self, name: str) -> Point | None:
        """The best point of all processes."""
        whole = self.whole()
        first = self.points[0].step if self.points else math.inf
        known = [self.best_before] if self.best_before is not None and self.best_before.step < first else []
        return best_of([*known, *([self.best] if self.best is not None else []), *whole], name)

    @property
    def last_step(self) -> Number:
        """The step of the last point; minus infinity without one."""
        last = self.points or self.before
        return last[-1].step if last else -math.inf


class TrainingMetrics:
    """All series of a training, and how far it has come."""

    def __init__(self, handed_over: Mapping[str, Any] | None = None) -> None:
        given = mapping(handed_over)
        self._series: dict[str, Series] = {}
        self._reports: dict[str, int] = {}  # number of reports without a step, by replica
        self.step: Number | None = None  #: Highest step, or percentage, that was reported.
        self.progress_at: float | None = None  #: Epoch seconds of that progress.
        self._progress_from = ""  # the replica that did
        self.last_steps: dict[str, Number] = {}  #: The last step of each replica that has reported one, by its name.
        self.omitted: tuple[str, ...] = ()  #: Names beyond MAX_NAMES.
        self._ignored_steps: dict[str, Number | None] = {}  # the first of each replica; None when it was reported
        self.steps = ReportedSteps.from_dict(given.get("steps"))  #: Steps in lines of the log.
        self._read(given)

    def __bool__(self) -> bool:
        return bool(self._series)

    def read_line(self, source: str, text: str, written_at: float, *, earlier: bool = False) -> None:
        """Take the metrics of one log line.

        :param written_at: when it was written, in epoch seconds.
        :param earlier: whether it was written before all lines that were not. Default: False.
        """
        values = parse_metric_line(text)
        if not values:
            return
        step = self._step(source, values.pop(STEP, None))
        if earlier:
            if step is not None:
                self._insert_all(source, step, values, written_at)
        elif step is not None:
            self._record_progress(source, step, written_at)
            self.steps.record(step, written_at)
            self._add_all(source, step, values, written_at)
        else:
            self._reports[source] = step = self._reports.get(source, 0) + 1
            self._add_all(source, step, values, written_at)

    def read_step(self, source: str, text: str, written_at: float) -> None:
        """Take only the step of a line, as progress: the series are those of the followed replicas.

        The parameters are those of `read_line`.
        """
        step = self._step(source, parse_metric_line(text).get(STEP))
        if step is not None:
            self._record_progress(source, step, written_at)

    def take_ignored_step(self, source: str) -> Number | None:
        """The first step of a replica that counts as none, once; None if there is nothing to report."""
        ignored = self._ignored_steps.get(source)
        if ignored is not None:
            self._ignored_steps[source] = None
        return ignored

    def _step(self, source: str, number: Number | None) -> Number | None:
        """The reported step; None if it can't be one."""
        if number is None or is_step(number):
            return number
        self._ignored_steps.setdefault(source, number)
        return None

    def read_trainer_status(self, job: Mapping[str, Any]) -> None:
        """Take `status.trainerStatus` of a TrainJob: its metrics, with the percentage as their step.

        Each report replaces the field as a whole (recording 61).
        """
        reported = mapping(mapping(job.get("status")).get("trainerStatus"))
        at = epoch_seconds(reported.get("lastUpdatedTime"))
        if at is None:
            return
        listed = reported.get("metrics")
        values = {
            clean(str(metric.get("name"))[:MAX_NAME_CHARS]): value
            for metric in map(mapping, listed if isinstance(listed, list) else ())
            if (value := _as_number(metric.get("value"))) is not None
        }
        percentage = _as_step(reported.get("progressPercentage"))
        if percentage is not None:
            values[PERCENTAGE] = percentage
            self._record_progress(TRAINER_STATUS, percentage, at)
        self._add_all(TRAINER_STATUS, percentage if percentage is not None else self.step or 0, values, at)

    def summary(self) -> dict[str, dict[str, Any]]:
        """For each metric its `last` and `best` value with their `step` and `best_step`, as JSON types."""
        found: dict[str, dict[str, Any]] = {}
        for name, series in self._series.items():
            if whole := series.whole():
                last, best = whole[-1], series.best_of_all(name)
                found[name] = {"last": _json_number(last.value), "step": _json_number(last.step)}
                if best is not None:
                    found[name] |= {"best": _json_number(best.value), "best_step": _json_number(best.step)}
        return found

    def points(self, max_bytes: int = MAX_SERIES_BYTES) -> dict[str, list[list[Any]]]:
        """For each metric its `[step, value]` pairs, first and last included, as JSON types of at most `max_bytes`."""
        wholes = {name: series.whole() for name, series in self._series.items()}
        count = max(min(MAX_POINTS, max_bytes // (6 * max(len(self._series), 1))), 1)  # a pair has 6 characters or more
        while True:
            found = {
                name: [[_json_number(p.step), _json_number(p.value)] for p in thinned(whole, count)]
                for name, whole in wholes.items()
                if whole
            }
            size = len(json.dumps(found))
            if count <= 1 or size <= max_bytes:
                return found
            count = max(min(count * max_bytes // size, count - 1), 1)

    def frozen(self) -> TrainingMetrics:
        """A copy that doesn't change, for another thread."""
        frozen = copy.copy(self)
        frozen.steps = replace(self.steps)
        frozen._series = {name: replace(series, points=list(series.points)) for name, series in self._series.items()}
        return frozen

    def handover(self) -> dict[str, Any]:
        """For the next process that follows the job."""
        points, series = self.points(MAX_HANDOVER_BYTES), {}
        for name, one in self._series.items():
            best = one.best_of_all(name)
            series[name] = {
                "source": one.source,
                "at": one.reported_at,
                "points": points.get(name, []),
                "best": None if best is None else [_json_number(number) for number in best],
            }
        steps = self.steps.to_dict()
        if not series and self.step is None and not steps:
            return {}
        progress = {"step": self.step, "progress_at": self.progress_at, "progress_from": self._progress_from}
        return dict(clean({"series": series, **progress, **({"steps": steps} if steps else {})}))

    def take_earlier(self, status: Mapping[str, Any]) -> None:
        """Take the points from the last status of an earlier process, in place of older ones that were handed over.

        A name in which a secret was masked is left out: its points can't be told from those of another one.
        """
        for name, pairs in mapping(status.get("series")).items():
            if MASK not in name and (name in self._series or len(self._series) < MAX_NAMES):
                series = self._series.setdefault(name, Series("", 0.0))
                best = mapping(mapping(status.get("metrics")).get(name))
                series.before = _as_points(pairs)
                series.best_before = _as_point([best.get("best_step"), best.get("best")])

    def _read(self, given: Mapping[str, Any]) -> None:
        """Read a handover of this release or another one."""
        for name, value in mapping(given.get("series")).items():
            read = mapping(value)
            at = _as_number(read.get("at")) or 0.0
            self._series[clean(str(name))] = Series(
                str(read.get("source", "")), float(at), _as_points(read.get("points")), _as_point(read.get("best"))
            )
        self.step = _as_step(given.get("step"))
        self.progress_at = _as_number(given.get("progress_at"))
        self._progress_from = str(given.get("progress_from") or "")
        if self.step is not None:
            self.last_steps[self._progress_from] = self.step

    def _record_progress(self, source: str, step: Number, at: float) -> None:
        """A step that is higher than all, or that isn't the replica's last one, is progress.

        A replica whose step is lower than before has gone back to a checkpoint. Until it has caught up, its steps are
        lower than the highest one, which another replica may have reported. A replica that hangs may still log, but
        repeats its step.
        """
        last = self.last_steps.get(source)
        self.last_steps[source] = step
        if self.step is None or step > self.step or source == self._progress_from:
            self.step, self._progress_from, is_progress = step, source, step != self.step
        else:
            is_progress = last is not None and step != last
        if is_progress:
            self.progress_at = max(at, self.progress_at or at)

    def _insert_all(self, source: str, step: Number, values: Mapping[str, Number], at: float) -> None:
        """Take metrics from before all others: the step, and points of series that have the same source or none."""
        if self.step is None or step > self.step:
            self._record_progress(source, step, at)
        self.steps.record(step, at)
        for name, value in values.items():
            if name in self._series or len(self._series) < MAX_NAMES:
                series = self._series.setdefault(name, Series(source, at))
                series.source = series.source or source
                if series.source == source:
                    series.insert(Point(step, value), name)

    def _add_all(self, source: str, step: Number, values: Mapping[str, Number], at: float) -> None:
        for name, value in values.items():
            series = self._series.get(name)
            if series is None:
                if len(self._series) >= MAX_NAMES:
                    if len(self.omitted) < MAX_NAMES and name not in self.omitted:
                        self.omitted += (name,)
                    continue
                series = self._series[name] = Series(source, at)
            if source != series.source:
                ahead = step > series.last_step
                if series.source and (not ahead or at < series.reported_at + TAKEOVER_SECONDS):
                    continue
                series.source = source
            series.reported_at = at
            series.add(Point(step, value), name)


def parse_metric_line(text: str) -> dict[str, Number]:
    """The numbers in a line with KTRAIN_METRIC, by name; empty if it has none. Other values are ignored.

    A step may be an integer of any length, so that it can be reported.
    """
    start = text.find(METRIC_MARKER)
    if start < 0 or len(text) > MAX_LINE_CHARS:
        return {}
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start + len(METRIC_MARKER))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        clean(str(name)[:MAX_NAME_CHARS]): value
        for name, value in found.items()
        if not isinstance(value, str) and (_as_number(value) is not None or (name == STEP and type(value) is int))
    }


def thinned(points: list[Point], count: int) -> list[Point]:
    """At most `count` of the points, evenly spread over the steps, the first and the last included.

    Spread over the points instead, a series that is thinned again and again would lose its older part.
    """
    if len(points) <= count:
        return points
    if count <= 1:
        return points[-1:]
    first, last = points[0], points[-1]
    kept, taken, span = [first], 0, last.step - first.step or 1
    for point in points[1:-1]:
        interval = int((point.step - first.step) / span * (count - 1))
        if taken < interval < count - 1:
            kept.append(point)
            taken = interval
    return [*kept, last]


def best_of(points: Iterable[Point], name: str) -> Point | None:
    """The point with the best finite value; the first one of equal ones."""
    finite = [point for point in points if math.isfinite(point.value)]
    if not finite:
        return None
    choose = min if any(word in name.lower() for word in LOWER_IS_BETTER) else max
    return choose(finite, key=lambda point: point.value)


def _json_number(number: Number | None) -> Any:
    """The number with six digits, which are enough for a plot. JSON has no NaN and infinities: they become text."""
    if number is None or isinstance(number, int):
        return number
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return float(f"{number:.6g}") if abs(number) < 1e6 else number


def _as_number(value: Any) -> Number | None:
    """The number that `_json_number`, or a program, wrote; None if it is none, or can't be stored as a double."""
    if isinstance(value, float):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 2**63 else None  # JSON has integers of any length
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _as_points(pairs: Any) -> list[Point]:
    listed = pairs if isinstance(pairs, list | tuple) else ()
    return [point for pair in listed if (point := _as_point(pair)) is not None]


def _as_point(pair: Any) -> Point | None:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return None
    step, value = _as_step(pair[0]), _as_number(pair[1])
    return None if step is None or value is None else Point(step, value)


def _as_step(value: Any) -> Number | None:
    number = _as_number(value)
    return number if is_step(number) else None
