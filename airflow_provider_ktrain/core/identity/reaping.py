"""Decides which jobs the reaper releases, by their state in the cluster and the state of their task in Airflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.identity import names
from airflow_provider_ktrain.core.state.pods.objects import is_being_deleted
from airflow_provider_ktrain.core.state.status import Seen, phase_of, seen_in
from airflow_provider_ktrain.core.text.output import counted

#: States of a task instance in which no process follows its job. In every other state one does or will.
ENDED_TASK_STATES = ("success", "failed", "upstream_failed", "skipped", "removed", "absent")


@dataclass(frozen=True)
class Verdict:
    """Whether a job is orphaned, and why.

    :param orphan: whether it is. The reaper releases a job that is orphaned at two checks in a row.
    """

    orphan: bool
    reason: str


def judge(job: Mapping[str, Any], deployment: str, state: str, held: int) -> Verdict:
    """Whether a job is orphaned.

    :param deployment: id of this deployment; jobs of other deployments are never touched.
    :param state: state of the owner's task instance in Airflow; `absent` if it does not exist.
    :param held: number of the job's pods that have not ended.
    """
    owner = names.Owner.of(job)
    if owner is names.Unreadable.OWNER:
        return Verdict(False, owner.value)
    if owner is None or owner.key.deployment != deployment:
        return Verdict(False, "it does not belong to this deployment")
    if state not in ENDED_TASK_STATES:
        return Verdict(False, f"its task is {state}")
    if is_being_deleted(job):
        return Verdict(False, "it is being deleted")
    phase = phase_of(job)
    if phase.ended and not is_kept(job):
        return Verdict(True, f"its task is {state}; job {phase} still exists")
    if not held and (phase.ended or names.annotation(job, names.SUSPENDED_ANNOTATION)):
        return Verdict(False, f"it is {phase} and has no active pods")
    return Verdict(True, f"its task is {state}; job {phase} with {counted(held, 'active pod')}")


def is_kept(job: Mapping[str, Any]) -> bool:
    """Whether a job is kept after it has ended: by its task's on_finish_action, and also if that is unknown."""
    action = names.OnFinishAction.of(names.annotation(job, names.FINISH_ANNOTATION))
    return not action.deletes(succeeded=seen_in(job, ()) is Seen.SUCCEEDED)
