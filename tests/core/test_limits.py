"""The clocks that run in each phase of a job."""

from __future__ import annotations

import math
from typing import Any

from airflow_provider_ktrain.core.identity.names import BACKSTOP_ANNOTATION
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.manifest.deadline import BACKSTOP_SECONDS, seconds_to_deadline
from airflow_provider_ktrain.core.state.limits import Limit, Limits, clocks
from airflow_provider_ktrain.core.state.pods.objects import restarts_of
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

CREATED, SUSPENDED, SCHEDULED = "2026-11-21T10:00:00Z", "2026-11-21T10:00:10Z", "2026-11-21T10:01:00Z"
ALL = Limits(queue=60, schedule=120, startup=300, log_stall=600)
T0 = epoch_seconds(CREATED) or 0.0


def job(*conditions: tuple[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"creationTimestamp": CREATED},
        "status": {"conditions": [{"type": t, "status": "True", "lastTransitionTime": at} for t, at in conditions]},
    }


def pod(node: str = "", phase: str = "Pending", **more: Any) -> dict[str, Any]:
    scheduled = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": SCHEDULED}] if node else []
    return {
        "metadata": {"creationTimestamp": CREATED, **more},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, "conditions": scheduled},
    }


def due(
    job: Any,
    pods: list[Any],
    phase: Phase,
    limits: Limits,
    deadline: float | None = None,
    last_line: float = T0,
    has_events: bool = False,
) -> dict[Limit, float]:
    groups = PodGroups(
        PYTORCHJOB, ({**pod, "metadata": {"uid": str(n), **pod["metadata"]}} for n, pod in enumerate(pods))
    )
    running = clocks(job, groups, phase, limits, deadline=deadline, last_line=last_line, has_events=has_events)
    return {clock.limit: clock.due - T0 for clock in running}


def unchanged_since(job: Any, pods: list[Any], phase: Phase) -> dict[Limit, float]:
    groups = PodGroups(PYTORCHJOB, ({**pod, "metadata": {"uid": "1", **pod["metadata"]}} for pod in pods))
    return {c.limit: c.unchanged_since - T0 for c in clocks(job, groups, phase, ALL, deadline=None, last_line=T0)}


def test_condition_proves_since_when_nothing_has_changed() -> None:
    waits = {"spec": {"runPolicy": {"suspend": True}}}
    assert unchanged_since(job(("Suspended", SUSPENDED)) | waits, [], Phase.QUEUED) == {Limit.QUEUE: 10}
    assert unchanged_since(job() | waits, [], Phase.QUEUED) == {Limit.QUEUE: math.inf}, "no condition, no proof"

    def with_condition(type_: str, node: str) -> dict[str, Any]:
        unmet = {"type": type_, "status": "False", "lastTransitionTime": SUSPENDED}
        waiting = pod(node)
        return {**waiting, "status": {"phase": "Pending", "conditions": [*waiting["status"]["conditions"], unmet]}}

    created = job(("Created", CREATED))
    assert unchanged_since(created, [with_condition("PodScheduled", "")], Phase.PENDING) == {Limit.SCHEDULE: 10}
    assert unchanged_since(created, [with_condition("Ready", "node")], Phase.STARTING) == {Limit.STARTUP: 10}
    assert unchanged_since(created, [pod("node")], Phase.STARTING) == {Limit.STARTUP: math.inf}


def test_deadline_names_the_seconds_that_the_task_allows() -> None:
    """The job's creation has whole seconds, its deadline is rounded: their difference may be a second more."""
    annotated = job(("Running", CREATED))
    annotated["metadata"]["annotations"] = {BACKSTOP_ANNOTATION: str(int(20 + BACKSTOP_SECONDS))}
    groups = PodGroups(PYTORCHJOB, [])
    seconds = seconds_to_deadline(annotated)
    (clock,) = clocks(
        annotated, groups, Phase.RUNNING, Limits(), deadline=T0 + 21, deadline_seconds=seconds, last_line=T0
    )
    assert (clock.limit, clock.seconds) == (Limit.EXECUTION, 20)
    assert seconds_to_deadline(job()) is None


def test_only_the_queue_clock_runs_for_a_suspended_job() -> None:
    waits = {"spec": {"runPolicy": {"suspend": True}}}
    assert due(job(("Suspended", SUSPENDED)) | waits, [pod()], Phase.QUEUED, ALL) == {Limit.QUEUE: 70}
    assert due(job() | waits, [], Phase.QUEUED, ALL) == {Limit.QUEUE: 60}, "without a condition: since it was created"


def test_no_clock_runs_while_spec_and_condition_disagree() -> None:
    """As while a running job is preempted, and while a job is admitted."""
    preempted = job() | {"spec": {"runPolicy": {"suspend": True}}}
    preempted["status"] = {**(preempted.get("status") or {}), "startTime": CREATED}
    assert not due(preempted, [], Phase.SUSPENDED, ALL)
    assert not due(job(("Suspended", SUSPENDED)), [], Phase.SUSPENDED, ALL)


def test_the_schedule_clock_starts_at_the_creation_of_the_pod() -> None:
    assert due(job(), [pod()], Phase.PENDING, ALL) == {Limit.SCHEDULE: 120}


def test_the_startup_clock_starts_when_the_pod_is_scheduled() -> None:
    assert due(job(), [pod("n1")], Phase.STARTING, ALL) == {Limit.STARTUP: 360}


def test_the_startup_clock_of_an_unreconciled_job_starts_at_its_creation() -> None:
    assert due(job(), [], Phase.PENDING, ALL) == {Limit.STARTUP: 300}
    assert due(job() | {"status": None}, [], Phase.PENDING, ALL) == {Limit.STARTUP: 300}
    assert not due(job(("Created", CREATED)), [], Phase.PENDING, ALL), "its operator is about to make the pods"
    assert not due(job() | {"spec": {"suspend": True}}, [], Phase.PENDING, ALL), "a queue's affair"
    assert not due({}, [], Phase.PENDING, ALL), "not seen yet"


def test_the_schedule_clock_runs_if_the_operator_cannot_create_pods() -> None:
    """Quota may become available. The job has events but no status."""
    assert due(job(), [], Phase.PENDING, ALL, has_events=True) == {Limit.SCHEDULE: 120}
    assert not due(job(), [], Phase.PENDING, Limits(startup=300), has_events=True)


def test_the_schedule_clock_of_a_resumed_job_without_pods_starts_at_its_admission() -> None:
    """A ResourceQuota rejects the pods of a job that Kueue has admitted: the job has conditions, but no pods."""
    resumed = job(("Created", CREATED), ("Suspended", SUSPENDED))
    resumed["status"]["conditions"][1]["status"] = "False"
    assert due(resumed, [], Phase.PENDING, ALL) == {Limit.SCHEDULE: 130}
    assert not due(resumed, [], Phase.RESTARTING, Limits(schedule=120))
    assert due(resumed, [pod("n1")], Phase.STARTING, ALL) == {Limit.STARTUP: 360}


def test_the_log_stall_clock_starts_at_the_last_line() -> None:
    assert due(job(), [pod("n1", "Running")], Phase.RUNNING, ALL, last_line=T0 + 5) == {Limit.LOG_STALL: 605}


def test_running_and_deleted_pods_have_no_clock() -> None:
    assert not due(job(), [pod("n1", "Running"), pod(deletionTimestamp=CREATED)], Phase.PENDING, ALL)


def test_the_deadline_runs_in_every_phase() -> None:
    for phase in Phase:
        assert due(job(), [], phase, Limits(), deadline=T0 + 99) == {Limit.EXECUTION: 99}


def test_no_clock_runs_without_limits() -> None:
    for phase in Phase:
        assert not due(job(("Suspended", SUSPENDED)), [pod(), pod("n1")], phase, Limits())


def test_restarts_of_all_containers_are_counted() -> None:
    statuses = {"containerStatuses": [{"restartCount": 2}], "initContainerStatuses": [{"restartCount": 1}, {}]}
    pods: list[dict[str, Any]] = [{"status": statuses}, {"status": {}}, {}]
    assert [sum(restarts_of(pod)) for pod in pods] == [3, 0, 0]
