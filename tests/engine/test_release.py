"""Release: what is deleted, kept or left unchanged, the requests, and the messages of failures."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, SUSPENDED_ANNOTATION, JobRef, Owner
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.state.status import wants_suspension
from airflow_provider_ktrain.engine import release as releasing
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import job_calls
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import JobChanged, JobRead, Observed, job_pods, read_training
from airflow_provider_ktrain.engine.release import (
    DecidedEnd,
    DecisionOnRead,
    HurriedKill,
    ReleaseError,
    fitting_mode,
    release,
)
from tests.apiserver import Lost, Request, Response, connected, stamp
from tests.engine.staged import NAME, Staged, of_each_kind, staged
from tests.engine.tasks import present, release_job

pytestmark = pytest.mark.virtual_time

BOTH = ("Master", "Worker")
of_each_mode = pytest.mark.parametrize("mode", [Mode.DELETE, Mode.SUSPEND])


@contextlib.asynccontextmanager
async def reached(kind: Kind = PYTORCHJOB, **how: Any) -> AsyncIterator[tuple[Staged, Api]]:
    """A training, and a client of its API server."""
    async with staged(kind, **how) as training, connected(training.url) as api:
        yield training, api


def queue(training: Staged) -> None:
    """The job has a Workload that Kueue has admitted."""
    training.workload(Admitted=("True", "Admitted", ""))


def made(training: Staged) -> list[str]:
    """The requests since `read`: method and what it is about."""
    lines = [line.partition("?")[0].split("/") for line in training.api.requests]
    return [line[0] + ("pods" if line[-1] == "pods" else "job" if line[-1] == NAME else line[-2]) for line in lines]


async def read_of(training: Staged, api: Api) -> JobRead:
    read = await read_training(api, training.ref)
    training.api.requests.clear()
    return read


def adopt(training: Staged) -> None:
    """A later try adopts the job. An adoption keeps the uid."""
    owner = Owner.of(training.job)
    assert isinstance(owner, Owner)
    annotations = {OWNER_ANNOTATION: replace(owner, try_number=2, ti_id="ti-2").annotation()}
    training.api.change(training.kind.plural, NAME, lambda job: job["metadata"]["annotations"].update(annotations))


def is_released(training: Staged) -> bool:
    return not training.holding and (not training.exists or wants_suspension(training.job))


@pytest.mark.parametrize(
    ("condition", "deleting", "fitting"),
    [
        ("Running", False, {Mode.DELETE: Mode.DELETE, Mode.SUSPEND: Mode.SUSPEND, Mode.DELETE_PODS: Mode.SUSPEND}),
        ("Running", True, {Mode.DELETE: Mode.DELETE, Mode.SUSPEND: Mode.DELETE, Mode.DELETE_PODS: Mode.DELETE}),
        (
            "Succeeded",
            False,
            {Mode.DELETE: Mode.DELETE, Mode.SUSPEND: Mode.DELETE_PODS, Mode.DELETE_PODS: Mode.DELETE_PODS},
        ),
    ],
)
def test_mode_fits_the_state_of_the_job(condition: str, deleting: bool, fitting: dict[Mode, Mode]) -> None:
    ref = JobRef("PyTorchJob", "v1", "ns", "train", "j", submission="s")
    meta = {"name": "train", "uid": "j", **({"deletionTimestamp": "2026-11-21T10:00:00Z"} if deleting else {})}
    job = {"kind": ref.kind, "metadata": meta, "status": {"conditions": [{"type": condition, "status": "True"}]}}
    assert {mode: fitting_mode(ref, job, mode) for mode in Mode} == fitting
    assert {fitting_mode(ref, ABSENT, mode) for mode in Mode} == {Mode.DELETE}


# what becomes of the job and its pods


def two_run(training: Staged) -> None:
    training.start()
    training.pod(1)


def one_has_no_node(training: Staged) -> None:
    training.pod(0, "Pending", node="")
    training.pod(1, "Pending", node="")


def one_has_ended(training: Staged) -> None:
    training.pod(0, "Succeeded")
    training.pod(1)
    training.pod(2)
    training.ended()


@of_each_kind
@pytest.mark.parametrize(
    ("state", "mode", "text"),
    [
        (two_run, Mode.DELETE, "deleted. 2 GPUs released, 2 pods deleted."),
        (two_run, Mode.SUSPEND, "suspended. 2 GPUs released, 2 pods deleted."),
        (one_has_no_node, Mode.DELETE, "deleted. No GPUs were held, 2 pods deleted."),
        (one_has_ended, Mode.DELETE_PODS, "kept without running pods. 2 GPUs released, 2 pods deleted."),
        # it has ended since it was seen running; suspending it would release nothing
        (one_has_ended, Mode.SUSPEND, "kept without running pods. 2 GPUs released, 2 pods deleted."),
    ],
)
async def test_release_ends_when_no_pod_runs(
    kind: Kind, state: Callable[[Staged], None], mode: Mode, text: str
) -> None:
    async with reached(kind) as (training, api):
        state(training)
        done = await release_job(api, training.ref, mode)
        assert text in done.text
        assert not training.holding
        assert training.exists is not done.job_deleted
        assert done.job_deleted is (mode is Mode.DELETE)
        if training.exists:
            assert len(training.api.pods) == (1 if state is one_has_ended else 0)
            assert wants_suspension(training.job) is (state is two_run)
            annotations = training.job["metadata"]["annotations"]
            assert annotations.get(SUSPENDED_ANNOTATION) == ("ti-1" if state is two_run else None)


async def test_job_pods_reads_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_calls, "PAGE_SIZE", 2)
    async with reached() as (training, api):
        for index in range(5):
            training.pod(index)
        assert len(await job_pods(api, training.ref)) == 5


@of_each_kind
async def test_release_is_idempotent(kind: Kind) -> None:
    async with reached(kind) as (training, api):
        training.start(grace=5)
        await asyncio.gather(*(release_job(api, training.ref) for _ in range(4)))
        assert "is gone. No pods were left." in (await release_job(api, training.ref)).text


async def test_release_without_verify_returns_at_once() -> None:
    async with reached() as (training, api):
        training.start(grace=20)
        done = await release_job(api, training.ref, verify=False)
        assert "deleted. 1 GPU will be released when 1 pod terminates." in done.text
        assert done.job_deleted, "the API server has accepted it"
        assert training.holding
        assert "foregroundDeletion" in training.job["metadata"]["finalizers"], "the job stays until its pods are gone"


@pytest.mark.parametrize(("completed", "is_suspended"), [(False, True), (True, False)])
async def test_failed_job_whose_pods_are_recreated_is_suspended(completed: bool, is_suspended: bool) -> None:
    """mpi-operator recreates them after an eviction until the job is suspended, because it sets no completionTime."""
    async with reached(MPIJOB) as (training, api):
        training.start()
        training.ended("Failed")
        if completed:
            training.api.change("mpijobs", NAME, lambda job: job["status"].update(completionTime=stamp()))
        done = await release_job(api, training.ref, Mode.DELETE_PODS)
        what = "suspended" if is_suspended else "kept without running pods"
        assert f"{what}. 1 GPU released, 1 pod deleted." in done.text
        assert wants_suspension(training.job) is is_suspended


async def test_pods_left_by_an_orphaning_deletion_are_deleted() -> None:
    async with reached() as (training, api):
        training.start()
        training.api.release(training.ref.uid)
        training.api.remove(training.kind.plural, NAME)
        assert training.holding
        assert "1 GPU released, 1 pod deleted." in (await release_job(api, training.ref)).text
        assert not training.holding


async def test_pods_of_a_job_without_our_labels_are_found() -> None:
    """Like a deletion by the job control operators: the job has no owner, and its pods lack our labels."""
    async with reached() as (training, api):
        training.start()
        ref = training.ref
        theirs = JobRef(ref.kind, ref.version, ref.namespace, ref.name, ref.uid)
        assert "1 GPU released" in (await release_job(api, theirs)).text


async def test_pods_of_the_next_tries_job_are_not_deleted() -> None:
    """Trainer before 2.2 can't label pods, and kubeflow-trainer-edit grants no right to read JobSets."""
    async with reached(TRAINJOB) as (training, api):
        before = training.pod(0, since=60.0)
        training.api.release(training.ref.uid)
        training.api.remove("trainjobs", NAME)
        next_try = Staged(training.api, TRAINJOB, since=30.0, submission="after")
        after = next_try.pod(1, since=30.0)
        for name in (before, after):
            pod = training.api.pods[name]
            pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-uid"] = f"jobset-of-{name}"
            training.api.put("pods", pod)
        training.api.fail("GET", "jobsets", 403, math.inf)
        assert "1 pod deleted." in (await release_job(api, training.ref)).text
        assert next_try.holding == [after]


# Kueue


async def test_unfinished_job_of_a_queue_is_paused_by_its_workload() -> None:
    async with reached() as (training, api):
        training.start()
        queue(training)
        training.after(1.0, training.api.remove, "pods", training.pod_name())  # Kueue suspends the job
        done = await release_job(api, training.ref, Mode.SUSPEND)
        assert "paused by its Workload. 1 GPU released, 1 pod deleted." in done.text
        assert training.exists


@of_each_kind
async def test_unfinished_job_of_a_queue_without_workload_is_deleted(kind: Kind) -> None:
    """Kueue would resume it: its Workload is still admitted."""
    async with reached(kind) as (training, api):
        training.start()
        queue(training)
        training.api.remove("workloads", f"job-{NAME}")
        done = await release_job(api, training.ref, Mode.SUSPEND)
        assert "deleted. 1 GPU released, 1 pod deleted." in done.text
        assert done.text.endswith("\nIt was not suspended, because Kueue would resume it, and it has no Workload.")
        assert not training.exists


async def test_finished_job_of_a_queue_is_kept() -> None:
    async with reached() as (training, api):
        queue(training)
        training.end()
        assert "kept" in (await release_job(api, training.ref, Mode.SUSPEND)).text
        assert training.exists


# jobs that have changed


@of_each_kind
@of_each_mode
async def test_job_that_another_try_has_adopted_since_the_read_is_not_released(kind: Kind, mode: Mode) -> None:
    """Without the resourceVersion, the release would delete the adopted job."""
    async with reached(kind) as (training, api):
        training.start()
        read = await read_training(api, training.ref)
        adopt(training)
        with pytest.raises(JobChanged, match="has changed since it was read"):
            await release(api, training.ref, DecidedEnd(mode, read))
        with pytest.raises(JobChanged):
            await release(api, training.ref, HurriedKill(mode, Observed(present(read))), timeout=5)
        assert training.holding
        assert not is_released(training)


@of_each_mode
async def test_job_that_has_vanished_since_the_read_is_read_again(mode: Mode) -> None:
    async with reached() as (training, api):
        training.start()
        read = await read_training(api, training.ref)
        training.api.remove(training.kind.plural, NAME)
        with pytest.raises(JobChanged):
            await release(api, training.ref, DecidedEnd(mode, read))


async def test_job_of_others_is_left_if_that_is_decided() -> None:
    async with reached() as (training, api):
        training.start()
        assert await release(api, training.ref, DecisionOnRead(lambda _: None)) is None
        assert not training.api.writes()


@of_each_kind
async def test_new_job_of_the_same_name_is_not_released(kind: Kind) -> None:
    """After a clear, the next job has the same name and another uid."""
    async with reached(kind) as (training, api):
        training.api.remove(kind.plural, NAME)
        after = Staged(training.api, kind, submission="after")
        after.start()
        await release_job(api, training.ref)
        assert after.job["metadata"]["uid"] == after.ref.uid
        assert "deletionTimestamp" not in after.job["metadata"]
        assert after.holding


@of_each_kind
@of_each_mode
async def test_release_of_others_decides_again_after_a_concurrent_write(kind: Kind, mode: Mode) -> None:
    """Another client writes to the job between our read and our write, three times."""
    reads = list[JobRead]()

    def mode_for(read: JobRead) -> Mode:
        reads.append(read)
        if len(reads) <= 3:
            touched = {"tests.example/touched": str(len(reads))}
            training.api.change(kind.plural, NAME, lambda job: job["metadata"]["annotations"].update(touched))
        return mode

    async with reached(kind) as (training, api):
        training.start()
        done = await release(api, training.ref, DecisionOnRead(mode_for))
        assert done is not None
        assert ("suspended." if mode is Mode.SUSPEND else "deleted.") in done.text
        assert len(reads) == 4
        assert is_released(training)


# failures


async def test_error_names_pods_that_are_left_at_the_timeout() -> None:
    async with reached() as (training, api):
        training.start(grace=30)
        training.api.change("pods", training.pod_name(), lambda pod: pod["metadata"].update(finalizers=["test"]))
        left = (
            r"1 pod with 1 GPU still present 60 s after the deletion was requested\.\n"
            r"These are train-worker-0\. See `kubectl get"
        )
        began = timing.now()
        with pytest.raises(ReleaseError, match=left):
            await release_job(api, training.ref, timeout=1)
        assert 59.0 <= timing.now() - began <= 60.0, "the grace period and a margin"


async def test_release_names_the_node_that_does_not_report() -> None:
    async with reached() as (training, api):
        training.start(grace=30)
        silent = [
            {"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-23T14:32:50Z"},
            {"type": "ContainersReady", "status": "True"},
        ]
        training.api.change("pods", training.pod_name(), lambda pod: pod["metadata"].update(finalizers=["test"]))
        training.api.change("pods", training.pod_name(), lambda pod: pod["status"].update(conditions=silent))
        said = list[str]()
        with pytest.raises(ReleaseError) as error:
            await release_job(api, training.ref, timeout=1, say=said.append)
        text = "has not reported since 14:32 UTC. Its pods stay until it reports again or is deleted."
        assert text in str(error.value)
        assert text in "".join(said)
        assert "SIGTERM" not in "".join(said)


async def test_release_waits_for_the_grace_period_and_says_so() -> None:
    async with reached() as (training, api):
        training.start(grace=30)
        said = list[str]()
        end = DecidedEnd(Mode.DELETE, await read_training(api, training.ref))
        done = await release(api, training.ref, end, timeout=1, say=said.append)
        assert "1 GPU released, 1 pod deleted." in done.text
        assert 30.0 <= done.seconds < 31.5
        assert len(said) == 2, "after 3 s, and every 15 s"
        assert f"Waiting for the pods of {training.ref} to end" in said[0]
        assert "its grace period of 30 s is over" in said[0]


async def test_job_that_a_finalizer_keeps_is_reported() -> None:
    async with reached() as (training, api):
        training.condition("Running")
        training.api.change(training.kind.plural, NAME, lambda job: job["metadata"].update(finalizers=["test"]))
        done = await release_job(api, training.ref, timeout=1)
        assert "something keeps it, such as a finalizer" in done.text


@of_each_kind
@pytest.mark.parametrize("status", [503, 403], ids=["unreachable", "just started"])
async def test_release_retries_while_the_api_server_refuses_requests(kind: Kind, status: int) -> None:
    """An API server that has just started hasn't read the rights yet."""
    async with reached(kind) as (training, api):
        training.start()
        training.api.fail(".*", kind.plural, status, 3)
        await release(api, training.ref, DecisionOnRead(lambda _: Mode.DELETE))
        assert not training.exists


async def test_release_fails_at_the_timeout_if_the_api_server_stays_unreachable() -> None:
    """The error names the job that may still hold GPUs. It is released, and counted, once the server is back."""
    async with reached() as (training, api):
        training.start()
        read = await read_training(api, training.ref)
        training.api.away = True
        began = timing.now()
        away = r"within 30 s: the API server can't be reached\."
        with pytest.raises(ReleaseError, match=rf"{away}\n.+\n.*kubectl delete -n"):
            await release(api, training.ref, DecisionOnRead(lambda _: Mode.DELETE), timeout=30)
        with pytest.raises(ReleaseError, match=away):
            await release(api, training.ref, DecidedEnd(Mode.DELETE, read), timeout=30)
        assert timing.now() - began < 61, "nothing waits for pods that cannot be asked for"
        training.after(60.0, setattr, training.api, "away", False)
        done = await release(api, training.ref, DecisionOnRead(lambda _: Mode.DELETE), timeout=120)
        assert done is not None
        assert "1 GPU released" in done.text


async def test_error_of_a_release_without_any_response_has_its_reason() -> None:
    async with reached() as (training, api):
        training.api.pause("before GET")
        away = r"within 10 s: the API server can't be reached\.\nIt did not respond\.\nIts pods"
        with pytest.raises(ReleaseError, match=away):
            await release(api, training.ref, DecisionOnRead(lambda _: Mode.DELETE), timeout=10)


@of_each_mode
async def test_release_pauses_between_conflicts_and_ends_with_an_error(mode: Mode) -> None:
    """Its operator writes to the job before each of our writes."""
    async with reached() as (training, api):
        training.api.fail("DELETE|PATCH", NAME, 409, math.inf, message="the object has been modified")
        with pytest.raises(
            ReleaseError, match=r"because it kept changing\. .*\n.*\n409 Conflict.*: the object has been"
        ):
            await release(api, training.ref, DecisionOnRead(lambda _: mode), timeout=6)
        assert len(training.api.writes()) == 9, "pauses of 0, and then from 0.05 to 1.6 and 2 seconds"


async def test_missing_right_is_an_error() -> None:
    async with reached() as (training, api):
        training.api.token = "another"
        with pytest.raises(
            ReleaseError, match=r"could not be released\. To delete it, run: kubectl delete .*\n401 Unauthorized"
        ):
            await release(api, training.ref, DecisionOnRead(lambda _: Mode.DELETE))


# requests


@pytest.mark.parametrize("phase", ["Succeeded", "Running"])
async def test_requests_of_a_deletion(phase: str) -> None:
    async with reached() as (training, api):
        training.pod(0, phase)
        training.ended()
        done = await release(api, training.ref, DecidedEnd(Mode.DELETE, await read_of(training, api)))
        by_name = ["GET pods"] * (phase == "Running")  # a list may lack a pod that runs
        assert made(training) == ["DELETE job", "GET job", "GET pods", *by_name]
        assert ("1 GPU released, 1 pod deleted." in done.text) is (phase == "Running")


async def test_delete_carries_uid_and_version_of_the_job_that_was_read() -> None:
    async with reached() as (training, api):
        training.start()
        read = await read_of(training, api)
        await release(api, training.ref, DecidedEnd(Mode.DELETE, read))
        ((_, body),) = training.sent
        meta = present(read)["metadata"]
        assert body["preconditions"] == {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}


async def test_kept_job_without_running_pods_takes_one_list() -> None:
    async with reached() as (training, api):
        training.pod(1, "Failed")
        training.end()
        done = await release(api, training.ref, DecidedEnd(Mode.DELETE_PODS, await read_of(training, api)))
        assert made(training) == ["GET pods"]
        assert done.text.endswith("kept without running pods.")


async def test_job_that_is_being_deleted_is_not_deleted_again() -> None:
    async with reached() as (training, api):
        training.start()
        deleting = {"deletionTimestamp": stamp()}
        training.api.change(training.kind.plural, NAME, lambda job: job["metadata"].update(deleting))
        read = await read_of(training, api)
        training.api.remove(training.kind.plural, NAME)
        assert (
            "deleted. 1 GPU released, 1 pod deleted."
            in (await release(api, training.ref, DecidedEnd(Mode.DELETE, read))).text
        )
        assert made(training) == ["GET job", "GET pods", "GET pods"], "the list, and the pod by its name"


async def test_pod_that_appears_after_the_read_is_deleted_and_counted() -> None:
    """The operator has replaced a Worker when the Master ended, and leaves it running (`cleanPodPolicy: None`)."""
    async with reached(roles=BOTH) as (training, api):
        training.spec(runPolicy={"cleanPodPolicy": "None"})
        training.pod(0, "Failed", role="Worker")
        training.end()
        read = await read_of(training, api)
        training.api.remove("pods", training.pod_name(0, "Worker"))
        training.pod(0, role="Worker")
        done = await release(api, training.ref, DecidedEnd(Mode.DELETE_PODS, read))
        assert list(training.api.pods) == [training.pod_name()]
        assert "1 GPU released, 1 pod deleted." in done.text


@pytest.mark.parametrize("in_time", [True, False])
async def test_pods_that_the_operator_cleans_up_are_left_to_it_for_two_seconds(in_time: bool) -> None:
    async with reached(roles=BOTH) as (training, api):
        training.spec(runPolicy={"cleanPodPolicy": "Running"})
        training.start()
        training.end()
        if in_time:
            training.after(1.5, training.api.remove, "pods", training.pod_name(0, "Worker"))
        done = await release(api, training.ref, DecidedEnd(Mode.DELETE_PODS, await read_of(training, api)))
        assert "1 GPU released" in done.text
        assert made(training).count("DELETE pods") == (0 if in_time else 1)


@pytest.mark.parametrize("timeout", [0.6, 0.7, 0.8, 0.9])
async def test_pods_that_are_replaced_until_the_timeout_are_named(
    timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last pause between two checks must not end in the timeout of a request."""
    monkeypatch.setattr(releasing, "GRACE_MARGIN_SECONDS", 0)
    async with reached() as (training, api):
        training.pod(0)
        training.ended()
        training.api.on_request = lambda line: training.after(0.01, training.pod) if "DELETE" in line else None
        with pytest.raises(ReleaseError, match="1 pod with 1 GPU still present"):
            await release(
                api, training.ref, DecidedEnd(Mode.DELETE_PODS, await read_of(training, api)), timeout=timeout
            )


# kills


@pytest.mark.parametrize(
    ("condition", "mode", "text", "requests"),
    [
        ("Running", Mode.DELETE, "deleted. Its pods are being terminated.", ["DELETE job"]),
        ("Running", Mode.SUSPEND, "suspended. Its pods are being terminated.", ["PATCH job"]),
        ("Succeeded", Mode.DELETE, "deleted. Its pods are being terminated.", ["DELETE job"]),
        ("Succeeded", Mode.SUSPEND, "has ended and is kept. Its running pods are not deleted.", []),
    ],
)
async def test_release_after_a_kill_takes_one_request(
    condition: str, mode: Mode, text: str, requests: list[str]
) -> None:
    async with reached() as (training, api):
        training.start(grace=20)
        training.condition(condition)
        read = await read_of(training, api)
        done = await release(api, training.ref, HurriedKill(mode, Observed(present(read))), timeout=5)
        assert done.text == f"{training.ref} {text}"
        assert made(training) == requests
        assert training.holding


def never(training: Staged) -> None:
    training.api.pause("before PATCH .*workloads")


def lost(training: Staged) -> None:
    def lose(request: Request, answer: Response | None) -> Response:
        raise Lost("cut")

    training.api.replace("PATCH", "workloads", lose, math.inf)


def refused(training: Staged) -> None:
    training.api.fail("PATCH", "workloads", 403)


def unknown(training: Staged) -> None:
    """The process has not seen it."""


def finished(training: Staged) -> None:
    """Kueue doesn't resume the job."""
    training.workload(Finished=("True", "", ""))


def changed(training: Staged) -> None:
    """It has changed since it was seen."""
    queue(training)


LATE = "its Workload could not be deactivated in time"


@pytest.mark.parametrize(
    ("fault", "text", "requests"),
    [
        (changed, "paused by its Workload", ["PATCH job", "PATCH workloads"]),
        (finished, "suspended", ["PATCH job"]),
        (never, LATE, ["PATCH job", "PATCH workloads", "DELETE job"]),
        (lost, LATE, ["PATCH job", ..., "DELETE job"]),
        (refused, "its Workload could not be deactivated (403 Forbidden)", [..., "PATCH workloads", "DELETE job"]),
        (unknown, "its Workload is not known", ["DELETE job"]),
    ],
)
async def test_job_of_a_queue_is_paused_or_deleted_after_a_kill(
    fault: Callable[[Staged], None], text: str, requests: list[Any]
) -> None:
    async with reached() as (training, api):
        training.start()
        queue(training)
        seen = None if fault is unknown else training.api.objects["workloads"][f"job-{NAME}"]
        fault(training)
        if fault is finished:
            seen = training.api.objects["workloads"][f"job-{NAME}"]
        read, began = await read_of(training, api), timing.now()
        kill = HurriedKill(Mode.SUSPEND, Observed(present(read), seen))
        done = await release(api, training.ref, kill, timeout=3.5)
        assert timing.now() - began <= 3.5 / 2
        what = text if requests[-1] != "DELETE job" else "deleted"
        assert done.text.startswith(f"{training.ref} {what}. Its pods are being terminated.")
        assert what == text or done.text.endswith(f"\nIt was not suspended, because Kueue would resume it, and {text}.")
        assert [one for one in made(training) if one in requests][-1] == requests[-1]
        assert ... in requests or made(training) == requests
        if fault is changed:
            assert training.api.objects["workloads"][f"job-{NAME}"]["spec"]["active"] is False


async def test_kill_that_is_not_answered_is_an_error() -> None:
    async with reached() as (training, api):
        training.start()
        read = await read_of(training, api)
        training.api.pause("before DELETE")
        with pytest.raises(ReleaseError, match="could not be released within 3 s"):
            await release(api, training.ref, HurriedKill(Mode.DELETE, Observed(present(read))), timeout=3)


# pods that wait for their Master


def waiting_pod(training: Staged, index: int, *, deleted: bool = False) -> None:
    """A Worker that still waits for its Master. Its program hasn't begun. Its shell is PID 1 and ignores SIGTERM."""
    pod = training.pod(index, "Pending", state={"waiting": {}}, grace=30)
    init = {"name": "init-pytorch", "state": {"running": {"startedAt": stamp(60)}}}
    deleting = {"deletionTimestamp": stamp(-30), "deletionGracePeriodSeconds": 30} if deleted else {}
    training.api.change("pods", pod, lambda pod: pod["status"].update(initContainerStatuses=[init]))
    training.api.change("pods", pod, lambda pod: pod["metadata"].update(deleting))


@pytest.mark.parametrize(
    ("condition", "mode", "deleted"),
    [
        ("Succeeded", Mode.DELETE_PODS, False),
        ("Succeeded", Mode.DELETE_PODS, True),
        ("Running", Mode.DELETE, False),
    ],
    ids=["ended", "ended, and the operator deletes it", "deleted"],
)
async def test_worker_that_waits_for_its_master_has_a_second(condition: str, mode: Mode, deleted: bool) -> None:
    """It would hold GPUs for the whole grace period, of 30 s by default."""
    async with reached() as (training, api):
        training.condition(condition)
        waiting_pod(training, 0, deleted=deleted)
        uid = training.api.pods[training.pod_name()]["metadata"]["uid"]
        done = await release_job(api, training.ref, mode)
        assert "1 pod deleted." in done.text
        assert done.seconds < 4.0, "an operator that cleans up has 2 s"
        bodies = [body for line, body in training.sent if "/pods/" in line]
        assert bodies == [{"gracePeriodSeconds": 1, "preconditions": {"uid": uid}}]


async def test_release_goes_on_if_the_grace_period_can_not_be_shortened() -> None:
    async with reached() as (training, api):
        training.condition("Running")
        waiting_pod(training, 0)
        training.api.fail("DELETE", "/pods/", 403, message="no right to delete pods")
        done = await release_job(api, training.ref, Mode.DELETE)
        assert done.text.startswith(f"{training.ref} deleted.")
        assert 30.0 <= done.seconds < 32.0


async def test_api_server_that_is_away_is_asked_once_to_end_waiting_pods() -> None:
    """256 Workers that wait, each with a request that isn't answered within 30 s, would stop a release for 2 hours."""
    async with reached() as (training, api):
        training.condition("Running")
        for index in range(3):
            waiting_pod(training, index)
        training.api.pause("before DELETE .*/pods/")
        done = await release_job(api, training.ref, Mode.DELETE)
        assert done.text.startswith(f"{training.ref} deleted.")
        assert made(training).count("DELETE pods") == 1
