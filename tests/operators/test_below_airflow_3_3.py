"""Airflow below 3.3: a task has no state that survives a retry, only XComs that the next try doesn't see."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ktrain.compat import DEFERRAL_TIMEOUT
from airflow_provider_ktrain.core.formats import STATUS_XCOM
from airflow_provider_ktrain.exceptions import TrainingConfigurationError, TrainingHangError, TrainingTimeoutError
from tests.operators.task_instance import TRAINS, Instance, Supervisor, of_each_kind, supervised

TRAINS_SOON = ["sh", "-c", "echo 'KTRAIN_RESULT {\"loss\": 1}'"]


@pytest.fixture
def stateless(instance: Instance) -> Instance:
    """A task instance without `task_state_store`. A try's XComs are deleted before the next try, as in Airflow."""
    instance.has_state = False
    return instance


def uids(instance: Instance) -> list[str]:
    return [job["metadata"]["uid"] for job in instance.jobs()]


@of_each_kind
def test_retry_takes_the_result_of_a_succeeded_job(stateless: Instance) -> None:
    result = stateless.execute(number=1, retries=1, command=TRAINS_SOON, deferrable=False)
    assert result == {"loss": 1}
    kept = uids(stateless)
    assert len(kept) == 1
    assert stateless.running() == 0
    assert stateless.execute(number=2, retries=1, command=TRAINS_SOON, deferrable=False) == result
    assert uids(stateless) == kept


def test_clear_replaces_the_kept_job(stateless: Instance) -> None:
    stateless.execute(number=1, command=TRAINS_SOON, deferrable=False)
    kept = uids(stateless)
    stateless.execute(number=2, max_tries=1, command=TRAINS_SOON, deferrable=False)
    assert len(uids(stateless)) == 1
    assert uids(stateless) != kept


@pytest.mark.parametrize(("action", "ttl"), [("delete_job", 3600), ("delete_succeeded_job", None), ("keep_job", None)])
def test_only_jobs_with_delete_job_expire(stateless: Instance, action: str, ttl: int | None) -> None:
    stateless.execute(on_finish_action=action)
    (job,) = stateless.jobs()
    assert job["spec"]["runPolicy"].get("ttlSecondsAfterFinished") == ttl


def test_job_with_a_stored_outcome_does_not_expire(instance: Instance) -> None:
    instance.execute()
    (job,) = instance.jobs()
    assert "ttlSecondsAfterFinished" not in (job["spec"].get("runPolicy") or {})


@of_each_kind
def test_deferral_timeout_releases_the_job_below_airflow_3_3(stateless: Instance) -> None:
    assert isinstance(stateless.execute(), TaskDeferred)
    with pytest.raises(TrainingTimeoutError):
        stateless.fail(DEFERRAL_TIMEOUT)
    assert not stateless.jobs()


@of_each_kind
def test_retry_with_an_invalid_parameter_adopts_the_job_below_airflow_3_3(stateless: Instance) -> None:
    """Nothing is stored about the job of the lost try, so it is looked for by its name."""
    stateless.execute(number=1, retries=1)
    before = uids(stateless)
    again = stateless.execute(number=2, retries=1, rendered={"gpus": "two"})
    assert isinstance(again, TaskDeferred)
    assert uids(stateless) == before


def test_invalid_parameter_without_a_job_is_final_below_airflow_3_3(stateless: Instance) -> None:
    for number in (1, 2):
        with pytest.raises(TrainingConfigurationError):
            stateless.execute(number=number, retries=1, rendered={"gpus": "two"})
    assert not stateless.jobs()


def test_failed_trigger_is_continued_from_the_xcom(stateless: Instance) -> None:
    command = ["sh", "-c", "sleep 3; echo 'KTRAIN_RESULT {\"loss\": 2}'"]
    assert isinstance(stateless.execute(command=command), TaskDeferred)
    assert stateless.fail("Trigger failure", traceback=["ImportError: no module\n"]) == {"loss": 2}
    assert len(uids(stateless)) == 1


class XComs(Supervisor):
    """The triggerer's supervisor, which stores the XComs of a task."""

    def __init__(self, xcoms: dict[str, Any]) -> None:
        super().__init__(TaskInstanceState.DEFERRED)
        self.xcoms = xcoms

    def send(self, message: Any) -> Any:
        if type(message).__name__ == "SetXCom":
            self.xcoms[message.key] = message.value
        return super().send(message)


@of_each_kind
def test_cause_is_read_back_after_a_lost_trigger_below_airflow_3_3(stateless: Instance) -> None:
    """The triggerer dies after it has released the job, and before its event is stored."""
    deferred = stateless.execute(command=TRAINS, log_stall_timeout=3)
    assert stateless.ti is not None
    ti, trigger = stateless.ti, deferred.trigger
    trigger.task_instance = dataclasses.replace(ti, xcoms={})

    async def release() -> None:
        following = asyncio.ensure_future(trigger._follow(0.0))
        async with asyncio.timeout(120):
            while await asyncio.to_thread(stateless.jobs):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        following.cancel()
        await asyncio.wait([following])
        await trigger._close()

    with supervised(XComs(ti.xcoms)):
        asyncio.run(release())
    assert "conclusion" in ti.xcoms[STATUS_XCOM]
    with pytest.raises(TrainingHangError, match="log_stall_timeout"):
        stateless.fail("Trigger failure")
