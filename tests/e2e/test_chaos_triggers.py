"""`make chaos`: triggers that can't be loaded, or that get the arguments of another release. No job is changed."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.e2e.airflow import ROOT, Airflow
from tests.e2e.chaos import airflow, begin, check_end, cluster, triggerers
from tests.e2e.scenario import Begin

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

MISSING = "No module named 'airflow_provider_ktrain.triggers'"


@pytest.fixture
def without_triggers(tmp_path: pathlib.Path) -> dict[str, str]:
    """The environment of a component in which the provider's triggers can't be imported.

    The rest of the provider stays: Airflow reads its entry points at startup, and fails if they can't be imported.
    """
    package = tmp_path / "airflow_provider_ktrain"
    (package / "triggers").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / package.name)!r})\n")
    (package / "triggers" / "__init__.py").write_text(f"raise ModuleNotFoundError({MISSING!r})\n")
    # safe path: `python -m` would put the working directory, which is the repository, before it
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "PYTHONSAFEPATH": "1"}


def test_task_ends_although_the_triggerer_cannot_import_the_trigger(
    begin: Begin, triggerers: Airflow, without_triggers: dict[str, str]
) -> None:
    """Airflow answers with `__fail__`. The worker follows the job until a triggerer can load the trigger."""
    triggerers.end("triggerer")
    triggerers.run("triggerer", **without_triggers)
    stage = begin("chaos_defers_again", seconds=60)
    stage.wait_line(f"The trigger failed: ModuleNotFoundError: {MISSING}")
    stage.wait_line("This worker follows PyTorchJob")
    assert stage.gpus() == 2
    triggerers.end("triggerer")
    triggerers.run("triggerer")
    # Airflow 3.3 may fail a try whose trigger ends within a second of the deferral: then a retry continues with the job
    number = stage.wait_state("success")["try_number"]
    check_end(stage, "success", try_number=number)
    stage.check_lines(60, number)


def test_trigger_accepts_arguments_of_an_earlier_release(begin: Begin, airflow: Airflow) -> None:
    """The worker hasn't been upgraded yet; the triggerer has."""
    stage = begin("chaos_earlier_release", seconds=20)
    stage.wait_followed()
    check_end(stage, "success")
    stage.check_lines(20)
    assert "The trigger failed" not in stage.log()
