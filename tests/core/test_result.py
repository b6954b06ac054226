"""The result that the primary replica hands over."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.result import MAX_BYTES, MAX_DEPTH, RESULT_MARKER, find_result, keep_result_line

JOB = {"spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 1}}}}


def pod(message: str, role: str = "master", exit_code: int = 0) -> dict[str, Any]:
    labels = {"training.kubeflow.org/replica-type": role, "training.kubeflow.org/replica-index": "0"}
    terminated = {"exitCode": exit_code, "message": message}
    return {
        "metadata": {"labels": labels},
        "status": {"containerStatuses": [{"state": {"terminated": terminated}}]},
    }


def result(*pods: dict[str, Any], line: str = "") -> tuple[Any, str]:
    return find_result(PYTORCHJOB, JOB, pods, line)


def test_the_marked_line_wins_over_the_termination_message() -> None:
    assert result(pod('{"a": 1}'), line=f'{RESULT_MARKER}{{"a": 2}}') == ({"a": 2}, "")
    assert result(pod('{"a": 1}')) == ({"a": 1}, "")
    assert result(pod("[1, 2]")) == ([1, 2], "")


def test_no_result() -> None:
    assert result() == (None, "")
    assert result(pod("finished after 3 epochs")) == (None, ""), "a message for people"
    assert result(pod('{"a": 1}', "worker")) == (None, ""), "only the primary's"
    assert result(pod('{"a": 1}', exit_code=1)) == (None, "")


@pytest.mark.parametrize("text", ["{", '{"loss": NaN}', '{"loss": Infinity}', '"' + "x" * MAX_BYTES + '"'])
def test_a_bad_result_is_said_and_does_not_raise(text: str) -> None:
    found, why = result(line=RESULT_MARKER + text)
    assert found is None
    assert "KTRAIN_RESULT" in why


REFUSED = {
    r'{"file": "\udcff"}': r"a string has the character '\udcff'",
    r'{"\ud800": 1}': r"a string has the character '\ud800'",
    r'["\u0000"]': r"a string has the character '\x00'",
    f"[{2**64}]": "an integer has more than 64 bits",
    f'{{"a": {-(2**63) - 1}}}': "an integer has more than 64 bits",
    '{"loss": -1e999}': "a number is not finite (-inf)",
    "[" * (MAX_DEPTH + 1) + "0" + "]" * (MAX_DEPTH + 1): "it is nested more than 64 deep",
    "[" * 3000 + "]" * 3000: "it is nested more than 64 deep",
    "[" * 20000: "it is nested more than 64 deep",
}


@pytest.mark.parametrize(("text", "why"), REFUSED.items(), ids=[text[:20] for text in REFUSED])
def test_what_airflow_could_not_carry_is_no_result(text: str, why: str) -> None:
    """It would end the triggerer, and with it every task that waits there."""
    by_line, by_message = result(line=RESULT_MARKER + text), result(pod(text))
    assert (by_line[0], by_message[0]) == (None, None)
    assert by_line[1].startswith(f"the line with KTRAIN_RESULT cannot be stored: {why}: ")
    assert by_message[1].startswith(f"the termination message cannot be stored: {why}: ")


def test_what_airflow_can_carry_is_a_result() -> None:
    deep = "[" * MAX_DEPTH + "0" + "]" * MAX_DEPTH
    for text in (f"[{2**64 - 1}, {-(2**63)}]", '{"x": 1e308, "ok": true, "é": null}', r'"\ud83d\ude00"', deep):
        assert result(line=RESULT_MARKER + text) == (json.loads(text), "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner),
)


@given(JSON | st.text(st.characters(exclude_categories=())))
def test_whatever_a_job_writes_can_be_carried(value: Any) -> None:
    for text in [json.dumps(value), *([value] if isinstance(value, str) else [])]:
        found = result(line=RESULT_MARKER + text), result(pod(text))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == [list(f) for f in found]


def held(*lines: str) -> str:
    kept = ""
    for line in lines:
        kept = keep_result_line(kept, line)
    return kept


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["epoch 1", "KTRAIN_RESULT"], None),
        (["KTRAIN_RESULT [1]", "epoch 2", "KTRAIN_RESULT [2]", "done"], [2]),
        (["epoch 1 of 1...KTRAIN_RESULT [1]"], [1]),
        (["+ echo 'KTRAIN_RESULT [1]'", "KTRAIN_RESULT [1]"], [1]),
        (["KTRAIN_RESULT [1]", "+ echo 'KTRAIN_RESULT [1]'"], [1]),
        (["KTRAIN_RESULT [1]", "KTRAIN_RESULT {broken"], [1]),
        (["wrote KTRAIN_RESULT KTRAIN_RESULT [1]"], [1]),
        (['KTRAIN_RESULT {"a": "KTRAIN_RESULT 1"}'], {"a": "KTRAIN_RESULT 1"}),
        (["KTRAIN_RESULT [1]  \r"], [1]),
        (["KTRAIN_RESULT null", "KTRAIN_RESULT"], None),
    ],
)
def test_last_line_with_json_after_the_marker_is_held(lines: list[str], expected: Any) -> None:
    assert result(line=held(*lines)) == (expected, "")


def test_line_without_json_is_reported_if_no_line_has_json() -> None:
    kept = held("KTRAIN_RESULT {first", "x KTRAIN_RESULT {second")
    assert kept == "KTRAIN_RESULT {second"
    assert "{second" in result(line=kept)[1]


def test_held_result_line_is_bounded() -> None:
    """It travels in a trigger's arguments, which are in Airflow's database."""
    kept = held(f"{RESULT_MARKER}[1]", f"{RESULT_MARKER}[{'1,' * 10**6}1]")
    assert len(kept) < 2 * MAX_BYTES
    assert "more than 49,152 bytes" in result(line=kept)[1]
    assert len(held(f"{RESULT_MARKER}{'x' * 10**6}")) < 2 * MAX_BYTES


def test_line_with_many_markers_is_read_quickly() -> None:
    line = f'{RESULT_MARKER}["' * 100_000
    started = time.process_time()
    held(line)
    assert time.process_time() - started < 1
