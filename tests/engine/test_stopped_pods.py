"""Pods that are stopped from outside, and whose end the process that follows the job has to find out."""

from __future__ import annotations

import asyncio

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.engine.follow.options import Options
from tests.apiserver import Object, stamp
from tests.engine.staged import Staged, staged

pytestmark = pytest.mark.virtual_time
OPTIONS = Options(drain_timeout=0.5)


def request_end(training: Staged, grace: float = 30.0) -> None:
    """Somebody deletes the pod of the primary."""
    requested = {"deletionTimestamp": stamp(-grace), "deletionGracePeriodSeconds": grace}
    training.api.change("pods", training.pod_name(), lambda pod: pod["metadata"].update(requested))


def remove(training: Staged, code: int = 0) -> None:
    """The program of the primary ends, and the kubelet removes its pod."""
    terminated = {"terminated": {"exitCode": code, "finishedAt": stamp()}}

    def end(pod: Object) -> None:
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        pod["status"]["containerStatuses"][0]["state"] = terminated

    training.api.change("pods", training.pod_name(), end)
    training.api.remove("pods", training.pod_name())


@pytest.mark.parametrize("is_elastic", [False, True])
async def test_end_of_a_primary_that_runs_on_after_the_success_is_not_known(is_elastic: bool) -> None:
    """Another pod has succeeded, which nobody has seen. An elastic job succeeds with its first Worker."""
    async with staged() as training:
        if is_elastic:
            training.spec(elasticPolicy={"maxReplicas": 2})
            training.pod(1)
            training.after(10, training.pod, 1, "Succeeded")
        training.start()
        training.after(10, training.ended)
        outcome = await training.follow(OPTIONS)
        assert outcome.succeeded
        assert ("was not observed" in str(training.log)) is not is_elastic


@pytest.mark.parametrize("kind", [PYTORCHJOB, TRAINJOB], ids=lambda kind: kind.name)
async def test_pod_that_replaced_a_failed_one_while_nobody_followed_was_stopped(kind: Kind) -> None:
    """The changes of the last pod decide, not those of the one before."""
    async with staged(kind) as training:
        training.start()
        handover = await training.hand_over(5)
        request_end(training)
        remove(training, code=143)
        training.pod(since=0)
        request_end(training)
        await asyncio.sleep(2)
        remove(training)
        training.ended()
        outcome = await training.follow(OPTIONS, handover)
        assert not outcome.succeeded, training.log


async def test_program_has_the_grace_period_of_the_request() -> None:
    """`kubectl delete --grace-period=600` lets the program save for as long. Nobody has seen its end."""
    async with staged() as training:
        training.start(grace=30)
        training.after(5, request_end, training, 600.0)
        handover = await training.hand_over(20)
        await asyncio.sleep(180)
        remove(training)
        training.ended()
        training.api.expire()
        outcome = await training.follow(OPTIONS, handover)
        assert not outcome.succeeded, training.log
