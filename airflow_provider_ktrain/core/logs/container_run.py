"""The newest run of a container, according to its pod's status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Pod = Mapping[str, Any]
#: Why a run of a container has ended that never began, by its terminated state.
START_ERRORS = ("StartError", "ContainerCannotRun", "RunContainerError")


@dataclass(frozen=True)
class Run:
    """The newest run of a container, according to its pod's status.

    :param restart: the container's restartCount.
    :param started: there is a log to request.
    :param ended: this run writes no more lines.
    :param final: the pod has ended, so there will be no other run.
    :param restarting: the run has just ended, and another one will start.
    :param backing_off: the kubelet waits before it starts the next run, and already serves the ended one as `previous`.
    :param never_began: the container runtime could not start it, or the one before: it wrote nothing.
    :param started_at: as the kubelet reports it; "" if unknown.
    :param finished_at: as the kubelet reports it; "" if it runs or this isn't known.
    """

    restart: int = 0
    started: bool = False
    ended: bool = False
    final: bool = False
    restarting: bool = False
    backing_off: bool = False
    never_began: bool = False
    started_at: str = field(default="", compare=False)
    finished_at: str = field(default="", compare=False)


def run_of(pod: Pod, container: str) -> Run:
    """The newest run of a container. During a back-off (waiting, with a lastState), that is the run that ended."""
    status, spec = pod.get("status") or {}, pod.get("spec") or {}
    final = status.get("phase") in ("Succeeded", "Failed")
    statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    found: Mapping[str, Any] = next((s for s in statuses if s.get("name") == container), {})
    state = found.get("state") or {}
    running, terminated = "running" in state, state.get("terminated")
    last = (found.get("lastState") or {}).get("terminated")
    newest = state.get("running") or terminated or last or {}
    started = running or terminated is not None or bool(found.get("lastState"))
    policy = spec.get("restartPolicy", "Always")
    init = any(c.get("name") == container for c in spec.get("initContainers") or ())
    failed = bool((terminated or {}).get("exitCode"))
    again = failed if init or policy == "OnFailure" else True
    return Run(
        restart=found.get("restartCount") or 0,
        started=started,
        ended=final or (started and not running),
        final=final,
        restarting=terminated is not None and again and policy != "Never" and not final,
        backing_off=started and not running and terminated is None,
        never_began=str((terminated or last or {}).get("reason")) in START_ERRORS,
        started_at=str(newest.get("startedAt") or ""),
        finished_at=str(newest.get("finishedAt") or ""),
    )
