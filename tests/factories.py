"""Objects that many tests need, and a wait for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, Owner

T = TypeVar("T")


def replica_pod(
    role: str, index: int | str = 0, *, job: str = "train", meta: Any = (), spec: Any = (), **status: Any
) -> dict[str, Any]:
    """A pod of training-operator, whose uid is its name.

    :param meta: further fields of its metadata, or others in their place.
    :param spec: the same of its spec.
    """
    name = f"{job}-{role.lower()}-{index}"
    labels = {"training.kubeflow.org/replica-type": role.lower(), "training.kubeflow.org/replica-index": str(index)}
    return {
        "metadata": {"name": name, "uid": name, "labels": labels, **dict(meta)},
        "spec": {"containers": [{"name": "pytorch"}], **dict(spec)},
        "status": status,
    }


def owned_job(
    owner: Owner | None = None, condition: str = "Running", *, annotations: Mapping[str, str] | None = None, **meta: Any
) -> dict[str, Any]:
    """A job of a task with one condition, which is true."""
    annotations = {**({OWNER_ANNOTATION: owner.annotation()} if owner else {}), **(annotations or {})}
    return {
        "metadata": {"annotations": annotations, **meta},
        "status": {"conditions": [{"type": condition, "status": "True"}]},
    }


def wait_for(what: str, look: Callable[[], T | None], timeout: float = 240, tick: float = 0.05) -> T:
    """Wait until `look` returns a true value; returns that value."""
    end = time.monotonic() + timeout
    while not (found := look()):
        assert time.monotonic() < end, f"{what}: not within {timeout:.0f} s; last seen: {found!r}"
        time.sleep(tick)
    return found
