"""Rules for startup: why a job is rejected, or a pod can't be created, scheduled or started."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from airflow_provider_ktrain.core.diagnosis import failure_patterns
from airflow_provider_ktrain.core.diagnosis.evidence import Evidence, make_evidence
from airflow_provider_ktrain.core.diagnosis.failure_patterns import FailurePattern
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.pod_failures import (
    Failure,
    Json,
    describe_exit_code,
    find_failures,
    restarts_of,
)
from airflow_provider_ktrain.core.manifest.avoidance import avoided_nodes
from airflow_provider_ktrain.core.text import clipped, counted, first_line
from airflow_provider_ktrain.core.timestamps import parse_timestamp

#: How long a problem may last before the job is given up, by the reason of a waiting container or of an event. A
#: registry may come back and a Secret may still be created; an invalid image name stays invalid.
GRACE_SECONDS: dict[str, float] = {
    "InvalidImageName": 0,
    "ErrImageNeverPull": 0,
    "CreateContainerConfigError": 30,
    "CreateContainerError": 120,
    "RunContainerError": 120,
    "ErrImagePull": 180,
    "ImagePullBackOff": 180,
    "ImageInspectError": 180,
    "RegistryUnavailable": 300,
    "FailedMount": 300,
    "FailedAttachVolume": 300,
    "FailedCreatePod": 60,
    "ResourcesCreationFailed": 60,
}
MAX_START_RESTARTS = 3  #: restarts after which a command that can't be started is given up


def find_startup_failure(
    job: Json,
    pods: Sequence[Json],
    events: Sequence[Json] = (),
    waited_seconds: float = 0.0,
    now: datetime | None = None,
) -> Cause | None:
    """Why a job will never start; None while it may still start.

    :param job: the job as last seen.
    :param pods: its pods.
    :param events: Events of the job and its pods. Default: none.
    :param waited_seconds: seconds since the job's phase last changed, compared with GRACE_SECONDS. Default: 0.
    :param now: the current time. With it, the grace time of a pod starts when it gets its node, since the job may have
        waited for hours until then. Default: None, only `waited_seconds` counts.
    """
    evidence = make_evidence(job, pods, events)
    if "Running" in evidence.conditions or evidence.failed_condition:
        return None
    cause = (
        find_operator_rejection(evidence)
        or find_blocked_container(evidence, waited_seconds, now)
        or find_admission_denial(evidence, waited_seconds)
        or find_refused_resources(evidence, waited_seconds)
    )
    return cause.with_short_summary() if cause else None


def find_unstartable_command(job: Json, pods: Sequence[Json]) -> Cause | None:
    """Why a container whose command can't be started will never run; None if there is no such container.

    Under OnFailure, training-operator's default, the kubelet restarts it forever and the job stays Running.

    :param job: the job as last seen.
    :param pods: its pods.
    """
    kind = make_evidence(job, pods, ()).kind
    for failure in find_failures(kind, pods, {}):
        is_needed = failure.is_init or kind.is_main_container(failure.container)  # not a sidecar
        tried_often = is_needed and failure.is_latest and failure.restarts >= MAX_START_RESTARTS
        if tried_often and (cause := start_error_cause(failure)) and cause.category is Category.IMAGE:
            summary = f"{cause.summary}. Giving up after {failure.restarts + 1} attempts."
            return replace(cause, summary=summary, replica=failure.replica).with_short_summary()
    return None


def restarted_often(pod: Json) -> bool:
    """Whether `find_unstartable_command` may find a container of this pod."""
    return any(restarts >= MAX_START_RESTARTS for restarts in restarts_of(pod))


def find_obstacle(evidence: Evidence) -> Cause | None:
    """What keeps pods from being created, scheduled or started, however long it has lasted."""
    return (
        find_blocked_container(evidence)
        or find_admission_denial(evidence)
        or find_unschedulable_pod(evidence)
        or find_refused_resources(evidence)
    )


def _given_up(cause: Cause, waited_seconds: float, grace_seconds: float) -> Cause:
    """The cause with the time that was waited, if the job is given up because the grace time is over."""
    if not grace_seconds or math.isinf(waited_seconds):
        return cause
    return replace(cause, summary=f"{cause.summary.rstrip('.')}. Giving up after waiting {waited_seconds:.0f} s.")


def find_operator_rejection(evidence: Evidence) -> Cause | None:
    """The operator rejects the manifest: proof enough to forbid retries."""
    for event in evidence.events:
        reason, message = str(event.get("reason")), str(event.get("message"))
        for reason_pattern, message_pattern, description, resolution in _OPERATOR_REJECTIONS:
            if re.search(reason_pattern, reason) and re.search(message_pattern, message):
                return Cause(
                    Category.CONFIGURATION,
                    f"{evidence.title} {description}: {_without_prefix(message)}",
                    f"Event {reason}: {message}",
                    resolution,
                    retryable=False,
                )
    return None


_OPERATOR_REJECTIONS = (
    (
        r"FailedValidation$|^ValidationError$",
        "",
        "was rejected by its operator",
        "Correct the manifest. `ktrain check` names the field.",
    ),
    (
        r"^FailedCreateService$",
        "must be no more than 63 characters",
        "has a name that is too long for its Services",
        "Shorten the job's name.",
    ),
    (
        r"^FailedCreate",
        "is invalid",
        "has pods that the API server rejects as invalid",
        "Correct the field that the message names.",
    ),
)


def find_admission_denial(evidence: Evidence, waited_seconds: float = math.inf) -> Cause | None:
    """Admission denies the pods: Pod Security, a LimitRange, a webhook, a missing service account.

    Not a quota: that is a matter of scheduling, since other jobs will free some of it.
    """
    grace_seconds = GRACE_SECONDS["FailedCreatePod"]
    for event in evidence.events if waited_seconds >= grace_seconds else ():
        message = str(event.get("message"))
        denied = str(event.get("reason")).startswith("FailedCreate") and re.search(_ADMISSION_DENIAL, message)
        if denied and not _created_since(evidence, message):
            cause = Cause(
                Category.ENVIRONMENT,
                f"{evidence.title} can't create its pods: {_without_prefix(message)}",
                f"Event {event.get('reason')}: {message}",
                "Correct what the message names, or ask the owner of the policy. A service account must exist in the "
                "job's namespace.",
            )
            return _given_up(cause, waited_seconds, grace_seconds)
    return None


def find_refused_resources(evidence: Evidence, waited_seconds: float = math.inf) -> Cause | None:
    """The API server refuses the objects between the job and its pods: a TrainJob's JobSet, or its Jobs.

    The job itself shows nothing of it (recordings 55b, 55d, 56b). It is no proof against this manifest, since the
    runtime is a part of these objects: a retry may succeed. An event may also pass (recording 58b), so a refusal counts
    only while there are no pods, and after some time unless the object is invalid.
    """
    if any(not (pod.get("metadata") or {}).get("deletionTimestamp") for pod in evidence.pods):
        return None
    for event in reversed(evidence.events):
        reason, message = str(event.get("reason")), str(event.get("message"))
        if reason not in _CREATION_FAILURES or "exceeded quota" in message:
            continue
        grace_seconds = 0.0 if " is invalid: " in message else GRACE_SECONDS["ResourcesCreationFailed"]
        if waited_seconds < grace_seconds:
            return None
        what = str((event.get("involvedObject") or {}).get("kind"))
        error = next((match[1] for pattern in _CREATION_ERRORS if (match := re.search(pattern, message))), message)
        resolutions = (known for pattern, known in _CREATION_RESOLUTIONS if re.search(pattern, message))
        cause = Cause(
            Category.ENVIRONMENT,
            f"{evidence.title} can't create its {_CREATION_FAILURES[reason]}: {first_line(error)}",
            f"Event {reason} ({what}): {message}",
            next(resolutions, "Correct what the message names in the runtime or in the manifest."),
        )
        return _given_up(cause, waited_seconds, grace_seconds)
    return None


#: reasons of events, and what could not be created
_CREATION_FAILURES = {"TrainJobResourcesCreationFailed": "JobSet", "JobCreationFailed": "Jobs"}
_CREATION_ERRORS = (
    r"(JobSet name is too long[^\"]*)",
    r" is invalid: \[?(.+?)\]?$",
    r"denied the request: (.+)",
    r"reconciliation failed: (.+)",
)
_CREATION_RESOLUTIONS = (
    (
        "JobSet name is too long",
        "Shorten the names of the runtime's replicatedJobs: names of pods are made of the job's name and theirs.",
    ),
    (
        "owned by another object",
        "Delete what an earlier job of this name left: its ConfigMap, and its JobSet if it still exists.",
    ),
    (r"must be less than or equal to \w+ limit", "Request no more than the limit."),
)


_ADMISSION_DENIAL = r"denied the request|is forbidden: (?!exceeded quota)"


def _created_since(evidence: Evidence, message: str) -> bool:
    """Whether the denied pod exists now: a missing object may have been created since the event."""
    existing = [str((pod.get("metadata") or {}).get("name")) for pod in evidence.pods]
    denied = re.search(r'pods "([^"]+)"', message)
    if denied is None:
        return bool(existing)
    stem = re.sub(r"(-launcher-)\w{5}$", r"\1", denied[1])  # a batch Job gives each attempt another name
    return any(name == stem or (stem.endswith("-") and name.startswith(stem)) for name in existing)


def find_blocked_container(
    evidence: Evidence, max_waited_seconds: float = math.inf, now: datetime | None = None
) -> Cause | None:
    """The container that can't be created, or whose image or volume is missing; image problems come first.

    A container that only waits for its init containers or for others of its pod is not blocked.
    """
    found = []
    for pod in evidence.pods:
        replica, status = evidence.replica_of(pod), pod.get("status") or {}
        waited_seconds = max_waited_seconds if now is None else min(max_waited_seconds, _seconds_on_node(pod, now))
        states = [c for key in ("initContainerStatuses", "containerStatuses") for c in status.get(key) or ()]
        waiting_containers = [(c, w) for c in states if (w := (c.get("state") or {}).get("waiting"))]
        for container, waiting in waiting_containers:
            reason = str(waiting.get("reason"))
            if reason in GRACE_SECONDS and waited_seconds >= GRACE_SECONDS[reason]:
                cause = _waiting_cause(replica, container, reason, str(waiting.get("message") or ""))
                found.append(_given_up(cause, waited_seconds, GRACE_SECONDS[reason]))
        if waiting_containers and not found:
            found += _mount_failures(evidence, pod, waited_seconds)
    return min(found, key=lambda c: c.category is not Category.IMAGE, default=None)


def _seconds_on_node(pod: Json, now: datetime) -> float:
    """Seconds since the pod was scheduled, or since its creation if that time is unknown."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    scheduled = [c.get("lastTransitionTime") for c in conditions if c.get("type") == "PodScheduled"]
    since = parse_timestamp(next(iter(scheduled), (pod.get("metadata") or {}).get("creationTimestamp")))
    return (now - since).total_seconds() if since else math.inf


def _waiting_cause(replica: str, container: Json, reason: str, message: str) -> Cause:
    """The kubelet can't create the container or pull its image."""
    detail = f"{reason}: {message}" if message else reason
    if "Image" in reason or "Registry" in reason:
        image = container.get("image") or (m[1] if (m := re.search(r'image "([^"]+)"', message)) else "its image")
        return Cause(
            Category.IMAGE,
            f"{replica} can't pull {image}: {_pull_error(message) or reason}",
            detail,
            _pull_resolution(reason, message),
            replica,
            retryable=reason != "InvalidImageName",
        )
    if reason != "CreateContainerConfigError" and "OCI runtime" in message:
        known, error = _start_error(message)
        return Cause(known.category, f"{replica} {known.description}: {error}", detail, known.resolution, replica)
    missing = reason == "CreateContainerConfigError"
    return Cause(
        Category.ENVIRONMENT if missing else Category.INFRASTRUCTURE,
        f"{replica} can't create container {container.get('name')}: {first_line(message)}",
        detail,
        failure_patterns.CREATE_MISSING if missing else "Check the node and the pod's volumes, then retry.",
        replica,
    )


def _pull_error(message: str) -> str:
    """The end of containerd's chain of messages, where the cause is: `not found`, or at most 140 characters."""
    line = clipped(message.strip().partition("\n")[0])
    parts = line.split(": ")
    if len(parts) > 1 and parts[-1] == "not found":
        return parts[-1]
    return next((tail for i in range(len(parts)) if len(tail := ": ".join(parts[i:])) <= 140), line[-140:])


def _pull_resolution(reason: str, message: str) -> str:
    for pattern, resolution in (
        ("NeverPull", "Load the image on the nodes, or set imagePullPolicy to IfNotPresent."),
        ("InvalidImageName", "Correct the image's name."),
        (
            r"(?i)unauthorized|forbidden|denied|401|403",
            "Set imagePullSecrets with access, or correct the image name.",
        ),
        (r"(?i)not found|manifest unknown|404", "Correct the image's name and tag, or push the image."),
        (
            r"(?i)no such host|lookup|timeout|refused|unreachable",
            "Correct the registry's name, or give the nodes access to it.",
        ),
    ):
        if re.search(pattern, f"{reason} {message}"):
            return resolution
    return "Correct the image's name, or give the nodes access to its registry."


def find_start_error(reason: str, message: str) -> FailurePattern | None:
    """What a container runtime's message means; None if the kubelet doesn't report that it could not start a container.

    :param reason: of a container's state.
    :param message: of a container's state.
    """
    if reason not in (*_START_REASONS, "CreateContainerError"):
        return None
    return _start_error(message)[0]


_START_REASONS = ("StartError", "ContainerCannotRun", "RunContainerError")


def start_error_cause(f: Failure) -> Cause | None:
    """The kubelet reports that the container never ran: the container runtime could not start its command."""
    if f.reason not in _START_REASONS:
        return None
    known, error = _start_error(f.message)
    error = error or f.tail.last_line or describe_exit_code(f.exit_code)
    return Cause(known.category, f"{f.replica} {known.description}: {error}", f.message, known.resolution)


def _start_error(message: str) -> tuple[FailurePattern, str]:
    """The pattern that matches a container runtime's message, and the matching part of the message."""
    found = ((known, re.search(known.pattern, message)) for known in failure_patterns.START_ERRORS)
    return next((known, first_line(match[0])) for known, match in found if match)


def _mount_failures(evidence: Evidence, pod: Json, waited_seconds: float) -> list[Cause]:
    """The most specific event about a pod's volumes, unless they were mounted later.

    A pod that came before its ConfigMap has an event, too, and may then pull its image for a long time.
    """
    events = _events_of(evidence, pod)
    if _has_mounted(pod, events):
        return []
    messages = [
        (reason, str(event.get("message")))
        for event in events
        if (reason := str(event.get("reason"))) in ("FailedMount", "FailedAttachVolume")
        and waited_seconds >= GRACE_SECONDS[reason]
    ]
    for known, (reason, message) in itertools.product(failure_patterns.MOUNT_ERRORS, messages):
        if re.search(known.pattern, message):
            replica = evidence.replica_of(pod)
            summary = f"{replica} {known.description}: {first_line(message)}"
            cause = Cause(known.category, summary, f"Event {reason}: {message}", known.resolution, replica)
            return [_given_up(cause, waited_seconds, GRACE_SECONDS[reason])]
    return []


def _events_of(evidence: Evidence, pod: Json) -> list[Json]:
    uid, name = (pod.get("metadata") or {}).get("uid"), (pod.get("metadata") or {}).get("name")
    about = ((event, event.get("involvedObject") or {}) for event in evidence.events)
    return [event for event, of in about if of.get("name") == name and of.get("uid") in (None, uid)]


def _has_mounted(pod: Json, events: Sequence[Json]) -> bool:
    """Whether the kubelet has mounted the volumes of a pod: before that, it neither pulls images nor starts containers.

    :param pod: which waits for a container.
    :param events: about it.
    """
    status = pod.get("status") or {}
    states = (
        c.get("state") or {} for key in ("initContainerStatuses", "containerStatuses") for c in status.get(key) or ()
    )
    conditions = status.get("conditions") or ()
    return (
        any(str(event.get("reason")) in _AFTER_MOUNT for event in events)
        or any(c.get("type") == "PodReadyToStartContainers" and c.get("status") == "True" for c in conditions)
        or any(state.keys() & {"running", "terminated"} for state in states)
    )


_AFTER_MOUNT = ("Pulling", "Pulled", "Created", "Started")  #: reasons of the kubelet's events


def find_unschedulable_pod(evidence: Evidence) -> Cause | None:
    """No node fits a pod, its scheduler doesn't respond, or the namespace's quota is used up."""
    unscheduled = [(pod, c) for pod in evidence.pods if (c := _unscheduled_condition(pod))]
    if unscheduled:
        pod, condition = unscheduled[0]
        message = str(condition.get("message") or "the scheduler gives no reason")
        hints = [resolution for pattern, resolution in failure_patterns.SCHEDULING_HINTS if re.search(pattern, message)]
        if excluded := describe_avoided(pod):
            hints.append(excluded)
        return Cause(
            Category.SCHEDULING,
            f"{evidence.replica_of(pod)} can't be scheduled: {_node_reasons(message)}",
            f"{len(unscheduled)} of {len(evidence.pods)} pods have no node.\n{message}",
            " ".join(hints) or failure_patterns.SCHEDULING_HINTS[-1][1],
            evidence.replica_of(pod),
        )
    for pod in evidence.pods:
        if scheduler := _silent_scheduler(pod):
            return Cause(
                Category.SCHEDULING,
                f"{evidence.replica_of(pod)} waits for the scheduler {scheduler}, which has not responded",
                "",
                f"Check that the scheduler {scheduler} runs, or remove schedulerName.",
                evidence.replica_of(pod),
            )
    for event in evidence.events:
        message = str(event.get("message"))
        reason = str(event.get("reason"))
        if (reason.startswith("FailedCreate") or reason in _CREATION_FAILURES) and "quota" in message:
            quota = _without_prefix(message).removeprefix("exceeded quota: ")
            return Cause(
                Category.SCHEDULING,
                f"{evidence.title} exceeds the namespace's quota: {quota}",
                f"Event {event.get('reason')}: {message}",
                "Free some of the quota, or ask its administrator for a larger one.",
            )
    return None


def describe_avoided(pod: Json) -> str:
    """Which nodes the pod avoids because an earlier try failed on them; empty if there are none."""
    names = avoided_nodes(pod)
    if not names:
        return ""
    return (
        f"The pod avoids {counted(len(names), 'node')} (avoid_failed_nodes): {', '.join(names)}. To use them again, "
        "repair them and clear the task."
    )


def _unscheduled_condition(pod: Json) -> Json | None:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == "PodScheduled" and c.get("status") == "False"), None)


def _silent_scheduler(pod: Json) -> str:
    """The pod's scheduler, if it isn't the default one and has reported nothing about a pod without a node."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    name = str(spec.get("schedulerName") or "default-scheduler")
    waits = status.get("phase", "Pending") == "Pending" and not spec.get("nodeName") and not status.get("conditions")
    return name if waits and name != "default-scheduler" else ""


def _node_reasons(message: str) -> str:
    """The part of the scheduler's message about nodes, without the part about claims and preemption."""
    return re.split(r"\. (?:no new claims|preemption)", message)[0].rstrip(".")


def _without_prefix(message: str) -> str:
    """The reason in the message of an event FailedCreate..., without the name of the pod."""
    return re.sub(r'^Error creating: (pods "[^"]+" is forbidden: )?', "", first_line(message))
