"""What Kueue's webhooks do to jobs (recordings 70 to 74e). There is no queue controller: nothing admits a job."""

from __future__ import annotations

import json
from typing import Any

from airflow_provider_ktrain.local.objects import resources as r
from airflow_provider_ktrain.local.objects.errors import ApiError
from airflow_provider_ktrain.local.objects.resources import Resource

Obj = dict[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PATCH_MANAGER = "kueue.x-k8s.io/manager"
#: where the jobs of Kueue's integrations have `suspend`
SUSPENDED_BY: dict[Resource, tuple[str, ...]] = {
    r.PYTORCHJOB: ("spec", "runPolicy"), r.MPIJOB_V2BETA1: ("spec", "runPolicy"), r.TRAINJOB: ("spec",),
}  # fmt: skip


def complete(resource: Resource, obj: Obj, old: Obj | None) -> None:
    """Suspend a new job that names a queue, and give each new TrainJob a place for Kueue's own changes of its pods."""
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
    """ApiError 403 where the queue of a job that isn't suspended changes."""
    if resource not in SUSPENDED_BY or old is None or _queue(obj) == _queue(old):
        return
    if not (_suspended(resource, obj) or _suspended(resource, old)):
        field = f"metadata.labels[{QUEUE_LABEL}]"
        why = f"{field}: Invalid value: {json.dumps(_queue(obj))}: field is immutable"
        raise ApiError(403, f'admission webhook "v{resource.singular}.kb.io" denied the request: {why}')


def _queue(obj: Obj) -> str:
    return str((obj["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""))


def _suspended(resource: Resource, obj: Obj) -> bool:
    holder = obj
    for key in SUSPENDED_BY[resource]:
        holder = holder.get(key) or {}
    return bool(holder.get("suspend"))
