"""A manifest that was saved from a job of ours by `kubectl get -o yaml` is submitted as its author had written it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from kubernetes import client, config

from airflow_provider_ktrain.core.identity.names import DEADLINE_ANNOTATION, SUSPENDED_ANNOTATION, annotation
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.kinds.conditions import FAILED_ANNOTATION
from airflow_provider_ktrain.core.manifest.deadline import deadline_of
from airflow_provider_ktrain.exceptions import TrainingJobError
from tests import clusters
from tests.clusters import TestCluster
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance, Object

pytestmark = pytest.mark.embedded("needs MPIJob v1 and runtimes, and starts clusters of its own")

#: ends with the exit code END, or runs for a long time without it
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
def in_one_try(cluster: TestCluster, kind: Kind) -> Iterator[Object]:
    """Parameters with which a job fails at its first exit code. The pods of a runtime are created again six times."""
    if kind is not TRAINJOB:
        yield {}
        return
    custom = client.CustomObjectsApi(config.new_client_from_config(str(cluster.kubeconfig)))
    place = TRAINJOB.group, "v1alpha1", "clustertrainingruntimes"
    runtime = custom.get_cluster_custom_object(*place, "torch-distributed") | {"metadata": {"name": "once"}}
    for replicated in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        replicated["template"]["spec"]["backoffLimit"] = 0
    custom.create_cluster_custom_object(*place, runtime)
    yield {"runtime": "once"}
    custom.delete_cluster_custom_object(*place, "once")


@pytest.fixture
def tasks(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch, kind: Kind, version: str
) -> Iterator[tuple[Instance, Instance]]:
    """The task that has submitted the job, and the one that submits it again."""
    set_connection(cluster, monkeypatch)
    with Instance(cluster, kind, version) as before, Instance(cluster, kind, version) as again:
        yield before, again


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
def test_manifest_of_a_queued_job(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """Kueue manages an MPIJob v2beta1 only. The cluster to which the manifest is submitted again has no Kueue."""
    with clusters.cluster(kueue=True, mpi_api="v2beta1") as queueing:
        set_connection(queueing, monkeypatch)
        with Instance(queueing, kind) as before:
            saved = first(before, queue_name="team-a", deferrable=True)
    assert "'suspend': True" in str(saved["spec"])
    with clusters.cluster(mpi_api="v2beta1") as other:
        set_connection(other, monkeypatch)
        with Instance(other, kind) as again:
            check_succeeds(again, saved, env={"END": "0"})
