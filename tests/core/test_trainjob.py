"""Specifics of TrainJobs: roles, counts, and phases that no condition shows (recordings 50 to 61)."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.crash_loop import RestartHistory
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.names import JobRef, TaskKey
from airflow_provider_ktrain.core.kinds import KINDS, TRAINJOB
from airflow_provider_ktrain.core.kinds.trainjob.patches import ROLES_ANNOTATION
from airflow_provider_ktrain.core.logs.selection import check_choice
from airflow_provider_ktrain.core.manifest.deadline import backstop
from airflow_provider_ktrain.core.manifest.transform import fit
from airflow_provider_ktrain.core.state.limits import Limits, clocks
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups
from airflow_provider_ktrain.core.state.status import Phase, phase_of, shown_conditions
from airflow_provider_ktrain.manifests import gpus_of

from .trainjobs import jobs_status, pod, trainjob

SUSPENDED = ("Suspended", "True", "Suspended")
RESUMED = ("Suspended", "False", "Resumed")
COMPLETE = ("Complete", "True", "AllJobsCompleted")
FAILED = ("Failed", "True", "FailedJobs")


def test_roles_come_from_the_labels_of_jobset() -> None:
    assert TRAINJOB.pod_role(pod("node", 3)["metadata"]["labels"]) == ("node", 3)
    assert TRAINJOB.pod_role(pod("dataset-initializer")["metadata"]["labels"]) == ("dataset-initializer", 0)
    assert TRAINJOB.pod_role(pod("evaluator", 1)["metadata"]["labels"]) == ("evaluator", 1)
    assert TRAINJOB.pod_role({}) == ("pod", 0)
    assert [TRAINJOB.replica_name(role, 1) for role in ("node", "launcher", "model-initializer")] == [
        "node 1", "launcher", "model-initializer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("job", "counts", "primary"),
    [
        (trainjob(4), {"node": 4}, "node"),
        (trainjob(None), {"node": 1}, "node"),
        (trainjob(0), {"node": 0}, "node"),
        # the launcher is a node, and at least one other node runs (recording 57)
        (trainjob(4, jobsStatus=jobs_status(node={}, launcher={})), {"node": 3, "launcher": 1}, "launcher"),
        (trainjob(1, jobsStatus=jobs_status(launcher={}, node={})), {"node": 1, "launcher": 1}, "launcher"),
        (
            trainjob(2, jobsStatus=jobs_status(dataset_initializer={}, node={})),
            {"node": 2, "dataset-initializer": 1},
            "node",
        ),
        (trainjob(2, jobsStatus=jobs_status(model_initializer={}, trainers={})), {"trainers": 2}, "trainers"),
    ],
)
def test_counts_and_primary_by_the_roles_of_the_status(job: Any, counts: dict[str, int], primary: str) -> None:
    assert counts.items() <= {role: TRAINJOB.count(job, role) for role in TRAINJOB.replicas(job)}.items()
    assert TRAINJOB.primary(job) == primary


@pytest.mark.parametrize(
    ("job", "pods", "phase"),
    [
        (trainjob(), [], Phase.PENDING),
        (trainjob(jobsStatus=jobs_status(node={"active": 1})), [pod(phase="Pending")], Phase.PENDING),
        (trainjob(), [pod(phase="Pending", conditions=[]) | {"spec": {"nodeName": "n"}}], Phase.STARTING),
        (trainjob(), [pod("dataset-initializer")], Phase.STARTING),
        (trainjob(), [pod("dataset-initializer", phase="Succeeded"), pod(phase="Pending")], Phase.PENDING),
        (trainjob(), [pod(), pod(index=1, phase="Pending")], Phase.RUNNING),
        (trainjob(), [pod(phase="Succeeded")], Phase.RUNNING),  # before the TrainJob is Complete
        (trainjob(jobsStatus=jobs_status(node={"active": 1, "ready": 1})), [], Phase.RUNNING),
        (trainjob(jobsStatus=jobs_status(dataset_initializer={"ready": 1}, node={})), [], Phase.PENDING),
        (trainjob(2, RESUMED), [pod()], Phase.RUNNING),
        (trainjob(), [pod(phase="Pending", attempt=1)], Phase.RESTARTING),
        (trainjob(2, SUSPENDED), [], Phase.QUEUED),
        (trainjob(2, RESUMED, COMPLETE), [pod(phase="Succeeded")], Phase.SUCCEEDED),
        (trainjob(2, SUSPENDED, COMPLETE), [], Phase.SUCCEEDED),  # recording 52b
        (trainjob(2, FAILED, SUSPENDED), [], Phase.FAILED),
    ],
)
def test_phase_without_conditions(job: Any, pods: list[Any], phase: Phase) -> None:
    assert phase_of(job, pods) is phase


def test_an_mpi_job_runs_when_its_launcher_does() -> None:
    """Its nodes run an SSH server 12 s earlier (recording 57)."""
    job = trainjob(jobsStatus=jobs_status(node={"ready": 1, "active": 1}, launcher={}))
    assert phase_of(job) is Phase.PENDING
    assert phase_of(job, [pod()]) is Phase.STARTING
    assert phase_of(job, [pod(), pod("launcher", phase="Pending")]) is Phase.PENDING
    assert phase_of(job, [pod(), pod("launcher")]) is Phase.RUNNING
    assert phase_of(trainjob(), [pod("launcher")]) is Phase.RUNNING  # Trainer 2.0 has no jobsStatus


def test_an_mpi_job_of_trainer_2_0_whose_status_lists_no_jobs() -> None:
    """Its roles are those of the annotation that the task has written."""
    job = trainjob()
    job["metadata"]["annotations"] = {ROLES_ANNOTATION: "node,launcher"}
    assert phase_of(job, [pod("node")]) is Phase.STARTING
    assert phase_of(job, [pod("node"), pod("launcher")]) is Phase.RUNNING
    assert (TRAINJOB.primary(job), TRAINJOB.size(job)) == ("launcher", 2)
    del job["metadata"]["annotations"]
    assert TRAINJOB.primary(job) == "node"


def test_a_queued_job_has_no_conditions_at_first() -> None:
    job = trainjob()
    job["spec"]["suspend"] = True
    assert phase_of(job) is Phase.QUEUED


@pytest.mark.parametrize(
    ("job", "pods", "earlier", "phase"),
    [
        (trainjob(jobsStatus=jobs_status(node={"active": 1})), [pod()], Phase.FAILED, Phase.FAILED),  # recording 60b
        (trainjob(2, COMPLETE), [], Phase.FAILED, Phase.SUCCEEDED),
        (trainjob(2, SUSPENDED), [], Phase.RUNNING, Phase.SUSPENDED),
        (trainjob(2, SUSPENDED), [], Phase.PENDING, Phase.QUEUED),
        (trainjob(), [], Phase.RUNNING, Phase.RESTARTING),  # its pods are being recreated
        (trainjob(2, RESUMED), [], Phase.SUSPENDED, Phase.PENDING),
    ],
)
def test_earlier_phase_is_used_if_the_status_is_ambiguous(job: Any, pods: Any, earlier: Phase, phase: Phase) -> None:
    assert phase_of(job, pods, earlier=earlier) is phase


def test_sensors_can_wait_for_conditions_that_a_trainjob_does_not_have() -> None:
    assert shown_conditions(trainjob(), Phase.PENDING) == {"Created"}
    assert shown_conditions(trainjob(2, RESUMED), Phase.RUNNING) == {"Created", "Running"}
    assert shown_conditions(trainjob(2, COMPLETE), Phase.SUCCEEDED) == {"Created", "Complete", "Succeeded"}
    assert shown_conditions(trainjob(), Phase.QUEUED) == {"Created", "Suspended"}


def test_no_startup_limit_runs_while_jobset_recreates_the_pods() -> None:
    limits = Limits(startup=60, schedule=60)
    how: Any = {"deadline": None, "last_line": 0.0}
    assert [c.seconds for c in clocks(trainjob(), PodGroups(TRAINJOB), Phase.PENDING, limits, **how)] == [60]
    assert not list(clocks(trainjob(), PodGroups(TRAINJOB), Phase.RESTARTING, limits, had_pods=True, **how))


def test_restarts_by_jobset_are_a_crash_loop() -> None:
    """JobSet deletes the pods of all nodes. This is an effect of the failure and doesn't reset the count."""
    history, job, loops = RestartHistory(TRAINJOB), trainjob(2), []
    for attempt in range(6):
        began, ended = (f"2026-11-22T10:{attempt:02d}:{second}Z" for second in ("10", "40"))
        running: Any = {"name": "node", "restartCount": 0, "state": {"running": {"startedAt": began}}}
        end = {"reason": "Error", "startedAt": began, "finishedAt": ended}
        nodes = [pod(index=i, attempt=attempt, containerStatuses=[running]) for i in range(2)]
        failed, killed = (
            pod(
                index=i,
                phase="Failed",
                attempt=attempt,
                containerStatuses=[running | {"state": {"terminated": end | {"exitCode": code}}}],
            )
            for i, code in enumerate((3, 143))
        )
        for each in (*nodes, failed, killed):
            each["metadata"]["creationTimestamp"] = began
        killed["metadata"] |= {"deletionTimestamp": ended, "deletionGracePeriodSeconds": 1}
        history.update(job, {p["metadata"]["uid"]: p for p in nodes})
        history.update(job, {p["metadata"]["uid"]: p for p in (failed, nodes[1])})
        history.update(job, {killed["metadata"]["uid"]: killed}, removed=[failed["metadata"]["uid"]])
        loops.append(history.crash_loop(6))
    assert [loop and loop.replica for loop in loops] == [None] * 5 + ["node 0"]


# ---- manifests


def test_gpus_are_those_of_all_nodes() -> None:
    job = trainjob(4)
    job["spec"]["trainer"]["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": 2}}
    assert gpus_of(job) == 8
    assert gpus_of(trainjob()) == 0  # the client doesn't have the runtime's resources


def test_the_deadline_is_in_spec() -> None:
    job = backstop(trainjob(), 300)
    assert job["spec"]["activeDeadlineSeconds"] == 300
    assert "runPolicy" not in job["spec"]
    assert backstop(job, 500)["spec"]["activeDeadlineSeconds"] == 300


def test_trainer_is_always_sent() -> None:
    """Without it the pods get no PET_* (recording 50b)."""
    job = trainjob()
    del job["spec"]["trainer"]
    assert fit(job, "trainer.kubeflow.org/v1alpha1")["spec"]["trainer"] == {}


def test_nodes_and_processes() -> None:
    spec: dict[str, Any] = {}
    TRAINJOB.form.set_replicas(spec, {"node": 3}, TRAINJOB.roles)
    TRAINJOB.form.set_processes(spec, "2")
    assert spec == {"trainer": {"numNodes": 3, "numProcPerNode": 2}}
    with pytest.raises(ManifestError, match="no replica type Worker"):
        TRAINJOB.form.set_replicas(spec, {"Worker": 3}, TRAINJOB.roles)
    with pytest.raises(ManifestError, match="must be a number"):
        TRAINJOB.form.set_processes(spec, "gpu")
    TRAINJOB.form.set_processes(spec, "auto")
    assert spec == {"trainer": {"numNodes": 3}}


# ---- names and pods


@pytest.mark.parametrize("role", ["node", "launcher", "dataset-initializer", "model-initializer"])
def test_names_leave_room_for_the_names_of_pods(role: str) -> None:
    """`<name>-<role>-0-<index>-<5 random>` has at most 63 characters (recording 55b)."""
    key = TaskKey("d", "dag", "a-task-with-a-name-of-many-characters-that-is-cut", "run")
    name = key.job_name(max_length=TRAINJOB.name_length)
    index = "9999" if role == "node" else "0"
    assert len(f"{name}-{role}-0-{index}-xxxxx") <= 63
    assert 30 <= len(name) <= 33


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_pods_are_selected_by_our_label_only_where_they_certainly_have_it(kind: Any) -> None:
    ours = JobRef(kind.name, kind.versions[0], "ns", "train", "j", submission="s")
    theirs = JobRef(kind.name, kind.versions[0], "ns", "train", "j")
    assert theirs.pod_selector == f"{kind.behavior.pod_name_label}=train"
    assert ours.pod_selector == ("ktrain.airflow/submission=s" if kind.behavior.labels_pods else theirs.pod_selector)


def test_logs_of_roles_named_by_a_runtime() -> None:
    check_choice({"evaluator": [0]}, TRAINJOB)
    with pytest.raises(ManifestError, match="found the role 'Worker'"):
        check_choice({"Worker": [0]}, TRAINJOB)
