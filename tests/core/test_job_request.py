"""The job that a task requests, and the manifest that is submitted for it."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_ktrain.core.errors import ManifestError, VersionNotServedError
from airflow_provider_ktrain.core.identity.names import (
    DEADLINE_ANNOTATION,
    FINISH_ANNOTATION,
    MANIFEST_ANNOTATION,
    STACKS_ANNOTATION,
    OnFinishAction,
    Owner,
    TaskKey,
)
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, Manifest
from airflow_provider_ktrain.core.manifest.code import CodeFile, pack
from airflow_provider_ktrain.core.manifest.deadline import deadline_of, deferral_timeout, run_seconds
from airflow_provider_ktrain.core.manifest.job_request import JobRequest, manifest_hash
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.manifest.transform import fit
from tests.core.manifests import pytorchjob

KEY = TaskKey("prod", "dag", "train", "run-1")
REQUEST = JobRequest(PYTORCHJOB, Owner(KEY, 1, "ti-1"), 1, pytorchjob())


def stamped(request: JobRequest, attempt: int = 1) -> Manifest:
    fitted = request.fitted("kubeflow.org/v1")
    return request.stamped(fitted, "team", "s-1", attempt=attempt, now=1000.0)


def notes_of(request: JobRequest, attempt: int = 1) -> dict[str, str]:
    annotations: dict[str, str] = stamped(request, attempt)["metadata"]["annotations"]
    return annotations


def environment(manifest: Manifest) -> dict[str, Any]:
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container.get("env") or ()}


def test_attempt_does_not_change_the_hash() -> None:
    """Otherwise `reattach="if_unchanged"` would replace the job in each retry."""
    assert notes_of(REQUEST, 1)[MANIFEST_ANNOTATION] == notes_of(REQUEST, 2)[MANIFEST_ANNOTATION]
    assert [environment(stamped(REQUEST, n))["KTRAIN_ATTEMPT"] for n in (1, 2)] == ["1", "2"]


def test_checkpoint_dir_is_sent_and_changes_the_hash() -> None:
    resumed = replace(REQUEST, checkpoint_root="/data/")
    assert environment(stamped(resumed))["KTRAIN_CHECKPOINT_DIR"] == f"/data/{KEY.job_name()}"
    assert notes_of(resumed)[MANIFEST_ANNOTATION] != notes_of(REQUEST)[MANIFEST_ANNOTATION]


@pytest.mark.parametrize(
    ("first_try", "resume", "directory"), [(1, False, ""), (3, False, "/from-try-3"), (3, True, "")]
)
def test_clear_changes_the_checkpoint_dir(first_try: int, resume: bool, directory: str) -> None:
    request = replace(REQUEST, first_try=first_try, checkpoint_root="/data", resume_on_clear=resume)
    assert request.checkpoint_dir == f"/data/{KEY.job_name()}{directory}"


def test_deadline_is_stored_and_enforced_by_the_cluster_later() -> None:
    job = stamped(replace(REQUEST, run_seconds=600))
    assert deadline_of(job) == 1600
    assert job["spec"]["runPolicy"]["activeDeadlineSeconds"] == 900
    unlimited = stamped(REQUEST)
    assert deadline_of(unlimited) is None
    assert "activeDeadlineSeconds" not in unlimited["spec"].get("runPolicy", {})
    assert DEADLINE_ANNOTATION not in unlimited["metadata"]["annotations"]


@pytest.mark.parametrize(("timeout", "seconds"), [(3600, 3570), (60, 54), (None, None)])
def test_deadline_is_before_the_execution_timeout(timeout: float | None, seconds: float | None) -> None:
    assert run_seconds(None if timeout is None else datetime.timedelta(seconds=timeout)) == seconds


def test_deferral_ends_after_the_deadline() -> None:
    assert deferral_timeout(1600, 1000, 900) == datetime.timedelta(seconds=1500)
    assert deferral_timeout(1600, 2000, 900) == datetime.timedelta(seconds=900)
    assert deferral_timeout(None, 1000, 900) is None


def test_expiry_is_not_raised_to_the_minimum_of_a_manifest() -> None:
    assert stamped(replace(REQUEST, expire_seconds=3600))["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 3600


def test_invalid_request_has_annotations_of_its_owner_alone() -> None:
    request = replace(REQUEST, manifest=None, invalid=ManifestError("gpus"), on_finish_action=OnFinishAction.KEEP_JOB)
    with pytest.raises(ManifestError, match="gpus"):
        request.fitted("kubeflow.org/v1")
    annotations = request.annotations(None, now=0)
    assert Owner.of({"metadata": {"annotations": annotations}}) == request.owner
    assert (annotations[FINISH_ANNOTATION], annotations[MANIFEST_ANNOTATION]) == ("keep_job", "")


def test_generated_manifest_is_written_for_the_served_version() -> None:
    options = JobOptions(image="i:1", workers=2)
    request = JobRequest(MPIJOB, Owner(KEY, 1, "ti-1"), 1, build("MPIJob", options), generated=True)
    for version in MPIJOB.api_versions:
        assert request.fitted(version) == fit(build("MPIJob", options, version), version)


def test_manifest_of_another_version_is_not_rewritten() -> None:
    manifest = build("MPIJob", JobOptions(image="i:1", workers=2), "kubeflow.org/v1")
    request = JobRequest(MPIJOB, Owner(KEY, 1, "ti-1"), 1, manifest)
    with pytest.raises(VersionNotServedError):
        request.fitted("kubeflow.org/v2beta1")


def test_namespace_of_parameter_manifest_or_connection() -> None:
    named = pytorchjob()
    named["metadata"]["namespace"] = "theirs"
    assert replace(REQUEST, namespace="ours", manifest=named).namespace_or("default") == "ours"
    assert replace(REQUEST, manifest=named).namespace_or("default") == "theirs"
    assert REQUEST.namespace_or("default") == "default"


def test_hash_does_not_depend_on_the_order_of_fields() -> None:
    assert manifest_hash({"a": 1, "b": {"c": 2, "d": 3}}) == manifest_hash({"b": {"d": 3, "c": 2}, "a": 1})


def test_sent_program_prints_stacks_unless_hang_traces_is_off() -> None:
    """A program of the image is started as before, because only code and functions are sure to have python3."""
    manifest = build("PyTorchJob", JobOptions(image="i", command=["python3", "train.py"]))
    function = build("PyTorchJob", JobOptions(image="i", command=["python3", "-c", "x"], env={"KTRAIN_PROGRAM": "x"}))
    code = pack([CodeFile("train.py", b"")])

    def command(manifest: Manifest, **options: Any) -> list[str]:
        asked = replace(REQUEST, manifest=manifest, **options)
        made = asked.stamped(asked.fitted("kubeflow.org/v1"), "team", "s-1", attempt=1, now=0.0)
        (container,) = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
        starts = container["command"][7:8] == ["ktrain-s-1"]
        assert (STACKS_ANNOTATION in made["metadata"]["annotations"]) is starts
        return list(container["command"])

    assert command(manifest, code=code)[7:] == ["ktrain-s-1", "30", "0", "python3", "train.py"]
    assert command(function)[5:] == ["", "", "ktrain-s-1", "30", "0", "python3", "-c", "x"]
    assert command(manifest, code=code, hang_traces=False)[7:] == ["", "30", "0", "python3", "train.py"]
    assert command(function, hang_traces=False) == ["python3", "-c", "x"]
    assert command(manifest) == ["python3", "train.py"]
