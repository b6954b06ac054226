"""Nodes that failed are found by evidence, stored for later tries, and excluded from every pod's affinity."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.crash_loop import CrashLoop
from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import (
    diagnose,
    diagnose_crash_loop,
    diagnose_limit,
    find_startup_cause,
)
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.formats import MAX_FAILED_NODES, failed_nodes, with_failed_nodes
from airflow_provider_ktrain.core.identity.names import Owner
from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.kinds.trainjob.patches import patched_template
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, overlay
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.state.pods.objects import avoided_nodes
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp

from .manifests import pytorchjob
from .test_diagnosis import failed, logs, pod, time
from .test_job_request import KEY
from .test_runtime_patches import replicated, runtime, trainjob

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def on(node: str, made: dict[str, Any], gpus: int = 0) -> dict[str, Any]:
    resources = {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}
    made["spec"] = {"nodeName": node, "containers": [{"name": "pytorch", "resources": resources}]}
    return made


def traceback(error: str) -> dict[str, list[str]]:
    return logs(worker_0=f'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n{error}')


# evidence


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"reason": "Evicted", "message": "The node was low on memory."}, "was evicted from its node (Evicted)"),
        ({"reason": "NodeLost"}, "lost its node (NodeLost)"),
        ({"reason": "Evicted", "message": "Pod ephemeral local storage usage exceeds the total limit of 1Gi."}, ""),
        ({"reason": "Preempting"}, ""),
        ({"reason": "OutOfcpu"}, ""),
        ({"reason": "DeadlineExceeded"}, ""),
        ({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}, ""),
        ({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]},
         "lost its node (DeletionByTaintManager)"),
    ],
)  # fmt: skip
def test_node_of_a_pod_that_kubernetes_ended(status: dict[str, Any], reason: str) -> None:
    pods = [on("n0", pod("Master", 0)), on("n1", pod("Worker", 0, code=137, at=9, **status))]
    assert diagnose(make_evidence(failed(), pods)).failed_nodes == ({"n1": f"Worker 0 {reason}"} if reason else {})


@pytest.mark.parametrize(
    ("error", "gpus", "reason"),
    [
        (ECC, 1, "has a broken GPU"),
        ("RuntimeError: No CUDA GPUs are available", 1, "can't see any GPU"),
        ("RuntimeError: No CUDA GPUs are available", 0, ""),
        ("ValueError: wrong", 1, ""),
        ("OSError: [Errno 28] No space left on device", 1, ""),
    ],
)
def test_node_of_a_program_that_reports_its_gpu(error: str, gpus: int, reason: str) -> None:
    pods = [on("n0", pod("Master", 0), gpus), on("n1", pod("Worker", 0, code=1, at=9), gpus)]
    cause = diagnose(make_evidence(failed(), pods, logs=traceback(error)))
    assert cause.failed_nodes == ({"n1": f"Worker 0 {reason}"} if reason else {})
    assert cause.as_dict()["failed_nodes"] == cause.failed_nodes


def test_log_of_a_later_failure_names_no_node() -> None:
    pods = [on("n0", pod("Master", 0, code=1, at=5)), on("n1", pod("Worker", 0, code=1, at=9))]
    assert diagnose(make_evidence(failed(), pods, logs=traceback(ECC))).failed_nodes == {}


def test_node_that_cannot_start_containers() -> None:
    made = on("n1", pod("Worker", 0))
    message = "OCI runtime create failed: nvidia-container-cli: initialization error: driver error: timed out"
    waiting = {"reason": "RunContainerError", "message": message}
    made["status"] |= {"phase": "Pending", "conditions": []}
    made["status"]["containerStatuses"][0]["state"] = {"waiting": waiting}
    reason = {"n1": "Worker 0 can't start: the node's GPU driver does not work"}
    job = {"kind": "PyTorchJob", "metadata": {"name": "train"}}
    assert diagnose_limit(Limit.STARTUP, 60, make_evidence(job, [made])).failed_nodes == reason
    now = parse_timestamp(time(600))
    assert now is not None
    given_up = find_startup_cause(make_evidence(job, [made], [], now=now), 600)
    assert given_up is not None
    assert (given_up.category, given_up.failed_nodes) == (Category.INFRASTRUCTURE, reason)


def test_node_of_a_crash_loop() -> None:
    running = on("n1", pod("Worker", 0, restarts=6), 1)
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": time(9)}
    running["status"]["containerStatuses"][0]["lastState"] = {"terminated": ended}
    job = {"kind": "PyTorchJob", "metadata": {"name": "train"}}
    cause = diagnose_crash_loop(CrashLoop("Worker 0", 6), make_evidence(job, [running], (), traceback(ECC)))
    assert cause.failed_nodes == {"n1": "Worker 0 has a broken GPU"}


# the task store


def test_latest_nodes_are_stored_until_a_clear() -> None:
    stored = None
    for number in range(10):
        stored = with_failed_nodes(stored, 3, {f"n{number}": "Worker 0 lost its node"})
    stored = with_failed_nodes(stored, 3, {"n5": "Worker 0 has a broken GPU"})
    assert list(failed_nodes(stored, 3)) == ["n2", "n3", "n4", "n6", "n7", "n8", "n9", "n5"]
    assert failed_nodes(stored, 3)["n5"] == "Worker 0 has a broken GPU"
    assert len(failed_nodes(stored, 3)) == MAX_FAILED_NODES
    assert failed_nodes(stored, 5) == failed_nodes(None, 3) == failed_nodes({"nodes": ["n1"], "max_tries": 3}, 3) == {}
    assert failed_nodes(with_failed_nodes(stored, 5, {"n1": "again"}), 5) == {"n1": "again"}


# the manifest


def not_in(*names: str) -> list[dict[str, Any]]:
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in names]


def terms_of(pod_spec: dict[str, Any]) -> list[dict[str, Any]]:
    return list(pod_spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"])


def test_every_template_and_term_excludes_the_nodes_one_value_an_entry() -> None:
    manifest = pytorchjob()
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [*zones, {}]}}, "podAntiAffinity": {"x": 1}}
    specs["Master"]["template"]["spec"]["affinity"] = affinity
    before = copy.deepcopy(manifest)
    result = overlay(manifest, JobOptions(avoid_nodes=["n1", "n2"]))
    assert manifest == before
    master, worker = (result["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"] for role in ("Master", "Worker"))
    assert terms_of(master) == [{**zone, "matchFields": not_in("n1", "n2")} for zone in zones] + [{}]
    assert master["affinity"]["podAntiAffinity"] == {"x": 1}
    assert terms_of(worker) == [{"matchFields": not_in("n1", "n2")}]
    assert avoided_nodes({"spec": worker}) == ["n1", "n2"]
    assert avoided_nodes({"spec": {}}) == []


def test_affinity_of_a_runtime_is_kept_and_extended() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [zone]}}}
    of = runtime(replicated("node", affinity=affinity), replicated("dataset-initializer", "init"))
    request = JobRequest(TRAINJOB, Owner(KEY, 2, "ti-2"), 1, trainjob(), avoid_nodes={"n1": "Worker 0 lost its node"})
    sent = request.stamped(trainjob(), "ns", "s", attempt=2, now=0, served=Served(True, of))
    jobs = patched_template(sent, of)["spec"]["replicatedJobs"]
    terms = [terms_of(job["template"]["spec"]["template"]["spec"]) for job in jobs]
    assert terms == [[{**zone, "matchFields": not_in("n1")}], [{"matchFields": not_in("n1")}]]


def test_affinity_of_a_runtime_is_kept_where_one_job_is_overridden() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    of = runtime(replicated("node", affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [zone]}}}))
    manifest = overlay(trainjob(), JobOptions(pod_override={"node": {"spec": {"nodeSelector": {"pool": "x"}}}}))
    request = JobRequest(TRAINJOB, Owner(KEY, 2, "ti-2"), 1, manifest, avoid_nodes={"n1": "Worker 0 lost its node"})
    sent = request.stamped(manifest, "ns", "s", attempt=2, now=0, served=Served(True, of))
    (job,) = patched_template(sent, of)["spec"]["replicatedJobs"]
    pod_spec = job["template"]["spec"]["template"]["spec"]
    assert terms_of(pod_spec) == [{**zone, "matchFields": not_in("n1")}]
    assert pod_spec["nodeSelector"] == {"pool": "x"}


def test_job_that_cannot_be_patched_is_sent_as_without_the_option() -> None:
    """A runtime that can't be read."""
    request = JobRequest(TRAINJOB, Owner(KEY, 2, "ti-2"), 1, trainjob())
    avoiding = replace(request, avoid_nodes={"n1": "lost"})
    served = Served(True, None, "no right to get it")
    assert not avoiding.can_avoid_nodes(served)
    sent = [r.stamped(trainjob(), "ns", "s", attempt=2, now=0, served=served) for r in (request, avoiding)]
    assert sent[0] == sent[1]


def test_avoided_nodes_do_not_count_as_a_change_of_the_manifest() -> None:
    request = JobRequest(PYTORCHJOB, Owner(KEY, 2, "ti-2"), 1, pytorchjob())
    sent = [
        r.stamped(r.fitted("kubeflow.org/v1"), "ns", "s", attempt=2, now=0)["metadata"]["annotations"]
        for r in (request, replace(request, avoid_nodes={"n1": "lost"}))
    ]
    assert sent[0] == sent[1]


def test_obstacle_names_the_avoided_nodes() -> None:
    manifest = overlay(pytorchjob(), JobOptions(avoid_nodes=["n1"]))
    waits = pod("Worker", 0)
    waits["spec"] = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    message = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    waits["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}],
    }
    cause = diagnose_limit(
        Limit.SCHEDULE, 60, make_evidence({"kind": "PyTorchJob", "metadata": {"name": "train"}}, [waits])
    )
    assert "The pod avoids 1 node (avoid_failed_nodes): n1." in cause.resolution
