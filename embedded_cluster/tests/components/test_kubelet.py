"""The kubelet, held to what recordings of a real one (1.36) show: statuses, their order, messages and events."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from components.small_cluster import FAST, SLEEP, Small, small
from ktrain_embedded.apiserver import logapi
from ktrain_embedded.controllers.nodes import NodeTimes
from ktrain_embedded.node import shim
from ktrain_embedded.node.podworker import Timing, backoff
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Obj

PRESENT = ("Pulled", 'Container image "demo" already present on machine and can be accessed by the pod')
CREATED, STARTED = ("Created", "Container created"), ("Started", "Container started")
UNREADY = "False/ContainersNotReady/containers with unready status: [pytorch]"


def conditions(status: Obj) -> dict[str, str]:
    """Conditions as `status/reason/message`, by type."""
    return {
        c["type"]: "/".join(c[k] for k in ("status", "reason", "message") if k in c)
        for c in status.get("conditions") or ()
    }


def steps(cluster: Small, name: str) -> list[tuple[str, str, str, str, str]]:
    """Each new status: phase, sandbox, Initialized, Ready, state of the main container."""
    found: list[tuple[str, str, str, str, str]] = []
    for status in cluster.history[name]:
        if "containerStatuses" not in status:
            continue
        by_type, main = conditions(status), status["containerStatuses"][0]["state"]
        kind, detail = next(iter(main.items()))
        state = f"{kind}/{detail.get('reason', '')}".rstrip("/")
        step = status["phase"], by_type["PodReadyToStartContainers"], by_type["Initialized"], by_type["Ready"], state
        if not found or found[-1] != step:
            found.append(step)
    return found


def container(cluster: Small, name: str) -> Obj:
    pod = cluster.pod(name)
    assert pod
    status: Obj = pod["status"]["containerStatuses"][0]
    return status


def waited(cluster: Small, name: str) -> list[str]:
    """The reasons for which the main container waited, without repetition in a row."""
    reasons = [
        s["containerStatuses"][0]["state"]["waiting"]["reason"]
        for s in cluster.history[name]
        if "waiting" in (s.get("containerStatuses") or [{"state": {}}])[0]["state"]
    ]
    return [x for i, x in enumerate(reasons) if i == 0 or x != reasons[i - 1]]


# the usual course


async def test_statuses_of_a_pod_that_succeeds(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        pod = cluster.create("one", "echo hello; echo $HOSTNAME; hostname")
        assert await cluster.ended("one") == "Succeeded"
        assert cluster.log(pod) == "hello\none\none\n"
        assert cluster.phases("one") == ["Pending", "Running", "Succeeded"]
        assert steps(cluster, "one") == [
            ("Pending", "False", "True", UNREADY, "waiting/ContainerCreating"),
            ("Pending", "True", "True", UNREADY, "waiting/ContainerCreating"),
            ("Running", "True", "True", "True", "running"),
            ("Running", "True", "True/PodCompleted", "False/PodCompleted", "terminated/Completed"),
            ("Succeeded", "False", "True/PodCompleted", "False/PodCompleted", "terminated/Completed"),
        ]
        scheduled = ("Scheduled", "Successfully assigned default/one to ktrain-node-0")
        assert cluster.events("one") == [scheduled, PRESENT, CREATED, STARTED]
        order = [c["type"] for c in (cluster.pod("one") or {})["status"]["conditions"]]
        assert order == ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"]


async def test_a_failure_under_never_is_final(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", "exit 3")
        assert await cluster.ended("one") == "Failed"
        assert steps(cluster, "one")[-2:] == [
            ("Running", "True", "True", "False/PodFailed", "terminated/Error"),
            ("Failed", "False", "True", "False/PodFailed", "terminated/Error"),
        ]
        terminated = container(cluster, "one")["state"]["terminated"]
        assert terminated["exitCode"] == 3
        assert terminated["containerID"] == container(cluster, "one")["containerID"]


async def test_a_crash_under_onfailure_restarts_at_once_and_then_backs_off(tmp_path: Path) -> None:
    async with small(tmp_path, timing=Timing(backoff=0.2)) as cluster:
        count = tmp_path / "count"
        pod = cluster.create("one", f"echo x >> {count}; test $(wc -l < {count}) = 3", restartPolicy="OnFailure")
        assert await cluster.ended("one") == "Succeeded"
        uid = pod["metadata"]["uid"]
        assert cluster.phases("one") == ["Pending", "Running", "Succeeded"]
        assert container(cluster, "one")["restartCount"] == 2
        assert container(cluster, "one")["lastState"]["terminated"]["exitCode"] == 1
        back_offs = [
            s["containerStatuses"][0]
            for s in cluster.history["one"]
            if "CrashLoopBackOff" in str(s.get("containerStatuses"))
        ]
        assert [c["restartCount"] for c in back_offs] == [1]
        assert back_offs[0]["state"]["waiting"]["message"] == (
            f"back-off 0.2s restarting failed container=pytorch pod=one_default({uid})"
        )
        assert back_offs[0]["containerID"] == back_offs[0]["lastState"]["terminated"]["containerID"]
        back_off = ("BackOff", f"Back-off restarting failed container pytorch in pod one_default({uid})")
        assert back_off in cluster.events("one")


@pytest.mark.parametrize(("failures", "seconds"), [(1, 0), (2, 10), (3, 20), (4, 40), (6, 160), (7, 300), (50, 300)])
def test_the_back_off_doubles_up_to_five_minutes(failures: int, seconds: float) -> None:
    assert backoff(failures, Timing()) == seconds


async def test_always_restarts_a_container_that_succeeded(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        pod = cluster.create("one", "echo run", restartPolicy="Always")
        await cluster.until(lambda: container(cluster, "one")["restartCount"] >= 3 if cluster.state("one") else False)
        assert cluster.phase("one") == "Running"
        logs = {p.name for p in (tmp_path / "pods" / pod["metadata"]["uid"] / "pytorch").glob("*.log")}
        assert "0.log" not in logs  # the current run's log and the one before are kept


# init containers


def init(command: str, name: str = "prepare") -> dict[str, Any]:
    return {"initContainers": [{"name": name, "image": "demo", "command": ["sh", "-c", command]}]}


async def test_init_containers_run_first_one_by_one(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        both = init("echo a >> $OUT", "a")["initContainers"] + init("echo b >> $OUT", "b")["initContainers"]
        out = {"name": "OUT", "value": str(tmp_path / "out")}
        cluster.create("one", f"cat {tmp_path}/out", initContainers=[{**c, "env": [out]} for c in both])
        assert await cluster.ended("one") == "Succeeded"
        assert cluster.log(cluster.pod("one") or {}) == "a\nb\n"
        waiting = conditions(cluster.history["one"][3])["Initialized"]
        assert waiting.startswith("False/ContainersNotInitialized/containers with incomplete status: [")


async def test_an_init_container_that_fails_under_never_fails_the_pod(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", "echo never", **init("exit 4"))
        assert await cluster.ended("one") == "Failed"
        incomplete = "False/ContainersNotInitialized/containers with incomplete status: [prepare]"
        assert steps(cluster, "one")[-2:] == [
            ("Pending", "True", incomplete, "False/PodFailed", "waiting/PodInitializing"),
            ("Failed", "False", incomplete, "False/PodFailed", "waiting/PodInitializing"),
        ]


async def test_failed_init_container_is_retried_under_onfailure(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", "echo never", restartPolicy="OnFailure", **init("exit 4"))
        await cluster.until(lambda: "CrashLoopBackOff" in str(cluster.history["one"][-1]))
        assert cluster.phases("one") == ["Pending"]
        assert "waiting/PodInitializing" in steps(cluster, "one")[-1]


WAIT = "err=1;for i in $(seq 100); do if nslookup m-0; then err=0 && break; fi;echo waiting; sleep 0.1; done; exit $err"


async def test_a_worker_waits_until_its_masters_name_resolves(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        labels = {"replica": "master"}
        worker = cluster.create("w-0", "echo trained", initContainers=[
            {"name": "init-pytorch", "image": "alpine:3.10", "command": ["sh", "-c", WAIT]},
        ])  # fmt: skip
        await cluster.until(lambda: "waiting" in cluster.log(worker, "init-pytorch"))
        cluster.store.create(r.SERVICE, {"metadata": {"name": "m-0", "namespace": "default"}, "spec": {
            "clusterIP": "None", "selector": labels,
        }})  # fmt: skip
        cluster.create("m-0", "sleep 60", metadata={"labels": labels})
        assert await cluster.ended("w-0") == "Succeeded"
        assert "server can't find m-0: NXDOMAIN" in cluster.log(worker, "init-pytorch")
        master = cluster.pod("m-0") or {}
        assert f"Name:\tm-0\nAddress: {master['status']['podIP']}\n" in cluster.log(worker, "init-pytorch")


async def test_the_name_of_a_master_that_has_ended_does_not_resolve(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.store.create(r.SERVICE, {"metadata": {"name": "m-0", "namespace": "default"}, "spec": {
            "clusterIP": "None", "selector": {"replica": "master"},
        }})  # fmt: skip
        cluster.create("m-0", "exit 0", metadata={"labels": {"replica": "master"}})
        await cluster.ended("m-0")
        assert (cluster.pod("m-0") or {})["status"]["podIP"]
        worker = cluster.create("w-0", "nslookup m-0")
        assert await cluster.ended("w-0") == "Failed"
        assert "NXDOMAIN" in cluster.log(worker)


# what keeps a container from starting


async def test_missing_command_fails_the_pod(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", ["/no/such/program"])
        assert await cluster.ended("one") == "Failed"
        message = (
            "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create "
            'failed: unable to start container process: exec: "/no/such/program": stat /no/such/program: no such file '
            "or directory"
        )
        terminated = container(cluster, "one")["state"]["terminated"]
        assert (terminated["exitCode"], terminated["reason"], terminated["message"]) == (128, "StartError", message)
        assert terminated["startedAt"] == "1970-01-01T00:00:00Z"
        assert cluster.phases("one") == ["Pending", "Failed"]
        assert cluster.events("one")[-2:] == [CREATED, ("Failed", f"Error: {message}")]


async def test_image_without_a_directory_is_not_pulled(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        image = "registry.example/team/trainer:1.0"
        cluster.create("one", "exit 0", container={"image": image})
        await cluster.until(lambda: waited(cluster, "one")[-2:] == ["ImagePullBackOff", "ErrImagePull"])
        assert waited(cluster, "one")[:3] == ["ContainerCreating", "ErrImagePull", "ImagePullBackOff"]
        events = cluster.events("one")[1:]
        assert [reason for reason, _ in events] == ["Pulling", "Failed", "Failed", "BackOff", "Failed"]
        assert events[0][1] == f'Pulling image "{image}"'
        assert events[1][1].startswith(f'Failed to pull image "{image}": failed to pull and unpack image "{image}":')
        assert events[1][1].endswith(f"--image {image}=DIR)")
        assert [m for _, m in events[2:]] == [
            "Error: ErrImagePull", f'Back-off pulling image "{image}"', "Error: ImagePullBackOff",
        ]  # fmt: skip
        assert cluster.phase("one") == "Pending"


async def test_missing_image_with_pull_policy_never(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", "exit 0", container={"image": "absent:1", "imagePullPolicy": "Never"})
        await cluster.until(lambda: "waiting/ErrImageNeverPull" in str(steps(cluster, "one")))
        message = 'Container image "absent:1" is not present with pull policy of Never'
        assert container(cluster, "one")["state"]["waiting"]["message"] == message
        assert cluster.events("one")[1:3] == [("ErrImageNeverPull", message), ("Failed", "Error: ErrImageNeverPull")]


async def test_invalid_image_name(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", "exit 0", container={"image": "team/My Trainer:1"})
        await cluster.until(lambda: "waiting/InvalidImageName" in str(steps(cluster, "one")))
        why = 'couldn\'t parse image name "team/My Trainer:1": invalid reference format'
        message = f'Failed to apply default image tag "team/My Trainer:1": {why}'
        assert container(cluster, "one")["state"]["waiting"]["message"] == message
        assert cluster.events("one")[1:3] == [("InspectFailed", message), ("Failed", "Error: InvalidImageName")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"configMapKeyRef": {"name": "absent", "key": "k"}}, 'configmap "absent" not found'),
        ({"secretKeyRef": {"name": "absent", "key": "k"}}, 'secret "absent" not found'),
        ({"configMapKeyRef": {"name": "there", "key": "k"}}, "couldn't find key k in ConfigMap default/there"),
    ],
)
async def test_missing_environment_source_is_a_config_error(tmp_path: Path, source: Obj, message: str) -> None:
    async with small(tmp_path) as cluster:
        there = cluster.store.create(r.CONFIG_MAP, {"metadata": {"name": "there", "namespace": "default"}})
        cluster.create("one", "echo $X", container={"env": [{"name": "X", "valueFrom": source}]})
        await cluster.until(lambda: "waiting/CreateContainerConfigError" in str(steps(cluster, "one")))
        assert container(cluster, "one")["state"]["waiting"]["message"] == message
        assert ("Failed", f"Error: {message}") in cluster.events("one")
        if "couldn't" in message:
            cluster.store.update(r.CONFIG_MAP, {**there, "data": {"k": "now"}})
            assert await cluster.ended("one") == "Succeeded"
            assert cluster.log(cluster.pod("one") or {}) == "now\n"


async def test_container_without_a_command_fails(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", [])
        await cluster.until(lambda: "waiting/CreateContainerError" in str(steps(cluster, "one")))


async def test_missing_volume_source_keeps_the_pod_pending(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", "exit 0", volumes=[{"name": "s", "secret": {"secretName": "absent"}}])
        message = 'MountVolume.SetUp failed for volume "s" : secret "absent" not found'
        await cluster.until(lambda: ("FailedMount", message) in cluster.events("one"))
        assert waited(cluster, "one") == ["ContainerCreating"]
        cluster.store.create(r.SECRET, {"metadata": {"name": "absent", "namespace": "default"}, "data": {}})
        assert await cluster.ended("one") == "Succeeded"


# ends that the pod did not choose


async def test_container_over_its_memory_limit_is_oom_killed(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        program = "import time; x = bytearray(100 << 20); time.sleep(60)"
        cluster.create("one", ["python3", "-c", program], container={"resources": {"limits": {"memory": "50Mi"}}})
        assert await cluster.ended("one") == "Failed"
        terminated = container(cluster, "one")["state"]["terminated"]
        assert (terminated["exitCode"], terminated["reason"]) == (137, "OOMKilled")


async def test_deadline_fails_the_pod(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", SLEEP, activeDeadlineSeconds=1)
        await cluster.up("one")
        assert await cluster.ended("one") == "Failed"
        status = (cluster.pod("one") or {})["status"]
        message = "Pod was active on the node longer than the specified deadline"
        assert (status["reason"], status["message"]) == ("DeadlineExceeded", message)
        assert container(cluster, "one")["state"]["terminated"]["exitCode"] == 143
        assert ("Running", "True", "True", "False/PodFailed", "running") in steps(cluster, "one")
        assert cluster.events("one")[-2:] == [("DeadlineExceeded", message), ("Killing", "Stopping container pytorch")]


async def test_deletion_is_graceful(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        pod = cluster.create("one", SLEEP, restartPolicy="OnFailure")
        await cluster.up("one")
        cluster.store.delete(r.POD, "default", "one")
        await cluster.until(lambda: cluster.pod("one") is None)
        last = cluster.history["one"][-1]
        assert last["phase"] == "Failed"
        assert last["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 143
        assert conditions(last)["Ready"] == "False/PodFailed"
        assert ("Killing", "Stopping container pytorch") in cluster.events("one")
        await cluster.until(lambda: not (tmp_path / "pods" / pod["metadata"]["uid"]).exists())


async def test_a_later_deletion_shortens_the_grace(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        pod = cluster.create("one", "trap '' TERM; echo up; sleep 60", terminationGracePeriodSeconds=600)
        await cluster.until(lambda: cluster.log(pod) == "up\n")
        cluster.store.delete(r.POD, "default", "one")
        await cluster.until(lambda: ("Killing", "Stopping container pytorch") in cluster.events("one"))
        cluster.store.delete(r.POD, "default", "one", grace=1)
        await cluster.until(lambda: cluster.pod("one") is None)
        assert cluster.history["one"][-1]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137


async def test_force_deleted_pod_is_killed(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        here = tmp_path / "pid"
        pod = cluster.create("one", f"echo $$$$ > {here}; echo up; exec sleep 600")
        await cluster.until(lambda: cluster.log(pod) == "up\n")
        cluster.store.delete(r.POD, "default", "one", grace=0)
        again = cluster.create("one", "echo second")
        assert await cluster.ended("one") == "Succeeded"
        assert cluster.log(again) == "second\n"
        pid = int(here.read_text())
        await cluster.until(lambda: not Path(f"/proc/{pid}").exists())


async def test_a_pod_that_never_started_is_deleted(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", "exit 0", container={"image": "absent"})
        await cluster.until(lambda: "ErrImagePull" in waited(cluster, "one"))
        cluster.store.delete(r.POD, "default", "one")
        await cluster.until(lambda: cluster.pod("one") is None)


async def test_pod_is_deleted_when_its_finalizer_is_removed(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", SLEEP, metadata={"finalizers": ["batch.kubernetes.io/job-tracking"]})
        await cluster.up("one")
        cluster.store.delete(r.POD, "default", "one")
        await cluster.until(lambda: cluster.phase("one") == "Failed")
        pod = cluster.pod("one") or {}
        cluster.store.update(r.POD, {**pod, "metadata": {**pod["metadata"], "finalizers": []}})
        await cluster.until(lambda: cluster.pod("one") is None)


async def test_eviction_fails_the_pod(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", SLEEP)
        await cluster.runs("one")
        message = "The node was low on resource: memory."
        cluster.kubelets[0].evict(cluster.pod("one") or {}, message)
        assert await cluster.ended("one") == "Failed"
        status = (cluster.pod("one") or {})["status"]
        assert (status["reason"], status["message"]) == ("Evicted", message)
        assert conditions(status)["DisruptionTarget"] == f"True/TerminationByKubelet/{message}"
        assert ("Evicted", message) in cluster.events("one")


async def test_lost_node_is_ready_after_its_return(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", SLEEP, restartPolicy="OnFailure")
        cluster.create("two", SLEEP)
        await cluster.runs("one")
        await cluster.runs("two")
        kubelet = cluster.kubelets[0]
        kubelet.lose()
        node = cluster.store.get(r.NODE, None, "ktrain-node-0")
        assert conditions(node["status"])["Ready"] == "Unknown/NodeStatusUnknown/Kubelet stopped posting node status."
        await cluster.until(lambda: conditions((cluster.pod("one") or {})["status"])["Ready"] == "False")
        node = cluster.store.get(r.NODE, None, "ktrain-node-0")
        assert {t["effect"] for t in node["spec"]["taints"]} == {"NoSchedule", "NoExecute"}
        assert cluster.phase("one") == "Running"
        cluster.create("three", "exit 0")
        await cluster.until(lambda: "untolerated taint {node.kubernetes.io/unreachable}" in str(cluster.pod("three")))
        kubelet.recover()
        assert await cluster.ended("two") == "Failed"
        assert await cluster.ended("three") == "Succeeded"
        await cluster.until(lambda: container(cluster, "one")["restartCount"] == 1)
        await cluster.runs("one")


async def test_pods_of_a_node_that_stays_lost_are_terminating(tmp_path: Path) -> None:
    async with small(tmp_path, node_times=NodeTimes(tolerations=0.001)) as cluster:
        cluster.create("one", SLEEP)
        await cluster.runs("one")
        cluster.kubelets[0].lose()
        await cluster.until(lambda: "deletionTimestamp" in (cluster.pod("one") or {})["metadata"])
        assert cluster.phase("one") == "Running"
        cluster.kubelets[0].recover()
        await cluster.until(lambda: cluster.pod("one") is None)


# what the process sees


async def test_environment_of_a_container(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.store.create(r.CONFIG_MAP, {
            "metadata": {"name": "c", "namespace": "default"}, "data": {"a": "from map", "b": "two"},
        })  # fmt: skip
        cluster.store.create(r.SECRET, {"metadata": {"name": "s", "namespace": "default"}, "data": {"p": "cGFzcw=="}})
        env: list[Obj] = [
            {"name": "A", "value": "first"},
            {"name": "B", "value": "$(A) $(UNKNOWN) $$(A)"},
            {"name": "A", "value": "last"},
            {"name": "MAP", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "a"}}},
            {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "p"}}},
            {"name": "OPTIONAL", "valueFrom": {"secretKeyRef": {"name": "no", "key": "p", "optional": True}}},
            {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['l']"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "MEM", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        ]
        spec = {
            "env": env, "envFrom": [{"prefix": "M_", "configMapRef": {"name": "c"}}],
            "args": ["arg $(A) $HOSTNAME"], "resources": {"limits": {"memory": "1Gi"}},
        }  # fmt: skip
        pod = cluster.create("one", ["sh", "-c", 'env; echo "$0"'], container=spec, metadata={"labels": {"l": "v"}})
        assert await cluster.ended("one") == "Succeeded"
        lines = cluster.log(pod).splitlines()
        seen = dict(line.split("=", 1) for line in lines[:-1])
        assert lines[-1] == "arg last $HOSTNAME"
        expected = {
            "A": "last", "B": "first $(UNKNOWN) $(A)", "MAP": "from map", "SECRET": "pass", "LABEL": "v",
            "NODE": "ktrain-node-0", "IP": "127.0.0.1", "MEM": "1024", "M_a": "from map", "M_b": "two",
            "HOSTNAME": "one", "CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }  # fmt: skip
        assert {k: seen.get(k) for k in expected} == expected
        assert "OPTIONAL" not in seen
        assert set(seen) - set(expected) <= {"PATH", "HOME", "PWD", "TMPDIR", "LD_LIBRARY_PATH", "OLDPWD", "SHLVL", "_"}


def owned(uid: str) -> Obj:
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": uid, "uid": uid, "controller": True}
    return {"ownerReferences": [owner]}


SERVE = """
import os, socket
server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
print("listening", flush=True)
server.accept()[0].sendall(os.environ["JOB"].encode())
"""
CONNECT = """
import os, socket
host, _, port = os.environ["PET_RDZV_ENDPOINT"].rpartition(":")
assert port == os.environ["MASTER_PORT"] == os.environ["PET_MASTER_PORT"]
print(socket.create_connection((host, int(port))).recv(100).decode())
"""


async def test_two_jobs_can_use_the_same_port(tmp_path: Path) -> None:
    async with small(tmp_path, nodes=2) as cluster:

        def member(job: str, role: str, program: str) -> Obj:
            address = f"{job}-master-0"
            env = {"JOB": job, "MASTER_ADDR": address, "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456",
                   "PET_RDZV_ENDPOINT": f"{address}:23456"}  # fmt: skip
            spec = {"env": [{"name": k, "value": v} for k, v in env.items()]}
            return cluster.create(f"{job}-{role}", ["python", "-c", program], container=spec, metadata=owned(job))

        masters = [member(job, "master", SERVE) for job in "ab"]
        await cluster.until(lambda: all(cluster.log(m) == "listening\n" for m in masters))
        workers = [member(job, "worker", CONNECT) for job in "ab"]
        for job in "ab":
            assert await cluster.ended(f"{job}-worker") == "Succeeded"
        assert [cluster.log(w) for w in workers] == ["a\n", "b\n"]
        api = {e["name"]: e["value"] for e in (cluster.pod("a-master") or {})["spec"]["containers"][0]["env"]}
        assert (api["MASTER_ADDR"], api["MASTER_PORT"]) == ("a-master-0", "23456")


async def test_container_runs_in_the_directory_of_its_image(tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "workspace").mkdir(parents=True)
    (image / "workspace" / "train.py").write_text("import os; print('trained in', os.getcwd())")
    async with small(tmp_path / "root", images={"trainer": image}) as cluster:
        one = cluster.create("one", ["python3", "/workspace/train.py"], container={"image": "trainer:1.0"})
        inside = {"image": "docker.io/library/trainer:2.0", "workingDir": "/workspace"}
        two = cluster.create("two", "exec python train.py --out=/workspace/train.py", container=inside)
        assert [await cluster.ended(p) for p in ("one", "two")] == ["Succeeded", "Succeeded"]
        assert cluster.log(one) == f"trained in {image}\n"
        assert cluster.log(two) == f"trained in {image}/workspace\n"


async def test_termination_messages(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("file", "echo from the file > /dev/termination-log; exit 1")
        own = {"terminationMessagePath": "/out/why", "env": [{"name": "WHY", "value": "/out/why"}]}
        cluster.create("own", "echo elsewhere > $WHY", container=own)
        cluster.create("none", "echo only a log; exit 1")
        cluster.create("long", "head -c 10000 /dev/zero | tr '\\0' x > /dev/termination-log")
        for name in ("file", "own", "none", "long"):
            await cluster.ended(name)
        messages = {
            name: container(cluster, name)["state"]["terminated"].get("message")
            for name in ("file", "own", "none", "long")
        }
        assert messages["file"] == "from the file\n"
        assert messages["own"] == "elsewhere\n"
        assert messages["none"] is None
        assert len(messages["long"]) == 4096


@pytest.mark.thorough
async def test_many_pods_run_concurrently(tmp_path: Path) -> None:
    async with small(tmp_path, nodes=4, timing=FAST) as cluster:
        for i in range(40):
            cluster.create(f"p-{i}", f"echo {i}")
        ends = await asyncio.gather(*(cluster.ended(f"p-{i}") for i in range(40)))
        assert set(ends) == {"Succeeded"}
        assert [cluster.log(cluster.pod(f"p-{i}") or {}) for i in range(40)] == [f"{i}\n" for i in range(40)]


async def test_log_follower_continues_after_a_rotation(tmp_path: Path) -> None:
    """A client that connects later reads the existing log, as with a real kubelet."""
    async with small(tmp_path) as cluster:
        cluster.create("one", SLEEP)
        await cluster.up("one")
        pod = cluster.pod("one") or {}
        run = logapi.find_run(tmp_path, pod, logapi.LogOptions(follow=True))
        assert run
        log = shim.Log(str(run.path))
        log.feed(b"stdout", b"first\n")
        follower = logapi.read(cluster.store, run, logapi.LogOptions(follow=True))
        assert await anext(follower) == b"up\nfirst\n"
        log.feed(b"stdout", b"last of the old file\n")
        run.path.rename(run.path.with_suffix(".log.rotated"))
        log = shim.Log(str(run.path))
        log.feed(b"stdout", b"first of the new file\n")
        assert await anext(follower) == b"last of the old file\n"
        assert await anext(follower) == b"first of the new file\n"
        cluster.store.delete(r.POD, "default", "one")
        assert [block async for block in follower] == []
        late = [block async for block in logapi.read(cluster.store, run, logapi.LogOptions())]
        assert late == [b"first of the new file\n"]
