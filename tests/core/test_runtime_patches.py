from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.errors import RuntimeMismatchError
from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.kinds.trainjob.patches import (
    ANY_JOB,
    MANAGER,
    PATCHES,
    ROLES_ANNOTATION,
    SUCCESS_POLICY_ANNOTATION,
    expand,
    patched_template,
)
from airflow_provider_ktrain.core.manifest.deadline import backstop
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, overlay
from airflow_provider_ktrain.core.manifest.transform import stamp
from airflow_provider_ktrain.volumes import SharedMemory

from . import manifests
from .manifests import runtime_patch as patch

Json = dict[str, Any]
NAME_LENGTH = 33


def trainjob(**spec: Any) -> Json:
    manifest = manifests.trainjob()
    del manifest["metadata"]["name"]
    manifest["spec"] = {"runtimeRef": {"name": "r"}, "trainer": {"command": ["train"]}, **spec}
    return manifest


def runtime(*jobs: Json, **policy: Any) -> Json:
    return {"spec": {"mlPolicy": {"numNodes": 1, **policy}, "template": {"spec": {"replicatedJobs": list(jobs)}}}}


def replicated(name: str, *containers: str, **pod: Any) -> Json:
    spec = {"containers": [{"name": c, "image": "i:1"} for c in containers or ("node",)], **pod}
    return {"name": name, "template": {"spec": {"template": {"spec": spec}}}}


def expanded(manifest: Json, options: JobOptions, of: Json, *, supported: bool = True) -> Json:
    return expand(overlay(manifest, options), Served(supported, of), name_length=NAME_LENGTH)


def pods(manifest: Json, of: Json) -> dict[str, Json]:
    """The pod specs that the Trainer would create, by replicated job."""
    jobs = patched_template(manifest, of)["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}


def managers(manifest: Json) -> list[str]:
    return [entry["manager"] for entry in manifest["spec"].get(PATCHES) or ()]


# options become patches of the runtime

TORCH = runtime(replicated("node"))
MPI = runtime(replicated("node"), replicated("launcher"), mpi={"runLauncherAsNode": True})
INITIALIZED = runtime(replicated("dataset-initializer", "dataset-initializer"), replicated("node"))


@pytest.mark.parametrize(
    ("trainer", "policy", "supported", "nodes"),
    [
        ({}, {"numNodes": 3}, True, 3),
        ({}, {"numNodes": 3}, False, 3),
        ({"numNodes": 2}, {"numNodes": 3}, True, 2),
        ({}, {"numNodes": None}, True, None),
    ],
)
def test_a_job_without_num_nodes_gets_the_runtimes(
    trainer: Json, policy: Json, supported: bool, nodes: int | None
) -> None:
    """Its size is read from the job: for the logs to follow, for crash loops and for the summary."""
    manifest = expanded(
        trainjob(trainer=trainer), JobOptions(), runtime(replicated("node"), **policy), supported=supported
    )
    assert manifest["spec"]["trainer"].get("numNodes") == nodes
    assert TRAINJOB.size(manifest) == (nodes or 1)


@pytest.mark.parametrize("supported", [True, False])
def test_the_jobs_of_the_runtime_are_noted(supported: bool) -> None:
    """The status lists them only later."""
    manifest = expanded(trainjob(), JobOptions(), MPI, supported=supported)
    assert manifest["metadata"]["annotations"][ROLES_ANNOTATION] == "node,launcher"
    assert SUCCESS_POLICY_ANNOTATION not in manifest["metadata"]["annotations"]
    of = copy.deepcopy(MPI)
    of["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["successPolicy"] = {
        "rules": [{"succeededIndexes": "0"}]
    }
    assert expanded(trainjob(), JobOptions(), of)["metadata"]["annotations"][SUCCESS_POLICY_ANNOTATION] == "node"
    assert TRAINJOB.primary(manifest) == "launcher"
    assert {role: TRAINJOB.count(manifest, role) for role in TRAINJOB.replicas(manifest)} == {"node": 1, "launcher": 1}


@pytest.mark.parametrize(("as_node", "nodes"), [(True, 4), (False, 3)])
def test_number_of_nodes_of_an_mpi_runtime_is_that_of_its_job_node(as_node: bool, nodes: int) -> None:
    """With runLauncherAsNode the launcher is one more node."""
    of = runtime(replicated("node"), replicated("launcher"), mpi={"runLauncherAsNode": as_node})
    of["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = 3
    assert expanded(trainjob(trainer={}), JobOptions(), of)["spec"]["trainer"]["numNodes"] == nodes


def test_options_of_the_program_need_no_patch() -> None:
    options = JobOptions(image="i:2", command=["a"], args=["b"], env={"A": "1"}, gpus=2, replicas={"node": 3})
    result = overlay(trainjob(), options)
    assert result["spec"]["trainer"] == {
        "image": "i:2",
        "command": ["a"],
        "args": ["b"],
        "env": [{"name": "A", "value": "1"}],
        "numNodes": 3,
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 2}},
    }
    assert PATCHES not in expand(result, Served(False, TORCH), name_length=NAME_LENGTH)["spec"]


def test_each_job_of_the_runtime_gets_node_selection_and_labels() -> None:
    options = JobOptions(node_selector={"pool": "gpu"}, labels={"team": "a"})
    result = stamp(expanded(trainjob(), options, INITIALIZED), "n", "ns", {"ktrain.airflow/submission": "s"})
    assert {pod["nodeSelector"]["pool"] for pod in pods(result, INITIALIZED).values()} == {"gpu"}
    templates = [
        job["template"]["spec"]["template"] for job in patched_template(result, INITIALIZED)["spec"]["replicatedJobs"]
    ]
    assert [t["metadata"]["labels"] for t in templates] == [{"team": "a", "ktrain.airflow/submission": "s"}] * 2


def test_volumes_are_mounted_where_the_trainer_runs() -> None:
    result = pods(expanded(trainjob(), JobOptions(volumes=[SharedMemory("1Gi")]), INITIALIZED), INITIALIZED)
    assert result["node"]["containers"] == [
        {"name": "node", "image": "i:1", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
    ]
    assert [v["name"] for v in result["node"]["volumes"]] == ["shm"]
    assert "volumes" not in result["dataset-initializer"]


def test_hosts_are_required_beside_the_terms_of_the_runtime() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    of = runtime(replicated("node", affinity=affinity))
    pod = pods(expanded(trainjob(), JobOptions(hosts=["n1"]), of), of)["node"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [[e["key"] for e in t["matchExpressions"]] for t in required["nodeSelectorTerms"]] == [
        ["zone", "kubernetes.io/hostname"]
    ]


TOLERATIONS = st.lists(st.sampled_from([{"key": k, "operator": "Exists"} for k in "abc"]), unique_by=lambda t: t["key"])
SELECTORS = st.dictionaries(st.sampled_from(["pool", "zone", "disk"]), st.sampled_from(["x", "y"]))
JOBS = st.lists(
    st.builds(
        lambda name, tolerations, selector, container: replicated(
            name, container, tolerations=tolerations, nodeSelector=selector, serviceAccountName="trainer"
        ),
        st.sampled_from(["node", "launcher", "dataset-initializer", "extra"]),
        TOLERATIONS,
        SELECTORS,
        st.sampled_from(["node", "other"]),
    ),
    min_size=1,
    unique_by=lambda job: str(job["name"]),
)


@given(JOBS, TOLERATIONS, SELECTORS)
def test_patches_add_options_and_keep_the_template(
    jobs: list[Json], tolerations: list[Json], node_selector: Json
) -> None:
    of = runtime(*jobs)
    before = pods(trainjob(), of)
    result = expanded(
        trainjob(), JobOptions(tolerations=tolerations, node_selector=node_selector, labels={"l": "1"}), of
    )
    for name, pod in pods(result, of).items():
        assert pod["nodeSelector"] == {**before[name]["nodeSelector"], **node_selector}
        expected = {t["key"] for t in [*before[name]["tolerations"], *tolerations]}
        assert sorted(t["key"] for t in pod["tolerations"]) == sorted(expected)
        assert {k: v for k, v in pod.items() if k not in ("nodeSelector", "tolerations")} == {
            k: v for k, v in before[name].items() if k not in ("nodeSelector", "tolerations")
        }


ENTRIES = st.lists(
    st.builds(
        lambda manager, selector: patch(manager, "node", nodeSelector=selector),
        st.sampled_from(["example.com/me", "kueue.x-k8s.io/manager", "example.com/other"]),
        SELECTORS,
    ),
    unique_by=lambda entry: str(entry["manager"]),
)


@given(ENTRIES, SELECTORS)
def test_entries_of_other_managers_stay_as_they_are(entries: list[Json], selector: Json) -> None:
    manifest = trainjob(**({PATCHES: entries} if entries else {}))
    result = expanded(manifest, JobOptions(node_selector=selector, labels={"l": "1"}), TORCH)
    assert [e for e in result["spec"][PATCHES] if e["manager"] != MANAGER] == entries
    assert managers(result).count(MANAGER) == 1
    again = expand(copy.deepcopy(result), Served(True, TORCH), name_length=NAME_LENGTH)
    assert pods(again, TORCH) == pods(result, TORCH)
    assert managers(again) == managers(result)


def test_an_entry_of_our_manager_in_the_manifest_is_merged() -> None:
    manifest = trainjob(runtimePatches=[patch(MANAGER, "node", nodeSelector={"zone": "a"})])
    result = expanded(manifest, JobOptions(node_selector={"pool": "b"}), TORCH)
    assert managers(result) == [MANAGER]
    assert pods(result, TORCH)["node"]["nodeSelector"] == {"zone": "a", "pool": "b"}


def test_the_placeholder_is_never_sent() -> None:
    options = JobOptions(node_selector={"a": "b"})
    assert ANY_JOB not in str(expanded(trainjob(), options, MPI))
    assert ANY_JOB not in str(expand(overlay(trainjob(), JobOptions(env={"A": "1"})), Served(), name_length=9))


# what can't be read


def test_without_the_schema_there_is_no_backstop() -> None:
    assert "activeDeadlineSeconds" not in backstop(trainjob(), 60, served=Served(False, TORCH))["spec"]
    assert backstop(trainjob(), 60, served=Served(True, TORCH))["spec"]["activeDeadlineSeconds"] == 60


@pytest.mark.parametrize(
    "served", [Served(True, None, "no right to get clustertrainingruntimes"), Served(False, TORCH)]
)
def test_without_schema_or_runtime_nothing_is_patched(served: Served) -> None:
    plain = overlay(trainjob(), JobOptions(image="i:2"))
    assert PATCHES not in stamp(expand(plain, served, name_length=33), "n", "ns", {"l": "1"})["spec"]
    with pytest.raises(RuntimeMismatchError, match="nodeSelector can't be applied"):
        expand(overlay(trainjob(), JobOptions(node_selector={"a": "b"})), served, name_length=33)


def test_entries_of_the_manifest_are_sent_without_a_right_to_read_the_runtime() -> None:
    manifest = trainjob(runtimePatches=[patch("example.com/me", "node", nodeSelector={"a": "b"})])
    assert expand(manifest, Served(True, None, "no right"), name_length=33) == manifest


# replicated jobs and containers that the runtime doesn't have (recordings 55b, 55d)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (patch("example.com/me", "worker", nodeSelector={"a": "b"}), "no job named worker"),
        (patch("example.com/me", "node", containers=[{"name": "main"}]), "no container named main"),
        (patch("example.com/me", "node", initContainers=[{"name": "node"}]), "no container named node in initContain"),
        (
            patch("example.com/me", "node", containers=[{"name": "node", "volumeMounts": [{"name": "v"}]}]),
            "no volume named v",
        ),
    ],
)
def test_patches_of_what_the_runtime_does_not_have_are_refused(entry: Json, message: str) -> None:
    with pytest.raises(RuntimeMismatchError, match=message):
        expanded(trainjob(runtimePatches=[entry]), JobOptions(), TORCH)


def test_volumes_need_a_container_of_the_trainer() -> None:
    with pytest.raises(RuntimeMismatchError, match="no container named node"):
        expanded(trainjob(), JobOptions(volumes=[SharedMemory()]), runtime(replicated("node", "other")))


@pytest.mark.parametrize(
    ("job", "nodes", "fits"),
    [
        ("dataset-initializer", 1, True),  # 19 characters: the longest name that the Trainer itself uses
        ("node", 10_000, True),
        ("n" * 19, 10, True),
        ("n" * 19, 11, False),
        ("n" * 20, 1, False),
    ],
)
def test_runtimes_with_long_job_names_are_refused(job: str, nodes: int, fits: bool) -> None:
    manifest = trainjob(trainer={"numNodes": nodes})
    if fits:
        expanded(manifest, JobOptions(), runtime(replicated(job)))
        return
    with pytest.raises(RuntimeMismatchError, match="too long"):
        expanded(manifest, JobOptions(), runtime(replicated(job)))


@pytest.mark.parametrize(
    ("command", "policy", "sent"),
    [
        (["mpirun", "-np", "2", "train"], {"mpi": {}}, ["mpirun", "-x", "A=1", "-np", "2", "train"]),
        (["/usr/bin/mpirun", "-x", "A", "train"], {"mpi": {}}, ["/usr/bin/mpirun", "-x", "A", "train"]),
        (["mpirun", "-x", "A=2", "train"], {"mpi": {}}, ["mpirun", "-x", "A=2", "train"]),
        (["mpirun", "train"], {"mpi": {"mpiImplementation": "Intel"}}, ["mpirun", "train"]),
        (["mpirun", "train"], {"torch": {}}, ["mpirun", "train"]),
        (["sh", "-c", "mpirun train"], {"mpi": {}}, ["sh", "-c", "mpirun train"]),
    ],
)
def test_variables_reach_all_processes_of_mpirun(command: list[str], policy: Json, sent: list[str]) -> None:
    """The launcher's node has no `env` of the job. mpirun passes the values of variables, not those of a Secret."""
    of = runtime(replicated("node"), replicated("launcher"), **policy)
    options = JobOptions(env={"A": "1", "TOKEN": {"secretKeyRef": {"name": "s", "key": "t"}}})
    assert expanded(trainjob(trainer={"command": command}), options, of)["spec"]["trainer"]["command"] == sent
