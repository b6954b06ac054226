"""A kill and a release end in a decision, whatever is raised, and by whichever request."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from airflow_provider_ktrain.core.end_rules import Event, Mode
from airflow_provider_ktrain.core.errors import AccessError, ClusterError, KtrainError, UnreachableError
from airflow_provider_ktrain.core.identity.names import (
    OWNER_ANNOTATION,
    SUBMISSION_LABEL,
    SUSPENDED_ANNOTATION,
    OnFinishAction,
    Owner,
    TaskKey,
)
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.engine import job_control, timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import Log, read_training
from airflow_provider_ktrain.engine.api.threads import LoopThread, in_thread
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.release import DecidedEnd, DecisionOnRead, ReleaseError, release
from airflow_provider_ktrain.engine.submit.create_or_adopt import Posting, Submitted, find_own, submit
from airflow_provider_ktrain.engine.training_owner import Stopped, Training
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests.apiserver import (
    NAMESPACE,
    PODS,
    ApiServer,
    Object,
    PodServer,
    Request,
    Response,
    clients,
    connected,
    failure,
    served,
    stamp,
)
from tests.engine.staged import NAME, Staged, staged
from tests.engine.tasks import Lines, host_of
from tests.engine.test_answers import LIES
from tests.until import until

virtual = pytest.mark.virtual_time
ERRORS = {
    **LIES,
    "redirect": Response(307, b"", {"Location": "/login"}),
    "401": failure(401, "Unauthorized"),
    "403": failure(403, "forbidden"),
    "500": failure(500, "etcd"),
}


@pytest.mark.sampled(3)
@virtual
@pytest.mark.parametrize("in_trigger", [True, False])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_job_is_released_after_any_error(error: str, method: str, in_trigger: bool) -> None:
    async with staged() as training, connected(training.url) as api:
        training.start(grace=2)
        owner = Training(lambda: contextlib.nullcontext(api), host_of(shared=in_trigger), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        training.api.replace(method, "", ERRORS[error], 4, processed=False)
        await owner.stop()
        await owner.close()
        await until(lambda: not training.exists, 10)  # a worker doesn't wait for the pods
        assert not training.exists, training.log


@virtual
@pytest.mark.parametrize("in_trigger", [True, False])
@pytest.mark.parametrize("answer", [failure(409, "Conflict"), ERRORS["403"], ERRORS["500"]], ids=[409, 403, 500])
async def test_kill_that_the_api_server_never_carries_out_ends(answer: Response, in_trigger: bool) -> None:
    async with staged() as training, connected(training.url) as api:
        training.start(grace=2)
        owner = Training(lambda: contextlib.nullcontext(api), host_of(shared=in_trigger), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        training.api.replace("DELETE", "", answer, 1_000, processed=False)
        await owner.stop()
        await owner.close()
        assert training.ref.delete_command in training.log.messages[-1], training.log
        assert sum(line.startswith("DELETE") for line in training.api.requests) < 200


@virtual
@pytest.mark.parametrize("in_trigger", [True, False])
@pytest.mark.parametrize("error", [AccessError("throttled"), RuntimeError("odd"), asyncio.CancelledError()], ids=repr)
async def test_job_is_released_if_the_client_cannot_be_opened_at_first(error: BaseException, in_trigger: bool) -> None:
    async with staged() as training, connected(training.url) as api:
        training.start(grace=2)
        left = 3

        @contextlib.asynccontextmanager
        async def connect() -> Any:
            nonlocal left
            if left:
                left -= 1
                raise error
            yield api

        owner = Training(connect, host_of(shared=in_trigger), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        await owner.stop()
        await owner.close()
        await until(lambda: not training.exists, 10)  # a worker doesn't wait for the pods
        assert not training.exists, training.log


@virtual
@pytest.mark.parametrize("begun", [False, True], ids=["ended", "completed"])
async def test_release_of_a_followed_job_that_keeps_changing_pauses(begun: bool) -> None:
    """Of one that passes its deadline, or that an earlier process of this try has suspended."""
    async with staged() as training:
        training.start()
        options = Options(deadline=timing.epoch() + 5, drain_timeout=0.5)
        if begun:
            options = Options(on_finish_action=OnFinishAction.KEEP_JOB)
            training.after(5, training.api.change, "pytorchjobs", NAME, suspended)
        training.api.fail("DELETE|PATCH", f"/pytorchjobs/{NAME}", 409, 1_000)
        training.after(100, training.api.clear_failures)
        assert not (await training.follow(options)).succeeded
        assert not training.holding
        assert sum(line.startswith(("DELETE", "PATCH")) for line in training.api.requests) < 200


def suspended(job: Object) -> None:
    job["metadata"]["annotations"][SUSPENDED_ANNOTATION] = "ti-1"
    job["spec"].setdefault("runPolicy", {})["suspend"] = True


@virtual
async def test_suspension_by_a_user_of_a_job_that_keeps_changing_ends() -> None:
    async with staged() as training, connected(training.url) as api:
        training.start()
        training.api.fail("PATCH", f"/pytorchjobs/{NAME}", 409, 1_000)
        with pytest.raises(ClusterError, match="409"):
            await job_control.suspend(api, training.ref, timeout=100)
        assert sum(line.startswith("PATCH") for line in training.api.requests) < 100


class Posted:
    """A submission of a job without pods."""

    def __init__(self, kind: Kind = PYTORCHJOB, try_number: int = 1) -> None:
        self.kind, self.version = kind, kind.versions[0]
        self.owner = Owner(TaskKey("tests", "dag", "train", "run"), try_number, f"ti-{try_number}")

    async def carry_out(self, api: Api, log: Log, *, posting: Posting) -> Submitted:
        def build(submission: str) -> Object:
            metadata = {
                "name": NAME, "namespace": NAMESPACE, "labels": self.owner.key.labels(submission),
                "annotations": {OWNER_ANNOTATION: self.owner.annotation()},
            }  # fmt: skip
            skeleton = self.kind.skeleton(f"{self.kind.group}/{self.version}", self.kind.primaries[:1])
            return {**skeleton, "metadata": metadata}

        return await submit(api, self.kind, self.version, build, self.owner, 1, posting=posting, log=log)

    @property
    def delete_command(self) -> str:
        return "kubectl delete"

    async def find(self, api: Api) -> Submitted | None:
        return await find_own(api, self.kind, self.version, NAMESPACE, NAME, self.owner)


async def killed_in_submission(kube: ApiServer, at: float, host: Host | None = None) -> str:
    """Submit in a worker that is killed after so many seconds; returns its log."""
    async with served(kube) as url, connected(url) as api:
        log, stop = Lines(), StopSignal()
        owner = Training(lambda: contextlib.nullcontext(api), host or host_of(), log, stop)
        asyncio.get_running_loop().call_later(at, stop.request, "killed")
        try:
            submitted = await owner.submit(Posted())
            await owner.follow(submitted.ref, Options())
        except Stopped:
            pass
        except KtrainError:
            await owner.interrupted(Event.ERROR)
        await owner.close()
        await asyncio.sleep(60)  # a create request that was sent may still be processed
        return str(log)


@pytest.mark.sampled(3)
@virtual
@pytest.mark.parametrize(
    "host", [pytest.param(host_of(), id="worker"), pytest.param(Host(), id="terminal", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("method", "processed"), [("POST", True), ("POST", False), ("GET", False), ("DELETE", True)])
async def test_job_of_a_killed_submission_is_released_after_any_error(
    method: str, error: str, processed: bool, host: Host
) -> None:
    """The kill comes when the first answer of the create was lost, or after one that was none."""
    kube = ApiServer()
    is_refused = error in ("401", "403", "403 of another object")  # such a request is not processed
    kube.replace(method, "/pytorchjobs", ERRORS[error], 3, processed=processed and not is_refused)
    if method != "POST":
        kube.replace("POST", "/pytorchjobs", LIES["login page"])
    log = await killed_in_submission(kube, 0.3, host)
    assert any(line.startswith("POST ") for line in kube.requests)
    assert not kube.objects["pytorchjobs"], log


@virtual
@pytest.mark.parametrize("kind", [PYTORCHJOB, TRAINJOB], ids=lambda kind: kind.name)
@pytest.mark.parametrize("status", ["", "Failed"], ids=["adopted", "replaced"])
async def test_try_ends_whose_earlier_job_keeps_changing(kind: Kind, status: str) -> None:
    kube = ApiServer()
    async with served(kube) as url, connected(url) as api:
        first, second = [Training(lambda: contextlib.nullcontext(api), host_of(), Lines()) for _ in range(2)]
        await first.submit(Posted(kind))
        failed = {"conditions": [{"type": status, "status": "True"}]} if status else {}
        kube.change(kind.plural, NAME, lambda job: job.update(status=failed))
        kube.fail("PATCH|DELETE", NAME, 409, 1_000)
        with pytest.raises(ClusterError, match=r"keeps changing.*kubectl delete"):
            await second.submit(Posted(kind, 2))
    assert sum(line.startswith(("PATCH", "DELETE")) for line in kube.requests) < 100


@virtual
@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_answer_about_another_job_of_the_name_does_not_replace_the_own_job(method: str) -> None:
    """It would look deleted, and its pods would be deleted as those that it has left."""

    def another(request: Request, true: Response | None) -> Response:
        assert true is not None
        other = {"uid": "another", "labels": {SUBMISSION_LABEL: "another"}}
        return Response(true.status, {**true.body, "metadata": {**true.body["metadata"], **other}})

    kube = ApiServer()
    kube.replace(method, "/pytorchjobs", another)
    async with served(kube) as url, connected(url) as api:
        for number in (1, 2):
            owner = Training(lambda: contextlib.nullcontext(api), host_of(), Lines())
            submitted = await owner.submit(Posted(try_number=number))
            assert submitted.ref.uid == kube.objects["pytorchjobs"][NAME]["metadata"]["uid"]


@virtual
@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_submission_with_refused_credentials_renews_them_once(method: str) -> None:
    """If those are refused, too, the try ends at once. The next one creates or adopts the job."""
    kube = ApiServer()
    async with served(kube) as url, connected(url) as api:

        async def submitted(try_number: int) -> Submitted:
            owner = Training(lambda: contextlib.nullcontext(api), host_of(), Lines())
            return await owner.submit(Posted(try_number=try_number))

        if method == "PATCH":
            await submitted(1)
        kube.replace(method, "/pytorchjobs", ERRORS["401"], 2, processed=False)
        began = timing.now()
        with pytest.raises(AccessError, match="refused the credentials"):
            await submitted(2)
        assert timing.now() - began < 1
        kube.replace(method, "/pytorchjobs", ERRORS["401"], processed=False)
        assert (await submitted(3)).created == (method == "POST")
    assert sum(line.startswith(method) for line in kube.requests) == 4


@virtual
async def test_expired_version_does_not_end_a_submission() -> None:
    """410 Gone says nothing about the request: a new one, without the version, succeeds."""
    kube = ApiServer()
    kube.replace("GET", "/pods", failure(410, "The provided resource version is too old"), processed=False)
    async with served(kube) as url, connected(url) as api:
        await Training(lambda: contextlib.nullcontext(api), host_of(), Lines()).submit(Posted(TRAINJOB))
    assert kube.objects["trainjobs"]


@virtual
async def test_list_that_is_older_than_the_own_job_does_not_delete_it() -> None:
    """It shows a pod of an earlier job that is gone by now."""

    def older(request: Request, true: Response | None) -> Response:
        assert true is not None
        if not kube.objects["trainjobs"]:
            return true
        pod = {"metadata": {"name": "old", "uid": "old", "creationTimestamp": stamp(60)}, "status": {}}
        return Response(true.status, {**true.body, "items": [pod]})

    kube = ApiServer()
    kube.replace("GET", "/pods.*limit", older, 2)
    async with served(kube) as url, connected(url) as api:
        owner = Training(lambda: contextlib.nullcontext(api), host_of(), Lines())
        submitted = await owner.submit(Posted(TRAINJOB))
    assert submitted.created
    assert not [line for line in kube.requests if line.startswith("DELETE")]


@virtual
async def test_try_ends_whose_own_job_cannot_be_created_again() -> None:
    """Pods of an earlier job are left, and its operator writes to the new job before each deletion."""

    def beside_old_pods(request: Request, true: Response | None) -> Response:
        assert true is not None
        name = {TRAINJOB.behavior.pod_name_label: NAME}
        kube.put("pods", {"metadata": {"name": "old", "labels": name, "creationTimestamp": stamp(60)}, "status": {}})
        return true

    kube = ApiServer()
    kube.replace("POST", "/trainjobs", beside_old_pods)
    kube.fail("DELETE", "/trainjobs/", 409, 1_000)
    async with served(kube) as url, connected(url) as api:
        owner = Training(lambda: contextlib.nullcontext(api), host_of(), Lines())
        with pytest.raises(ClusterError, match=r"keeps changing.*kubectl delete"):
            await owner.submit(Posted(TRAINJOB))
    assert sum(line.startswith("DELETE") for line in kube.requests) < 100


@virtual
@pytest.mark.parametrize("status", [500, 504])
async def test_create_that_is_processed_after_an_error_is_released(status: int) -> None:
    """kube-apiserver goes on with a request that it has answered by 504, and etcd with one that took too long."""

    def late(request: Request, true: Response | None) -> Response:
        asyncio.get_running_loop().call_later(3, lambda: kube.put("pytorchjobs", {**request.body}))
        return failure(status, "etcdserver: request timed out")

    kube = ApiServer()
    kube.replace("POST", "/pytorchjobs", late, processed=False)
    log = await killed_in_submission(kube, 0.3)
    assert not kube.objects["pytorchjobs"], log


@virtual
async def test_create_that_is_processed_after_the_refusal_of_the_next_one_is_released() -> None:
    """The second response says nothing about the first request."""

    def late(request: Request, true: Response | None) -> Response:
        asyncio.get_running_loop().call_later(10, lambda: kube.put("pytorchjobs", {**request.body}))
        return failure(504, "request timed out")

    kube = ApiServer()
    kube.replace("POST", "/pytorchjobs", late, processed=False)
    kube.replace("POST", "/pytorchjobs", ERRORS["403"], processed=False)
    log = await killed_in_submission(kube, 2)
    assert sum(line.startswith("POST ") for line in kube.requests) == 2
    assert not kube.objects["pytorchjobs"], log


@virtual
@pytest.mark.parametrize("stays", [False, True])
async def test_pod_whose_fields_cannot_be_read_stops_no_release(stays: bool) -> None:
    async with staged() as training, connected(training.url) as api:
        pod = training.pod(grace=2)
        odd = {"extendedResourceClaimStatus": {"requestMappings": [None]}}
        training.api.change("pods", pod, lambda pod: pod["status"].update(odd))
        if stays:
            training.api.change("pods", pod, lambda pod: pod["metadata"].update(finalizers=["test"]))
        problem = pytest.raises(ReleaseError, match="1 pod with accelerators still present")
        with problem if stays else contextlib.nullcontext():
            await release(api, training.ref, DecidedEnd(Mode.DELETE, await read_training(api, training.ref)))
        assert training.exists is stays


@virtual
@pytest.mark.parametrize("kind", [MPIJOB, TRAINJOB], ids=lambda kind: kind.name)
@pytest.mark.parametrize("in_trigger", [True, False])
async def test_kill_deletes_the_pods_that_a_deleted_job_has_left(kind: Kind, in_trigger: bool) -> None:
    """A user has deleted the job with `--cascade=orphan`."""
    async with staged(kind) as training, connected(training.url) as api:
        training.start(grace=2)
        owner = Training(lambda: contextlib.nullcontext(api), host_of(shared=in_trigger), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        for name in training.holding:
            training.api.change("pods", name, lambda pod: pod["metadata"].pop("ownerReferences"))
        training.api.remove(kind.plural, NAME)
        await owner.stop()
        await owner.close()
        await asyncio.sleep(10)
        assert not training.holding, training.log


@virtual
async def test_last_line_names_the_command_if_errors_outlast_the_time() -> None:
    async with staged() as training, connected(training.url) as api:
        training.start()
        owner = Training(lambda: contextlib.nullcontext(api), host_of(shared=True), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        training.api.replace("", "/pytorchjobs/", LIES["text 404"], 10_000, processed=False)
        began = timing.now()
        outcome = await owner.stop()
        await owner.close()
        assert training.holding
        assert 290 < timing.now() - began < 310
        assert outcome.release_error.splitlines()[-1].endswith(training.ref.delete_pods_command)


@virtual
async def test_page_404_does_not_end_a_healthy_training() -> None:
    async with staged() as training:
        training.start()
        training.after(5, training.api.replace, "GET", f"/pytorchjobs/{NAME}$", LIES["text 404"], 3)
        training.after(10, training.api.change, "pytorchjobs", NAME, lambda job: job["metadata"]["labels"].clear())
        training.after(60, training.end)
        outcome = await training.follow(Options(drain_timeout=0.5))
        assert outcome.succeeded, training.log


@virtual
async def test_end_of_a_job_is_noticed_after_a_restore_of_etcd() -> None:
    async with staged() as training:
        training.start()

        def restore() -> None:
            training.api.history.clear()
            training.api.version = 5
            training.end()
            training.api.cut()

        training.after(5, restore)
        outcome = await training.follow(Options(drain_timeout=0.5))
        assert outcome.succeeded, training.log


@virtual
async def test_pod_that_a_list_lacks_is_read_by_its_name() -> None:
    def lacking(request: Request, true: Response | None) -> Response:
        assert true is not None
        return Response(200, {**true.body, "items": []})

    async with staged() as training, connected(training.url) as api:
        training.start(grace=20)
        training.condition("Succeeded")
        read = await read_training(api, training.ref)
        training.api.replace("GET", r"/pods\?", lacking, math.inf)
        await release(api, training.ref, DecidedEnd(Mode.DELETE_PODS, read))
        assert not training.holding


@virtual
async def test_close_of_a_shared_client_does_not_end_the_requests_of_others() -> None:
    kube = PodServer()
    kube.pod("p")
    building = asyncio.Event()
    async with clients(kube) as make:

        async def slowly() -> Any:
            building.set()
            await asyncio.sleep(1)
            return await make()

        api = Api(slowly)
        reading = asyncio.ensure_future(api.request("GET", f"{PODS}/p"))
        await until(building.is_set)
        await api.close()
        assert (await reading)["metadata"]["name"] == "p"
        await api.close()


async def test_call_that_ends_its_thread_is_an_error() -> None:
    with pytest.raises(KtrainError, match="SystemExit"):
        await in_thread(sys.exit)


async def _exit() -> None:
    sys.exit(3)


async def _exit_in_a_task() -> None:
    await asyncio.create_task(_exit())


@pytest.mark.parametrize("work", [_exit, _exit_in_a_task])
def test_loop_survives_an_exit(work: Callable[[], Any]) -> None:
    loop = LoopThread()
    with pytest.raises(SystemExit):
        loop.run(work())
    assert loop.run(asyncio.sleep(0, "works")) == "works"
    loop.close()


class Broken(Lines):
    """A log that nobody reads any more."""

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        super().info(event)
        raise BrokenPipeError

    warning = error = info


@virtual
@pytest.mark.parametrize("in_trigger", [True, False])
@pytest.mark.parametrize("errors", [0, 4])
async def test_log_that_fails_stops_no_release(errors: int, in_trigger: bool) -> None:
    async with staged(log=Broken()) as training, connected(training.url) as api:
        training.start(grace=2)
        owner = Training(lambda: contextlib.nullcontext(api), host_of(shared=in_trigger), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        training.api.replace("", "/pytorchjobs/", ERRORS["500"], errors, processed=False)
        await owner.stop()
        await owner.close()
        await until(lambda: not training.exists, 10)
        assert not training.exists, training.log


@virtual
@pytest.mark.parametrize("in_trigger", [True, False])
async def test_log_that_fails_does_not_keep_a_limit_from_ending_a_job(in_trigger: bool) -> None:
    async with staged(log=Broken()) as training:
        training.start(grace=2)
        await training.follow(Options(deadline=timing.epoch() + 5, drain_timeout=0.5), shared=in_trigger)
        await until(lambda: not training.exists, 10)


def unserve(training: Staged, *paths: str, group: str = "kubeflow.org", versions: str = "") -> None:
    """Requests at these paths get a page, and the document of all groups names only these versions of the group."""

    def groups(request: Request, true: Response | None) -> Response:
        assert true is not None
        found = [
            {**one, "versions": [v for v in one["versions"] if v["version"] in versions.split()]}
            if one["name"] == group else one
            for one in true.body["groups"]
        ]  # fmt: skip
        return Response(200, {**true.body, "groups": [one for one in found if one["versions"]]})

    training.api.replace("GET", "/apis$", groups, math.inf)
    for path in paths:
        training.api.replace("", path, LIES["text 404"], math.inf, processed=False)
    training.api.cut()


@virtual
@pytest.mark.parametrize("in_trigger", [True, False])
async def test_job_is_released_in_another_version_after_a_kill(in_trigger: bool) -> None:
    async with staged(MPIJOB) as training, connected(training.url) as api:
        training.start(grace=2)
        owner = Training(lambda: contextlib.nullcontext(api), host_of(shared=in_trigger), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        unserve(training, "kubeflow.org/v2beta1", versions="v1")
        outcome = await owner.stop()
        await owner.close()
        await until(lambda: not training.exists, 10)
        assert not outcome.release_error


@virtual
async def test_job_of_others_is_released_in_another_version() -> None:
    async with staged(MPIJOB) as training, connected(training.url) as api:
        training.start(grace=2)
        unserve(training, "kubeflow.org/v2beta1", versions="v1")
        await release(api, training.ref, DecisionOnRead(lambda read: Mode.DELETE))
        assert not training.exists
        assert not training.holding


@virtual
@pytest.mark.parametrize("operation", ["scale", "suspend", "resume"])
async def test_job_is_controlled_in_another_version(operation: str) -> None:
    async with staged(MPIJOB, roles=("Launcher", "Worker")) as training, connected(training.url) as api:
        if operation == "resume":
            training.spec(runPolicy={"suspend": True})
            training.after(5, training.start)
        else:
            training.start(grace=2)
        unserve(training, "kubeflow.org/v2beta1", versions="v1")
        match operation:
            case "scale":
                training.after(5, lambda: training.pod(1, role="Worker"))
                await job_control.scale(api, training.ref, 2, timeout=30)
                assert training.job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
            case "suspend":
                await job_control.suspend(api, training.ref, timeout=30)
                assert training.job["spec"]["runPolicy"]["suspend"]
            case "resume":
                await job_control.resume(api, training.ref, timeout=30)
                assert not training.job["spec"]["runPolicy"]["suspend"]


@virtual
async def test_version_may_end_during_a_release() -> None:
    async with staged(MPIJOB) as training, connected(training.url) as api:
        training.start(grace=2)
        read = await read_training(api, training.ref)
        training.after(1, lambda: unserve(training, "kubeflow.org/v2beta1", versions="v1"))
        await release(api, training.ref, DecidedEnd(Mode.DELETE, read))
        assert not training.exists


@virtual
async def test_trainjob_is_released_although_jobsets_are_not_served() -> None:
    async with staged(TRAINJOB) as training, connected(training.url) as api:
        training.start(grace=2)
        unserve(training, "/apis/jobset", group="jobset.x-k8s.io")
        await release(api, training.ref, DecidedEnd(Mode.DELETE, await read_training(api, training.ref)))
        assert not training.holding


@virtual
@pytest.mark.parametrize("in_trigger", [True, False])
@pytest.mark.parametrize("event", ["watched", "deadline", "kill"])
async def test_kind_that_is_not_served_any_more_proves_nothing(event: str, in_trigger: bool) -> None:
    """Nothing ends the pods. The last line says how to."""
    async with staged() as training:
        training.start()
        stop = StopSignal()
        training.after(5, unserve, training, "/pytorchjobs")
        if event == "kill":
            training.after(60, stop.request, "killed")
        options = Options(deadline=timing.epoch() + 100 if event == "deadline" else None, drain_timeout=0.5)
        began = timing.now()
        async with training.owner(shared=in_trigger, stop=stop) as owner:
            if event == "kill":
                outcome = await owner.follow(training.ref, options)
                assert isinstance(outcome, Outcome)
                assert outcome.release_error
            else:
                with pytest.raises(UnreachableError):
                    await owner.follow(training.ref, options)
                assert timing.now() - began > 600
                await owner.interrupted(Event.ERROR)
        assert training.holding
        assert training.log.messages[-1].splitlines()[-1].endswith(training.ref.delete_pods_command), training.log


@virtual
async def test_busy_api_server_is_no_reason_to_give_up() -> None:
    """For longer than a watch may be refused."""
    busy = Response(429, b"Too many requests, please try again later.\n", {"Retry-After": "1"})
    async with staged() as training:
        training.start()
        training.after(5, lambda: training.api.replace("GET", "", busy, math.inf, processed=False))
        training.after(6, training.api.cut)
        training.after(900, training.api.clear_failures)
        training.after(960, training.end)
        outcome = await training.follow(Options(drain_timeout=0.5))
        assert outcome.succeeded, training.log


@virtual
@pytest.mark.sampled(11)
@pytest.mark.parametrize("in_trigger", [True, False])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("method", "path", "queued"),
    [("PATCH", "", False), ("PATCH", "", True), ("GET", "/workloads|/apis", True), ("PATCH", "/workloads/", True)],
)
async def test_job_is_suspended_after_any_error(
    method: str, path: str, queued: bool, error: str, in_trigger: bool
) -> None:
    """Of a queue, by its Workload; or the job is deleted, where that can't be changed."""
    async with staged() as training, connected(training.url) as api:
        training.start(grace=2)
        if queued:
            training.workload(Admitted=("True", "Admitted", ""))
        owner = Training(lambda: contextlib.nullcontext(api), host_of(shared=in_trigger), training.log)
        owner.job.take(api, Submitted(training.ref, training.job, created=False))
        owner.job.options = Options(on_finish_action=OnFinishAction.KEEP_JOB)
        if queued:
            owner.job.workload = training.api.objects["workloads"][f"job-{NAME}"]
        training.api.replace(method, path, ERRORS[error], 4, processed=False)
        await owner.stop()
        await owner.close()

        def released() -> bool:
            workloads = training.api.objects["workloads"].values()
            inactive = any(one["spec"].get("active") is False for one in workloads)
            return not training.exists or inactive or bool(training.job["spec"]["runPolicy"].get("suspend"))

        await until(released, 10)
