"""The exit codes of `ktrain run`. docs/how-to/run.md lists them."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.errors import KtrainError, ManifestError


class ExitCode(enum.IntEnum):
    """How the command ended. 128 + the number of a signal if it was interrupted."""

    SUCCEEDED = 0
    FAILED = 1  #: The program failed, ran out of memory or stopped writing log lines.
    INVALID = 2  #: The command line or the manifest is invalid.
    NOT_RUN = 3  #: The cluster couldn't run the job, or lost it: the same job may succeed.
    CLUSTER = 4  #: The cluster can't be reached or rejects a request, or the job could not be deleted.
    TIMEOUT = 124  #: A limit has passed. The command timeout(1) has the same code.


def of_cause(cause: Mapping[str, Any] | None) -> int:
    """The exit code of a failed training."""
    category = Category.of((cause or {}).get("category"))
    if category is Category.TIMEOUT:
        return ExitCode.TIMEOUT
    return ExitCode.NOT_RUN if category.is_of_cluster else ExitCode.FAILED


def of_error(error: KtrainError) -> int:
    """The exit code of an error that is not about a training."""
    return ExitCode.INVALID if isinstance(error, ManifestError) else ExitCode.CLUSTER


def of_signal(number: int) -> int:
    """The exit code of a command that a signal interrupted, as a shell reports it."""
    return 128 + signal.Signals(number)
