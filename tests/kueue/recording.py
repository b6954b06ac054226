"""A recording of Kueue as a sequence of steps: writes of the client, writes of Kueue, states reached by the operators.

The format is that of the recordings of a real cluster: `setup.yaml` (objects without a namespace that are created
before; may be missing), `events.jsonl` (every change of every object) and `http.jsonl` (the client's requests with
their responses).
Changes are ordered by resourceVersion, which is one sequence over all resources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

Obj = dict[str, Any]

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
#: the API of each resource, and whether its objects are namespaced. `load` adds those of other objects of a scenario
RESOURCES = {
    "workloads": (KUEUE, True), "localqueues": (KUEUE, True), "clusterqueues": (KUEUE, False),
    "cohorts": (KUEUE, False), "admissionchecks": (KUEUE, False), "topologies": (KUEUE, False),
    "resourceflavors": (KUEUE, False), "workloadpriorityclasses": (KUEUE, False), "events": ("/api/v1", True),
    "pytorchjobs": ("/apis/kubeflow.org/v1", True), "mpijobs": ("/apis/kubeflow.org/v2beta1", True),
    "trainjobs": ("/apis/trainer.kubeflow.org/v1alpha1", True),
}  # fmt: skip
JOBS = ("pytorchjobs", "mpijobs", "trainjobs")
#: labels of pods with the name of their job
JOB_LABELS = ("training.kubeflow.org/job-name", "jobset.sigs.k8s.io/jobset-name")
QUEUES = ("localqueues", "clusterqueues")
PLURALS = {
    "ResourceFlavor": "resourceflavors", "ClusterQueue": "clusterqueues", "LocalQueue": "localqueues",
    "WorkloadPriorityClass": "workloadpriorityclasses", "Cohort": "cohorts", "AdmissionCheck": "admissionchecks",
    "Topology": "topologies",
}  # fmt: skip
#: conditions of jobs that the operators must reach before the replay continues; a replay may miss other conditions
AWAITED = {
    ("Running", "True"), ("Succeeded", "True"), ("Failed", "True"), ("Complete", "True"), ("Suspended", "True"),
    ("Suspended", "False"),
}  # fmt: skip
PATH = re.compile(
    r"(?P<base>/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[^/]+))?"
)
WRITES = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


class Actor(Enum):
    """The component that made the change of a step."""

    CLIENT = "client"
    KUEUE = "Kueue"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Step:
    """One recorded change.

    :param verb: client: create, patch, delete, status (replaced as a whole), evict (a pod). Kueue: create, status,
        spec, finalizers, delete, job, event. Operator: condition, ready, no pods, gone.
    :param about: the resource and the recorded name of the object.
    :param body: the written object or merge patch. For a condition, its type and status.
    :param title: the name of the client's step in the recording.
    """

    actor: Actor
    verb: str
    about: tuple[str, str]
    body: Obj = field(default_factory=dict)
    title: str = ""

    def __str__(self) -> str:
        named = f"{self.title!r}: " if self.title else ""
        return f"{named}{self.actor.value} {self.verb} {'/'.join(self.about)} {json.dumps(self.body)[:300]}"


@dataclass(frozen=True)
class Recording:
    """:param namespace: of the recorded objects.
    :param setup: objects without a namespace, which an administrator creates before.
    :param jobs: the resource of the recorded jobs: pytorchjobs, mpijobs or trainjobs.
    :param seconds: how long the recording took.
    """

    name: str
    namespace: str
    setup: tuple[Obj, ...]
    steps: tuple[Step, ...]
    jobs: str
    namespace_labels: dict[str, str]
    seconds: float

    @property
    def stopped(self) -> set[str]:
        """The jobs that somebody has stopped, or changed otherwise: they must still run then."""
        return {
            step.about[1].partition("-")[2].rpartition("-")[0] if step.about[0] == "workloads" else step.about[1]
            for step in self.steps
            if (step.actor is Actor.CLIENT and step.verb != "create" and step.about[0] in (*JOBS, "workloads"))
            or (step.verb == "job" and "true" in json.dumps(step.body).partition('"suspend": ')[2][:4])
        }


def load(folder: Path) -> Recording:
    """The recording in a folder."""
    scenario = yaml.safe_load((folder / "scenario.yaml").read_text())
    given = folder / "setup.yaml"
    setup = tuple(yaml.safe_load_all(given.read_text())) if given.exists() else ()
    for obj in setup:
        version_path = f"/apis/{obj['apiVersion']}" if "/" in obj["apiVersion"] else f"/api/{obj['apiVersion']}"
        RESOURCES.setdefault(plural_of(obj), (version_path, False))
    namespace = scenario["recorded"]["namespace"]
    changes = sorted(_lines(folder / "events.jsonl"), key=lambda change: version(change["object"]))
    written = list(_client_writes(_lines(folder / "http.jsonl"), changes))
    jobs = next(change["watch"] for change in changes if change["watch"] in JOBS)
    steps = tuple(_steps(changes, dict(written), setup))
    seconds, labels = float(scenario["recorded"]["seconds"]), scenario.get("namespace_labels") or {}
    return Recording(folder.name, namespace, setup, steps, jobs, labels, seconds)


def plural_of(obj: Obj) -> str:
    """The resource of an object of setup.yaml."""
    return PLURALS.get(obj["kind"]) or f"{obj['kind'].lower()}s"


def version(obj: Obj) -> int:
    return int(obj["metadata"]["resourceVersion"])


def kept(change: Obj) -> bool:
    """Whether a replay needs the change: changes of Kueue's objects and of jobs, and Kueue's events."""
    if change["watch"] == "events":
        reporter = change["object"].get("reportingComponent") or change["object"].get("source", {}).get("component", "")
        return "kueue" in reporter and change["type"] == "ADDED"
    return change["watch"] in RESOURCES


def job_of(pod: Obj) -> str:
    """The name of the job that a pod belongs to; "" if it belongs to none."""
    labels = pod["metadata"].get("labels") or {}
    return next((str(labels[label]) for label in JOB_LABELS if label in labels), "")


def _lines(path: Path) -> list[Obj]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _client_writes(requests: list[Obj], changes: list[Obj]) -> Iterator[tuple[float, Step]]:
    """The client's successful writes, each with the version of the resulting change, or one just before the next."""
    for record in requests:
        request = record["request"]
        if request["method"] not in WRITES or record["status"] >= 400:
            continue
        verb, body = WRITES[request["method"]], request.get("body") or {}
        path, _, query = request["path"].partition("?")
        found = PATH.fullmatch(path)
        if found is None or "dryRun" in query:
            continue
        plural, name = found["plural"], found["name"] or (body.get("metadata") or {}).get("name")
        if name is None or found["subresource"] not in (None, "status", "eviction"):
            continue
        RESOURCES.setdefault(plural, (found["base"], found["namespace"] is not None))
        verb = {"status": "status", "eviction": "evict"}.get(found["subresource"] or "", verb)
        step = Step(Actor.CLIENT, verb, (plural, name), body, record["name"])
        yield _version_of(record, step, changes), step


def _version_of(record: Obj, step: Step, changes: list[Obj]) -> float:
    """The version that a write made: from the response, or else from the object's next change, or else by time."""
    answered = (record["body"] or {}).get("metadata", {}).get("resourceVersion")
    if answered and step.verb != "evict":
        return int(answered)
    plural, name = step.about
    later = [change for change in changes if change["t"] >= record["t"]]
    since = (c for c in later if (c["watch"], c["object"]["metadata"]["name"]) == (plural, name))
    ending = (c for c in since if c["type"] == "DELETED" or "deletionTimestamp" in c["object"]["metadata"])
    if (ended := next(ending, None)) is not None and plural != "pods":
        return version(ended["object"])
    return min((version(change["object"]) for change in later), default=version(changes[-1]["object"]) + 1) - 0.5


def _steps(changes: list[Obj], written: dict[float, Step], setup: tuple[Obj, ...]) -> Iterator[Step]:
    known: dict[tuple[str, str], Obj] = {(plural_of(obj), obj["metadata"]["name"]): obj for obj in setup}
    waiting: dict[tuple[str, str], bool] = {}  # jobs whose pods have not been ready since they were admitted
    pending = dict(written)
    pods: dict[str, str] = {}  # the job of each pod that exists, by uid
    jobs = next(change["watch"] for change in changes if change["watch"] in JOBS)
    for change in changes:
        obj, about = change["object"], (change["watch"], change["object"]["metadata"]["name"])
        for at in [at for at in pending if at < version(obj)]:  # a write to an object that isn't watched
            yield pending.pop(at)
        step = pending.pop(version(obj), None)
        if step is not None:
            yield replace(step, body=obj.get("status") or {}) if step.verb == "status" else step
            if change["type"] == "DELETED" and about[0] in JOBS:
                yield Step(Actor.OPERATOR, "gone", about)
        elif change["watch"] == "pods":
            yield from _of_pod(change, pods, jobs)
        elif kept(change):
            yield from _step(change, known.get(about, {}), about, waiting)
        known[about] = {} if change["type"] == "DELETED" else obj
    yield from pending.values()


def _step(change: Obj, old: Obj, about: tuple[str, str], waiting: dict[tuple[str, str], bool]) -> Iterator[Step]:
    plural, obj = about[0], change["object"]
    if plural == "events":
        yield Step(Actor.KUEUE, "event", about, obj)
    elif plural in JOBS:
        yield from _of_job(change, old, about, waiting)
    elif change["type"] == "DELETED":
        yield Step(Actor.KUEUE, "delete", about)
    elif change["type"] == "ADDED":
        yield Step(Actor.KUEUE, "create", about, obj)
    else:
        yield from _of_kueue(obj, old, about)


def _of_pod(change: Obj, pods: dict[str, str], jobs: str) -> Iterator[Step]:
    """A job lost its last pod: Kueue or the client may have waited for this."""
    uid, job = change["object"]["metadata"]["uid"], job_of(change["object"])
    if change["type"] != "DELETED":
        pods[uid] = job
    elif pods.pop(uid, "") and job not in pods.values():
        yield Step(Actor.OPERATOR, "no pods", (jobs, job))


def _of_kueue(obj: Obj, old: Obj, about: tuple[str, str]) -> Iterator[Step]:
    """Kueue's changes of its own objects: their status, spec and finalizers."""
    if obj.get("status") != old.get("status"):
        yield Step(Actor.KUEUE, "status", about, obj.get("status") or {})
    if about[0] in QUEUES:
        return  # the first change of a queue contains the defaults of its spec
    if spec := difference(old.get("spec") or {}, obj.get("spec") or {}):
        yield Step(Actor.KUEUE, "spec", about, {"spec": spec})
    if obj["metadata"].get("finalizers") != old.get("metadata", {}).get("finalizers"):
        yield Step(Actor.KUEUE, "finalizers", about, {"metadata": {"finalizers": obj["metadata"].get("finalizers")}})


def _of_job(change: Obj, old: Obj, about: tuple[str, str], waiting: dict[tuple[str, str], bool]) -> Iterator[Step]:
    obj = change["object"]
    if change["type"] == "DELETED":
        yield Step(Actor.OPERATOR, "gone", about)
        return
    if change["type"] == "ADDED":
        return  # by the client; the webhooks suspend it
    if "deletionTimestamp" in obj["metadata"] and "deletionTimestamp" not in old.get("metadata", {}):
        return
    if spec := difference(old.get("spec") or {}, obj["spec"]):
        yield Step(Actor.KUEUE, "job", about, {"spec": spec})
        waiting[about] = not obj["spec"].get("suspend")
    before = _conditions(old)
    for condition in sorted(_conditions(obj) - before):
        if condition in AWAITED:
            yield Step(Actor.OPERATOR, "condition", about, dict(zip(("type", "status"), condition, strict=True)))
    counts = obj.get("status", {}).get("jobsStatus") or ()
    if waiting.get(about) and any(of["ready"] and of["active"] for of in counts):
        waiting[about] = False
        yield Step(Actor.OPERATOR, "ready", about)


def _conditions(obj: Obj) -> set[tuple[str, str]]:
    return {(c["type"], c["status"]) for c in obj.get("status", {}).get("conditions") or ()}


def difference(old: Any, new: Any) -> Any:
    """The merge patch that changes `old` into `new`; {} if they are equal. It removes values, never whole objects."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    found: Obj = {
        key: difference(old[key], {}) if isinstance(old[key], dict) else None for key in old if key not in new
    }
    for key, value in new.items():
        if key not in old:
            found[key] = value
        elif value != old[key]:
            found[key] = difference(old[key], value)
    return found
