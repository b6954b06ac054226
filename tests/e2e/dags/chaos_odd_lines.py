"""DAG of the tests in which Airflow's supervisor reads a log slowly, stops or goes away: odd and long lines."""

import os
from typing import Any

import pendulum
from airflow.sdk import DAG, BaseOperator

from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from tests.e2e.loop_probe import LoopProbe
from tests.e2e.odd_lines import PROGRAM


class Probe(BaseOperator):
    """Measures the event loop of the triggerer."""

    template_fields = ("file",)

    def __init__(self, *, file: str, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.file = file

    def execute(self, context: Any) -> None:
        self.defer(trigger=LoopProbe(file=self.file), method_name="end")

    def end(self, context: Any, event: Any = None) -> None:
        """The probe was stopped."""


with DAG("chaos_odd_lines", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), tags=["chaos"]):
    Probe(task_id="probe", file='{{ dag_run.conf["probe"] }}')
    PyTorchJobOperator(
        task_id="train",
        image=os.environ.get("TEST_IMAGE", "scratch"),
        command=["sh", "-c", PROGRAM.replace("STEPS", os.environ.get("CHAOS_STEPS", "/none"))],
        gpus=1,
    )
