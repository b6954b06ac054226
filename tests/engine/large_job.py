"""One PyTorchJob of any size, in the process that follows the job.

It isn't served by `tests.apiserver`: what is measured includes the time and the objects of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.host import StatusSink
from tests.engine.tasks import follow
from tests.until import until

Object = dict[str, Any]
REF = JobRef("PyTorchJob", "v1", "ns", "train", "job-uid")
AT = f"{timing.utc_now():%Y-%m-%dT%H:%M:%SZ}"  # recent: no limit and no warning is due
STEPS_UNTIL_IDLE = 40  #: How many turns of the event loop it takes to handle a change.


class Stream:
    """The response to a watch. It is its own `content`."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.content = self

    async def iter_any(self) -> AsyncIterator[bytes]:
        while True:
            yield await self.lines.get()


async def nobody() -> Any:
    raise AssertionError("no client is needed")


class LargeJob(Api):
    """A job whose pods wait for nodes, until `change` is called.

    :param size: number of pods.
    """

    def __init__(self, size: int) -> None:
        super().__init__(nobody)
        self.size, self.version = size, 1
        self.streams: dict[str, Stream] = {}
        self.listed = 0
        self.requests: list[str] = []

    def pod(self, index: int, phase: str = "Pending", node: str = "") -> Object:
        self.version += 1
        labels = {
            "training.kubeflow.org/job-name": "train",
            "training.kubeflow.org/replica-type": "worker",
            "training.kubeflow.org/replica-index": str(index),
        }
        owner = {"kind": "PyTorchJob", "name": "train", "uid": "job-uid", "controller": True}
        main = {"name": "pytorch", "image": "train:1", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
        state = {"running": {"startedAt": AT}} if phase == "Running" else {"waiting": {"reason": "ContainerCreating"}}
        return {
            "metadata": {
                "name": f"train-worker-{index}",
                "namespace": "ns",
                "uid": f"uid-{index}",
                "resourceVersion": str(self.version),
                "creationTimestamp": AT,
                "labels": labels,
                "ownerReferences": [owner],
            },
            "spec": {"containers": [main], **({"nodeName": node} if node else {})},
            "status": {
                "phase": phase,
                "conditions": [{"type": "PodScheduled", "status": str(bool(node)), "lastTransitionTime": AT}],
                "containerStatuses": [{"name": "pytorch", "restartCount": 0, "state": state}] if node else [],
            },
        }

    def job(self) -> Object:
        meta = {"name": "train", "namespace": "ns", "uid": "job-uid", "resourceVersion": "1", "creationTimestamp": AT}
        replicas = {"Worker": {"replicas": self.size, "template": {"spec": {"containers": [{"name": "pytorch"}]}}}}
        created = {"type": "Created", "status": "True", "lastTransitionTime": AT}
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": meta,
            "spec": {"pytorchReplicaSpecs": replicas},
            "status": {"conditions": [created]},
        }

    async def request(self, method: str, path: str, **how: Any) -> Object:
        self.requests.append(f"{method} {path}")
        await asyncio.sleep(0)  # as a response takes at least one step of the event loop
        query: Mapping[str, str] = how.get("query") or {}
        more: Object = {}
        items: list[Object] = []
        if path.endswith("/pytorchjobs"):
            items = [self.job()]
        elif path.endswith("/pods"):
            began = int(query.get("continue", 0))
            end = min(began + int(query.get("limit", self.size)), self.size)
            items = [self.pod(index) for index in range(began, end)]
            more = {"continue": str(end)} if end < self.size else {}
        return {
            "apiVersion": "v1",
            "kind": "List",
            "metadata": {"resourceVersion": str(self.version), **more},
            "items": items,
        }

    @contextlib.asynccontextmanager
    async def stream(self, path: str, **how: Any) -> AsyncIterator[Any]:
        yield self.streams.setdefault(path.rpartition("/")[2], Stream())

    def change(self, index: int, phase: str, node: str) -> None:
        """Change a pod; the watch shows it."""
        event = {"type": "MODIFIED", "object": self.pod(index, phase, node)}
        self.streams["pods"].lines.put_nowait(json.dumps(event).encode() + b"\n")

    async def handled(self) -> None:
        """Wait until the event loop is idle."""
        for _ in range(STEPS_UNTIL_IDLE):
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def followed(self, log: Log, sink: StatusSink | None = None) -> AsyncIterator[None]:
        """Follow the job; all its pods have been listed."""
        following: asyncio.Task[Outcome | Any] = asyncio.create_task(
            follow(REF, self, Options(logs="none"), log=log, status_sink=sink)
        )
        try:
            await until(lambda: "pods" in self.streams or following.done())
            await self.handled()
            assert not following.done(), following.result()
            yield
        finally:
            following.cancel()
            await asyncio.wait([following])
            for informer in list(self.informers.values()):
                await informer.close()  # type: ignore[attr-defined]
