"""The controllers' queue, the budget of events, garbage collection and namespaces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.controller_play import NAMESPACE, Play
from ktrain_embedded.controllers import all_controllers
from ktrain_embedded.controllers.namespace import NamespaceController
from ktrain_embedded.controllers.runtime import Controller, Key, itself
from ktrain_embedded.events import BUDGET, EventRecorder
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.store import Change, Store

JOB = {"metadata": {"name": "job", "namespace": NAMESPACE}, "spec": {}}


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class TestController:
    def make(self, answers: list[Any]) -> tuple[Controller[Key], list[Key], Clock]:
        """A controller whose reconciles give or raise the answers, one after the other."""
        done: list[Key] = []

        class Answering(Controller[Key]):
            def reconcile(self, key: Key) -> float | None:
                done.append(key)
                answer = answers.pop(0) if answers else None
                if isinstance(answer, Exception):
                    raise answer
                return answer

        clock = Clock()
        return Answering(Store(), clock), done, clock

    def test_a_key_is_reconciled_once_however_often_it_changed(self) -> None:
        controller, done, _ = self.make([])
        for key in [("ns", "a"), ("ns", "b"), ("ns", "a")]:
            controller.enqueue(key)
        assert [controller.step() for _ in range(3)] == [True, True, False]
        assert done == [("ns", "a"), ("ns", "b")]

    @pytest.mark.parametrize("turns", range(5))
    async def test_a_cancellation_counts_although_a_key_comes_at_the_same_time(self, turns: int) -> None:
        """When a cluster stops, its kubelets write the last states of their pods.

        :param turns: of the event loop between the key and the cancellation.
        """
        controller, _, _ = self.make([])
        controller.enqueue(("ns", "later"), 600)
        running = asyncio.create_task(controller.run())
        for _ in range(5):
            await asyncio.sleep(0)
        controller.enqueue(("ns", "a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([running])
        assert running.cancelled()

    def test_a_delayed_key_keeps_the_earliest_time(self) -> None:
        controller, done, clock = self.make([])
        for after in (5, 2, 9):
            controller.enqueue(("ns", "a"), after)
        assert not controller.step()
        clock.now += 2
        assert controller.step()
        clock.now += 10
        assert not controller.step()
        assert done == [("ns", "a")]

    @pytest.mark.parametrize("error", [ApiError(409, "stale"), KeyError("template")])
    def test_failed_reconciles_are_retried_with_growing_delay(self, error: Exception) -> None:
        controller, done, clock = self.make([error] * 3)
        controller.enqueue(("ns", "a"))
        waits = []
        while controller.step():
            if controller.due is not None:
                waits.append(round(controller.due - clock.now, 3))
                clock.now = controller.due
        assert waits == [0.005, 0.01, 0.02]
        assert len(done) == 4

    def test_reconcile_can_request_another_call(self) -> None:
        controller, _, clock = self.make([30.0])
        controller.enqueue(("ns", "a"))
        controller.step()
        assert controller.due == clock.now + 30

    async def test_controller_gets_existing_and_new_objects(self) -> None:
        store = Store()
        store.create(r.PYTORCHJOB, JOB)
        seen: asyncio.Queue[Key] = asyncio.Queue()

        class Telling(Controller[Key]):
            def reconcile(self, key: Key) -> None:
                seen.put_nowait(key)

        controller = Telling(store)
        controller.watch(r.PYTORCHJOB, itself)
        loop = asyncio.create_task(controller.run())
        assert await asyncio.wait_for(seen.get(), 240) == (NAMESPACE, "job")
        store.create(r.PYTORCHJOB, {**JOB, "metadata": {**JOB["metadata"], "name": "late"}})
        assert await asyncio.wait_for(seen.get(), 240) == (NAMESPACE, "late")
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop


class TestEvents:
    def events(self, messages: list[str]) -> list[Any]:
        store = Store()
        job = store.create(r.PYTORCHJOB, JOB)
        recorder = EventRecorder(store, "test")
        for message in messages:
            recorder.event(job, "Normal", "Reason", message)
        return sorted(store.list(r.EVENT), key=lambda e: int(e["metadata"]["resourceVersion"]))

    def test_repeated_event_is_counted(self) -> None:
        (event,) = self.events(["again"] * 3)
        assert (event["count"], event["message"]) == (3, "again")
        assert event["involvedObject"]["kind"] == "PyTorchJob"

    @given(st.lists(st.sampled_from("abcde"), max_size=60))
    def test_events_of_an_object_are_limited(self, messages: list[str]) -> None:
        events = self.events(messages)
        assert sum(e["count"] for e in events) <= max(len(messages), BUDGET)
        assert {e["message"] for e in events} == set(messages[: int(BUDGET)])


class TestGarbage:
    def play(self, *finalizers: str) -> Play:
        """An owner of two ConfigMaps, one of which has an owner of its own besides."""
        play = Play()
        owner = play.create(r.CONFIG_MAP, {"metadata": {"name": "owner"}})
        other = play.create(r.CONFIG_MAP, {"metadata": {"name": "other"}})
        reference = [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": o["metadata"]["name"], "uid": o["metadata"]["uid"]}
            for o in (owner, other)
        ]
        play.create(r.CONFIG_MAP, {"metadata": {"name": "child", "ownerReferences": reference[:1]}})
        blocks = {**reference[0], "blockOwnerDeletion": True}
        meta = {"name": "grandchild", "ownerReferences": [{**reference[0], "name": "child", "uid": self.uid(play)}]}
        play.create(r.CONFIG_MAP, {"metadata": meta})
        held = {"name": "held", "ownerReferences": [blocks], "finalizers": list(finalizers)}
        play.create(r.CONFIG_MAP, {"metadata": held})
        play.create(r.CONFIG_MAP, {"metadata": {"name": "shared", "ownerReferences": reference}})
        return play

    @staticmethod
    def uid(play: Play) -> str:
        return str(play.store.get(r.CONFIG_MAP, NAMESPACE, "child")["metadata"]["uid"])

    def test_background_deletion_deletes_children_later(self) -> None:
        play = self.play()
        play.store.delete(r.CONFIG_MAP, NAMESPACE, "owner")
        assert "owner" not in play.names(r.CONFIG_MAP)
        play.settle()
        assert play.names(r.CONFIG_MAP) == ["other", "shared"]
        shared = play.store.get(r.CONFIG_MAP, NAMESPACE, "shared")
        assert [o["name"] for o in shared["metadata"]["ownerReferences"]] == ["other"]

    def test_foreground_deletion_waits_for_blocking_children(self) -> None:
        play = self.play("example.com/wait")
        play.store.delete(r.CONFIG_MAP, NAMESPACE, "owner", propagation="Foreground")
        play.settle()
        assert {"owner", "held"} <= set(play.names(r.CONFIG_MAP))
        play.patch(r.CONFIG_MAP, "held", lambda o: o["metadata"].pop("finalizers"))
        play.wait(1)
        assert play.names(r.CONFIG_MAP) == ["other", "shared"]

    def test_orphan_deletion_keeps_children(self) -> None:
        play = self.play()
        play.store.delete(r.CONFIG_MAP, NAMESPACE, "owner", propagation="Orphan")
        play.settle()
        play.wait(1)
        assert play.names(r.CONFIG_MAP) == ["child", "grandchild", "held", "other", "shared"]
        assert "ownerReferences" not in play.store.get(r.CONFIG_MAP, NAMESPACE, "child")["metadata"]

    def test_child_of_a_deleted_owner_is_deleted(self) -> None:
        play = Play()
        gone = {"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "never-was"}
        play.create(r.CONFIG_MAP, {"metadata": {"name": "late", "ownerReferences": [gone]}})
        assert play.names(r.CONFIG_MAP) == []


class TestNamespaces:
    def play(self) -> Play:
        play = Play(lambda s, c: NamespaceController(s, r.served(), "PEM", c))
        play.store.create(r.NAMESPACE, {"metadata": {"name": NAMESPACE}})
        play.settle()
        return play

    def test_each_namespace_has_an_account_and_the_ca(self) -> None:
        play = self.play()
        assert play.names(r.SERVICE_ACCOUNT) == ["default"]
        assert play.store.get(r.CONFIG_MAP, NAMESPACE, "kube-root-ca.crt")["data"] == {"ca.crt": "PEM"}

    @pytest.mark.parametrize(("resource", "name"), [(r.SERVICE_ACCOUNT, "default"), (r.CONFIG_MAP, "kube-root-ca.crt")])
    def test_deleted_account_and_ca_are_recreated(self, resource: r.Resource, name: str) -> None:
        play = self.play()
        play.store.delete(resource, NAMESPACE, name)
        play.settle()
        assert play.names(resource) == [name]

    def test_deleted_namespace_is_emptied_first(self) -> None:
        play = self.play()
        play.create(r.PYTORCHJOB, {"metadata": {"name": "job"}, "spec": {}})
        play.create(r.POD, {"metadata": {"name": "pod"}, "spec": {"containers": []}})
        play.status("pod", phase="Running")
        play.store.delete(r.NAMESPACE, None, NAMESPACE)
        play.wait(1)
        assert play.store.get(r.NAMESPACE, None, NAMESPACE)["status"]["phase"] == "Terminating"
        assert play.names(r.PYTORCHJOB) == []
        assert play.names(r.POD) == ["pod"]
        play.reap()
        play.wait(1)
        assert play.store.find(r.NAMESPACE, None, NAMESPACE) is None


@pytest.mark.parametrize("mpi_api", ["v1", "v2beta1"])
async def test_all_controllers_run_until_cancelled(mpi_api: str, tmp_path: Path) -> None:
    store = Store()
    loops = [asyncio.ensure_future(run()) for run in all_controllers(store, r.served(mpi_api), tmp_path, "PEM")]
    made: asyncio.Queue[Change] = asyncio.Queue()
    store.subscribe(r.CONFIG_MAP, made.put_nowait)
    store.create(r.NAMESPACE, {"metadata": {"name": NAMESPACE}})
    async with asyncio.timeout(240):
        assert (await made.get()).object["metadata"]["name"] == "kube-root-ca.crt"
    assert not [loop for loop in loops if loop.done()]
    for loop in loops:
        loop.cancel()
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*loops, return_exceptions=True))
