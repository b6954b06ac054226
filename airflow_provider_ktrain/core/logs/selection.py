"""Which logs a task follows: of which replicas, and of which of their containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds import Kind

#: "auto", "all", "primary", "none", or replica indexes by role, such as {"Master": [0], "Worker": [0, 1]}.
LogChoice = str | Mapping[str, Sequence[int]]
KEYWORDS = ("auto", "all", "primary", "none")
MAX_REPLICAS_FOR_ALL = 16  #: "auto" means "all" up to this size, else "primary".


def check_choice(choice: LogChoice, kind: Kind) -> None:
    """Raise ManifestError if `choice` is invalid for jobs of this kind."""
    if isinstance(choice, str) and choice in KEYWORDS:
        return
    if not isinstance(choice, Mapping):
        raise ManifestError(f"logs: found {choice!r}, expected one of {', '.join(KEYWORDS)} or indexes by role")
    if unknown := [role for role in choice if not kind.has_role(role)]:
        expected = f"expected {' or '.join(kind.roles)} for a {kind.name}"
        raise ManifestError(f"logs: found the role {unknown[0]!r}, {expected}")
    for role, indexes in choice.items():
        if not isinstance(indexes, Sequence) or not all(isinstance(i, int) and i >= 0 for i in indexes):
            raise ManifestError(f"logs: found {role}: {indexes!r}, expected a list of replica indexes such as [0, 1]")


def chooser(choice: LogChoice, kind: Kind, job: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool]:
    """A predicate that is true for pods whose logs to follow.

    :param job: its replicas decide what "auto" and "primary" mean.
    """
    if choice == "auto":
        choice = "all" if kind.size(job) <= MAX_REPLICAS_FOR_ALL else "primary"
    if choice == "all":
        return lambda pod: True
    if choice == "none":
        return lambda pod: False
    selected = {kind.primary(job): [0]} if isinstance(choice, str) else choice

    def chosen(pod: Mapping[str, Any]) -> bool:
        role, index = kind.role_of(pod)
        return index in selected.get(role, ())

    return chosen


def is_followed(kind: Kind, job: Mapping[str, Any], pod: Mapping[str, Any], container: str) -> bool:
    """Whether a container is the main one of its pod, or an init container. Sidecars are not followed.

    Nor is the operator's own init container, which repeats the same lines while it waits for another replica.
    """
    init = is_init_container(pod, container) and container != kind.behavior.waiting_container
    return init or container == kind.main_container_name(job, pod)


def is_init_container(pod: Mapping[str, Any], container: str) -> bool:
    """Whether the pod's main container starts after this one has ended.

    Kubernetes calls an init container with `restartPolicy: Always` a sidecar: it runs beside the main container.
    """
    return any(
        init.get("name") == container and init.get("restartPolicy") != "Always"
        for init in (pod.get("spec") or {}).get("initContainers") or ()
    )
