"""What a cluster's answers mean for a job that is still to be made. The engine asks (`engine/preflight.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.checks.job import NAMESPACE, NAMESPACE_IS, At, Level, Problem
from airflow_provider_ktrain.core.manifest.overlay import QUEUE_LABEL

ERROR, WARNING = Level.ERROR, Level.WARNING
_BEARABLE = {"events"}  #: without them a job runs; only some causes of failures are not told


@dataclass(frozen=True)
class Right:
    """One verb on one resource: `list`, `pods`."""

    verb: str
    resource: str
    group: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to a GET: 200 and the object, or another HTTP status (404: there is none; 403: no right to look)."""

    status: int
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """What was asked about one job.

    :param namespace: where the job would be made, and what the cluster says of it.
    :param denied: the rights that the connection has not; None where the cluster does not tell.
    :param kueue: the API group of Kueue; None where the job names no queue.
    :param queue: the job's LocalQueue; None where it was not asked for.
    """

    namespace: tuple[str, Answer]
    denied: tuple[Right, ...] | None = ()
    kueue: Answer | None = None
    queue: Answer | None = None


def queue_of(manifest: Mapping[str, Any]) -> At:
    """Where a job names its Kueue LocalQueue."""
    return At(manifest)["metadata"]["labels"][QUEUE_LABEL]


def judge(manifest: Mapping[str, Any], answers: Answers) -> Iterator[Problem]:
    """The problems that the answers show. Where the cluster may not be asked, nothing is said."""
    name, namespace = answers.namespace
    yield from _namespace(At(manifest)["metadata"]["namespace"], name, namespace)
    if namespace.status != 404:
        yield from _rights(name, answers.denied)
        yield from _queue(queue_of(manifest), name, answers)


def _namespace(at: At, name: str, answer: Answer) -> Iterator[Problem]:
    if answer.status == 404:
        possible = re.fullmatch(NAMESPACE, name) is not None
        hint = f"create it: kubectl create namespace {name}" if possible else "correct it"
        expected = "" if possible else NAMESPACE_IS
        yield Problem(ERROR, "namespace", at.path, "the cluster has no such namespace", name, expected, hint)
    elif ((answer.body.get("status") or {}).get("phase")) == "Terminating":
        hint = "wait until it is gone and create it anew, or use another one"
        yield Problem(ERROR, "namespace", at.path, "the namespace is being deleted", name, "", hint)


def _rights(namespace: str, denied: tuple[Right, ...] | None) -> Iterator[Problem]:
    remedy = f"`ktrain rbac --namespace {namespace}` prints the least Role"
    if denied is None:
        yield Problem(WARNING, "rights", "$", "the cluster does not say what this connection may do", hint=remedy)
        return
    lacking: dict[str, list[str]] = {}
    for right in denied:
        lacking.setdefault(".".join(filter(None, (right.resource, right.group))), []).append(right.verb)
    for resource, verbs in lacking.items():
        level = WARNING if resource in _BEARABLE else ERROR
        what = f"no right to {', '.join(verbs)} {resource} in namespace {namespace}"
        yield Problem(level, "rights", "$", what, hint=remedy)


def _queue(at: At, namespace: str, answers: Answers) -> Iterator[Problem]:
    if answers.kueue is None:
        return
    if answers.kueue.status == 404:
        message = "the cluster has no Kueue: the label does nothing, and the job starts at once"
        yield Problem(WARNING, "queue", at.path, message, at.text, "", "leave it out, or install Kueue")
    elif answers.queue is None:
        return
    elif answers.queue.status == 404:
        message = f"namespace {namespace} has no such LocalQueue: Kueue would keep the job suspended for ever"
        hint = f"see: kubectl get localqueues -n {namespace}"
        yield Problem(ERROR, "queue", at.path, message, at.text, "a LocalQueue", hint)
    elif answers.queue.status == 200:
        yield from _held(at, answers.queue.body)


def _held(at: At, queue: Mapping[str, Any]) -> Iterator[Problem]:
    policy = (queue.get("spec") or {}).get("stopPolicy") or "None"
    if policy != "None":
        message = f"the LocalQueue is stopped (stopPolicy {policy}): the job waits until it is resumed"
        yield Problem(
            WARNING, "queue", at.path, message, at.text, "stopPolicy None", "resume the queue, or use another one"
        )
        return
    for condition in (queue.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Active" and condition.get("status") == "False":
            said = condition.get("message") or condition.get("reason") or "no reason given"
            message = f"the LocalQueue admits nothing now: {said}"
            hint = "wait until it does, or use another one"
            yield Problem(WARNING, "queue", at.path, message, at.text, "an active one", hint)
