"""Who a job belongs to: its deterministic name, its owner, and what a task may do with a job that it finds.

Pure: the engine reads the cluster and carries out what is decided here.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from airflow_provider_ktrain.core.formats import VERSION, known_fields
from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.state.status import Phase, phase_of

PREFIX = "ktrain.airflow"
DEPLOYMENT_LABEL = f"{PREFIX}/deployment"
SUBMISSION_LABEL = f"{PREFIX}/submission"  #: on the job and its pods; new for every job created: names are used again
OWNER_ANNOTATION = f"{PREFIX}/owner"
DEADLINE_ANNOTATION = f"{PREFIX}/deadline"  #: epoch seconds; carried over adoption, but not over a suspension
MANIFEST_ANNOTATION = f"{PREFIX}/manifest"  #: a hash of the manifest before it was stamped
FINISH_ANNOTATION = f"{PREFIX}/on-finish-action"  #: for the reaper, where the task did not come to it
SUSPENDED_ANNOTATION = f"{PREFIX}/suspended-by"  #: set where a release suspended the job: the next adoption resumes it

HASH_LENGTH = 10

Reattach = Literal["always", "if_unchanged"]


class OnFinishAction(enum.StrEnum):
    """What happens to a job when its task ends. Formats contain its value; users pass it as text."""

    DELETE_JOB = "delete_job"
    KEEP_JOB = "keep_job"  #: without GPUs: an unfinished job is suspended, a finished one loses its running pods
    DELETE_SUCCEEDED_JOB = "delete_succeeded_job"

    @classmethod
    def of(cls, value: Any) -> OnFinishAction:
        """The action of this name; KEEP_JOB for an unknown name, of another release, because a deletion is final."""
        try:
            return cls(value)
        except ValueError:
            return cls.KEEP_JOB

    def deletes(self, *, succeeded: bool) -> bool:
        """Whether a job that has ended, or that its task gives up, is deleted.

        :param succeeded: whether the job succeeded.
        """
        return self is OnFinishAction.DELETE_JOB or (self is OnFinishAction.DELETE_SUCCEEDED_JOB and succeeded)


@dataclass(frozen=True)
class TaskKey:
    """What stays the same over all tries of a task: who a job belongs to."""

    deployment: str
    dag_id: str
    task_id: str
    run_id: str
    map_index: int = -1

    def job_name(self, prefix: str | None = None, max_length: int = Kind.name_length) -> str:
        """A DNS-1035 name: readable prefix, then a hash of the whole key.

        :param prefix: the readable prefix. Default: the task's id.
        :param max_length: of the job's kind. Pods' names begin with the job's: training-operator accepts longer names
            and then never writes a status (recording 21c), Kubeflow Trainer never creates the JobSet (recording 55b).
        """
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:HASH_LENGTH]
        readable = re.sub(r"[^a-z0-9]+", "-", (prefix or self.task_id).lower()).strip("-")
        readable = readable[: max_length - HASH_LENGTH - 1].strip("-")
        if not readable or not readable[0].isalpha():
            readable = f"job-{readable}"[: max_length - HASH_LENGTH - 1].strip("-")
        return f"{readable}-{digest}"

    def labels(self, submission: str) -> dict[str, str]:
        """Labels of the job and of its pod templates, so that our pods are found by *our* labels."""
        return {
            DEPLOYMENT_LABEL: label_value(self.deployment),
            SUBMISSION_LABEL: submission,
            f"{PREFIX}/dag-id": label_value(self.dag_id),
            f"{PREFIX}/task-id": label_value(self.task_id),
            f"{PREFIX}/run-id": label_value(self.run_id),
            **({f"{PREFIX}/map-index": str(self.map_index)} if self.map_index >= 0 else {}),
        }

    def __str__(self) -> str:
        index = f"[{self.map_index}]" if self.map_index >= 0 else ""
        return f"{self.dag_id}.{self.task_id}{index} of run {self.run_id} (deployment {self.deployment})"


@dataclass(frozen=True)
class Owner:
    """One try of a task, as the job's owner annotation names it.

    :param ti_id: new on every try and every clear.
    :param max_tries: of the task instance: only a clear moves it. None: not known.
    """

    key: TaskKey
    try_number: int
    ti_id: str
    max_tries: int | None = field(default=None, compare=False)

    def annotation(self) -> str:
        """The value of OWNER_ANNOTATION, which `of` reads."""
        said = {"try_number": self.try_number, "ti_id": self.ti_id, "max_tries": self.max_tries}
        return json.dumps({"version": VERSION, **asdict(self.key), **said}, sort_keys=True)

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Owner | None:
        """The owner that a job names; None where it names none or one that cannot be read."""
        text = ((job.get("metadata") or {}).get("annotations") or {}).get(OWNER_ANNOTATION)
        try:
            said = json.loads(text or "")
            names = {f: said[f] for f in ("deployment", "dag_id", "task_id", "run_id")}
            key = TaskKey(**names, map_index=said.get("map_index", -1))
            return cls(key, int(said["try_number"]), str(said["ti_id"]), said.get("max_tries"))
        except (ValueError, KeyError, TypeError):
            return None


def label_value(text: str) -> str:
    """A valid label value: the text itself, or its readable part and a hash where it is too long or has other signs."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[: 62 - HASH_LENGTH].strip("-_.")
    return f"{readable}-{digest}" if readable else digest


class Action(enum.Enum):
    """What a task does with the job that stands where it would create its own."""

    ADOPT = "adopt"  #: patch the owner to this try and follow it
    TAKE_RESULT = "take its result"  #: it succeeded for an earlier try of this run: do not train again
    REPLACE = "replace"  #: release it, then create
    WAIT = "wait"  #: it is being deleted: wait until it is gone, then create
    REFUSE = "refuse"  #: it is not ours, or a later try's


@dataclass(frozen=True)
class Decision:
    """What a task does with a job that it finds under its name, and why.

    :param action: what it does.
    :param reason: a clause for the log.
    :param detail: a sentence that explains the reason. Default: "".
    """

    action: Action
    reason: str
    detail: str = ""


def first_try_since_clear(max_tries: int, retries: int) -> int:
    """The try number with which this task's present life began.

    A clear adds `retries` to what was tried (Airflow sets `max_tries = try_number + retries`), so an owner whose try is
    at least this one is an earlier try of the same life (a retry), and an older one belongs to the time before a
    clear. A clear *while running* does not move max_tries: it looks like a retry. A `retries` that was lowered
    in the DAG file meanwhile looks like a clear here: `cleared` knows better.
    """
    return max_tries - retries + 1


def cleared(owner: Owner, me: Owner, first_try: int) -> bool:
    """Whether the task was cleared between two of its tries, as far as Airflow lets that be seen."""
    if owner.max_tries is None or me.max_tries is None:
        return owner.try_number < first_try
    return owner.max_tries != me.max_tries


def decide(
    found: Mapping[str, Any], me: Owner, first_try: int, *, reattach: Reattach = "always", changed: bool = False
) -> Decision:
    """What to do with a job that has our name.

    :param found: the job as it stands.
    :param me: this try.
    :param first_try: of `first_try_since_clear`.
    :param reattach: `if_unchanged` replaces a live job whose manifest differs from ours.
    :param changed: whether it does.
    """
    owner = Owner.of(found)
    if owner is None:
        return Decision(Action.REFUSE, "it has no owner annotation", "Somebody else created it.")
    if owner.key != me.key:
        return Decision(Action.REFUSE, "it belongs to another task", f"Its task is {owner.key}.")
    if owner.try_number > me.try_number:  # a worker that was cut off for long, or a run deleted and created again
        return Decision(Action.REFUSE, f"it belongs to try {owner.try_number}, and this is try {me.try_number}")
    phase = phase_of(found)
    proves_success = phase is Phase.SUCCEEDED and owner.try_number < me.try_number and not cleared(owner, me, first_try)
    if (found.get("metadata") or {}).get("deletionTimestamp") and not proves_success:
        return Decision(Action.WAIT, "it is being deleted")
    if owner.try_number == me.try_number and owner.ti_id != me.ti_id:  # in one run of one Airflow no two tries have it
        theirs = f"it is {phase} and belongs to another try {me.try_number}"
        why = "Another Airflow has the same [ktrain] deployment_id, or this run was deleted and created again."
        return Decision(Action.REPLACE if phase.ended else Action.REFUSE, theirs, why)
    whose = "this try" if owner.ti_id == me.ti_id else f"try {owner.try_number}"
    if phase is Phase.FAILED:
        return Decision(Action.REPLACE, f"it is the failed job of {whose}")
    if cleared(owner, me, first_try):
        return Decision(Action.REPLACE, f"the task was cleared after {whose} submitted it")
    if phase is Phase.SUCCEEDED:
        return Decision(Action.TAKE_RESULT, f"it succeeded for {whose}")
    if changed and reattach == "if_unchanged" and owner.ti_id != me.ti_id:
        return Decision(Action.REPLACE, f"the manifest has changed since {whose}")
    return Decision(Action.ADOPT, f"{whose} left it {phase}")


def differences(wanted: Any, found: Any, path: str = "$.spec") -> Iterator[str]:
    """JSON paths where `found` lacks or contradicts what `wanted` says; what only `found` has is the cluster's own.

    Lists whose items have a `manager` (runtimePatches of a TrainJob) are compared by it: Kueue adds an entry.
    """
    if _by_manager(wanted) and _by_manager(found):
        theirs = {entry["manager"]: entry for entry in found}
        for i, entry in enumerate(wanted):
            yield from differences(entry, theirs.get(entry["manager"]), f"{path}[{i}]")
    elif isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key, value in wanted.items():
            if key in found:
                yield from differences(value, found[key], f"{path}.{key}")
            elif value not in (None, {}, []):
                yield f"{path}.{key}"
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
            yield from differences(a, b, f"{path}[{i}]")
    elif wanted != found:
        yield path


def _by_manager(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(i, Mapping) and isinstance(i.get("manager"), str) for i in items)


@dataclass(frozen=True)
class JobRef:
    """One job in one cluster, as it travels from the worker to the triggerer and back.

    :param kind: PyTorchJob, MPIJob or TrainJob.
    :param version: API version without the group, e.g. v1.
    :param uid: of this very job: names are used again.
    :param owner: the ti_id of the try that owns it: fences every delete and patch. Empty: a job that others submitted.
    :param submission: of SUBMISSION_LABEL; empty likewise.
    :param cluster: of `engine.api.Api.cluster`, where it was submitted: connections get edited. Empty: not known.
    """

    kind: str
    version: str
    namespace: str
    name: str
    uid: str
    owner: str = ""
    deployment: str = ""
    submission: str = ""
    cluster: str = ""

    @property
    def pod_selector(self) -> str:
        """A label selector for this job's pods: our label where they certainly have it, else the operator's."""
        kind = kind_of(self.kind)
        if self.submission and kind.labels_pods:
            return f"{SUBMISSION_LABEL}={self.submission}"
        return f"{kind.pod_name_label}={self.name}"

    def to_dict(self) -> dict[str, str]:
        """A form that fits into trigger kwargs and the task state."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, str]) -> JobRef:
        """What `to_dict` gave, here or in another release. ValueError where it doesn't name a job."""
        missing = [name for name in ("kind", "version", "namespace", "name", "uid") if name not in data]
        if missing:
            raise ValueError(f"the stored reference to the job has no {', '.join(missing)}")
        return cls(**known_fields(cls, data))

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"
