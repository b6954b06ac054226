"""A training whose states a test sets by hand in a `ApiServer`, and the process that follows it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.ending import Successor
from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, JobRef, Owner, TaskKey
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.state.queue.kueue_status import QUEUE_LABEL
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.following import Noticed
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.training import Training
from tests.apiserver import NAMESPACE, ApiServer, Object, connected, precise_stamp, served, stamp
from tests.engine.tasks import Lines

NAME = "train"
KINDS = (PYTORCHJOB, MPIJOB, TRAINJOB)
GPUS = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}


class Memory:
    """Stores a conclusion, as the status XCom does. A `StatusSink`."""

    host = "trigger"
    try_number = 1

    def __init__(self) -> None:
        self.stored: Mapping[str, Any] | None = None

    def offer(self, build: object, *, urgent: bool) -> None: ...

    async def conclude(self, document: Mapping[str, Any]) -> bool:
        self.stored = document
        return True

    def retract(self) -> None:
        self.stored = None

    async def concluded(self) -> Mapping[str, Any] | None:
        return self.stored


@dataclass
class Staged:
    """A job in an API server.

    :param api: the server.
    :param kind: kind of the job.
    :param since: seconds ago at which the job was created.
    """

    api: ApiServer
    kind: Kind = PYTORCHJOB
    since: float = 60.0
    log: Lines = field(default_factory=Lines)
    memory: Memory = field(default_factory=Memory)
    url: str = ""
    background: asyncio.Future[None] | None = None  # what the job does until the test ends
    early_lines: list[tuple[str, str, str]] = field(default_factory=list)  # pod, time, text

    def __post_init__(self) -> None:
        key = TaskKey("tests", "dag", "train", uuid.uuid4().hex[:8])
        owner, version = Owner(key, 1, "ti-1"), self.kind.versions[0]
        self.labels = key.labels("submission")
        spec = self.kind.skeleton(f"{self.kind.group}/{version}", self.kind.primaries[-1:])["spec"]
        job = self.api.put(
            self.kind.plural,
            {
                "apiVersion": f"{self.kind.group}/{version}", "kind": self.kind.name, "spec": spec,
                "metadata": {
                    "name": NAME, "labels": dict(self.labels), "creationTimestamp": stamp(self.since),
                    "annotations": {OWNER_ANNOTATION: owner.annotation()},
                },
            },
        )  # fmt: skip
        self.ref = JobRef(
            self.kind.name, version, NAMESPACE, NAME, job["metadata"]["uid"], "ti-1", "tests", "submission"
        )

    # what the operator and the kubelet would write

    @property
    def role(self) -> str:
        return self.kind.primaries[-1] if self.kind is not PYTORCHJOB else "Worker"

    def condition(self, *types: str, since: float = 1.0) -> None:
        """Set the conditions that are True; the others are False."""

        def write(job: Object) -> None:
            old = (job.get("status") or {}).get("conditions") or []
            kept = [{**one, "status": "False"} for one in old if one["type"] not in types]
            new = [{"type": one, "status": "True", "lastTransitionTime": stamp(since)} for one in types]
            job.setdefault("status", {})["conditions"] = [*kept, *new]

        self.api.change(self.kind.plural, NAME, write)

    def spec(self, **fields: Any) -> None:
        self.api.change(self.kind.plural, NAME, lambda job: job["spec"].update(fields))

    def running(self) -> None:
        """The condition Running, of a kind that has it. A TrainJob runs if its pods do."""
        if self.kind.behavior.reports_phases:
            self.condition("Running")

    def ended(self, how: str = "Succeeded") -> None:
        self.condition("Complete" if self.kind is TRAINJOB and how == "Succeeded" else how)

    def pod(
        self, index: int = 0, phase: str = "Running", *, state: Mapping[str, Any] | None = None, node: str = "node-1",
        since: float = 60.0, restarts: int = 0, last: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """Create a pod or replace its status; returns its name.

        :param state: of its container. Default: running, or ended with exit code 0 or 1, as the phase says.
        :param since: seconds ago at which it was created and scheduled.
        """
        name = f"{NAME}-{self.role.lower()}-{index}"
        default: dict[str, Any] = {
            "Running": {"running": {"startedAt": stamp(since)}},
            "Succeeded": {"terminated": {"exitCode": 0, "startedAt": stamp(since), "finishedAt": stamp()}},
            "Failed": {"terminated": {"exitCode": 1, "startedAt": stamp(since), "finishedAt": stamp()}},
            "Pending": {"waiting": {"reason": "ContainerCreating"}},
        }
        container = self.kind.form.container or "mpi"
        status = {
            "name": container, "restartCount": restarts, "state": state or default[phase], "lastState": last or {},
            "ready": phase == "Running",
        }  # fmt: skip
        role_labels = {
            f"{TRAINJOB.behavior.pod_name_label}": NAME, "jobset.sigs.k8s.io/replicatedjob-name": "node",
            "jobset.sigs.k8s.io/jobset-uid": "jobset", "batch.kubernetes.io/job-completion-index": str(index),
        } if self.kind is TRAINJOB else {
            self.kind.behavior.pod_name_label: NAME, "training.kubeflow.org/replica-type": self.role.lower(),
            "training.kubeflow.org/replica-index": str(index), "training.kubeflow.org/job-role": self.role.lower(),
        }  # fmt: skip
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(since)}
        known = self.api.objects["pods"].get(name)
        self.api.put(
            "pods",
            {
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {
                    "name": name, "labels": {**self.labels, **role_labels},
                    "creationTimestamp": known["metadata"]["creationTimestamp"] if known else stamp(since),
                    "ownerReferences": [{"kind": self.kind.name, "name": NAME, "uid": self.ref.uid}],
                },
                "spec": {
                    "containers": [{"name": container, **GPUS}], "terminationGracePeriodSeconds": 0,
                    **({"nodeName": node} if node else {}),
                },
                "status": {
                    "phase": phase, "containerStatuses": [status] if node else [],
                    "conditions": [scheduled] if node else [],
                },
            },
        )  # fmt: skip
        for early in [one for one in self.early_lines if one[0] == name]:
            self.early_lines.remove(early)
            self.api.log(name).write(*early[1:])
        return name

    def workload(self, *, active: bool = True, **conditions: tuple[str, str, str]) -> None:
        """Kueue's Workload of the job, which names a queue.

        :param conditions: status, reason and message by type.
        """
        self.api.change(
            self.kind.plural, NAME, lambda job: job["metadata"]["labels"].update({QUEUE_LABEL: "user-queue"})
        )
        owner = {"kind": self.kind.name, "name": NAME, "uid": self.ref.uid, "controller": True}
        written = [
            {"type": one, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp(1.0)}
            for one, (status, reason, message) in conditions.items()
        ]
        self.api.put(
            "workloads",
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
                "metadata": {"name": f"job-{NAME}", "ownerReferences": [owner]},
                "spec": {"active": active, "queueName": "user-queue"}, "status": {"conditions": written},
            },
        )  # fmt: skip

    def line(self, text: str, index: int = 0, since: float = 0.0, restart: int | None = None) -> None:
        """A line in the log of a pod, or of the one that is created next.

        :param restart: the run of its container. Default: the present one.
        """
        name = f"{NAME}-{self.role.lower()}-{index}"
        if name in self.api.pods:
            self.api.log(name, restart=restart).line(text, since)
        else:
            self.early_lines.append((name, precise_stamp(since), text))

    def event(self, reason: str, message: str, *, about: str = "", since: float = 60.0) -> None:
        """A Warning event about the job, or about a pod."""
        resource, name = ("pods", about) if about else (self.kind.plural, NAME)
        obj = self.api.objects[resource][name]
        involved = {"kind": obj["kind"], "name": name, "uid": obj["metadata"]["uid"], "namespace": NAMESPACE}
        self.api.put(
            "events",
            {
                "metadata": {"name": f"event-{reason.lower()}", "creationTimestamp": stamp(since)}, "type": "Warning",
                "involvedObject": involved, "reason": reason, "message": message,
                "firstTimestamp": stamp(since), "lastTimestamp": stamp(),
            },
        )  # fmt: skip

    # the process

    async def follow(
        self, options: Options, handover: Handover | None = None, *, shared: bool = True, first: Noticed | None = None
    ) -> Outcome:
        """Follow the job to its end in a process of its own: a trigger, or a worker unless it is `shared`."""
        async with self.owner(shared=shared) as training:
            training.handover = handover or Handover()
            outcome = await training.follow(self.ref, options, first=first)
        assert isinstance(outcome, Outcome)
        return outcome

    @contextlib.asynccontextmanager
    async def owner(self, *, shared: bool = True) -> AsyncIterator[Training]:
        """The owner of the training's life, in a trigger, or in a worker unless it is `shared`."""
        host = Host(successor=Successor.OTHER_PROCESS, shared=shared, status_sink=self.memory)
        if not shared:
            host = Host(seconds=3.5, status_sink=self.memory)

        training = Training(lambda: connected(self.url), host, self.log)
        try:
            yield training
        finally:
            await training.close()


@contextlib.asynccontextmanager
async def staged(kind: Kind = PYTORCHJOB, **how: Any) -> AsyncIterator[Staged]:
    """A job in an API server of its own."""
    api = ApiServer()
    async with served(api) as url:
        training = Staged(api, kind, **how)
        training.url = url
        try:
            yield training
        finally:
            if training.background is not None:
                training.background.cancel()


def writes_of(training: Staged, of: Iterable[str] = ("DELETE", "PATCH")) -> list[str]:
    """The requests that have changed the job or its pods."""
    return [line for line in training.api.writes() if line.split()[0] in of]
