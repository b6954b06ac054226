"""Trainings in a Kueue queue under Airflow's own processes: replays of recordings, while the tasks are deferred."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB, Kind
from tests import clusters
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube, selector_of
from tests.engine.tasks import api_of
from tests.kueue.conftest import driver as replay
from tests.kueue.driver import Driver
from tests.kueue.library import recording
from tests.kueue.test_follow import EVICTED_FOR_GOOD
from tests.kueue.workloads import write_workload

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.embedded("starts a cluster without Kueue's controller"),
    pytest.mark.xdist_group("e2e-1"),
]
PAUSED = "74c-kueue-workload-inactive"
BY_SOMEBODY = "queue changed while suspended"


@pytest.fixture(scope="module")
def kueue(airflow: Airflow) -> Iterator[TestCluster]:
    """A cluster that serves Kueue, and the connection `kueue` to it."""
    with clusters.cluster(kueue=True, gpus=8) as started:
        extra = json.dumps({"kube_config_path": str(started.kubeconfig)})
        connection = {"connection_id": "kueue", "conn_type": "kubernetes", "extra": extra}
        airflow.call("POST", "/api/v2/connections", connection)
        yield started


class Run:
    """One run of a DAG in a namespace of the cluster."""

    def __init__(self, airflow: Airflow, cluster: TestCluster, dag: str, namespace: str, kind: Kind) -> None:
        self.airflow, self.dag, self.namespace = airflow, dag, namespace
        self.kube = Kube(str(cluster.kubeconfig), namespace, kind)
        self.run = airflow.trigger(dag, {"namespace": namespace})

    def wait_state(self, *states: str) -> dict[str, Any]:
        return self.airflow.wait_state(self.dag, self.run, "train", *states)

    def wait_line(self, text: str, try_number: int = 1) -> None:
        wait_for(f"{text!r} in the log", lambda: text in self.log(try_number))

    def log(self, try_number: int = 1) -> str:
        return self.airflow.log(self.dag, self.run, "train", try_number)

    def wait_deferred(self) -> None:
        """Wait until a triggerer follows the job."""
        self.wait_state("deferred")
        self.wait_line(f"trigger {self.dag}/")

    def job(self) -> str:
        return str(wait_for("the job exists", self.kube.jobs)[0]["metadata"]["name"])

    def control(self, action: str, job: str) -> None:
        """Run the job-control operator in a DAG of its own, and wait until it has succeeded."""
        run = self.airflow.trigger(f"kueue_{action}", {"namespace": self.namespace, "job": job})
        self.airflow.wait_state(f"kueue_{action}", run, action, "success")

    def check_free(self) -> None:
        """No pod of this run holds a GPU, and the job is gone."""
        mine = f"ktrain.airflow/dag-id={self.dag}"
        wait_for("no pod holds a GPU", lambda: not self.kube.gpus_held(mine))
        wait_for("the job is gone", lambda: not [j for j in self.kube.jobs() if mine_of(j, self.dag)])


def mine_of(job: dict[str, Any], dag: str) -> bool:
    return bool((job["metadata"].get("labels") or {}).get("ktrain.airflow/dag-id") == dag)


Begin = Callable[..., Run]


@pytest.fixture
def begin(airflow: Airflow, kueue: TestCluster) -> Begin:
    def start(dag: str, namespace: str, kind: Kind = PYTORCHJOB) -> Run:
        return Run(airflow, kueue, dag, namespace, kind)

    return start


@contextlib.contextmanager
def replaying(cluster: TestCluster, name: str, **options: Any) -> Iterator[Driver]:
    with replay(cluster.kubeconfig, recording(name), timeout=600, **options) as driver:
        yield driver


def test_a_queued_and_evicted_task_continues_from_its_checkpoint(begin: Begin, kueue: TestCluster) -> None:
    """Recording 70b: the ClusterQueue is held, let go, drained while the job runs, and let go again."""
    steps = ("queue let go", "queue drained", "queue let go again")
    with replaying(kueue, "70b-kueue-hold", ours={"train": None}, held=steps) as driver:
        run = begin("kueue_continues", driver.namespace)
        run.wait_deferred()
        run.wait_line("Queued in LocalQueue queue: ClusterQueue q70b is stopped. An administrator must correct this.")
        driver.let_go("queue let go")
        run.wait_line("] saved")
        assert run.kube.gpus_held() == 1
        driver.let_go("queue drained")
        run.wait_line("lost its admission and is queued again (1 time so far)")
        wait_for("no pod holds a GPU", lambda: not run.kube.gpus_held())
        assert run.wait_state("deferred")["try_number"] == 1
        driver.let_go("queue let go again")
        assert run.wait_state("success")["try_number"] == 1
        run.check_free()
        driver.finish()
    assert "Admitted by ClusterQueue q70b with flavor q70b." in run.log()
    assert "[Master 0] continues in attempt 1" in run.log()
    usage = run.airflow.xcom(run.dag, run.run, "train", "usage")
    assert usage["queued"] + usage["wasted"] > 0  # each may round to 0: timestamps have whole seconds


def test_a_preempted_task_is_queued_again_and_a_kill_releases_it(begin: Begin, kueue: TestCluster) -> None:
    """Recording 72b: a TrainJob is preempted by one of a higher priority, and deleted while it waits."""
    with replaying(kueue, "72b-kueue-trainjob-preemption", ours={"low": None}, held=("create high",)) as driver:
        run = begin("kueue_trainjob", driver.namespace, TRAINJOB)
        run.wait_line("] trains")
        run.wait_deferred()
        driver.let_go("create high")
        run.wait_line("lost its admission and is queued again (1 time so far)")
        assert "preempted: a job with a higher priority in the ClusterQueue needs the quota" in run.log()
        run.wait_line("Queued in LocalQueue queue: needs 200m cpu more in flavor q72b.")
        assert run.wait_state("deferred")["try_number"] == 1
        run.airflow.set_state(run.dag, run.run, "train", "failed")
        run.check_free()
        driver.finish()


@pytest.mark.parametrize("by", ["administrator", "operators"])
def test_a_paused_task_waits_and_continues(begin: Begin, kueue: TestCluster, by: str) -> None:
    """Recording 74c: its Workload is made inactive while the job runs, and active again."""
    control = ("inactive", "active")
    by_others = (BY_SOMEBODY, *(control if by == "administrator" else ()))
    with replaying(kueue, PAUSED, ours={"train": None}, by_others=by_others, held=control) as driver:
        run = begin("kueue_continues", driver.namespace)
        run.wait_line("] saved")
        run.wait_deferred()
        job = run.job()
        driver.let_go("inactive")
        if by == "operators":
            run.control("suspend", job)
        run.wait_line("The job is paused: somebody set spec.active of its Workload to false.")
        wait_for("no pod holds a GPU", lambda: not run.kube.gpus_held())
        assert run.wait_state("deferred")["try_number"] == 1
        driver.wait_for(BY_SOMEBODY)
        driver.let_go("active")
        if by == "operators":
            run.control("resume", job)
        assert run.wait_state("success")["try_number"] == 1
        run.check_free()
        driver.finish()
    assert "[Master 0] continues in attempt 1" in run.log()


def test_a_job_that_kueue_gave_up_on_fails_its_task_and_is_retried(begin: Begin, kueue: TestCluster) -> None:
    run = begin("kueue_retried", kueue.namespace)
    run.wait_deferred()
    mine = selector_of(run.dag, run.run)
    (queued,) = run.kube.jobs(mine)
    asyncio.run(give_up(kueue, queued))
    run.wait_line("Kueue gave up on the job: its pods were not ready in time too often")

    def another() -> list[Any]:
        return [job for job in run.kube.jobs(mine) if job["metadata"]["uid"] != queued["metadata"]["uid"]]

    (again,) = wait_for("the retry has created another job", another)
    asyncio.run(resume(kueue, again))
    assert run.wait_state("success")["try_number"] == 2
    assert "TrainingQueueError" in run.log()
    run.check_free()


async def give_up(cluster: TestCluster, job: dict[str, Any]) -> None:
    async with api_of(cluster) as api:
        await write_workload(api, job, [EVICTED_FOR_GOOD], active=False)


async def resume(cluster: TestCluster, job: dict[str, Any]) -> None:
    path = f"/apis/kubeflow.org/v1/namespaces/{job['metadata']['namespace']}/pytorchjobs/{job['metadata']['name']}"
    async with api_of(cluster) as api:
        await api.request("PATCH", path, body={"spec": {"runPolicy": {"suspend": False}}})
