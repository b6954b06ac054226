"""The KubernetesExecutor: worker pods on the embedded cluster, beside the trainings, with logs in an emptyDir."""

from __future__ import annotations

import os
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
from tests.e2e.chaos import chaos_airflow, check_end
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with a_cluster(images={IMAGE: None}, nodes=3, gpus=64, node_times=0.1) as reached:
        yield reached


@pytest.fixture(scope="module")
def nodes(cluster: TestCluster) -> tuple[str, str]:
    """The nodes for worker pods."""
    core = Kube(str(cluster.kubeconfig)).core
    _, *names = sorted(node.metadata.name for node in core.list_node().items)
    for name in names:
        taint = {"key": WORKERS, "value": "", "effect": "NoSchedule"}
        core.patch_node(name, {"metadata": {"labels": {WORKERS: ""}}, "spec": {"taints": [taint]}})
    return names[0], names[1]


@pytest.fixture(scope="module")
def airflow(
    cluster: TestCluster, nodes: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Airflow]:
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


def worker_of(stage: Stage) -> str:
    """The name of the pod that runs the task of a stage."""

    def running() -> str | None:
        found = stage.kube.pods(f"dag_id={stage.dag}")
        mine = [p for p in found if p.metadata.annotations["run_id"] == stage.run and p.status.phase == "Running"]
        return mine[0].metadata.name if mine else None

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


def evict(core: client.CoreV1Api, pod: str, namespace: str) -> None:
    meta = client.V1ObjectMeta(name=pod, namespace=namespace)
    core.create_namespaced_pod_eviction(pod, namespace, client.V1Eviction(metadata=meta))


@dataclass(frozen=True)
class Stop:
    """
    :param act: gets the stage whose worker pod it stops, and the process of its task.
    :param signalled: whether the task gets SIGTERM.
    """

    act: Callable[[Stage, int], None]
    signalled: bool = False


def delete(stage: Stage, **options: Any) -> None:
    stage.kube.core.delete_namespaced_pod(worker_of(stage), stage.kube.namespace, **options)


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


STOPS = {
    "deleted": Stop(lambda stage, _: delete(stage), signalled=True),
    "evicted": Stop(lambda stage, _: evict(stage.kube.core, worker_of(stage), stage.kube.namespace), signalled=True),
    "deleted by force": Stop(lambda stage, _: delete(stage, grace_period_seconds=0)),
    "killed": Stop(lambda _, task: kill(parent(task), task)),
    "task killed": Stop(lambda _, task: kill(task)),
}


def test_stopped_workers(begin: Begin, airflow: Airflow) -> None:
    """Each way to stop a worker pod: of a task with a retry, and of one without. All at once: each needs a minute."""
    retried = {how: begin("chaos_worker_retries", seconds=150) for how in STOPS}
    alone = {how: begin("chaos_worker", seconds=ENDLESS) for how in STOPS}
    for stage in (*retried.values(), *alone.values()):
        wait_running(stage)
    for how, stop in STOPS.items():
        for stage in (retried[how], alone[how]):
            (task,) = airflow.task_processes(airflow.task(stage.dag, stage.run, TASK)["id"])
            stop.act(stage, task)
    check_stopped(
        released=[alone[how] for how, stop in STOPS.items() if stop.signalled],
        left=[alone[how] for how, stop in STOPS.items() if not stop.signalled],
    )
    for stage in retried.values():
        check_adopted(stage)


def test_lost_node(begin: Begin, airflow: Airflow, cluster: TestCluster, nodes: tuple[str, str]) -> None:
    core = Kube(str(cluster.kubeconfig)).core
    stays, lost = nodes
    core.patch_node(stays, {"spec": {"unschedulable": True}})
    retried = begin("chaos_worker_retries", seconds=150)
    wait_running(retried)
    core.patch_node(stays, {"spec": {"unschedulable": None}})
    cluster.admin("lose", node=lost)
    try:
        check_adopted(retried)
    finally:
        cluster.admin("recover", node=lost)


def test_worker_is_stopped_while_a_task_resumes(begin: Begin) -> None:
    """The executor starts another pod if the task had not begun, else a retry returns the result."""
    stage = begin("chaos_deferred_retries", seconds=20)
    wait_running(stage)
    wait_for("the training ends", stage.ended)
    delete(stage, grace_period_seconds=0)
    stage.wait_state("success")
    stage.check_freed()
    stage.check_created(1)


def test_scheduler_is_away(begin: Begin, airflow: Airflow) -> None:
    """Trainings that end meanwhile succeed."""
    stages = [begin(dag, seconds=30) for dag in ("chaos_worker", "chaos_deferred")]
    for stage in stages:
        wait_running(stage)
    airflow.end("scheduler")
    for stage in stages:
        wait_for("the training ends", stage.ended)
    airflow.run("scheduler")
    for stage in stages:
        check_end(stage, "success")


def test_pods_cannot_be_created_when_a_task_resumes(begin: Begin, cluster: TestCluster) -> None:
    """With task_publish_max_retries=-1, it waits."""
    stage = begin("chaos_deferred", seconds=20)
    wait_running(stage)
    cluster.admin("status", status=503, verb="create", path="/pods$")
    stage.wait_state("queued")
    wait_for("the training ends", stage.ended)
    stage.check_freed()
    cluster.admin("clear")
    check_end(stage, "success")


def test_kubernetes_api_is_away(begin: Begin, airflow: Airflow, cluster: TestCluster) -> None:
    """Trainings go on. A scheduler that looks for orphaned tasks meanwhile ends: something must start it again."""
    stages = [begin(dag, seconds=60) for dag in ("chaos_worker", "chaos_deferred")]
    for stage in stages:
        wait_running(stage)
    cluster.admin("refuse", seconds=20)
    wait_for("the API server is away", lambda: not stages[0].answers())
    wait_for("the API server is back", stages[0].answers)

    def succeeded() -> bool:
        if airflow.processes["scheduler"].poll() is not None:
            airflow.run("scheduler")
        return all(airflow.task(stage.dag, stage.run, TASK)["state"] == "success" for stage in stages)

    wait_for("both tasks succeed", succeeded)
    for stage in stages:
        check_end(stage, "success")
