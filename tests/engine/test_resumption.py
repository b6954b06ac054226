"""A suspended job is resumed when its operator has ended the pods: it would count them as failed."""

from __future__ import annotations

import asyncio

import pytest

from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.errors import ClusterError
from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, Owner
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.status import wants_suspension
from airflow_provider_ktrain.engine import job_control
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from tests.apiserver import NAMESPACE, connected
from tests.engine.staged import Staged, of_each_kind, staged
from tests.engine.tasks import adopt, release_job
from tests.until import until

pytestmark = pytest.mark.virtual_time

GRACE_SECONDS = 5
NEVER = 10_000.0
#: Seconds from the suspension until the operator deletes the pods.
of_each_lag = pytest.mark.parametrize("lag", [0.0, 3.0], ids=["is ending", "runs on"])


async def suspended(training: Staged, api: Api) -> None:
    """A kill suspends the job, and waits for nothing."""
    training.start(grace=GRACE_SECONDS)
    await release_job(api, training.ref, Mode.SUSPEND, verify=False)
    await asyncio.sleep(0.1)
    assert training.holding


async def next_try(training: Staged, api: Api) -> Submitted:
    owner = Owner.of(training.job)
    assert isinstance(owner, Owner)
    again = Owner(owner.key, 2, "ti-2")
    annotations = {OWNER_ANNOTATION: again.annotation()}
    metadata = {"name": training.name, "namespace": NAMESPACE, "annotations": annotations}
    return await adopt(api, training.kind, training.ref.version, metadata, again, 1, log=training.log)


@of_each_kind
@of_each_lag
async def test_next_try_resumes_a_job_whose_pods_have_ended(kind: Kind, lag: float) -> None:
    async with staged(kind, operator_lag=lag) as training, connected(training.url) as api:
        await suspended(training, api)
        adopting = asyncio.ensure_future(next_try(training, api))
        await until(lambda: adopting.done() or not wants_suspension(training.job))
        assert not training.holding
        assert (await adopting).ref.uid == training.ref.uid
        assert f"Resuming {training.ref}" in str(training.log).replace(" (try 1)", "")


@of_each_kind
@of_each_lag
async def test_operator_resumes_a_job_whose_pods_have_ended(kind: Kind, lag: float) -> None:
    async with staged(kind, operator_lag=lag) as training, connected(training.url) as api:
        await suspended(training, api)
        resuming = asyncio.ensure_future(job_control.resume(api, training.ref, timeout=60))
        await until(lambda: resuming.done() or not wants_suspension(training.job))
        assert not training.holding
        training.pod(0)
        assert (await resuming).endswith("is resumed")


async def test_next_try_waits_until_kueue_has_ended_the_pods() -> None:
    """Its Workload is deactivated. Kueue suspends the job some seconds later."""

    def stop() -> None:
        training.spec(**training.kind.form.suspension(True))
        training.api.remove("pods", training.pod_name())

    def is_active() -> bool:
        (workload,) = training.api.objects["workloads"].values()
        return bool(workload["spec"]["active"])

    async with staged() as training, connected(training.url) as api:
        training.workload()
        await suspended(training, api)
        assert not is_active()
        assert not wants_suspension(training.job)
        training.after(3.0, stop)
        adopting = asyncio.ensure_future(next_try(training, api))
        await until(lambda: adopting.done() or is_active())
        assert not training.holding
        await adopting


async def test_job_that_a_user_has_resumed_is_adopted_at_once() -> None:
    async with staged(operator_lag=NEVER) as training, connected(training.url) as api:
        await suspended(training, api)
        training.spec(**training.kind.form.suspension(False))
        assert (await next_try(training, api)).ref.uid == training.ref.uid
        assert training.holding


async def test_pods_that_no_operator_ends_are_named() -> None:
    async with staged(operator_lag=NEVER) as training, connected(training.url) as api:
        await suspended(training, api)
        with pytest.raises(ClusterError) as error:
            await next_try(training, api)
        assert "is still being suspended after 600 s" in str(error.value)
        assert f"pod {training.pod_name()} on node-1 (not being deleted yet)" in str(error.value)
        assert "Its operator does not end them: check that it runs" in str(error.value)
        assert wants_suspension(training.job)
