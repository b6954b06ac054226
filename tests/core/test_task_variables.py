"""The variables that name the task, in the manifests of each kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_ktrain.core.checks import check
from airflow_provider_ktrain.core.identity.names import MANIFEST_ANNOTATION, Owner, TaskKey
from airflow_provider_ktrain.core.identity.task_variables import without_variables
from airflow_provider_ktrain.core.kinds import Manifest, kind_of
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from tests.core.manifests import mpijob, pytorchjob, trainjob

KEY = TaskKey("prod", "nightly", "train", "scheduled__2026-11-22T00:00:00+00:00", 3)
VARIABLES = {
    "KTRAIN_DAG_ID": "nightly",
    "KTRAIN_RUN_ID": "scheduled__2026-11-22T00:00:00+00:00",
    "KTRAIN_TASK_ID": "train",
    "KTRAIN_MAP_INDEX": "3",
    "KTRAIN_TRY": "2",
}


def stamped(manifest: Manifest, try_number: int = 2) -> Manifest:
    request = JobRequest(kind_of(manifest["kind"]), Owner(KEY, try_number, "ti"), 1, manifest)
    return request.stamped(request.fitted(manifest["apiVersion"]), "team", "s-1", attempt=1, now=0.0)


def environments(manifest: Manifest) -> list[dict[str, str]]:
    """The variables of each role."""
    kind = kind_of(manifest["kind"])
    containers = [
        spec["template"]["spec"]["containers"][0] for spec in kind.replicas(manifest).values() if "template" in spec
    ]
    return [{entry["name"]: entry["value"] for entry in c["env"] if "value" in entry} for c in containers]


@pytest.mark.parametrize("manifest", [pytorchjob(), mpijob("v1"), mpijob("v2beta1"), trainjob()])
def test_every_role_has_the_variables(manifest: Manifest) -> None:
    found = environments(stamped(manifest))
    assert len(found) == len(kind_of(manifest["kind"]).replicas(manifest))
    assert all(environment.items() >= VARIABLES.items() for environment in found)


def test_variables_of_a_task_that_is_not_mapped() -> None:
    request = JobRequest(kind_of("PyTorchJob"), Owner(replace(KEY, map_index=-1), 1, "ti"), 1, pytorchjob())
    job = request.stamped(request.fitted("kubeflow.org/v1"), "team", "s-1", attempt=1, now=0.0)
    assert {environment["KTRAIN_MAP_INDEX"] for environment in environments(job)} == {"-1"}


@pytest.mark.parametrize("make", [pytorchjob, mpijob, trainjob])
def test_try_does_not_change_the_hash(make: Any) -> None:
    """Otherwise `reattach="if_unchanged"` would replace the job in each retry."""
    first, second = (stamped(make(), number)["metadata"]["annotations"][MANIFEST_ANNOTATION] for number in (1, 2))
    assert first == second


def test_variables_replace_those_of_the_manifest() -> None:
    """They may come from a manifest that was saved with `kubectl get -o yaml`."""
    saved = stamped(pytorchjob(), 1)
    del saved["metadata"]["name"]
    again = stamped(saved, 2)
    assert [environment["KTRAIN_TRY"] for environment in environments(again)] == ["2", "2"]
    containers = [spec["template"]["spec"]["containers"][0] for spec in kind_of("PyTorchJob").replicas(again).values()]
    assert [len({e["name"] for e in c["env"]}) for c in containers] == [len(c["env"]) for c in containers]


def test_variables_are_found_and_left_out() -> None:
    job = stamped(pytorchjob(env=[{"name": "GREETING", "value": "hello"}]))
    warned = [problem for problem in check(job) if problem.code == "reserved-variable"]
    assert {problem.message.split()[0] for problem in warned} == {*VARIABLES, "KTRAIN_ATTEMPT"}
    assert environments(without_variables(job)) == [{"GREETING": "hello"}] * 2
