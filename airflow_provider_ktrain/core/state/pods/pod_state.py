"""The state of a pod in a few words, as `kubectl get pods` prints it in the column STATUS.

There are four differences: a pod without a node has the scheduler's reason instead of Pending, if there is one; the
state is Succeeded instead of Completed, and NodeNotReady if the node doesn't report; and it names an awaited replica.
"""

from __future__ import annotations

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json

PENDING, RUNNING, SUCCEEDED, FAILED = "Pending", "Running", "Succeeded", "Failed"
TERMINATING, CREATING = "Terminating", "ContainerCreating"
SILENT = "NodeNotReady"
INIT = "Init:"  #: Begins the states of a pod whose init containers have not all ended.
_STARTS = (CREATING, "PodInitializing")  # reasons of a container that waits for nothing special
_SAME = {"ErrImagePull": "ImagePullBackOff"}  # the kubelet alternates between the two


def state_of_pod(pod: Json, kind: Kind) -> str:
    """The state of a pod.

    :param kind: of its job: the states of sidecars don't count.
    """
    status = pod.get("status") or {}
    phase = str(status.get("phase") or PENDING)
    main = [container for container in objects.main_containers(pod) if kind.is_main_container(container.get("name"))]
    if phase == FAILED:
        inits = status.get("initContainerStatuses") or ()
        return _failure([*inits, *main]) or str(status.get("reason") or FAILED)
    if phase == SUCCEEDED:
        return phase
    if objects.is_being_deleted(pod):
        return TERMINATING
    if objects.silent_since(pod):
        return SILENT
    if waits := _unscheduled(pod) or (_init_state(pod) if phase == PENDING else ""):
        only_waits = objects.only_waits(pod, kind.behavior.waiting_container)
        return f"{waits} (waits for {kind.replica_name(kind.primaries[0], 0)})" if only_waits else waits
    reasons = (str(objects.state_of(container, "waiting").get("reason") or CREATING) for container in main)
    problem = next((reason for reason in reasons if reason not in _STARTS), "")
    if problem or phase != PENDING:
        return _SAME.get(problem, problem) or phase
    return CREATING if objects.node_of(pod) else PENDING


def passes_by_itself(state: str) -> bool:
    """Whether a pod in this state needs no attention: it runs, has succeeded, starts or ends."""
    return state in (PENDING, RUNNING, SUCCEEDED, TERMINATING, CREATING) or state[len(INIT) : len(INIT) + 1].isdigit()


def _failure(containers: list[Json]) -> str:
    """Why a container of a failed pod ended."""
    ends = (objects.state_of(container, "terminated") for container in containers)
    return next((reason for end in ends if (reason := str(end.get("reason") or "Completed")) != "Completed"), "")


def _unscheduled(pod: Json) -> str:
    """What a pod without a node waits for, such as `Unschedulable` or `SchedulingGated`."""
    condition = objects.scheduling(pod)
    return str(condition.get("reason") or PENDING) if condition.get("status") == "False" else ""


def _init_state(pod: Json) -> str:
    """`Init:1/2` while the second init container runs, or `Init:` and its problem; empty if all have ended."""
    declared = (pod.get("spec") or {}).get("initContainers") or ()
    sidecars = {container.get("name") for container in declared if container.get("restartPolicy") == "Always"}
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or ()
    for number, container in enumerate(statuses):
        state = container.get("state") or {}
        end, reason = state.get("terminated"), (state.get("waiting") or {}).get("reason")
        if (end and not end.get("exitCode")) or (container.get("started") and container.get("name") in sidecars):
            continue
        if end:
            return f"{INIT}{end.get('reason') or 'Error'}"
        if reason and reason not in _STARTS:
            return f"{INIT}{_SAME.get(reason, reason)}"
        return f"{INIT}{number}/{max(len(declared), len(statuses))}"
    return ""
