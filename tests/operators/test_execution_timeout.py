"""Airflow's own timeout counts from the start of each `execute`, and the job's deadline from its creation."""

from __future__ import annotations

import datetime

import pytest
from airflow.sdk.exceptions import AirflowTaskTimeout

from airflow_provider_ktrain.exceptions import TrainingTimeoutError
from tests.operators.task_instance import TRAINS
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")


def time_out_after(instance: VirtualInstance, seconds: float) -> None:
    """End `execute` as Airflow does."""

    def time_out() -> None:
        raise AirflowTaskTimeout("Timeout, PID: 1")

    instance.on_interrupt(time_out)
    instance.world.after(seconds, instance.interrupt)


@pytest.mark.parametrize("retries", [0, 1])
def test_slow_submission_does_not_hide_the_cause(instance: VirtualInstance, retries: int) -> None:
    """The worker ends the training before Airflow would, although the job's own deadline comes later."""
    instance.api.slow("before GET /apis/kubeflow.org/v1$", 5.0)
    time_out_after(instance, 20.0)
    with pytest.raises(TrainingTimeoutError) as caught:
        instance.execute(
            command=TRAINS, deferrable=False, retries=retries, execution_timeout=datetime.timedelta(seconds=20)
        )
    first = str(caught.value).splitlines()[0]
    assert "did not finish within" in first
    assert first.endswith("(execution_timeout): 1/1 Running")
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


def test_time_for_which_airflow_waits_is_left_to_a_job_that_was_submitted_at_once(instance: VirtualInstance) -> None:
    """The reserve for the release is the same in both."""
    began = instance.clock
    with pytest.raises(TrainingTimeoutError, match="within 18 s of its creation"):
        instance.execute(command=TRAINS, deferrable=False, execution_timeout=datetime.timedelta(seconds=20))
    assert instance.clock - began < 20.0
