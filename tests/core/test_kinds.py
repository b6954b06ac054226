from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.errors import ManifestError, UnknownKindError
from airflow_provider_ktrain.core.kinds.base import KINDS, MPIJOB, PYTORCHJOB, Kind, kind_of

from .manifests import mpijob, pytorchjob

TO = "training.kubeflow.org/"


@pytest.mark.parametrize(
    ("kind", "labels", "role"),
    [
        (
            PYTORCHJOB,
            {f"{TO}replica-type": "master", f"{TO}replica-index": "0", f"{TO}job-role": "master"},
            ("Master", 0),
        ),
        (PYTORCHJOB, {f"{TO}replica-type": "worker", f"{TO}replica-index": "14"}, ("Worker", 14)),
        # 1.8+: worker 0 of a job without a Master carries job-role=master
        (
            PYTORCHJOB,
            {f"{TO}replica-type": "worker", f"{TO}replica-index": "0", f"{TO}job-role": "master"},
            ("Worker", 0),
        ),
        (PYTORCHJOB, {"replica-type": "Worker", "replica-index": "2"}, ("Worker", 2)),  # before 1.6
        (PYTORCHJOB, {"pytorch-replica-type": "worker", "pytorch-replica-index": "1"}, ("Worker", 1)),  # legacy
        (MPIJOB, {f"{TO}job-role": "launcher"}, ("Launcher", 0)),  # mpi-operator has no replica-type
        (MPIJOB, {f"{TO}job-role": "worker", f"{TO}replica-index": "3"}, ("Worker", 3)),
        (MPIJOB, {f"{TO}replica-type": "launcher", f"{TO}job-role": "master"}, ("Launcher", 0)),  # training-operator
        (MPIJOB, {f"{TO}replica-type": "worker", f"{TO}replica-index": "1"}, ("Worker", 1)),
        (PYTORCHJOB, {}, ("pod", 0)),
        (PYTORCHJOB, {f"{TO}replica-index": "odd"}, ("pod", 0)),
    ],
)
def test_role_and_index_by_the_labels_of_every_operator(kind: Kind, labels: dict[str, str], role: Any) -> None:
    assert kind.pod_role(labels) == role


def test_replicas_and_their_counts() -> None:
    assert list(PYTORCHJOB.replicas(pytorchjob(3))) == ["Master", "Worker"]
    assert [PYTORCHJOB.count(pytorchjob(3), role) for role in ("Master", "Worker", "Chief")] == [1, 3, 0]
    bare: dict[str, Any] = {"spec": {"mpiReplicaSpecs": {"Launcher": {}, "Worker": {}}}}
    assert [MPIJOB.count(bare, role) for role in MPIJOB.roles] == [1, 0]
    assert PYTORCHJOB.count({"spec": {"pytorchReplicaSpecs": {"Worker": {}}}}, "Worker") == 1


@pytest.mark.parametrize("specs", [None, [], {"Worker": 3}])
def test_broken_specs_have_no_replicas(specs: Any) -> None:
    assert PYTORCHJOB.replicas({"spec": {"pytorchReplicaSpecs": specs}}) == {}
    assert PYTORCHJOB.replicas({"spec": None}) == PYTORCHJOB.replicas({}) == {}


def test_the_primary_is_the_first_that_the_job_has() -> None:
    workers = pytorchjob()
    del workers["spec"]["pytorchReplicaSpecs"]["Master"]
    assert PYTORCHJOB.primary(pytorchjob()) == "Master"
    assert PYTORCHJOB.primary(workers) == "Worker"
    assert MPIJOB.primary(mpijob()) == "Launcher"
    assert MPIJOB.primary({}) == "Launcher"


def test_kinds_by_name() -> None:
    assert kind_of("MPIJob") is MPIJOB
    assert MPIJOB.api_versions == ("kubeflow.org/v2beta1", "kubeflow.org/v1")
    assert all(name == kind.name and set(kind.primaries) <= set(kind.roles) for name, kind in KINDS.items())
    with pytest.raises(UnknownKindError, match=r"found 'TFJob'; expected one of MPIJob, PyTorchJob; remedy: ") as e:
        kind_of("TFJob")
    assert isinstance(e.value, ManifestError)
    with pytest.raises(UnknownKindError, match=r"remedy: did you mean PyTorchJob\?"):
        kind_of("PytorchJob")
    for nothing in (None, ""):
        with pytest.raises(UnknownKindError, match="found nothing"):
            kind_of(nothing)
