"""A model of a Kubernetes API and an operator in memory, to test ownership and fencing. No time passes.

Each request waits at one gate before it is processed and at another before its response arrives. The test opens the
gates in random order, and so it decides every interleaving, crash and lost response.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.identity import (
    DEPLOYMENT_LABEL,
    MANIFEST_ANNOTATION,
    OWNER_ANNOTATION,
    Owner,
    TaskKey,
)
from airflow_provider_ktrain.core.kinds import PYTORCHJOB, Kind
from airflow_provider_ktrain.core.state.status import phase_of, wants_suspension
from airflow_provider_ktrain.engine import api_paths
from airflow_provider_ktrain.engine.api import ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.job_requests import has_ended, is_terminating
from tests.engine.model_watches import History, Stream, WatchingApi, selects

Object = dict[str, Any]
KEY = TaskKey("prod", "dag", "train", "run-1")
NAME, NAMESPACE = KEY.job_name(), "ns"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
REAPER = "reaper"


class InstantLoop(asyncio.SelectorEventLoop):
    """An event loop without I/O, whose time is set by the test."""

    class _Nothing(selectors.SelectSelector):
        def select(self, timeout: float | None = None) -> list[Any]:
            return []

    def __init__(self) -> None:
        super().__init__(self._Nothing())
        self.now = 0.0

    def time(self) -> float:
        return self.now


class Broken(AssertionError):
    """An invariant doesn't hold."""


@dataclass
class Gate:
    """The gate at which a request of `actor` waits. `answer`: the request is processed and its response waits."""

    actor: str
    answer: bool
    opened: asyncio.Future[None]


class Cluster:
    """One namespace of a Kubernetes API, with an operator and kubelets that act when the test calls them.

    The operator may act on a cache that is behind: it may still create a pod of a job that is being deleted. Garbage
    collection isn't behind: a job that is deleted in the foreground is removed only when it has no pods, and no pod is
    created after the removal. A TrainJob's pods are created as long as its JobSet exists.

    :param allowed: called with actor, verb, job and body of each write to a job; raises Broken.
    :param kind: of the jobs.
    :param cleans_up: whether the operator deletes the pods that still run when a job has ended (cleanPodPolicy).
    :param labels_pods: whether the pods have our labels. A TrainJob's may lack them.
    """

    def __init__(
        self,
        allowed: Callable[[str, str, Object, Object], None],
        kind: Kind = PYTORCHJOB,
        *,
        cleans_up: bool = False,
        labels_pods: bool = True,
    ) -> None:
        self.jobs: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.jobsets: dict[str, Object] = {}
        self.gates: list[Gate] = []
        self.streams: list[Stream] = []  # open watches
        self.created: list[Object] = []
        self.log: list[str] = []
        self.kind = kind
        self.orphaned: set[str] = set()  #: uids of jobs that a user deleted in the background: their pods outlive them
        self.version = 0
        self._allowed = allowed
        self._cleans_up = cleans_up
        self._labels_pods = labels_pods
        self._uids = itertools.count(1)
        self._over: dict[str, bool] = {}  # by uid of a job whose primary pod has ended: whether it succeeded
        self._late: set[str] = set()  # uids of terminating jobs of which the operator has created a pod
        self.jobs_path = api_paths.jobs(kind, kind.versions[0], NAMESPACE)
        self.histories = {self.jobs_path: History(), PODS: History()}

    # the API

    async def request(
        self, actor: str, method: str, path: str, query: Mapping[str, str], body: Any, spares_ended: bool = False
    ) -> Object:
        await self._gate(actor, False)
        try:
            answer = self._carry_out(actor, method, path, query, body, spares_ended)
        except ApiStatusError as e:
            self.log.append(f"{actor}: {method} {path.rpartition('/')[2]}: {e}")
            await self._gate(actor, True)
            raise
        self.log.append(f"{actor}: {method} {path.rpartition('/')[2]}: done")
        await self._gate(actor, True)
        return answer

    async def _gate(self, actor: str, answer: bool) -> None:
        gate = Gate(actor, answer, asyncio.get_running_loop().create_future())
        self.gates.append(gate)
        try:
            await gate.opened
        finally:
            self.gates.remove(gate)

    def _carry_out(
        self, actor: str, method: str, path: str, query: Mapping[str, str], body: Any, spares_ended: bool
    ) -> Object:
        if path in (self.jobs_path, PODS) and method == "GET":
            return self._list(path, query)
        if path == self.jobs_path:
            assert method == "POST"
            return self._create(actor, body)
        parent, _, name = path.rpartition("/")
        if parent == PODS:
            return self._delete_pod(actor, name, body)
        objects = self.jobs if parent == self.jobs_path else self.jobsets
        found = objects.get(name)
        if found is None:
            raise ApiStatusError(404, "NotFound", f'"{name}" not found')
        if method == "GET":
            return copy.deepcopy(found)
        assert objects is self.jobs
        self._compare(found, body["preconditions"] if method == "DELETE" else body["metadata"])
        self._allowed(actor, method, found, body)
        if method == "DELETE":
            if spares_ended and phase_of(found).ended:
                raise Broken(f"{actor} deletes a job that has ended, which it must keep")
            assert body["propagationPolicy"] == self.kind.propagation
            self._request_deletion(found)
        else:
            for annotation, value in body["metadata"]["annotations"].items():
                found["metadata"]["annotations"].pop(annotation, None)
                if value is not None:
                    found["metadata"]["annotations"][annotation] = value
            spec = body.get("spec", {})
            found["spec"] |= {k: v for k, v in spec.items() if k != "runPolicy"}
            found["spec"].setdefault("runPolicy", {}).update(spec.get("runPolicy", {}))
            self._written(found)
        return copy.deepcopy(found)

    def _list(self, path: str, query: Mapping[str, str]) -> Object:
        objects = self.pods if path == PODS else self.jobs
        found = [obj for obj in objects.values() if selects(query, obj)]
        return {"kind": f"{found[0]['kind'] if found else ''}List", "items": copy.deepcopy(found),
                "metadata": {"resourceVersion": str(self.version)}}  # fmt: skip

    def _create(self, actor: str, body: Object) -> Object:
        name = body["metadata"]["name"]
        if name in self.jobs:
            raise ApiStatusError(409, "AlreadyExists", f'"{name}" already exists')
        self._allowed(actor, "POST", {}, body)
        job = {**copy.deepcopy(body), "kind": self.kind.name, "status": {"conditions": []}}
        job["metadata"] |= {"uid": f"uid-{next(self._uids)}", "creationTimestamp": self._time()}
        self.jobs[name] = job
        self.created.append(job)
        return copy.deepcopy(self._written(job))

    def _request_deletion(self, job: Object) -> None:
        if self.kind.pods_outlive_job:
            self._removed(self.jobs, job)
        elif "deletionTimestamp" not in job["metadata"]:
            job["metadata"]["deletionTimestamp"] = self._time()
            self._written(job)

    def _delete_pod(self, actor: str, name: str, body: Any) -> Object:
        pod = self.pods.get(name)
        if pod is None:
            raise ApiStatusError(404, "NotFound", name)
        if body["preconditions"]["uid"] != pod["metadata"]["uid"]:
            raise ApiStatusError(409, "Conflict", name)
        for job in self.jobs.values():
            if job["metadata"]["uid"] == pod["metadata"]["job"] and not phase_of(job).ended:
                raise Broken(f"{actor} deletes a pod of a job that has not ended")
        self._terminate(pod)
        return {}

    @staticmethod
    def _compare(job: Object, expected: Mapping[str, Any]) -> None:
        for field_ in ("uid", "resourceVersion"):
            if field_ in expected and expected[field_] != job["metadata"][field_]:
                raise ApiStatusError(409, "Conflict", f"{field_} has changed")

    def _time(self) -> str:
        return f"2026-11-21T10:{self.version:08d}"  # only compared

    def _written(self, obj: Object) -> Object:
        """Give the object a new version after a change."""
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.histories[PODS if obj["kind"] == "Pod" else self.jobs_path].note(self.version, obj)
        return obj

    def _removed(self, objects: dict[str, Object], obj: Object) -> None:
        del objects[obj["metadata"]["name"]]
        self.version += 1
        if objects is not self.jobsets:
            self.histories[PODS if obj["kind"] == "Pod" else self.jobs_path].note(self.version, obj, deleted=True)

    def expire(self) -> None:
        """Compact the history, so that watches can't be resumed from earlier versions."""
        for history in self.histories.values():
            history.expired = self.version

    # the operator, the garbage collector and the kubelets

    def reconcile(self, rng: random.Random) -> None:
        """One step of them, if a step is possible."""
        gone = [pod for pod in self.pods.values() if "deletionTimestamp" in pod["metadata"]]
        if gone and rng.random() < 0.5:
            self._removed(self.pods, rng.choice(gone))
            return
        for job in list(self.jobs.values()):
            self._reconcile(job, rng)
        if self.kind.pods_outlive_job:
            self._reconcile_jobsets(rng)
        uids = {obj["metadata"]["uid"] for obj in (*self.jobs.values(), *self.jobsets.values())}
        for pod in self.pods.values():
            if pod["metadata"]["ownerReferences"][0]["uid"] not in uids:
                self._terminate(pod)

    def _reconcile(self, job: Object, rng: random.Random) -> None:
        meta, phase, mine = job["metadata"], phase_of(job), self._pods_of(job)
        if "deletionTimestamp" in meta:
            for pod in mine:
                self._terminate(pod)
            if not mine:
                self._removed(self.jobs, job)
            elif meta["uid"] not in self._late and not phase.ended and rng.random() < 0.2:
                self._late.add(meta["uid"])  # the operator's cache doesn't have the deletion yet
                self._create_pods(job)
        elif phase.ended:
            if self._cleans_up or self.kind.pods_outlive_job:
                for pod in mine:
                    if not has_ended(pod):
                        self._terminate(pod)
        elif wants_suspension(job) and not (self.kind.pods_outlive_job and meta["uid"] in self._over):
            for pod in mine:
                self._terminate(pod)
            self._over.pop(meta["uid"], None)  # it trains again when it is resumed
            self._condition(job, "Suspended")
        elif meta["uid"] in self._over:
            if not self.kind.pods_outlive_job:
                self._create_pods(job)  # a missing pod is created in the pass that observes the end
            self._condition(job, "Succeeded" if self._over[meta["uid"]] else "Failed")
        elif not self.kind.pods_outlive_job:
            self._run(job)

    def _reconcile_jobsets(self, rng: random.Random) -> None:
        """A JobSet outlives its TrainJob until it is collected, and creates pods until then."""
        for job in self.jobs.values():
            if job["metadata"]["name"] not in self.jobsets and not phase_of(job).ended and not wants_suspension(job):
                owners = [{"uid": job["metadata"]["uid"], "kind": self.kind.name}]
                meta = {"name": job["metadata"]["name"], "uid": f"uid-{next(self._uids)}", "ownerReferences": owners}
                self.jobsets[meta["name"]] = {"metadata": meta, "job": job}
                return
        for jobset in list(self.jobsets.values()):
            job = jobset["job"]
            if self.jobs.get(job["metadata"]["name"]) is not job and rng.random() < 0.5:
                self._removed(self.jobsets, jobset)
                return
            if not phase_of(job).ended and not wants_suspension(job) and job["metadata"]["uid"] not in self._over:
                self._run(job)

    def _run(self, job: Object) -> None:
        """Replace the pods that have failed, and create the missing ones."""
        for pod in self._pods_of(job):
            if has_ended(pod):
                self._terminate(pod)
        self._create_pods(job)
        self._condition(job, "Running")

    def _create_pods(self, job: Object) -> None:
        meta = job["metadata"]
        known = {pod["metadata"]["labels"]["index"] for pod in self._pods_of(job)}
        jobset = self.jobsets.get(meta["name"])
        for index, labels in enumerate(_ROLES[self.kind.name]):
            uid = f"uid-{next(self._uids)}"
            name = f"{meta['name']}-{index}" + f"-{uid}" * self.kind.pods_outlive_job
            if str(index) in known or name in self.pods:
                continue
            ours = dict(meta.get("labels") or {}) if self._labels_pods else {}
            owner = jobset["metadata"]["uid"] if jobset is not None else meta["uid"]
            self.pods[name] = {
                "kind": "Pod",
                "metadata": {
                    "name": name, "uid": uid, "job": meta["uid"], "creationTimestamp": self._time(),
                    "created": self.version, "ownerReferences": [{"uid": owner, "kind": self.kind.name, "name": ""}],
                    "labels": {**ours, **labels, "index": str(index), self.kind.pod_name_label: meta["name"],
                               **({self.kind.pod_owner_label: owner} if jobset is not None else {})},
                },
                "spec": {"nodeName": "node", "terminationGracePeriodSeconds": 1},
                "status": {"phase": "Running"},
            }  # fmt: skip
            self._written(self.pods[name])

    def _pods_of(self, job: Object) -> list[Object]:
        return [pod for pod in self.pods.values() if pod["metadata"]["job"] == job["metadata"]["uid"]]

    def _terminate(self, pod: Object) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = self._time()
            self._written(pod)

    def touch(self) -> None:
        """The operator writes an unchanged status."""
        for job in self.jobs.values():
            self._written(job)

    def finish(self, succeeded: bool, lingering: bool = False) -> None:
        """The training ends. `lingering`: one of its pods continues to run, as with `cleanPodPolicy: None`."""
        for job in self.jobs.values():
            mine = self._pods_of(job)
            runs = [pod for pod in mine if pod["metadata"]["labels"]["index"] == "0" and not has_ended(pod)]
            if runs and not phase_of(job).ended and "deletionTimestamp" not in job["metadata"]:
                self._over[job["metadata"]["uid"]] = succeeded
                for pod in runs if lingering else mine:
                    self._end(pod, succeeded)

    def fail_pod(self, rng: random.Random) -> None:
        """A pod of a training that goes on fails, and the operator replaces it."""
        running = [pod for pod in self.pods.values() if not has_ended(pod) and pod["metadata"]["job"] not in self._over]
        if running:
            self._end(rng.choice(running), False)

    def _end(self, pod: Object, succeeded: bool) -> None:
        if not has_ended(pod):
            pod["status"]["phase"] = "Succeeded" if succeeded else "Failed"
            self._written(pod)

    def remove_label(self, rng: random.Random) -> None:
        """A user removes the label of the deployment from a job or a pod that isn't being deleted."""
        candidates = rng.choice([self.jobs, self.pods]).values()
        objects = [obj for obj in candidates if not is_terminating(obj)]
        if objects:
            obj = rng.choice(objects)
            obj["metadata"]["labels"].pop(DEPLOYMENT_LABEL, None)
            self._written(obj)

    def delete(self, propagation: str) -> None:
        """A user deletes the job. In the background, which is kubectl's default, the job is removed at once."""
        for job in list(self.jobs.values()):
            if propagation == "Background" and "deletionTimestamp" not in job["metadata"]:
                self.orphaned.add(job["metadata"]["uid"])
                self._removed(self.jobs, job)
            elif propagation == self.kind.propagation:
                self._request_deletion(job)

    def _condition(self, job: Object, kind: str) -> None:
        if not self.kind.reports_phases:
            kind = {"Succeeded": "Complete", "Running": ""}.get(kind, kind)
        wanted = [kind] if kind else []
        if [c["type"] for c in job["status"]["conditions"]] != wanted:
            job["status"] = {
                "conditions": [{"type": kind, "status": "True"} for kind in wanted],
                "startTime": "2026-11-21T10:00:00Z",
            }
            if phase_of(job).ended and self.kind.reports_phases:
                job["status"]["completionTime"] = "2026-11-21T10:30:00Z"
            self._written(job)

    def live(self) -> set[str]:
        """Uids of the jobs whose pods hold GPUs."""
        return {p["metadata"]["job"] for p in self.pods.values() if p["status"]["phase"] == "Running"}

    def held(self, uid: str, before: int | None = None, *, terminating: bool = True) -> list[str]:
        """Names of the pods of a job that hold GPUs.

        :param before: count only pods that were created before this version. Default: all.
        :param terminating: count pods that are being deleted, too. Default: True.
        """
        return [
            pod["metadata"]["name"]
            for pod in self.pods.values()
            if pod["metadata"]["job"] == uid and not has_ended(pod)
            if before is None or pod["metadata"]["created"] < before
            if terminating or not is_terminating(pod)
        ]


_ROLE = "training.kubeflow.org/replica-type"
_ROLES: dict[str, tuple[Object, ...]] = {
    "PyTorchJob": ({_ROLE: "master"}, {_ROLE: "worker"}),
    "MPIJob": ({_ROLE: "launcher"}, {_ROLE: "worker"}),
    "TrainJob": ({"jobset.sigs.k8s.io/replicatedjob-name": "node"},) * 2,
}


class Client(WatchingApi):
    """The part of `engine.api.Api` that submit and release use, for one process of a try.

    :param informers: of all clients of the same process. Default: of this client alone.
    """

    def __init__(
        self, cluster: Cluster, actor: str, informers: dict[tuple[str, str, str], object] | None = None
    ) -> None:
        super().__init__(cluster.histories, cluster.streams, informers)
        self._cluster, self.actor = cluster, actor
        self._spares_ended = False  # whether deleting a job that has ended is an error
        self._uid = ""  # of the job that is released
        self._has_read = False  # whether the job was read, and is gone or this actor's

    def begin_release(self, uid: str, spares_ended: bool) -> None:
        """Check the requests of a release of the job with this uid."""
        self._uid, self._spares_ended, self._has_read = uid, spares_ended, False

    def end_release(self) -> None:
        self._spares_ended, self._has_read = False, True

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None, **_: Any
    ) -> Object:
        if method == "DELETE" and path.startswith(PODS) and not self._has_read:
            raise Broken(f"{self.actor} deletes a pod without a read of its job")
        reads_job = method == "GET" and path.startswith(f"{self._cluster.jobs_path}/")
        try:
            answer = await self._cluster.request(self.actor, method, path, query or {}, body, self._spares_ended)
        except ApiStatusError as e:
            self._has_read = self._has_read or (reads_job and e.status == 404)
            raise
        if reads_job:
            owner = Owner.of(answer)
            mine = self.actor == REAPER or (owner is not None and owner.ti_id == self.actor)
            self._has_read = mine or answer["metadata"]["uid"] != self._uid
        return answer

    async def cluster(self) -> str:
        return "https://cluster"


class Quiet:
    def info(self, event: Any, *args: Any, **kw: Any) -> None: ...

    def warning(self, event: Any, *args: Any, **kw: Any) -> None: ...

    def error(self, event: Any, *args: Any, **kw: Any) -> None: ...


def manifest(owner: Owner, submission: str, changed: bool = False, *, cleans_up: bool = False) -> Object:
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


def lost(gate: Gate) -> None:
    """Lose the request or its response."""
    gate.opened.set_exception(ApiUnavailable("cut"))


def spawn(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(coroutine, name=name)
