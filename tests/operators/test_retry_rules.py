"""The examples of docs/how-to/infrastructure-failures.md, as they are written there."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ktrain import exceptions
from airflow_provider_ktrain.exceptions import TrainingInfrastructureError, TrainingJobError
from tests.operators.task_instance import Instance

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "infrastructure-failures.md"
_, POLICY, SUBCLASS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
#: The job was released, and a retry would fail in the same way.
NEVER_RETRIED = {
    "TrainingUserCodeError", "TrainingOutOfMemoryError", "TrainingImageError", "TrainingEnvironmentError",
    "TrainingSchedulingError", "TrainingQueueError", "TrainingTimeoutError", "TrainingHangError",
}  # fmt: skip
ERRORS = [
    error for error in vars(exceptions).values() if isinstance(error, type) and issubclass(error, TrainingJobError)
]
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def load(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "documented"}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    return names


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_policy_fails_the_task_only_if_a_retry_cannot_help(error: type[TrainingJobError]) -> None:
    sdk = pytest.importorskip("airflow.sdk.definitions.retry_policy", reason="Airflow 3.3 and newer")
    policy = load(POLICY)["INFRASTRUCTURE_ONLY"]
    for evaluated in (policy, type(policy).deserialize(policy.serialize())):
        decision = evaluated.evaluate(error("why"), 1, 5)
        expected = sdk.RetryAction.FAIL if error.__name__ in NEVER_RETRIED else sdk.RetryAction.DEFAULT
        assert decision.action is expected


def test_subclass_fails_for_good_only_if_a_retry_cannot_help(instance: Instance) -> None:
    operator = load(SUBCLASS)["InfrastructureRetries"]
    assert {error.__name__ for error in load(SUBCLASS)["NEVER_RETRIED"]} <= NEVER_RETRIED
    with pytest.raises(AirflowFailException, match="exit code 3"):
        instance.execute(operator=operator, command=["sh", "-c", "exit 3"], deferrable=False, retries=1)
    broken = ["sh", "-c", f"echo '{ECC}' >&2; exit 1"]
    with pytest.raises(TrainingInfrastructureError, match="broken GPU"):
        instance.execute(operator=operator, number=2, command=broken, deferrable=False, retries=2)


def test_subclass_fails_for_good_after_a_deferral(instance: Instance) -> None:
    instance.execute(operator=load(SUBCLASS)["InfrastructureRetries"])
    cause = {"category": "user code", "summary": "Master 0 failed"}
    with pytest.raises(AirflowFailException, match="Master 0 failed"):
        instance.resume({"outcome": {"succeeded": False, "cause": cause}})
