"""The table of trainings: what it shows, what it reads, and how often."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import Cost, Listed, Selection, TaskRecord
from airflow_provider_ktrain.core.formats import total_usage, usage_of_try
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.plugin.stored_texts import HIDDEN_CAUSE
from airflow_provider_ktrain.plugin.trainings import CACHE_SECONDS, MAX_ROWS, OLD_READS, Filters, Shared, Trainings

NOW = 1000.0
READABLE = "team-a"
CAUSES = {0: ("out of memory", "Worker 3 ran out of memory"), 1: ("user code", "ValueError: no data")}


class Database:
    """120 trainings, newest first, of two DAGs in turns; the newest ten run. Counts what is read."""

    def __init__(self) -> None:
        self.listed = [self._listed(n) for n in range(120)]
        self.reads: Counter[str] = Counter()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.selections: list[Selection] = []

    def _listed(self, n: int) -> Listed:
        key = TaskInstanceId(("team-a", "team-b")[n % 2], f"run-{n:03}", "train")
        record = TaskRecord(key, "deferred" if n < 10 else "failed", 2, 0.0, None if n < 10 else 60.0)
        category, cause = CAUSES[n // 2 % 2] if n >= 10 else ("", "")
        summary = {
            "cause": cause, "category": category, "usage": {"tries": 2, "held": 3600.0, "wasted": 60.0},
            "metrics": {"loss": [0.5, 0.25]}, "parameters": {"lr": f"0.{n}", "seed": "1"},
        }  # fmt: skip
        return Listed(str(n), record, summary)

    def summarized_dags(self) -> dict[str, float]:
        self.reads["dags"] += 1
        return {"team-a": 0.0, "team-b": 86400.0}

    def _selected(self, selection: Selection, after: str) -> list[Listed]:
        self.selections.append(selection)
        self.may_answer.wait()
        found = self.listed[int(after) + 1 if after else 0 :]
        return [
            one
            for one in found
            if one.record.key.dag_id in selection.dag_ids and (selection.ids is None or one.position in selection.ids)
        ]

    def trainings(self, selection: Selection, after: str, most: int) -> list[Listed]:
        self.reads["trainings"] += 1
        return self._selected(selection, after)[:most]

    def costs(self, selection: Selection, after: str = "") -> Iterator[Cost]:
        self.reads["costs"] += 1
        for one in self._selected(selection, after):
            status = {"usage": {"held": "7200.0", "wasted": None}}  # a database's numbers are texts
            yield Cost(one.position, one.record.state, one.record.try_number, one.summary, status)

    def read_statuses(self, keys: Sequence[TaskInstanceId]) -> dict[TaskInstanceId, Mapping[str, Any]]:
        self.reads["statuses"] += len(keys)
        usage = {"held": 7200.0}
        return {key: {"phase": "Running", "phase_since": NOW - 90, "usage": usage} for key in keys}

    def rights(self, user: str, dag_ids: Iterable[str]) -> dict[str, bool]:
        readable = {"admin": {"team-a": True, "team-b": True}, "somebody": {"team-a": True}}
        return readable.get(user, {"team-a": True, "team-b": False})


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    """In place of Airflow's."""
    here = Database()
    for name in ("summarized_dags", "trainings", "costs", "read_statuses", "rights"):
        monkeypatch.setattr(compat_server, name, getattr(here, name))
    return here


def runs(shown: Any) -> list[str]:
    return [row["run_id"] for row in shown.rows]


def test_rows_of_running_and_ended_trainings(database: Database) -> None:
    rows = Trainings().view("admin", Filters(), NOW).rows
    first, ended = rows[0], rows[10]
    assert (first["state"], first["in_state"], first["lasted"]) == ("Running", "1 min 30 s", "16 min 40 s")
    assert first["held"] == "3 h", "of the tries before and of this one so far"
    assert (ended["state"], ended["lasted"], ended["held"]) == ("Failed", "1 min", "1 h")
    assert (ended["cause"], ended["category"]) == ("ValueError: no data", "user code")
    assert ended["metrics"] == [("loss", "0.5", "0.25")]
    assert ended["parameters"] == {"lr": "0.10"}, "those of the other rows of this task differ only in this"


def test_row_of_a_killed_training_has_what_was_stored_last(database: Database) -> None:
    """No worker runs after a mark while the task is deferred: the summary is still the one of its beginning."""
    ended = database.listed[10]
    begun = {"state": "running", "usage": {"tries": 1, "held": 3600.0}}
    database.listed[10] = replace(ended, summary=begun)
    row = Trainings().view("admin", Filters(), NOW).rows[10]
    assert (row["state"], row["held"], row["held_note"]) == ("Failed", "3 h", "at least")


@pytest.mark.parametrize(
    ("tries", "own", "note"),
    [(2, {}, ""), (1, {}, "this try only"), (0, {}, "this try only"), (1, {"at_least": True}, "at least")],
    ids=["all", "Airflow below 3.3", "none", "the usage of the last one isn't known"],
)
def test_row_says_which_tries_its_time_lacks(database: Database, tries: int, own: Any, note: str) -> None:
    ended = database.listed[10]
    database.listed[10] = replace(ended, summary={"usage": {"tries": tries, "held": 3600.0, **own}})
    assert Trainings().view("admin", Filters(), NOW).rows[10]["held_note"] == note


@pytest.mark.parametrize("bounds", [[True], [False, True], [True, False]])
def test_row_of_tries_of_which_one_is_a_bound_says_so(database: Database, bounds: list[bool]) -> None:
    ended = database.listed[10]
    used = total_usage([usage_of_try({"held": 60.0, **({"at_least": True} if bound else {})}) for bound in bounds])
    record = replace(ended.record, try_number=len(bounds))
    database.listed[10] = replace(ended, record=record, summary={"state": "succeeded", "usage": used})
    assert Trainings().view("admin", Filters(), NOW).rows[10]["held_note"] == "at least"


def test_sums_have_the_last_try_of_running_and_killed_trainings_so_far(database: Database) -> None:
    """What a status had at last is the least: nothing is stored when a worker is killed."""
    assert Trainings().view("admin", Filters(), NOW).sums["held"] == "at least 140.0 h", "the newest ten run"
    del database.listed[:10]
    assert Trainings().view("admin", Filters(), NOW).sums["held"] == "110.0 h"
    ended = database.listed[0]
    database.listed[0] = replace(ended, summary={**ended.summary, "state": "running", "usage": {"tries": 1}})
    assert Trainings().view("admin", Filters(), NOW).sums["held"] == "at least 111.0 h", "it was killed in its try 2"
    database.listed[0] = replace(ended, summary={**ended.summary, "usage": {"tries": 1, "held": 3600.0}})
    assert Trainings().view("admin", Filters(), NOW).sums["held"] == "at least 110.0 h", "try 1 is not stored"


def test_pages_go_by_the_last_training_of_the_page_before(database: Database) -> None:
    trainings, pages, found, filters = Trainings(), list[int](), list[str](), Filters()
    while True:
        shown = trainings.view("admin", filters, NOW)
        pages.append(len(shown.rows))
        found += runs(shown)
        if not shown.next:
            break
        filters = Filters(after=shown.next.removeprefix("after="))
    assert pages == [MAX_ROWS, MAX_ROWS, 20]
    assert found == [f"run-{n:03}" for n in range(120)]
    assert shown.sums["count"] == "120", "of all pages"


def test_filters_by_cause_and_sums_of_what_is_left(database: Database) -> None:
    shown = Trainings().view("admin", Filters(category="out of memory", text="WORKER 3"), NOW)
    assert {row["category"] for row in shown.rows} == {"out of memory"}
    assert shown.sums == {"count": "54", "held": "54.0 h", "wasted": "0.9 h"}
    assert Trainings().view("admin", Filters(text="nothing says this"), NOW).rows == []


def test_database_selects_by_dag_state_and_day(database: Database) -> None:
    Trainings().view("admin", Filters(dag_id="team-b", state="failed", since="2026-11-28", until="2026-11-28"), NOW)
    (selection, *_) = database.selections
    assert (selection.dag_ids, selection.states) == (frozenset({"team-b"}), ("failed",))
    assert selection.since is not None
    assert selection.until is not None
    assert (selection.since.isoformat(), selection.until.isoformat()) == (
        "2026-11-28T00:00:00+00:00",
        "2026-11-29T00:00:00+00:00",
    )
    odd = Trainings().view("admin", Filters(state="no such state", since="yesterday"), NOW)
    assert len(odd.rows) == MAX_ROWS, "what can't be read asks for nothing"


def test_rows_of_other_dags_are_neither_shown_nor_counted(database: Database) -> None:
    shown = Trainings().view("somebody", Filters(), NOW)
    assert {row["dag_id"] for row in shown.rows} == {READABLE}
    assert (len(shown.rows), shown.sums["count"]) == (MAX_ROWS, "60")
    assert shown.since.startswith("1970-01-01")
    assert Trainings().view("somebody", Filters(dag_id="team-b"), NOW).rows == []


def test_causes_need_the_right_to_the_logs_of_their_dag(database: Database) -> None:
    shown = Trainings().view("reads no logs of team-b", Filters(), NOW)
    hidden = {(row["dag_id"], row["cause"] == HIDDEN_CAUSE) for row in shown.rows if row["cause"]}
    assert hidden == {("team-a", False), ("team-b", True)}
    for filters in (Filters(category="user code"), Filters(text="a")):
        found = Trainings().view("reads no logs of team-b", filters, NOW)
        assert {row["dag_id"] for row in found.rows} == {"team-a"}
        assert found.unsearched


def test_row_that_cannot_be_read_breaks_no_table(database: Database) -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    strange = {"cause": deep, "usage": 1, "parameters": [], "metrics": {"a": 1}}
    amounts: tuple[Any, ...] = ("nan", "1e400", 10**400, [], "an hour")
    odd: list[Mapping[str, Any]] = [compat_server.UNREADABLE, strange, *({"usage": {"held": one}} for one in amounts)]
    database.listed[10:17] = [Listed(one.position, one.record, odd[n]) for n, one in enumerate(database.listed[10:17])]
    shown = Trainings().view("admin", Filters(), NOW)
    assert len(shown.rows) == MAX_ROWS
    assert shown.rows[10]["state"] == "can't be read"
    assert shown.sums["held"] == "at least 133.0 h"


def test_all_viewers_share_what_is_read(database: Database) -> None:
    trainings = Trainings(Shared(cache_seconds=3600.0))
    for _ in range(100):
        shown = trainings.view("admin", Filters(), NOW)
    assert len(shown.rows) == MAX_ROWS
    assert database.reads == {"dags": 1, "costs": 1, "trainings": 1, "statuses": 10}


def test_table_is_read_again_when_the_cache_has_expired(database: Database) -> None:
    trainings = Trainings(Shared(cache_seconds=0.0))
    trainings.view("admin", Filters(), NOW)
    del database.listed[1:]
    assert len(trainings.view("admin", Filters(), NOW).rows) == 1
    assert database.reads == {"dags": 2, "costs": 2, "trainings": 2, "statuses": 11}


class Reader:
    """Reads when it may."""

    def __init__(self) -> None:
        self.reads = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self) -> str:
        self.reads += 1
        self.may_answer.wait()
        return "read"


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def test_viewers_do_not_wait_while_another_one_reads_again() -> None:
    now, read = [100.0], Reader()
    shared = Shared(cache_seconds=5.0, clock=lambda: now[0])
    shared.get("key", read)
    now[0] += 5.0
    read.may_answer.clear()
    with ThreadPoolExecutor(101) as viewers:
        first = viewers.submit(shared.get, "key", read)
        wait_until(lambda: read.reads == 2)
        others = [viewers.submit(shared.get, "key", read) for _ in range(100)]
        assert all(other.result(timeout=60) == "read" for other in others)
        assert not first.done()
        assert read.reads == 2
        read.may_answer.set()
        assert first.result(timeout=60) == "read"


@pytest.mark.parametrize("age", [None, CACHE_SECONDS * OLD_READS], ids=["nothing was read", "it is old"])
def test_viewers_do_not_wait_for_each_other_if_there_is_nothing_to_show(age: float | None) -> None:
    now, read = [100.0], Reader()
    shared = Shared(clock=lambda: now[0])
    if age is not None:
        shared.get("key", read)
        now[0] += age
    read.may_answer.clear()
    before = read.reads
    with ThreadPoolExecutor(2) as viewers:
        both = [viewers.submit(shared.get, "key", read) for _ in range(2)]
        wait_until(lambda: read.reads == before + 2)
        read.may_answer.set()
        assert [one.result(timeout=60) for one in both] == ["read", "read"]
