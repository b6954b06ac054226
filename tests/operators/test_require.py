"""`require`: a training that isn't good enough fails its task, and nothing continues with its result."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ktrain.exceptions import (
    TrainingConfigurationError,
    TrainingJobError,
    TrainingRequirementError,
    TrainingUserCodeError,
)
from tests.operators.task_instance import Instance, of_each_kind

BAD = ["sh", "-c", """echo 'KTRAIN_RESULT {"val_accuracy": 0.87, "model_uri": "s3://m/1"}'; sleep 1"""]
GOOD = ["sh", "-c", """echo 'KTRAIN_RESULT {"val_accuracy": 0.95}'; sleep 1"""]
DIVERGED = ["sh", "-c", """echo 'KTRAIN_METRIC {"step": 1, "loss": NaN}'; sleep 1"""]
REQUIRE = {"val_accuracy": ">= 0.9"}
SUCCEEDED: dict[str, Any] = {"phase": "Succeeded", "succeeded": True}


def unmet(message: str) -> Any:
    return pytest.raises(TrainingRequirementError, match=rf"\A{message}")


def test_a_training_that_is_good_enough_returns_its_result(instance: Instance) -> None:
    assert instance.execute(command=GOOD, deferrable=False, require=REQUIRE) == {"val_accuracy": 0.95}
    assert not instance.jobs()


@pytest.mark.parametrize("has_state", [True, False])
def test_a_training_that_is_not_good_enough_fails_for_good(instance: Instance, has_state: bool) -> None:
    instance.has_state = has_state
    model = Asset("model")
    with unmet("val_accuracy is 0.87, required >= 0.9") as raised:
        instance.execute(command=BAD, deferrable=False, require=REQUIRE, outlets=[model])
    assert isinstance(raised.value, AirflowFailException)
    assert instance.running() == 0
    assert instance.ti is not None
    assert "return_value" not in instance.ti.xcoms
    assert not instance.outlet_events[model].extra
    assert instance.ti.xcoms["ktrain_status"]["cause"]["summary"] == "val_accuracy is 0.87, required >= 0.9"
    if has_state:
        assert not instance.jobs()


@pytest.mark.parametrize("has_state", [True, False])
def test_a_later_try_does_not_train_again(instance: Instance, has_state: bool) -> None:
    """The worker was lost before Airflow had stored that the task failed for good."""
    instance.has_state = has_state
    for number, command in enumerate((BAD, GOOD), 1):  # the second would be good enough
        with unmet("val_accuracy is 0.87"):
            instance.execute(command=command, deferrable=False, require=REQUIRE, retries=1, number=number)


def test_a_cleared_task_trains_again(instance: Instance) -> None:
    with unmet("val_accuracy is 0.87"):
        instance.execute(command=BAD, deferrable=False, require=REQUIRE)
    assert instance.execute(command=GOOD, deferrable=False, require=REQUIRE, number=2, max_tries=1) == {
        "val_accuracy": 0.95
    }


@of_each_kind
def test_the_bound_that_was_rendered_before_the_submission_counts(instance: Instance) -> None:
    deferred = instance.execute(require=REQUIRE)
    assert deferred.trigger.serialize()[1]["options"]["require"] == REQUIRE
    assert instance.operator is not None
    instance.operator.require = {"val_accuracy": ">= 0.1"}  # rendered again when the task resumes
    with unmet("val_accuracy is 0.87, required >= 0.9"):
        instance.resume({"outcome": {**SUCCEEDED, "require": REQUIRE, "result": {"val_accuracy": 0.87}}})


def test_an_event_of_an_older_triggerer_is_judged_too(instance: Instance) -> None:
    instance.execute(require=REQUIRE)
    with unmet("val_accuracy is 0.87, required >= 0.9"):
        instance.resume({"outcome": {**SUCCEEDED, "result": {"val_accuracy": 0.87}}})


def test_the_trigger_passes_the_bounds_on(instance: Instance) -> None:
    event = instance.event(instance.execute(command=BAD, require=REQUIRE))
    assert event["outcome"]["require"] == REQUIRE
    with unmet("val_accuracy is 0.87"):
        instance.resume(event)
    assert not instance.jobs()


def test_the_last_value_of_a_metric_counts(instance: Instance) -> None:
    with unmet("loss is nan, required finite"):
        instance.execute(command=DIVERGED, deferrable=False, require={"loss": "finite"})


@of_each_kind
@pytest.mark.parametrize("text", ["0.5", "NaN"])
def test_a_metric_in_a_log_that_is_not_followed_counts(instance: Instance, text: str) -> None:
    program = ["sh", "-c", f"""echo 'KTRAIN_METRIC {{"loss": {text}}}'"""]
    met = contextlib.nullcontext() if text == "0.5" else unmet("loss is nan, required finite")
    with met:
        instance.execute(command=program, deferrable=False, logs="none", require={"loss": "finite"})


def test_a_missing_value_is_unmet(instance: Instance) -> None:
    with unmet("accuracy is missing, required > 0; the training reported val_accuracy"):
        instance.execute(command=GOOD, deferrable=False, require={"accuracy": "> 0"})


def test_a_failed_training_fails_by_its_cause(instance: Instance) -> None:
    with pytest.raises(TrainingUserCodeError, match="exit code 3"):
        instance.execute(command=["sh", "-c", "exit 3"], deferrable=False, require=REQUIRE)


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("unread", ["Its result may be an earlier one", "Its metrics are unknown"])
def test_a_value_after_which_lines_may_be_missing_is_not_proved(instance: Instance, retries: int, unread: str) -> None:
    """A retry reads the logs of the kept job again; the last try fails for good."""
    instance.execute(command=GOOD, require=REQUIRE, retries=retries)
    error = {"result_error": f"{unread}: the log of Master 0 was not read to its end"}
    outcome = {**SUCCEEDED, **error, "require": REQUIRE, "result": {"val_accuracy": 0.95}}
    with pytest.raises(TrainingJobError, match=r"\Ait is not proved that") as raised:
        instance.resume({"outcome": outcome})
    assert isinstance(raised.value, AirflowFailException) is not bool(retries)
    assert ("ktrain_outcome" in instance.store) is not bool(retries)


@pytest.mark.parametrize(
    ("require", "found"), [({"loss": "0.9"}, "'0.9'"), ({"loss": 1, "x": "<= {{ 1 }}"}, "1"), ([], r"\[\]")]
)
def test_an_invalid_bound_fails_when_the_dag_is_parsed(instance: Instance, require: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"require.*invalid parameter; found {found}"):
        instance.execute(require=require)


def test_a_bound_that_renders_to_no_number_fails_before_the_submission(instance: Instance) -> None:
    with pytest.raises(TrainingConfigurationError, match=r"require\['loss'\]: invalid parameter; found '<= None'"):
        instance.execute(require={"loss": "<= {{ x }}"}, rendered={"require": {"loss": "<= None"}})
    assert not instance.jobs()


@pytest.mark.parametrize(("literal", "rendered"), [("<= {{ x }}", "<= None"), ("0.9", "0.9")])
def test_a_bound_of_a_mapped_task_is_validated_before_the_submission(
    instance: Instance, literal: str, rendered: str
) -> None:
    """Its values aren't known when the DAG is parsed."""
    bounds = {"require": {"loss": rendered}}
    with pytest.raises(TrainingConfigurationError, match=rf"require\['loss'\]: .*found '{rendered}'"):
        instance.execute(require={"loss": literal}, rendered=bounds, _airflow_from_mapped=True)
    assert not instance.jobs()
    assert instance.operator is not None
    instance.operator.require = {"loss": "<= {{ x }}"}
    context: Any = {"x": 0.5}
    instance.operator.render_template_fields(context)
    assert instance.operator.require == {"loss": "<= 0.5"}


NAN = ["sh", "-c", """while :; do echo 'KTRAIN_METRIC {"step": 7, "loss": NaN}'; sleep 1; done"""]


@of_each_kind
@pytest.mark.parametrize("deferrable", [False, True])
def test_a_training_that_diverges_is_ended_and_may_be_retried(instance: Instance, deferrable: bool) -> None:
    def train() -> None:
        ended = instance.execute(command=NAN, deferrable=deferrable, fail_on_nan="loss", retries=1)
        instance.resume(instance.event(ended))

    with pytest.raises(TrainingUserCodeError, match=r"loss 3 times in a row .*since step 7 \(fail_on_nan\)") as e:
        train()
    assert not isinstance(e.value, AirflowFailException)
    assert not instance.jobs()
    assert instance.running() == 0


@pytest.mark.parametrize(("names", "found"), [([], r"\[\]"), ("", "''"), (1, "1"), ({"loss": 1}, "{'loss': 1}")])
def test_invalid_names_of_metrics_fail_when_the_dag_is_parsed(instance: Instance, names: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"fail_on_nan: invalid parameter; found {found}"):
        instance.execute(fail_on_nan=names)
