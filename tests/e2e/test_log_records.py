"""The records of a task's log under Airflow's own processes: source, time and level, in a worker and in a triggerer."""

from __future__ import annotations

import contextlib
import datetime
import re
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube, selector_of

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-4")]
DAG, TASK = "log_sources", "train"
TICKS = 60  # numbered lines, one a second: the worker follows the first ten seconds, a triggerer the others
Record = dict[str, Any]


def of(records: list[Record], source: str) -> list[Record]:
    return [record for record in records if record.get("logger") == source]


def texts(records: list[Record]) -> list[str]:
    return [record["event"] for record in records]


def lines(records: list[Record]) -> list[str]:
    """The lines of replicas. Where Airflow is behind, a record has several."""
    return [line for text in texts(records) for line in text.splitlines()]


def moment(stamp: str) -> datetime.datetime:
    """The time of a kubelet's or of a record's timestamp, in microseconds."""
    return datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", stamp).replace("Z", "+00:00"))


def kubelet_times(kube: Kube, run: str, role: str) -> dict[str, str]:
    """The kubelet's timestamps of the numbered lines of a replica, as long as its pod has a log."""
    found: dict[str, str] = {}
    for pod in kube.pods(f"{selector_of(DAG, run)},training.kubeflow.org/replica-type={role}"):
        with contextlib.suppress(ApiException):
            log = kube.core.read_namespaced_pod_log(
                pod.metadata.name, kube.namespace, container="pytorch", timestamps=True, _preload_content=False
            ).data.decode()
            lines = [line.partition(" ") for line in log.splitlines()]
            found |= {text: stamp for stamp, _, text in lines if text.startswith("tick")}
    return found


def test_records_have_source_time_and_level(airflow: Airflow, kube: Kube) -> None:
    """A training that succeeds and one that fails, side by side: each takes a minute."""
    succeeds, fails = airflow.trigger(DAG), airflow.trigger(DAG, {"code": 3})
    check_sources_and_times(airflow, kube, succeeds)
    check_errors(airflow, fails)


def check_sources_and_times(airflow: Airflow, kube: Kube, run: str) -> None:
    """Lines have their replica as source, and the time of the kubelet."""
    written: dict[str, str] = {}

    def ended() -> bool:
        written.update(kubelet_times(kube, run, "worker"))
        return airflow.task(DAG, run, TASK)["state"] in ("success", "failed")

    wait_for("the task has ended", ended)
    airflow.wait_state(DAG, run, TASK, "success")
    assert len(written) > 20
    assert airflow.xcom(DAG, run, TASK) == {"loss": 1}, "of the main container, not of the sidecar"

    records = airflow.records(DAG, run, TASK)
    followed = of(records, "Worker 0")
    assert {line.partition("] ")[2] for line in lines(followed)} >= set(written)
    logged = {record["event"].partition("] ")[2]: record for record in followed if "\n" not in record["event"]}
    for text in written.keys() & logged.keys():
        assert moment(logged[text]["timestamp"]) == moment(written[text]), text
    for replica in ("Master 0", "Worker 0"):
        mine = of(records, replica)
        assert lines(mine).count(f"[{replica}] same") == 3 * TICKS, "equal lines of the same microsecond are kept"
        assert [text for text in lines(mine) if "tick" in text] == [f"[{replica}] tick {n}" for n in range(TICKS)]
        assert not [text for text in lines(mine) if "beside" in text], "a sidecar is not followed"
        waits = [text for text in lines(mine) if text.startswith(f"[{replica} fetch] ")]
        assert waits == [f"[{replica} fetch] waiting for the volume"] * 10
        assert not [field for record in mine for field in ("role", "index", "pod") if field in record]
    ours = of(records, "job")
    assert any(text.startswith("Deferred: the triggerer now follows") for text in texts(ours))
    assert "2/2 Running" in texts(ours)
    warnings = [record["event"] for record in ours if record["level"] == "warning"]
    late = "this trigger started late"  # a triggerer on a loaded machine
    assert [text for text in warnings if not text.startswith("Manifest: ") and late not in text] == []
    manifest = texts(ours)[texts(ours).index("::group::Submitted manifest, without secrets") + 1]
    assert "HF_TOKEN" in manifest
    assert "hf-0123456789" not in manifest
    (job,) = {text for text in texts(ours) if text.startswith("Submitted PyTorchJob")}
    assert "1 Master x 1 GPU, 1 Worker x 1 GPU" in job


def check_errors(airflow: Airflow, run: str) -> None:
    """A failure shows the end of the replica's log as an error."""
    airflow.wait_state(DAG, run, TASK, "failed")
    errors = [record for record in airflow.records(DAG, run, TASK) if record["level"] == "error"]
    assert any(text.startswith("Master 0 failed: ValueError: bad shard") for text in texts(of(errors, "job")))
    (end,) = texts(of(errors, "Master 0"))
    assert end.startswith("Last log lines of Master 0:\n")
    assert end.endswith("\n  ValueError: bad shard")
