"""No limit, no startup rule and no verdict of Kueue ends a job that became healthy while nobody could see it.

Each of them is tested with an API server that is away for longer than the limit, with a late watch of the jobs, of the
pods and of Kueue's Workloads, and with a read that fails once at the decision. It is ended if it stays unhealthy.
All combinations run at the same time, because a limit takes seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis import unmatched_pods
from airflow_provider_ktrain.core.diagnosis.startup_rules import GRACE_SECONDS
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.state.queue.kueue_status import FAILS_AFTER_SECONDS
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.watch import informer
from tests.apiserver import stamp
from tests.engine.staged import KINDS, NAME, Staged, staged, writes_of
from tests.until import until

pytestmark = pytest.mark.virtual_time

LEFT = 3.0  # seconds until a limit passes, from the beginning of the following
AWAY = 6.0  # seconds for which the API server is away, more than is left of a limit
OUTAGE = 12.0  # of an API server, at the beginning of the following
GRACE = 2.0  # of each startup rule in this test
LIMIT_SECONDS = LEFT + 8  # until a limit has been decided on, also if a read has failed
RULE_SECONDS = 42.0  # likewise: startup rules are looked at after 15 s, and again after 22 s

Change = Callable[[Staged], object]


@dataclass(frozen=True)
class Case:
    """A limit or a rule, a job that it ends, and what becomes of the job.

    :param limits: of the task.
    :param unhealthy: brings the job into the state that is ended.
    :param healthy: brings it into one that isn't.
    :param text: what the cause of its end contains.
    """

    limits: Mapping[str, Any]
    unhealthy: Change
    healthy: Change
    text: str


def starts(training: Staged) -> None:
    """All pods run."""
    training.pod(0)
    training.running()


def succeeds(training: Staged) -> None:
    training.pod(0, "Succeeded")
    training.ended()


def suspended(training: Staged) -> None:
    training.spec(**training.kind.form.suspension(True))
    training.condition("Suspended", since=27.0)


def admitted(training: Staged) -> None:
    training.spec(**training.kind.form.suspension(False))
    starts(training)


def never_fits(training: Staged) -> None:
    """Kueue's own words, of a job that requests more than the whole quota."""
    message = (
        "couldn't assign flavors to pod set worker: insufficient quota for nvidia.com/gpu in flavor default-flavor, "
        "previously considered podsets requests (0) + current podset request (16) > maximum capacity (8)"
    )
    suspended(training)
    training.workload(QuotaReserved=("False", "ExceedsMaxQuota", message))


def given_up(training: Staged) -> None:
    suspended(training)
    reason, message = "DeactivatedDueToRequeuingLimitExceeded", "The workload is deactivated"
    training.workload(active=False, Evicted=("True", reason, message), QuotaReserved=("False", "Pending", message))


def admitted_by_kueue(training: Staged) -> None:
    training.workload(QuotaReserved=("True", "QuotaReserved", ""), Admitted=("True", "Admitted", ""))
    admitted(training)


def without_node(training: Staged) -> None:
    training.condition("Created")
    training.pod(0, "Pending", node="", since=27.0)


def pulling(training: Staged) -> None:
    training.condition("Created")
    training.pod(0, "Pending", since=27.0)


def partly_scheduled(training: Staged) -> None:
    training.condition("Created")
    training.pod(0, since=27.0)
    training.pod(1, "Pending", node="", since=27.0)


def both_start(training: Staged) -> None:
    training.pod(1)
    starts(training)


def silent(training: Staged) -> None:
    """Two replicas run, of which the first is followed."""
    training.line("started", since=30.0)
    both_start(training)


async def talk(training: Staged) -> None:
    """Each second, the replica that is not followed writes a line with a higher step."""
    for step in itertools.count(1):
        training.line(f'KTRAIN_METRIC {{"step": {step}, "loss": 0.5}}', 1)
        await asyncio.sleep(1.0)


def talks(training: Staged) -> None:
    training.background.add(asyncio.ensure_future(talk(training)))


def restarted(number: int) -> Change:
    def change(training: Staged) -> None:
        end = {"terminated": {"exitCode": 1, "startedAt": stamp(8), "finishedAt": stamp(6)}}
        training.pod(0, state={"running": {"startedAt": stamp(5)}}, restarts=number, last=end)
        training.running()

    return change


def waits(reason: str, message: str = "") -> Change:
    def change(training: Staged) -> None:
        training.condition("Created")
        training.pod(0, "Pending", state={"waiting": {"reason": reason, "message": message}}, since=27.0)

    return change


def volume_missing(training: Staged) -> None:
    pulling(training)
    text = 'MountVolume.SetUp failed for volume "data": configmap "data" not found'
    training.event("FailedMount", text, about=f"{NAME}-{training.role.lower()}-0")


def unscheduled(training: Staged, message: str) -> None:
    without_node(training)
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "lastTransitionTime": stamp(27.0),
    }
    (name,) = training.api.objects["pods"]
    training.api.change("pods", name, lambda pod: pod["status"].update(conditions=[condition | {"message": message}]))


def claim_missing(training: Staged) -> None:
    unscheduled(training, '0/4 nodes are available: persistentvolumeclaim "data" not found.')


def claim_restored(training: Staged) -> None:
    """The claim exists again, but the scheduler has not said anything since."""
    training.api.put("persistentvolumeclaims", {"metadata": {"name": "data"}})


def node_missing(training: Staged) -> None:
    """The scheduler says that no node matches, as a read of the nodes shows."""
    unscheduled(training, "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.")
    (name,) = training.api.objects["pods"]
    training.api.change("pods", name, lambda pod: pod["spec"].update(nodeSelector={"pool": "a100"}))
    training.api.put("nodes", {"metadata": {"name": "node-1", "labels": {"pool": "h100"}}, "status": {"capacity": {}}})


def node_labelled(training: Staged) -> None:
    """A node matches now, and is still full."""
    training.api.change("nodes", "node-1", lambda node: node["metadata"].update(labels={"pool": "a100"}))


def pods_refused(training: Staged) -> None:
    training.condition("Created")
    text = 'Error creating: pods "train-worker-0" is forbidden: violates PodSecurity "restricted:latest"'
    training.event("FailedCreatePod", text)


LIMITS: dict[str, Case] = {
    "queue": Case({"queue": 30}, suspended, admitted, "queue_timeout"),
    "schedule": Case({"schedule": 30}, without_node, starts, "schedule_timeout"),
    "startup": Case({"startup": 30}, pulling, starts, "startup_timeout"),
    "partial start": Case({"partial_start": 30}, partly_scheduled, both_start, "partial_start_timeout"),
    "log stall": Case({"log_stall": LEFT + 1}, silent, talks, "log_stall_timeout"),
    "progress": Case({"progress": LEFT + 1}, silent, talks, "progress_timeout"),
}
#: Each is exceeded by one more restart. The number never becomes less, but the job may have succeeded meanwhile.
RESTARTS: dict[str, Case] = {
    "max_restarts": Case({"max_restarts": 1}, restarted(1), succeeds, "max_restarts"),
    "crash loop": Case({"crash_loop": 2}, restarted(1), succeeds, "crash_loop"),
}
VERDICTS: dict[str, Case] = {
    "never fits": Case({}, never_fits, admitted_by_kueue, "ExceedsMaxQuota"),
    "given up": Case({}, given_up, admitted_by_kueue, "Kueue gave up on the job"),
}
RULES: dict[str, Case] = {
    "late Secret": Case({}, waits("CreateContainerConfigError", 'secret "s" not found'), starts, "secret"),
    "registry away": Case({}, waits("ErrImagePull", "dial tcp: i/o timeout"), starts, "image"),
    "back-off": Case({}, waits("ImagePullBackOff", "Back-off pulling image"), starts, "image"),
    "late volume": Case({}, volume_missing, starts, "data"),
    "refused pods": Case({}, pods_refused, starts, "PodSecurity"),
    "late claim": Case({}, claim_missing, starts, "persistentvolumeclaim"),
    "restored claim": Case({}, claim_missing, claim_restored, "persistentvolumeclaim"),
    "late node": Case({}, node_missing, starts, "no node matches nodeSelector pool=a100"),
    "late label": Case({}, node_missing, node_labelled, "no node matches nodeSelector pool=a100"),
}
EXCEEDED: dict[str, Case] = {
    "max_restarts": Case({"max_restarts": 1}, restarted(2), succeeds, "max_restarts"),
    "crash loop": Case({"crash_loop": 1}, restarted(1), succeeds, "crash_loop"),
}
CASES = {**LIMITS, **RULES, **VERDICTS, **EXCEEDED}
of_each_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
#: `make test` runs each case with half of the faults, each for one kind, and `make test-all` all with each kind
of_pairs = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["part", "all"]
)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    for reason in GRACE_SECONDS:
        monkeypatch.setitem(GRACE_SECONDS, reason, GRACE)
    monkeypatch.setattr(unmatched_pods, "GRACE_SECONDS", GRACE)
    for phase in FAILS_AFTER_SECONDS:
        monkeypatch.setitem(FAILS_AFTER_SECONDS, phase, LEFT)


# the faults: each makes the job healthy without showing that


async def away(training: Staged, case: Case) -> None:
    """The API server is away for longer than the limit, and the job becomes healthy meanwhile."""
    training.api.away = True
    case.healthy(training)
    await asyncio.sleep(AWAY if case.limits else 16)
    training.api.away = False


async def late_jobs(training: Staged, case: Case) -> None:
    training.api.freeze(training.kind.plural)
    case.healthy(training)


async def late_pods(training: Staged, case: Case) -> None:
    training.api.freeze("pods")
    case.healthy(training)


async def late_workloads(training: Staged, case: Case) -> None:
    training.api.freeze("workloads")
    case.healthy(training)


async def all_late(training: Staged, case: Case) -> None:
    training.api.freeze("pods", "workloads", training.kind.plural)
    case.healthy(training)


async def late_and_unread(training: Staged, case: Case) -> None:
    """The watches are late, and the read of the decision fails once."""
    training.api.freeze("pods", "workloads", training.kind.plural)
    training.api.fail("GET", f"/{training.kind.plural}/{NAME}", 503, 1)
    case.healthy(training)


async def late_and_unlisted(training: Staged, case: Case) -> None:
    """The watches are late, and the list of pods of the decision fails once."""
    training.api.freeze("pods", "workloads", training.kind.plural)
    training.api.fail("GET", r"/pods\?(?!.*watch)", 503, 1)
    case.healthy(training)


async def late_and_no_workload(training: Staged, case: Case) -> None:
    """The watches are late, and the list of Workloads of the decision fails once."""
    training.api.freeze("pods", "workloads", training.kind.plural)
    training.api.fail("GET", r"/workloads(?!.*watch)", 503, 1)
    case.healthy(training)


async def unwritable(training: Staged, case: Case) -> None:
    """The API server answers no request and its watches stay open and silent, as if etcd had no leader.

    A kubelet or a queue reports what happened meanwhile some seconds after it can.
    """
    training.api.fail("GET", "^(?!.*watch=true)", 503, math.inf)
    await asyncio.sleep(AWAY)
    training.api.clear_failures()
    await asyncio.sleep(AWAY / 2)
    if not training.api.writes():
        case.healthy(training)


async def unreported(training: Staged, case: Case) -> None:
    """As `unwritable`, until the read of a later decision.

    A kubelet has pulled the image meanwhile, and reports that some seconds after it can.
    """
    reads: list[str] = []
    path = f"/{training.kind.plural}/{NAME}"
    training.api.fail("GET", path, 503, 1)
    training.api.on_request = lambda line: reads.append(line) if line.endswith(path) else None
    await until(lambda: len(reads) > 1, 120)
    await asyncio.sleep(AWAY / 2)
    if not training.api.writes():
        case.healthy(training)


FAULTS = (away, late_jobs, late_pods, all_late, late_and_unread, late_and_unlisted)


async def followed(training: Staged, case: Case) -> asyncio.Future[Any]:
    """The training is followed, and its state is known."""
    case.unhealthy(training)
    options = Options(limits=Limits(**case.limits), drain_timeout=0.5, logs={training.role: [0]})
    following = asyncio.ensure_future(training.follow(options))
    await until(lambda: following.done() or " is " in str(training.log), 120)
    watched = {"pods", training.kind.plural, *(["workloads"] if training.api.objects["workloads"] else [])}
    await until(lambda: all(map(training.api.watched, watched)), 120)
    return following


async def outcome_of_healthy(kind: Kind, case: Case, fault: Any) -> str:
    """What is wrong with the end of a job that became healthy; empty if nothing is."""
    async with staged(kind) as training:
        following = await followed(training, case)
        await fault(training, case)
        await asyncio.wait([following], timeout=LIMIT_SECONDS if case.limits else RULE_SECONDS)
        if following.done():
            return f"ended: {following.result().cause} {writes_of(training)}\n{training.log}"
        if writes_of(training):
            return f"changed: {writes_of(training)}"
        succeeds(training)
        for pod in list(training.api.objects["pods"]):
            training.api.change("pods", pod, lambda pod: pod["status"].update(phase="Succeeded"))
        training.api.thaw()
        if not (await asyncio.wait([following], timeout=120))[0]:
            following.cancel()
            return f"its end is not noticed:\n{training.log}\n{training.api.requests[-12:]}"
        outcome = following.result()
        return "" if outcome.succeeded and not outcome.cause else f"its own end is lost: {outcome.cause}"


async def outcome_of_unhealthy(kind: Kind, case: Case, *, fails_once: bool) -> str:
    """What is wrong with the end of a job that stays unhealthy; empty if nothing is."""
    async with staged(kind) as training:
        following = await followed(training, case)
        if fails_once:
            training.api.fail("GET", f"/{training.kind.plural}/{NAME}", 503, 1)
        outcome = await asyncio.wait_for(following, 240)
        deleted = [line for line in training.api.writes() if line.startswith("DELETE") and training.kind.plural in line]
        if outcome.succeeded or len(deleted) != 1 or training.api.objects["pods"]:
            return f"not ended: {outcome} {training.api.writes()}"
        return "" if case.text in str(outcome.cause) else f"another cause: {outcome.cause}"


def pairs(cases: Mapping[str, Case], faults: Sequence[Any], kind: Kind, *, every: bool) -> Iterator[tuple[str, Any]]:
    """Names of cases, each with a fault."""
    for number, name in enumerate(cases):
        for fault_number, fault in enumerate(faults):
            if every or (number + fault_number) % (2 * len(KINDS)) == KINDS.index(kind):
                yield name, fault


@of_each_kind
@of_pairs
@pytest.mark.parametrize("cases", [LIMITS, RULES], ids=["limits", "startup rules"])
async def test_healthy_job_is_never_ended(kind: Kind, every: bool, cases: Mapping[str, Case]) -> None:
    runs = {
        f"{name}, {fault.__name__}": outcome_of_healthy(kind, cases[name], fault)
        for name, fault in pairs(cases, FAULTS, kind, every=every)
    }
    found = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
    assert {name: problem for name, problem in found.items() if problem} == {}


@of_each_kind
async def test_job_whose_state_can_not_be_written_in_time_is_never_ended(kind: Kind) -> None:
    cases = {name: case for name, case in LIMITS.items() if name not in ("log stall", "progress")}
    runs = {name: outcome_of_healthy(kind, case, unwritable) for name, case in cases.items()}
    found = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
    assert {name: problem for name, problem in found.items() if problem} == {}


@of_each_kind
async def test_start_that_can_not_be_reported_in_time_is_no_failed_start(kind: Kind) -> None:
    runs = {name: outcome_of_healthy(kind, case, unreported) for name, case in RULES.items()}
    found = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
    assert {name: problem for name, problem in found.items() if problem} == {}


@of_each_kind
@of_pairs
async def test_job_that_kueue_admits_after_all_is_never_ended(kind: Kind, every: bool) -> None:
    runs = {
        f"{name}, {fault.__name__}": outcome_of_healthy(kind, VERDICTS[name], fault)
        for name, fault in pairs(VERDICTS, (*FAULTS, late_workloads, late_and_no_workload), kind, every=every)
    }
    found = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
    assert {name: problem for name, problem in found.items() if problem} == {}


@of_each_kind
@of_pairs
async def test_unhealthy_job_is_ended(kind: Kind, every: bool) -> None:
    runs = {
        f"{name}, {fails}": outcome_of_unhealthy(kind, CASES[name], fails_once=fails)
        for name, fails in pairs(CASES, (False, True), kind, every=every)
    }
    found = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
    assert {name: problem for name, problem in found.items() if problem} == {}


async def seconds_until_ended(case: Case) -> float:
    """After how many seconds a job is ended that doesn't change during an outage of OUTAGE seconds, the first ones."""
    async with staged(KINDS[0]) as training:
        following = await followed(training, case)
        began = timing.now()
        training.api.away = True
        await asyncio.sleep(OUTAGE)
        training.api.away = False
        outcome = await asyncio.wait_for(following, 240)
        assert case.text in str(outcome.cause)
        return timing.now() - began


async def test_outage_counts_if_a_condition_is_unchanged_since_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each limit passes 2 * OUTAGE seconds from the beginning: then the cluster had time to recover as well."""
    monkeypatch.setattr(informer, "BACKOFF_SECONDS", (0.05, 0.5))  # the end of the outage is noticed at once
    since = 30.0 - 2 * OUTAGE

    def queued(training: Staged) -> None:
        training.spec(**training.kind.form.suspension(True))
        training.condition("Suspended", since=since)

    def waiting(condition: str, node: str) -> Change:
        def change(training: Staged) -> None:
            training.condition("Created")
            name = training.pod(0, "Pending", node=node, since=since)
            unmet = {"type": condition, "status": "False", "lastTransitionTime": stamp(since)}
            training.api.change("pods", name, lambda pod: pod["status"]["conditions"].append(unmet))

        return change

    proven = (
        Case({"queue": 30}, queued, admitted, "queue_timeout"),
        Case({"schedule": 30}, waiting("PodScheduled", ""), starts, "schedule_timeout"),
        Case({"startup": 30}, waiting("Ready", "node-1"), starts, "startup_timeout"),
    )
    unproven = Case({"startup": 30}, waiting("Other", "node-1"), starts, "startup_timeout")
    *counted, later = await asyncio.gather(*map(seconds_until_ended, (*proven, unproven)))
    assert later > 2.5 * OUTAGE
    assert all(2 * OUTAGE - 2 < seconds < 2.5 * OUTAGE for seconds in counted), counted


async def test_limit_that_passes_after_an_outage_gives_the_cluster_time_to_recover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No read has failed: only the watch knows that the API server was away."""
    monkeypatch.setattr(informer, "BACKOFF_SECONDS", (0.05, 0.5))  # the end of the outage is noticed at once

    def queued(training: Staged) -> None:
        training.spec(**training.kind.form.suspension(True))
        training.condition("Suspended", since=30.0 - OUTAGE - 2)  # it passes 2 s after the outage

    seconds = await seconds_until_ended(Case({"queue": 30}, queued, admitted, "queue_timeout"))
    assert 2 * OUTAGE - 2 < seconds < 2.5 * OUTAGE


async def test_limit_ends_a_job_between_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server is away for 30 s of every 40 s, at a tenth of that time, and a queue doesn't admit the job."""
    monkeypatch.setattr(informer, "BACKOFF_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(informer, "RECOVERY_SECONDS", 3.0)
    async with staged(KINDS[0]) as training:
        following = await followed(training, LIMITS["queue"])

        async def go_away_and_return() -> None:
            while True:
                training.api.away = True
                await asyncio.sleep(3.0)
                training.api.away = False
                await asyncio.sleep(1.0)

        returning = asyncio.ensure_future(go_away_and_return())
        began = timing.now()
        while not training.api.writes():
            assert not following.done(), following.result()
            assert timing.now() - began < 60, str(training.log)
            await asyncio.sleep(0.05)
        returning.cancel()
        training.api.away = False
        assert "queue_timeout" in str((await asyncio.wait_for(following, 60)).cause)
        assert timing.now() - began > LEFT + 3.0  # the cluster has had the time to admit it


async def outcome_of_exceeded(kind: Kind, case: Case, fault: Any) -> str:
    """What is wrong with the end of a job that has succeeded when its last restart is seen; empty if nothing is."""
    async with staged(kind) as training:
        following = await followed(training, case)

        def exceeds(training: Staged) -> None:
            restarted(2)(training)
            succeeds(training)

        if fault is late_jobs:
            training.api.freeze(training.kind.plural)
            restarted(2)(training)
        await fault(training, Case(case.limits, case.unhealthy, exceeds, case.text))
        training.api.thaw()
        outcome = await asyncio.wait_for(following, 240)
        return "" if outcome.succeeded else f"{outcome}\n{training.log}"


@of_pairs
async def test_success_wins_against_restarts(every: bool) -> None:
    """The restart that exceeds the limit is seen when the job has succeeded already."""
    runs = {
        f"{kind.name}, {name}, {fault.__name__}": outcome_of_exceeded(kind, RESTARTS[name], fault)
        for kind in KINDS
        for name, fault in pairs(RESTARTS, (late_jobs, late_pods, away, late_and_unread), kind, every=every)
    }
    found = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
    assert {name: problem for name, problem in found.items() if problem} == {}
