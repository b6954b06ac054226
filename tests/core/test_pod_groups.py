"""Decisions from one pod of each group are those from all pods, after any sequence of changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_provider_ktrain.core.kinds import KINDS, Kind
from airflow_provider_ktrain.core.state.limits import Limits, clocks
from airflow_provider_ktrain.core.state.pods.partial_start import find_partial_start
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups, partial_start_since
from airflow_provider_ktrain.core.state.pods.pod_state import state_of_pod
from airflow_provider_ktrain.core.state.status import Phase, phase_of

LIMITS = Limits(schedule=120, startup=300, partial_start=600)
ROLES = {"PyTorchJob": ("master", "worker"), "MPIJob": ("launcher", "worker"), "TrainJob": ("node", "launcher")}


def at(second: int) -> str:
    return f"2026-11-22T10:{second // 60:02}:{second % 60:02}Z"


def labels(kind: Kind, role: str, index: int, attempt: int) -> dict[str, str]:
    if kind.behavior.reports_phases:
        prefix = "training.kubeflow.org"
        return {f"{prefix}/replica-type": role, f"{prefix}/replica-index": str(index), f"{prefix}/job-role": role}
    return {
        "jobset.sigs.k8s.io/replicatedjob-name": role,
        "batch.kubernetes.io/job-completion-index": str(index),
        "jobset.sigs.k8s.io/restart-attempt": str(attempt),
    }


@st.composite
def pods(draw: st.DrawFn, kind: Kind) -> dict[str, Any]:
    number = draw(st.integers(0, 11))
    node = draw(st.booleans())
    conditions = [{"type": "PodScheduled", "status": str(node), "lastTransitionTime": at(draw(st.integers(0, 3599)))}]
    meta: dict[str, Any] = {
        "uid": f"u{number}",
        "name": f"p{number}",
        "labels": labels(kind, draw(st.sampled_from(ROLES[kind.name])), number, draw(st.integers(0, 1))),
    }
    if draw(st.integers(0, 9)):
        meta["creationTimestamp"] = at(draw(st.integers(0, 3599)))
    if not draw(st.integers(0, 4)):
        meta["deletionTimestamp"] = at(0)
    spec: dict[str, Any] = {"nodeName": "n"} if node else {}
    if not draw(st.integers(0, 5)):
        spec["schedulingGates"] = [{"name": "queue"}]
    gpus = {"limits": {"nvidia.com/gpu": "1"}} if draw(st.booleans()) else {}
    spec["containers"] = [{"name": "pytorch", "resources": gpus}]
    status = {"conditions": draw(st.sampled_from([conditions, []]))}
    phase = draw(st.sampled_from(["Pending", "Pending", "Running", "Succeeded", "Failed", None]))
    return {"metadata": meta, "spec": spec, "status": status | ({"phase": phase} if phase else {})}


def changes(kind: Kind) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(pods(kind), pods(kind), st.integers(0, 11).map("u{}".format)), max_size=40)


def job_of(kind: Kind, elastic: bool) -> dict[str, Any]:
    job: dict[str, Any] = {"kind": kind.name, "metadata": {"name": "train", "creationTimestamp": at(0)}, "spec": {}}
    if elastic:
        job["spec"] = {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 8}, "pytorchReplicaSpecs": {"Worker": {}}}
    return job


def first_of_each_limit(job: Any, groups: PodGroups) -> dict[str, float]:
    found: dict[str, float] = {}
    for clock in clocks(job, groups, Phase.STARTING, LIMITS, deadline=None, last_line=0, had_pods=True):
        found[clock.limit] = min(clock.due, found.get(clock.limit, clock.due))
    return found


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
@settings(deadline=None)
@given(st.data(), st.booleans())
def test_examples_decide_as_all_pods_do(kind: Kind, data: st.DataObject, elastic: bool) -> None:
    job = job_of(kind, elastic and kind.name == "PyTorchJob")
    groups = PodGroups(kind)
    existing: dict[str, Any] = {}
    for change in data.draw(changes(kind)):
        if isinstance(change, str):
            groups.remove(change)
            existing.pop(change, None)
        else:
            groups.put(change)
            existing[change["metadata"]["uid"]] = change
        every, examples = list(existing.values()), groups.examples()
        assert groups.pods == existing
        assert groups.shown == {uid: state_of_pod(pod, kind) for uid, pod in existing.items()}
        for earlier in (None, Phase.STARTING, Phase.RUNNING):
            assert phase_of(job, examples, earlier=earlier) is phase_of(job, every, earlier=earlier)
        partial = find_partial_start(job, every)
        assert partial_start_since(job, groups) == (partial.since if partial else None)
        alone = [first_of_each_limit(job, PodGroups(kind, [pod])) for pod in every]
        wanted = {
            name: min(each[name] for each in alone if name in each) for name in {n for each in alone for n in each}
        }
        if partial:
            wanted["partial_start_timeout"] = partial.since + 600
        assert first_of_each_limit(job, groups) == wanted


def test_the_number_of_examples_does_not_grow_with_the_job() -> None:
    kind = KINDS["PyTorchJob"]
    groups = PodGroups(kind)
    for number in range(3000):
        meta = {"uid": f"u{number}", "name": f"p{number}", "creationTimestamp": at(number % 3600)}
        meta["labels"] = labels(kind, "worker", number, 0)  # type: ignore[assignment]
        groups.put({"metadata": meta, "spec": {}, "status": {"phase": "Pending"}})
    assert len(groups.examples()) == 1
    for number in range(3000):  # the times of a group's former members are forgotten
        groups.put({**groups.pods[f"u{number}"], "status": {"phase": "Running"}})
    assert [json.dumps(pod["status"]) for pod in groups.examples()] == ['{"phase": "Running"}']
    assert sum(len(group._heap) for group in groups._groups.values()) <= 2 * 3000 + 16
