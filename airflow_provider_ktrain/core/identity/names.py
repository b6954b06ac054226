"""The identity of a job: its deterministic name, its labels and owner, and the labels by which its pods are found.

`core/identity/adoption.py` decides what a task does with an existing job that has its name.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from airflow_provider_ktrain.core.formats import VERSION, known_fields, mapping
from airflow_provider_ktrain.core.kinds import Kind, kind_of

PREFIX = "ktrain.airflow"
DEPLOYMENT_LABEL = f"{PREFIX}/deployment"
#: Label of the job and its pods, new for every job created: names are used again.
SUBMISSION_LABEL = f"{PREFIX}/submission"
OWNER_ANNOTATION = f"{PREFIX}/owner"
DEADLINE_ANNOTATION = f"{PREFIX}/deadline"  #: Epoch seconds; carried over adoption, but not over a suspension.
BACKSTOP_ANNOTATION = f"{PREFIX}/backstop"  #: The activeDeadlineSeconds of its task, unless it had less.
MANIFEST_ANNOTATION = f"{PREFIX}/manifest"  #: A hash of the manifest before it was stamped.
CODE_ANNOTATION = f"{PREFIX}/code"  #: A hash of the job's code, which its pods wait for: on the job and its ConfigMap.
#: Set if the job's pods print the stacks of their processes when they are stopped.
STACKS_ANNOTATION = f"{PREFIX}/hang-traces"
FINISH_ANNOTATION = f"{PREFIX}/on-finish-action"  #: What the reaper does if the task itself could not release the job.
SUSPENDED_ANNOTATION = f"{PREFIX}/suspended-by"  #: Set if a release suspended the job: the next adoption resumes it.

HASH_LENGTH = 10

Reattach = Literal["always", "if_unchanged"]


class OnFinishAction(enum.StrEnum):
    """What happens to a job when its task ends. Formats contain its value; users pass it as text."""

    DELETE_JOB = "delete_job"
    #: Keep the job without GPUs: an unfinished job is suspended, and running pods of a finished one are deleted.
    KEEP_JOB = "keep_job"
    DELETE_SUCCEEDED_JOB = "delete_succeeded_job"

    @classmethod
    def of(cls, value: Any) -> OnFinishAction:
        """The action of this name; KEEP_JOB for an unknown name of another release, because a deletion is final."""
        try:
            return cls(value)
        except ValueError:
            return cls.KEEP_JOB

    def deletes(self, *, succeeded: bool) -> bool:
        """Whether a job that has ended is deleted; for an unfinished one see `core.end_rules.deletes`."""
        return self is OnFinishAction.DELETE_JOB or (self is OnFinishAction.DELETE_SUCCEEDED_JOB and succeeded)


@dataclass(frozen=True)
class TaskInstanceId:
    """A task instance of one Airflow.

    :param map_index: index of a mapped task. Default: -1, it is not mapped.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    @classmethod
    def of(cls, ti: Any) -> TaskInstanceId:
        """The key of Airflow's `ti` or `ti_key`."""
        return cls(ti.dag_id, ti.run_id, ti.task_id, -1 if ti.map_index is None else ti.map_index)


@dataclass(frozen=True)
class TaskKey:
    """The identity of a task instance, the same for all its tries: the task that a job belongs to."""

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


class Unreadable(enum.Enum):
    """What an annotation contains that exists and can't be read: nobody knows whose job it is."""

    OWNER = "the owner annotation can't be read"


@dataclass(frozen=True)
class Owner:
    """One try of a task, as the job's owner annotation names it.

    :param ti_id: id of the task instance: new for every try and every clear.
    :param max_tries: of the task instance: only a clear changes it. None: not known.
    :param is_stored: whether Airflow's task store of the run contained the submission before the job was created or
        adopted. Default: False.
    """

    key: TaskKey
    try_number: int
    ti_id: str
    max_tries: int | None = field(default=None, compare=False)
    is_stored: bool = field(default=False, compare=False)

    def annotation(self) -> str:
        """The value of OWNER_ANNOTATION, which `of` reads."""
        fields = {"try_number": self.try_number, "ti_id": self.ti_id, "max_tries": self.max_tries}
        fields |= {"is_stored": True} if self.is_stored else {}
        return json.dumps({"version": VERSION, **asdict(self.key), **fields}, sort_keys=True)

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Owner | Unreadable | None:
        """The owner in a job's annotation; None if it has no such annotation."""
        text = annotation(job, OWNER_ANNOTATION)
        if text is None:
            return None
        try:
            fields = json.loads(text)
            names = {f: fields[f] for f in ("deployment", "dag_id", "task_id", "run_id")}
            key = TaskKey(**names, map_index=fields.get("map_index", -1))
            number, ti_id, is_stored = int(fields["try_number"]), str(fields["ti_id"]), fields.get("is_stored") is True
            return cls(key, number, ti_id, fields.get("max_tries"), is_stored)
        except (ValueError, KeyError, TypeError, OverflowError):
            return Unreadable.OWNER


def label_value(text: str) -> str:
    """A valid label value: the text itself, or a readable part of it and a hash if the text isn't a valid value."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[: 62 - HASH_LENGTH].strip("-_.")
    return f"{readable}-{digest}" if readable else digest


def annotation(job: Mapping[str, Any], name: str) -> str | None:
    """The value of an annotation of a job; None if it isn't set."""
    return mapping(mapping(job.get("metadata")).get("annotations")).get(name)


def label(job: Mapping[str, Any], name: str) -> str | None:
    """The value of a label of a job; None if it isn't set."""
    return mapping(mapping(job.get("metadata")).get("labels")).get(name)


def code_hash(job: Mapping[str, Any]) -> str:
    """The hash of the code with which a job runs; empty if it has none."""
    return str(annotation(job, CODE_ANNOTATION) or "")


def delete_command(kind: Kind, namespace: str, name: str) -> str:
    """The command with which a user deletes a job."""
    return f"kubectl delete -n {namespace} {kind.plural} {name}"


@dataclass(frozen=True)
class JobRef:
    """A reference to one job in one cluster, which worker and triggerer exchange.

    :param version: API version without the group, for example v1.
    :param uid: uid of the job: a later job may have the same name.
    :param owner: the ti_id of the try that owns it: fences every delete and patch. Empty: a job that others submitted.
    :param submission: value of SUBMISSION_LABEL. Empty: a job that others submitted.
    :param cluster: where it was submitted, by `engine.api.client.Api.cluster`, because a connection may be edited.
        Empty: not known.
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
        """A label selector for this job's pods: our label if they certainly have it, else the operator's."""
        kind = kind_of(self.kind)
        if self.submission and kind.behavior.labels_pods:
            return f"{SUBMISSION_LABEL}={self.submission}"
        return f"{kind.behavior.pod_name_label}={self.name}"

    @property
    def delete_command(self) -> str:
        """The command with which a user deletes the job."""
        return delete_command(kind_of(self.kind), self.namespace, self.name)

    @property
    def delete_pods_command(self) -> str:
        """The command with which a user deletes the pods of the job, and keeps the job."""
        return f"kubectl delete -n {self.namespace} pods -l {self.pod_selector}"

    def has_suspended(self, job: Mapping[str, Any]) -> bool:
        """Whether a release by the try that owns the job has suspended it."""
        return bool(self.owner) and annotation(job, SUSPENDED_ANNOTATION) == self.owner

    def to_dict(self) -> dict[str, str]:
        """A form that fits into trigger kwargs and the task store."""
        return asdict(self)

    def described(self, code: str = "") -> dict[str, str]:
        """The job as other tasks and the training page see it.

        :param code: hash of its code. Default: empty, it isn't known or there is none.
        """
        job = {"kind": self.kind, "namespace": self.namespace, "name": self.name, "uid": self.uid}
        return {**job, "code": code} if code else job

    @classmethod
    def of(cls, kind: Kind, version: str, job: Mapping[str, Any], owner: Owner | None, cluster: str = "") -> JobRef:
        """A reference to a job as it was read.

        :param owner: the try that owns it. None: others submitted the job.
        """
        meta = job["metadata"]
        ref = cls(kind.name, version, meta["namespace"], meta["name"], meta["uid"], cluster=cluster)
        if owner is None:
            return ref
        submission = label(job, SUBMISSION_LABEL) or ""
        return replace(ref, owner=owner.ti_id, deployment=owner.key.deployment, submission=submission)

    @classmethod
    def from_dict(cls, data: Mapping[str, str]) -> JobRef:
        """Read what `to_dict` returned, in this release or another one.

        :raises ValueError: it doesn't identify a job.
        """
        missing = [name for name in ("kind", "version", "namespace", "name", "uid") if name not in data]
        if missing:
            raise ValueError(f"the stored reference to the job has no {', '.join(missing)}")
        return cls(**known_fields(cls, data))

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"
