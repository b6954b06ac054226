from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests import clusters
from tests.clusters import TestCluster
from tests.engine.tasks import Task, api_of


@pytest.fixture
async def task(cluster: TestCluster, request: pytest.FixtureRequest) -> AsyncIterator[Task]:
    """A task with a unique job name. `of_each_kind`, or `TASK` in the test's module, sets its class.

    Its job is deleted at the end.
    """
    of_module = getattr(request.module, "TASK", Task)
    async with api_of(cluster) as api:
        task = getattr(request, "param", of_module)(api, cluster.namespace)
        clusters.require(cluster, task.kind, task.version)
        try:
            yield task
        finally:
            await task.delete()
