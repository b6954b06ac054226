"""What a task raises: one exception per category of cause, so that `retry_policy` rules can name them.

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

retry_policy=ExceptionRetryPolicy(rules=[RetryRule(exception=TrainingUserCodeError, action=RetryAction.FAIL)])
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_provider_ktrain.core.text import clean


class TrainingJobError(AirflowException):
    """A training job that did not succeed. The first line says why.

    `cause` is `core.cause.Cause` as a dict, empty where there is none: a `retry_policy` of your own may ask it whether
    the cause is `retryable`, or which `replica` failed.
    """

    cause: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *args: object) -> None:
        super().__init__(*clean(args))  # Airflow logs the text, and its log refuses half of a surrogate pair


class TrainingUserCodeError(TrainingJobError):
    """The program failed: exit code, traceback."""


class TrainingOutOfMemoryError(TrainingJobError):
    """A container exceeded its memory limit, or a GPU's memory is used up."""


class TrainingEnvironmentError(TrainingJobError):
    """What the job needs around it is missing or refused: a ConfigMap, a Secret, a volume, an account, a policy."""


class TrainingImageError(TrainingJobError):
    """An image cannot be pulled or started."""


class TrainingSchedulingError(TrainingJobError):
    """No node takes a pod, or not in time."""


class TrainingQueueError(TrainingJobError):
    """No queue admitted the job in time."""


class TrainingInfrastructureError(TrainingJobError):
    """Eviction, preemption, a lost node, a broken GPU, a lost peer, a pod or job deleted by somebody else."""


class TrainingTimeoutError(TrainingJobError):
    """`execution_timeout`, or a deadline of the manifest's, has passed."""


class TrainingHangError(TrainingJobError):
    """The job ran, and no replica that is followed wrote a line for `log_stall_timeout`."""


class TrainingKilledError(TrainingJobError):
    """The task was killed: by a user, by a timeout of Airflow's, or with its worker."""


class TrainingSupersededError(TrainingJobError):
    """Another try of the task owns the job by now."""


class TrainingReleaseError(TrainingJobError, AirflowFailException):
    """The training succeeded (its result is in XCom), but its pods could not be released: they may still hold GPUs.

    Never retried: that would train again.
    """


class TrainingConfigurationError(AirflowFailException):
    """The manifest, the task's parameters or the cluster's set-up: trying again does not help, so it is not retried."""

    cause: Mapping[str, Any] = MappingProxyType({})


BY_CATEGORY: Mapping[str, type[TrainingJobError | TrainingConfigurationError]] = {
    "user code": TrainingUserCodeError,
    "configuration": TrainingConfigurationError,
    "environment": TrainingEnvironmentError,
    "image": TrainingImageError,
    "scheduling": TrainingSchedulingError,
    "infrastructure": TrainingInfrastructureError,
    "out of memory": TrainingOutOfMemoryError,
    "queue": TrainingQueueError,
    "timeout": TrainingTimeoutError,
    "hang": TrainingHangError,
    "killed": TrainingKilledError,
}


def failure(cause: Mapping[str, Any], released: str = "") -> TrainingJobError | TrainingConfigurationError:
    """The exception of a cause (`core.diagnosis.Cause` as a dict): summary first, then detail, remedy, release."""
    lines = [cause["summary"], cause.get("detail"), cause.get("resolution"), released]
    error = BY_CATEGORY.get(cause["category"], TrainingJobError)("\n".join(str(line) for line in lines if line))
    error.cause = cause
    return error
