"""The extra of asset events: bounded, without secrets, and the URI of a model."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.reporting.asset_events import (
    LEFT_OUT,
    MAX_EXTRA_BYTES,
    checkpoint_dir,
    event_extra,
    model_uri,
)
from airflow_provider_ktrain.core.reporting.redaction import redacted

JOB = {"kind": "PyTorchJob", "namespace": "team", "name": "train-1", "uid": "5"}
USAGE = {"requested": 8.0, "queued": 2.0, "held": 6.0, "wasted": 1.0, "gpus": 2}
texts = st.text(max_size=100)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@given(result=values, metrics=st.dictionaries(texts, values, max_size=15), size=st.integers(0, 20_000))
def test_extra_is_bounded_and_names_what_it_leaves_out(result: Any, metrics: dict[str, Any], size: int) -> None:
    fields = {"job": JOB, "usage": USAGE, "metrics": metrics, "result": [result, [1] * size]}
    extra = event_extra(fields)
    assert len(json.dumps(extra)) <= MAX_EXTRA_BYTES
    assert (extra["version"], extra["job"], extra["usage"]) == (1, JOB, USAGE)
    left_out = extra.pop(LEFT_OUT, [])
    assert left_out in ([], ["result"], ["result", "metrics"])
    filled = {name: value for name, value in fields.items() if value and name not in left_out}
    assert extra == {"version": 1, **redacted(filled)}


def test_result_is_left_out_before_the_metrics() -> None:
    metrics = {"loss": {"last": 0.5}}
    extra = event_extra({"result": "x " * MAX_EXTRA_BYTES, "metrics": metrics, "model_uri": "s3://b/m"})
    assert extra["model_uri"] == "s3://b/m"
    fields = {"result": ["x"] * MAX_EXTRA_BYTES, "metrics": metrics}
    assert event_extra(fields) == {"version": 1, "metrics": metrics, LEFT_OUT: ["result"]}


@pytest.mark.parametrize(
    "result",
    [
        {"api_key": "hunter2"},
        {"nested": [{"Password": "hunter2"}]},
        "postgresql://me:hunter2@db/models",
        "curl -H 'Authorization: Bearer hunter2'",
        ["--token", "hunter2"],
    ],
)
def test_secrets_in_a_result_are_masked(result: Any) -> None:
    extra = event_extra({"job": JOB, "result": result})
    assert "hunter2" not in json.dumps(extra)
    assert "***" in json.dumps(extra["result"])


def test_empty_fields_are_missing() -> None:
    fields: dict[str, Any] = {
        "job": {},
        "usage": {},
        "metrics": {},
        "result": None,
        "checkpoint_dir": "",
        "model_uri": "",
    }
    assert event_extra(fields) == {"version": 1}
    assert event_extra({**fields, "result": 0}) == {"version": 1, "result": 0}


def test_model_uri_of_a_result() -> None:
    assert model_uri({"loss": 1, "model_uri": "s3://models/7"}) == "s3://models/7"


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, "its result has no model_uri"),
        ([1], "its result has no model_uri"),
        ({"loss": 1}, "its result has no model_uri"),
        ({"model_uri": 7}, "model_uri is of type int, expected text"),
        ({"model_uri": "s3://models/" + "x" * 4089}, "model_uri has more than 1,500 characters"),
        ({"model_uri": "https://me:hunter2@host/m"}, "model_uri contains a secret"),
        ({"model_uri": "https://host/m?X-Amz-Signature=hunter2"}, "model_uri contains a secret"),
    ],
)
def test_result_without_a_model_uri(result: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        model_uri(result)


ENV = [{"name": "A", "value": "1"}, {"name": "KTRAIN_CHECKPOINT_DIR", "value": "/checkpoints/train-1"}]


def spec(kind: Kind, env: list[dict[str, Any]]) -> dict[str, Any]:
    container = {"name": kind.form.container or "main", "image": "i", "env": env}
    role = kind.roles[0]
    if kind is TRAINJOB:
        return {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"env": env}}
    return {kind.form.replica_specs: {role: {"replicas": 1, "template": {"spec": {"containers": [container]}}}}}


@pytest.mark.parametrize("kind", [PYTORCHJOB, MPIJOB, TRAINJOB], ids=lambda kind: kind.name)
def test_checkpoint_directory_of_a_job(kind: Kind) -> None:
    job = {"metadata": {"name": "x"}, "spec": spec(kind, ENV)}
    before = copy.deepcopy(job)
    assert checkpoint_dir(kind, job) == "/checkpoints/train-1"
    assert job == before
    assert checkpoint_dir(kind, {"spec": spec(kind, ENV[:1])}) == ""
    by_reference = [{"name": "KTRAIN_CHECKPOINT_DIR", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "d"}}}]
    assert checkpoint_dir(kind, {"spec": spec(kind, by_reference)}) == ""
    assert checkpoint_dir(kind, {}) == ""
