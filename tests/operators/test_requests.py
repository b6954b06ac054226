"""The API requests in the life of one short job, by kind of request, from `execute` to its return."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.operators.training import MPIJobOperator, TrainJobOperator
from tests import clusters
from tests.clusters import TestCluster, served_version
from tests.core.manifests import replica
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance
from tests.request_log import RequestLog, recorded_requests

PROGRAM = ["sh", "-c", "echo started; sleep 6; echo done"]
WATCHES = {"list pods": 1, "watch pods": 1, "create JOBS": 1, "list JOBS": 1, "watch JOBS": 1, "delete JOBS": 1}
#: the read that concludes the end, a list after the pods were freed, and the look for job and pods after the deletion
EVIDENCE = {"get JOBS": 2, "list pods": 4}
RUNS = 3  #: an operator may write the job's status between our read and our delete: then the job is read again
Run = Callable[[Instance], Any]


@pytest.fixture
def requests(cluster: TestCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestLog]:
    """The requests of the operators in this test."""
    with recorded_requests(cluster, tmp_path) as log:
        set_connection(dataclasses.replace(cluster, kubeconfig=log.kubeconfig), monkeypatch)
        yield log


def assert_requests(
    cluster: TestCluster, requests: RequestLog, kind: Kind, run: Run, expected: dict[str, int], streams: int
) -> None:
    """Check the requests of a run, except those for logs, and how many log streams were opened.

    A log stream that ends before the watch shows the end of its container is opened once more.

    :param expected: number of requests by kind; JOBS stands for the plural of the kind.
    """
    wanted = {name.replace("JOBS", kind.plural): number for name, number in expected.items()}
    for _ in range(RUNS):
        requests.take()
        with Instance(cluster, kind, served_version(cluster, kind)) as instance:
            run(instance)
        made = requests.take()
        logs = {name: made.pop(name, 0) for name in ("follow pods/log", "get pods/log")}
        if made == wanted:
            break
    assert made == wanted
    assert streams <= logs["follow pods/log"] <= 2 * streams


def test_requests_of_a_short_pytorchjob(cluster: TestCluster, requests: RequestLog) -> None:
    def run(instance: Instance) -> None:
        instance.execute(command=PROGRAM, deferrable=False)

    expected = {**WATCHES, **EVIDENCE, "discovery": 1}
    assert sum(expected.values()) == 12
    assert_requests(cluster, requests, PYTORCHJOB, run, expected, streams=1)


def test_requests_of_a_short_mpijob(cluster: TestCluster, requests: RequestLog) -> None:
    """The worker's pod still runs when the job has succeeded: the operator deletes it."""

    def run(instance: Instance) -> None:
        launcher, worker = replica(name="mpi"), replica(name="mpi")
        for role, program in ((launcher, PROGRAM), (worker, ["sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"])):
            role["template"]["spec"]["containers"][0] |= {"image": clusters.IMAGE, "command": program}
        version = served_version(cluster, MPIJOB)
        policy: dict[str, Any] = {"cleanPodPolicy": "Running"}
        spec = {"mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker}, "runPolicy": policy}
        manifest = {"apiVersion": f"kubeflow.org/{version}", "kind": "MPIJob", "metadata": {}, "spec": spec}
        instance.execute(manifest=manifest, deferrable=False, operator=MPIJobOperator)

    tried = MPIJOB.versions.index(served_version(cluster, MPIJOB)) + 1
    assert_requests(cluster, requests, MPIJOB, run, {**WATCHES, **EVIDENCE, "discovery": tried}, streams=2)


def test_requests_of_a_short_trainjob(cluster: TestCluster, requests: RequestLog) -> None:
    """Also read are its schema and its runtime, and earlier pods of its name: before and after it is created.

    After its deletion, which is in the background, its pods, the job and its JobSet are looked up once.
    """

    def run(instance: Instance) -> None:
        instance.execute(command=PROGRAM, gpus=1, deferrable=False, operator=TrainJobOperator)

    reads = {"discovery": 2, "get clustertrainingruntimes": 1, "get jobsets": 1}
    expected = {**WATCHES, **EVIDENCE, **reads, "list pods": 6}
    assert_requests(cluster, requests, TRAINJOB, run, expected, streams=1)


def test_requests_of_a_short_deferred_pytorchjob(cluster: TestCluster, requests: RequestLog) -> None:
    """The worker and the trigger list and watch on their own; the worker that resumes reads the job once more."""

    def run(instance: Instance) -> None:
        async def fire(deferred: Any) -> Any:
            return (await anext(aiter(deferred.trigger.run()))).payload

        instance.resume(asyncio.run(fire(instance.execute(command=PROGRAM))))

    again = {"list JOBS": 2, "watch JOBS": 2, "watch pods": 2, "get JOBS": 3, "list pods": 6, "get pods": 1}
    expected = {**WATCHES, **again, "discovery": 1}
    assert sum(expected.values()) == 19
    assert_requests(cluster, requests, PYTORCHJOB, run, expected, streams=1)
