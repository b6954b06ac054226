"""Copies recordings of Kueue to tests/kueue/recordings, without what a replay doesn't need.

python -m tests.kueue.prepare FOLDER...
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.apiserver.server import merged

from .recording import JOBS, KEPT, Obj, about_of, difference, lines

WHOLE = {
    *JOBS, "workloads", "localqueues", "clusterqueues", "cohorts", "admissionchecks", "topologies", "resourceflavors",
    "workloadpriorityclasses",
}  # fmt: skip
OWNERS = ("jobs", "jobsets")  #: Objects between a TrainJob and its pods, of which only the existence is recorded.
META = ("name", "uid", "resourceVersion", "labels", "ownerReferences", "creationTimestamp", "deletionTimestamp")
#: What is kept of an object in a list of the key, and of the specs and statuses of pods.
FIELDS = {
    "containers": ("name", "resources", "restartPolicy"), "initContainers": ("name", "resources", "restartPolicy"),
    "conditions": ("type", "status", "reason", "message", "lastTransitionTime"),
    "containerStatuses": ("name", "state", "lastState", "ready", "restartCount"),
    "initContainerStatuses": ("name", "state", "lastState", "ready", "restartCount"),
}  # fmt: skip
SPEC = ("containers", "initContainers", "nodeName", "restartPolicy", "terminationGracePeriodSeconds")
STATUS = ("phase", "reason", "message", "startTime", "conditions", "containerStatuses", "initContainerStatuses")


def copy(folder: Path) -> None:
    target = KEPT / folder.name
    target.mkdir(parents=True, exist_ok=True)
    for name in ("scenario.yaml", "setup.yaml"):
        shutil.copy(folder / name, target / name)
    requests = [_short(r) for r in lines(folder / "http.jsonl") if r["request"]["method"] != "GET"]
    _store(target / "events.jsonl", patches(kept(lines(folder / "events.jsonl"))))
    _store(target / "http.jsonl", requests)


def kept(changes: list[Obj]) -> list[Obj]:
    """The changes that a replay needs: those of Kueue's objects and of jobs, Kueue's events, and short ones of pods."""
    found: list[Obj] = []
    pods: dict[str, Obj] = {}  # the last state of each pod, without its version
    for change in changes:
        plural, obj = change["watch"], change["object"]
        obj["metadata"].pop("managedFields", None)
        if plural in WHOLE or (plural == "events" and change["type"] == "ADDED" and _is_of_kueue(obj)):
            found.append(change)
        elif plural in OWNERS and change["type"] != "MODIFIED":
            found.append({**change, "object": {"metadata": _only(obj["metadata"], META)}})
        elif plural == "pods":
            short = {"metadata": _only(obj["metadata"], META), "spec": _only(obj["spec"], SPEC)}
            short["status"] = _only(obj["status"], STATUS)
            state = {**short, "metadata": {k: v for k, v in short["metadata"].items() if k != "resourceVersion"}}
            if change["type"] == "DELETED" or pods.get(obj["metadata"]["uid"]) != state:
                found.append({**change, "object": short})
            pods[obj["metadata"]["uid"]] = state
    return found


def patches(changes: list[Obj]) -> Iterator[Obj]:
    """The changes, with merge patches in place of objects that were known before."""
    known: dict[tuple[str, str], Obj] = {}
    for change in changes:
        before, obj = known.get(about_of(change)), change["object"]
        patch = difference(before, obj, whole=True)
        if change["type"] != "ADDED" and before is not None and merged(before, patch) == obj:
            head = {key: value for key, value in change.items() if key != "object"}
            yield {**head, "patch": {**patch, "metadata": {"name": obj["metadata"]["name"], **patch["metadata"]}}}
        else:
            yield change
        known[about_of(change)] = obj


def _is_of_kueue(event: Obj) -> bool:
    return "kueue" in (event.get("reportingComponent") or event.get("source", {}).get("component", ""))


def _only(obj: Obj, keys: tuple[str, ...]) -> Obj:
    return {
        key: [_only(of, FIELDS[key]) for of in obj[key]] if key in FIELDS else obj[key] for key in keys if key in obj
    }


def _short(record: Obj) -> Obj:
    """A request and the relevant part of its response: its status, the written version, or the rejection's reason."""
    about = record["body"] if isinstance(record["body"], dict) else {}
    body = {"metadata": _only(about.get("metadata") or {}, ("name", "resourceVersion", "uid"))}
    request = {key: value for key, value in record["request"].items() if key != "headers"}
    return {
        **_only(record, ("t", "name", "status")),
        "request": request,
        "body": body | _only(about, ("message", "reason")),
    }


def _store(path: Path, records: Iterable[Any]) -> None:
    path.write_text("".join(f"{json.dumps(one, separators=(',', ':'), ensure_ascii=False)}\n" for one in records))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        copy(Path(argument))
