"""Stored formats: each later release reads what a release wrote, with additional fields and with missing fields.

tests/formats/v1 contains a recorded example of each format of version 1, and is never removed.
"""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from airflow_provider_ktrain.core.formats import (
    MAX_OUTCOME_BYTES,
    MAX_TRIES,
    earlier_success,
    known_fields,
    mapping,
    stored_outcome,
    with_try,
)
from airflow_provider_ktrain.core.identity.names import JobRef, OnFinishAction, Owner
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.reporting.conclusion import Conclusion
from airflow_provider_ktrain.engine.follow.deferral import Deferral, Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome, event_of, read_event
from airflow_provider_ktrain.exceptions import failure
from airflow_provider_ktrain.links.training import url_of
from airflow_provider_ktrain.sensors.training import read_state
from airflow_provider_ktrain.triggers.reaper import SecondLookTrigger
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger


@pytest.fixture(autouse=True)
def job_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__JOB_URL", "https://board.example/{plural}/{namespace}/{name}/{uid}")


RECORDED = pathlib.Path(__file__).parents[1] / "formats" / "v1"
OPAQUE = (
    "cursor",
    "metrics",
    "usage",
    "result",
    "result_from",
    "pod_history",
    "candidates",
    "return_value",
    "kept",
    "cause",
    "failed_nodes",
)  # any keys are valid
JOB = {f"job.{field}" for field in ("kind", "version", "namespace", "name", "uid")} | {"job"}

Path = tuple[str, ...]


def trigger(data: Any) -> Any:
    assert data["classpath"] == TrainingJobTrigger.__module__ + "." + TrainingJobTrigger.__qualname__
    _, arguments = TrainingJobTrigger(**data["kwargs"]).serialize()
    return Deferral.from_dict(arguments)


def reaper_trigger(data: Any) -> Any:
    assert data["classpath"] == SecondLookTrigger.__module__ + "." + SecondLookTrigger.__qualname__
    return SecondLookTrigger(**data["kwargs"]).serialize()


def event(data: Any) -> Any:
    return read_event(data)


def state_outcome(data: Any) -> Any:
    found = earlier_success(data, 2, 1)
    return found and Outcome.from_dict(found)


def state_job(data: Any) -> Any:
    return JobRef.from_dict(data["job"])


def job_metadata(data: Any) -> Any:
    return Owner.of({"metadata": data})


def sensor(data: Any) -> Any:
    failures, deadline, job = read_state(data)
    return failures, deadline, job and JobRef.from_dict(job)


def tries(data: Any) -> Any:
    return with_try(data, {"try_number": 4})["tries"][-1]


def xcoms(data: Any) -> Any:
    return url_of(data["job"])


#: The reader of each recorded example, and its required fields.
READERS: Mapping[str, tuple[Callable[[Any], Any], set[str]]] = {
    "trigger_training": (trigger, {"classpath", "kwargs"} | {f"kwargs.{path}" for path in JOB}),
    "trigger_reaper": (reaper_trigger, {"classpath", "kwargs"}),
    "event_outcome_succeeded": (event, set()),
    "event_outcome_failed": (event, set()),
    "event_error": (event, set()),
    "event_reaper": (lambda data: mapping(data.get("candidates")), set()),
    "state_ktrain_deferral": (Deferral.from_dict, JOB),
    "state_ktrain_job": (state_job, JOB),
    "state_ktrain_outcome": (state_outcome, set()),
    "state_ktrain_outcome_failed": (state_outcome, set()),
    "state_ktrain_submission": (mapping, set()),  # tests/operators/test_submission.py reads it like a retry
    "state_ktrain_tries": (tries, set()),
    "state_ktrain_sensor": (sensor, JOB - {"job"}),
    "cursor": (lambda data: Cursor.from_dict(data).to_dict(), set()),  # tests/core/test_log_cursor.py tests the details
    "conclusion": (Conclusion.from_dict, set()),
    "job_metadata": (job_metadata, set()),
    "xcoms": (xcoms, {"job"}),
}


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def fields_of(data: Any, at: Path = ()) -> Iterator[Path]:
    """The path of each field, except fields below opaque ones."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield (*at, key)
            if key not in OPAQUE:
                yield from fields_of(value, (*at, key))


def without(data: Any, path: Path) -> Any:
    shortened = copy.deepcopy(data)
    parent = shortened
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return shortened


def with_more(data: Any) -> Any:
    """A copy with a field of a later release in each object."""
    if not isinstance(data, dict):
        return [with_more(item) for item in data] if isinstance(data, list) else data
    more = {key: value if key in OPAQUE else with_more(value) for key, value in data.items()}
    return {**more, "of_a_later_release": {"any": ["thing"]}}


CASES = [(name, path) for name in READERS for path in fields_of(recorded(name))]


def test_each_recorded_example_has_a_reader() -> None:
    assert {file.stem for file in RECORDED.glob("*.json")} == set(READERS)


@pytest.mark.parametrize("name", READERS)
def test_recorded_example_is_read_as_it_is(name: str) -> None:
    read, _ = READERS[name]
    ignored = name == "state_ktrain_outcome_failed"  # only a success is returned by a later try
    assert bool(read(recorded(name))) is not ignored


@pytest.mark.parametrize(
    "name", [name for name in READERS if name not in ("state_ktrain_submission", "trigger_reaper")]
)
def test_unknown_fields_are_ignored(name: str) -> None:
    read, _ = READERS[name]
    assert read(with_more(recorded(name))) == read(recorded(name))


@pytest.mark.parametrize(("name", "path"), CASES, ids=[f"{name}-{'.'.join(path)}" for name, path in CASES])
def test_missing_field_has_a_default(name: str, path: Path) -> None:
    read, required = READERS[name]
    shortened = without(recorded(name), path)
    if ".".join(path) in required:
        with pytest.raises((ValueError, KeyError)):
            read(shortened)
    else:
        read(shortened)


@pytest.mark.parametrize("field", ["category", "summary", "detail", "resolution", "replica"])
def test_cause_with_a_missing_field_is_an_exception(field: str) -> None:
    ended = read_event(without(recorded("event_outcome_failed"), ("outcome", "cause", field)))
    assert isinstance(ended, Outcome)
    assert ended.cause is not None
    assert str(failure(ended.cause))


def test_unknown_version_is_read_as_far_as_possible() -> None:
    for name in ("event_outcome_succeeded", "event_error", "state_ktrain_deferral"):
        read, _ = READERS[name]
        assert read({**recorded(name), "version": 99}) == read(recorded(name))


@pytest.mark.parametrize("unreadable", [None, [], "text", {}, {"outcome": None}, {"outcome": {"succeeded": "yes"}}])
def test_unreadable_event_is_a_failure_of_the_trigger(unreadable: Any) -> None:
    assert "can't be read" in str(read_event(unreadable))


def test_events_are_read_as_they_were_written() -> None:
    outcome = Outcome("Failed", False, cause={"category": "user code", "summary": "exit code 3"}, metrics={"a": 1.0})
    assert read_event(json.loads(json.dumps(event_of(outcome)))) == outcome
    assert read_event(event_of("no luck")) == "no luck"


def test_deferral_is_read_as_it_was_written() -> None:
    job = JobRef("PyTorchJob", "v1", "ns", "train", "uid", "ti-1")
    options = Options(logs={"Worker": [0]}, deadline=12.5, conditions=("Running",))
    deferral = Deferral(job, options, Handover(result_line="KTRAIN_RESULT 1"), "cluster", "context", 2)
    assert Deferral.from_dict(json.loads(json.dumps(deferral.to_dict()))) == deferral


@pytest.mark.parametrize("nothing", [None, [], "text", 3])
def test_other_types_are_read_as_an_empty_mapping(nothing: Any) -> None:
    assert known_fields(Options, nothing) == {}
    assert Options.from_dict(nothing) == Options()
    assert Handover.from_dict(nothing) == Handover()


@pytest.mark.parametrize("unknown", ["suspend_job", "", None, []])
def test_unknown_on_finish_action_keeps_the_job(unknown: Any) -> None:
    """Another release may have written it, and a deletion can't be undone."""
    assert Options.from_dict({"on_finish_action": unknown}).on_finish_action is OnFinishAction.KEEP_JOB
    assert Options.from_dict({}).on_finish_action is OnFinishAction.DELETE_JOB


def test_on_finish_action_travels_as_text() -> None:
    """Airflow rejects an enum in trigger arguments and in the task store."""
    written = Options(on_finish_action=OnFinishAction.KEEP_JOB).to_dict()
    assert type(written["on_finish_action"]) is str
    assert Options.from_dict(written).on_finish_action is OnFinishAction.KEEP_JOB


# the stored outcome


SUCCEEDED = Outcome("Succeeded", True, result={"loss": 0.5}).to_dict()


def test_stored_success_is_used_until_a_clear() -> None:
    stored = stored_outcome(SUCCEEDED, try_number=2, max_tries=3)
    assert earlier_success(stored, 3, 3) == SUCCEEDED
    assert earlier_success(stored, 2, 3) == SUCCEEDED, "the same try, which Airflow runs again"
    assert earlier_success(stored, 3, 4) is None, "the task was cleared"
    assert earlier_success(stored, 1, 3) is None, "a try that is older"
    assert earlier_success(None, 1, 3) is None


def test_stored_failure_is_not_used_by_the_next_try() -> None:
    failed = Outcome("Failed", False, cause={"category": "user code", "summary": "exit code 3"}).to_dict()
    assert earlier_success(stored_outcome(failed, 1, 3), 2, 3) is None


@pytest.mark.parametrize("character", ["x", "\u20ac", "\U0001f600"])
def test_stored_outcome_is_small_and_keeps_a_result(character: str) -> None:
    result = {"text": character * (40 * 1024 // len(json.dumps(character)))}
    detail = character * 16 * 1024
    outcome = Outcome("Succeeded", True, result=result, released=detail, metrics={detail: 1.0}).to_dict()
    stored = stored_outcome(outcome, 1, 0)
    assert len(json.dumps(stored)) <= MAX_OUTCOME_BYTES + 200
    assert stored["outcome"]["result"] == result


@pytest.mark.parametrize("result", ["x" * 70_000, "\u0451" * 11_000])
def test_result_that_is_too_large_is_left_out_with_a_reason(result: str) -> None:
    stored = stored_outcome({**SUCCEEDED, "result": result}, 1, 0)
    assert stored["outcome"]["result"] is None
    assert "too large" in stored["outcome"]["result_error"]
    assert stored["outcome"]["succeeded"]


def test_last_tries_are_kept() -> None:
    stored: Any = None
    for number in [*range(1, 15), 14]:
        stored = with_try(stored, {"try_number": number, "cause": "", "usage": {}})
    assert [one["try_number"] for one in stored["tries"]] == list(range(15 - MAX_TRIES, 15))
