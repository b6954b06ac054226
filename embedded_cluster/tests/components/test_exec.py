"""Names and commands between pods, and real mpirun over them."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from components.small_cluster import Small, small
from components.test_shim import command_line, survivors, until
from ktrain_embedded.node.exec import resolve
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Obj, Store

READY = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
KUBEXEC = '#!/bin/sh\nset -x\nPOD_NAME=$1\nshift\n/opt/kube/kubectl exec ${POD_NAME} -- /bin/sh -c "$*"'
RANK = """
import os
from mpi4py import MPI
c = MPI.COMM_WORLD
print("rank", c.Get_rank(), "of", c.Get_size(), "on", os.environ["HOSTNAME"], "sum", c.allreduce(c.Get_rank() + 1),
      flush=True)
"""


def pod(store: Store, status: Obj, **spec: str) -> None:
    """A pod that the selector {"a": "b"} selects."""
    meta = {"name": "p", "namespace": "default", "labels": {"a": "b"}}
    made = store.create(r.POD, {"metadata": meta, "spec": {"containers": [], **spec}})
    store.update_status(r.POD, made, status)


@pytest.mark.parametrize(
    ("name", "status", "found"),
    [
        ("m-0", READY, True),
        ("m-0.default", READY, True),
        ("m-0.default.svc", READY, True),
        ("m-0.default.svc.cluster.local", READY, True),
        ("m-0.other.svc", READY, False),
        ("m-1", READY, False),
        ("host.sub.default.svc", READY, True),
        ("host.sub", READY, True),
        ("host", READY, True),
        ("host.other.default.svc", READY, False),
        ("m-0", {**READY, "conditions": []}, False),
        ("m-0", {**READY, "phase": "Succeeded"}, False),
        ("", READY, False),
    ],
)
def test_host_names_are_resolved_by_services(name: str, status: Obj, found: bool) -> None:
    store = Store()
    for service, selector in (("m-0", {"a": "b"}), ("sub", {"a": "b"})):
        store.create(r.SERVICE, {"metadata": {"name": service, "namespace": "default"}, "spec": {"selector": selector}})
    pod(store, status, hostname="host", subdomain="sub")
    assert (resolve(store, "default", name) is not None) == found


def test_unready_pods_resolve_with_publish_not_ready_addresses() -> None:
    store = Store()
    spec = {"selector": {"a": "b"}, "publishNotReadyAddresses": True}
    store.create(r.SERVICE, {"metadata": {"name": "s", "namespace": "default"}, "spec": spec})
    pod(store, {**READY, "conditions": []})
    assert resolve(store, "default", "s")


def workers(cluster: Small, command: list[str] | str = "sleep 600 & wait", **spec: Any) -> list[Obj]:
    return [
        cluster.create(f"real-worker-{i}", command, **{"terminationGracePeriodSeconds": 0, **spec}) for i in range(2)
    ]


def launcher_v1(cluster: Small, command: list[str] | str, own_host: str = "") -> Obj:
    """A launcher as training-operator makes it (recording 41b).

    :param own_host: its line in the hostfile. Default: it has none.
    """
    cluster.store.create(r.CONFIG_MAP, {"metadata": {"name": "real-config", "namespace": "default"}, "data": {
        "hostfile": own_host + "real-worker-0 slots=1\nreal-worker-1 slots=1\n", "kubexec.sh": KUBEXEC,
        "discover_hosts.sh": "#!/bin/sh\necho real-worker-0:1\necho real-worker-1:1",
    }})  # fmt: skip
    items = [
        {"key": "kubexec.sh", "path": "kubexec.sh", "mode": 365},
        {"key": "hostfile", "path": "hostfile", "mode": 292},
        {"key": "discover_hosts.sh", "path": "discover_hosts.sh", "mode": 365},
    ]
    mounts = [
        {"name": "mpi-job-kubectl", "mountPath": "/opt/kube"},
        {"name": "mpi-job-config", "mountPath": "/etc/mpi"},
    ]
    env = [
        {"name": "OMPI_MCA_plm_rsh_agent", "value": "/etc/mpi/kubexec.sh"},
        {"name": "OMPI_MCA_orte_default_hostfile", "value": "/etc/mpi/hostfile"},
        {"name": "NVIDIA_VISIBLE_DEVICES"},
        {"name": "I_MPI_HYDRA_BOOTSTRAP", "value": "rsh"},
    ]
    deliver = {
        "name": "kubectl-delivery", "image": "mpioperator/kubectl-delivery:latest", "volumeMounts": mounts,
        "env": [{"name": "TARGET_DIR", "value": "/opt/kube"}, {"name": "NAMESPACE", "value": "default"}],
    }  # fmt: skip
    return cluster.create(
        "real-launcher", command, container={"env": env, "volumeMounts": mounts}, initContainers=[deliver],
        volumes=[
            {"name": "mpi-job-kubectl", "emptyDir": {}},
            {"name": "mpi-job-config", "configMap": {"name": "real-config", "items": items}},
        ],
    )  # fmt: skip


def launcher_v2(cluster: Small, command: list[str] | str) -> Obj:
    """A launcher as mpi-operator makes it (recording 31b)."""
    labels = {"job-name": "real"}
    cluster.store.create(r.SERVICE, {"metadata": {"name": "real", "namespace": "default"}, "spec": {
        "clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True,
    }})  # fmt: skip
    hosts = [f"real-worker-{i}.real.default.svc slots=1\n" for i in range(2)]
    cluster.store.create(r.CONFIG_MAP, {
        "metadata": {"name": "real-config", "namespace": "default"}, "data": {"hostfile": "".join(hosts)},
    })  # fmt: skip
    env = [
        {"name": "OMPI_MCA_orte_keep_fqdn_hostnames", "value": "true"},
        {"name": "OMPI_MCA_orte_default_hostfile", "value": "/etc/mpi/hostfile"},
        {"name": "OMPI_MCA_plm_rsh_args", "value": "-o ConnectionAttempts=10"},
    ]
    for i in range(2):
        cluster.create(f"real-worker-{i}", ["/usr/sbin/sshd", "-De"], hostname=f"real-worker-{i}", subdomain="real",
                       metadata={"labels": labels})  # fmt: skip
    return cluster.create(
        "real-launcher", command, hostname="real-launcher", subdomain="real", metadata={"labels": labels},
        container={"env": env, "volumeMounts": [{"name": "mpi-job-config", "mountPath": "/etc/mpi"}]},
        volumes=[{"name": "mpi-job-config", "configMap": {"name": "real-config"}}],
    )  # fmt: skip


MPIRUN = ["mpirun", "--allow-run-as-root", "-n", "2", "python3", "-c"]


async def test_kubectl_exec_runs_a_command_in_the_other_pod(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        made = workers(cluster)
        command = "echo typed | /etc/mpi/kubexec.sh real-worker-1 'read x; echo $x on $HOSTNAME; echo e >&2; exit 7'"
        launcher = launcher_v1(cluster, f"{command}; echo code $?")
        assert await cluster.ended("real-launcher") == "Succeeded"
        log = cluster.log(launcher)
        assert "typed on real-worker-1\n" in log
        assert "command terminated with exit code 7\ncode 7\n" in log
        assert [cluster.log(w) for w in made] == ["", ""]


async def test_kubectl_exec_has_the_messages_of_kubectl(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        workers(cluster)
        launcher = launcher_v1(cluster, "/opt/kube/kubectl exec gone -- true; /opt/kube/kubectl get pods")
        assert await cluster.ended("real-launcher") == "Failed"
        assert 'Error from server (NotFound): pods "gone" not found\n' in cluster.log(launcher)
        assert "error: this kubectl knows nothing but: exec" in cluster.log(launcher)


async def test_the_launcher_of_v1_waits_for_its_workers(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        launcher_v1(cluster, "exit 0")
        init = "initContainerStatuses"
        await cluster.until(lambda: "running" in str((cluster.pod("real-launcher") or {})["status"].get(init)))
        workers(cluster)
        assert await cluster.ended("real-launcher") == "Succeeded"


@pytest.mark.parametrize("launcher", [launcher_v1, launcher_v2])
async def test_real_mpirun_runs_ranks_in_the_workers(tmp_path: Path, launcher: Any) -> None:
    async with small(tmp_path, nodes=2) as cluster:
        if launcher is launcher_v1:
            workers(cluster)
        made = launcher(cluster, [*MPIRUN, RANK])
        await cluster.until(lambda: cluster.phase("real-launcher") in ("Succeeded", "Failed"))
        lines = [line for line in cluster.log(made).splitlines() if line.startswith("rank")]
        assert sorted(lines) == [f"rank {i} of 2 on real-worker-{i} sum 3" for i in range(2)], cluster.log(made)
        assert cluster.phase("real-launcher") == "Succeeded"


@pytest.mark.thorough
async def test_workers_do_not_share_dev_shm(tmp_path: Path) -> None:
    """Two ranks in each Worker; on a real cluster each pod has a /dev/shm of its own."""
    program = """
from mpi4py import MPI
import os
MPI.COMM_WORLD.allreduce(1)
print("shared", [name for name in os.listdir("/dev/shm") if name.startswith("sm_segment.")], flush=True)
MPI.COMM_WORLD.barrier()
"""
    async with small(tmp_path) as cluster:
        workers(cluster)
        command = ["mpirun", "--allow-run-as-root", "-n", "4", "--map-by", ":OVERSUBSCRIBE", "python3", "-c", program]
        made = launcher_v1(cluster, command)
        assert await cluster.ended("real-launcher") == "Succeeded", cluster.log(made)
        assert cluster.log(made).count("shared []\n") == 4


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [launcher_v1, launcher_v2])
async def test_end_of_a_worker_ends_its_ranks(tmp_path: Path, launcher: Any) -> None:
    marker = uuid.uuid4().hex
    program = "import sys, time; from mpi4py import MPI; print('up', flush=True); time.sleep(600)"
    async with small(tmp_path) as cluster:
        if launcher is launcher_v1:
            workers(cluster)
        made = launcher(cluster, [*MPIRUN, program, marker])
        await cluster.until(lambda: cluster.log(made).count("up\n") == 2)
        assert len([p for p in survivors(marker) if b"prte" not in command_line(p)]) >= 2
        cluster.store.delete(r.POD, "default", "real-worker-0", grace=0)
        assert await cluster.ended("real-launcher") == "Failed"
        await until(lambda: not survivors(marker))


async def test_end_of_the_launcher_ends_its_remote_commands(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    async with small(tmp_path) as cluster:
        workers(cluster)
        launcher_v1(cluster, f"/etc/mpi/kubexec.sh real-worker-0 'sleep 600; : {marker}'")
        await cluster.runs("real-launcher")
        in_worker = f"PATH={tmp_path}/pods/{(cluster.pod('real-worker-0') or {})['metadata']['uid']}".encode()

        def there() -> list[int]:
            return [p for p in survivors(marker) if in_worker in Path(f"/proc/{p}/environ").read_bytes()]

        await until(there)
        cluster.store.delete(r.POD, "default", "real-launcher", grace=0)
        await until(lambda: not survivors(marker))
        assert cluster.phase("real-worker-0") == "Running"


def worker_v2(cluster: Small, command: list[str] | str, **container: Any) -> Obj:
    """A Worker of mpi-operator with this command, that has the host name `w.real`."""
    labels = {"job-name": "real"}
    cluster.store.create(r.SERVICE, {"metadata": {"name": "real", "namespace": "default"}, "spec": {
        "clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True,
    }})  # fmt: skip
    return cluster.create("w", command, hostname="w", subdomain="real", metadata={"labels": labels},
                          container=container, terminationGracePeriodSeconds=0)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("worker", ["sleep 600", ["sleep", "600"], "/usr/sbin/sshd -t; sleep 600"])
async def test_ssh_is_refused_without_sshd(tmp_path: Path, worker: list[str] | str) -> None:
    async with small(tmp_path) as cluster:
        worker_v2(cluster, worker)
        await cluster.runs("w")
        pod = cluster.create("one", "ssh -x -o ConnectionAttempts=2 w.real true")
        assert await cluster.ended("one") == "Failed"
        assert cluster.log(pod) == "ssh: connect to host w.real port 22: Connection refused\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "worker",
    [
        ["/usr/sbin/sshd", "-De"],
        "/usr/sbin/sshd -D -f /home/mpiuser/.sshd_config",
        "mkdir -p run; /usr/sbin/sshd && sleep 600",
        "service ssh restart; sleep 600",
        "/etc/init.d/ssh start; sleep 600",
    ],
)
async def test_sessions_of_sshd_have_no_variables_of_their_container(tmp_path: Path, worker: list[str] | str) -> None:
    (tmp_path / "image" / "etc").mkdir(parents=True)
    (tmp_path / "image" / "etc" / "environment").write_text('# of PAM\nexport FROM_IMAGE="two words"\n')
    async with small(tmp_path / "root", images={"demo": tmp_path / "image"}, gpus=1) as cluster:
        worker_v2(
            cluster, worker, env=[{"name": "MODEL", "value": "sparrow"}], resources={"limits": {"nvidia.com/gpu": "1"}}
        )
        await cluster.runs("w")
        ask = "ssh -o ConnectionAttempts=60 w.real 'echo [$MODEL] [$FROM_IMAGE] [$HOSTNAME] [${CUDA_DEVICE_ORDER}]'"
        pod = cluster.create("one", ask)
        assert await cluster.ended("one") == "Succeeded", cluster.log(pod)
        assert cluster.log(pod) == "[] [two words] [w] [PCI_BUS_ID]\n"


async def test_ssh_to_its_own_pod_needs_no_sshd(tmp_path: Path) -> None:
    """mpirun starts the ranks of its own host without ssh, with its own variables."""
    async with small(tmp_path) as cluster:
        pod = worker_v2(cluster, "OWN=1 ssh w.real 'echo [$MODEL] [$OWN]'", env=[{"name": "MODEL", "value": "sparrow"}])
        assert await cluster.ended("w") == "Succeeded", cluster.log(pod)
        assert cluster.log(pod) == "[sparrow] [1]\n"


@pytest.mark.thorough
async def test_the_launcher_of_v1_does_not_wait_for_itself(tmp_path: Path) -> None:
    """A launcher with a GPU limit is a host of its own hostfile."""
    async with small(tmp_path) as cluster:
        workers(cluster)
        made = launcher_v1(cluster, [*MPIRUN[:2], "-n", "3", *MPIRUN[4:], RANK], own_host="real-launcher slots=1\n")
        assert await cluster.ended("real-launcher") == "Succeeded", cluster.log(made)
        hosts = sorted(line.split()[5] for line in cluster.log(made).splitlines() if line.startswith("rank"))
        assert hosts == ["real-launcher", "real-worker-0", "real-worker-1"]


async def test_ssh_to_an_unknown_host_fails(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        pod = cluster.create("one", "ssh -o StrictHostKeyChecking=no -x nobody true")
        assert await cluster.ended("one") == "Failed"
        assert cluster.log(pod) == "ssh: Could not resolve hostname nobody: Name or service not known\n"
        status = (cluster.pod("one") or {})["status"]["containerStatuses"][0]
        assert status["state"]["terminated"]["exitCode"] == 255


async def test_sshd_ends_with_its_pod(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        pod = cluster.create("one", ["/usr/sbin/sshd", "-De"])
        await cluster.until(lambda: "listening on :: port 22." in cluster.log(pod))
        cluster.store.delete(r.POD, "default", "one")
        await cluster.until(lambda: cluster.pod("one") is None)
        assert cluster.history["one"][-1]["phase"] == "Succeeded"
        assert cluster.log(pod).endswith("Received signal 15; terminating.\n")
