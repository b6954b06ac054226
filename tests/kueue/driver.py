"""Drivers of a recorded scenario: `replay` writes what the recorded Kueue wrote, `real` waits for a real Kueue.

Both repeat the writes of the recorded client to jobs that don't belong to the test. If the recorded client wrote to a
job of the test, they wait for the test's own write. A replay that doesn't come about within its recorded length and
GRACE fails the test.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .api import JSON_PATCH, MERGE, Api, JobHistory, Refused, path_of
from .names import Names
from .recording import JOBS, QUEUES, RESOURCES, Actor, Obj, Recording, Step, job_of, plural_of

PATCH_MANAGER = "kueue.x-k8s.io/manager"
POLL = 0.05  # seconds
GRACE = 240.0  # seconds that a replay may take longer than its recording, on a loaded machine
PACE = 0.3  # seconds between two writes of the same status, so that a watch sees each of them
PAUSE = 1.0  # seconds before the client changes an object: recorded ones are longer. The test reads the state before


class ReplayError(AssertionError):
    """A recorded step did not happen in time, or could not be repeated."""


class Driver:
    """One scenario on a cluster, in a separate namespace; a context manager.

    :param kubeconfig: of an administrator of the cluster.
    :param recording: the scenario.
    :param ours: recorded names of the jobs that the test submits and writes to, each with its name on the cluster, or
        None for the first job of its kind that the driver has not created itself.
    :param by_others: titles of the client's steps that the driver repeats although they write to such a job.
    :param held: steps before which the driver stops until `let_go`: the client's by title, others as `create high`.
    :param prepare: changes a recorded object before the driver creates it, for example its image.
    :param real: wait for a real Kueue instead of writing what the recorded one wrote.
    :param settle: called before each write of Kueue and of the client: it waits until the test has seen the writes
        before, or the event is set. Default: nothing.
    :param timeout: seconds for the whole replay. Default: as long as the recording, and GRACE.
    """

    def __init__(
        self, kubeconfig: Path, recording: Recording, *, ours: Mapping[str, str | None] | None = None,
        by_others: Collection[str] = (), held: Collection[str] = (), prepare: Callable[[Obj], Obj] = copy.deepcopy,
        real: bool = False, settle: Callable[[threading.Event], object] = lambda stop: None,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        self._api = Api(kubeconfig)
        self._settle = settle
        self._recording = recording
        self._ours = dict(ours or {})
        self._by_others = by_others
        self._held = set(held)
        self._prepare = prepare
        self._real = real
        self._timeout = recording.seconds + GRACE if timeout is None else timeout
        self._end = math.inf  # time.monotonic() at which the replay fails
        self.namespace = f"kueue-{secrets.token_hex(4)}"
        self.names = Names((recording.namespace, self.namespace))
        self.done: list[Step] = []
        self.awaited: Step | None = None  #: the step that the test must perform now
        self._written: dict[tuple[str, str], float] = {}  # time of the last write to the status of each Workload
        self._created: set[str] = set()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Driver:
        meta = {"name": self.namespace, "labels": self._recording.namespace_labels}
        self._api.request("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        for obj in self._recording.setup:
            self._create_setup(obj)
        self._history = JobHistory(self._api, self._recording.jobs, self.namespace)
        self._end = time.monotonic() + self._timeout
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._stop.set()
            self._thread.join()
            self._history.close()
            self._clean_up()

    def _create_setup(self, obj: Obj) -> None:
        """Create an object of the administrator. A replay does without those that the cluster doesn't serve."""
        try:
            self._api.request("POST", path_of(plural_of(obj), self.namespace), self.prepared(obj))
        except Refused as error:
            if error.status != 404 or self._real:
                raise

    @property
    def finished(self) -> bool:
        """Whether all steps have happened. Raises ReplayError if one doesn't."""
        if self._error:
            raise self._error
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until all steps have happened. Raises ReplayError if one doesn't."""
        while not self.finished:
            self._thread.join(POLL)

    def prepared(self, recorded: Obj) -> Obj:
        """A recorded object for this cluster. A job that nobody stopped trains for a second: only the order counts."""
        made = self._prepare(recorded)
        if not self._real and made["metadata"]["name"] not in self._recording.stopped:
            _shorten(made)
        return made

    def wait_for(self, title: str) -> None:
        """Wait until the client's step with this title has happened. Raises ReplayError if it doesn't."""
        self.until(lambda: any(step.title == title for step in self.done))

    def let_go(self, title: str) -> None:
        """Continue with a step of `held`."""
        self._held.discard(title)

    def until(self, right: Callable[[], bool]) -> None:
        """Wait until a condition is true. Raises ReplayError if the replay fails, or if the timeout expires."""
        while not right():
            if self._error:
                raise self._error
            if time.monotonic() > self._end:
                raise ReplayError(f"not within {self._timeout:.0f} s; last step: {self.done[-1:]}")
            time.sleep(POLL)

    def _run(self) -> None:
        try:
            for step in self._recording.steps:
                self._until(step, lambda: not self._held & {step.title, _short(step)})  # noqa: B023
                self._act(step)
                self.done.append(step)
        except _Stopped:
            pass
        except Exception as error:
            self._error = error if isinstance(error, ReplayError) else ReplayError(f"{step}: {error!r}")

    def _clean_up(self) -> None:
        for plural in ("workloads", self._recording.jobs):
            for obj in self._api.request("GET", path_of(plural, self.namespace))["items"]:
                path = path_of(plural, self.namespace, obj["metadata"]["name"])
                with contextlib.suppress(Refused):
                    self._api.request("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)
        self._api.request("DELETE", f"/api/v1/namespaces/{self.namespace}")
        created = [s.about for s in self.done if s.verb == "create" and s.actor is Actor.CLIENT]
        for plural, name in created:
            if not RESOURCES[plural][1]:
                with contextlib.suppress(Refused):
                    self._api.request("DELETE", path_of(plural, self.namespace, name))
        for obj in self._recording.setup:
            with contextlib.suppress(Refused):
                self._api.request("DELETE", path_of(plural_of(obj), self.namespace, obj["metadata"]["name"]))

    # steps

    def _act(self, step: Step) -> None:
        if step.actor is not Actor.OPERATOR:
            self._settle(self._stop)
        if step.actor is Actor.CLIENT:
            self._client(step)
        elif step.actor is Actor.OPERATOR:
            self._operator(step)
        elif self._real:
            self._await_kueue(step)
        else:
            self._kueue(step)

    def _client(self, step: Step) -> None:
        plural, recorded = step.about
        if step.verb != "status" and self._is_ours(*step.about) and step.title not in self._by_others:
            self._await_ours(step)
            return
        if step.verb == "create":
            self._created.add(recorded)
            made = self._api.request("POST", path_of(plural, self.namespace), self.prepared(step.body))
            self._created.add(made["metadata"]["name"])
        elif step.verb == "status":
            self._set_status(step)
        elif plural == "pods":
            self._remove_pod(step)
        elif step.verb == "patch":
            time.sleep(PAUSE)
            self._api.request("PATCH", self._path(*step.about), self.names.translate(step.body), MERGE)
        else:
            self._api.request("DELETE", self._path(*step.about), step.body or None)

    def _set_status(self, step: Step) -> None:
        """What the controller of an admission check writes. On a real cluster, the rest of the status is Kueue's."""
        body = step.body
        if self._real and step.about[0] == "workloads":
            body = {"admissionChecks": body.get("admissionChecks")}
        with contextlib.suppress(Refused):  # a replay does without objects that the cluster doesn't serve
            self._write(step, {"status": self.names.translate(body)}, "/status")

    def _remove_pod(self, step: Step) -> None:
        """Delete or evict the pod that has the place of the recorded one."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        live = [pod["metadata"]["name"] for pod in self._api.request("GET", path)["items"]]
        wanted = self.names.pod(step.about[1])
        found = next((name for name in live if name == wanted), "") or next(
            (name for name in live if name.rpartition("-")[0] == wanted.rpartition("-")[0]), wanted
        )
        if step.verb == "evict":
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": found}}
            self._api.request("POST", f"{path}/{found}/eviction", eviction)
        else:
            self._api.request("DELETE", f"{path}/{found}", step.body or None)

    def _is_ours(self, plural: str, recorded: str) -> bool:
        """Whether an object is a job of the test or the Workload of such a job."""
        if plural == "workloads":
            return recorded.partition("-")[2].rpartition("-")[0] in self._ours
        return plural in JOBS and recorded in self._ours

    def _await_ours(self, step: Step) -> None:
        self.awaited = step
        try:
            self._wait_for_ours(step)
        finally:
            self.awaited = None

    def _wait_for_ours(self, step: Step) -> None:
        if step.verb == "create":
            self._until(step, lambda: self._find_ours(step.about[1]))
        elif step.verb == "delete":
            self._until(step, lambda: self._is_going(*step.about))
        else:
            expected = self.names.translate(step.body)
            self._until(step, lambda: _holds(self._api.find(self._path(*step.about)) or {}, expected))

    def _find_ours(self, recorded: str) -> bool:
        """Whether the test has created a job; if so, its name is stored."""
        expected = self._ours[recorded]
        taken = {self.names.job(other) for other in self._ours if other != recorded and other in self._created}
        for obj in self._api.request("GET", path_of(self._recording.jobs, self.namespace))["items"]:
            name = obj["metadata"]["name"]
            if name == expected or (expected is None and name not in self._created and name not in taken):
                self.names.add_job(recorded, name)
                self._created.add(recorded)
                return True
        return False

    def _operator(self, step: Step) -> None:
        mark = f"{step.body['type']} {step.body['status']}" if step.verb == "condition" else step.verb
        name = self.names.job(step.about[1])

        def reached() -> bool:
            if step.verb == "no pods":
                return not self._has_pods(name)
            if step.verb != "gone" and self._history.take(name, mark):
                return True
            if mark in ("ready", "Running True") and self._history.has_ended(name):
                return True  # its pods never ran at the same time: they train for a second
            if step.verb == "gone" and self._is_ours(*step.about):
                return self._is_going(*step.about)  # deleted in the foreground, it waits for its Workload's finalizer
            gone = self._api.find(self._path(*step.about)) is None
            return gone and (step.verb == "gone" or self._is_ours(*step.about))

        self._until(step, reached)

    def _has_pods(self, job: str) -> bool:
        pods = self._api.request("GET", f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return any(job_of(pod) == job for pod in pods)

    def _is_going(self, plural: str, recorded: str) -> bool:
        found = self._api.find(self._path(plural, recorded))
        return found is None or "deletionTimestamp" in found["metadata"]

    # Kueue's writes

    def _kueue(self, step: Step) -> None:
        plural, recorded = step.about
        if step.verb == "create":
            self._create_workload(step)
        elif step.verb == "event":
            self._create_event(step.body)
        elif step.verb == "delete":
            self._write(step, {"metadata": {"finalizers": None}})
            self._until(step, lambda: self._api.find(self._path(plural, recorded)) is None)
        elif step.verb == "status":
            time.sleep(max(0.0, self._written.get(step.about, 0.0) + PACE - time.monotonic()))
            self._written[step.about] = time.monotonic()
            replaced = [{"op": "add", "path": "/status", "value": self.names.translate(step.body)}]
            self._write(step, replaced, "/status", JSON_PATCH)
        elif step.verb == "job":
            found = self._api.find(self._path(plural, recorded))
            if found is not None:
                self._write(step, _fitted(self.names.translate(step.body), found))
        else:
            self._write(step, self.names.translate(step.body))

    def _create_workload(self, step: Step) -> None:
        plural, recorded = step.about
        if plural in QUEUES:
            return  # an administrator did this
        name = self.names.name(plural, recorded)
        owner = step.body["metadata"]["ownerReferences"][0]
        job = self._api.find(path_of(self._recording.jobs, self.namespace, self.names.job(owner["name"])))
        if job is None:
            return  # the test has deleted it
        self.names.add_uid(owner["uid"], job["metadata"]["uid"])
        references = [{**owner, "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}]
        kept = {k: step.body["metadata"][k] for k in ("labels", "finalizers") if k in step.body["metadata"]}
        meta = {**self.names.translate(kept), "name": name, "ownerReferences": references}
        body = {**self.names.translate({k: v for k, v in step.body.items() if k != "status"}), "metadata": meta}
        made = self._api.request("POST", path_of(plural, self.namespace), body)
        self.names.add_uid(step.body["metadata"]["uid"], made["metadata"]["uid"])

    def _create_event(self, event: Obj) -> None:
        about = event["involvedObject"]
        plural = "workloads" if about["kind"] == "Workload" else self._recording.jobs
        made = self.names.translate({k: v for k, v in event.items() if k != "metadata"})
        made["involvedObject"]["name"] = self.names.name(plural, about["name"])
        made["metadata"] = {"name": f"{made['involvedObject']['name']}.{secrets.token_hex(8)}"}
        made["involvedObject"].pop("resourceVersion", None)
        self._api.request("POST", path_of("events", self.namespace), made)

    def _write(self, step: Step, body: Any, subresource: str = "", content_type: str = MERGE) -> None:
        try:
            self._api.request("PATCH", self._path(*step.about) + subresource, body, content_type)
        except Refused as error:
            if error.status != 404:  # deleted with its job, which the test has deleted
                raise

    def _await_kueue(self, step: Step) -> None:
        """Wait until a real Kueue has made the recorded changes: conditions of Workloads, `suspend` of jobs."""
        plural, recorded = step.about
        if plural == "workloads" and step.verb == "status":
            expected = {(c["type"], c["status"], c["reason"]) for c in step.body.get("conditions") or ()}
            self._until(step, lambda: expected <= self._reached(recorded))
        elif step.verb == "job":
            suspend = _suspend(step.body)
            self._until(step, lambda: suspend in (None, _suspend(self._api.find(self._path(plural, recorded)) or {})))

    def _reached(self, recorded: str) -> set[tuple[str, str, str]]:
        job = self.names.job(recorded.partition("-")[2].rpartition("-")[0])
        uid = self._history.uids.get(job)
        for workload in self._api.request("GET", path_of("workloads", self.namespace))["items"]:
            if any(owner["uid"] == uid for owner in workload["metadata"].get("ownerReferences") or ()):
                conditions = workload.get("status", {}).get("conditions") or ()
                return {(c["type"], c["status"], c["reason"]) for c in conditions}
        return set()

    def _path(self, plural: str, recorded: str) -> str:
        return path_of(plural, self.namespace, self.names.name(plural, recorded))

    def _until(self, step: Step, right: Callable[[], bool]) -> None:
        while not right():
            if self._stop.is_set():
                raise _Stopped
            if time.monotonic() > self._end:
                raise ReplayError(f"not within {self._timeout:.0f} s: {step}")
            time.sleep(POLL)


def _short(step: Step) -> str:
    """A step without a title of its own: `create high`."""
    return f"{step.verb} {step.about[1]}"


def _shorten(value: Any) -> None:
    """Let the programs of a recorded object sleep for a second at most."""
    if isinstance(value, dict):
        for key, of in value.items():
            if key in ("command", "args") and isinstance(of, list):
                value[key] = [re.sub(r"\bsleep \d+", "sleep 1", str(word)) for word in of]
            else:
                _shorten(of)
    elif isinstance(value, list):
        for of in value:
            _shorten(of)


class _Stopped(Exception):
    """The test has ended."""


def _suspend(obj: Obj) -> Any:
    spec = obj.get("spec") or {}
    return (spec.get("runPolicy") or spec).get("suspend")


def _holds(obj: Any, expected: Any) -> bool:
    """Whether a merge patch would change nothing."""
    if not isinstance(expected, dict):
        return bool(obj == expected)
    if not isinstance(obj, dict):
        return False
    return all(_holds(obj.get(key), value) for key, value in expected.items())


def _fitted(patch: Obj, job: Obj) -> Obj:
    """A recorded patch, adapted to a job that may have other roles and its own entries in runtimePatches."""
    fitted = copy.deepcopy(patch)
    for key, value in job["spec"].items():
        if key.endswith("ReplicaSpecs") and key in fitted["spec"]:
            fitted["spec"][key] = {role: change for role, change in fitted["spec"][key].items() if role in value}
    if "runtimePatches" in fitted["spec"]:
        known = job["spec"].get("runtimePatches") or []
        fitted["spec"]["runtimePatches"] = [
            *(entry for entry in known if entry["manager"] != PATCH_MANAGER),
            *(entry for entry in fitted["spec"]["runtimePatches"] or () if entry["manager"] == PATCH_MANAGER),
        ]
    return fitted
