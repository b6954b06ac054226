"""What disrupts pods: evictions and budgets, failed nodes, preemption, rejections and limits of storage."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from components.small_cluster import FAST, SLEEP, Small, small
from ktrain_embedded.controllers.nodes import NodeTimes
from ktrain_embedded.objects import disruptions
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.store import Obj

SOON = NodeTimes(tolerations=0.0001, quarantine=0.05, period=0.02)


def reason(pod: Obj | None) -> str:
    """Reason and message of the condition DisruptionTarget."""
    conditions = (pod or {}).get("status", {}).get("conditions") or ()
    found = next((c for c in conditions if c["type"] == "DisruptionTarget"), None)
    return f"{found['reason']}: {found['message']}" if found else ""


def last(cluster: Small, name: str) -> str:
    """The disruption in the last status that the pod had."""
    return reason({"status": cluster.history[name][-1]})


def budget(cluster: Small, **spec: object) -> None:
    selector = {"matchLabels": {"app": "x"}}
    meta = {"name": "keep", "namespace": "default"}
    cluster.store.create(r.DISRUPTION_BUDGET, {"metadata": meta, "spec": {"selector": selector, **spec}, "status": {}})


def budget_status(cluster: Small) -> Obj:
    status: Obj = cluster.store.get(r.DISRUPTION_BUDGET, "default", "keep")["status"]
    return status


def node(cluster: Small, index: int = 0) -> Obj:
    return cluster.store.get(r.NODE, None, f"ktrain-node-{index}")


async def test_evicted_pod_shows_why_and_keeps_its_exit_code(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        pod = cluster.create("one", SLEEP)
        await cluster.up("one")
        disruptions.evict(cluster.store, cluster.pod("one") or pod, {})
        assert reason(cluster.pod("one")) == "EvictionByEvictionAPI: Eviction API: evicting"
        assert cluster.phase("one") == "Running"
        await cluster.until(lambda: cluster.pod("one") is None)
        assert cluster.history["one"][-1]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 143
        assert cluster.phases("one")[-1] == "Failed"


async def test_budget_refuses_an_eviction_until_enough_pods_are_ready(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        budget(cluster, minAvailable=1)
        for name in ("one", "two"):
            cluster.create(name, SLEEP, metadata={"labels": {"app": "x"}})
        await cluster.runs("one")
        await cluster.runs("two")
        await cluster.until(lambda: budget_status(cluster)["disruptionsAllowed"] == 1)
        disruptions.evict(cluster.store, cluster.pod("one") or {}, {})
        with pytest.raises(ApiError) as error:
            disruptions.evict(cluster.store, cluster.pod("two") or {}, {})
        assert error.value.code == 429
        causes = (error.value.details or {})["causes"]
        assert causes[0]["message"].startswith("The disruption budget keep needs 1 healthy pods and has ")
        assert reason(cluster.pod("two")) == ""


async def test_budget_in_percent_needs_a_scale_subresource(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": "1", "controller": True}
        cluster.create("one", SLEEP, metadata={"labels": {"app": "x"}, "ownerReferences": [owner]})
        budget(cluster, minAvailable="50%")
        await cluster.until(lambda: budget_status(cluster).get("conditions"))
        (condition,) = budget_status(cluster)["conditions"]
        assert condition["reason"] == "SyncFailed"
        assert condition["message"] == "jobs.batch does not implement the scale subresource"


async def test_pods_of_a_silent_node_run_on_until_it_returns(tmp_path: Path) -> None:
    timing = replace(FAST, unreachable=0.05)
    async with small(tmp_path, nodes=2, timing=timing, node_times=SOON) as cluster:
        pod = cluster.create("one", SLEEP, nodeName="ktrain-node-1")
        await cluster.up("one")
        cluster.kubelets[1].silence()
        await cluster.until(lambda: "deletionTimestamp" in (cluster.pod("one") or {})["metadata"])
        assert reason(cluster.pod("one")) == "DeletionByTaintManager: Taint manager: deleting due to NoExecute taint"
        assert "running" in cluster.state("one")
        assert ("NodeNotReady", "Node is not ready") in cluster.events("one")
        assert ("TaintManagerEviction", "Marking for deletion Pod default/one") in cluster.events("one")
        assert cluster.log(pod) == "up\n"
        cluster.kubelets[1].recover()
        await cluster.until(lambda: cluster.pod("one") is None)
        assert cluster.history["one"][-1]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 143


async def test_a_node_that_is_silent_for_a_moment_loses_nothing(tmp_path: Path) -> None:
    async with small(tmp_path, timing=replace(FAST, unreachable=0.05)) as cluster:
        pod = cluster.create("one", "until [ -e go ]; do sleep 0.02; done; exit 3")
        await cluster.runs("one")
        cluster.kubelets[0].silence()
        await cluster.until(lambda: "NodeNotReady" in str(cluster.events("one")))
        (tmp_path / "pods" / pod["metadata"]["uid"] / "pytorch" / "root" / "go").touch()
        cluster.kubelets[0].recover()
        assert await cluster.ended("one") == "Failed"
        assert cluster.state("one")["terminated"]["exitCode"] == 3
        await cluster.until(lambda: "taints" not in node(cluster)["spec"])
        assert node(cluster)["status"]["conditions"][-1]["status"] == "True"


async def test_pods_of_a_deleted_node_are_collected_and_run_on(tmp_path: Path) -> None:
    async with small(tmp_path, nodes=2, node_times=SOON) as cluster:
        pod = cluster.create("one", SLEEP, nodeName="ktrain-node-1")
        await cluster.up("one")
        cluster.kubelets[1].silence()
        cluster.store.delete(r.NODE, None, "ktrain-node-1")
        await cluster.until(lambda: cluster.pod("one") is None)
        assert last(cluster, "one") == "DeletionByPodGC: PodGC: node no longer exists"
        assert cluster.history["one"][-1]["phase"] == "Failed"
        assert "running" in cluster.history["one"][-1]["containerStatuses"][0]["state"]
        directory = tmp_path / "pods" / pod["metadata"]["uid"]
        assert directory.exists()
        cluster.kubelets[1].recover()
        await cluster.until(lambda: not directory.exists(), "the container is stopped when its kubelet returns")
        assert node(cluster, 1)


async def test_out_of_service_frees_the_names_of_terminating_pods(tmp_path: Path) -> None:
    async with small(tmp_path, nodes=2, node_times=SOON, timing=replace(FAST, unreachable=0.05)) as cluster:
        cluster.create("one", SLEEP, nodeName="ktrain-node-1")
        await cluster.up("one")
        cluster.kubelets[1].silence()
        await cluster.until(lambda: "deletionTimestamp" in (cluster.pod("one") or {})["metadata"])
        spec = node(cluster, 1)["spec"]
        taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
        cluster.store.update(r.NODE, {**node(cluster, 1), "spec": {**spec, "taints": [*spec["taints"], taint]}})
        await cluster.until(lambda: cluster.pod("one") is None)
        assert last(cluster, "one").startswith("DeletionByTaintManager")
        assert cluster.history["one"][-1]["phase"] == "Failed"


async def test_cordoned_node_gets_a_taint_of_its_own(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        own = {"key": "team", "effect": "NoSchedule"}
        cluster.store.update(
            r.NODE, {**node(cluster), "spec": {**node(cluster)["spec"], "taints": [own], "unschedulable": True}}
        )
        await cluster.until(lambda: len(node(cluster)["spec"]["taints"]) == 2)
        assert node(cluster)["spec"]["taints"][1]["key"] == "node.kubernetes.io/unschedulable"
        spec = {k: v for k, v in node(cluster)["spec"].items() if k != "unschedulable"}
        cluster.store.update(r.NODE, {**node(cluster), "spec": spec})
        await cluster.until(lambda: node(cluster)["spec"]["taints"] == [own])


async def test_pod_of_higher_priority_preempts_as_few_as_possible(tmp_path: Path) -> None:
    async with small(tmp_path, gpus=3) as cluster:
        for name, priority in (("low", 1), ("middle", 2), ("other", 3)):
            resources = {"limits": {"nvidia.com/gpu": "1"}}
            cluster.create(name, SLEEP, priority=priority, container={"resources": resources})
            await cluster.up(name)
        urgent = cluster.create(
            "urgent", "exit 0", priority=9, container={"resources": {"limits": {"nvidia.com/gpu": "2"}}}
        )
        assert await cluster.ended("urgent") == "Succeeded"
        # their GPUs are free before their names
        await cluster.until(lambda: cluster.pod("low") is None and cluster.pod("middle") is None)
        for name in ("low", "middle"):
            assert last(cluster, name).startswith("PreemptionByScheduler: default-scheduler: preempting")
            preempted = f"Preempted by pod {urgent['metadata']['uid']} on node ktrain-node-0"
            assert ("Preempted", preempted) in cluster.events(name)
        assert cluster.phase("other") == "Running"
        assert cluster.history["urgent"][1]["nominatedNodeName"] == "ktrain-node-0"
        assert "nominatedNodeName" not in (cluster.pod("urgent") or {})["status"]


async def test_pod_that_never_preempts_waits(tmp_path: Path) -> None:
    async with small(tmp_path, gpus=1) as cluster:
        resources = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        cluster.create("low", SLEEP, container=resources)
        await cluster.runs("low")
        cluster.create("polite", "exit 0", priority=9, preemptionPolicy="Never", container=resources)
        await cluster.until(lambda: "preemptionPolicy=Never" in str(cluster.pod("polite")))
        assert cluster.phase("low") == "Running"


@pytest.mark.parametrize(
    ("spec", "why", "text"),
    [
        ({"container": {"resources": {"requests": {"cpu": "6400"}}}}, "OutOfcpu", "cpu, requested: 6400000, used: 0"),
        ({"nodeSelector": {"zone": "x"}}, "NodeAffinity", "node(s) didn't match Pod's node affinity/selector"),
        (
            {"container": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}},
            "UnexpectedAdmissionError",
            "Allocate failed due to rpc error: d0 is lost, which is unexpected",
        ),
    ],
)
async def test_kubelet_rejects_a_pod_that_does_not_fit(tmp_path: Path, spec: Obj, why: str, text: str) -> None:
    async with small(tmp_path, gpus=1) as cluster:
        cluster.kubelets[0].break_devices("rpc error: d0 is lost")
        cluster.create("one", SLEEP, nodeName="ktrain-node-0", **spec)
        assert await cluster.ended("one") == "Failed"
        status = (cluster.pod("one") or {})["status"]
        assert status["reason"] == why
        assert status["message"].startswith("Pod was rejected: ")
        assert text in status["message"]
        assert "containerStatuses" not in status
        assert cluster.events("one")[0][0] == why


async def test_pod_over_its_ephemeral_storage_is_evicted(tmp_path: Path) -> None:
    async with small(tmp_path, timing=replace(FAST, storage=0.05)) as cluster:
        limit = {"resources": {"limits": {"ephemeral-storage": "10Ki"}}}
        cluster.create("one", f"head -c 20000 /dev/zero > big; {SLEEP}", container=limit)
        assert await cluster.ended("one") == "Failed"
        status = (cluster.pod("one") or {})["status"]
        message = "Pod ephemeral local storage usage exceeds the total limit of containers 10Ki. "
        assert (status["reason"], status["message"]) == ("Evicted", message)
        assert reason(cluster.pod("one")) == ""
        assert "deletionTimestamp" not in (cluster.pod("one") or {})["metadata"]


async def test_pod_over_the_limit_of_an_empty_dir_is_evicted(tmp_path: Path) -> None:
    async with small(tmp_path, timing=replace(FAST, storage=0.05)) as cluster:
        mounts = {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
        volumes = [{"name": "scratch", "emptyDir": {"sizeLimit": "10Ki"}}]
        cluster.create("one", f"head -c 20000 /dev/zero > /scratch/big; {SLEEP}", container=mounts, volumes=volumes)
        assert await cluster.ended("one") == "Failed"
        message = 'Usage of EmptyDir volume "scratch" exceeds the limit "10Ki". '
        assert (cluster.pod("one") or {})["status"]["message"] == message


@pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="open files are found by /proc")
@pytest.mark.parametrize(
    ("folder", "limits", "volumes", "message"),
    [
        (
            "/tmp", {"ephemeral-storage": "10Ki"}, [],
            "Pod ephemeral local storage usage exceeds the total limit of containers 10Ki. ",
        ),
        (
            "/dev/shm", {}, [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "10Ki"}}],
            'Usage of EmptyDir volume "shm" exceeds the limit "10Ki". ',
        ),
    ],
)  # fmt: skip
async def test_open_files_of_shared_directories_count(
    tmp_path: Path, folder: str, limits: Obj, volumes: list[Obj], message: str
) -> None:
    """Deleted ones, too, which is how PyTorch shares memory. Those that the pod only reads don't."""
    with tempfile.NamedTemporaryFile(dir=folder) as foreign:
        foreign.write(bytes(20_000))
        foreign.flush()
        async with small(tmp_path, timing=replace(FAST, storage=0.05)) as cluster:
            mounts = [{"name": volume["name"], "mountPath": folder} for volume in volumes]
            container = {"resources": {"limits": limits}, "volumeMounts": mounts}
            file, go = f"{folder}/ktrain-{tmp_path.name}", tmp_path / "go"
            program = (
                f"exec 3< {foreign.name}; echo up; until [ -e {go} ]; do sleep 0.05; done; "
                f"exec 4> {file}; rm {file}; head -c 20000 /dev/zero >&4; {SLEEP}"
            )
            cluster.create("one", program, container=container, volumes=volumes)
            await cluster.up("one")
            await asyncio.sleep(0.3)  # some measurements
            assert cluster.phase("one") == "Running"
            go.touch()
            assert await cluster.ended("one") == "Failed"
            assert (cluster.pod("one") or {})["status"]["message"] == message


async def test_node_without_disk_evicts_one_pod_and_rejects_others(tmp_path: Path) -> None:
    async with small(tmp_path, timing=replace(FAST, pressure=0.3)) as cluster:
        cluster.create("one", f"head -c 20000 /dev/zero > big; {SLEEP}")
        cluster.create("two", SLEEP)
        await cluster.up("one")
        await cluster.up("two")
        await cluster.kubelets[0].run_out_of_disk()
        assert await cluster.ended("one") == "Failed"
        pod = cluster.pod("one") or {}
        assert pod["status"]["reason"] == "Evicted"
        assert pod["status"]["message"].startswith(
            "The node was low on resource: ephemeral-storage. Threshold quantity: "
        )
        assert pod["status"]["message"].endswith("request is 0, has larger consumption of ephemeral-storage. ")
        assert reason(pod) == f"TerminationByKubelet: {pod['status']['message']}"
        cluster.create("three", SLEEP)  # the taint comes later, so it is bound to the node
        assert await cluster.ended("three") == "Failed"
        pod = cluster.pod("three") or {}
        message = "The node had condition: [DiskPressure]. "
        assert (pod["status"]["reason"], pod["status"]["message"]) == ("Evicted", f"Pod was rejected: {message}")
        assert ("Evicted", message) in cluster.events("three")
        assert reason(pod) == ""
        await cluster.until(lambda: "disk-pressure" in str(node(cluster)["spec"]))
        cluster.create("four", SLEEP)
        await cluster.until(lambda: "had untolerated taint" in str(cluster.pod("four")))
        cluster.kubelets[0].recover()
        await cluster.up("four")
        assert "taints" not in node(cluster)["spec"]
        assert {c["type"]: c["status"] for c in node(cluster)["status"]["conditions"]} == {
            "Ready": "True", "DiskPressure": "False",
        }  # fmt: skip
        assert cluster.phase("two") == "Running"


async def test_node_that_shuts_down_rejects_pods(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.kubelets[0].shut_down()
        cluster.create("one", SLEEP, nodeName="ktrain-node-0")
        assert await cluster.ended("one") == "Failed"
        status, message = (cluster.pod("one") or {})["status"], "Pod was rejected as the node is shutting down."
        assert (status["reason"], status["message"]) == ("NodeShutdown", f"Pod was rejected: {message}")
        cluster.kubelets[0].recover()
        cluster.create("two", SLEEP, nodeName="ktrain-node-0")
        await cluster.up("two")


async def test_shutdown_of_a_node_ends_its_pods_as_failed(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", SLEEP)
        await cluster.up("one")
        cluster.kubelets[0].shut_down()
        assert await cluster.ended("one") == "Failed"
        pod = cluster.pod("one") or {}
        message = "Pod was terminated in response to imminent node shutdown."
        assert (pod["status"]["reason"], pod["status"]["message"]) == ("Terminated", message)
        assert reason(pod) == f"TerminationByKubelet: {message}"
        assert "deletionTimestamp" not in pod["metadata"]
        await cluster.until(lambda: "not-ready" in str(node(cluster)["spec"]))
