"""Repeated lines of init containers: what is left out is counted, and nothing else is left out."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.logs.repeats import Repeated, Repeats

EPOCH = datetime(2026, 11, 21, 10)
LOOKUP = "lookup noimage-master-0 on 198.18.0.1:53: no such host"
SUMMARY = re.compile(r"(.*) \(repeated (?:([\d,]+) times|once) in (\d+) (s|min)(?:, with ([\d,]+) other lines?)?\)")


def at(seconds: float) -> str:
    return f"{(EPOCH + timedelta(seconds=seconds)).isoformat(timespec='microseconds')}000Z"


def collapsed(*lines: str, every: float = 2) -> list[str]:
    repeats = Repeats()
    out = [line for n, text in enumerate(lines) for line in repeats.add(at(n * every), text)]
    return [line.text for line in [*out, *repeats.flush()]]


def test_a_line_that_repeats_is_counted() -> None:
    assert collapsed(*["waiting for master"] * 91) == [
        "waiting for master",
        "waiting for master (repeated 90 times in 3 min)",
    ]


def test_lines_that_alternate_are_counted() -> None:
    """As in recording 17-pt-image-pull, where stdout and stderr change places now and then."""
    lines = [LOOKUP, "waiting for master"] * 3 + ["waiting for master", LOOKUP] * 2 + [LOOKUP, "waiting for master"]
    assert collapsed(*lines, "Name: noimage-master-0", every=1) == [
        LOOKUP,
        "waiting for master",
        "waiting for master (repeated 5 times in 9 s, with 5 other lines)",
        "Name: noimage-master-0",
    ]


def test_a_few_repetitions_are_logged_as_they_are() -> None:
    lines = [LOOKUP, "waiting for master", LOOKUP, "waiting for master", "Name: m Address: 10.0.0.1"]
    assert collapsed(*lines) == lines


def test_lines_without_a_time_are_counted() -> None:
    repeats = Repeats()
    out = [line for _ in range(5) for line in repeats.add("", "waiting for master")] + list(repeats.flush())
    assert [line.text for line in out] == ["waiting for master", "waiting for master (repeated 4 times in 0 s)"]


@pytest.mark.parametrize("stamp", ["2026-11-21T10:00:0{}.123Z", "2026/11/21 10:00:0{}", "[10:00:0{},5]"])
def test_times_do_not_distinguish_lines(stamp: str) -> None:
    lines = [f"{stamp.format(n)} waiting for master" for n in range(5)]
    assert collapsed(*lines) == [lines[0], f"{lines[4]} (repeated 4 times in 6 s)"]


def test_other_numbers_distinguish_lines() -> None:
    lines = [f"fetched shard {n} of 5" for n in range(5)]
    assert collapsed(*lines) == lines


def test_lines_that_differ_are_not_collapsed() -> None:
    lines = [f"step {name}" for name in "abcdefghijklm"] * 3
    assert collapsed(*lines) == lines, "a cycle of more lines than are compared"


@pytest.mark.parametrize("seconds", [1, 119, 120, 7200])
def test_the_time_is_that_of_the_repetitions(seconds: int) -> None:
    lines = Repeats()
    assert lines.add(at(0), "x")
    for n in (0, 1, 2):
        assert not lines.add(at(seconds / 2 * n), "x")
    (line,) = lines.flush()
    unit = f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
    assert line == Repeated(at(seconds), f"x (repeated 3 times in {unit})", 3)


TEXTS = st.one_of(
    st.sampled_from(["waiting", "waiting 10:00:01", "waiting 10:00:22", LOOKUP, "", "\tName: m"]),
    st.sampled_from("abcdefghijkl"),
)


@given(st.lists(TEXTS, max_size=60), st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_no_line_is_left_out_without_being_counted(lines: list[str], flushes: set[int], handovers: set[int]) -> None:
    """For any lines, any times of a flush, and any point at which another process continues."""
    repeats, out = Repeats(), list[Repeated]()
    for n, text in enumerate(lines):
        if n in handovers:
            out += repeats.flush()
            repeats = Repeats()
        elif n in flushes:
            out += repeats.flush()
        out += repeats.add(at(n), text)
        assert sum(line.count for line in out) + repeats.held == n + 1
    out += repeats.flush()
    read = 0
    for line in out:
        read += line.count
        summary = SUMMARY.fullmatch(line.text)
        if line.count == 1:
            assert (line.time, line.text) == (at(read - 1), lines[read - 1]), "each line in its place"
        else:
            assert summary, line
            assert (line.time, summary[1]) == (at(read - 1), lines[read - 1])
            assert int(summary[2] or 1) + int(summary[5] or 0) == line.count
    assert read == len(lines)
