"""A real triggerer of Airflow, with its supervisor and its runner, in front of a stand-in for the Kubernetes API."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.core.identity.names import JobRef, OnFinishAction
from airflow_provider_ktrain.engine.follow.deferral import Deferral, Handover
from airflow_provider_ktrain.engine.follow.options import Options

from . import cpu, memory, quantile, waited

Json = dict[str, Any]
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PATIENCE = 1800.0  # seconds; a loaded machine needs minutes to start a triggerer
TRAINING = "in_triggerer.Training"
_template: bytes | None = None  # a new database
SQLITE = 'WAIT = {"timeout": 30}\n'  # seconds that a writer waits for another one
SQLITE_SETTINGS = {
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS": "sqlite_of_bench.WAIT",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS_ASYNC": "sqlite_of_bench.WAIT",
}


def wait_for(what: str, look: Callable[[], Any], timeout: float = PATIENCE, tick: float = 0.2) -> Any:
    """Wait until `look` returns a true value; returns that value."""
    end = time.monotonic() + timeout
    while not (found := look()):
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {timeout:.0f} s")
        time.sleep(tick)
    return found


class StandIn:
    """The process of `standin.py`."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "standin.py"), json.dumps(parameters)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"]

    def ask(self, path: str, body: Any = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=60) as response:
            answer: Json = json.load(response)
        return answer

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for it."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
            "current-context": "x",
        }
        path.write_text(json.dumps(content))
        return path

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def deferred(
    name: str,
    uid: str,
    *,
    task_id: str = "train",
    map_index: int = -1,
    deployment: str = "bench-0",
    logs: str = "all",
    age: float | None = None,
) -> Json:
    """A deferred task that follows a job: entry of `Airflow.defer`.

    :param age: seconds since its handover. Default: unknown, so that no takeover is assumed.
    """
    ref = JobRef("PyTorchJob", "v1", "default", name, uid, name, deployment, name)
    options = Options(logs=logs, on_finish_action=OnFinishAction.DELETE_JOB)
    kwargs = Deferral(ref, options, Handover(handed_over_at=0.0 if age is None else time.time() - age)).to_dict()
    return {"task_id": task_id, "map_index": map_index, "classpath": TRAINING, "kwargs": kwargs}


def task(number: int, deployment: str = "bench-0") -> Json:
    """A deferred task that follows a job of the stand-in."""
    name = f"job-{number:05}"
    return deferred(name, f"uid-{name}", map_index=number, deployment=deployment)


def probe(file: Path, url: str) -> Json:
    """A deferred task that measures the event loop of the triggerer."""
    return {
        "task_id": "probe",
        "map_index": -1,
        "classpath": "in_triggerer.Probe",
        "kwargs": {"file": str(file), "url": url},
    }


class Airflow:
    """An Airflow that consists of a database and triggerers, without a scheduler and workers."""

    def __init__(self, home: Path, kubeconfig: Path, sql: str = "", **settings: str) -> None:
        """
        :param sql: URL of an empty database. Default: SQLite in `home`.
        """
        self.home = home
        self.sql = sql
        self.database = home / "airflow.db"
        self.kills = home / "kills.jsonl"
        (home / "config").mkdir(parents=True)
        (home / "config" / "sqlite_of_bench.py").write_text(SQLITE)
        connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(kubeconfig), "namespace": "default"}}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW")}
        self.env = {
            **inherited,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__API_AUTH__JWT_SECRET": "of-a-benchmark-that-runs-on-loopback-only-and-ends-soon",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": sql or f"sqlite:///{self.database}",
            **({} if sql else SQLITE_SETTINGS),
            "AIRFLOW__TRIGGERER__CAPACITY": "2000",
            "AIRFLOW_CONN_KUBERNETES_DEFAULT": json.dumps(connection),
            "BENCH_KILLS": str(self.kills),
            "PYTHONWARNINGS": "ignore",
            **settings,
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._migrate()

    def _migrate(self) -> None:
        """Create the tables. An SQLite database is copied from the one that this process has created before."""
        global _template
        if _template is not None and not self.sql:
            self.database.write_bytes(_template)
            return
        subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"], env=self.env, check=True, capture_output=True
        )
        if not self.sql:
            _template = self.database.read_bytes()

    def defer(self, tasks: Sequence[Json]) -> None:
        """Write deferred tasks into the database."""
        done = subprocess.run(
            [sys.executable, str(HERE / "defer.py")],
            env=self.env,
            input=json.dumps({"tasks": list(tasks)}),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])

    def run(self, component: str, name: str = "") -> Component:
        """Start a component, which is a triggerer or the API server."""
        options = ["--skip-serve-logs"] if component == "triggerer" else []
        with (self.home / f"{name or component}.out").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "airflow", component, *options],
                env=self.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.processes[name or component] = process
        return Component(process.pid)

    def kill(self, name: str) -> None:
        """Kill the processes of a component."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def mark_failed(self, map_indexes: Sequence[int]) -> None:
        """What marking tasks failed changes in the database; the API server's own time is left out."""
        with contextlib.closing(sqlite3.connect(self.database, timeout=60)) as database, database:
            database.executemany(
                "UPDATE task_instance SET state = 'failed' WHERE task_id = 'train' AND map_index = ?",
                [(index,) for index in map_indexes],
            )

    def steps(self) -> dict[str, dict[str, float]]:
        """The times of the kills' steps, by job."""
        found: dict[str, dict[str, float]] = {}
        for line in self.kills.read_text().splitlines() if self.kills.exists() else ():
            step = json.loads(line)
            found.setdefault(step["job"], {})[step["step"]] = step["at"]
        return found

    def logs(self) -> list[Path]:
        """The log files that triggerers have written."""
        return sorted((self.home / "logs").glob("dag_id=bench/**/*.trigger.*.log"))

    def stop(self) -> None:
        for name in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                self.kill(name)


class Component:
    """The processes of a triggerer: the supervisor, and the runner with the event loop."""

    def __init__(self, pid: int) -> None:
        self.supervisor = pid
        self.runner = 0

    def find_runner(self) -> int:
        """Find the child of the supervisor."""
        children = [
            int(entry.parent.name) for entry in Path("/proc").glob("[0-9]*/stat") if _parent(entry) == self.supervisor
        ]
        self.runner = max(children, key=lambda pid: memory(pid), default=0)
        return self.runner

    def cpu(self) -> dict[str, float]:
        return {"runner": cpu(self.runner), "supervisor": cpu(self.supervisor)}

    def waited(self) -> dict[str, float]:
        return {"runner": waited(self.runner), "supervisor": waited(self.supervisor)}

    def memory(self) -> dict[str, float]:
        return {"runner": memory(self.runner), "supervisor": memory(self.supervisor)}


def _parent(entry: Path) -> int:
    with contextlib.suppress(OSError):
        return int(entry.read_text().rpartition(")")[2].split()[1])
    return 0


class ProbeFile:
    """What the probe in a triggerer has written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[Json]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def between(self, began: float, ended: float) -> dict[str, float | None]:
        """Quantiles in ms between two times of `time.monotonic`."""
        rows = [row for row in self.rows() if began <= row["at"] <= ended]
        found = {
            f"{name} p{100 * q:.0f}": quantile([value for row in rows for value in row[key]], q)
            for name, key in (("lag", "late"), ("busy", "busy"), ("watch", "watch"))
            for q in (0.5, 0.99)
        }
        return {key: None if value is None else 1000 * value for key, value in found.items()}


@contextlib.contextmanager
def triggerer(
    parameters: Mapping[str, Any], tasks: Sequence[Json], sql: str = "", **settings: str
) -> Iterator[tuple[Airflow, Component, StandIn, ProbeFile]]:
    """A running triggerer with these tasks and a probe, when it has created all triggers. `sql` as for `Airflow`."""
    stand_in = StandIn(parameters)
    with tempfile.TemporaryDirectory(prefix="ktrain-bench-") as folder:
        home = Path(folder)
        airflow = Airflow(home / "airflow", stand_in.kubeconfig(home / "kubeconfig"), sql, **settings)
        file = ProbeFile(home / "probe.jsonl")
        try:
            airflow.defer([*tasks, probe(file.path, stand_in.url)])
            component = airflow.run("triggerer")
            wait_for("the triggerer runs the probe", file.rows)
            component.find_runner()
            # every trigger logs as soon as it follows its job
            wait_for("all triggers follow their jobs", lambda: len(airflow.logs()) > len(tasks), tick=2.0)
            wait_for("the supervisor has loaded Airflow's API", lambda: file.rows()[-1]["warm"], tick=2.0)
            yield airflow, component, stand_in, file
        finally:
            airflow.stop()
            stand_in.end()
