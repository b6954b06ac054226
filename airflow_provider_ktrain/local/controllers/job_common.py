"""What the job controllers share: conditions, times, and pods seen through their status."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from airflow_provider_ktrain.local.store import Obj

PREFIX = "training.kubeflow.org/"
JOB_NAME, OPERATOR_NAME = f"{PREFIX}job-name", f"{PREFIX}operator-name"
JOB_ROLE, REPLICA_TYPE, REPLICA_INDEX = f"{PREFIX}job-role", f"{PREFIX}replica-type", f"{PREFIX}replica-index"

EXCLUSIVE = {"Running": "Restarting", "Restarting": "Running"}  # one removes the other


def timestamp(seconds: float) -> str:
    """RFC 3339 in whole seconds, as metav1.Time."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(time: str) -> float:
    """Seconds since the epoch of an RFC 3339 time."""
    return datetime.datetime.fromisoformat(time).timestamp()


def condition(status: Obj, type_: str) -> Obj | None:
    return next((c for c in status.get("conditions") or () if c["type"] == type_), None)


def has(status: Obj, *types: str) -> bool:
    """Whether one of the conditions is True."""
    return any(c["type"] in types and c["status"] == "True" for c in status.get("conditions") or ())


def is_finished(status: Obj) -> bool:
    return has(status, "Succeeded", "Failed")


def set_condition(
    status: Obj, type_: str, value: str, reason: str, message: str, now: float, *, ends: Iterable[str] = ("Running",)
) -> bool:
    """Set a condition as both Kubeflow operators do; False where status and reason are as they were.

    A changed condition moves to the end. Running and Restarting remove each other.

    :param ends: conditions that Succeeded and Failed turn False where they stand (mpi-operator: Failed too).
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


def phase(pod: Obj) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def is_terminating(obj: Obj) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def add_env(container: Obj, variables: Iterable[tuple[str, Any]]) -> None:
    """Append to the container's environment (the last duplicate wins)."""
    added = [{"name": name, **({"value": str(value)} if value != "" else {})} for name, value in variables]
    container["env"] = [*(container.get("env") or ()), *added]
