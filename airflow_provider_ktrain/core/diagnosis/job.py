"""Why a job failed, or does not start: one line, and what to do about it.

A pure function of what was seen: the job, its pods as they were last seen, events, the last lines of logs. Each rule
looks at one kind of evidence; the first that has something to say decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from airflow_provider_ktrain.core.diagnosis.evidence import Seen, evidence_of
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause, Limit
from airflow_provider_ktrain.core.diagnosis.pod_failures import Json, deletion_of, moment
from airflow_provider_ktrain.core.diagnosis.replicas import replica_failed
from airflow_provider_ktrain.core.diagnosis.startup import (
    cannot_start,
    find_obstacle,
    pods_refused,
    refused_by_operator,
    unschedulable,
)
from airflow_provider_ktrain.core.state.status import true_conditions

Rule = Callable[[Seen], Cause | None]


def diagnose(
    job: Json,
    pods: Sequence[Json],
    events: Sequence[Json] = (),
    log_tails: Mapping[str, Sequence[str]] | None = None,
    now: datetime | None = None,
    *,
    gone: bool = False,
) -> Cause:
    """The cause of a failure, or of not getting on.

    :param job: the job as it was last seen.
    :param pods: its pods as each was last seen, also those deleted since and those replaced by others of their name.
    :param events: Events of the job, its pods and its launcher Job.
    :param log_tails: the last lines (50 or so) of containers by `log_key(pod, container)`, without timestamps.
    :param now: the time to which a job that has not ended is said to have run.
    :param gone: the job does not exist any more.
    """
    seen = evidence_of(job, pods, events, log_tails, now, gone)
    return next((cause for rule in _RULES if (cause := rule(seen))), _unknown(seen))


def limit_passed(
    limit: Limit,
    seconds: float,
    job: Json,
    pods: Sequence[Json],
    events: Sequence[Json] = (),
    log_tails: Mapping[str, Sequence[str]] | None = None,
) -> Cause:
    """The cause where one of our own limits ended the job: the limit, and what kept the job from getting on.

    :param seconds: the limit (for `max_restarts`: the number of restarts).
    """
    seen = replace(evidence_of(job, pods, events, log_tails), healed=limit is Limit.RESTARTS)
    obstacle = refused_by_operator(seen) or replica_failed(seen) or find_obstacle(seen)
    if limit is Limit.RESTARTS:
        said = obstacle.summary if obstacle else "no failure is left to be seen"
        cause = obstacle or Cause(Category.USER_CODE, "")
        much = f"was restarted more often than max_restarts={seconds:.0f} allows"
        return replace(cause, summary=f"{seen.title} {much}: {said}")
    category, what, resolution = _LIMITS[limit]
    after = f"after {seconds:.0f} s ({limit})"
    if limit is Limit.EXECUTION:
        after = f"{seconds:.0f} s after its creation ({limit}, less the time to release it)"
    if limit is Limit.STARTUP and not pods and not true_conditions(job) and not obstacle:
        what, resolution = "was reconciled by no operator", "see whether training-operator or mpi-operator runs"
    said = f": {obstacle.summary}" if obstacle else ""
    decisive = obstacle if limit in (Limit.SCHEDULE, Limit.STARTUP) else None
    return Cause(
        decisive.category if decisive else category,
        f"{seen.title} {what} {after}{said}",
        obstacle.detail if obstacle else "",
        (obstacle.resolution if obstacle else "") or resolution,
        obstacle.replica if obstacle else "",
        decisive.retryable if decisive else True,
    )


def crash_loop(
    replica: str,
    times: int,
    job: Json,
    pods: Sequence[Json],
    events: Sequence[Json] = (),
    log_tails: Mapping[str, Sequence[str]] | None = None,
) -> Cause:
    """The cause where a crash loop ended the job: that of the last failure.

    :param replica: `Master 0`, whose container failed.
    :param times: how often in a row.
    """
    seen = replace(evidence_of(job, pods, events, log_tails), healed=True)
    last = replica_failed(seen)
    said = re.sub(f"^{replica} failed(:| with) ", "", last.summary) if last else "no failure is left to be seen"
    often = f"{replica} failed {times} times in a row, each within 10 minutes of its start ({Limit.CRASH_LOOP})"
    return replace(
        last or Cause(Category.USER_CODE, "", replica=replica, resolution="see the log of this replica"),
        summary=f"{often}: {said}",
        retryable=True,
    )


_LIMITS = {
    Limit.QUEUE: (Category.QUEUE, "was not admitted by its queue", "look at the queue's quota and workloads"),
    Limit.SCHEDULE: (Category.SCHEDULING, "has no nodes for all its pods", "free nodes, ask for less, or wait longer"),
    Limit.STARTUP: (Category.INFRASTRUCTURE, "has not started", "look at the events of its pods"),
    Limit.EXECUTION: (Category.TIMEOUT, "has not ended", "raise execution_timeout, or train less"),
    Limit.LOG_STALL: (
        Category.HANG,
        "has written no log line",
        "look for a replica that waits for another: a missing peer, unequal numbers of batches, a deadlock; "
        "py-spy dump in a pod shows where it stands; raise log_stall_timeout where silence is normal",
    ),
}


def _past_deadline(seen: Seen) -> Cause | None:
    """The job's own deadline, unless a replica had failed of itself before."""
    failed = seen.failed
    if not failed or not (failed.reason == "DeadlineExceeded" or "longer than specified deadline" in failed.message):
        return None
    if any(f.reason != "DeadlineExceeded" for f in seen.failures):
        return None
    seconds = ((seen.job.get("spec") or {}).get("runPolicy") or {}).get("activeDeadlineSeconds")
    said = f" of {seconds} s" if seconds is not None else ""
    return Cause(
        Category.TIMEOUT,
        f"{seen.title} was active longer than its activeDeadlineSeconds{said}",
        failed.message,
        "raise runPolicy.activeDeadlineSeconds (or execution_timeout, from which it is set), or train less",
    )


def _gave_up(seen: Seen) -> Cause | None:
    failed = seen.failed
    if not failed or not (failed.reason.startswith("BackoffLimitExceeded") or "backoff limit" in failed.message):
        return None
    limit = ((seen.job.get("spec") or {}).get("runPolicy") or {}).get("backoffLimit")
    codes = [m[0] for e in seen.events if (m := re.search(r"exitCode: (?!0\b)\d+", str(e.get("message"))))]
    said = f"; seen: {codes[-1].replace('exitCode:', 'exit code')}" if codes else ""
    return Cause(
        Category.USER_CODE,
        f"{seen.title} was restarted until its backoffLimit{'' if limit is None else f' of {limit}'} was reached{said}",
        failed.message,
        "see the log; under restartPolicy Always even a program that ends well is restarted",
    )


def _pod_deleted(seen: Seen) -> Cause | None:
    """A pod that is being deleted counts as failed at once, and under Never the job with it (recorded)."""
    failed = seen.failed
    match = re.search(r"(\w+) replica\(s\) failed", failed.message) if failed else None
    deleted = [(at, seen.replica_of(pod)) for pod in seen.pods if (at := deletion_of(pod))]
    told = [(at, replica) for at, replica in deleted if match and replica.startswith(match[1])]
    if not failed or not told:
        return None
    replica = min(told)[1]
    return Cause(
        Category.INFRASTRUCTURE,
        f"{replica} was deleted or killed from outside, and the job failed with it",
        failed.message,
        "find out who deletes pods in this namespace: kubectl, a drain, a cleanup tool; look at the node",
        replica,
    )


def _failed_somehow(seen: Seen) -> Cause | None:
    if not seen.failed:
        return None
    category = Category.INFRASTRUCTURE if "Evicted" in seen.failed.reason else Category.UNKNOWN
    said = seen.failed.message.strip() or seen.failed.reason
    return Cause(category, f"{seen.title} failed: {said}", f"reason {seen.failed.reason}", "see its events")


def _deleted(seen: Seen) -> Cause | None:
    if not seen.gone and not (seen.job.get("metadata") or {}).get("deletionTimestamp"):
        return None
    if seen.failed or {"Succeeded", "Complete"} & set(true_conditions(seen.job)):
        return None
    what = "was deleted" if seen.gone else "is being deleted"
    obstacle = find_obstacle(seen)
    return Cause(
        Category.INFRASTRUCTURE,
        f"{seen.title} {what} by someone else before it had ended",
        obstacle.summary if obstacle else "",
        "find out who deletes jobs in this namespace: kubectl, a quota or cleanup tool, another workflow",
    )


def _suspended(seen: Seen) -> Cause | None:
    condition = true_conditions(seen.job).get("Suspended")
    if not condition:
        return None
    return Cause(
        Category.QUEUE,
        f"{seen.title} is suspended: {condition.message or condition.reason or 'it waits for its queue'}",
        "",
        "look at the queue's workloads and quota; without a queue, resume it",
    )


def _unknown(seen: Seen) -> Cause:
    if not true_conditions(seen.job):
        return Cause(
            Category.UNKNOWN,
            f"{seen.title} has no status: no operator has reconciled it",
            "",
            "see whether training-operator or mpi-operator runs, and the job's events",
        )
    started = moment((seen.job.get("status") or {}).get("startTime"))
    ran = f" after {(seen.now - started).total_seconds():.0f} s" if seen.now and started else ""
    return Cause(Category.UNKNOWN, f"{seen.title} shows no failure{ran}", "", "see its events and logs")


_RULES: tuple[Rule, ...] = (
    refused_by_operator,
    _past_deadline,
    replica_failed,
    _gave_up,
    _pod_deleted,
    _failed_somehow,
    _deleted,
    cannot_start,
    pods_refused,
    unschedulable,
    _suspended,
)
