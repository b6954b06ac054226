"""Rules for replicas: why a container failed or a pod was lost, the most specific rule first."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

from airflow_provider_ktrain.core.diagnosis import failure_patterns
from airflow_provider_ktrain.core.diagnosis.collectives import explain_timeout
from airflow_provider_ktrain.core.diagnosis.evidence import Evidence, reached_backoff_limit
from airflow_provider_ktrain.core.diagnosis.model import LAST_LINES, READ_LOG, Category, Cause
from airflow_provider_ktrain.core.diagnosis.node_rules import blame_node, describe_nodes
from airflow_provider_ktrain.core.diagnosis.pod_failures import (
    CLOCK_SKEW,
    PEER_LOSS_DELAY,
    Failure,
    causes_of_peers,
    describe_exit_code,
    follows_build,
)
from airflow_provider_ktrain.core.diagnosis.startup_rules import find_obstacle, start_error_cause
from airflow_provider_ktrain.core.state.pods.objects import (
    SIGKILLED,
    SIGTERMED,
    created,
    deletion_requested_at,
    failures_of,
    main_containers,
    name_of,
    signal_name,
)
from airflow_provider_ktrain.core.text.output import MAX_FIRST_LINE_CHARS, ends_of_chain, first_line
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp

LIMIT_DELAY = timedelta(seconds=2)  #: An operator deletes pods just before it shows that a job has reached its limit.


def diagnose_replica(evidence: Evidence) -> Cause | None:
    """The cause of the failure that most likely made the job fail; None if no replica failed."""
    found = evidence.failures
    if not found:
        return None
    failure = found[0]
    may_follow = failure.is_effect or failure.tail.exception.startswith("ImportError")
    peers = causes_of_peers(evidence.kind, evidence.pods, evidence.logs) if may_follow else []
    failure = next((peer for peer in peers if failure.is_effect or follows_build(failure, [peer])), failure)
    cause = next((c for rule in _RULES if (c := rule(failure))), None) or _program_failed(failure)
    if failure.tail.is_peer_loss and cause == _lost_a_peer(failure):
        cause = _left_early(evidence, failure, cause) or explain_timeout(evidence, cause) or cause
    if failure.follows_peers(evidence.kind.launchers) and not cause.replica:
        cause = _peer_deleted(evidence, failure, cause) or cause
    obstacle = find_obstacle(evidence)
    needs_its_peers = failure.tail.is_peer_loss or failure.role in evidence.kind.launchers
    if obstacle and obstacle.replica != failure.replica and needs_its_peers:
        effect = f"{failure.replica} failed while waiting for it ({describe_exit_code(failure.exit_code)})"
        cause = obstacle.with_summary(lambda summary: f"{summary}. {effect}")
    else:
        cause = blame_node(cause, failure, evidence)
    return replace(
        cause.with_summary(lambda summary: " ".join(summary.split())),
        replica=cause.replica or failure.replica,
        last_lines=failure.tail.quoted_lines,
        detail="\n".join(text for text in (cause.detail, *_context(evidence, failure)) if text),
    )


def _context(evidence: Evidence, failure: Failure) -> Iterator[str]:
    """The lines of the detail: the job's message, pod and restarts, later failures, nodes, the last log lines."""
    yield evidence.failed_condition.message.strip() if evidence.failed_condition else ""
    recreated = sum(not f.is_latest and f.replica == failure.replica for f in evidence.all_failures)
    yield f"{failure.replica}: " + ", ".join(
        text
        for text in (
            f"pod {failure.pod}",
            f"container {failure.container}" if failure.container else "",
            f"restarted {_times(failure.restarts)}" if failure.restarts else "",
            f"recreated {_times(recreated)}" if recreated else "",
        )
        if text
    )
    others = dict.fromkeys(f.replica for f in evidence.failures if f.replica != failure.replica)
    yield f"Failed later: {', '.join(others)}" if others else ""
    if failure.tail.others:
        yield "\n".join(["Other exceptions:", *(f"  {text}" for text in failure.tail.others)])
    yield from describe_nodes(evidence, failure)
    if failure.tail.quoted_lines:
        yield "\n".join([LAST_LINES, *(f"  {line}" for line in failure.tail.quoted_lines)])


def _disrupted(f: Failure) -> Cause | None:
    """Kubernetes ended the pod: eviction, preemption, a lost node, the pod's deadline."""
    known = failure_patterns.explain_disruption(f.reason, f.message)
    if known is None:
        return None
    what = f"{f.replica} {known.description} ({f.reason})"
    message = f.message and first_line(f.message)
    if f.reason == "UnexpectedAdmissionError":  # a chain of errors, of which the device plugin's is the last
        message = ends_of_chain(f.message, MAX_FIRST_LINE_CHARS - len(what) - 2)
    message = f": {message}" if message else ""
    return Cause(known.category, f"{what}{message}", "", known.resolution)


def _out_of_memory(f: Failure) -> Cause | None:
    """The kubelet reports OOMKilled, or a launcher or shell reports that one of its processes got SIGKILL."""
    resolution = "Raise the memory limit, or reduce the batch size, prefetching or the number of DataLoader workers."
    if f.reason == "OOMKilled":
        summary = f"{f.replica} ran out of memory (OOMKilled, exit code 137)"
        return Cause(Category.OUT_OF_MEMORY, summary, "", resolution)
    shell_reports_kill = (f.exit_code == SIGKILLED or f.is_running) and f.tail.is_kill_reported
    if (f.tail.child_exit_code == -9 or shell_reports_kill) and not f.tail.exception:
        code = _code(f)
        summary = f"{f.replica} failed: SIGKILL ended one of its processes, probably out of memory ({code})"
        return Cause(Category.OUT_OF_MEMORY, summary, "", resolution)
    return None


def _command_missing(f: Failure) -> Cause | None:
    """A shell's exit code 126 or 127. The program may have run for hours before it called that command."""
    problem = {126: "a command is not executable", 127: "a command was not found"}.get(f.exit_code or 0)
    if problem is None or f.tail.exception:
        return None
    last_line = f": {f.tail.last_line}" if f.tail.last_line else ""
    what = f"{f.replica} failed with {_code(f)}, {problem}"
    resolution = "Correct the command, or use an image that contains it."
    return Cause(Category.USER_CODE, f"{what}{last_line}", "", resolution, unquoted=what)


def _known_message(f: Failure) -> Cause | None:
    """A known message of the program explains its end."""
    found = find_known_message(f)
    if found is None:
        return None
    known, message = found
    category = known.category_with_gpus if f.has_gpus and known.category_with_gpus else known.category
    return replace(_explained(f, known, message), category=category)


def _explained(f: Failure, known: failure_patterns.FailurePattern, message: str) -> Cause:
    """The cause that a message in the log explains."""
    what, code = f"{f.replica} {known.description}", f"({_code(f)})"
    if "NCCL" in known.description:
        message = message.removeprefix("NCCL: ")
    summary = f"{what}: {re.sub(failure_patterns.CODE_PATH, '', message)} {code}"
    return Cause(known.category, summary, "", known.resolution, unquoted=f"{what} {code}")


def find_known_message(f: Failure) -> tuple[failure_patterns.FailurePattern, str] | None:
    """A known message in the final exception, or after it near the end of the log; None if there is none.

    Messages explain only a program that ended by itself: not one that was killed from outside, and a crashed process
    only by its exception.
    """
    ended_by = _signal_of(f)
    if ended_by in (signal.SIGKILL, signal.SIGTERM):
        return None
    why = f.tail.exception or (f.tail.crash_line if ended_by in (0, signal.SIGABRT) else "")
    after = f.tail.final_text.rpartition(f.tail.exception)[2] if f.tail.exception else f.tail.final_text
    if f.tail.exception:  # wandb sends its last data then, and reports what that meets
        after = re.sub(r"(?m)^wandb: .*", "", after)
    texts = (why, after) if ended_by in (0, signal.SIGABRT) else (why,)
    for text, known in itertools.product(texts, failure_patterns.PROGRAM_ERRORS):
        if match := re.search(known.pattern, text):
            begin = text.rfind("\n", 0, match.start()) + 1
            line = text[begin:].partition("\n")[0] if text is not why else why
            most = MAX_FIRST_LINE_CHARS - len(f"{f.replica} {known.description}: ({_code(f)})")
            return known, why if why and text is not why else _focused(line, match.end() - begin, most - 6)
    return None


def _focused(message: str, end: int, most: int) -> str:
    """A message without as many of its first sentences or clauses as must go so that the part up to `end` fits."""
    if end <= most:
        return message.strip()
    begins = (mark.end() for mark in re.finditer(r"[.?:,\]]\s+", message[:end]) if end - mark.end() <= most)
    return f"... {message[next(begins, 0) :].strip()}"


def _telling_signal(f: Failure) -> Cause | None:
    """SIGBUS ended the program, which happens if /dev/shm is full, or SIGILL, because the CPU is another one."""
    known = failure_patterns.first_match(failure_patterns.SIGNALS, signal_name(-_signal_of(f)))
    if known is None or f.tail.exception:
        return None
    place = f.tail.crash_line.rpartition(" in ")[2] if f.tail.crash_signal else ""
    where = f" in {place}" if place and place != f.tail.crash_line else ""
    summary = f"{f.replica} {known.description}{where} ({_code(f)})"
    return Cause(known.category, summary, "", known.resolution)


def _signal_of(f: Failure) -> int:
    """The signal that ended the container, or the process that its launcher reports; 0 if none did."""
    for code in (f.tail.child_exit_code, (128 - f.exit_code) if f.exit_code else None):
        if code is not None and code < 0:
            return -code
    return f.tail.crash_signal


def _lost_a_peer(f: Failure) -> Cause | None:
    """The replica failed because another one was lost, and none of them shows another cause."""
    if not f.tail.is_peer_loss:
        return None
    last = reversed(f.tail.text.splitlines())
    reported = next((line.strip() for line in last if failure_patterns.reports_peer_loss(line)), f.tail.last_line)
    message = f.tail.exception or f.tail.crash_line or reported
    return _explained(f, failure_patterns.explain(failure_patterns.PEER_LOSSES, message), message)


def _left_early(evidence: Evidence, f: Failure, lost: Cause) -> Cause | None:
    """A replica has left the job before another one lost it: its program ended with exit code 0."""
    if f.since is None or f.role in evidence.kind.launchers:
        return None
    left = [
        (ended, evidence.kind.replica(pod))
        for pod in evidence.pods
        for container in main_containers(pod)
        if (run := (container.get("state") or {}).get("terminated") or {}).get("exitCode") == 0
        and evidence.kind.is_main_container(str(container.get("name")))
        and (ended := parse_timestamp(run.get("finishedAt")))
        and ended <= f.since
    ]
    _, replica = min(left, default=(None, f.replica))
    if replica == f.replica:
        return None
    summary = f"{replica} ended with exit code 0 while {f.replica} was still training"
    resolution = "Let all replicas make the same number of steps: a barrier or a collective operation waits for each."
    return Cause(Category.USER_CODE, summary, lost.summary, resolution, replica)


def _peer_deleted(evidence: Evidence, f: Failure, effect: Cause) -> Cause | None:
    """The pod of a peer was deleted before the replica failed, and not by the operator, which cleans up afterwards."""
    kind, job, failed = evidence.kind, evidence.job, evidence.failed_condition
    if f.since is None or failed is None or (ended := parse_timestamp(failed.since)) is None:
        return None

    def is_removed(role: str, index: int) -> bool:
        return 0 < kind.count(job, role) <= index  # since the job was scaled down

    if reached_backoff_limit(failed):
        ended -= LIMIT_DELAY
    own = next((pod for pod in evidence.pods if name_of(pod) == f.pod), {})
    deleted = [
        (at, kind.replica(pod))
        for pod in evidence.pods
        if (at := deletion_requested_at(pod))
        and at >= f.since - PEER_LOSS_DELAY
        and at <= f.since + CLOCK_SKEW
        and at < ended
        and created(own) <= f"{at:%Y-%m-%dT%H:%M:%SZ}"
        and not is_removed(*kind.role_of(pod))
        and not failures_of(pod)
    ]
    _, replica = min(deleted, default=(None, f.replica))
    if replica == f.replica:
        return None
    summary = f"The pod of {replica} was deleted before {f.replica} failed ({describe_exit_code(f.exit_code)})"
    resolution = "Find out what deletes pods in this namespace: kubectl, a node drain, a cleanup tool, another task."
    return Cause(Category.INFRASTRUCTURE, summary, effect.summary, resolution, replica)


def _killed(f: Failure) -> Cause | None:
    """SIGKILL or SIGTERM ended the container, and neither Kubernetes nor the program reports why."""
    if f.exit_code not in (SIGKILLED, SIGTERMED) or (f.tail.exception and not f.tail.is_handled):
        return None
    summary = f"{f.replica} was killed from outside by {signal_name(f.exit_code)} (exit code {f.exit_code})"
    resolution = "Check the node for memory pressure, a reboot or a manual kill. A failed liveness probe kills as well."
    return Cause(Category.INFRASTRUCTURE, summary, "", resolution)


_RULES: tuple[Callable[[Failure], Cause | None], ...] = (
    _disrupted,
    _out_of_memory,
    start_error_cause,
    _command_missing,
    _known_message,
    _telling_signal,
    _lost_a_peer,
    _killed,
)


def _program_failed(f: Failure) -> Cause:
    """What is left if no rule applies: the program's exception, or its exit code and last line."""
    who = f"Init container {f.container} of {f.replica}" if f.is_init else f.replica
    why = f.tail.exception or f.tail.crash_line or f.tail.record
    last_line = f". Last log line: {f.tail.last_line}" if f.tail.last_line else ""
    if f.tail.assertion:
        why = f"{why}: {f.tail.assertion}"
    code = _code(f)
    what, resolution = f"{who} failed with {code}", READ_LOG.format(f.replica)
    if f.tail.child_exit_code and not why:
        process = f.tail.process or "one of its processes"
        what = f"{who} failed: {process} ended with {describe_exit_code(f.tail.child_exit_code)}"
    elif f.tail.has_log and not last_line and not why:
        what += " and wrote no output"
        resolution = "Check its command, and whether it buffers its output (python -u, or PYTHONUNBUFFERED=1)."
    summary = f"{who} failed: {why} ({code})" if why else f"{what}{last_line}"
    return Cause(Category.USER_CODE, summary, "", resolution, unquoted=what)


def _code(f: Failure) -> str:
    code = "it still runs" if f.is_running else describe_exit_code(f.exit_code)
    return f"{code}, {f.tail.process}" if f.tail.process else code


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
