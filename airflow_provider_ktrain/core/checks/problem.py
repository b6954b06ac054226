"""What a check reports. Checks of parameters need only this when a DAG is parsed."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.text.output import SUGGESTION

NAMESPACE = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
NAMESPACE_FORMAT = "up to 63 lower-case letters, digits and -"


class Level(enum.StrEnum):
    """How serious a problem is."""

    ERROR = "error"  #: The cluster or the operator would refuse the job or never run it.
    WARNING = "warning"  #: The job runs, but probably not as intended.


ERROR, WARNING = Level.ERROR, Level.WARNING


@dataclass(frozen=True)
class Problem:
    """One problem of a manifest, a parameter or the cluster.

    :param code: identifier of the rule: `container-name`.
    :param path: JSON path: `$.spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].image`.
    :param expected: what would be right.
    :param hint: what to do.
    """

    level: Level
    code: str
    path: str
    message: str
    found: str = ""
    expected: str = ""
    hint: str = ""

    @classmethod
    def of(cls, code: str, error: ManifestError, path: str = "$") -> Problem:
        """The problem that an error states.

        :param path: used if the error names none. Default: the manifest.
        """
        where = error.where or path
        return cls(Level.ERROR, code, where, error.message, error.found, error.expected, error.remedy)

    def __str__(self) -> str:
        return f"{self.level} {self.text}"

    @property
    def text(self) -> str:
        """Everything but the level, for logs that have a level of their own."""
        suggested = self.hint.startswith(SUGGESTION)
        message = f"{self.hint} {self.message}" if suggested else self.message
        parts = (("found ", self.found), ("expected ", self.expected), ("", "" if suggested else self.hint))
        details = "".join(f"; {label}{text}" for label, text in parts if text)
        return f"{self.code} at {self.path}: {message}{details}"


def raise_errors(problems: Iterable[Problem]) -> None:
    """:raises ManifestError: if one of the problems is an error; it names all errors, one a line."""
    errors = [p for p in problems if p.level is Level.ERROR]
    if not errors:
        return
    first = errors[0]
    more = "".join(f"\n  {p}" for p in errors[1:])
    raise ManifestError(
        first.message, where=first.path, found=first.found, expected=first.expected, remedy=first.hint + more
    )
