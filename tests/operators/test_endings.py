"""A training that has ended is never repeated and never lost, whoever fails to say so."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferralTimeout

from airflow_provider_ktrain.exceptions import TrainingUserCodeError
from tests.operators.instance import Instance

RESULT = ["sh", "-c", """echo 'KTRAIN_RESULT {"loss": 0.5}'; sleep 3"""]
FAILS = ["sh", "-c", "echo no such file >&2; sleep 3; exit 3"]


def test_a_worker_that_cannot_tell_airflow(instance: Instance) -> None:
    """The next try takes the result; the job goes when Airflow knows."""
    with pytest.raises(ConnectionError):
        instance.execute(command=RESULT, deferrable=False, retries=1, refuses="usage")
    (job,) = instance.jobs()
    assert not instance.running()
    assert instance.execute(command=RESULT, deferrable=False, number=2, retries=1) == {"loss": 0.5}
    assert instance.ti is not None
    assert instance.ti.xcoms["job"]["uid"] == job["metadata"]["uid"]
    assert not instance.jobs()


def test_airflow_gave_the_deferral_up(instance: Instance) -> None:
    """No triggerer was there for so long that Airflow timed the deferral out; the training went on and succeeded."""
    instance.execute(command=RESULT)
    instance.wait_ended()
    assert instance.fail("Trigger timeout") == {"loss": 0.5}
    assert not instance.jobs()


def test_airflow_gave_the_deferral_up_and_it_failed(instance: Instance) -> None:
    instance.execute(command=FAILS)
    instance.wait_ended()
    with pytest.raises(TrainingUserCodeError, match="exit code 3"):
        instance.fail("Trigger timeout")
    assert not instance.jobs()


def test_airflow_gave_the_deferral_up_and_it_runs_on(instance: Instance) -> None:
    instance.execute()
    with pytest.raises(TaskDeferralTimeout):
        instance.fail("Trigger timeout")
    assert not instance.jobs()


def test_triggers_that_all_failed(instance: Instance) -> None:
    deferred: Any = instance.execute(command=RESULT)
    instance.wait_ended()
    _, arguments = deferred.trigger.serialize()
    assert instance.resume({"error": "no luck", "trigger": {**arguments, "failures": 3}}) == {"loss": 0.5}
    assert not instance.jobs()
