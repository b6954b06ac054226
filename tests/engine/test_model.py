"""Random interleavings of owners of a training, in all hosts, with a model of a cluster and of Airflow.

No job is duplicated or deleted alive, no success is lost or trained again, also if it doesn't meet what the task
requires, no GPU leaks, and causes survive crashes.

A seed is one interleaving of some hundred steps. `KTRAIN_MODEL_RUNS=100000 pytest tests/engine/test_model.py` runs more
of them. A failure reports its seed and its steps. Each mutation of the owner or of its rules must be found.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose_divergence
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.end_rules import RULES, Action, Event, Mode, Ownership, Rule, decide
from airflow_provider_ktrain.core.identity import adoption
from airflow_provider_ktrain.core.identity.names import SUSPENDED_ANNOTATION, JobRef, OnFinishAction, Owner, TaskKey
from airflow_provider_ktrain.core.kinds import KINDS, kind_of
from airflow_provider_ktrain.core.kinds.conditions import INCOMPLETE_ANNOTATION
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.state.pods.objects import is_being_deleted
from airflow_provider_ktrain.core.state.pods.stopped_pods import STOPPED_PODS_ANNOTATION
from airflow_provider_ktrain.core.state.status import Phase, phase_of, wants_suspension
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from airflow_provider_ktrain.engine import owned_job
from airflow_provider_ktrain.engine import release as releasing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import JobChanged, JobRead, Observed
from airflow_provider_ktrain.engine.conclusion_store import ConclusionStore
from airflow_provider_ktrain.engine.decisions import STATUS_LAG_SECONDS, Decisions
from airflow_provider_ktrain.engine.follow.divergence import DivergenceProbe
from airflow_provider_ktrain.engine.follow.following import Following, Noticed
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.owned_job import OwnedJob, Result
from airflow_provider_ktrain.engine.release import DecisionOnRead, release
from airflow_provider_ktrain.engine.submit import create_or_adopt as submitting
from airflow_provider_ktrain.engine.training_owner import Training
from tests.apiserver.in_process import InProcessStream
from tests.engine.model_airflow import OVER, RETRIES, Airflow, Try
from tests.engine.model_cluster import (
    KEY,
    NAME,
    REAPER,
    Broken,
    Client,
    Cluster,
    Evidence,
    InstantLoop,
    Object,
    manifest,
)
from tests.engine.model_hosts import Process, Terminal, Trigger, Worker, World

RUNS = int(os.environ.get("KTRAIN_MODEL_RUNS", "1000"))
BATCH = 50
#: The seeds from these on are those of trainings that report NaN, or that may not be good enough.
NAN_SEED, REQUIRE_SEED = 1_000_000, 2_000_000
STEPS = 150
STRANGER = Owner(TaskKey("staging", "dag", "train", "run-1"), 1, "theirs")


ANNOTATIONS = {STOPPED_PODS_ANNOTATION, INCOMPLETE_ANNOTATION}


class Interleaving:
    """One random interleaving. `run` raises Broken if an invariant doesn't hold."""

    def __init__(self, seed: int, loop: InstantLoop, make_training: type[Training] = Training) -> None:
        self.rng = rng = random.Random(seed)
        self.loop = loop
        random.seed(seed)  # of the pauses of informers and requests
        cleans_up = rng.random() < 0.5
        kind = rng.choice(list(KINDS.values()))
        self.cluster = Cluster(
            self, loop.epoch, kind, cleans_up=cleans_up, labels_pods=kind.behavior.labels_pods or rng.random() < 0.8
        )
        self.cluster.status_lag = rng.choice([0, 0, 1, 3, 10])
        self.cluster.no_nodes_until = loop.epoch() + rng.choice([0, 3, 15, 40])
        self.cluster.no_images_until = loop.epoch() + rng.choice([0, 3, 15, 40])
        self.slow = rng.choice(["", "pods", kind.plural])  # resource of the watches that are far behind
        self.airflow = Airflow()
        self.action = rng.choice([OnFinishAction.DELETE_JOB, *OnFinishAction])
        self.in_terminal = rng.random() < 0.1
        self.foreign = rng.random() < 0.05
        self.unrest = rng.choice(
            [1.0, 0.1, 0.1]
        )  # how often processes end and users interfere: limits take time to pass
        self.back_at = 0.0  # loop time at which the API server is reachable again
        limit = functools.partial(rng.choice, [None, None, 4.0, 12.0])
        self.limits = Limits(queue=limit(), schedule=limit(), startup=limit(), partial_start=limit())
        self.cluster.has_logs = NAN_SEED <= seed < REQUIRE_SEED  # and some trainings report NaN
        self.requires = seed >= REQUIRE_SEED  # and some trainings don't reach it
        if self.requires or self.cluster.has_logs:  # pods start at once
            self.slow, self.cluster.no_nodes_until, self.cluster.no_images_until = "", 0.0, 0.0
        self.world = World(
            rng, self.cluster, self.airflow, self.limits, self.action,
            rng.choice(["always", "always", "if_unchanged"]), cleans_up, make_training, self._judge, self._check_text,
            {} if rng.random() < 0.5 else None, rng.choice([None, None, 8.0, 15.0, 30.0]),
            faulty=rng.random() < 0.6, lack=self._lack,
        )  # fmt: skip
        #: The process, the category, and whether it was stored, of each job that a limit has ended, by the job's uid.
        self.causes: dict[str, tuple[Process, str, bool]] = {}
        self.nobody_to_kill = False  # whether the task was ended while none of its processes ran

    def _lack(self, uid: str) -> Event | None:
        """What the training of the job with this uid lacks of what the task requires."""
        return random.Random(uid).choice([Event.UNMET, Event.UNMET, Event.NOT_PROVED, None]) if self.requires else None

    # the invariants: what may be written

    def check_create(self, client: Client, job: Object) -> None:
        me = client.process.me
        for earlier in self.airflow.tries:
            same_life = earlier is not me and earlier.owner.max_tries == me.owner.max_tries
            if same_life and earlier.stored_in_time and earlier.stored is not None and earlier.stored[0].succeeded:
                raise Broken(f"{client.process} trains again after {earlier.name} has stored its success")
        for uid, owner in self.cluster.shown_succeeded.items():
            same_life = owner.max_tries == me.owner.max_tries and owner.try_number < me.owner.try_number
            # a try that Airflow has declared dead may store its success after the next try has looked for it
            if same_life and not self._has_stored(owner) and uid not in self.cluster.touched_by_users:
                raise Broken(f"{client.process} trains again after {owner.ti_id} has succeeded")

    def _has_stored(self, owner: Owner) -> bool:
        """Whether this try has stored its outcome."""
        return any(t.stored is not None and t.owner == owner for t in self.airflow.tries)

    def check_write(self, client: Client, verb: str, job: Object, sent: Object) -> None:
        owner = Owner.of(job)
        if not isinstance(owner, Owner) or owner.key != KEY:
            raise Broken(f"{client.actor} writes to a foreign job")
        if client.actor == REAPER:
            return
        if owner.ti_id != client.actor:
            self._check_replacement(client.process, owner, verb, job, sent)
        elif Owner.of(sent) is None and not is_annotation(sent):
            self._check_end(client.process, verb, job)

    def _check_replacement(self, process: Process, owner: Owner, verb: str, job: Object, sent: Object) -> None:
        """A try may adopt or replace the job of an earlier one while it submits."""
        phase, me = phase_of(job), process.me
        cleared = owner.try_number < me.began
        if owner.try_number > me.owner.try_number:
            raise Broken(f"{process} changes the job of {owner.ti_id}, a later try")
        if process.kill_is_proved or process.failed_for_good:
            return  # nobody is left for the job of a lost try
        if process.has_stored_outcome and phase is Phase.SUCCEEDED:
            return
        if not process.submitting:
            raise Broken(f"{process} changes the job of {owner.ti_id} after its submission")
        if verb == "DELETE":
            changed = self.world.reattach == "if_unchanged" and phase is not Phase.SUCCEEDED
            if not (phase is Phase.FAILED or cleared or changed):
                raise Broken(f"{process} deletes the {phase} job of {owner.ti_id}")
        elif Owner.of(sent) is None or cleared or phase is Phase.FAILED:
            raise Broken(f"{process} patches the {phase} job of {owner.ti_id} without taking it over")

    def _check_end(self, process: Process, verb: str, job: Object) -> None:
        """A process ends the job of its own try."""
        phase = phase_of(job)
        if phase.ended:
            suspends = verb == "PATCH" and phase is Phase.FAILED and self.cluster.kind.behavior.restarts_failed_jobs
            interrupted = isinstance(process, Terminal) and process.stopped
            replaces = process.submitting and phase is Phase.FAILED
            if not (suspends or interrupted or replaces or process.has_stored_outcome):
                raise Broken(f"{process} deletes a job that is {phase} before its outcome was stored")
            return
        if job["metadata"]["annotations"].get(SUSPENDED_ANNOTATION) == process.me.owner.ti_id and (
            process.me.conclusion is not None or wants_suspension(job)
        ):
            return  # an earlier process of this try has suspended it
        released_before = isinstance(process.me.event, Outcome) and bool(process.me.event.release_error)
        if process.kill_is_proved or process.submitting or process.failed_for_good or process.has_stored_outcome:
            return
        evidence = process.client.evidence
        version = job["metadata"]["resourceVersion"]
        if evidence is None or evidence.job["metadata"]["resourceVersion"] != version:
            raise Broken(f"{process} ends a job that it has not read")
        if process.in_trouble and process.training.job.is_fresh and not self.airflow.has_retry(process.me):
            return
        if not released_before and not self._has_passed(evidence, process.deadline, process.client.diverged):
            raise Broken(f"{process} ends a job whose limits have not passed")
        self._check_lag(process, job)
        if process.sink.answered is None and process.me.conclusion is None and not isinstance(process, Terminal):
            raise Broken(f"{process} ends a job whose cause it has not stored")
        if process.sink.answered is not None:
            cause = process.sink.answered["category"]
            self.causes[job["metadata"]["uid"]] = process, cause, process.me.conclusion is not None

    def _check_lag(self, process: Process, job: Object) -> None:
        """A job whose program has succeeded has time until its status shows that."""
        uid, now = job["metadata"]["uid"], self.loop.now
        ends = [at for at, ended in process.saw_end.values() if ended == uid]
        if self.cluster.over.get(uid) and ends and now - ends[-1] < STATUS_LAG_SECONDS:
            raise Broken(f"{process} ends a job {now - ends[-1]:.1f} s after it read that the program has ended")

    def _has_passed(self, evidence: Evidence, deadline: float | None, diverged: set[str]) -> bool:
        """Whether a limit has passed, by the timestamps of what a process has read."""
        now, job, limits = self.loop.epoch(), evidence.job, self.limits

        def longer(since: object, limit: float | None) -> bool:
            return limit is not None and now >= (epoch_seconds(since) or 0.0) + limit

        created = job["metadata"]["creationTimestamp"]
        conditions = job["status"]["conditions"]
        if deadline is not None and now >= deadline:
            return True
        if diverged & {pod["metadata"]["uid"] for pod in evidence.pods}:
            return True
        if wants_suspension(job):
            suspended = next((c["lastTransitionTime"] for c in conditions if c["type"] == "Suspended"), created)
            return longer(suspended, limits.queue)
        pods = [pod for pod in evidence.pods if not is_being_deleted(pod)]
        pending = [pod for pod in pods if pod["status"]["phase"] == "Pending"]
        waiting = [pod["metadata"]["creationTimestamp"] for pod in pending if "nodeName" not in pod["spec"]]
        starting = [_scheduled(pod) for pod in pending if "nodeName" in pod["spec"]]
        placed = [_scheduled(pod) for pod in pods if "nodeName" in pod["spec"]]
        return (
            any(longer(since, limits.schedule) for since in waiting)
            or any(longer(since, limits.startup) for since in starting)
            or bool(waiting and placed and longer(max(min(waiting), min(placed)), limits.partial_start))
            or (not evidence.pods and any(longer(created, limit) for limit in (limits.startup, limits.schedule)))
        )

    # the invariants: what is reported

    def _judge(self, process: Process, outcome: Outcome) -> None:
        """Compare an outcome with what has happened."""
        self.cluster.record(f"{process} reports {outcome.phase}, success: {outcome.succeeded}, cause: {outcome.cause}")
        ref, me = process.ref, process.me
        if ref is None or outcome.superseded:
            return
        cause = outcome.cause or {}
        if outcome.succeeded:
            if self.cluster.over.get(ref.uid) is not True:
                raise Broken(f"{process} reports the success of a training that has not succeeded")
            return
        killed = cause.get("category") == Category.KILLED
        owner = self.cluster.shown_succeeded.get(ref.uid)
        late = owner is not None and owner != me.owner and self._has_stored(owner)
        late = late or ref.uid in self.causes  # it has succeeded between the read and the release
        if owner is not None and not (killed or late) and ref.uid not in self.cluster.touched_by_users:
            raise Broken(f"{process} reports a succeeded training as failed: {cause.get('summary')}")
        by, why, is_stored = self.causes.get(ref.uid, (None, "", False))
        knows = by is process or (by is not None and by.me is me and is_stored)
        if knows and not killed and cause.get("category") != why:
            raise Broken(f"{process} reports {cause.get('summary')!r}, but the cause was {why}")

    def _check_text(self, process: Process, text: str) -> None:
        """A process that reports a verified deletion of its job is right."""
        ref = process.ref
        if ref is None or process.submitting or not text.startswith(f"{ref} deleted.") or " s)" not in text:
            return
        if self.cluster.job_of(ref.uid) is not None or self.cluster.held(ref.uid):
            raise Broken(f"{process} reports {text!r}, but the job or its pods exist")

    def _check(self) -> None:
        if len(live := self.cluster.live() - self.cluster.orphaned) > 1:
            raise Broken(f"two jobs hold GPUs: {live}")
        for process in self.world.processes:
            if (evidence := process.client.evidence) is not None:
                for pod in evidence.pods:
                    states = [c["state"] for c in pod["status"].get("containerStatuses", ())]
                    ended = any(state.get("terminated", {}).get("exitCode") == 0 for state in states)
                    if pod["metadata"]["labels"]["index"] == "0" and ended:
                        seen = self.loop.now, evidence.job["metadata"]["uid"]
                        process.saw_end.setdefault(pod["metadata"]["uid"], seen)
            task = process.task
            if task is not None and task.done() and not task.cancelled() and task.exception() is not None:
                raise task.exception() or Broken

    # random events

    def _running(self, *hosts: type[Process]) -> list[Any]:
        return [p for p in self.world.processes if isinstance(p, hosts) and p.is_running and not p.client.is_dead]

    def _start(self) -> None:
        if self.airflow.state not in ("none", "up_for_retry") or (self.in_terminal and self.airflow.tries):
            return
        me = self.airflow.start(self.rng.choice([RETRIES, RETRIES, 0]))
        self.cluster.record(f"{me.name} starts; first of this life: {me.began}")
        process = Terminal(self.world, me) if self.in_terminal else Worker(self.world, me)
        process.spawn(process.execute())

    def _continue(self) -> None:
        """Airflow starts the trigger of a deferred task, or the worker after its event."""
        if self.airflow.state == "deferred" and not any(p.me is self.airflow.current for p in self._running(Trigger)):
            trigger = Trigger(self.world, self.airflow.current)
            trigger.spawn(trigger.run())
        elif self.airflow.state == "queued" and self.airflow.move(self.airflow.current, "queued", "running"):
            worker = Worker(self.world, self.airflow.current)
            worker.spawn(worker.resume())

    def _second_trigger(self) -> None:
        """A triggerer that stalled runs on beside the one that took over its triggers."""
        if self.airflow.state == "deferred":
            trigger = Trigger(self.world, self.airflow.current)
            trigger.spawn(trigger.run())

    def _cancel_trigger(self) -> None:
        """A stale cancellation, or one after a kill."""
        for trigger in self._running(Trigger):
            if not trigger.stopped and (trigger.me is not self.airflow.current or self.rng.random() < 0.5):
                trigger.kill()

    def _expire_deferral(self) -> None:
        me = self.airflow.tries and self.airflow.current
        due = me and me.deferral and me.deferral.options.deadline
        if me and due and self.loop.epoch() > due + 5 and self.airflow.move(me, "deferred", "queued"):
            me.event = None
            self._cancel_triggers_of(me)

    def _cancel_triggers_of(self, me: object) -> None:
        for trigger in self._running(Trigger):
            if trigger.me is me and not trigger.stopped:
                trigger.kill()

    def _crash(self) -> None:
        """SIGKILL to a random process, at any gate."""
        processes = self._running(Process)
        if processes:
            process = self.rng.choice(processes)
            process.crash()
            if not isinstance(process, Trigger):
                self.airflow.end(process.me, False)

    def _crash_after_release(self) -> None:
        """SIGKILL to a triggerer that has released a job because of a limit, before it has reported that."""
        for process in self._running(Trigger):
            if process.ref is not None and process.ref.uid in self.causes:
                process.crash()

    def _crash_before_answer(self) -> None:
        """SIGKILL to a worker that has stored a success which isn't good enough, before Airflow knows its end."""
        for process in self._running(Worker):
            if process.me.stored is not None and process.me.stored[0].unmet:
                process.crash()
                self.airflow.end(process.me, False)

    def _finish_at_deadline(self) -> None:
        """A training succeeds when its deadline or a limit is about to pass."""
        for process in self._running(Process):
            if process.deadline is not None and 0 < process.deadline - self.loop.epoch() < 3:
                self.cluster.finish(True, self.rng.random() < 0.3)

    def _sigterm(self) -> None:
        """A worker is asked to stop, for a reason that is none of the task's."""
        processes = [p for p in self._running(Worker, Terminal) if not p.stopped]
        if processes:
            self.rng.choice(processes).kill()

    def _miss_heartbeat(self) -> None:
        """The heartbeat is missing: Airflow ends the try, but its worker still runs."""
        if self.airflow.state == "running" and not self.in_terminal:
            self.cluster.record(f"{self.airflow.current.name} is declared dead")
            self.airflow.end(self.airflow.current, False)

    def _mark(self) -> None:
        """A user marks the task as failed or succeeded, so its process is killed."""
        if self.airflow.state in ("running", "deferred", "queued") and not self.in_terminal:
            self._kill_processes()
            self.airflow.state = self.rng.choice(OVER)
            self.cluster.record(f"marked as {self.airflow.state}")

    def _kill_processes(self) -> None:
        processes = [p for p in self._running(Worker, Trigger) if p.me is self.airflow.current]
        host = {"running": Worker, "deferred": Trigger}.get(self.airflow.state, Terminal)
        self.nobody_to_kill = not any(isinstance(process, host) for process in processes)
        for process in processes:
            if not process.stopped:
                process.kill()

    def _clear(self) -> None:
        if self.airflow.tries and not self.in_terminal:
            self.cluster.record(f"cleared while {self.airflow.state}")
            self._kill_processes()
            self.airflow.clear()

    def _open(self) -> None:
        if gates := self.cluster.gates:
            gate = self.rng.choice(gates)
            if self.world.faulty and self.rng.random() < 0.05:
                gate.lose()
            else:
                gate.open()

    @property
    def _streams(self) -> list[InProcessStream]:
        return [stream for stream in self.cluster.streams.values() if isinstance(stream, InProcessStream)]

    def _deliver(self) -> None:
        """One watch delivers some events. The others may be behind."""
        behind = [stream for stream in self._streams if stream.backlog]
        if behind:
            stream = self.rng.choice(behind)
            if stream.resource != self.slow or self.rng.random() < 0.1:
                stream.deliver(self.rng.choice([1, 1, 2, 5, 100]), bookmark=self.rng.random() < 0.2)

    def _cut(self) -> None:
        """A watch ends. If its version has expired, the informer lists again."""
        if streams := self._streams:
            if self.rng.random() < 0.5:
                self.cluster.expire()
            self.rng.choice(streams).abort()

    def _go_away(self) -> None:
        """The API server can't be reached for some time."""
        if self.world.faulty:
            self.cluster.away, self.back_at = True, self.loop.now + self.rng.choice([2, 8, 30])
            self.cluster.record("the API server is away")

    def _wait(self) -> None:
        """Time passes."""
        self.loop.now += self.rng.choice([1, 3, 3, 8])

    def _submit_foreign_job(self) -> None:
        if self.foreign and NAME not in self.cluster.jobs and not self.cluster.pods:
            other = manifest(STRANGER, "theirs")
            if self.rng.random() < 0.5:
                other["metadata"]["annotations"] = {}
            self.cluster.put(self.cluster.kind.plural, other)

    def _step(self) -> None:
        rng, cluster = self.rng, self.cluster
        unrest = self.unrest
        finishes = 8 if self.requires else 0.5 if cluster.has_logs else 4
        choices: list[tuple[float, Callable[[], object]]] = [
            (60, self._open),
            (16, lambda: cluster.reconcile(rng)),
            (3, cluster.touch),
            (6, self._start),
            (6, self._continue),
            (finishes, lambda: cluster.finish(rng.random() < 0.6, rng.random() < 0.3)),
            (unrest * 0.5, lambda: cluster.delete("Foreground")),
            (unrest * 0.3, lambda: cluster.delete("Background")),
            (0.5, lambda: cluster.suspend(True)),
            (1.5, lambda: cluster.suspend(False)),
            (unrest * 1.5, self._crash),
            (5, self._crash_after_release),
            (6, self._finish_at_deadline),
            (unrest, self._sigterm),
            (unrest * 0.7, self._miss_heartbeat),
            (unrest, self._mark),
            (unrest * 0.7, self._clear),
            (1, self._second_trigger),
            (1, self._cancel_trigger),
            (1, self._expire_deferral),
            (0.5, self._submit_foreign_job),
            (24, self._deliver),
            (1, self._cut),
            (0.7, self._go_away),
            (7, self._wait),
            (3, lambda: cluster.fail_pod(rng)),
            (2, lambda: cluster.remove_label(rng)),
            (30 if cluster.has_logs else 0, lambda: cluster.report(rng)),
            (5 if self.requires else 0, self._crash_before_answer),
        ]
        rng.choices([do for _, do in choices], [weight for weight, _ in choices])[0]()

    async def run(self) -> None:
        for _ in range(2 * STEPS if self.requires else STEPS):
            self._step()
            await self._advance(0.1)
        await self._settle()

    async def _advance(self, seconds: float) -> None:
        await self.loop.turn(seconds)
        if self.cluster.away and self.loop.now >= self.back_at:
            self.cluster.away = False
            self.cluster.record("the API server is back")
        self._check()

    async def _settle(self) -> None:
        """Complete everything without faults. Afterwards no job of a finished task may hold a GPU."""
        self.cluster.record("no more disturbances")
        self.world.faulty, self.cluster.away, self.back_at = False, False, 0.0
        self.cluster.no_nodes_until = self.cluster.no_images_until = 0.0
        for number in range(900):
            for gate in list(self.cluster.gates):
                gate.open()
            self.cluster.suspend(False)
            if number == 100:
                self.slow = ""
            self._deliver()
            self.cluster.reconcile(self.rng)
            if self.cluster.has_logs and number < 40:
                self.cluster.report(self.rng)
            else:
                self.cluster.finish(True, self.rng.random() < 0.5)
            self._continue()
            if self.rng.random() < 0.1:
                self._end_stale(number)
            await self._advance(0.5)
            if not self._running(Process) and self.airflow.state not in ("deferred", "queued"):
                break
        else:
            raise Broken(f"these processes do not end: {[str(p) for p in self._running(Process)]}")
        for _ in range(100):
            self.cluster.reconcile(self.rng)
        await self._check_final_state()

    def _end_stale(self, number: int) -> None:
        """Airflow ends processes whose task is in another state, or in another try."""
        for process in self._running(Worker, Trigger):
            state = "running" if isinstance(process, Worker) else "deferred"
            stale = self.airflow.state != state or process.me is not self.airflow.current
            if stale and not process.stopped and (state == "deferred" or number > 200):
                process.kill()

    async def _check_final_state(self) -> None:
        job = self.cluster.jobs.get(NAME)
        owner = Owner.of(job or {})
        if job is None or not isinstance(owner, Owner) or owner.key != KEY:
            if job is None and self.cluster.live():
                raise Broken("pods without a job")
            return
        if self.airflow.state in ("none", "up_for_retry"):
            return  # the next try finds the job
        me = next(t for t in self.airflow.tries if t.name == owner.ti_id)
        # a process that has kept the job, because of an error or of Airflow's answer, doesn't ask again
        asked_before = any(p.stopped and (p.in_trouble or not p.kill_is_proved) for p in me.processes)
        crashed = asked_before or any(process.client.is_dead for process in me.processes)
        named = any(
            "kubectl delete" in text or "may have been created" in text
            for process in me.processes
            for text in process.log.texts
        )
        lost = crashed or me.was_rejected or self.nobody_to_kill
        if self.cluster.live() and me is self.airflow.current and not (lost or named):
            raise Broken("the task is over, its job holds GPUs, and no text says how to delete it")
        # no try is left that could act, so run the reaper
        kind = self.cluster.kind
        ref = JobRef(kind.name, kind.versions[0], "ns", NAME, job["metadata"]["uid"], owner.ti_id, "prod",
                     job["metadata"]["labels"]["ktrain.airflow/submission"])  # fmt: skip
        client = Client(self.cluster, REAPER)
        reaping = asyncio.ensure_future(release(cast(Api, client), ref, DecisionOnRead(lambda read: Mode.DELETE)))
        for _ in range(200):
            for gate in list(self.cluster.gates):
                gate.open()
            self.cluster.reconcile(self.rng)
            await self._advance(0.3)
        if not reaping.done() or self.cluster.live():
            raise Broken("GPUs are held after the reaper's run")

    async def end(self) -> None:
        for process in self.world.processes:
            process.client.is_dead = True
            if process.task is not None:
                process.task.cancel()
        for _ in range(5):
            await self.loop.turn(0)
        for process in self.world.processes:
            await process.client.close()


def is_annotation(sent: Object) -> bool:
    """Whether a patch only says which pods were stopped: it ends nothing."""
    annotations = (sent.get("metadata") or {}).get("annotations") or {}
    return sent.keys() == {"metadata"} and bool(annotations) and annotations.keys() <= ANNOTATIONS


def _scheduled(pod: Object) -> str:
    return str(pod["status"]["conditions"][0]["lastTransitionTime"])


def find_broken(seeds: Iterator[int], make_training: type[Training] = Training) -> str:
    """The first seed whose interleaving breaks an invariant, with its story; empty if none does."""
    for seed in seeds:
        loop = InstantLoop()
        interleaving = Interleaving(seed, loop, make_training)
        try:
            loop.run_until_complete(interleaving.run())
        except (Exception, Broken) as e:
            story = "\n  ".join(interleaving.cluster.story)
            return f"seed {seed}: {type(e).__name__}: {e}\n  {story}"
        finally:
            loop.run_until_complete(interleaving.end())
            loop.close()
    return ""


@pytest.mark.parametrize(
    "batch", [pytest.param(batch, marks=[pytest.mark.thorough] if batch else []) for batch in range(-(-RUNS // BATCH))]
)
def test_no_interleaving_breaks_an_invariant(batch: int) -> None:
    first, last = batch * BATCH, min((batch + 1) * BATCH, RUNS)
    more = (range(seed + first // 20, seed + last // 20) for seed in (NAN_SEED, REQUIRE_SEED))
    if broken := find_broken(itertools.chain(range(first, last), *more)):
        pytest.fail(broken, pytrace=False)


# mutations: each must be found

MUTATION_RUNS = 2000  # at most
#: Seeds that found a mutation late, or shortly before: the search begins there, and goes on after it.
FIRST_SEEDS = {
    "superseded": 250,
    "its end is near": 60,
    "released before": 590,
    "outcome not known": 810,
    "ReadsNoConclusion": 590,
    "StoresNoCause": 100,
    "a kill deletes an ended job": 180,
    "a kill ignores what was seen last": 610,
    "the owner is ignored": 250,
    "a create doesn't wait for pods": 590,
    "a retry replaces each job": 30,
    "deletions are fenced by uid only": 50,
    "JobChanged is ignored": 50,
    "fail_on_nan doesn't read the log again": NAN_SEED,
    "a try doesn't look for a stored success": REQUIRE_SEED,
}


def _seeds(name: str) -> Iterator[int]:
    first = FIRST_SEEDS.get(name, 0)
    return iter(range(first, first + MUTATION_RUNS))


def _without(*names: str) -> tuple[Rule, ...]:
    """The rules without some of them."""
    assert {rule.name for rule in RULES} >= set(names)
    return tuple(rule for rule in RULES if rule.name not in names)


def _changed(name: str, **fields: Any) -> tuple[Rule, ...]:
    """The rules, with one that is different."""
    assert name in {rule.name for rule in RULES}
    return tuple(replace(rule, **fields) if rule.name == name else rule for rule in RULES)


MUTATED_RULES = {
    "a kill deletes an ended job": _changed("killed in a hurry", seen=None),
    "superseded": _without("superseded"),
    "its end is near": _without("its end is near"),
    "not read, may wait": _without("not read, may wait"),
    "no longer holds": _without("no longer holds"),
    "own end": _without("own end"),
    "released before": _without("released before"),
    "task goes on elsewhere": _without("task goes on elsewhere"),
    "stopped": _without("stopped"),
    "outcome not known": _changed("outcome not known", action=Action.DELETE_ENDED),
    "trouble, continued": _changed("trouble, continued", action=Action.RELEASE),
    "killed in a hurry": _changed("killed in a hurry", action=Action.LEAVE),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTATED_RULES)
def test_a_mutation_of_the_rules_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutated = functools.partial(decide, rules=MUTATED_RULES[name])
    monkeypatch.setattr(owned_job, "decide", mutated)
    assert find_broken(_seeds(name))


class WatchDecisions(Decisions):
    """Decisions on the job and the pods as the watches have shown them."""

    async def rule_for(self, following: Following, noticed: Noticed) -> tuple[Rule, JobRead | None]:
        state = following.state
        read = JobRead(ABSENT if state.gone or state.job is None else state.job, [dict(pod) for pod in state.pods.live])
        return self._job.rule(noticed.event, read, seen=state.seen), read


class DecidesOnTheWatch(Training):
    """Decides on the job and the pods as the watches have shown them."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._decisions = WatchDecisions(self.job, self._store, self._log)


class NothingStored(ConclusionStore):
    """Stores no cause."""

    def __init__(self, store: ConclusionStore) -> None:
        super().__init__(store._sink, store._log)

    async def put(self, ref: JobRef, noticed: Noticed, cause: Cause) -> None: ...


class NothingFound(NothingStored):
    """Stores causes, and finds none."""

    put = ConclusionStore.put

    async def find(self, ref: JobRef) -> bool:
        return False


class StoresNoCause(Training):
    """Releases a job before the cause is stored."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._store = NothingStored(self._store)
        self._decisions._store = self._store


class ReadsNoConclusion(Training):
    """Doesn't look for the cause that an earlier process has stored."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._store = NothingFound(self._store)
        self._decisions._store = self._store


@pytest.mark.thorough
@pytest.mark.parametrize("mutation", [DecidesOnTheWatch, StoresNoCause, ReadsNoConclusion])
def test_a_mutation_of_the_owner_is_found(mutation: type[Training]) -> None:
    assert find_broken(_seeds(mutation.__name__), mutation)


async def _write_again(self: OwnedJob, rule: Rule, read: JobRead, *, verify: bool = True) -> Result:
    """A release that ignores that the job has changed: it is sent again for what the job is now."""
    while True:
        try:
            return await _write(self, rule, read, verify=verify)
        except JobChanged:
            read = await self.read()


async def _delete_unfenced(api: Api, ref: JobRef, job: Object) -> None:
    """A deletion that is fenced by the uid alone."""
    propagation = kind_of(ref.kind).behavior.propagation
    body = {"propagationPolicy": propagation, "preconditions": {"uid": job["metadata"]["uid"]}}
    await api.request("DELETE", api_paths.job(ref), body=body)


async def _delete_in_foreground(api: Api, ref: JobRef, job: Object) -> None:
    fence = {"uid": job["metadata"]["uid"], "resourceVersion": job["metadata"]["resourceVersion"]}
    await api.request("DELETE", api_paths.job(ref), body={"propagationPolicy": "Foreground", "preconditions": fence})


async def _no_pods(claim: object) -> bool:
    """A creation that doesn't wait for the pods of an earlier job."""
    return True


def _not_seen(self: OwnedJob, event: Event, evidence: JobRead | Observed | None, **known: Any) -> Rule:
    """A kill that ignores what was seen last."""
    return _rule(self, event, None if isinstance(evidence, Observed) else evidence, **known)


async def _no_wait(self: object, mode: Mode) -> tuple[list[Object], bool]:
    """A release that doesn't wait for the pods."""
    return [], True


def _always_mine(self: OwnedJob, read: JobRead | None) -> Ownership:
    """A process that doesn't look at the owner."""
    return Ownership.MINE


async def _not_undone(*args: object) -> bool:
    return False


async def _confirmed(self: DivergenceProbe) -> bool:
    """A limit on reports of NaN that doesn't read the log again."""
    self.cause = diagnose_divergence("Master 0", "loss", None)
    return True


def _nothing_stored(self: Airflow, me: Try) -> None:
    """A try that doesn't look for a success that an earlier one has stored."""


def _adopt_always(found: Object, *args: object, **kw: object) -> adoption.Decision:
    """A retry that adopts each job."""
    return adoption.Decision(adoption.Adoption.ADOPT, "")


def _replace_always(found: Object, *args: object, **kw: object) -> adoption.Decision:
    """A retry that replaces each job."""
    return adoption.Decision(adoption.Adoption.REPLACE, "")


_write, _rule = OwnedJob.write, OwnedJob.rule
PATCHES: dict[str, tuple[tuple[object, str, object], ...]] = {  # modules or classes, names in them, replacements
    "JobChanged is ignored": ((OwnedJob, "write", _write_again),),
    "deletions are fenced by uid only": ((releasing, "delete_fenced", _delete_unfenced),),
    "a TrainJob is deleted in the foreground": ((releasing, "delete_fenced", _delete_in_foreground),),
    "a create doesn't wait for pods": (
        (submitting._Claim, "without_pods", _no_pods),
        (submitting._Claim, "undone", _not_undone),
    ),
    "a kill ignores what was seen last": ((OwnedJob, "rule", _not_seen),),
    "a release doesn't wait": ((releasing._Release, "wait", _no_wait),),
    "the owner is ignored": ((OwnedJob, "owner_in", _always_mine),),
    "a retry adopts each job": ((submitting, "decide_adoption", _adopt_always),),
    "a retry replaces each job": ((submitting, "decide_adoption", _replace_always),),
    "fail_on_nan doesn't read the log again": ((DivergenceProbe, "confirms", _confirmed),),
    "a try doesn't look for a stored success": ((Airflow, "earlier_success", _nothing_stored),),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PATCHES)
def test_a_mutation_of_what_the_owner_uses_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, attribute, replacement in PATCHES[name]:
        monkeypatch.setattr(target, attribute, replacement)
    assert find_broken(_seeds(name))
