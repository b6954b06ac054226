"""Rules for startup: why a job is rejected, or a pod can't be created, scheduled or started."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from airflow_provider_ktrain.core.diagnosis import failure_patterns, refusals
from airflow_provider_ktrain.core.diagnosis.evidence import Evidence
from airflow_provider_ktrain.core.diagnosis.failure_patterns import FailurePattern
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.pod_failures import Failure, describe_exit_code
from airflow_provider_ktrain.core.logs.container_run import START_ERRORS
from airflow_provider_ktrain.core.state.nodes import describe_selection
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json, avoided_nodes
from airflow_provider_ktrain.core.state.pods.pod_groups import MAX_START_RESTARTS
from airflow_provider_ktrain.core.text.output import MAX_FIRST_LINE_CHARS, clipped, counted, ends_of_chain, first_line
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp

#: How long a problem may last before the job is given up, by the reason of a waiting container or of an event. A
#: registry may come back, a Secret may still be created, and a webhook or a runtime may be corrected.
GRACE_SECONDS: dict[str, float] = {
    "InvalidImageName": 60,
    "ErrImageNeverPull": 60,
    "CreateContainerConfigError": 30,
    "missing claim": 30,
    "CreateContainerError": 120,
    "RunContainerError": 120,
    "ErrImagePull": 180,
    "ImagePullBackOff": 180,
    "ImageInspectError": 180,
    "RegistryUnavailable": 300,
    "FailedMount": 300,
    "FailedAttachVolume": 300,
    "FailedMapVolume": 300,
    "FailedCreatePodSandBox": 300,
    "FailedCreatePodContainer": 300,
    "refusal": 60,  # any event by which the API server or the operator refuses the job, a pod or another object
}
#: Age of the last event up to which a pod still has no sandbox: the kubelet tries again every 10 to 15 s.
SANDBOX_EVENT_SECONDS = 120.0
#: Age of the last event up to which a pod still waits for its volumes: the kubelet tries again after 122 s at most.
MOUNT_EVENT_SECONDS = 150.0
CLOCK_SECONDS = 5.0  #: How much the clocks of operators may differ from ours.
LONG_RUN_SECONDS = 600.0  #: A job whose primary replica has run for as long is not given up because of events.


def has_run(evidence: Evidence) -> bool:
    """Whether the job was Running, or its primary replica has run for long.

    An operator that can't create all pods writes no status, although the first pods run (recording 21c).
    """
    kind, primary = evidence.kind, evidence.kind.primary(evidence.job)
    return _was_running(evidence.job) or any(
        _longest_run(status, evidence.now) >= LONG_RUN_SECONDS
        for pod in evidence.pods
        if kind.role_of(pod)[0] == primary
        for status in objects.main_containers(pod)
    )


def _was_running(job: Json) -> bool:
    """Whether the job's conditions prove that it runs or has run.

    mpi-operator writes Running False also for a job that it suspends before its first start (recording 74e).
    """
    conditions = (job.get("status") or {}).get("conditions") or ()
    found = [c for c in conditions if c.get("type") in ("Running", "Restarting")]
    return any(str(c.get("status")) == "True" or c.get("reason") != "MPIJobSuspended" for c in found)


def _longest_run(container: Json, now: datetime | None) -> float:
    """Seconds of the container's current or previous run, whichever is longer; 0 if it has not run."""
    runs = objects.runs_of(container)
    times = [(parse_timestamp(run.get("startedAt")), parse_timestamp(run.get("finishedAt")) or now) for run in runs]
    return max(((end - start).total_seconds() if start and end else math.inf for start, end in times), default=0.0)


def find_unstartable_command(evidence: Evidence) -> Cause | None:
    """Why a container whose command can't be started will never run; None if there is no such container.

    Under OnFailure, training-operator's default, the kubelet restarts it forever and the job stays Running.
    """
    for failure in evidence.all_failures:
        is_needed = failure.is_init or evidence.kind.is_main_container(failure.container)  # not a sidecar
        tried_often = is_needed and failure.is_latest and failure.restarts >= MAX_START_RESTARTS
        if tried_often and (cause := start_error_cause(failure)) and cause.category is Category.IMAGE:
            given_up = _given_up(cause, f"{failure.restarts + 1} attempts")
            return replace(given_up, replica=failure.replica).with_short_summary()
    return None


def find_obstacle(evidence: Evidence) -> Cause | None:
    """What keeps pods from being created, scheduled or started, however long it has lasted."""
    return next((cause for rule in _OBSTACLES if (cause := rule(evidence))), None)


def _waited(evidence: Evidence, since: datetime | None) -> float:
    """For how many seconds a problem has lasted, at most since the job's phase changed; infinite if it counts at once.

    :param since: when the problem may have begun: the job may have waited for hours until then. None: not known.
    """
    if evidence.waited_seconds is None:
        return math.inf
    if since is None or evidence.now is None:
        return evidence.waited_seconds
    return min(evidence.waited_seconds, (evidence.now - since).total_seconds())


def _given_up(cause: Cause, after: str) -> Cause:
    """The cause with that after which the job is given up."""
    return cause.with_summary(lambda summary: f"{summary.rstrip('.')}. Giving up after {after}.")


def _waited_for(cause: Cause, seconds: float) -> Cause:
    """The cause with the time that was waited, if the job is given up because the grace time is over."""
    return cause if math.isinf(seconds) else _given_up(cause, f"waiting {seconds:.0f} s")


def _lasting_refusals(evidence: Evidence) -> Iterator[tuple[Json, str, str, float]]:
    """The events of refusals that last a grace period: each with its reason, message, and the seconds since its start.

    The age of the last one doesn't matter: mpi-operator reports a refusal once, and the Trainer's series stop at two.
    """
    began = evidence.spec_since
    for event in filter(refusals.is_refusal, evidence.events):
        if began is not None and objects.event_time(event) < began.timestamp() - CLOCK_SECONDS:
            continue  # another specification of the job was refused
        if refusals.is_contradicted(event, evidence.events):
            continue
        if refusals.refused_object(event, objects.name_of(evidence.job)) in evidence.existing:
            continue
        first = parse_timestamp(event.get("firstTimestamp") or event.get("eventTime") or objects.created(event))
        waited_seconds = _waited(evidence, max(filter(None, (first, began)), default=None))
        if waited_seconds >= GRACE_SECONDS["refusal"]:
            yield event, str(event.get("reason")), str(event.get("message")), waited_seconds


def refused_objects(evidence: Evidence) -> set[tuple[str, str]]:
    """Kinds and names of the objects that are said to be refused. If one exists, its refusal is over."""
    job = objects.name_of(evidence.job)
    found = (refusals.refused_object(event, job) for event in evidence.events if refusals.is_refusal(event))
    return {one for one in found if one is not None}


def find_operator_rejection(evidence: Evidence) -> Cause | None:
    """The operator reports that the manifest is invalid, and has created no pods."""
    for event, reason, message, waited_seconds in _lasting_refusals(evidence):
        if refusals.is_rejection(event) and not _has_pods(evidence):
            summary = f"{evidence.title} was rejected by its operator: {first_line(message)}"
            resolution = "Correct the manifest. `ktrain check` names the field."
            cause = Cause(Category.ENVIRONMENT, summary, f"Event {reason}: {message}", resolution)
            return _waited_for(cause, waited_seconds)
    return None


def _has_pods(evidence: Evidence) -> bool:
    return any(not objects.is_being_deleted(pod) for pod in evidence.pods)


def find_refused_pods(evidence: Evidence) -> Cause | None:
    """The API server refuses pods or Services: as invalid, or by Pod Security, a LimitRange, a webhook and so on.

    This doesn't prove that the manifest is wrong: a webhook may have added the part that is refused. A quota is left to
    the scheduling limit, because other jobs will free some of it.
    """
    for event, reason, message, waited_seconds in _lasting_refusals(evidence):
        text = f"{reason}: {message}"
        known = failure_patterns.first_match(failure_patterns.POD_REFUSALS, text)
        if known and not _created_since(evidence, event):
            summary = f"{evidence.title} {known.description}: {_without_prefix(message)}"
            return _waited_for(Cause(known.category, summary, f"Event {text}", known.resolution), waited_seconds)
    return None


def find_refused_resources(evidence: Evidence) -> Cause | None:
    """The API server refuses the objects between the job and its pods: a TrainJob's JobSet, or its Jobs.

    The job itself doesn't show this (recordings 55b, 55d, 56b). It doesn't prove that the manifest is wrong, because
    these objects contain the runtime: a retry may succeed. The refusal may also end by itself (recording 58b), so it
    counts only while there are no pods, and after some time.
    """
    lasting = [] if _has_pods(evidence) else list(_lasting_refusals(evidence))
    for event, reason, message, waited_seconds in reversed(lasting):
        if reason not in refusals.CREATION_FAILURES:
            continue
        what = str((event.get("involvedObject") or {}).get("kind"))
        error = next((match[1] for pattern in _CREATION_ERRORS if (match := re.search(pattern, message))), message)
        known = failure_patterns.explain(failure_patterns.CREATION_ERRORS, message)
        summary = f"{evidence.title} can't create its {refusals.CREATION_FAILURES[reason]}: {first_line(error)}"
        cause = Cause(known.category, summary, f"Event {reason} ({what}): {message}", known.resolution)
        return _waited_for(cause, waited_seconds)
    return None


REFUSALS = (find_operator_rejection, find_refused_pods, find_refused_resources)
_CREATION_ERRORS = (
    r" is invalid: \[?(\S+: Invalid value): [\[{].* \.\.\.$",  # cut within the value, before the reason (recording 56b)
    r"(JobSet name is too long[^\"]*)",
    r" is invalid: \[?(.+?)\]?$",
    r"denied the request: (.+)",
    r"reconciliation failed: (.+)",
)


def _created_since(evidence: Evidence, event: Json) -> bool:
    """Whether the refused pod exists now: a missing object may have been created since the event.

    A Service is none of the pods: see `refused_objects`.
    """
    refused = refusals.refused_object(event, objects.name_of(evidence.job))
    if refused is None:
        return bool(evidence.pods)
    return refused[0] == "Pod" and any(refusals.has_name(objects.name_of(pod), refused[1]) for pod in evidence.pods)


def find_blocked_container(evidence: Evidence) -> Cause | None:
    """The container that can't be created, or whose image or volume is missing; image problems come first.

    A container that only waits for its init containers or for others of its pod is not blocked.
    """
    found = []
    for pod in evidence.pods:
        replica, waited_seconds = evidence.kind.replica(pod), _waited_on_node(evidence, pod)
        states = ((container, objects.state_of(container, "waiting")) for container in objects.containers(pod))
        waiting_containers = [(container, waiting) for container, waiting in states if waiting]
        for container, waiting in waiting_containers:
            reason = str(waiting.get("reason"))
            if reason in GRACE_SECONDS and waited_seconds >= GRACE_SECONDS[reason]:
                cause = _waiting_cause(replica, container, reason, str(waiting.get("message") or ""))
                found.append(_waited_for(cause, waited_seconds))
        if waiting_containers and not found:
            found += _mount_failures(evidence, pod, waited_seconds)
    return min(found, key=lambda c: c.category is not Category.IMAGE, default=None)


def next_end(evidence: Evidence) -> tuple[float, str] | None:
    """After how many seconds a container that can't start ends the job if nothing changes, and why it can't start."""
    found = []
    for pod in evidence.pods:
        reasons = {str(objects.state_of(container, "waiting").get("reason")) for container in objects.containers(pod)}
        events = _events_of(evidence, pod)
        if not _has_mounted(pod, events):
            reasons |= _NOT_READY_REASONS.keys() & {str(event.get("reason")) for event in events}
        waited_seconds = _waited_on_node(evidence, pod)
        found += [(GRACE_SECONDS[reason] - waited_seconds, reason) for reason in reasons & GRACE_SECONDS.keys()]
    return min(found, default=None)


def _waited_on_node(evidence: Evidence, pod: Json) -> float:
    """Seconds since the pod was scheduled and its last init container ended, which may take long.

    If it isn't known when it was scheduled, since its creation.
    """
    scheduled = objects.scheduling(pod).get("lastTransitionTime") or objects.created(pod)
    ends = (objects.state_of(c, "terminated").get("finishedAt") for is_init, c in objects.with_init(pod) if is_init)
    return min(_waited(evidence, parse_timestamp(time)) for time in (scheduled, *ends))


def _waiting_cause(replica: str, container: Json, reason: str, message: str) -> Cause:
    """The kubelet can't create the container or pull its image."""
    detail = f"{reason}: {message}" if message else reason
    if "Image" in reason or "Registry" in reason:
        image = container.get("image") or (m[1] if (m := re.search(r'image "([^"]+)"', message)) else "its image")
        known = failure_patterns.explain(failure_patterns.PULL_ERRORS, f"{reason} {message}")
        summary = f"{replica} can't pull {image}: {_pull_error(message, known) or reason}"
        return Cause(known.category, summary, detail, known.resolution, replica)
    if reason != "CreateContainerConfigError" and "OCI runtime" in message:
        known, error = _start_error(message)
        return Cause(known.category, f"{replica} {known.description}: {error}", detail, known.resolution, replica)
    summary = f"{replica} can't create container {container.get('name')}: {first_line(message)}"
    if reason == "CreateContainerConfigError":
        return Cause(Category.ENVIRONMENT, summary, detail, failure_patterns.CREATE_MISSING, replica)
    return Cause(Category.INFRASTRUCTURE, summary, detail, "Check the node and the pod's volumes, then retry.", replica)


def _pull_error(message: str, known: FailurePattern) -> str:
    """The end of containerd's chain of messages, where the cause is: `not found`, or about 140 characters.

    :param known: what the end has to contain.
    """
    parts = clipped(message.strip().partition("\n")[0]).split(": ")
    ends = [": ".join(parts[i:]) for i in range(len(parts))]
    ends = [end for end in ends if re.search(known.pattern, end)] or ends
    return "not found" if ends[-1] == "not found" else next((end for end in ends if len(end) <= 140), ends[-1])


def find_start_error(reason: str, message: str) -> FailurePattern | None:
    """What a container's state means; None if it isn't that the container runtime could not start the container."""
    if reason not in (*START_ERRORS, "CreateContainerError"):
        return None
    return _start_error(message)[0]


def start_error_cause(f: Failure) -> Cause | None:
    """The kubelet reports that the container never ran: the container runtime could not start its command."""
    if f.reason not in START_ERRORS:
        return None
    known, error = _start_error(f.message)
    what, code = f"{f.replica} {known.description}", describe_exit_code(f.exit_code)
    return Cause(
        known.category, f"{what}: {error or f.tail.last_line or code}", f.message, known.resolution,
        unquoted=f"{what}: {error or code}",
    )  # fmt: skip


def _start_error(message: str) -> tuple[FailurePattern, str]:
    """The pattern that matches a container runtime's message, and the matching part of the message."""
    found = ((known, re.search(known.pattern, message)) for known in failure_patterns.START_ERRORS)
    return next((known, first_line(match[0])) for known, match in found if match)


def _mount_failures(evidence: Evidence, pod: Json, waited_seconds: float) -> list[Cause]:
    """The most specific event about a pod's volumes or its sandbox, unless its containers could start later.

    A pod that came before its ConfigMap has an event, too, and may then pull its image for a long time.
    """
    events = _events_of(evidence, pod)
    if _has_mounted(pod, events):
        return []
    messages = [
        (reason, str(event.get("message")))
        for event in events
        if (reason := str(event.get("reason"))) in _NOT_READY_REASONS
        and waited_seconds >= GRACE_SECONDS[reason]
        and _is_recent(evidence, event, _NOT_READY_REASONS[reason] is failure_patterns.MOUNT_ERRORS)
    ]
    for errors in (failure_patterns.MOUNT_ERRORS, failure_patterns.SANDBOX_ERRORS):
        for known, (reason, message) in itertools.product(errors, messages):
            if _NOT_READY_REASONS[reason] is errors and re.search(known.pattern, message):
                replica = evidence.kind.replica(pod)
                what = f"{replica} {known.description}"
                output = re.search(r"^Output: (.+)", message, re.MULTILINE)  # of the command mount
                error = f"{first_line(message).split(' : ')[0]}: {output[1]}" if output else message
                error = ends_of_chain(error, MAX_FIRST_LINE_CHARS - len(what) - 2)
                summary = f"{what}: {error}"
                cause = Cause(known.category, summary, f"Event {reason}: {message}", known.resolution, replica)
                return [_waited_for(cause, waited_seconds)]
    return []


#: Reasons of events about a pod whose containers can't start yet, each with its known messages.
_NOT_READY_REASONS = {
    **dict.fromkeys(("FailedMount", "FailedAttachVolume", "FailedMapVolume"), failure_patterns.MOUNT_ERRORS),
    **dict.fromkeys(("FailedCreatePodSandBox", "FailedCreatePodContainer"), failure_patterns.SANDBOX_ERRORS),
}


def _events_of(evidence: Evidence, pod: Json) -> list[Json]:
    uid, name = objects.metadata_of(pod).get("uid"), objects.metadata_of(pod).get("name")
    about = ((event, event.get("involvedObject") or {}) for event in evidence.events)
    return [event for event, of in about if of.get("name") == name and of.get("uid") in (None, uid)]


def _is_recent(evidence: Evidence, event: Json, is_of_mount: bool) -> bool:
    seconds = MOUNT_EVENT_SECONDS if is_of_mount else SANDBOX_EVENT_SECONDS
    return evidence.now is None or evidence.now.timestamp() - objects.event_time(event) <= seconds


def _has_mounted(pod: Json, events: Sequence[Json]) -> bool:
    """Whether the kubelet has mounted the pod's volumes: before that, it neither pulls images nor starts containers."""
    return (
        objects.has_condition(pod, "PodReadyToStartContainers")
        or any(str(event.get("reason")) in _AFTER_MOUNT for event in events)
        or any((c.get("state") or {}).keys() & {"running", "terminated"} for c in objects.containers(pod))
    )


_AFTER_MOUNT = ("Pulling", "Pulled", "Created", "Started")  #: Reasons of the kubelet's events.


def find_missing_claim(evidence: Evidence, waited_seconds: float) -> tuple[str, Cause] | None:
    """A PersistentVolumeClaim that doesn't exist, as the scheduler says of a pod, and the cause. This may be old news.

    :param waited_seconds: for how long the scheduler has said so.
    """
    for pod in evidence.pods:
        condition = objects.scheduling(pod)
        waits = condition.get("status") == "False" and not objects.is_being_deleted(pod)
        message = str(condition.get("message"))
        if waits and (missing := re.search(failure_patterns.MISSING_CLAIM.pattern, message)):
            replica = evidence.kind.replica(pod)
            summary = f"{replica} can't be scheduled: {missing[0]}"
            cause = Cause(Category.ENVIRONMENT, summary, message, failure_patterns.MISSING_CLAIM.resolution, replica)
            return missing[1], _waited_for(cause, waited_seconds)
    return None


def find_unschedulable_pod(evidence: Evidence) -> Cause | None:
    """No node fits a pod, its scheduler doesn't respond, or the namespace's quota is used up."""
    unscheduled = [(pod, c) for pod in evidence.pods if (c := objects.scheduling(pod)).get("status") == "False"]
    if unscheduled:
        pod, condition = unscheduled[0]
        message = str(condition.get("message") or "the scheduler gives no reason")
        hints = [hint.resolution for hint in failure_patterns.SCHEDULING_HINTS if re.search(hint.pattern, message)]
        if excluded := describe_avoided(pod):
            hints.append(excluded)
        about_nodes = re.split(r"\. (?:no new claims|preemption)", message)[0].rstrip(".")
        selection = describe_selection(pod) if "selector" in message else ""
        selected = f"\nIt selects nodes by {selection}." if selection else ""
        replica = evidence.kind.replica(pod)
        summary = f"{replica} can't be scheduled: {about_nodes}"
        detail = f"{len(unscheduled)} of {len(evidence.pods)} pods have no node.\n{message}{selected}"
        resolution = " ".join(hints) or failure_patterns.SCHEDULING_HINTS[-1].resolution
        return Cause(Category.SCHEDULING, summary, detail, resolution, replica)
    for pod in evidence.pods:
        if scheduler := _silent_scheduler(pod):
            replica = evidence.kind.replica(pod)
            summary = f"{replica} waits for the scheduler {scheduler}, which has not responded"
            resolution = f"Check that the scheduler {scheduler} runs, or remove schedulerName."
            return Cause(Category.SCHEDULING, summary, "", resolution, replica)
    for event in evidence.events:
        message = str(event.get("message"))
        reason = str(event.get("reason"))
        if (reason.startswith("FailedCreate") or reason in refusals.CREATION_FAILURES) and "quota" in message:
            quota = _without_prefix(message).removeprefix("exceeded quota: ")
            summary = f"{evidence.title} exceeds the namespace's quota: {quota}"
            resolution = "Free some of the quota, or ask its administrator for a larger one."
            return Cause(Category.SCHEDULING, summary, f"Event {reason}: {message}", resolution)
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


def _silent_scheduler(pod: Json) -> str:
    """The pod's scheduler, if it isn't the default one and has reported nothing about a pod without a node."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    name = str(spec.get("schedulerName") or "default-scheduler")
    waits = status.get("phase", "Pending") == "Pending" and not spec.get("nodeName") and not status.get("conditions")
    return name if waits and name != "default-scheduler" else ""


def _without_prefix(message: str) -> str:
    """The reason in the message of an event FailedCreate..., without the name of the object."""
    return re.sub(r'^Error creating: (\w+ "[^"]+" is (forbidden|invalid): )?', "", first_line(message))


_OBSTACLES = (
    find_blocked_container,
    find_operator_rejection,
    find_refused_pods,
    find_unschedulable_pod,
    find_refused_resources,
)
