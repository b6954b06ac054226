"""`ktrain check --server` for TrainJobs: checks that depend on the runtime and on the version of the Trainer."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client, config

from airflow_provider_ktrain.core.kinds import TRAINJOB
from tests.clusters import TestCluster, require
from tests.core.manifests import runtime_patch, trainjob
from tests.job_control.conftest import Check


@pytest.fixture(autouse=True)
def runtime(cluster: TestCluster) -> None:
    require(cluster, TRAINJOB, runtime="torch-distributed")


SLOW = ("warning", "slow-failure")  # both runtimes restart programs that fail


def codes(problems: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(p["level"], p["code"]) for p in problems]


def patched(job: str, manager: str = "example.com/me", **pod: Any) -> dict[str, Any]:
    manifest = trainjob()
    manifest["spec"]["runtimePatches"] = [runtime_patch(manager, job, **pod)]
    return manifest


def test_valid_trainjob_is_not_created(cluster: TestCluster, check: Check) -> None:
    status, problems = check(patched("node", nodeSelector={"kubernetes.io/os": "linux"}), cluster)
    assert (status, codes(problems)) == (0, [SLOW])
    assert problems[0]["message"] == "a failing program is restarted for up to 5 minutes before the job fails"
    api = client.CustomObjectsApi(config.new_client_from_config(str(cluster.kubeconfig)))
    made = api.list_cluster_custom_object("trainer.kubeflow.org", "v1alpha1", "trainjobs")["items"]
    assert "train" not in [job["metadata"]["name"] for job in made]


@pytest.mark.parametrize("kind", ["ClusterTrainingRuntime", "TrainingRuntime"])
def test_missing_runtime_is_an_error(cluster: TestCluster, check: Check, kind: str) -> None:
    manifest = trainjob()
    manifest["spec"]["runtimeRef"] = {"name": "nosuch", "kind": kind}
    status, (problem,) = check(manifest, cluster)
    assert (status, problem["code"], problem["path"]) == (1, "runtime", "$.spec.runtimeRef")
    assert "nosuch does not exist" in problem["message"]
    assert f"{kind.lower()}s" in problem["hint"]


def test_unknown_runtime_is_compared_with_the_names_of_the_others(cluster: TestCluster, check: Check) -> None:
    manifest = trainjob()
    manifest["spec"]["runtimeRef"] = {"name": "torch-distribute"}
    status, (problem,) = check(manifest, cluster)
    assert (status, problem["code"]) == (1, "runtime")
    assert problem["hint"].startswith("did you mean torch-distributed")
    manifest["spec"]["runtimeRef"] = {"name": "x"}
    (problem,) = check(manifest, cluster)[1]
    assert problem["hint"].startswith("there are ")
    assert "torch-distributed" in problem["hint"]


def test_objects_that_a_trainjob_names_are_checked(cluster: TestCluster, check: Check) -> None:
    manifest = patched("node", volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "imagenet"}}])
    manifest["spec"]["trainer"]["env"] = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "a"}}}]
    manifest["spec"]["initializer"] = {"model": {"secretRef": {"name": "weights"}}}
    problems = [p for p in check(manifest, cluster)[1] if p["code"] == "reference"]
    assert sorted((p["found"], p["path"].rpartition("]")[0] or p["path"]) for p in problems) == [
        ("hub", "$.spec.trainer.env[0"),
        (
            "imagenet",
            "$.spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec.template.spec"
            ".volumes[0",
        ),
        ("weights", "$.spec.initializer.model.secretRef.name"),
    ]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (patched("worker", nodeSelector={"a": "b"}), "no job named worker"),
        (patched("node", containers=[{"name": "main", "volumeMounts": []}]), "no container named main"),
        (
            patched("node", containers=[{"name": "node", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]),
            "no volume named v",
        ),
    ],
)
def test_patches_that_the_server_accepts_and_never_runs_are_errors(
    cluster: TestCluster, check: Check, manifest: dict[str, Any], message: str
) -> None:
    status, problems = check(manifest, cluster)
    assert (status, codes(problems)) == (1, [("error", "runtime-patch"), SLOW])
    assert message in problems[0]["message"]


def test_reserved_variables_are_an_error_on_the_runtime_that_reserves_them(cluster: TestCluster, check: Check) -> None:
    manifest = trainjob(env=[{"name": "PET_NNODES", "value": "3"}])
    status, problems = check(manifest, cluster)
    assert (status, codes(problems)) == (1, [("error", "reserved-env"), SLOW, ("warning", "reserved-env")])


def test_number_of_nodes_is_compared_with_an_mpi_runtime(cluster: TestCluster, check: Check) -> None:
    manifest = trainjob(nodes=1)
    manifest["spec"]["runtimeRef"]["name"] = "mpi-distributed"
    status, problems = check(manifest, cluster)
    assert status == 0
    assert sorted(codes(problems)) == [("warning", "node-count"), SLOW, SLOW, ("warning", "trainer-scope")]


def test_unknown_fields_are_refused(cluster: TestCluster, check: Check) -> None:
    status, problems = check(trainjob(nodesPerJob=2), cluster)
    assert status == 1
    assert ("error", "unknown-field") in codes(problems)


def test_a_broken_patch_is_reported_by_its_type(cluster: TestCluster, check: Check) -> None:
    status, problems = check(patched("node", containers="main"), cluster)
    assert (status, codes(problems)) == (1, [("error", "type")])
