"""Tables for `kubectl get`: columns and cells per resource, as in the API server's printers."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, at

NAME_TEXT = (
    "Name must be unique within a namespace. Is required when creating resources, although some resources may allow a "
    "client to request the generation of an appropriate name automatically. Name is primarily intended for creation "
    "idempotence and configuration definition. Cannot be updated. More info: "
    "https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names"
)
META = "meta.k8s.io/v1"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
#: Units of an age that is less than this number of seconds: the unit, and a smaller unit for the rest.
AGES = [
    (120, "s", ""), (600, "m", "s"), (3 * 3600, "m", ""), (8 * 3600, "h", "m"), (48 * 3600, "h", ""),
    (8 * 86400, "d", "h"), (math.inf, "d", ""),
]  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column. `value` is a dotted path or a function. kubectl shows a `wide` column only with `-o wide`."""

    name: str
    value: Callable[[Obj], Any] | str
    type: str = "string"
    wide: bool = False
    format: str = ""
    description: str = ""

    def cell(self, obj: Obj) -> Any:
        """Return the value of this column in the row of an object."""
        return at(obj, self.value, "<none>") if isinstance(self.value, str) else self.value(obj)

    def definition(self) -> Obj:
        """Return the column's definition in a Table. kubectl shows columns of priority 1 only with `-o wide`."""
        return {
            "name": self.name, "type": self.type, "format": self.format,
            "description": self.description, "priority": 1 if self.wide else 0,
        }  # fmt: skip


@dataclass(frozen=True)
class View:
    """The form in which a client requested objects: complete, as rows of a Table, or only the metadata.

    :param form: one of negotiation.FORMS.
    :param whole_rows: include the whole object in each row of a Table, not only its metadata.
    """

    resource: Resource
    form: str = ""
    whole_rows: bool = False

    def one(self, obj: Obj, *, head: bool = True) -> Obj:
        """Return one object in the requested form. Objects of another kind, such as a Status, are not changed.

        :param head: include the column definitions. A watch sends them only once.
        """
        if not self.form or obj["kind"] != self.resource.kind:
            return obj
        if self.form == "Table":
            return self._table([obj], {"resourceVersion": obj["metadata"].get("resourceVersion", "")}, head=head)
        return _metadata_only(obj)

    def all(self, objects: list[Obj], metadata: Obj) -> Obj:
        """Return a list of objects. Only items of custom resources include kind and apiVersion."""
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
        head_row = [c.definition() for c in columns] if head else None
        about = {"kind": "Table", "apiVersion": META, "metadata": metadata}
        return {**about, "columnDefinitions": head_row, "rows": rows}


def _metadata_only(obj: Obj) -> Obj:
    return {"kind": "PartialObjectMetadata", "apiVersion": META, "metadata": obj["metadata"]}


def age(timestamp: str | None) -> str:
    """Return the age of a timestamp in the short form of kubectl: 5s, 3m20s, 2h, 4d."""
    if not timestamp:
        return "<unknown>"
    then = datetime.datetime.fromisoformat(timestamp)
    seconds = max(int((datetime.datetime.now(datetime.UTC) - then).total_seconds()), 0)
    unit, smaller = next((u, s) for limit, u, s in AGES if seconds < limit)
    rest = seconds % SECONDS[unit] // SECONDS[smaller] if smaller else 0
    return f"{seconds // SECONDS[unit]}{unit}" + (f"{rest}{smaller}" if rest else "")


def _pod_status(pod: Obj) -> str:
    """Return the pod status that kubectl prints: the reason of the first container that isn't running, or the phase."""
    if at(pod, "metadata.deletionTimestamp"):
        return "Unknown" if at(pod, "status.reason") == "NodeLost" else "Terminating"
    inits = at(pod, "status.initContainerStatuses", [])
    for index, container in enumerate(inits):
        if at(container, "state.terminated.exitCode") != 0:
            return f"Init:{_reason(container, but='PodInitializing') or f'{index}/{len(inits)}'}"
    reasons = filter(None, map(_reason, at(pod, "status.containerStatuses", [])))
    return next(reasons, "") or str(at(pod, "status.reason") or at(pod, "status.phase", "Unknown"))


def _reason(container: Obj, but: str = "") -> str:
    """Return the reason why a container isn't running, "" if it is running or if the reason is `but`."""
    if ended := at(container, "state.terminated"):
        return str(ended.get("reason") or f"ExitCode:{ended.get('exitCode')}")
    reason = str(at(container, "state.waiting.reason", ""))
    return "" if reason == but else reason


def _pod_ready(pod: Obj) -> str:
    ready = [c for c in at(pod, "status.containerStatuses", []) if c.get("ready")]
    return f"{len(ready)}/{len(at(pod, 'spec.containers', []))}"


def _pod_restarts(pod: Obj) -> str:
    statuses = at(pod, "status.containerStatuses", [])
    count = sum(c.get("restartCount", 0) for c in statuses)
    last = max(filter(None, (at(c, "lastState.terminated.finishedAt") for c in statuses)), default=None)
    return f"{count} ({age(last)} ago)" if count and last else str(count)


def _job_state(job: Obj) -> str | None:
    conditions = at(job, "status.conditions", [])
    return conditions[-1].get("type") if conditions else None


def _node_status(node: Obj) -> str:
    ready = {"type": "Ready", "status": "True"}.items()
    state = "Ready" if any(ready <= c.items() for c in at(node, "status.conditions", [])) else "NotReady"
    return f"{state},SchedulingDisabled" if at(node, "spec.unschedulable") else state


def _ports(service: Obj) -> str:
    return ",".join(f"{p['port']}/{p.get('protocol', 'TCP')}" for p in at(service, "spec.ports", [])) or "<none>"


def _access_modes(obj: Obj) -> str:
    short = {"ReadWriteOnce": "RWO", "ReadOnlyMany": "ROX", "ReadWriteMany": "RWX", "ReadWriteOncePod": "RWOP"}
    return ",".join(short.get(mode, mode) for mode in at(obj, "spec.accessModes", ()))


def _event_object(event: Obj) -> str:
    return f"{at(event, 'involvedObject.kind', '').lower()}/{at(event, 'involvedObject.name', '')}"


NAME = Column("Name", "metadata.name", format="name", description=NAME_TEXT)
AGE = Column("Age", lambda o: age(o["metadata"].get("creationTimestamp")))
JSON_PATH = "Custom resource definition column (in JSONPath format): "
CUSTOM_AGE = Column("Age", AGE.value, "date", description=f"{JSON_PATH}.metadata.creationTimestamp")
STATE = Column("State", _job_state, description=f"{JSON_PATH}.status.conditions[-1:].type")


def _job_status(job: Obj) -> str:
    true = {c["type"] for c in at(job, "status.conditions", []) if c["status"] == "True"}
    if at(job, "metadata.deletionTimestamp"):
        return "Terminating"
    states = ("Complete", "Failed", "Suspended", "FailureTarget", "SuccessCriteriaMet")
    return next((state for state in states if state in true), "Running")


def _job_completions(job: Obj) -> str:
    completions = at(job, "spec.completions")
    done = at(job, "status.succeeded", 0)
    return f"{done}/{completions}" if completions is not None else f"{done}/1 of {at(job, 'spec.parallelism', 1)}"


def _job_duration(job: Obj) -> str:
    start, end = at(job, "status.startTime"), at(job, "status.completionTime")
    if not start or not end:
        return age(start) if start else ""
    spent = datetime.datetime.fromisoformat(end) - datetime.datetime.fromisoformat(start)
    return f"{int(spent.total_seconds())}s"


def _condition_status(name: str) -> Callable[[Obj], str | None]:
    def status(obj: Obj) -> str | None:
        return next((c["status"] for c in at(obj, "status.conditions", []) if c["type"] == name), None)

    return status


def _field(path: str) -> Callable[[Obj], Any]:
    """Return a function for a field whose cell is empty if the field is missing, as for custom resources."""
    return lambda obj: at(obj, path)


#: Columns by resource. Other resources have the columns Name and Age.
COLUMNS: dict[Resource, tuple[Column, ...]] = {
    r.PYTORCHJOB: (NAME, STATE, CUSTOM_AGE),
    r.MPIJOB_V1: (NAME, CUSTOM_AGE, STATE),
    r.MPIJOB_V2BETA1: (NAME, CUSTOM_AGE),
    r.TRAINJOB: (NAME, STATE, CUSTOM_AGE),
    r.JOBSET: (
        NAME, Column("TerminalState", "status.terminalState"), Column("Restarts", "status.restarts"),
        Column("Completed", _condition_status("Completed")), Column("Suspended", "spec.suspend"), CUSTOM_AGE,
    ),
    r.WORKLOAD: (
        NAME, Column("Queue", _field("spec.queueName")), Column("Reserved in", _field("status.admission.clusterQueue")),
        *(Column(name, _condition_status(name)) for name in ("Admitted", "Finished")), CUSTOM_AGE,
    ),
    r.LOCAL_QUEUE: (
        NAME, Column("ClusterQueue", _field("spec.clusterQueue")),
        *(Column(f"{name} Workloads", _field(f"status.{name.lower()}Workloads"), "integer")
          for name in ("Pending", "Admitted")),
    ),
    r.CLUSTER_QUEUE: (
        NAME, Column("Cohort", _field("spec.cohortName")),
        Column("Pending Workloads", _field("status.pendingWorkloads"), "integer"),
    ),
    r.BATCH_JOB: (
        NAME, Column("Status", _job_status), Column("Completions", _job_completions),
        Column("Duration", _job_duration), AGE,
    ),
    r.POD: (
        NAME, Column("Ready", _pod_ready), Column("Status", _pod_status), Column("Restarts", _pod_restarts), AGE,
        Column("IP", "status.podIP", wide=True), Column("Node", "spec.nodeName", wide=True),
    ),
    r.SERVICE: (
        NAME, Column("Type", "spec.type"), Column("Cluster-IP", "spec.clusterIP"),
        Column("External-IP", lambda _: "<none>"), Column("Port(s)", _ports), AGE,
    ),
    r.CLAIM: (
        NAME, Column("Status", "status.phase"), Column("Volume", "spec.volumeName"),
        Column("Capacity", "status.capacity.storage"), Column("Access Modes", _access_modes),
        Column("StorageClass", "spec.storageClassName"), AGE,
    ),
    r.VOLUME: (
        NAME, Column("Capacity", "spec.capacity.storage"), Column("Access Modes", _access_modes),
        Column("Reclaim Policy", "spec.persistentVolumeReclaimPolicy"), Column("Status", "status.phase"),
        Column("Claim", lambda o: f"{at(o, 'spec.claimRef.namespace')}/{at(o, 'spec.claimRef.name')}"), AGE,
    ),
    r.PRIORITY_CLASS: (
        NAME, Column("Value", "value", "integer"), Column("Global-Default", lambda o: bool(o.get("globalDefault"))),
        AGE,
    ),
    r.NAMESPACE: (NAME, Column("Status", "status.phase"), AGE),
    r.NODE: (
        NAME, Column("Status", _node_status), Column("Roles", lambda _: "<none>"), AGE,
        Column("Version", "status.nodeInfo.kubeletVersion"),
    ),
    r.EVENT: (
        Column("Last Seen", lambda o: age(o.get("lastTimestamp") or o.get("eventTime"))), Column("Type", "type"),
        Column("Reason", "reason"), Column("Object", _event_object), Column("Message", "message"),
    ),
}  # fmt: skip
