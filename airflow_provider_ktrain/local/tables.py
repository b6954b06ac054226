"""The Table that `kubectl get` prints: columns and cells per resource, as the API server's printers make them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj

NAME_TEXT = (
    "Name must be unique within a namespace. Is required when creating resources, although some resources may allow a "
    "client to request the generation of an appropriate name automatically. Name is primarily intended for creation "
    "idempotence and configuration definition. Cannot be updated. More info: "
    "https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names"
)
META = "meta.k8s.io/v1"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
#: ages below so many seconds are told in this unit, and in a smaller one
AGES = [
    (120, "s", ""), (600, "m", "s"), (3 * 3600, "m", ""), (8 * 3600, "h", "m"), (48 * 3600, "h", ""),
    (8 * 86400, "d", "h"), (math.inf, "d", ""),
]  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One column: `wide` ones show with `-o wide` only."""

    name: str
    cell: Callable[[Obj], Any]
    type: str = "string"
    wide: bool = False
    format: str = ""
    description: str = ""

    def definition(self) -> Obj:
        return {
            "name": self.name, "type": self.type, "format": self.format,
            "description": self.description, "priority": 1 if self.wide else 0,
        }  # fmt: skip


@dataclass(frozen=True)
class View:
    """How a client asked to be shown objects of a resource: whole, as rows of a Table, or their metadata alone.

    :param form: of negotiation.FORMS.
    :param whole_rows: rows of a Table bring the whole object, not only its metadata.
    """

    resource: Resource
    form: str = ""
    whole_rows: bool = False

    def one(self, obj: Obj, *, head: bool = True) -> Obj:
        """One object; what is no object of the resource, such as a Status, as it is.

        :param head: with the definitions of columns, as a watch sends them once.
        """
        if not self.form or obj["kind"] != self.resource.kind:
            return obj
        if self.form == "Table":
            return self._table([obj], {"resourceVersion": obj["metadata"].get("resourceVersion", "")}, head=head)
        return _metadata_only(obj)

    def all(self, objects: list[Obj], metadata: Obj) -> Obj:
        """A list of objects. Only items of custom resources say their kind."""
        if self.form == "Table":
            return self._table(objects, metadata)
        if self.form:
            items = [_metadata_only(o) for o in objects]
            return {"kind": "PartialObjectMetadataList", "apiVersion": META, "metadata": metadata, "items": items}
        head = {
            "kind": f"{self.resource.kind}List",
            "apiVersion": self.resource.api_version,
            "metadata": {**({"continue": ""} if self.resource.custom else {}), **metadata},
        }
        if self.resource.custom:
            return {**head, "items": objects}
        return {**head, "items": [{k: v for k, v in o.items() if k not in ("kind", "apiVersion")} for o in objects]}

    def _table(self, objects: list[Obj], metadata: Obj, *, head: bool = True) -> Obj:
        columns = COLUMNS.get(self.resource, (NAME, AGE))
        rows = [
            {"cells": [c.cell(o) for c in columns], "object": o if self.whole_rows else _metadata_only(o)}
            for o in objects
        ]
        definitions = [c.definition() for c in columns] if head else None
        return {
            "kind": "Table",
            "apiVersion": META,
            "metadata": metadata,
            "columnDefinitions": definitions,
            "rows": rows,
        }


def _metadata_only(obj: Obj) -> Obj:
    return {"kind": "PartialObjectMetadata", "apiVersion": META, "metadata": obj["metadata"]}


def age(timestamp: str | None) -> str:
    """How long ago, in the short form of kubectl: 5s, 3m20s, 2h, 4d."""
    if not timestamp:
        return "<unknown>"
    then = datetime.datetime.fromisoformat(timestamp)
    seconds = max(int((datetime.datetime.now(datetime.UTC) - then).total_seconds()), 0)
    unit, smaller = next((u, s) for limit, u, s in AGES if seconds < limit)
    rest = seconds % SECONDS[unit] // SECONDS[smaller] if smaller else 0
    return f"{seconds // SECONDS[unit]}{unit}" + (f"{rest}{smaller}" if rest else "")


def at(path: str, default: Any = None) -> Callable[[Obj], Any]:
    """A cell that shows the value at a dotted path."""

    def cell(obj: Obj) -> Any:
        value: Any = obj
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    return cell


def _pod_status(pod: Obj) -> str:
    """Pod status as kubectl words it: the reason of the container that keeps the pod from running well."""
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    inits = status.get("initContainerStatuses") or []
    for index, container in enumerate(inits):
        state = container.get("state") or {}
        if (state.get("terminated") or {}).get("exitCode") != 0:
            return f"Init:{_reason(state, but='PodInitializing') or f'{index}/{len(inits)}'}"
    reasons = (_reason(c.get("state") or {}) for c in status.get("containerStatuses") or ())
    return str(next(filter(None, reasons), "") or status.get("reason") or status.get("phase") or "Unknown")


def _reason(state: Obj, but: str = "") -> str:
    """Why a container in this state does not run, "" where it does or where it is for the reason `but`."""
    ended, reason = state.get("terminated"), (state.get("waiting") or {}).get("reason") or ""
    if ended:
        return str(ended.get("reason") or f"ExitCode:{ended.get('exitCode')}")
    return "" if reason == but else str(reason)


def _pod_ready(pod: Obj) -> str:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return f"{sum(bool(c.get('ready')) for c in statuses)}/{len(pod['spec'].get('containers') or ())}"


def _pod_restarts(pod: Obj) -> str:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    count = sum(c.get("restartCount", 0) for c in statuses)
    ends = [((c.get("lastState") or {}).get("terminated") or {}).get("finishedAt") for c in statuses]
    last = max(filter(None, ends), default=None)
    return f"{count} ({age(last)} ago)" if count and last else str(count)


def _job_state(job: Obj) -> str | None:
    conditions = (job.get("status") or {}).get("conditions") or []
    return conditions[-1].get("type") if conditions else None


def _node_status(node: Obj) -> str:
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    state = "Ready" if ready else "NotReady"
    return f"{state},SchedulingDisabled" if (node.get("spec") or {}).get("unschedulable") else state


def _event_object(event: Obj) -> str:
    involved = event.get("involvedObject") or {}
    return f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"


NAME = Column("Name", at("metadata.name"), format="name", description=NAME_TEXT)
AGE = Column("Age", lambda o: age(o["metadata"].get("creationTimestamp")))
JSON_PATH = "Custom resource definition column (in JSONPath format): "
CUSTOM_AGE = Column("Age", AGE.cell, "date", description=f"{JSON_PATH}.metadata.creationTimestamp")
STATE = Column("State", _job_state, description=f"{JSON_PATH}.status.conditions[-1:].type")
#: columns by resource; the others show their name and age
COLUMNS: dict[Resource, tuple[Column, ...]] = {
    r.PYTORCHJOB: (NAME, STATE, CUSTOM_AGE),
    r.MPIJOB_V1: (NAME, CUSTOM_AGE, STATE),
    r.MPIJOB_V2BETA1: (NAME, CUSTOM_AGE),
    r.POD: (
        NAME, Column("Ready", _pod_ready), Column("Status", _pod_status), Column("Restarts", _pod_restarts), AGE,
        Column("IP", at("status.podIP", "<none>"), wide=True), Column("Node", at("spec.nodeName", "<none>"), wide=True),
    ),
    r.NAMESPACE: (NAME, Column("Status", at("status.phase")), AGE),
    r.NODE: (
        NAME, Column("Status", _node_status), Column("Roles", lambda _: "<none>"), AGE,
        Column("Version", at("status.nodeInfo.kubeletVersion")),
    ),
    r.EVENT: (
        Column("Last Seen", lambda o: age(o.get("lastTimestamp") or o.get("eventTime"))), Column("Type", at("type")),
        Column("Reason", at("reason")), Column("Object", _event_object), Column("Message", at("message", "")),
    ),
}  # fmt: skip
