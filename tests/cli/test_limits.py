"""`ktrain run` has the limits of an operator without parameters."""

from __future__ import annotations

from airflow_provider_ktrain.cli.run_host import LIMITS
from airflow_provider_ktrain.operators.training import PyTorchJobOperator


def test_the_limits_are_the_defaults_of_the_operators() -> None:
    assert PyTorchJobOperator(task_id="train", image="registry/train:1")._options({}).limits == LIMITS
