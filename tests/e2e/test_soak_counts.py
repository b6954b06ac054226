"""The counts of `make soak`: they must show each defect of a run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.soak import LABELS, Count, counted

SUCCESS = {"state": "success", "try_number": 1}


def job(uid: str, training: str = "0", end: str = "") -> dict[str, Any]:
    conditions = [{"type": "Running", "status": "True"}, *([{"type": end, "status": "True"}] if end else [])]
    labels = {**dict.fromkeys(LABELS, "same"), LABELS[-1]: training}
    return {"metadata": {"uid": uid, "name": uid, "labels": labels}, "status": {"conditions": conditions}}


def test_one_job_per_training_is_clean() -> None:
    jobs = [job("a", "0", "Succeeded"), job("b", "1", "Succeeded")]
    count = counted(jobs, {"a", "b"}, [SUCCESS, SUCCESS])
    assert count == Count(created=2, states=count.states, tries=2)
    assert count.clean()


@pytest.mark.parametrize(("first", "repeated"), [("Succeeded", 1), ("Failed", 0)])
def test_job_after_a_success_counts_as_repeated(first: str, repeated: int) -> None:
    jobs = [job("a", "0", first), job("b", "1", "Succeeded"), job("c", "0", "Succeeded")]
    count = counted(jobs, {"a"}, [SUCCESS])
    assert len(count.repeated) == repeated
    assert count.clean() is not bool(repeated)


def test_job_deleted_before_its_end_counts_as_deleted_alive() -> None:
    count = counted([job("a"), job("b", "1")], {"a"}, [SUCCESS])
    assert [name.split()[0] for name in count.deleted_alive] == ["a"]
    assert not count.clean()


@pytest.mark.parametrize("state", ["failed", "deferred", "None"])
def test_task_without_success_is_not_clean(state: str) -> None:
    assert not counted([job("a", "0", "Succeeded")], {"a"}, [SUCCESS, {"state": state, "try_number": 1}]).clean()


def test_gpus_left_are_not_clean() -> None:
    count = counted([job("a", "0", "Succeeded")], {"a"}, [SUCCESS])
    count.gpus = 1
    assert not count.clean()
