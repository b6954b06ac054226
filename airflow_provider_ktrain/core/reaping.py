"""Which jobs a reaper releases: pure, over what the cluster and Airflow say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.identity import FINISH_ANNOTATION, SUSPENDED_ANNOTATION, Owner
from airflow_provider_ktrain.core.state.status import Phase, phase_of

#: states of a task instance in which nobody follows its job any more; in every other one somebody does or will
OVER = ("success", "failed", "upstream_failed", "skipped", "removed", "absent")


@dataclass(frozen=True)
class Verdict:
    """:param orphan: whether the job is a candidate; it is released when it is seen so twice."""

    orphan: bool
    reason: str


def judge(job: Mapping[str, Any], deployment: str, state: str, held: int) -> Verdict:
    """Whether a job is left over.

    :param deployment: ours: jobs of others are never touched.
    :param state: of the owner's task instance, as Airflow says; `absent` where there is none.
    :param held: pods of the job that have not ended.
    """
    owner = Owner.of(job)
    if owner is None or owner.key.deployment != deployment:
        return Verdict(False, "it is not of this deployment")
    if state not in OVER:
        return Verdict(False, f"its task is {state}")
    if (job.get("metadata") or {}).get("deletionTimestamp"):
        return Verdict(False, "it is being deleted")
    phase = phase_of(job)
    if phase.ended and not is_kept(job):
        return Verdict(True, f"its task is {state}, and it is {phase} and was to be deleted")
    if not held and (phase.ended or _note(job, SUSPENDED_ANNOTATION)):
        return Verdict(False, f"it is {phase} and holds nothing")
    return Verdict(True, f"its task is {state}, and it is {phase} with {held} pods that have not ended")


def is_kept(job: Mapping[str, Any]) -> bool:
    """Whether a job stays once it has ended: by its task's on_finish_action, and where that is not known."""
    action = _note(job, FINISH_ANNOTATION)
    return not (action == "delete_job" or (action == "delete_succeeded_job" and phase_of(job) is Phase.SUCCEEDED))


def _note(job: Mapping[str, Any], annotation: str) -> str | None:
    return ((job.get("metadata") or {}).get("annotations") or {}).get(annotation)
