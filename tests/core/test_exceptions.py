"""A cause becomes the exception that `retry_policy` rules name."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ktrain.core.cause import Category, Cause
from airflow_provider_ktrain.core.diagnosis import as_dict
from airflow_provider_ktrain.exceptions import BY_CATEGORY, TrainingJobError, failure


@pytest.mark.parametrize("category", Category)
def test_each_category_has_its_exception_and_carries_the_cause(category: Category) -> None:
    error = failure(as_dict(Cause(category, "why", "more", "do this", "Worker 3", retryable=False)), "2 GPUs released")
    assert str(error).splitlines() == ["why", "more", "do this", "2 GPUs released"]
    assert type(error) is BY_CATEGORY.get(category, TrainingJobError)
    assert isinstance(error, AirflowFailException) is (category is Category.CONFIGURATION)
    assert (error.cause["replica"], error.cause["retryable"]) == ("Worker 3", False)
