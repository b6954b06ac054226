"""Memory that `follow` uses for a job that recreates its pods for days, and for many jobs that wait."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.state.accelerators import GPU
from airflow_provider_ktrain.core.state.pods.devices import accelerators_of_job
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.evidence_collector import TAIL_LINES, EvidenceCollector
from airflow_provider_ktrain.engine.follow.restarts import RestartReporter
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.watch.stripping import stripped, with_shared_names

from .tasks import Lines
from .waiting_jobs import job as a_job
from .waiting_jobs import memory_of_jobs

START = datetime(2026, 11, 21, 10, tzinfo=UTC)
JOB: dict[str, Any] = {"spec": {"mpiReplicaSpecs": {"Launcher": {}}}}


async def nobody() -> Any:
    raise AssertionError("there must be no request")


def launcher(number: int) -> dict[str, Any]:
    """A pod of mpi-operator's batch Job; each pod has a new name."""
    began, ended = (START + timedelta(minutes=number, seconds=seconds) for seconds in (0, 30))
    run = {"startedAt": began.isoformat(), "finishedAt": ended.isoformat(), "exitCode": 1}
    return {
        "metadata": {
            "name": f"train-launcher-{number}x",
            "uid": f"uid-{number}",
            "creationTimestamp": began.isoformat(),
            "labels": {"training.kubeflow.org/job-role": "launcher"},
        },
        "spec": {"nodeName": "n", "containers": [{"name": "mpi"}]},
        "status": {
            "phase": "Failed",
            "containerStatuses": [{"name": "mpi", "restartCount": 0, "state": {"terminated": run}}],
        },
    }


async def test_memory_does_not_grow_with_launcher_pods() -> None:
    state = JobState(JobRef("MPIJob", "v1", "ns", "train", "uid"), Handover())
    state.job, pods = JOB, state.pods
    context = FollowContext(Api(nobody), state, Lines())
    evidence = EvidenceCollector(context)
    restarts = RestartReporter(context, evidence.lines_of_run)
    sizes, recorders = [], []
    for number in range(600):
        pod = launcher(number)
        name = pod["metadata"]["name"]
        keep = evidence.recorder(LogLine(name, "mpi", "Launcher", 0, 0, "", ""))
        recorders.append(keep)
        for line in range(TAIL_LINES):
            keep(f"line {line}", pod["metadata"]["creationTimestamp"], 0, False)
        mine = {pod["metadata"]["uid"]: pod}
        pods.update(mine, (), START)
        evidence.forget_others()
        restarts.update(mine)
        restarts.report(at_once=True)
        pods.mark_deleted(pod)
        restarts.mark_deleted(pod)
        assert evidence.newest_lines()[name], "the newest one is kept"
        if number in {299, 599}:
            sizes.append(sum(len(repr(vars(held))) for held in (pods, evidence, restarts, restarts._history)))
    half, whole = sizes
    assert whole < half * 1.1
    assert restarts.crash_loop(6)
    recorders[0]("a line that comes after its pod was forgotten", START.isoformat(), 0, False)


async def test_memory_of_a_waiting_job_is_bounded() -> None:
    """A triggerer may wait for a thousand jobs. Most of the memory was for parts of the job that nothing reads."""
    allocated = await memory_of_jobs(60)
    assert allocated.total() < 30 * 1024, allocated.most_common(5)


def test_a_job_without_unread_fields_is_followed_alike() -> None:
    whole, read = a_job(1), stripped(a_job(1))
    assert len(json.dumps(read)) < len(json.dumps(whole)) / 2
    assert accelerators_of_job(read) == accelerators_of_job(whole) == {GPU: 40}
    (container,) = read["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container.keys() == {"name", "image", "command", "resources"}


def test_required_nodes_are_kept_until_a_pod_has_a_node() -> None:
    """They explain why a pod can't be scheduled."""
    required: dict[str, Any] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}

    def pod(**spec: Any) -> dict[str, Any]:
        return {"metadata": {}, "spec": {"affinity": {"nodeAffinity": required, "podAffinity": {}}, **spec}}

    assert stripped(pod())["spec"] == {"affinity": {"nodeAffinity": required}}
    assert stripped(pod(nodeName="node-1"))["spec"] == {"nodeName": "node-1"}


def test_equal_pod_templates_of_a_job_are_kept_once() -> None:
    roles = stripped(a_job(1))["spec"]["pytorchReplicaSpecs"]
    assert roles["Master"]["template"] is roles["Worker"]["template"]
    other = json.loads(json.dumps(a_job(1)))
    other["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["image"] = "another"
    roles = stripped(other)["spec"]["pytorchReplicaSpecs"]
    assert roles["Master"]["template"] is not roles["Worker"]["template"]


def test_objects_of_a_watch_share_the_names_of_their_fields() -> None:
    first, second = (with_shared_names(json.loads(json.dumps(a_job(1)))) for _ in range(2))
    assert first == second == a_job(1)
    assert names(first) == names(second)


def names(value: Any) -> list[int]:
    """The identities of the names of all fields."""
    if isinstance(value, dict):
        return [number for name, of in value.items() for number in (id(name), *names(of))]
    return [number for of in value for number in names(of)] if isinstance(value, list) else []
