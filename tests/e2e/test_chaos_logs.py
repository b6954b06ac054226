"""Logs as in production: each process has its own disk, and S3 is the remote log storage.

The tests check what the UI's API returns after the task has ended, unless stated otherwise.
"""

from __future__ import annotations

import collections
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator

import pytest

from tests.clusters import TestCluster
from tests.e2e import s3
from tests.e2e.airflow import Airflow, running, wait_for
from tests.e2e.chaos import QUICK, begin, check_end, cluster, triggerers
from tests.e2e.conftest import DAGS
from tests.e2e.scenario import LINE, TASK, Begin, Stage

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
EARLY = 6  # lines that the program writes before those that it writes at once
UPLOADED_WITHIN = 60.0  # seconds from the task's end until its whole log is visible
FAILURE = re.compile(r"^Training\w*Error: (.+)$", re.MULTILINE)  # the exception that fails the task: its first line
LINES, PAUSE = 900, 0.066  # 15 lines a second for a minute
NOT_AGAIN = re.compile(r"(?:at least )?([\d,]+) lines? of \S+ between \S+ and \S+ are not logged again")
ENDS_WITHIN = 120.0  # seconds from the job's end to that of its task: 30 for earlier lines, and a margin for the load
WROTE = re.compile(r"^\[(\w+ \d+)\] wrote (\d+) lines$", re.MULTILINE)  # the last line of a replica
REPEATED = re.compile(r"lines since \d\d:\d\d:\d\d may be repeated: ")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.S3]:
    with s3.running(tmp_path_factory.mktemp("s3")) as started:
        yield started


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, storage: s3.S3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """An Airflow whose processes share no disk."""
    dags, home, steps = (tmp_path_factory.mktemp(name) for name in ("dags", "airflow", "steps"))
    (dags / "chaos_logs.py").symlink_to(DAGS / "chaos_logs.py")
    with running(home, cluster, dags, CHAOS_STEPS=str(steps), **QUICK, **storage.settings) as started:
        yield started


def numbers(log: str) -> dict[str, collections.Counter[int]]:
    """How often each numbered line of each replica occurs in a log."""
    found: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for line in log.splitlines():
        if match := LINE.match(line):
            found[match[1]][int(match[2])] += 1
    return found


def missing(log: str) -> dict[str, int] | None:
    """How many lines are missing, by replica. None: the last line of a replica, with their number, is."""
    found, wrote = numbers(log), {name: int(lines) for name, lines in WROTE.findall(log)}
    return {name: wrote[name] - len(found[name]) for name in wrote} if len(wrote) == 2 else None


def counted(log: str) -> int:
    """How many lines the log says are not logged again."""
    return sum(int(count.replace(",", "")) for count in NOT_AGAIN.findall(log))


def check_log(stage: Stage) -> str:
    """No line is missing, and repeated lines are announced; returns the log."""

    def settled() -> str | None:
        log = stage.log()
        seen.append(missing(log))
        return log if seen[-1] is not None and not any(seen[-1].values()) else None

    seen: list[dict[str, int] | None] = []
    try:
        log = wait_for("the whole log", settled, UPLOADED_WITHIN)
    except AssertionError:
        raise AssertionError(f"lines are missing: {seen[-1]}; the log ends:\n{stage.log()[-6000:]}") from None
    repeated = {name: sum(n > 1 for n in counts.values()) for name, counts in numbers(log).items()}
    assert not any(repeated.values()) or REPEATED.search(log), f"lines repeated without a word: {repeated}"
    return log


def check_accounted_for(stages: list[Stage]) -> None:
    """Each line is there, or counted. How many are counted depends on the load: they are logged again for seconds."""

    def accounted_for() -> bool:
        logs = [stage.log() for stage in stages]
        seen[:] = [(None if (lines := missing(log)) is None else sum(lines.values()), counted(log)) for log in logs]
        return all(missed == told for missed, told in seen)

    seen: list[tuple[int | None, int]] = []
    try:
        wait_for("all lines", accounted_for, UPLOADED_WITHIN)
    except AssertionError:
        logs = "\n".join(LINE.sub("", stage.log())[-3000:] for stage in stages)
        raise AssertionError(f"missing and counted lines: {seen}; the logs, without lines, end:\n{logs}") from None


def logged(airflow: Airflow, name: str, stage: Stage) -> set[int]:
    """The numbers of the lines of worker 0 on the disk of a component."""
    folder = airflow.log_folder(name) / f"dag_id={stage.dag}" / f"run_id={stage.run}" / f"task_id={TASK}"
    text = "\n".join(file.read_text() for file in folder.glob("attempt=1.log*"))
    return {int(n) for n in re.findall(r"\[Worker 0\] line (\d+)", text)}


def trigger_logs(storage: s3.S3, stage: Stage) -> str:
    """The events of the trigger logs that were uploaded."""
    below = f"dag_id={stage.dag}/run_id={stage.run}/task_id={TASK}/attempt=1.log.trigger."
    lines = [line for text in storage.objects(below).values() for line in text.splitlines()]
    return "\n".join(str(json.loads(line).get("event")) for line in lines)


def test_deferred_log_is_live_and_complete(begin: Begin, storage: s3.S3) -> None:
    stage = begin("chaos_logs", lines=EARLY, seconds=600)
    stage.wait_state("deferred")
    stage.wait_line("Log lines from the trigger appear here when the trigger ends")  # the worker uploads its log later
    stage.wait_line(f"[Worker 0] line {EARLY + 10}")
    stage.wait_state("deferred", timeout=0)
    stage.finish()
    check_end(stage, "success")
    check_log(stage)
    assert "on 2 GPUs" in trigger_logs(storage, stage), "who follows the job logs its summary"


def test_triggerer_and_its_disk_are_lost_after_14000_lines(begin: Begin, triggerers: Airflow) -> None:
    stage = begin("chaos_logs", lines=14_000, seconds=600)
    stage.wait_state("deferred")
    wait_for("the triggerer has the lines", lambda: max(logged(triggerers, "triggerer", stage), default=0) > 14_000)
    triggerers.end("triggerer")
    shutil.rmtree(triggerers.log_folder("triggerer"))
    triggerers.run("triggerer", "triggerer-2")
    wait_for("the other one follows", lambda: max(logged(triggerers, "triggerer-2", stage), default=0) > 14_000)
    stage.finish()
    check_end(stage, "success")
    check_accounted_for([stage])


def test_stalled_triggerer_resumes_after_a_takeover(begin: Begin, triggerers: Airflow) -> None:
    stage = begin("chaos_logs", lines=500, seconds=600)
    stage.wait_state("deferred")
    wait_for("the triggerer follows", lambda: max(logged(triggerers, "triggerer", stage), default=0) > 500)
    triggerers.run("triggerer", "triggerer-2")
    triggerers.wait_triggerers(2)
    triggerers.signal("triggerer", signal.SIGSTOP)
    wait_for("the other one logs earlier lines", lambda: len(logged(triggerers, "triggerer-2", stage)) > 400)
    triggerers.signal("triggerer", signal.SIGCONT)
    stage.finish()
    check_end(stage, "success")
    check_log(stage)


def test_trigger_logs_the_cause_of_a_failure(begin: Begin, storage: s3.S3) -> None:
    stage = begin("chaos_logs", lines=EARLY, seconds=20, code=3)
    check_end(stage, "failed")
    check_log(stage)
    cause = wait_for("the cause", lambda: FAILURE.findall(stage.log()), UPLOADED_WITHIN)[0]
    assert cause in trigger_logs(storage, stage)


def test_ends_after_a_takeover_do_not_wait_for_earlier_lines(begin: Begin, triggerers: Airflow) -> None:
    stages = [begin("chaos_logs", lines=EARLY, seconds=LINES, pause=PAUSE) for _ in range(4)]
    for stage in stages:
        stage.wait_state("deferred")
    wait_for("the triggerer has lines of all", lambda: all(201 in logged(triggerers, "triggerer", s) for s in stages))
    triggerers.end("triggerer")
    shutil.rmtree(triggerers.log_folder("triggerer"))
    triggerers.run("triggerer", "triggerer-2")
    for stage in stages:
        wait_for("the end of the job", stage.ended)
    began = time.monotonic()
    for stage in stages:
        check_end(stage, "success")
    assert time.monotonic() - began < ENDS_WITHIN * len(stages)
    check_accounted_for(stages)
    assert all(REPEATED.search(stage.log()) for stage in stages)
    assert all("succeeded after" in stage.log() for stage in stages)
