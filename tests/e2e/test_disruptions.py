"""Disruptions under Airflow's own scheduler, triggerer and API server: what the task, its log and its asset show."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from tests import clusters
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube, selector_of
from tests.e2e.test_assets import unpause

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-3")]
#: The replica on whose success that of the job depends.
VICTIM = {"PyTorchJob": "Master 0", "MPIJob": "Launcher", "TrainJob": "node 1"}
#: What its log lines begin with.
PREFIX = {"PyTorchJob": "[Master 0]", "MPIJob": "[Launcher 0]", "TrainJob": "[node 1]"}
LIMIT = "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. "
#: test_features.py has this with a PyTorchJob.
other_kinds = pytest.mark.parametrize("kind", [MPIJOB, TRAINJOB], ids=lambda kind: kind.name)


@pytest.fixture(scope="module")
def training_cluster(airflow: Airflow) -> Iterator[TestCluster]:
    """A cluster with mpi-operator, and the connection `disruptions` to it."""
    with clusters.cluster(nodes=2, gpus=8, mpi_api="v2beta1") as started:
        extra = json.dumps({"kube_config_path": str(started.kubeconfig), "namespace": started.namespace})
        connection = {"connection_id": "disruptions", "conn_type": "kubernetes", "extra": extra}
        airflow.call("POST", "/api/v2/connections", connection)
        yield started


class Run:
    """One run of the DAG of a kind."""

    def __init__(self, airflow: Airflow, cluster: TestCluster, kind: Kind, *, never: bool = False) -> None:
        self.airflow, self.cluster, self.kind = airflow, cluster, kind
        self.dag = f"disrupted_{kind.name.lower()}{'_never' * never}"
        clusters.require(cluster, kind, runtime="torch-distributed")
        self.kube = Kube(str(cluster.kubeconfig), cluster.namespace, kind)
        self.run = airflow.trigger(self.dag)

    def log(self, try_number: int = 1) -> str:
        return self.airflow.log(self.dag, self.run, "train", try_number)

    def wait_line(self, text: str, try_number: int = 1) -> None:
        wait_for(f"{text!r} in the log", lambda: text in self.log(try_number))

    def wait_state(self, *states: str) -> dict[str, Any]:
        return self.airflow.wait_state(self.dag, self.run, "train", *states)

    def pod(self, replica: str) -> Any:
        """The pod of a replica that runs."""

        def find() -> Any:
            pods = self.kube.pods(selector_of(self.dag, self.run))
            running = [pod for pod in pods if pod.status.phase == "Running" and not pod.metadata.deletion_timestamp]
            return next(
                (p for p in running if self.kind.replica_name(*self.kind.pod_role(p.metadata.labels)) == replica), None
            )

        return wait_for(f"{replica} runs", find)

    def evict(self, replica: str) -> str:
        """Evict the pod of a replica as `kubectl drain` does. Returns its node."""
        pod = self.pod(replica)
        self.kube.evict(pod.metadata.name)
        return str(pod.spec.node_name)

    def evict_by_kubelet(self, replica: str) -> None:
        name = self.pod(replica).metadata.name
        self.cluster.admin("evict", pod=name, namespace=self.kube.namespace, message=LIMIT)

    def check_free(self) -> None:
        wait_for("no pod holds a GPU", lambda: not self.kube.gpus_held(selector_of(self.dag, self.run)))


@other_kinds
def test_interrupted_program_is_trained_to_its_end(airflow: Airflow, training_cluster: TestCluster, kind: Kind) -> None:
    """The program saves and exits with 0: its job succeeds, and the task does not. The asset starts one run."""
    consumer = f"disrupted_{kind.name.lower()}_consumer"
    earlier = unpause(airflow, consumer)
    run = Run(airflow, training_cluster, kind)
    run.wait_line(f"{PREFIX[kind.name]} step 3")
    node = run.evict(VICTIM[kind.name])
    assert run.wait_state("success")["try_number"] == 2
    cause = f"{VICTIM[kind.name]} ended with exit code 0 after it was evicted from {node}"
    assert f"{cause}: the training is probably incomplete" in run.log(1)
    assert "TrainingInfrastructureError" in run.log(1)
    assert f"{PREFIX[kind.name]} complete" in run.log(2)
    assert f"{PREFIX[kind.name]} step 1\n" not in run.log(2), "it has trained on from its checkpoint"
    started = wait_for(
        "a run of the consumer", lambda: [r for r in airflow.runs(consumer) if r["dag_run_id"] not in earlier]
    )
    airflow.wait_run(consumer, started[0]["dag_run_id"], "success")
    assert len([r for r in airflow.runs(consumer) if r["dag_run_id"] not in earlier]) == 1
    run.check_free()


@pytest.mark.embedded("sets fault switches")
def test_launcher_that_runs_on_after_its_worker_was_evicted(airflow: Airflow, training_cluster: TestCluster) -> None:
    run = Run(airflow, training_cluster, MPIJOB)
    run.wait_line("[Launcher 0] step 3")
    run.evict_by_kubelet("Worker 0")
    run.wait_line("has lost a replica for good")
    assert run.wait_state("success")["try_number"] == 1
    assert "Worker 0 wrote more to its local disk than its ephemeral-storage limit allows (Evicted)" in run.log()
    assert "[Launcher 0] complete" in run.log()
    run.check_free()


@pytest.mark.embedded("sets fault switches")
def test_pod_that_exceeds_its_own_limit_is_not_infrastructure(airflow: Airflow, training_cluster: TestCluster) -> None:
    """The job has no retries that could help: its cause is the program's, and no node is to blame."""
    run = Run(airflow, training_cluster, PYTORCHJOB, never=True)
    for number in (1, 2):
        run.wait_line("[Master 0] step", number)
        run.evict_by_kubelet("Master 0")
    assert run.wait_state("failed")["try_number"] == 2
    assert "TrainingUserCodeError: Master 0 wrote more to its local disk than its ephemeral-storage limit" in run.log(2)
    assert "avoids" not in run.log(2), "no node is to blame"
    run.check_free()


@contextlib.contextmanager
def silent(cluster: TestCluster, node: str) -> Iterator[None]:
    """A node that doesn't report."""
    cluster.admin("lose", node=node)
    try:
        yield
    finally:
        cluster.admin("recover", node=node)


@pytest.mark.embedded("sets fault switches")
def test_silent_node_is_said_by_log_and_page(airflow: Airflow, training_cluster: TestCluster) -> None:
    run = Run(airflow, training_cluster, PYTORCHJOB)
    run.wait_line("[Master 0] step 3")
    node = run.pod("Master 0").spec.node_name
    said = f"Node {node} has not reported since"
    with silent(training_cluster, node):
        run.wait_line(said)
        wait_for("the page says it", lambda: said in str(airflow.xcom(run.dag, run.run, "train", "ktrain_status")))
    run.wait_state("success")
    run.check_free()
