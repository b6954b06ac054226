from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB
from airflow_provider_ktrain.core.state.pods.pod_history import MAX_REPLACED_PODS, PodHistory
from airflow_provider_ktrain.core.state.pods.usage import usage

START = datetime(2026, 11, 21, 10, tzinfo=UTC)


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def pod(
    number: int, code: int | None, *, name: str = "w-0", restarts: int = 0, deleted: bool = False, labels: Any = None
) -> Any:
    """One pod of a replica that ran for 10 s."""
    started, ended = at(20 * number), at(20 * number + 10)
    run = {"startedAt": started, "finishedAt": ended, "exitCode": code}
    state = {"running": {"startedAt": started}} if code is None else {"terminated": run}
    meta: dict[str, Any] = {"uid": f"{name}-{number}", "name": name, "creationTimestamp": started, "labels": labels}
    if deleted:  # requested 2 s before the end
        meta |= {"deletionTimestamp": at(20 * number + 38), "deletionGracePeriodSeconds": 30}
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    phase = "Running" if code is None else "Failed" if code else "Succeeded"
    return {
        "metadata": meta,
        "spec": {"nodeName": "n", "containers": [{"name": "pytorch", "resources": resources}]},
        "status": {
            "phase": phase,
            "startTime": started,
            "containerStatuses": [{"name": "pytorch", "restartCount": restarts, "state": state}],
        },
    }


def history_of(pods: list[Any], now: datetime) -> PodHistory:
    """A history in which each pod replaced the previous one; the last pod exists."""
    history = PodHistory(PYTORCHJOB)
    for before, after in zip([None, *pods], pods, strict=False):
        if before:
            history.mark_deleted(before)
        history.update({after["metadata"]["uid"]: after}, (), now)
    return history


@given(
    st.lists(st.sampled_from([0, 1, 130]), max_size=3 * MAX_REPLACED_PODS),
    st.lists(st.integers(0, 2), min_size=99, max_size=99),
)
def test_dropped_pods_still_count(codes: list[int], restarted: list[int]) -> None:
    pods = [pod(n, code, restarts=restarted[n]) for n, code in enumerate(codes)]
    pods.append(pod(len(codes), None))
    now = START + timedelta(seconds=20 * len(codes) + 5)
    history = history_of(pods, now)
    assert len(history.all) <= MAX_REPLACED_PODS + 1
    assert history.restarts == sum(map(bool, codes)) + sum(restarted[: len(codes)])
    assert history.usage(now, None) == usage(pods, now)


@given(st.lists(st.sampled_from([0, 1, 130]), max_size=2 * MAX_REPLACED_PODS), st.integers(0, 2 * MAX_REPLACED_PODS))
def test_handover_keeps_restarts_and_usage(codes: list[int], at_pod: int) -> None:
    pods = [pod(n, code) for n, code in enumerate([*codes, None])]
    now = START + timedelta(seconds=20 * len(pods))
    cut = min(at_pod, len(codes))
    before = history_of(pods[: cut + 1], now)
    after = PodHistory(PYTORCHJOB, before.handover({}, now))
    for gone, there in zip([None, *pods[cut:]], pods[cut:], strict=False):
        if gone:
            after.mark_deleted(gone)
        after.update({there["metadata"]["uid"]: there}, (), now)
    whole = history_of(pods, now)
    assert after.restarts == whole.restarts
    assert after.usage(now, None) == whole.usage(now, None)


def test_recreated_launchers_count_as_restarts() -> None:
    """mpi-operator's launcher is the pod of a batch Job, which creates another one until its backoffLimit."""
    labels = {"training.kubeflow.org/job-role": "launcher"}
    launchers = [pod(n, None if n == 7 else 1, name=f"launcher-{n}", labels=labels) for n in range(8)]
    history = PodHistory(MPIJOB)
    for launcher in launchers:  # the failed pods remain
        history.update({p["metadata"]["uid"]: p for p in launchers[: launchers.index(launcher) + 1]}, (), START)
    assert history.restarts == 7


def test_a_pod_that_failed_by_its_deletion_is_not_a_restart() -> None:
    """For example when a suspended job is resumed, or a Worker is scaled down and up."""
    assert history_of([pod(0, 143, deleted=True), pod(1, None)], START).restarts == 0
    assert history_of([pod(0, 143), pod(1, None)], START).restarts == 1


def test_a_failed_pod_that_was_not_replaced_is_not_a_restart() -> None:
    history = history_of([pod(0, 1)], START)
    assert history.restarts == 0
    history.mark_deleted(pod(0, 1))
    history.update({"w-1-0": pod(0, None, name="w-1")}, (), START)
    assert history.restarts == 0
    assert [p["metadata"]["name"] for p in history.live] == ["w-1"]
    assert history.uids == ["w-1-0", "w-0-0"]
