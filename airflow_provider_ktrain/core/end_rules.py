"""The rules by which a training's life ends: the first rule that matches decides, and the last one matches everything.

The owner of a life (`engine/training_owner.py`) reads the job and its pods whenever something may end the training,
describes what it knows as a `Situation`, and carries out the rule that `decide` returns. Nothing else decides an end.
A try has no part in the life of a job that it finds under its name: `core/identity/adoption.py` decides whether it
takes that job, replaces it, or, with invalid parameters, takes it or fails. That needs a read, too, which fences what
is written.
`scripts/end_rules.py` prints this list as a table, for docs/contributing/rules.md.

A watch only shows when to look. Where a rule names what was `seen`, that is a read from the API server made for this
decision. A kill is the exception: Airflow's own word that the task is over is the evidence, because a worker has
seconds, and its one request is fenced by the last resourceVersion that was seen.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TypeVar

from airflow_provider_ktrain.core.identity.names import OnFinishAction
from airflow_provider_ktrain.core.state.status import Seen

T = TypeVar("T")


class Event(enum.StrEnum):
    """What may end a training's life. The value is its name in the table.

    `engine/follow/following.py` notices the first ones; the hosts and `engine/process_end.py` ask for the others.
    """

    # noticed while the job is followed
    ENDED = "the job has ended"
    MISSING = "the job is gone"
    BEING_DELETED = "the job is being deleted"
    SUSPENDED = "the job was suspended"
    STOPPED_POD = "a pod was stopped from outside"
    OWNED_BY_OTHERS = "the job has another owner"
    LIMIT = "a limit has passed"
    RESTARTS = "max_restarts is exceeded"
    CRASH_LOOP = "a container fails again and again"
    STARTUP_RULE = "a pod can't start"
    QUEUE_VERDICT = "the queue will never admit the job"
    DEADLINE = "the task's execution_timeout has passed"
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
    # judged by the worker, when it has the outcome of a success
    UNMET = "a succeeded training doesn't reach what `require` asks for"
    NOT_PROVED = "lines are missing that may show whether it does"
    # happened to the submission or the release
    CODE_REFUSED = "the API server refuses the code's ConfigMap"
    RELEASE_FAILED = "an earlier release did not finish"
    END_CHANGED = "the job's end was read, and it has changed since"
    OUTCOME_STORED = "Airflow has stored the outcome"
    OUTCOME_NOT_STORED = "Airflow could not store the outcome"
    SUCCESS_FOUND = "an earlier try has stored its success"
    KEPT_UNRELEASED = "the job is to be kept, and its pods could not be deleted"


class Ownership(enum.StrEnum):
    """Whose job it is, by the owner annotation of the read."""

    MINE = "this try"
    ANOTHER_TRY = "another try"
    FOREIGN = "somebody else"
    UNREADABLE = "can't be read"


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

    FOLLOW = "goes on following the job"
    LOOK_AGAIN = "looks again"
    HAND_OVER = "ends, and another process follows the job"
    ANNOTATE = "records on the job which pod it was, and goes on following it"
    LET_GO = "stops following the job, and changes nothing"
    LEAVE = "leaves the job as it is"
    REPORT = "reports the end, releases nothing"
    TAKE_END = (
        "takes the job's end as the outcome, deletes its running pods, and keeps the job until Airflow has stored the "
        "outcome"
    )
    TAKE_END_SUSPENDED = "suspends the failed job, and takes its end as the outcome"
    TAKE_END_INCOMPLETE = (
        "takes the job's end as a success if the program printed a result before the pod was stopped, otherwise as a "
        "failure, and marks the job; then as take end"
    )
    TAKE_STORED_CAUSE = "takes the stored cause as the outcome, and completes the release"
    FREE_PODS = "deletes the running pods, and keeps the ended job"
    DELETE_PODS = "deletes the pods that are left of it"
    RELEASE = "stores the cause, releases the job, and waits until its pods are gone"
    RELEASE_NOW = "releases the job by one request"
    DELETE_ENDED = "deletes the ended job"
    FAIL_FOR_GOOD = "stores that the training is not good enough, ends the job as a success, fails the task for good"


class Mode(enum.Enum):
    """How a job is released."""

    DELETE = "delete"  #: Delete the job and everything that it owns.
    SUSPEND = "suspend"  #: Keep an unfinished job without its pods; of a job of a Kueue queue, deactivate the Workload.
    DELETE_PODS = "delete pods"  #: Keep a finished job and its finished pods; delete running pods.


#: The actions that end pods or the job, and how. None: as `on_finish_action` says.
ACTS: dict[Action, Mode | None] = {
    Action.TAKE_END: Mode.DELETE_PODS,
    Action.TAKE_END_SUSPENDED: Mode.DELETE_PODS,
    Action.TAKE_END_INCOMPLETE: Mode.DELETE_PODS,
    Action.TAKE_STORED_CAUSE: None,
    Action.FREE_PODS: Mode.DELETE_PODS,
    Action.DELETE_PODS: Mode.DELETE_PODS,
    Action.RELEASE: None,
    Action.RELEASE_NOW: None,
    Action.DELETE_ENDED: Mode.DELETE,
}
ENDED = frozenset({Seen.SUCCEEDED, Seen.INCOMPLETE, Seen.FAILED})
ALIVE = frozenset({Seen.RUNNING, Seen.PRIMARY_ENDED})
#: Limits, and rules with a grace period: a read must show that they still hold.
LIMITS = frozenset({Event.LIMIT, Event.RESTARTS, Event.CRASH_LOOP, Event.STARTUP_RULE, Event.QUEUE_VERDICT})
#: Events that a process may have to end within seconds.
HURRIED = frozenset({Event.DEADLINE, Event.INTERRUPT, Event.KILL})
#: Somebody continues with the job.
CONTINUED = frozenset({Successor.NEXT_TRY, Successor.OTHER_PROCESS})
#: Ends of a process that prove nothing about the training.
TROUBLE = frozenset({Event.ERROR, Event.NO_RIGHT})


@dataclass(frozen=True)
class Situation:
    """Everything that the end of a training depends on.

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
    :param suspended: whether a process of this try has suspended the job, which nobody resumes then. Default: False.
    :param restarts: whether the operator may train the failed job again, unless it is suspended. Default: False.
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
    suspended: bool = False
    restarts: bool = False


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    :param name: short name, for tests and logs.
    :param action: what the owner does.
    :param text: the sentence that the user reads. `{job}`, `{command}`, `{next}` and `{why}` are replaced: the job, the
        command that deletes it, who continues with it, and the result of `why_ended`.
    :param event, seen, owner, task, successor, holds, may_wait, hurried, fresh, cause_stored, suspended, restarts: the
        values of the `Situation` to which the rule applies. Default: None, any value.
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
    suspended: bool | None = None
    restarts: bool | None = None

    def matches(self, situation: Situation) -> bool:
        """Whether the rule applies to the situation."""
        for name in CONDITIONS:
            wanted, found = getattr(self, name), getattr(situation, name)
            if wanted is not None and (found not in wanted if isinstance(wanted, frozenset) else found is not wanted):
                return False
        return True


#: The fields of a situation, which are also those of a rule.
CONDITIONS = tuple(field.name for field in fields(Situation))


def _of(*values: T) -> frozenset[T]:
    return frozenset(values)


#: Whether the task goes on isn't known yet.
_UNDECIDED = _of(Task.CHANGING, Task.UNKNOWN)

RULES: tuple[Rule, ...] = (
    # whose job it is
    Rule(
        "superseded", Action.LET_GO, "{job} belongs to another try of this task now. This try stops following it.",
        owner=_of(Ownership.ANOTHER_TRY),
    ),
    Rule(
        "owner unreadable", Action.REPORT, "{job} has an owner annotation that can't be read, and is not changed.",
        owner=_of(Ownership.UNREADABLE), event=_of(Event.ENDED, Event.MISSING), seen=_of(Seen.GONE, *ENDED),
    ),
    Rule(
        "owner unreadable, not ended", Action.LEAVE,
        "{job} has an owner annotation that can't be read, and is not changed.\nTo delete it, run: {command}",
        owner=_of(Ownership.UNREADABLE),
    ),
    # the training goes on, whoever follows it
    Rule(
        "handed over", Action.HAND_OVER, "The next process follows {job} from here.",
        event=_of(Event.HAND_OVER),
    ),
    Rule(
        "not affected", Action.FOLLOW, "{why}: {job} is still followed.",
        event=_of(Event.SUSPENDED, Event.TRIGGER_FAILED),
    ),
    Rule(
        "pod stopped", Action.ANNOTATE, "{job} is still followed. If it succeeds, it is probably incomplete.",
        event=_of(Event.STOPPED_POD), owner=_of(Ownership.MINE),
    ),
    # the job of a sensor
    Rule(
        "sensor reports", Action.REPORT, "{job} is reported as it is.",
        owner=_of(Ownership.FOREIGN), event=_of(Event.ENDED, Event.MISSING, Event.CONDITION, *LIMITS),
    ),
    Rule(
        "sensor follows on", Action.FOLLOW, "{job} is still watched.",
        owner=_of(Ownership.FOREIGN), event=_of(Event.BEING_DELETED, Event.STOPPED_POD),
    ),
    Rule(
        "sensor stops", Action.LET_GO, "{job} was submitted by somebody else: it is not changed.",
        owner=_of(Ownership.FOREIGN),
    ),
    # a success was read, and its values are compared with `require`
    Rule(
        "not proved, continued", Action.LEAVE, "The job is kept: a retry reads its logs again.",
        event=_of(Event.NOT_PROVED), successor=CONTINUED,
    ),
    Rule(
        "not good enough", Action.FAIL_FOR_GOOD, "Clear the task to train again.",
        event=_of(Event.UNMET, Event.NOT_PROVED),
    ),
    # a kill: Airflow's word that the task is over is the evidence
    Rule(
        "state will change", Action.LOOK_AGAIN, "The task's state doesn't show yet whether it goes on.",
        event=_of(Event.KILL), task=_UNDECIDED, may_wait=True,
    ),
    Rule(
        "task goes on elsewhere", Action.LEAVE, "{job} runs on: its task goes on in another process or try.",
        event=_of(Event.KILL), task=_of(Task.ELSEWHERE, Task.CHANGING),
    ),
    Rule(
        "stopped", Action.LEAVE, "This process was stopped while the task was running. {job} runs on for {next}.",
        event=_of(Event.KILL), task=_of(Task.RUNNING), successor=CONTINUED,
    ),
    Rule(
        "state unknown", Action.LEAVE,
        "Airflow did not report the task's state. {job} runs on for {next}.\nIf the task is over, run: {command}",
        event=_of(Event.KILL), task=_of(Task.UNKNOWN), successor=CONTINUED,
    ),
    Rule(
        "killed in a hurry", Action.RELEASE_NOW, "{why}: {job} is released.",
        event=_of(Event.KILL), hurried=True, seen=_of(Seen.NOTHING, *ALIVE),
    ),
    # nothing is decided without a read
    Rule(
        "not read, may wait", Action.LOOK_AGAIN, "{job} can't be read. Nothing is decided, and it is read again.",
        seen=_of(Seen.NOTHING), may_wait=True,
    ),
    Rule(
        "not read, failed for good", Action.LEAVE,
        "{job} can't be read, and the task has failed for good.\nTo delete it, run: {command}",
        event=_of(Event.FINAL_ERROR), seen=_of(Seen.NOTHING),
    ),
    Rule(
        "not read, continued", Action.LEAVE, "{job} can't be read, and is left as it is for {next}.",
        seen=_of(Seen.NOTHING), successor=CONTINUED,
    ),
    Rule(
        "not read, nobody", Action.LEAVE, "{job} can't be read, and no retry is left.\nTo delete it, run: {command}",
        seen=_of(Seen.NOTHING),
    ),
    # the job has ended: its own end counts, whatever led here
    Rule(
        "kept", Action.FREE_PODS, "{job} has ended, and is kept without running pods.",
        event=_of(Event.KEPT_UNRELEASED), seen=ENDED,
    ),
    Rule(
        "outcome known", Action.DELETE_ENDED, "{job} has ended, and Airflow has its outcome.",
        event=_of(Event.OUTCOME_STORED, Event.SUCCESS_FOUND), seen=ENDED,
    ),
    Rule(
        "outcome not known", Action.FREE_PODS,
        "{job} had ended before. It is kept without running pods.\nIts status is the only proof of how it ended.",
        event=_of(Event.KILL, *TROUBLE, Event.FINAL_ERROR, Event.OUTCOME_NOT_STORED), seen=ENDED,
    ),
    Rule(
        "interrupted by a user after its end", Action.RELEASE, "{job} has ended, and is released after Ctrl-C.",
        event=_of(Event.INTERRUPT), seen=ENDED,
    ),
    Rule(
        "own end, may restart", Action.TAKE_END_SUSPENDED, "{job} has failed, and its operator may train it again.",
        seen=_of(Seen.FAILED), restarts=True,
    ),
    Rule(
        "incomplete end", Action.TAKE_END_INCOMPLETE, "{job} has succeeded, but is probably incomplete.",
        seen=_of(Seen.INCOMPLETE),
    ),
    Rule("own end", Action.TAKE_END, "{job} has ended.", seen=ENDED),
    # the job is gone
    Rule(
        "released before", Action.TAKE_STORED_CAUSE, "{job} was released by an earlier process of this try.",
        seen=_of(Seen.GONE), cause_stored=True,
    ),
    Rule(
        "gone", Action.DELETE_PODS, "{job} is gone.",
        event=_of(
            Event.OUTCOME_STORED, Event.OUTCOME_NOT_STORED, Event.SUCCESS_FOUND, Event.KEPT_UNRELEASED,
            Event.INTERRUPT, Event.KILL, *TROUBLE, Event.FINAL_ERROR, Event.CODE_REFUSED,
        ),
        seen=_of(Seen.GONE),
    ),
    Rule("deleted by others", Action.TAKE_END, "{job} was deleted by somebody else.", seen=_of(Seen.GONE)),
    # the job may be alive
    Rule(
        "release is under way", Action.TAKE_STORED_CAUSE, "{job} is being released by an earlier process of this try.",
        event=_of(Event.BEING_DELETED), cause_stored=True,
    ),
    Rule(
        "suspended before", Action.TAKE_STORED_CAUSE,
        "{job} was suspended by an earlier process of this try, and it isn't known why.",
        event=_of(Event.BEING_DELETED), seen=ALIVE, suspended=True,
    ),
    Rule(
        "no longer holds", Action.FOLLOW, "{job} has changed meanwhile, and is still followed.",
        event=_of(*LIMITS, Event.CODE_REFUSED), holds=False,
    ),
    Rule(
        "its end is near", Action.LOOK_AGAIN, "The program of {job} has ended, and its status doesn't show that yet.",
        event=_of(*LIMITS, Event.DEADLINE, Event.DEFERRAL_EXPIRED, Event.RELEASE_FAILED), may_wait=True,
        seen=_of(Seen.PRIMARY_ENDED),
    ),
    Rule(
        "ended in a hurry", Action.RELEASE_NOW, "{why}: {job} is released.",
        event=_of(Event.DEADLINE, Event.INTERRUPT), hurried=True,
    ),
    Rule(
        "ended", Action.RELEASE, "{why}: {job} is released.",
        event=_of(
            *LIMITS, Event.DEADLINE, Event.DEFERRAL_EXPIRED, Event.INTERRUPT, Event.KILL, Event.RELEASE_FAILED,
            Event.CODE_REFUSED, Event.FINAL_ERROR, Event.OUTCOME_STORED,
        ),
    ),
    Rule(
        "end was read before", Action.FREE_PODS, "{job} had ended, and its status doesn't show that any more.",
        event=_of(Event.END_CHANGED, Event.KEPT_UNRELEASED),
    ),
    Rule(
        "trouble, continued", Action.LEAVE, "{job} runs on for {next}.", event=TROUBLE, successor=CONTINUED,
    ),
    Rule(
        "trouble right after the creation", Action.RELEASE,
        "{job} is released: no retry is left, and it was created just now.", event=TROUBLE, fresh=True,
    ),
    Rule(
        "trouble, nobody", Action.LEAVE, "{job} runs on, and nobody follows it now.\nTo delete it, run: {command}",
        event=TROUBLE,
    ),
    # everything else
    Rule("follow on", Action.FOLLOW, "{job} is still followed."),
)  # fmt: skip

#: How a kill is named, by the task's state.
_KILLED_BY = {"none": "cleared", "restarting": "cleared", "absent": "its run was deleted"}


def why_ended(event: Event, state: str = "") -> str:
    """What led to the end, for the text of a rule.

    :param state: of a kill, that of the task in Airflow; empty if Airflow did not answer. Default: "".
    """
    text = str(event)
    if event is Event.KILL:
        text = {
            Task.RUNNING: "the worker was stopped. No retry is left",
            Task.UNKNOWN: "Airflow did not report the task's state. No retry is left",
        }.get(task_of(state), f"the task was killed ({_KILLED_BY.get(state, state)})")
    return f"{text[:1].upper()}{text[1:]}"


def decide(situation: Situation, rules: Iterable[Rule] = RULES) -> Rule:
    """The first rule that matches."""
    return next(rule for rule in rules if rule.matches(situation))


def deletes(action: OnFinishAction, seen: Seen) -> bool:
    """Whether `on_finish_action` deletes a job; otherwise it is kept without running pods.

    Only `keep_job` keeps an unfinished job: suspending it needs a working operator, deleting it only Kubernetes'
    garbage collector.
    """
    if seen in ENDED:
        return action.deletes(succeeded=seen is Seen.SUCCEEDED)
    return action is not OnFinishAction.KEEP_JOB


def mode_of(action: Action, on_finish_action: OnFinishAction, seen: Seen) -> Mode | None:
    """How an action releases the job; None if it doesn't."""
    if action not in ACTS:
        return None
    return ACTS[action] or (Mode.DELETE if deletes(on_finish_action, seen) else Mode.SUSPEND)


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
