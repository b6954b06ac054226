"""Errors that core and engine raise. Their texts contain what was found, what was expected and what to do.

`exceptions.airflow_error` converts them to the exceptions that a task raises. Only the attribute `final` decides
whether a task may be retried:

| final | error | because |
|---|---|---|
| yes | ManifestError | a manifest or parameter that can't be valid; a create refused for what is in the manifest |
| no | ManifestUnreadableError, VersionNotServedError | the file may appear, the cluster may be upgraded |
| no | RuntimeMismatchError | the training runtime may be created or changed, the Trainer may be upgraded |
| no | ClusterError and its subclasses | access, credentials, rights, quotas and other objects change without the task |
| no | every other KtrainError | nothing proves that another try can't succeed |
"""

from __future__ import annotations

from typing import ClassVar

from airflow_provider_ktrain.core.text.output import MAX_FIRST_LINE_CHARS, SUGGESTION, masked


class KtrainError(Exception):
    """Base of every error of this project. Its text is `masked`: it may quote a response, and is logged and stored."""

    final: ClassVar[bool] = False  #: Whether no other try of the same task can succeed: then it is not retried.

    def __init__(self, *args: object) -> None:
        super().__init__(*masked(args))


class ManifestError(KtrainError):
    """A manifest or a parameter that can't be submitted as it is.

    A remedy that suggests a word ("did you mean ...") comes first. The parts of the text that would make its first line
    longer than MAX_FIRST_LINE_CHARS have lines of their own.

    :param where: file and line, or JSON path.
    """

    final = True

    def __init__(self, message: str, *, where: str = "", found: str = "", expected: str = "", remedy: str = "") -> None:
        self.message = message
        self.where, self.found, self.expected, self.remedy = where, found, expected, remedy
        suggestion, _, rest = remedy.partition("\n") if remedy.startswith(SUGGESTION) else ("", "", "")
        message = f"{suggestion} {message}" if suggestion else message
        details = (("found ", found), ("expected ", expected), ("remedy: ", "" if suggestion else remedy))
        parts = [f"{where}: {message}" if where else message, *(f"{label}{text}" for label, text in details if text)]
        lines = [parts[0]]
        for part in parts[1:]:
            longer = f"{lines[0]}; {part}"
            if len(lines) == 1 and len(longer.partition("\n")[0]) <= MAX_FIRST_LINE_CHARS:
                lines = [longer]
            else:
                lines.append(part)
        super().__init__("\n".join([*lines, rest] if suggestion and rest else lines))


class ManifestUnreadableError(ManifestError):
    """The manifest's file is missing or can't be read: a DAG bundle or a volume may be incomplete for now."""

    final = False


class VersionNotServedError(ManifestError):
    """The manifest is written for an API version that this cluster does not serve now."""

    final = False


class ClusterError(KtrainError):
    """The cluster rejects a request for a reason that isn't in the manifest."""


class RuntimeMismatchError(ManifestError, ClusterError):
    """The job doesn't fit the training runtime or the Trainer of this cluster as they are now."""

    final = False


class UnreachableError(ClusterError):
    """The API server does not answer at all."""


class AccessError(ClusterError):
    """Credentials are refused, or a right is missing: the message names verb, resource and the remedy."""


class NoRightError(AccessError):
    """The API server knows the user and denies the right (403). Rejected credentials (401) don't prove this."""


class OperatorMissingError(ClusterError):
    """The cluster does not serve the job's kind: no operator is installed."""


class ForeignJobError(ClusterError):
    """The job's name is taken by a job that is not this task's. It may be deleted before the next try."""
