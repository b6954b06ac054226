"""The exceptions that a task raises: one per category of cause, so that `retry_policy` rules can name them.

All are `TrainingJobError`s. Airflow retries all except `TrainingConfigurationError` and `TrainingRequirementError`.

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

retry_policy=ExceptionRetryPolicy(rules=[RetryRule(exception=TrainingUserCodeError, action=RetryAction.FAIL)])
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowTaskTerminated

from airflow_provider_ktrain.core.diagnosis.model import Category, advice_of
from airflow_provider_ktrain.core.errors import ClusterError, KtrainError
from airflow_provider_ktrain.core.text.output import masked, with_short_first_line

#: The exception of each category, in the order of their definition; `unknown` has none of its own.
BY_CATEGORY: dict[Category, type[TrainingJobError]] = {}


class TrainingJobError(AirflowException):
    """A training job did not succeed. The first line of the message is the cause, in at most 200 characters.

    `cause` is the cause as a dict (`core.diagnosis.model.Cause`), empty if there is none. Your own `retry_policy` can
    read from it the `category`, or which `replica` failed.
    """

    cause: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls, category: Category | None = None) -> None:
        super().__init_subclass__()
        if category is not None:
            BY_CATEGORY[category] = cls

    def __init__(self, *args: object) -> None:
        texts = (with_short_first_line(arg) if isinstance(arg, str) else arg for arg in args)
        super().__init__(*masked(tuple(texts)))


class TrainingUserCodeError(TrainingJobError, category=Category.USER_CODE):
    """The program failed with an exception or an exit code, or reported NaN (`fail_on_nan`)."""


class TrainingOutOfMemoryError(TrainingJobError, category=Category.OUT_OF_MEMORY):
    """A container exceeded its memory limit, or a GPU ran out of memory."""


class TrainingEnvironmentError(TrainingJobError, category=Category.ENVIRONMENT):
    """What the job needs is missing (ConfigMap, Secret, volume), its pods are refused, or its operator rejects it.

    A policy, an injected container or a runtime may be the reason, so Airflow retries it.
    """


class TrainingImageError(TrainingJobError, category=Category.IMAGE):
    """An image can't be pulled, or its command can't be started."""


class TrainingSchedulingError(TrainingJobError, category=Category.SCHEDULING):
    """A pod can't be scheduled, or not in time."""


class TrainingQueueError(TrainingJobError, category=Category.QUEUE):
    """The queue did not admit the job in time."""


class TrainingInfrastructureError(TrainingJobError, category=Category.INFRASTRUCTURE):
    """Eviction, preemption, a lost node, a broken GPU, a lost peer, or a pod or job deleted by someone else."""


class TrainingTimeoutError(TrainingJobError, category=Category.TIMEOUT):
    """The job exceeded `execution_timeout` or a deadline in its manifest."""


class TrainingHangError(TrainingJobError, category=Category.HANG):
    """A running job wrote no log line for `log_stall_timeout`, or reported no higher step for `progress_timeout`."""


class TrainingKilledError(TrainingJobError, category=Category.KILLED):
    """A user killed the task, or its worker was stopped (SIGTERM), in which case the job runs on for a retry."""


class TrainingSupersededError(TrainingJobError):
    """Another try of the task now owns the job."""


class TrainingReleaseError(TrainingJobError):
    """The training succeeded, but its pods could not be released and may still hold accelerators.

    Raised only while a retry is left: the retry doesn't train again, but releases the job and returns the result. With
    no retry left, the task succeeds, and its log names the command that deletes the job.
    """


class TrainingRequirementError(TrainingJobError, AirflowFailException):
    """The training succeeded, and what it reached is not what `require` asks for. Never retried: it would be repeated.

    The job is released as after a success. A cleared task trains again.
    """


class TrainingClusterError(TrainingJobError):
    """The cluster can't run the job at present: access, credentials, a permission, a quota, or a missing object.

    It can be fixed without changing the task (the connection, a token, the operator, a namespace, a policy, another job
    with this name), so Airflow retries it.
    """


class TrainingConfigurationError(TrainingJobError, AirflowFailException):
    """The content of the manifest or of a parameter is rejected. Never retried.

    Raised for parameters that can't be valid on any cluster, for a return value that isn't JSON, and if the API server
    (400, 413, 422) or the operator's own webhook answers the creation of the job with a refusal of this manifest.
    """


def failure(cause: Mapping[str, Any], released: str = "") -> TrainingJobError:
    """The exception for a cause: its summary, detail and advice, then the release.

    :param cause: `core.diagnosis.model.Cause` as a dict. A category of a later release raises `TrainingJobError`.
    :param released: one line about the release; empty if nothing was released. Default: "".
    """
    lines = [cause["summary"], cause.get("detail"), advice_of(cause), released]
    error = BY_CATEGORY.get(cause["category"], TrainingJobError)("\n".join(str(line) for line in lines if line))
    error.cause = cause
    return error


def airflow_error(error: KtrainError) -> TrainingJobError:
    """The exception that a task raises for a `KtrainError`, whose `final` decides whether Airflow retries the task."""
    if error.final:
        return TrainingConfigurationError(str(error))
    return TrainingClusterError(str(error)) if isinstance(error, ClusterError) else TrainingJobError(str(error))


@contextlib.contextmanager
def as_airflow_errors() -> Iterator[None]:
    """Raise the provider's errors as Airflow's. Airflow logs the whole chain: it is left out if it can't be shown.

    Airflow fails a task without a retry if it is terminated (apache/airflow#73395), also while it stores an outcome.
    """
    try:
        try:
            yield
        except KtrainError as e:
            raise airflow_error(e) from e
        except AirflowTaskTerminated as e:
            raise TrainingKilledError("Airflow has terminated the task") from e
    except Exception as e:
        texts = [part for part in traceback.format_exception(e) if not part.startswith("  File ")]
        if masked(texts) == texts:
            raise
        error = e if isinstance(e, TrainingJobError) else TrainingJobError(f"{type(e).__name__}: {e}")
        error.__cause__ = None
        raise error from None
