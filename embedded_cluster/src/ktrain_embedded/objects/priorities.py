"""PriorityClasses: the built-in ones, and the admission of pods that name one."""

from __future__ import annotations

from collections.abc import Sequence

from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.resources import Obj

SYSTEM: tuple[Obj, ...] = tuple(
    {
        "metadata": {"name": f"system-{name}-critical"},
        "value": value,
        "description": f"Used for system critical pods that must {what}.",
    }
    for name, value, what in (
        ("cluster", 2_000_000_000, "run in the cluster, but can be moved to another node if necessary"),
        ("node", 2_000_001_000, "not be moved from their current node"),
    )
)


def admit(pod: Obj, classes: Sequence[Obj]) -> None:
    """Set priority and preemptionPolicy of a new pod from its PriorityClass, or from the default class.

    :param pod: the pod; it is changed.
    :param classes: all PriorityClasses.
    :raises ApiError: 403 if the class doesn't exist, or if the pod sets another priority than its class.
    """
    spec, name = pod["spec"], pod["spec"].get("priorityClassName")
    if name:
        found = next((c for c in classes if c["metadata"]["name"] == name), None)
        if found is None:
            raise _forbidden(pod, f"no PriorityClass with name {name} was found")
    else:
        defaults = [c for c in classes if c.get("globalDefault")]
        found = min(defaults, key=lambda c: int(c["value"]), default=None)
        if found is None:
            return
    value = int(found["value"])
    if spec.get("priority") not in (None, value):
        raise _forbidden(
            pod,
            f"the integer value of priority ({spec['priority']}) must not be provided in pod spec; priority admission "
            f"controller computed {value} from the given PriorityClass name",
        )
    policy = found.get("preemptionPolicy") or "PreemptLowerPriority"
    spec |= {"priorityClassName": found["metadata"]["name"], "priority": value, "preemptionPolicy": policy}


def _forbidden(pod: Obj, why: str) -> ApiError:
    name = pod["metadata"]["name"]
    return ApiError(403, f'pods "{name}" is forbidden: {why}', details={"name": name, "kind": "pods"})
