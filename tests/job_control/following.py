"""Submit a job like a task, and follow it without Airflow."""

from __future__ import annotations

from collections.abc import Callable

from kubernetes_asyncio import client as aio
from kubernetes_asyncio import config as aio_config

from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, JobRef, Owner, TaskKey
from airflow_provider_ktrain.core.manifest.transform import stamp
from airflow_provider_ktrain.engine.api.client import Api, MakeClient
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.engine.tasks import Lines, follow, release_job
from tests.job_control.jobs import Jobs, Object


def connect(jobs: Jobs) -> MakeClient:
    async def make_client() -> aio.ApiClient:
        configuration = aio.Configuration()
        await aio_config.load_kube_config(str(jobs.kubeconfig), client_configuration=configuration)
        return aio.ApiClient(configuration)

    return make_client


def owned(jobs: Jobs, manifest: Object) -> tuple[Object, JobRef]:
    """A job submitted like a task's job, and its reference."""
    name, version = manifest["metadata"]["name"], manifest["apiVersion"].rpartition("/")[2]
    key, submission = TaskKey("life", "dag", "train", name), f"s{name[-8:]}"
    annotations = {OWNER_ANNOTATION: Owner(key, 1, "ti").annotation()}
    job = jobs.submit(stamp(manifest, name, jobs.namespace, key.labels(submission), annotations))
    return job, JobRef(job["kind"], version, jobs.namespace, name, job["metadata"]["uid"], "ti", "life", submission)


async def follow_to_the_end(
    jobs: Jobs, ref: JobRef, log: Lines, make_api: Callable[[MakeClient], Api] = Api
) -> Outcome:
    api = make_api(connect(jobs))
    try:
        outcome = await follow(ref, api, log=log)
        if isinstance(outcome, Outcome) and outcome.kept:  # operators do this last
            await release_job(api, ref)
    finally:
        await api.close()
    assert isinstance(outcome, Outcome)
    return outcome
