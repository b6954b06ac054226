"""A job that has ended before anybody follows it: its logs, its result and its cause come all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kubernetes_asyncio import client as aio
from kubernetes_asyncio import config as aio_config

from airflow_provider_ktrain.core.identity import JobRef, Owner, TaskKey
from airflow_provider_ktrain.core.manifest import stamp
from airflow_provider_ktrain.engine.api import Api
from airflow_provider_ktrain.engine.supervisor import Options, Outcome, Stop, follow
from tests.life.jobs import Jobs, Object


class LatePods(Api):
    """An API whose list of pods comes after its list of jobs."""

    def __init__(self, jobs: Jobs) -> None:
        async def make_client() -> aio.ApiClient:
            configuration = aio.Configuration()
            await aio_config.load_kube_config(str(jobs.kubeconfig), client_configuration=configuration)
            return aio.ApiClient(configuration)

        super().__init__(make_client, "test")
        self._listed = asyncio.Event()

    async def request(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        if path.endswith("/pods"):
            await self._listed.wait()
        answer = await super().request(method, path, **more)
        if path.endswith("jobs"):
            self._listed.set()
        return answer


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        self.said.append(str(event))

    warning = info


def owned(jobs: Jobs, manifest: Object) -> tuple[Object, JobRef]:
    """Submitted as a task does; and as the task remembers it."""
    name = manifest["metadata"]["name"]
    key, submission = TaskKey("life", "dag", "train", name), f"s{name[-8:]}"
    owner = Owner(key, 1, "ti")
    notes = {"ktrain.airflow/owner": owner.annotation()}
    job = jobs.submit(stamp(manifest, name, jobs.namespace, key.labels(submission), notes))
    version = manifest["apiVersion"].rpartition("/")[2]
    return job, JobRef(
        job["kind"], version, jobs.namespace, name, job["metadata"]["uid"], "ti", "life", submission
    )  # fmt: skip


async def ends(jobs: Jobs, ref: JobRef, log: Lines) -> Outcome:
    api = LatePods(jobs)
    try:
        outcome = await follow(ref, api, Options(), log=log, stop=Stop())
    finally:
        await api.close()
    assert isinstance(outcome, Outcome)
    return outcome


async def test_of_a_job_that_has_failed_the_cause_is_told(jobs: Jobs) -> None:
    job, ref = owned(jobs, jobs.build(command=["sh", "-c", "echo no data >&2; exit 3"]))
    jobs.wait(job, "Failed")
    outcome = await ends(jobs, ref, log := Lines())
    assert outcome.cause
    assert outcome.cause["summary"] == "Master 0 failed with exit code 3; its last line: no data"
    assert "[Master 0] no data" in log.said


@pytest.mark.parametrize(
    ("program", "result", "error"),
    [
        ("""echo 'KTRAIN_RESULT {"accuracy": 0.97}'""", {"accuracy": 0.97}, ""),
        ("""echo 'KTRAIN_RESULT {"loss": 1}'; echo 'KTRAIN_RESULT {"loss": 0.5}'""", {"loss": 0.5}, ""),
        ("""echo '{"from": "message"}' > /dev/termination-log""", {"from": "message"}, ""),
        ("echo 'KTRAIN_RESULT {broken'", None, "the line that begins with KTRAIN_RESULT is no JSON"),
        ("echo KTRAIN_RESULT [$(seq -s, 20000)]", None, "expected at most 49,152. Store it elsewhere"),
        ("echo done", None, ""),
    ],
)
async def test_of_a_job_that_has_succeeded_the_result_is_brought(
    jobs: Jobs, program: str, result: Any, error: str
) -> None:
    job, ref = owned(jobs, jobs.build(command=["sh", "-c", program]))
    jobs.wait(job, "Succeeded")
    outcome = await ends(jobs, ref, Lines())
    assert outcome.succeeded
    assert outcome.result == result
    assert error in outcome.result_error
    assert bool(error) == bool(outcome.result_error)
    assert jobs.read(job) is None
