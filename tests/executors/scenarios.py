"""What both executors must do: a training ends as its task does, and as docs/where-it-runs.md says."""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Callable

from tests.e2e.airflow import wait_for
from tests.e2e.chaos import check_end, reap
from tests.e2e.scenario import LINE, TASK, Begin, Stage

SETTINGS = {
    "AIRFLOW__CORE__PARALLELISM": "64",
    # no test stops a triggerer, and many tasks that start at once delay heartbeats
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "120",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",
    "TEST_ONE_TRIGGERER": "1",  # two on one host can't both serve their logs
}
NOT_AGAIN = re.compile(r"Not logged again: (some|at least|[\d,]+) ")
SHOWN_WITHIN = 60.0  # seconds from the end of a task until its log is complete
ENDLESS = 3600  # seconds: the test ends the training


def wait_running(stage: Stage) -> None:
    """Both replicas run, and the process that follows them does."""
    wait_for("both pods run", lambda: [pod.status.phase for pod in stage.kube.pods(stage.selector)] == ["Running"] * 2)
    if stage.dag.startswith("chaos_deferred"):
        stage.wait_followed()


def lines(stage: Stage, try_number: int = 1) -> dict[str, list[int]]:
    """The numbers of the lines that the UI shows, sorted, by replica."""
    found: dict[str, list[int]] = collections.defaultdict(list)
    for line in stage.log(try_number).splitlines():
        if match := LINE.search(line):
            found[match[1]].append(int(match[2]))
    return {replica: sorted(numbers) for replica, numbers in found.items()}


def check_shown(stage: Stage, seconds: int, try_number: int = 1) -> None:
    """The UI shows all lines of both replicas, none twice. The log says which can't be logged again.

    Those are lines of a pod that was deleted while it ran, as a failed job's Master is, or of a slow machine.
    """

    def shown() -> bool:
        found = lines(stage, try_number)
        missing = sum(len(set(range(seconds)) - set(found.get(replica, ()))) for replica in stage.replicas)
        told = NOT_AGAIN.findall(stage.log(try_number))
        once = all(len(numbers) == len(set(numbers)) for numbers in found.values())
        counted = sum(int(number.replace(",", "")) for number in told if number[0].isdigit())
        return once and (missing == counted or bool({"some", "at least"} & {*told}))

    try:
        wait_for("the whole log", shown, SHOWN_WITHIN)
    except AssertionError:
        raise AssertionError(f"{lines(stage, try_number)}\n{stage.log(try_number)[-6000:]}") from None


def parent(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def check_outcomes(begin: Begin, check_log: Callable[[Stage, int], None]) -> None:
    """Success and failure, with and without a deferral."""
    dags = ("chaos_worker", "chaos_deferred")
    stages = [(begin(dag, seconds=20, code=code), code) for dag in dags for code in (0, 3)]
    for stage, code in stages:
        check_end(stage, "failed" if code else "success")
        assert stage.ended_as("Failed" if code else "Succeeded")
    for stage, _ in stages:
        check_log(stage, 20)


def check_marked_and_cleared(begin: Begin) -> None:
    """A task that is marked as failed ends its training, and one that is cleared trains anew."""
    dags = ("chaos_worker", "chaos_deferred")
    marked = [begin(dag, seconds=ENDLESS) for dag in dags]
    cleared = [begin(dag, seconds_of_first_try=ENDLESS, seconds=15) for dag in dags]
    for stage in (*marked, *cleared):
        wait_running(stage)
    for stage in marked:
        stage.set_state("failed")
    for stage in cleared:
        stage.clear()
    for stage in marked:
        check_end(stage, "failed")
    for stage in cleared:
        check_end(stage, "success", jobs=2, try_number=2)


def check_adopted(*stages: Stage) -> None:
    """The retries follow the only jobs to their ends."""
    for stage in stages:
        stage.wait_try(2)
        stage.wait_state("running")
        stage.finish()
    for stage in stages:
        check_end(stage, "success", try_number=2)
        assert stage.ended_as("Succeeded")


def check_stopped(released: list[Stage], left: list[Stage]) -> None:
    """Workers of tasks without a retry were stopped.

    :param released: the task got SIGTERM, and released its job.
    :param left: it got none: the next run of the reaper releases the job.
    """
    stages = (*released, *left)
    for stage in stages:
        stage.excuse()
        # without a look at the worker's processes: orphans go on until they see that the task is over
        wait_for("it is failed", lambda s=stage: s.airflow.task(s.dag, s.run, TASK)["state"] == "failed")  # type: ignore[misc]
    for stage in released:
        stage.check_freed()
    assert [stage.gpus() for stage in left] == [2] * len(left)
    reap(left[0].airflow)
    for stage in stages:
        assert stage.gpus() == 0
        stage.check_created(1)
