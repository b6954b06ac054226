"""How programs ended: the rule, and what it says of all succeeded jobs of recordings 100 to 113."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.state.pods.pod_changes import (
    First,
    PodChanges,
    PodEnd,
    Verdict,
    end_of,
    version_before_end,
    with_change,
)
from tests.core.recorded_ends import NOW, RECORDED, Change, Process, changes_of, following

D = 1_000.0  #: When the pod was requested to end.
STOPPED = {
    "100b-pt-evicted-exit-0-master-onfailure": "Master 0 ended with exit code 0 after it was evicted from node-1",
    "100b-mpi-evicted-exit-0-launcher": "Launcher ended with exit code 0 after it was evicted from node-1",
    "100b-trainjob-evicted-exit-0-default": "node 1 ended with exit code 0 after it was evicted from node-1",
    "107c-pt-deleted-by-hand-exit-0-master-onfailure": "Master 0 ended with exit code 0 after its pod was deleted",
    "110-pt-master-deleted-saves-at-once": "Master 0 ended with exit code 0 after its pod was deleted",
    "110b-pt-master-deleted-saves-2s": "Master 0 ended with exit code 0 after its pod was deleted",
    "110c-pt-master-deleted-alone": "Master 0 ended with exit code 0 after its pod was deleted",
    "111-pt-elastic-worker-2-evicted": "Worker 2 ended with exit code 0 after it was evicted from node-1",
    "111b-pt-elastic-worker-2-deleted": "Worker 2 ended with exit code 0 after its pod was deleted",
    "111c-pt-elastic-scaled-down": "Worker 2 ended with exit code 0 after its pod was deleted",
    "111d-pt-elastic-scaled-down-saves-2s": "Worker 2 ended with exit code 0 after its pod was deleted",
    "111e-pt-elastic-worker-0-evicted": "Worker 0 ended with exit code 0 after it was evicted from node-1",
    "111f-pt-elastic-worker-2-evicted-cleanpodpolicy-running": "Worker 2 ended with exit code 0 after it was evicted "
    "from node-1",
    "112b-pt-silent-node-master-stopped": "Master 0 ended with exit code 0 after it lost its node",
}  #: All others are complete.
each_job = pytest.mark.parametrize("name", RECORDED)


def end(**known: Any) -> PodEnd:
    return PodEnd(**known)


@pytest.mark.parametrize(
    ("known", "job_end", "verdict"),
    [
        # it failed
        (end(failed=True, ended=True, finished=D, requested=D, first=First.REQUEST), D, Verdict.FAILED),
        # no request, or the end was shown before
        (end(exists=True), None, Verdict.RUNS),
        (end(ended=True, finished=D), D + 1, Verdict.BY_ITSELF),
        (end(ended=True, finished=D + 9, requested=D, first=First.END), D + 10, Verdict.BY_ITSELF),
        # the request was shown first
        (end(ended=True, finished=D - 6, requested=D, first=First.REQUEST), D + 10, Verdict.BY_ITSELF),
        (end(ended=True, finished=D - 5, requested=D, first=First.REQUEST), D + 10, Verdict.STOPPED),
        (end(ended=True, finished=D + 9, requested=D, first=First.REQUEST), D + 10, Verdict.STOPPED),
        (end(ended=True, requested=D, first=First.REQUEST), D, Verdict.STOPPED),
        # its end was never shown
        (end(requested=D, grace=10, first=First.REQUEST), None, Verdict.STOPPED),
        (end(requested=D, grace=10, first=First.REQUEST), D + 70, Verdict.STOPPED),
        (end(requested=D, grace=10, first=First.REQUEST), D + 71, Verdict.UNKNOWN),
        (end(), D, Verdict.UNKNOWN),
        # only the last state is known
        (end(ended=True, finished=D - 6, requested=D, disrupted=True, observed=True), D, Verdict.BY_ITSELF),
        (end(ended=True, finished=D - 5, requested=D, disrupted=True, observed=False), D, Verdict.STOPPED),
        (end(ended=True, finished=D - 9, requested=D, observed=True), D, Verdict.STOPPED),
        (end(ended=True, finished=D + 9, requested=D, observed=False), D, Verdict.BY_ITSELF),
        (end(ended=True, finished=D + 9, requested=D), D, Verdict.UNKNOWN),
        # the request came after the end of the job
        (end(ended=True, finished=D, requested=D, first=First.REQUEST), D - 6, Verdict.BY_ITSELF),
        (end(requested=D, exists=True, first=First.REQUEST), D - 6, Verdict.RUNS),
    ],
)
def test_rule(known: PodEnd, job_end: float | None, verdict: Verdict) -> None:
    assert known.verdict(job_end) is verdict


def state(version: int, *, requested: bool = False, ended: str = "", container: str = "main") -> dict[str, Any]:
    """One state of a pod."""
    meta: dict[str, Any] = {"uid": "u", "resourceVersion": str(version)}
    if requested:
        meta |= {"deletionTimestamp": "1970-01-01T00:00:10Z", "deletionGracePeriodSeconds": 10}
    of = {"terminated": {"exitCode": 0, "finishedAt": ended}} if ended else {"running": {}}
    return {"metadata": meta, "status": {"containerStatuses": [{"name": container, "state": of}]}}


RUNS, REQUESTED, ENDED = state(1), state(2, requested=True), state(2, ended="12:00")
BOTH = state(3, requested=True, ended="12:00")


@pytest.mark.parametrize(
    ("states", "first", "version"),
    [
        ([RUNS, REQUESTED, BOTH], First.REQUEST, "1"),
        ([RUNS, ENDED, BOTH], First.END, "1"),
        ([RUNS, BOTH], First.UNKNOWN, "1"),
        ([BOTH], First.UNKNOWN, ""),
        # a watch is behind a read
        ([RUNS, BOTH, REQUESTED], First.REQUEST, "1"),
        ([BOTH, RUNS, ENDED], First.END, "1"),
        # the container was started again
        (
            [RUNS, ENDED, state(4), state(5, requested=True), state(6, requested=True, ended="13:00")],
            First.REQUEST,
            "4",
        ),
        ([RUNS, ENDED, state(5, ended="13:00"), state(6, requested=True, ended="13:00")], First.END, "1"),
        ([RUNS, ENDED, state(4), state(6, requested=True, ended="13:00")], First.UNKNOWN, "4"),
    ],
)
def test_order_of_changes(states: list[dict[str, Any]], first: First, version: str) -> None:
    changes: PodChanges | None = None
    last: dict[str, Any] = {}
    for one in states:
        changes = with_change(changes, last, one)
        last = one
    newest = max(states, key=lambda one: int(one["metadata"]["resourceVersion"]))
    assert end_of(newest, changes, "main", exists=True).first is first
    assert version_before_end(newest, changes) == version


@each_job
@pytest.mark.parametrize("skew", [-5, 0, 5])
def test_recorded_jobs(name: str, skew: int) -> None:
    """One process sees all changes, and the clocks of the nodes are right, behind or ahead."""
    known = [process.why_incomplete for process in following(changes_of(name, skew)) if process.succeeded]
    assert known
    expected = [STOPPED[name]] if name in STOPPED else []
    assert known == [expected] * len(known)


@pytest.mark.sampled(4)
@each_job
def test_recorded_jobs_with_a_handover_after_each_change(name: str) -> None:
    first, *changes = changes_of(name)
    process = Process(first.obj)
    for change in changes:
        process.see(change)
        if process.succeeded:
            assert process.why_incomplete == ([STOPPED[name]] if name in STOPPED else [])
            if name not in STOPPED:
                return  # the pods of a complete job may be gone when the next process looks
        process = process.next()


@pytest.mark.sampled(4)
@each_job
def test_recorded_jobs_after_a_cut(name: str) -> None:
    """The changes after any one are missed, and read again from where it is said that they show more."""
    changes = changes_of(name)
    for seen in range(1, len(changes)):
        *_, process = following(changes[:seen])
        list_again(process, changes)
        unread = process.pods.ends(process.job, process.kind.deciding_replicas(process.job)).unread
        version = min((int(version or "0") for version in unread.values()), default=None)
        for change in changes:
            if version is not None and change.is_pod and int(change.obj["metadata"]["resourceVersion"]) > version:
                if change.deleted:
                    process.pods.mark_deleted(change.obj)
                else:
                    process.pods.record_earlier(change.obj)
        assert process.why_incomplete == ([STOPPED[name]] if name in STOPPED else []), seen


def list_again(process: Process, changes: list[Change]) -> None:
    """Let a process read the job and its pods as they are after all changes."""
    last = {change.obj["metadata"]["uid"]: change for change in changes}
    process.job = last[process.job["metadata"]["uid"]].obj
    pods = {uid: change.obj for uid, change in last.items() if change.is_pod and not change.deleted}
    gone = [uid for pod in process.pods.live if (uid := pod["metadata"]["uid"]) not in pods]
    process.pods.update(pods, gone, NOW)


@each_job
def test_last_states_of_recorded_jobs(name: str) -> None:
    """Nothing else is known of any pod."""
    changes = changes_of(name)
    last = {change.obj["metadata"]["uid"]: change for change in changes}
    *_, process = following([one for one in changes if not one.is_pod or last[one.obj["metadata"]["uid"]] is one])
    assert process.why_incomplete == ([STOPPED[name]] if name in STOPPED else [])
