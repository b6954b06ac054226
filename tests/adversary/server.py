"""The cluster of a life: the training operators in virtual time, with a server that lies."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from tests.adversary.lies import LOGIN, PAGE, Lie, kind_of
from tests.adversary.truth import REAPER, Truth
from tests.apiserver import Lost, Object, Request, Response
from tests.apiserver.server import Stream
from tests.apiserver.store import copied
from tests.operators import operators
from tests.operators.operators import JOBS, Container, Operators, has_ended, has_phase

#: The wrong answer to a request, by its `Liar.purpose` and the number of wrong answers before it. None: the right one.
Plan = Callable[[str, int], Lie | None]


def _set_workers(field: str, workers: Object, job: Object) -> None:
    job["spec"][field]["Worker"] = workers


class Node(Container):
    """A container that tells how its program has ended."""

    def ended(self, code: int, reason: str = "") -> None:
        pod, cluster = self._pod, self._cluster
        assert isinstance(cluster, Liar)
        if pod is not None:
            labels, by_itself = pod["metadata"]["labels"], not self._terminating
            again = by_itself and (self._policy == "Always" or (self._policy == "OnFailure" and code != 0))
            job = operators._owner(pod)
            cluster.truth.program_ended(job, labels["test/replica"], code, by_itself=by_itself, again=again)
        super().ended(code, reason)


class Liar(Operators):
    """The API server of a life.

    :ivar truth: what it tells everything that truly happens.
    :ivar plan: its lies.
    :ivar rng: of the details of lies.
    :ivar is_cut_off: whether the present process is dead: nothing that it sends arrives.
    """

    truth: Truth
    container_class = Node

    def __init__(self, after: Callable[..., None], namespace: str = "default") -> None:
        self.plan: Plan = lambda purpose, count: None
        self.rng = random.Random(0)
        self.is_cut_off = False
        self._lied_about: set[str] = set()  # resources whose last list was a lie that nobody can detect
        self._last_lie: Lie | None = None  # if the last answer was one
        super().__init__(after, namespace=namespace)

    async def handle(self, request: Request) -> Response | Stream:
        if self.is_cut_off:
            raise Lost("the process is dead")
        if request.path == LOGIN:
            self.truth.object(f"{self.truth.actor} follows a redirect with {request.method}")
            return Response(200, PAGE)
        purpose = self.purpose(request)
        self.truth.requests.append(purpose)
        lie = self.plan(purpose, self.truth.lies)
        if lie is not None and lie.undetectable and request.where.resource in self._lied_about:
            lie = None
        if lie is not None and lie.once and lie is self._last_lie:  # credentials are refused once, not for good
            lie = None
        if lie is not None and (told := await self._lied(lie, request)) is not None:
            self._last_lie = lie
            return told
        self._last_lie = None
        if request.verb == "list":
            self._lied_about.discard(request.where.resource)
        return await self._true(request)

    def purpose(self, request: Request) -> str:
        """What a request is for, for example `get pytorchjobs`, or `reaper: get pytorchjobs`."""
        return f"{'reaper: ' if self.truth.actor == REAPER else ''}{kind_of(request)}"

    async def _lied(self, lie: Lie, request: Request) -> Response | None:
        carried_out = self.rng.random() < 0.5 if lie.carried_out is None else lie.carried_out
        if lie.undetectable and request.verb != "list":
            return None
        true: Any = None
        if lie.undetectable:  # not processed before it is known that this lie is possible
            true = super().answer(request)
        elif carried_out and request.verb not in ("watch", "log"):
            true = await self._true(request)
        told = lie.tell(request, true if isinstance(true, Response) else None, self, self.rng)
        if told is None:
            return true if isinstance(true, Response) and not lie.undetectable else None
        self.truth.lied()
        self.truth.compacted |= told.status == 410 or (request.verb == "watch" and b'"code": 410' in told.data)
        if lie.undetectable:
            self._lied_about.add(request.where.resource)
        self.truth.tell(f"  {self._line(request)}: LIE, {lie.name}{' (carried out)' if true is not None else ''}")
        return told

    async def _true(self, request: Request) -> Response | Stream:
        if request.method in ("DELETE", "PATCH"):
            self._check(request)
        answer = await super().handle(request)
        status = answer.status if isinstance(answer, Response) else "stream"
        self.truth.tell(f"  {self._line(request)}: {status}")
        return answer

    def _line(self, request: Request) -> str:
        where, query = request.where, request.query
        path = "/".join(part for part in (where.resource, where.name, where.sub) if part) or request.path
        chosen = {key: query[key] for key in ("resourceVersion", "previous", "dryRun") if key in query}
        return f"{request.verb if where.resource else 'discover'} {path}{f' {chosen}' if chosen else ''}"

    def _check(self, request: Request) -> None:
        """Tell the truth what a write will end, if it is carried out."""
        where = request.where
        obj = self.objects[where.resource].get(where.name)
        if obj is None or where.sub:
            return
        body: Mapping[str, Any] = request.body if isinstance(request.body, dict) else {}
        fence = {**(body.get("preconditions") or {}), **{
            key: value for key, value in (body.get("metadata") or {}).items() if key in ("uid", "resourceVersion")
        }}  # fmt: skip
        if any(value and obj["metadata"].get(key) != value for key, value in fence.items()):
            return
        if where.resource in JOBS and "deletionTimestamp" not in obj["metadata"]:
            spec = body.get("spec") or {}
            suspends = spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend")
            if request.method == "PATCH":
                self.truth.changed(obj["metadata"]["uid"])
            if request.method == "DELETE" or suspends:
                self.truth.check_end(obj["metadata"]["uid"], "ends the job")
        elif where.resource == "pods" and request.method == "DELETE" and not has_phase(obj, "Succeeded", "Failed"):
            self.truth.check_end(operators._owner(obj), f"deletes the pod {where.name}")

    def compact(self) -> None:
        """Forget all changes so far, and end all connections: watches begin again with an answer 410."""
        self.truth.compacted = True
        self.expire()
        self.break_connections()

    def scale(self) -> None:
        """A user changes the number of Workers of all elastic jobs, between 1 and 2."""
        for plural, field in (("pytorchjobs", "pytorchReplicaSpecs"), ("mpijobs", "mpiReplicaSpecs")):
            for name, job in list(self.objects[plural].items()):
                workers = copied(job)["spec"][field]["Worker"]
                workers["replicas"] = 3 - workers["replicas"]
                self.change(plural, name, functools.partial(_set_workers, field, workers))

    def _judge(self, kind: Kind, job: Object, pods: Mapping[str, Object]) -> None:
        """Any Worker's 0 ends an elastic job."""
        if "elasticPolicy" in job["spec"] and any(has_phase(pod, "Succeeded") for pod in pods.values()):
            self._conditions(kind, job, "Succeeded")
        else:
            super()._judge(kind, job, pods)

    # the store tells the truth

    def put(self, resource: str, obj: Object) -> Object:
        is_new = obj["metadata"]["name"] not in self.objects[resource]
        put = super().put(resource, obj)
        if resource in JOBS:
            kind: Kind = JOBS[resource]
            if is_new:
                self.truth.created(kind.name, put["metadata"]["uid"], elastic="elasticPolicy" in put["spec"])
            elif has_ended(put):
                true = [c["type"] for c in put["status"]["conditions"] if c["status"] == "True"]
                self.truth.job_ended(put["metadata"]["uid"], "Failed" not in true)
        elif resource == "pods":
            owner, uid = operators._owner(put), put["metadata"]["uid"]
            if has_phase(put, "Running"):
                self.truth.pod_runs(uid, owner, put["metadata"]["name"])
            elif has_phase(put, "Succeeded", "Failed"):
                self.truth.pod_over(uid, owner)
        return put

    def remove(self, resource: str, name: str) -> Object:
        removed = super().remove(resource, name)
        if resource in JOBS:
            self.truth.job_gone(removed["metadata"]["uid"])
        elif resource == "pods":
            self.truth.pod_over(removed["metadata"]["uid"], operators._owner(removed))
        return removed
