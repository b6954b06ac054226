"""Why a job failed, or does not start: one line, and what to do about it.

A pure function of what was seen: the job, its pods as they were last seen, events, the last lines of logs. Each rule
looks at one kind of evidence; the first that has something to say decides.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.diagnosis import failure_patterns as words
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause, Limit
from airflow_provider_ktrain.core.diagnosis.pod_failures import (
    SIGKILLED,
    SIGTERMED,
    Failure,
    Json,
    deletion_of,
    failures,
    log_key,
    moment,
    signal_name,
    suspects,
)
from airflow_provider_ktrain.core.kinds import KINDS, PYTORCHJOB, Kind
from airflow_provider_ktrain.core.state.status import Condition, true_conditions
from airflow_provider_ktrain.core.text import clipped

__all__ = ["Category", "Cause", "Limit", "diagnose", "hopeless", "limit_passed", "log_key", "never_starts"]


@dataclass(frozen=True)
class Seen:
    """The evidence.

    :param healed: whether a failure counts though its container runs again.
    """

    job: Json
    pods: Sequence[Json]
    events: Sequence[Json]
    logs: Mapping[str, Sequence[str]]
    now: datetime | None = None
    gone: bool = False
    healed: bool = False

    @property
    def kind(self) -> Kind:
        return KINDS.get(str(self.job.get("kind")), PYTORCHJOB)

    @property
    def title(self) -> str:
        return f"{self.kind.name} {(self.job.get('metadata') or {}).get('name', '')}".strip()

    @property
    def failed(self) -> Condition | None:
        return true_conditions(self.job).get("Failed")

    @functools.cached_property
    def all_failures(self) -> list[Failure]:
        return failures(self.kind, self.pods, self.logs, healed=self.healed)

    @property
    def failures(self) -> list[Failure]:
        """Those that can be the cause, the likeliest first."""
        return suspects(self.all_failures)

    def replica_of(self, pod: Json) -> str:
        role, index = self.kind.pod_role((pod.get("metadata") or {}).get("labels") or {})
        return role if role == "Launcher" else f"{role} {index}"


def _seen(
    job: Json,
    pods: Sequence[Json],
    events: Sequence[Json],
    logs: Mapping[str, Sequence[str]] | None = None,
    now: datetime | None = None,
    gone: bool = False,
) -> Seen:
    """The evidence in an order of its own: the one in which it came says nothing."""

    def place(pod: Json) -> tuple[str, str]:
        meta = pod.get("metadata") or {}
        return str(meta.get("name")), str(meta.get("creationTimestamp"))

    def told(event: Json) -> tuple[str, str]:
        return str(event.get("lastTimestamp") or event.get("eventTime") or ""), str(event.get("message"))

    return Seen(job, sorted(pods, key=place), sorted(events, key=told), logs or {}, now, gone)


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
    seen = _seen(job, pods, events, log_tails, now, gone)
    return next((cause for rule in _RULES if (cause := rule(seen))), _unknown(seen))


def hopeless(
    job: Json,
    pods: Sequence[Json],
    events: Sequence[Json] = (),
    waited: float = 0.0,
    now: datetime | None = None,
) -> Cause | None:
    """Why a job will never start, or None while it may.

    :param waited: seconds since the job last got on. What may heal by itself (a registry that is away, a Secret that
        is still to be made) is hopeless only after some patience: see `PATIENCE`.
    :param now: by which the patience with each pod counts from when it got its node: others may have had one for hours.
        Default: it counts from `waited` alone.
    """
    seen = _seen(job, pods, events)
    if "Running" in true_conditions(job) or seen.failed:
        return None
    return _refused_by_operator(seen) or _cannot_start(seen, waited, now) or _pods_refused(seen, waited)


def never_starts(job: Json, pods: Sequence[Json]) -> Cause | None:
    """Why a container that is restarted again and again will never run, or None.

    Its job says Running all the while: under OnFailure, which is training-operator's default, without end.
    """
    kind = _seen(job, pods, ()).kind
    for failure in failures(kind, pods, {}):
        is_needed = failure.is_init or kind.container in (None, failure.container)  # a sidecar ends no training
        tried_often = is_needed and failure.final and failure.restarts >= STARTS
        if tried_often and (cause := _not_started(failure)) and cause.category is Category.IMAGE:
            said = f"{cause.summary}; it was tried {failure.restarts + 1} times"
            return replace(cause, summary=said, replica=failure.replica)
    return None


STARTS = 3  #: restarts after which a command that cannot be started is given up


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
    seen = replace(_seen(job, pods, events, log_tails), healed=limit is Limit.RESTARTS)
    obstacle = _refused_by_operator(seen) or _replica_failed(seen) or _obstacle(seen)
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
    seen = replace(_seen(job, pods, events, log_tails), healed=True)
    last = _replica_failed(seen)
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


# ---------------------------------------------------------------- rules about failures


def _replica_failed(seen: Seen) -> Cause | None:
    found = seen.failures
    if not found:
        return None
    failure = found[0]
    cause = next((c for rule in _FAILURES if (c := rule(failure))), None) or _program_failed(failure)
    obstacle = _obstacle(seen)
    waits_for_others = failure.is_effect or failure.role == "Launcher"
    if obstacle and obstacle.replica != failure.replica and waits_for_others:
        # it could not wait for a replica that never came
        meanwhile = f"{obstacle.summary}; meanwhile {failure.replica} failed ({_code(failure.exit_code)})"
        cause = replace(obstacle, summary=meanwhile)
    return replace(
        cause,
        summary=" ".join(cause.summary.split())[:500],
        replica=cause.replica or failure.replica,
        detail="\n".join(text for text in (cause.detail, *_surroundings(seen, failure)) if text),
    )


def _surroundings(seen: Seen, failure: Failure) -> Iterator[str]:
    """What else was seen of and around a failure."""
    yield seen.failed.message.strip() if seen.failed else ""
    anew = sum(not f.final and f.replica == failure.replica for f in seen.all_failures)
    yield ", ".join(
        text
        for text in (
            f"{failure.replica} is pod {failure.pod}",
            f"container {failure.container}" if failure.container else "",
            f"restarted {_times(failure.restarts)}" if failure.restarts else "",
            f"made anew {_times(anew)}" if anew else "",
        )
        if text
    )
    others = dict.fromkeys(f.replica for f in seen.failures[1:] if f.replica != failure.replica)
    yield f"later failed: {', '.join(others)}" if others else ""
    if failure.tail.lines:
        yield "\n".join(["last lines:", *(f"  {line}" for line in failure.tail.lines)])


def _taken_away(f: Failure) -> Cause | None:
    for known in words.TAKEN:
        if re.search(known.pattern, f.reason):
            said = f": {_first_line(f.message)}" if f.message else ""
            remedy = words.OWN_DISK_REMEDY if re.search(words.OWN_DISK_LIMIT, f.message) else known.resolution
            return Cause(known.category, f"{f.replica} {known.what} ({f.reason}){said}", "", remedy)
    return None


def _out_of_memory(f: Failure) -> Cause | None:
    remedy = "raise the memory limit, or lower batch size, prefetching or the number of DataLoader workers"
    if f.reason == "OOMKilled":
        return Cause(Category.OUT_OF_MEMORY, f"{f.replica} ran out of memory (OOMKilled, exit code 137)", "", remedy)
    shells_word = f.exit_code == SIGKILLED and re.search(r"^Killed$|\bKilled  ", f.tail.last)
    if (f.tail.child == -9 or shells_word) and not f.tail.exception:
        said = f"{f.replica}: a process was killed by SIGKILL, most likely for memory ({_code(f.exit_code)})"
        return Cause(Category.OUT_OF_MEMORY, said, "", remedy)
    return None


def _not_started(f: Failure) -> Cause | None:
    """The kubelet's word that the container never ran."""
    if f.reason not in ("StartError", "ContainerCannotRun", "RunContainerError"):
        return None
    known, said = _start_failure(f.message)
    said = said or f.tail.last or _code(f.exit_code)
    return Cause(known.category, f"{f.replica}: {known.what}: {said}", "", known.resolution)


def _command_missing(f: Failure) -> Cause | None:
    """A shell's exit codes: some command of the program is missing, perhaps after hours of training."""
    what = {126: "a command is not executable", 127: "a command was not found"}.get(f.exit_code or 0)
    if what is None or f.tail.exception:
        return None
    said = f": {f.tail.last}" if f.tail.last else ""
    resolution = "correct the command, or use an image that has it"
    return Cause(Category.USER_CODE, f"{f.replica} failed with {_code(f.exit_code)}, {what}{said}", "", resolution)


def _start_failure(message: str) -> tuple[words.Words, str]:
    """What a container runtime means, and its own words for it."""
    found = ((known, re.search(known.pattern, message)) for known in words.STARTS)
    return next((known, _first_line(match[0])) for known, match in found if match)


def _known_words(f: Failure) -> Cause | None:
    """A known message in the exception, or near the end of the log and behind the exception.

    A message explains what ended by itself. A kill from outside needs no explanation by the program, and the crash of a
    process is explained by its exception only.
    """
    signalled = _signal_of(f)
    if signalled in (signal.SIGKILL, signal.SIGTERM):
        return None
    _, _, behind = f.tail.end.rpartition(f.tail.exception) if f.tail.exception else ("", "", f.tail.end)
    texts = (f.tail.exception, behind) if signalled in (0, signal.SIGABRT) else (f.tail.exception,)
    for text, known in itertools.product(texts, words.PROGRAMS):
        if match := re.search(known.pattern, text):
            said = f.tail.exception or _line_at(text, match.start())
            summary = f"{f.replica} {known.what}: {said} ({_code(f.exit_code)})"
            category = known.category_with_gpus if f.gpus and known.category_with_gpus else known.category
            return Cause(category, summary, "", known.resolution)
    return None


def _bus_error(f: Failure) -> Cause | None:
    if _signal_of(f) != signal.SIGBUS or f.tail.exception:
        return None
    summary = f"{f.replica} died of SIGBUS ({_code(f.exit_code)}), most likely for lack of shared memory"
    return Cause(Category.USER_CODE, summary, "", words.SHM)


def _signal_of(f: Failure) -> int:
    """The signal that ended the container, or the process that its launcher reports; 0 where none did."""
    for code in (f.tail.child, (128 - f.exit_code) if f.exit_code else None):
        if code is not None and code < 0:
            return -code
    return 0


def _line_at(text: str, place: int) -> str:
    return text[text.rfind("\n", 0, place) + 1 :].partition("\n")[0].strip()


def _lost_a_peer(f: Failure) -> Cause | None:
    if not f.is_effect:
        return None
    said = f.tail.exception or f.tail.last
    known = next(known for known in words.PEERS if re.search(known.pattern, said))
    return Cause(known.category, f"{f.replica} {known.what}: {said} ({_code(f.exit_code)})", "", known.resolution)


def _killed(f: Failure) -> Cause | None:
    if f.exit_code not in (SIGKILLED, SIGTERMED) or f.tail.exception:
        return None
    name = signal_name(f.exit_code)
    return Cause(
        Category.INFRASTRUCTURE,
        f"{f.replica} was killed from outside by {name} (exit code {f.exit_code})",
        "",
        "look at the node: memory pressure, a reboot, somebody's kill; a failed liveness probe kills too",
    )


_FAILURES: tuple[Callable[[Failure], Cause | None], ...] = (
    _taken_away,
    _out_of_memory,
    _not_started,
    _command_missing,
    _known_words,
    _bus_error,
    _lost_a_peer,
    _killed,
)


def _program_failed(f: Failure) -> Cause:
    who = f"init container {f.container} of {f.replica}" if f.is_init else f.replica
    if f.tail.exception:
        summary = f"{who} failed: {f.tail.exception} ({_code(f.exit_code)})"
    elif f.tail.child:
        summary = f"{who} failed: one of its processes ended with {_code(f.tail.child)}"
        summary += f"; its last line: {f.tail.last}" if f.tail.last else ""
    elif f.tail.last:
        summary = f"{who} failed with {_code(f.exit_code)}; its last line: {f.tail.last}"
    else:
        summary = f"{who} failed with {_code(f.exit_code)}" + (" and wrote no output" if f.tail.heard else "")
    return Cause(Category.USER_CODE, summary, "", "see the log of this replica")


# ---------------------------------------------------------------- rules about the job


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
    obstacle = _obstacle(seen)
    return Cause(
        Category.INFRASTRUCTURE,
        f"{seen.title} {what} by someone else before it had ended",
        obstacle.summary if obstacle else "",
        "find out who deletes jobs in this namespace: kubectl, a quota or cleanup tool, another workflow",
    )


# ---------------------------------------------------------------- rules about not getting on


def _refused_by_operator(seen: Seen) -> Cause | None:
    for event in seen.events:
        reason, message = str(event.get("reason")), str(event.get("message"))
        for pattern, said, what, resolution in _REFUSALS:
            if re.search(pattern, reason) and re.search(said, message):
                return Cause(
                    Category.CONFIGURATION,
                    f"{seen.title} {what}: {_first_line(message)}",
                    f"event {reason}",
                    resolution,
                    retryable=False,
                )
    return None


_REFUSALS = (
    (
        r"FailedValidation$|^ValidationError$",
        "",
        "is refused by its operator and will never run",
        "correct the manifest: `ktrain check` names the field",
    ),
    (
        r"^FailedCreateService$",
        "must be no more than 63 characters",
        "has a name that is too long for its services, and will never get a status",
        "shorten the job's name",
    ),
    (r"^FailedCreate", "is invalid", "has pods that the cluster refuses", "correct the field that is named"),
)


def _obstacle(seen: Seen) -> Cause | None:
    """What keeps pods from being made, placed or started."""
    return _cannot_start(seen) or _pods_refused(seen) or _unschedulable(seen)


def _pods_refused(seen: Seen, waited: float = math.inf) -> Cause | None:
    """Admission refuses the pods. A quota is the scheduling's affair: others will free some of it."""
    for event in seen.events if waited >= PATIENCE["FailedCreatePod"] else ():
        message = str(event.get("message"))
        refused = str(event.get("reason")).startswith("FailedCreate") and re.search(_ADMISSION, message)
        if refused and not _made_since(seen, message):
            return Cause(
                Category.ENVIRONMENT,
                f"{seen.title} has pods that the cluster refuses: {_first_line(message)}",
                f"event {event.get('reason')}",
                "correct what is named, or ask whoever set the rule; a service account must exist in the namespace",
            )
    return None


def _made_since(seen: Seen, message: str) -> bool:
    """Whether the pod that was refused is there by now: what was missing may have been created meanwhile."""
    there = [str((pod.get("metadata") or {}).get("name")) for pod in seen.pods]
    named = re.search(r'pods "([^"]+)"', message)
    if named is None:
        return bool(there)
    stem = re.sub(r"(-launcher-)\w{5}$", r"\1", named[1])  # a batch Job gives each try another name
    return any(name == stem or (stem.endswith("-") and name.startswith(stem)) for name in there)


_ADMISSION = r"denied the request|is forbidden: (?!exceeded quota)"
PATIENCE: dict[str, float] = {
    "InvalidImageName": 0,
    "ErrImageNeverPull": 0,
    "CreateContainerConfigError": 30,
    "CreateContainerError": 120,
    "RunContainerError": 120,
    "ErrImagePull": 180,
    "ImagePullBackOff": 180,
    "ImageInspectError": 180,
    "RegistryUnavailable": 300,
    "FailedMount": 300,
    "FailedAttachVolume": 300,
    "FailedCreatePod": 60,
}  #: seconds for which a reason for waiting may heal by itself


def _cannot_start(seen: Seen, longest: float = math.inf, now: datetime | None = None) -> Cause | None:
    """The first pod whose container waits for what will not come. A container that only waits its turn says nothing."""
    found = []
    for pod in seen.pods:
        status = pod.get("status") or {}
        waited = longest if now is None else min(longest, _seconds_on_node(pod, now))
        states = [c for key in ("initContainerStatuses", "containerStatuses") for c in status.get(key) or ()]
        waits = [(c, w) for c in states if (w := (c.get("state") or {}).get("waiting"))]
        for container, waiting in waits:
            reason = str(waiting.get("reason"))
            if reason in PATIENCE and waited >= PATIENCE[reason]:
                found.append(_waiting_cause(seen.replica_of(pod), container, reason, str(waiting.get("message") or "")))
        if waits and not found:
            found += _mount_failures(seen, pod, waited)
    return min(found, key=lambda c: c.category is not Category.IMAGE, default=None)


def _seconds_on_node(pod: Json, now: datetime) -> float:
    """Since it got its node; since its creation where nobody says when that was."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    scheduled = [c.get("lastTransitionTime") for c in conditions if c.get("type") == "PodScheduled"]
    since = moment(next(iter(scheduled), (pod.get("metadata") or {}).get("creationTimestamp")))
    return (now - since).total_seconds() if since else math.inf


def _waiting_cause(replica: str, container: Json, reason: str, message: str) -> Cause:
    if "Image" in reason or "Registry" in reason:
        image = container.get("image") or (m[1] if (m := re.search(r'image "([^"]+)"', message)) else "")
        return Cause(
            Category.IMAGE,
            f"{replica}: image {image} cannot be pulled ({reason}): {_why_no_image(message)}",
            message,
            _image_remedy(reason, message),
            replica,
            retryable=reason != "InvalidImageName",
        )
    if reason != "CreateContainerConfigError" and "OCI runtime" in message:
        known, said = _start_failure(message)
        summary = f"{replica}: {known.what}: {said}"
        return Cause(known.category, summary, "", known.resolution, replica)
    missing = reason == "CreateContainerConfigError"
    return Cause(
        Category.ENVIRONMENT if missing else Category.INFRASTRUCTURE,
        f"{replica}: container {container.get('name')} cannot be created ({reason}): {_first_line(message)}",
        "",
        "create what is missing in the job's namespace, or correct its name in the manifest"
        if missing
        else "look at the node and at the pod's volumes; retry",
        replica,
    )


def _why_no_image(message: str) -> str:
    """The end of a containerd message is its cause: what is before says who told whom."""
    line = clipped(message.strip().partition("\n")[0])
    parts = line.split(": ")
    return next((tail for i in range(len(parts)) if len(tail := ": ".join(parts[i:])) <= 140), line[-140:])


def _image_remedy(reason: str, message: str) -> str:
    for pattern, remedy in (
        ("NeverPull", "put the image on the nodes, or set imagePullPolicy IfNotPresent"),
        ("InvalidImageName", "correct the image's name"),
        (r"(?i)unauthorized|forbidden|denied|401|403", "give imagePullSecrets that may pull it, or correct its name"),
        (r"(?i)not found|manifest unknown|404", "correct the image's name and tag, or push it"),
        (
            r"(?i)no such host|lookup|timeout|refused|unreachable",
            "correct the registry's name, or let the nodes reach it",
        ),
    ):
        if re.search(pattern, f"{reason} {message}"):
            return remedy
    return "correct the image's name, or let the nodes reach its registry"


def _mount_failures(seen: Seen, pod: Json, waited: float) -> list[Cause]:
    """The most telling event about a pod's volumes."""
    uid, name = (pod.get("metadata") or {}).get("uid"), (pod.get("metadata") or {}).get("name")
    messages = [
        (reason, _first_line(str(event.get("message"))))
        for event in seen.events
        if (reason := str(event.get("reason"))) in ("FailedMount", "FailedAttachVolume")
        and waited >= PATIENCE[reason]
        and (about := event.get("involvedObject") or {}).get("name") == name
        and about.get("uid") in (None, uid)
    ]
    for known, (reason, said) in itertools.product(words.MOUNTS, messages):
        if re.search(known.pattern, said):
            replica = seen.replica_of(pod)
            what = f"{replica}: {known.what}: {said}"
            return [Cause(known.category, what, f"event {reason}", known.resolution, replica)]
    return []


def _unschedulable(seen: Seen) -> Cause | None:
    stuck = [(pod, c) for pod in seen.pods if (c := _not_scheduled(pod))]
    if stuck:
        pod, condition = stuck[0]
        message = str(condition.get("message") or "no reason given")
        return Cause(
            Category.SCHEDULING,
            f"{seen.replica_of(pod)} finds no node: {_scheduler_words(message)}",
            f"{len(stuck)} of {len(seen.pods)} pods have no node\n{message}",
            "; ".join(remedy for pattern, remedy in words.PLACES if re.search(pattern, message)) or words.PLACES[-1][1],
            seen.replica_of(pod),
        )
    for pod in seen.pods:
        if scheduler := _waits_for_scheduler(pod):
            return Cause(
                Category.SCHEDULING,
                f"{seen.replica_of(pod)} is looked at by no scheduler: schedulerName is {scheduler}",
                "",
                f"see whether the scheduler {scheduler} runs, or leave schedulerName out",
                seen.replica_of(pod),
            )
    for event in seen.events:
        if str(event.get("reason")).startswith("FailedCreate") and "quota" in str(event.get("message")):
            said = _first_line(str(event.get("message")))
            return Cause(
                Category.SCHEDULING, f"{seen.title} exceeds the namespace's quota: {said}", "", "free some, or ask"
            )
    return None


def _not_scheduled(pod: Json) -> Json | None:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == "PodScheduled" and c.get("status") == "False"), None)


def _waits_for_scheduler(pod: Json) -> str:
    """The name of a scheduler that is not the cluster's own and has said nothing of a pod that needs a node."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    name = str(spec.get("schedulerName") or "default-scheduler")
    waits = status.get("phase", "Pending") == "Pending" and not spec.get("nodeName") and not status.get("conditions")
    return name if waits and name != "default-scheduler" else ""


def _scheduler_words(message: str) -> str:
    """What the scheduler says of the nodes, without its words on claims and preemption."""
    return re.split(r"\. (?:no new claims|preemption)", message)[0].rstrip(".")


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
    _refused_by_operator,
    _past_deadline,
    _replica_failed,
    _gave_up,
    _pod_deleted,
    _failed_somehow,
    _deleted,
    _cannot_start,
    _pods_refused,
    _unschedulable,
    _suspended,
)


def _code(code: int | None) -> str:
    name = signal_name(code)
    return "no exit code" if code is None else f"exit code {code}" + (f", {name}" if name else "")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 300 else line[:297] + "..."


def as_dict(cause: Cause) -> dict[str, Any]:
    """For XCom and events of triggers."""
    return {"category": str(cause.category)} | {
        k: getattr(cause, k) for k in ("summary", "detail", "resolution", "replica", "retryable")
    }
