"""A training whose states a test sets in a scripted API server, and the process that follows it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, SUBMISSION_LABEL, JobRef, Owner, TaskKey
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.kinds.trainjob.patches import ROLES_ANNOTATION
from airflow_provider_ktrain.core.state.queue.kueue_status import QUEUE_LABEL
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.following import Noticed
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.host import StatusSink
from airflow_provider_ktrain.engine.training_owner import Training
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests.apiserver import NAMESPACE, ApiServer, Object, Request, connected, precise_stamp, served, stamp
from tests.apiserver.server import merged
from tests.engine.tasks import Lines, host_of

NAME = "train"
KINDS = (PYTORCHJOB, MPIJOB, TRAINJOB)
GPUS = {"nvidia.com/gpu": "1"}
FOLLOW_SECONDS = 10_000.0  #: How long a followed job may take to end.
of_each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


class Memory:
    """Stores a conclusion, as the status XCom does. A `StatusSink`."""

    host = "trigger"
    try_number = 1

    def __init__(self) -> None:
        self.earlier: Mapping[str, Any] | None = None
        self.stored: Mapping[str, Any] | None = None
        self.stored_at = 0.0  #: Time of the loop.

    def offer(self, build: object, *, urgent: bool) -> None: ...

    async def read_earlier(self) -> None: ...

    async def store_conclusion(self, document: Mapping[str, Any]) -> bool:
        self.stored, self.stored_at = document, timing.now()
        return True

    def retract(self) -> None:
        self.stored = None

    async def stored_conclusion(self) -> Mapping[str, Any] | None:
        return self.stored


@dataclass
class Staged:
    """A job in an API server.

    :param api: the server.
    :param kind: kind of the job.
    :param name: of the job.
    :param since: seconds ago at which the job was created.
    :param submission: which its pods are labelled with.
    :param roles: of its replicas. Default: the last of the kind's primaries alone: Worker, Launcher or node.
    :param job_of: the job, which exists already. Default: None, it is created.
    """

    api: ApiServer
    kind: Kind = PYTORCHJOB
    name: str = NAME
    since: float = 60.0
    roles: tuple[str, ...] = ()
    submission: str = "submission"
    job_of: Object | None = None
    log: Lines = field(default_factory=Lines)
    memory: Memory = field(default_factory=Memory)
    url: str = ""
    attempt: int = 0  #: How often its pods were created again.
    operator_lag: float = 0.0  #: Seconds from a suspension until the operator deletes the pods.
    began: float = 0.0  #: When the last process began, in the loop's time.
    sent: list[tuple[str, Any]] = field(default_factory=list)  #: Writes: method and path, and body.
    early_lines: list[tuple[str, str, str]] = field(default_factory=list)  # pod, time, text
    background: set[asyncio.Future[None]] = field(default_factory=set)  # what the job does until the test ends

    def __post_init__(self) -> None:
        job = self.job_of or self._create()
        meta = job["metadata"]
        owner = Owner.of(job)
        self.name, self.labels = str(meta["name"]), dict(meta["labels"])
        self.submission, self.roles = self.labels[SUBMISSION_LABEL], tuple(self.kind.replicas(job))
        self.ref = JobRef(
            self.kind.name, job["apiVersion"].rpartition("/")[2], NAMESPACE, self.name, meta["uid"],
            owner.ti_id if isinstance(owner, Owner) else "", "tests", self.submission,
        )  # fmt: skip

    def _create(self) -> Object:
        key = TaskKey("tests", "dag", "train", uuid.uuid4().hex[:8])
        owner, version = Owner(key, 1, "ti-1"), self.kind.versions[0]
        annotations = {OWNER_ANNOTATION: owner.annotation()}
        if self.kind is TRAINJOB and self.roles:
            annotations[ROLES_ANNOTATION] = ",".join(self.roles)
        spec = self.kind.skeleton(f"{self.kind.group}/{version}", self.roles or self.kind.primaries[-1:])["spec"]
        return self.api.put(
            self.kind.plural,
            {
                "apiVersion": f"{self.kind.group}/{version}", "kind": self.kind.name, "spec": spec,
                "metadata": {
                    "name": self.name, "labels": key.labels(self.submission), "creationTimestamp": stamp(self.since),
                    "annotations": annotations,
                },
            },
        )  # fmt: skip

    # what the operator and the kubelet would write

    @property
    def role(self) -> str:
        """Of pods, unless another one is given: that whose end is the job's end."""
        return self.kind.primary(self.job)

    @property
    def job(self) -> Object:
        return self.api.objects[self.kind.plural][self.name]

    @property
    def exists(self) -> bool:
        """Whether the job was not deleted."""
        job = self.api.objects[self.kind.plural].get(self.name)
        return job is not None and job["metadata"]["uid"] == self.ref.uid

    @property
    def holding(self) -> list[str]:
        """Names of the pods that have not ended and hold GPUs."""
        return [
            name
            for name, pod in self.api.pods.items()
            if pod["status"]["phase"] not in ("Succeeded", "Failed")
            and pod["metadata"]["labels"].get(SUBMISSION_LABEL) == self.submission
        ]

    def pod_name(self, index: int = 0, role: str = "") -> str:
        role = role or self.role
        renamed = f"-{self.attempt}" if self.attempt and self.kind.behavior.renames_pods(role) else ""
        return f"{self.name}-{role.lower()}-{index}{renamed}"

    def condition(self, *types: str, since: float = 1.0) -> None:
        """Set the conditions that are True; the others are False."""

        def write(job: Object) -> None:
            old = (job.get("status") or {}).get("conditions") or []
            kept = [{**one, "status": "False"} for one in old if one["type"] not in types]
            new = [{"type": one, "status": "True", "lastTransitionTime": stamp(since)} for one in types]
            job.setdefault("status", {})["conditions"] = [*kept, *new]

        self.api.change(self.kind.plural, self.name, write)

    def spec(self, **fields: Any) -> None:
        self.api.change(self.kind.plural, self.name, lambda job: job["spec"].update(fields))

    def running(self) -> None:
        """The condition Running, of a kind that has it. A TrainJob runs if its pods do."""
        if self.kind.behavior.reports_phases:
            self.condition("Running")

    def ended(self, how: str = "Succeeded") -> None:
        self.condition("Complete" if self.kind is TRAINJOB and how == "Succeeded" else how)

    def pod(
        self, index: int = 0, phase: str = "Running", *, role: str = "", state: Mapping[str, Any] | None = None,
        node: str = "node-1", since: float = 60.0, restarts: int = 0, last: Mapping[str, Any] | None = None,
        code: int = 1, grace: int = 0, limits: Mapping[str, Any] = GPUS, **spec: Any,
    ) -> str:  # fmt: skip
        """Create a pod or replace its status; returns its name.

        :param state: of its container. Default: running, or ended with exit code 0 or `code`, as the phase says.
        :param since: seconds ago at which it was created and scheduled.
        :param grace: its terminationGracePeriodSeconds, after which the kubelet kills it.
        :param limits: of its container's resources.
        :param spec: further fields of its spec.
        """
        role, name = role or self.role, self.pod_name(index, role)
        default: dict[str, Any] = {
            "Running": {"running": {"startedAt": stamp(since)}},
            "Succeeded": {"terminated": {"exitCode": 0, "startedAt": stamp(since), "finishedAt": stamp()}},
            "Failed": {"terminated": {"exitCode": code, "startedAt": stamp(since), "finishedAt": stamp()}},
            "Pending": {"waiting": {"reason": "ContainerCreating"}},
        }
        container = self.kind.form.container or "mpi"
        status = {
            "name": container, "restartCount": restarts, "state": state or default[phase], "lastState": last or {},
            "ready": phase == "Running",
        }  # fmt: skip
        role_labels = {
            f"{TRAINJOB.behavior.pod_name_label}": self.name, "jobset.sigs.k8s.io/replicatedjob-name": role,
            "jobset.sigs.k8s.io/jobset-uid": "jobset", "batch.kubernetes.io/job-completion-index": str(index),
        } if self.kind is TRAINJOB else {
            self.kind.behavior.pod_name_label: self.name, "training.kubeflow.org/replica-type": role.lower(),
            "training.kubeflow.org/replica-index": str(index), "training.kubeflow.org/job-role": role.lower(),
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
                    "ownerReferences": [{"kind": self.kind.name, "name": self.name, "uid": self.ref.uid}],
                },
                "spec": {
                    "containers": [{"name": container, "resources": {"limits": limits}}], **spec,
                    "terminationGracePeriodSeconds": grace, **({"nodeName": node} if node else {}),
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
            self.kind.plural, self.name, lambda job: job["metadata"]["labels"].update({QUEUE_LABEL: "user-queue"})
        )
        owner = {"kind": self.kind.name, "name": self.name, "uid": self.ref.uid, "controller": True}
        written = [
            {"type": one, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp(1.0)}
            for one, (status, reason, message) in conditions.items()
        ]
        self.api.put(
            "workloads",
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
                "metadata": {"name": f"job-{self.name}", "ownerReferences": [owner]},
                "spec": {"active": active, "queueName": "user-queue"}, "status": {"conditions": written},
            },
        )  # fmt: skip

    def start(self, *lines: str, **how: Any) -> None:
        """Pods of all roles run, and the job with them; the first has written these lines.

        :param how: further arguments of `pod`.
        """
        for role in self.roles:
            self.pod(role=role, **how)
        for text in lines:
            self.line(text)
        self.running()

    def end(self, code: int = 0, **how: Any) -> None:
        """The primary's pod and the job end.

        :param how: further arguments of `pod`.
        """
        self.pod(0, "Failed" if code else "Succeeded", code=code, **how)
        self.ended("Failed" if code else "Succeeded")

    def line(self, text: str, index: int = 0, since: float = 0.0, restart: int | None = None, role: str = "") -> None:
        """A line in the log of a pod, or of the one that is created next.

        :param restart: the run of its container. Default: the present one.
        """
        name = self.pod_name(index, role)
        if name in self.api.pods:
            self.api.log(name, restart=restart).line(text, since)
        else:
            self.early_lines.append((name, precise_stamp(since), text))

    def prints(self, lines: Iterable[str], *, every: float, index: int = 0, role: str = "") -> None:
        """Write a line each so many seconds, until the pod has ended or is gone."""

        async def print_on(pod: str) -> None:
            for text in lines:
                if pod not in self.holding:
                    return
                self.line(text, index, role=role)
                await asyncio.sleep(every)

        self.background.add(asyncio.ensure_future(print_on(self.pod_name(index, role))))

    def after(self, seconds: float, change: Callable[..., object], *arguments: Any) -> None:
        """Do something when so many seconds have passed."""
        asyncio.get_running_loop().call_later(seconds, change, *arguments)

    def event(self, reason: str, message: str, *, about: str = "", since: float = 60.0) -> None:
        """A Warning event about the job, or about a pod."""
        resource, name = ("pods", about) if about else (self.kind.plural, self.name)
        obj = self.api.objects[resource][name]
        involved = {"kind": obj["kind"], "name": name, "uid": obj["metadata"]["uid"], "namespace": NAMESPACE}
        self.api.put(
            "events",
            {
                "metadata": {"name": f"event-{self.name}-{reason.lower()}", "creationTimestamp": stamp(since)},
                "type": "Warning",
                "involvedObject": involved, "reason": reason, "message": message,
                "firstTimestamp": stamp(since), "lastTimestamp": stamp(),
            },
        )  # fmt: skip

    # the cluster

    def admit(self, request: Request, obj: Object | None) -> None:
        """What operator, garbage collector and kubelets do with a request: running pods use their grace period."""
        self.sent.append((request.line, request.body))
        if obj is None or not (obj["metadata"]["uid"] == self.ref.uid or obj["metadata"]["name"] in self.holding):
            return
        body, is_pod = request.body or {}, obj["kind"] == "Pod"
        running = [obj] if is_pod else [self.api.pods[name] for name in self.holding]
        if request.method == "DELETE" and body.get("propagationPolicy") != "Orphan":
            graceful = [pod for pod in running if self._end(pod, mark=not is_pod, **body)]
            if body.get("propagationPolicy") == "Foreground" and (graceful or obj["metadata"].get("finalizers")):
                obj["metadata"].setdefault("finalizers", []).append("foregroundDeletion")
                self.after(0.1, self._collect)
            elif graceful and not is_pod:
                self.api.release(obj["metadata"]["uid"])
        elif request.method == "PATCH" and not is_pod:
            suspended = merged(obj["spec"], self.kind.form.suspension(True))
            if merged(obj, body)["spec"] == suspended:
                self.after(self.operator_lag, lambda: [self._end(pod, mark=True) for pod in running])

    def _end(self, pod: Object, *, mark: bool, gracePeriodSeconds: float | None = None, **_: Any) -> bool:
        """Kill a pod after its grace period. Returns whether it has one."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        grace = pod["spec"]["terminationGracePeriodSeconds"] if gracePeriodSeconds is None else gracePeriodSeconds
        if grace and mark:
            ending = {"deletionTimestamp": stamp(-grace), "deletionGracePeriodSeconds": grace}
            self.api.change("pods", name, lambda pod: pod["metadata"].update(ending))
        if grace or mark:
            self.after(grace, self._kill, name, uid)
        return bool(grace)

    def _kill(self, name: str, uid: str) -> None:
        pod = self.api.pods.get(name)
        if pod is None or pod["metadata"]["uid"] != uid or pod["metadata"].get("finalizers"):
            return
        self.api.remove("pods", name)
        self._collect()

    def _collect(self) -> None:
        """End the deletion of the job in the foreground when its pods are gone."""
        if self.exists and "deletionTimestamp" in self.job["metadata"] and not self.holding:
            left = [one for one in self.job["metadata"].get("finalizers") or () if one != "foregroundDeletion"]
            if left:
                self.api.change(self.kind.plural, self.name, lambda job: job["metadata"].update(finalizers=left))
            else:
                self.api.remove(self.kind.plural, self.name)

    # the process

    async def follow(
        self, options: Options | None = None, handover: Handover | None = None, *, first: Noticed | None = None,
        **host: Any,
    ) -> Outcome:  # fmt: skip
        """Follow the job to its end in a process of its own.

        :param host: of `owner`.
        """
        async with self.owner(**host) as training:
            training.handover = handover or Handover()
            async with asyncio.timeout(FOLLOW_SECONDS):
                outcome = await training.follow(self.ref, options or Options(), first=first)
        assert isinstance(outcome, Outcome)
        return outcome

    async def hand_over(
        self, seconds: float, options: Options | None = None, handover: Handover | None = None, **host: Any
    ) -> Handover:
        """Follow the job for so many seconds, in which it doesn't end; returns what the process hands over."""
        async with self.owner(**host) as training:
            training.handover = handover or Handover()
            found = await training.follow(self.ref, options or Options(), until=timing.now() + seconds)
        assert isinstance(found, Handover), found
        return Handover.from_dict(found.to_dict())

    @property
    def decided_after(self) -> float:
        """Seconds from the beginning of the last process until it has stored a conclusion, which is its last step."""
        return round(self.memory.stored_at - self.began, 1)

    @contextlib.asynccontextmanager
    async def owner(
        self, *, shared: bool = True, stop: StopSignal | None = None, sink: StatusSink | None = None, **host: Any
    ) -> AsyncIterator[Training]:
        """The owner of the training's life, in a trigger, or in a worker unless it is `shared`.

        :param host: further arguments of `host_of`.
        """
        self.began = timing.now()
        made = host_of(shared=shared, status_sink=sink or self.memory, **host)
        training = Training(lambda: connected(self.url), made, self.log, stop)
        try:
            yield training
        finally:
            await training.close()


@contextlib.asynccontextmanager
async def staged(kind: Kind = PYTORCHJOB, **how: Any) -> AsyncIterator[Staged]:
    """A job in an API server of its own."""
    api = ApiServer(admit=lambda request, obj: training.admit(request, obj))
    async with served(api) as url:
        training = Staged(api, kind, **how)
        training.url = url
        try:
            yield training
        finally:
            for one in training.background:
                one.cancel()


def writes_of(training: Staged, of: Iterable[str] = ("DELETE", "PATCH")) -> list[str]:
    """The requests that have changed the job or its pods."""
    return [line for line in training.api.writes() if line.split()[0] in of]
