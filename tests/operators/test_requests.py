"""The API requests in the life of one short job, by kind of request, from `execute` to its return."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import parse_qsl

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, TRAINJOB
from tests.apiserver.messages import Request
from tests.core.manifests import replica
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")

PROGRAM = ["sh", "-c", "echo started; sleep 6; echo done"]
WATCHES = {"list pods": 1, "watch pods": 1, "create JOBS": 1, "list JOBS": 1, "watch JOBS": 1, "delete JOBS": 1}
#: The read of the end, a list after the pods were freed, and the look for job and pods after the deletion.
EVIDENCE = {"get JOBS": 2, "list pods": 4}


def kind_of_request(line: str) -> str:
    """Verb and resource, such as `list pods`, or `discovery`."""
    method, _, url = line.partition(" ")
    path, _, query = url.partition("?")
    request = Request(method, path, dict(parse_qsl(query)))
    if not request.where.resource:
        return "discovery"
    return f"{request.verb} {request.where.resource}"


def assert_requests(instance: VirtualInstance, expected: dict[str, int], streams: int) -> None:
    """Check the requests since the last call, and how many logs were followed.

    A log stream that ends before the watch shows the end of its container is opened once more.

    :param expected: number of requests by kind; JOBS stands for the plural of the kind.
    """
    made = Counter(map(kind_of_request, instance.api.requests))
    del made["log pods"]
    logs = sum("follow=true" in line for line in instance.api.requests)
    assert made == {name.replace("JOBS", instance.kind.plural): number for name, number in expected.items()}
    assert streams <= logs <= 2 * streams


def test_requests_of_a_short_pytorchjob(instance: VirtualInstance) -> None:
    instance.execute(command=PROGRAM, deferrable=False)
    expected = {**WATCHES, **EVIDENCE, "discovery": 1}
    assert sum(expected.values()) == 12
    assert_requests(instance, expected, streams=1)


@pytest.mark.parametrize("instance", [MPIJOB], indirect=True)
def test_requests_of_a_short_mpijob(instance: VirtualInstance) -> None:
    """The worker's pod still runs when the job has succeeded: the operator deletes it."""
    launcher, worker = replica(name="mpi"), replica(name="mpi")
    for role, program in ((launcher, PROGRAM), (worker, ["sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"])):
        role["template"]["spec"]["containers"][0] |= {"image": "image", "command": program}
    policy: dict[str, Any] = {"cleanPodPolicy": "Running"}
    spec = {"mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker}, "runPolicy": policy}
    manifest = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {}, "spec": spec}
    instance.execute(manifest=manifest, deferrable=False)
    assert_requests(instance, {**WATCHES, **EVIDENCE, "discovery": 1}, streams=2)


@pytest.mark.parametrize("instance", [TRAINJOB], indirect=True)
def test_requests_of_a_short_trainjob(instance: VirtualInstance) -> None:
    """Also read are its schema and its runtime, and earlier pods of its name: before and after it is created.

    After its deletion, which is in the background, its pods, the job and its JobSet are looked up once.
    """
    instance.execute(command=PROGRAM, gpus=1, deferrable=False)
    reads = {"discovery": 2, "get clustertrainingruntimes": 1, "get jobsets": 1}
    assert_requests(instance, {**WATCHES, **EVIDENCE, **reads, "list pods": 6}, streams=1)


def test_requests_of_a_short_deferred_pytorchjob(instance: VirtualInstance) -> None:
    """The worker and the trigger list and watch on their own; the worker that resumes reads the job once more."""
    instance.resume(instance.event(instance.execute(command=PROGRAM)))
    again = {"list JOBS": 2, "watch JOBS": 2, "watch pods": 2, "get JOBS": 3, "list pods": 6, "get pods": 1}
    expected = {**WATCHES, **again, "discovery": 1}
    assert sum(expected.values()) == 19
    assert_requests(instance, expected, streams=1)
