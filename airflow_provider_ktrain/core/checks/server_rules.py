"""What a cluster's responses mean for a job that isn't created yet. `engine/submit/preflight.py` sends the requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.checks.cluster_queue import judge_cluster_queue, stopped
from airflow_provider_ktrain.core.checks.job import Field
from airflow_provider_ktrain.core.checks.problem import ERROR, NAMESPACE, NAMESPACE_FORMAT, WARNING, Problem
from airflow_provider_ktrain.core.checks.rbac import CODE_RULES
from airflow_provider_ktrain.core.checks.references import Reference
from airflow_provider_ktrain.core.state.pods.objects import condition_of, labels_of
from airflow_provider_ktrain.core.state.queue.kueue_status import PRIORITY_LABEL, QUEUE_LABEL

#: Without access to these a job runs; only some causes of failures, or the reasons of Kueue, are missing.
_OPTIONAL_RESOURCES = {
    "events", "persistentvolumeclaims", "services", "jobs.batch", "workloads.kueue.x-k8s.io",
    "localqueues.kueue.x-k8s.io",
}  # fmt: skip
#: Resources that only tasks with `code` need.
_OF_CODE = {resource for _, resources, _ in CODE_RULES for resource in resources}


@dataclass(frozen=True)
class Right:
    """One verb on one resource: `list`, `pods`."""

    verb: str
    resource: str
    group: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to a GET: 200 and the object, or another HTTP status (404: not found; 403: no right to read it)."""

    status: int
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """The cluster's answers about one job; None: it was not requested, as the job doesn't name it.

    :param namespace: the namespace in which the job would be created, and the answer about it.
    :param denied: the rights that the connection lacks; None if it can't check its rights.
    :param kueue: the API group of Kueue; None if the job names no queue.
    :param missing: the objects of the namespace that the manifest names and that don't exist. Default: none.
    """

    namespace: tuple[str, Answer]
    denied: tuple[Right, ...] | None = ()
    kueue: Answer | None = None
    queue: Answer | None = None
    cluster_queue: Answer | None = None
    priority_class: Answer | None = None
    missing: tuple[Reference, ...] = ()


def queue_of(manifest: Mapping[str, Any]) -> Field:
    """The label that names the job's Kueue LocalQueue."""
    return Field(manifest)["metadata"]["labels"][QUEUE_LABEL]


def priority_class_of(manifest: Mapping[str, Any]) -> Field:
    """The label that names the job's WorkloadPriorityClass."""
    return Field(manifest)["metadata"]["labels"][PRIORITY_LABEL]


def cluster_queue_of(queue: Answer) -> str:
    """The name of the ClusterQueue of a LocalQueue; "" if the LocalQueue can't be read."""
    return str((queue.body.get("spec") or {}).get("clusterQueue") or "")


def judge(manifest: Mapping[str, Any], answers: Answers) -> Iterator[Problem]:
    """The problems that the answers show. What the connection may not read causes no problem."""
    name, namespace = answers.namespace
    yield from _namespace(Field(manifest)["metadata"]["namespace"], name, namespace)
    if namespace.status != 404:
        yield from _rights(name, answers.denied)
        yield from _queue(queue_of(manifest), name, answers)
        yield from _cluster_queue(manifest, answers)
        yield from _priority_class(priority_class_of(manifest), answers.priority_class)
        yield from (_missing(name, reference) for reference in answers.missing)


def _namespace(at: Field, name: str, answer: Answer) -> Iterator[Problem]:
    """The namespace exists and isn't being deleted."""
    if answer.status == 404:
        valid = re.fullmatch(NAMESPACE, name) is not None
        hint = f"create it: kubectl create namespace {name}" if valid else "correct it"
        expected = "" if valid else NAMESPACE_FORMAT
        yield Problem(ERROR, "namespace", at.path, "the namespace does not exist", name, expected, hint)
    elif ((answer.body.get("status") or {}).get("phase")) == "Terminating":
        hint = "wait until it is deleted and create it again, or use another one"
        yield Problem(ERROR, "namespace", at.path, "the namespace is being deleted", name, "", hint)


def _rights(namespace: str, denied: tuple[Right, ...] | None) -> Iterator[Problem]:
    """The connection has the rights that the provider needs."""
    remedy = f"`ktrain rbac --namespace {namespace} --service-account NAMESPACE:NAME` prints the Role and its binding"
    if denied is None:
        yield Problem(WARNING, "rights", "$", "the connection's user has no right to check its own rights", hint=remedy)
        return
    lacking: dict[str, list[str]] = {}
    for right in denied:
        lacking.setdefault(".".join(filter(None, (right.resource, right.group))), []).append(right.verb)
    for resource, verbs in lacking.items():
        level = WARNING if resource in _OPTIONAL_RESOURCES else ERROR
        message = f"no right to {', '.join(verbs)} {resource} in namespace {namespace}"
        hint = remedy.replace("rbac", "rbac --code") if resource in _OF_CODE else remedy
        yield Problem(level, "rights", "$", message, hint=hint)


def _queue(at: Field, namespace: str, answers: Answers) -> Iterator[Problem]:
    """Kueue is installed and the LocalQueue exists."""
    if answers.kueue is None:
        return
    if answers.kueue.status == 404:
        message = "Kueue is not installed: the label has no effect, and the job starts at once"
        yield Problem(WARNING, "queue", at.path, message, at.text, "", "remove it, or install Kueue")
    elif answers.queue is None:
        return
    elif answers.queue.status == 404:
        message = f"namespace {namespace} has no such LocalQueue: Kueue would never admit the job"
        hint = f"kubectl get localqueues -n {namespace} lists them"
        yield Problem(ERROR, "queue", at.path, message, at.text, "a LocalQueue", hint)
    elif answers.queue.status == 200 and (answers.cluster_queue is None or answers.cluster_queue.status != 404):
        yield from _inactive(at, answers.queue.body)


def _cluster_queue(manifest: Mapping[str, Any], answers: Answers) -> Iterator[Problem]:
    """The ClusterQueue exists and can admit the job."""
    at, found = queue_of(manifest), answers.cluster_queue
    if answers.queue is None or found is None:
        return
    name = cluster_queue_of(answers.queue)
    if found.status == 404:
        message = f"ClusterQueue {name} of the LocalQueue does not exist: Kueue would never admit the job"
        yield Problem(ERROR, "queue", at.path, message, at.text, "a queue with a ClusterQueue", "use another queue")
    elif found.status == 200:
        yield from judge_cluster_queue(at, name, found.body, manifest, labels_of(answers.namespace[1].body))


def _priority_class(at: Field, found: Answer | None) -> Iterator[Problem]:
    """The WorkloadPriorityClass exists. Without it, Kueue creates no Workload, and the job stays suspended."""
    if found is not None and found.status == 404:
        message = "the cluster has no such WorkloadPriorityClass: Kueue would never admit the job"
        hint = "kubectl get workloadpriorityclasses lists them"
        yield Problem(ERROR, "queue", at.path, message, at.text, "a WorkloadPriorityClass", hint)


def _missing(namespace: str, reference: Reference) -> Problem:
    """An object that the manifest names doesn't exist in the job's namespace."""
    level = WARNING if reference.pulls_images else ERROR
    consequence = "images are pulled without it" if reference.pulls_images else "the job's pods could not start"
    message = f"namespace {namespace} has no such {reference.kind}: {consequence}"
    hint = f"create it, or correct the name: kubectl get {reference.plural} -n {namespace} lists them"
    return Problem(level, "reference", reference.at.path, message, reference.at.text, f"a {reference.kind}", hint)


def _inactive(at: Field, queue: Mapping[str, Any]) -> Iterator[Problem]:
    """The LocalQueue admits jobs."""
    found = list(stopped(at, "the LocalQueue", queue))
    yield from found
    active = condition_of(queue, "Active")
    if active.get("status") == "False" and not found:
        reason = active.get("message") or active.get("reason") or "no reason given"
        message = f"the LocalQueue does not admit jobs now: {reason}"
        hint = "wait until it does, or use another one"
        yield Problem(WARNING, "queue", at.path, message, at.text, "an active LocalQueue", hint)
