"""The records of container lines: their source, and times that Airflow's reader doesn't take for repetitions."""

from __future__ import annotations

import json
from typing import Any

from airflow.utils.log.file_task_handler import _interleave_logs
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, Kind
from airflow_provider_ktrain.engine.logs.line_logger import LineLogger
from airflow_provider_ktrain.engine.logs.log_line import LogLine


class Records:
    """A log that keeps its records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def _keep(self, level: str, event: str, fields: dict[str, Any]) -> None:
        self.records.append({"level": level, "event": event, **fields})

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        self._keep("info", event, kw)

    def warning(self, event: Any, *args: Any, **kw: Any) -> None:
        self._keep("warning", event, kw)

    def error(self, event: Any, *args: Any, **kw: Any) -> None:
        self._keep("error", event, kw)


def line(text: str, nanoseconds: int = 0, **more: Any) -> LogLine:
    time = f"2026-11-21T10:00:00.{nanoseconds:09d}Z"
    return LogLine(**{"pod": "p", "container": "main", "role": "Worker", "index": 1, "restart": 0, "time": time,
                      "text": text, **more})  # fmt: skip


def logged(*lines: LogLine, kind: Kind = PYTORCHJOB) -> list[dict[str, Any]]:
    log = Records()
    write = LineLogger(log, kind)
    for one in lines:
        write(one)
    return log.records


def test_a_line_has_its_replica_as_source_and_the_kubelets_time() -> None:
    assert logged(line("step 1", 123_456_789)) == [
        {
            "level": "info", "event": "[Worker 1] step 1", "logger": "Worker 1",
            "timestamp": "2026-11-21T10:00:00.123456Z",
        }
    ]  # fmt: skip


def test_an_init_container_is_named_in_the_text() -> None:
    (record,) = logged(line("fetched", container="fetch", init=True))
    assert (record["logger"], record["event"]) == ("Worker 1", "[Worker 1 fetch] fetched")


def test_the_only_replica_of_a_role_has_no_index() -> None:
    (record,) = logged(line("x", role="Launcher", index=0), kind=MPIJOB)
    assert (record["logger"], record["event"]) == ("Launcher", "[Launcher 0] x")


def test_notes_are_warnings_and_may_have_no_time() -> None:
    (record,) = logged(line("lines may be missing", time="", notice=True))
    assert record["level"] == "warning"
    assert "timestamp" not in record


@given(st.lists(st.tuples(st.sampled_from("aab"), st.integers(0, 4000)), max_size=40))
def test_airflow_shows_every_line(written: list[tuple[str, int]]) -> None:
    """Lines of one container in the order of its log, many within a microsecond, some equal."""
    time, lines = 0, []
    for text, step in written:
        time += step  # nanoseconds
        lines.append(line(text, time))
    records = logged(*lines)
    shown = list(_interleave_logs(json.dumps(record) for record in records))
    assert [entry.event for entry in shown] == [f"[Worker 1] {one.text}" for one in lines]
    for record, one in zip(records, lines, strict=True):
        late = int(record["timestamp"][20:26]) - int(one.time[20:26])
        assert 0 <= late < len(lines), "at most a microsecond for each equal line"
