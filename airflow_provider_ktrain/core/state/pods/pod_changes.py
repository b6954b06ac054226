"""How the program of a pod ended: by itself, or because somebody stopped the pod.

A program that handles SIGTERM by saving a checkpoint and exiting with 0 ends like one that is complete. Times alone
can't tell the two apart: they are whole seconds (recording 110), the clock of a node may be seconds off, and a node
that was silent reports an end from before the request (112). The order of the pod's changes can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Self

from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds, timestamp

#: The end of a container is the node's time, and the request the API server's.
MAX_CLOCK_SKEW_SECONDS = 5.0
MAX_LAG_SECONDS = 60.0  #: How long the job's status may take to show that its program has ended.


class Verdict(StrEnum):
    """How the program of a pod ended, as far as its changes show that."""

    RUNS = "runs"  #: It exists, and has neither ended nor been requested to.
    BY_ITSELF = "ended by itself"
    STOPPED = "stopped"
    FAILED = "failed"  #: No operator takes that for a success.
    UNKNOWN = "unknown"


class First(StrEnum):
    """Which of two changes of a pod was shown first."""

    END = "end"
    REQUEST = "request"
    UNKNOWN = "unknown"  #: They were seen together.


@dataclass(frozen=True)
class PodEnd:
    """What is known of a pod.

    :param exists: whether the pod exists.
    :param failed: whether its program or the pod failed.
    :param ended: whether its program has ended.
    :param finished: when, by the clock of the node, in epoch seconds; None if it isn't known.
    :param requested: when the pod was requested to end, in epoch seconds; None if it wasn't.
    :param disrupted: whether the condition DisruptionTarget says so.
    :param first: which of the two was shown first.
    :param observed: whether the kubelet knew of the deletion when it reported the end (Kubernetes 1.34 and newer); None
        if the pod doesn't show that.
    :param grace: for how many seconds it may run on after the request.
    """

    exists: bool = False
    failed: bool = False
    ended: bool = False
    finished: float | None = None
    requested: float | None = None
    disrupted: bool = False
    first: First = First.UNKNOWN
    observed: bool | None = None
    grace: float = objects.DEFAULT_GRACE_SECONDS

    def verdict(self, job_end: float | None) -> Verdict:
        """How the program ended.

        :param job_end: when the job ended, in epoch seconds; None if it has not.
        """
        requested = self.requested
        if requested is not None and job_end is not None and requested > job_end + MAX_CLOCK_SKEW_SECONDS:
            requested = None  # what ended the job was before that
        if self.failed:
            return Verdict.FAILED
        if requested is None and not self.ended:
            return Verdict.RUNS if self.exists else Verdict.UNKNOWN
        if requested is None or self.first is First.END:
            return Verdict.BY_ITSELF
        if not self.ended:
            has_stopped = job_end is None or job_end <= requested + self.grace + MAX_LAG_SECONDS
            return Verdict.STOPPED if has_stopped else Verdict.UNKNOWN
        if self.first is First.REQUEST or self.disrupted:
            is_earlier = self.finished is not None and self.finished < requested - MAX_CLOCK_SKEW_SECONDS
            return Verdict.BY_ITSELF if is_earlier else Verdict.STOPPED
        if self.observed is None:
            return Verdict.UNKNOWN
        return Verdict.STOPPED if self.observed else Verdict.BY_ITSELF


@dataclass(frozen=True, slots=True)
class PodChanges:
    """What is kept of the changes of a pod that was requested to end, or has a container that has ended.

    The changes may come in any order, and repeatedly: a watch may show a change after a read has shown a later one.

    :param version: the latest resourceVersion of the pod without a request and an end; "" if none was seen.
    :param requested: when it was requested to end, in epoch seconds: the earliest time, because the kubelet moves the
        deletionTimestamp at the end; None if it wasn't.
    :param running: containers that had not ended when the request was shown.
    :param ended: when containers ended, by name, whose end was shown without a request, as RFC 3339.
    """

    version: str = ""
    requested: float | None = None
    running: frozenset[str] = frozenset()
    ended: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def requested_before_end(self, at: float, container: str) -> Self:
        """These changes, and that an earlier process has seen a request at `at`, in epoch seconds, before the end."""
        return replace(self, requested=_earlier(self.requested, at), running=self.running | {container})

    def first(self, container: str, finished_at: str) -> First:
        """Which was shown first, the request or the end of a container's last run, which ended at `finished_at`."""
        if self.ended.get(container) == finished_at:
            return First.END
        return First.REQUEST if container in self.running else First.UNKNOWN


def with_change(changes: PodChanges | None, before: Json, pod: Json) -> PodChanges | None:
    """The changes with one more; None while there is nothing to keep.

    :param before: the pod as it was seen before this change; empty if it wasn't.
    """
    requested, ends = requested_at(pod), _ends(pod)
    if changes is None:
        if requested is None and not any(ends.values()):
            return None
        changes = PodChanges(_version(before) if objects.uid_of(before) == objects.uid_of(pod) else "")
    if requested is not None:
        running = changes.running | {name for name, end in ends.items() if not end}
        return replace(changes, requested=_earlier(changes.requested, requested), running=running)
    if not any(ends.values()):  # an older change, or a container was started again
        return replace(changes, version=max(changes.version, _version(pod), key=_number))
    return replace(changes, ended={**changes.ended, **{name: end for name, end in ends.items() if end}})


def as_ended(pod: Json, changes: PodChanges | None) -> Json:
    """A pod as a diagnosis needs it.

    A deletion that was requested after its main containers had ended explains no end, and is left out. Else, once the
    kubelet has removed the grace period, the deletionTimestamp becomes the time of the request.
    """
    if changes is None or not objects.is_being_deleted(pod):
        return pod
    meta, ends = dict(objects.metadata_of(pod)), _ends(pod)
    if ends and all(changes.first(container, end) is First.END for container, end in ends.items()):
        del meta["deletionTimestamp"]
    elif changes.requested is not None and not meta.get("deletionGracePeriodSeconds"):
        meta["deletionTimestamp"] = timestamp(changes.requested)
    return {**pod, "metadata": meta}


def requested_at(pod: Json) -> float | None:
    """When a pod was requested to end, in epoch seconds, as this state of it shows that; None if it wasn't."""
    deleted = objects.deletion_requested_at(pod)
    return _earlier(None if deleted is None else deleted.timestamp(), disrupted_at(pod))


def disrupted_at(pod: Json) -> float | None:
    """Since when the pod has the condition DisruptionTarget, in epoch seconds; None if it hasn't."""
    if not objects.has_condition(pod, "DisruptionTarget"):
        return None
    return epoch_seconds(objects.condition_of(pod, "DisruptionTarget").get("lastTransitionTime")) or 0.0


def end_of(pod: Json, changes: PodChanges | None, container: str, *, exists: bool) -> PodEnd:
    """What is known of a pod.

    :param pod: as last seen.
    :param changes: what is kept of its changes; None: nothing.
    :param container: name of the main container.
    """
    ended = objects.state_of(objects.container_status(pod, container), "terminated")
    status, meta = pod.get("status") or {}, objects.metadata_of(pod)
    changes, generation = changes or PodChanges(), meta.get("generation")
    shows_request = generation and objects.is_being_deleted(pod) and status.get("observedGeneration")
    return PodEnd(
        exists=exists,
        failed=status.get("phase") == "Failed" or objects.run_failed(ended),
        ended=bool(ended) or objects.has_ended(pod),
        finished=epoch_seconds(ended.get("finishedAt")),
        requested=_earlier(changes.requested, requested_at(pod)),
        disrupted=disrupted_at(pod) is not None,
        first=changes.first(container, _end(ended)),
        observed=status["observedGeneration"] == generation if shows_request else None,
        grace=max(objects.grace_of(pod), float(meta.get("deletionGracePeriodSeconds") or 0.0)),  # of the request
    )


def version_before_end(pod: Json, changes: PodChanges | None) -> str:
    """The resourceVersion from which the changes of a pod show how it ended; "" if it isn't known."""
    return _version(pod) if changes is None else changes.version


def _ends(pod: Json) -> dict[str, str]:
    """The end of each container's current run; "" if it has not ended."""
    return {str(c.get("name")): _end(objects.state_of(c, "terminated")) for c in objects.main_containers(pod)}


def _end(terminated: Json) -> str:
    return str(terminated.get("finishedAt")) if terminated else ""


def is_newer(pod: Json, known: Json) -> bool:
    """Whether a state of a pod is newer than a known one. resourceVersions of one kind are ordered."""
    return _number(_version(pod)) > _number(_version(known))


def _version(pod: Json) -> str:
    return str(objects.metadata_of(pod).get("resourceVersion") or "")


def _number(version: str) -> int:
    return int(version) if version.isdigit() else -1


def _earlier(one: float | None, other: float | None) -> float | None:
    return min((at for at in (one, other) if at is not None), default=None)
