from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.checks import check
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.manifest.deadline import backstop
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build, overlay
from airflow_provider_ktrain.core.manifest.transform import TTL_MINIMUM, fit, modernize, stamp
from airflow_provider_ktrain.manifests import gpus_of, load
from airflow_provider_ktrain.volumes import ClaimVolume, HostPath, SharedMemory

from .manifests import DATA, GUIDES, JSON, container, mpijob, pytorchjob, replica

EVERYTHING = JobOptions(
    image="registry/other:2",
    command=["torchrun", "train.py"],
    args=["--epochs", "3"],
    env={
        "A": "1", "TOKEN": {"secretKeyRef": {"name": "s", "key": "k"}},
        "KTRAIN_CHECKPOINT_DIR": "/data/run-1", "KTRAIN_ATTEMPT": "2",
    },
    workers=3,
    gpus=2,
    resources={"memory": "64Gi", "rdma/hca": 1},
    nproc_per_node=2,
    hosts=["node-a", "node-b"],
    node_selector={"pool": "gpu"},
    tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}],
    priority_class="high",
    queue="team-a",
    workload_priority_class="high",
    volumes=[SharedMemory("8Gi"), ClaimVolume("data", "/data", read_only=True, sub_path="v1"), HostPath("/scratch")],
    labels={"team": "a"},
    annotations={"sidecar.istio.io/inject": "false"},
)  # fmt: skip


def pod_of(manifest: dict[str, Any], role: str) -> dict[str, Any]:
    specs = manifest["spec"].get("pytorchReplicaSpecs") or manifest["spec"]["mpiReplicaSpecs"]
    pod: dict[str, Any] = specs[role]["template"]["spec"]
    return pod


@pytest.mark.parametrize("guide", GUIDES)
def test_no_options_change_nothing(guide: str) -> None:
    manifest = load(DATA / guide)
    assert overlay(manifest, JobOptions()) == manifest


@pytest.mark.parametrize("guide", GUIDES)
def test_the_input_is_never_changed(guide: str) -> None:
    manifest = load(DATA / guide)
    before = copy.deepcopy(manifest)
    result = overlay(manifest, EVERYTHING)
    backstop(stamp(fit(modernize(result)[0], manifest["apiVersion"]), "n", "ns", {"l": "1"}, {"a": "1"}), 60)
    assert manifest == before


@pytest.mark.parametrize("make", [pytorchjob, mpijob])
def test_a_manifest_with_every_option_has_no_problems(make: Any) -> None:
    env = {name: value for name, value in EVERYTHING.env.items() if name != "KTRAIN_ATTEMPT"}  # set after the check
    options = replace(EVERYTHING, env=env)
    found = check(fit(overlay(make(), options), make()["apiVersion"]))
    assert [str(p) for p in found] == []


def test_options_reach_every_replica_of_a_pytorchjob() -> None:
    result = overlay(pytorchjob(), EVERYTHING)
    assert result["spec"]["nprocPerNode"] == "2"
    queued = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "high"}
    assert result["metadata"]["labels"] == {"team": "a", **queued}
    assert result["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    counts = {role: spec["replicas"] for role, spec in result["spec"]["pytorchReplicaSpecs"].items()}
    assert counts == {"Master": 1, "Worker": 3}
    for role in counts:
        pod = pod_of(result, role)
        main = pod["containers"][0]
        template = result["spec"]["pytorchReplicaSpecs"][role]["template"]
        assert template["metadata"] == {"labels": {"team": "a"}, "annotations": {"sidecar.istio.io/inject": "false"}}
        assert (main["image"], main["command"], main["args"]) == (
            "registry/other:2",
            ["torchrun", "train.py"],
            ["--epochs", "3"],
        )
        assert main["resources"] == {
            "limits": {"memory": "64Gi", "rdma/hca": 1, "nvidia.com/gpu": 2},
            "requests": {"memory": "64Gi"},
        }
        assert main["env"] == [
            {"name": "A", "value": "1"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "KTRAIN_CHECKPOINT_DIR", "value": "/data/run-1"},
            {"name": "KTRAIN_ATTEMPT", "value": "2"},
        ]
        assert main["volumeMounts"] == [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "pvc-data", "mountPath": "/data", "readOnly": True, "subPath": "v1"},
            {"name": "host-scratch", "mountPath": "/scratch"},
        ]
        assert pod["volumes"] == [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
            {"name": "pvc-data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "host-scratch", "hostPath": {"path": "/scratch", "type": "Directory"}},
        ]
        assert pod["priorityClassName"] == "high"
        assert pod["nodeSelector"] == {"pool": "gpu"}
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert gpus_of(result) == 8


def test_command_goes_to_the_launcher_and_gpus_go_to_the_workers() -> None:
    result = overlay(mpijob(), EVERYTHING)
    launcher, worker = (pod_of(result, role)["containers"][0] for role in ("Launcher", "Worker"))
    assert launcher["command"] == ["torchrun", "train.py"]
    assert worker["command"] == ["python", "train.py"]
    assert "resources" not in launcher
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert result["spec"]["slotsPerWorker"] == 2
    assert gpus_of(result) == 6
    as_worker = mpijob()
    as_worker["spec"]["runLauncherAsWorker"] = True
    assert gpus_of(overlay(as_worker, JobOptions(gpus=1))) == 3


def test_hosts_are_added_to_every_node_selector_term() -> None:
    manifest = pytorchjob()
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}, {"matchFields": []}]
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms, {}]}}
    pod_of(manifest, "Master")["affinity"] = {"nodeAffinity": affinity, "podAntiAffinity": {"x": 1}}
    result = overlay(manifest, JobOptions(hosts=["n1", "n2"]))
    ours = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1", "n2"]}
    master = pod_of(result, "Master")["affinity"]
    alternatives = master["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [t["matchExpressions"] for t in alternatives] == [[terms[0]["matchExpressions"][0], ours], [ours]]  # type: ignore[index]
    assert master["podAntiAffinity"] == {"x": 1}
    worker = pod_of(result, "Worker")["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert worker == {"nodeSelectorTerms": [{"matchExpressions": [ours]}]}


def test_options_change_the_training_container_only() -> None:
    manifest = pytorchjob()
    pod_of(manifest, "Master")["containers"].insert(0, container("sidecar"))
    names = {
        c["name"]: c["image"] for c in pod_of(overlay(manifest, JobOptions(image="new:1")), "Master")["containers"]
    }
    assert names == {"sidecar": "registry/train:1", "pytorch": "new:1"}
    horovod = mpijob("v1")
    horovod["spec"]["mainContainer"] = "trainer"
    pod_of(horovod, "Worker")["containers"].append(container("trainer"))
    images = [c["image"] for c in pod_of(overlay(horovod, JobOptions(image="new:1")), "Worker")["containers"]]
    assert images == ["registry/train:1", "new:1"]


def test_entries_of_the_same_name_or_path_are_replaced_in_place() -> None:
    manifest = pytorchjob(
        env=[{"name": "A", "value": "0"}, {"name": "B", "value": "0"}, {"name": "A", "value": "9"}],
        volumeMounts=[{"name": "old", "mountPath": "/dev/shm"}],
    )
    main = pod_of(overlay(manifest, JobOptions(env={"A": "1"}, volumes=[SharedMemory()])), "Master")["containers"][0]
    assert main["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "0"}]
    assert main["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]


def test_gpus_set_request_and_limit_and_zero_removes_both() -> None:
    resources = {"limits": {"nvidia.com/gpu": 8}, "requests": {"nvidia.com/gpu": 8, "cpu": 1}}
    manifest = pytorchjob(resources=resources)
    both = pod_of(overlay(manifest, JobOptions(gpus=2)), "Master")["containers"][0]["resources"]
    assert both == {"limits": {"nvidia.com/gpu": 2}, "requests": {"nvidia.com/gpu": 2, "cpu": 1}}
    none = pod_of(overlay(manifest, JobOptions(gpus=0)), "Master")["containers"][0]["resources"]
    assert none == {"requests": {"cpu": 1}}


def test_gpus_set_twice_are_refused() -> None:
    with pytest.raises(ManifestError, match=r"both set nvidia.com/gpu; found gpus=1 and 2; expected one of them"):
        overlay(pytorchjob(), JobOptions(gpus=1, resources={"nvidia.com/gpu": 2}))


def test_processes_are_set_in_the_field_that_the_manifest_uses() -> None:
    elastic = pytorchjob()
    elastic["spec"]["elasticPolicy"] = {"nProcPerNode": 1}
    result = overlay(elastic, JobOptions(nproc_per_node=4))
    assert result["spec"]["elasticPolicy"] == {"nProcPerNode": 4}
    assert "nprocPerNode" not in result["spec"]
    with pytest.raises(ManifestError, match="slotsPerWorker"):
        overlay(mpijob(), JobOptions(nproc_per_node="auto"))


def test_replicas_of_a_missing_role_are_refused() -> None:
    manifest = pytorchjob()
    del manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert overlay(manifest, JobOptions(workers=0)) == manifest
    with pytest.raises(ManifestError, match=r"no replica type Worker.*found Master"):
        overlay(manifest, JobOptions(workers=2))
    with pytest.raises(ManifestError, match=r"did you mean Worker\?.*expected Master or Worker"):
        overlay(pytorchjob(), JobOptions(replicas={"worker": 3}))
    both = overlay(pytorchjob(), JobOptions(workers=2, replicas={"Worker": 5}))
    assert both["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 5


def test_a_pod_without_containers_is_refused_by_name() -> None:
    manifest = pytorchjob()
    pod_of(manifest, "Worker")["containers"] = []
    with pytest.raises(ManifestError, match=r"Worker has no container.*'pytorch'"):
        overlay(manifest, JobOptions(image="x:1"))


@pytest.mark.parametrize("kind", ["PyTorchJob", "MPIJob"])
def test_job_built_from_options_alone_has_no_problems(kind: str) -> None:
    manifest = build(kind, JobOptions(image="i:1", command=["python", "x.py"], workers=3, gpus=1))
    assert check(stamp(manifest, "n", "ns")) == []
    roles = manifest["spec"].get("pytorchReplicaSpecs") or manifest["spec"]["mpiReplicaSpecs"]
    assert [spec["replicas"] for spec in roles.values()] == [1, 3]
    assert gpus_of(manifest) == (4 if kind == "PyTorchJob" else 3)


def test_build_needs_an_image_and_an_mpijob_needs_workers() -> None:
    with pytest.raises(ManifestError, match="needs an image"):
        build("PyTorchJob", JobOptions(command=["x"]))
    with pytest.raises(ManifestError, match="has no Workers"):
        build("MPIJob", JobOptions(image="i:1"))
    assert list(build("PyTorchJob", JobOptions(image="i:1"))["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert build("MPIJob", JobOptions(image="i:1", workers=1), "kubeflow.org/v1")["apiVersion"] == "kubeflow.org/v1"


def test_legacy_run_policy_is_moved() -> None:
    manifest = pytorchjob()
    manifest["spec"] |= {"cleanPodPolicy": "All", "backoffLimit": 3, "runPolicy": {"backoffLimit": 5, "suspend": True}}
    result, moved = modernize(manifest)
    assert result["spec"]["runPolicy"] == {"cleanPodPolicy": "All", "backoffLimit": 5, "suspend": True}
    assert "cleanPodPolicy" not in result["spec"]
    assert moved == ("cleanPodPolicy", "backoffLimit")
    assert modernize(pytorchjob()) == (pytorchjob(), ())
    assert modernize(mpijob("v1"))[1] == ()
    for broken in (pytorchjob(), mpijob("v2beta1")):
        broken["spec"] |= {"cleanPodPolicy": "All", "runPolicy": "All"}
        assert modernize(broken) == (broken, ()), "a check reports the type"


def test_mpijob_is_converted_for_the_served_version() -> None:
    manifest = mpijob("v2beta1")
    manifest["spec"]["cleanPodPolicy"] = "Running"
    fitted = fit(modernize(manifest)[0], "kubeflow.org/v2beta1")["spec"]
    assert fitted["runPolicy"] == {"cleanPodPolicy": "Running"}
    assert "cleanPodPolicy" not in fitted
    assert fitted["launcherCreationPolicy"] == "WaitForWorkersReady"

    manifest["spec"]["launcherCreationPolicy"] = "AtStartup"
    manifest["spec"]["runPolicy"] = {"cleanPodPolicy": "None"}
    fitted = fit(modernize(manifest)[0], "kubeflow.org/v2beta1")["spec"]
    assert (fitted["launcherCreationPolicy"], fitted["runPolicy"]) == ("AtStartup", {"cleanPodPolicy": "None"})

    guide = load(DATA / "mpi-operator-guide.yaml")
    assert fit(guide, "kubeflow.org/v1") == guide
    del guide["apiVersion"]
    assert fit(guide, "kubeflow.org/v1")["apiVersion"] == "kubeflow.org/v1"


@pytest.mark.parametrize(
    ("version", "served", "remedy"),
    [("v1", "v2beta1", "under spec.runPolicy"), ("v1", "v2beta1", "add --slots"), ("v2beta1", "v1", "kubexec.sh")],
)
def test_mpijob_for_another_operator_is_refused_with_a_remedy(version: str, served: str, remedy: str) -> None:
    with pytest.raises(ManifestError) as e:
        fit(mpijob(version), f"kubeflow.org/{served}")
    assert f"found kubeflow.org/{version}; expected kubeflow.org/{served}" in str(e.value)
    assert remedy in e.value.remedy


def test_role_with_0_replicas_is_removed() -> None:
    """training-operator 1.9 rejects a Worker with 0 replicas."""
    alone = fit(overlay(pytorchjob(workers=2), JobOptions(workers=0)), "kubeflow.org/v1")
    assert list(alone["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert list(fit(pytorchjob(workers=1), "kubeflow.org/v1")["spec"]["pytorchReplicaSpecs"]) == ["Master", "Worker"]


def test_null_metadata_of_templates_is_removed() -> None:
    """kubectl and Go's serializers write these fields."""
    manifest = pytorchjob()
    template = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    template["metadata"] = {"creationTimestamp": None, "labels": {"a": "b"}, "annotations": None}
    stamped = stamp(manifest, "train", "ns", {"c": "d"})
    assert stamped["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"] == {"labels": {"a": "b", "c": "d"}}


@pytest.mark.parametrize(("given", "sent"), [(0, TTL_MINIMUM), (600, TTL_MINIMUM), (10**6, 10**6), (None, None)])
def test_stamp_raises_a_ttl_that_would_delete_the_ended_job_too_soon(given: int | None, sent: int | None) -> None:
    job = pytorchjob()
    if given is not None:
        job["spec"]["runPolicy"] = {"ttlSecondsAfterFinished": given}
    policy = stamp(job, "train", "ns")["spec"].get("runPolicy") or {}
    assert policy.get("ttlSecondsAfterFinished") == sent


def test_stamp_sets_name_and_labels_and_removes_server_fields() -> None:
    saved = pytorchjob()
    saved["metadata"] |= {
        "uid": "u",
        "resourceVersion": "7",
        "generateName": "x-",
        "managedFields": [],
        "labels": {"mine": "1", "owner": "theirs"},
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "kept": "1"},
    }
    saved["status"] = {"conditions": []}
    result = stamp(saved, "run-1", "team", {"owner": "us"}, {"ours": "2"})
    assert result["metadata"] == {
        "name": "run-1",
        "namespace": "team",
        "labels": {"mine": "1", "owner": "us"},
        "annotations": {"kept": "1", "ours": "2"},
    }
    assert "status" not in result
    for spec in result["spec"]["pytorchReplicaSpecs"].values():
        assert spec["template"]["metadata"] == {"labels": {"owner": "us"}}


@pytest.mark.parametrize("make", [pytorchjob, mpijob])
def test_backstop_deadline_of_pods_is_after_that_of_the_job(make: Any) -> None:
    result = backstop(make(), 3600.5)
    assert result["spec"]["runPolicy"] == {"activeDeadlineSeconds": 3600, "cleanPodPolicy": "Running"}
    specs = result["spec"].get("pytorchReplicaSpecs") or result["spec"]["mpiReplicaSpecs"]
    assert [s["template"]["spec"]["activeDeadlineSeconds"] for s in specs.values()] == [3620, 3620]
    assert check(result) == []


def test_backstop_keeps_shorter_deadlines_of_the_manifest() -> None:
    manifest = mpijob("v1")
    manifest["spec"] |= {"cleanPodPolicy": "None", "runPolicy": {"activeDeadlineSeconds": 60}}
    pod_of(manifest, "Worker")["activeDeadlineSeconds"] = 9999
    result = backstop(manifest, 600)
    assert result["spec"]["runPolicy"] == {"activeDeadlineSeconds": 60}
    assert pod_of(result, "Worker")["activeDeadlineSeconds"] == 620


@given(st.floats(0.001, 1e12))
def test_backstop_deadlines_are_valid_in_kubernetes(seconds: float) -> None:
    result = backstop(pytorchjob(), seconds)
    job = result["spec"]["runPolicy"]["activeDeadlineSeconds"]
    pod = pod_of(result, "Master")["activeDeadlineSeconds"]
    assert 1 <= job <= pod <= 2**31 - 1


@pytest.mark.parametrize(
    ("manifest", "gpus"),
    [
        (pytorchjob(workers=15, resources={"limits": {"nvidia.com/gpu": 1}}), 16),
        (pytorchjob(resources={"requests": {"amd.com/gpu": "2"}}), 4),
        (pytorchjob(resources={"limits": {"nvidia.com/mig-1g.5gb": 1, "rdma/hca": 1, "cpu": 4}}), 2),
        (pytorchjob(), 0),
        (mpijob(workers=4, resources={"limits": {"nvidia.com/gpu": 8}}), 32),
    ],
)
def test_gpus_of_all_replicas(manifest: dict[str, Any], gpus: int) -> None:
    assert gpus_of(manifest) == gpus


def test_gpus_of_a_file() -> None:
    assert gpus_of(DATA / "pytorch-guide.yaml") == 2
    with pytest.raises(ManifestError, match="TFJob"):
        gpus_of({"kind": "TFJob"})


def test_gpus_of_init_containers_count_if_they_exceed_the_containers() -> None:
    manifest = pytorchjob(workers=0, resources={"limits": {"nvidia.com/gpu": 1}})
    pod_of(manifest, "Master")["initContainers"] = [container("warm", resources={"limits": {"nvidia.com/gpu": 4}})]
    assert gpus_of(manifest) == 4


@given(extra=st.dictionaries(st.text(min_size=1).map(lambda t: f"x-{t}"), JSON, max_size=3))
def test_unknown_fields_are_kept(extra: dict[str, Any]) -> None:
    manifest = pytorchjob()
    manifest |= extra
    manifest["spec"] |= extra
    manifest["spec"]["pytorchReplicaSpecs"]["Worker"] |= extra
    pod_of(manifest, "Worker")["containers"][0] |= extra
    result = stamp(backstop(overlay(manifest, EVERYTHING), 60), "n", "ns")
    for place in (
        result,
        result["spec"],
        result["spec"]["pytorchReplicaSpecs"]["Worker"],
        pod_of(result, "Worker")["containers"][0],
    ):
        assert {k: place[k] for k in extra} == extra


def test_overlay_is_idempotent() -> None:
    once = overlay(pytorchjob(), EVERYTHING)
    twice = overlay(once, EVERYTHING)
    affinity = "requiredDuringSchedulingIgnoredDuringExecution"
    for result in (once, twice):  # hosts are added to each term: two equal terms are equivalent to one
        for role in ("Master", "Worker"):
            for term in pod_of(result, role)["affinity"]["nodeAffinity"][affinity]["nodeSelectorTerms"]:
                term["matchExpressions"] = term["matchExpressions"][:1]
    assert once == twice


def test_replica_without_a_template_is_accepted() -> None:
    manifest = pytorchjob()
    manifest["spec"]["pytorchReplicaSpecs"]["Worker"] = {"replicas": 1}
    assert stamp(manifest, "n", "ns", {"a": "b"})["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] == {
        "metadata": {"labels": {"a": "b"}}
    }
    assert replica()["replicas"] == 1


@pytest.mark.parametrize(("implementation", "exported"), [(None, ["-x", "A"]), ("OpenMPI", ["-x", "A"]), ("Intel", [])])
def test_variables_of_an_mpijob_reach_all_processes(implementation: str | None, exported: list[str]) -> None:
    """The Launcher has them; sshd doesn't pass them to its sessions in the Workers."""
    manifest = mpijob()
    if implementation:
        manifest["spec"]["mpiImplementation"] = implementation
    made = overlay(manifest, JobOptions(command=["mpirun", "train"], env={"A": "1"}))
    for once_more in (made, overlay(made, JobOptions(env={"A": "1"}))):
        (launcher,) = once_more["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
        assert launcher["command"] == ["mpirun", *exported, "train"]
