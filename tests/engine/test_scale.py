"""Scaling at the bounds of a job. `tests/job_control/test_operations.py` scales jobs whose pods run."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.engine import job_control
from tests.apiserver.http import connected
from tests.engine.staged import NAME, staged

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize(("workers", "fits"), [(0, False), (1, True), (3, True), (4, False)])
async def test_number_of_workers_between_the_elastic_bounds_is_written(workers: int, fits: bool) -> None:
    async with staged() as training, connected(training.url) as api:
        training.spec(elasticPolicy={"minReplicas": 1, "maxReplicas": 3})
        for index in range(workers):
            training.pod(index)
        training.running()
        if not fits:
            with pytest.raises(ManifestError, match="expected 1 to 3"):
                await job_control.scale(api, training.ref, workers, timeout=10)
            return
        await job_control.scale(api, training.ref, workers, timeout=10)
        spec = training.api.objects["pytorchjobs"][NAME]["spec"]
        assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == workers
