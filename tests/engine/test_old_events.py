"""Events say when to look and why: what is old, or contradicted since, never ends a training."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.apiserver import NAMESPACE, Object, Request, Response, stamp
from tests.engine.staged import NAME, Staged, of_each_kind, staged, writes_of

pytestmark = pytest.mark.virtual_time

DENIED = 'Error creating: admission webhook "policy.example" denied the request: label team is missing'
QUOTA = 'Error creating: pods "{}" is forbidden: exceeded quota: gpus, requested: 1, used: 8, limited: 8'
EVENTS = {"apiVersion": "v1", "kind": "EventList"}
JOBSET_DENIED = 'TrainJob resources reconciliation failed: admission webhook "vjobset.kb.io" denied the request: x'


def report(training: Staged, reason: str, message: str, *, first: float, last: float, normal: bool = False) -> None:
    """An event about the job.

    :param first: seconds ago at which it was first seen, `last` likewise.
    """
    involved = {"kind": training.kind.name, "name": NAME, "namespace": NAMESPACE, "uid": training.ref.uid}
    training.api.put(
        "events",
        {
            "metadata": {"name": f"{reason.lower()}-{len(training.api.objects['events'])}"},
            "type": "Normal" if normal else "Warning", "involvedObject": involved,
            "reason": reason, "message": message, "firstTimestamp": stamp(first), "lastTimestamp": stamp(last),
        },
    )  # fmt: skip


def mount_fails(training: Staged, *, times: int) -> None:
    """The pod has its node; the kubelet reports a missing ConfigMap so many times, as seldom as its back-off allows."""
    training.condition("Created")
    pod, since = training.pod(0, "Pending", since=900.0), stamp(900.0)
    uid = training.api.pods[pod]["metadata"]["uid"]

    async def repeat() -> None:
        for count in range(times):
            training.api.put(
                "events",
                {
                    "metadata": {"name": "mount"}, "type": "Warning", "reason": "FailedMount",
                    "message": 'MountVolume.SetUp failed for volume "data" : configmap "data" not found',
                    "involvedObject": {"kind": "Pod", "name": pod, "uid": uid, "namespace": NAMESPACE},
                    "firstTimestamp": since, "lastTimestamp": stamp(), "count": count + 1,
                },
            )  # fmt: skip
            await asyncio.sleep(122.0)

    training.background.add(asyncio.ensure_future(repeat()))


def pod_event(training: Staged, reason: str, *, ago: float) -> None:
    pod = training.pod_name()
    uid = training.api.pods[pod]["metadata"]["uid"]
    training.api.put(
        "events",
        {
            "metadata": {"name": f"{pod}-{reason.lower()}"}, "type": "Normal", "reason": reason, "message": "",
            "involvedObject": {"kind": "Pod", "name": pod, "uid": uid, "namespace": NAMESPACE},
            "firstTimestamp": stamp(ago), "lastTimestamp": stamp(ago), "count": 1,
        },
    )  # fmt: skip


async def followed(training: Staged, seconds: float = 600.0, handover: Handover | None = None) -> Outcome | None:
    """The outcome; None if the training isn't ended for so many seconds."""
    following = asyncio.ensure_future(training.follow(Options(drain_timeout=0.5), handover))
    done, _ = await asyncio.wait([following], timeout=seconds)
    if done:
        return following.result()
    assert writes_of(training) == []
    following.cancel()
    await asyncio.wait([following])
    return None


@of_each_kind
@pytest.mark.parametrize("old", [0.0, 3600.0])
async def test_refusal_of_any_age_that_nothing_contradicts_ends_the_job(kind: Kind, old: float) -> None:
    """mpi-operator reports a refusal once, and the Trainer's series stop at two."""
    async with staged(kind, since=old + 60) as training:
        training.condition("Created")
        report(training, "FailedCreatePod", DENIED, first=old, last=old)
        outcome = await followed(training)
        assert outcome is not None
        assert "label team is missing" in str(outcome.cause)


@of_each_kind
async def test_pods_that_wait_for_a_quota_since_a_webhook_denied_them_once_keep_the_job(kind: Kind) -> None:
    async with staged(kind, since=200.0) as training:
        training.condition("Created")
        report(training, "FailedCreatePod", DENIED, first=180, last=180)
        report(training, "FailedCreatePod", QUOTA.format(training.pod_name()), first=170, last=10)
        assert await followed(training) is None


@of_each_kind
async def test_normal_event_of_the_creation_contradicts_an_older_refusal(kind: Kind) -> None:
    """The pod was created after the refusal, and then deleted by somebody: the operator creates it again."""
    async with staged(kind, since=200.0) as training:
        training.condition("Created")
        report(training, "FailedCreatePod", DENIED, first=180, last=180)
        report(training, "SuccessfulCreatePod", f"Created pod: {training.pod_name()}", first=170, last=170, normal=True)
        assert await followed(training) is None


async def test_event_on_another_page_contradicts_a_refusal() -> None:
    """What is between us and the API server divides its lists into pages."""
    left: list[Object] = []

    def paged(request: Request, true: Response | None) -> Response:
        assert true is not None
        meta = {"resourceVersion": "1"}
        if "continue" not in request.query:
            left[:] = true.body["items"]
        items, left[:] = left[:1], left[1:]
        return Response(200, {**EVENTS, "items": items, "metadata": meta | ({"continue": "next"} if left else {})})

    async with staged(since=200.0) as training:
        training.condition("Created")
        report(training, "FailedCreatePod", DENIED, first=180, last=180)
        report(training, "SuccessfulCreatePod", f"Created pod: {training.pod_name()}", first=170, last=170, normal=True)
        training.api.replace("GET", r"/events\?(?!.*watch)", paged, 1_000)
        assert await followed(training) is None


@of_each_kind
async def test_refusal_after_a_creation_ends_the_job(kind: Kind) -> None:
    async with staged(kind, since=200.0) as training:
        training.condition("Created")
        report(training, "SuccessfulCreatePod", f"Created pod: {training.pod_name()}", first=180, last=180, normal=True)
        report(training, "FailedCreatePod", DENIED, first=170, last=170)
        assert await followed(training) is not None


@pytest.mark.parametrize("exists", [False, True])
async def test_refused_jobset_that_exists_keeps_the_job(exists: bool) -> None:
    """Its pods may wait for a quota, of which the Trainer says nothing."""
    async with staged(TRAINJOB, since=200.0) as training:
        report(training, "TrainJobResourcesCreationFailed", JOBSET_DENIED, first=180, last=180)
        if exists:
            owner = {"kind": "TrainJob", "name": NAME, "uid": training.ref.uid, "controller": True}
            training.api.put(
                "jobsets",
                {
                    "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
                    "metadata": {"name": NAME, "ownerReferences": [owner]},
                },
            )  # fmt: skip
        assert (await followed(training) is None) is exists


async def test_refused_service_that_exists_keeps_the_job() -> None:
    async with staged(PYTORCHJOB, since=200.0) as training:
        training.condition("Created")
        message = f'Error creating: Service "{training.pod_name()}" is invalid: spec.ports: Required value'
        report(training, "FailedCreateService", message, first=180, last=180)
        owner = {"kind": "PyTorchJob", "name": NAME, "uid": training.ref.uid, "controller": True}
        service = {"kind": "Service", "metadata": {"name": training.pod_name(), "ownerReferences": [owner]}}
        training.api.put("services", {"apiVersion": "v1", **service})
        assert await followed(training) is None


@pytest.mark.parametrize("handed_over_after", [None, 10.0, 30.0], ids=["one process", "then", "by the first of two"])
async def test_refusal_of_an_earlier_specification_keeps_the_job(handed_over_after: float | None) -> None:
    """It changes after 20 s: while it is followed, while nobody follows it, or while another process does."""

    def specify(generation: int) -> None:
        training.api.change(training.kind.plural, NAME, lambda job: job["metadata"].update(generation=generation))

    async with staged(MPIJOB, since=200.0) as training:
        training.condition("Created")
        report(training, "MPIJobFailedValidation", "Master ReplicaSpec must be present", first=20, last=20)
        specify(1)
        training.after(20.0, specify, 2)
        handover = None
        if handed_over_after is not None:
            handover = await training.hand_over(handed_over_after)
            await asyncio.sleep(20.0)
        assert await followed(training, handover=handover) is None


@pytest.mark.parametrize("what", ["/events.*fieldSelector", "/services/"])
async def test_what_can_not_be_read_never_ends_the_job(what: str) -> None:
    async with staged(PYTORCHJOB, since=200.0) as training:
        training.condition("Created")
        message = f'Error creating: Service "{training.pod_name()}" is invalid: spec.ports: Required value'
        report(training, "FailedCreateService", message, first=180, last=180)
        training.api.fail("GET", what, 403, math.inf)
        assert await followed(training) is None


@of_each_kind
@pytest.mark.parametrize(("times", "ends"), [(10, True), (2, False)])
async def test_failed_mount_counts_while_the_kubelet_repeats_it(kind: Kind, times: int, ends: bool) -> None:
    """Kubernetes below 1.29 has no condition that shows that the volumes are mounted: the image may be large."""
    async with staged(kind, since=1000.0) as training:
        mount_fails(training, times=times)
        assert (await followed(training, 900.0) is not None) is ends


async def test_pod_that_pulls_its_image_has_mounted_its_volumes() -> None:
    """The event of the pull is Normal: the watch of Warning events doesn't show it."""
    async with staged(PYTORCHJOB, since=1000.0) as training:
        mount_fails(training, times=10)
        pod_event(training, "Pulling", ago=60.0)
        assert await followed(training, 900.0) is None


def show(pod: Object, container: Object) -> None:
    pod["status"]["containerStatuses"] = [container]


@of_each_kind
async def test_failures_of_a_pull_and_its_back_off_are_one(kind: Kind) -> None:
    """The kubelet shows them in turn: each read may show the other one."""
    async with staged(kind, since=100.0) as training:
        training.condition("Created")

        pod = training.pod(0, "Pending", since=90.0)

        async def alternate() -> None:
            for reason in itertools.cycle(("ErrImagePull", "ImagePullBackOff")):
                waiting = {"reason": reason, "message": "x"}
                container = training.api.pods[pod]["status"]["containerStatuses"][0] | {"state": {"waiting": waiting}}
                training.api.change("pods", pod, functools.partial(show, container=container))
                await asyncio.sleep(7.0)

        training.background.add(asyncio.ensure_future(alternate()))
        outcome = await followed(training)
        assert outcome is not None
        assert "pull" in str(outcome.cause)
