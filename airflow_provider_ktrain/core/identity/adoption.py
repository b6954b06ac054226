"""Decides what a try does with a job that it finds under its name: adopt, replace, wait, take its result, or refuse.

Pure: `engine/submit/create_or_adopt.py` reads the cluster and carries out what is decided here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.identity.names import (
    OWNER_ANNOTATION,
    SUSPENDED_ANNOTATION,
    Owner,
    Reattach,
    Unreadable,
    annotation,
)
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.kinds.conditions import incomplete_annotation
from airflow_provider_ktrain.core.state.pods.objects import containers, is_being_deleted
from airflow_provider_ktrain.core.state.status import Phase, phase_of


class Adoption(enum.Enum):
    """What a task does with an existing job that has the name of its own job."""

    ADOPT = "adopt"  #: Patch the owner to this try and follow it.
    TAKE_RESULT = "take its result"  #: It succeeded for an earlier try of this run: do not train again.
    REPLACE = "replace"  #: Release it, then create.
    WAIT = "wait"  #: It is being deleted: wait until it is gone, then create.
    REFUSE = "refuse"  #: It has no owner annotation, or belongs to another task or to a later try.


@dataclass(frozen=True)
class Decision:
    """What a task does with a job that it finds under its name, and why.

    :param reason: a clause for the log.
    """

    action: Adoption
    reason: str
    detail: str = ""


def first_try_since_clear(max_tries: int, retries: int) -> int:
    """The number of the first try since the task was last cleared.

    A clear sets `max_tries = try_number + retries`. So an owner with at least this try number is an earlier try of the
    same life of the task, and an owner with a lower one is from before the clear. Two cases can't be detected here: a
    clear *while the task runs* doesn't change max_tries and looks like a retry, and `retries` that were lowered in the
    DAG file look like a clear. `cleared` detects the second one.
    """
    return max_tries - retries + 1


def cleared(owner: Owner, me: Owner, first_try: int) -> bool:
    """Whether the task was cleared between two of its tries, as far as Airflow's data shows this."""
    if owner.max_tries is None or me.max_tries is None:
        return owner.try_number < first_try
    return owner.max_tries != me.max_tries


def decide_adoption(
    found: Mapping[str, Any],
    me: Owner,
    first_try: int,
    *,
    reattach: Reattach = "always",
    changed: bool = False,
    has_submitted: bool = True,
) -> Decision:
    """What to do with a job that has our name.

    :param first_try: the result of `first_try_since_clear`.
    :param reattach: `if_unchanged` replaces an unfinished job whose manifest differs from this try's.
    :param has_submitted: whether an earlier try of this run may have submitted a job. False: its task store is empty.
    """
    owner = Owner.of(found)
    if owner is Unreadable.OWNER:
        return Decision(Adoption.REFUSE, "its owner can't be read", f"Read the annotation {OWNER_ANNOTATION}.")
    if owner is None:
        return Decision(Adoption.REFUSE, "it has no owner annotation", "Somebody else created it.")
    if owner.key != me.key:
        return Decision(Adoption.REFUSE, "it belongs to another task", f"Its task is {owner.key}.")
    if owner.try_number > me.try_number:  # this worker was disconnected for long, or the run was deleted and recreated
        return Decision(Adoption.REFUSE, f"it belongs to try {owner.try_number}, and this is try {me.try_number}")
    if owner.ti_id == me.ti_id:  # the response to the create was lost; whatever has happened since is this try's end
        return Decision(Adoption.ADOPT, "this try has created or adopted it")
    phase = phase_of(found)
    incomplete = incomplete_annotation(found) if phase is Phase.SUCCEEDED else ""
    of_deleted_run = owner.is_stored and not has_submitted
    proves_success = (
        phase is Phase.SUCCEEDED
        and not incomplete
        and not of_deleted_run
        and owner.try_number < me.try_number
        and not cleared(owner, me, first_try)
    )
    if is_being_deleted(found) and not proves_success:
        return Decision(Adoption.WAIT, "it is being deleted")
    if owner.try_number == me.try_number:  # try numbers of one run are unique
        theirs = f"it is {phase} and belongs to another try {me.try_number}"
        why = "Another Airflow has the same [ktrain] deployment_id, or this run was deleted and created again."
        return Decision(Adoption.REPLACE if phase.ended else Adoption.REFUSE, theirs, why)
    whose = f"try {owner.try_number}"
    if phase is Phase.FAILED:
        return Decision(Adoption.REPLACE, f"it is the failed job of {whose}")
    if incomplete:
        return Decision(Adoption.REPLACE, f"it succeeded for {whose}, and is probably incomplete", f"{incomplete}.")
    if cleared(owner, me, first_try):
        return Decision(Adoption.REPLACE, f"the task was cleared after {whose} submitted it")
    if phase is Phase.SUCCEEDED and of_deleted_run:
        why = "No try of this run has submitted a job: the run was deleted and created again."
        return Decision(Adoption.REPLACE, f"it succeeded for {whose} of a deleted run", why)
    if phase is Phase.SUCCEEDED:
        return Decision(Adoption.TAKE_RESULT, f"it succeeded for {whose}")
    if changed and reattach == "if_unchanged":
        return Decision(Adoption.REPLACE, f"the manifest has changed since {whose}")
    return Decision(Adoption.ADOPT, f"{whose} left it {phase}")


def may_have_begun(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a container of the job may have started, now or in a pod that no longer exists."""
    if annotation(job, SUSPENDED_ANNOTATION) is not None:
        return True
    conditions = (job.get("status") or {}).get("conditions") or ()
    if any(c.get("type") in ("Running", "Restarting") for c in conditions):
        return True
    return kind_of(job.get("kind")).is_running(job, ()) or any(_may_have_started(pod) for pod in pods)


def _may_have_started(pod: Mapping[str, Any]) -> bool:
    statuses = containers(pod)
    started = any((c.get("state") or {}).keys() & {"running", "terminated"} or c.get("restartCount") for c in statuses)
    return started or (pod.get("status") or {}).get("phase", "Pending") != "Pending"
