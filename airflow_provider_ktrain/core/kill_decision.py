"""Decides what happens to the job when its task is killed, by the state of the task in Airflow.

A kill alone proves nothing. Airflow also calls a trigger's `on_kill` when a stalled triggerer wakes up after another
one took over its triggers, and it also sends SIGTERM to a worker that lost its connection or is being redeployed.
Neither is a reason to end the training. A job that is kept is adopted by the next try, followed by the next trigger, or
released by the reaper.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

ABSENT = "absent"  #: the task instance does not exist: its run was deleted
NONE = "none"  #: the task was cleared, which resets its state
UNKNOWN = "unknown"  #: Airflow did not answer


class KillAction(enum.Enum):
    """What happens to the job."""

    RELEASE = "release"
    KEEP = "keep"
    ASK_AGAIN = "ask again"  #: the state is about to change; keep the job if it does not


@dataclass(frozen=True)
class KillDecision:
    """What happens to the job, and why.

    :param action: what happens to the job.
    :param reason: a sentence for the log and the exception.
    :param certain: whether Airflow reported the task's state. Default: True.
    """

    action: KillAction
    reason: str
    certain: bool = True

    @property
    def keep(self) -> bool:
        """Whether the job continues after the kill, at least until Airflow is asked again."""
        return self.action is not KillAction.RELEASE


_ENDED = ("failed", "success", "skipped", "upstream_failed", "removed", NONE, ABSENT)
_CONTINUES = ("deferred", "running", "up_for_retry", "up_for_reschedule", "restarting")
_CHANGING = ("scheduled", "queued")

_TRIGGER: Mapping[str, KillAction] = {
    **dict.fromkeys(_ENDED, KillAction.RELEASE),
    **dict.fromkeys(_CONTINUES, KillAction.KEEP),
    **dict.fromkeys((*_CHANGING, UNKNOWN), KillAction.ASK_AGAIN),
}

_ENDINGS = {
    NONE: "it was cleared",
    "restarting": "it was cleared while it ran",
    ABSENT: "its run or its task instance was deleted",
}
_STOPPED = "The worker was stopped (SIGTERM)"
_KEPT = "The job is kept for the next try; if there is none, the reaper releases it."


def action_for_trigger(state: str) -> KillAction:
    """What a killed trigger does with its job. An unknown state keeps the job.

    Scheduled and queued don't decide it: the task may have been cleared, or may return to a worker with our own event.

    :param state: state of the task instance, or UNKNOWN.
    """
    return _TRIGGER.get(state, KillAction.KEEP)


def decision_for_worker(state: str, retry_left: bool) -> KillDecision:
    """What a worker does with its job when it receives SIGTERM.

    Airflow shows a running task that was cleared as restarting until its worker has ended; the next try trains from the
    start. The job is kept, even without a retry left, in states in which another try or a trigger will follow it.

    :param state: state of the task instance from `compat.task_state`, or UNKNOWN.
    :param retry_left: whether Airflow retries the task if this try fails.
    """
    if state in _ENDED or state == "restarting":
        how = _ENDINGS.get(state, f"its state in Airflow is {state}")
        return KillDecision(KillAction.RELEASE, f"The task was killed: {how}")
    if state == UNKNOWN:
        why = f"{_STOPPED}, and Airflow did not report the task's state"
    elif state == "running":
        why = f"{_STOPPED} while the task was running"
    else:
        return KillDecision(KillAction.KEEP, f"{_STOPPED} while the task was {state}. {_KEPT}")
    if retry_left:
        return KillDecision(KillAction.KEEP, f"{why}. {_KEPT}", certain=state != UNKNOWN)
    return KillDecision(
        KillAction.RELEASE, f"{why}. No retry is left, so the job is released.", certain=state != UNKNOWN
    )
