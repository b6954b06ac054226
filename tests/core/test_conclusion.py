"""The conclusion of a job that is released: its size, its identity, and what it reads of other releases."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.reporting.conclusion import IDENTITY, MAX_BYTES, Conclusion
from airflow_provider_ktrain.exceptions import TrainingTimeoutError, failure

JOB = JobRef("PyTorchJob", "v1", "ns", "train", "uid", owner="ti-1", submission="s1")
CONCLUSION = Conclusion(
    "uid",
    "ti-1",
    "s1",
    Cause(
        Category.TIMEOUT,
        "the job was not scheduled",
        resolution="ask for fewer GPUs",
        replica="Worker 1",
        failed_nodes={"node": "Xid 79"},
    ),
    event="limit",
    limit="schedule_timeout",
)
texts = st.text(max_size=3000) | st.sampled_from(["x" * 2048, "\u0451" * 2048, "\U0001f600" * 2048, "\ud800\0" * 1024])
names = st.text("abc-.", max_size=253) | texts


@given(st.lists(texts, min_size=5, max_size=5), st.dictionaries(names, texts, max_size=20))
def test_size_is_limited_and_the_job_stays_identified(given_texts: list[str], nodes: dict[str, str]) -> None:
    event, limit, summary, resolution, replica = given_texts
    cause = Cause(Category.UNKNOWN, summary, resolution=resolution, replica=replica, failed_nodes=nodes)
    written = Conclusion("u" * 36, "o" * 36, "s" * 63, cause, event, limit).to_dict()
    stored = json.dumps(written)
    assert len(stored) <= MAX_BYTES
    read = Conclusion.from_dict(json.loads(stored))
    assert read is not None
    assert (read.uid, read.owner, read.submission) == ("u" * 36, "o" * 36, "s" * 63)


def test_only_long_texts_are_shortened() -> None:
    cause = Cause(Category.QUEUE, "\u0451" * 2048, resolution="\u0451" * 2000)
    written = Conclusion("uid", "ti-1", "s1", cause, limit="queue_timeout").to_dict()
    assert written["limit"] == "queue_timeout"
    assert len(written["summary"]) == len(written["resolution"]) > 250
    assert written["summary"].endswith("\u0451...")


def test_it_is_read_as_it_was_written() -> None:
    assert Conclusion.from_dict(json.loads(json.dumps(CONCLUSION.to_dict()))) == CONCLUSION


def test_texts_are_masked_before_they_are_shortened() -> None:
    text = f"token={'secret' * 400}"
    cause = Cause(Category.HANG, text, resolution="\u0451" * 2048, failed_nodes={"n": text})
    written = Conclusion("uid", "ti-1", "s1", cause).to_dict()
    assert (written["summary"], written["failed_nodes"]) == ("token=***", {"n": "token=***"})


def test_identifiers_are_not_masked() -> None:
    written = Conclusion("token=1", "token=2", "token=3", Cause(Category.UNKNOWN, "")).to_dict()
    assert [written[name] for name in IDENTITY] == ["token=1", "token=2", "token=3"]


@pytest.mark.parametrize("field", IDENTITY)
def test_it_belongs_to_one_submission_of_one_try(field: str) -> None:
    assert CONCLUSION.belongs_to(JOB)
    assert not CONCLUSION.belongs_to(JobRef(**{**JOB.to_dict(), field: "another"}))


@pytest.mark.parametrize("nothing", [None, [], "text", {}, {"uid": ""}, {"uid": 3}])
def test_without_a_job_it_is_no_conclusion(nothing: Any) -> None:
    assert Conclusion.from_dict(nothing) is None


@pytest.mark.parametrize("other", [None, 3, ["text"], {"any": "thing"}, float("nan")])
def test_other_types_are_read_as_defaults(other: Any) -> None:
    names = ("owner", "submission", "event", "category", "summary", "resolution", "replica", "limit")
    data = {"uid": "uid", **dict.fromkeys(names, other), "failed_nodes": [other]}
    assert Conclusion.from_dict(data) == Conclusion("uid", "", "", Cause(Category.UNKNOWN, ""))


def test_its_cause_is_an_exception() -> None:
    error = failure(CONCLUSION.cause.as_dict())
    assert isinstance(error, TrainingTimeoutError)
    assert str(error) == "the job was not scheduled\nask for fewer GPUs"
