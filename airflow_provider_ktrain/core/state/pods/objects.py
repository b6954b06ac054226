"""What a pod shows: its conditions, its containers and their runs, and whether Kubernetes or somebody ended it.

Every object is as read from the API server; what is missing in it counts as empty.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from airflow_provider_ktrain.core.kinds.manifest_fields import REQUIRED_NODES
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds, parse_timestamp

Json = Mapping[str, Any]
DEFAULT_GRACE_SECONDS = 30.0  #: Kubernetes' terminationGracePeriodSeconds.
NODE_NAME = "metadata.name"  #: The only field that matchFields of a node affinity may name.
SIGKILLED, SIGTERMED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
BY_TAINT, NO_EXECUTE = "DeletionByTaintManager", "NoExecute taint"  #: The second is for a node that reports.
LOST_RUN = "ContainerStatusUnknown"  #: The kubelet's reason if it can't tell how a run ended.
TIMESTAMP_RESOLUTION = timedelta(seconds=1)  #: Kubernetes writes most times in whole seconds.


def metadata_of(obj: Json) -> Json:
    """The object's metadata."""
    return obj.get("metadata") or {}


def name_of(obj: Json) -> str:
    """The object's name; "None" if it has none."""
    return str(metadata_of(obj).get("name"))


def uid_of(obj: Json) -> str:
    """The object's uid; "None" if it has none."""
    return str(metadata_of(obj).get("uid"))


def labels_of(obj: Json) -> Json:
    """The object's labels."""
    return metadata_of(obj).get("labels") or {}


def created(obj: Json) -> str:
    """The time of creation, which sorts as text; empty if it isn't known."""
    return str(metadata_of(obj).get("creationTimestamp") or "")


def created_at(obj: Json) -> float | None:
    """The time of creation in epoch seconds; None if it isn't known."""
    return epoch_seconds(metadata_of(obj).get("creationTimestamp"))


def is_being_deleted(obj: Json) -> bool:
    """Whether somebody has requested the deletion of the object."""
    return bool(metadata_of(obj).get("deletionTimestamp"))


def has_ended(pod: Json) -> bool:
    """Whether the pod has finished, so that it holds no GPUs."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def node_of(pod: Json) -> str:
    """The name of the pod's node; empty if it isn't scheduled."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def avoided_nodes(pod: Json) -> list[str]:
    """The names of the nodes that every term of a pod's required node affinity excludes, sorted."""
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get(REQUIRED_NODES) or {}).get("nodeSelectorTerms") or ()
    excluded = [
        {
            str(name)
            for field in term.get("matchFields") or ()
            if avoids_node(field)
            for name in field.get("values") or ()
        }
        for term in terms
    ]
    return sorted(set.intersection(*excluded)) if excluded else []


def avoids_node(field: Json) -> bool:
    """Whether an entry of matchFields excludes nodes by their names."""
    return field.get("key") == NODE_NAME and field.get("operator") == "NotIn"


def condition_of(obj: Json, type_: str) -> Json:
    """The object's condition of a type, whatever its status; empty if there is none."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == type_), {})


def has_condition(obj: Json, type_: str) -> bool:
    """Whether the status of the object's condition of a type is True."""
    return str(condition_of(obj, type_).get("status")) == "True"


def resumed_at(job: Json) -> float | None:
    """When a suspended job was last resumed, in epoch seconds; None if it was not."""
    suspended = condition_of(job, "Suspended")
    return epoch_seconds(suspended.get("lastTransitionTime")) if str(suspended.get("status")) == "False" else None


def scheduling(pod: Json) -> Json:
    """The condition PodScheduled; empty if there is none."""
    return condition_of(pod, "PodScheduled")


def silent_since(pod: Json) -> str:
    """Since when the pod's node doesn't report, as RFC 3339; empty if it does.

    Kubernetes then sets Ready of its running pods to False without a reason, and keeps ContainersReady (recording 104).
    """
    ready, phase = condition_of(pod, "Ready"), (pod.get("status") or {}).get("phase")
    silent = phase == "Running" and ready.get("status") == "False" and not ready.get("reason")
    return str(ready.get("lastTransitionTime") or "") if silent and has_condition(pod, "ContainersReady") else ""


# containers


def containers(pod: Json) -> Iterator[Json]:
    """The status of each container, those of init containers first."""
    for _, container in with_init(pod):
        yield container


def main_containers(pod: Json) -> Iterator[Json]:
    """The status of each container that is not an init container."""
    yield from (pod.get("status") or {}).get("containerStatuses") or ()


def container_status(pod: Json, name: str) -> Json:
    """The status of the container of that name, which is not an init container; empty if it isn't known."""
    return next((container for container in main_containers(pod) if container.get("name") == name), {})


def with_init(pod: Json) -> Iterator[tuple[bool, Json]]:
    """Whether it is an init container, and the status, of each container; init containers first."""
    status = pod.get("status") or {}
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            yield key.startswith("init"), container


def only_waits(pod: Json, init_container: str) -> bool:
    """Whether the init container of that name runs, so that nothing else of the pod does."""
    return [container.get("name") for container in containers(pod) if state_of(container, "running")] == [
        init_container
    ]


def restarts_of(pod: Json) -> Iterator[int]:
    """The number of restarts of each container of a pod, init containers included."""
    return map(restart_count, containers(pod))


def restart_count(container: Json) -> int:
    """How often a container was started again in its pod, by its status.

    If the kubelet can't tell how a run ended, it counts the restart before it starts the container. If it has evicted
    the pod, that start never comes (recording 101), so the restart isn't counted here until the container runs.
    """
    count, last = int(container.get("restartCount") or 0), (container.get("lastState") or {}).get("terminated") or {}
    is_lost = state_of(container, "terminated").get("reason", LOST_RUN) == LOST_RUN
    is_counted_early = last.get("reason") == LOST_RUN and is_lost and not state_of(container, "running")
    return max(count - is_counted_early, 0)


def state_of(container: Json, which: str) -> Json:
    """The container's state `running`, `waiting` or `terminated`; empty if it is in another one."""
    return (container.get("state") or {}).get(which) or {}


def runs_of(container: Json) -> Iterator[Json]:
    """The previous and the current run of a container, as far as they are known: its running or terminated states."""
    for state in (container.get("lastState") or {}, container.get("state") or {}):
        yield from (run for key in ("terminated", "running") if (run := state.get(key)))


def run_failed(terminated: Json) -> bool:
    """Whether a run of a container failed, by its terminated state."""
    return terminated.get("exitCode") not in (0, None) or terminated.get("reason") == "OOMKilled"


# ends


def signal_name(exit_code: int | None) -> str:
    """`SIGKILL` for 137 and for -9; empty if the exit code does not denote a signal."""
    number = (exit_code or 0) - 128 if (exit_code or 0) > 128 else -(exit_code or 0)
    try:
        return signal.Signals(number).name if number > 0 else ""
    except ValueError:
        return ""


def grace_of(pod: Json) -> float:
    """The grace period of a pod, or of a template of pods, in seconds."""
    seconds = (pod.get("spec") or {}).get("terminationGracePeriodSeconds")
    return float(DEFAULT_GRACE_SECONDS if seconds is None else seconds)


def deletion_requested_at(pod: Json) -> datetime | None:
    """When the deletion of a pod was requested: its deletionTimestamp less the grace period; None if it was not."""
    deadline = parse_timestamp(metadata_of(pod).get("deletionTimestamp"))
    return deadline - timedelta(seconds=_grace_seconds(pod)) if deadline else None


def _grace_seconds(pod: Json) -> float:
    return float(metadata_of(pod).get("deletionGracePeriodSeconds") or 0)


def was_ended_by_deletion(terminated: Json, pod: Json) -> bool:
    """Whether a container ended because its pod was being deleted. An OOM kill never counts as such.

    A deletion sends SIGTERM at once and SIGKILL at the end of the grace period; a program that handles SIGTERM may end
    with any exit code. If a container exits in the same second in which the deletion is requested, its exit may be the
    reason for the deletion, so only SIGTERM counts then. When the kubelet removes the object, it sets the grace period
    to 0, and the time of the request is lost (recorded): then every SIGKILL and SIGTERM counts.
    """
    deadline, requested = parse_timestamp(metadata_of(pod).get("deletionTimestamp")), deletion_requested_at(pod)
    finished, code = parse_timestamp(terminated.get("finishedAt")), terminated.get("exitCode")
    if deadline is None or requested is None or terminated.get("reason") == "OOMKilled":
        return False
    if finished is None or not _grace_seconds(pod):
        return code in (SIGKILLED, SIGTERMED)
    if code == SIGKILLED:
        return finished >= deadline - TIMESTAMP_RESOLUTION
    return finished >= requested if code == SIGTERMED else finished > requested


def disruption_of(pod: Json) -> tuple[str, str, datetime | None]:
    """Reason, message and time, if Kubernetes ended the pod rather than its program; else empty, empty and None."""
    status = pod.get("status") or {}
    if has_condition(pod, "DisruptionTarget"):
        condition = condition_of(pod, "DisruptionTarget")
        reason, message = str(condition.get("reason") or "DisruptionTarget"), str(condition.get("message") or "")
        reason, at = str(status.get("reason") or reason), parse_timestamp(condition.get("lastTransitionTime"))
        return NO_EXECUTE if reason == BY_TAINT and not _was_silent(pod, at) else reason, message, at
    reason = str(status.get("reason") or "") if status.get("phase") == "Failed" else ""
    return (reason, str(status.get("message") or ""), _last_end(pod)) if reason else ("", "", None)


def _was_silent(pod: Json, evicted: datetime | None) -> bool:
    """Whether a pod was evicted because its node didn't report, which taints the node, too.

    It ends when the node reports again (recording 104), and not within its grace period.
    """
    ready = condition_of(pod, "Ready")
    since = parse_timestamp(ready.get("lastTransitionTime"))
    if evicted is None or silent_since(pod) or (ready.get("status") == "True" and since and since > evicted):
        return True
    latest = evicted + timedelta(seconds=grace_of(pod) + 5)
    ends = (parse_timestamp(state_of(c, "terminated").get("finishedAt")) for c in main_containers(pod))
    return any(end and not evicted - timedelta(seconds=5) <= end <= latest for end in ends)


def failed_runs(container: Json, include_recovered: bool = False) -> list[Json]:
    """The terminated states of a container's failed runs, oldest first: at most the previous and the current one.

    :param include_recovered: also of a container that runs again or has succeeded since. Default: False.
    """
    state, last = container.get("state") or {}, container.get("lastState") or {}
    runs = [s["terminated"] for s in (last, state) if s.get("terminated")]
    recovered = state.get("running") or (state.get("terminated") and not run_failed(state["terminated"]))
    return [] if recovered and not include_recovered else [run for run in runs if run_failed(run)]


def failures_of(pod: Json, include_recovered: bool = False) -> list[tuple[bool, Json, list[Json]]]:
    """The containers of a pod that failed by themselves: whether it is an init container, its status, its failed runs.

    A pod that Kubernetes ended before any container failed has one entry, with an empty status and an empty run.
    """
    disruption, found = disruption_of(pod)[0], []
    for is_init, container in with_init(pod):
        failed, last = failed_runs(container, include_recovered), state_of(container, "terminated")
        # what is deleted isn't started again, so it's the last run that a deletion has ended
        if runs := [run for run in failed if disruption or run is not last or not was_ended_by_deletion(run, pod)]:
            found.append((is_init, container, runs))
    return found or ([(False, {}, [{}])] if disruption else [])


def _last_end(pod: Json) -> datetime | None:
    ends = [parse_timestamp(run.get("finishedAt")) for c in containers(pod) for run in failed_runs(c)]
    return max((at for at in ends if at), default=parse_timestamp((pod.get("status") or {}).get("startTime")))


def event_time(event: Json) -> float:
    """When the event was last seen, in epoch seconds. JobSet's events have fractions of a second, the job has not."""
    times = (
        (event.get("series") or {}).get("lastObservedTime"),
        *(event.get(name) for name in ("lastTimestamp", "eventTime", "firstTimestamp")),
        created(event),
    )
    return next((seconds for time in times if (seconds := epoch_seconds(time)) is not None), math.inf)
