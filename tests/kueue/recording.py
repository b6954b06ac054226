"""A recording of Kueue: every change of every object, and what the recorded client wrote.

The format is that of the recordings of a real cluster: `setup.yaml` (objects without a namespace that are created
before; may be missing), `events.jsonl` (every change of every object) and `http.jsonl` (the client's requests with
their responses).
Changes are ordered by resourceVersion, which is one sequence over all resources.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.apiserver.messages import Where
from tests.apiserver.server import merged
from tests.tables import table

Obj = dict[str, Any]
About = tuple[str, str]  #: The resource and the name of an object.

KEPT = Path(__file__).parent / "recordings"
#: Another folder with recordings.
FOLDER = Path(os.path.expanduser(os.environ.get("KTRAIN_TEST_RECORDINGS", "") or KEPT))
JOBS = ("pytorchjobs", "mpijobs", "trainjobs")
PLURALS = {"WorkloadPriorityClass": "workloadpriorityclasses", "Topology": "topologies"}
VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class Write:
    """A successful request of the recorded client.

    :param verb: create, patch or delete.
    :param title: the name of the request in the recording.
    """

    verb: str
    about: About
    body: Obj
    title: str

    @property
    def job(self) -> str:
        """The job that it wrote to, or whose Workload it wrote to; "" if it wrote to something else."""
        return self.about[1] if self.about[0] in JOBS else job_of_workload(self.about)

    def __str__(self) -> str:
        return f"{self.title!r}: {self.verb} {'/'.join(self.about)} {json.dumps(self.body)[:300]}"


@dataclass(frozen=True)
class Step:
    """A change of an object, a write of the client, or both: the change that the write made.

    :param at: seconds since the recording began.
    """

    at: float
    change: Obj | None
    write: Write | None


@dataclass(frozen=True)
class Recording:
    """:param namespace: of the recorded objects.
    :param began: when, in epoch seconds.
    :param setup: objects that an administrator has created before.
    """

    name: str
    namespace: str
    began: float
    setup: tuple[Obj, ...]
    steps: tuple[Step, ...]

    @property
    def jobs(self) -> list[str]:
        """The jobs with a queue that the client has created, in order."""
        created = [step.write for step in self.steps if step.write is not None and step.write.verb == "create"]
        return [write.about[1] for write in created if write.about[0] in JOBS and _has_queue(write.body)]

    def states(self, job: str) -> Iterator[Obj]:
        """The states of a job."""
        for step in self.steps:
            if step.change is not None and (step.change["watch"] in JOBS, about_of(step.change)[1]) == (True, job):
                yield step.change["object"]

    def workloads(self, job: str) -> Iterator[Obj]:
        """The states of a job's Workload."""
        for step in self.steps:
            if step.change is not None and job_of_workload(about_of(step.change)) == job:
                yield step.change["object"]


def names() -> list[str]:
    """The names of all recordings with a queue."""
    return sorted(path.parent.name for path in FOLDER.glob("*/setup.yaml"))


@functools.cache
def recording(name: str) -> Recording:
    """The recording with that name; other folders may lack those that some tests need."""
    folder = (FOLDER if (FOLDER / name).exists() else KEPT) / name
    recorded = table(folder / "scenario.yaml")["recorded"]
    setup = tuple(yaml.safe_load_all((folder / "setup.yaml").read_text())) if (folder / "setup.yaml").exists() else ()
    changes = changes_in(folder / "events.jsonl")
    written = dict(_writes(lines(folder / "http.jsonl"), changes))
    began = max(
        _seconds(change["object"]["metadata"]["creationTimestamp"]) - change["t"]
        for change in changes
        if change["type"] == "ADDED"
    )
    return Recording(name, recorded["namespace"], began, setup, tuple(_steps(changes, written)))


def plural_of(obj: Obj) -> str:
    """The resource of an object of setup.yaml."""
    return PLURALS.get(obj["kind"]) or f"{obj['kind'].lower()}s"


def about_of(change: Obj) -> About:
    return change["watch"], change["object"]["metadata"]["name"]


def job_of_workload(about: About) -> str:
    """The job of a Workload, by its name."""
    return about[1].partition("-")[2].rpartition("-")[0] if about[0] == "workloads" else ""


def version(obj: Obj) -> int:
    return int(obj["metadata"]["resourceVersion"])


def lines(path: Path) -> list[Obj]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def changes_in(path: Path) -> list[Obj]:
    """The changes in a file, in order of their versions. Those of this directory have merge patches of most objects."""
    found = lines(path)
    known: dict[About, Obj] = {}
    for change in found:
        if (patch := change.pop("patch", None)) is not None:
            change["object"] = merged(known[change["watch"], patch["metadata"].pop("name")], patch)
        known[about_of(change)] = change["object"]
    return sorted(found, key=lambda change: version(change["object"]))


def _has_queue(job: Obj) -> bool:
    return "kueue.x-k8s.io/queue-name" in (job["metadata"].get("labels") or {})


def _seconds(stamp: str) -> float:
    return datetime.datetime.fromisoformat(stamp).timestamp()


def _writes(requests: list[Obj], changes: list[Obj]) -> Iterator[tuple[float, tuple[float, Write]]]:
    """The client's writes and their times, each with the version of the change that it made, or one just before the
    next change. Evictions and writes of a status are left out: the changes show what they did.
    """
    for record in requests:
        request, where = record["request"], Where.of(record["request"]["path"].partition("?")[0])
        if request["method"] not in VERBS or record["status"] >= 400 or "dryRun" in request["path"] or where.sub:
            continue
        body = request.get("body") or {}
        about = where.resource, where.name or (body.get("metadata") or {}).get("name", "")
        write = Write(VERBS[request["method"]], about, body, record["name"])
        yield _version_of(record, write, changes), (record["t"], write)


def _version_of(record: Obj, write: Write, changes: list[Obj]) -> float:
    """The version that a write made: from the response, or else from the object's next change, or else by time."""
    answered = (record["body"] or {}).get("metadata", {}).get("resourceVersion")
    if answered:
        return int(answered)
    later = [change for change in changes if change["t"] >= record["t"]]
    for change in (of for of in later if about_of(of) == write.about and write.about[0] != "pods"):
        if change["type"] == "DELETED" or "deletionTimestamp" in change["object"]["metadata"]:
            return version(change["object"])
    return min((version(change["object"]) for change in later), default=version(changes[-1]["object"]) + 1) - 0.5


def _steps(changes: list[Obj], written: dict[float, tuple[float, Write]]) -> Iterator[Step]:
    for change in changes:
        for at in sorted(at for at in written if at < version(change["object"])):  # to objects that aren't watched
            yield Step(written[at][0], None, written.pop(at)[1])
        _, write = written.pop(version(change["object"]), (0.0, None))
        yield Step(change["t"], change, write)
    for at in sorted(written):
        yield Step(written[at][0], None, written[at][1])


def difference(old: Any, new: Any, *, whole: bool = False) -> Any:
    """The merge patch that changes `old` into `new`; {} if they are equal.

    :param whole: remove objects as a whole. Default: only the values in them, for an object that has others, too.
    """
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    removed = {key: value for key, value in old.items() if key not in new}
    found: Obj = {key: None if whole or not isinstance(of, dict) else difference(of, {}) for key, of in removed.items()}
    for key, value in new.items():
        if key not in old:
            found[key] = value
        elif value != old[key]:
            found[key] = difference(old[key], value, whole=whole)
    return found
