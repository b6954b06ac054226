"""The table of metrics names what the code reports, and the Grafana dashboard queries nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.reporting.task_metrics import PREFIX, Sample, counts, gauges
from airflow_provider_ktrain.core.state.pods.usage import Usage
from airflow_provider_ktrain.core.state.status import Phase

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "examples" / "grafana" / "ktrain.json").read_text())
TASK_TAGS = ("dag_id", "task_id")


class Metric(NamedTuple):
    """A metric as docs/how-to/metrics.md describes it, with its tags beside TASK_TAGS."""

    type: str
    tags: tuple[str, ...]


def documented() -> dict[str, Metric]:
    page = (ROOT / "docs" / "how-to" / "metrics.md").read_text()
    rows = ([cell.strip() for cell in line.split("|")] for line in page.splitlines())
    return {
        name: Metric(row[2].partition(",")[0], tuple(re.findall(r"`(\w+)`", row[3])))
        for row in rows
        if len(row) == 6  # four cells between the outer lines
        for name in re.findall(rf"`{re.escape(PREFIX)}([\w.]+)`", row[1])
    }


KNOWN = documented()
USAGE = Usage(requested=40.4, queued=10.2, held=30.2, wasted=0.4, gpus=3).as_dict()
ROWS = ["Waiting", "Running", "Failures by cause", "GPU time", "Metrics of the programs"]
#: A name that the engine gives to what it measures, for example f"seconds.{self.phase.lower()}".
MEASURED = re.compile(r'"((?:seconds|log|watch|queue)\.[^" ]+)"')
EXPANDED = {"seconds.{self.phase.lower()}": [f"seconds.{phase.lower()}" for phase in Phase]}
EXPANDED["seconds.{phase.lower()}"] = EXPANDED["seconds.{self.phase.lower()}"]
EXPANDED["queue.{name}"] = ["queue.evictions", "queue.preemptions"]


def measured() -> set[str]:
    """The names that occur in the code that measures."""
    package = ROOT / "airflow_provider_ktrain"
    files = [*(package / "engine").rglob("*.py"), package / "worker_host.py"]
    found = {name for file in files for name in MEASURED.findall(file.read_text())}
    return {name for pattern in found for name in EXPANDED.get(pattern, [pattern])}


def reported() -> list[Sample]:
    """Samples of everything that a try can report."""
    metrics = {"loss": {"last": 0.1, "best": 0.05, "step": 3}, "text": {"last": "nan"}}
    cause = Cause(Category.OUT_OF_MEMORY, "why").as_dict()
    usage = USAGE | {"wasted": 5.0, "repeated": 2.0, "repeated_steps": 4}
    return [*gauges(usage, dict.fromkeys(measured(), 1.0), metrics), *counts(usage, None), *counts(usage, cause)]


def test_table_has_exactly_the_metrics_that_are_reported() -> None:
    assert {sample.name for sample in reported()} == KNOWN.keys()


def test_table_has_the_tags_that_are_reported() -> None:
    for sample in reported():
        tags = KNOWN[sample.name].tags
        assert tuple(sample.tags) in (tags, () if tags == ("resource",) else tags), sample


def test_other_accelerators_have_a_tag() -> None:
    neuron = Usage(requested=8, held=8, gpus=2, resource="aws.amazon.com/neuroncore")
    usage = Usage(16, 2, 14, 1, 4, resource="google.com/tpu", others=(neuron,), unknown_claims=1).as_dict()
    samples = [*gauges(usage, {}, {}), *counts(usage, None)]
    tagged = {(sample.name, sample.value, *sample.tags.values()) for sample in samples}
    assert tagged >= {
        ("gpus", 4, "google.com/tpu"), ("gpus", 2, "aws.amazon.com/neuroncore"),
        ("gpu_seconds.held", 14, "google.com/tpu"), ("gpu_seconds.held", 8, "aws.amazon.com/neuroncore"),
        ("gpu_time.held", 14, "google.com/tpu"), ("gpu_time.held", 8, "aws.amazon.com/neuroncore"),
    }  # fmt: skip
    assert {name for name, *_ in tagged} <= KNOWN.keys()
    unknown = Usage(unknown_claims=2).as_dict()
    assert not [sample for sample in gauges(unknown, {}, {}) if sample.name.startswith("gpu")], "unknown, and not 0"


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (None, [Sample("succeeded", 1, {})]),
        ({"category": "user code"}, [Sample("failed", 1, {"cause": "user_code"})]),
        ({}, [Sample("failed", 1, {"cause": "unknown"})]),
    ],
)
def test_end_of_a_try_is_counted_with_its_gpu_time(cause: Any, expected: list[Sample]) -> None:
    times = [Sample("gpu_time.queued", 10, {}), Sample("gpu_time.held", 30, {})]  # less than half a second is wasted
    assert list(counts(USAGE, cause)) == [*expected, *times]


# the dashboard


def panels(*, rows: bool) -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if (panel["type"] == "row") is rows]


def queries() -> list[str]:
    found = [target["expr"] for panel in panels(rows=False) for target in panel["targets"]]
    return [*found, *(v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query")]


def test_dashboard_has_a_row_for_each_subject() -> None:
    assert [row["title"] for row in panels(rows=True)] == ROWS


def test_dashboard_queries_metrics_that_tasks_report() -> None:
    """Names and tags as statsd_exporter translates them: see docs/how-to/metrics.md."""
    exported = {f"airflow.{PREFIX}{name}".replace(".", "_"): metric for name, metric in KNOWN.items()}
    for query in queries():
        names = re.findall(r"airflow_\w+", query)
        assert names, query
        assert set(names) <= exported.keys(), query
        tags = {*TASK_TAGS, *(tag for name in names for tag in exported[name].tags)}
        grouped = [label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")]
        assert {*re.findall(r"[{,](\w+)=~", query), *grouped} <= tags, query
        for name in names:
            counted = f"increase({name}{{" in query
            assert counted == (exported[name].type == "counter"), query


def test_dashboard_shows_only_tags_that_its_metrics_have() -> None:
    for panel in panels(rows=False):
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                tags = {tag for metric in KNOWN.values() for tag in metric.tags}
                assert label in TASK_TAGS or label in tags, target


def test_dashboard_is_a_valid_model() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD, "Grafana gives the id"
    assert "__inputs" not in DASHBOARD, "a variable selects the data source"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        cells = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert x + w <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(rows=False):
        assert panel["type"] in ("timeseries", "stat", "table")
        assert panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters)) > 0
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", *TASK_TAGS]
