from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.state.accelerators import GPU
from airflow_provider_ktrain.core.state.pods.pod_history import PodHistory
from airflow_provider_ktrain.core.state.pods.usage import Usage, usage

START = datetime(2026, 11, 21, 10, tzinfo=UTC)
RECORDINGS = Path(__file__).parent / "recordings"


def at(seconds: float | None) -> str | None:
    return None if seconds is None else (START + timedelta(seconds=seconds)).isoformat()


def pod(
    created: float,
    placed: float | None,
    started: float | None,
    ended: float | None,
    *,
    gpus: int = 1,
    name: str = "p",
    resource: str = "nvidia.com/gpu",
) -> dict[str, Any]:
    run = {"startedAt": at(started), "finishedAt": at(ended)}
    state = {} if started is None else {"terminated": run} if ended is not None else {"running": run}
    return {
        "metadata": {"name": name, "creationTimestamp": at(created)},
        "spec": {
            "nodeName": "n" if placed is not None else None,
            "containers": [{"name": "pytorch", "resources": {"limits": {resource: gpus}}}],
        },
        "status": {
            "phase": "Succeeded" if ended is not None else "Running",
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(placed)}]
            if placed is not None
            else [],
            "containerStatuses": [{"state": state}],
        },
    }


NOW = START + timedelta(seconds=1000)


def test_seconds_of_a_pod_from_queue_to_end() -> None:
    used = usage([pod(0, 10, 40, 100, gpus=2)], NOW)
    assert used == Usage(requested=200, queued=20, held=180, wasted=60, gpus=2)


def test_existing_pods_count_until_now() -> None:
    assert usage([pod(0, 10, 10, None)], NOW) == Usage(1000, 10, 990, 0, 1)
    assert usage([pod(0, None, None, None)], NOW) == Usage(1000, 1000, 0, 0, 0)
    assert usage([pod(0, 10, None, None)], NOW) == Usage(1000, 10, 990, 990, 1)


def test_gpu_time_after_the_end_of_the_job_is_wasted() -> None:
    used = usage([pod(0, 0, 0, 100), pod(0, 0, 0, None, name="w")], NOW, job_ended=START + timedelta(seconds=100))
    assert used == Usage(1100, 0, 1100, 900, 2)


def test_only_gpus_count() -> None:
    amd = pod(0, 0, 0, 10, resource="amd.com/gpu")
    assert usage([amd], NOW).held == 10
    assert usage([pod(0, 0, 0, 10, resource="rdma/hca")], NOW) == Usage()


def test_a_recreated_pod_counts_its_gpus_once() -> None:
    used = usage([pod(0, 0, 0, 10, gpus=4), pod(20, 20, 20, 30, gpus=4)], NOW)
    assert (used.held, used.gpus) == (80, 4)


def test_a_deleted_pod_holds_its_gpus_until_its_deletion() -> None:
    gone = pod(0, 0, 0, None)
    gone["metadata"]["deletionTimestamp"] = at(60)
    assert usage([gone], NOW).held == 60


times = st.one_of(st.none(), st.floats(-100, 2000))
pods = st.lists(
    st.builds(
        lambda c, p, s, e, g, n: pod(c, p, s, e, gpus=g, name=n),
        st.floats(-100, 2000),
        times,
        times,
        times,
        st.integers(0, 8),
        st.sampled_from("abc"),
    ),
    max_size=6,
)


def test_gpu_time_of_evicted_pods_is_wasted() -> None:
    evicted = pod(0, 10, 20, 100)
    evicted["metadata"]["uid"] = "u"
    kept = {**pod(200, 210, 220, 300), "metadata": {**pod(200, 210, 220, 300)["metadata"], "uid": "v"}}
    assert usage([evicted, kept], NOW, evicted={"u"}) == Usage(200, 20, 180, 90 + 10, 1)


def test_the_time_in_a_queue_does_not_count_for_pods_that_still_exist() -> None:
    """2 GPUs, evicted after 100 s; the pod ends 30 s later. Who counts 2 x 60 s in the queue counts these 30 s, too."""
    evicted = pod(0, 10, 20, 130, gpus=2)
    queued = (START + timedelta(seconds=100), START + timedelta(seconds=160))
    history = PodHistory(PYTORCHJOB)
    history.update({"u": {**evicted, "metadata": {**evicted["metadata"], "uid": "u", "labels": {}}}}, (), NOW)
    assert history.usage(NOW, None).requested == 2 * 130
    used = history.usage(NOW, None, {GPU: 2 * 60}, [queued])
    assert (used.requested, used.queued, used.held) == (2 * 160, 2 * 10 + 2 * 30, 2 * 120)
    history.update({}, ["u"], NOW)
    following = PodHistory(PYTORCHJOB, history.handover({}, NOW, [queued]))
    assert following.usage(NOW, None, {GPU: 2 * 60}, [queued]).requested == 2 * 160


@given(pods, times)
def test_the_figures_are_consistent_for_any_timestamps(many: list[dict[str, Any]], ended: float | None) -> None:
    job_ended = None if ended is None else START + timedelta(seconds=ended)
    used = usage(many, NOW, job_ended=job_ended)
    assert used.queued >= 0
    assert 0 <= used.wasted <= used.held + 1e-6
    assert used.requested == pytest.approx(used.queued + used.held)
    alone = [usage([p], NOW, job_ended=job_ended) for p in many]
    for name in ("requested", "queued", "held", "wasted"):
        assert getattr(used, name) == pytest.approx(sum(getattr(u, name) for u in alone))
    assert usage(reversed(many), NOW, job_ended=job_ended).as_dict() == pytest.approx(used.as_dict())


@given(pods, st.floats(0, 1000))
def test_usage_never_decreases(many: list[dict[str, Any]], later: float) -> None:
    now, then = usage(many, NOW), usage(many, NOW + timedelta(seconds=later))
    assert then.requested >= now.requested - 1e-6
    assert then.held >= now.held - 1e-6


@pytest.mark.parametrize(
    ("used", "line"),
    [
        (Usage(), "GPU time: none."),
        (Usage(20, 20, 0, 0, 0), "GPU time: none, plus 20.0 GPU-seconds queued."),
        (
            Usage(100, 20, 80, 5, 2),
            "GPU time: 80.0 GPU-seconds on 2 GPUs (5.0 GPU-seconds wasted), plus 20.0 GPU-seconds queued.",
        ),
        (
            Usage(936, 186, 750, 48, 4),
            "GPU time: 12.5 GPU-minutes on 4 GPUs (0.8 GPU-minutes wasted), plus 3.1 GPU-minutes queued.",
        ),
        (
            Usage(7200, 0, 7200, 0, 16),
            "GPU time: 2.0 GPU-hours on 16 GPUs (0.0 GPU-hours wasted).",
        ),
    ],
)
def test_usage_as_one_line(used: Usage, line: str) -> None:
    assert str(used) == line


def test_a_recorded_job_that_waited_for_its_gpus() -> None:
    record = json.loads((RECORDINGS / "18-pt-gpu-unschedulable.json").read_text())
    used = usage(record["pods"], datetime.fromisoformat(record["job"]["status"]["completionTime"]))
    assert used.gpus == 2
    assert 0 < used.held < used.queued
