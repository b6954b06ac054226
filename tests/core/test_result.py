"""The result that the primary replica returns."""

from __future__ import annotations

import json
import math
import time
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.logs.result import (
    MAX_BYTES,
    PART_MARKER,
    RESULT_MARKER,
    find_result,
    keep_result_line,
)
from airflow_provider_ktrain.core.text.xcom_values import MAX_DEPTH
from tests.factories import replica_pod

JOB = {"spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 1}}}}


def pod(message: str, role: str = "master", exit_code: int = 0) -> dict[str, Any]:
    terminated = {"exitCode": exit_code, "message": message}
    return replica_pod(role, containerStatuses=[{"name": "pytorch", "state": {"terminated": terminated}}])


def result(*pods: dict[str, Any], line: str = "") -> tuple[Any, str]:
    return find_result(PYTORCHJOB, JOB, pods, line)[:2]


def test_result_line_wins_over_the_termination_message() -> None:
    assert result(pod('{"a": 1}'), line=f'{RESULT_MARKER}{{"a": 2}}') == ({"a": 2}, "")
    assert result(pod('{"a": 1}')) == ({"a": 1}, "")
    assert result(pod("[1, 2]")) == ([1, 2], "")


def test_termination_message_of_a_sidecar_is_no_result() -> None:
    containers = [{"name": "metrics"}, {"name": "pytorch"}]
    found = pod('{"loss": 1}')
    (main,) = found["status"]["containerStatuses"]
    sidecar = {"name": "metrics", "state": {"terminated": {"exitCode": 0, "message": '{"loss": 9}'}}}
    beside = {**found, "spec": {"containers": containers}}
    beside["status"] = {"containerStatuses": [sidecar, {**main, "name": "pytorch"}]}
    assert result(beside) == ({"loss": 1}, "")


def test_job_without_result() -> None:
    assert result() == (None, "")
    assert find_result(PYTORCHJOB, JOB, [], f"{RESULT_MARKER}null") == (None, "", True), "None can be a result"
    assert find_result(PYTORCHJOB, JOB, [], "") == (None, "", False)
    assert result(pod("finished after 3 epochs")) == (None, ""), "a message for people"
    assert result(pod('{"a": 1}', "worker")) == (None, ""), "only the primary's"
    assert result(pod('{"a": 1}', exit_code=1)) == (None, "")


@pytest.mark.parametrize("text", ["{", "{'a': 1}", '"' + "x" * MAX_BYTES + '"'])
def test_invalid_result_gives_a_warning(text: str) -> None:
    found, why = result(line=RESULT_MARKER + text)
    assert found is None
    assert why.startswith("Its result is left out: the line with KTRAIN_RESULT")


STORED = {
    r'{"file": "\udcff", "a": 1}': ({"file": "\ufffd", "a": 1}, "file is changed: characters that databases refuse"),
    r'{"\ud800": 1}': ({"\ufffd": 1}, r"the key '\ud800' is changed: characters"),
    r'["\u0000"]': (["\ufffd"], "[0] is changed: characters"),
    f"[{2**64}]": ([str(2**64)], "[0] is stored as text: the integer has more than 64 bits"),
    f'{{"a": {-(2**63) - 1}}}': ({"a": str(-(2**63) - 1)}, "a is stored as text: the integer has"),
    f'{{"a": 1{"0" * 5000}}}': ({"a": "1" + "0" * 5000}, "a is stored as text: the integer has"),
    '{"loss": -1e999}': ({"loss": "-inf"}, "loss is stored as text: the number is not finite"),
    '{"loss": NaN, "ok": 1}': ({"loss": "nan", "ok": 1}, "loss is stored as text: the number is not finite"),
    '{"a": [{"b": 1e20}]}': (
        {"a": [{"b": "1e+20"}]},
        "a[0].b is stored as text: databases return it as a large integer",
    ),
    "-1e19": ("-1e+19", "the result is stored as text: databases"),
    '{"__classname__": "x", "a": 1}': ({"a": 1}, "__classname__ is left out: Airflow's serializer"),
    '{"__type": "x", "__var": 1}': ({"__var": 1}, "__type is left out: Airflow's serializer"),
}


@pytest.mark.parametrize(("text", "stored"), STORED.items(), ids=[text[:20] for text in STORED])
def test_values_that_airflow_cannot_store_are_changed_or_left_out(text: str, stored: tuple[Any, str]) -> None:
    """An unstorable value would end the triggerer, and with it all tasks that wait there."""
    value, why = stored
    assert result(line=RESULT_MARKER + text)[0] == value
    assert result(line=RESULT_MARKER + text)[1].startswith(f"Its result is stored with a change: {why}")
    assert result(pod(RESULT_MARKER + text))[0] == value


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1])
def test_integers_of_64_bits_are_stored_as_they_are(number: int) -> None:
    found, why = result(line=RESULT_MARKER + str(number))
    assert (found, type(found), why) == (number, int, "")


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 3000])
def test_deeply_nested_result_is_left_out(depth: int) -> None:
    found, why = result(line=RESULT_MARKER + '{"a": ' + "[" * depth + "]" * depth + ', "b": 1}')
    assert "nested more than 64 deep" in why
    assert depth > MAX_DEPTH + 1 or found["b"] == 1
    msgspec.msgpack.encode(found)


def test_json_that_is_too_deep_for_some_parsers_is_left_out() -> None:
    """Python 3.14 parses it, 3.11 doesn't."""
    assert "nested more than 64 deep" in result(line=RESULT_MARKER + "[" * 20_000 + "]" * 20_000)[1]


def test_warnings_list_only_the_first_changes() -> None:
    found, why = result(line=RESULT_MARKER + json.dumps([math.nan] * 500))
    assert found == ["nan"] * 500
    assert len(why.splitlines()) == 11
    assert why.endswith("490 more values are changed or left out")


def test_marked_termination_message_may_be_any_json() -> None:
    assert result(pod("done\nKTRAIN_RESULT 0.97\n")) == (0.97, "")


def test_result_that_airflow_can_store_is_unchanged() -> None:
    deep = "[" * MAX_DEPTH + "0" + "]" * MAX_DEPTH
    for text in (f"[{2**64 - 1}, {-(2**63)}]", '{"x": 1.8e19, "ok": true, "é": null}', r'"\ud83d\ude00"', deep):
        assert result(line=RESULT_MARKER + text) == (json.loads(text), "")


def carried(value: Any) -> bool:
    """Whether PostgreSQL and msgpack preserve the value: numbers without a fraction come back as integers."""
    if isinstance(value, float):
        return math.isfinite(value) and (value % 1 != 0 or -(2**63) <= int(value) < 2**64)
    if isinstance(value, dict):
        return all("\0" not in key and carried(item) for key, item in value.items())
    return all(map(carried, value)) if isinstance(value, list) else "\0" not in str(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner),
)


@given(JSON | st.text(st.characters(exclude_categories=())))
def test_airflow_can_store_any_result_that_a_job_writes(value: Any) -> None:
    for text in [json.dumps(value), *([value] if isinstance(value, str) else [])]:
        found = result(line=RESULT_MARKER + text), result(pod(text))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == [list(f) for f in found]
        assert all(carried(value) for value, _ in found)


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
    """It is part of a trigger's arguments, which are stored in Airflow's database."""
    kept = held(f"{RESULT_MARKER}[1]", f"{RESULT_MARKER}[{'1,' * 10**6}1]")
    assert len(kept) < 2 * MAX_BYTES
    assert "more than 49,152 bytes" in result(line=kept)[1]
    assert len(held(f"{RESULT_MARKER}{'x' * 10**6}")) < 2 * MAX_BYTES


def test_line_with_many_markers_is_read_quickly() -> None:
    line = f'{RESULT_MARKER}["' * 100_000
    started = time.process_time()
    held(line)
    assert time.process_time() - started < 5


# ---- numbered lines


def numbered(value: Any, size: int = 8) -> list[str]:
    """A return value as a function under mpirun prints it."""
    text = json.dumps(value)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    rest = [f"{n}/{len(parts)} {zlib.crc32(text.encode()):08x} {part}" for n, part in enumerate(parts, 1)]
    return [f"{PART_MARKER}{zlib.crc32(line.encode()):08x} {line}" for line in rest]


VALUE = {"loss": 0.25, "name": "a b  c", "ü": None}
LINES = numbered(VALUE)


@pytest.mark.parametrize(
    "lines",
    [
        LINES,
        [*LINES, *LINES],
        [f"rank 1 epoch 3{line}\r" for line in reversed(LINES)],
        [line[:-1] for line in LINES[:2]] + LINES[2:] + [f"{line}rank 1" for line in LINES[2:]] + LINES[:2],
        [*numbered([1, 2, 3, 4, 5, 6]), *LINES],
        ["KTRAIN_RESULT [1]", *LINES, "KTRAIN_RESULT [2]"],
        ["KTRAIN_RESULT_PART", "KTRAIN_RESULT_PART 1/1 x", *LINES],
    ],
)
def test_numbered_lines_are_joined(lines: list[str]) -> None:
    assert result(line=held(*lines)) == (VALUE, "")


def test_result_line_may_contain_the_marker_of_numbered_lines() -> None:
    assert result(line=held(f'{RESULT_MARKER}["{PART_MARKER}"]')) == ([PART_MARKER], "")


@pytest.mark.parametrize("damaged", [LINES[1][:-1], LINES[1] + "x", LINES[1].replace(" 2/", " 3/"), ""])
def test_damaged_or_missing_numbered_line_is_an_error(damaged: str) -> None:
    found, why = result(line=held(LINES[0], damaged, *LINES[2:]))
    assert found is None
    assert why == f"Its result is left out: 1 of its {len(LINES)} numbered lines are missing or damaged"


def test_numbered_lines_of_two_texts_are_not_mixed() -> None:
    """The Launcher ran twice, and the second text is incomplete."""
    found, why = result(line=held(*LINES, numbered({**VALUE, "loss": 0.75})[0]))
    assert found is None
    assert "numbered lines are missing" in why


def test_held_numbered_lines_are_bounded() -> None:
    assert held(*numbered("x" * MAX_BYTES * 2, 1900)) == ""
    assert held(*numbered("x" * 3998, 2000)) == ""
    assert len(held(*numbered("x" * (MAX_BYTES - 2), 1900))) < 2 * MAX_BYTES
