"""How pods of jobs ended that succeeded in recordings 100 to 113 of a real cluster: see scripts/recorded_ends.py."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.state.pods.pod_history import PodHistory
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recordings" / "ends.json").read_text())
NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
Object = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A change of the job, or of a pod."""

    obj: Object
    is_pod: bool
    deleted: bool = False


def changes_of(name: str, skew: int = 0) -> list[Change]:
    """The changes of a recording in order.

    :param skew: seconds by which the clocks of the nodes are ahead. Default: 0.
    """
    recorded = RECORDED[name]
    job = {"kind": recorded["kind"], "spec": _with_containers(recorded), "metadata": recorded["metadata"]}
    found = [Change({**job, "status": {}}, False)]
    for version, uid, *row in recorded["changes"]:
        if uid:
            found.append(Change(_pod(uid, recorded["pods"][uid], version, row, skew), True, row[0]))
        else:
            conditions = [
                {"type": kind, "status": "True", "lastTransitionTime": since, "message": message}
                for kind, since, message in row
            ]
            found.append(Change({**job, "status": {"conditions": conditions}}, False))
    return found


def _with_containers(recorded: Object) -> Object:
    spec = copy.deepcopy(recorded["spec"])
    names = next(iter(recorded["pods"].values()))["containers"]
    for field, roles in spec.items():
        for role in roles.values() if field.endswith("ReplicaSpecs") else ():
            role["template"] = {"spec": {"containers": [{"name": name} for name in names]}}
    return spec


def _pod(uid: str, of: Object, version: int, row: list[Any], skew: int) -> Object:
    _, phase, deletion, grace, generation, observed, disruptions, states = row
    meta = {
        "name": of["name"], "uid": uid, "labels": of["labels"], "creationTimestamp": of["creationTimestamp"],
        "resourceVersion": str(version), "generation": generation, "deletionTimestamp": deletion,
        "deletionGracePeriodSeconds": grace,
    }  # fmt: skip
    conditions = [
        {"type": "DisruptionTarget", "status": status, "reason": reason, "lastTransitionTime": at}
        for status, reason, at in disruptions
    ]
    containers = [{"name": name, "state": _state(state, skew)} for name, state in states.items()]
    return {
        "metadata": {name: value for name, value in meta.items() if value is not None},
        "spec": {
            "nodeName": "node-1", "containers": [{"name": name} for name in of["containers"]],
            "terminationGracePeriodSeconds": of["grace"],
        },
        "status": {
            "phase": phase, "observedGeneration": observed, "conditions": conditions, "containerStatuses": containers,
        },
    }  # fmt: skip


def _state(state: list[Any], skew: int) -> Object:
    name, *end = state
    if not end:
        return {name: {}}
    code, reason, finished = end
    at = parse_timestamp(finished)
    shown = f"{at + timedelta(seconds=skew):%Y-%m-%dT%H:%M:%SZ}" if at else finished
    return {name: {"exitCode": code, "reason": reason, "finishedAt": shown}}


class Process:
    """What a process knows of a recorded job.

    :param handed_over: what the process before has handed over. Default: nothing.
    """

    def __init__(self, job: Object, handed_over: Object | None = None) -> None:
        self.job = job
        self.kind: Kind = kind_of(job["kind"])
        self.pods = PodHistory(self.kind, handed_over)

    def see(self, change: Change) -> None:
        if not change.is_pod:
            self.job = change.obj
        elif change.deleted:
            self.pods.mark_deleted(change.obj)
        else:
            self.pods.update({change.obj["metadata"]["uid"]: change.obj}, (), NOW)

    def next(self) -> Process:
        """The process to which this one hands the job over, and which lists the pods that exist."""
        taken = Process(self.job, json.loads(json.dumps(self.pods.handover(self.job, NOW))))
        taken.pods.update({pod["metadata"]["uid"]: pod for pod in self.pods.live}, (), NOW)
        return taken

    @property
    def succeeded(self) -> bool:
        return phase_of(self.job) is Phase.SUCCEEDED

    @property
    def why_incomplete(self) -> list[str]:
        return [one.text for one in self.pods.stopped(self.job)]


def following(changes: Iterable[Change]) -> Iterator[Process]:
    """One process that sees all changes, after each of them."""
    process: Process | None = None
    for change in changes:
        process = process or Process(change.obj)
        process.see(change)
        yield process
