"""The result of a diagnosis: a cause, its category, and the limits that can end a job."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from airflow_provider_ktrain.core.text.output import MAX_FIRST_LINE_CHARS, clipped, masked, shortened

MAX_DETAIL_CHARS = 16 * 1024  #: `Cause.detail` is part of trigger events and of an exception's text.
LAST_LINES = "Last log lines:"  #: What precedes them in a detail.
READ_LOG = "Read the log of {}."  #: The resolution if nothing else is known, with the replica.


class Category(enum.StrEnum):
    """The kind of a failure. It selects the exception that the task raises. None forbids a retry.

    ENVIRONMENT is for what the job needs and what can be fixed before a retry: a ConfigMap, a Secret, a volume, a
    service account, an admission policy, and a manifest that the operator accepts.
    """

    USER_CODE = "user code"
    ENVIRONMENT = "environment"
    IMAGE = "image"
    SCHEDULING = "scheduling"
    INFRASTRUCTURE = "infrastructure"
    OUT_OF_MEMORY = "out of memory"
    QUEUE = "queue"
    TIMEOUT = "timeout"
    HANG = "hang"
    KILLED = "killed"
    UNKNOWN = "unknown"

    @property
    def is_of_cluster(self) -> bool:
        """Whether the cluster couldn't run the job, or lost it: the same job may succeed."""
        return self in (self.ENVIRONMENT, self.IMAGE, self.SCHEDULING, self.INFRASTRUCTURE, self.QUEUE)

    @classmethod
    def of(cls, value: object) -> Category:
        """The category of this name; UNKNOWN for a name of another release."""
        return next((category for category in cls if category == value), cls.UNKNOWN)


@dataclass(frozen=True)
class Cause:
    """Why a job failed. Its texts, which may quote logs, are limited in length and `masked`.

    :param category: see :class:`Category`.
    :param summary: one line: the replica, what happened to it, and the program's own message if there is one.
    :param detail: further evidence: the operator's message, restarts, the last lines of the replica's log. Default: "".
    :param resolution: what the user should do; empty if unknown. Default: "".
    :param replica: for example `Worker 3`; empty if the cause concerns the whole job. Default: "".
    :param failed_nodes: nodes that failed, by name, each with the reason. Default: none.
    :param last_lines: the end of the replica's log, which the detail quotes as well. Not part of `as_dict`. Default:
        none.
    :param unquoted: the summary without the words of a log that it quotes. Not part of `as_dict`. Default: the summary.
    """

    category: Category
    summary: str
    detail: str = ""
    resolution: str = ""
    replica: str = ""
    failed_nodes: Mapping[str, str] = field(default_factory=dict)
    last_lines: tuple[str, ...] = ()
    unquoted: str = ""

    def __post_init__(self) -> None:
        for name in ("resolution", "failed_nodes", "last_lines"):
            object.__setattr__(self, name, masked(getattr(self, name)))
        object.__setattr__(self, "unquoted", clipped(masked(self.unquoted or self.summary)))
        object.__setattr__(self, "summary", clipped(masked(self.summary)))
        object.__setattr__(self, "detail", clipped(masked(self.detail), MAX_DETAIL_CHARS))

    def __str__(self) -> str:
        return "\n".join(text for text in (self.summary, self.detail, self.resolution) if text)

    def with_summary(self, phrase: Callable[[str], str]) -> Cause:
        """The same cause with another summary.

        :param phrase: makes it of the present one, and of the one that quotes no log.
        """
        return replace(self, summary=phrase(self.summary), unquoted=phrase(self.unquoted))

    def with_short_summary(self) -> Cause:
        """The same cause with a summary of at most MAX_FIRST_LINE_CHARS; a longer one moves to the detail."""
        summary = " ".join(self.summary.split())
        if len(summary) <= MAX_FIRST_LINE_CHARS:
            return replace(self, summary=summary)
        detail = "\n".join(text for text in (summary, self.detail) if text)
        return replace(self, summary=shortened(summary), detail=detail)

    def as_dict(self) -> dict[str, Any]:
        """The cause as it is stored in XComs and trigger events."""
        fields = asdict(self) | {"category": str(self.category)}
        del fields["last_lines"], fields["unquoted"]
        return fields


def advice_of(cause: Mapping[str, Any]) -> str:
    """The resolution of a cause as a dict; empty if it is to read the log whose end the detail quotes."""
    resolution = str(cause.get("resolution") or "")
    is_quoted = LAST_LINES in str(cause.get("detail") or "")
    return "" if is_quoted and resolution == READ_LOG.format(cause.get("replica")) else resolution
