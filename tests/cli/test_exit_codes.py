"""The exit code of `ktrain run` for each category of causes."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.cli.exit_codes import ExitCode, of_cause
from airflow_provider_ktrain.core.diagnosis.model import Category

OF_CLUSTER = {"environment", "image", "scheduling", "infrastructure", "queue"}


@pytest.mark.parametrize("category", Category)
def test_exit_code_says_whether_the_cluster_or_the_program_is_the_reason(category: Category) -> None:
    of_program = ExitCode.TIMEOUT if category is Category.TIMEOUT else ExitCode.FAILED
    assert of_cause({"category": str(category)}) == (ExitCode.NOT_RUN if category in OF_CLUSTER else of_program)


@pytest.mark.parametrize("cause", [None, {}, {"category": "of a later release"}])
def test_unknown_causes_are_failures(cause: dict[str, str] | None) -> None:
    assert of_cause(cause) == ExitCode.FAILED
