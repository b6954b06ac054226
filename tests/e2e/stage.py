"""What the tests that kill things ask after each: how many jobs there ever were, and who holds GPUs."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import urllib3
from kubernetes import client, watch

from airflow_provider_ktrain.core.identity import PREFIX, label_value
from airflow_provider_ktrain.local.cluster import EmbeddedCluster
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube

TASK = "train"
FREED_WITHIN = 60.0  # seconds from the task's end until no pod of it holds a GPU


class Watcher:
    """Every job that was ever created, by uid: a watch of its own, which outlives the API server's absences."""

    def __init__(self, kube: Kube) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self._kube = kube
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        ask = self._kube.custom.list_namespaced_custom_object
        while not self._over.wait(0.1):
            with contextlib.suppress(client.ApiException, urllib3.exceptions.HTTPError, OSError, ValueError):
                for event in watch.Watch().stream(
                    ask, "kubeflow.org", "v1", self._kube.namespace, "pytorchjobs", timeout_seconds=5
                ):
                    job = event["object"]
                    if job.get("kind") == "PyTorchJob":
                        self.jobs[job["metadata"]["uid"]] = job


@dataclass
class Stage:
    """One run of a chaos DAG, with a finger on everything."""

    airflow: Airflow
    cluster: EmbeddedCluster
    kube: Kube
    watcher: Watcher
    dag: str
    run: str = ""

    def start(self, **conf: Any) -> Stage:
        self.run = self.airflow.trigger(self.dag, conf)
        return self

    @property
    def selector(self) -> str:
        return f"{PREFIX}/dag-id={self.dag},{PREFIX}/run-id={label_value(self.run)}"

    def created(self) -> list[dict[str, Any]]:
        """The jobs that this run ever created."""
        labels = dict(pair.split("=") for pair in self.selector.split(","))
        return [j for j in self.watcher.jobs.values() if labels.items() <= (j["metadata"].get("labels") or {}).items()]

    def wait_created(self, number: int = 1) -> dict[str, Any]:
        return wait_for(f"{number} jobs are created", lambda: self.created()[number - 1 :])[0]

    def wait_state(self, *states: str, timeout: float = 120) -> dict[str, Any]:
        return self.airflow.wait_state(self.dag, self.run, TASK, *states, timeout=timeout)

    def log(self, try_number: int = 1) -> str:
        return self.airflow.log(self.dag, self.run, TASK, try_number)

    def wait_line(self, text: str, try_number: int = 1) -> None:
        wait_for(f"{text!r} in the log", lambda: text in self.log(try_number))

    def lines(self, try_number: int = 1, replica: str = "Master 0") -> list[str]:
        """What one replica wrote, as the task's log has it."""
        start = f"[{replica}] "
        return [x.removeprefix(start) for x in self.log(try_number).splitlines() if x.startswith(start)]

    def set_state(self, state: str) -> None:
        self.airflow.set_state(self.dag, self.run, TASK, state)

    def clear(self) -> None:
        self.airflow.clear(self.dag, self.run, TASK)

    def job(self) -> dict[str, Any] | None:
        return next(
            (j for j in self.kube.jobs() if j["metadata"]["uid"] in {c["metadata"]["uid"] for c in self.created()}),
            None,
        )

    def check_freed(self, within: float = FREED_WITHIN) -> None:
        """No pod of this run holds a GPU, soon."""

        def free() -> bool:
            with contextlib.suppress(client.ApiException, urllib3.exceptions.HTTPError):
                return not self.kube.gpus_held(self.selector)
            return False

        wait_for(f"no pod of {self.dag} holds a GPU", free, within)

    def check_created(self, number: int) -> None:
        names = [j["metadata"]["name"] for j in self.created()]
        assert len(names) == number, f"{number} jobs expected, created were {names}"
