"""The connection to the API server is cut for some seconds while a task follows its job."""

from __future__ import annotations

import re

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, TRAINJOB
from airflow_provider_ktrain.exceptions import TrainingInfrastructureError
from tests.operators import operators
from tests.operators.task_instance import first_event
from tests.operators.test_evictions import SECONDS, deciding_pod, deferred
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")

CUT_SECONDS = 5.0
each_kind = pytest.mark.parametrize("instance", [MPIJOB, TRAINJOB], indirect=True, ids=["mpijob", "trainjob"])


def cut(instance: VirtualInstance, *, forgotten: bool) -> None:
    """Cut the connection for some seconds.

    :param forgotten: whether the API server has forgotten the changes meanwhile: clients must list again.
    """
    instance.cluster.admin("drop", seconds=CUT_SECONDS)
    if forgotten:
        instance.world.after(CUT_SECONDS - 0.1, instance.api.expire)


@pytest.mark.parametrize("forgotten", [False, True], ids=["by changes", "by events"])
@each_kind
def test_eviction_during_a_cut_of_the_network_fails_the_task(
    instance: VirtualInstance, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    """The trigger has seen the pod run, and then misses it."""
    trigger = deferred(instance, SECONDS[instance.kind.name], monkeypatch)

    def evict() -> None:
        cut(instance, forgotten=forgotten)
        instance.api.evict(deciding_pod(instance))

    instance.world.after(3.0, evict)
    with pytest.raises(TrainingInfrastructureError) as failed:
        instance.resume(first_event(trigger))
    assert "the training is probably incomplete" in str(failed.value)


@pytest.mark.parametrize("forgotten", [False, True], ids=["watched", "listed"])
@each_kind
def test_log_of_a_pod_that_ran_within_a_cut_is_reported_as_lost(
    instance: VirtualInstance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forgotten: bool
) -> None:
    """It was seen Pending, and is gone when the connection is back."""
    monkeypatch.setattr(operators, "STARTED", 4.0)
    trigger = deferred(instance, 1, monkeypatch)
    name = deciding_pod(instance)

    def has_ended() -> bool:
        return operators.has_phase(instance.api.pods[name], "Succeeded")

    instance.world.after(0.5, lambda: cut(instance, forgotten=forgotten))
    instance.when(has_ended, lambda: instance.api.remove("pods", name))
    capsys.readouterr()
    instance.resume(first_event(trigger))
    written = capsys.readouterr().out
    assert re.search(f"Missing: .* of {name}/|The log of {name}/.* may be incomplete", written), written
