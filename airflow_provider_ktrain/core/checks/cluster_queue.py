"""Whether a ClusterQueue of Kueue can ever admit a job, by its requests and the quotas. The engine reads the queue.

Proof is needed for an error: a job that borrows may get what the cohort has, whose size isn't known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from airflow_provider_ktrain.core.checks.job import Field
from airflow_provider_ktrain.core.checks.problem import ERROR, WARNING, Problem
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.state.nodes import expression_matches
from airflow_provider_ktrain.core.state.quantity import parse_quantity

Object = Mapping[str, Any]
Amounts = dict[str, Decimal]


def judge_cluster_queue(
    at: Field, name: str, queue: Object, manifest: Object, namespace_labels: Mapping[str, str]
) -> Iterator[Problem]:
    """The problems that a job has with its ClusterQueue.

    :param manifest: of the job. What only its runtime requests is not counted.
    """
    spec = queue.get("spec") or {}
    yield from stopped(at, f"ClusterQueue {name}", queue)
    if not _selects(spec.get("namespaceSelector"), namespace_labels):
        message = f"ClusterQueue {name} admits no jobs of this namespace (namespaceSelector)"
        hint = "use another queue, or ask an administrator to label the namespace"
        yield Problem(ERROR, "queue", at.path, message, at.text, "a queue for this namespace", hint)
    yield from _quota(at, name, spec, requests_of(manifest))


def stopped(at: Field, title: str, queue: Object) -> Iterator[Problem]:
    """A LocalQueue or ClusterQueue is stopped."""
    policy = (queue.get("spec") or {}).get("stopPolicy") or "None"
    if policy != "None":
        message = f"{title} is stopped (stopPolicy {policy}): the job waits until it is resumed"
        hint = "resume the queue, or use another one"
        yield Problem(WARNING, "queue", at.path, message, at.text, "stopPolicy None", hint)


def requests_of(manifest: Object) -> dict[str, Amounts]:
    """What all pods of a role request together, by role. They need one flavor for all resources of a resource group."""
    kind = kind_of(manifest.get("kind"))
    found = {}
    for role, replica in kind.replicas(manifest).items():
        pod = (replica.get("template") or {}).get("spec") or {}
        found[role] = {resource: amount * kind.count(manifest, role) for resource, amount in _of_pod(pod).items()}
    return found


def _of_pod(pod: Object) -> Amounts:
    """What one pod requests: its containers together, or the largest init container if that is more."""
    total: Amounts = {}
    for container in pod.get("containers") or ():
        for resource, amount in _of_container(container).items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    for container in pod.get("initContainers") or ():
        for resource, amount in _of_container(container).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    return total


def _of_container(container: Any) -> Amounts:
    """What a container requests; a limit without a request is one, too."""
    resources = (container.get("resources") or {}) if isinstance(container, Mapping) else {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    amounts = {resource: parse_quantity(value) for resource, value in asked.items()}
    return {resource: amount for resource, amount in amounts.items() if amount}


def _quota(at: Field, name: str, spec: Object, asked: Mapping[str, Amounts]) -> Iterator[Problem]:
    """No flavor can hold the pods of a role, or no flavor has quota for a resource."""
    groups = [group for group in spec.get("resourceGroups") or () if isinstance(group, Mapping)]
    covered = {resource for group in groups for resource in group.get("coveredResources") or ()}
    missing = sorted({resource for amounts in asked.values() for resource in amounts} - covered)
    if missing:
        message = f"ClusterQueue {name} has no quota for {', '.join(missing)}: it may never admit the job"
        hint = "use another queue, or ask an administrator for quota"
        yield Problem(WARNING, "queue", at.path, message, at.text, "a queue with quota for all resources", hint)
    borrows = bool(spec.get("cohortName") or spec.get("cohort"))
    for group in groups:
        flavors = {str(f.get("name")): _most(f, borrows=borrows) for f in group.get("flavors") or ()}
        for role, amounts in asked.items():
            lacking = [_lacking(amounts, flavor, most) for flavor, most in flavors.items()]
            if flavors and all(lacking):
                message = (
                    f"ClusterQueue {name} can never admit the job: its {role} pods request "
                    f"{' and '.join(filter(None, lacking))}"
                )
                hint = "request less, use another queue, or ask an administrator to raise the quota"
                yield Problem(ERROR, "queue", at.path, message, at.text, "at most the quota of one flavor", hint)


def _lacking(asked: Amounts, flavor: str, most: Mapping[str, Decimal | None]) -> str:
    """What a flavor can't give; "" if it can, perhaps by borrowing."""
    for resource, limit in most.items():
        amount = asked.get(resource, Decimal(0))
        if limit is not None and amount > limit:
            return f"{_text(amount)} {resource} of at most {_text(limit)} in flavor {flavor}"
    return ""


def _most(flavor: Object, *, borrows: bool) -> dict[str, Decimal | None]:
    """The most that a job can get of each resource of a flavor; None if that isn't known."""
    found: dict[str, Decimal | None] = {}
    for resource in flavor.get("resources") or ():
        nominal = parse_quantity(resource.get("nominalQuota"))
        limit = resource.get("borrowingLimit")
        extra = parse_quantity(limit) if borrows and limit is not None else None if borrows else Decimal(0)
        found[str(resource.get("name"))] = None if nominal is None or extra is None else nominal + extra
    return found


def _text(amount: Decimal) -> str:
    return f"{amount.normalize():f}"


def _selects(selector: Any, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches; null matches nothing, {} everything. Unknown operators match."""
    if not isinstance(selector, Mapping):
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(expression_matches(expression, labels) for expression in selector.get("matchExpressions") or ())
