"""Every line is read once, however often and wherever a request is cut."""

from __future__ import annotations

import base64
import json
import random
import uuid
import zlib
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.logs.cursor import (
    MAX_SIZE,
    Cursor,
    Position,
    Replay,
    Window,
    normal_time,
    normal_times,
)

# a line of a log file: its timestamp, and its number, which only the test uses
Line = tuple[str, int]


def at(seconds: float) -> str:
    return f"2026-11-21T10:00:{seconds:012.9f}Z"


def answer(file: list[Line], since: str | None) -> list[Line]:
    """The response of a kubelet: lines from this second on, in the order of the file."""
    return [line for line in file if since is None or line[0][:19] >= since[:19]]


def read(file: list[Line], position: Position, until: int | None = None) -> tuple[list[int], Replay]:
    """One request, cut after this many lines of the response; returns the new lines."""
    replay = Replay(position)
    return [number for time, number in answer(file, position.since)[:until] if replay.fresh(time)], replay


def handed_over(position: Position) -> Position:
    """The position as the next process receives it."""
    data = json.dumps(Cursor({Cursor.key("u", "c"): position}).to_dict())
    return Cursor.from_dict(json.loads(data)).position("u", "c")


@st.composite
def log_files(draw: st.DrawFn) -> list[Line]:
    """Timestamps that mostly increase, with equal ones, gaps, and swapped neighbours, as of stdout and stderr."""
    steps = draw(st.lists(st.sampled_from([0, 0, 1, 1000, 400_000_000, 1_700_000_000, -900, -5]), max_size=40))
    time, file = 30_000_000_000, []
    for number, step in enumerate(steps):
        time = min(max(time + step, 0), 59_000_000_000)
        file.append((at(time / 1e9), number))
    return file


@given(log_files(), st.lists(st.integers(0, 30), max_size=30))
def test_every_line_is_read_once_and_in_order_under_cuts(file: list[Line], cuts: list[int]) -> None:
    position, got = Position(), []
    for cut in cuts:
        assert all(Replay(position).follows(time) for time, _ in answer(file, position.since)[:1])
        new, replay = read(file, position, cut)
        assert replay.gap is None
        got += new
        position = handed_over(position)
    got += read(file, position)[0]
    assert got == [number for _, number in file]


@given(log_files(), st.integers(0, 40), st.booleans())
def test_rotation_after_a_handover_repeats_no_line(file: list[Line], cut: int, twice: bool) -> None:
    file = sorted({time: (time, number) for time, number in file}.values())
    position = Position()
    before, _ = read(file, position, cut)
    position = handed_over(handed_over(position) if twice else position)
    after, _ = read(file[len(before) // 2 :], position)
    assert before + after == [number for _, number in file]


@given(log_files(), st.integers(0, 40), st.integers(0, 40))
def test_rotation_repeats_no_line_and_reports_a_gap(file: list[Line], cut: int, rotated: int) -> None:
    file = sorted({time: (time, number) for time, number in file}.values())
    position = Position()
    before, _ = read(file, position, cut)
    after, replay = read(file[rotated:], position)
    seen, left = file[: len(before)], file[rotated:]
    assert after == [number for _, number in left if number not in before]
    lost = seen and left and left[0][0] > seen[-1][0] and len(seen) < rotated
    if lost:
        assert replay.gap == (seen[-1][0], left[0][0])


@given(st.lists(st.integers(1, 3_000), max_size=60), st.lists(st.tuples(*[st.integers(0, 60)] * 3), max_size=12))
def test_missing_lines_lie_in_reported_gaps(steps: list[int], requests: list[tuple[int, int, int]]) -> None:
    """Requests for the last lines that are cut after rotations: no line is repeated, and each loss is reported."""
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
        assert any(after < file[number][0] < until for after, until in gaps)


@given(log_files(), st.integers(0, 40), st.integers(0, 39), st.integers(1, 40))
def test_log_of_another_run_is_recognized(file: list[Line], cut: int, tail: int, pause: int) -> None:
    """After a tail request, the file's first line is unknown, so it isn't a reason to reject a response."""
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


def test_a_thousand_lines_with_the_same_time_are_read_once() -> None:
    file = [(at(1), number) for number in range(1000)]
    position = Position()
    got = []
    for cut in (1, 400, 401, 999):
        got += read(file, position, cut)[0]
    assert got + read(file, position)[0] == list(range(1000))


def test_clock_that_is_set_back_loses_no_line() -> None:
    file = [(at(50 + n / 100), n) for n in range(10)] + [(at(20 + n / 100), 10 + n) for n in range(10)]
    position = Position()
    got, _ = read(file, position, 12)
    new, _ = read(file, position)
    assert set(got + new) == set(range(20))


def test_since_is_a_whole_second_before_the_last_line() -> None:
    assert Position().since is None
    position = Position()
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
def test_timestamps_are_normalized(stamp: str, normal: str | None) -> None:
    assert normal_time(stamp) == normal


def test_cursor_survives_a_handover() -> None:
    cursor = Cursor()
    assert cursor.to_dict() == {}
    cursor.position("u0", "main")
    for n in range(10_000):
        cursor.position("u1", "main").advance(at(n / 1000))
    cursor.positions[Cursor.key("u2", "main")] = Position(3, complete=True)
    cursor.names = {Cursor.key("u0", "main"): "train-worker-0/main", Cursor.key("u1", "main"): "train-worker-1/main"}
    other = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    assert other.names == cursor.names
    assert other.position("u0", "main") == cursor.position("u0", "main")
    assert other.position("u2", "main") == cursor.position("u2", "main")
    before, after = cursor.position("u1", "main"), other.position("u1", "main")
    assert (after.base, after.last, after.at_last) == (before.base, before.last, before.at_last)
    assert after.newest == Window(before.newest.second, "", 0)
    assert after.first == before.first
    assert Cursor.from_dict(None) == Cursor.from_dict({}) == Cursor()


def test_first_line_is_rounded_up_to_a_millisecond() -> None:
    position = Position()
    position.advance(at(1.000_000_001))
    assert handed_over(position).first == at(1.001)


def test_only_the_run_of_a_complete_container_is_kept() -> None:
    cursor = Cursor()
    cursor.positions[Cursor.key("u", "main")] = Position(3)
    cursor.position("u", "main").advance(at(1))
    cursor.position("u", "main").complete = True
    other = Cursor.from_dict(cursor.to_dict())
    assert other.position("u", "main") == Position(3, complete=True)
    assert other.has("u", "main")
    assert all(at.complete for at in other.positions.values())


def busy_cursor(containers: int, spread: float = 3600) -> tuple[Cursor, list[str]]:
    """Positions of containers whose last lines are within `spread` seconds, and the uids of their pods."""
    rng, cursor, uids = random.Random(1), Cursor(), []
    for n in range(containers):
        uid = str(uuid.UUID(int=rng.getrandbits(128)))
        uids.append(uid)
        suffix = "".join(rng.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
        cursor.names[Cursor.key(uid, "pytorch")] = f"train-526460183f-node-0-{n}-{suffix}/pytorch"
        end = 4000 + rng.random() * spread
        for seconds in (rng.random(), *(end + n / 3 + rng.random() / 9 for n in range(8))):
            cursor.position(uid, "pytorch").advance(later(seconds))
    return cursor, uids


def packed(text: bytes) -> str:
    return base64.b85encode(zlib.compress(text)).decode()


def later(seconds: float) -> str:
    moment = datetime(2026, 11, 21, 10) + timedelta(seconds=int(seconds))
    return f"{moment.isoformat()}.{int(seconds % 1 * 1e9):09d}Z"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spread", [1, 3600, 7 * 86400])
@pytest.mark.parametrize(
    ("containers", "smallest", "largest", "exact"),
    [(100, 2_000, 5_000, 100), (1000, 20_000, MAX_SIZE, 1000), (4000, 30_000, MAX_SIZE, 1050)],
)
def test_size_of_a_cursor(spread: float, containers: int, smallest: int, largest: int, exact: int) -> None:
    cursor, uids = busy_cursor(containers, spread)
    data = cursor.to_dict()
    assert smallest < len(json.dumps(data)) <= largest
    other = Cursor.from_dict(data)
    kept = [uid for uid in uids if other.has(uid, "pytorch")]
    assert len(kept) >= exact
    assert len(kept) + other.omitted == containers
    for uid in kept:
        assert other.position(uid, "pytorch").last == cursor.position(uid, "pytorch").last
        assert other.position(uid, "pytorch").base == cursor.position(uid, "pytorch").base


def test_containers_that_do_not_fit_are_read_from_one_common_time() -> None:
    cursor, uids = busy_cursor(4000)
    other = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    omitted = [uid for uid in uids if not other.has(uid, "pytorch")]
    lasts = [cursor.position(uid, "pytorch").last for uid in omitted]
    assert other.since == min(lasts)
    for uid, last in zip(omitted, lasts, strict=True):
        other.resume(uid, "pytorch", 0, "2026-11-21T10:00:00Z")
        position = other.position(uid, "pytorch")
        replay = Replay(position)
        assert replay.follows(last)
        assert not replay.fresh(at(0))  # long before the common time
        assert replay.fresh(last)
        assert replay.gap is None


def test_common_time_is_not_used_for_containers_that_started_after_it() -> None:
    """A pod that the watch reported late has lines from before the common time that were never read."""
    cursor = Cursor(since=later(600))
    cursor.resume("late", "main", 0, later(570))
    cursor.resume("restarted", "main", 2, later(700))
    cursor.resume("old", "main", 2, later(0))
    cursor.resume("unknown", "main", 0, "")
    assert cursor.position("late", "main") == cursor.position("unknown", "main") == Position()
    assert (cursor.position("restarted", "main").restart, cursor.position("restarted", "main").last) == (1, later(600))
    assert (cursor.position("old", "main").restart, cursor.position("old", "main").last) == (2, later(600))


def test_second_cursor_that_does_not_fit_keeps_the_earlier_common_time() -> None:
    cursor, _ = busy_cursor(4000)
    first = Cursor.from_dict(cursor.to_dict())
    second = Cursor.from_dict(first.to_dict(limit=10_000))
    assert second.since <= first.since
    assert second.omitted > first.omitted
    assert Cursor.from_dict({"version": 7, "since": later(1), "omitted": 3}) == Cursor(since=later(1), omitted=3)
    assert Cursor(since=later(1), omitted=3).to_dict()["since"] == later(1)


@pytest.mark.parametrize(
    "data",
    [
        *({"containers": text} for text in ("no", 3, "c$", "aGk=", packed(b"{}"), packed(b"[]"), packed(b"no"))),
        {"omitted": "many"},
    ],
)
def test_an_unreadable_cursor_reads_everything_again(data: dict[str, object]) -> None:
    assert Cursor.from_dict({"version": 1, **data}) == Cursor(unreadable=True)
    assert Cursor.from_dict("text") == Cursor(unreadable=True)


def test_log_with_an_invalid_date_is_read_again() -> None:
    cursor = Cursor()
    for time in (at(1), "2026-13-41T10:00:02.000000000Z"):
        cursor.position("u", "main").advance(time)
    assert not Cursor.from_dict(cursor.to_dict()).has("u", "main")


@pytest.mark.parametrize(("seconds_per_line", "spread", "restarts"), [(60, 600, 4), (600, 86_400, 1)])
def test_positions_of_a_thousand_slow_containers_fit(seconds_per_line: float, spread: float, restarts: int) -> None:
    rng, cursor = random.Random(1), Cursor()
    for number in range(1000):
        position = cursor.position(f"u{number}", "pytorch")
        position.restart = rng.randrange(restarts)
        seconds = rng.random() * spread
        for _ in range(60):
            position.advance(later(seconds))
            seconds += rng.expovariate(1 / seconds_per_line)
    assert "omitted" not in cursor.to_dict()


FIXTURE = Path(__file__).parents[1] / "formats" / "v1" / "cursor.json"


def recorded_cursor() -> Cursor:
    """The positions in the fixture."""
    cursor = Cursor()
    for n in range(30):
        cursor.position("0b6f4c6e-6d1c-4a53-9a51-6d6c6f1b2f10", "pytorch").advance(at(n / 7))
    cursor.position("9f1d7f4e-22a4-4f0e-8f0e-2b9f1f6e7a11", "pytorch")
    key = Cursor.key("9f1d7f4e-22a4-4f0e-8f0e-2b9f1f6e7a11", "init-pytorch")
    cursor.positions[key] = Position(2, complete=True)
    cursor.names[Cursor.key("0b6f4c6e-6d1c-4a53-9a51-6d6c6f1b2f10", "pytorch")] = "train-1-master-0/pytorch"
    return cursor


@pytest.mark.parametrize("more", [{}, {"version": 9, "added": [1]}])
def test_first_version_can_be_read(more: dict[str, object]) -> None:
    read = Cursor.from_dict({**json.loads(FIXTURE.read_text()), **more})
    expected = recorded_cursor()
    assert read.names == expected.names
    assert read.positions.keys() == expected.positions.keys()
    for key, position in expected.positions.items():
        found = read.positions[key]
        assert (found.restart, found.complete, found.last, found.at_last, found.base) == (
            position.restart, position.complete, position.last, position.at_last, position.base
        )  # fmt: skip


@given(log_files(), st.booleans(), st.integers(0, 40), st.booleans())
def test_lines_are_counted_alike_together(file: list[Line], ordered: bool, alone: int, after_a_takeover: bool) -> None:
    times = [time for time, _ in (sorted(file) if ordered else file)]
    position, each = (Position.at(0, at(29)) if after_a_takeover else Position() for _ in range(2))
    for time in times[:alone]:
        position.advance(time)
    position.advance_all(normal_times([f"{time} text" for time in times[alone:]]))
    for time in times:
        each.advance(time)
    assert position == each


@pytest.mark.parametrize(
    "line",
    [
        "",
        at(2),
        f"{at(2)[:-1]}+00:00 another format",
        f"{at(2)[:-5]}Z fewer digits",
        "failed to create fsnotify watcher: too many open files",
        f"{at(2)[:20]} {at(2)[21:]} a space",
    ],
)
def test_line_without_a_normal_time_needs_a_look(line: str) -> None:
    assert normal_times([f"{at(1)} a", line, f"{at(2)} b"]) == []
