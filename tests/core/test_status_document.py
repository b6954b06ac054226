"""The document that the training page shows, and its size."""

from __future__ import annotations

import json
from typing import Any

from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.state.status_document import (
    MAX_BYTES,
    TrainingStatus,
    last_lines,
    replica_rows,
)
from airflow_provider_ktrain.core.state.training_metrics import TrainingMetrics

JOB = {"kind": "PyTorchJob", "namespace": "train", "name": "mnist", "uid": "u1"}


def pod(role: str, index: int, **status: Any) -> dict[str, Any]:
    labels = {"training.kubeflow.org/replica-type": role, "training.kubeflow.org/replica-index": str(index)}
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    return {
        "metadata": {"name": f"mnist-{role}-{index}", "labels": labels},
        "spec": {"nodeName": "n1", "containers": [{"name": "pytorch", **gpus}]},
        "status": status,
    }


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
