"""What was observed of one job and its pods."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from airflow_provider_ktrain.core.diagnosis.pod_failures import find_failures
from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.identity.names import JobRef, Owner, annotation
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.kinds.conditions import incomplete_annotation, true_conditions
from airflow_provider_ktrain.core.reporting.status_document import MAX_PHASES
from airflow_provider_ktrain.core.state.accelerators import CLAIMS, Amounts
from airflow_provider_ktrain.core.state.pods.devices import accelerators_of_job
from airflow_provider_ktrain.core.state.pods.exit_code import EndedPrimary, find_ended_primary
from airflow_provider_ktrain.core.state.pods.objects import created, is_being_deleted
from airflow_provider_ktrain.core.state.pods.pod_history import PodHistory
from airflow_provider_ktrain.core.state.pods.stopped_pods import (
    STOPPED_PODS_ANNOTATION,
    Ends,
    Replica,
    pods_until_end,
    stopped_pods_annotation,
)
from airflow_provider_ktrain.core.state.pods.usage import Usage
from airflow_provider_ktrain.core.state.status import CONDITION_OF_PHASE, Phase, Seen, phase_of
from airflow_provider_ktrain.core.text.output import with_short_first_line
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Object
from airflow_provider_ktrain.engine.api.job_calls import belongs
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.host import UNSHARED_SECONDS

#: Messages of conditions that only repeat the phase.
REPETITIVE = re.compile(r"\w+ \S+ (is )?(created|running|suspended|resumed|successfully completed)\.?")


class JobState:
    """The job and its pods as last observed. It sends no requests: the observer updates it.

    :param ref: the job. If it has no uid, the observer adds it when it sees the job first.
    """

    def __init__(self, ref: JobRef, handover: Handover) -> None:
        self.ref, self.handover = ref, handover
        self.kind = kind_of(ref.kind)
        self.job: Object | None = None  #: The job as last seen, also after it was deleted.
        self.gone = False  #: Whether the job was deleted.
        self.uncertain = False  #: Whether the API server could not be asked if the job exists, or who owns it.
        self.pod_owners: dict[str, bool] = {}  #: Answers of `engine.api.job_calls.pod_owners`.
        self.pods = PodHistory(self.kind, handover.pod_history)
        self.pods_version = ""  #: The resourceVersion up to which all changes of the pods are known; "" if unknown.
        #: What the process before has seen of the pods, until it is known what became of them.
        self.pods_before = dict(mapping(mapping(handover.pod_history).get("existing")))
        self.generation = handover.generation  #: Of the job, as last seen; None if it wasn't.
        #: When its change was seen, in epoch seconds; None if none was.
        self.spec_since = handover.spec_since if _is_time(handover.spec_since) else None
        self.phase: Phase | None = None  #: None until the job and its pods are known.
        self.began = self.phase_since = timing.now()
        self.metrics = dict(handover.metrics)
        self.requested_by_workload = Amounts()  #: The accelerators; empty if no Workload was seen.
        self.phases = list(_phases(handover.phases))  #: The phases so far, each with its epoch seconds.

    @property
    def known_job(self) -> Object:
        """The job as last seen; of a job that was never seen its kind and name."""
        return self.job or {"kind": self.ref.kind, "metadata": {"name": self.ref.name}}

    def owns(self, pod: Mapping[str, Any]) -> bool:
        """Whether the pod is the job's. A job that is followed by name has no uid until it is seen."""
        return belongs(pod, self.ref, self.pod_owners) and created(pod) >= created(self.job or {})

    @property
    def ownership(self) -> object:
        """What `owns` depends on beside the pod. While it is the same, an unchanged pod is still owned or not."""
        return self.ref, tuple(self.pod_owners.items()), created(self.job or {})

    @property
    def ended(self) -> bool:
        """Whether the job has ended; False until it has been read once."""
        return self.phase is not None and self.phase.ended

    @property
    def seen(self) -> Seen:
        """What was observed last, as the rules of `core/end_rules.py` know it."""
        if self.phase is None or not self.phase.ended:
            if self.gone:
                return Seen.GONE
            return Seen.RUNNING if self.ended_primary is None else Seen.PRIMARY_ENDED
        return {Phase.SUCCEEDED: Seen.SUCCEEDED, Phase.FAILED: Seen.FAILED}.get(self.phase, Seen.GONE)

    @property
    def ended_primary(self) -> EndedPrimary | None:
        """The end of the primary replica's main container; None if it has not ended."""
        return find_ended_primary(self.kind, self.known_job, self.pods.live)

    @property
    def pods_of_training(self) -> list[Mapping[str, Any]]:
        """All pods, each as it ended, without those that replace another one after the job has ended."""
        return pods_until_end(self.kind, self.known_job, self.pods.as_ended)

    @property
    def ends(self) -> Ends:
        """How the replicas ended on which the success depends."""
        expected = self.replicas_before
        if phase_of(self.known_job) is Phase.SUCCEEDED:
            expected = expected | self.kind.deciding_replicas(self.known_job)
        return self.pods.ends(self.known_job, expected)

    @property
    def replicas_before(self) -> set[Replica]:
        """The replicas that had pods when the process before handed over; none once their changes were read."""
        before = mapping(self.pods_before.get("replicas")).items()
        lists = ((role, indexes) for role, indexes in before if isinstance(indexes, list))
        return {(role, index) for role, indexes in lists for index in indexes if isinstance(index, int)}

    @property
    def why_incomplete(self) -> str:
        """Why the success of the job is incomplete: what its pods have shown, or an earlier process; "" if it isn't."""
        shown = (one.text for one in self.ends.stopped)
        return incomplete_annotation(self.known_job) or next(shown, "")

    @property
    def is_annotated(self) -> bool:
        """Whether the job has an annotation about stopped pods."""
        return annotation(self.known_job, STOPPED_PODS_ANNOTATION) is not None

    @property
    def stopped_pods_annotation(self) -> dict[str, str]:
        """The annotation about stopped pods that the job doesn't have yet; empty if it has it."""
        value = stopped_pods_annotation(self.known_job, self.ends.stopped)
        return {} if value is None else {STOPPED_PODS_ANNOTATION: value}

    @property
    def existing_pods(self) -> dict[str, Any]:
        """For the next process: the replicas on which the success depends and whose end isn't known, by role."""
        if self.pods_before or not self.pods_version:
            return self.pods_before
        unread = self.ends.unread
        versions = [self.pods_version, *filter(str.isdigit, unread.values())]
        version = min(versions, key=int) if all(map(str.isdigit, versions)) else self.pods_version
        open_ = {replica for replica, _ in unread} | set(map(self.kind.role_of, self.pods.live))
        replicas: dict[str, list[int]] = {}
        for role, index in sorted(replica for replica in open_ if self.kind.completes(self.known_job, *replica)):
            replicas.setdefault(role, []).append(index)
        return {"version": version, "replicas": replicas}

    @property
    def is_being_released(self) -> bool:
        """Whether somebody has requested the deletion of the job, or a process of this try has suspended it."""
        return is_being_deleted(self.known_job) or self.ref.has_suspended(self.known_job)

    @property
    def has_run(self) -> bool:
        """Whether the job was Running or Restarting, or a queue has evicted it, in any process that followed it.

        A handover without metrics had no room for them: then the job counts as one that has run.
        """
        ran = any(self.seconds_in(phase) for phase in (Phase.RUNNING, Phase.RESTARTING))
        is_unknown = bool(self.handover.handed_over_at and not self.handover.metrics)
        return ran or is_unknown or bool(self.metrics.get("queue.evictions"))

    @property
    def superseded(self) -> bool:
        """Whether the job, as last seen, belongs to another try of the task."""
        owner = Owner.of(self.job or {})
        return bool(self.ref.owner and isinstance(owner, Owner) and owner.ti_id != self.ref.owner)

    @property
    def requested(self) -> Amounts:
        """The accelerators that the job requests: by its Workload, which includes a runtime's, or by its manifest."""
        return self.requested_by_workload | accelerators_of_job(self.known_job)

    def enter(self, phase: Phase) -> None:
        """Change the phase and start its clock."""
        self.count_phase()
        self.phase, self.phase_since = phase, timing.now()
        if not self.phases or self.phases[-1][0] != phase:
            self.phases = [*self.phases[1 - MAX_PHASES :], (str(phase), timing.epoch())]

    def take_earlier_status(self, status: Mapping[str, Any]) -> None:
        """Take what neither the job nor its pods show any more from the last status of an earlier process.

        :param status: empty if there is none: then pods may have used more than what is known, unless this process
            has begun right after the one before.
        """
        usage, written_at = mapping(status.get("usage")), status.get("written_at")
        began = timing.epoch() - (timing.now() - self.began)
        if not usage or not _is_time(written_at):
            if began > self.handover.handed_over_at + UNSHARED_SECONDS:
                self.pods.count_earlier(Usage(at_least=True), timing.utc_now())
            return
        if earlier := [entry for entry in _phases(status.get("phases")) if _is_time(entry[1])]:
            since = min(written_at, began)
            phases = [*earlier, *(entry for entry in self.phases if entry[1] > since)]
            if self.phase is not None and phases[-1][0] != self.phase:
                phases.append((str(self.phase), timing.epoch() - (timing.now() - self.phase_since)))
            new = [entry for n, entry in enumerate(phases) if not n or entry[0] != phases[n - 1][0]]
            self.phases = new[-MAX_PHASES:]
        seconds = self.handover.metrics.get("seconds.queued", 0.0)
        in_queue = {name: number * seconds for name, number in self.requested.items() if name != CLAIMS}
        at = datetime.datetime.fromtimestamp(written_at, datetime.UTC)
        self.pods.count_earlier(Usage.from_dict(usage), at, in_queue, self.spans_in(Phase.QUEUED))

    def count_phase(self) -> None:
        """Add the time in the current phase to the metrics."""
        if self.phase is not None:
            name = f"seconds.{self.phase.lower()}"
            self.metrics[name] = round(self.metrics.get(name, 0) + timing.now() - self.phase_since, 3)

    def seconds_in(self, phase: Phase) -> float:
        """The time in a phase so far, over all processes that followed the job."""
        current = timing.now() - self.phase_since if self.phase is phase else 0.0
        return self.metrics.get(f"seconds.{phase.lower()}", 0.0) + current

    def queued_seconds(self) -> dict[str, float]:
        """The device-seconds in which the job was queued so far, by what is counted."""
        seconds = self.seconds_in(Phase.QUEUED)
        return {name: number * seconds for name, number in self.requested.items() if name != CLAIMS}

    def spans_in(self, phase: Phase) -> list[tuple[datetime.datetime, datetime.datetime]]:
        """When the job was in a phase, as far as its phases are kept."""
        began = [datetime.datetime.fromtimestamp(at, datetime.UTC) for _, at in self.phases]
        ended = [*began[1:], timing.utc_now()]
        return [(b, e) for (name, _), b, e in zip(self.phases, began, ended, strict=False) if name == phase]

    def describe(self, phase: Phase) -> str:
        """A log line about the job in `phase`, with the condition's message unless it only repeats the phase."""
        conditions = true_conditions({} if phase is Phase.GONE else self.job or {})
        condition = conditions.get(CONDITION_OF_PHASE.get(phase, phase.value))
        if phase is Phase.SUCCEEDED:
            condition = condition or conditions.get("Complete")
        message = condition.message or condition.reason if condition else ""
        why = f": {message}" if message and not REPETITIVE.fullmatch(message) else ""
        return with_short_first_line(f"{self.ref} is {phase}{why}")

    def pods_explain_the_end(self) -> bool:
        """Whether a known pod shows why the job ended: a failed one, or the primary that succeeded."""
        if self.phase is Phase.FAILED:
            return any(failure.is_latest for failure in find_failures(self.kind, self.pods_of_training, {}))
        if self.phase is not Phase.SUCCEEDED:
            return True
        primary = self.kind.primary(self.job or {}), 0
        return any(phase_of_pod(pod) == "Succeeded" and self.kind.role_of(pod) == primary for pod in self.pods.all)


def phase_of_pod(pod: Mapping[str, Any]) -> str:
    """The pod's own phase: Pending, Running, Succeeded, Failed or Unknown; "None" without a status."""
    return str((pod.get("status") or {}).get("phase"))


def _phases(handed_over: object) -> Iterator[tuple[str, float]]:
    """The phases of a handover of this release or another one."""
    for pair in handed_over if isinstance(handed_over, list | tuple) else ():
        if isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], int | float):
            yield str(pair[0]), float(pair[1])


def _is_time(value: object) -> TypeGuard[float]:
    """Whether these are epoch seconds, as far as a `datetime` can be made of them."""
    return isinstance(value, int | float) and 0 <= value < 1e11
