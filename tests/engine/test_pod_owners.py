"""Which pods belong to a TrainJob if our labels are not on them: those of its JobSet."""

from __future__ import annotations

import asyncio

import pytest

from airflow_provider_ktrain.core.identity.names import SUBMISSION_LABEL
from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.engine.follow.options import Options
from tests.engine.staged import NAME, staged


@pytest.mark.virtual_time
@pytest.mark.parametrize("ours", [True, False])
async def test_pods_of_the_jobset_of_another_job_are_ignored(ours: bool) -> None:
    async with staged(TRAINJOB) as training:
        owner = {"kind": "TrainJob", "name": NAME, "uid": training.ref.uid if ours else "another"}
        training.api.put("jobsets", {"metadata": {"name": NAME, "uid": "jobset", "ownerReferences": [owner]}})
        pod = training.pod(0)
        training.api.change("pods", pod, lambda pod: pod["metadata"]["labels"].pop(SUBMISSION_LABEL))
        following = asyncio.ensure_future(training.follow(Options()))
        await asyncio.sleep(30)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert (f"TrainJob ns/{NAME} is Running" in str(training.log)) is ours
