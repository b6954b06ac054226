"""Errors that core raises: typed, with what was expected, what was found, what to do.

Faces to Airflow turn them into Airflow's exceptions (`exceptions.py`, by `hooks/worker.py`).
"""

from __future__ import annotations

from airflow_provider_ktrain.core.text import clean


class KtrainError(Exception):
    """Base of every error of this project. Its text is `clean`: it may quote a response, and is logged and stored."""

    def __init__(self, *args: object) -> None:
        super().__init__(*clean(args))


class ManifestError(KtrainError):
    """A manifest that cannot be submitted as it is.

    :param message: what is wrong, naming the field.
    :param where: file and line, or JSON path.
    :param found: what is there.
    :param expected: what should be there.
    :param remedy: what to do about it.
    """

    def __init__(self, message: str, *, where: str = "", found: str = "", expected: str = "", remedy: str = "") -> None:
        self.message = message
        self.where, self.found, self.expected, self.remedy = where, found, expected, remedy
        details = "".join(
            f"; {label}{text}"
            for label, text in (("found ", found), ("expected ", expected), ("remedy: ", remedy))
            if text
        )
        super().__init__(f"{where}: {message}{details}" if where else f"{message}{details}")


class UnknownKindError(ManifestError):
    """A kind that is no training job that we know."""


class ClusterError(KtrainError):
    """The cluster answers a request with an error that is not the manifest's fault."""


class UnreachableError(ClusterError):
    """The API server does not answer at all."""


class AccessError(ClusterError):
    """Credentials are refused, or a right is missing: the message names verb, resource and the remedy."""


class OperatorMissingError(ClusterError):
    """The cluster does not serve the job's kind: no operator is installed."""


class ForeignJobError(KtrainError):
    """The job's name is taken by a job that is not this task's."""
