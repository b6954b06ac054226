"""What events report about a job's pods: which category it has, how long it must last, and that it forbids no retry."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose, find_startup_cause
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.diagnosis.startup_rules import GRACE_SECONDS
from airflow_provider_ktrain.exceptions import failure
from tests.factories import replica_pod

Object = dict[str, Any]
START = datetime.fromisoformat("2026-11-21T10:00:00Z")
CREATED = {"type": "Created", "status": "True"}
INVALID_IMAGE = "spec.containers[1].image: Required value"
#: Kind, reason and message of an event; category and first line of the cause. Recorded ones have their number.
REPORTED = {
    "38 no launcher": (
        "MPIJob",
        "ValidationError",
        "Found validation errors: spec.mpiReplicaSpecs[Launcher]: Required value: must have Launcher replica spec",
        Category.ENVIRONMENT,
        "MPIJob train was rejected by its operator: Found validation errors: spec.mpiReplicaSpecs[Launcher]: "
        "Required value: must have Launcher replica spec",
    ),
    "46d no master": (
        "MPIJob",
        "MPIJobFailedValidation",
        "MPIJob failed validation because MPIReplicaSpec is not valid: Master ReplicaSpec must be present",
        Category.ENVIRONMENT,
        "MPIJob train was rejected by its operator: MPIJob failed validation because MPIReplicaSpec is not valid: "
        "Master ReplicaSpec must be present",
    ),
    "21c long name": (
        "PyTorchJob",
        "FailedCreateService",
        'Error creating: Service "train-master-0" is invalid: metadata.name: Invalid value: "train-master-0": '
        "must be no more than 63 characters",
        Category.ENVIRONMENT,
        "PyTorchJob train has a name that is too long for its Services: metadata.name: Invalid value: "
        '"train-master-0": must be no more than 63 characters',
    ),
    "injected sidecar": (
        "PyTorchJob",
        "FailedCreatePod",
        f'Error creating: Pod "train-worker-0" is invalid: {INVALID_IMAGE}',
        Category.ENVIRONMENT,
        f"PyTorchJob train can't create its pods: {INVALID_IMAGE}",
    ),
    "injected sidecar of a TrainJob": (
        "TrainJob",
        "FailedCreate",
        f'Error creating: Pod "train-node-0-0-x7k2p" is invalid: {INVALID_IMAGE}',
        Category.ENVIRONMENT,
        f"TrainJob train can't create its pods: {INVALID_IMAGE}",
    ),
    "55b JobSet of a runtime": (
        "TrainJob",
        "TrainJobResourcesCreationFailed",
        'TrainJob resources reconciliation failed: admission webhook "vjobset.kb.io" denied the request: '
        'JobSet.jobset.x-k8s.io "train" is invalid: spec.replicatedJobs[0].name: Invalid value: "train-node-0": '
        "JobSet name is too long, pod names generated for this JobSet will exceed 63 characters",
        Category.ENVIRONMENT,
        "TrainJob train can't create its JobSet: JobSet name is too long, pod names generated for this JobSet will "
        "exceed 63 characters",
    ),
    "56b JobSet, message cut by the Trainer": (
        "TrainJob",
        "TrainJobResourcesCreationFailed",
        'TrainJob resources reconciliation failed: admission webhook "vjobset.kb.io" denied the request: '
        'JobSet.jobset.x-k8s.io "train" is invalid: spec.replicatedJobs: Invalid value: '
        '[{"name":"node","groupName":"default","template":{"spec":{"terminationGracePeriodSeco ...',
        Category.ENVIRONMENT,
        "TrainJob train can't create its JobSet: spec.replicatedJobs: Invalid value",
    ),
    "55d Jobs of a runtime": (
        "TrainJob",
        "JobCreationFailed",
        'job "train-node-0" creation failed with error: Job.batch "train-node-0" is invalid: '
        'spec.template.spec.containers[0].volumeMounts[0].name: Not found: "v"',
        Category.ENVIRONMENT,
        'TrainJob train can\'t create its Jobs: spec.template.spec.containers[0].volumeMounts[0].name: Not found: "v"',
    ),
    "a policy": (
        "PyTorchJob",
        "FailedCreatePod",
        'Error creating: admission webhook "policy.example" denied the request: label team is missing',
        Category.ENVIRONMENT,
        'PyTorchJob train can\'t create its pods: admission webhook "policy.example" denied the request: '
        "label team is missing",
    ),
    "a quota": (
        "PyTorchJob",
        "FailedCreatePod",
        'Error creating: pods "train-worker-0" is forbidden: exceeded quota: gpus',
        Category.SCHEDULING,
        "PyTorchJob train exceeds the namespace's quota: gpus",
    ),
}
REFUSED = sorted(name for name in REPORTED if name != "a quota")


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def job(kind: str, *conditions: Object) -> Object:
    return {"kind": kind, "metadata": {"name": "train"}, "status": {"conditions": list(conditions)}}


def event(name: str, first: float = 0) -> Object:
    _, reason, message, *_ = REPORTED[name]
    return {"type": "Warning", "reason": reason, "message": message, "firstTimestamp": at(first)}


def pod(role: str, state: Object) -> Object:
    container = {"name": "pytorch", "state": state}
    return replica_pod(role, meta={"creationTimestamp": at(0)}, phase="Running", containerStatuses=[container])


def given_up(seen: Object, pods: list[Object], events: list[Object], seconds: float, *, has_run: bool = False) -> bool:
    """Whether the job is given up so many seconds after START, if it has been in its phase since then."""
    now = START + timedelta(seconds=seconds)
    return find_startup_cause(make_evidence(seen, pods, events, now=now), seconds, has_run=has_run) is not None


@pytest.mark.parametrize("name", REPORTED)
def test_no_event_forbids_a_retry(name: str) -> None:
    kind, _, _, category, first = REPORTED[name]
    cause = diagnose(make_evidence(job(kind, CREATED), [], [event(name)]))
    assert (cause.category, cause.summary) == (category, first)
    assert cause.resolution
    assert not isinstance(failure(cause.as_dict()), AirflowFailException)


def test_remedy_of_a_message_that_the_trainer_cut_is_its_log() -> None:
    """The event ends before the reason, and a dry run of ours would not be the Trainer's request: see the design."""
    cut, whole = (
        diagnose(make_evidence(job("TrainJob"), [], [event(name)])).resolution
        for name in ("56b JobSet, message cut by the Trainer", "55d Jobs of a runtime")
    )
    assert "logs deployment/kubeflow-trainer-controller-manager" in cut
    assert "logs deployment" not in whole


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_ends_a_job_after_a_minute(name: str) -> None:
    seen = job(REPORTED[name][0], CREATED)
    assert [given_up(seen, [], [event(name)], seconds) for seconds in (0, 59, 60)] == [False, False, True]


@pytest.mark.parametrize("name", REFUSED)
def test_time_of_a_refusal_begins_with_its_first_event(name: str) -> None:
    """The job waited for its node for two hours before."""
    seen, late = job(REPORTED[name][0], CREATED), [event(name, first=7200)]
    assert [given_up(seen, [], late, seconds) for seconds in (7201, 7259, 7260)] == [False, False, True]


@pytest.mark.parametrize(("seconds", "ends"), [(-1, True), (0, False), (1, False)])
def test_creation_in_the_second_of_a_refusal_ends_it(seconds: float, ends: bool) -> None:
    """Two events of one second have no order."""
    refused = event("injected sidecar") | {"lastTimestamp": at(10)}
    made = {
        "type": "Normal", "reason": "SuccessfulCreatePod", "message": "Created pod: train-worker-0",
        "lastTimestamp": at(10 + seconds),
    }  # fmt: skip
    assert given_up(job("PyTorchJob", CREATED), [], [refused, made], 60) is ends


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("reason", ["PyTorchJobSuspended", "JobSuspended"])
def test_refusal_never_ends_a_job_that_was_evicted(name: str, reason: str) -> None:
    """It ran for 40 minutes, lost its quota and was admitted again: recording 79."""
    conditions = [{"type": "Running", "status": "False", "reason": reason}, {"type": "Suspended", "status": "False"}]
    assert not given_up(job(REPORTED[name][0], CREATED, *conditions), [], [event(name, first=2400)], 7200)
    assert not given_up(job(REPORTED[name][0], CREATED), [], [event(name, first=2400)], 7200, has_run=True)


def test_mpijob_that_was_suspended_before_its_start_has_not_run() -> None:
    """Recording 74e."""
    conditions = [{"type": "Running", "status": "False", "reason": "MPIJobSuspended"}]
    assert given_up(job("MPIJob", CREATED, *conditions), [], [event("a policy")], 60)


@pytest.mark.parametrize(
    ("kind", "role", "seconds", "ends"),
    [
        ("PyTorchJob", "master", 90, True),
        ("PyTorchJob", "master", 2400, False),
        ("MPIJob", "worker", 2400, True),
    ],
    ids=["its master waits for the worker", "its master has trained for 40 minutes", "its workers wait for a launcher"],
)
def test_refusal_ends_a_job_only_if_its_primary_has_not_run_for_long(
    kind: str, role: str, seconds: float, ends: bool
) -> None:
    """Without all its pods, the job's status never shows that some of them run: recording 21c."""
    seen, refused = job(kind), event("injected sidecar") | {"message": 'Error creating: Pod "train-x-1" is invalid: x'}
    assert given_up(seen, [pod(role, {"running": {"startedAt": at(0)}})], [refused], seconds) is ends
    ended = {"terminated": {"exitCode": 0, "startedAt": at(0), "finishedAt": at(seconds)}}
    assert given_up(seen, [pod(role, ended)], [refused], seconds) is ends


@pytest.mark.parametrize("name", ["38 no launcher", "55d Jobs of a runtime", "injected sidecar"])
def test_refusal_is_over_when_the_pods_exist(name: str) -> None:
    waiting = pod("worker", {"waiting": {"reason": "ContainerCreating"}})
    assert not given_up(job(REPORTED[name][0], CREATED), [waiting], [event(name)], 3600)


def test_own_end_of_a_job_comes_before_what_an_event_reports() -> None:
    evicted = pod("worker", {"terminated": {"exitCode": 137, "finishedAt": at(2400)}})
    evicted["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    failed = {"type": "Failed", "status": "True", "message": "PyTorchJob train is failed"}
    cause = diagnose(make_evidence(job("PyTorchJob", CREATED, failed), [evicted], [event(name) for name in REPORTED]))
    assert cause.category is Category.INFRASTRUCTURE
    assert cause.summary.startswith("Worker 0 was evicted")


def test_every_problem_has_a_grace_time() -> None:
    assert min(GRACE_SECONDS.values()) >= 30
