"""A manifest that was saved from a job of ours by `kubectl get -o yaml` is submitted as its author had written it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import DEADLINE_ANNOTATION, SUSPENDED_ANNOTATION, annotation
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.kinds.conditions import FAILED_ANNOTATION
from airflow_provider_ktrain.core.manifest.deadline import deadline_of
from airflow_provider_ktrain.exceptions import TrainingJobError
from tests.apiserver.store import copied
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance, Object
from tests.operators.virtual_cluster import VirtualCluster, virtual_cluster
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs MPIJob v1 and a runtime")

#: Ends with the exit code END, or runs for a long time without it.
ENDS = 'if [ -n "$END" ]; then echo "KTRAIN_RESULT $END"; exit $END; fi'
PROGRAM = ["sh", "-c", f"{ENDS}; trap 'exit 143' TERM; sleep 600 & wait"]
KINDS = [(PYTORCHJOB, "v1"), (MPIJOB, "v1"), (TRAINJOB, "v1alpha1")]
of_each_kind = pytest.mark.parametrize(("kind", "version"), KINDS, ids=lambda value: str(getattr(value, "name", "")))


def first(task: Instance, **parameters: Any) -> Object:
    """The job of a task that keeps it, as it is read after the task has ended or deferred."""
    workers = {"workers": 1} if task.kind is MPIJOB else {}
    given = {"command": PROGRAM, "execution_timeout": timedelta(hours=1), "deferrable": False, **workers, **parameters}
    try:
        task.execute(on_finish_action="keep_job", **given)
    except TrainingJobError:
        assert parameters.get("env") != {"END": "0"}
    (job,) = task.jobs()
    assert deadline_of(job)
    return job


def a_day_later(job: Object) -> Object:
    """The job as if it had been submitted a day ago."""
    job, metadata, day = copy.deepcopy(job), job["metadata"], timedelta(days=1)
    created = datetime.fromisoformat(metadata["creationTimestamp"]) - day
    job["metadata"]["creationTimestamp"] = created.isoformat().replace("+00:00", "Z")
    job["metadata"]["annotations"][DEADLINE_ANNOTATION] = str(float(deadline_of(job) or 0) - day.total_seconds())
    return job


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualCluster]:
    with virtual_cluster(tmp_path) as made:
        set_connection(made, monkeypatch)
        yield made


@pytest.fixture
def in_one_try(cluster: VirtualCluster, kind: Kind) -> Object:
    """Parameters with which a job fails at its first exit code. The pods of a runtime are created again six times."""
    if kind is not TRAINJOB:
        return {}
    runtime = copied(cluster.api.objects["clustertrainingruntimes"]["torch-distributed"])
    for replicated in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        replicated["template"]["spec"]["backoffLimit"] = 0
    cluster.api.put("clustertrainingruntimes", runtime | {"metadata": {"name": "once"}})
    return {"runtime": "once"}


@pytest.fixture
def tasks(cluster: VirtualCluster, kind: Kind, version: str) -> tuple[Instance, Instance]:
    """The task that has submitted the job, and the one that submits it again."""
    cluster.api.mpi_version = "v1"
    return VirtualInstance(cluster, kind, version), VirtualInstance(cluster, kind, version)


def check_succeeds(task: Instance, saved: Object, **parameters: Any) -> None:
    assert task.execute(manifest=saved, deferrable=False, on_finish_action="keep_job", **parameters) == 0
    (job,) = task.jobs()
    assert job["metadata"]["name"] != saved["metadata"]["name"]
    assert deadline_of(job) is None
    assert "activeDeadlineSeconds" not in str(job)


@of_each_kind
def test_manifest_of_a_finished_job(tasks: tuple[Instance, Instance]) -> None:
    before, again = tasks
    check_succeeds(again, a_day_later(first(before, env={"END": "0"})))


@of_each_kind
def test_manifest_of_a_failed_job(tasks: tuple[Instance, Instance], in_one_try: Object) -> None:
    """The new job fails by itself, with the cause of its own program."""
    before, again = tasks
    saved = a_day_later(first(before, env={"END": "3"}, **in_one_try))
    with pytest.raises(TrainingJobError, match=r"failed with exit code 3\. Last log line: KTRAIN_RESULT 3"):
        again.execute(manifest=saved, deferrable=False)


@of_each_kind
def test_manifest_of_a_suspended_job(tasks: tuple[Instance, Instance]) -> None:
    before, again = tasks
    saved = first(before, execution_timeout=timedelta(seconds=2))
    assert annotation(saved, SUSPENDED_ANNOTATION)
    saved["metadata"]["annotations"][FAILED_ANNOTATION] = '{"reason": "Failed"}'  # if it had failed before
    check_succeeds(again, saved, env={"END": "0"})


@pytest.mark.parametrize("kind", [PYTORCHJOB, MPIJOB, TRAINJOB], ids=lambda kind: str(kind.name))
def test_manifest_of_a_queued_job(cluster: VirtualCluster, kind: Kind) -> None:
    """Kueue suspends the job. In the namespace to which the manifest is submitted again, it manages no jobs."""
    cluster.api.put("localqueues", {"metadata": {"name": "team-a"}})
    saved = first(VirtualInstance(cluster, kind), queue_name="team-a", deferrable=True)
    assert "'suspend': True" in str(saved["spec"])
    cluster.api.remove("localqueues", "team-a")
    check_succeeds(VirtualInstance(cluster, kind), saved, env={"END": "0"})
