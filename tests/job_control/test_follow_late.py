"""A job that has ended before it is followed: its logs, its result and its cause are found nevertheless."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from airflow_provider_ktrain.engine.api.client import Api, MakeClient
from tests.job_control.following import Lines, follow_to_the_end, owned
from tests.job_control.jobs import Jobs


class LatePods(Api):
    """An Api whose list of pods arrives after its list of jobs."""

    def __init__(self, make_client: MakeClient) -> None:
        super().__init__(make_client)
        self._listed = asyncio.Event()

    async def request(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        if path.endswith("/pods"):
            await self._listed.wait()
        answer = await super().request(method, path, **more)
        if path.endswith("jobs"):
            self._listed.set()
        return answer


async def test_cause_of_a_job_that_has_failed_before(jobs: Jobs) -> None:
    job, ref = owned(jobs, jobs.build(command=["sh", "-c", "echo no data >&2; exit 3"]))
    jobs.wait(job, "Failed")
    outcome = await follow_to_the_end(jobs, ref, log := Lines(), LatePods)
    assert outcome.cause
    assert outcome.cause["summary"] == "Master 0 failed with exit code 3. Last log line: no data"
    assert "[Master 0] no data" in log.messages


@pytest.mark.parametrize(
    ("program", "result", "error"),
    [
        ("""echo 'KTRAIN_RESULT {"accuracy": 0.97}'""", {"accuracy": 0.97}, ""),
        ("""printf 'epoch 1...'; echo 'KTRAIN_RESULT {"loss": 1}'""", {"loss": 1}, ""),
        ("""set -x; echo 'KTRAIN_RESULT {"loss": 1}'""", {"loss": 1}, ""),
        ("""echo 'KTRAIN_RESULT {"loss": 1}'; echo 'KTRAIN_RESULT {"loss": 0.5}'""", {"loss": 0.5}, ""),
        ("""echo '{"from": "message"}' > /dev/termination-log""", {"from": "message"}, ""),
        ("echo 'KTRAIN_RESULT {broken'", None, "the line with KTRAIN_RESULT is not valid JSON"),
        ("echo KTRAIN_RESULT [$(seq -s, 20000)]", None, "more than 49,152 bytes. Store the result elsewhere"),
        ("echo done", None, ""),
    ],
)
async def test_result_of_a_job_that_has_succeeded_before(jobs: Jobs, program: str, result: Any, error: str) -> None:
    job, ref = owned(jobs, jobs.build(command=["sh", "-c", program]))
    jobs.wait(job, "Succeeded")
    outcome = await follow_to_the_end(jobs, ref, Lines(), LatePods)
    assert outcome.succeeded
    assert outcome.result == result
    assert error in outcome.result_error
    assert bool(error) == bool(outcome.result_error)
    assert jobs.read(job) is None
