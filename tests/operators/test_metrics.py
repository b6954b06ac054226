"""The metrics that a task reports to Airflow when it ends, collected by a backend like Airflow's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from airflow.sdk.observability import stats

from airflow_provider_ktrain.core.reporting.task_metrics import PREFIX
from airflow_provider_ktrain.exceptions import TrainingUserCodeError
from tests.core.test_task_metrics import KNOWN
from tests.operators.task_instance import Instance
from tests.operators.virtual_instance import VirtualInstance


class Kept:
    """Gauges by name, with their tags, and what was added to counters."""

    def __init__(self) -> None:
        self.gauges: dict[str, tuple[float, dict[str, str]]] = {}
        self.counted: list[tuple[str, int, str]] = []  # name, number, cause

    def incr(self, stat: str, count: int = 1, rate: float = 1, **more: Any) -> None:
        tags = more.get("tags") or {}
        if stat.startswith(PREFIX):
            self.counted.append((stat.removeprefix(PREFIX), count, tags.get("cause", "")))

    def gauge(self, stat: str, value: float, rate: float = 1, delta: bool = False, **more: Any) -> None:
        self.gauges[stat] = (value, more.get("tags", {}))

    def timer(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        """Ignore times: other providers in this process measure some."""
        return contextlib.nullcontext()


@pytest.fixture
def kept() -> Iterator[Kept]:
    backend = Kept()
    initialize(lambda: backend)
    yield backend
    initialize(Kept)


def initialize(factory: Callable[[], Any]) -> None:
    if hasattr(stats, "initialize"):
        stats.initialize(factory=factory, export_legacy_names=False)
    else:  # Airflow 3.2
        legacy: Any = stats.Stats
        legacy.initialize(factory=factory)


@pytest.mark.embedded("needs the scripted API server")
def test_task_reports_seconds_gpus_and_log_counts(instance: VirtualInstance, kept: Kept) -> None:
    instance.api.slow("before POST", 0.25)
    instance.execute(command=["sh", "-c", "echo one; echo two; sleep 1"], deferrable=False)
    values = {name.removeprefix("ktrain."): value for name, (value, _) in kept.gauges.items()}
    assert values["gpus"] == 1
    assert values["log.lines"] == 2
    assert values["gpu_seconds.held"] >= 1
    assert values["seconds.running"] == pytest.approx(1.0, abs=0.1)
    assert values["seconds.submit"] == 0.25
    assert values["seconds.release"] >= 0  # a job whose pods have ended needs no request
    assert all(tags == {"dag_id": "dag", "task_id": "train"} for _, tags in kept.gauges.values())
    assert values.keys() <= KNOWN.keys()
    assert kept.counted[0] == ("succeeded", 1, "")
    assert {name for name, _, _ in kept.counted[1:]} <= {"gpu_time.held", "gpu_time.wasted", "gpu_time.queued"}


def test_a_failed_try_is_counted_by_cause_and_its_stored_success_once(instance: Instance, kept: Kept) -> None:
    with pytest.raises(TrainingUserCodeError):
        instance.execute(command=["false"], gpus=None, deferrable=False, retries=2)
    instance.execute(number=2, command=["true"], gpus=None, deferrable=False, retries=2)
    instance.execute(number=3, command=["true"], gpus=None, deferrable=False, retries=2)  # returns what is stored
    assert kept.counted == [("failed", 1, "user_code"), ("succeeded", 1, "")]
