"""The Jobs of a JobSet: names, labels, templates, and their counts in the JobSet's status."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ktrain_embedded.controllers import common as c
from ktrain_embedded.objects.store import Obj, Objects

PREFIX = "jobset.sigs.k8s.io/"
NAME, ATTEMPT = f"{PREFIX}jobset-name", f"{PREFIX}restart-attempt"
REPLICATED_JOB = f"{PREFIX}replicatedjob-name"
COUNTS = ("active", "failed", "ready", "succeeded", "suspended")


@dataclass(frozen=True)
class Place:
    """One Job of a JobSet: its replicated job, and its index in the replicated job, the group and the JobSet."""

    replicated: Obj
    index: int
    group_index: int
    global_index: int


def places(jobset: Obj) -> Iterator[Place]:
    """All Jobs of a JobSet, in the order of its replicated jobs."""
    groups: dict[str, int] = {}
    number = 0
    for replicated in jobset["spec"].get("replicatedJobs") or ():
        group = replicated.get("groupName", "default")
        for index in range(replicated.get("replicas", 1)):
            yield Place(replicated, index, groups.get(group, 0), number)
            groups[group] = groups.get(group, 0) + 1
            number += 1


def subdomain(jobset: Obj) -> str:
    """The name of the headless Service."""
    network = jobset["spec"].get("network") or {}
    return str(network.get("subdomain") or jobset["metadata"]["name"])


def job_name(jobset: Obj, place: Place) -> str:
    """The name of a Job: JobSet, replicated job and index."""
    return f"{jobset['metadata']['name']}-{place.replicated['name']}-{place.index}"


def construct(jobset: Obj, place: Place, restarts: int) -> Obj:
    """Build a Job of the JobSet."""
    name, template = job_name(jobset, place), copy.deepcopy(place.replicated["template"])
    own = _labels(jobset, place, name, restarts)
    spec, meta = template["spec"], template.get("metadata") or {}
    pod = spec["template"]
    pod["metadata"] = {
        "labels": {**((pod.get("metadata") or {}).get("labels") or {}), **own},
        "annotations": {**((pod.get("metadata") or {}).get("annotations") or {}), **own},
    }
    if (jobset["spec"].get("network") or {}).get("enableDNSHostnames", True):
        pod["spec"].setdefault("subdomain", subdomain(jobset))
    spec["suspend"] = bool(jobset["spec"].get("suspend"))
    labels = {**(meta.get("labels") or {}), **own}
    annotations = {**(meta.get("annotations") or {}), **own}
    return c.child(jobset, name, {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec})


def _labels(jobset: Obj, place: Place, name: str, restarts: int) -> dict[str, str]:
    """The labels of each Job and pod. They are also set as annotations."""
    all_places = list(places(jobset))
    meta, group = jobset["metadata"], place.replicated.get("groupName", "default")
    key = hashlib.sha1(f"{meta['namespace']}/{name}".encode(), usedforsecurity=False).hexdigest()
    found = {
        "global-replicas": len(all_places), "group-name": group,
        "group-replicas": sum(p.replicated.get("groupName", "default") == group for p in all_places),
        "job-global-index": place.global_index, "job-group-index": place.group_index, "job-index": place.index,
        "job-key": key, "jobset-name": meta["name"], "jobset-uid": meta["uid"],
        "replicatedjob-name": place.replicated["name"],
        "replicatedjob-replicas": place.replicated.get("replicas", 1), "restart-attempt": restarts,
    }  # fmt: skip
    return {f"{PREFIX}{label}": str(value) for label, value in found.items()}


def resumed(job: Obj, jobset: Obj) -> Obj:
    """The Job, resumed. Additions to the template of its replicated job are copied; nothing is removed."""
    name = job["metadata"]["labels"][REPLICATED_JOB]
    replicated = next(x for x in jobset["spec"]["replicatedJobs"] if x["name"] == name)
    template, resumed_job = replicated["template"]["spec"]["template"], copy.deepcopy(job)
    pod = resumed_job["spec"]["template"]
    for key in ("labels", "annotations"):
        if added := (template.get("metadata") or {}).get(key):
            pod["metadata"][key] = {**(pod["metadata"].get(key) or {}), **added}
    if selector := template["spec"].get("nodeSelector"):
        pod["spec"]["nodeSelector"] = {**(pod["spec"].get("nodeSelector") or {}), **selector}
    for key in ("tolerations", "schedulingGates"):
        old = pod["spec"].get(key) or []
        if new := [x for x in template["spec"].get(key) or () if x not in old]:
            pod["spec"][key] = [*old, *new]
    resumed_job["spec"]["suspend"] = False
    return resumed_job


def attempt(job: Obj) -> int:
    """The restart-attempt of the JobSet in which the Job was created."""
    return int(job["metadata"]["labels"].get(ATTEMPT, 0))


def tally(jobset: Obj, jobs: Iterable[Obj]) -> Objects:
    """status.replicatedJobsStatus: the number of Jobs in each state, for each replicated job."""
    replicated = jobset["spec"].get("replicatedJobs") or ()
    counts = {x["name"]: {**dict.fromkeys(COUNTS, 0), "name": x["name"]} for x in replicated}
    for job in jobs:
        of = counts.get(job["metadata"]["labels"].get(REPLICATED_JOB))
        for what in _states(job) if of else ():
            assert of is not None
            of[what] += 1
    return list(counts.values())


def _states(job: Obj) -> Iterator[str]:
    status, spec = job.get("status") or {}, job["spec"]
    if c.has(status, "Failed"):
        yield "failed"
    elif c.has(status, "Complete"):
        yield "succeeded"
    else:
        pods = min(spec.get("parallelism", 1), spec.get("completions") or spec.get("parallelism", 1))
        if status and not spec.get("suspend") and status.get("ready", 0) + status.get("succeeded", 0) >= pods:
            yield "ready"
        if status.get("active"):
            yield "active"
        if spec.get("suspend"):
            yield "suspended"


def has_started(of: Obj, replicated: Obj) -> bool:
    """Whether all Jobs of a replicated job are ready or have ended."""
    return bool(of["failed"] + of["ready"] + of["succeeded"] >= replicated.get("replicas", 1))


def may_start(replicated: Obj, counts: dict[str, Obj], known: dict[str, Obj]) -> bool:
    """Whether the replicated jobs in dependsOn have the required status."""
    for needed in replicated.get("dependsOn") or ():
        of, other = counts[needed["name"]], known[needed["name"]]
        complete = of["succeeded"] >= other.get("replicas", 1)
        if not (complete if needed["status"] == "Complete" else has_started(of, other)):
            return False
    return True
