"""Functions that controllers share: owners, conditions, times, and the status of pods."""

from __future__ import annotations

import copy
import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ktrain_embedded.objects.pods import has_ended
from ktrain_embedded.objects.store import Obj

PREFIX = "training.kubeflow.org/"
JOB_NAME, OPERATOR_NAME = f"{PREFIX}job-name", f"{PREFIX}operator-name"
JOB_ROLE, REPLICA_TYPE, REPLICA_INDEX = f"{PREFIX}job-role", f"{PREFIX}replica-type", f"{PREFIX}replica-index"

EXCLUSIVE = {"Running": "Restarting", "Restarting": "Running"}  # each removes the other
COUNT_FIELD_OF_PHASE = {
    "Running": "active",
    "Succeeded": "succeeded",
    "Failed": "failed",
}  # field of replicaStatuses by phase


def controller_of(obj: Obj) -> Obj | None:
    """The owner reference with `controller: true`, or None."""
    return next((r for r in obj["metadata"].get("ownerReferences") or () if r.get("controller")), None)


def is_controlled_by(obj: Obj, owner: Obj) -> bool:
    """Whether `owner` is the controller of an object. Compares uids."""
    reference = controller_of(obj)
    return reference is not None and reference["uid"] == owner["metadata"]["uid"]


def owner_reference(owner: Obj) -> Obj:
    """A reference that makes `owner` the controller, like apimachinery's NewControllerRef."""
    return {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip


def child(owner: Obj, name: str, obj: Obj) -> Obj:
    """The object with this name in the namespace of `owner`, and with `owner` as its controller."""
    ours = {
        "name": name, "namespace": owner["metadata"]["namespace"], "ownerReferences": [owner_reference(owner)],
    }  # fmt: skip
    return {**obj, "metadata": {**obj.get("metadata", {}), **ours}}


def timestamp(seconds: float) -> str:
    """Format a time as metav1.Time: RFC 3339 in whole seconds."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(time: str) -> float:
    """Convert an RFC 3339 time to seconds since the epoch."""
    return datetime.datetime.fromisoformat(time).timestamp()


def condition(status: Obj, type_: str) -> Obj | None:
    """The condition of this type with any status, or None if it doesn't exist."""
    return next((c for c in status.get("conditions") or () if c["type"] == type_), None)


def has(status: Obj, *types: str) -> bool:
    """Whether one of the conditions is True."""
    return any(c["type"] in types and c["status"] == "True" for c in status.get("conditions") or ())


def is_finished(status: Obj) -> bool:
    """Whether a training job has succeeded or failed."""
    return has(status, "Succeeded", "Failed")


def set_condition(
    status: Obj, type_: str, value: str, reason: str, message: str, now: float, *, ends: Iterable[str] = ("Running",)
) -> bool:
    """Set a condition as both Kubeflow operators do. Returns False if its status and reason didn't change.

    A changed condition moves to the end. Running and Restarting remove each other.

    :param ends: conditions that Succeeded and Failed set to False without moving them (mpi-operator: also Failed).
    """
    old = condition(status, type_)
    if old and (old["status"], old["reason"]) == (value, reason):
        return False
    at = timestamp(now)
    since = old["lastTransitionTime"] if old and old["status"] == value else at
    others = [
        {**c, "status": "False"} if type_ in ("Succeeded", "Failed") and c["type"] in ends else c
        for c in status.get("conditions") or ()
        if c["type"] not in (type_, EXCLUSIVE.get(type_))
    ]
    new = {
        "type": type_, "status": value, "reason": reason, "message": message,
        "lastUpdateTime": at, "lastTransitionTime": since,
    }  # fmt: skip
    status["conditions"] = [*others, new]
    return True


def set_status_condition(status: Obj, type_: str, value: str, reason: str, message: str, now: float) -> bool:
    """Set a condition without moving it, like apimachinery's meta.SetStatusCondition. False if nothing changed."""
    old = condition(status, type_)
    same = old is not None and old["status"] == value
    new = {
        "type": type_, "status": value, "reason": reason, "message": message,
        "lastTransitionTime": old["lastTransitionTime"] if old is not None and same else timestamp(now),
    }  # fmt: skip
    conditions = status.get("conditions") or []
    status["conditions"] = [new if x is old else x for x in conditions] if old else [*conditions, new]
    return old != new


def phase(pod: Obj) -> str:
    """The phase of a pod; Pending until the kubelet has reported one."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def is_terminating(obj: Obj) -> bool:
    """Whether the object is being deleted."""
    return "deletionTimestamp" in obj["metadata"]


def is_active(pod: Obj) -> bool:
    """Whether a pod has not ended and isn't being deleted. The Job controller counts these pods as active."""
    return not has_ended(pod) and not is_terminating(pod)


def tally(pods: Iterable[Obj], deleted: str = "active") -> dict[str, int]:
    """Count the active, succeeded and failed pods.

    :param deleted: the field that counts running pods that are being deleted.
    """
    counts: Counter[str] = Counter()
    for pod in pods:
        if what := COUNT_FIELD_OF_PHASE.get(phase(pod)):
            counts[deleted if what == "active" and is_terminating(pod) else what] += 1
    return dict(counts)


def restarts(pods: Iterable[Obj]) -> int:
    """The number of container restarts of the pods."""
    kinds = ("initContainerStatuses", "containerStatuses")
    return sum(x.get("restartCount", 0) for pod in pods for kind in kinds for x in pod["status"].get(kind) or ())


def default_replicas(spec: Obj, field: str, defaults: dict[str, tuple[int, str]]) -> None:
    """Set the defaults of a job's cleanPodPolicy, and of replicas and restartPolicy of each replica type."""
    policy = spec["runPolicy"] = spec.get("runPolicy") or {}
    # in training-operator's MPIJob, the policy can also be a field of spec
    policy["cleanPodPolicy"] = policy.get("cleanPodPolicy") or spec.get("cleanPodPolicy") or "None"
    for type_, (replicas, restart_policy) in defaults.items():
        replica = (spec.get(field) or {}).get(type_)
        if replica is not None:
            replica["replicas"] = replicas if replica.get("replicas") is None else replica["replicas"]
            replica["restartPolicy"] = replica.get("restartPolicy") or restart_policy


def pod_template(template: Obj, labels: dict[str, str]) -> Obj:
    """Metadata and spec of a pod from a template, with additional labels."""
    meta = template.get("metadata") or {}
    annotations = {"annotations": meta["annotations"]} if meta.get("annotations") else {}
    made = {"labels": {**(meta.get("labels") or {}), **labels}, **annotations}
    return {"metadata": made, "spec": copy.deepcopy(template["spec"])}


def append(spec: Obj, field: str, *values: Any) -> None:
    """Append to a list of an object. Creates the list if it doesn't exist."""
    spec[field] = [*(spec.get(field) or ()), *values]


def add_env(container: Obj, variables: Mapping[str, Any]) -> None:
    """Append variables to the container's environment. The last duplicate wins."""
    append(container, "env", *({"name": k, **({"value": str(v)} if v != "" else {})} for k, v in variables.items()))
