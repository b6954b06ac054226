"""The counts of `make soak`: they must show each defect of a run."""

from __future__ import annotations

import pathlib
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds.conditions import INCOMPLETE_ANNOTATION
from tests.e2e.soak_count import LABELS, Count, Observed, counted, read_records

SUCCESS: dict[str, Any] = {"state": "success", "try_number": 1, "dag_id": "same", "map_index": 9}
BEGAN = 1_800_000_000.0
RECORD = "same.0"  # of the training "0"


def time(seconds: float) -> str:
    return datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat()


def job(uid: str, training: str = "0", end: str = "", at: float = 0) -> dict[str, Any]:
    conditions = [{"type": "Running", "status": "True"}, *([{"type": end, "status": "True"}] if end else [])]
    labels = {**dict.fromkeys(LABELS, "same"), LABELS[-1]: training}
    metadata = {"uid": uid, "name": uid, "labels": labels, "creationTimestamp": time(at)}
    return {"metadata": metadata, "status": {"conditions": conditions}}


def pod(created: float = 1, scheduled: float = 2, started: float | None = 3, deleted: float = 60) -> dict[str, Any]:
    found = job("pod", at=created)
    found["metadata"] |= {"deletionTimestamp": time(deleted + 30), "deletionGracePeriodSeconds": 30}
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": time(scheduled)}
    states = [] if started is None else [{"name": "main", "state": {"running": {"startedAt": time(started)}}}]
    return {**found, "status": {"conditions": [condition], "containerStatuses": states}}


def steps(first: int, last: int, at: float) -> list[tuple[str, float]]:
    """A step each second."""
    return [(str(step), BEGAN + at + step - first) for step in range(first, last + 1)]


def test_one_job_per_training_is_clean() -> None:
    jobs = [job("a", "0", "Succeeded"), job("b", "1", "Succeeded")]
    records = {RECORD: steps(0, 40, 3), "same.1": steps(0, 3, 3)}
    count = counted(Observed(jobs, {"a", "b"}, records=records), [SUCCESS, SUCCESS])
    assert count == Count(created=2, states=count.states, tries=2)
    assert count.clean()


@pytest.mark.parametrize(("first", "repeated"), [("Succeeded", 1), ("Failed", 0)])
def test_job_after_a_success_counts_as_repeated(first: str, repeated: int) -> None:
    jobs = [job("a", "0", first), job("b", "1", "Succeeded"), job("c", "0", "Succeeded")]
    count = counted(Observed(jobs, {"a"}), [SUCCESS])
    assert len(count.repeated) == repeated
    assert count.clean() is not bool(repeated)


def test_job_that_replaces_a_doubtful_success_is_not_repeated() -> None:
    doubtful = job("a", "0", "Succeeded")
    doubtful["metadata"]["annotations"] = {INCOMPLETE_ANNOTATION: "Master 0 ended with exit code 0 after ..."}
    assert not counted(Observed([doubtful, job("b", "0", "Succeeded", at=30)], {"a"}), [SUCCESS]).repeated


@pytest.mark.parametrize("last", ["20", "end", "done"])
def test_success_without_its_last_step_counts_as_incomplete(last: str) -> None:
    records = {RECORD: [*steps(0, 19, 3), (last, BEGAN + 24)]}
    count = counted(Observed([job("a", end="Succeeded")], (), records=records), [{**SUCCESS, "map_index": 0}])
    assert count.incomplete == ([] if last == "done" else [RECORD])
    assert count.clean() is (last == "done")


def test_job_deleted_before_its_end_counts_as_deleted_alive() -> None:
    count = counted(Observed([job("a"), job("b", "1")], {"a"}), [SUCCESS])
    assert [name.split()[0] for name in count.deleted_alive] == ["a"]
    assert not count.clean()


@pytest.mark.parametrize(("first", "set_back"), [("", True), ("Succeeded", True), ("Failed", False)])
def test_lower_step_without_a_failure_counts_as_set_back(first: str, set_back: bool) -> None:
    jobs = [job("a", end=first), job("b", end="Succeeded", at=30)]
    records = {RECORD: [*steps(0, 20, 3), *steps(0, 40, 33)]}
    count = counted(Observed(jobs, (), records=records), [SUCCESS])
    assert count.set_back == (["same.0 went from step 20 to 0"] if set_back else [])
    assert count.clean() is not set_back


def test_second_drop_after_one_failure_counts_as_set_back() -> None:
    jobs = [job("a", end="Failed"), job("b", end="Succeeded", at=30)]
    records = {RECORD: [*steps(0, 9, 3), *steps(0, 9, 33), *steps(5, 9, 50)]}
    assert counted(Observed(jobs, (), records=records), [SUCCESS]).set_back == [
        "same.0 went from step 9 to 0, then 9 to 5"
    ]


def test_suspension_of_a_running_training_counts_as_set_back() -> None:
    """A watch that is 30 s behind shows no line in this time; the program printed one each second."""
    observed = Observed([job("a", end="Succeeded")], (), {"a"}, [pod()], {RECORD: steps(0, 40, 3)})
    count = counted(observed, [SUCCESS])
    assert count.set_back == ["a of same/same/same/0 was suspended"]
    assert count.limits_passed == []
    assert not count.clean()


def test_suspension_until_the_next_try_counts_as_set_back() -> None:
    """The time between the two runs of the program doesn't pass a limit."""
    record = [*steps(0, 20, 3), ("end", BEGAN + 24), *steps(0, 40, 60)]
    count = counted(Observed([job("a", end="Succeeded")], (), {"a"}, [pod()], {RECORD: record}), [SUCCESS])
    assert count.set_back == ["a of same/same/same/0 was suspended", "same.0 went from step 20 to 0"]
    assert count.limits_passed == []


@pytest.mark.parametrize(
    ("pods", "record", "limit"),
    [
        ([pod(created=21)], steps(0, 9, 23), "startup_timeout"),
        ([pod(scheduled=30, started=31)], steps(0, 9, 32), "schedule_timeout"),
        ([pod(started=30)], steps(0, 9, 31), "startup_timeout"),
        ([pod(started=None)], [], "startup_timeout"),
        ([pod()], [*steps(0, 9, 3), *steps(10, 12, 30)], "progress_timeout"),
        ([pod()], [*steps(0, 9, 3), ("end", BEGAN + 30)], "log_stall_timeout"),
        ([pod()], steps(0, 9, 30), "log_stall_timeout"),
        ([pod()], steps(0, 1300, 3), "execution_timeout"),
    ],
)
@pytest.mark.parametrize("how", ["deleted", "suspended"])
def test_limit_that_had_passed_is_no_defect(
    pods: list[dict[str, Any]], record: list[tuple[str, float]], limit: str, how: str
) -> None:
    seen: dict[str, Any] = {"deleted": (), "suspended": (), how: {"a"}}
    later = [("0", BEGAN + 2000)]
    jobs = [job("a"), job("b", end="Succeeded", at=1990)]
    count = counted(Observed(jobs, **seen, pods=pods, records={RECORD: [*record, *later]}), [SUCCESS])
    assert [limit in name for name in count.limits_passed] == [True]
    assert not any(count.defects.values())


def test_healthy_job_has_passed_no_limit() -> None:
    observed = Observed([job("a")], {"a"}, (), [pod()], {RECORD: [*steps(0, 40, 3), ("end", BEGAN + 44)]})
    count = counted(observed, [SUCCESS])
    assert len(count.deleted_alive) == 1
    assert count.limits_passed == []


def test_records_are_read_by_training(tmp_path: pathlib.Path) -> None:
    (tmp_path / "soak_x.3").write_text("0 1800000000\n1 1800000001\nend 1800000002\n")
    assert read_records(tmp_path) == {"soak_x.3": [("0", BEGAN), ("1", BEGAN + 1), ("end", BEGAN + 2)]}


@pytest.mark.parametrize("state", ["failed", "deferred", "None"])
def test_task_without_success_is_not_clean(state: str) -> None:
    observed = Observed([job("a", "0", "Succeeded")], {"a"})
    assert not counted(observed, [SUCCESS, {"state": state, "try_number": 1}]).clean()


def test_gpus_left_are_not_clean() -> None:
    assert not counted(Observed([job("a", "0", "Succeeded")], {"a"}), [SUCCESS], 1).clean()
