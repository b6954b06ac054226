"""What a task raises: one exception per category of cause, so that `retry_policy` rules can name them.

All are `TrainingJobError`s. Airflow retries all of them but `TrainingConfigurationError` and `TrainingReleaseError`.

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

retry_policy=ExceptionRetryPolicy(rules=[RetryRule(exception=TrainingUserCodeError, action=RetryAction.FAIL)])
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_provider_ktrain.core.errors import ClusterError, KtrainError
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
    """The task was killed by a user, or its worker was stopped (SIGTERM): then the job is kept for a retry."""


class TrainingSupersededError(TrainingJobError):
    """Another try of the task owns the job by now."""


class TrainingReleaseError(TrainingJobError, AirflowFailException):
    """The training succeeded (its result is in XCom), but its pods could not be released: they may still hold GPUs.

    Never retried: that would train again.
    """


class TrainingClusterError(TrainingJobError):
    """The cluster cannot run the job as things are: access, credentials, a right, a quota, or a missing object.

    It may be put right without a change to the task: the connection, a token, the operator, a namespace, a policy, a
    job that has this job's name. So Airflow retries it.
    """


class TrainingConfigurationError(TrainingJobError, AirflowFailException):
    """The manifest or a parameter is refused for what stands in it. Never retried.

    Raised for parameters that cannot be valid on any cluster, and where the API server (400, 413, 422) or the
    operator's own validation refuses this manifest.
    """


BY_CATEGORY: Mapping[str, type[TrainingJobError]] = {
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


def failure(cause: Mapping[str, Any], released: str = "") -> TrainingJobError:
    """The exception of a cause: summary first, then detail, remedy, release.

    :param cause: `core.cause.Cause` as a dict.
    :param released: what was released, one line; empty where nothing was.
    """
    lines = [cause["summary"], cause.get("detail"), cause.get("resolution"), released]
    error = BY_CATEGORY.get(cause["category"], TrainingJobError)("\n".join(str(line) for line in lines if line))
    error.cause = cause
    return error


def airflow_error(error: KtrainError) -> TrainingJobError:
    """The exception that a task raises for an error of ours; `KtrainError.final` decides whether it is retried."""
    if error.final:
        return TrainingConfigurationError(str(error))
    return TrainingClusterError(str(error)) if isinstance(error, ClusterError) else TrainingJobError(str(error))
