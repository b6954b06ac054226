"""What a kill means for the job: decided by the state of the task in Airflow, never by the kill alone.

Airflow calls a trigger's `on_kill` also where a stalled triggerer wakes up after another one took its triggers, and
sends a worker SIGTERM also where it only lost its connection or is being redeployed. Both are no reason to end a
training. What is kept is adopted by the next try, followed by the next trigger, or released by the reaper.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

ABSENT = "absent"  #: there is no such task instance: its run was deleted
NONE = "none"  #: a clear has reset the state
UNKNOWN = "unknown"  #: Airflow could not be asked


class Action(enum.Enum):
    """What is done with the job."""

    RELEASE = "release"
    KEEP = "keep"
    ASK_AGAIN = "ask again"  #: the state is on its way to another one; keep the job where it stays


@dataclass(frozen=True)
class Decision:
    """What is done with the job, and a sentence that says why.

    :param certain: False where Airflow could not be asked.
    """

    action: Action
    reason: str
    certain: bool = True

    @property
    def keep(self) -> bool:
        return self.action is not Action.RELEASE


_OVER = ("failed", "success", "skipped", "upstream_failed", "removed", NONE, ABSENT)
_GOES_ON = ("deferred", "running", "up_for_retry", "up_for_reschedule", "restarting")
_ON_ITS_WAY = ("scheduled", "queued")

_TRIGGER: Mapping[str, Action] = {
    **dict.fromkeys(_OVER, Action.RELEASE),
    **dict.fromkeys(_GOES_ON, Action.KEEP),
    **dict.fromkeys((*_ON_ITS_WAY, UNKNOWN), Action.ASK_AGAIN),
}

_ENDINGS = {
    NONE: "it was cleared",
    "restarting": "it was cleared while it ran",
    ABSENT: "its run or its task instance was deleted",
}
_STOPPED = "the worker was stopped (SIGTERM)"
_NEXT_TRY = "the job is kept for the next try; if none comes, the reaper releases it"


def of_trigger(state: str) -> Action:
    """What a trigger that is killed does with its job. A state that we do not know keeps it.

    Scheduled and queued tell nothing: the task may have been cleared, or it returns to a worker with our own event.
    """
    return _TRIGGER.get(state, Action.KEEP)


def of_worker(state: str, retry_left: bool) -> Decision:
    """What a worker that gets SIGTERM does with its job.

    A clear of a running task shows as restarting until its worker has ended: the next try is to train anew. A state in
    which another try is certain to come, or a trigger follows the job, keeps it whether or not a retry was left.

    :param state: of the task instance, of `compat.task_state`, or UNKNOWN.
    :param retry_left: whether Airflow retries this try if it fails.
    """
    if state in _OVER or state == "restarting":
        how = _ENDINGS.get(state, f"Airflow has it as {state}")
        return Decision(Action.RELEASE, f"the task was killed: {how}")
    if state == UNKNOWN:
        why = f"{_STOPPED}, and Airflow could not be asked why"
    elif state == "running":
        why = f"{_STOPPED} while Airflow has the task as running"
    else:
        return Decision(Action.KEEP, f"{_STOPPED} while Airflow has the task as {state}: {_NEXT_TRY}")
    if retry_left:
        return Decision(Action.KEEP, f"{why}: {_NEXT_TRY}", certain=state != UNKNOWN)
    return Decision(Action.RELEASE, f"{why}; no retry is left, so the job is released", certain=state != UNKNOWN)
