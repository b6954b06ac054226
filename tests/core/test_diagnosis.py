"""The first line of a failure is its cause: for failures recorded on a real cluster, and for some others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose, diagnose_limit, find_startup_cause
from airflow_provider_ktrain.core.diagnosis.log_lines import TimedText
from airflow_provider_ktrain.core.diagnosis.log_parser import PATTERN_WINDOW_LINES, read_tail
from airflow_provider_ktrain.core.diagnosis.model import MAX_DETAIL_CHARS, Category, Cause
from airflow_provider_ktrain.core.diagnosis.pod_failures import log_key
from airflow_provider_ktrain.core.diagnosis.startup_rules import GRACE_SECONDS
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.text.output import MAX_FIRST_LINE_CHARS, MAX_LINE_CHARS, clean
from tests.factories import replica_pod

RECORDINGS = Path(__file__).parent / "recordings"
CONTAINERD = "dial tcp: lookup registry.example.invalid on 10.255.255.53:53: no such host"


def recording(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text())
    return content


def cause_of(record: dict[str, Any]) -> Cause:
    return diagnose(make_evidence(record["job"], record["pods"], record["events"], record["logs"], gone=record["gone"]))


DEADLINE = "exceeded its activeDeadlineSeconds of"
DELETED = "was deleted by someone else before it ended"
NO_NODE = "can't be scheduled: 0/1 nodes are available:"
SELECTOR = "1 node(s) didn't match Pod's node affinity/selector"
LONG = "long-name-long-name-long-name-long-name-long-name-longz"
REJECTED = "was rejected by its operator:"
V1 = "MPIJob failed validation because MPIReplicaSpec is not valid:"

FIRST_LINES: dict[str, tuple[Category, str]] = {
    "05-pt-never-fail": (Category.USER_CODE, "Master 0 failed with exit code 1. Last log line: about to fail"),
    "05b-pt-worker-never-fail": (Category.USER_CODE, "Worker 1 failed with exit code 1. Last log line: worker"),
    "08-pt-backofflimit-0": (Category.USER_CODE, "Master 0 failed with exit code 3. Last log line: boom"),
    "08b-pt-never-backofflimit-3": (Category.USER_CODE, "Master 0 failed with exit code 3. Last log line: boom"),
    "08c-pt-always": (
        Category.USER_CODE,
        "PyTorchJob always reached its backoffLimit of 3 restarts; the last failure had exit code 1",
    ),
    "10-pt-exitcode-1": (Category.USER_CODE, "Master 0 failed with exit code 1. Last log line: permanent"),
    "12c-pt-ttl-failed": (Category.USER_CODE, "Master 0 failed with exit code 1 and wrote no output"),
    "13-pt-activedeadline": (Category.TIMEOUT, f"PyTorchJob deadline {DEADLINE} 5 s"),
    "13c-pt-template-deadline-never": (Category.TIMEOUT, f"PyTorchJob backstop {DEADLINE} 25 s"),
    "13c-pt-template-deadline-onfailure": (Category.TIMEOUT, f"PyTorchJob backstop {DEADLINE} 25 s"),
    "16-pt-delete-background": (Category.INFRASTRUCTURE, f"PyTorchJob gone {DELETED}"),
    "16-pt-delete-foreground": (Category.INFRASTRUCTURE, f"PyTorchJob gone {DELETED}"),
    "16-pt-delete-orphan": (Category.INFRASTRUCTURE, f"PyTorchJob gone {DELETED}"),
    "17-pt-image-never": (
        Category.IMAGE,
        "Master 0 can't pull docker.io/library/absent:1: Container image "
        '"docker.io/library/absent:1" is not present with pull policy of Never',
    ),
    "17-pt-image-pull": (
        Category.IMAGE,
        f"Master 0 can't pull registry.example.invalid/team/trainer:1.0: {CONTAINERD}",
    ),
    "18-pt-gpu-unschedulable-at-7s": (Category.SCHEDULING, f"Master 0 {NO_NODE} 1 Insufficient nvidia.com/gpu"),
    "18b-pt-nodeselector-at-5s": (Category.SCHEDULING, f"Master 0 {NO_NODE} {SELECTOR}"),
    "18c-pt-cpu-memory": (Category.SCHEDULING, f"Master 0 {NO_NODE} 1 Insufficient cpu, 1 Insufficient memory"),
    "21c-pt-long-name-runs": (
        Category.ENVIRONMENT,
        f"PyTorchJob {LONG} has a name that is too long for its Services: metadata.name: "
        'Invalid value: "long-name-long-name-long-name-long-name-long-name-lon...',
    ),
    "22-pt-oom": (Category.OUT_OF_MEMORY, "Master 0 ran out of memory (OOMKilled, exit code 137)"),
    "22b-pt-oom-exitcode": (Category.OUT_OF_MEMORY, "Master 0 ran out of memory (OOMKilled, exit code 137)"),
    "24-pt-init-fail": (
        Category.USER_CODE,
        "Init container prepare of Master 0 failed with exit code 4. Last log line: cannot prepare",
    ),
    "24b-pt-init-fail-onfailure": (
        Category.USER_CODE,
        "Init container prepare of Master 0 failed with exit code 4. Last log line: cannot prepare",
    ),
    "25c-pt-bad-command": (
        Category.IMAGE,
        'Master 0 can\'t start its command: exec: "/no/such/program": stat /no/such/program: no such file or directory',
    ),
    "25d-pt-config-error": (
        Category.ENVIRONMENT,
        'Master 0 can\'t create container pytorch: configmap "absent" not found',
    ),
    "25d-pt-config-error-nosecret": (
        Category.ENVIRONMENT,
        'Master 0 can\'t mount a volume: MountVolume.SetUp failed for volume "s" : secret "absent" not found',
    ),
    "32-mpi-launcher-fails": (
        Category.USER_CODE,
        "Launcher failed with exit code 1. Last log line: launcher fails",
    ),
    "32b-mpi-launcher-fails-onfailure": (
        Category.USER_CODE,
        "Launcher failed with exit code 1. Last log line: launcher fails",
    ),
    "32c-mpi-launcher-fails-default": (
        Category.USER_CODE,
        "Launcher failed with exit code 1. Last log line: launcher fails",
    ),
    "32d-mpi-launcher-backoff-0": (
        Category.USER_CODE,
        "Launcher failed with exit code 3. Last log line: launcher fails",
    ),
    "32e-mpi-launcher-fails-never": (
        Category.USER_CODE,
        "Launcher failed with exit code 1. Last log line: launcher fails",
    ),
    "38-mpi-invalid": (
        Category.ENVIRONMENT,
        f"MPIJob nolauncher {REJECTED} Found validation errors: spec.mpiReplicaSpecs[Launcher]: Required value: "
        "must have Launcher replica spec",
    ),
    "38-mpi-invalid-exitcode": (
        Category.ENVIRONMENT,
        f"MPIJob exitcode {REJECTED} Found validation errors: spec.mpiReplicaSpecs[Launcher].restartPolicy: "
        'Unsupported value: "ExitCode": supported values: "Never", "OnFailure"',
    ),
    "40b-mpi-unschedulable-worker": (
        Category.SCHEDULING,
        f"Worker 0 {NO_NODE} {SELECTOR}. Launcher failed while waiting for it (exit code 1)",
    ),
    "40c-mpi-deadline-ttl": (Category.TIMEOUT, f"MPIJob deadline {DEADLINE} 5 s"),
    "43-mpi1-worker-fails": (Category.USER_CODE, "Worker 0 failed with exit code 1 and wrote no output"),
    "45-mpi1-launcher-fails": (
        Category.USER_CODE,
        "Launcher failed with exit code 1. Last log line: launcher fails",
    ),
    "45b-mpi1-launcher-fails-onfailure": (
        Category.USER_CODE,
        "Launcher failed with exit code 1. Last log line: launcher fails",
    ),
    "46d-mpi1-invalid": (
        Category.ENVIRONMENT,
        f"MPIJob nolauncher {REJECTED} {V1} Master ReplicaSpec must be present",
    ),
    "46d-mpi1-invalid-twolaunchers": (
        Category.ENVIRONMENT,
        f"MPIJob twolaunchers {REJECTED} {V1} There must be only 1 launcher replica",
    ),
    "35-mpi-suspend-at-10s": (Category.QUEUE, "MPIJob held is suspended: MPIJob suspended"),
    "14-pt-suspend-create-at-3s": (Category.QUEUE, "PyTorchJob held is suspended: PyTorchJob held is suspended."),
    "13b-pt-activedeadline-quiet": (Category.UNKNOWN, "PyTorchJob deadline shows no failure"),
    "51-tj-fails": (Category.USER_CODE, "node 1 failed with exit code 1. Last log line: broken"),
    "51-tj-fails-default": (Category.USER_CODE, "node 1 failed with exit code 1. Last log line: broken"),
    "51-tj-fails-onfailure": (Category.USER_CODE, "node 1 failed with exit code 1. Last log line: broken"),
    "51c-tj-oom": (Category.OUT_OF_MEMORY, "node 0 ran out of memory (OOMKilled, exit code 137)"),
    "51d-tj-bad-image": (
        Category.IMAGE,
        "node 0 can't pull registry.example.invalid/team/trainer:1.0: dial tcp: lookup "
        "registry.example.invalid on 192.0.2.53:53: no such host",
    ),
    "51e-tj-bad-command": (
        Category.IMAGE,
        'node 0 can\'t start its command: exec: "/no/such/program": stat /no/such/program: no such file or directory',
    ),
    "51h-tj-never-backofflimit-2": (Category.USER_CODE, "node 0 failed with exit code 1. Last log line: try"),
    "51i-tj-fails-default-end": (Category.USER_CODE, "node 0 failed with exit code 1. Last log line: try"),
    "54-tj-deadline": (Category.TIMEOUT, "TrainJob train exceeded its activeDeadlineSeconds of 10 s"),
    "55b-tj-long-name": (
        Category.ENVIRONMENT,
        "TrainJob nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn can't create its JobSet: JobSet name"
        " is too long, pod names generated for this JobSet will exceed 63 characters",
    ),
    "55d-tj-limits": (
        Category.ENVIRONMENT,
        "TrainJob limits can't create its Jobs: spec.template.spec.containers[0].resources.requests: "
        'Invalid value: "2": must be less than or equal to cpu limit of 1',
    ),
    "55d-tj-nodes-minus": (
        Category.ENVIRONMENT,
        "TrainJob nodes-minus can't create its Jobs: spec.parallelism: Invalid value: -1: must be "
        "greater than or equal to 0, spec.completions: Invalid value: -1: must be greater than or equal "
        "to 0",
    ),
    "55d-tj-patch-container": (
        Category.ENVIRONMENT,
        "TrainJob patch-container can't create its Jobs: spec.template.spec.containers[0].image: "
        'Required value, spec.template.spec.containers[0].volumeMounts[0].name: Not found: "v"',
    ),
    "55d-tj-patch-job": (
        Category.ENVIRONMENT,
        "TrainJob patch-job can't create its JobSet: "
        'spec.replicatedJobs[0].template.spec.template.spec.containers: Invalid value: "null": '
        "spec.replicatedJobs[0].template.spec.template.spec.containers in...",
    ),
    "55d-tj-patch-mount": (
        Category.ENVIRONMENT,
        "TrainJob patch-mount can't create its Jobs: "
        'spec.template.spec.containers[0].volumeMounts[0].name: Not found: "v"',
    ),
    "56-tj-runtimepatches": (
        Category.SCHEDULING,
        "node 0 can't be scheduled: 0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector",
    ),
    "59b-tj-pod-deleted-never": (
        Category.INFRASTRUCTURE,
        "node 1 was deleted or killed from outside, which failed the job",
    ),
    "60b-tj-ttl-failed": (Category.USER_CODE, "node 0 failed with exit code 1. Last log line: ran"),
}


def assert_sentences(resolution: str) -> None:
    assert resolution[0].isupper()
    assert resolution.endswith(".")


@pytest.mark.parametrize("name", FIRST_LINES)
def test_the_first_line_of_a_recorded_failure(name: str) -> None:
    cause = cause_of(recording(name))
    assert (cause.category, cause.summary) == FIRST_LINES[name]
    assert str(cause).splitlines()[0] == cause.summary
    assert len(cause.summary) <= MAX_FIRST_LINE_CHARS
    assert_sentences(cause.resolution)


@settings(max_examples=5)
@given(st.data())
@pytest.mark.parametrize("name", FIRST_LINES)
def test_the_order_of_the_evidence_does_not_matter(name: str, data: st.DataObject) -> None:
    record = recording(name)
    shuffled = record | {key: data.draw(st.permutations(record[key])) for key in ("pods", "events")}
    shuffled["job"]["status"]["conditions"] = data.draw(st.permutations(record["job"]["status"].get("conditions", [])))
    assert cause_of(shuffled) == cause_of(record)


FAILED_AFTER_GRACE = {
    "55b-tj-long-name",
    "55d-tj-limits",
    "55d-tj-nodes-minus",
    "55d-tj-patch-container",
    "55d-tj-patch-job",
    "55d-tj-patch-mount",
    "17-pt-image-never",
    "17-pt-image-pull",
    "21c-pt-long-name-runs",
    "25d-pt-config-error",
    "25d-pt-config-error-nosecret",
    "38-mpi-invalid",
    "38-mpi-invalid-exitcode",
    "46d-mpi1-invalid",
    "46d-mpi1-invalid-twolaunchers",
    "51d-tj-bad-image",
}


@pytest.mark.parametrize("name", sorted(p.stem for p in RECORDINGS.glob("[0-9]*.json")))
def test_startup_failures_are_only_jobs_that_never_start(name: str) -> None:
    record = recording(name)
    seen = record["job"], record["pods"], record["events"]
    in_the_end = find_startup_cause(make_evidence(*seen), max(GRACE_SECONDS.values()))
    assert find_startup_cause(make_evidence(*seen), min(GRACE_SECONDS.values()) - 1) is None
    assert (in_the_end is not None) == (name in FAILED_AFTER_GRACE)
    if in_the_end:
        cause = cause_of(record)
        assert (in_the_end.category, in_the_end.resolution) == (cause.category, cause.resolution)
        assert in_the_end.summary.endswith((". Giving up after waiting 300 s.", "..."))


def test_image_pull_failure_ends_the_job_after_three_minutes() -> None:
    record = recording("17-pt-image-pull")
    assert find_startup_cause(make_evidence(record["job"], record["pods"], record["events"]), 179) is None
    cause = find_startup_cause(make_evidence(record["job"], record["pods"], record["events"]), 180)
    assert cause
    assert cause.replica == "Master 0"
    assert cause.summary.endswith("no such host. Giving up after waiting 180 s.")
    assert cause.resolution == "Correct the registry's name, or give the nodes access to it."


def test_who_finds_no_output_is_not_told_to_read_the_log() -> None:
    cause = cause_of(recording("12c-pt-ttl-failed"))
    assert cause.summary.endswith("and wrote no output")
    assert (
        cause.resolution == "Check its command, and whether it buffers its output (python -u, or PYTHONUNBUFFERED=1)."
    )


def test_detail_lists_the_remaining_evidence() -> None:
    detail = cause_of(recording("05-pt-never-fail")).detail
    assert "PyTorchJob fails is failed because 1 Master replica(s) failed." in detail
    assert "Master 0: pod fails-master-0, container pytorch" in detail
    assert detail.endswith("Last log lines:\n  about to fail")
    assert "recreated 6 times" in cause_of(recording("22b-pt-oom-exitcode")).detail
    assert "restarted 3 times" in cause_of(recording("32c-mpi-launcher-fails-default")).detail
    assert "1 Insufficient nvidia.com/gpu. no new claims" in cause_of(recording("18-pt-gpu-unschedulable-at-7s")).detail


# ---- failures that were not recorded: pods and logs written by hand


def time(seconds: int) -> str:
    return f"2026-11-21T10:{seconds // 60:02d}:{seconds % 60:02d}Z"


def pod(role: str, index: int, *, code: int | None = None, at: int = 0, uid: str = "", **more: Any) -> dict[str, Any]:
    """A pod of a PyTorchJob; with an exit code, one that ended `at` seconds after the job's start."""
    state: dict[str, Any] = {"running": {"startedAt": time(0)}}
    if code is not None:
        state = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": time(at)} | more.pop("end", {})}
    container = {"name": "pytorch", "image": "train:1", "restartCount": more.pop("restarts", 0), "state": state}
    meta = {
        "creationTimestamp": more.pop("created", time(0)),
        **({"uid": uid} if uid else {}),
        **more.pop("metadata", {}),
    }
    status = {"phase": "Failed" if code else "Running", "containerStatuses": [container], "conditions": [], **more}
    return replica_pod(role, index, meta=meta, spec={"nodeName": "n"}, **status)


def failed(at: int = 600, reason: str = "PyTorchJobFailed", message: str = "job failed") -> dict[str, Any]:
    condition = {
        "type": "Failed",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": time(at),
    }
    return {"kind": "PyTorchJob", "metadata": {"name": "train"}, "status": {"conditions": [condition]}}


def logs(**by_replica: str) -> dict[str, list[str]]:
    return {log_key(f"train-{k.replace('_', '-')}", "pytorch"): v.splitlines() for k, v in by_replica.items()}


TRACEBACK = """\
epoch 1 loss 0.5
Traceback (most recent call last):
  File "/app/train.py", line 7, in <module>
    main()
  File "/app/train.py", line 4, in main
    raise ValueError("negative loss")
ValueError: negative loss
"""
PEER_LOST = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/app/train.py", line 9, in <module>
[rank1]:     dist.all_reduce(t)
[rank1]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4711
"""
NCCL_TIMEOUT = (
    "[rank2]:[E1121 10:00:00 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 600029 milliseconds before timing out."
)
LOGS = Path(__file__).parent / "data" / "logs"  #: Real output of torchrun, PyTorch and mpirun.


def written(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


def test_cause_is_the_earliest_failure_and_not_later_kills() -> None:
    killed: dict[str, Any] = {"metadata": {"deletionTimestamp": time(132), "deletionGracePeriodSeconds": 30}}
    pods = [
        pod("Worker", 0, code=1, at=100),
        pod("Master", 0, code=143, at=103, **copy.deepcopy(killed)),
        pod("Worker", 1, code=137, at=132, **copy.deepcopy(killed)),
    ]
    cause = diagnose(make_evidence(failed(at=101), pods, logs=logs(worker_0=TRACEBACK, master_0="epoch 1")))
    assert (cause.category, cause.replica) == (Category.USER_CODE, "Worker 0")
    assert cause.summary == "Worker 0 failed: ValueError: negative loss (exit code 1)"
    assert "Failed later" not in cause.detail


def test_a_lost_peer_is_not_the_cause_even_if_it_failed_first() -> None:
    pods = [pod("Master", 0, code=1, at=99), pod("Worker", 0, code=1, at=100)]
    cause = diagnose(make_evidence(failed(), pods, logs=logs(master_0=PEER_LOST, worker_0=TRACEBACK)))
    assert cause.summary == "Worker 0 failed: ValueError: negative loss (exit code 1)"
    assert "Failed later: Master 0" in cause.detail


@pytest.mark.parametrize("log", [PEER_LOST, NCCL_TIMEOUT, "torch.distributed.DistNetworkError: Broken pipe"])
def test_if_all_replicas_lost_a_peer_the_cause_is_unknown(log: str) -> None:
    pods = [pod("Master", 0, code=1, at=99), pod("Worker", 0, code=134, at=100)]
    cause = diagnose(make_evidence(failed(), pods, logs=logs(master_0=log, worker_0=log)))
    assert cause.category is Category.INFRASTRUCTURE
    assert cause.summary.startswith("Master 0 lost a peer, and no replica reports why: ")


def test_a_replica_that_left_early_is_the_cause_of_a_lost_peer() -> None:
    """Rank 1 ends with exit code 0 while rank 0 waits in a barrier."""
    pods = [pod("Master", 0, code=1, at=99), pod("Worker", 0, code=0, at=40), pod("Worker", 1)]
    cause = diagnose(make_evidence(failed(), pods, logs=logs(master_0=PEER_LOST)))
    assert cause.summary == "Worker 0 ended with exit code 0 while Master 0 was still training"
    assert (cause.category, cause.replica) == (Category.USER_CODE, "Worker 0")
    assert "Master 0 lost a peer" in cause.detail
    pods[1] = pod("Worker", 0, code=0, at=100)  # it ended later, so that isn't why
    cause = diagnose(make_evidence(failed(), pods, logs=logs(master_0=PEER_LOST)))
    assert cause.summary.startswith("Master 0 lost a peer")
    pods[1] = pod("Worker", 0, code=3, at=40)  # which the operator may ignore
    cause = diagnose(make_evidence(failed(), pods, logs=logs(master_0=PEER_LOST)))
    assert (cause.category, cause.replica) == (Category.USER_CODE, "Worker 0")
    assert cause.summary == "Worker 0 failed with exit code 3"


def test_a_replaced_evicted_pod_is_the_cause_if_others_only_lost_a_peer() -> None:
    message = "The node was low on resource: memory.\nmore"
    evicted = pod("Worker", 0, uid="old", phase="Failed", reason="Evicted", message=message)
    evicted["status"]["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": time(90)}]
    evicted["status"]["startTime"] = time(80)
    recreated = pod("Worker", 0, uid="new", created=time(95))
    pods = [pod("Master", 0, code=1, at=100), evicted, recreated]
    cause = diagnose(make_evidence(failed(), pods, logs=logs(master_0=PEER_LOST)))
    assert (cause.category, cause.replica) == (Category.INFRASTRUCTURE, "Worker 0")
    assert cause.summary == "Worker 0 was evicted from its node (Evicted): The node was low on resource: memory."
    # a traceback is a cause, not an effect
    assert diagnose(make_evidence(failed(), pods, logs=logs(master_0=TRACEBACK))).replica == "Master 0"


@pytest.mark.parametrize(
    ("reason", "description"),
    [
        ("PreemptionByScheduler", "was preempted by a pod of higher priority"),
        ("EvictionByEvictionAPI", "was evicted from its node"),
        ("TerminationByKubelet", "was evicted from its node"),
        ("DeletionByPodGC", "lost its node"),
    ],
)
def test_disruption_is_an_infrastructure_failure(reason: str, description: str) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "m"}
    condition["lastTransitionTime"] = time(9)
    meta = {"deletionTimestamp": time(40), "deletionGracePeriodSeconds": 30}
    pods = [pod("Worker", 3, code=143, at=11, conditions=[condition], metadata=meta), pod("Master", 0)]
    cause = diagnose(make_evidence(failed(at=12), pods))
    assert cause.summary == f"Worker 3 {description} ({reason}): m"
    assert cause.category is Category.INFRASTRUCTURE


@pytest.mark.parametrize("ended", [9, 11, 44])
def test_pod_that_a_taint_evicted_has_not_lost_its_node(ended: int) -> None:
    """A node that doesn't report is tainted, too. Its pod ends when it reports again, and not within 30 s of grace."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "m"}
    condition["lastTransitionTime"] = time(9)
    evicted = pod("Worker", 3, code=143, at=ended, conditions=[condition])
    cause = diagnose(make_evidence(failed(at=12), [evicted, pod("Master", 0)]))
    assert cause.summary == "Worker 3 was evicted from its node (NoExecute taint): m"
    assert not cause.failed_nodes
    evicted["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = time(ended + 60)
    cause = diagnose(make_evidence(failed(at=12), [evicted, pod("Master", 0)]))
    assert cause.summary == "Worker 3 lost its node (DeletionByTaintManager): m"
    assert cause.failed_nodes


def test_lost_node_is_an_infrastructure_failure() -> None:
    lost = pod("Worker", 0, phase="Failed", reason="NodeLost", message="Node n was lost")
    assert diagnose(make_evidence(failed(), [lost])).summary == "Worker 0 lost its node (NodeLost): Node n was lost"


@pytest.mark.parametrize(
    "meta",
    [
        {"deletionTimestamp": time(131), "deletionGracePeriodSeconds": 30},
        {"deletionTimestamp": time(104), "deletionGracePeriodSeconds": 0},  # as when the kubelet removes it
    ],
)
def test_a_pod_deleted_by_hand_fails_the_job_under_never(meta: dict[str, Any]) -> None:
    job = failed(at=101, message="PyTorchJob train is failed because 1 Worker replica(s) failed.")
    cause = diagnose(make_evidence(job, [pod("Worker", 1, code=143, at=102, metadata=meta), pod("Master", 0)]))
    assert cause.summary == "Worker 1 was deleted or killed from outside, which failed the job"
    assert cause.category is Category.INFRASTRUCTURE


def test_sigkill_from_outside_is_an_infrastructure_failure() -> None:
    cause = diagnose(make_evidence(failed(), [pod("Master", 0, code=137, at=5)], logs=logs(master_0="epoch 1")))
    assert cause.summary == "Master 0 was killed from outside by SIGKILL (exit code 137)"
    assert cause.category is Category.INFRASTRUCTURE


def test_a_kill_that_made_the_operator_delete_the_pod_is_the_cause() -> None:
    """A deletion sends SIGKILL at the end of the grace period, not before."""
    meta = {"deletionTimestamp": time(131), "deletionGracePeriodSeconds": 30}
    cause = diagnose(
        make_evidence(failed(at=101), [pod("Worker", 1, code=137, at=100, metadata=meta), pod("Master", 0)])
    )
    assert cause.summary == "Worker 1 was killed from outside by SIGKILL (exit code 137)"


def test_a_program_that_handles_sigterm_may_end_with_any_code() -> None:
    meta = {"deletionTimestamp": time(132), "deletionGracePeriodSeconds": 30}
    pods = [pod("Worker", 0, code=1, at=104, metadata=meta), pod("Master", 0, code=3, at=105)]
    assert diagnose(make_evidence(failed(at=106), pods)).replica == "Master 0"


@pytest.mark.parametrize(
    ("log", "category", "summary"),
    [
        ("torchrun-raise", Category.USER_CODE, "Master 0 failed: ValueError: negative loss at step 7 (exit code 1)"),
        (
            "torchrun-kill",
            Category.OUT_OF_MEMORY,
            "Master 0 failed: SIGKILL ended one of its processes, probably out of memory (exit code 1)",
        ),
        ("torchrun-exit", Category.USER_CODE, "Master 0 failed: one of its processes ended with exit code 3"),
        ("mpirun-raise", Category.USER_CODE, "Master 0 failed: ValueError: bad shard (exit code 1)"),
        (
            "mpirun-kill",
            Category.OUT_OF_MEMORY,
            "Master 0 failed: SIGKILL ended one of its processes, probably out of memory (exit code 1)",
        ),
        (
            "mpirun-segv",
            Category.USER_CODE,
            "Master 0 failed: Segmentation fault in mca_btl_sm_poll_handle_frag (libopen-pal.so.80) (exit code 1)",
        ),
        (
            "mpirun-root",
            Category.USER_CODE,
            "Master 0 can't start mpirun as root: prterun has detected an attempt to run as root. (exit code 1)",
        ),
        (
            "mpirun-slots",
            Category.USER_CODE,
            "Master 0 starts more processes than it has slots: "
            "There are not enough slots available in the system to satisfy the 64 (exit code 1)",
        ),
    ],
)
def test_cause_is_found_in_the_report_of_a_launcher(log: str, category: Category, summary: str) -> None:
    cause = diagnose(make_evidence(failed(), [pod("Master", 0, code=1, at=5)], logs=logs(master_0=written(log))))
    assert (cause.category, cause.summary) == (category, summary)
    assert "ChildFailedError" not in cause.detail or log in ("torchrun-kill", "torchrun-exit")


def test_cause_is_the_failed_rank_and_not_its_peers() -> None:
    pods = [pod("Master", 0, code=1, at=5), pod("Worker", 0, code=1, at=5)]
    cause = diagnose(
        make_evidence(failed(), pods, logs=logs(master_0=written("gloo-rank0"), worker_0=written("gloo-rank1")))
    )
    assert cause.summary == "Worker 0 failed: ValueError: boom (exit code 1)"


def test_torchrun_ended_by_sigterm_is_not_the_cause() -> None:
    message = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15"
    pods = [pod("Master", 0, code=1, at=5), pod("Worker", 0, code=2, at=9)]
    assert diagnose(make_evidence(failed(), pods, logs=logs(master_0=message, worker_0="x"))).replica == "Worker 0"


def test_the_last_exception_of_a_process_counts() -> None:
    log = f"Traceback (most recent call last):\n  x\nKeyError: 'retried'\ngoing on\n{TRACEBACK}"
    cause = diagnose(make_evidence(failed(), [pod("Master", 0, code=1, at=5)], logs=logs(master_0=log)))
    assert cause.summary == "Master 0 failed: ValueError: negative loss (exit code 1)"


def test_error_file_of_torchelastic_is_read_from_the_termination_message() -> None:
    error = {"message": {"message": "KeyError: 'lr'", "extraInfo": {"py_callstack": "...", "timestamp": "1"}}}
    cause = diagnose(make_evidence(failed(), [pod("Master", 0, code=1, at=5, end={"message": json.dumps(error)})]))
    assert cause.summary == "Master 0 failed: KeyError: 'lr' (exit code 1)"
    cause = diagnose(make_evidence(failed(), [pod("Master", 0, code=1, at=5, end={"message": "disk is gone"})]))
    assert cause.summary == "Master 0 failed with exit code 1. Last log line: disk is gone"


WORDS = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", 1, Category.OUT_OF_MEMORY),
    ("train.py: error: unrecognized arguments: --world-size=16", 2, Category.USER_CODE),
    ("python: can't open file '/app/trian.py': [Errno 2] No such file or directory", 2, Category.USER_CODE),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.", 1, Category.USER_CODE),
    ("RuntimeError: Found no NVIDIA driver on your system.", 1, Category.USER_CODE),
    ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", 1, Category.USER_CODE),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 1, Category.INFRASTRUCTURE),
    ("OSError: [Errno 28] No space left on device", 1, Category.INFRASTRUCTURE),
    ("ModuleNotFoundError: No module named 'timm'", 1, Category.USER_CODE),
    ("There are not enough slots available in the system", 1, Category.USER_CODE),
    ("sh: trian: not found", 127, Category.USER_CODE),
    ("", 135, Category.USER_CODE),
    ("Fatal Python error: Segmentation fault", 139, Category.USER_CODE),
]


@pytest.mark.parametrize(("line", "code", "category"), WORDS, ids=[w[0][:40] or str(w[1]) for w in WORDS])
def test_known_messages_of_programs_give_the_category(line: str, code: int, category: Category) -> None:
    cause = diagnose(make_evidence(failed(), [pod("Worker", 2, code=code, at=5)], logs=logs(worker_2=line)))
    assert cause.category is category
    assert line in cause.summary
    assert cause.summary.startswith("Worker 2")


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: Error initializing torch.distributed using env:// rendezvous: "
        "environment variable RANK expected, but not set",
        "KeyError: 'LOCAL_RANK'",
    ],
)
def test_program_that_torchrun_could_not_start_is_named(line: str) -> None:
    """The Trainer sets only PET_* variables, which torchrun reads (migrate-to-trainjob.md)."""
    cause = diagnose(make_evidence(failed(), [pod("Worker", 0, code=1, at=5)], logs=logs(worker_0=line)))
    assert cause.summary == f"Worker 0 lacks the variables that torchrun sets: {line} (exit code 1)"
    assert cause.resolution.startswith("Start the program by torchrun")


@pytest.mark.parametrize("gpus", [0, 8])
def test_requested_gpus_that_are_not_visible_are_an_infrastructure_failure(gpus: int) -> None:
    it = pod("Worker", 0, code=1, at=5)
    it["spec"]["containers"] = [{"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]
    cause = diagnose(make_evidence(failed(), [it], logs=logs(worker_0="RuntimeError: No CUDA GPUs are available")))
    assert cause.summary == "Worker 0 can't see any GPU: RuntimeError: No CUDA GPUs are available (exit code 1)"
    assert cause.category is (Category.INFRASTRUCTURE if gpus else Category.USER_CODE)


NO_FILE = "python: can't open file '/etc/train.yaml': [Errno 2] No such file or directory"


@pytest.mark.parametrize(
    "log",
    [
        [f"warning: {NO_FILE}, using defaults"],
        [NO_FILE, *(f"epoch {i}" for i in range(PATTERN_WINDOW_LINES))],
        [NO_FILE, "Traceback (most recent call last):", "  x", "ValueError: negative loss"],
    ],
    ids=["a warning", "far from the end", "before the exception"],
)
def test_known_message_before_later_output_is_ignored(log: list[str]) -> None:
    cause = diagnose(
        make_evidence(failed(), [pod("Worker", 0, code=1, at=5)], logs={log_key("train-worker-0", "pytorch"): log})
    )
    assert "can't find its program" not in cause.summary
    assert cause.category is Category.USER_CODE


@pytest.mark.parametrize(
    ("code", "category", "end_of_summary"),
    [
        (137, Category.INFRASTRUCTURE, "was killed from outside by SIGKILL"),
        (143, Category.INFRASTRUCTURE, "was killed from outside by SIGTERM"),
        (139, Category.USER_CODE, "failed with exit code 139, SIGSEGV"),
    ],
)
def test_a_known_message_does_not_override_a_signal(code: int, category: Category, end_of_summary: str) -> None:
    cause = diagnose(make_evidence(failed(), [pod("Worker", 0, code=code, at=5)], logs=logs(worker_0=NO_FILE)))
    assert cause.category is category
    assert cause.summary.startswith(f"Worker 0 {end_of_summary}")


def test_signals_are_shown_by_name() -> None:
    cause = diagnose(make_evidence(failed(), [pod("Master", 0, code=139, at=5)]))
    assert cause.summary == "Master 0 failed with exit code 139, SIGSEGV"


def test_a_recovered_container_is_not_a_failure() -> None:
    include_recovered = pod("Worker", 0)
    include_recovered["status"]["containerStatuses"][0]["lastState"] = {
        "terminated": {"exitCode": 1, "finishedAt": time(1)}
    }
    done = pod("Worker", 1, code=0, at=9)
    done["status"]["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 1, "finishedAt": time(1)}}
    cause = diagnose(
        make_evidence(failed(), [include_recovered, done, pod("Master", 0, code=2, at=50)], logs=logs(master_0="bad"))
    )
    assert cause.replica == "Master 0"


def test_replicas_that_failed_in_the_same_second_are_chosen_by_index() -> None:
    pods = [pod("Worker", i, code=1, at=5) for i in (2, 1, 0)]
    assert diagnose(make_evidence(failed(), pods)).replica == "Worker 0"


def test_an_eviction_reported_by_mpi_operator() -> None:
    cause = diagnose(make_evidence(failed(reason="MPIJobEvicted", message="1/2 workers are evicted"), []))
    assert cause.category is Category.INFRASTRUCTURE


def test_a_job_that_no_operator_has_reconciled() -> None:
    job = {"kind": "PyTorchJob", "metadata": {"name": "train"}}
    assert "no operator has reconciled it" in diagnose(make_evidence(job, [])).summary
    cause = diagnose_limit(Limit.STARTUP, 300, make_evidence(job, []))
    assert cause.summary == "PyTorchJob train was not reconciled by any operator within 300 s (startup_timeout)"


def test_exceeded_quota_is_a_scheduling_failure() -> None:
    event = {"reason": "FailedCreatePod", "message": 'Error creating: pods "x" is forbidden: exceeded quota: gpus'}
    cause = diagnose(make_evidence({"kind": "PyTorchJob", "metadata": {"name": "t"}, "status": {}}, [], [event]))
    assert cause.category is Category.SCHEDULING
    assert "exceeds the namespace's quota: gpus" in cause.summary


# ---- limits of the task


@pytest.mark.parametrize(
    ("limit", "name", "category", "expected"),
    [
        (
            Limit.QUEUE,
            "14-pt-suspend-create-at-3s",
            Category.QUEUE,
            "was not admitted by its queue within 60 s (queue_timeout)",
        ),
        (
            Limit.SCHEDULE,
            "18-pt-gpu-unschedulable-at-7s",
            Category.SCHEDULING,
            "(schedule_timeout): Master 0 can't be scheduled: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu",
        ),
        (Limit.STARTUP, "17-pt-image-pull", Category.IMAGE, "(startup_timeout): Master 0 can't pull registry"),
        (
            Limit.STARTUP,
            "25d-pt-config-error-nosecret",
            Category.ENVIRONMENT,
            "(startup_timeout): Master 0 can't mount a volume",
        ),
        (
            Limit.EXECUTION,
            "13b-pt-activedeadline-quiet",
            Category.TIMEOUT,
            "did not finish within 60 s of its creation (execution_timeout)",
        ),
        (
            Limit.LOG_STALL,
            "13b-pt-activedeadline-quiet",
            Category.HANG,
            "wrote no log line for 60 s (log_stall_timeout)",
        ),
    ],
)
def test_a_limit_names_what_blocked_the_job(limit: Limit, name: str, category: Category, expected: str) -> None:
    record = recording(name)
    cause = diagnose_limit(limit, 60, make_evidence(record["job"], record["pods"], record["events"], record["logs"]))
    assert cause.category is category
    assert expected in cause.summary
    assert cause.resolution


def test_an_expired_timeout_names_where_the_replicas_are() -> None:
    record = recording("13b-pt-activedeadline-quiet")
    evidence = make_evidence(record["job"], record["pods"], record["events"], record["logs"])
    cause = diagnose_limit(Limit.EXECUTION, 60, evidence, step=120, replicas="2/2 Running")
    assert cause.summary.endswith(
        "did not finish within 60 s of its creation (execution_timeout): 2/2 Running, step 120"
    )
    assert cause.resolution.startswith("Raise execution_timeout")


def test_max_restarts_names_the_failure() -> None:
    record = recording("32c-mpi-launcher-fails-default")
    cause = diagnose_limit(
        Limit.RESTARTS, 2, make_evidence(record["job"], record["pods"], record["events"], record["logs"])
    )
    assert cause.category is Category.USER_CODE
    assert cause.summary == (
        "MPIJob lfail was restarted more often than max_restarts=2 allows: "
        "Launcher failed with exit code 1. Last log line: launcher fails"
    )


@pytest.mark.parametrize(
    "now",
    [{"running": {"startedAt": time(9)}}, {"terminated": {"exitCode": 0}}, {"waiting": {"reason": "CrashLoopBackOff"}}],
    ids=["runs again", "has ended well", "waits"],
)
def test_max_restarts_names_the_failure_before_the_restart(now: dict[str, Any]) -> None:
    """The restart is counted when the container is already running again."""
    again = pod("Master", 0, code=1, at=5, restarts=1)
    (status,) = again["status"]["containerStatuses"]
    status |= {"lastState": status["state"], "state": now}
    job = {"kind": "PyTorchJob", "metadata": {"name": "train"}}
    cause = diagnose_limit(Limit.RESTARTS, 0, make_evidence(job, [again], (), logs(master_0="broken")))
    assert cause.category is Category.USER_CODE
    assert cause.summary == (
        "PyTorchJob train was restarted more often than max_restarts=0 allows: "
        "Master 0 failed with exit code 1. Last log line: broken"
    )
    assert "restarted once" in cause.detail


@pytest.mark.parametrize(("size", "shown"), [(140, "failed to do request: dial tcp: "), (141, "dial tcp: ")])
def test_the_longest_end_of_a_pull_error_that_fits_is_shown(size: int, shown: str) -> None:
    address = "a" * (size - len("failed to do request: dial tcp: "))
    message = f"failed to resolve reference: failed to do request: dial tcp: {address}"
    waiting = pod("Master", 0)
    (status,) = waiting["status"]["containerStatuses"]
    status |= {"image": "trainer:1", "state": {"waiting": {"reason": "ErrImagePull", "message": message}}}
    cause = find_startup_cause(make_evidence({"kind": "PyTorchJob"}, [waiting]), 180)
    assert cause
    assert f"can't pull trainer:1: {shown}{address}" in cause.summary


def test_a_typo_in_an_image_name_is_named_in_the_first_line() -> None:
    image = "docker.io/library/pytorch-dmeo:latest"
    message = (
        f'rpc error: code = NotFound desc = failed to pull and unpack image "{image}": '
        f'failed to resolve reference "{image}": {image}: not found'
    )
    waiting = pod("Master", 0)
    (status,) = waiting["status"]["containerStatuses"]
    status |= {"image": "pytorch-dmeo:latest", "state": {"waiting": {"reason": "ErrImagePull", "message": message}}}
    cause = find_startup_cause(make_evidence({"kind": "PyTorchJob"}, [waiting]), 180)
    assert cause
    assert cause.summary == "Master 0 can't pull pytorch-dmeo:latest: not found. Giving up after waiting 180 s."
    assert cause.detail == f"ErrImagePull: {message}"
    assert cause.resolution == "Correct the image's name and tag, or push the image."


def test_a_long_summary_moves_to_the_detail() -> None:
    long = Cause(Category.USER_CODE, "Worker 0 failed: " + "x" * 300, "more")
    short = long.with_short_summary()
    assert short.summary == f"{long.summary[: MAX_FIRST_LINE_CHARS - 3]}..."
    assert short.detail == f"{long.summary}\nmore"
    assert short.with_short_summary() == short
    fitting = Cause(Category.USER_CODE, "x" * MAX_FIRST_LINE_CHARS, "more")
    assert fitting.with_short_summary() == fitting


def test_cause_is_restored_from_json() -> None:
    cause = cause_of(recording("22-pt-oom"))
    again = json.loads(json.dumps(cause.as_dict()))
    assert Cause(**{**again, "category": Category(again["category"])}) == cause


HUGE = 256 * 1024  #: A progress bar counts as one line.


@pytest.mark.parametrize(("replicas", "bars", "chars"), [(1, 49, HUGE), (64, 0, 2 * MAX_LINE_CHARS)])
def test_a_cause_is_limited_in_length(replicas: int, bars: int, chars: int) -> None:
    pods = [pod("Worker", i, code=1, at=5) for i in range(replicas)]
    progress = "\r".join(["epoch 3:  97%|####"] * (chars // 20))
    lines = [*[progress] * bars, f"ValueError: bad shard {'x' * chars} in b"]
    cause = diagnose(
        make_evidence(
            failed(message="y" * HUGE), pods, logs={log_key(p["metadata"]["name"], "pytorch"): lines for p in pods}
        )
    )
    assert cause.summary.startswith("Worker 0 failed: ValueError: bad shard xxx")
    assert len(cause.summary) == MAX_FIRST_LINE_CHARS
    assert len(cause.detail) <= MAX_DETAIL_CHARS
    assert cause.detail.startswith("Worker 0 failed: ValueError: bad shard xxx"), "the summary in full"
    assert "\nyyy" in cause.detail
    assert cause.detail.endswith("in b")
    assert " characters ...] " in cause.detail


def test_long_lines_are_clipped_before_they_are_parsed() -> None:
    """Parsing runs in the event loop, for every replica that failed."""
    for log, message in (["x" * HUGE] * 50, ""), ([], "x" * HUGE):
        tail = read_tail(log, message)
        assert len(tail.final_text) <= 50 * (MAX_LINE_CHARS + 1)
        assert all(len(line) <= MAX_LINE_CHARS for line in (*tail.quoted_lines, tail.last_line))
    assert len(read_tail([], json.dumps({"message": f"KeyError: {'x' * HUGE}"})).exception) <= MAX_LINE_CHARS


def test_recreated_pods_share_one_log() -> None:
    class Logs(dict[str, list[str]]):
        asked = 0

        def get(self, key: str, default: Any = None) -> Any:
            self.asked += 1
            return super().get(key, default)

    pods = [pod("Worker", 0, code=1, at=20 * n + 5, uid=str(n), created=time(20 * n)) for n in range(20)]
    tails = Logs(logs(worker_0=TRACEBACK))
    assert "recreated 19 times" in diagnose(make_evidence(failed(), pods, logs=tails)).detail
    assert tails.asked == 1


@pytest.mark.parametrize("text", ["a\0b", "a\udcffb"])
def test_a_cause_has_only_storable_characters(text: str) -> None:
    end = {"message": text}
    for cause in (
        diagnose(make_evidence(failed(), [pod("Worker", 0, code=1, at=5)], logs=logs(worker_0=f"ValueError: {text}"))),
        diagnose(make_evidence(failed(), [pod("Worker", 0, code=1, at=5, end=end)])),
        diagnose(make_evidence(failed(message=text), [])),
    ):
        assert "a\ufffdb" in cause.summary
        assert clean(cause.as_dict()) == cause.as_dict()


@pytest.mark.parametrize("message", ["[" * 4096, '{"message": ' * 900 + "1" + "}" * 900], ids=["lists", "objects"])
def test_a_termination_message_that_is_not_json_is_text(message: str) -> None:
    cause = diagnose(make_evidence(failed(), [pod("Master", 0, code=1, at=5, end={"message": message})]))
    assert cause.summary.startswith("Master 0 failed")


@given(st.lists(st.text(max_size=80), max_size=30), st.text(max_size=200))
def test_logs_with_any_bytes_can_be_parsed(lines: list[str], message: str) -> None:
    end = {"message": message}
    tails = {log_key("train-master-0", "pytorch"): lines}
    cause = diagnose(make_evidence(failed(), [pod("Master", 0, code=1, at=5, end=end)], logs=tails))
    assert cause.summary.startswith("Master 0")
    assert "\n" not in cause.summary
    assert len(cause.summary) <= MAX_FIRST_LINE_CHARS


def test_message_before_an_older_line_of_the_other_stream_is_quoted() -> None:
    """`print("step 120 ...")` and then `sys.exit("no data ...")`: the node has read stderr first."""
    lines: list[tuple[str, int | None]] = [
        ("loading", 90),
        ("step 119 loss 0.31", 100),
        ("no data for shard 3", 101),
        ("step 120 loss 0.30", 101),
    ]
    cause = cause_of_lines(lines)
    assert cause.summary == "Worker 0 failed with exit code 1. Last log line: no data for shard 3"
    assert cause.last_lines == tuple(text for text, _ in lines), "the quote has the node's order"


def cause_of_lines(lines: list[tuple[str, int | None]]) -> Cause:
    """Of a Worker that has written these lines, each with the second at which the node has read it."""
    read = [TimedText(text, "" if at is None else time(at)) for text, at in lines]
    ended = {"train-worker-0/pytorch": read}
    return diagnose(make_evidence(failed(), [pod("Worker", 0, code=1, at=102)], logs=ended))


@pytest.mark.parametrize(
    "lines",
    [
        [("warming up", 90), ("epoch 3 loss 0.30", 101)],  # too long before
        [("epoch 3 loss 0.30", 101), ("no data for shard 3", 101)],
        [("a", 101), ("b", 101)],
        [("cut line", None), ("step 3", None)],
    ],
)
def test_lines_stay_in_their_order_otherwise(lines: list[tuple[str, int | None]]) -> None:
    assert cause_of_lines(lines).summary.endswith(f"Last log line: {lines[-1][0]}")


def test_last_line_is_one_of_the_program() -> None:
    """Neither a marker, nor what the init container of a Worker prints until its Master's name resolves."""
    metric = 'KTRAIN_METRIC {"step": 3}'
    assert read_tail(["cannot open data", metric, 'KTRAIN_RESULT {"loss": 1}']).last_line == "cannot open data"
    resolved = ["nslookup: can't resolve", "Server:    10.96.0.10", "Name:      master-0", "Address: 10.1.2.3"]
    assert read_tail(resolved).last_line == "nslookup: can't resolve"
    assert read_tail([metric]).last_line == metric, "it has written nothing else"


def test_launcher_that_ends_while_its_evicted_worker_is_shut_down_is_the_effect() -> None:
    """The kubelet records the eviction when the grace period is over."""
    job = failed(at=400, reason="MPIJobEvicted", message="1/2 workers are evicted")
    launcher, worker = pod("Launcher", 0, code=1, at=300), pod("Worker", 1)
    worker["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    worker["status"]["containerStatuses"][0]["state"] = {
        "terminated": {"exitCode": 137, "reason": "Error", "finishedAt": time(302)}
    }
    first = "Worker 1 was evicted from its node (Evicted): The node was low on resource: memory."
    assert diagnose(make_evidence(job | {"kind": "MPIJob"}, [launcher, worker])).summary == first
