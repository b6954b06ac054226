"""All kinds have one interface, and code outside `core/kinds` doesn't depend on a kind's name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import airflow_provider_ktrain
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds import KINDS, MPIJOB, PYTORCHJOB, Kind, kind_of
from airflow_provider_ktrain.engine.job_control import keeps_world_size

from .manifests import mpijob, pytorchjob

LABEL_PREFIX = "training.kubeflow.org/"


@pytest.mark.parametrize(
    ("kind", "labels", "role"),
    [
        (
            PYTORCHJOB,
            {
                f"{LABEL_PREFIX}replica-type": "master",
                f"{LABEL_PREFIX}replica-index": "0",
                f"{LABEL_PREFIX}job-role": "master",
            },
            ("Master", 0),
        ),
        (PYTORCHJOB, {f"{LABEL_PREFIX}replica-type": "worker", f"{LABEL_PREFIX}replica-index": "14"}, ("Worker", 14)),
        # 1.8+: worker 0 of a job without a Master has job-role=master
        (
            PYTORCHJOB,
            {
                f"{LABEL_PREFIX}replica-type": "worker",
                f"{LABEL_PREFIX}replica-index": "0",
                f"{LABEL_PREFIX}job-role": "master",
            },
            ("Worker", 0),
        ),
        (MPIJOB, {f"{LABEL_PREFIX}job-role": "launcher"}, ("Launcher", 0)),  # mpi-operator sets no replica-type
        (MPIJOB, {f"{LABEL_PREFIX}job-role": "worker", f"{LABEL_PREFIX}replica-index": "3"}, ("Worker", 3)),
        (
            MPIJOB,
            {f"{LABEL_PREFIX}replica-type": "launcher", f"{LABEL_PREFIX}job-role": "master"},
            ("Launcher", 0),
        ),  # training-operator
        (MPIJOB, {f"{LABEL_PREFIX}replica-type": "worker", f"{LABEL_PREFIX}replica-index": "1"}, ("Worker", 1)),
        (PYTORCHJOB, {}, ("pod", 0)),
        (PYTORCHJOB, {f"{LABEL_PREFIX}replica-index": "odd"}, ("pod", 0)),
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
    with pytest.raises(ManifestError, match=r"found 'TFJob'; expected one of MPIJob, PyTorchJob, TrainJob; remedy: "):
        kind_of("TFJob")
    with pytest.raises(ManifestError, match=r"^kind: did you mean PyTorchJob\? unsupported kind"):
        kind_of("PytorchJob")
    for nothing in (None, ""):
        with pytest.raises(ManifestError, match="found nothing"):
            kind_of(nothing)


# ---- scaling


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, (1, None)),
        ({"minReplicas": 1, "maxReplicas": 4}, (1, 4)),
        ({"maxReplicas": 4}, (4, 4)),
        ({"minReplicas": 2}, (2, 2)),
        ({}, (1, None)),
    ],
)
def test_worker_bounds_of_a_pytorchjob_come_from_its_elastic_policy(
    policy: Any, expected: tuple[int, int | None]
) -> None:
    job = {"spec": {"elasticPolicy": policy}}
    assert PYTORCHJOB.scaling.worker_bounds(job) == expected
    assert PYTORCHJOB.scaling.is_elastic(job) is (policy is not None)


@pytest.mark.parametrize(
    ("command", "slots", "expected"),
    [
        (["mpirun", "-np", "2", "python"], 1, (0, None)),
        (["horovodrun", "--min-np", "1", "--max-np", "4", "python"], 1, (1, 4)),
        (["horovodrun", "--min-np=3", "--max-np=9", "python"], 2, (2, 4)),
        (["horovodrun", "--min-num-proc", "2", "--max-num-proc", "8"], 2, (1, 4)),
        (["horovodrun", "--max-np", "$MAX"], 1, (0, None)),
    ],
)
def test_worker_bounds_of_an_mpijob_count_processes(
    command: list[str], slots: int, expected: tuple[int, int | None]
) -> None:
    launcher = {"template": {"spec": {"containers": [{"command": command[:1], "args": command[1:]}]}}}
    job = {"spec": {"slotsPerWorker": slots, "mpiReplicaSpecs": {"Launcher": launcher}}}
    assert MPIJOB.scaling.worker_bounds(job) == expected
    assert MPIJOB.scaling.is_elastic(job) is (expected != (0, None))


def test_a_job_with_a_master_and_no_elastic_policy_keeps_its_world_size() -> None:
    job = pytorchjob()
    assert keeps_world_size(PYTORCHJOB, job)
    job["spec"]["elasticPolicy"] = {}
    assert not keeps_world_size(PYTORCHJOB, job)
    del job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Master"]
    assert not keeps_world_size(PYTORCHJOB, job)
    assert not keeps_world_size(MPIJOB, mpijob())


# ---- the operators


@pytest.mark.parametrize(
    ("kind", "version", "policies", "limited", "recreates"),
    [
        (PYTORCHJOB, "v1", ("Always", "OnFailure", "Never", "ExitCode"), False, False),
        (MPIJOB, "v1", ("Always", "OnFailure", "Never"), False, False),
        (MPIJOB, "v2beta1", ("OnFailure", "Never"), True, True),
    ],
)
def test_served_version_determines_operator_behaviour(
    kind: Kind, version: str, policies: tuple[str, ...], limited: bool, recreates: bool
) -> None:
    operator = kind.operator_of(version)
    assert operator.restart_policies == policies
    assert operator.limits_restarts is limited
    assert operator.recreates_pods is operator.rejects_after_creation is recreates


# ---- code that differs between kinds is in core/kinds

PACKAGE = Path(airflow_provider_ktrain.__file__).parent
VALUES = {*KINDS, *(version for kind in KINDS.values() for version in kind.versions if version != "v1")}
CONSTANTS = {name.upper() for name in KINDS}


def is_kind_name(node: ast.AST | None) -> bool:
    """Whether an expression is a kind's name, its constant (`MPIJOB`, `MPIJOB.name`) or an API version of its own."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(is_kind_name(member) for member in node.elts)
    if isinstance(node, ast.Attribute):
        return node.attr in CONSTANTS or is_kind_name(node.value)
    if isinstance(node, ast.Name):
        return node.id in CONSTANTS
    return isinstance(node, ast.Constant) and str(node.value).rpartition("/")[2] in VALUES


def kind_comparisons(code: str) -> list[int]:
    """The lines in which code depends on the name or the version of a kind."""
    found = []
    for node in ast.walk(ast.parse(code)):
        operands: list[Any] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            operands = node.keys
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            operands = node.args if node.func.attr in ("startswith", "endswith") else []
        if any(map(is_kind_name, operands)):
            found.append(operands[0].lineno)
    return found


@pytest.mark.parametrize(
    "code",
    [
        'kind.name == "MPIJob"',
        "kind != 'PyTorchJob'",
        "kind is MPIJOB",
        "kind.name == kinds.PYTORCHJOB.name or x",
        'kind in ("MPIJob", other)',
        '(kind, version) == ("x", "v2beta1")',
        'api_version.endswith("/v2beta1")',
        '{"MPIJob": "slotsPerWorker"}[name]',
        'match kind:\n  case "PyTorchJob": pass',
    ],
)
def test_comparisons_with_a_kind_are_recognized(code: str) -> None:
    assert kind_comparisons(code)


def test_no_kind_is_compared_outside_core_kinds() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if not file.is_relative_to(PACKAGE / "core/kinds")]
    assert len(files) > 50
    found = [f"{file.relative_to(PACKAGE)}:{line}" for file in files for line in kind_comparisons(file.read_text())]
    assert found == []
