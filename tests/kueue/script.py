"""A recording as a script of the scripted API server: what Kueue and the operators wrote, when they wrote it.

The test makes the writes of the recorded client to the jobs with a queue and to their Workloads, when it is their turn.
Names, uids and times are as recorded: the test's event loop has the recorded time.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from tests.apiserver import ApiServer, Object, Request
from tests.apiserver.server import merged
from tests.virtual import VirtualLoop

from .recording import JOBS, About, Recording, Write, about_of, difference, plural_of

PATIENCE = 60.0  #: Seconds for a write of the test.
PATCH_MANAGER = "kueue.x-k8s.io/manager"
OURS = "ktrain.airflow/"  #: Labels that the operators copy from a job to its pods.


class ReplayError(AssertionError):
    """The test has not made a recorded write."""


class Script(ApiServer):
    """The API server of a recording.

    :param recording: the scenario.
    :param perform: makes a write of the recorded client to a job, or begins with it: it must not wait for what follows.
    :param by_others: titles of writes to jobs that the test doesn't make: they are changes like others.
    """

    def __init__(
        self, recording: Recording, perform: Callable[[Write], Awaitable[object]], *, by_others: Collection[str] = ()
    ) -> None:
        super().__init__(admit=self._admit_job, namespace=recording.namespace)
        self._recording, self._perform, self._by_others = recording, perform, by_others
        self._jobs = set(recording.jobs)
        self._states: dict[About, Object] = {}  # as recorded
        self._step = recording.steps[0]
        self._to_be_deleted = {
            step.change["object"]["metadata"]["uid"]
            for step in recording.steps
            if step.change is not None and step.change["type"] == "DELETED"
        }
        for obj in recording.setup:
            self.put(plural_of(obj), copy.deepcopy(obj))

    async def play(self) -> None:
        """All steps, at their recorded times.

        :raises ReplayError: the test has not made a write of the recorded client.
        """
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.set_epoch(self._recording.began)
        began = loop.time()
        for step in self._recording.steps:
            self._step = step
            await asyncio.sleep(max(0.0, began + step.at - loop.time()))
            if step.write is not None and self.is_ours(step.write):
                await self._perform(step.write)
                await self._made(step.write)
            if step.change is not None:
                self._show(step.change)
            elif step.write is not None:
                self._write(step.write)

    def is_ours(self, write: Write) -> bool:
        """Whether the test makes a write."""
        return write.job in self._jobs and write.title not in self._by_others

    async def _made(self, write: Write) -> None:
        """Wait until the test has made a write."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not self._holds(write):
                    await self.news.wait()
        except TimeoutError:
            raise ReplayError(f"not made within {PATIENCE:.0f} s: {write}") from None

    def _holds(self, write: Write) -> bool:
        obj = self._present(write.about, self._states.get(write.about))
        if write.verb == "create":
            return write.about[1] in self.objects[write.about[0]]
        if write.verb == "delete":
            return obj is None or "deletionTimestamp" in obj["metadata"]
        return obj is not None and merged(obj, write.body) == obj

    def _present(self, about: About, recorded: Object | None) -> Object | None:
        """The object, if it still is the recorded one."""
        obj = self.objects[about[0]].get(about[1])
        same = obj is not None and recorded is not None and obj["metadata"]["uid"] == recorded["metadata"]["uid"]
        return obj if same else None

    # changes

    def _admit_job(self, request: Request, obj: Object | None) -> None:
        """Complete a new job as the API server and Kueue's webhook did."""
        change, write = self._step.change, self._step.write
        if obj is None and request.where.resource in JOBS and change is not None and write is not None:
            created = {key: value for key, value in difference(write.body, change["object"]).items() if value}
            kept = {**created, "metadata": difference(write.body["metadata"], change["object"]["metadata"])}
            request.body.update(merged(request.body, kept))

    def _show(self, change: Object) -> None:
        about, obj = about_of(change), change["object"]
        before, self._states[about] = self._states.get(about), obj
        present = self._present(about, obj)
        if change["type"] == "DELETED":
            self._to_be_deleted.discard(obj["metadata"]["uid"])
            if present is not None:
                self.remove(*about)
        elif about[0] in JOBS and about[1] in self._jobs:
            if present is not None and before is not None and change["type"] == "MODIFIED":
                patch = _fitted({key: difference(before.get(key), obj.get(key)) for key in ("spec", "status")}, present)
                self.put(about[0], merged(present, {key: value for key, value in patch.items() if value}))
        elif present is not None or (change["type"] == "ADDED" and not self._is_orphan(obj)):
            self.put(about[0], self._labelled(copy.deepcopy(obj)) if about[0] == "pods" else copy.deepcopy(obj))

    def _is_orphan(self, obj: Object) -> bool:
        """Whether the test has deleted the job that owned an object."""
        owners = obj["metadata"].get("ownerReferences") or ()
        jobs = {job["metadata"]["uid"] for plural in JOBS for job in self.objects[plural].values()}
        return any(owner["kind"].lower() + "s" in JOBS and owner["uid"] not in jobs for owner in owners)

    def _labelled(self, pod: Object) -> Object:
        """A pod with the labels of its job that a recording can't have."""
        for owner in pod["metadata"].get("ownerReferences") or ():
            job = self.objects[f"{owner['kind'].lower()}s"].get(owner["name"], {}).get("metadata", {})
            labels = {key: value for key, value in (job.get("labels") or {}).items() if key.startswith(OURS)}
            pod["metadata"].setdefault("labels", {}).update(labels)
        return pod

    def put(self, resource: str, obj: Object) -> Object:
        """A pod that the test has deleted ends after its grace period."""
        made = super().put(resource, obj)
        meta = made["metadata"]
        if resource == "pods" and "deletionTimestamp" in meta and meta["uid"] not in self._to_be_deleted:
            grace = meta.get("deletionGracePeriodSeconds") or 0
            asyncio.get_running_loop().call_later(grace, lambda: self._end(made))
        return made

    def _end(self, pod: Object) -> None:
        if self._present(("pods", pod["metadata"]["name"]), pod) is not None:
            self.remove("pods", pod["metadata"]["name"])

    def _write(self, write: Write) -> None:
        """A write to an object that was not watched."""
        plural, name = write.about
        if write.verb == "create":
            self.put(plural, copy.deepcopy(write.body))
        elif name in self.objects[plural]:
            if write.verb == "patch":
                self.put(plural, merged(self.objects[plural][name], write.body))
            else:
                self.remove(plural, name)

    def collect(self, uid: str) -> None:
        """Leave what is deleted later, as recorded."""
        for plural, objects in list(self.objects.items()):
            for owned in list(objects.values()):
                meta = owned["metadata"]
                is_owned = any(owner["uid"] == uid for owner in meta.get("ownerReferences") or ())
                if is_owned and meta["uid"] not in self._to_be_deleted and meta["name"] in objects:
                    self.remove(plural, meta["name"])


def _fitted(patch: Object, job: Object) -> Object:
    """A recorded patch, adapted to a job that may have other roles and its own entries in runtimePatches."""
    spec: dict[str, Any] = patch["spec"] or {}
    for key, value in job["spec"].items():
        if key.endswith("ReplicaSpecs") and key in spec:
            spec[key] = {role: change for role, change in spec[key].items() if role in value}
    if "runtimePatches" in spec:
        known = job["spec"].get("runtimePatches") or []
        spec["runtimePatches"] = [
            *(entry for entry in known if entry["manager"] != PATCH_MANAGER),
            *(entry for entry in spec["runtimePatches"] or () if entry["manager"] == PATCH_MANAGER),
        ]
    return patch
