"""A model of a Kubernetes API, an operator and Airflow in memory, to test ownership and fencing. No time passes.

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
from dataclasses import dataclass, field
from typing import Any, cast

from airflow_provider_ktrain.core.adoption import first_try_since_clear
from airflow_provider_ktrain.core.identity import MANIFEST_ANNOTATION, OWNER_ANNOTATION, JobRef, Owner, TaskKey
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.state.status import phase_of
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable

Object = dict[str, Any]
KEY = TaskKey("prod", "dag", "train", "run-1")
NAME, NAMESPACE = KEY.job_name(), "ns"
JOBS = f"/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
RETRIES = 2


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
    """One namespace of a Kubernetes API, with an operator and kubelets that act when the test calls them."""

    def __init__(self, allowed: Callable[[str, str, Object, Object], None]) -> None:
        self.jobs: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.gates: list[Gate] = []
        self.created: list[Object] = []
        self.log: list[str] = []
        self._allowed = allowed  # called with actor, verb, job, body; raises Broken
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)

    # the API

    async def request(self, actor: str, method: str, path: str, query: Mapping[str, str], body: Any) -> Object:
        await self._gate(actor, False)
        try:
            answer = self._carry_out(actor, method, path, query, body)
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

    def _carry_out(self, actor: str, method: str, path: str, query: Mapping[str, str], body: Any) -> Object:
        if path == JOBS:
            assert method == "POST"
            return self._create(actor, body)
        if path == PODS:
            label, _, value = query["labelSelector"].partition("=")
            found = [p for p in self.pods.values() if p["metadata"]["labels"].get(label) == value]
            return {"items": copy.deepcopy(found)}
        parent, _, name = path.rpartition("/")
        if parent == PODS:
            return self._delete_pod(name, body)
        assert parent == JOBS
        job = self.jobs.get(name)
        if job is None:
            raise ApiStatusError(404, "NotFound", f'pytorchjobs "{name}" not found')
        if method == "GET":
            return copy.deepcopy(job)
        self._compare(job, body["preconditions"] if method == "DELETE" else body["metadata"])
        self._allowed(actor, method, job, body)
        if method == "DELETE":
            assert body["propagationPolicy"] == "Foreground"
            job["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
        else:
            for annotation, value in body["metadata"]["annotations"].items():
                job["metadata"]["annotations"].pop(annotation, None)
                if value is not None:
                    job["metadata"]["annotations"][annotation] = value
            job["spec"].setdefault("runPolicy", {}).update(body.get("spec", {}).get("runPolicy", {}))
        return copy.deepcopy(self._written(job))

    def _create(self, actor: str, body: Object) -> Object:
        name = body["metadata"]["name"]
        if name in self.jobs:
            raise ApiStatusError(409, "AlreadyExists", f'pytorchjobs "{name}" already exists')
        self._allowed(actor, "POST", {}, body)
        job = copy.deepcopy(body)
        job["metadata"]["uid"] = f"uid-{next(self._uids)}"
        job["status"] = {"conditions": []}
        self.jobs[name] = job
        self.created.append(job)
        return copy.deepcopy(self._written(job))

    def _delete_pod(self, name: str, body: Any) -> Object:
        pod = self.pods.get(name)
        if pod is None:
            raise ApiStatusError(404, "NotFound", name)
        if body["preconditions"]["uid"] != pod["metadata"]["uid"]:
            raise ApiStatusError(409, "Conflict", name)
        pod["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
        return {}

    @staticmethod
    def _compare(job: Object, expected: Mapping[str, Any]) -> None:
        for field_ in ("uid", "resourceVersion"):
            if field_ in expected and expected[field_] != job["metadata"][field_]:
                raise ApiStatusError(409, "Conflict", f"{field_} has changed")

    def _written(self, job: Object) -> Object:
        job["metadata"]["resourceVersion"] = str(next(self._versions))
        return job

    # the operator and the kubelets

    def reconcile(self, rng: random.Random) -> None:
        """One step of the operator and the kubelets, if a step is possible."""
        gone = [n for n, p in self.pods.items() if "deletionTimestamp" in p["metadata"]]
        if gone and rng.random() < 0.5:
            del self.pods[rng.choice(gone)]
            return
        for job in list(self.jobs.values()):
            self._reconcile(job)

    def _reconcile(self, job: Object) -> None:
        meta = job["metadata"]
        mine = [p for p in self.pods.values() if p["metadata"]["job"] == meta["uid"]]
        phase = phase_of(job)
        if "deletionTimestamp" in meta:
            for pod in mine:
                pod["metadata"]["deletionTimestamp"] = meta["deletionTimestamp"]
            if not mine:
                del self.jobs[meta["name"]]
        elif phase.ended:
            return
        elif job["spec"].get("runPolicy", {}).get("suspend"):
            for pod in mine:
                pod["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
            self._condition(job, "Suspended")
        elif not mine:
            for i in range(2):
                uid = f"uid-{next(self._uids)}"
                self.pods[f"{meta['name']}-{i}-{uid}"] = {
                    "metadata": {
                        "name": f"{meta['name']}-{i}-{uid}", "uid": uid, "job": meta["uid"],
                        "labels": dict(meta.get("labels") or {}),
                    },
                    "status": {"phase": "Running"},
                }  # fmt: skip
            self._condition(job, "Running")

    def touch(self) -> None:
        """The operator writes an unchanged status."""
        for job in self.jobs.values():
            self._written(job)

    def finish(self, succeeded: bool, lingering: bool = False) -> None:
        """The training ends. `lingering`: one of its pods continues to run, as with `cleanPodPolicy: None`."""
        for job in self.jobs.values():
            if "Running" in (c["type"] for c in job["status"]["conditions"]):
                self._condition(job, "Succeeded" if succeeded else "Failed")
                mine = [p for p in self.pods.values() if p["metadata"]["job"] == job["metadata"]["uid"]]
                for pod in mine[:1] if lingering else mine:
                    pod["status"]["phase"] = "Succeeded" if succeeded else "Failed"

    def delete(self) -> None:
        """A user deletes the job by kubectl."""
        for job in self.jobs.values():
            job["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
            self._written(job)

    def _condition(self, job: Object, kind: str) -> None:
        if [c["type"] for c in job["status"]["conditions"]] != [kind]:
            job["status"] = {"conditions": [{"type": kind, "status": "True"}], "startTime": "2026-11-21T10:00:00Z"}
            self._written(job)

    def live(self) -> set[str]:
        """Uids of the jobs whose pods hold GPUs."""
        return {p["metadata"]["job"] for p in self.pods.values() if p["status"]["phase"] == "Running"}


@dataclass
class Try:
    """One try of the task, with its processes."""

    owner: Owner
    began: int  # first try since the task was cleared
    first: int  # the same, as the task computes it
    ref: JobRef | None = None
    process: asyncio.Task[None] | None = None
    others: list[asyncio.Task[None]] = field(default_factory=list)
    killed: bool = False  # a kill has released the job of this try

    @property
    def name(self) -> str:
        return self.owner.ti_id


class Airflow:
    """One task instance: its state, its tries, and Airflow's rules for starting the next try."""

    def __init__(self) -> None:
        self.state = "none"  # none, running, up_for_retry, success, failed
        self.try_number = 0
        self.max_tries = RETRIES
        self.tries: list[Try] = []

    @property
    def current(self) -> Try:
        return self.tries[-1]

    def start(self, retries: int = RETRIES) -> Try:
        """Start the next try. `retries` in the DAG file may have changed."""
        self.try_number += 1
        self.state = "running"
        began, first = (
            min(first_try_since_clear(self.max_tries, value), self.try_number) for value in (RETRIES, retries)
        )
        self.tries.append(Try(Owner(KEY, self.try_number, f"ti-{self.try_number}", self.max_tries), began, first))
        return self.current

    def end(self, ended: Try, succeeded: bool) -> None:
        """A try reports its end. Airflow ignores the report of any try but the current one."""
        if ended is self.current and self.state == "running":
            again = self.try_number <= self.max_tries
            self.state = "success" if succeeded else "up_for_retry" if again else "failed"

    def clear(self) -> None:
        """Clear the task. Nothing else changes max_tries, and clearing a running task doesn't change it."""
        if self.state != "running":
            self.max_tries = self.try_number + RETRIES
        self.state = "none"


class Client:
    """The part of `engine.api.Api` that submit and release use, for one try."""

    def __init__(self, cluster: Cluster, actor: str) -> None:
        self._cluster, self._actor = cluster, actor
        self.informers: dict[tuple[str, str, str], object] = {}  # no watch runs, so releases read and list

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None, **_: Any
    ) -> Object:
        return await self._cluster.request(self._actor, method, path, query or {}, body)

    async def cluster(self) -> str:
        return "https://cluster"


class Quiet:
    def info(self, event: Any, *args: Any, **kw: Any) -> None: ...

    def warning(self, event: Any, *args: Any, **kw: Any) -> None: ...

    def error(self, event: Any, *args: Any, **kw: Any) -> None: ...


def client(cluster: Cluster, actor: str) -> Api:
    return cast(Api, Client(cluster, actor))


def manifest(owner: Owner, submission: str, changed: bool = False) -> Object:
    return {
        "metadata": {
            "namespace": NAMESPACE, "name": NAME, "labels": KEY.labels(submission),
            "annotations": {
                OWNER_ANNOTATION: owner.annotation(),
                MANIFEST_ANNOTATION: f"of try {owner.try_number}" if changed else "same",
            },
        },
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}}, "runPolicy": {}},
    }  # fmt: skip


def lost(gate: Gate) -> None:
    """Lose the request or its response."""
    gate.opened.set_exception(ApiUnavailable("cut"))


def spawn(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(coroutine, name=name)


KIND = PYTORCHJOB
