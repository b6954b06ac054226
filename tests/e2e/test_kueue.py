"""Trainings in a Kueue queue under Airflow's own processes. The tests write what Kueue would write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_provider_ktrain.engine.api import kueue as requests
from tests import clusters
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube, selector_of
from tests.engine.tasks import api_of
from tests.kueue.test_follow import EVICTED_FOR_GOOD
from tests.kueue.workloads import write_workload

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.embedded("starts a cluster without Kueue's controller"),
    pytest.mark.xdist_group("e2e-1"),
]
AT = {"status": "True", "lastTransitionTime": "2026-11-22T02:00:00Z"}
ADMITTED = {**AT, "type": "Admitted", "reason": "Admitted", "message": "The workload is admitted"}
EVICTED = {**AT, "type": "Evicted", "reason": "ClusterQueueStopped", "message": "The ClusterQueue is stopped"}


class Run:
    """One run of a DAG, and its job.

    :param dag: the DAG.
    """

    def __init__(self, airflow: Airflow, cluster: TestCluster, dag: str) -> None:
        self.airflow, self.dag, self.cluster = airflow, dag, cluster
        self.kube = Kube(str(cluster.kubeconfig), cluster.namespace)
        self.run = airflow.trigger(dag)
        self.jobs = selector_of(dag, self.run)

    def wait_state(self, *states: str) -> dict[str, Any]:
        return self.airflow.wait_state(self.dag, self.run, "train", *states)

    def wait_line(self, text: str) -> None:
        wait_for(f"{text!r} in the log", lambda: text in self.log())

    def log(self) -> str:
        return self.airflow.log(self.dag, self.run, "train", 1)

    def wait_deferred(self) -> None:
        """Wait until a triggerer follows the job."""
        self.wait_state("deferred")
        self.wait_line(f"trigger {self.dag}/")

    def write(self, job: dict[str, Any], *conditions: dict[str, str], active: bool = True, new: bool = False) -> None:
        """Write the conditions of the job's Workload."""

        async def write() -> None:
            async with api_of(self.cluster) as api:
                if new:
                    await write_workload(api, job, list(conditions), active=active)
                    return
                path = requests.workloads_path("v1beta2", self.cluster.namespace)
                name = f"{path}/pytorchjob-{job['metadata']['name']}-12345/status"
                await api.request("PATCH", name, body={"status": {"conditions": list(conditions)}})

        asyncio.run(write())

    def suspend(self, job: dict[str, Any], suspended: bool) -> None:
        """What Kueue does when it admits a job, and when it evicts one."""
        patch = {"spec": {"runPolicy": {"suspend": suspended}}}
        self.kube.custom.patch_namespaced_custom_object(*self.kube.resource, job["metadata"]["name"], patch)

    def check_free(self) -> None:
        """No pod of this run holds a GPU, and the job is gone."""
        wait_for("no pod holds a GPU", lambda: not self.kube.gpus_held(self.jobs))
        wait_for("the job is gone", lambda: not self.kube.jobs(self.jobs))


@pytest.fixture(scope="module")
def kueue(airflow: Airflow) -> Iterator[TestCluster]:
    """A cluster that serves Kueue, and the connection `kueue` to it."""
    with clusters.cluster(kueue=True, gpus=8) as started:
        extra = json.dumps({"kube_config_path": str(started.kubeconfig)})
        connection = {"connection_id": "kueue", "conn_type": "kubernetes", "extra": extra}
        airflow.call("POST", "/api/v2/connections", connection)
        yield started


def test_a_queued_and_evicted_task_continues_from_its_checkpoint(airflow: Airflow, kueue: TestCluster) -> None:
    run = Run(airflow, kueue, "kueue_continues")
    run.wait_deferred()
    (job,) = run.kube.jobs(run.jobs)
    run.write(job, ADMITTED, new=True)
    run.suspend(job, False)
    run.wait_line("] saved")
    assert run.kube.gpus_held(run.jobs) == 1
    run.write(job, ADMITTED, EVICTED)
    run.suspend(job, True)
    run.wait_line("lost its admission and is queued again (1 time so far)")
    wait_for("its pod is gone", lambda: not run.kube.pods(run.jobs))  # the operator would count it as failed
    assert run.wait_state("deferred")["try_number"] == 1
    run.write(job, ADMITTED)
    run.suspend(job, False)
    assert run.wait_state("success")["try_number"] == 1
    run.check_free()
    assert "[Master 0] continues in attempt 1" in run.log()
    usage = run.airflow.xcom(run.dag, run.run, "train", "usage")
    assert usage["queued"] + usage["wasted"] > 0  # each may round to 0: timestamps have whole seconds


def test_a_job_that_kueue_gave_up_on_fails_its_task_and_is_retried(airflow: Airflow, kueue: TestCluster) -> None:
    run = Run(airflow, kueue, "kueue_retried")
    run.wait_deferred()
    (queued,) = run.kube.jobs(run.jobs)
    run.write(queued, EVICTED_FOR_GOOD, active=False, new=True)
    run.wait_line("Kueue gave up on the job: DeactivatedDueToRequeuingLimitExceeded")

    def another() -> list[Any]:
        return [job for job in run.kube.jobs(run.jobs) if job["metadata"]["uid"] != queued["metadata"]["uid"]]

    (again,) = wait_for("the retry has created another job", another)
    run.suspend(again, False)
    assert run.wait_state("success")["try_number"] == 2
    assert "TrainingQueueError" in run.log()
    run.check_free()
