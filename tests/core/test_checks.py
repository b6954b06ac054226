"""Each mistake is reported once, at its path, with a remedy; valid manifests have no problems."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.checks import Problem, check, raise_errors, rules
from airflow_provider_ktrain.core.checks.trainjob_rules import judge_runtime
from airflow_provider_ktrain.core.errors import ManifestError, RuntimeMismatchError
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.kinds.trainjob.patches import expand
from airflow_provider_ktrain.core.manifest.schema import published, schema_of
from airflow_provider_ktrain.manifests import load
from tests.tables import table

from .manifests import DATA, GUIDES, JSON, mpijob, pytorchjob, runtime_patch, trainjob

MASTER = "$.spec.pytorchReplicaSpecs.Master.template.spec"
WORKER = "$.spec.pytorchReplicaSpecs.Worker.template.spec"

Change = Callable[[dict[str, Any]], object]


def put(path: str, value: Any) -> Change:
    """A change of a manifest: sets `a.b.0.c` to a value; None removes it."""

    def change(manifest: dict[str, Any]) -> None:
        *parents, last = (key.replace("|", "/") for key in path.split("/"))
        here: Any = manifest
        for key in parents:
            here = here[int(key)] if isinstance(here, list) else here.setdefault(key, {})
        if value is None:
            del here[last]
        elif isinstance(here, list):
            here[int(last)] = value
        else:
            here[last] = value

    return change


def found(manifest: Any, **kwargs: Any) -> list[tuple[str, str, str]]:
    return [(str(p.level), p.code, p.path) for p in check(manifest, **kwargs)]


def changed(manifest: dict[str, Any], *changes: Change) -> dict[str, Any]:
    for change in changes:
        change(manifest)
    return manifest


PROBLEMS_OF_GUIDES = {
    "practitioner-nccl.yaml": [
        ("error", "container-name", f"{MASTER}.containers[0].name"),
        ("error", "container-name", f"{WORKER}.containers[0].name"),
        ("error", "wrong-list", f"{WORKER}.containers[0].volumeMounts[5]"),
        ("error", "wrong-list", f"{WORKER}.containers[0].volumeMounts[6]"),
        ("warning", "nccl-without-gpus", f"{MASTER}.containers[0].env[4]"),
        ("warning", "world-size", f"{MASTER}.containers[0].args[11]"),
        ("warning", "world-size", f"{WORKER}.containers[0].args[11]"),
        ("warning", "endless-restarts", "$.spec.runPolicy.backoffLimit"),
    ],
    "pytorch-operator-guide.yaml": [
        ("error", "image", f"{MASTER}.containers[0].image"),
        ("error", "image", f"{WORKER}.containers[0].image"),
        ("warning", "shm", f"{MASTER}.containers[0].volumeMounts"),
        ("warning", "shm", f"{WORKER}.containers[0].volumeMounts"),
        ("warning", "endless-restarts", "$.spec.runPolicy.backoffLimit"),
    ],
    "torchrun-cpu.yaml": [
        ("warning", "image-tag", f"{MASTER}.containers[0].image"),
        ("warning", "endless-restarts", "$.spec.runPolicy.backoffLimit"),
    ],
    "mpi-operator-guide.yaml": [
        (
            "warning",
            "horovod-cooldown",
            f"{MASTER.replace('pytorch', 'mpi').replace('Master', 'Launcher')}.containers[0].args[2]",
        ),
    ],
}
PROBLEMS_OF_GUIDES["pytorch-guide.yaml"] = PROBLEMS_OF_GUIDES["pytorch-operator-guide.yaml"]


@pytest.mark.parametrize("guide", GUIDES)
def test_manifests_of_guides_have_exactly_these_problems(guide: str) -> None:
    assert found(load(DATA / guide)) == PROBLEMS_OF_GUIDES[guide]


def test_entry_in_the_wrong_list_has_a_remedy() -> None:
    problem = check(load(DATA / "practitioner-nccl.yaml"))[2]
    assert (problem.message, problem.found, problem.expected, problem.hint) == (
        "NCCL_DEBUG is in volumeMounts, but is an entry of env",
        "{name, value}",
        "{name, mountPath}",
        "move it to env",
    )


@pytest.mark.parametrize("manifest", [pytorchjob(), mpijob("v1"), mpijob("v2beta1"), trainjob()])
def test_valid_manifest_has_no_problems(manifest: dict[str, Any]) -> None:
    assert check(manifest) == []
    assert check(manifest, kind=manifest["kind"]) == []


MISTAKES = table(Path(__file__).parent / "mistakes.yaml")
ROWS = [(job, name, row) for job, rows in MISTAKES.items() for name, row in rows.items()]


@pytest.mark.parametrize(("job", "name", "row"), ROWS, ids=[f"{job}: {name}" for job, name, _ in ROWS])
def test_each_mistake_is_reported_once_and_alone(job: str, name: str, row: dict[str, Any]) -> None:
    kind, version = job.split()
    manifest = {"PyTorchJob": pytorchjob, "TrainJob": trainjob}[kind]() if kind != "MPIJob" else mpijob(version)
    specs = "pytorchReplicaSpecs" if kind == "PyTorchJob" else "mpiReplicaSpecs"
    for path, value in row["change"].items():
        put(place(path, specs), value)(manifest)
    expected = [(level, code, json_path(path, specs)) for level, code, path in (f.split() for f in row["found"])]
    assert found(manifest) == expected
    assert [str(p) for p in check(manifest) if not p.hint] == []


def place(path: str, specs: str) -> str:
    full = f"spec/{specs}/{path}" if path[0].isupper() or path.startswith("launcher") else path
    full = re.sub(r"/container\b", "/template/spec/containers/0", full, count=1)
    return re.sub(r"/pod\b", "/template/spec", full, count=1)


def json_path(path: str, specs: str) -> str:
    full = path if path.startswith("$") else f"$.spec.{specs}.{path}"
    return re.sub(r"\.container\b", ".template.spec.containers[0]", re.sub(r"\.pod\b", ".template.spec", full, count=1))


def test_every_rule_has_a_mistake() -> None:
    reported = {text.split()[1] for _, _, row in ROWS for text in row["found"]}
    assert {r.code for r in rules()} - reported == set()


MASTER_SPEC, CONTAINER = "spec/pytorchReplicaSpecs/Master", "spec/pytorchReplicaSpecs/Master/template/spec/containers/0"


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ([put("kind", "PytorchJob")], "did you mean PyTorchJob?"),
        ([put("spec/pytorchReplicaSpecs/master", {})], "did you mean Master?"),
        ([put(f"{CONTAINER}/volumemounts", [])], "did you mean `volumeMounts`?"),
        ([put(f"{CONTAINER}/image_pull_policy", "x")], "did you mean `imagePullPolicy`?"),
        ([put(f"{CONTAINER}/volumes", [])], "`volumes` belongs in the pod's spec, beside containers"),
        ([put(f"{CONTAINER}/nodeSelector", {})], "`nodeSelector` belongs in the pod's spec, beside containers"),
        ([put(f"{CONTAINER}/limits", {})], "`limits` belongs under the container's resources"),
        ([put(f"{MASTER_SPEC}/suspend", True)], "`suspend` belongs under spec.runPolicy"),
        ([put(f"{CONTAINER}/env", [{"name": "A", "value": 1}])], 'quote it: "1"'),
        ([put(f"{CONTAINER}/env", [{"name": "A", "value": True}])], 'quote it: "true"'),
        ([put(f"{CONTAINER}/env", {"A": "b"})], "write each entry as an item of a list: `- name: ...`"),
        ([put(f"{CONTAINER}/command", "python x.py")], 'write it as a list: ["sh", "-c", ...]'),
        ([put("spec/pytorchReplicaSpecs/Worker/replicas", "2")], "write it without quotes"),
        ([put(f"{CONTAINER}/resources/nvidia.com|gpu", 1)], "write an extended resource under resources.limits"),
    ],
)
def test_problems_have_hints(changes: list[Change], hint: str) -> None:
    assert hint in [p.hint for p in check(changed(pytorchjob(), *changes))]


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("spec/trainer/resources", "did you mean `resourcesPerNode`?"),
        ("spec/numNodes", "`numNodes` belongs under spec.trainer"),
        ("spec/trainer/volumes", "`volumes` belongs in the pod's spec of a runtimePatches entry"),
        ("spec/trainer/volumeMounts", "`volumeMounts` belongs in a container of a runtimePatches entry"),
        ("spec/trainer/suspend", "`suspend` belongs under spec"),
    ],
)
def test_hints_of_a_trainjob_name_its_own_fields(place: str, hint: str) -> None:
    assert [p.hint for p in check(changed(trainjob(), put(place, {})))] == [hint]


def test_text_in_place_of_a_number_is_quoted() -> None:
    (problem,) = check(changed(trainjob(), put("spec/trainer/numNodes", "2")))
    assert (problem.found, problem.hint) == ("'2'", "write it without quotes")


def test_unknown_field_names_the_consequence_and_a_similar_field() -> None:
    """A create is strict: the server rejects unknown fields instead of dropping them."""
    manifest = changed(pytorchjob(), put(f"{CONTAINER}/imagePullPolice", "x"))
    (ours,) = check(manifest)
    assert ours.message == "unknown field `imagePullPolice`: the API server will probably reject it"
    assert str(ours).endswith(f".imagePullPolice: did you mean `imagePullPolicy`? {ours.message}")
    (servers,) = check(changed(pytorchjob(), put("metadata/nmae", "x")), schema=SERVER)
    assert servers.message == "unknown field `nmae`: the API server will reject it"


def test_message_names_a_field_with_dots_in_full() -> None:
    (problem,) = check(changed(pytorchjob(), put(f"{CONTAINER}/resources/limits", {"nvidia.com/gpu": [1]})))
    assert problem.message == "`nvidia.com/gpu` has the wrong type"


def test_unexpected_kind_is_reported_once() -> None:
    (problem,) = check(mpijob(), kind="PyTorchJob")
    assert (problem.code, problem.found, problem.expected) == ("kind", "'MPIJob'", "PyTorchJob")
    assert problem.hint == "use MPIJobOperator for it"


# ---- the recordings: the responses of a real API server, webhook and operator to manifests with mistakes

SENT = json.loads((Path(__file__).parent / "recordings" / "rejected.json").read_text())
REJECTED = [record for record in SENT if record["status"] != 201]
PRUNED = {"unknown-field"}  #: 400 under strict validation, accepted and pruned by default.


@pytest.mark.parametrize("record", REJECTED, ids=[r["manifest"]["metadata"]["name"][-24:] for r in REJECTED])
def test_manifests_that_a_real_cluster_rejected_have_problems(record: dict[str, Any]) -> None:
    problems = [p for p in check(record["manifest"]) if p.code != "suspended"]  # the recordings suspend them on purpose
    assert problems, record["message"]
    assert [p for p in problems if p.level == "error" or p.code in PRUNED] == problems


@pytest.mark.parametrize(
    "name", ["policy", "none", "nolauncher", "twolaunchers", "badpolicy", "exitcode", "always", "zero"]
)
def test_manifests_that_were_accepted_and_never_ran_have_errors(name: str) -> None:
    records = [r for r in SENT if r["manifest"]["metadata"]["name"] == name]
    assert records
    assert all(any(p.level == "error" for p in check(r["manifest"])) for r in records)


# ---- the schema that a server publishes

SERVER = {
    "$ref": "#/components/schemas/Job",
    "components": {
        "schemas": {
            "Job": {
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"allOf": [{"$ref": "#/components/schemas/Meta"}]},
                    "spec": {
                        "x-kubernetes-preserve-unknown-fields": True,
                        "properties": {"nprocPerNode": {"type": "string"}},
                    },
                }
            },
            "Meta": {"properties": {"name": {"type": "string"}}},
        }
    },
}


def test_schema_of_the_server_is_applied_strictly() -> None:
    assert found(pytorchjob(), schema=SERVER) == []
    manifest = changed(pytorchjob(), put("metadata/nmae", "x"), put("spec/new", 1), put("spec/nprocPerNode", 2))
    assert found(manifest, schema=SERVER) == [
        ("error", "unknown-field", "$.metadata.nmae"),
        ("error", "type", "$.spec.nprocPerNode"),
    ]


def test_duplicate_env_is_an_error_only_with_the_schema_of_the_server() -> None:
    """CRDs of training-operator before 1.9 use the last one."""
    env = {"type": "array", "items": {}, "x-kubernetes-list-map-keys": ["name"]}
    schema = {"properties": {"spec": {"properties": {"env": env}}}}
    manifest = changed(pytorchjob(), put("spec/env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]))
    assert ("error", "duplicate", "$.spec.env[1]") in found(manifest, schema=schema)


def test_null_values_have_no_problems() -> None:
    assert found(changed(pytorchjob(), lambda m: m["metadata"].update(nothing=None)), schema=SERVER) == []


def test_schema_of_a_kind_is_read_from_the_openapi_document() -> None:
    job: dict[str, Any] = SERVER["components"]["schemas"]["Job"]  # type: ignore[index]
    named = job | {
        "x-kubernetes-group-version-kind": [{"group": "kubeflow.org", "version": "v1", "kind": "PyTorchJob"}]
    }
    meta = SERVER["components"]["schemas"]["Meta"]  # type: ignore[index]
    document = {"components": {"schemas": {"Meta": meta, "Job": named}}}
    assert found(pytorchjob(), schema=published(document, "PyTorchJob", "kubeflow.org/v1")) == []
    assert published(document, "PyTorchJob", "kubeflow.org/v2") is None
    assert published({}, "PyTorchJob", "kubeflow.org/v1") is None


def test_built_in_schema_compiles() -> None:
    for kind, version in (("PyTorchJob", "v1"), ("MPIJob", "v1"), ("MPIJob", "v2beta1")):
        assert schema_of(kind, version)["properties"]["spec"]["properties"]["runPolicy"]["type"] == "object"


# ---- robustness

PLACES = [
    (),
    ("spec",),
    ("metadata",),
    ("spec", "runPolicy"),
    ("spec", "elasticPolicy"),
    ("spec", "pytorchReplicaSpecs"),
    ("spec", "pytorchReplicaSpecs", "Worker"),
    ("spec", "pytorchReplicaSpecs", "Worker", "replicas"),
    ("spec", "pytorchReplicaSpecs", "Worker", "template"),
    ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec"),
    ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers"),
    ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0),
    *(
        ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0, key)
        for key in ("image", "command", "args", "env", "volumeMounts", "resources", "name", "ports")
    ),
    ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "volumes"),
]


@given(st.sampled_from(PLACES), JSON)
def test_broken_manifests_can_be_checked(place: tuple[str | int, ...], value: Any) -> None:
    check_broken(pytorchjob(), place, value)


RUNTIME = {
    "spec": {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": {
        "containers": [{"name": "node"}], "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}],
    }}}}}]}}}
}  # fmt: skip
PATCH = ("spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
PATCHED_POD = (*PATCH, 0, "template", "spec", "template", "spec")
TRAINJOB_PLACES: list[tuple[str | int, ...]] = [
    *(PATCHED_POD[:length] for length in range(1, len(PATCHED_POD) + 1)),
    (*PATCHED_POD, "containers"),
    (*PATCHED_POD, "containers", 0, "name"),
    (*PATCHED_POD, "containers", 0, "env"),
    *(("spec", "trainer", key) for key in ("env", "image", "command", "numNodes", "resourcesPerNode")),
    *(("spec", "runtimeRef", key) for key in ("name", "kind", "apiGroup")),
    ("spec", "runtimeRef"),
    ("spec", "trainer"),
]


@given(st.sampled_from(TRAINJOB_PLACES), JSON)
@example((*PATCH, 0), None)
def test_broken_trainjobs_can_be_checked(place: tuple[str | int, ...], value: Any) -> None:
    job = trainjob()
    job["spec"]["runtimePatches"] = [runtime_patch("example.com/me", "node", containers=[{"name": "node", "env": []}])]
    broken, problems = check_broken(job, place, value)
    if not isinstance(broken, dict) or any(p.code == "type" for p in problems):
        return  # this value isn't compared with the runtime
    assert all(p.path.startswith("$") for p in judge_runtime(broken, RUNTIME, 33))
    with contextlib.suppress(RuntimeMismatchError):
        expand(broken, Served(True, RUNTIME), name_length=33)


def check_broken(job: Any, place: tuple[str | int, ...], value: Any) -> tuple[Any, list[Problem]]:
    """Check a job with this value at a path; returns the job and its problems."""
    manifest: Any = {"root": job}
    here, last = manifest, "root"
    for key in place:
        here, last = here[last], key  # type: ignore[assignment]
    here[last] = value
    job = manifest["root"]
    before = copy.deepcopy(job)
    problems = check(job)
    assert job == before
    assert all(p.path.startswith("$") and p.message and str(p) for p in problems)
    assert len({(p.code, p.path) for p in problems}) == len(problems)
    return job, problems


def test_errors_are_raised_together() -> None:
    raise_errors(check(pytorchjob()))
    raise_errors(check(load(DATA / "torchrun-cpu.yaml")))  # a manifest with only warnings is submitted
    with pytest.raises(ManifestError) as e:
        raise_errors(check(load(DATA / "practitioner-nccl.yaml")))
    text = str(e.value)
    assert text.startswith(f"{MASTER}.containers[0].name: Master has no container named pytorch")
    assert "found cuda1; expected pytorch\nremedy: rename" in text
    assert text.count("\n") == 4
    assert "move it to env" in text
