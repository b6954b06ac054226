"""Submit against an API server: the create is the lock; an existing job is adopted, replaced or rejected."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio import client

from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.errors import (
    AccessError,
    ClusterError,
    ForeignJobError,
    ManifestError,
    ManifestUnreadableError,
    NoRightError,
    OperatorMissingError,
    UnreachableError,
)
from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, SUBMISSION_LABEL, Owner, Reattach, TaskKey
from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.engine.api.client import AbsentError, Api, ApiStatusError, ApiUnavailable, Object
from airflow_provider_ktrain.engine.api.job_calls import served_version
from airflow_provider_ktrain.engine.api.request_errors import explain
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from tests.engine import scripted
from tests.engine.tasks import (
    STUBBORN,
    TRAINS,
    AnyCluster,
    Lines,
    MeddledApi,
    Task,
    TrainTask,
    adopt,
    api_of,
    of_each_kind,
    release_job,
    submit,
    until,
)

cluster, task = scripted.cluster, scripted.task
pytestmark = pytest.mark.scripted


@of_each_kind
async def test_created_job_has_owner_and_submission(task: Task) -> None:
    submitted = await task.submit()
    assert submitted.created
    job = await task.job()
    assert job is not None
    assert Owner.of(job) == task.owner(1)
    assert submitted.ref.uid == job["metadata"]["uid"]
    assert submitted.ref.submission == job["metadata"]["labels"][SUBMISSION_LABEL]
    await task.running(submitted.ref)  # our label finds its pods


async def test_retry_adopts_a_live_job_and_logs_differences(task: Task) -> None:
    first = await task.submit(1)
    second = await task.submit(2, "echo something else")
    assert not second.created
    assert second.ref.uid == first.ref.uid
    assert Owner.of(await task.job() or {}) == task.owner(2)
    assert "try 1 left it" in str(task.log)
    assert "$.spec.pytorchReplicaSpecs.Master.template.spec.containers[0].command" in str(task.log)


@of_each_kind
async def test_retry_with_if_unchanged_replaces_a_changed_job(task: Task) -> None:
    first = await task.submit(1)
    same = await task.submit(2, reattach="if_unchanged")
    assert same.ref.uid == first.ref.uid
    other = await task.submit(3, "sleep 1", reattach="if_unchanged")
    assert other.created
    assert other.ref.uid != first.ref.uid
    assert not await task.pods(first.ref)


@of_each_kind
async def test_clear_replaces_a_live_job_after_its_pods_are_gone(task: Task) -> None:
    first = await task.submit(1)
    await task.running(first.ref)
    second = await task.submit(2, first=2)
    assert second.created
    assert second.ref.uid != first.ref.uid
    assert not await task.pods(first.ref)
    assert "1 GPU released" in str(task.log)


@of_each_kind
@pytest.mark.parametrize(
    ("program", "condition", "first", "created"),
    [("true", "Succeeded", 1, False), ("true", "Succeeded", 2, True), ("exit 3", "Failed", 1, True)],
    ids=["a retry takes the result", "a clear does not", "a failed one is replaced"],
)
async def test_job_that_has_ended_is_replaced_or_its_result_used(
    task: Task, program: str, condition: str, first: int, created: bool
) -> None:
    before = await task.submit(1, program)
    await task.condition(condition)
    after = await task.submit(2, program, first=first)
    assert after.created is created
    assert (after.ref.uid != before.ref.uid) is created
    assert Owner.of(await task.job() or {}) == task.owner(2)


@of_each_kind
async def test_submit_waits_for_a_job_that_is_being_deleted(task: Task) -> None:
    first = await task.submit(1)
    await task.patch({"metadata": {"finalizers": ["tests.example/hold"]}})
    await task.delete()
    waiting = asyncio.create_task(task.submit(2))

    async def waits() -> bool:
        return "Waiting for the previous job's pods to stop." in str(task.log)

    await until(waits)
    assert not waiting.done()
    await task.patch({"metadata": {"finalizers": None}})
    second = await waiting
    assert second.created
    assert second.ref.uid != first.ref.uid


async def test_submit_gives_up_when_a_deletion_does_not_end(task: Task) -> None:
    """The error names the pods that are still there; a retry may wait again."""
    first = await task.submit(1, STUBBORN, grace=20)
    await task.started(first.ref)
    await task.delete("Foreground")
    with pytest.raises(ClusterError, match=r"-master-0 on \S+ \(has until .*: its grace period is 20 s") as error:
        await task.submit(2, deletion_patience=2)
    assert f"kubectl delete pod -n {task.namespace} {task.key.job_name()}-master-0 --force" in str(error.value)
    assert "is still being deleted after 1 s.\nWaiting for pod" in str(task.log)
    assert not error.value.final, "it is worth another try"


async def test_error_names_finalizers_that_block_a_deletion(task: Task) -> None:
    first = await task.submit(1)
    await task.patch({"metadata": {"finalizers": ["tests.example/hold"]}})
    await task.delete("Foreground")

    async def only_finalizer_is_left() -> bool:
        job = await task.job()
        return job is not None and job["metadata"]["finalizers"] == ["tests.example/hold"]

    await until(only_finalizer_is_left)
    assert not await task.pods(first.ref)
    with pytest.raises(ClusterError, match=r"waits for its finalizers: tests\.example/hold\.\nSee: kubectl get"):
        await task.submit(2, deletion_patience=0)
    await task.patch({"metadata": {"finalizers": None}})


@pytest.mark.parametrize(
    ("deleted", "reason"),
    [
        (None, "not being deleted yet"),
        ("2001-01-01T10:00:00Z", "its grace period ended at 10:00:00 UTC: check that its node is ready"),
        ("2999-01-01T10:00:00Z", "has until 10:00:00 UTC: its grace period is 3600 s"),
    ],
)
async def test_error_explains_the_pod_that_blocks_a_deletion(deleted: str | None, reason: str) -> None:
    """For a pod on a lost node, or one with a grace period of hours."""
    meta = {"name": "train", "namespace": "ns", "uid": "j", "deletionTimestamp": "2026-11-21T10:00:00Z"}
    me = Owner(TaskKey("tests", "dag", "train", "run"), 2, "ti-2")
    before = Owner(me.key, 1, "ti-1")
    job = {"metadata": {**meta, "annotations": {OWNER_ANNOTATION: before.annotation()}}}
    pod: dict[str, Any] = {
        "metadata": {"name": "train-worker-0", "uid": "p", "ownerReferences": [{"kind": "PyTorchJob", "uid": "j"}]},
        "spec": {"nodeName": "node-7", "terminationGracePeriodSeconds": 3600},
    }
    if deleted:
        pod["metadata"]["deletionTimestamp"] = deleted

    class Deleting(Api):
        async def request(self, method: str, path: str, **_: Any) -> dict[str, Any]:
            if method == "POST":
                raise ApiStatusError(409, "AlreadyExists")
            return {"items": [pod], "metadata": {}} if path.endswith("/pods") else job

    with pytest.raises(ClusterError, match=re.escape(f"pod train-worker-0 on node-7 ({reason})")):
        await submit(
            Deleting(nobody), PYTORCHJOB, "v1", lambda _: job, me, 1, deletion_patience=0, log=Lines()
        )  # fmt: skip


@of_each_kind
async def test_job_suspended_by_a_release_is_resumed(task: Task) -> None:
    first = await task.submit(1)
    await task.running(first.ref)
    await release_job(task.api, first.ref, Mode.SUSPEND)
    second = await task.submit(2)
    assert second.ref.uid == first.ref.uid
    await task.running(second.ref)
    assert f"Resuming {task.kind.name}" in str(task.log)


@of_each_kind
async def test_job_suspended_by_a_kill_is_resumed_after_its_pods_are_gone(task: Task) -> None:
    """If it were resumed earlier, the operator would count these pods as failed, and the job would fail."""
    first = await task.submit(1, "trap 'sleep 2; exit 143' TERM; echo started; sleep 600 & wait", grace=10)
    await task.running(first.ref)
    (before,) = await task.pods(first.ref)
    await release_job(task.api, first.ref, Mode.SUSPEND, verify=False)
    await task.condition("Suspended")
    second = await task.submit(2)
    assert second.ref.uid == first.ref.uid
    await task.running(second.ref)
    (after,) = await task.pods(second.ref)
    assert (after == before) is not task.kind.behavior.renames_pods(task.kind.roles[0]), (
        "recreated, under another name only by a batch Job"
    )


@of_each_kind
@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        (None, "Somebody else created it"),
        (
            Owner(TaskKey("staging", "dag", "train", "run"), 1, "theirs"),
            r"another task\. .*\nIts task is dag\.train of run run .*staging",
        ),
        (2, "belongs to try 2, and this is try 1"),
    ],
    ids=["nobody", "another deployment", "a later try"],
)
async def test_foreign_job_is_refused_and_not_changed(task: Task, owner: Owner | int | None, reason: str) -> None:
    await task.submit(2)
    if not isinstance(owner, int):
        await task.patch({"metadata": {"annotations": {OWNER_ANNOTATION: owner and owner.annotation()}}})
    before = await task.job()
    with pytest.raises(ForeignJobError, match=reason) as error:
        await task.submit(1)
    assert f"kubectl delete -n {task.namespace} {task.kind.plural}" in str(error.value)
    after = await task.job()
    assert before is not None
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]


# races


@of_each_kind
async def test_concurrent_tries_share_one_job(task: Task) -> None:
    numbers = range(1, 9)
    ends = await asyncio.gather(*(task.submit(n) for n in numbers), return_exceptions=True)
    taken = [end for end in ends if isinstance(end, Submitted)]
    assert all(isinstance(end, Submitted | ForeignJobError) for end in ends)
    assert len({end.ref.uid for end in taken}) == 1
    assert [end.created for end in taken].count(True) == 1
    assert Owner.of(await task.job() or {}) == task.owner(8), "the last try is never refused"


@of_each_kind
async def test_create_with_a_lost_response_counts_as_created(task: Task, cluster: AnyCluster) -> None:
    """The retry of the create gets 409 and adopts the job."""

    class Lossy(MeddledApi):
        lost = 0

        async def after(self, method: str, path: str) -> None:
            if method == "POST" and not self.lost:
                self.lost += 1
                raise ApiUnavailable("the answer got lost")

    async with api_of(cluster, Lossy) as api:
        submitted = await task.submit(1, api=api)
        assert api.lost == 1
    assert submitted.created
    assert "can't process the request" in str(task.log)


QUOTA_EXCEEDED = ApiStatusError(
    403, "Forbidden", 'pytorchjobs.kubeflow.org "train" is forbidden: exceeded quota: jobs, requested: '
    "count/pytorchjobs.kubeflow.org=1, used: count/pytorchjobs.kubeflow.org=4, limited: "
    "count/pytorchjobs.kubeflow.org=4",
)  # fmt: skip


class RefusingApi(MeddledApi):
    """The response to the first create is lost, and the next ones are refused. Then so many reads of the job fail."""

    processed, unread = True, 0
    refusal = ApiStatusError(
        404, "NotFound", 'namespaces "default" not found', {"name": "default", "kind": "namespaces"}
    )  # fmt: skip
    creates = 0

    async def request(self, method: str, path: str, **how: Any) -> Object:
        if method == "POST":
            self.creates += 1
            if self.creates > 1:
                raise self.refusal
            if not self.processed:
                raise ApiUnavailable("the request got lost")
        elif method == "GET" and self.creates > 1 and self.unread:
            self.unread -= 1
            raise ApiUnavailable("the read got lost")
        answer = await super().request(method, path, **how)
        if method == "POST":
            raise ApiUnavailable("the answer got lost")
        return answer


@of_each_kind
@pytest.mark.parametrize("unread", [0, 2])
@pytest.mark.parametrize("refusal", [RefusingApi.refusal, QUOTA_EXCEEDED], ids=["namespace", "quota"])
async def test_job_of_a_lost_create_is_taken_although_the_next_create_is_refused(
    task: Task, cluster: AnyCluster, refusal: ApiStatusError, unread: int
) -> None:
    """The namespace is being deleted, or the job itself has used up the quota."""
    async with api_of(cluster, RefusingApi) as api:
        api.refusal, api.unread = refusal, unread
        submitted = await task.submit(1, api=api)
        assert (submitted.created, api.unread) == (True, 0)


async def test_refusal_after_a_lost_create_is_an_error_if_no_job_exists(task: Task, cluster: AnyCluster) -> None:
    async with api_of(cluster, RefusingApi) as api:
        api.processed = False
        with pytest.raises(ClusterError, match=r"namespace .* does not exist"):
            await task.submit(1, api=api)
        assert api.creates == 2


async def test_refusal_after_a_lost_create_is_no_error_while_the_job_cannot_be_read(
    task: Task, cluster: AnyCluster
) -> None:
    async with api_of(cluster, RefusingApi) as api:
        api.unread = 1_000
        with pytest.raises(UnreachableError, match="the read got lost"):
            await task.submit(1, api=api, patience=3)
        assert api.creates > 2


@of_each_kind
async def test_change_between_read_and_write_is_decided_again(task: Task, cluster: AnyCluster) -> None:
    """The job succeeds just before it is deleted: the delete gets 409, and submit decides again."""
    await task.submit(1)

    class Meddled(MeddledApi):
        changed = 0

        async def before(self, method: str, path: str) -> None:
            if method in ("DELETE", "PATCH") and self.changed < 3:
                self.changed += 1
                await task.patch({"metadata": {"annotations": {"tests.example/touched": str(self.changed)}}})

    async with api_of(cluster, Meddled) as api:
        adopted = await task.submit(2, api=api)
        assert api.changed == 3
        assert str(task.log).count("Adopting it.") >= 4  # operators also write
        assert not adopted.created
        api.changed = 0
        replaced = await task.submit(3, first=3, api=api)
        assert str(task.log).count("Replacing it.") >= 4
    assert replaced.ref.uid != adopted.ref.uid


@of_each_kind
async def test_job_adopted_between_read_and_write_is_refused(task: Task, cluster: AnyCluster) -> None:
    await task.submit(1)

    class Overtaken(MeddledApi):
        async def before(self, method: str, path: str) -> None:
            if method == "PATCH":
                await task.disown(3)

    async with api_of(cluster, Overtaken) as api:
        with pytest.raises(ForeignJobError, match="belongs to try 3"):
            await task.submit(2, api=api)
    assert Owner.of(await task.job() or {}) == task.owner(3)


# failures


@pytest.mark.embedded("sets fault switches")
async def test_submit_retries_on_an_overloaded_api_server(task: Task, cluster: AnyCluster) -> None:
    cluster.admin("status", status=503, verb="create", path=f"/namespaces/{task.namespace}/pytorchjobs", count=2)
    submitted = await task.submit()
    assert submitted.created
    assert str(task.log).count("Trying again") == 1, "one message for each outage"


class FullApi(MeddledApi):
    """A ResourceQuota rejects the first `rejections` creates of a job."""

    rejections = 2

    async def before(self, method: str, path: str) -> None:
        if method == "POST" and path.endswith("/pytorchjobs") and self.rejections:
            self.rejections -= 1
            raise QUOTA_EXCEEDED


async def test_submit_waits_for_a_resource_quota(task: Task, cluster: AnyCluster) -> None:
    async with api_of(cluster, FullApi) as full:
        submitted = await task.submit(api=full, quota_patience=60)
        assert (submitted.created, full.rejections) == (True, 0)
    waits = [line for line in task.log.messages if "ResourceQuota" in line]
    assert waits == [
        f"PyTorchJob {task.namespace}/{task.name} exceeds a ResourceQuota. Trying for up to 60 s (schedule_timeout)."
    ]


async def test_submit_waits_for_a_resource_quota_no_longer_than_its_limit(task: Task, cluster: AnyCluster) -> None:
    async with api_of(cluster, FullApi) as full:
        full.rejections = 9
        with pytest.raises(ClusterError, match=r"the quota 'jobs' of namespace .* is exceeded"):
            await task.submit(api=full, quota_patience=0.5)
        assert full.rejections == 8
        with pytest.raises(ClusterError, match=r"the quota 'jobs' of namespace .* is exceeded"):
            await task.submit(api=full)
        assert full.rejections == 7
    assert sum("is still exceeded after" in line for line in task.log.messages) == 1


@pytest.mark.embedded("sets fault switches")
async def test_submit_stops_retrying_at_its_limit(task: Task, cluster: AnyCluster) -> None:
    cluster.admin("status", status=500, verb="create", path=f"/namespaces/{task.namespace}/pytorchjobs", seconds=60)
    try:
        with pytest.raises(Exception, match=r"could not create pytorchjobs.kubeflow.org in .* \(500\)"):
            await task.submit(patience=0.1)
    finally:
        cluster.admin("clear")


async def test_manifest_rejected_by_the_schema_is_final(task: Task) -> None:
    with pytest.raises(ManifestError, match="refused the manifest"):
        await task.submit(run_policy={"backofLimit": 3})
    assert await task.job() is None


async def test_missing_namespace_is_an_error(task: Task) -> None:
    task.namespace = "nowhere"
    with pytest.raises(ClusterError, match=r"namespace 'nowhere' does not exist.*kubectl create namespace nowhere"):
        await task.submit()


async def nobody() -> client.ApiClient:
    return client.ApiClient(client.Configuration(host="https://127.0.0.1:9"))


async def test_unreachable_cluster_is_an_error() -> None:
    api = Api(nobody)
    with pytest.raises(UnreachableError, match=r"can't be reached\. .*kube_config_path.*kubectl version"):
        await served_version(api, PYTORCHJOB)
    await api.close()


@pytest.mark.parametrize(
    ("group", "found"), [("absent.example", "no version of absent.example"), ("kubeflow.org", "kubeflow.org/v1")]
)
async def test_missing_operator_is_an_error_with_the_served_versions(task: Task, group: str, found: str) -> None:
    operator = dataclasses.replace(PYTORCHJOB.operators[0], version="v9")
    kind = dataclasses.replace(PYTORCHJOB, group=group, operators=(operator,))
    with pytest.raises(OperatorMissingError, match=f"Expected {group}/v9, found .*{found}"):
        await served_version(task.api, kind)


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        (
            'pytorchjobs.kubeflow.org is forbidden: User "u" cannot create resource "pytorchjobs" in API group '
            '"kubeflow.org" in the namespace "ns"',
            NoRightError,
            "no right to create .*ktrain rbac --namespace ns",
        ),
        ('forbidden: User "u" cannot get path "/apis/kubeflow.org"', NoRightError, "no right"),
        ('admission webhook "policy.example" denied the request: no', ClusterError, "'policy.example' denied"),
        ('admission webhook "vpytorchjob.kb.io" denied the request: queue', ClusterError, "'vpytorchjob.kb.io' denied"),
        (
            'admission webhook "validator.pytorchjob.training-operator.kubeflow.org" denied the request: spec: Invalid',
            ManifestError,
            "refused the manifest.*spec: Invalid",
        ),
        (
            'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.RuntimeRef: Invalid '
            'value: {}: ClusterTrainingRuntime.trainer.kubeflow.org "nosuch" not found: specified '
            "clusterTrainingRuntime must be created before the TrainJob is created",
            ClusterError,
            "(?s)create the object.*nosuch.*not found",
        ),
        (
            "pytorchjobs.kubeflow.org \"train\" is forbidden: ValidatingAdmissionPolicy 'p' denied request: no team",
            ClusterError,
            "could not create.*no team",
        ),
        (
            'pytorchjobs.kubeflow.org "train" is forbidden: failed quota: cpu: must specify limits.cpu',
            ClusterError,
            "could not create.*must specify",
        ),
        ("ns because it is being terminated", ClusterError, "is being terminated"),
        (
            'pytorchjobs.kubeflow.org "train" is forbidden: exceeded quota: gpus, requested: '
            "count/pytorchjobs.kubeflow.org=1,pods=2, used: count/pytorchjobs.kubeflow.org=4,pods=7, limited: "
            "count/pytorchjobs.kubeflow.org=4,pods=8",
            ClusterError,
            "quota 'gpus' of namespace 'ns' is exceeded .*Kueue.*\nRequested: count/pytorchjobs.kubeflow.org=1,pods=2; "
            "used: count/pytorchjobs.kubeflow.org=4,pods=7; limit: count/pytorchjobs.kubeflow.org=4,pods=8",
        ),
    ],
)
def test_403_is_explained(message: str, error: type[Exception], reason: str) -> None:
    """Only an error in the content of the manifest is final: a ManifestError."""
    with pytest.raises(Exception, match=reason) as raised:
        raise explain(ApiStatusError(403, "Forbidden", message), "create", "pytorchjobs.kubeflow.org", "ns")
    assert type(raised.value) is error


@pytest.mark.parametrize(("verb", "reason"), [("watch", "Forbidden"), ("create", "")], ids=["a read", "a proxy"])
def test_403_outside_admission_is_a_missing_right(verb: str, reason: str) -> None:
    assert isinstance(explain(ApiStatusError(403, reason, "no"), verb, "pods", "ns"), AccessError)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ApiStatusError(401, "Unauthorized", "Unauthorized"), r"refused the credentials \(401\).*renew its token"),
        (ApiStatusError(500, "InternalError", "etcd"), r"could not create .* \(500\): etcd"),
    ],
)
def test_401_and_500_are_explained(error: ApiStatusError, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        raise explain(error, "create", "pytorchjobs.kubeflow.org", "ns")


DENIED = 'admission webhook "defaulter.trainjob.trainer.kubeflow.org" denied the request'
WEBHOOK = f"{DENIED}: "
OTHERS = 'admission webhook "experiment.validator.katib.kubeflow.org" denied the request: '
POLICY = (
    "pytorchjobs.kubeflow.org \"train\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: x"
)


@pytest.mark.parametrize(
    ("error", "verb", "final"),
    [
        (ApiStatusError(422, "Invalid", "spec.replicas: Invalid value"), "create", True),
        (ApiStatusError(400, "BadRequest", 'strict decoding error: unknown field "x"'), "create", True),
        (ApiStatusError(400, "", f"{WEBHOOK}json: cannot unmarshal number"), "create", True),
        (ApiStatusError(403, "Forbidden", f"{DENIED} without explanation"), "create", True),
        (ApiStatusError(413, "RequestEntityTooLarge", "limit is 3145728"), "create", True),
        (ApiStatusError(413, "", "<html>a proxy</html>"), "create", False),
        (ApiStatusError(403, "Forbidden", f"{WEBHOOK}[spec.runtimeRef.name: Invalid value]"), "create", False),
        (ApiStatusError(403, "Forbidden", f'{WEBHOOK}TrainingRuntime "gone" not found'), "create", False),
        (ApiStatusError(422, "Invalid", POLICY), "create", False),
        (ApiStatusError(403, "Forbidden", f"{OTHERS}the pod needs a profile"), "create", False),
        (ApiStatusError(400, "BadRequest", OTHERS.replace(": ", " without explanation")), "create", False),
        (ApiStatusError(400, "", "<html>a proxy</html>"), "create", False),
        (ApiStatusError(422, "Invalid", "metadata.resourceVersion"), "patch", False),
        (ApiStatusError(400, "Bad", 'admission webhook "policy.example" denied the request: no'), "create", False),
        (ApiStatusError(500, "InternalError", 'failed calling webhook "validator.kubeflow.org"'), "create", False),
        (ApiStatusError(404, "NotFound", "the server could not find the requested resource"), "create", False),
        (ApiStatusError(401, "Unauthorized", "Unauthorized"), "create", False),
    ],
    ids=[
        "schema", "strict", "the operator's defaulting", "no explanation", "too large", "too large for a proxy",
        "not on this runtime", "no runtime", "a policy of the cluster", "a webhook of another Kubeflow component",
        "a policy without explanation", "a proxy", "a patch", "a policy's webhook",
        "a webhook that cannot be called", "no CRD", "credentials",
    ],
)  # fmt: skip
def test_only_rejected_manifests_forbid_retries(error: ApiStatusError, verb: str, final: bool) -> None:
    assert explain(error, verb, "pytorchjobs.kubeflow.org", "ns").final is final


#: What a real cluster answered (recording 55-trainjob-rejected).
REFUSED = json.loads((Path(__file__).parent / "data" / "trainjob-refusals.json").read_text())
#: Reasons to reject a create although the manifest is valid: the runtime doesn't exist, or lacks a job.
RETRYABLE = {"missing runtime", "missing namespaced runtime", "initializer without its job"}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_of_a_trainjob_are_final_unless_its_runtime_is_missing(name: str) -> None:
    reason, _, message = REFUSED[name]["says"].partition(": ")
    refusal = ApiStatusError(REFUSED[name]["status"], "" if reason == "Failure" else reason, message)
    assert explain(refusal, "create", "trainjobs").final is (name not in RETRYABLE)


# an invalid manifest on a retry


async def test_retry_adopts_its_job_although_the_create_would_be_rejected(task: Task) -> None:
    first = await task.submit(1)
    again = await task.submit(2, run_policy={"backofLimit": 3})
    assert again.ref.uid == first.ref.uid
    assert Owner.of(await task.job() or {}) == task.owner(2)


async def take_over(task: Task, reattach: Reattach, invalid: ManifestError) -> Submitted:
    metadata = task.manifest(2, "", TRAINS, {}, 1, "Never")["metadata"]
    return await adopt(
        task.api, PYTORCHJOB, "v1", metadata, task.owner(2), 1, reattach=reattach, invalid=invalid, log=task.log
    )


async def test_invalid_manifest_keeps_the_job_with_always(task: Task) -> None:
    first = await task.submit(1)
    again = await take_over(task, "always", ManifestError("two Masters"))
    assert again.ref.uid == first.ref.uid
    assert not again.created
    assert "A new submission would fail: two Masters" in str(task.log)


async def test_invalid_manifest_counts_as_changed_with_if_unchanged(task: Task) -> None:
    await task.submit(1)
    with pytest.raises(ManifestError, match="two Masters"):
        await take_over(task, "if_unchanged", ManifestError("two Masters"))
    assert await task.job() is None


async def test_unreadable_manifest_does_not_count_as_changed(task: Task) -> None:
    first = await task.submit(1)
    again = await take_over(task, "if_unchanged", ManifestUnreadableError("job.yaml"))
    assert again.ref.uid == first.ref.uid


async def test_invalid_manifest_creates_no_job(task: Task) -> None:
    with pytest.raises(ManifestError, match="two Masters"):
        await take_over(task, "always", ManifestError("two Masters"))
    assert await task.job() is None


class EndingPodsApi(Api):
    """No job has the name, but pods of a previous job exist for 1.5 s. Then a connection is lost once."""

    def __init__(self) -> None:
        super().__init__(self._no_client)
        pod = {"metadata": {"name": "train-node-0-0-abcde", "uid": "p"}}
        self.answers: list[Any] = [[pod]] * 3 + [ApiUnavailable("reset"), [pod], ApiUnavailable("reset"), [], []]

    @staticmethod
    async def _no_client() -> Any:
        raise ApiUnavailable("there is no server")

    async def cluster(self) -> str:
        return "here"

    async def request(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        if method == "POST":
            return {"metadata": {**how["body"]["metadata"], "uid": "u"}}
        if not path.endswith("/pods"):
            raise AbsentError(404, "NotFound")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"items": answer, "metadata": {}}


async def test_wait_for_earlier_pods_does_not_count_as_retry_time() -> None:
    task = TrainTask(EndingPodsApi(), "ns")
    manifest = task.manifest(1, "s", "true", {}, 1, "Never")
    submitted = await submit(
        task.api, TRAINJOB, "v1alpha1", lambda _: manifest, task.owner(1), 1, patience=0.8, log=task.log
    )
    assert submitted.created
