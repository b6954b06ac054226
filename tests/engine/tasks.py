"""A task that uses a cluster through the engine, shared by the tests of submit, release and follow."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, overload

import pytest
from kubernetes_asyncio import client as aio
from kubernetes_asyncio import config as aio_config

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.end_rules import Mode, Successor
from airflow_provider_ktrain.core.identity.names import (
    MANIFEST_ANNOTATION,
    OWNER_ANNOTATION,
    JobRef,
    Owner,
    Reattach,
    TaskKey,
)
from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.manifest.transform import stamp
from airflow_provider_ktrain.core.state.queue.kueue_status import QUEUE_LABEL
from airflow_provider_ktrain.core.state.status import phase_of, shown_conditions
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import AbsentError, Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.api.job_calls import JobChanged, JobRead, Log, job_pods, read_training
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.host import Host, StatusSink
from airflow_provider_ktrain.engine.release import DecidedEnd, Released, release
from airflow_provider_ktrain.engine.submit import create_or_adopt as submitting
from airflow_provider_ktrain.engine.submit.create_or_adopt import Posting, Submitted
from airflow_provider_ktrain.engine.training_owner import Training
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests import clusters
from tests.clusters import TestCluster
from tests.virtual import VirtualLoop

Object = dict[str, Any]
T = TypeVar("T")
#: Trains until SIGTERM, then exits immediately.
TRAINS = "trap 'exit 143' TERM; echo started; sleep 600 & wait"
#: Ignores SIGTERM; `Task.started` waits until it does.
STUBBORN = "trap '' TERM; echo started; sleep 600 & while true; do wait; done"


class Lines:
    """A log that keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        self.messages.append(str(event))

    warning = error = info

    def __str__(self) -> str:
        return "\n".join(self.messages)


class MeddledApi(Api):
    """An Api that calls `before` and `after` around each request, to simulate concurrent changes."""

    async def before(self, method: str, path: str) -> None: ...

    async def after(self, method: str, path: str) -> None: ...

    async def request(self, method: str, path: str, **how: Any) -> Object:
        await self.before(method, path)
        answer = await super().request(method, path, **how)
        await self.after(method, path)
        return answer


A = TypeVar("A", bound=Api)


class AnyCluster(Protocol):
    """What tests need of a cluster, a scripted one included."""

    @property
    def namespace(self) -> str: ...

    def admin(self, fault: str, **how: Any) -> None: ...


@overload
def api_of(cluster: AnyCluster, *, token: str = "") -> AbstractAsyncContextManager[Api]: ...


@overload
def api_of(cluster: AnyCluster, cls: type[A], token: str = "") -> AbstractAsyncContextManager[A]: ...


@contextlib.asynccontextmanager
async def api_of(cluster: Any, cls: type[Any] = Api, token: str = "") -> AsyncIterator[Any]:
    """A client of a cluster.

    :param token: its only credentials, of a real or embedded cluster.
    """

    async def make_client() -> aio.ApiClient:
        if not isinstance(cluster, TestCluster):
            return aio.ApiClient(aio.Configuration(host=cluster.url))
        configuration = aio.Configuration()
        await aio_config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)
        if token:  # the only credentials, because a server prefers a client certificate
            configuration.cert_file = configuration.key_file = None
            configuration.api_key = {"BearerToken": f"Bearer {token}"}
        return aio.ApiClient(configuration)

    api = cls(make_client)
    try:
        yield api
    finally:
        await api.close()


async def until(look: Callable[[], Awaitable[T]], seconds: float = 240) -> T:
    """The result of `look` as soon as it is true."""
    pause = 0.5 if isinstance(asyncio.get_running_loop(), VirtualLoop) else 0.05
    async with asyncio.timeout(seconds):
        while not (found := await look()):  # noqa: ASYNC110
            await asyncio.sleep(pause)
    return found


async def release_job(api: Api, ref: JobRef, mode: Mode = Mode.DELETE, *, verify: bool = True, **how: Any) -> Released:
    """Release the job in this mode, whatever a read of it says; again while the operator changes it."""
    while True:
        with contextlib.suppress(JobChanged):
            return await release(api, ref, DecidedEnd(mode, await read_training(api, ref), verify), **how)


class Sink:
    """A host that stores conclusions in memory and publishes no status. Tests override what they look at."""

    host = "worker"
    try_number = 1

    def __init__(self) -> None:
        self.earlier: Mapping[str, Any] | None = None
        self.conclusion: Mapping[str, Any] | None = None  #: The conclusion that a process of this try has stored.

    def offer(self, build: Callable[[], Callable[[], Mapping[str, Any]]], *, urgent: bool) -> None: ...

    async def read_earlier(self) -> None: ...

    async def store_conclusion(self, document: Mapping[str, Any]) -> bool:
        self.conclusion = document
        return True

    def retract(self) -> None:
        self.conclusion = None

    async def stored_conclusion(self) -> Mapping[str, Any] | None:
        return self.conclusion


#: Seconds that a worker may still take after SIGTERM.
WORKER_SECONDS = 3.5


def host_of(*, shared: bool = False, state: str = "failed", **fields: Any) -> Host:
    """The process of a task: a worker, or a triggerer if it is `shared`.

    :param state: of the task, as Airflow answers after a kill.
    :param fields: others of `Host`.
    """

    async def ask(seconds: float) -> str:
        return state

    if shared:
        return Host(None, ask, Successor.OTHER_PROCESS, shared=True, **fields)
    return Host(WORKER_SECONDS, ask, **fields)


@contextlib.asynccontextmanager
async def owner_in(api: Api, host: Host, log: Log, stop: StopSignal | None = None) -> AsyncIterator[Training]:
    """The owner of a training's life, with a client that stays open."""

    training = Training(lambda: contextlib.nullcontext(api), host, log, stop)
    try:
        yield training
    finally:
        await training.close()


@dataclass(frozen=True)
class Call:
    """A submission that calls a function."""

    work: Callable[..., Awaitable[Submitted]]

    async def carry_out(self, api: Api, log: Log, *, posting: Posting) -> Submitted:
        return await self.work(api, log=log, posting=posting)

    @property
    def delete_command(self) -> str:
        return "kubectl delete"

    async def find(self, api: Api) -> Submitted | None:
        return None


async def submit(
    api: Api, kind: Kind, version: str, build: Callable[[str], Object], me: Owner, first_try: int, *, log: Log,
    **how: Any,
) -> Submitted:  # fmt: skip
    """`engine.submit.submit` as the owner of the training's life calls it, in a worker."""

    async def work(api: Api, **more: Any) -> Submitted:
        return await submitting.submit(api, kind, version, build, me, first_try, **how, **more)

    async with owner_in(api, host_of(), log) as training:
        return await training.submit(Call(work))


async def adopt(
    api: Api, kind: Kind, version: str, metadata: Object, me: Owner, first_try: int, *, log: Log, **how: Any
) -> Submitted:
    """`submit` of a try whose manifest is invalid."""
    return await submit(api, kind, version, lambda _: {"metadata": metadata}, me, first_try, log=log, **how)


async def follow(
    ref: JobRef, api: Api, options: Options | None = None, *, log: Log, stop: StopSignal | None = None,
    handover: Handover | None = None, until: float | None = None, cursor: Cursor | None = None, created: bool = False,
    shared: bool = False, state: str = "failed", began_at: float | None = None, status_sink: StatusSink | None = None,
    node_seconds: float = 60.0,
) -> Outcome | Handover:  # fmt: skip
    """Follow a job as a worker does, or as a triggerer if it is `shared`.

    :param created: whether this process has just created the job.
    :param state: of the task, as Airflow answers after `stop`.
    """

    async def known(api: Api, **_: Any) -> Submitted:
        return Submitted(ref, {}, created)

    host = host_of(shared=shared, state=state, began_at=began_at, status_sink=status_sink, node_seconds=node_seconds)
    async with owner_in(api, host, log, stop) as training:
        training.job.options = options or Options()
        if created:
            await training.submit(Call(known))
        training.handover, training.cursor = handover or Handover(), cursor
        return await training.follow(ref, training.job.options, until=until)


@dataclass
class Task:
    """One run of a task with a unique key: its tries and their one job."""

    api: Api
    namespace: str
    key: TaskKey = field(default_factory=lambda: TaskKey("tests", "dag", "train", uuid.uuid4().hex[:8]))
    log: Lines = field(default_factory=Lines)

    kind: ClassVar[Kind] = PYTORCHJOB
    version: ClassVar[str] = "v1"

    @property
    def name(self) -> str:
        return self.key.job_name(max_length=self.kind.name_length)

    def owner(self, number: int) -> Owner:
        return Owner(self.key, number, f"ti-{number}-{self.key.run_id}")

    def manifest(
        self,
        number: int,
        submission: str,
        program: str,
        run_policy: Mapping[str, Any],
        grace: int,
        restart_policy: str,
        **more: Any,
    ) -> Object:
        overlay = JobOptions(**{"image": clusters.IMAGE, "command": ["sh", "-c", program], "gpus": 1, **more})
        built = build(PYTORCHJOB.name, overlay)
        built["spec"].setdefault("runPolicy", {}).update(run_policy)
        for replica in built["spec"]["pytorchReplicaSpecs"].values():
            replica["template"]["spec"]["terminationGracePeriodSeconds"] = grace
            replica["restartPolicy"] = restart_policy
        return self.stamped(built, number, submission)

    def stamped(self, built: Object, number: int, submission: str) -> Object:
        owner = self.owner(number)
        annotations = {OWNER_ANNOTATION: owner.annotation(), MANIFEST_ANNOTATION: str(hash(repr(built)))}
        return stamp(built, self.name, self.namespace, owner.key.labels(submission), annotations)

    async def submit(
        self, number: int = 1, program: str = TRAINS, *, first: int = 1, reattach: Reattach = "always",
        run_policy: Mapping[str, Any] | None = None, grace: int = 1, restart_policy: str = "Never",
        patience: float = 30, quota_patience: float = 0, deletion_patience: float = 600, api: Api | None = None,
        **overlay: Any,
    ) -> Submitted:  # fmt: skip
        """Submit as try `number`; the task was cleared before try `first`."""

        def stamped(submission: str) -> Object:
            return self.manifest(number, submission, program, run_policy or {}, grace, restart_policy, **overlay)

        return await submit(
            api or self.api, self.kind, self.version, stamped, self.owner(number), first,
            reattach=reattach, patience=patience, quota_patience=quota_patience, deletion_patience=deletion_patience,
            log=self.log,
        )  # fmt: skip

    async def follow(
        self, ref: JobRef, *, stop: StopSignal | None = None, until: float | None = None,
        handover: Handover | None = None, created: bool = False, shared: bool = False, state: str = "failed",
        began_at: float | None = None, status_sink: StatusSink | None = None, node_seconds: float = 60.0,
        **options: Any,
    ) -> Outcome | Handover:  # fmt: skip
        """Follow as `follow` does, with these options."""
        return await follow(
            ref, self.api, Options(**options), log=self.log, stop=stop, handover=handover, until=until, created=created,
            shared=shared, state=state, began_at=began_at, status_sink=status_sink, node_seconds=node_seconds,
        )  # fmt: skip

    async def ended(self, ref: JobRef, *, deleted: bool = True, **how: Any) -> Outcome:
        """Follow until the job has ended. With `deleted`, delete a kept job afterwards, as operators do."""
        outcome = await self.follow(ref, **how)
        assert isinstance(outcome, Outcome)
        if outcome.kept and deleted:
            await release_job(self.api, ref)
        return outcome

    # state of the cluster

    @property
    def path(self) -> str:
        return api_paths.jobs(self.kind, self.version, self.namespace, self.name)

    async def job(self) -> Object | None:
        try:
            return await self.api.request("GET", self.path)
        except ApiStatusError as e:
            if e.status == 404:
                return None
            raise

    async def pods(self, ref: JobRef) -> dict[str, str]:
        """Phases of the job's pods by name."""
        return {p["metadata"]["name"]: p["status"]["phase"] for p in await job_pods(self.api, ref)}

    async def holding(self, ref: JobRef) -> list[str]:
        """Names of the unfinished pods, which hold GPUs. Finished pods may exist a little longer."""
        return [name for name, phase in (await self.pods(ref)).items() if phase not in ("Succeeded", "Failed")]

    async def running(self, ref: JobRef, number: int = 1) -> None:
        async def run() -> bool:
            return list((await self.pods(ref)).values()).count("Running") == number

        await until(run)

    async def started(self, ref: JobRef, number: int = 1) -> None:
        """Wait until that many pods run whose programs have printed a line: they have set their traps."""
        await self.running(ref, number)
        for name in await self.pods(ref):
            path = f"{api_paths.core(self.namespace, 'pods', name)}/log"
            async with self.api.stream(path, query={"follow": "true"}) as response:
                assert await response.content.readline()

    async def condition(self, kind: str) -> None:
        """Wait until the job has this condition, or the state that implies it if the kind has no such condition."""

        async def has() -> bool:
            job = await self.job() or {}
            return kind in shown_conditions(job, phase_of(job))

        await until(has)

    async def patch(self, patch: Object) -> Object:
        return await self.api.request("PATCH", self.path, body=patch)

    async def disown(self, number: int) -> None:
        """Make another try the owner of the job."""
        await self.patch({"metadata": {"annotations": {OWNER_ANNOTATION: self.owner(number).annotation()}}})

    async def delete(self, propagation: str = "Background") -> None:
        with contextlib.suppress(ApiStatusError, ApiUnavailable):
            await self.api.request("DELETE", self.path, body={"propagationPolicy": propagation})


class TrainTask(Task):
    """A task with a TrainJob that uses a runtime of the namespace."""

    kind = TRAINJOB
    version = "v1alpha1"

    async def submit(self, number: int = 1, program: str = TRAINS, **how: Any) -> Submitted:
        """Create the runtime first, since only a runtime can set restarts and failure policies."""
        policy, jobset = how.get("restart_policy", "Never"), how.pop("jobset", {})
        runtime = torch_runtime(self.name, policy, how.get("grace", 1), jobset, how.pop("role", "node"))
        await create_runtime(self.api, self.namespace, runtime)
        return await super().submit(number, program, **how)

    def manifest(
        self,
        number: int,
        submission: str,
        program: str,
        run_policy: Mapping[str, Any],
        grace: int,
        restart_policy: str,
        **more: Any,
    ) -> Object:
        trainer = {
            "image": more.pop("image", clusters.IMAGE),
            "command": ["sh", "-c", program],
            "numNodes": 1 + (more.pop("workers", 0) or 0),
            "resourcesPerNode": {"limits": {clusters.GPUS: more.pop("gpus", 1)}},
        }
        labels = {QUEUE_LABEL: more.pop("queue")} if "queue" in more else {}
        built = {
            "apiVersion": f"{TRAINJOB.group}/{self.version}",
            "kind": TRAINJOB.name,
            "metadata": {"labels": labels},
            "spec": {"runtimeRef": {"name": self.name, "kind": "TrainingRuntime"}, "trainer": trainer}
            | {key: value for key, value in run_policy.items() if key in ("suspend", "managedBy")},
        }
        assert not more
        return self.stamped(built, number, submission)


#: Parametrizes a test over all kinds: `of_each_kind` yields a task of each.
of_each_kind = pytest.mark.parametrize("task", [Task, TrainTask], indirect=True, ids=["pytorchjob", "trainjob"])


def torch_runtime(name: str, restart_policy: str, grace: int, jobset: Mapping[str, Any], role: str = "node") -> Object:
    """A TrainingRuntime like torch-distributed, in which `restart_policy` alone decides about retries of a failure.

    :param jobset: further fields of the JobSet's spec.
    :param role: name of the replicated job. Default: node.
    """
    pod = {
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": grace,
        "containers": [{"name": "node", "image": clusters.IMAGE}],
    }
    node = {
        "name": role,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0 if restart_policy == "Never" else 6, "template": {"spec": pod}},
        },
    }
    return {
        "apiVersion": f"{TRAINJOB.group}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {"spec": {"replicatedJobs": [node], **jobset}},
        },
    }


async def create_runtime(api: Api, namespace: str, runtime: Object) -> None:
    """Create a TrainingRuntime, unless it exists, and wait until the Trainer's webhook finds it in its cache."""
    collection = f"/apis/{TRAINJOB.group}/v1alpha1/namespaces/{namespace}"
    with contextlib.suppress(ApiStatusError):
        await api.request("POST", f"{collection}/trainingruntimes", body=runtime)
    ref = {"name": runtime["metadata"]["name"], "kind": "TrainingRuntime"}
    probe = {
        "apiVersion": runtime["apiVersion"],
        "kind": TRAINJOB.name,
        "metadata": {"name": "probe"},
        "spec": {"runtimeRef": ref},
    }

    async def is_found() -> bool:
        try:
            await api.request("POST", f"{collection}/trainjobs", body=probe, query={"dryRun": "All"})
        except ApiStatusError as e:
            return "must be created before the TrainJob" not in e.message
        return True

    await until(is_found)


class EvictedApi(Api):
    """A Failed MPIJob v2beta1 whose pods are recreated until it is suspended, deleted or has a completionTime.

    mpi-operator does this after an eviction, because that doesn't set a completionTime.
    """

    ref = JobRef("MPIJob", "v2beta1", "ns", "train", "j", "ti-1")

    def __init__(self, **status: Any) -> None:
        super().__init__(self._no_client)
        owner = Owner(TaskKey("tests", "dag", "train", "run"), 1, self.ref.owner)
        meta = {"namespace": "ns", "name": "train", "uid": "j", "resourceVersion": "1"}
        self.job: Object | None = {
            "metadata": {**meta, "annotations": {OWNER_ANNOTATION: owner.annotation()}},
            "spec": {},
            "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "MPIJobEvicted"}], **status},
        }
        self.made = 1  # pods
        self.pods = [self._pod()]

    @staticmethod
    async def _no_client() -> aio.ApiClient:
        raise ApiUnavailable("there is no server")

    def _pod(self) -> Object:
        owners = [{"kind": "MPIJob", "uid": "j"}]
        meta = {"name": "train-worker-0", "uid": f"p{self.made}", "ownerReferences": owners}
        return {"metadata": meta, "status": {"phase": "Running"}}

    async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Object:
        plural, name = path.split("/")[-2:]
        if name == "pods":
            return {"items": self.pods, "metadata": {}}
        if plural == "pods":
            assert method == "DELETE"
            self.made += 1
            self.pods = [] if self.job is None or "completionTime" in self.job["status"] else [self._pod()]
            return {}
        if self.job is None:
            raise AbsentError(404, "NotFound")
        if method == "DELETE":
            self.job, self.pods = None, []
        elif method == "PATCH":
            self.job["spec"], self.pods = body["spec"], []
        return self.job or {}


def present(read: JobRead) -> Object:
    """The job, which a test knows to exist."""
    assert read.job is not ABSENT
    return read.job


def soon(seconds: float = 0.0) -> float:
    return time.monotonic() + seconds


@contextlib.asynccontextmanager
async def occupied_threads() -> AsyncIterator[None]:
    """The only thread of the event loop is busy until the body of the `async with` has ended."""
    loop, over = asyncio.get_running_loop(), threading.Event()
    threads = concurrent.futures.ThreadPoolExecutor(1)
    loop.set_default_executor(threads)
    waiting = threads.submit(over.wait)
    try:
        yield
    finally:
        over.set()
        waiting.result()
