"""Random interleavings of the real submit and release with a model of a cluster: no job is duplicated, no GPU leaks.

Most tries follow their job by real informers, whose watches are behind, each by another number of events, and break.

A seed is one interleaving of about a hundred steps. `KTRAIN_MODEL_RUNS=100000 pytest tests/engine/test_model.py` runs
more of them. A failure reports its seed and its steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Iterable
from typing import Any, cast

import pytest

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity import JobRef, OnFinishAction, Owner, Reattach, TaskKey
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.observer import subscriptions
from airflow_provider_ktrain.engine.job_requests import read_job
from airflow_provider_ktrain.engine.release import Mode, Released, ReleaseError, mode_of, release
from airflow_provider_ktrain.engine.submit import submit
from airflow_provider_ktrain.engine.watch.informer import SharedInformer
from airflow_provider_ktrain.engine.watch.object_keys import by_uid
from tests.engine.model_airflow import RETRIES, Airflow, Try
from tests.engine.model_cluster import (
    KEY,
    NAME,
    PODS,
    REAPER,
    Broken,
    Client,
    Cluster,
    InstantLoop,
    Object,
    Quiet,
    lost,
    manifest,
    spawn,
)

RUNS = int(os.environ.get("KTRAIN_MODEL_RUNS", "10000"))
BATCH = 1000
STEPS = 90
STRANGER = Owner(TaskKey("staging", "dag", "train", "run-1"), 1, "theirs")


class Interleaving:
    """One random interleaving. `run` raises Broken if an invariant doesn't hold."""

    def __init__(self, seed: int, loop: InstantLoop) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        random.seed(seed)  # of the pauses of informers and requests
        self.cleans_up = self.rng.random() < 0.5
        kind = self.rng.choice(list(KINDS.values()))
        self.cluster = Cluster(
            self._allowed, kind, cleans_up=self.cleans_up, labels_pods=kind.labels_pods or self.rng.random() < 0.8
        )
        self.watches = self.rng.random() < 0.7  # whether tries follow their jobs by watches
        self.slow = self.rng.choice(["", PODS, self.cluster.jobs_path])  # path of the watches that are far behind
        self.clients: list[Client] = []
        # of the triggerer in which all tries run. None: each try runs in a process of its own
        self.informers: dict[tuple[str, str, str], object] | None = {} if self.rng.random() < 0.5 else None
        self.airflow = Airflow()
        self.action = self.rng.choice(list(OnFinishAction))
        self.reattach: Reattach = self.rng.choice(["always", "always", "if_unchanged"])
        self.faulty = self.rng.random() < 0.5
        self.foreign = self.rng.random() < 0.05

    # which requests each participant may send

    def _allowed(self, actor: str, verb: str, job: Object, sent: Object) -> None:
        owner = Owner.of(job)
        if verb == "POST":
            return
        if owner is None or owner.key != KEY:
            raise Broken(f"{actor} writes to a foreign job")
        if actor == REAPER or owner.ti_id == actor:
            return
        me = next(t for t in self.airflow.tries if t.name == actor)
        phase, cleared = phase_of(job), owner.try_number < me.began
        if owner.try_number > me.owner.try_number:
            raise Broken(f"{actor} takes the job of {owner.ti_id}, a later try")
        if verb == "DELETE":
            changed = self.reattach == "if_unchanged" and phase is not Phase.SUCCEEDED
            if not (phase is Phase.FAILED or cleared or changed):
                raise Broken(f"{actor} deletes the {phase} job of {owner.ti_id}")
        elif Owner.of(sent) is None or cleared or phase is Phase.FAILED:
            raise Broken(f"{actor} patches the {phase} job of {owner.ti_id} without taking it over")

    def _check(self) -> None:
        if len(live := self.cluster.live() - self.cluster.orphaned) > 1:
            raise Broken(f"two jobs hold GPUs: {live}")

    def _check_release(self, actor: str, ref: JobRef, mode: Mode, released: Released, began: int) -> None:
        """Check what a release reports. A pod of a job that is kept may be created while the release runs."""
        self.cluster.log.append(f"{actor}: {released.text}")
        if not released.done:
            return
        deleted = mode is Mode.DELETE and not released.kept
        if held := self.cluster.held(ref.uid, None if deleted else began):
            raise Broken(f"{actor} reports that the job was released, but these pods hold GPUs: {held}")
        if deleted and any(job["metadata"]["uid"] == ref.uid for job in self.cluster.jobs.values()):
            raise Broken(f"{actor} reports that the job was deleted, but it exists")

    # processes

    def _client(self, actor: str) -> Client:
        self.clients.append(Client(self.cluster, actor, self.informers))
        return self.clients[-1]

    async def _release(self, client: Client, ref: JobRef, mode: Mode, *, spares_ended: bool = False) -> Released:
        began, actor, superseded = self.cluster.version, client.actor, self._shows_another_owner(client, ref)
        client.begin_release(ref.uid, spares_ended)
        try:
            released = await release(cast(Api, client), ref, mode, spare_ended=spares_ended)
        except ReleaseError as e:
            if "still present" in str(e) and self.cluster.held(ref.uid, began, terminating=False):
                raise Broken(f"{actor} has waited for pods that nobody deletes") from e
            raise
        finally:
            client.end_release()
        self._check_release(actor, ref, mode, released, began)
        if superseded and released.done and "is gone" not in released.text:
            raise Broken(f"{actor} reports that it released a job of another try")
        return released

    def _shows_another_owner(self, client: Client, ref: JobRef) -> bool:
        """Whether the watches of this process that have the job show that a later try owns it."""
        informers = cast(Iterable[SharedInformer], client.informers.values())
        shown = [Owner.of(job) for informer in informers for job in informer.objects_of([by_uid(ref.uid)])]
        mine = next((t.owner.try_number for t in self.airflow.tries if t.name == ref.owner), 0)
        return bool(shown) and all(owner is not None and owner.try_number > mine > 0 for owner in shown)

    async def _try(self, me: Try) -> None:
        """Submit, follow and release, first as a worker, then as a triggerer."""
        me.client = self._client(me.name)
        succeeded = False
        kind = self.cluster.kind
        try:
            submitted = await submit(
                cast(Api, me.client), kind, kind.versions[0],
                lambda s: manifest(me.owner, s, self.reattach == "if_unchanged", cleans_up=self.cleans_up),
                me.owner, me.first, reattach=self.reattach, log=Quiet(),
            )  # fmt: skip
            me.ref = submitted.ref
            follow = self._watch if self.watches else self._poll
            ended = await follow(me, submitted.ref, submitted.job)
            if ended is None:
                return
            succeeded = ended
            mode = mode_of(self.action, succeeded=succeeded, ended=True)
            released = await self._release(me.client, me.ref, mode, spares_ended=True)
            self.airflow.end(me, succeeded)
            if released.kept:
                await self._release(me.client, me.ref, mode)
        except KtrainError:
            succeeded = False
        finally:
            if me.process is not None and not me.process.cancelling():
                self.airflow.end(me, succeeded)

    async def _poll(self, me: Try, ref: JobRef, job: Object | None) -> bool | None:
        """Read the job until it has ended. Returns whether it succeeded. None: another try owns it."""
        assert me.client is not None
        while not phase_of(job).ended:
            job = await read_job(cast(Api, me.client), ref)
            owner = Owner.of(job or {})
            if owner is not None and owner.ti_id != me.name:
                return None
        return phase_of(job) is Phase.SUCCEEDED

    async def _watch(self, me: Try, ref: JobRef, job: Object | None) -> bool | None:
        """As `_poll`, by watches, which run on for some seconds after that."""
        api = cast(Api, me.client)
        jobs, pods = subscriptions(api, ref, shared=self.rng.random() < 0.5)
        async with jobs, pods:
            while not phase_of(job).ended:
                with contextlib.suppress(ApiStatusError, ApiUnavailable, TimeoutError):
                    async with asyncio.timeout(2):  # a job without its label is never shown
                        await jobs.changed()
                job = jobs.objects.get(ref.uid)
                owner = Owner.of(job or {})
                if owner is None or owner.ti_id != me.name:
                    job = await read_job(api, ref)
                    owner = Owner.of(job or {})
                    if owner is not None and owner.ti_id != me.name:
                        return None
        return phase_of(job) is Phase.SUCCEEDED

    async def _kill(self, me: Try, client: Client, ref: JobRef, mode: Mode, spares_ended: bool) -> None:
        try:
            released = await self._release(client, ref, mode, spares_ended=spares_ended)
        except KtrainError:
            self.cluster.log.append(f"{me.name}: the kill failed")
        else:
            me.killed = not released.kept

    # random events

    def _start(self) -> None:
        if self.airflow.state in ("none", "up_for_retry"):
            me = self.airflow.start(self.rng.choice([RETRIES, RETRIES, 0]))
            self.cluster.log.append(f"{me.name} starts; first of this life: {me.began}")
            me.process = spawn(self._try(me), me.name)

    def _crash(self) -> None:
        """SIGKILL to the processes of random tries, at any gate."""
        for me in self.airflow.tries:
            if me.process and not me.process.done() and self.rng.random() < 0.5:
                self.cluster.log.append(f"{me.name} crashes")
                me.process.cancel()
                self.airflow.end(me, False)

    def _miss_heartbeat(self) -> None:
        """The heartbeat is missing: Airflow ends the try, but its worker still runs."""
        if self.airflow.state == "running":
            self.cluster.log.append(f"{self.airflow.current.name} is declared dead")
            self.airflow.end(self.airflow.current, False)

    def _mark_failed(self) -> None:
        """The user marks the running try as failed, so its process kills the job."""
        if self.airflow.state == "running":
            me = self.airflow.current
            self._kill_now(me)
            self.airflow.state = "failed"

    def _kill_now(self, me: Try) -> None:
        self.cluster.log.append(f"{me.name} is killed")
        client, me.client = me.client, None  # the process that followed the job releases it
        if me.process is not None and not me.process.done():
            me.process.cancel()
        if me.ref is not None:
            mode = mode_of(self.action, succeeded=False, ended=False)
            spares_ended = self.rng.random() < 0.5
            client = client or self._client(me.name)
            me.others.append(spawn(self._kill(me, client, me.ref, mode, spares_ended), me.name))

    def _late_kill(self) -> None:
        """A late on_kill from a try that isn't current or was killed before."""
        old = [t for t in self.airflow.tries if t.ref and (t is not self.airflow.current or t.killed)]
        if old:
            self._kill_now(self.rng.choice(old))

    def _clear(self) -> None:
        if self.airflow.tries:
            self.cluster.log.append(f"cleared while {self.airflow.state}")
            if self.airflow.state == "running":
                self._kill_now(self.airflow.current)
            self.airflow.clear()

    def _open(self) -> None:
        gates = self.cluster.gates
        if gates:
            gate = self.rng.choice(gates)
            if self.faulty and self.rng.random() < 0.05:
                lost(gate)
            else:
                gate.opened.set_result(None)

    def _deliver(self) -> None:
        """One watch delivers some events. The others may be behind."""
        behind = [stream for stream in self.cluster.streams if stream.backlog]
        if behind:
            stream = self.rng.choice(behind)
            if stream.path != self.slow or self.rng.random() < 0.1:
                stream.deliver(self.rng.choice([1, 1, 2, 5, 100]), bookmark=self.rng.random() < 0.2)

    def _cut(self) -> None:
        """A watch ends. If its version has expired, the informer lists again."""
        if self.cluster.streams:
            if self.rng.random() < 0.5:
                self.cluster.expire()
            self.rng.choice(self.cluster.streams).cut()

    def _foreign(self) -> None:
        if self.foreign and NAME not in self.cluster.jobs and not self.cluster.pods:
            other = manifest(STRANGER, "theirs")
            if self.rng.random() < 0.5:
                other["metadata"]["annotations"] = {}
            self.cluster._create("stranger", other)

    def _step(self) -> None:
        rng, cluster = self.rng, self.cluster
        choices: list[tuple[float, Any]] = [
            (60, self._open),
            (14, lambda: cluster.reconcile(rng)),
            (4, cluster.touch),
            (6, self._start),
            (3, lambda: cluster.finish(rng.random() < 0.5, rng.random() < 0.3)),
            (1, lambda: cluster.delete("Foreground")),
            (0.3, lambda: cluster.delete("Background")),
            (2, self._crash),
            (2, self._miss_heartbeat),
            (2, self._mark_failed),
            (3, self._late_kill),
            (2, self._clear),
            (1, self._foreign),
            (24 if self.watches else 0, self._deliver),
            (2 if self.watches else 0, self._cut),
            (8, lambda: cluster.fail_pod(rng)),
            (3, lambda: cluster.remove_label(rng)),
        ]
        rng.choices([do for _, do in choices], [weight for weight, _ in choices])[0]()

    async def run(self) -> None:
        for _ in range(STEPS):
            self._step()
            await self._advance()
        await self._settle()

    async def _advance(self) -> None:
        self.loop.now += 0.1
        for _ in range(3):
            await asyncio.sleep(0)
        self._check()
        for me in self.airflow.tries:
            for task in (me.process, *me.others):
                if task is not None and task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception() or Broken

    async def _settle(self) -> None:
        """Complete all pending requests without faults. Afterwards no job of a finished task may hold a GPU."""
        self.faulty = False
        if self.airflow.state == "running" and self.airflow.current.process:
            if self.rng.random() < 0.5:
                self._mark_failed()
            else:
                self.cluster.finish(True)
        for number in range(600):
            for gate in list(self.cluster.gates):
                if not gate.opened.done():
                    gate.opened.set_result(None)
            if number == 100:
                self.slow = ""
            if number < 50 and self.rng.random() < 0.3:
                self.cluster.fail_pod(self.rng)
            self._deliver()
            self.cluster.reconcile(self.rng)
            self.cluster.finish(True, self.rng.random() < 0.5)
            await self._advance()
            if all(t.done() for t in self._tasks()):
                break
        else:
            raise Broken(f"these tasks do not end: {[t for t in self._tasks() if not t.done()]}")
        for _ in range(20):
            self.cluster.reconcile(self.rng)
        await self._check_final_state()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for me in self.airflow.tries for task in (me.process, *me.others) if task is not None]

    async def _check_final_state(self) -> None:
        job = self.cluster.jobs.get(NAME)
        owner = Owner.of(job or {})
        if job is None or owner is None or owner.key != KEY:
            if job is None and self.cluster.live():
                raise Broken("pods without a job")
            return
        me = next(t for t in self.airflow.tries if t.name == owner.ti_id)
        if me.killed and self.cluster.live():
            raise Broken(f"{me.name} was killed, but its pods hold GPUs")
        if self.airflow.state in ("none", "up_for_retry", "running"):
            return
        # no try is left that could act, so run the reaper
        kind = self.cluster.kind
        ref = JobRef(kind.name, kind.versions[0], "ns", NAME, job["metadata"]["uid"], owner.ti_id, "prod",
                     job["metadata"]["labels"]["ktrain.airflow/submission"])  # fmt: skip
        reaping = spawn(self._reap(ref), REAPER)
        for _ in range(100):
            for gate in list(self.cluster.gates):
                gate.opened.set_result(None)
            self.cluster.reconcile(self.rng)
            await self._advance()
        if not reaping.done() or self.cluster.live():
            raise Broken("GPUs are held after the reaper's run")

    async def _reap(self, ref: JobRef) -> None:
        await self._release(self._client(REAPER), ref, Mode.DELETE)

    async def end(self) -> None:
        for task in self._tasks():
            task.cancel()
        for client in self.clients:
            await client.close()


@pytest.mark.parametrize("batch", range(-(-RUNS // BATCH)))
def test_no_interleaving_duplicates_or_wrongly_deletes_a_job(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = InstantLoop()
    monkeypatch.setattr("time.monotonic", loop.time)
    try:
        for seed in range(batch * BATCH, min((batch + 1) * BATCH, RUNS)):
            interleaving = Interleaving(seed, loop)
            try:
                loop.run_until_complete(interleaving.run())
            except Exception as e:
                story = "\n  ".join(interleaving.cluster.log)
                pytest.fail(f"seed {seed}: {type(e).__name__}: {e}\n  {story}")
            finally:
                loop.run_until_complete(interleaving.end())
    finally:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
