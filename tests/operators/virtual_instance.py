"""A task instance without Airflow whose jobs run in virtual time."""

from __future__ import annotations

import signal
from collections.abc import Callable

from airflow_provider_ktrain.core.kinds import PYTORCHJOB, Kind
from airflow_provider_ktrain.core.state.status import phase_of
from tests.apiserver import Object, stamp
from tests.apiserver.selectors import selector
from tests.operators.operators import has_phase
from tests.operators.task_instance import Instance
from tests.operators.virtual_cluster import VirtualCluster


class VirtualInstance(Instance):
    """An `Instance` that reads the store of the scripted API server."""

    cluster: VirtualCluster

    def __init__(self, cluster: VirtualCluster, kind: Kind = PYTORCHJOB, version: str | None = None) -> None:
        super().__init__(cluster, kind, version)
        self.world, self.api = cluster.world, cluster.api

    def _connect(self) -> None: ...

    def _selected(self, resource: str) -> list[Object]:
        selected = selector(resource, {"labelSelector": self.selector})
        return [obj for obj in self.api.objects[resource].values() if selected(obj)]

    def jobs(self) -> list[Object]:
        return self._selected(self.kind.plural)

    def pods(self) -> list[Object]:
        return self._selected("pods")

    def all_jobs(self) -> set[str]:
        return {job["metadata"]["uid"] for job in self.api.objects[self.kind.plural].values()}

    def running(self) -> int:
        return sum(has_phase(pod, "Running") for pod in self._selected("pods"))

    def wait_ended(self) -> None:
        self.world.wait("the job has ended", lambda: any(phase_of(job).ended for job in self.jobs()))

    def wait_running(self) -> None:
        self.world.wait("the pod runs", lambda: self.running() == 1)

    def set_finalizers(self, *names: str) -> None:
        for job in self.jobs():
            name = job["metadata"]["name"]
            changed = self.api.change(self.kind.plural, name, lambda one: one["metadata"].update(finalizers=[*names]))
            if not names and "deletionTimestamp" in changed["metadata"]:
                self.api.remove(self.kind.plural, name)

    def delete(self) -> None:
        for job in self.jobs():
            name = job["metadata"]["name"]
            if job["metadata"].get("finalizers"):
                self.api.change(self.kind.plural, name, lambda one: one["metadata"].update(deletionTimestamp=stamp()))
            else:
                self.api.remove(self.kind.plural, name)

    @property
    def clock(self) -> float:
        return self.world.now

    def when(self, condition: Callable[[], object], work: Callable[[], object]) -> None:
        self.world.when(condition, work)

    def block(self, seconds: float) -> None:
        self.world.block(seconds)

    def interrupt(self) -> None:
        self.world.signal_main_thread(signal.SIGUSR1)

    def on_interrupt(self, handler: Callable[[], object]) -> None:
        def handled() -> None:
            handler()
            self.world.signal_handled()  # unless it raises

        super().on_interrupt(handled)
