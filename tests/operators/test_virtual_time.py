"""Trainings of an hour in virtual time, from `execute` to the result: each kind, followed by a worker or a trigger."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB
from tests.operators.operators import NOTICED, STARTED
from tests.operators.task_instance import Supervisor, supervised
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")
PROGRAM = ["sh", "-c", """sleep 3600; echo 'KTRAIN_RESULT {"loss": 0.5}'"""]
HOUR = STARTED + 3600.0 + NOTICED  #: Time from the create to the end of the job.


@pytest.mark.sampled(4)
@pytest.mark.parametrize("instance", [PYTORCHJOB, MPIJOB, TRAINJOB], indirect=True, ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("deferrable", [False, True], ids=["worker", "trigger"])
def test_training_of_an_hour(instance: VirtualInstance, deferrable: bool) -> None:
    began, more = instance.clock, dict[str, Any]()
    if instance.kind is MPIJOB:
        more = {"workers": 1}
    with supervised(Supervisor(TaskInstanceState.DEFERRED)):
        result = instance.execute(command=PROGRAM, deferrable=deferrable, **more)
        assert isinstance(result, TaskDeferred) is deferrable
        if deferrable:
            assert instance.clock - began == pytest.approx(0.5), "AIRFLOW__KTRAIN__WORKER_SECONDS"
            result = instance.resume(instance.event(result))
    assert result == {"loss": 0.5}
    assert instance.clock - began == pytest.approx(HOUR, abs=1.0)
    assert not instance.jobs()
