"""Random interleavings of the real submit and release with a model of a cluster: no job is duplicated, no GPU leaks.

A seed is one interleaving of about a hundred steps. `KTRAIN_MODEL_RUNS=100000 pytest tests/engine/test_model.py` runs
more of them. A failure reports its seed and its steps.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity import JobRef, OnFinishAction, Owner, Reattach, TaskKey
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.engine.job_requests import read_job
from airflow_provider_ktrain.engine.release import Mode, mode_of, release
from airflow_provider_ktrain.engine.submit import submit
from tests.engine.model_cluster import (
    KEY,
    KIND,
    NAME,
    RETRIES,
    Airflow,
    Broken,
    Cluster,
    InstantLoop,
    Object,
    Quiet,
    Try,
    client,
    lost,
    manifest,
    spawn,
)

RUNS = int(os.environ.get("KTRAIN_MODEL_RUNS", "10000"))
BATCH = 1000
STEPS = 90
REAPER = "reaper"
STRANGER = Owner(TaskKey("staging", "dag", "train", "run-1"), 1, "theirs")


class Interleaving:
    """One random interleaving. `run` raises Broken if an invariant doesn't hold."""

    def __init__(self, seed: int, loop: InstantLoop) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        self.cluster = Cluster(self._allowed)
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
        if len(live := self.cluster.live()) > 1:
            raise Broken(f"two jobs hold GPUs: {live}")

    # processes

    async def _try(self, me: Try) -> None:
        """Submit, follow and release, first as a worker, then as a triggerer."""
        api = client(self.cluster, me.name)
        succeeded = False
        try:
            submitted = await submit(
                api, KIND, "v1", lambda s: manifest(me.owner, s, self.reattach == "if_unchanged"), me.owner, me.first,
                reattach=self.reattach, log=Quiet(),
            )  # fmt: skip
            me.ref = submitted.ref
            job: Object | None = submitted.job
            while not phase_of(job).ended:
                job = await read_job(api, me.ref)
                owner = Owner.of(job or {})
                if owner is not None and owner.ti_id != me.name:
                    return  # superseded
            succeeded = phase_of(job) is Phase.SUCCEEDED
            await release(api, me.ref, mode_of(self.action, succeeded=succeeded, ended=True))
        except KtrainError:
            succeeded = False
        finally:
            if me.process is not None and not me.process.cancelling():
                self.airflow.end(me, succeeded)

    async def _kill(self, me: Try, ref: JobRef, mode: Mode) -> None:
        try:
            await release(client(self.cluster, me.name), ref, mode)
        except KtrainError:
            self.cluster.log.append(f"{me.name}: the kill failed")
        else:
            me.killed = True

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
        if me.process is not None and not me.process.done():
            me.process.cancel()
        if me.ref is not None:
            mode = mode_of(self.action, succeeded=False, ended=False)
            me.others.append(spawn(self._kill(me, me.ref, mode), me.name))

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

    def _foreign(self) -> None:
        if self.foreign and NAME not in self.cluster.jobs:
            other = manifest(STRANGER, "theirs")
            if self.rng.random() < 0.5:
                other["metadata"]["annotations"] = {}
            self.cluster._create("stranger", other)

    def _step(self) -> None:
        rng, cluster = self.rng, self.cluster
        choices: list[tuple[int, Any]] = [
            (60, self._open),
            (14, lambda: cluster.reconcile(rng)),
            (4, cluster.touch),
            (6, self._start),
            (3, lambda: cluster.finish(rng.random() < 0.5, rng.random() < 0.3)),
            (1, cluster.delete),
            (2, self._crash),
            (2, self._miss_heartbeat),
            (2, self._mark_failed),
            (3, self._late_kill),
            (2, self._clear),
            (1, self._foreign),
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
        for _ in range(600):
            for gate in list(self.cluster.gates):
                if not gate.opened.done():
                    gate.opened.set_result(None)
            self.cluster.reconcile(self.rng)
            self.cluster.finish(True)
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
        ref = JobRef("PyTorchJob", "v1", "ns", NAME, job["metadata"]["uid"], owner.ti_id, "prod",
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
        await release(client(self.cluster, REAPER), ref, Mode.DELETE)

    def end(self) -> None:
        for task in self._tasks():
            task.cancel()


@pytest.mark.parametrize("batch", range(-(-RUNS // BATCH)))
def test_no_interleaving_duplicates_or_wrongly_deletes_a_job(batch: int) -> None:
    loop = InstantLoop()
    try:
        for seed in range(batch * BATCH, min((batch + 1) * BATCH, RUNS)):
            interleaving = Interleaving(seed, loop)
            try:
                loop.run_until_complete(interleaving.run())
            except Exception as e:
                story = "\n  ".join(interleaving.cluster.log)
                pytest.fail(f"seed {seed}: {type(e).__name__}: {e}\n  {story}")
            finally:
                interleaving.end()
    finally:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
