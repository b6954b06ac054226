"""Checks after each chaos test: the number of jobs ever created, the pods that hold GPUs, and the logs."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import urllib3
from airflow.triggers.base import BaseTrigger
from kubernetes import client, watch

from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.state.status import Phase, phase_of, wants_suspension
from tests.clusters import TestCluster, require
from tests.e2e.airflow import WITHIN, Airflow
from tests.e2e.kube import Kube, selector_of

T = TypeVar("T")
TASK = "train"
REPLICAS = {"PyTorchJob": ("Master 0", "Worker 0"), "TrainJob": ("node 0", "node 1")}
#: Parametrizes a test over all kinds: it passes the kind to `begin`.
of_each_kind = pytest.mark.parametrize("kind", [PYTORCHJOB, TRAINJOB], ids=["pytorchjob", "trainjob"])
FREED_WITHIN = 240.0  # seconds from the task's end until its pods hold no GPU: 60, and a margin for a loaded machine
UNAVAILABLE = (client.ApiException, urllib3.exceptions.HTTPError, OSError)  # the API server may be unavailable
LINE = re.compile(r"\[(\w+ \d+)\] line (\d+)$")
AGAIN = "(again, after a takeover)"


class Watcher:
    """Every job or pod ever created, in its last state, by uid. It goes on after the API server was unavailable.

    :param pods: whether pods are watched. Default: the jobs of the kind of `kube`.
    """

    def __init__(self, kube: Kube, *, pods: bool = False) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.order: list[str] = []  # the uids in order of creation
        self.deleted: set[str] = set()  # uids
        self.suspended: set[str] = set()  # uids of jobs that were suspended before they had ended
        self._kube = kube
        self._list: Callable[..., Any] = kube.custom.list_namespaced_custom_object
        self._of: tuple[str, ...] = kube.resource
        if pods:
            self._list, self._of = kube.core.list_namespaced_pod, (kube.namespace,)
        self._version = ""  # seen so far
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watcher:
        self._version = self._kube.version()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        complete = False
        while not complete:
            last = self._over.wait(0.1)  # the last watch begins after the end, so that no earlier change is missed
            with contextlib.suppress(*UNAVAILABLE):
                # continues where it stopped, so that no object is too short-lived to be seen
                for event in watch.Watch().stream(
                    self._list, *self._of, resource_version=self._version, timeout_seconds=1 if last else 5
                ):
                    self._take(event["type"], event["raw_object"])
                complete = last

    def _take(self, change: str, found: dict[str, Any]) -> None:
        uid = found["metadata"]["uid"]
        if uid not in self.objects:
            self.order.append(uid)
        self.objects[uid] = found
        if change == "DELETED":
            self.deleted.add(uid)
        elif wants_suspension(found) and not terminal(found):
            self.suspended.add(uid)
        self._version = found["metadata"]["resourceVersion"]


def terminal(job: dict[str, Any]) -> str:
    """`Succeeded` or `Failed`, by the job's conditions; empty while the job hasn't ended."""
    phase = phase_of(job)
    return str(phase) if phase in (Phase.SUCCEEDED, Phase.FAILED) else ""


@dataclass
class Stage:
    """One run of a chaos DAG, with access to its jobs, its task and its log."""

    airflow: Airflow
    cluster: TestCluster
    kube: Kube
    watcher: Watcher
    dag: str
    pods: Watcher
    run: str = ""
    excused: set[str] = field(default_factory=set)  # defects that the test itself causes

    def start(self, **conf: Any) -> Stage:
        self.run = self.airflow.trigger(self.dag, conf)
        return self

    def wait(self, what: str, look: Callable[[], T | None], within: float = WITHIN) -> T:
        """Wait until `look` returns a true value; returns that value. A failure says what the run's tasks do."""
        try:
            return self.airflow.wait(what, look, within)
        except AssertionError as e:
            tasks = self.airflow.tasks(self.dag, self.run)
            found = ", ".join(f"{task['task_id']} is {task['state']} (try {task['try_number']})" for task in tasks)
            log = self.log(max((task["try_number"] for task in tasks if task["task_id"] == TASK), default=1))
            raise AssertionError(f"{e}; {found}\n{log[-10_000:]}") from None

    # the cluster

    @property
    def replicas(self) -> tuple[str, str]:
        """The replicas of the job, by their names in its log."""
        return REPLICAS[self.kube.kind.name]

    @property
    def selector(self) -> str:
        return selector_of(self.dag, self.run)

    def created(self) -> list[dict[str, Any]]:
        """All jobs that this run ever created."""
        labels = dict(pair.split("=") for pair in self.selector.split(","))
        jobs = list(self.watcher.objects.values())
        return [j for j in jobs if labels.items() <= (j["metadata"].get("labels") or {}).items()]

    def wait_created(self, number: int = 1) -> dict[str, Any]:
        return self.wait(f"{number} jobs are created", lambda: self.created()[number - 1 :])[0]

    def job(self) -> dict[str, Any] | None:
        """The job that currently exists."""
        mine = {c["metadata"]["uid"] for c in self.created()}
        return next((j for j in self.kube.jobs() if j["metadata"]["uid"] in mine), None)

    def ended(self) -> bool:
        """Whether a job of this run has succeeded or failed."""
        return any(terminal(job) for job in self.created())

    def ended_as(self, end: str) -> bool:
        """Whether a job of this run has ended so: `Succeeded` or `Failed`."""
        return any(terminal(job) == end for job in self.created())

    def gpus(self) -> int:
        return self.kube.gpus_held(self.selector)

    def delete_job(self) -> None:
        """Delete the job, as another user."""
        self.excuse()
        self.kube.delete(self.wait_created()["metadata"]["name"])

    def excuse(self, *more: str) -> None:
        """From now on, the test ends the job before its end."""
        self.excused |= {"deleted alive", "set back", *more}

    def answers(self) -> bool:
        with contextlib.suppress(*UNAVAILABLE):
            self.kube.version()
            return True
        return False

    def check_freed(self, within: float = FREED_WITHIN) -> None:
        """Wait until no pod of this run holds a GPU; fails after `within` seconds."""

        def free() -> bool:
            with contextlib.suppress(*UNAVAILABLE):
                return not self.gpus()
            return False

        self.wait(f"no pod of {self.dag} holds a GPU", free, within)

    def check_succeeded_job(self) -> None:
        """The job is deleted. Below Airflow 3.3 it is kept for a retry: see docs/guarantees.md."""
        kept = not hasattr(BaseTrigger, "on_kill")
        assert bool(self.job()) is kept

    def check_created(self, number: int) -> None:
        names = [j["metadata"]["name"] for j in self.created()]
        assert len(names) == number, f"{number} jobs expected, created were {names}"

    # the task

    def wait_state(self, *states: str, timeout: float = WITHIN) -> dict[str, Any]:
        return self.airflow.wait_state(self.dag, self.run, TASK, *states, timeout=timeout)

    def wait_try(self, number: int) -> None:
        def reached() -> bool:
            return bool(self.airflow.task(self.dag, self.run, TASK)["try_number"] >= number)

        self.wait(f"try {number}", reached)

    def wait_followed(self, try_number: int = 1) -> None:
        """Wait until a triggerer runs the task's trigger; before that, no process reacts to changes of the task."""
        self.wait_state("deferred")
        self.wait_line(f"trigger {self.dag}/", try_number)

    def triggerer(self) -> str:
        """The name of the triggerer that has the task's trigger."""
        return self.wait("a triggerer has it", lambda: self.airflow.triggerer_of(self.dag, self.run, TASK))

    def set_state(self, state: str) -> None:
        self.excuse()
        self.airflow.set_state(self.dag, self.run, TASK, state)

    def kill_task(self, number: signal.Signals) -> None:
        if number is signal.SIGTERM and "retr" not in self.dag:  # without a retry, this ends the job
            self.excuse()
        self.airflow.kill_task(self.dag, self.run, TASK, number)

    def finish(self) -> None:
        """Let the programs end as if their seconds had passed."""
        pathlib.Path(self.airflow.env["CHAOS_STEPS"], f"{self.dag}.{self.run}.finish").touch()

    def clear(self) -> None:
        self.excuse("trained twice")
        self.airflow.clear(self.dag, self.run, TASK)

    # its log

    def log(self, try_number: int = 1) -> str:
        return self.airflow.log(self.dag, self.run, TASK, try_number)

    def wait_line(self, text: str, try_number: int = 1) -> None:
        self.wait(f"{text!r} in the log", lambda: text in self.log(try_number))

    def segments(self, try_number: int) -> list[dict[str, list[int]]]:
        """The numbered lines that each process wrote to the log of a try, by replica: earlier ones first.

        A record may have several lines. After a takeover, blocks with the earlier lines come between the new ones.
        """
        segments = []
        folder = self.airflow.home / "logs" / f"dag_id={self.dag}" / f"run_id={self.run}" / f"task_id={TASK}"
        for file in sorted(folder.glob(f"attempt={try_number}.log*")):
            earlier: dict[str, list[int]] = {}
            numbers: dict[str, list[int]] = {}
            for record in file.read_text().splitlines():
                text = json.loads(record)["event"]
                for line in text.splitlines():
                    if found := LINE.match(line):
                        (earlier if AGAIN in text else numbers).setdefault(found[1], []).append(int(found[2]))
            segments.append(
                {replica: earlier.get(replica, []) + numbers.get(replica, []) for replica in earlier | numbers}
            )
        return segments

    def check_lines(self, seconds: int, try_number: int = 1) -> None:
        """All lines of both replicas arrived; within one process, no line was skipped or repeated."""
        segments = self.segments(try_number)
        for replica in self.replicas:
            parts = [numbers[replica] for numbers in segments if replica in numbers]
            for numbers in parts:
                assert numbers == list(range(numbers[0], numbers[-1] + 1)), f"{replica} in one process: {numbers}"
            assert sorted({n for numbers in parts for n in numbers}) == list(range(seconds)), f"{replica}: {parts}"


Begin = Callable[..., Stage]


@contextlib.contextmanager
def beginning(airflow: Airflow, cluster: TestCluster, stages: list[Stage]) -> Iterator[Begin]:
    """A function that starts a run of a chaos DAG; `kind=` selects that DAG for a kind other than PyTorchJob.

    `start=False` leaves the start to the test: for faults that would keep the stage from watching the jobs.

    :param stages: gets each stage.
    """
    with contextlib.ExitStack() as watchers:
        watched: dict[str, Watcher] = {}

        def watcher(kube: Kube, *, pods: bool = False) -> Watcher:
            """The one of all stages: each takes seconds to end."""
            what = "pods" if pods else kube.kind.name
            if what not in watched:
                watched[what] = watchers.enter_context(Watcher(kube, pods=pods))
            return watched[what]

        def begin(dag: str, kind: Kind = PYTORCHJOB, start: bool = True, **conf: Any) -> Stage:
            require(cluster, kind, runtime="torch-distributed")
            kube = Kube(str(cluster.kubeconfig), cluster.namespace, kind)
            suffix = "" if kind is PYTORCHJOB else f"_{kind.name.lower()}"
            stage = Stage(airflow, cluster, kube, watcher(kube), dag + suffix, watcher(kube, pods=True))
            stages.append(stage)
            return stage.start(**conf) if start else stage

        yield begin
