"""Airflow's own processes for end-to-end tests: scheduler, triggerers, API server, DAG processor.

They use SQLite and one triggerer, or PostgreSQL and two triggerers, as production does: see `tests.e2e.database`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from signal import Signals
from typing import Any, TypeVar

from tests import factories, leaks
from tests.clusters import IMAGE, TestCluster
from tests.e2e import database
from tests.e2e.database import free_port

T = TypeVar("T")
ROOT = pathlib.Path(__file__).resolve().parents[2]
TICK = 0.5  # seconds between checks of a condition: most are requests to the API server
#: Seconds until a condition counts as never true: a task with a retry took 500 at a load of 50. A test's own limit is
#: longer, because it ends the test process and doesn't say what was waited for.
WITHIN = 600.0
WORKER_ENDS_WITHIN = 60.0  # seconds from the end of a try until its worker has written its log
ENDED = ("success", "failed", "skipped", "upstream_failed", "removed")  # states of a task
COMPONENTS = ("api-server", "scheduler", "dag-processor")
# each component has its own loopback address, so that Airflow's jobs and log servers can be distinguished
HOSTNAME = """import os


def own():
    return os.environ.get("TEST_HOSTNAME", "127.0.0.1")
"""
# SQLite has one writer at a time. The others wait 5 s by default, which is too short on a loaded machine.
SQLITE = """WAIT = {"timeout": 30}  # seconds
"""
SQLITE_SETTINGS = {
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS": "sqlite_of_test.WAIT",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS_ASYNC": "sqlite_of_test.WAIT",
}
LOCKED_FOR = 120.0  # seconds that a request is repeated while SQLite is locked


def wait_for(what: str, look: Callable[[], T | None], timeout: float = WITHIN) -> T:
    """Wait until `look` returns a true value; returns that value."""
    return factories.wait_for(what, look, timeout, TICK)


class Airflow:
    """One Airflow in its own home directory. Components are process groups that can be stopped and killed by name."""

    def __init__(
        self, home: pathlib.Path, cluster: TestCluster, dags: pathlib.Path, sql: str = "", **settings: str
    ) -> None:
        """
        :param home: AIRFLOW_HOME, an empty directory.
        :param dags: the directory of the DAGs.
        :param sql: URL of an empty database. Default: SQLite in `home`.
        :param settings: environment variables of all components.
        """
        self.home = home
        self.sql = sql or f"sqlite:///{home}/airflow.db"
        one = self.sql.startswith("sqlite") or "TEST_ONE_TRIGGERER" in settings
        self.triggerers = ("triggerer",) if one else ("triggerer", "triggerer-2")
        self.hosts: dict[str, str] = {}  # a component's name -> its host name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._token = self._temporary = ""
        trigger_log_port = str(free_port())
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW")}
        self.env = {
            **inherited,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__PARALLELISM": "8",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API_AUTH__JWT_SECRET": "of-a-test-that-runs-on-loopback-only-and-ends-soon",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": trigger_log_port,
            # the API server of Airflow below 3.3 reads this one instead
            "AIRFLOW__LOGGING__TRIGGERER_LOG_SERVER_PORT": trigger_log_port,
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self.sql,
            "AIRFLOW__CORE__HOSTNAME_CALLABLE": "hostname_of_test.own",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            # a changed file is parsed at once; each round over all files takes seconds of CPU time
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "300",
            "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            # the API server loads its execution API at a worker's first request: 7 s of CPU time, measured 43 s at a
            # load of 20; after six timeouts of 5 s, the default, the worker fails its task
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            # a DAG that isn't imported within 30 s, the default, is unknown, and its tasks fail
            "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "300",
            "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "320",
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
            "AIRFLOW__OPENLINEAGE__DISABLED": "True",  # also if the environment has OPENLINEAGE_URL
            "AIRFLOW__KTRAIN__DEPLOYMENT_ID": f"e2e-{self.port}",
            "AIRFLOW__KTRAIN__JOB_URL": "https://board.example/{plural}/{name}",
            "AIRFLOW_CONN_KUBERNETES_DEFAULT": json.dumps(
                {
                    "conn_type": "kubernetes",
                    "extra": {"kube_config_path": str(cluster.kubeconfig), "namespace": cluster.namespace},
                }
            ),
            "TEST_IMAGE": IMAGE,
            "PYTHONWARNINGS": "ignore",
            **(SQLITE_SETTINGS if self.sql.startswith("sqlite") else {}),
            "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **settings,
        }

    # processes

    def start(self) -> None:
        self.env["TMPDIR"] = self._temporary = tempfile.mkdtemp(prefix="airflow-")  # a short path: it has sockets
        (self.home / "config").mkdir()  # Airflow adds it to the import path of each component
        (self.home / "config" / "hostname_of_test.py").write_text(HOSTNAME)
        (self.home / "config" / "sqlite_of_test.py").write_text(SQLITE)
        subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"], env=self.env, check=True, capture_output=True
        )
        for component in COMPONENTS:
            self.run(component)
        for name in self.triggerers:
            self.run("triggerer", name)
        wait_for("the API server answers", self._healthy)
        wait_for("the execution API answers", self._serves_workers)  # it is loaded at its first request

    def wait(self, what: str, look: Callable[[], T | None], timeout: float = WITHIN) -> T:
        """Wait until `look` returns a true value; returns that value. A failure says which components have ended."""
        try:
            return wait_for(what, look, timeout)
        except AssertionError as e:
            raise AssertionError("\n".join(filter(None, (str(e), self.ended_components())))) from None

    def ended_components(self) -> str:
        """The components that have ended, each with the end of its output. Empty: all run."""
        ended = [(name, code) for name, process in self.processes.items() if (code := process.poll()) is not None]
        return "\n".join(
            f"{name} ended with exit code {code}:\n{(self.home / f'{name}.out').read_text(errors='replace')[-2000:]}"
            for name, code in ended
        )

    def run(
        self, component: str, name: str | None = None, *, module: str = "airflow", **env: str
    ) -> subprocess.Popen[bytes]:
        """Start a component, named `name` (default: its own name).

        Call this from the main thread, because the component ends with the thread that started it.

        :param component: the words of its command line.
        :param module: the Python module that is run with them.
        :param env: environment variables of this component only.
        """
        name = name or component
        if name in self.processes:  # the caller has ended it
            self.processes[name].wait(10)
        env = {"AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(self.log_folder(name)), **env}
        host = self.hosts.setdefault(name, f"127.0.1.{len(self.hosts) + 1}")
        with (self.home / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *component.split()],
                env={**self.env, "TEST_HOSTNAME": host, **env}, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=database.ends_with_parent(signal.SIGTERM),
            )  # fmt: skip
        self.processes[name] = process
        leaks.allow_process(process.pid)
        return process

    def log_folder(self, name: str) -> pathlib.Path:
        """The log folder of a component: its own with remote logs or TEST_OWN_DISKS, else one for all components."""
        own = self.env.keys() & {"AIRFLOW__LOGGING__REMOTE_LOGGING", "TEST_OWN_DISKS"}
        return self.home / (f"disk-of-{name}" if own else "logs")

    def set_triggerers(self, *names: str) -> None:
        """Restart triggerers. Afterwards exactly these run, and Airflow counts no other one as alive."""
        before = {job["id"] for job in self._triggerer_jobs()}
        for name in [name for name in self.processes if name.startswith("triggerer")]:
            self.end(name)
        for name in names:
            self.run("triggerer", name)

        def restarted() -> bool:
            now = {job["id"] for job in self._triggerer_jobs()}
            return len(now) == len(names) and not now & before

        wait_for(f"the triggerers {', '.join(names)} work and no other", restarted)

    def signal(self, name: str, number: Signals) -> None:
        """Send a signal to the component and all its children, including those in their own sessions."""
        for pid in [*descendants(self.processes[name].pid), self.processes[name].pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, name: str) -> None:
        """Send SIGKILL to a component and remove it from the list."""
        self.signal(name, signal.SIGKILL)
        self.processes.pop(name).wait(30)

    def wait_triggerers(self, number: int) -> None:
        """Wait until this many triggerers work."""

        wait_for(f"{number} triggerers work", lambda: len(self._triggerer_jobs()) == number)

    def _triggerer_jobs(self) -> list[dict[str, Any]]:
        return list(self.call("GET", "/api/v2/jobs?job_type=TriggererJob&is_alive=true")["jobs"])

    def stop(self) -> None:
        pids = [p for process in self.processes.values() for p in (process.pid, *descendants(process.pid))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait(30)
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def task_processes(self, ti_id: str = "") -> list[int]:
        """The processes that currently run tasks (not their supervisors), or the process of one task instance."""
        among = every_process() if ti_id else descendants(self.processes["scheduler"].pid)
        titles = {pid: title(pid) for pid in among}
        return [p for p, t in titles.items() if t.startswith(f"airflow worker -- {ti_id}") and "LocalExecutor" not in t]

    def _written(self, ti_ids: set[str]) -> bool:
        """Whether no worker runs one of these tries any more. Their logs are complete then."""
        titles = [title(pid) for pid in every_process()]
        return not any(t.startswith("airflow worker") and ti_id in t for t in titles for ti_id in ti_ids)

    def kill_worker(self) -> None:
        """Send SIGKILL to the process that runs a task and to its supervisor: the worker is lost."""
        for pid in descendants(self.processes["scheduler"].pid):
            if "LocalExecutor" in (name := title(pid)) and "<idle>" not in name:
                for process in (pid, *descendants(pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)

    def kill_task(self, dag_id: str, run_id: str, task_id: str, number: Signals) -> None:
        """Send a signal to the process that runs a task."""
        (process,) = self.task_processes(self.task(dag_id, run_id, task_id)["id"])
        os.kill(process, number)

    # the API

    def _healthy(self) -> bool:
        if ended := self.ended_components():
            raise RuntimeError(ended)
        with contextlib.suppress(OSError, ValueError, AssertionError):  # it may answer before it can work
            health = self.call("GET", "/api/v2/monitor/health")
            return all(health[c]["status"] == "healthy" for c in ("scheduler", "triggerer", "dag_processor"))
        return False

    def _serves_workers(self) -> bool:
        with contextlib.suppress(OSError):
            with contextlib.suppress(AssertionError):  # any answer
                self._send("GET", "/execution/health", None)
            return True
        return False

    def call(self, method: str, path: str, body: Any = None) -> Any:
        if not self._token and "health" not in path:
            self._token = self._send("GET", "/auth/token", None)["access_token"]
        return self._send(method, path, body)

    def _send(self, method: str, path: str, body: Any) -> Any:
        """Send a request. It is repeated while Airflow's database is locked.

        A 409 after a repetition means that an earlier attempt has already made the change; returns None in this case.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        end, repeated = time.monotonic() + LOCKED_FOR, False
        while True:
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    read = answer.read()
            except urllib.error.HTTPError as e:
                text = e.read().decode()
                if repeated and e.code == 409:
                    return None
                if not self._locked(e.code, text) or time.monotonic() > end:
                    raise AssertionError(f"{method} {path}: {e.code} {text[:2000]}") from None
                repeated = True
                time.sleep(TICK)
            else:
                return json.loads(read) if read else None

    def _locked(self, code: int, answer: str) -> bool:
        """Whether a request failed probably because another process was writing to SQLite; nothing was changed."""
        errors = ("Database error", "Internal Server Error")  # the second is Airflow's answer below 3.3
        return code == 500 and any(error in answer for error in errors) and self.sql.startswith("sqlite")

    def trigger(self, dag_id: str, conf: dict[str, Any] | None = None) -> str:
        """Start a run as soon as the DAG is known; returns its id."""
        self.wait(f"the DAG {dag_id} is known", lambda: self.known(dag_id))
        self.call("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": False})
        # as Airflow names runs; a repeated request finds the run instead of starting another one
        run_id = f"manual__{datetime.now(UTC).isoformat()}"
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf or {}}
        self.call("POST", f"/api/v2/dags/{dag_id}/dagRuns", body)
        return run_id

    def backfill(self, dag_id: str, from_date: str, to_date: str, max_active_runs: int) -> None:
        """`airflow backfill create`, while no scheduler runs.

        SQLite has one writer: Airflow rolls a backfill back if another write interrupts it. A scheduler that has
        already seen its runs then crashes.
        """
        scheduler = self.processes["scheduler"]
        scheduler.terminate()
        scheduler.wait(WITHIN)  # it waits for the tasks that run
        command = ["backfill", "create", "--dag-id", dag_id, "--from-date", from_date, "--to-date", to_date]
        command += ["--max-active-runs", str(max_active_runs)]

        def created() -> bool:
            done = subprocess.run(
                [sys.executable, "-m", "airflow", *command], env=self.env, capture_output=True, text=True
            )
            assert done.returncode == 0 or "locked" in done.stderr + done.stdout, done.stderr
            return done.returncode == 0

        try:
            wait_for(f"a backfill of {dag_id} is created", created)
        finally:
            self.run("scheduler")

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        return list(self.call("GET", f"/api/v2/dags/{dag_id}/dagRuns?limit=100")["dag_runs"])

    def wait_run(self, dag_id: str, run_id: str, state: str) -> None:
        """Wait until the DAG run itself has this state, which the scheduler sets some time after the tasks end."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{urllib.parse.quote(run_id)}"
        self.wait(f"the run {run_id} is {state}", lambda: self.call("GET", path)["state"] == state)

    def known(self, dag_id: str) -> bool:
        found = self.call("GET", f"/api/v2/dags?dag_id_pattern={dag_id}&limit=100")["dags"]
        return any(dag["dag_id"] == dag_id for dag in found)

    def _ti(self, dag_id: str, run_id: str, task_id: str) -> str:
        return f"/api/v2/dags/{dag_id}/dagRuns/{urllib.parse.quote(run_id)}/taskInstances/{task_id}"

    def task(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", self._ti(dag_id, run_id, task_id))
        return found

    def triggerer_of(self, dag_id: str, run_id: str, task_id: str) -> str:
        """The name of the triggerer that has the task's trigger; empty if no triggerer has it."""
        job = self.task(dag_id, run_id, task_id)["triggerer_job"] or {}
        return next((name for name, host in self.hosts.items() if host == job.get("hostname")), "")

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        path = f"/api/v2/dags/{dag_id}/dagRuns/{urllib.parse.quote(run_id)}/taskInstances?limit=100"
        found: list[dict[str, Any]] = []
        while True:
            page = self.call("GET", f"{path}&offset={len(found)}")
            found += page["task_instances"]
            if len(found) >= page["total_entries"] or not page["task_instances"]:
                return found

    def wait_state(
        self, dag_id: str, run_id: str, task_id: str, *states: str, timeout: float = WITHIN
    ) -> dict[str, Any]:
        """Wait until the task has one of these states and, if a try has ended, its worker has written its log.

        A worker reports the state while it still reads the last lines of the task's process.
        """

        def look() -> dict[str, Any] | None:
            found = self.task(dag_id, run_id, task_id)
            seen.append(f"{found['state']} (try {found['try_number']})")
            tries.add(found["id"])
            if found["state"] in ENDED and found["state"] not in states:
                raise AssertionError(f"{dag_id}.{task_id} is {found['state']}, not {' or '.join(states)}")
            return found if found["state"] in states else None

        seen: list[str] = []
        tries: set[str] = set()
        try:
            found = self.wait(f"{dag_id}.{task_id} is {' or '.join(states)}", look, timeout)
        except AssertionError as e:
            raise AssertionError(
                f"{e}; states seen: {list(dict.fromkeys(seen))}\n{self.log(dag_id, run_id, task_id)}"
            ) from None
        if found["state"] in (*ENDED, "up_for_retry"):
            with contextlib.suppress(AssertionError):  # a test has stopped the worker
                wait_for("the worker has ended", lambda: self._written(tries), WORKER_ENDS_WITHIN)
        return found

    def set_state(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        self.call("PATCH", self._ti(dag_id, run_id, task_id), {"new_state": state})

    def clear(self, dag_id: str, run_id: str, task_id: str) -> None:
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": [task_id],
            "only_failed": False,
            "only_running": False,
        }
        self.call("POST", f"/api/v2/dags/{dag_id}/clearTaskInstances", body)

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The lines of the task's log, as the UI shows it."""
        try:
            content = self._log_content(dag_id, run_id, task_id, try_number)
        except AssertionError as e:
            return str(e)
        return "\n".join(line for entry in content for line in _texts(entry))

    def records(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> list[dict[str, Any]]:
        """The records of the task's log with their fields: event, timestamp, level, logger."""
        content = self._log_content(dag_id, run_id, task_id, try_number)
        return [entry for entry in content if isinstance(entry, dict) and "level" in entry]

    def _log_content(self, dag_id: str, run_id: str, task_id: str, try_number: int) -> list[Any]:
        path = f"{self._ti(dag_id, run_id, task_id)}/logs/{try_number}?full_content=true"
        return list(self.call("GET", path)["content"])

    def links(self, dag_id: str, run_id: str, task_id: str) -> dict[str, str | None]:
        """The buttons that the UI shows."""
        found = self.call("GET", f"{self._ti(dag_id, run_id, task_id)}/links")
        return dict(found["extra_links"])

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        return self.call("GET", f"{self._ti(dag_id, run_id, task_id)}/xcomEntries/{key}")["value"]

    def stored(self, dag_id: str, run_id: str, task_id: str, key: str) -> Any:
        """A value of the task's state store, which Airflow 3.3 and newer have."""
        return self.call("GET", f"{self._ti(dag_id, run_id, task_id)}/state-store/{key}")["value"]

    def xcom_keys(self, dag_id: str, run_id: str, task_id: str) -> set[str]:
        """The keys of the XComs that the task has pushed."""
        found = self.call("GET", f"{self._ti(dag_id, run_id, task_id)}/xcomEntries")["xcom_entries"]
        return {entry["key"] for entry in found}


def _texts(entry: Any) -> Iterator[str]:
    """One entry of a log: its text, then its exceptions."""
    yield entry["event"] if isinstance(entry, dict) else str(entry)
    for error in (entry.get("error_detail") or ()) if isinstance(entry, dict) else ():
        yield f"{error['exc_type']}: {error['exc_value']}"


def every_process() -> list[int]:
    return [int(entry.name) for entry in pathlib.Path("/proc").glob("[0-9]*")]


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on. The deepest are last."""
    parents: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after = entry.read_text().rpartition(")")[2].split()
            parents.setdefault(int(after[1]), []).append(int(entry.parent.name))
    found, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


@contextlib.contextmanager
def running(home: pathlib.Path, cluster: TestCluster, dags: pathlib.Path, **settings: str) -> Iterator[Airflow]:
    """A context manager: an Airflow on the selected database. Skips the test if the database is missing."""
    with database.database(home) as sql:
        airflow = Airflow(home, cluster, dags, sql, **settings)
        try:
            airflow.start()
            yield airflow
        finally:
            airflow.stop()
