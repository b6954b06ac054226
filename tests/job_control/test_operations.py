"""Operations on running jobs: scale, suspend, resume, delete. The operators run them on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, JobRef
from airflow_provider_ktrain.engine import job_control as verbs
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.exceptions import TrainingConfigurationError, TrainingJobError
from airflow_provider_ktrain.operators.job_control import (
    DeleteTrainingJobOperator,
    ResumeTrainingJobOperator,
    ScaleTrainingJobOperator,
    SuspendTrainingJobOperator,
)
from tests.clusters import TestCluster, most_gpus
from tests.job_control.following import connect
from tests.job_control.jobs import WAIT, Jobs, Object

ELASTIC = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 3}}
HOROVOD = ["horovodrun", "-np", "2", "--min-np", "1", "--max-np", "3"]


def run(operator: type[Any], job: Object, **arguments: Any) -> str:
    """Execute an operator for a job. Returns its line for the log."""
    task = operator(task_id="verb", job_name=job["metadata"]["name"], kind=job["kind"], **arguments)
    done: str = task.execute({})
    return done


def elastic(jobs: Jobs, workers: int = 1) -> Object:
    """A manifest with one to three elastic Workers and no Master."""
    manifest = jobs.build(workers=workers, spec=ELASTIC)
    del manifest["spec"]["pytorchReplicaSpecs"]["Master"]
    return manifest


# ---- scale


def test_scale_waits_until_exactly_these_workers_run(jobs: Jobs) -> None:
    job = jobs.submit(elastic(jobs), owned=True)
    jobs.wait_pods(job, 1)
    name = job["metadata"]["name"]
    assert (
        run(ScaleTrainingJobOperator, job, workers=3)
        == f"PyTorchJob {jobs.namespace}/{name} scaled from 1 to 3 Workers"
    )
    assert jobs.pods(job, "Running") == [f"{name}-worker-{i}" for i in range(3)]
    assert "from 3 to 2 Workers" in run(ScaleTrainingJobOperator, job, workers="2")  # a template renders to text
    assert jobs.pods(job) == [f"{name}-worker-{i}" for i in range(2)]
    after = jobs.read(job)
    assert after
    assert after["metadata"]["annotations"][OWNER_ANNOTATION] == job["metadata"]["annotations"][OWNER_ANNOTATION]


@pytest.mark.parametrize("workers", [0, 4])
def test_scale_outside_the_elastic_bounds_is_refused(jobs: Jobs, workers: int) -> None:
    job = jobs.submit(elastic(jobs))
    with pytest.raises(
        TrainingConfigurationError, match=f"^workers: .*found {workers}; expected 1 to 3, the elastic bounds"
    ):
        run(ScaleTrainingJobOperator, job, workers=workers)
    after = jobs.read(job)
    assert after
    assert after["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1


def test_scale_of_a_job_with_a_master_warns_about_world_size(jobs: Jobs) -> None:
    job = jobs.submit(jobs.build(workers=1))
    jobs.wait_pods(job, 2)
    with pytest.raises(TrainingConfigurationError, match=r"found 0; expected at least 1$"):
        run(ScaleTrainingJobOperator, job, workers=0)
    assert "from 1 to 2 Workers.\nIt has a Master and no elasticPolicy" in run(ScaleTrainingJobOperator, job, workers=2)
    assert run(ScaleTrainingJobOperator, job, workers=2).endswith("from 2 to 2 Workers")


def test_bounds_of_an_mpijob_come_from_horovodrun(jobs: Jobs) -> None:
    manifest = jobs.build("MPIJob", workers=2, gpus=None)
    launcher = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    launcher["command"] = [*WAIT, *HOROVOD]
    job = jobs.submit(manifest)
    jobs.wait_pods(job, 3)
    done = run(ScaleTrainingJobOperator, job, workers=3)
    assert done.endswith(
        "from 2 to 3 Workers.\nThese Workers run: the Launcher decides whether and when it starts ranks in them"
    )
    assert len(jobs.pods(job, "Running")) == 4
    with pytest.raises(TrainingConfigurationError, match="found 4; expected 1 to 3"):
        run(ScaleTrainingJobOperator, job, workers=4)


def test_scale_fails_if_workers_stay_unscheduled(jobs: Jobs, cluster: TestCluster) -> None:
    job = jobs.submit(workers=1, gpus=most_gpus(cluster, pods=2))
    jobs.wait_pods(job, 2)
    with pytest.raises(TrainingJobError, match="after 1 s, the number of running Workers is still not 2"):
        run(ScaleTrainingJobOperator, job, workers=2, timeout=1)


def test_job_that_has_ended_cannot_be_changed(jobs: Jobs) -> None:
    job = jobs.submit(command=["true"], workers=1)
    jobs.wait(job, "Succeeded")
    for operator, what, more in (
        (ScaleTrainingJobOperator, "scaled", {"workers": 2}),
        (SuspendTrainingJobOperator, "suspended", {}),
        (ResumeTrainingJobOperator, "resumed", {}),
    ):
        with pytest.raises(TrainingJobError, match=f"is Succeeded: it can't be {what}"):
            run(operator, job, **more)


# ---- suspend, resume


def test_suspended_job_has_no_pods_and_can_be_resumed(jobs: Jobs) -> None:
    job = jobs.submit(workers=1, owned=True)
    jobs.wait_pods(job, 2)
    assert run(SuspendTrainingJobOperator, job).endswith("is suspended and its pods are gone")
    assert jobs.pods(job) == []
    assert jobs.condition(job, "Suspended")
    assert "The job is suspended: its Workers start when it is resumed" in run(ScaleTrainingJobOperator, job, workers=2)
    assert run(ResumeTrainingJobOperator, job).endswith("is resumed")
    jobs.wait_pods(job, 3)
    after = jobs.read(job)
    assert after
    assert after["metadata"]["annotations"][OWNER_ANNOTATION] == job["metadata"]["annotations"][OWNER_ANNOTATION]


def test_resume_waits_until_old_pods_are_gone(jobs: Jobs) -> None:
    """Operators count a terminating pod as failed, which would fail the resumed job."""
    job = jobs.submit(workers=1, owned=True)
    jobs.wait_pods(job, 2)
    jobs.patch(job, {"spec": {"runPolicy": {"suspend": True}}})
    jobs.wait_for("Suspended", lambda: jobs.condition(job, "Suspended"))
    assert run(ResumeTrainingJobOperator, job).endswith("is resumed")
    jobs.wait_pods(job, 2)
    assert not jobs.condition(job, "Failed")


# ---- delete


def test_delete_waits_until_pods_are_gone(jobs: Jobs) -> None:
    job = jobs.submit(workers=1)
    jobs.wait_pods(job, 2)
    assert "2 GPUs released" in run(DeleteTrainingJobOperator, job)
    assert jobs.read(job) is None
    assert jobs.pods(job) == []


def test_delete_of_a_missing_job_succeeds_by_default(jobs: Jobs) -> None:
    absent = jobs.build()
    assert run(DeleteTrainingJobOperator, absent).endswith("does not exist")
    for operator, more in (
        (DeleteTrainingJobOperator, {"missing_ok": False}),
        (ScaleTrainingJobOperator, {"workers": 1}),
        (SuspendTrainingJobOperator, {}),
    ):
        with pytest.raises(TrainingJobError, match=r"does not exist\. See: kubectl get pytorchjobs"):
            run(operator, absent, **more)


def test_unfinished_job_of_a_task_is_deleted_only_with_force(jobs: Jobs) -> None:
    job = jobs.submit(owned=True)
    jobs.wait_pods(job, 1)
    with pytest.raises(
        TrainingJobError, match=r"belongs to dag.train of run run .* try 1, and is Running(?s:.*)force=True"
    ):
        run(DeleteTrainingJobOperator, job)
    assert len(jobs.pods(job, "Running")) == 1
    run(DeleteTrainingJobOperator, job, force=True)
    assert jobs.read(job) is None


def test_finished_job_of_a_task_is_deleted_without_force(jobs: Jobs) -> None:
    job = jobs.submit(owned=True, command=["true"])
    jobs.wait(job, "Succeeded")
    run(DeleteTrainingJobOperator, job)
    assert jobs.read(job) is None


@pytest.mark.parametrize(
    ("operator", "name", "value", "error"),
    [
        (SuspendTrainingJobOperator, "kind", "TFJob", r"found 'TFJob'; expected one of MPIJob, PyTorchJob"),
        (ScaleTrainingJobOperator, "workers", "x", r"found 'x'; expected a whole number, 0 or more"),
        (ScaleTrainingJobOperator, "workers", -1, r"found -1; expected a whole number, 0 or more"),
        (SuspendTrainingJobOperator, "timeout", "5m", r"^timeout: .*found '5m'"),
        (DeleteTrainingJobOperator, "job_name", "", r"^job_name: .*found ''"),
    ],
)
def test_wrong_parameters_fail_without_a_request_or_retry(
    operator: type[Any], name: str, value: Any, error: str
) -> None:
    right = {"task_id": "verb", "job_name": "x"} | ({"workers": 1} if operator is ScaleTrainingJobOperator else {})
    with pytest.raises(ValueError, match=error):
        operator(**{**right, name: value})
    task = operator(**right)
    setattr(task, name, value)  # as a template is rendered
    with pytest.raises(TrainingConfigurationError, match=error):
        task.execute({})


# ---- fencing: changes between the read and the write


class Meanwhile(Api):
    """An Api that runs a callback before the first write."""

    def __init__(self, jobs: Jobs, happens: Callable[[], object]) -> None:
        super().__init__(connect(jobs))
        self._happens: Callable[[], object] | None = happens

    async def request(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        if method in ("PATCH", "DELETE") and self._happens:
            happens, self._happens = self._happens, None
            await asyncio.to_thread(happens)
        return await super().request(method, path, **more)


def ref_of(job: Object) -> JobRef:
    meta = job["metadata"]
    return JobRef(job["kind"], "v1", meta["namespace"], meta["name"], meta["uid"])


async def act(jobs: Jobs, happens: Callable[[], object], verb: Callable[[Api], Awaitable[Any]]) -> Any:
    api = Meanwhile(jobs, happens)
    try:
        return await verb(api)
    finally:
        await api.close()


def replace(jobs: Jobs, job: Object) -> Callable[[], Object]:
    """Someone deletes the job and submits another one with the same name."""

    def happens() -> Object:
        jobs.delete(job)
        jobs.wait_for("the job is gone", lambda: jobs.read(job) is None)
        kept = {k: job["metadata"][k] for k in ("name", "namespace")}
        return jobs.submit({**job, "metadata": kept})

    return happens


VERBS: dict[str, Callable[[Api, JobRef], Awaitable[Any]]] = {
    "scale": lambda api, ref: verbs.scale(api, ref, 2, timeout=240),
    "suspend": lambda api, ref: verbs.suspend(api, ref, timeout=240),
    "delete": lambda api, ref: verbs.delete(api, ref, force=True, timeout=240),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_new_job_of_the_same_name_is_not_changed(jobs: Jobs, verb: str) -> None:
    job = jobs.submit(workers=1)
    jobs.wait_pods(job, 2)  # they hold GPUs
    other: list[Object] = []
    doing = act(jobs, lambda: other.append(replace(jobs, job)()), lambda api: VERBS[verb](api, ref_of(job)))
    if verb == "delete":
        assert "2 GPUs released" in (await doing).text
    else:
        with pytest.raises(KtrainError, match="no longer exists"):
            await doing
    after = jobs.read(other[0])
    assert after
    assert after["spec"] == other[0]["spec"]
    assert not after["metadata"].get("deletionTimestamp")


async def test_concurrent_change_is_read_before_the_write(jobs: Jobs) -> None:
    """Lower bounds are set between the read and the write: scale must use the new bounds."""
    job = jobs.submit(elastic(jobs))
    lower = {"spec": {"elasticPolicy": {"maxReplicas": 1}}}
    with pytest.raises(KtrainError, match="found 2; expected 1 to 1"):
        await act(jobs, lambda: jobs.patch(job, lower), lambda api: verbs.scale(api, ref_of(job), 2, timeout=240))
    after = jobs.read(job)
    assert after
    assert after["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
