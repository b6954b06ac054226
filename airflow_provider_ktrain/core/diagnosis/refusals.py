"""What the events of refused creations mean together: which object was refused, and which events contradict that."""

from __future__ import annotations

import re
from collections.abc import Sequence

from airflow_provider_ktrain.core.diagnosis import failure_patterns
from airflow_provider_ktrain.core.state.pods.objects import Json, event_time

#: Reasons of events, and what could not be created.
CREATION_FAILURES = {"TrainJobResourcesCreationFailed": "JobSet", "JobCreationFailed": "Jobs"}
#: Kinds of objects whose events show that a creation worked, by the kind of the refused object; "" is the job.
_BELOW = {"": ("JobSet", "Job", "Pod"), "JobSet": ("JobSet", "Job", "Pod"), "Job": ("Job", "Pod"), "Pod": ("Pod",)}
_NAME = re.compile(r"\b(?:pods?|services?|jobs?(?:\.batch)?)(?: \"|: ?)([a-z0-9][a-z0-9.-]*)", re.IGNORECASE)


def is_rejection(event: Json) -> bool:
    """Whether the operator reports that the job is invalid."""
    return re.search(r"FailedValidation$|^ValidationError$", str(event.get("reason"))) is not None


def is_refusal(event: Json) -> bool:
    """Whether the event reports a refusal. An exceeded quota doesn't count, because other jobs will free some of it."""
    text = f"{event.get('reason')}: {event.get('message')}"
    if event.get("reason") in CREATION_FAILURES:
        return "exceeded quota" not in text
    return is_rejection(event) or failure_patterns.first_match(failure_patterns.POD_REFUSALS, text) is not None


def refused_object(event: Json, job: str) -> tuple[str, str] | None:
    """Kind and name of the object that was refused; None if the event doesn't name it.

    :param job: name of the job, which a JobSet has too.
    """
    created = _created_kind(event)
    name = job if created == "JobSet" else created_name(event)
    return (created, name) if created in ("Pod", "Service", "Job", "JobSet") and name else None


def created_name(event: Json) -> str:
    """The name of the object whose creation the event is about, without a random end; empty if it is not named."""
    named = _NAME.search(str(event.get("message")))
    name = named[1] if named else ""
    # a batch Job gives each of its pods another name
    is_of_job = event.get("reason") in ("FailedCreate", "SuccessfulCreate") or "-launcher-" in name
    return re.sub(r"-\w{5}$", "-", name) if is_of_job else name


def has_name(name: str, created: str) -> bool:
    """Whether an object has a name that `created_name` returned."""
    return name == created or (created.endswith("-") and name.startswith(created))


def is_contradicted(refusal: Json, events: Sequence[Json]) -> bool:
    """Whether an event that isn't older shows that the refusal is over.

    The object was created since, or its creation fails for another reason, such as a quota. A further refusal doesn't
    contradict. Two events of one second have no order.
    """
    return any(
        event_time(other) >= event_time(refusal) and not is_refusal(other) and _is_about_same(refusal, other)
        for other in events
    )


def _is_about_same(refusal: Json, other: Json) -> bool:
    """Whether an event is about what was refused, or about what exists only if that was created."""
    created, name = _created_kind(refusal), created_name(refusal)
    about, about_other = (event.get("involvedObject") or {} for event in (refusal, other))
    if about.get("uid") == about_other.get("uid") and about.get("name") == about_other.get("name"):
        if not created:
            return _reporter(refusal) == _reporter(other)
        other_name = created_name(other)
        return _created_kind(other) == created and (not name or not other_name or has_name(other_name, name))
    if about_other.get("kind") not in _BELOW.get(created, (created,)):
        return False
    other_name = str(about_other.get("name"))
    is_child = created == "Job" and other_name.startswith(f"{name}-")
    return created in ("", "JobSet") or not name or is_child or has_name(other_name, name)


def _created_kind(event: Json) -> str:
    """The kind of the object whose creation the event is about; empty if it is about something else."""
    reason = str(event.get("reason"))
    if reason in CREATION_FAILURES:
        return CREATION_FAILURES[reason].rstrip("s")
    creation = re.match(r"(?:Failed|Successful)Create(\w*)", reason)
    return "" if creation is None else creation[1] or "Pod"


def _reporter(event: Json) -> str:
    """The component that the event comes from."""
    return str((event.get("source") or {}).get("component") or event.get("reportingComponent") or "")
