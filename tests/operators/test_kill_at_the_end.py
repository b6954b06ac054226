"""A kill after the training has ended, and what a retry finds, where the review found defects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState

from airflow_provider_ktrain.core.formats import STATUS_XCOM
from tests.operators.task_instance import Instance, Store, Supervisor, Ti, supervised

RESULT = ["sh", "-c", """echo 'KTRAIN_RESULT {"loss": 0.5}'"""]


@pytest.fixture(autouse=True)
def supervisor() -> Iterator[Supervisor]:
    with supervised(Supervisor(TaskInstanceState.RUNNING)) as answers:
        yield answers


def test_stopped_worker_returns_the_result_of_a_training_that_has_succeeded(instance: Instance) -> None:
    """The worker is stopped while it stores the outcome. No retry is left, so another end would lose the result."""

    class Stopped(Store):
        def set(self, key: str, value: Any) -> None:
            super().set(key, value)
            if key == "ktrain_outcome" and instance.operator is not None:
                instance.operator.on_kill()

    instance.store = Stopped()
    assert instance.execute(command=RESULT, deferrable=False) == {"loss": 0.5}


def test_retry_with_an_invalid_parameter_looks_for_the_job_of_the_lost_try_below_airflow_3_3(
    instance: Instance,
) -> None:
    instance.has_state = False
    instance.execute(number=1, retries=1)
    (first,) = instance.jobs()
    deferred = instance.execute(number=2, retries=1, rendered={"gpus": "two"})
    assert deferred.trigger.job["uid"] == first["metadata"]["uid"]


def test_last_status_is_not_replaced_by_an_earlier_one(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status that waits for the writer's interval is written while the worker deletes the job."""
    statuses: list[Any] = []
    push = Ti.xcom_push

    def pushed(ti: Ti, key: str, value: Any) -> None:
        if key == STATUS_XCOM:
            statuses.append(value)
            if value.get("ended"):
                until = instance.clock + 2.5  # the deletion takes that long
                instance.when(lambda: instance.clock > until, instance.set_finalizers)
            elif len(statuses) == 1:
                instance.set_finalizers("example.com/slow")
        push(ti, key, value)

    monkeypatch.setattr(Ti, "xcom_push", pushed)  # a part of these tests, not of the code
    instance.execute(command=["sh", "-c", "sleep 1"], deferrable=False)
    assert statuses[-1]["ended"], [(s["ended"], s["phases"][-1][0]) for s in statuses]
