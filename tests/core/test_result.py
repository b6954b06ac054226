"""The result that the primary replica hands over."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.result import MAX_BYTES, RESULT_MARKER, find_result, marked_line

JOB = {"spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 1}}}}


def pod(message: str, role: str = "master", exit_code: int = 0) -> dict[str, Any]:
    labels = {"training.kubeflow.org/replica-type": role, "training.kubeflow.org/replica-index": "0"}
    terminated = {"exitCode": exit_code, "message": message}
    return {
        "metadata": {"labels": labels},
        "status": {"containerStatuses": [{"state": {"terminated": terminated}}]},
    }


def result(*pods: dict[str, Any], marked: str = "") -> tuple[Any, str]:
    return find_result(PYTORCHJOB, JOB, pods, marked)


def test_the_marked_line_wins_over_the_termination_message() -> None:
    assert result(pod('{"a": 1}'), marked=f'{RESULT_MARKER}{{"a": 2}}') == ({"a": 2}, "")
    assert result(pod('{"a": 1}')) == ({"a": 1}, "")
    assert result(pod("[1, 2]")) == ([1, 2], "")


def test_no_result() -> None:
    assert result() == (None, "")
    assert result(pod("finished after 3 epochs")) == (None, ""), "a message for people"
    assert result(pod('{"a": 1}', "worker")) == (None, ""), "only the primary's"
    assert result(pod('{"a": 1}', exit_code=1)) == (None, "")


@pytest.mark.parametrize("text", ["{", '{"loss": NaN}', '{"loss": Infinity}', '"' + "x" * MAX_BYTES + '"'])
def test_a_bad_result_is_said_and_does_not_raise(text: str) -> None:
    found, why = result(marked=RESULT_MARKER + text)
    assert found is None
    assert "KTRAIN_RESULT" in why


def test_a_line_that_is_too_long_is_not_handed_over_whole() -> None:
    """A trigger's arguments are in Airflow's database."""
    assert marked_line(f"{RESULT_MARKER}[1]") == f"{RESULT_MARKER}[1]"
    assert marked_line("epoch 1") == ""
    kept = marked_line(f"{RESULT_MARKER}{'1' * 10**6}")
    assert len(kept) < 2 * MAX_BYTES
    assert "more than 49,152 bytes" in result(marked=kept)[1]
