"""A result that is printed before the deferral and doesn't fit into the trigger's arguments."""

from __future__ import annotations

import asyncio
import json
import pathlib

import pytest

from airflow_provider_ktrain.core.reporting.trigger_arguments import MAX_BYTES
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.operators.task_instance import Instance, of_each_kind

pytestmark = pytest.mark.embedded("its programs see the files of this machine")
TEXT = "\u0451" * 20_000  # 40 KB, as JSON with escaped characters 120 KB


@of_each_kind
def test_large_result_survives_the_deferral(
    instance: Instance, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "10")
    end = tmp_path / "end"
    printed = json.dumps({"text": TEXT}, ensure_ascii=False)
    program = f"echo 'KTRAIN_RESULT {printed}'; until [ -e {end} ]; do sleep 0.1; done"
    deferred = instance.execute(command=["sh", "-c", program])
    _, arguments = deferred.trigger.serialize()
    assert len(json.dumps(arguments)) <= MAX_BYTES
    assert arguments["handover"]["result_from"], "the result was printed before the deferral"
    assert not arguments["handover"]["result_line"]
    end.touch()

    async def fire() -> dict[str, object]:
        payload = (await anext(aiter(TrainingJobTrigger(**arguments).run()))).payload
        assert isinstance(payload, dict)
        return payload

    assert instance.resume(asyncio.run(fire())) == {"text": TEXT}
    assert not instance.jobs()
