"""A result never fails a training that succeeded; the return value of a function must be JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_provider_ktrain.decorators.pytorchjob import _PyTorchJobDecoratedOperator
from airflow_provider_ktrain.exceptions import TrainingConfigurationError
from tests.operators.task_instance import Instance


def prints(text: str) -> list[str]:
    return ["sh", "-c", f"echo 'KTRAIN_RESULT {text}'"]


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
    return {"nan": float("nan"), "text": "x", "set": {1}}[what]


def test_return_value_arrives_by_the_termination_message(instance: Instance) -> None:
    """The Master's log isn't followed."""
    function: Any = {"operator": _PyTorchJobDecoratedOperator, "python_callable": returns, "deferrable": False}
    assert instance.execute(**function, op_args=["text"], workers=1, logs={"Worker": [0]}) == "x"


def test_return_value_that_is_not_json_fails_the_task_for_good(instance: Instance) -> None:
    function: Any = {"operator": _PyTorchJobDecoratedOperator, "python_callable": returns, "deferrable": False}
    assert instance.execute(**function, op_args=["text"]) == "x"
    assert instance.execute(**function, op_args=["nan"], number=2, max_tries=2) == "nan"
    with pytest.raises(TrainingConfigurationError, match="returns succeeded, but its return value is not JSON") as e:
        instance.execute(**function, op_args=["set"], number=3, max_tries=3)
    assert "Object of type set is not JSON serializable. Return strings" in str(e.value)
    assert not instance.jobs()
