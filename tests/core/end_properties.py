"""What must hold of every end, over the product of all that an end depends on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.end_rules import (
    ACTS,
    ALIVE,
    ENDED,
    LIMITS,
    TROUBLE,
    Action,
    Event,
    Ownership,
    Rule,
    Situation,
    Successor,
    Task,
    decide,
)
from airflow_provider_ktrain.core.state.status import Seen

TAKES_END = {Action.TAKE_END, Action.TAKE_END_SUSPENDED}
#: Events that end nothing.
HARMLESS = {Event.TRIGGER_FAILED, Event.SUSPENDED, Event.STOPPED_POD}
#: Events about a success that was read, and whose pods were deleted.
JUDGED = {Event.UNMET, Event.NOT_PROVED}
FLAGS = ("holds", "may_wait", "hurried", "fresh", "cause_stored", "suspended")
DELETES = {Action.RELEASE, Action.RELEASE_NOW, Action.DELETE_ENDED}
#: Events after which a read that shows a running job is proof enough for its release.
PROVEN_BY_READ = {
    Event.DEADLINE, Event.DEFERRAL_EXPIRED, Event.INTERRUPT, Event.RELEASE_FAILED, Event.FINAL_ERROR,
    Event.OUTCOME_STORED, Event.END_CHANGED, Event.KEPT_UNRELEASED,
}  # fmt: skip
#: What following notices, after which the job's own end counts.
FOLLOWING = {Event.ENDED, *LIMITS, Event.DEADLINE, Event.DEFERRAL_EXPIRED, Event.RELEASE_FAILED, Event.BEING_DELETED}


def situations() -> Iterator[Situation]:
    """Every situation. Airflow is asked about the task after a kill alone, and only a failed job may train again."""
    for event in Event:
        tasks = Task if event is Event.KILL else (Task.NOT_ASKED,)
        for seen, owner, task, successor in itertools.product(Seen, Ownership, tasks, Successor):
            for values in itertools.product((False, True), repeat=len(FLAGS)):
                flags = dict(zip(FLAGS, values, strict=True))
                for restarts in (False, True) if seen is Seen.FAILED else (False,):
                    yield Situation(
                        event, seen, owner=owner, task=task, successor=successor, restarts=restarts, **flags
                    )


def kill_proves(s: Situation) -> bool:
    """Whether Airflow's answer after a kill proves that nobody continues with the job."""
    if s.task in (Task.OVER, Task.CLEARED, Task.NOT_ASKED):
        return True
    return s.task in (Task.RUNNING, Task.UNKNOWN) and s.successor is Successor.NOBODY


def live_job_is_deleted_on_proof_only(s: Situation, rule: Rule) -> bool:
    if s.seen not in (*ALIVE, Seen.NOTHING) or rule.action not in ACTS:
        return True
    if s.event is Event.KILL:
        return kill_proves(s)
    if s.seen is Seen.NOTHING:
        return False
    lags = s.seen is Seen.PRIMARY_ENDED and s.may_wait
    if s.event in LIMITS:
        return s.holds and not lags
    if s.event in (Event.DEADLINE, Event.DEFERRAL_EXPIRED, Event.RELEASE_FAILED):
        return not lags
    if s.event in TROUBLE:
        return s.fresh and s.successor is Successor.NOBODY
    if s.event is Event.BEING_DELETED:
        return s.cause_stored or s.suspended
    return s.event in PROVEN_BY_READ or (s.event is Event.CODE_REFUSED and s.holds)


def ended_job_is_deleted_after_its_outcome_was_stored(s: Situation, rule: Rule) -> bool:
    if s.seen not in ENDED or rule.action not in DELETES:
        return True
    return s.event in (Event.OUTCOME_STORED, Event.SUCCESS_FOUND, Event.INTERRUPT)


def job_of_another_owner_is_left_alone(s: Situation, rule: Rule) -> bool:
    return s.owner is Ownership.MINE or rule.action not in ACTS


def job_that_a_retry_could_adopt_is_kept_on_trouble(s: Situation, rule: Rule) -> bool:
    stopped = s.event is Event.KILL and s.task not in (Task.OVER, Task.CLEARED, Task.NOT_ASKED)
    if s.successor is Successor.NOBODY or not (s.event in TROUBLE or stopped):
        return True
    return rule.action not in DELETES


def release_is_verified_or_named(s: Situation, rule: Rule) -> bool:
    """A release without a wait is for processes that have no time. Where nobody continues, the text has the command."""
    if rule.action is Action.RELEASE_NOW:
        return s.hurried
    nobody = s.successor is Successor.NOBODY and s.event is not Event.KILL
    return rule.action is not Action.LEAVE or not nobody or "{command}" in rule.text


def own_end_counts(s: Situation, rule: Rule) -> bool:
    if s.owner is not Ownership.MINE or s.seen not in ENDED or s.event not in FOLLOWING:
        return True
    if s.seen is Seen.INCOMPLETE:
        return rule.action is Action.TAKE_END_INCOMPLETE
    return rule.action in TAKES_END


def failed_job_that_may_train_again_is_suspended(s: Situation, rule: Rule) -> bool:
    return rule.action not in TAKES_END or (rule.action is Action.TAKE_END_SUSPENDED) is s.restarts


def incomplete_training_does_not_end_as_a_success(s: Situation, rule: Rule) -> bool:
    return s.seen is not Seen.INCOMPLETE or rule.action not in (*TAKES_END, Action.TAKE_STORED_CAUSE)


def job_that_is_over_holds_no_gpus(s: Situation, rule: Rule) -> bool:
    """Pods of an ended job may still run, and a deletion with propagationPolicy Orphan leaves pods."""
    left = {Event.HAND_OVER, *HARMLESS, *JUDGED}
    if s.owner is not Ownership.MINE or s.seen not in {*ENDED, Seen.GONE} or s.event in left:
        return True
    if s.event is Event.KILL and not kill_proves(s):
        return True
    return rule.action in {*ACTS, Action.LOOK_AGAIN}


def stored_cause_is_used(s: Situation, rule: Rule) -> bool:
    if s.owner is not Ownership.MINE or not s.cause_stored or s.event in {Event.KILL, Event.HAND_OVER, *JUDGED}:
        return True
    if s.seen is Seen.GONE and s.event not in HARMLESS:
        return rule.action is Action.TAKE_STORED_CAUSE
    under_way = s.event is Event.BEING_DELETED and s.seen in ALIVE
    return rule.action is Action.TAKE_STORED_CAUSE or not under_way


def nothing_is_decided_without_a_read(s: Situation, rule: Rule) -> bool:
    known = s.event is Event.KILL and (s.hurried or not kill_proves(s))
    if s.owner is not Ownership.MINE or s.seen is not Seen.NOTHING:
        return True
    if known or s.event in {Event.HAND_OVER, *HARMLESS, *JUDGED}:
        return True
    return rule.action is (Action.LOOK_AGAIN if s.may_wait else Action.LEAVE)


def looking_again_takes_time(s: Situation, rule: Rule) -> bool:
    return rule.action is not Action.LOOK_AGAIN or s.may_wait


def limit_that_holds_ends_the_job(s: Situation, rule: Rule) -> bool:
    if s.owner is not Ownership.MINE or s.event not in LIMITS or s.seen is not Seen.RUNNING:
        return True
    return rule.action is (Action.RELEASE if s.holds else Action.FOLLOW)


def gone_job_is_not_released(s: Situation, rule: Rule) -> bool:
    return s.seen is not Seen.GONE or rule.action not in {*DELETES, Action.FREE_PODS}


def foreign_job_is_followed_to_its_end(s: Situation, rule: Rule) -> bool:
    """A sensor lets go of its job only when it stops, and it reports a cause."""
    if s.owner is not Ownership.FOREIGN:
        return True
    if s.event in {Event.ENDED, Event.MISSING, Event.CONDITION, *LIMITS}:
        return rule.action is Action.REPORT
    return rule.action is Action.FOLLOW or s.event not in {Event.BEING_DELETED, *HARMLESS}


def lack_fails_for_good_if_proved_or_nobody_can_prove_it(s: Situation, rule: Rule) -> bool:
    if s.owner is not Ownership.MINE or s.event not in JUDGED:
        return rule.action is not Action.FAIL_FOR_GOOD
    final = s.event is Event.UNMET or s.successor is Successor.NOBODY
    return rule.action is (Action.FAIL_FOR_GOOD if final else Action.LEAVE)


PROPERTIES: Sequence[Callable[[Situation, Rule], bool]] = (
    live_job_is_deleted_on_proof_only,
    ended_job_is_deleted_after_its_outcome_was_stored,
    job_of_another_owner_is_left_alone,
    job_that_a_retry_could_adopt_is_kept_on_trouble,
    release_is_verified_or_named,
    own_end_counts,
    failed_job_that_may_train_again_is_suspended,
    incomplete_training_does_not_end_as_a_success,
    job_that_is_over_holds_no_gpus,
    stored_cause_is_used,
    nothing_is_decided_without_a_read,
    looking_again_takes_time,
    limit_that_holds_ends_the_job,
    gone_job_is_not_released,
    foreign_job_is_followed_to_its_end,
    lack_fails_for_good_if_proved_or_nobody_can_prove_it,
)


@dataclass(frozen=True)
class Scenario:
    """A situation, and what must happen, written by hand.

    :param text: a part of the sentence that the user reads.
    """

    name: str
    event: Event
    action: Action
    text: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def holds(self, rules: Sequence[Rule]) -> bool:
        """Whether the rules decide as expected."""
        rule = decide(Situation(self.event, **self.facts), rules)
        return rule.action is self.action and self.text in rule.text


MINE_RUNS = {"seen": Seen.RUNNING}
RETRY = {"successor": Successor.NEXT_TRY}
SCENARIOS = (
    Scenario("another try adopted the job", Event.ENDED, Action.LET_GO, "another try",
             {"seen": Seen.SUCCEEDED, "owner": Ownership.ANOTHER_TRY}),
    Scenario("the training ends, and nobody can read whose job it is", Event.ENDED, Action.REPORT, "can't be read",
             {"seen": Seen.SUCCEEDED, "owner": Ownership.UNREADABLE}),
    Scenario("a limit passes, and nobody can read whose job it is", Event.LIMIT, Action.LEAVE, "{command}",
             {"seen": Seen.RUNNING, "owner": Ownership.UNREADABLE}),
    Scenario("a sensor's job has failed", Event.ENDED, Action.REPORT, facts={"owner": Ownership.FOREIGN}),
    Scenario("a sensor's job runs at the end of the worker's time", Event.HAND_OVER, Action.HAND_OVER,
             facts={"owner": Ownership.FOREIGN}),
    Scenario(
        "somebody deletes a sensor's job", Event.BEING_DELETED, Action.FOLLOW, "still watched",
        {"owner": Ownership.FOREIGN},
    ),
    Scenario("a sensor times out", Event.WAIT_EXPIRED, Action.LET_GO, "submitted by somebody else",
             {"owner": Ownership.FOREIGN, "seen": Seen.RUNNING}),
    Scenario("a retry finds a stored success", Event.SUCCESS_FOUND, Action.DELETE_ENDED, "Airflow has its outcome",
             {"seen": Seen.SUCCEEDED}),
    Scenario("SIGTERM while the task is deferred", Event.KILL, Action.LEAVE, "another process or try",
             {"task": Task.ELSEWHERE, "hurried": True}),
    Scenario("somebody suspends the job", Event.SUSPENDED, Action.FOLLOW, "still followed"),
    Scenario("a pod is evicted", Event.STOPPED_POD, Action.ANNOTATE, "probably incomplete"),
    Scenario("a pod of a sensor's job is evicted", Event.STOPPED_POD, Action.FOLLOW,
             facts={"owner": Ownership.FOREIGN}),
    Scenario("somebody suspends a sensor's job", Event.SUSPENDED, Action.FOLLOW, "still followed",
             {"owner": Ownership.FOREIGN}),
    Scenario("the loss is NaN", Event.UNMET, Action.FAIL_FOR_GOOD, "to train again", RETRY),
    Scenario("the log was not read to its end", Event.NOT_PROVED, Action.LEAVE, "reads its logs again", RETRY),
    Scenario("the log was not read to its end in the last try", Event.NOT_PROVED, Action.FAIL_FOR_GOOD),
    Scenario("a stale cancellation of a trigger", Event.KILL, Action.LEAVE, "while the task was running",
             {"task": Task.RUNNING, "successor": Successor.OTHER_PROCESS}),
    Scenario("a rolling update of workers", Event.KILL, Action.LEAVE, "runs on for {next}",
             {"task": Task.RUNNING, "hurried": True, **RETRY}),
    Scenario("a trigger's event is on its way", Event.KILL, Action.LOOK_AGAIN, facts={"task": Task.CHANGING}),
    Scenario("the task stays scheduled", Event.KILL, Action.LEAVE, "another process or try",
             {"task": Task.CHANGING, "may_wait": False}),
    Scenario("Airflow doesn't answer, with a retry", Event.KILL, Action.LEAVE, "did not report",
             {"task": Task.UNKNOWN, "may_wait": False, **RETRY}),
    Scenario(
        "Airflow doesn't answer, without a retry", Event.KILL, Action.RELEASE_NOW, "{why}",
        {"task": Task.UNKNOWN, "may_wait": False, "hurried": True},
    ),
    Scenario("marked failed after the end", Event.KILL, Action.FREE_PODS, "only proof",
             {"task": Task.OVER, "seen": Seen.SUCCEEDED}),
    Scenario("marked failed, and the job is gone", Event.KILL, Action.DELETE_PODS, "is gone",
             {"task": Task.OVER, "seen": Seen.GONE}),
    Scenario("marked failed in a worker", Event.KILL, Action.RELEASE_NOW, "{why}",
             {"task": Task.OVER, "hurried": True}),
    Scenario("cleared in a worker", Event.KILL, Action.RELEASE_NOW, "{why}",
             {"task": Task.CLEARED, "hurried": True}),
    Scenario("SIGTERM without a retry", Event.KILL, Action.RELEASE_NOW, "{why}",
             {"task": Task.RUNNING, "hurried": True}),
    Scenario("marked failed while deferred, not read yet", Event.KILL, Action.LOOK_AGAIN, "can't be read",
             {"task": Task.OVER}),
    Scenario("marked failed in a worker after the end", Event.KILL, Action.FREE_PODS, "only proof",
             {"task": Task.OVER, "hurried": True, "seen": Seen.SUCCEEDED}),
    Scenario("marked failed while deferred", Event.KILL, Action.RELEASE, facts={"task": Task.OVER, **MINE_RUNS}),
    Scenario("the worker's time is over", Event.HAND_OVER, Action.HAND_OVER),
    Scenario("a trigger can't be loaded", Event.TRIGGER_FAILED, Action.FOLLOW, "{why}"),
    Scenario("a limit passes while the API server is away", Event.LIMIT, Action.LOOK_AGAIN, "Nothing is decided"),
    Scenario("trouble while the API server is away", Event.ERROR, Action.LEAVE, "is left as it is for {next}",
             {"may_wait": False, **RETRY}),
    Scenario(
        "an invalid manifest while the API server is away", Event.FINAL_ERROR, Action.LEAVE, "failed for good",
        {"may_wait": False, **RETRY},
    ),
    Scenario(
        "the deadline of a last try while the API server is away", Event.DEADLINE, Action.LEAVE, "{command}",
        {"may_wait": False, "hurried": True},
    ),
    Scenario("a retry finds a stored success whose pods were not deleted", Event.KEPT_UNRELEASED, Action.FREE_PODS,
             "is kept without", {"seen": Seen.SUCCEEDED}),
    Scenario("Airflow has the outcome", Event.OUTCOME_STORED, Action.DELETE_ENDED, facts={"seen": Seen.FAILED}),
    Scenario("Airflow can't store the outcome", Event.OUTCOME_NOT_STORED, Action.FREE_PODS, "only proof",
             {"seen": Seen.SUCCEEDED}),
    Scenario("an XCom push fails after the end", Event.ERROR, Action.FREE_PODS, facts={"seen": Seen.SUCCEEDED}),
    Scenario("a result that can't be returned fails the task for good after the end", Event.FINAL_ERROR,
             Action.FREE_PODS, "only proof", {"seen": Seen.SUCCEEDED}),
    Scenario("Ctrl-C after the end", Event.INTERRUPT, Action.RELEASE, facts={"seen": Seen.SUCCEEDED}),
    Scenario("the job has failed", Event.ENDED, Action.TAKE_END, facts={"seen": Seen.FAILED}),
    Scenario("a TrainJob has failed", Event.ENDED, Action.TAKE_END_SUSPENDED,
             facts={"seen": Seen.FAILED, "restarts": True}),
    Scenario("the operator writes to the job that has ended", Event.END_CHANGED, Action.TAKE_END,
             facts={"seen": Seen.FAILED}),
    Scenario("a failed job trains again before its outcome was stored", Event.END_CHANGED, Action.FREE_PODS,
             facts=MINE_RUNS),
    Scenario("a success shortly before the deadline", Event.DEADLINE, Action.TAKE_END, facts={"seen": Seen.SUCCEEDED}),
    Scenario("an eviction ended the program with exit code 0", Event.ENDED, Action.TAKE_END_INCOMPLETE,
             "probably incomplete", {"seen": Seen.INCOMPLETE}),
    Scenario("the triggerer died after a limit's release", Event.MISSING, Action.TAKE_STORED_CAUSE,
             facts={"seen": Seen.GONE, "cause_stored": True}),
    Scenario("Ctrl-C, and the job is gone", Event.INTERRUPT, Action.DELETE_PODS, facts={"seen": Seen.GONE}),
    Scenario("somebody deleted the job", Event.MISSING, Action.TAKE_END, "somebody else", {"seen": Seen.GONE}),
    Scenario("the triggerer died during a limit's release", Event.BEING_DELETED, Action.TAKE_STORED_CAUSE,
             facts={"cause_stored": True, **MINE_RUNS}),
    Scenario("a triggerer died after a limit's suspension, and Airflow has no cause", Event.BEING_DELETED,
             Action.TAKE_STORED_CAUSE, "it isn't known why", {"suspended": True, **MINE_RUNS}),
    Scenario("the pod has started meanwhile", Event.STARTUP_RULE, Action.FOLLOW, "has changed meanwhile",
             {"holds": False, **MINE_RUNS}),
    Scenario("a limit just before the job's condition", Event.LIMIT, Action.LOOK_AGAIN, "program",
             {"seen": Seen.PRIMARY_ENDED}),
    Scenario("the deadline just before the job's condition", Event.DEADLINE, Action.LOOK_AGAIN, "program",
             {"seen": Seen.PRIMARY_ENDED}),
    Scenario("the job's condition never comes", Event.LIMIT, Action.RELEASE,
             facts={"seen": Seen.PRIMARY_ENDED, "may_wait": False}),
    Scenario("a limit holds", Event.LIMIT, Action.RELEASE, "{why}", MINE_RUNS),
    Scenario("the deadline in a worker", Event.DEADLINE, Action.RELEASE_NOW, facts={"hurried": True, **MINE_RUNS}),
    Scenario("the deadline in a trigger", Event.DEADLINE, Action.RELEASE, "{why}", MINE_RUNS),
    Scenario("the deferral's timeout", Event.DEFERRAL_EXPIRED, Action.RELEASE, "{why}", MINE_RUNS),
    Scenario("Ctrl-C in airflow dags test", Event.INTERRUPT, Action.RELEASE_NOW,
             facts={"hurried": True, **MINE_RUNS}),
    Scenario("Ctrl-C in a terminal", Event.INTERRUPT, Action.RELEASE, "{why}", MINE_RUNS),
    Scenario("a failed job trains again after its outcome was stored", Event.OUTCOME_STORED, Action.RELEASE,
             facts=MINE_RUNS),
    Scenario("the trigger's release failed", Event.RELEASE_FAILED, Action.RELEASE, "{why}", MINE_RUNS),
    Scenario("the code is refused", Event.CODE_REFUSED, Action.RELEASE, "{why}", MINE_RUNS),
    Scenario("the code is refused, and a container runs", Event.CODE_REFUSED, Action.FOLLOW,
             facts={"holds": False, **MINE_RUNS}),
    Scenario("the task has failed for good", Event.FINAL_ERROR, Action.RELEASE, "{why}", MINE_RUNS),
    Scenario("trouble with a retry", Event.ERROR, Action.LEAVE, "runs on for {next}", {**MINE_RUNS, **RETRY}),
    Scenario("no right to watch the new job", Event.NO_RIGHT, Action.RELEASE, "just now",
             {"fresh": True, **MINE_RUNS}),
    Scenario("trouble without a retry", Event.ERROR, Action.LEAVE, "{command}", MINE_RUNS),
    Scenario("somebody is deleting the job", Event.BEING_DELETED, Action.FOLLOW, "still followed", MINE_RUNS),
)  # fmt: skip
