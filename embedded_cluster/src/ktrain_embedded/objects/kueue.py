"""The webhooks of Kueue for jobs (recordings 70 to 74e). The cluster has no queue controller and admits no job."""

from __future__ import annotations

import json

from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import denied
from ktrain_embedded.objects.resources import Obj, Resource

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PATCH_MANAGER = "kueue.x-k8s.io/manager"
#: Path of the object that contains `suspend`, by resource that Kueue integrates.
SUSPENDED_BY: dict[Resource, tuple[str, ...]] = {
    r.PYTORCHJOB: ("spec", "runPolicy"), r.MPIJOB_V2BETA1: ("spec", "runPolicy"), r.TRAINJOB: ("spec",),
}  # fmt: skip


def complete(resource: Resource, obj: Obj, old: Obj | None) -> None:
    """Suspend a new job that has a queue label. Add an empty runtime patch of Kueue to each new TrainJob."""
    if resource not in SUSPENDED_BY or old is not None:
        return
    if _queue(obj):
        holder = obj
        for key in SUSPENDED_BY[resource]:
            holder = holder.setdefault(key, {})
        holder["suspend"] = True
    if resource == r.TRAINJOB:
        patches = obj["spec"].setdefault("runtimePatches", [])
        if all(patch.get("manager") != PATCH_MANAGER for patch in patches):
            patches.append({"manager": PATCH_MANAGER, "trainingRuntimeSpec": {"template": {"spec": {}}}})


def validate(resource: Resource, obj: Obj, old: Obj | None) -> None:
    """Raise ApiError 403 if the queue of a job changes while the job isn't suspended."""
    if resource not in SUSPENDED_BY or old is None or _queue(obj) == _queue(old):
        return
    if not (_suspended(resource, obj) or _suspended(resource, old)):
        field = f"metadata.labels[{QUEUE_LABEL}]"
        why = f"{field}: Invalid value: {json.dumps(_queue(obj))}: field is immutable"
        raise denied(f"v{resource.singular}.kb.io", [why])


def _queue(obj: Obj) -> str:
    return str((obj["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""))


def _suspended(resource: Resource, obj: Obj) -> bool:
    holder = obj
    for key in SUSPENDED_BY[resource]:
        holder = holder.get(key) or {}
    return bool(holder.get("suspend"))
