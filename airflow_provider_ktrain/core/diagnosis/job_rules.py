"""Why a job failed or doesn't start: the rules for the job as a whole, and the order of all rules.

A diagnosis is a pure function of the evidence: the job, its pods as last seen, events, and the last lines of logs. Each
rule looks at one kind of evidence; the first that applies decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_provider_ktrain.core.diagnosis import failure_patterns, startup_rules
from airflow_provider_ktrain.core.diagnosis.crash_loop import CrashLoop
from airflow_provider_ktrain.core.diagnosis.evidence import Evidence, make_evidence, reached_backoff_limit
from airflow_provider_ktrain.core.diagnosis.hangs import LOOK_FOR_STACKS
from airflow_provider_ktrain.core.diagnosis.model import READ_LOG, Category, Cause
from airflow_provider_ktrain.core.diagnosis.node_rules import broken_nodes, first_problem, named
from airflow_provider_ktrain.core.diagnosis.replica_rules import diagnose_replica, find_known_message
from airflow_provider_ktrain.core.state.accelerators import is_accelerator, units_together
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.devices import requested_by
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.state.steps.non_finite import REPORTS_IN_A_ROW

Rule = Callable[[Evidence], Cause | None]
_NO_FAILURE_LEFT = "its last failure is no longer visible"


def diagnose(evidence: Evidence) -> Cause:
    """The cause of a job's failure, or of its lack of progress."""
    cause = next((cause for rule in _RULES if (cause := rule(evidence))), _unknown(evidence))
    return _with_failed_nodes(cause, evidence)


def diagnose_limit(
    limit: Limit, amount: float, evidence: Evidence, *, step: float | None = None, replicas: str = ""
) -> Cause:
    """The cause if one of the task's limits ended the job: the limit, and what kept the job from making progress.

    :param amount: its value: seconds, or a number of restarts for `max_restarts`.
    :param step: the highest step that the program reported. Default: None, it reported none.
    :param replicas: how many run and what the others wait for. Default: "", not known.
    """
    if limit is Limit.LOG_STALL and evidence.kind.runs_on(evidence.job):
        cause = diagnose(evidence)
        silent = f"{evidence.kind.primary(evidence.job)} wrote no line for {amount:.0f} s after that"
        return replace(cause, summary=f"{cause.summary}. {silent}").with_short_summary()
    evidence = replace(evidence, include_recovered=limit is Limit.RESTARTS)
    if limit is Limit.PARTIAL_START:  # whatever else failed, it failed while it waited for these pods
        obstacle = startup_rules.find_unschedulable_pod(evidence)
    else:
        obstacle = diagnose_replica(evidence) or startup_rules.find_obstacle(evidence)
    if limit is Limit.RESTARTS:
        often = f"{evidence.title} was restarted more often than max_restarts={amount:.0f} allows"
        cause = (obstacle or Cause(Category.USER_CODE, _NO_FAILURE_LEFT)).with_summary(lambda why: f"{often}: {why}")
        return _with_failed_nodes(cause, evidence)
    category, description, resolution = _LIMITS[limit]
    if limit is Limit.STARTUP and not evidence.pods and not evidence.conditions and not obstacle:
        description = "was not reconciled by any operator within {seconds} s ({limit})"
        resolution = f"Check that {evidence.operators} runs."
        if not evidence.kind.behavior.reports_phases:  # its operator may have tried, which only events show
            description = "had no pods within {seconds} s ({limit})"
            resolution = f"Check that {evidence.operators} runs, and the events of the job and of what it owns."
    higher = "" if step is None else f" higher than {step:.10g}"
    values = {
        "seconds": f"{amount:.0f}", "limit": limit, "higher": higher, "accelerators": _held_by(evidence),
    }  # fmt: skip
    passed = f"{evidence.title} {description.format(**values)}"
    reached = "" if step is None else f", step {step:.10g}"
    where = f"{replicas}{reached}" if replicas and limit is Limit.EXECUTION else ""
    found = obstacle or Cause(category, where)
    cause = replace(
        found.with_summary(lambda why: f"{passed}: {why}" if why else passed),
        category=found.category if limit in (Limit.SCHEDULE, Limit.STARTUP) else category,
        resolution=found.resolution or resolution,
        last_lines=(),
    )
    return _with_failed_nodes(cause, evidence)


def diagnose_divergence(replica: str, metric: str, step: float | None) -> Cause:
    """The cause if `fail_on_nan` ended the job.

    :param step: of the first report that was NaN or infinite; None if it had none.
    """
    since = "" if step is None else f", since step {step:.10g}"
    return Cause(
        Category.USER_CODE,
        f"{replica} reported {metric} {REPORTS_IN_A_ROW} times in a row as NaN or infinity{since} ({Limit.NAN})",
        resolution="Check the learning rate and the data of that step. A retry trains again.",
        replica=replica,
    ).with_short_summary()


def lost_replica(job: Mapping[str, Any], pods: Sequence[Json]) -> str:
    """Which replica is lost for good of a job that has failed and runs on, and what that means."""
    evidence = make_evidence(job, pods)
    cause, primary = diagnose_replica(evidence), evidence.kind.primary(job)
    return (
        f"{evidence.title} has lost a replica for good. Its {primary} runs on.\n"
        f"{'No pod shows why.' if cause is None else cause.summary}\nThe job fails after 5 minutes without a log line."
    )


def with_obstacle(cause: Cause, summary: str, evidence: Evidence) -> Cause:
    """The cause of a job that a queue has given up because its pods were not ready, with what kept them from it.

    :param cause: without the obstacle, whose category replaces the cause's.
    :param summary: a short one, which leaves room for the obstacle.
    :param evidence: what is known of the job, with its deleted pods.
    """
    evidence = replace(evidence, include_recovered=True)
    found = diagnose_replica(evidence) or startup_rules.find_obstacle(evidence)
    if found is None:
        return cause
    detail = "\n".join(text for text in (found.detail, cause.detail) if text)
    found = replace(found, detail=detail, resolution=found.resolution or cause.resolution)
    return _with_failed_nodes(found.with_summary(lambda why: f"{summary}: {why}"), evidence)


def diagnose_crash_loop(loop: CrashLoop, evidence: Evidence) -> Cause:
    """The cause if a crash loop ended the job: that of the last failure."""
    evidence, replica = replace(evidence, include_recovered=True), loop.replica
    if loop.of_pods:
        own = (pod for pod in evidence.pods if evidence.kind.replica(pod) == replica)
        ousted = (pod for pod in own if objects.disruption_of(pod)[0])
        evidence = replace(evidence, pods=sorted(ousted, key=objects.created)[-1:])
    often = f"{replica} failed {loop.failures} times in a row, each within 10 minutes of its start"
    last = diagnose_replica(evidence) or Cause(
        Category.USER_CODE, _NO_FAILURE_LEFT, replica=replica, resolution=READ_LOG.format(replica)
    )
    begin = re.compile(f"^{replica} (failed(:| with) )?")
    cause = last.with_summary(lambda why: f"{often} ({Limit.CRASH_LOOP}): {begin.sub('', why)}")
    return _with_failed_nodes(cause, evidence)


def find_startup_cause(evidence: Evidence, waited_seconds: float, *, has_run: bool = False) -> Cause | None:
    """Why a job will never start, with the nodes that failed; None while it may still start.

    Events don't end a job that has run: it may be a part of a training that waits for its pods again.

    :param evidence: what is known of the job. With a current time, the grace time of a pod starts when it gets its
        node, and that of an event when it was first seen, since the job may have waited for hours until then.
    :param waited_seconds: seconds since the job's phase last changed, compared with GRACE_SECONDS.
    :param has_run: whether the job is known to have run before. Default: False, its conditions and pods show it.
    """
    if "Running" in evidence.conditions or evidence.failed_condition:
        return None
    evidence = replace(evidence, waited_seconds=waited_seconds)
    cause = startup_rules.find_blocked_container(evidence)
    if cause is None and not has_run and not startup_rules.has_run(evidence):
        cause = next((refusal for rule in startup_rules.REFUSALS if (refusal := rule(evidence))), None)
    return None if cause is None else _with_failed_nodes(cause, evidence)


def _with_failed_nodes(cause: Cause, evidence: Evidence) -> Cause:
    """The cause with a short summary and the nodes that failed."""
    return replace(cause, failed_nodes=_find_failed_nodes(evidence, cause)).with_short_summary()


def _find_failed_nodes(evidence: Evidence, cause: Cause) -> dict[str, str]:
    """The nodes on which a job failed by infrastructure, by name, each with the reason.

    Those with a broken GPU, lost ones, those that evicted a pod because of a shortage, and those whose conditions say
    that they broke while the job ran. Not those of preempted or drained pods, nor of pods that exceeded a limit of
    their own. What a program logs about its GPU counts only for the failure that is the cause.
    """
    found: dict[str, str] = {}
    if cause.category is Category.INFRASTRUCTURE:
        for node, reason in (*broken_nodes(evidence), *_of_failures(evidence), *_of_blocked_pods(evidence)):
            found.setdefault(node, reason)
    return found


def _of_failures(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for at, failure in enumerate(evidence.failures):
        found = [(failure_patterns.explain_disruption(failure.reason, failure.message), f" ({failure.reason})")]
        if at == 0:
            message = find_known_message(failure)
            known = startup_rules.find_start_error(failure.reason, failure.message) or (message[0] if message else None)
            found.append((known, ""))
        why = next((f"{known.description}{reason}" for known, reason in found if known and known.blames_node), "")
        if failure.node and why:
            yield failure.node, f"{failure.replica} {why}"


def _of_blocked_pods(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Pods whose containers the node can't start."""
    for pod in evidence.pods:
        for container in objects.main_containers(pod):
            waiting = objects.state_of(container, "waiting")
            known = startup_rules.find_start_error(str(waiting.get("reason")), str(waiting.get("message") or ""))
            if known and known.blames_node and (node := objects.node_of(pod)):
                yield node, f"{evidence.kind.replica(pod)} {known.description}"


#: Category, description and resolution for each limit.
_LIMITS = {
    Limit.QUEUE: (
        Category.QUEUE,
        "was not admitted by its queue within {seconds} s ({limit})",
        "Check the queue's quota and workloads.",
    ),
    Limit.SCHEDULE: (
        Category.SCHEDULING,
        "could not schedule all its pods within {seconds} s ({limit})",
        "Free nodes, request less, or raise schedule_timeout.",
    ),
    Limit.STARTUP: (
        Category.INFRASTRUCTURE,
        "did not start within {seconds} s ({limit})",
        "Check the events of its pods.",
    ),
    Limit.PARTIAL_START: (
        Category.SCHEDULING,
        "held {accelerators} for {seconds} s while some of its pods had no node ({limit})",
        "Free nodes, request less, use a queue or a gang scheduler, or raise partial_start_timeout.",
    ),
    Limit.EXECUTION: (
        Category.TIMEOUT,
        "did not finish within {seconds} s of its creation ({limit})",
        "Raise execution_timeout, or shorten the training. A part of execution_timeout is reserved for the release.",
    ),
    Limit.LOG_STALL: (
        Category.HANG,
        "wrote no log line for {seconds} s ({limit})",
        f"{LOOK_FOR_STACKS} Raise log_stall_timeout if the program may be silent for longer.",
    ),
    Limit.PROGRESS: (
        Category.HANG,
        "reported no step{higher} for {seconds} s ({limit})",
        f"{LOOK_FOR_STACKS} Raise progress_timeout if steps, their evaluation or the start may take longer. "
        'The program must print lines such as KTRAIN_METRIC {"step": 120}.',
    ),
}


def category_of(limit: Limit | None) -> Category:
    """The category of a cause of which only the limit is known."""
    if limit is Limit.NAN:
        return Category.USER_CODE
    return _LIMITS[limit][0] if limit in _LIMITS else Category.UNKNOWN


def _held_by(evidence: Evidence) -> str:
    """What the accelerators of the pods that have a node are called."""
    requested = (requested_by(pod.get("spec") or {}) for pod in evidence.pods if objects.node_of(pod))
    return units_together(name for amounts in requested for name in amounts if is_accelerator(name))


def _deadline_exceeded(evidence: Evidence) -> Cause | None:
    """The manifest's deadline ended the job, and no replica had failed for another reason before."""
    failed = evidence.failed_condition
    if not failed or not (failed.reason == "DeadlineExceeded" or "longer than specified deadline" in failed.message):
        return None
    if any(f.reason != "DeadlineExceeded" for f in evidence.failures):
        return None
    spec = evidence.job.get("spec") or {}
    seconds = (spec.get("runPolicy") or spec).get("activeDeadlineSeconds")
    summary = f"{evidence.title} exceeded its activeDeadlineSeconds{'' if seconds is None else f' of {seconds} s'}"
    return Cause(
        Category.TIMEOUT, summary, failed.message,
        "Raise activeDeadlineSeconds of the manifest, or execution_timeout if the operator set the deadline from it.",
    )  # fmt: skip


def _backoff_limit_exceeded(evidence: Evidence) -> Cause | None:
    """The operator ended the job after `backoffLimit` restarts."""
    failed = evidence.failed_condition
    if not failed or not reached_backoff_limit(failed):
        return None
    limit = ((evidence.job.get("spec") or {}).get("runPolicy") or {}).get("backoffLimit")
    codes = [m[1] for e in evidence.events if (m := re.search(r"exitCode: ((?!0\b)\d+)", str(e.get("message"))))]
    last_code = f"; the last failure had exit code {codes[-1]}" if codes else ""
    summary = f"{evidence.title} reached its backoffLimit{'' if limit is None else f' of {limit} restarts'}{last_code}"
    resolution = "Read the log. Under restartPolicy Always, a program that succeeds is restarted as well."
    return Cause(Category.USER_CODE, summary, failed.message, resolution)


def _pod_deleted(evidence: Evidence) -> Cause | None:
    """Operators count a pod that is being deleted as failed; under restartPolicy Never the job fails with it."""
    failed = evidence.failed_condition
    found = re.search(evidence.kind.behavior.failed_role, failed.message) if failed else None
    role = found[1] if found else ""
    deletions = [
        (at, evidence.kind.replica(pod), objects.node_of(pod))
        for pod in evidence.pods
        if (at := objects.deletion_requested_at(pod))
    ]
    of_failed_role = [deletion for deletion in deletions if role and deletion[1].startswith(role)]
    if not failed or not of_failed_role:
        return None
    _, replica, node = min(of_failed_role)
    summary = f"{replica} was deleted or killed from outside, which failed the job"
    resolution = "Find out what deletes pods in this namespace: kubectl, a node drain, a cleanup tool. Check the node."
    cause = Cause(Category.INFRASTRUCTURE, summary, failed.message, resolution, replica)
    return named(cause, first_problem(evidence, lambda problem: problem.node == node), replica)


def _failed_without_evidence(evidence: Evidence) -> Cause | None:
    """The job failed, and no pod, event or log shows why."""
    failed = evidence.failed_condition
    if not failed:
        return None
    category = Category.INFRASTRUCTURE if "Evicted" in failed.reason else Category.UNKNOWN
    message = failed.message.strip() or failed.reason
    return Cause(category, f"{evidence.title} failed: {message}", f"Reason: {failed.reason}", "Check the job's events.")


def _job_deleted(evidence: Evidence) -> Cause | None:
    """Somebody else deleted the job before it ended."""
    if not evidence.gone and not objects.is_being_deleted(evidence.job):
        return None
    if evidence.failed_condition or {"Succeeded", "Complete"} & set(evidence.conditions):
        return None
    obstacle = startup_rules.find_obstacle(evidence)
    summary = f"{evidence.title} {'was' if evidence.gone else 'is being'} deleted by someone else before it ended"
    resolution = "Find out what deletes jobs in this namespace: kubectl, a quota or cleanup tool, another workflow."
    return Cause(Category.INFRASTRUCTURE, summary, obstacle.summary if obstacle else "", resolution)


def _suspended(evidence: Evidence) -> Cause | None:
    """The job is suspended, by a queue or by a user."""
    condition = evidence.conditions.get("Suspended")
    if not condition:
        return None
    summary = f"{evidence.title} is suspended: {condition.message or condition.reason or 'it waits for its queue'}"
    resolution = "Check the queue's workloads and quota. If the job has no queue, resume it."
    return Cause(Category.QUEUE, summary, resolution=resolution)


def _unknown(evidence: Evidence) -> Cause:
    """No rule found a cause."""
    if not evidence.conditions and (evidence.kind.behavior.reports_phases or not evidence.job.get("status")):
        summary = f"{evidence.title} has no status: no operator has reconciled it"
        return Cause(Category.UNKNOWN, summary, "", f"Check that {evidence.operators} runs, and the job's events.")
    return Cause(Category.UNKNOWN, f"{evidence.title} shows no failure", "", "Check its events and logs.")


_RULES: tuple[Rule, ...] = (
    _deadline_exceeded,
    diagnose_replica,
    _backoff_limit_exceeded,
    _pod_deleted,
    startup_rules.find_operator_rejection,
    _failed_without_evidence,
    _job_deleted,
    startup_rules.find_blocked_container,
    startup_rules.find_refused_pods,
    startup_rules.find_unschedulable_pod,
    startup_rules.find_refused_resources,
    _suspended,
)
