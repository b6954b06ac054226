"""Disruptions as a real cluster has shown them, replayed in an API server while the job is followed to its end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from airflow_provider_ktrain.core.end_rules import Event
from airflow_provider_ktrain.core.kinds import MPIJOB, TRAINJOB, Kind, kind_of
from airflow_provider_ktrain.core.kinds.conditions import INCOMPLETE_ANNOTATION
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.state.pods.stopped_pods import STOPPED_PODS_ANNOTATION
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow import observer
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.apiserver import Object, stamp
from tests.core.disruptions import changes
from tests.core.test_disruptions import DOUBTS, SHOWN
from tests.engine.staged import NAME, Staged, staged
from tests.until import until

pytestmark = pytest.mark.virtual_time

OPTIONS = Options(drain_timeout=0.5)
MASTER = "100b-pt-evicted-exit-0-master-onfailure"
LATE_MASTER = "107c-pt-deleted-by-hand-exit-0-master-onfailure"
RESULT = 'KTRAIN_RESULT {"loss": 0.5}'
#: The Master is evicted at 14:35:22, and a clock may be 5 s off.
BEFORE, AFTER = "2026-11-23T14:35:16.900000000Z", "2026-11-23T14:35:17.000000000Z"


class Replay:
    """A recording, whose changes are repeated in the order in which they happened.

    :param training: the job whose status and pods they become.
    """

    def __init__(self, training: Staged, name: str) -> None:
        self.training, self.api, self.kind = training, training.api, training.kind
        self._left = changes(name)
        self._pods: set[str] = set()  # uids
        created = next(c["object"]["metadata"]["creationTimestamp"] for c in self._left if c["watch"] != "pods")
        self.api.change(self.kind.plural, NAME, lambda job: job["metadata"].update({"creationTimestamp": created}))

    def go(self, until: Callable[[Object], object] = lambda change: False) -> None:
        """Repeat the changes up to the first for which `until` holds, or all."""
        while self._left:
            change = self._left.pop(0)
            self._write(copy.deepcopy(change))
            if until(change):
                return

    async def go_slowly(self, until: Callable[[Object], object] = lambda change: False) -> None:
        """The same, so that a watch shows each change."""
        found = False
        while self._left and not found and NAME in self.api.objects[self.kind.plural]:
            found = bool(until(self._left[0]))
            self.go(lambda change: True)
            await asyncio.sleep(0.01)

    def _write(self, change: Object) -> None:
        obj, name = change["object"], change["object"]["metadata"]["name"]
        if change["watch"] != "pods":
            shown = {"spec": obj["spec"], "status": obj["status"]}
            self.api.change(self.kind.plural, NAME, lambda job: job.update(shown))
            return
        labels = {**self.training.labels, **obj["metadata"]["labels"], self.kind.behavior.pod_name_label: NAME}
        meta = {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}
        owner = {"kind": self.kind.name, "name": NAME, "uid": self.training.ref.uid}
        obj["metadata"] = {**meta, "labels": labels, "ownerReferences": [owner]}
        obj["spec"]["terminationGracePeriodSeconds"] = 0
        uid, found = meta["uid"], self.api.objects["pods"].get(name)
        if uid in self._pods and (found is None or found["metadata"]["uid"] != uid):
            return  # the process that follows the job has deleted it
        self._pods.add(uid)
        self.api.put("pods", obj)
        if change["type"] == "DELETED":
            self.api.remove("pods", name)


@contextlib.asynccontextmanager
async def replaying(name: str) -> AsyncIterator[tuple[Staged, Replay]]:
    kind = kind_of(next(c["object"]["kind"] for c in changes(name) if c["watch"] != "pods"))
    async with staged(kind) as training:
        yield training, Replay(training, name)


async def followed(training: Staged, recorded: Replay, options: Options = OPTIONS) -> Outcome:
    """The outcome of a process that sees every change."""
    following = asyncio.ensure_future(training.follow(options))
    await until(lambda: training.api.watched("pods"))
    await recorded.go_slowly()
    return await asyncio.wait_for(following, 60)


def annotation_of(training: Staged, name: str) -> str | None:
    found: str | None = training.api.objects[training.kind.plural][NAME]["metadata"]["annotations"].get(name)
    return found


def mark_of(training: Staged) -> str | None:
    return annotation_of(training, INCOMPLETE_ANNOTATION)


def running_pods(training: Staged) -> list[str]:
    pods = training.api.objects["pods"].values()
    return [p["metadata"]["name"] for p in pods if p["status"]["phase"] not in ("Succeeded", "Failed")]


def succeeds(change: Object, *types: str) -> bool:
    conditions = (change["object"].get("status") or {}).get("conditions") or ()
    return change["watch"] != "pods" and any(c["type"] in ("Succeeded", "Complete", *types) for c in conditions)


def ends(change: Object) -> bool:
    return succeeds(change, "Failed")


@pytest.mark.parametrize("name", DOUBTS)
async def test_interrupted_success_fails_and_is_marked(name: str) -> None:
    async with replaying(name) as (training, recorded):
        outcome = await followed(training, recorded)
        assert not outcome.succeeded
        cause = outcome.cause or {}
        assert (cause["category"], cause["summary"]) == (
            "infrastructure", f"{DOUBTS[name]}: the training is probably incomplete",
        )  # fmt: skip
        assert "KTRAIN_RESULT" in cause["resolution"]
        assert mark_of(training) == DOUBTS[name]
        assert (cause["failed_nodes"], outcome.kept is not None) == ({}, True)
        assert running_pods(training) == []


async def test_result_proves_that_the_training_is_complete() -> None:
    async with replaying(MASTER) as (training, recorded):
        recorded.go(lambda change: change["object"]["status"].get("phase") == "Running")
        training.api.log("run-master-0").write(BEFORE, RESULT)
        outcome = await followed(training, recorded)
        assert (outcome.succeeded, outcome.result) == (True, {"loss": 0.5})
        assert mark_of(training) is None


async def test_result_of_a_signal_handler_proves_nothing() -> None:
    async with replaying(MASTER) as (training, recorded):
        recorded.go(lambda change: change["object"]["status"].get("phase") == "Running")
        training.api.log("run-master-0").write(AFTER, RESULT)
        outcome = await followed(training, recorded)
        assert (outcome.succeeded, mark_of(training)) == (False, DOUBTS[MASTER])


@pytest.mark.parametrize(("printed", "succeeds"), [(BEFORE, True), (AFTER, False)])
async def test_result_that_is_read_from_the_end_of_a_log(printed: str, succeeds: bool) -> None:
    """A process that follows no logs reads it when the job has ended."""
    async with replaying(MASTER) as (training, recorded):
        recorded.go(lambda change: change["object"]["status"].get("phase") == "Running")
        training.api.log("run-master-0").write(printed, RESULT)
        outcome = await followed(training, recorded, Options(drain_timeout=0.5, logs="none"))
        assert outcome.succeeded is succeeds


async def test_result_that_is_read_at_the_end_removes_the_mark() -> None:
    """The process before died after it had marked the job, and before it had read the result."""
    async with replaying(MASTER) as (training, recorded):
        recorded.go(succeeds)
        training.api.change("pytorchjobs", NAME, lambda job: job["metadata"]["annotations"].update(mark))
        training.api.log("run-master-0").write(BEFORE, RESULT)
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: mark_of(training) is None)
        recorded.go()  # the pod is gone
        assert (await following).succeeded


mark = {INCOMPLETE_ANNOTATION: DOUBTS[MASTER]}


async def test_mark_is_the_proof_when_the_pods_are_gone() -> None:
    async with replaying(MASTER) as (training, recorded):
        recorded.go()
        training.api.change("pytorchjobs", NAME, lambda job: job["metadata"]["annotations"].update(mark))
        outcome = await training.follow(OPTIONS)
        assert not outcome.succeeded
        assert (outcome.cause or {})["summary"].startswith(DOUBTS[MASTER])


async def test_pods_that_nobody_saw_are_no_doubt() -> None:
    async with replaying("100b-mpi-evicted-exit-0-launcher") as (training, recorded):
        recorded.go()
        assert (await training.follow(OPTIONS)).succeeded
        assert "PATCH" not in str(training.api.writes()), "a success needs no further request"


async def test_master_that_nobody_saw_is_doubtful_by_the_conditions_of_its_job() -> None:
    """It was drained between the death of the worker that deferred the task and the next try (found by the soak)."""
    async with replaying(MASTER) as (training, recorded):
        recorded.go()
        outcome = await training.follow(OPTIONS)
        assert (outcome.cause or {})["summary"] == f"{SHOWN}: the training is probably incomplete"
        assert mark_of(training) == SHOWN


def is_stopped(change: Object) -> bool:
    return "DisruptionTarget" in str(change["object"]["status"]) or "deletionTimestamp" in change["object"]["metadata"]


@pytest.mark.parametrize("name", [name for name in DOUBTS if "trainjob" not in name])
async def test_process_after_one_that_died_knows_of_the_stopped_pod(name: str) -> None:
    """It died before the job had succeeded, and the pod is gone."""
    async with replaying(name) as (training, recorded):
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: training.api.watched("pods"))
        await recorded.go_slowly(is_stopped)
        await until(lambda: annotation_of(training, STOPPED_PODS_ANNOTATION))
        following.cancel()
        await asyncio.wait([following])
        recorded.go()
        for pod in list(training.api.objects["pods"]):
            training.api.remove("pods", pod)
        outcome = await training.follow(OPTIONS)
        assert not outcome.succeeded
        replica = DOUBTS[name].partition(" ended")[0]
        assert (outcome.cause or {})["summary"].startswith(f"{replica} had not ended when ")
        assert (mark_of(training) or "").startswith(replica)


async def test_pods_that_are_rejected_without_end_are_not_recorded() -> None:
    """Of 103 pods in 34 s, none can make the success of the job doubtful."""
    async with replaying("107d-pt-admission-error-worker-onfailure") as (training, recorded):
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: training.api.watched("pods"))
        await recorded.go_slowly()
        assert "PATCH" not in str(training.api.writes())
        following.cancel()


async def test_pod_that_could_not_be_recorded_is_recorded_later() -> None:
    async with replaying(MASTER) as (training, recorded):
        training.api.fail("PATCH", "pytorchjobs", 403)
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: training.api.watched("pods"))
        await recorded.go_slowly(is_stopped)
        await until(lambda: annotation_of(training, STOPPED_PODS_ANNOTATION), 30)
        assert "could not be recorded" in str(training.log)
        following.cancel()


async def test_annotation_that_is_not_answered_in_time_is_said() -> None:
    async with replaying(MASTER) as (training, recorded):
        training.api.pause("before PATCH .*pytorchjobs")
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: training.api.watched("pods"))
        await recorded.go_slowly(is_stopped)
        await until(lambda: "could not be recorded" in str(training.log), 40)
        following.cancel()


async def test_stop_while_the_result_is_read_repeats_no_success() -> None:
    """The program was stopped, and has printed a result. The process ends before it has read that."""
    async with replaying(MASTER) as (training, recorded):
        recorded.go(succeeds)
        training.api.log("run-master-0").write(BEFORE, RESULT)
        training.api.pause("before GET .*/log")
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await training.api.paused.wait()
        await until(lambda: annotation_of(training, STOPPED_PODS_ANNOTATION))
        following.cancel()
        await asyncio.wait([following])
        assert mark_of(training) is None, "the next try would train again"
        training.api.pause("")
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: '"pods": []' in str(annotation_of(training, STOPPED_PODS_ANNOTATION)))
        recorded.go()  # the pod is gone
        outcome = await following
        assert (outcome.succeeded, outcome.result) == (True, {"loss": 0.5})
        assert (await training.follow(OPTIONS)).succeeded, "a process that can't read the log any more"


async def test_next_process_knows_what_the_one_before_has_seen() -> None:
    """Rank 1 of a TrainJob was evicted; a trigger takes over half a minute before rank 0 ends."""
    async with replaying("100b-trainjob-evicted-exit-0-default") as (training, recorded):
        async with training.owner() as before:
            following = asyncio.ensure_future(before.follow(training.ref, OPTIONS, until=timing.now() + 2))
            await until(lambda: training.api.watched("pods"))
            recorded.go(lambda change: change["type"] == "DELETED")
            handover = await following
        assert isinstance(handover, Handover)
        assert len(training.api.objects["pods"]) == 1, "the evicted pod is gone"
        recorded.go()
        outcome = await training.follow(OPTIONS, Handover.from_dict(handover.to_dict()))
        assert not outcome.succeeded


async def handed_over(training: Staged, recorded: Replay, until_change: Callable[[Object], object]) -> Handover:
    """What a process hands over that has seen the changes up to one."""
    async with training.owner() as before:
        following = asyncio.ensure_future(before.follow(training.ref, OPTIONS, until=timing.now() + 2))
        await until(lambda: training.api.watched("pods"))
        await recorded.go_slowly(until_change)
        handover = await following
    assert isinstance(handover, Handover)
    return Handover.from_dict(json.loads(json.dumps(handover.to_dict())))


def runs(change: Object) -> bool:
    return change["watch"] == "pods" and change["object"]["status"].get("phase") == "Running"


def remove_pods(training: Staged) -> None:
    for pod in list(training.api.objects["pods"]):
        training.api.remove("pods", pod)


@pytest.mark.parametrize("name", DOUBTS)
async def test_next_process_reads_what_happened_before_it_began(name: str) -> None:
    """The pod was stopped, and is gone with its job's success, before the next process has listed the pods."""
    async with replaying(name) as (training, recorded):
        handover = await handed_over(training, recorded, runs)
        assert handover.pod_history["existing"]["replicas"]
        recorded.go()
        remove_pods(training)
        outcome = await training.follow(OPTIONS, handover)
        assert (outcome.cause or {})["summary"] == f"{DOUBTS[name]}: the training is probably incomplete"
        assert mark_of(training) == DOUBTS[name]


async def test_api_server_that_is_away_is_asked_again() -> None:
    name = "100b-mpi-evicted-exit-0-launcher"
    async with replaying(name) as (training, recorded):
        handover = await handed_over(training, recorded, runs)
        recorded.go()
        remove_pods(training)
        training.api.fail("GET", f"pods.*resourceVersion={handover.pod_history['existing']['version']}", 503, count=3)
        assert not (await training.follow(OPTIONS, handover)).succeeded


@pytest.mark.parametrize("kind", [MPIJOB, TRAINJOB], ids=lambda kind: kind.name)
async def test_pod_that_is_deleted_after_the_end_is_no_doubt(kind: Kind) -> None:
    async with staged(kind) as training:
        training.pod()
        training.running()
        async with training.owner() as before:
            handover = await before.follow(training.ref, OPTIONS, until=timing.now() + 1)
        assert isinstance(handover, Handover)
        training.pod(phase="Succeeded")
        training.ended()
        remove_pods(training)
        assert (await training.follow(OPTIONS, handover)).succeeded
        assert "was not observed" not in str(training.log)


@pytest.mark.parametrize("version", ["1", "no number"])
async def test_changes_that_the_api_server_has_forgotten_are_no_doubt(version: str) -> None:
    """That the log names the pods is all that can be done, whatever another release has handed over."""
    async with replaying("100b-mpi-evicted-exit-0-launcher") as (training, recorded):
        recorded.go()
        remove_pods(training)
        training.api.expire()
        for replicas in ({"Launcher": [0]}, {}, {"Launcher": "all"}, None):
            handover = Handover(pod_history={"existing": {"version": version, "replicas": replicas}})
            outcome = await training.follow(OPTIONS, handover)
            assert outcome.succeeded
        assert str(training.log).count("can't be read any more: Launcher.") == 4


def kubelet_event(training: Staged, pod: str, container: str, reason: str, at: str) -> None:
    """As recorded in 100b."""
    about = {"kind": "Pod", "namespace": "ns", "name": pod, "uid": pod, "fieldPath": f"spec.containers{{{container}}}"}
    times = {"firstTimestamp": at, "lastTimestamp": at, "eventTime": None}
    name = f"{pod}-{reason}-{at}".lower()
    source = {"component": "kubelet", "host": "node-1"}
    event = {"involvedObject": about, "reason": reason, "type": "Normal", "source": source, **times}
    training.api.put("events", {"metadata": {"name": name, "creationTimestamp": at}, **event})


@pytest.mark.parametrize(
    ("name", "pod", "container", "replica"),
    [
        ("100b-mpi-evicted-exit-0-launcher", f"{NAME}-launcher-29nzj", "mpi-launcher", "Launcher"),
        ("100b-trainjob-evicted-exit-0-default", f"{NAME}-node-0-1-pgmmp", "node", "node 1"),
    ],
)
async def test_events_show_what_no_process_has_seen(name: str, pod: str, container: str, replica: str) -> None:
    """The worker was lost before the eviction, and its retry finds a job that has succeeded, without pods."""
    for reasons, doubtful in ((("Started", "Killing"), True), (("Started",), False)):
        async with replaying(name) as (training, recorded):
            recorded.go()
            remove_pods(training)
            for number, reason in enumerate(reasons):
                kubelet_event(training, pod, container, reason, f"2026-11-23T14:35:1{number}Z")
            outcome = await training.follow(OPTIONS)
            said = (
                f"{replica} ended with exit code 0 after it was stopped on node-1: the training is probably incomplete"
            )
            assert ((outcome.cause or {}).get("summary"), outcome.succeeded) == (
                said if doubtful else None,
                not doubtful,
            )


@pytest.mark.parametrize(
    ("printed", "stops", "is_complete"),
    [
        ("14:35:05", ["14:35:11"], True),
        ("14:35:09", ["14:35:11"], False),
        ("14:35:05", ["14:35:03", "14:35:11"], False),  # a kubelet that restarts reports the stop again
    ],
)
async def test_result_before_a_stop_that_only_events_show_proves_the_training(
    printed: str, stops: list[str], is_complete: bool
) -> None:
    """The process before has read the result, and nobody has seen the end. Two clocks may be 5 s apart."""
    async with replaying("100b-mpi-evicted-exit-0-launcher") as (training, recorded):
        recorded.go(lambda change: runs(change) and "launcher" in change["object"]["metadata"]["name"])
        (pod,) = (name for name in running_pods(training) if "launcher" in name)
        training.api.log(pod).write(f"2026-11-23T{printed}Z", RESULT)
        handover = await training.hand_over(5, OPTIONS)
        assert handover.result_line == RESULT
        recorded.go()
        remove_pods(training)
        training.api.expire()
        for reason, at in (("Started", "14:34:59"), *(("Killing", at) for at in stops)):
            kubelet_event(training, f"{NAME}-launcher-29nzj", "mpi-launcher", reason, f"2026-11-23T{at}Z")
        assert (await training.follow(OPTIONS, handover)).succeeded is is_complete


@pytest.mark.parametrize(("status", "asked"), [(403, 1), (503, 1), (500, math.inf), (503, math.inf)])
async def test_events_that_cannot_be_read_leave_the_success(
    status: int, asked: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the right to, it is said once. An API server that is away is asked again, but not for ever.

    Large clusters keep events in an etcd of their own.
    """
    monkeypatch.setattr(observer, "UNREAD_HISTORY_SECONDS", 2.0)
    async with replaying("100b-mpi-evicted-exit-0-launcher") as (training, recorded):
        recorded.go()
        remove_pods(training)
        training.api.fail("GET", "events.*reason", status, count=asked)
        outcome = await asyncio.wait_for(training.follow(OPTIONS), 30)
        assert outcome.succeeded
        assert str(training.log).count("can't be read any more: Launcher.") == 1


async def test_changes_that_can_never_be_read_stop_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "UNREAD_HISTORY_SECONDS", 2.0)
    async with replaying("100b-mpi-evicted-exit-0-launcher") as (training, recorded):
        handover = await handed_over(training, recorded, runs)
        recorded.go()
        remove_pods(training)
        version = handover.pod_history["existing"]["version"]
        training.api.fail("GET", f"pods.*resourceVersion={version}", 500, count=math.inf)
        assert (await asyncio.wait_for(training.follow(OPTIONS, handover), 30)).succeeded


async def test_pod_that_is_created_after_the_end_hides_no_eviction() -> None:
    """Recordings 103, 105c and 107c: the operator starts a Master of a job that has ended."""
    async with replaying("100b-mpi-evicted-exit-0-launcher") as (training, recorded):
        recorded.go()
        remove_pods(training)
        for reason, at in (("Started", "2026-11-23T14:35:10Z"), ("Killing", "2026-11-23T14:35:11Z")):
            kubelet_event(training, f"{NAME}-launcher-29nzj", "mpi-launcher", reason, at)
        training.pod(0)
        assert not (await training.follow(OPTIONS)).succeeded


async def test_pod_that_replaces_an_evicted_one_and_ends_is_no_doubt() -> None:
    """Both pods are gone when the next process begins."""
    async with staged(MPIJOB) as training:
        training.pod(since=60)
        training.running()
        async with training.owner() as before:
            handover = await before.follow(training.ref, OPTIONS, until=timing.now() + 1)
        assert isinstance(handover, Handover)
        for stopped in (True, False):
            name = training.pod(phase="Succeeded", since=60 if stopped else 28)
            pod = training.api.objects["pods"][name]
            if stopped:
                pod["metadata"] |= {"deletionTimestamp": stamp(30), "deletionGracePeriodSeconds": 0}
                state = {"terminated": {"exitCode": 0, "startedAt": stamp(50), "finishedAt": stamp(29)}}
                pod["status"]["containerStatuses"][0]["state"] = state
                training.api.put("pods", pod)
            training.api.remove("pods", name)
        training.ended()
        outcome = await training.follow(OPTIONS, Handover.from_dict(handover.to_dict()))
        assert outcome.succeeded, outcome.cause


async def test_sensor_asks_for_no_events() -> None:
    """It reports what the job says, so it needs no right to list events."""
    async with replaying("100b-mpi-evicted-exit-0-launcher") as (training, recorded):
        recorded.go()
        remove_pods(training)
        outcome = await training.follow(Options(release=False, conditions=("Succeeded",)))
        assert outcome.succeeded
        assert not [line for line in training.api.requests if "events" in line and "Killing" in line]
        assert "can't be read any more" not in str(training.log)


async def test_nothing_is_read_again_if_no_pod_is_missing() -> None:
    async with replaying("100b-mpi-evicted-exit-0-launcher") as (training, recorded):
        handover = await handed_over(training, recorded, runs)
        before = len(training.api.requests)
        following = asyncio.ensure_future(training.follow(OPTIONS, handover))
        await until(lambda: any("/log?" in line for line in training.api.requests[before:]))
        watches = [line for line in training.api.requests[before:] if "/pods?" in line and "watch=true" in line]
        assert len(watches) == 1
        following.cancel()


async def test_interruption_that_a_late_watch_shows_is_marked() -> None:
    """The read no longer has the pod; what the pods' watch brings while the logs are read shows the eviction."""
    async with replaying(MASTER) as (training, recorded):
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: training.api.watched("pods"))
        await recorded.go_slowly(
            lambda change: change["watch"] != "pods" and "Running" in str(change["object"]["status"])
        )
        training.api.freeze("pods")
        recorded.go()
        for pod in list(training.api.objects["pods"]):
            if pod.endswith("master-0"):
                training.api.remove("pods", pod)
        await until(lambda: "is Succeeded" in str(training.log), 30)
        training.api.thaw()
        outcome = await following
        assert not outcome.succeeded
        assert mark_of(training) == DOUBTS[MASTER]


async def test_mark_is_written_again_after_a_conflict() -> None:
    async with replaying(MASTER) as (training, recorded):
        training.api.fail("PATCH", "pytorchjobs", 409)
        outcome = await followed(training, recorded)
        assert (outcome.succeeded, mark_of(training)) == (False, DOUBTS[MASTER])


async def test_mark_is_written_again_when_the_pods_are_released() -> None:
    async with replaying(MASTER) as (training, recorded):
        recorded.go(succeeds)
        training.api.fail("PATCH", "pytorchjobs", 403, count=2)
        outcome = await followed(training, recorded)
        assert (outcome.succeeded, mark_of(training)) == (False, DOUBTS[MASTER])
        assert "could not be marked" not in str(training.log)


async def test_job_that_could_not_be_marked_is_doubtful_for_the_next_process() -> None:
    """The stopped pod was recorded while the job was alive."""
    async with replaying(MASTER) as (training, recorded):
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: training.api.watched("pods"))
        await recorded.go_slowly(lambda change: is_stopped(change) and change["object"]["status"]["phase"] != "Running")
        await until(lambda: '"ends_by": 0.0' in str(annotation_of(training, STOPPED_PODS_ANNOTATION)))
        training.api.fail("PATCH", "pytorchjobs", 403, count=9)
        await recorded.go_slowly()
        assert not (await following).succeeded
        assert "A retry may take it for a success" in str(training.log)
        assert (mark_of(training), training.api.objects["pods"].get("run-master-0")) == (None, None)
        training.api.clear_failures()
        assert not (await training.follow(OPTIONS)).succeeded
        assert mark_of(training) == DOUBTS[MASTER]


@pytest.mark.parametrize("name", ["103-pt-node-deleted-master-never", LATE_MASTER])
async def test_master_that_is_created_after_the_end_is_released(name: str) -> None:
    """It is created while the release looks for pods, as the operator did 0.1 s after the end."""
    async with replaying(name) as (training, recorded):
        recorded.go(ends)
        for pod in list(training.api.objects["pods"]):
            training.api.remove("pods", pod)
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: [line for line in training.api.requests if "/pods?" in line and "watch" not in line][2:])
        recorded.go(lambda change: change["type"] == "ADDED")
        await asyncio.wait_for(following, 60)
        assert running_pods(training) == []


# a failure that is not final


async def test_job_with_an_evicted_worker_is_followed_to_its_success() -> None:
    async with replaying("101-mpi-ephemeral-storage-worker") as (training, recorded):
        outcome = await followed(training, recorded)
        assert outcome.succeeded
        assert "MPIJob train has lost a replica for good. Its Launcher runs on." in str(training.log)
        assert "is Failed" not in str(training.log)


async def test_its_silence_ends_it_with_the_lost_worker_as_cause() -> None:
    async with replaying("101-mpi-ephemeral-storage-worker") as (training, recorded):
        recorded.go(lambda change: "MPIJobEvicted" in str(change["object"]))
        outcome = await training.follow(Options(drain_timeout=0.5, limits=Limits(log_stall=1)))
        assert (outcome.cause or {})["category"] == "user code"
        assert "wrote more to its local disk" in str(outcome.cause)
        assert NAME not in training.api.objects["mpijobs"], "the job is deleted: its Launcher would be created again"
        assert training.memory.stored is not None
        assert training.memory.stored["event"] == Event.LIMIT.name.lower()


# loops and silence


@pytest.mark.parametrize("limits", [{"crash_loop": 3}, {"max_restarts": 3}], ids=str)
async def test_pods_that_are_rejected_without_end_end_the_job(limits: dict[str, Any]) -> None:
    async with replaying("107d-pt-admission-error-worker-onfailure") as (training, recorded):
        outcome = await followed(training, recorded, Options(drain_timeout=0.5, limits=Limits(**limits)))
        cause = outcome.cause or {}
        assert cause["category"] == "infrastructure"
        assert "was rejected by its node (UnexpectedAdmissionError)" in cause["summary"] + cause["detail"]
        assert NAME not in training.api.objects["pytorchjobs"]


LOST = "after its pod wrote more to its local disk than its ephemeral-storage limit allows (Evicted)."
EVICTED = "after its pod was evicted from its node (EvictionByEvictionAPI)."
#: Replica, reason and number of its restarts.
RESTARTS = {
    "101-pt-ephemeral-storage-master-onfailure": ("Master 0", LOST, 4),
    "100b-pt-evicted-exit-0-worker-onfailure": ("Worker 0", EVICTED, 1),
    "100b-mpi-evicted-exit-0-worker": ("Worker 0", EVICTED, 1),
}


def restart_lines(training: Staged) -> list[str]:
    return [line for line in training.log.messages if " restarted (" in line]


def expected_lines(name: str) -> list[str]:
    replica, why, number = RESTARTS[name]
    return [f"{replica} restarted ({ordinal} time) {why}" for ordinal in ("1st", "2nd", "3rd", "4th")[:number]]


@pytest.mark.parametrize("name", RESTARTS)
async def test_each_lost_pod_is_reported_once_whatever_its_exit_code(name: str) -> None:
    """The kubelet counts a restart in pods of recording 101 that it never starts again."""
    async with replaying(name) as (training, recorded):
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: training.api.watched("pods"))
        await recorded.go_slowly()
        await until(lambda: len(restart_lines(training)) >= RESTARTS[name][2], 30)
        assert restart_lines(training) == expected_lines(name)
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.parametrize("name", RESTARTS)
async def test_each_lost_pod_counts_once_for_max_restarts(name: str) -> None:
    """The limit ends the job with the first restart that it doesn't allow."""
    most = RESTARTS[name][2] - 1
    async with replaying(name) as (training, recorded):
        outcome = await followed(training, recorded, Options(drain_timeout=0.5, limits=Limits(max_restarts=most)))
        assert f"max_restarts={most}" in (outcome.cause or {})["summary"]
        assert restart_lines(training) == expected_lines(name)


async def test_silent_node_is_in_the_log_at_once() -> None:
    async with replaying("104-pt-silent-node-master-onfailure") as (training, recorded):
        following = asyncio.ensure_future(training.follow(OPTIONS))
        await until(lambda: training.api.watched("pods"))
        recorded.go(lambda change: change["t"] > 71.6)
        await until(lambda: "Node node-2 has not reported since 14:32 UTC." in str(training.log))
        await until(lambda: "1/2 Running · Master 0 NodeNotReady" in str(training.log), 30)
        recorded.go(lambda change: change["t"] > 455)
        await until(lambda: "Node node-2 reports again." in str(training.log))
        following.cancel()
