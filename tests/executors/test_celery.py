"""The CeleryExecutor: real workers, Redis as broker, PostgreSQL for results. Each component has its own log disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.clusters import TestCluster
from tests.clusters import cluster as a_cluster
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.chaos import REAPER, chaos_airflow, check_end, reap
from tests.e2e.scenario import TASK, Begin, Stage
from tests.executors import broker
from tests.executors.broker import Redis
from tests.executors.scenarios import (
    ENDLESS,
    SETTINGS,
    check_adopted,
    check_marked_and_cleared,
    check_outcomes,
    check_shown,
    check_stopped,
    parent,
    wait_running,
)

pytestmark = [pytest.mark.executors, pytest.mark.timeout(1200)]

DEFAULT, GPU, SHORT, CANCELS = "default", "gpu", "short", "cancels"


class Workers:
    """`airflow celery worker`, each with a name of its own, on machines with log disks of their own."""

    def __init__(self, airflow: Airflow) -> None:
        self._airflow = airflow
        self._groups: list[int] = []
        self._machines: set[str] = set()

    def start(self, *queues: str, machine: str = "machine-1", **env: str) -> str:
        """Start a worker for these queues; returns its name."""
        airflow, name = self._airflow, f"worker-{len(self._groups) + 1}"
        log_disk = {"AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(airflow.log_folder(machine))}
        if machine not in self._machines:
            self._machines.add(machine)
            host = airflow.hosts.setdefault(machine, f"127.0.2.{len(self._machines)}")
            # a worker's own log server listens on all addresses, with the same port as those of the other machines
            port = airflow.env["AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT"]
            server = f"airflow.utils.serve_logs.log_server:get_app --factory --host {host} --port {port}"
            airflow.run(server, machine, module="uvicorn", **log_disk)
        options = f"--skip-serve-logs --celery-hostname {name} --pid {airflow.home / name}.pid --concurrency 8"
        process = airflow.run(
            f"celery worker {options} --queues {','.join(queues)}", name,
            TEST_HOSTNAME=airflow.hosts[machine], **log_disk, **env,
        )  # fmt: skip
        self._groups.append(process.pid)
        return name

    def wait_ready(self, name: str) -> None:
        def ready() -> bool:
            assert self._airflow.processes[name].poll() is None, self.output(name)[-2000:]
            return f"celery@{name} ready." in self.output(name)

        wait_for(f"{name} is ready", ready)

    def output(self, name: str) -> str:
        return (self._airflow.home / f"{name}.out").read_text()

    def end(self) -> None:
        """Kill all workers, and what is left of those that have ended."""
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with a_cluster(gpus=128) as reached:
        yield reached


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    if importlib.util.find_spec("celery") is None:
        pytest.skip("no Celery provider: run `make test-executors`")
    with broker.running(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    settings = {
        **SETTINGS,
        "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
        "AIRFLOW__CELERY__BROKER_URL": redis.url,
        "CHAOS_QUEUES": " ".join([GPU, SHORT, CANCELS, *STOPS]),
        "TEST_OWN_DISKS": "1",
    }
    with chaos_airflow(cluster, tmp_path_factory, **settings) as started:
        yield started


@pytest.fixture(scope="module")
def workers(airflow: Airflow) -> Iterator[Workers]:
    """One worker runs, for the default queue."""
    started = Workers(airflow)
    try:
        started.wait_ready(started.start(DEFAULT))
        yield started
    finally:
        started.end()


def test_outcomes(begin: Begin, workers: Workers) -> None:
    check_outcomes(begin, check_shown)


def test_marked_and_cleared(begin: Begin, workers: Workers) -> None:
    check_marked_and_cleared(begin)


def kill_pool_processes(airflow: Airflow, worker: str, tasks: list[int]) -> None:
    for task in tasks:
        os.kill(parent(task), signal.SIGKILL)


def kill_tasks(airflow: Airflow, worker: str, tasks: list[int]) -> None:
    for task in tasks:
        os.kill(task, signal.SIGKILL)


def to_main(number: signal.Signals) -> Callable[[Airflow, str, list[int]], None]:
    return lambda airflow, worker, tasks: airflow.processes[worker].send_signal(number)


@dataclass(frozen=True)
class Stop:
    """
    :param act: gets the Airflow, the worker's name, and the processes of its tasks.
    :param signalled: whether the tasks get SIGTERM.
    :param grace: whether the worker is killed later, as after a grace period.
    """

    act: Callable[[Airflow, str, list[int]], None]
    signalled: bool = False
    grace: bool = False
    env: tuple[tuple[str, str], ...] = ()


#: By the queue of its worker.
STOPS = {
    "tasks_killed": Stop(kill_tasks),
    "pool_killed": Stop(kill_pool_processes),
    "killed": Stop(lambda airflow, worker, tasks: airflow.signal(worker, signal.SIGKILL)),
    "main_killed": Stop(to_main(signal.SIGKILL)),
    "warm": Stop(to_main(signal.SIGTERM), grace=True),
    "cold": Stop(to_main(signal.SIGQUIT), signalled=True),
    "group": Stop(
        lambda airflow, worker, tasks: os.killpg(airflow.processes[worker].pid, signal.SIGTERM), signalled=True
    ),
    "remapped": Stop(to_main(signal.SIGTERM), env=(("REMAP_SIGTERM", "SIGQUIT"),)),
}


def test_stopped_workers(begin: Begin, airflow: Airflow, workers: Workers) -> None:
    """Each way to stop a worker: of a task with a retry, and of one without. All at once, because each needs minutes.

    Some had a deferred task, too, which resumes on another machine.
    """
    names = {queue: workers.start(queue, **dict(stop.env)) for queue, stop in STOPS.items()}
    retried = {queue: begin(f"chaos_worker_retries_{queue}", seconds=ENDLESS) for queue in STOPS}
    alone = {queue: begin(f"chaos_worker_{queue}", seconds=ENDLESS) for queue in STOPS}
    for stage in (*retried.values(), *alone.values()):
        wait_running(stage)
    deferred = [begin(f"chaos_deferred_{queue}", seconds=150) for queue in ("cold", "killed")]
    for stage in deferred:
        wait_running(stage)
    tasks: dict[str, list[int]] = {}
    for queue, stop in STOPS.items():
        ids = [airflow.task(stage.dag, stage.run, TASK)["id"] for stage in (retried[queue], alone[queue])]
        tasks[queue] = [pid for ti_id in ids for pid in airflow.task_processes(ti_id)]
        assert len(tasks[queue]) == 2
        stop.act(airflow, names[queue], tasks[queue])
    for queue in (queue for queue, stop in STOPS.items() if stop.grace):
        for stage in (retried[queue], alone[queue]):
            lines = stage.log().count("[Worker 0] line")
            wait_for("the task goes on", lambda s=stage, n=lines: s.log().count("[Worker 0] line") > n + 5)  # type: ignore[misc]
        airflow.signal(names[queue], signal.SIGKILL)
    workers.start(*STOPS, machine="machine-2")
    check_stopped(
        released=[alone[queue] for queue, stop in STOPS.items() if stop.signalled],
        left=[alone[queue] for queue, stop in STOPS.items() if not stop.signalled],
    )
    check_adopted(*retried.values())
    for stage in deferred:
        check_end(stage, "success")
        check_shown(stage, 150)


def test_broker_is_away(begin: Begin, airflow: Airflow, workers: Workers, redis: Redis) -> None:
    """A task that resumes meanwhile fails at once, and a retry after the outage returns its result.

    Without one, the reaper logs that the training has succeeded.
    """
    running = begin("chaos_worker", seconds=120)
    alone = begin("chaos_deferred", seconds=ENDLESS)
    retried = begin("chaos_deferred_retry_in_a_minute", seconds=60)
    for stage in (running, alone, retried):
        wait_running(stage)
    redis.stop()
    alone.finish()
    alone.wait_state("failed")
    retried.wait_state("up_for_retry")
    redis.start()
    check_end(running, "success")
    check_end(alone, "failed")
    assert alone.ended_as("Succeeded")
    check_end(retried, "success", try_number=2)
    check_shown(running, 120)
    check_shown(retried, 60, try_number=2)
    run = reap(airflow)
    warning = "succeeded, but its task is failed.\nIf you clear the task, it trains again."
    wait_for("the reaper's log", lambda: warning in airflow.log(REAPER, run, "reap"))
    assert not alone.job()


def test_broker_restarts(begin: Begin, workers: Workers, redis: Redis) -> None:
    """Only a worker that is set to cancel its tasks stops them."""
    cancels = '{"worker_cancel_long_running_tasks_on_connection_loss": true}'
    workers.start(CANCELS, AIRFLOW__CELERY__EXTRA_CELERY_CONFIG=cancels)
    other, alone = begin("chaos_worker", seconds=ENDLESS), begin(f"chaos_worker_{CANCELS}", seconds=ENDLESS)
    retried = begin(f"chaos_worker_retries_{CANCELS}", seconds=ENDLESS)
    for stage in (other, alone, retried):
        wait_running(stage)
    alone.excuse()
    redis.stop()
    redis.start()
    check_adopted(retried)
    check_end(alone, "failed")
    other.finish()
    check_end(other, "success")


def test_only_workers_of_its_queue_run_a_task(begin: Begin, airflow: Airflow, workers: Workers) -> None:
    """It waits for one, also when it resumes: its GPUs are free by then."""
    stage = begin(f"chaos_deferred_{GPU}", seconds=60)
    stage.wait_state("queued")
    first = workers.start(GPU)
    wait_running(stage)
    airflow.end(first)
    wait_for("the training ends", stage.ended)
    stage.check_freed()
    assert stage.wait_state("queued")["try_number"] == 1
    workers.start(GPU, machine="machine-2")
    check_end(stage, "success")
    check_shown(stage, 60)


def test_redelivered_message_is_ignored(begin: Begin, workers: Workers) -> None:
    stage: Stage = begin(f"chaos_worker_{SHORT}", seconds=120)
    first = workers.start(SHORT)
    wait_running(stage)
    stage.wait_line("[Worker 0] line 12")
    second = workers.start(SHORT, AIRFLOW__CELERY_BROKER_TRANSPORT_OPTIONS__VISIBILITY_TIMEOUT="10")

    def ignored() -> bool:
        """By the one that takes the message: either."""
        return any("ignoring redelivered message" in workers.output(name) for name in (first, second))

    wait_for("the message is delivered again, and ignored", ignored)
    check_end(stage, "success")
    check_shown(stage, 120)
