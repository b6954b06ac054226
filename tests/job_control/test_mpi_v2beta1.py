"""MPIJob v2beta1 as people write it: adapted to the fields that mpi-operator reads, and followed to its end."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, overlay
from airflow_provider_ktrain.core.manifest.transform import fit, modernize
from tests.job_control.following import Lines, follow_to_the_end, owned
from tests.job_control.jobs import Jobs, Object


def mpijob(jobs: Jobs, program: str) -> Object:
    """Like the guides: cleanPodPolicy at the top level, and no launcherCreationPolicy."""
    manifest = jobs.build("MPIJob", "v2beta1", workers=2, gpus=None, command=["sh", "-c", program])
    del manifest["spec"]["runPolicy"]["cleanPodPolicy"]
    manifest["spec"]["cleanPodPolicy"] = "Running"
    for role in ("Launcher", "Worker"):
        del manifest["spec"]["mpiReplicaSpecs"][role]["restartPolicy"]  # OnFailure and Never
    workers = manifest["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    workers["command"] = ["sh", "-c", "sleep 600"]
    return manifest


def fitted(manifest: Object) -> Object:
    return fit(modernize(manifest)[0], "kubeflow.org/v2beta1")


async def test_workers_are_deleted_by_the_top_level_clean_pod_policy(jobs_v2: Jobs) -> None:
    manifest = fitted(mpijob(jobs_v2, "exit 0"))
    assert "cleanPodPolicy" not in manifest["spec"]
    assert manifest["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    job = jobs_v2.submit(manifest)  # the job isn't followed
    jobs_v2.wait(job, "Succeeded")
    jobs_v2.wait_none(job, "Running")


async def test_launcher_waits_for_its_workers(jobs_v2: Jobs) -> None:
    """The workers can't be scheduled. By default there is no launcher then; a manifest can change this."""
    unplaced = overlay(mpijob(jobs_v2, "exit 1"), JobOptions(node_selector={"no": "such"}))
    job = jobs_v2.submit(fitted(unplaced))
    assert job["spec"]["launcherCreationPolicy"] == "WaitForWorkersReady"
    name = job["metadata"]["name"]
    jobs_v2.wait_exactly(job, [f"{name}-worker-0", f"{name}-worker-1"])
    unplaced["metadata"]["name"] += "-at-once"
    unplaced["spec"]["launcherCreationPolicy"] = "AtStartup"
    at_once = jobs_v2.submit(fitted(unplaced))
    jobs_v2.wait_number(at_once, 3)
    assert jobs_v2.pods(job) == [f"{name}-worker-0", f"{name}-worker-1"]


async def test_log_of_a_deleted_launcher_is_kept(jobs_v2: Jobs) -> None:
    """With OnFailure, a batch Job deletes the pod that has reached the backoffLimit."""
    manifest = mpijob(jobs_v2, "echo no data >&2; exit 3")
    manifest["spec"]["runPolicy"]["backoffLimit"] = 1
    manifest = fitted(manifest)
    job, ref = owned(jobs_v2, manifest)
    outcome = await follow_to_the_end(jobs_v2, ref, log := Lines())
    assert outcome.cause
    assert outcome.cause["summary"] == "Launcher failed with exit code 3. Last log line: no data"
    assert "[Launcher 0] no data" in log.messages
    assert jobs_v2.read(job) is None
    assert jobs_v2.pods(job) == []


def test_manifest_for_the_other_operator_has_a_remedy(jobs_v2: Jobs) -> None:
    with pytest.raises(ManifestError, match=r"(?s)does not serve kubeflow.org/v1 of MPIJob.*mpi-operator"):
        fit(jobs_v2.build("MPIJob", "v1", workers=1), "kubeflow.org/v2beta1")
