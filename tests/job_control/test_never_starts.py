"""A command that doesn't exist, under OnFailure: the job stays Running, and the task ends it."""

from __future__ import annotations

import asyncio

import pytest

from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.options import Options
from tests.apiserver import stamp
from tests.engine.staged import staged

MESSAGE = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    'unable to start container process: exec: "/no/such/program": stat /no/such/program: no such file or directory'
)


@pytest.mark.virtual_time
async def test_missing_command_ends_the_job_after_its_first_restarts() -> None:
    async with staged() as training:

        def restarted(times: int) -> None:
            failed = {"exitCode": 128, "reason": "StartError", "message": MESSAGE, "finishedAt": stamp()}
            waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}}
            training.pod(state=waiting, last={"terminated": failed}, restarts=times)

        training.running()
        for times, seconds in enumerate((0, 0.5, 10.5, 30.5), 0):  # the kubelet's back-off
            asyncio.get_running_loop().call_later(seconds, restarted, times)
        began = timing.now()
        outcome = await training.follow(Options())
    assert outcome.cause
    assert (outcome.phase, outcome.cause["category"]) == ("Running", "image")
    assert outcome.cause["summary"].startswith('Worker 0 can\'t start its command: exec: "/no/such/program"')
    assert not training.api.objects["pytorchjobs"]
    assert timing.now() - began == pytest.approx(30.5, abs=1)
