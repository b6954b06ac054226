"""The Table that `kubectl get` prints: columns and cells per resource, as the API server's printers make them."""

from __future__ import annotations

import datetime
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


@dataclass(frozen=True)
class Column:
    """One column: `wide` ones show with `-o wide` only."""

    name: str
    cell: Callable[[Obj], Any]
    type: str = "string"
    wide: bool = False
    format: str = ""
    description: str = ""


def table(
    resource: Resource, objects: list[Obj], metadata: Obj, *, head: bool = True, include: str = "Metadata"
) -> Obj:
    """Objects as rows. `head`: with column definitions, as a watch sends once. `include`: Metadata, Object or None."""
    columns = COLUMNS.get(resource, (NAME, AGE))
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [_definition(c) for c in columns] if head else None,
        "rows": [{"cells": [c.cell(o) for c in columns], "object": _row_object(o, include)} for o in objects],
    }


def partial(obj: Obj) -> Obj:
    """The object's metadata alone."""
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def _definition(column: Column) -> Obj:
    return {
        "name": column.name, "type": column.type, "format": column.format,
        "description": column.description, "priority": 1 if column.wide else 0,
    }  # fmt: skip


def _row_object(obj: Obj, include: str) -> Obj | None:
    return {"Object": obj, "None": None}.get(include, partial(obj))


def age(timestamp: str | None) -> str:
    """How long ago, in the short form of kubectl: 5s, 3m20s, 2h, 4d."""
    if not timestamp:
        return "<unknown>"
    then = datetime.datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    seconds = max(int((datetime.datetime.now(datetime.UTC) - then).total_seconds()), 0)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    return f"{days}d" if days < 730 else f"{days // 365}y"


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
    reason = status.get("reason") or status.get("phase") or "Unknown"
    initializing = False
    inits = status.get("initContainerStatuses") or []
    for index, container in enumerate(inits):
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), state.get("waiting")
        if ended and ended.get("exitCode") == 0:
            continue
        if ended:
            reason = f"Init:{ended.get('reason') or 'ExitCode:' + str(ended.get('exitCode'))}"
        elif waiting and waiting.get("reason") not in (None, "PodInitializing"):
            reason = f"Init:{waiting['reason']}"
        else:
            reason = f"Init:{index}/{len(pod['spec'].get('initContainers') or inits)}"
        initializing = True
        break
    if not initializing:
        for container in reversed(status.get("containerStatuses") or []):
            state = container.get("state") or {}
            ended, waiting = state.get("terminated"), state.get("waiting")
            if waiting and waiting.get("reason"):
                reason = waiting["reason"]
            elif ended:
                reason = ended.get("reason") or f"ExitCode:{ended.get('exitCode')}"
    if pod["metadata"].get("deletionTimestamp"):
        reason = "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return str(reason)


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


def _roles(node: Obj) -> str:
    prefix = "node-role.kubernetes.io/"
    roles = [k.removeprefix(prefix) for k in node["metadata"].get("labels") or {} if k.startswith(prefix)]
    return ",".join(sorted(roles)) or "<none>"


def _ports(service: Obj) -> str:
    ports = (service.get("spec") or {}).get("ports") or []
    return ",".join(f"{p.get('port')}/{p.get('protocol', 'TCP')}" for p in ports) or "<none>"


def _event_object(event: Obj) -> str:
    involved = event.get("involvedObject") or {}
    return f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"


def _batch_status(job: Obj) -> str:
    done = {c["type"] for c in (job.get("status") or {}).get("conditions") or () if c.get("status") == "True"}
    return next((s for s in ("Complete", "Failed", "Suspended") if s in done), "Running")


NAME = Column("Name", at("metadata.name"), format="name", description=NAME_TEXT)
AGE = Column("Age", lambda o: age(o["metadata"].get("creationTimestamp")))
CUSTOM_AGE = Column(
    "Age",
    AGE.cell,
    "date",
    description="Custom resource definition column (in JSONPath format): .metadata.creationTimestamp",
)
STATE = Column(
    "State",
    _job_state,
    description="Custom resource definition column (in JSONPath format): .status.conditions[-1:].type",
)
COLUMNS: dict[Resource, tuple[Column, ...]] = {
    r.PYTORCHJOB: (NAME, STATE, CUSTOM_AGE),
    r.MPIJOB_V1: (NAME, CUSTOM_AGE, STATE),
    r.MPIJOB_V2BETA1: (NAME, CUSTOM_AGE),
    r.POD: (
        NAME, Column("Ready", _pod_ready), Column("Status", _pod_status), Column("Restarts", _pod_restarts), AGE,
        Column("IP", at("status.podIP", "<none>"), wide=True), Column("Node", at("spec.nodeName", "<none>"), wide=True),
        Column("Nominated Node", at("status.nominatedNodeName", "<none>"), wide=True),
        Column("Readiness Gates", lambda o: "<none>", wide=True),
    ),
    r.SERVICE: (
        NAME, Column("Type", at("spec.type")), Column("Cluster-IP", at("spec.clusterIP", "<none>")),
        Column("External-IP", lambda o: "<none>"), Column("Port(s)", _ports), AGE,
        Column("Selector", lambda o: _pairs((o.get("spec") or {}).get("selector")), wide=True),
    ),
    r.CONFIG_MAP: (NAME, Column("Data", lambda o: str(len(o.get("data") or {}) + len(o.get("binaryData") or {}))), AGE),
    r.SECRET: (NAME, Column("Type", at("type")), Column("Data", lambda o: str(len(o.get("data") or {}))), AGE),
    r.NAMESPACE: (NAME, Column("Status", at("status.phase")), AGE),
    r.NODE: (
        NAME, Column("Status", _node_status), Column("Roles", _roles), AGE,
        Column("Version", at("status.nodeInfo.kubeletVersion")),
    ),
    r.EVENT: (
        Column("Last Seen", lambda o: age(o.get("lastTimestamp") or o.get("eventTime"))), Column("Type", at("type")),
        Column("Reason", at("reason")), Column("Object", _event_object), Column("Message", at("message", "")),
    ),
    r.BATCH_JOB: (
        NAME, Column("Status", _batch_status),
        Column("Completions", lambda o: f"{at('status.succeeded', 0)(o)}/{at('spec.completions', 1)(o)}"), AGE,
    ),
    r.CRD: (NAME, Column("Created At", at("metadata.creationTimestamp"), "date")),
    r.ROLE: (NAME, Column("Created At", at("metadata.creationTimestamp"), "date")),
    r.CLUSTER_ROLE: (NAME, Column("Created At", at("metadata.creationTimestamp"), "date")),
}  # fmt: skip


def _pairs(labels: dict[str, str] | None) -> str:
    return ",".join(f"{k}={v}" for k, v in sorted((labels or {}).items())) or "<none>"
