"""A result never fails a training that succeeded; the return value of a function must be JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_provider_ktrain.decorators.pytorchjob import _PyTorchJobDecoratedOperator
from airflow_provider_ktrain.exceptions import TrainingConfigurationError, TrainingJobError
from tests.operators.task_instance import Instance, of_each_kind


def prints(text: str) -> list[str]:
    return ["sh", "-c", f"echo 'KTRAIN_RESULT {text}'"]


@of_each_kind
@pytest.mark.parametrize(
    ("printed", "returned", "warning"),
    [
        ('{"loss": 1e20, "n": 1}', {"loss": "1e+20", "n": 1}, "loss is stored as text"),
        ('{"loss": NaN}', {"loss": "nan"}, "loss is stored as text"),
        ("{broken", None, "Its result is left out: the line with KTRAIN_RESULT is not valid JSON"),
    ],
)
def test_result_that_airflow_cannot_store_is_converted(
    instance: Instance, capfd: pytest.CaptureFixture[str], printed: str, returned: Any, warning: str
) -> None:
    assert instance.execute(command=prints(printed), deferrable=False) == returned
    assert warning in capfd.readouterr().out
    assert not instance.jobs()


@of_each_kind
@pytest.mark.parametrize("text", ['{"loss": 0.5}', "null"])
def test_result_is_found_although_no_log_is_followed(
    instance: Instance, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    assert instance.execute(command=prints(text), deferrable=False, logs="none") == json.loads(text)
    assert "unknown" not in capfd.readouterr().out
    assert "KTRAIN_RESULT" not in capfd.readouterr().out, "its log isn't followed"


def test_program_without_a_result_returns_none_without_a_warning(
    instance: Instance, capfd: pytest.CaptureFixture[str]
) -> None:
    for logs in ("none", "all"):
        assert instance.execute(command=["true"], deferrable=False, logs=logs) is None
        assert "Its result is" not in capfd.readouterr().out


def test_output_with_an_invalid_xcom_key_is_left_out(instance: Instance, capfd: pytest.CaptureFixture[str]) -> None:
    printed = json.dumps({"x" * 513: 1, "loss": 0.5})
    assert instance.execute(command=prints(printed), deferrable=False, multiple_outputs=True) == {"loss": 0.5}
    assert "is left out: a key of multiple_outputs has 1 to 512 characters" in capfd.readouterr().out


def test_multiple_outputs_of_a_list_are_one_output(instance: Instance, capfd: pytest.CaptureFixture[str]) -> None:
    """Airflow itself would raise a TypeError after the training."""
    assert instance.execute(command=prints("[1, 2]"), deferrable=False, multiple_outputs=True) == [1, 2]
    assert instance.operator is not None
    assert not instance.operator.multiple_outputs
    assert "multiple_outputs: found a list, expected a dict" in capfd.readouterr().out


def returns(what: str) -> Any:
    return {
        "nan": {"history": [0.5, float("nan")]},
        "text": "x",
        "set": {1},
        "large": "x" * 50_000,
    }[what]


FUNCTION: dict[str, Any] = {
    "operator": _PyTorchJobDecoratedOperator,
    "python_callable": returns,
    "deferrable": False,
}


@pytest.mark.programs("runs a Python function")
def test_return_value_arrives_by_the_termination_message(instance: Instance) -> None:
    """The Master's log isn't followed."""
    assert instance.execute(**FUNCTION, op_args=["text"], workers=1, logs={"Worker": [0]}) == "x"


@pytest.mark.programs("runs a Python function")
def test_return_value_that_is_not_json_fails_the_task_for_good(instance: Instance) -> None:
    lost = "its return value is not JSON and is lost: it is of type set"
    with pytest.raises(TrainingConfigurationError, match=rf"^returns succeeded, but {lost}\.\nReturn strings"):
        instance.execute(**FUNCTION, op_args=["set"])
    assert not instance.jobs()


@pytest.mark.programs("runs a Python function")
def test_nan_in_a_return_value_is_text_and_the_rest_is_kept(instance: Instance) -> None:
    assert instance.execute(**FUNCTION, op_args=["nan"])["history"] == [0.5, "nan"]


@pytest.mark.programs("runs a Python function")
def test_return_value_that_is_too_large_fails_the_task(instance: Instance) -> None:
    """Without a result, the tasks after it would get None."""
    for number in (1, 2):
        with pytest.raises(TrainingJobError, match=r"return value can't be read: .* has more than 49,152 bytes"):
            instance.execute(**FUNCTION, op_args=["large"], number=number, retries=1)
    assert len([one for one in instance.store["ktrain_tries"]["tries"] if "usage" in one]) == 1, "it trained once"


def hides_its_return_value(how: str) -> Any:
    import os

    if how == "exits":
        os._exit(0)
    return None


@pytest.mark.programs("runs a Python function")
@pytest.mark.parametrize(("how", "is_lost"), [("exits", True), ("returns", False)])
def test_return_value_that_was_not_reported_is_an_error(instance: Instance, how: str, is_lost: bool) -> None:
    options = {**FUNCTION, "python_callable": hides_its_return_value, "op_args": [how]}
    if not is_lost:
        assert instance.execute(**options) is None, "None is a return value"
        return
    for number in (1, 2):
        with pytest.raises(TrainingJobError, match=r"return value can't be read: neither the log of replica 0 nor"):
            instance.execute(**options, number=number, retries=1)
    assert len([one for one in instance.store["ktrain_tries"]["tries"] if "usage" in one]) == 1, "it trained once"


@pytest.mark.programs("runs a Python function")
def test_return_value_that_is_not_pushed_may_be_anything(instance: Instance) -> None:
    assert instance.execute(**FUNCTION, op_args=["set"], do_xcom_push=False) is None
