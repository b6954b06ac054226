"""A scripted API server with Kueue, in which tests write the Workloads, and a task whose job waits in a queue."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from airflow_provider_ktrain.engine.api.client import Api
from tests.apiserver import NAMESPACE, ApiServer, Object, Request, serving
from tests.engine.tasks import Task

from .workloads import has_queue, suspend


def suspend_new_job(request: Request, present: Object | None) -> None:
    """Kueue's webhook."""
    if present is None and request.where.resource.endswith("jobs") and has_queue(request.body):
        suspend(request.body, True)


@pytest.fixture
def server() -> ApiServer:
    made = ApiServer(admit=suspend_new_job)
    made.put("workloadpriorityclasses", {"metadata": {"name": "low"}, "value": 1})
    return made


@pytest.fixture
async def api(server: ApiServer) -> AsyncIterator[Api]:
    async with serving(server) as api:
        yield api


@pytest.fixture
async def task(api: Api, request: pytest.FixtureRequest) -> Task:
    """`of_each_kind` sets its class."""
    made: Task = getattr(request, "param", Task)(api, NAMESPACE)
    return made
