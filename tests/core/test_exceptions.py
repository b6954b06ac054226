"""Each cause raises the exception that `retry_policy` rules can match."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ktrain import exceptions
from airflow_provider_ktrain.core import errors
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.exceptions import (
    TrainingClusterError,
    TrainingConfigurationError,
    TrainingJobError,
    TrainingReleaseError,
    airflow_error,
    failure,
)

EXCEPTIONS = {
    Category.USER_CODE: "TrainingUserCodeError",
    Category.ENVIRONMENT: "TrainingEnvironmentError",
    Category.IMAGE: "TrainingImageError",
    Category.SCHEDULING: "TrainingSchedulingError",
    Category.INFRASTRUCTURE: "TrainingInfrastructureError",
    Category.OUT_OF_MEMORY: "TrainingOutOfMemoryError",
    Category.QUEUE: "TrainingQueueError",
    Category.TIMEOUT: "TrainingTimeoutError",
    Category.HANG: "TrainingHangError",
    Category.KILLED: "TrainingKilledError",
    Category.UNKNOWN: "TrainingJobError",
}


@pytest.mark.parametrize("category", Category)
def test_each_category_has_its_exception_and_carries_the_cause(category: Category) -> None:
    error = failure(Cause(category, "why", "more", "do this", "Worker 3").as_dict(), "2 GPUs released")
    assert str(error).splitlines() == ["why", "more", "do this", "2 GPUs released"]
    assert type(error) is getattr(exceptions, EXCEPTIONS[category])
    assert not isinstance(error, AirflowFailException), "what ended a job never forbids a retry"
    assert error.cause["replica"] == "Worker 3"


def test_a_category_of_a_later_release_raises_the_base_class() -> None:
    error = failure({"category": "of a later release", "summary": "why"})
    assert (type(error), str(error)) == (TrainingJobError, "why")


def test_pods_that_are_left_after_a_success_do_not_forbid_the_retry() -> None:
    assert not issubclass(TrainingReleaseError, AirflowFailException)


def test_all_exceptions_of_a_task_have_one_base() -> None:
    raised = [e for e in vars(exceptions).values() if isinstance(e, type) and e.__module__ == exceptions.__name__]
    assert len(raised) > 10
    assert all(issubclass(e, TrainingJobError) for e in raised)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errors.ManifestError("replicas"), TrainingConfigurationError),
        (errors.ManifestUnreadableError("job.yaml"), TrainingJobError),
        (errors.VersionNotServedError("v1"), TrainingJobError),
        (errors.RuntimeMismatchError("no such runtime"), TrainingClusterError),
        (errors.ClusterError("a quota"), TrainingClusterError),
        (errors.UnreachableError("no answer"), TrainingClusterError),
        (errors.AccessError("401"), TrainingClusterError),
        (errors.OperatorMissingError("no CRD"), TrainingClusterError),
        (errors.ForeignJobError("the name is taken"), TrainingClusterError),
        (errors.KtrainError("anything"), TrainingJobError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_which_errors_are_final(error: errors.KtrainError, raised: type[TrainingJobError]) -> None:
    made = airflow_error(error)
    assert type(made) is raised
    assert isinstance(made, AirflowFailException) is error.final
    assert str(made) == str(error)
