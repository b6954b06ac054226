"""What the recordings of job controllers do not show, from the operators' sources."""

from __future__ import annotations

import base64
import copy
from typing import Any

import pytest

from components.controller_play import NAMESPACE, Play
from ktrain_embedded.controllers.batchjob import JobController
from ktrain_embedded.controllers.jobpods import TRACKING
from ktrain_embedded.controllers.mpijob_v1 import MPIJobV1Controller
from ktrain_embedded.controllers.mpijob_v2beta1 import MPIJobV2Controller
from ktrain_embedded.controllers.pytorchjob import PyTorchJobController
from ktrain_embedded.objects import resources as r

FAILED = "Failed=True/PyTorchJobFailed"


def replica(name: str, replicas: int | None = 1, policy: str | None = None, **container: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"template": {"spec": {"containers": [{"name": name, "image": "image", **container}]}}}
    return {**spec, "replicas": replicas, **({"restartPolicy": policy} if policy else {})}


def pytorch(specs: dict[str, Any] | None = None, **spec: Any) -> Play:
    """A play with the PyTorchJob `job`: by default one Master and one Worker."""
    play = Play(PyTorchJobController)
    specs = specs or {"Master": replica("pytorch"), "Worker": replica("pytorch")}
    play.create(r.PYTORCHJOB, {"metadata": {"name": "job"}, "spec": {"pytorchReplicaSpecs": specs, **spec}})
    return play


def mpi(resource: r.Resource, launcher: dict[str, Any], worker: dict[str, Any] | None = None, **spec: Any) -> Play:
    """A play with the MPIJob `job`."""
    make: Any = MPIJobV1Controller if resource == r.MPIJOB_V1 else MPIJobV2Controller
    play = Play(make, JobController, mpi_api="v1" if resource == r.MPIJOB_V1 else "v2beta1")
    specs = {"Launcher": launcher, **({"Worker": worker} if worker else {})}
    play.create(resource, {"metadata": {"name": "job"}, "spec": {"mpiReplicaSpecs": specs, **spec}})
    return play


def env(play: Play, pod: str) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in play.pod(pod)["spec"]["containers"][0]["env"]}


class TestPyTorchEnvironment:
    @pytest.mark.parametrize(
        ("per_node", "expected", "world"),
        [(None, "auto", "4"), ("auto", "auto", "4"), ("gpu", "gpu", "4"), ("8", "8", "32")],
    )
    def test_processes_per_node_are_passed_to_the_pods(self, per_node: str | None, expected: str, world: str) -> None:
        given = {"nprocPerNode": per_node} if per_node else {}
        play = pytorch({"Master": replica("pytorch"), "Worker": replica("pytorch", 3)}, **given)
        seen = env(play, "job-worker-2")
        assert (seen["PET_NPROC_PER_NODE"], seen["WORLD_SIZE"], seen["RANK"]) == (expected, world, "3")

    def test_every_field_of_elastic_policy_becomes_a_variable(self) -> None:
        policy = {
            "minReplicas": 2, "maxReplicas": 4, "rdzvBackend": "etcd", "rdzvHost": "etcd.local", "rdzvPort": 2379,
            "rdzvId": "run", "rdzvConf": [{"key": "a", "value": "1"}, {"key": "b", "value": "2"}], "standalone": True,
            "nProcPerNode": 3, "maxRestarts": 9,
        }  # fmt: skip
        seen = env(pytorch({"Worker": replica("pytorch", 2)}, elasticPolicy=policy), "job-worker-1")
        assert {k: v for k, v in seen.items() if k.startswith("PET_")} == {
            "PET_RDZV_ENDPOINT": "etcd.local:2379", "PET_RDZV_BACKEND": "etcd", "PET_NNODES": "2:4",
            "PET_MAX_RESTARTS": "9", "PET_NPROC_PER_NODE": "3", "PET_RDZV_ID": "run", "PET_RDZV_CONF": "a=1,b=2",
            "PET_STANDALONE": "",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("policy", "nodes"), [({}, "2:2"), ({"minReplicas": 1}, "1:1"), ({"maxReplicas": 5}, "5:5")]
    )
    def test_missing_elastic_bounds_have_defaults(self, policy: dict[str, int], nodes: str) -> None:
        play = pytorch({"Worker": replica("pytorch", 2)}, elasticPolicy=policy)
        assert env(play, "job-worker-0")["PET_NNODES"] == nodes

    def test_variables_and_ports_of_the_manifest_are_kept(self) -> None:
        port = {"name": "pytorchjob-port", "containerPort": 1234}
        own = replica("pytorch", env=[{"name": "RANK", "value": "mine"}], ports=[port])
        play = pytorch({"Master": own})
        container = play.pod("job-master-0")["spec"]["containers"][0]
        assert [e["value"] for e in container["env"] if e["name"] == "RANK"] == ["mine", "0"]
        assert env(play, "job-master-0")["MASTER_PORT"] == "1234"
        assert play.store.get(r.SERVICE, NAMESPACE, "job-master-0")["spec"]["ports"][0]["port"] == 1234


class TestPyTorchJob:
    @pytest.mark.parametrize("policy", ["OnFailure", "Always", "ExitCode"])
    def test_evicted_pod_is_recreated(self, policy: str) -> None:
        play = pytorch({"Master": replica("pytorch", policy=policy)})
        first = play.pod("job-master-0")["metadata"]["uid"]
        play.run("job-master-0")
        play.status("job-master-0", phase="Failed", reason="Evicted", containerStatuses=[])
        assert play.pod("job-master-0")["metadata"]["uid"] != first
        assert play.types(r.PYTORCHJOB, "job") == ["Created=True", "Restarting=True"]

    def test_deleted_pod_counts_as_failed_at_once_under_never(self) -> None:
        play = pytorch({"Master": replica("pytorch", policy="Never")})
        play.run("job-master-0")
        play.store.delete(r.POD, NAMESPACE, "job-master-0")
        play.settle()
        assert play.conditions(r.PYTORCHJOB, "job")[-1].startswith(FAILED)

    def test_exitcode_job_with_a_ttl_is_never_removed(self) -> None:
        play = pytorch({"Master": replica("pytorch", policy="ExitCode")}, runPolicy={"ttlSecondsAfterFinished": 1})
        play.run("job-master-0")
        play.exit("job-master-0", 1)
        play.wait(60)
        assert play.conditions(r.PYTORCHJOB, "job")[-1].startswith(FAILED)
        assert "completionTime" not in play.store.get(r.PYTORCHJOB, NAMESPACE, "job")["status"]

    def test_a_template_policy_is_overridden_with_a_warning(self) -> None:
        spec = replica("pytorch", policy="Never")
        spec["template"]["spec"]["restartPolicy"] = "Always"
        play = pytorch({"Master": spec})
        assert play.pod("job-master-0")["spec"]["restartPolicy"] == "Never"
        assert any("SetPodTemplateRestartPolicy" in e for e in play.events("job"))

    def test_any_elastic_worker_that_succeeds_ends_the_job(self) -> None:
        play = pytorch({"Worker": replica("pytorch", 3)}, elasticPolicy={})
        play.run("job-worker-0", "job-worker-1", "job-worker-2")
        play.exit("job-worker-1", 0)
        assert play.conditions(r.PYTORCHJOB, "job")[-1].startswith("Succeeded=True")
        assert play.counts(r.PYTORCHJOB, "job") == {"Worker": {"succeeded": 3}}

    def test_suspension_deletes_running_pods(self) -> None:
        play = pytorch()
        play.run("job-master-0", "job-worker-0")
        play.patch(r.PYTORCHJOB, "job", lambda job: job["spec"].update(runPolicy={"suspend": True}))
        play.reap()
        assert (play.names(r.POD), play.names(r.SERVICE)) == ([], [])
        assert play.types(r.PYTORCHJOB, "job") == ["Created=True", "Running=False", "Suspended=True"]
        play.wait(10)
        play.patch(r.PYTORCHJOB, "job", lambda job: job["spec"].update(runPolicy={"suspend": False}))
        play.run("job-master-0")
        assert play.types(r.PYTORCHJOB, "job") == ["Created=True", "Suspended=False", "Running=True"]


class TestMPIJobV1:
    def test_launcher_with_gpus_is_in_the_hostfile(self) -> None:
        launcher = replica("mpi", resources={"limits": {"nvidia.com/gpu": 1}})
        play = mpi(r.MPIJOB_V1, launcher, replica("mpi", 1), slotsPerWorker=2, mainContainer="mpi")
        config = play.store.get(r.CONFIG_MAP, NAMESPACE, "job-config")["data"]
        assert config["hostfile"] == "job-launcher slots=2\njob-worker-0 slots=2\n"
        assert "--container mpi -- /bin/sh" in config["kubexec.sh"]
        play.run("job-worker-0")
        config = play.store.get(r.CONFIG_MAP, NAMESPACE, "job-config")["data"]
        assert config["discover_hosts.sh"] == "#!/bin/sh\necho job-launcher:2\n\necho job-worker-0:2"
        assert "NVIDIA_VISIBLE_DEVICES" not in env(play, "job-launcher")

    def test_a_worker_without_a_command_sleeps(self) -> None:
        play = mpi(r.MPIJOB_V1, replica("mpi"), replica("mpi", 1))
        container = play.pod("job-worker-0")["spec"]["containers"][0]
        assert (container["command"], container["args"]) == (["sleep"], ["365d"])

    def test_foreign_object_of_the_same_name_blocks_the_job(self) -> None:
        play = mpi(r.MPIJOB_V1, {**replica("mpi"), "replicas": 2})  # invalid: makes nothing yet
        play.create(r.CONFIG_MAP, {"metadata": {"name": "job-config"}})
        play.patch(r.MPIJOB_V1, "job", lambda job: job["spec"]["mpiReplicaSpecs"]["Launcher"].update(replicas=1))
        assert any("ErrResourceExists" in event for event in play.events("job"))
        assert play.types(r.MPIJOB_V1, "job") == []

    @pytest.mark.parametrize(
        ("specs", "problem"),
        [
            (None, "Master ReplicaSpec must be present"),
            ({"Launcher": {"template": {"spec": {}}}}, "containers definition expected in Launcher"),
            ({"Worker": replica("mpi")}, "Master ReplicaSpec must be present"),
        ],
    )
    def test_invalid_jobs_are_refused(self, specs: Any, problem: str) -> None:
        play = Play(MPIJobV1Controller)
        play.create(r.MPIJOB_V1, {"metadata": {"name": "job"}, "spec": {"mpiReplicaSpecs": specs}})
        (event,) = play.events("job")
        assert event.startswith("Warning MPIJobFailedValidation MPIJob failed validation because")
        assert problem in event


class TestMPIJobV2:
    def test_ssh_keys_are_created_once(self) -> None:
        play = mpi(r.MPIJOB_V2BETA1, replica("mpi"), replica("mpi", 1))
        secret = play.store.get(r.SECRET, NAMESPACE, "job-ssh")
        private, public = (base64.b64decode(secret["data"][k]) for k in ("ssh-privatekey", "ssh-publickey"))
        assert private.startswith(b"-----BEGIN EC PRIVATE KEY-----")
        assert public.startswith(b"ecdsa-sha2-nistp521 ")
        play.run("job-worker-0")
        assert play.store.get(r.SECRET, NAMESPACE, "job-ssh") == secret

    def test_mpich_gets_its_variables(self) -> None:
        play = mpi(r.MPIJOB_V2BETA1, replica("mpi"), replica("mpi", 1), mpiImplementation="MPICH", slotsPerWorker=2)
        (launcher,) = [name for name in play.names(r.POD) if "launcher" in name]
        assert env(play, launcher)["HYDRA_HOST_FILE"] == "/etc/mpi/hostfile"
        config = play.store.get(r.CONFIG_MAP, NAMESPACE, "job-config")["data"]
        assert config["hostfile"] == f"job-worker-0.job.{NAMESPACE}.svc:2\n"

    def test_an_evicted_worker_fails_the_job_until_the_launcher_succeeds(self) -> None:
        play = mpi(r.MPIJOB_V2BETA1, replica("mpi"), replica("mpi", 1))
        (launcher,) = [name for name in play.names(r.POD) if "launcher" in name]
        play.run("job-worker-0", launcher)
        play.status("job-worker-0", phase="Failed", reason="Evicted")
        status = play.store.get(r.MPIJOB_V2BETA1, NAMESPACE, "job")["status"]
        assert play.conditions(r.MPIJOB_V2BETA1, "job")[-1] == "Failed=True/MPIJobEvicted/1/1 workers are evicted"
        assert "completionTime" not in status
        play.exit(launcher, 0)
        play.wait(2)
        types = play.types(r.MPIJOB_V2BETA1, "job")
        assert types == ["Created=True", "Running=False", "Failed=False", "Succeeded=True"]

    def test_scaling_updates_the_hostfile(self) -> None:
        play = mpi(r.MPIJOB_V2BETA1, replica("mpi"), replica("mpi", 3))
        play.run("job-worker-0", "job-worker-1", "job-worker-2")
        play.patch(r.MPIJOB_V2BETA1, "job", lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"].update(replicas=1))
        play.reap()
        config = play.store.get(r.CONFIG_MAP, NAMESPACE, "job-config")["data"]
        assert config["hostfile"].count("\n") == 1
        assert config["discover_hosts.sh"] == f"#!/bin/sh\necho job-worker-0.job.{NAMESPACE}.svc\n"


class TestJob:
    SPEC: dict[str, Any] = {  # noqa: RUF012
        "template": {"spec": {"containers": [{"name": "main", "image": "image"}], "restartPolicy": "Never"}},
    }

    def play(self, **spec: Any) -> Play:
        play = Play(JobController)
        play.create(r.BATCH_JOB, {"metadata": {"name": "job"}, "spec": {**copy.deepcopy(self.SPEC), **spec}})
        return play

    def status(self, play: Play) -> dict[str, Any]:
        status: dict[str, Any] = play.store.get(r.BATCH_JOB, NAMESPACE, "job")["status"]
        return status

    def test_pod_has_a_finalizer_until_it_is_counted(self) -> None:
        play = self.play()
        (name,) = play.names(r.POD)
        play.exit(name, 0)
        play.store.delete(r.POD, NAMESPACE, name)
        assert play.pod(name)["metadata"]["finalizers"] == [TRACKING]
        play.wait(2)
        assert play.names(r.POD) == []
        assert self.status(play)["succeeded"] == 1

    def test_delay_of_retries_grows(self) -> None:
        play = self.play(backoffLimit=3)
        for wait in (10, 20):
            (name,) = [p["metadata"]["name"] for p in play.store.list(r.POD) if p["status"].get("phase") != "Failed"]
            play.exit(name, 1)
            play.wait(wait - 3)
            before = len(play.names(r.POD))
            play.wait(5)
            assert len(play.names(r.POD)) == before + 1
        assert self.status(play)["failed"] == 2

    def test_unscheduled_pod_that_was_deleted_is_replaced(self) -> None:
        play = self.play(podReplacementPolicy="Failed")
        (name,) = play.names(r.POD)
        play.store.delete(r.POD, NAMESPACE, name)
        play.wait(30)
        (successor,) = play.names(r.POD)
        assert successor != name
        assert self.status(play)["failed"] == 1

    @pytest.mark.parametrize("propagation", ["Background", "Foreground"])
    def test_deletion_removes_the_finalizers_of_pods(self, propagation: str) -> None:
        play = self.play()
        play.run(*play.names(r.POD))
        play.store.delete(r.BATCH_JOB, NAMESPACE, "job", propagation=propagation)
        play.settle()
        play.reap()
        play.wait(1)
        assert (play.names(r.POD), play.names(r.BATCH_JOB)) == ([], [])

    def test_ttl_deletes_the_job(self) -> None:
        play = self.play(ttlSecondsAfterFinished=60)
        (pod,) = play.names(r.POD)
        play.exit(pod, 0)
        play.wait(50)
        assert play.names(r.BATCH_JOB) == ["job"]
        play.wait(15)
        assert (play.names(r.BATCH_JOB), play.names(r.POD)) == ([], [])
