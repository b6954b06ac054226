"""An API server whose pods and logs a test writes, as a kubelet does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.apiserver.logs import LogFile
from tests.apiserver.messages import Object
from tests.apiserver.server import ApiServer

PODS = "/api/v1/namespaces/ns/pods"
WORKER = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "0"}


class PodServer(ApiServer):
    """The server. A log ends when the test ends it, whatever the status of its container says."""

    def __init__(self) -> None:
        super().__init__()
        self.ends_logs = False

    def put_pod(self, name: str, labels: dict[str, str] | None = None, **content: Any) -> Object:
        """Create or replace a pod.

        :param content: its fields beside the metadata; `metadata` adds to that.
        """
        meta = {"name": name, "labels": labels or {}, **content.pop("metadata", {})}
        return self.put("pods", {"metadata": meta, **content})

    def pod(
        self, name: str, *, restart: int = 0, state: str = "running", phase: str = "Running", init: Iterable[str] = (),
        containers: Iterable[str] = ("main",), labels: dict[str, str] | None = None, last: bool | None = None,
    ) -> Object:  # fmt: skip
        """Create a pod or set its status: all containers get the same state and run."""
        status = {"restartCount": restart, "state": {state: {"exitCode": 1} if state == "terminated" else {}}}
        if restart if last is None else last:
            status["lastState"] = {"terminated": {"exitCode": 1}}
        containers, init = list(containers), list(init)
        return self.put_pod(
            name,
            labels or dict(WORKER),
            spec={
                "restartPolicy": "OnFailure",
                "containers": [{"name": one} for one in containers],
                "initContainers": [{"name": one} for one in init],
            },
            status={
                "phase": phase,
                "containerStatuses": [{"name": one, **status} for one in containers],
                "initContainerStatuses": [{"name": one, **status} for one in init],
            },
        )

    def log(self, pod: str, container: str = "main", restart: int | None = 0) -> LogFile:
        """The log of a run, by default of the first one; created if it doesn't exist."""
        return super().log(pod, container, restart)

    def delete_pod(self, name: str) -> Object:
        """Delete a pod; returns its last state."""
        return self.remove("pods", name)
