"""The disturbances of Airflow's processes and of the API server in `make soak`, chosen at random by a seed."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

from kubernetes import client

from airflow_provider_ktrain.core.identity.names import PREFIX
from tests import clusters
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, descendants, title
from tests.e2e.scenario import UNAVAILABLE

T = TypeVar("T")
PAUSE = (4.0, 16.0)  # seconds between two disturbances
# seconds for which a component is left alone after a disturbance: without Airflow's API server no task starts, and
# without a triggerer no deferred task continues
CALM = 60.0
AWAY = (2.0, 20.0)  # seconds for which a process is unavailable, or requests fail
OUTAGE = (20.0, 60.0)  # seconds for which the Kubernetes API server refuses connections: longer than most limits
DAG_LABEL = f"{PREFIX}/dag-id"
EVICTED = "soak_evicted_"  #: DAGs whose pods may be evicted.
EVICTION, DRAIN = "pod evicted", "node drained"
EVICTIONS = 1 / 3  #: The share of these two among the disturbances.
OUTAGE_NAME = "Kubernetes API server away"


class Disturbances:
    """One disturbance at a time. Call `next` often, and only from the main thread.

    :param random: decides what is disturbed, when, and for how long.
    """

    def __init__(self, airflow: Airflow, cluster: TestCluster, random: random.Random) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        self.last = ""
        self._airflow = airflow
        self._cluster = cluster
        self._random = random
        self._next = time.monotonic()
        self._next_outage = self._next + CALM  # trainings run then
        self._calm: dict[str, float] = {}  # the time until which a component is left alone, by its name
        self._undo: list[tuple[float, Callable[[], object]]] = []  # when and how a disturbance ends
        self._kinds: dict[str, Callable[[], bool]] = {
            "worker killed": self._kill_worker,
            "worker terminated": self._terminate_worker,
            "triggerer killed": lambda: self._end_triggerer(signal.SIGKILL),
            "triggerer terminated": lambda: self._end_triggerer(signal.SIGTERM),
            "triggerer stalled": self._stall_triggerer,
            "Airflow's API server killed": self._kill_api_server,
        }
        self._evictions = {EVICTION: self._evict, DRAIN: self._drain}
        if cluster.embedded:
            self._kinds |= {
                "its connections cut": lambda: self._fault("drop"),
                "it answers 500": lambda: self._fault("status", status=500),
                "it answers 429": lambda: self._fault("status", status=429),
                "it answers 401": lambda: self._fault("status", status=401),
                "its log streams cut": lambda: self._fault("cut_logs", bytes=64),
            }

    def next(self) -> None:
        """End disturbances that are due to end, and start one if it is time."""
        now = time.monotonic()
        for due in [entry for entry in self._undo if entry[0] <= now]:
            self._undo.remove(due)
            due[1]()
        if now < self._next:
            time.sleep(min(0.5, self._next - now))
            return
        self._next = now + self._random.uniform(*PAUSE)
        if self._cluster.embedded and now > self._next_outage:
            self._begin_outage()
            return
        kinds = self._evictions if self._random.random() < EVICTIONS else self._kinds
        kind = self._random.choice(list(kinds))
        if kinds[kind]():
            self.done[kind] += 1
            self.last = kind

    def end(self) -> None:
        """Restore what is unavailable."""
        undone, self._undo = self._undo, []
        for _, undo in undone:
            undo()

    def _away(self, name: str, undo: Callable[[], object]) -> None:
        back = time.monotonic() + self._random.uniform(*AWAY)
        self._undo.append((back, undo))
        self._calm[name] = back + CALM

    def _is_calm(self, name: str) -> bool:
        return time.monotonic() < self._calm.get(name, 0.0)

    def _choice(self, among: list[T]) -> T | None:
        return self._random.choice(among) if among else None

    # workers

    def _kill_worker(self) -> bool:
        """Kill a task's process and its supervisor: no process is left to report the failure."""
        scheduler = self._airflow.processes["scheduler"].pid
        busy = [p for p in descendants(scheduler) if "LocalExecutor" in title(p) and "<idle>" not in title(p)]
        worker = self._choice(sorted(busy))
        if worker is None:
            return False
        for pid in (worker, *descendants(worker)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True

    def _terminate_worker(self) -> bool:
        """Send SIGTERM to a task's process, as when a deployment replaces its worker."""
        task = self._choice(sorted(self._airflow.task_processes()))
        if task is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(task, signal.SIGTERM)
        return True

    # triggerers

    def _triggerer(self) -> str | None:
        return self._choice([name for name in self._airflow.triggerers if not self._is_calm(name)])

    def _end_triggerer(self, number: signal.Signals) -> bool:
        if (name := self._triggerer()) is None:
            return False
        if number == signal.SIGKILL:
            self._airflow.signal(name, number)
        else:
            self._airflow.processes[name].terminate()
        self._away(name, lambda: self._start_again("triggerer", name))
        return True

    def _start_again(self, component: str, name: str) -> None:
        try:
            self._airflow.processes[name].wait(20)
        except subprocess.TimeoutExpired:  # a graceful end would take too long
            self._airflow.signal(name, signal.SIGKILL)
        self._airflow.run(component, name)

    def _stall_triggerer(self) -> bool:
        if (name := self._triggerer()) is None:
            return False
        self._airflow.signal(name, signal.SIGSTOP)
        self._away(name, lambda: self._airflow.signal(name, signal.SIGCONT))
        return True

    # trainings

    def _evict(self) -> bool:
        """Evict a running pod."""
        with contextlib.suppress(*UNAVAILABLE):
            if (pod := self._choice(sorted(self._evictable()))) is not None:
                self._evict_pod(pod)
                return True
        return False

    def _drain(self) -> bool:
        """Cordon a node for a while, and evict its pods, as `kubectl drain --pod-selector` does."""
        core = self._core
        with contextlib.suppress(*UNAVAILABLE):
            pods = self._evictable()
            others = {node.metadata.name for node in core.list_node().items if not node.spec.unschedulable}
            node = self._choice(sorted({on for on in pods.values() if others - {on}}))
            if node is None or self._is_calm(node):
                return False
            core.patch_node(node, {"spec": {"unschedulable": True}})
            self._away(node, lambda: self._uncordon(node))
            for pod in sorted(pod for pod, on in pods.items() if on == node):
                with contextlib.suppress(client.ApiException):  # it has ended meanwhile
                    self._evict_pod(pod)
            return True
        return False

    def _uncordon(self, node: str) -> None:
        try:
            self._core.patch_node(node, {"spec": {"unschedulable": None}})
        except UNAVAILABLE:  # during an outage
            self._undo.append((time.monotonic() + PAUSE[0], lambda: self._uncordon(node)))

    def _evictable(self) -> dict[str, str]:
        """The nodes of the running pods that may be evicted, by the pods' names."""
        pods = self._core.list_namespaced_pod(self._cluster.namespace, label_selector=DAG_LABEL).items
        return {
            pod.metadata.name: pod.spec.node_name for pod in pods
            if pod.metadata.labels[DAG_LABEL].startswith(EVICTED) and pod.status.phase == "Running"
            and not pod.metadata.deletion_timestamp
        }  # fmt: skip

    def _evict_pod(self, name: str) -> None:
        meta = client.V1ObjectMeta(name=name, namespace=self._cluster.namespace)
        self._core.create_namespaced_pod_eviction(name, meta.namespace, client.V1Eviction(metadata=meta))

    @property
    def _core(self) -> client.CoreV1Api:
        return clusters.core(self._cluster.kubeconfig)

    # API servers

    def _kill_api_server(self) -> bool:
        name = "api-server"
        if self._is_calm(name):
            return False
        self._airflow.signal(name, signal.SIGKILL)
        self._away(name, lambda: self._start_again(name, name))
        return True

    def _begin_outage(self) -> None:
        seconds = self._random.uniform(*OUTAGE)
        self._next_outage = time.monotonic() + seconds + CALM
        if self._fault("refuse", seconds):
            self.done[OUTAGE_NAME] += 1
            self.last = OUTAGE_NAME

    def _fault(self, fault: str, seconds: float = 0.0, **how: int) -> bool:
        with contextlib.suppress(Exception):  # it may already be gone
            self._cluster.admin(fault, seconds=round(seconds or self._random.uniform(*AWAY), 1), **how)
            return True
        return False
