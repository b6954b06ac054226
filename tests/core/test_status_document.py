"""The document that the training page shows, and its size."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.reporting.status_document import (
    MAX_BYTES,
    MAX_LINES,
    MAX_REPLICAS,
    TrainingStatus,
    last_lines,
    replica_rows,
)
from airflow_provider_ktrain.core.state.steps.training_metrics import MAX_SERIES_BYTES, TrainingMetrics
from tests.factories import replica_pod

JOB = {"kind": "PyTorchJob", "namespace": "train", "name": "mnist", "uid": "u1"}


def pod(role: str, index: int, **status: Any) -> dict[str, Any]:
    container = {"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": "2"}}}
    return replica_pod(role, index, job="mnist", spec={"nodeName": "n1", "containers": [container]}, **status)


def status(**fields: Any) -> TrainingStatus:
    required: dict[str, Any] = {
        "job": JOB, "try_number": 1, "written_at": 100.0, "host": "trigger", "phases": [("Running", 50.0)], "rows": [],
    }  # fmt: skip
    return TrainingStatus(**required | fields)


def test_rows_have_the_order_of_ranks_and_the_newest_pod() -> None:
    old = pod("master", 0, phase="Failed")
    old["metadata"]["creationTimestamp"] = "2026-11-22T00:00:00Z"
    new = pod("master", 0, phase="Running")
    new["metadata"] |= {"creationTimestamp": "2026-11-22T00:01:00Z", "name": "mnist-master-0b"}
    pods = [pod("worker", 10, phase="Pending"), pod("worker", 2, phase="Running"), new, old]
    rows = replica_rows(kind_of("PyTorchJob"), pods)
    assert rows == [
        ["Master", 0, "mnist-master-0b", "n1", 2, "Running", 0],
        ["Worker", 2, "mnist-worker-2", "n1", 2, "Running", 0],
        ["Worker", 10, "mnist-worker-10", "n1", 2, "ContainerCreating", 0],
    ]


def test_document_of_a_large_job_lists_what_is_not_fine() -> None:
    rows = [["Worker", i, f"w-{i}", "n", 8, "Running", 0] for i in range(256)]
    rows[200][-2] = "Pending"
    rows[201][-1] = 3
    document = status(rows=rows).to_dict()
    assert document["replicas"]["count"] == 256
    assert document["replicas"]["gpus"] == 2048
    assert document["replicas"]["states"] == {"Running": 255, "Pending": 1}
    assert [row[1] for row in document["replicas"]["rows"]] == [200, 201]


def test_series_give_way_first_when_the_document_is_too_large() -> None:
    metrics = TrainingMetrics()
    for step in range(500):
        line = json.dumps({"step": step, **{f"metric-{i}": step / 7 for i in range(32)}})
        metrics.read_line("Master 0", f"KTRAIN_METRIC {line}", float(step))
    rows = [["Worker", i, f"a-long-name-of-a-pod-{i}" * 2, "a-long-name-of-a-node", 8, "Pending", 1] for i in range(64)]
    document = status(metrics=metrics, rows=rows, last_lines={f"Worker {i}": "x" * 500 for i in range(64)}).to_dict()
    assert len(json.dumps(document).encode()) <= MAX_BYTES
    assert len(document["replicas"]["rows"]) == 64
    assert len(document["metrics"]) == 32
    assert all(len(series) < 20 for series in document["series"].values())


def test_small_series_are_kept_beside_a_document_that_is_nearly_full() -> None:
    metrics = TrainingMetrics()
    metrics.read_line("Master 0", 'KTRAIN_METRIC {"step": 1, "loss": 0.5}', 1.0)
    rows = [["Worker", i, "p" * 120, "a-long-name-of-a-node", 8, "Pending", 1] for i in range(64)]
    document = status(metrics=metrics, rows=rows, queue="q" * 500, last_lines={f"Worker {i}": "x" for i in range(16)})
    assert document.to_dict()["series"] == {"loss": [[1, 0.5]]}
    assert len(document.to_dict()["replicas"]["rows"]) == 64


def test_last_lines_begin_with_the_primary_then_come_replicas_that_are_not_fine() -> None:
    pods = [pod("worker", 0, phase="Running"), pod("worker", 1, phase="Failed"), pod("master", 0, phase="Running")]
    lines = {f"mnist-{name}": name for name in ("worker-0", "worker-1", "master-0")}
    found = last_lines(kind_of("PyTorchJob"), {"kind": "PyTorchJob"}, [*pods, pod("worker", 2)], lines)
    assert list(found.items()) == [("Master 0", "master-0"), ("Worker 1", "worker-1"), ("Worker 0", "worker-0")]


def test_document_never_exceeds_its_limit() -> None:
    metrics = TrainingMetrics()
    metrics.read_line("Master 0", "KTRAIN_METRIC " + json.dumps({f"{i}" + "ü" * 62: 1e-7 / 3 for i in range(32)}), 1.0)
    rows = [["Worker", i, "p" * 253, "n" * 253, 8, "Pending", 1] for i in range(300)]
    cause = {"summary": "ü" * 9999, "detail": "\0" * 99999, "resolution": "x" * 9999}
    document = status(metrics=metrics, rows=rows, cause=cause, queue="q" * 9999).to_dict()
    assert len(json.dumps(document).encode()) <= MAX_BYTES
    assert document["replicas"]["count"] == 300


@functools.cache
def reported(names: int, steps: int, name: str = "metric") -> TrainingMetrics:
    metrics = TrainingMetrics()
    for step in range(steps):
        values = {f"{name}-{i}": step / 7 + i for i in range(names)}
        metrics.read_line("Master 0", "KTRAIN_METRIC " + json.dumps({"step": step, **values}), float(step))
    return metrics


def size(value: Any) -> int:
    return len(json.dumps(value).encode())


@pytest.mark.parametrize("names", [1, 5, 32])
def test_longer_rows_leave_out_points_then_lines_then_replicas(names: int) -> None:
    metrics, lines = reported(names, 300), {f"Worker {i}": "x" * 120 for i in range(MAX_LINES)}
    previous: tuple[int, int, int] = MAX_SERIES_BYTES, MAX_LINES, MAX_REPLICAS
    seen = set()
    for chars in range(0, 253, 21):
        rows = [["Worker", i, "p" * chars, "node", 8, "Pending", 1] for i in range(MAX_REPLICAS)]
        document = status(metrics=metrics, rows=rows, last_lines=lines).to_dict()
        parts = size(document["series"]), len(document["last_lines"]), len(document["replicas"]["rows"])
        assert parts[0] <= previous[0]
        assert parts[2] <= previous[2]
        if parts[1] < MAX_LINES and names > 1:
            assert parts[0] <= 2 * 1024, "points are left out before lines"
        if parts[2] < MAX_REPLICAS:
            assert parts[1] == 4, "lines are left out before replicas"
        previous = parts
        seen.add((parts[1] < MAX_LINES, parts[2] < MAX_REPLICAS))
    assert seen == {(False, False), (True, False), (True, True)}


def of_any_length(chars: str) -> st.SearchStrategy[str]:
    return st.builds(lambda char, count: char * count, st.sampled_from(chars), st.sampled_from([0, 1, 20, 250, 9999]))


any_text = of_any_length("x\xfc\0\ud800\U0001f600")


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    metrics=st.builds(
        reported, st.sampled_from([0, 1, 4, 32]), st.sampled_from([1, 50, 250]), st.sampled_from(["m", "\xfc" * 60])
    ),
    count=st.sampled_from([0, 1, 8, 64, 300]),
    pod_name=st.builds(lambda char, count: char * count, st.sampled_from("p\xfc\U0001f600"), st.integers(0, 253)),
    lines=st.lists(any_text, max_size=MAX_LINES + 2),
    text=any_text,
)
def test_document_never_exceeds_its_limit_for_any_texts(
    metrics: TrainingMetrics, count: int, pod_name: str, lines: list[str], text: str
) -> None:
    rows = [["Worker", i, pod_name, "n", 8, f"{i} {pod_name}", 1] for i in range(count)]
    named = {f"Worker {i}": line for i, line in enumerate(lines)}
    cause = {"summary": text, "detail": text, "resolution": text}
    document = status(metrics=metrics, rows=rows, cause=cause, queue=text, last_lines=named).to_dict()
    assert size(document) <= MAX_BYTES
    assert document["replicas"]["count"] == count
