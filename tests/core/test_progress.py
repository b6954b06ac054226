"""Progress of a training: what counts as progress, and when the clock of `progress_timeout` starts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose_limit
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.state.limits import Limit, Limits, clocks
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.state.steps.progress import RunStarts
from airflow_provider_ktrain.core.state.steps.training_metrics import TrainingMetrics

from .test_diagnosis import time
from .test_partial_start import ELASTIC, T0, job
from .test_partial_start import pod as pod_without_status


def pod(role: str, at: int | None, **more: Any) -> dict[str, Any]:
    """A pod whose container started `at` seconds after the job; None: it has not started."""
    state = {} if at is None else {"state": {"running": {"startedAt": time(at)}}}
    return pod_without_status(
        role, node=True, meta={"uid": role}, containerStatuses=[{"name": "pytorch", **state, **more}]
    )


def due(
    *pods: dict[str, Any], phase: Phase = Phase.RUNNING, progress: float | None = None, elastic: bool = False
) -> float | None:
    """When the clock of one minute expires, in seconds after the job's creation."""
    limits, spec = Limits(progress=60), ELASTIC if elastic else {}
    began = RunStarts().last(job(**spec), pods)
    since = None if began is None else max(began, progress or began)
    groups = PodGroups(PYTORCHJOB, pods)
    found = list(clocks(job(**spec), groups, phase, limits, deadline=None, last_line=T0, progress_since=since))
    return found[0].due - T0 if found else None


def test_clock_starts_at_the_last_progress_or_when_the_last_container_started() -> None:
    pods = pod("Master", 10), pod("Worker", 30)
    assert due(*pods) == 90
    assert due(*pods, progress=T0 + 200) == 260
    assert due(*pods, progress=T0 + 20) == 90, "progress before the restart of a replica"


def test_restart_of_a_container_restarts_the_clock() -> None:
    again = pod("Worker", 500, lastState={"terminated": {"startedAt": time(30)}})
    assert due(pod("Master", 10), again, progress=T0 + 400) == 560


def test_container_that_waits_for_its_restart_counts_since_its_last_start() -> None:
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    assert due(pod("Master", None, state=waiting, lastState={"terminated": {"startedAt": time(30)}})) == 90


def test_start_of_a_changed_pod_is_noticed_and_a_deleted_pod_is_forgotten() -> None:
    starts = RunStarts()
    master, worker = pod("Master", 10), pod("Worker", 30)
    for number, known in enumerate((master, worker)):
        known["metadata"]["uid"] = str(number)
    again = pod("Worker", 500) | {"metadata": worker["metadata"]}
    found = [starts.last(job(), pods) for pods in ([master, worker], [master, worker], [master, again], [master])]
    assert found == [T0 + 30, T0 + 30, T0 + 500, T0 + 10]


@pytest.mark.parametrize("phase", list(Phase))
def test_clock_runs_only_while_the_job_runs(phase: Phase) -> None:
    assert due(pod("Master", 0), phase=phase) == (60 if phase in (Phase.RUNNING, Phase.RESTARTING) else None)


def test_clock_waits_until_all_containers_have_started() -> None:
    assert due(pod("Master", 10), pod("Worker", None)) is None
    assert due(pod("Master", 10), pod("Worker", None), elastic=True) == 70, "an elastic job trains without this Worker"
    assert due(pod("Master", 10), pod("Worker", None) | {"status": {"phase": "Failed"}}) == 70
    assert due() is None
    assert RunStarts().last({}, [pod("Master", 0)]) is None, "job not seen yet"


@pytest.mark.parametrize(
    ("step", "summary"),
    [
        (1234567, "PyTorchJob train reported no step higher than 1234567 for 600 s (progress_timeout)"),
        (None, "PyTorchJob train reported no step for 600 s (progress_timeout)"),
    ],
)
def test_cause_names_the_last_step(step: int | None, summary: str) -> None:
    cause = diagnose_limit(Limit.PROGRESS, 600, make_evidence(job(), [pod("Master", 0)]), step=step)
    assert cause.category is Category.HANG
    assert cause.summary == summary
    assert "KTRAIN_METRIC" in cause.resolution


# what counts as progress

Report = tuple[str, int]


def after(reports: list[Report], *, handed_over_at: int | None = None) -> TrainingMetrics:
    """The metrics after one report a second, with a handover before one of them."""
    metrics = TrainingMetrics()
    for at, (source, step) in enumerate(reports):
        if at == handed_over_at:
            metrics = TrainingMetrics(json.loads(json.dumps(metrics.handover())))
        metrics.read_line(source, f"KTRAIN_METRIC {json.dumps({'step': step})}", float(at))
    return metrics


reports = st.lists(st.tuples(st.sampled_from(["Master 0", "Worker 0", "Worker 1"]), st.integers(0, 5)), min_size=1)


@given(reports)
def test_new_highest_step_is_always_progress(before: list[Report]) -> None:
    found = after([*before, ("Worker 1", 6)])
    assert (found.step, found.progress_at) == (6, float(len(before)))


@given(reports, st.integers(1, 20))
def test_repeated_step_of_a_replica_is_never_progress(before: list[Report], times: int) -> None:
    source, step = before[-1]
    assert after([*before, *[(source, step)] * times]).progress_at == after(before).progress_at


@given(st.lists(st.integers(0, 5), min_size=1), st.data())
def test_handover_changes_nothing_for_a_replica_that_reports_alone(steps: list[int], data: st.DataObject) -> None:
    alone = [("Master 0", step) for step in steps]
    moved = after(alone, handed_over_at=data.draw(st.integers(0, len(steps) - 1)))
    assert (moved.step, moved.progress_at) == (after(alone).step, after(alone).progress_at)


def test_replica_that_goes_on_from_a_checkpoint_makes_progress_below_the_highest_step() -> None:
    """After an elastic restart inside the pods, another replica may have rank 0."""
    first = [("Worker 0", 1), *(("Master 0", step) for step in range(50, 60))]
    assert after([*first, ("Worker 0", 40)]).progress_at == 11.0
    assert after([*first, ("Worker 0", 40), ("Worker 0", 41)]).progress_at == 12.0
    assert after([*first, ("Worker 0", 40), ("Worker 0", 40)]).progress_at == 11.0


def test_lines_that_arrive_late_do_not_set_progress_back() -> None:
    metrics = after([("Master 0", 1), ("Master 0", 2)])
    metrics.read_line("Worker 0", 'KTRAIN_METRIC {"step": 3}', 0.5)
    assert (metrics.step, metrics.progress_at) == (3, 1.0)
