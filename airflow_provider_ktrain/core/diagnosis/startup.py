"""Why a job does not start: refused by its operator or by admission, without a node, an image or a volume."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from airflow_provider_ktrain.core.diagnosis import failure_patterns as words
from airflow_provider_ktrain.core.diagnosis.evidence import Seen, evidence_of
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.pod_failures import Failure, Json, exit_code_text, failures, moment
from airflow_provider_ktrain.core.state.status import true_conditions
from airflow_provider_ktrain.core.text import clipped, first_line

PATIENCE: dict[str, float] = {
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
}  #: seconds for which a reason for waiting may heal by itself

STARTS = 3  #: restarts after which a command that cannot be started is given up


def hopeless(
    job: Json,
    pods: Sequence[Json],
    events: Sequence[Json] = (),
    waited: float = 0.0,
    now: datetime | None = None,
) -> Cause | None:
    """Why a job will never start, or None while it may.

    :param waited: seconds since the job last got on. What may heal by itself (a registry that is away, a Secret that
        is still to be made) is hopeless only after some patience: see `PATIENCE`.
    :param now: by which the patience with each pod counts from when it got its node: others may have had one for hours.
        Default: it counts from `waited` alone.
    """
    seen = evidence_of(job, pods, events)
    if "Running" in true_conditions(job) or seen.failed:
        return None
    return refused_by_operator(seen) or cannot_start(seen, waited, now) or pods_refused(seen, waited)


def never_starts(job: Json, pods: Sequence[Json]) -> Cause | None:
    """Why a container that is restarted again and again will never run, or None.

    Its job says Running all the while: under OnFailure, which is training-operator's default, without end.
    """
    kind = evidence_of(job, pods, ()).kind
    for failure in failures(kind, pods, {}):
        is_needed = failure.is_init or kind.container in (None, failure.container)  # a sidecar ends no training
        tried_often = is_needed and failure.final and failure.restarts >= STARTS
        if tried_often and (cause := not_started(failure)) and cause.category is Category.IMAGE:
            said = f"{cause.summary}; it was tried {failure.restarts + 1} times"
            return replace(cause, summary=said, replica=failure.replica)
    return None


def find_obstacle(seen: Seen) -> Cause | None:
    """What keeps pods from being made, placed or started."""
    return cannot_start(seen) or pods_refused(seen) or unschedulable(seen)


def refused_by_operator(seen: Seen) -> Cause | None:
    for event in seen.events:
        reason, message = str(event.get("reason")), str(event.get("message"))
        for pattern, said, what, resolution in _REFUSALS:
            if re.search(pattern, reason) and re.search(said, message):
                return Cause(
                    Category.CONFIGURATION,
                    f"{seen.title} {what}: {first_line(message)}",
                    f"event {reason}",
                    resolution,
                    retryable=False,
                )
    return None


_REFUSALS = (
    (
        r"FailedValidation$|^ValidationError$",
        "",
        "is refused by its operator and will never run",
        "correct the manifest: `ktrain check` names the field",
    ),
    (
        r"^FailedCreateService$",
        "must be no more than 63 characters",
        "has a name that is too long for its services, and will never get a status",
        "shorten the job's name",
    ),
    (r"^FailedCreate", "is invalid", "has pods that the cluster refuses", "correct the field that is named"),
)


def pods_refused(seen: Seen, waited: float = math.inf) -> Cause | None:
    """Admission refuses the pods. A quota is the scheduling's affair: others will free some of it."""
    for event in seen.events if waited >= PATIENCE["FailedCreatePod"] else ():
        message = str(event.get("message"))
        refused = str(event.get("reason")).startswith("FailedCreate") and re.search(_ADMISSION, message)
        if refused and not _made_since(seen, message):
            return Cause(
                Category.ENVIRONMENT,
                f"{seen.title} has pods that the cluster refuses: {first_line(message)}",
                f"event {event.get('reason')}",
                "correct what is named, or ask whoever set the rule; a service account must exist in the namespace",
            )
    return None


_ADMISSION = r"denied the request|is forbidden: (?!exceeded quota)"


def _made_since(seen: Seen, message: str) -> bool:
    """Whether the pod that was refused is there by now: what was missing may have been created meanwhile."""
    there = [str((pod.get("metadata") or {}).get("name")) for pod in seen.pods]
    named = re.search(r'pods "([^"]+)"', message)
    if named is None:
        return bool(there)
    stem = re.sub(r"(-launcher-)\w{5}$", r"\1", named[1])  # a batch Job gives each try another name
    return any(name == stem or (stem.endswith("-") and name.startswith(stem)) for name in there)


def not_started(f: Failure) -> Cause | None:
    """The kubelet's word that the container never ran."""
    if f.reason not in ("StartError", "ContainerCannotRun", "RunContainerError"):
        return None
    known, said = _start_failure(f.message)
    said = said or f.tail.last or exit_code_text(f.exit_code)
    return Cause(known.category, f"{f.replica}: {known.what}: {said}", "", known.resolution)


def _start_failure(message: str) -> tuple[words.Words, str]:
    """What a container runtime means, and its own words for it."""
    found = ((known, re.search(known.pattern, message)) for known in words.STARTS)
    return next((known, first_line(match[0])) for known, match in found if match)


def cannot_start(seen: Seen, longest: float = math.inf, now: datetime | None = None) -> Cause | None:
    """The first pod whose container waits for what will not come. A container that only waits its turn says nothing."""
    found = []
    for pod in seen.pods:
        status = pod.get("status") or {}
        waited = longest if now is None else min(longest, _seconds_on_node(pod, now))
        states = [c for key in ("initContainerStatuses", "containerStatuses") for c in status.get(key) or ()]
        waits = [(c, w) for c in states if (w := (c.get("state") or {}).get("waiting"))]
        for container, waiting in waits:
            reason = str(waiting.get("reason"))
            if reason in PATIENCE and waited >= PATIENCE[reason]:
                found.append(_waiting_cause(seen.replica_of(pod), container, reason, str(waiting.get("message") or "")))
        if waits and not found:
            found += _mount_failures(seen, pod, waited)
    return min(found, key=lambda c: c.category is not Category.IMAGE, default=None)


def _seconds_on_node(pod: Json, now: datetime) -> float:
    """Since it got its node; since its creation where nobody says when that was."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    scheduled = [c.get("lastTransitionTime") for c in conditions if c.get("type") == "PodScheduled"]
    since = moment(next(iter(scheduled), (pod.get("metadata") or {}).get("creationTimestamp")))
    return (now - since).total_seconds() if since else math.inf


def _waiting_cause(replica: str, container: Json, reason: str, message: str) -> Cause:
    if "Image" in reason or "Registry" in reason:
        image = container.get("image") or (m[1] if (m := re.search(r'image "([^"]+)"', message)) else "")
        return Cause(
            Category.IMAGE,
            f"{replica}: image {image} cannot be pulled ({reason}): {_why_no_image(message)}",
            message,
            _image_remedy(reason, message),
            replica,
            retryable=reason != "InvalidImageName",
        )
    if reason != "CreateContainerConfigError" and "OCI runtime" in message:
        known, said = _start_failure(message)
        summary = f"{replica}: {known.what}: {said}"
        return Cause(known.category, summary, "", known.resolution, replica)
    missing = reason == "CreateContainerConfigError"
    return Cause(
        Category.ENVIRONMENT if missing else Category.INFRASTRUCTURE,
        f"{replica}: container {container.get('name')} cannot be created ({reason}): {first_line(message)}",
        "",
        "create what is missing in the job's namespace, or correct its name in the manifest"
        if missing
        else "look at the node and at the pod's volumes; retry",
        replica,
    )


def _why_no_image(message: str) -> str:
    """The end of a containerd message is its cause: what is before says who told whom."""
    line = clipped(message.strip().partition("\n")[0])
    parts = line.split(": ")
    return next((tail for i in range(len(parts)) if len(tail := ": ".join(parts[i:])) <= 140), line[-140:])


def _image_remedy(reason: str, message: str) -> str:
    for pattern, remedy in (
        ("NeverPull", "put the image on the nodes, or set imagePullPolicy IfNotPresent"),
        ("InvalidImageName", "correct the image's name"),
        (r"(?i)unauthorized|forbidden|denied|401|403", "give imagePullSecrets that may pull it, or correct its name"),
        (r"(?i)not found|manifest unknown|404", "correct the image's name and tag, or push it"),
        (
            r"(?i)no such host|lookup|timeout|refused|unreachable",
            "correct the registry's name, or let the nodes reach it",
        ),
    ):
        if re.search(pattern, f"{reason} {message}"):
            return remedy
    return "correct the image's name, or let the nodes reach its registry"


def _mount_failures(seen: Seen, pod: Json, waited: float) -> list[Cause]:
    """The most telling event about a pod's volumes."""
    uid, name = (pod.get("metadata") or {}).get("uid"), (pod.get("metadata") or {}).get("name")
    messages = [
        (reason, first_line(str(event.get("message"))))
        for event in seen.events
        if (reason := str(event.get("reason"))) in ("FailedMount", "FailedAttachVolume")
        and waited >= PATIENCE[reason]
        and (about := event.get("involvedObject") or {}).get("name") == name
        and about.get("uid") in (None, uid)
    ]
    for known, (reason, said) in itertools.product(words.MOUNTS, messages):
        if re.search(known.pattern, said):
            replica = seen.replica_of(pod)
            what = f"{replica}: {known.what}: {said}"
            return [Cause(known.category, what, f"event {reason}", known.resolution, replica)]
    return []


def unschedulable(seen: Seen) -> Cause | None:
    stuck = [(pod, c) for pod in seen.pods if (c := _not_scheduled(pod))]
    if stuck:
        pod, condition = stuck[0]
        message = str(condition.get("message") or "no reason given")
        return Cause(
            Category.SCHEDULING,
            f"{seen.replica_of(pod)} finds no node: {_scheduler_words(message)}",
            f"{len(stuck)} of {len(seen.pods)} pods have no node\n{message}",
            "; ".join(remedy for pattern, remedy in words.PLACES if re.search(pattern, message)) or words.PLACES[-1][1],
            seen.replica_of(pod),
        )
    for pod in seen.pods:
        if scheduler := _waits_for_scheduler(pod):
            return Cause(
                Category.SCHEDULING,
                f"{seen.replica_of(pod)} is looked at by no scheduler: schedulerName is {scheduler}",
                "",
                f"see whether the scheduler {scheduler} runs, or leave schedulerName out",
                seen.replica_of(pod),
            )
    for event in seen.events:
        if str(event.get("reason")).startswith("FailedCreate") and "quota" in str(event.get("message")):
            said = first_line(str(event.get("message")))
            return Cause(
                Category.SCHEDULING, f"{seen.title} exceeds the namespace's quota: {said}", "", "free some, or ask"
            )
    return None


def _not_scheduled(pod: Json) -> Json | None:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == "PodScheduled" and c.get("status") == "False"), None)


def _waits_for_scheduler(pod: Json) -> str:
    """The name of a scheduler that is not the cluster's own and has said nothing of a pod that needs a node."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    name = str(spec.get("schedulerName") or "default-scheduler")
    waits = status.get("phase", "Pending") == "Pending" and not spec.get("nodeName") and not status.get("conditions")
    return name if waits and name != "default-scheduler" else ""


def _scheduler_words(message: str) -> str:
    """What the scheduler says of the nodes, without its words on claims and preemption."""
    return re.split(r"\. (?:no new claims|preemption)", message)[0].rstrip(".")
