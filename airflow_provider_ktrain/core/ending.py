"""The rules by which a training's life ends: the first rule that matches decides, and the last one matches everything.

The owner of a life (`engine/training.py`) reads the job and its pods whenever something may end the training, describes
what it knows as a `Situation`, and carries out the ending that `decide` returns. Nothing else decides an end.
docs/guarantees.md contains this list as a table, which `scripts/endings.py` generates.

A watch only shows when to look. Where a rule names what was `seen`, that is a read from the API server made for this
decision. A kill is the exception: Airflow's own word that the task is over is the evidence, because a worker has
seconds, and its one request is fenced by the last resourceVersion that was seen.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TypeVar

from airflow_provider_ktrain.core.identity import OnFinishAction
from airflow_provider_ktrain.core.state.status import Seen

T = TypeVar("T")


class Event(enum.StrEnum):
    """What may end a training's life. The value is its name in the table."""

    # noticed while the job is followed
    ENDED = "the job has ended"
    MISSING = "the job is gone"
    BEING_DELETED = "the job is being deleted"
    OWNED_BY_OTHERS = "the job has another owner"
    LIMIT = "a limit has passed"
    RESTARTS = "max_restarts is exceeded"
    CRASH_LOOP = "a container fails again and again"
    STARTUP_RULE = "a pod can't start"
    QUEUE_VERDICT = "the queue will never admit the job"
    DEADLINE = "execution_timeout has passed"
    CONDITION = "the job has the awaited condition"
    # happened to the process that follows
    HAND_OVER = "the worker's time is over"
    KILL = "the process was asked to stop"
    INTERRUPT = "a user pressed Ctrl-C"
    TRIGGER_FAILED = "the trigger failed"
    DEFERRAL_EXPIRED = "Airflow's timeout of the deferral has expired"
    WAIT_EXPIRED = "the sensor's timeout has expired"
    NO_RIGHT = "the API server refuses the watch (401, 403)"
    ERROR = "an error ends the try"
    FINAL_ERROR = "an error ends the task for good"
    # happened to the submission or the release
    CODE_REFUSED = "the API server refuses the code's ConfigMap"
    RELEASE_FAILED = "an earlier release did not finish"
    OUTCOME_STORED = "Airflow has stored the outcome"
    OUTCOME_NOT_STORED = "Airflow could not store the outcome"
    SUCCESS_FOUND = "an earlier try has stored its success"


class Ownership(enum.StrEnum):
    """Whose job it is, by the owner annotation of the read."""

    MINE = "this try"
    ANOTHER_TRY = "another try"
    FOREIGN = "somebody else"


class Task(enum.StrEnum):
    """What Airflow answers about the task."""

    NOT_ASKED = "not asked"
    OVER = "over"
    CLEARED = "cleared"
    RUNNING = "running"
    ELSEWHERE = "goes on elsewhere"
    CHANGING = "about to change"
    UNKNOWN = "no answer"


class Successor(enum.StrEnum):
    """Who continues with the job when this process stops."""

    NEXT_TRY = "the next try"
    OTHER_PROCESS = "another process"
    NOBODY = "nobody"


class Action(enum.StrEnum):
    """What the owner does. ACTS are those that change the job."""

    FOLLOW = "follows on"
    LOOK_AGAIN = "looks again"
    HAND_OVER = "ends, and another process follows the job"
    LET_GO = "stops following the job, and changes nothing"
    KEEP = "keeps the job"
    REPORT = "reports the end, releases nothing"
    CONCLUDE = "concludes the job's own end: frees its running pods, and keeps the job until Airflow has the outcome"
    CONCLUDE_INTERRUPTED = (
        "concludes with a failure, unless the log has a result: marks the job, frees its running pods, and keeps it "
        "until Airflow has the outcome"
    )
    CONCLUDE_STORED = "concludes with the stored cause, and completes the release"
    FREE_PODS = "deletes the running pods, and keeps the ended job"
    RELEASE = "stores the cause, releases the job, and waits until its pods are gone"
    RELEASE_NOW = "releases the job by one request"
    DELETE_ENDED = "deletes the ended job"


#: the actions that end pods or the job
ACTS = frozenset(
    {
        Action.CONCLUDE,
        Action.CONCLUDE_INTERRUPTED,
        Action.CONCLUDE_STORED,
        Action.FREE_PODS,
        Action.RELEASE,
        Action.RELEASE_NOW,
        Action.DELETE_ENDED,
    }
)
ENDED = frozenset({Seen.SUCCEEDED, Seen.INTERRUPTED, Seen.FAILED})
ALIVE = frozenset({Seen.RUNNING, Seen.PRIMARY_ENDED})
#: limits, and rules with a grace period: a read must show that they still hold
LIMITS = frozenset({Event.LIMIT, Event.RESTARTS, Event.CRASH_LOOP, Event.STARTUP_RULE, Event.QUEUE_VERDICT})
#: events that a process may have to end within seconds
HURRIED = frozenset({Event.DEADLINE, Event.INTERRUPT, Event.KILL})
#: ends of a process that prove nothing about the training
TROUBLE = frozenset({Event.ERROR, Event.NO_RIGHT})


@dataclass(frozen=True)
class Situation:
    """Everything that an ending depends on.

    :param event: what led here.
    :param seen: what a read made for this decision shows. Default: nothing was read.
    :param owner: whose job it is. Default: this try's.
    :param task: Airflow's answer about the task, for a kill. Default: it was not asked.
    :param successor: who continues with the job when this process stops. Default: nobody.
    :param holds: whether the rule that led here holds on what was read. Default: True.
    :param may_wait: whether this process has the time to look again. Default: True.
    :param hurried: whether this process has seconds only. Default: False.
    :param fresh: whether this process has just created the job, and has not followed it or has no right to. Default:
        False.
    :param cause_stored: whether an earlier process has stored why it released this job. Default: False.
    """

    event: Event
    seen: Seen = Seen.NOTHING
    owner: Ownership = Ownership.MINE
    task: Task = Task.NOT_ASKED
    successor: Successor = Successor.NOBODY
    holds: bool = True
    may_wait: bool = True
    hurried: bool = False
    fresh: bool = False
    cause_stored: bool = False


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    :param name: short name, for tests and logs.
    :param action: what the owner does.
    :param text: the sentence that the user reads. `{job}`, `{command}` and `{state}` are replaced: the job, the command
        that deletes it, and the task's state in Airflow.
    :param event, seen, owner, task, successor, holds, may_wait, hurried, fresh, cause_stored: the values of the
        `Situation` to which the rule applies. Default: None, any value.
    """

    name: str
    action: Action
    text: str
    event: frozenset[Event] | None = None
    seen: frozenset[Seen] | None = None
    owner: frozenset[Ownership] | None = None
    task: frozenset[Task] | None = None
    successor: frozenset[Successor] | None = None
    holds: bool | None = None
    may_wait: bool | None = None
    hurried: bool | None = None
    fresh: bool | None = None
    cause_stored: bool | None = None

    def matches(self, situation: Situation) -> bool:
        """Whether the rule applies to the situation."""
        for name in CONDITIONS:
            wanted, found = getattr(self, name), getattr(situation, name)
            if wanted is not None and (found not in wanted if isinstance(wanted, frozenset) else found is not wanted):
                return False
        return True


#: the fields of a situation, which are also those of a rule
CONDITIONS = tuple(field.name for field in fields(Situation))


def _of(*values: T) -> frozenset[T]:
    return frozenset(values)


_KEPT_FOR_RETRY = "{job} is kept for the next try."
_NOBODY_RELEASES = "{job} is kept, and nobody follows it now.\nTo delete it, run: {command}"
_STATE_DECIDES = _of(Task.OVER, Task.CLEARED)
_NO_ANSWER = _of(Task.CHANGING, Task.UNKNOWN)

RULES: tuple[Rule, ...] = (
    # whose job it is
    Rule(
        "superseded", Action.LET_GO, "{job} belongs to another try of this task now. This try stops following it.",
        owner=_of(Ownership.ANOTHER_TRY),
    ),
    Rule(
        "sensor reports", Action.REPORT, "{job} is reported as it is.",
        owner=_of(Ownership.FOREIGN), event=_of(Event.ENDED, Event.MISSING, Event.CONDITION, *LIMITS),
    ),
    Rule(
        "sensor follows on", Action.FOLLOW, "{job} is watched on.",
        owner=_of(Ownership.FOREIGN), event=_of(Event.BEING_DELETED, Event.TRIGGER_FAILED),
    ),
    Rule(
        "sensor hands over", Action.HAND_OVER, "{job} is watched by another process from now on.",
        owner=_of(Ownership.FOREIGN), event=_of(Event.HAND_OVER),
    ),
    Rule(
        "sensor stops", Action.LET_GO, "{job} was submitted by somebody else: it is not changed.",
        owner=_of(Ownership.FOREIGN),
    ),
    # a try whose success is known needs no job
    Rule(
        "success was stored", Action.DELETE_ENDED, "{job} has succeeded for an earlier try, whose result is returned.",
        event=_of(Event.SUCCESS_FOUND), seen=ENDED,
    ),
    # a kill: Airflow's word that the task is over is the evidence
    Rule(
        "task goes on elsewhere", Action.KEEP, "The task goes on in another process or try, which follows {job}.",
        event=_of(Event.KILL), task=_of(Task.ELSEWHERE),
    ),
    Rule(
        "task runs in another process", Action.KEEP, "The task runs in another process, which follows {job}.",
        event=_of(Event.KILL), task=_of(Task.RUNNING), successor=_of(Successor.OTHER_PROCESS),
    ),
    Rule(
        "stopped, next try", Action.KEEP, f"The worker was stopped while the task was running. {_KEPT_FOR_RETRY}",
        event=_of(Event.KILL), task=_of(Task.RUNNING), successor=_of(Successor.NEXT_TRY),
    ),
    Rule(
        "state will change", Action.LOOK_AGAIN, "The task's state doesn't show yet whether it goes on.",
        event=_of(Event.KILL), task=_NO_ANSWER, may_wait=True,
    ),
    Rule(
        "state about to change", Action.KEEP, "The task is about to be scheduled. {job} is kept for it.",
        event=_of(Event.KILL), task=_of(Task.CHANGING),
    ),
    Rule(
        "state unknown, successor", Action.KEEP,
        "Airflow did not report the task's state. {job} is kept for the next try or process.\n"
        "If the task is over, run: {command}",
        event=_of(Event.KILL), task=_of(Task.UNKNOWN), successor=_of(Successor.NEXT_TRY, Successor.OTHER_PROCESS),
    ),
    Rule(
        "killed after its end", Action.FREE_PODS, "{job} had ended before the task was killed.",
        event=_of(Event.KILL), seen=ENDED,
    ),
    Rule(
        "killed after its deletion", Action.LET_GO, "{job} is gone.",
        event=_of(Event.KILL), seen=_of(Seen.GONE),
    ),
    Rule(
        "killed in a hurry", Action.RELEASE_NOW, "The task was killed ({state}): {job} is released.",
        event=_of(Event.KILL), task=_STATE_DECIDES, hurried=True,
    ),
    Rule(
        "state unknown in a hurry", Action.RELEASE_NOW,
        "Airflow did not report the task's state. No retry is left: {job} is released.",
        event=_of(Event.KILL), task=_of(Task.UNKNOWN), hurried=True,
    ),
    Rule(
        "stopped in a hurry", Action.RELEASE_NOW, "The worker was stopped. No retry is left: {job} is released.",
        event=_of(Event.KILL), hurried=True,
    ),
    Rule(
        "killed, not read", Action.LOOK_AGAIN, "The task was killed ({state}), and {job} can't be read yet.",
        event=_of(Event.KILL), seen=_of(Seen.NOTHING), may_wait=True,
    ),
    Rule(
        "killed, never read", Action.RELEASE_NOW, "The task was killed ({state}), and {job} could not be read.",
        event=_of(Event.KILL), seen=_of(Seen.NOTHING),
    ),
    Rule("killed", Action.RELEASE, "The task was killed ({state}): {job} is released.", event=_of(Event.KILL)),
    # nothing is decided without a read
    Rule(
        "handed over", Action.HAND_OVER, "The next process follows {job} from here.",
        event=_of(Event.HAND_OVER),
    ),
    Rule(
        "trigger failed", Action.FOLLOW, "The trigger failed. {job} is not affected, and this worker follows it.",
        event=_of(Event.TRIGGER_FAILED),
    ),
    Rule(
        "not read, may wait", Action.LOOK_AGAIN, "{job} can't be read. Nothing is decided, and it is read again.",
        seen=_of(Seen.NOTHING), may_wait=True,
    ),
    Rule(
        "not read, failed for good", Action.KEEP,
        "{job} can't be read, and the task has failed for good.\nTo delete it, run: {command}",
        event=_of(Event.FINAL_ERROR), seen=_of(Seen.NOTHING),
    ),
    Rule(
        "not read, next try", Action.KEEP, "{job} can't be read, and is kept for the next try.",
        seen=_of(Seen.NOTHING), successor=_of(Successor.NEXT_TRY, Successor.OTHER_PROCESS),
    ),
    Rule(
        "not read, nobody", Action.KEEP, "{job} can't be read, and no retry is left.\nTo delete it, run: {command}",
        seen=_of(Seen.NOTHING),
    ),
    # the job has ended: its own end counts, whatever led here
    Rule(
        "outcome stored", Action.DELETE_ENDED, "{job} has ended, and Airflow has its outcome.",
        event=_of(Event.OUTCOME_STORED), seen=ENDED,
    ),
    Rule(
        "outcome not stored", Action.FREE_PODS,
        "{job} is kept without running pods: its status is the only proof of how it ended.",
        event=_of(Event.OUTCOME_NOT_STORED), seen=ENDED,
    ),
    Rule(
        "interrupted after its end", Action.FREE_PODS, "{job} has ended. The next try takes its outcome.",
        event=_of(*TROUBLE, Event.FINAL_ERROR), seen=ENDED,
    ),
    Rule(
        "interrupted by a user after its end", Action.RELEASE, "{job} has ended, and is released after Ctrl-C.",
        event=_of(Event.INTERRUPT), seen=ENDED,
    ),
    Rule(
        "interrupted end", Action.CONCLUDE_INTERRUPTED,
        "{job} has succeeded, but is probably incomplete.",
        seen=_of(Seen.INTERRUPTED),
    ),
    Rule("own end", Action.CONCLUDE, "{job} has ended.", seen=ENDED),
    # the job is gone
    Rule(
        "released before", Action.CONCLUDE_STORED, "{job} was released by an earlier process of this try.",
        seen=_of(Seen.GONE), cause_stored=True,
    ),
    Rule(
        "gone after its outcome", Action.LET_GO, "{job} is gone.",
        event=_of(
            Event.OUTCOME_STORED, Event.OUTCOME_NOT_STORED, Event.SUCCESS_FOUND, Event.INTERRUPT,
            *TROUBLE, Event.FINAL_ERROR, Event.CODE_REFUSED,
        ),
        seen=_of(Seen.GONE),
    ),
    Rule("deleted by others", Action.CONCLUDE, "{job} was deleted by somebody else.", seen=_of(Seen.GONE)),
    # the job may be alive
    Rule(
        "release is under way", Action.CONCLUDE_STORED, "{job} is being released by an earlier process of this try.",
        event=_of(Event.BEING_DELETED), cause_stored=True,
    ),
    Rule(
        "no longer holds", Action.FOLLOW, "{job} has changed meanwhile, and is followed on.",
        event=LIMITS, holds=False,
    ),
    Rule(
        "its end is near", Action.LOOK_AGAIN, "The program of {job} has ended, and its status doesn't show that yet.",
        event=_of(*LIMITS, Event.DEADLINE, Event.DEFERRAL_EXPIRED, Event.RELEASE_FAILED), may_wait=True,
        seen=_of(Seen.PRIMARY_ENDED),
    ),
    Rule("limit", Action.RELEASE, "{job} is released: a limit has passed.", event=LIMITS),
    Rule(
        "timed out in a hurry", Action.RELEASE_NOW, "{job} is released: execution_timeout has passed.",
        event=_of(Event.DEADLINE), hurried=True,
    ),
    Rule(
        "timed out", Action.RELEASE, "{job} is released: execution_timeout has passed.",
        event=_of(Event.DEADLINE, Event.DEFERRAL_EXPIRED),
    ),
    Rule(
        "interrupted in a hurry", Action.RELEASE_NOW, "{job} is released after Ctrl-C.",
        event=_of(Event.INTERRUPT), hurried=True,
    ),
    Rule("interrupted", Action.RELEASE, "{job} is released after Ctrl-C.", event=_of(Event.INTERRUPT)),
    Rule(
        "end was read before", Action.RELEASE, "{job} had failed, and its status doesn't show that any more.",
        event=_of(Event.OUTCOME_STORED),
    ),
    Rule(
        "release continued", Action.RELEASE, "The release of {job} is completed.", event=_of(Event.RELEASE_FAILED),
    ),
    Rule(
        "code refused", Action.RELEASE, "{job} can't get its code, and no container has started.",
        event=_of(Event.CODE_REFUSED), holds=True,
    ),
    Rule(
        "refused for good", Action.RELEASE, "The task has failed for good: {job} is released.",
        event=_of(Event.FINAL_ERROR),
    ),
    Rule("trouble, next try", Action.KEEP, _KEPT_FOR_RETRY, event=TROUBLE, successor=_of(Successor.NEXT_TRY)),
    Rule(
        "trouble right after the creation", Action.RELEASE,
        "{job} is released: no retry is left, and it was created just now.",
        event=TROUBLE, successor=_of(Successor.NOBODY), fresh=True,
    ),
    Rule("trouble, nobody", Action.KEEP, _NOBODY_RELEASES, event=TROUBLE, successor=_of(Successor.NOBODY)),
    # everything else
    Rule("follow on", Action.FOLLOW, "{job} is followed on."),
)  # fmt: skip


def decide(situation: Situation, rules: Iterable[Rule] = RULES) -> Rule:
    """The first rule that matches.

    :param situation: what is known.
    :param rules: the rules in their order. Default: RULES.
    """
    return next(rule for rule in rules if rule.matches(situation))


def deletes(action: OnFinishAction, seen: Seen) -> bool:
    """Whether `on_finish_action` deletes a job; otherwise it is kept without running pods.

    Only `keep_job` keeps an unfinished job: suspending it needs a working operator, deleting it only Kubernetes'
    garbage collector.

    :param action: of the task.
    :param seen: what the read shows.
    """
    if seen in ENDED:
        return action.deletes(succeeded=seen is Seen.SUCCEEDED)
    return action is not OnFinishAction.KEEP_JOB


_TASKS = {
    **dict.fromkeys(("failed", "success", "skipped", "upstream_failed", "removed", "absent"), Task.OVER),
    **dict.fromkeys(("none", "restarting"), Task.CLEARED),
    **dict.fromkeys(("scheduled", "queued"), Task.CHANGING),
    "running": Task.RUNNING,
    "": Task.UNKNOWN,
}


def task_of(state: str) -> Task:
    """What the state of the task instance means for its job. Another state, such as deferred, keeps the job.

    A clear resets the state ("none"). Airflow shows a running task that was cleared as restarting until its worker has
    ended.

    :param state: of the task instance, `absent` if it doesn't exist, or empty if Airflow did not answer.
    """
    return _TASKS.get(state, Task.ELSEWHERE)
