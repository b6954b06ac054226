"""A trigger that a triggerer stops: the server in the same loop, the connection through Airflow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState

from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.apiserver import NAMESPACE, ApiServer, kubeconfig, served
from tests.engine.staged import Staged
from tests.operators.task_instance import Supervisor, supervised

pytestmark = pytest.mark.virtual_time


@contextlib.asynccontextmanager
async def staged_with_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Staged]:
    api = ApiServer()
    async with served(api) as url:
        extra = {"kube_config_path": str(kubeconfig(tmp_path, url, NAMESPACE)), "namespace": NAMESPACE}
        monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))
        monkeypatch.setenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID", "tests")
        training = Staged(api)
        training.url = url
        yield training


def trigger_of(training: Staged) -> TrainingJobTrigger:
    trigger = TrainingJobTrigger(job=training.ref.to_dict(), options=Options(drain_timeout=0.5).to_dict())
    ti: Any = SimpleNamespace(dag_id="dag", run_id="run", task_id="train", map_index=-1, id="ti-1")
    trigger.task_instance = ti
    return trigger


async def test_cleanup_closes_the_streams_of_a_trigger_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triggerers repeat cancellations, which must not leave a client half closed."""
    async with staged_with_connection(tmp_path, monkeypatch) as training:
        training.pod(0)
        training.running()
        trigger = trigger_of(training)
        with supervised(Supervisor(TaskInstanceState.DEFERRED)):
            running = asyncio.ensure_future(anext(aiter(trigger.run())))
            await asyncio.sleep(5)
            assert training.api.open
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            others = asyncio.all_tasks()
            cleaning = asyncio.ensure_future(trigger.cleanup())
            await asyncio.sleep(0)
            cleaning.cancel()
            await asyncio.gather(cleaning, return_exceptions=True)
            assert cleaning.cancelled()
            assert asyncio.all_tasks() <= others, "the closing goes on"
        await asyncio.sleep(1)
        assert not training.api.open
