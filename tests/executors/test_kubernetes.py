"""The KubernetesExecutor: worker pods on the embedded cluster, beside the trainings, with logs in an emptyDir."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.clusters import TestCluster
from tests.clusters import cluster as a_cluster
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.chaos import chaos_airflow, check_end, check_reaped
from tests.e2e.kube import Kube
from tests.e2e.scenario import TASK, Begin, Stage
from tests.executors.scenarios import (
    ENDLESS,
    SETTINGS,
    check_adopted,
    check_marked_and_cleared,
    check_outcomes,
    check_stopped,
    lines,
    parent,
    wait_running,
)

pytestmark = [pytest.mark.executors, pytest.mark.timeout(1200)]

IMAGE = "airflow-worker"
LOGS = "/opt/airflow/logs"
INHERITED = ("AIRFLOW", "TEST_", "CHAOS_", "KTRAIN_", "PYTHON")  #: Begin the names of variables that worker pods get.
WORKERS = "airflow"  #: Label and taint of the nodes for worker pods.
MEMORY = 1536 * 2**20  #: Limit in bytes of the pods of `chaos_memory`. A worker takes about 600 MiB.


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with a_cluster(images={IMAGE: None}, nodes=4, gpus=64, node_times=0.1) as reached:
        yield reached


class Nodes:
    """Three nodes for worker pods."""

    def __init__(self, core: client.CoreV1Api) -> None:
        self._core = core
        _, *self.names = sorted(node.metadata.name for node in core.list_node().items)
        for name in self.names:
            taint = {"key": WORKERS, "value": "", "effect": "NoSchedule"}
            core.patch_node(name, {"metadata": {"labels": {WORKERS: ""}}, "spec": {"taints": [taint]}})

    def open(self, *names: str) -> None:
        """Let worker pods start on these nodes only."""
        for name in self.names:
            self._core.patch_node(name, {"spec": {"unschedulable": None if name in names else True}})


@pytest.fixture(scope="module")
def prepared(cluster: TestCluster) -> Nodes:
    return Nodes(Kube(str(cluster.kubeconfig)).core)


@pytest.fixture
def nodes(prepared: Nodes) -> Iterator[Nodes]:
    """Worker pods start on all of them afterwards."""
    yield prepared
    prepared.open(*prepared.names)


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, prepared: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    template = tmp_path_factory.mktemp("template") / "pod.yaml"
    settings = {
        **SETTINGS,
        "AIRFLOW__CORE__EXECUTOR": "KubernetesExecutor",
        "AIRFLOW__KUBERNETES_EXECUTOR__NAMESPACE": cluster.namespace,
        "AIRFLOW__KUBERNETES_EXECUTOR__IN_CLUSTER": "False",
        "AIRFLOW__KUBERNETES_EXECUTOR__CONFIG_FILE": str(cluster.kubeconfig),
        "AIRFLOW__KUBERNETES_EXECUTOR__WORKER_CONTAINER_REPOSITORY": IMAGE,
        "AIRFLOW__KUBERNETES_EXECUTOR__WORKER_CONTAINER_TAG": "test",
        "AIRFLOW__KUBERNETES_EXECUTOR__POD_TEMPLATE_FILE": str(template),
        "AIRFLOW__KUBERNETES_EXECUTOR__TASK_PUBLISH_MAX_RETRIES": "-1",
        "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "20",
        "CHAOS_WORKER_MEMORY": str(MEMORY),
    }
    with chaos_airflow(cluster, tmp_path_factory, **settings) as started:
        template.write_text(yaml.safe_dump(worker_pod(started.env)))
        yield started


def worker_pod(variables: dict[str, str]) -> dict[str, Any]:
    """The template of worker pods."""
    env: list[dict[str, Any]] = [{"name": n, "value": v} for n, v in variables.items() if n.startswith(INHERITED)]
    env.append({"name": "AIRFLOW__LOGGING__BASE_LOG_FOLDER", "value": LOGS})
    env.append({"name": "TEST_HOSTNAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    mounts = [{"name": "logs", "mountPath": LOGS}]
    spec = {
        "restartPolicy": "Never",
        "nodeSelector": {WORKERS: ""},
        "tolerations": [{"key": WORKERS, "operator": "Exists"}],
        "containers": [{"name": "base", "image": IMAGE, "env": env, "volumeMounts": mounts}],
        "volumes": [{"name": "logs", "emptyDir": {}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker"}, "spec": spec}


def worker_of(stage: Stage) -> client.V1Pod:
    """The pod that runs the task of a stage."""

    def running() -> client.V1Pod | None:
        found = stage.kube.pods(f"dag_id={stage.dag}")
        mine = [p for p in found if p.metadata.annotations["run_id"] == stage.run and p.status.phase == "Running"]
        return mine[0] if mine else None

    return wait_for("a worker pod runs", running)


def check_log(stage: Stage, seconds: int) -> None:
    """The UI shows those lines that the triggerer wrote: a pod's are gone with it."""
    shown = lines(stage)
    if stage.dag.startswith("chaos_deferred"):
        _, worker = stage.replicas  # the Master of a job that fails is deleted while it waits for its end
        assert shown[worker] == list(range(shown[worker][0], seconds))
    else:
        assert not shown


def test_outcomes(begin: Begin) -> None:
    check_outcomes(begin, check_log)


def test_marked_and_cleared(begin: Begin) -> None:
    check_marked_and_cleared(begin)


@dataclass(frozen=True)
class Stop:
    """
    :param act: gets the stage whose worker pod it stops, and the process of its task.
    :param signalled: whether the task gets SIGTERM.
    """

    act: Callable[[Stage, int], None]
    signalled: bool = False
    dag: str = "chaos_worker"


def delete(stage: Stage, **options: Any) -> None:
    stage.kube.core.delete_namespaced_pod(worker_of(stage).metadata.name, stage.kube.namespace, **options)


def evict(stage: Stage, task: int) -> None:
    stage.kube.evict(worker_of(stage).metadata.name)


def signal_all_and_delete(stage: Stage, task: int) -> None:
    """As the entrypoint of Airflow's image does, which passes the signal to all processes."""
    kill(parent(task), task, number=signal.SIGTERM)
    delete(stage)


def kill(*pids: int, number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, number)


STOPS = {
    "deleted": Stop(lambda stage, _: delete(stage), signalled=True),
    "deleted with 2 s": Stop(lambda stage, _: delete(stage, grace_period_seconds=2), signalled=True),
    "all signalled": Stop(signal_all_and_delete, signalled=True),
    "evicted": Stop(evict, signalled=True),
    "deleted by force": Stop(lambda stage, _: delete(stage, grace_period_seconds=0)),
    "killed": Stop(lambda _, task: kill(parent(task), task)),
    "task killed": Stop(lambda _, task: kill(task)),
    "out of memory": Stop(lambda _, task: kill(task, number=signal.SIGUSR1), dag="chaos_memory"),
}


def process_of(stage: Stage) -> int:
    """The process of a stage's task."""
    (process,) = stage.airflow.task_processes(stage.airflow.task(stage.dag, stage.run, TASK)["id"])
    return process


def test_stopped_workers(begin: Begin) -> None:
    """Each way to stop a worker pod: of a task with a retry, and of one without. All at once: each needs a minute."""
    retried = {how: begin(f"{stop.dag}_retries", seconds=ENDLESS) for how, stop in STOPS.items()}
    alone = {how: begin(stop.dag, seconds=ENDLESS) for how, stop in STOPS.items()}
    for stage in (*retried.values(), *alone.values()):
        wait_running(stage)
    out_of_memory = worker_of(alone["out of memory"])
    for how, stop in STOPS.items():
        for stage in (retried[how], alone[how]):
            stop.act(stage, process_of(stage))
    check_stopped(
        released=[alone[how] for how, stop in STOPS.items() if stop.signalled],
        left=[alone[how] for how, stop in STOPS.items() if not stop.signalled],
    )
    (ended,) = [
        p for p in alone["out of memory"].pods.objects.values() if p["metadata"]["uid"] == out_of_memory.metadata.uid
    ]
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"
    check_adopted(*retried.values())


def test_lost_and_silent_nodes(begin: Begin, cluster: TestCluster, nodes: Nodes) -> None:
    """The workers of a silent node go on. When it is back, it gets to know that their pods were deleted."""
    stays, lost, silent = nodes.names
    nodes.open(lost)
    retried, alone = begin("chaos_worker_retries", seconds=ENDLESS), begin("chaos_worker", seconds=ENDLESS)
    for stage in (retried, alone):
        wait_running(stage)
    nodes.open(silent)
    back, back_alone = begin("chaos_worker_retries", seconds=ENDLESS), begin("chaos_worker", seconds=ENDLESS)
    forced = begin("chaos_worker_retries", seconds=ENDLESS)
    followed = (back, back_alone, forced)
    for stage in followed:
        wait_running(stage)
    processes = {stage.run: process_of(stage) for stage in followed}
    nodes.open(stays)
    cluster.admin("lose", node=lost)
    cluster.admin("silence", node=silent)
    try:
        for stage in followed:
            wait_for("its worker pod is deleted", lambda s=stage: worker_of(s).metadata.deletion_timestamp)  # type: ignore[misc]
        delete(forced, grace_period_seconds=0)
        forced.wait_try(2)
        wait_for("the worker of try 1 has let go", lambda: not exists(processes[forced.run]))
        for stage in (back, back_alone):
            assert exists(processes[stage.run])
            assert stage.airflow.task(stage.dag, stage.run, TASK)["state"] == "running"
        cluster.admin("recover", node=silent)
        check_stopped(released=[back_alone], left=[alone])
        check_adopted(retried, back, forced)
    finally:
        for name in (lost, silent):
            cluster.admin("recover", node=name)


def exists(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def test_task_is_queued_too_long(begin: Begin, airflow: Airflow, nodes: Nodes) -> None:
    """No worker pod can start: Airflow fails the task, without using its retries. The reaper releases what is left."""
    left = begin("chaos_worker_retries", seconds=ENDLESS)
    wait_running(left)
    resumed = [begin(dag, seconds=ENDLESS) for dag in ("chaos_deferred", "chaos_deferred_retries")]
    for stage in resumed:
        wait_running(stage)
    nodes.open()
    airflow.end("scheduler")
    airflow.run(
        "scheduler",
        AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT="5",
        AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT_CHECK_INTERVAL="2",
    )
    delete(left, grace_period_seconds=0)
    for stage in resumed:
        stage.finish()
    assert left.wait_state("failed")["try_number"] == 2
    for stage in resumed:
        check_end(stage, "failed")
        assert stage.ended_as("Succeeded")
    airflow.end("scheduler")
    airflow.run("scheduler")
    nodes.open(*nodes.names)
    check_reaped(left)


def test_worker_is_stopped_while_a_task_resumes(begin: Begin) -> None:
    """The executor starts another pod if the task had not begun, else a retry returns the result."""
    stage = begin("chaos_deferred_retries", seconds=ENDLESS)
    wait_running(stage)
    stage.finish()
    wait_for("the training ends", stage.ended)
    delete(stage, grace_period_seconds=0)
    stage.wait_state("success")
    stage.check_freed()
    stage.check_created(1)


def test_scheduler_is_away(begin: Begin, airflow: Airflow) -> None:
    """Trainings that end meanwhile succeed."""
    stages = [begin(dag, seconds=ENDLESS) for dag in ("chaos_worker", "chaos_deferred")]
    for stage in stages:
        wait_running(stage)
    airflow.end("scheduler")
    for stage in stages:
        stage.finish()
    for stage in stages:
        wait_for("the training ends", stage.ended)
    airflow.run("scheduler")
    for stage in stages:
        check_end(stage, "success")


def test_pods_cannot_be_created_when_a_task_resumes(begin: Begin, cluster: TestCluster) -> None:
    """With task_publish_max_retries=-1, it waits."""
    stage = begin("chaos_deferred", seconds=ENDLESS)
    wait_running(stage)
    cluster.admin("status", status=503, verb="create", path="/pods$")
    stage.finish()
    stage.wait_state("queued")
    wait_for("the training ends", stage.ended)
    stage.check_freed()
    cluster.admin("clear")
    check_end(stage, "success")


def test_kubernetes_api_is_away(begin: Begin, airflow: Airflow, cluster: TestCluster) -> None:
    """Trainings go on. A scheduler that looks for orphaned tasks meanwhile ends: something must start it again."""
    stages = [begin(dag, seconds=ENDLESS) for dag in ("chaos_worker", "chaos_deferred")]
    for stage in stages:
        wait_running(stage)
    cluster.admin("refuse", seconds=20)
    wait_for("the API server is away", lambda: not stages[0].answers())
    wait_for("the API server is back", stages[0].answers)
    for stage in stages:
        stage.finish()

    def succeeded() -> bool:
        if airflow.processes["scheduler"].poll() is not None:
            airflow.run("scheduler")
        return all(airflow.task(stage.dag, stage.run, TASK)["state"] == "success" for stage in stages)

    wait_for("both tasks succeed", succeeded)
    for stage in stages:
        check_end(stage, "success")
