"""A model of a Kubernetes API and an operator in memory. Its time is that of the model's event loop.

Each request waits at one gate before it is processed and at another before its response arrives. The test opens the
gates in random order, and so it decides every interleaving, crash and lost response.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from airflow_provider_ktrain.core.identity.names import (
    DEPLOYMENT_LABEL,
    MANIFEST_ANNOTATION,
    OWNER_ANNOTATION,
    SUSPENDED_ANNOTATION,
    Owner,
    TaskKey,
)
from airflow_provider_ktrain.core.kinds import PYTORCHJOB, Kind
from airflow_provider_ktrain.core.state.pods.objects import has_ended, is_being_deleted
from airflow_provider_ktrain.core.state.status import Phase, phase_of, wants_suspension
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import ApiStatusError
from airflow_provider_ktrain.engine.follow.divergence import LAST_LINES
from tests.apiserver import ApiServer, Lost, Request, Response
from tests.apiserver.in_process import InProcessApi
from tests.apiserver.resources import Resource
from tests.apiserver.server import Stream

Object = dict[str, Any]
KEY = TaskKey("prod", "dag", "train", "run-1")
NAME, NAMESPACE = KEY.job_name(), "ns"
PODS = api_paths.core(NAMESPACE, "pods")
EPOCH = datetime(2026, 11, 21, 10, tzinfo=UTC).timestamp()
REAPER = "reaper"
_ROLE, _INDEX = "training.kubeflow.org/replica-type", "batch.kubernetes.io/job-completion-index"
_JOBSET_ROLE = "jobset.sigs.k8s.io/replicatedjob-name"
_ROLES: dict[str, tuple[Object, ...]] = {
    "PyTorchJob": ({_ROLE: "master"}, {_ROLE: "worker"}),
    "MPIJob": ({_ROLE: "launcher"}, {_ROLE: "worker"}),
    "TrainJob": ({_JOBSET_ROLE: "node", _INDEX: "0"}, {_JOBSET_ROLE: "node", _INDEX: "1"}),
}


class InstantLoop(asyncio.SelectorEventLoop):
    """An event loop without I/O, whose time is set by the test."""

    class _Nothing(selectors.SelectSelector):
        def select(self, timeout: float | None = None) -> list[Any]:
            return []

    def __init__(self) -> None:
        super().__init__(self._Nothing())
        self.now = 1000.0  # a process never starts at 0

    def time(self) -> float:
        return self.now

    def epoch(self) -> float:
        """The time in epoch seconds."""
        return EPOCH + self.now

    async def turn(self, seconds: float) -> None:
        """Let time pass, and the tasks run."""
        self.now += seconds
        for _ in range(3):
            await asyncio.sleep(0)
            for thread in threading.enumerate():  # of `engine.threads.in_thread`
                if thread.name == "ktrain-call":
                    thread.join()


class Broken(BaseException):
    """An invariant doesn't hold. No Exception, because the product tries again after each of these."""


@dataclass(frozen=True)
class Evidence:
    """What one process has read of the job and its pods for a decision, as the API server had it."""

    job: Object
    pods: list[Object]


class Rules(Protocol):
    """Judges each write. Its methods raise Broken."""

    def check_create(self, client: Client, job: Object) -> None: ...

    def check_write(self, client: Client, verb: str, job: Object, sent: Object) -> None: ...


class Cluster(ApiServer):
    """A scripted API server with an operator and kubelets that act when the test calls them.

    All requests wait at its gates. The operator may act on a cache that is behind: it may still create a pod of a job
    that is being deleted. Garbage collection isn't behind: a job that is deleted in the foreground is removed only when
    it has no pods, and no pod is created after the removal. A TrainJob's pods are created as long as its JobSet exists.

    :param rules: judge each write to a job.
    :param clock: returns the time in epoch seconds.
    :param kind: of the jobs.
    :param cleans_up: whether the operator deletes the pods that still run when a job has ended (cleanPodPolicy).
    :param labels_pods: whether the pods have our labels. A TrainJob's may lack them.
    """

    def __init__(
        self,
        rules: Rules,
        clock: Callable[[], float],
        kind: Kind = PYTORCHJOB,
        *,
        cleans_up: bool = False,
        labels_pods: bool = True,
    ) -> None:
        super().__init__(admit=self._judge)
        self.hold("before|after")
        self.kind = kind
        self.jobs, self.jobsets = self.objects[kind.plural], self.objects["jobsets"]
        self.story: list[str] = []
        self.no_nodes_until = self.no_images_until = 0.0  #: Epoch seconds.
        self.status_lag = 0.0  #: Seconds from the end of the primary's container to the job's condition, at least.
        self.orphaned: set[str] = set()  #: Uids of jobs that a user deleted in the background: their pods outlive them.
        self.touched_by_users: set[str] = set()  #: Uids of jobs that a user deleted or suspended.
        #: The owner, at that time, of each job whose status showed Succeeded, by the job's uid.
        self.shown_succeeded: dict[str, Owner] = {}
        self._rules, self._clock = rules, clock
        self._cleans_up = cleans_up
        self._labels_pods = labels_pods
        self.over: dict[str, bool] = {}  #: Whether the job of this uid, whose primary pod has ended, succeeded.
        self._over_at: dict[str, float] = {}
        self._last_jobs: dict[str, Object] = {}  # by uid, also of those that are gone
        self._late: set[str] = set()  # uids of terminating jobs of which the operator has created a pod
        self.jobs_path = api_paths.jobs(kind, kind.versions[0], NAMESPACE)

    # the API

    def answer(self, request: Request) -> Response | Stream:
        answer = super().answer(request)
        if isinstance(answer, Response):
            self.record(f"{request.actor}: {request.method} {request.path.rpartition('/')[2]}: {answer.status}")
        return answer

    def check_reached(self, request: Request) -> None:
        super().check_reached(request)
        if isinstance(request.sender, Client) and request.sender.is_dead:
            raise Lost("the process is dead")

    def record(self, text: str) -> None:
        self.story.append(f"{self._clock() - EPOCH:7.1f} {text}")

    def _judge(self, request: Request, obj: Object | None) -> None:
        """Check a write.

        :raises Broken: it must not happen.
        """
        client = request.sender
        assert isinstance(client, Client)
        if obj is None:
            self._rules.check_create(client, request.body)
        elif obj["kind"] != "Pod":
            self._rules.check_write(client, request.method, obj, request.body)
        elif not client.has_read_job:
            raise Broken(f"{client.actor} deletes a pod without a read of its job")
        else:
            for job in self.jobs.values():
                if job["metadata"]["uid"] == obj["metadata"]["job"] and not phase_of(job).ended:
                    raise Broken(f"{client.actor} deletes a pod of a job that has not ended")

    def carry_out_deletion(self, resource: Resource, obj: Object, options: Mapping[str, Any]) -> Response:
        if resource.plural == "pods":
            self._terminate(obj)
        elif options["propagationPolicy"] != self.kind.behavior.propagation:
            raise Broken(f"a {self.kind.name} is deleted in the {options['propagationPolicy']}")
        else:
            self._request_deletion(obj)
        return Response(200, obj)

    def put(self, resource: str, obj: Object) -> Object:
        if resource == self.kind.plural:
            obj.setdefault("status", {"conditions": []})
        obj["metadata"].setdefault("creationTimestamp", self.stamp())
        put = super().put(resource, obj)
        if resource == self.kind.plural:
            self._last_jobs[put["metadata"]["uid"]] = put
        return put

    def collect(self, uid: str) -> None:
        """Nothing at once: `reconcile` does it."""

    def _request_deletion(self, job: Object) -> None:
        if self.kind.behavior.pods_outlive_job:
            self._removed(job)
        elif "deletionTimestamp" not in job["metadata"]:
            job["metadata"]["deletionTimestamp"] = self.stamp()
            self._written(job)

    def stamp(self) -> str:
        """The time as the API server writes it, with a fraction by which writes of one second are ordered."""
        at = datetime.fromtimestamp(int(self._clock()), UTC)
        return f"{at:%Y-%m-%dT%H:%M:%S}.{self.version:06d}Z"

    def _written(self, obj: Object) -> None:
        """Give the object a new version after a change."""
        self.put("pods" if obj["kind"] == "Pod" else self.kind.plural, obj)

    def _removed(self, obj: Object) -> None:
        self.remove({"Pod": "pods", "JobSet": "jobsets"}.get(obj["kind"], self.kind.plural), obj["metadata"]["name"])

    # the operator, the garbage collector, the scheduler and the kubelets

    def reconcile(self, rng: random.Random) -> None:
        """One step of them, if a step is possible."""
        gone = [pod for pod in self.pods.values() if "deletionTimestamp" in pod["metadata"]]
        if gone and rng.random() < 0.3:
            self._removed(rng.choice(gone))
            return
        self._start_pods(rng)
        for job in list(self.jobs.values()):
            self._reconcile(job, rng)
        if self.kind.behavior.pods_outlive_job:
            self._reconcile_jobsets(rng)
        uids = {obj["metadata"]["uid"] for obj in (*self.jobs.values(), *self.jobsets.values())}
        for pod in self.pods.values():
            if pod["metadata"]["ownerReferences"][0]["uid"] not in uids:
                self._terminate(pod)

    def _start_pods(self, rng: random.Random) -> None:
        now = self._clock()
        for pod in self.pods.values():
            if pod["status"]["phase"] != "Pending" or is_being_deleted(pod) or rng.random() < 0.3:
                continue
            if "nodeName" not in pod["spec"]:
                if now >= self.no_nodes_until or rng.random() < 0.05:
                    pod["spec"]["nodeName"] = "node"
                    pod["status"]["conditions"] = [
                        {"type": "PodScheduled", "status": "True", "lastTransitionTime": self.stamp()}
                    ]
                    self._written(pod)
            elif now >= self.no_images_until:
                pod["status"] |= {"phase": "Running", **self._containers(pod, {"running": {"startedAt": self.stamp()}})}
                self._written(pod)

    @staticmethod
    def _containers(pod: Object, state: Object) -> Object:
        names = [container["name"] for container in pod["spec"]["containers"]]
        return {"containerStatuses": [{"name": name, "restartCount": 0, "state": state} for name in names]}

    def _reconcile(self, job: Object, rng: random.Random) -> None:
        meta, phase, mine = job["metadata"], phase_of(job), self.pods_of(job)
        if "deletionTimestamp" in meta:
            for pod in mine:
                self._terminate(pod)
            if not mine:
                self._removed(job)
            elif meta["uid"] not in self._late and not phase.ended and rng.random() < 0.2:
                self._late.add(meta["uid"])  # the operator's cache doesn't have the deletion yet
                self._create_pods(job)
        elif phase.ended:
            if self._cleans_up or self.kind.behavior.pods_outlive_job:
                for pod in mine:
                    if not has_ended(pod):
                        self._terminate(pod)
        elif wants_suspension(job) and not (self.kind.behavior.pods_outlive_job and meta["uid"] in self.over):
            for pod in mine:
                self._terminate(pod)
            self.over.pop(meta["uid"], None)  # it trains again when it is resumed
            self._condition(job, "Suspended")
        elif meta["uid"] in self.over:
            if self._clock() < self._over_at[meta["uid"]] + self.status_lag:
                return
            if not self.kind.behavior.pods_outlive_job:
                self._create_pods(job)  # a missing pod is created in the pass that observes the end
            self._condition(job, "Succeeded" if self.over[meta["uid"]] else "Failed")
        elif not self.kind.behavior.pods_outlive_job:
            self._run(job)

    def _reconcile_jobsets(self, rng: random.Random) -> None:
        """A JobSet outlives its TrainJob until it is collected, and creates pods until then."""
        for job in self.jobs.values():
            if job["metadata"]["name"] not in self.jobsets and not phase_of(job).ended and not wants_suspension(job):
                owners = [{"uid": job["metadata"]["uid"], "kind": self.kind.name}]
                self.put("jobsets", {"metadata": {"name": job["metadata"]["name"], "ownerReferences": owners}})
                return
        for jobset in list(self.jobsets.values()):
            job = self._last_jobs[jobset["metadata"]["ownerReferences"][0]["uid"]]
            if self.job_of(job["metadata"]["uid"]) is None and rng.random() < 0.5:
                self._removed(jobset)
                return
            if not phase_of(job).ended and not wants_suspension(job) and job["metadata"]["uid"] not in self.over:
                self._run(job)

    def _run(self, job: Object) -> None:
        """Replace the pods that have failed, and create the missing ones."""
        for pod in self.pods_of(job):
            if has_ended(pod):
                self._terminate(pod)
        self._create_pods(job)
        runs = all(pod["status"]["phase"] == "Running" for pod in self.pods_of(job))
        self._condition(job, "Running" if runs else "Created")

    def _create_pods(self, job: Object) -> None:
        meta = job["metadata"]
        known = {pod["metadata"]["labels"]["index"] for pod in self.pods_of(job)}
        jobset = self.jobsets.get(meta["name"])
        for index, labels in enumerate(_ROLES[self.kind.name]):
            uid = self.new_uid()
            name = f"{meta['name']}-{index}" + f"-{uid}" * self.kind.behavior.pods_outlive_job
            if str(index) in known or name in self.pods:
                continue
            ours = dict(meta.get("labels") or {}) if self._labels_pods else {}
            owner = jobset["metadata"]["uid"] if jobset is not None else meta["uid"]
            pod = {
                "kind": "Pod",
                "metadata": {
                    "name": name, "namespace": NAMESPACE, "uid": uid, "job": meta["uid"],
                    "creationTimestamp": self.stamp(),
                    "created": self.version, "ownerReferences": [{"uid": owner, "kind": self.kind.name, "name": ""}],
                    "labels": {**ours, **labels, "index": str(index), self.kind.behavior.pod_name_label: meta["name"],
                               **({self.kind.behavior.pod_owner_label: owner} if jobset is not None else {})},
                },
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "containers": [{"name": self.kind.form.container or "node",
                                    "resources": {"limits": {"nvidia.com/gpu": 1}}}],
                },
                "status": {"phase": "Pending"},
            }  # fmt: skip
            self.put("pods", pod)

    def pods_of(self, job: Object) -> list[Object]:
        """All pods of a job."""
        return [pod for pod in self.pods.values() if pod["metadata"]["job"] == job["metadata"]["uid"]]

    def _terminate(self, pod: Object) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = self.stamp()
            self._written(pod)

    def _condition(self, job: Object, kind: str) -> None:
        if not self.kind.behavior.reports_phases:
            kind = {"Succeeded": "Complete", "Running": "", "Created": ""}.get(kind, kind)
        wanted = [kind] if kind else []
        before = job["status"]["conditions"]
        if [c["type"] for c in before if c["status"] == "True"] == wanted:
            return
        resumed = [c for c in before if c["type"] == "Suspended" and kind != "Suspended"]
        for condition in resumed:
            if condition["status"] == "True":
                condition |= {"status": "False", "lastTransitionTime": self.stamp()}
        shown = [{"type": kind, "status": "True", "lastTransitionTime": self.stamp()} for kind in wanted]
        job["status"] = {
            "conditions": [*resumed, *shown],
            "startTime": job["status"].get("startTime") or self.stamp(),
        }
        if phase_of(job).ended and self.kind.behavior.reports_phases:
            job["status"]["completionTime"] = self.stamp()
        owner = Owner.of(job)
        if phase_of(job) is Phase.SUCCEEDED and isinstance(owner, Owner):
            self.shown_succeeded[job["metadata"]["uid"]] = owner
        self._written(job)

    # what happens to trainings

    def report(self, rng: random.Random) -> None:
        """Running pods report a metric, which is often NaN and may recover. Streams may be late."""
        for pod in self.pods.values():
            if pod["status"]["phase"] == "Running" and pod["metadata"]["job"] not in self.over:
                log = self.log(pod["metadata"]["name"])
                was = log.files[-1][-1].text if log.files[-1] else b""
                for _ in range(rng.choice([1, 2, 3])):
                    recovers = rng.random() < (0.05 if b"NaN" in was else 0.3)
                    log.store(self.stamp(), f'KTRAIN_METRIC {{"loss": {"0.5" if recovers else "NaN"}}}')
                if rng.random() < 0.7:
                    log.grown.tell()

    def diverges(self, pod: str) -> bool:
        """Whether the last three reports of the pod with this name are NaN."""
        last = self.log(pod).files[-1][-3:]
        return len(last) == 3 and all(b"NaN" in record.text for record in last)

    def touch(self) -> None:
        """The operator writes an unchanged status."""
        for job in self.jobs.values():
            self._written(job)

    def finish(self, succeeded: bool, lingering: bool = False) -> None:
        """The training ends. `lingering`: one of its pods continues to run, as with `cleanPodPolicy: None`.

        A TrainJob succeeds when all its ranks have.
        """
        lingering = lingering and not (succeeded and self.kind.behavior.pods_outlive_job)
        for job in self.jobs.values():
            mine = self.pods_of(job)
            if not mine or any(pod["status"]["phase"] != "Running" or is_being_deleted(pod) for pod in mine):
                continue
            if len(mine) == len(_ROLES[self.kind.name]) and not phase_of(job).ended and not is_being_deleted(job):
                uid = job["metadata"]["uid"]
                self.over[uid], self._over_at[uid] = succeeded, self._clock()
                self.record(f"the program of {uid} ends with {'success' if succeeded else 'an error'}")
                for pod in mine:
                    if not lingering or pod["metadata"]["labels"]["index"] == "0":
                        self._end(pod, succeeded)

    def fail_pod(self, rng: random.Random) -> None:
        """A pod of a training that goes on fails, and the operator replaces it."""
        running = [
            pod
            for pod in self.pods.values()
            if pod["status"]["phase"] == "Running" and pod["metadata"]["job"] not in self.over
        ]
        if running:
            self._end(rng.choice(running), False)

    def _end(self, pod: Object, succeeded: bool) -> None:
        state = {"terminated": {"exitCode": 0 if succeeded else 1, "finishedAt": self.stamp()}}
        pod["status"] |= {"phase": "Succeeded" if succeeded else "Failed", **self._containers(pod, state)}
        self._written(pod)

    def remove_label(self, rng: random.Random) -> None:
        """A user removes the label of the deployment from a job or a pod that isn't being deleted."""
        candidates = rng.choice([self.jobs, self.pods]).values()
        objects = [obj for obj in candidates if not is_being_deleted(obj)]
        if objects:
            obj = rng.choice(objects)
            obj["metadata"]["labels"].pop(DEPLOYMENT_LABEL, None)
            self._written(obj)

    def suspend(self, suspend: bool) -> None:
        """A user suspends the job, or resumes it."""
        for job in self.jobs.values():
            ours = SUSPENDED_ANNOTATION in job["metadata"]["annotations"]
            if (
                wants_suspension(job) is not suspend
                and not ours
                and not phase_of(job).ended
                and not is_being_deleted(job)
            ):
                self.record(f"a user {'suspends' if suspend else 'resumes'} {job['metadata']['uid']}")
                self.touched_by_users.add(job["metadata"]["uid"])
                fields = self.kind.form.suspension(suspend)
                job["spec"] |= {k: v for k, v in fields.items() if k != "runPolicy"}
                job["spec"].setdefault("runPolicy", {}).update(fields.get("runPolicy", {}))
                self._written(job)

    def delete(self, propagation: str) -> None:
        """A user deletes the job. In the background, which is kubectl's default, the job is removed at once."""
        for job in list(self.jobs.values()):
            uid = job["metadata"]["uid"]
            if propagation == "Background" and "deletionTimestamp" not in job["metadata"]:
                self.orphaned.add(uid)
                self.touched_by_users.add(uid)
                self._removed(job)
            elif propagation == self.kind.behavior.propagation:
                self.touched_by_users.add(uid)
                self._request_deletion(job)

    # what is true

    def job_of(self, uid: str) -> Object | None:
        """The job with this uid; None if it doesn't exist."""
        return next((job for job in self.jobs.values() if job["metadata"]["uid"] == uid), None)

    def live(self) -> set[str]:
        """Uids of the jobs whose pods hold GPUs."""
        return {p["metadata"]["job"] for p in self.pods.values() if p["status"]["phase"] == "Running"}

    def held(self, uid: str) -> list[str]:
        """Names of the pods of a job that hold GPUs."""
        return [
            name
            for name, pod in self.pods.items()
            if pod["metadata"]["job"] == uid and pod["status"]["phase"] == "Running"
        ]


class Client(InProcessApi):
    """The client of one process of a try.

    :param informers: of all clients of the same process. Default: of this client alone.
    """

    def __init__(
        self, cluster: Cluster, actor: str, informers: dict[tuple[str, str, str], object] | None = None
    ) -> None:
        super().__init__(cluster, actor, informers)
        self._jobs_path = cluster.jobs_path
        self.is_dead = False  #: Whether the process was killed by SIGKILL.
        self.evidence: Evidence | None = None  #: The last read of job and pods.
        self.has_read_job = False  #: Whether the job was read, by a request of its own.
        self._job: Object | None = None  # as read by the last request of its own
        self.diverged: set[str] = set()  #: Uids of pods whose log ended with NaN when it was read again.
        self.process: Any = None  #: The process of model_hosts.

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None, **_: Any
    ) -> Object:
        task = asyncio.current_task()
        reads = method == "GET" and task is not None and not task.get_name().startswith("watch ")
        reads_job = reads and path.startswith(f"{self._jobs_path}/")
        try:
            answer = await super().request(method, path, query=query, body=body)
        except ApiStatusError as e:
            self.has_read_job = self.has_read_job or (reads_job and e.status == 404)
            raise
        if reads:
            self._record_answer(path, answer)
        return answer

    @contextlib.asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str], **kw: Any) -> AsyncIterator[Any]:
        async with super().stream(path, query=query, **kw) as response:
            if path.endswith("/log") and query.get("tailLines") == str(LAST_LINES):
                self._record_log(path.split("/")[-2])
            yield response

    def _record_log(self, pod: str) -> None:
        assert isinstance(self._server, Cluster)
        uid = self._server.pods[pod]["metadata"]["uid"]
        (self.diverged.add if self._server.diverges(pod) else self.diverged.discard)(uid)

    def _record_answer(self, path: str, answer: Object) -> None:
        """Keep what was read for a decision, not for a watch."""
        if path.startswith(f"{self._jobs_path}/"):
            self._job, self.has_read_job = answer, True
        elif path == PODS and self._job is not None:
            uid = self._job["metadata"]["uid"]
            self.evidence = Evidence(self._job, [p for p in answer["items"] if p["metadata"]["job"] == uid])


def manifest(owner: Owner, submission: str, changed: bool = False, *, cleans_up: bool = False) -> Object:
    """The manifest that a try submits."""
    return {
        "metadata": {
            "namespace": NAMESPACE, "name": NAME, "labels": KEY.labels(submission),
            "annotations": {
                OWNER_ANNOTATION: owner.annotation(),
                MANIFEST_ANNOTATION: f"of try {owner.try_number}" if changed else "same",
            },
        },
        "spec": {"runPolicy": {"cleanPodPolicy": "Running" if cleans_up else "None"}},
    }  # fmt: skip
