"""An Airflow with trainings in an embedded cluster, for the browser tests and scripts/screenshots.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests import clusters
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, running, wait_for
from tests.e2e.database import free_port
from tests.e2e.kube import Kube
from tests.engine.tasks import api_of
from tests.kueue.workloads import write_workload

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DAGS = pathlib.Path(__file__).parent / "dags"
TOKEN = """
import json, sys
from airflow.api_fastapi.app import create_app, get_auth_manager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
create_app(apps="core")
user = SimpleAuthManagerUser(username="somebody", role=json.loads(sys.argv[1]))
print("token:", get_auth_manager().generate_jwt(user))
"""
NO_QUOTA = {
    "type": "QuotaReserved", "status": "False", "reason": "Pending", "lastTransitionTime": "2026-11-22T02:00:00Z",
    "message": "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor "
    "h100, 24 more needed",
}  # fmt: skip


def browser_path() -> str | None:
    """The browser that KTRAIN_TEST_CHROMIUM names, else the first one of BROWSERS in PATH."""
    return os.environ.get("KTRAIN_TEST_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


def token(airflow: Airflow) -> str:
    """An administrator's token: the API server takes everybody for one."""
    return str(airflow.call("GET", "/auth/token")["access_token"])


@dataclass(frozen=True)
class Training:
    """One task instance, whose page is shown."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    def query(self) -> str:
        names = {"dag_id": self.dag_id, "run_id": self.run_id, "task_id": self.task_id, "map_index": self.map_index}
        return urllib.parse.urlencode(names)


@dataclass(frozen=True)
class ApiServer:
    """A second API server of the same Airflow, which asks for a login.

    :param url: its address, with the path of `[api] base_url`.
    """

    url: str
    airflow: Airflow

    def page(self, training: Training) -> str:
        """The URL of the training's page."""
        return f"{self.url}/ktrain/training?{training.query()}"

    def list(self) -> str:
        """The URL of the table of trainings."""
        return f"{self.url}/ktrain/trainings"

    def token(self, role: str | None) -> str:
        """The token of a user with this role of SimpleAuthManager; None: without a role."""
        made = subprocess.run(
            [sys.executable, "-c", TOKEN, json.dumps(role)],
            env=self.airflow.env, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return next(line.split()[1] for line in made.stdout.splitlines() if line.startswith("token:"))

    def password(self, user: str) -> str:
        """The password that Airflow has generated for a user."""
        (file,) = self.airflow.home.glob("simple_auth_manager_passwords*")
        return str(json.loads(file.read_text())[user])


class Site:
    """Airflow's UI with our pages, and the trainings that they show.

    :param airflow: its processes run.
    :param cluster: serves Kueue's resources.
    """

    def __init__(self, airflow: Airflow, cluster: TestCluster) -> None:
        self.airflow, self.cluster = airflow, cluster
        self._begun: dict[str, Training] = {}

    def page(self, training: Training) -> str:
        """The URL of the training's page."""
        return f"{self.airflow.url}/ktrain/training?{training.query()}"

    def list(self) -> str:
        """The URL of the table of trainings."""
        return f"{self.airflow.url}/ktrain/trainings"

    def comparison(self, *trainings: Training) -> str:
        """The URL of their comparison."""
        query = urllib.parse.urlencode([("training", training.query()) for training in trainings])
        return f"{self.airflow.url}/ktrain/compare?{query}"

    def task_page(self, training: Training) -> str:
        """The URL of the task instance's details in Airflow's UI."""
        run_id = urllib.parse.quote(training.run_id, safe="")
        return f"{self.airflow.url}/dags/{training.dag_id}/runs/{run_id}/tasks/{training.task_id}/details"

    @contextlib.contextmanager
    def api_server(self, path: str) -> Iterator[ApiServer]:
        """Start an API server that asks for a login, below a path of its address."""
        port, name = free_port(), "api-server-with-login"
        server = ApiServer(f"http://127.0.0.1:{port}{path}", self.airflow)
        settings = {
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__BASE_URL": server.url,
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
        }
        self.airflow.run("api-server", name, **settings)
        try:
            wait_for("the API server answers", lambda: _answers(f"{server.url}/api/v2/version"), 600)
            yield server
        finally:
            self.airflow.end(name)

    def begin(self, dag_id: str, task_id: str = "train") -> Training:
        """A run of the DAG; the same one for each caller."""
        if dag_id not in self._begun:
            self._begun[dag_id] = Training(dag_id, self.airflow.trigger(dag_id), task_id)
        return self._begun[dag_id]

    def wait_state(self, training: Training, *states: str) -> None:
        self.airflow.wait_state(training.dag_id, training.run_id, training.task_id, *states, timeout=600)

    def status(self, training: Training) -> dict[str, Any]:
        """The training's status; empty if there is none yet."""
        with contextlib.suppress(AssertionError):
            found = self.airflow.xcom(training.dag_id, training.run_id, training.task_id, "ktrain_status")
            return dict(found)
        return {}

    def running(self) -> Training:
        """A training that is deferred and has written a curve."""
        training = self.begin("image_classifier")
        self.wait_state(training, "deferred")
        wait_for("the status has a curve", lambda: len(self.status(training).get("series", {}).get("loss", ())) > 1)
        return training

    def failed(self) -> Training:
        training = self.begin("large_batch")
        self.wait_state(training, "failed")
        return training

    def hung(self) -> Training:
        """A training of which one rank stopped in its data loader."""
        training = self.begin("hanging_training")
        self.wait_state(training, "failed")
        return training

    def succeeded(self) -> Training:
        training = self.begin("short_training")
        self.wait_state(training, "success")
        return training

    def retried(self) -> Training:
        """A training that succeeded at its second try, which repeated some steps."""
        training = self.begin("retried_training")
        self.wait_state(training, "success")
        return training

    def queued(self) -> Training:
        """A training that waits for quota: as Kueue's Workload shows it in recording 70."""
        training = self.begin("queued_training")
        self.wait_state(training, "deferred")
        kube = Kube(str(self.cluster.kubeconfig), self.cluster.namespace)

        def job() -> dict[str, Any] | None:
            labels = ((job, job["metadata"].get("labels") or {}) for job in kube.jobs())
            return next((job for job, found in labels if found.get("ktrain.airflow/dag-id") == training.dag_id), None)

        found = wait_for("the job exists", job)
        if not self.status(training).get("queue"):
            with ThreadPoolExecutor(1) as pool:  # Playwright's event loop runs in this thread
                pool.submit(asyncio.run, self._write_workload(found)).result()
        wait_for("the status has the queue's reason", lambda: "h100" in self.status(training).get("queue", ""))
        return training

    async def _write_workload(self, job: dict[str, Any]) -> None:
        async with api_of(self.cluster) as api:
            await write_workload(api, job, [NO_QUOTA])


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as answer:
        return answer.status == 200
    return False


@contextlib.contextmanager
def site(home: pathlib.Path, **settings: str) -> Iterator[Site]:
    """A running Airflow and its cluster.

    :param home: an empty directory.
    :param settings: environment variables of Airflow.
    """
    with (
        clusters.cluster(kueue=True, nodes=4, gpus=8, resources={"cpu": "64", "memory": "256Gi"}) as cluster,
        running(home, cluster, DAGS, **settings) as airflow,
    ):
        yield Site(airflow, cluster)
