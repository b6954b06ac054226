"""The pods of a batch Job: which are missing, how they are built, and which have failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ktrain_embedded.controllers import common as c
from ktrain_embedded.objects.pods import containers, has_ended
from ktrain_embedded.objects.store import Obj, Objects

TRACKING = "batch.kubernetes.io/job-tracking"  # the finalizer that keeps a pod until it is counted
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
INDEX_VARIABLE: Obj = {
    "name": "JOB_COMPLETION_INDEX",
    "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{COMPLETION_INDEX}']"}},
}
JOBSET_NAME, JOBSET_PRIORITY = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/priority"
LONGEST = 63 - 5  # maximum length of a generateName; the API server appends five characters


def is_indexed(job: Obj) -> bool:
    """Whether each pod of a batch Job has a completion index."""
    return bool(job["spec"].get("completionMode") == "Indexed")


def indexes(pods: Iterable[Obj]) -> set[int]:
    """The completion indexes of an Indexed Job's pods."""
    found = ((pod["metadata"].get("annotations") or {}).get(COMPLETION_INDEX) for pod in pods)
    return {int(index) for index in found if index is not None}


def parse_indexes(text: str) -> set[int]:
    """Parse status.completedIndexes, such as "0,2-4"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def format_indexes(found: Iterable[int]) -> str:
    """Format status.completedIndexes. Three or more consecutive numbers are written as a range."""
    rows: list[list[int]] = []
    for index in sorted(found):
        if rows and rows[-1][-1] == index - 1:
            rows[-1].append(index)
        else:
            rows.append([index])
    return ",".join(f"{row[0]}-{row[-1]}" if len(row) > 2 else ",".join(map(str, row)) for row in rows)


def waits_for_end(job: Obj) -> bool:
    """Whether a pod that is being deleted is replaced and counted only after it has ended."""
    return bool(job["spec"].get("podReplacementPolicy") == "Failed")


def has_failed(job: Obj, pod: Obj) -> bool:
    """Whether a pod counts as failed: it is Failed, or it is being deleted and the Job doesn't wait for its end."""
    if c.phase(pod) == "Failed":
        return True
    never_ran = not pod["spec"].get("nodeName")
    return c.is_terminating(pod) and not has_ended(pod) and (never_ran or not waits_for_end(job))


def missing(job: Obj, pods: Objects, succeeded: int, completed: set[int]) -> Sequence[int | None]:
    """The completion indexes of the pods to create now. For a Job without indexes, one None for each pod."""
    spec = job["spec"]
    occupying = [p for p in pods if c.is_active(p) or (waits_for_end(job) and not has_ended(p))]
    completions = spec.get("completions")
    room = max(int(spec.get("parallelism", 1)) - len(occupying), 0)
    if is_indexed(job):
        taken = completed | indexes(occupying)
        return [index for index in range(completions or 0) if index not in taken][:room]
    if completions is None:  # a work queue: no pods are created after the first success
        return [] if succeeded else [None] * room
    return [None] * min(room, max(completions - succeeded - len(occupying), 0))


def new_pod(job: Obj, index: int | None) -> Obj:
    """Build a pod for a completion index, or for a Job without indexes (None)."""
    name = str(job["metadata"]["name"])
    pod = c.child(job, "", c.pod_template(job["spec"]["template"], {}))
    meta, prefix = pod["metadata"], f"{name[: LONGEST - 1]}-"
    if index is not None:
        prefix = f"{name[: LONGEST - len(f'-{index}-')]}-{index}-"
        meta["labels"][COMPLETION_INDEX] = str(index)
        meta["annotations"] = {**meta.get("annotations", {}), COMPLETION_INDEX: str(index)}
        pod["spec"].setdefault("hostname", f"{name}-{index}")
        for container in containers(pod["spec"]):
            c.append(container, "env", INDEX_VARIABLE)
    if JOBSET_NAME in meta["labels"]:  # like JobSet's webhook for pods
        meta["labels"][JOBSET_PRIORITY] = str(pod["spec"].get("priority", 0))
    meta.update(generateName=prefix, finalizers=[TRACKING])
    return pod


def finished_at(pod: Obj) -> float:
    """When the last container of a pod ended, in seconds since the epoch. Otherwise, when the pod was created."""
    ends = [x["state"].get("terminated", {}).get("finishedAt") for x in pod["status"].get("containerStatuses") or ()]
    return max((c.seconds(t) for t in ends if t), default=c.seconds(pod["metadata"]["creationTimestamp"]))
