"""Every line once, however often and wherever reading is cut."""

from __future__ import annotations

import json
import random
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.logcursor import Cursor, Gap, Position, Replay, normal_time

# a line of a log file: its time and its text, which only the test knows
Line = tuple[str, int]


def at(seconds: float) -> str:
    return f"2026-11-21T10:00:{seconds:012.9f}Z"


def answer(file: list[Line], since: str | None) -> list[Line]:
    """What a kubelet answers: lines from that second on, in the order of the file."""
    return [line for line in file if since is None or line[0][:19] >= since[:19]]


def read(file: list[Line], position: Position, until: int | None = None) -> tuple[list[int], Replay]:
    """One request, cut after so many lines of the answer: the new ones."""
    replay = Replay(position)
    return [number for time, number in answer(file, position.since)[:until] if replay.fresh(time)], replay


@st.composite
def log_files(draw: st.DrawFn) -> list[Line]:
    """Times that mostly grow, with equal ones, pauses, and neighbours in the wrong order, as of stdout and stderr."""
    steps = draw(st.lists(st.sampled_from([0, 0, 1, 1000, 400_000_000, 1_700_000_000, -900, -5]), max_size=40))
    time, file = 30_000_000_000, []
    for number, step in enumerate(steps):
        time = min(max(time + step, 0), 59_000_000_000)
        file.append((at(time / 1e9), number))
    return file


@given(log_files(), st.lists(st.integers(0, 30), max_size=30))
def test_every_line_once_and_in_order_under_cuts(file: list[Line], cuts: list[int]) -> None:
    position, got = Position(), []
    for cut in cuts:
        assert all(Replay(position).follows(time) for time, _ in answer(file, position.since)[:1])
        new, replay = read(file, position, cut)
        assert replay.gap is None
        got += new
        position = Cursor.from_dict(json.loads(json.dumps(Cursor({"u/c": position}).to_dict()))).position("u", "c")
    got += read(file, position)[0]
    assert got == [number for _, number in file]


@given(log_files(), st.integers(0, 40), st.integers(0, 40))
def test_after_a_rotation_no_line_comes_twice_and_a_gap_is_told(file: list[Line], cut: int, rotated: int) -> None:
    file = sorted({time: (time, number) for time, number in file}.values())
    position = Position()
    before, _ = read(file, position, cut)
    after, replay = read(file[rotated:], position)
    seen, left = file[: len(before)], file[rotated:]
    assert after == [number for _, number in left if number not in before]
    lost = seen and left and left[0][0] > seen[-1][0] and len(seen) < rotated
    if lost:
        assert replay.gap == Gap(seen[-1][0], left[0][0])


@given(st.lists(st.integers(1, 3_000), max_size=60), st.lists(st.tuples(*[st.integers(0, 60)] * 3), max_size=12))
def test_what_is_missing_lies_in_gaps_that_are_told(steps: list[int], requests: list[tuple[int, int, int]]) -> None:
    """Requests that are cut, after rotations, for the last lines only: none twice, and no silent loss."""
    file = [(at(sum(steps[: n + 1]) / 4000), n) for n in range(len(steps))]
    position, rotated, got, gaps = Position(), 0, [], []
    for cut, rotation, tail in [*requests, (1000, 0, 1000)]:
        rotated = max(rotated, rotation if rotation < 40 else 0)
        served = file[rotated:][-tail - 1 :]
        new, replay = read(served, position, cut)
        gaps += [replay.gap] if replay.gap else []
        got += new
    assert got == sorted(set(got))
    for number in set(range(got[0], got[-1]) if got else ()) - set(got):
        assert any(gap.after < file[number][0] < gap.until for gap in gaps)


@given(log_files(), st.integers(0, 40), st.integers(0, 39), st.integers(1, 40))
def test_another_run_is_told_from_the_same_file(file: list[Line], cut: int, tail: int, pause: int) -> None:
    """After a tail, whose beginning is not the file's, an answer may not be doubted for that."""
    position = Position()
    if tail:
        position.rebase()
    for time, _ in file[-tail:][:cut]:
        position.advance(time)
    assert all(Replay(position).follows(time) for time, _ in answer(file, position.since)[:1])
    last = max((time for time, _ in file[-tail:][:cut]), default="")
    if last and not tail:
        other = at(float(last[17:-1]) + pause / 1000)
        assert not Replay(position).follows(other)


def test_a_thousand_lines_of_one_time() -> None:
    file = [(at(1), number) for number in range(1000)]
    position = Position()
    got = []
    for cut in (1, 400, 401, 999):
        got += read(file, position, cut)[0]
    assert got + read(file, position)[0] == list(range(1000))


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    file = [(at(50 + n / 100), n) for n in range(10)] + [(at(20 + n / 100), 10 + n) for n in range(10)]
    position = Position()
    got, _ = read(file, position, 12)
    new, _ = read(file, position)
    assert set(got + new) == set(range(20))


def test_since_is_a_whole_second_before_the_last_line() -> None:
    position = Position()
    assert position.since is None
    position.advance(at(10.25))
    assert position.since == "2026-11-21T10:00:09Z"
    position.advance(at(12.5))
    assert position.since == "2026-11-21T10:00:10Z"
    position.advance(at(12.75))
    position.advance(at(13))
    assert position.since == "2026-11-21T10:00:12Z"


@pytest.mark.parametrize(
    ("stamp", "normal"),
    [
        ("2026-11-21T10:06:08.619084892Z", "2026-11-21T10:06:08.619084892Z"),
        ("2026-11-21T10:06:08.6Z", "2026-11-21T10:06:08.600000000Z"),
        ("2026-11-21T10:06:08Z", "2026-11-21T10:06:08.000000000Z"),
        ("2026-11-21T12:06:08.619084892+02:00", "2026-11-21T10:06:08.619084892Z"),
        ("2026-11-20T22:36:08.5-11:30", "2026-11-21T10:06:08.500000000Z"),
        ("2026-13-21T10:06:08.6+00:00", None),
        ("unable", None),
        ("", None),
        ("2026-11-21T10:06:08.6190848921Z", None),
    ],
)
def test_normal_time(stamp: str, normal: str | None) -> None:
    assert normal_time(stamp) == normal


def test_a_cursor_travels_whole() -> None:
    cursor = Cursor()
    assert cursor.to_dict() == {}
    cursor.position("u0", "main")
    for n in range(10_000):
        cursor.position("u1", "main").advance(at(n / 1000))
    cursor.begin("u2", "main", 3).complete = True
    cursor.pods = {"u1": "train-worker-0", "u2": "train-worker-1"}
    assert Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor
    assert Cursor.from_dict(None) == Cursor.from_dict({}) == Cursor()


def test_of_what_is_complete_the_run_travels() -> None:
    cursor = Cursor()
    cursor.begin("u", "main", 3).advance(at(1))
    cursor.position("u", "main").complete = True
    other = Cursor.from_dict(cursor.to_dict())
    assert other.position("u", "main") == Position(3, complete=True)
    assert other.has("u", "main")
    assert other.unfinished() == {}


def test_512_containers_travel_in_what_mysql_keeps_encrypted() -> None:
    rng, cursor = random.Random(1), Cursor()
    for n in range(512):
        uid = str(uuid.UUID(int=rng.getrandbits(128)))
        cursor.pods[uid] = f"train-526460183f-worker-{n}"
        for second in range(50):
            cursor.position(uid, "pytorch").advance(at(second + rng.random()))
    assert len(json.dumps(cursor.to_dict())) * 4 / 3 < 60_000
