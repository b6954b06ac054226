"""The events of a task's outlets contain what the training returned; an alias becomes the asset of its model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk import Asset, AssetAlias
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.log import mask_secret

from airflow_provider_ktrain.core.reporting.asset_events import MAX_EXTRA_BYTES
from airflow_provider_ktrain.decorators.pytorchjob import _PyTorchJobDecoratedOperator
from airflow_provider_ktrain.engine.follow.outcome import Outcome, event_of
from airflow_provider_ktrain.exceptions import TrainingJobError, TrainingUserCodeError
from tests.operators.task_instance import Instance, of_each_kind

MODEL, ALIAS = Asset("model", uri="s3://models/latest"), AssetAlias("trained")
RESULT = {"loss": 0.5, "model_uri": "s3://models/7"}


def program(result: Any) -> list[str]:
    metric = """echo 'KTRAIN_METRIC {"step": 1, "loss": 0.5}'"""
    return ["sh", "-c", f"{metric}; echo 'KTRAIN_RESULT {json.dumps(result)}'; sleep 1"]


def extras(instance: Instance) -> dict[str, dict[str, Any]]:
    """The extra of the event of each outlet, by its name."""
    found = instance.outlet_events
    return {outlet.name: found[outlet].extra for outlet in found if isinstance(outlet, Asset)}


def alias_events(instance: Instance, alias: AssetAlias = ALIAS) -> list[tuple[str, dict[str, Any]]]:
    """URI and extra of the events that an alias gets."""
    return [(event.dest_asset_key.uri, event.extra) for event in instance.outlet_events[alias].asset_alias_events]


@of_each_kind
def test_event_contains_what_the_training_returned(instance: Instance) -> None:
    outlets = [MODEL, Asset("other"), ALIAS, {"a": "lineage entity of another kind"}]
    instance.execute(command=program(RESULT), deferrable=False, outlets=outlets, checkpoint_dir="/checkpoints", gpus=2)
    assert instance.ti is not None
    xcoms = instance.ti.xcoms
    extra = dict(extras(instance)["model"])
    directory = extra.pop("checkpoint_dir")
    assert directory.startswith("/checkpoints/")
    assert extra["job"]["kind"] == instance.kind.name
    assert extra["usage"]["held"] > 0
    assert extra == {
        "version": 1,
        "job": xcoms["job"],
        "usage": xcoms["usage"],
        "metrics": xcoms["metrics"],
        "result": RESULT,
        "model_uri": "s3://models/7",
    }
    with_directory = {**extra, "checkpoint_dir": directory}
    assert extras(instance) == {"model": with_directory, "other": with_directory}
    assert alias_events(instance) == [("s3://models/7", with_directory)]


def test_event_of_a_deferred_task(instance: Instance) -> None:
    parameters: dict[str, Any] = {"outlets": [MODEL, ALIAS], "checkpoint_dir": "/checkpoints"}
    assert isinstance(instance.execute(**parameters), TaskDeferred)
    assert not extras(instance)
    (job,) = instance.jobs()
    metrics, usage = {"loss": {"last": 0.5}}, {"held": 6.0, "gpus": 1}
    outcome = Outcome("Succeeded", True, result=RESULT, training_metrics=metrics, usage=usage)
    assert instance.resume(event_of(outcome)) == RESULT
    extra = extras(instance)["model"]
    assert extra.pop("checkpoint_dir").startswith("/checkpoints/")
    metadata = job["metadata"]
    named = {"kind": "PyTorchJob", **{key: metadata[key] for key in ("namespace", "name", "uid")}}
    fields = {"job": named, "usage": usage, "metrics": metrics, "result": RESULT}
    assert extra == {"version": 1, "model_uri": RESULT["model_uri"], **fields}


@pytest.mark.parametrize("has_state", [True, False], ids=["airflow 3.3", "below airflow 3.3"])
@of_each_kind
def test_retry_after_a_success_gives_the_same_event(instance: Instance, has_state: bool) -> None:
    """Try 1 trains and fails afterwards, as when its worker is lost before it reports its success."""
    instance.has_state = has_state
    parameters: dict[str, Any] = {
        "command": program(RESULT),
        "deferrable": False,
        "outlets": [MODEL, ALIAS],
        "checkpoint_dir": "/c",
    }
    seen = []
    for number in (1, 2):
        instance.execute(**parameters, number=number, retries=1)
        seen.append((extras(instance), alias_events(instance)))
    assert seen[0] == seen[1]
    assert seen[0][0]["model"]["result"] == RESULT
    assert seen[0][0]["model"]["job"]


def test_event_of_a_retry_has_the_usage_of_all_tries(instance: Instance) -> None:
    with pytest.raises(TrainingUserCodeError):
        instance.execute(command=["sh", "-c", "sleep 1; exit 3"], deferrable=False, retries=1, outlets=[MODEL])
    assert instance.ti is not None
    first = instance.ti.xcoms["usage"]
    instance.execute(command=program(RESULT), deferrable=False, retries=1, outlets=[MODEL], number=2)
    usage = extras(instance)["model"]["usage"]
    assert usage["all_tries"]["tries"] == 2
    assert usage["all_tries"]["held"] == pytest.approx(usage["held"] + first["held"], abs=0.2)


def test_retry_that_adopts_gives_the_directory_of_the_job(instance: Instance) -> None:
    """The parameter has changed since the job was submitted."""
    command = ["sh", "-c", "sleep 5; echo 'KTRAIN_RESULT 1'"]
    parameters: dict[str, Any] = {"command": command, "outlets": [MODEL], "retries": 1}
    assert isinstance(instance.execute(**parameters, checkpoint_dir="/before"), TaskDeferred)
    assert instance.execute(**parameters, checkpoint_dir="/after", deferrable=False, number=2) == 1
    assert extras(instance)["model"]["checkpoint_dir"].startswith("/before/")


def returns(result: Any) -> Any:
    return result


@pytest.mark.programs("runs a Python function")
def test_function_returns_the_model_of_an_alias(instance: Instance) -> None:
    function: dict[str, Any] = {"operator": _PyTorchJobDecoratedOperator, "python_callable": returns}
    instance.execute(**function, op_args=[RESULT], deferrable=False, outlets=[ALIAS])
    ((uri, extra),) = alias_events(instance)
    assert uri == RESULT["model_uri"]
    assert extra["result"] == RESULT


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"loss": 0.5}, "its result has no model_uri"),
        ({"model_uri": ""}, "Airflow rejects model_uri: Asset"),
        ({"model_uri": "airflow://models/7"}, "Airflow rejects model_uri: Asset scheme 'airflow' is reserved"),
        ({"model_uri": "https://me:hunter2@host/m"}, "model_uri contains a secret"),
        ({"model_uri": "s3://bucket/of-the-connection"}, "model_uri contains a secret"),
    ],
)
def test_alias_without_a_valid_model_uri_gets_no_event(
    instance: Instance, capfd: pytest.CaptureFixture[str], result: Any, why: str
) -> None:
    mask_secret("of-the-connection")
    assert instance.execute(command=program(result), deferrable=False, outlets=[MODEL, ALIAS]) == result
    assert not alias_events(instance)
    assert "model_uri" not in extras(instance)["model"]
    assert "hunter2" not in json.dumps(extras(instance))
    assert "of-the-connection" not in json.dumps(extras(instance))
    assert f"Outlet trained gets no asset event: {why}" in capfd.readouterr().out


def test_large_result_is_left_out_of_the_event(instance: Instance, capfd: pytest.CaptureFixture[str]) -> None:
    result = {"history": [0.5] * MAX_EXTRA_BYTES, "model_uri": "s3://models/7"}
    outcome = Outcome("Succeeded", True, result=result)
    instance.execute(outlets=[MODEL, ALIAS])
    assert instance.resume(event_of(outcome)) == result
    extra = extras(instance)["model"]
    assert extra["left_out"] == ["result"]
    assert "result" not in extra
    assert alias_events(instance)[0][0] == "s3://models/7"
    assert "The asset events do not contain result: their extra has at most 16 KiB." in capfd.readouterr().out


def test_outlet_that_cannot_be_resolved_fails_no_training(
    instance: Instance, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reference is resolved by a request to Airflow's supervisor, which this process doesn't have."""
    outlets = [Asset.ref(name="unknown"), MODEL]
    assert instance.execute(command=program(RESULT), deferrable=False, outlets=outlets) == RESULT
    assert extras(instance)["model"]["result"] == RESULT
    assert "The event of an outlet does not contain the training's result." in capfd.readouterr().out


def test_failed_training_gives_no_result_to_its_outlets(instance: Instance) -> None:
    with pytest.raises(TrainingJobError):
        instance.execute(command=["sh", "-c", "exit 1"], deferrable=False, outlets=[MODEL, ALIAS])
    assert not extras(instance)


def test_dry_run_updates_no_asset(instance: Instance) -> None:
    instance.execute(dry_run=True, outlets=[MODEL, ALIAS])
    assert instance.operator is not None
    assert instance.operator.outlets == []
