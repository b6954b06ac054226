"""A result that is printed before the deferral and doesn't fit into the trigger's arguments."""

from __future__ import annotations

import json

import pytest

from airflow_provider_ktrain.core.reporting.trigger_arguments import MAX_BYTES
from tests.operators.task_instance import Instance, of_each_kind

TEXT = "\u0451" * 20_000  # 40 KB, as JSON with escaped characters 120 KB


@of_each_kind
def test_large_result_survives_the_deferral(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "10")
    printed = json.dumps({"text": TEXT}, ensure_ascii=False)
    deferred = instance.execute(command=["sh", "-c", f"echo 'KTRAIN_RESULT {printed}'; sleep 20"])
    _, arguments = deferred.trigger.serialize()
    assert len(json.dumps(arguments)) <= MAX_BYTES
    assert arguments["handover"]["result_from"], "the result was printed before the deferral"
    assert not arguments["handover"]["result_line"]
    assert instance.resume(instance.event(deferred)) == {"text": TEXT}
    assert not instance.jobs()
