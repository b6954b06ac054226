"""The words in which a failure is told: its category, its cause, the limit that ended it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.text import clean, clipped

DETAIL = 16 * 1024  #: characters of `Cause.detail`, which travels in events and is an exception's text


class Category(enum.StrEnum):
    """What kind of thing went wrong: which exception is raised, and whom it concerns.

    CONFIGURATION forbids a retry, so it needs proof: the API server, or the operator, refuses this manifest.
    ENVIRONMENT is what the job needs around it and what may be put right before a retry: a ConfigMap, a Secret, a
    volume, a service account, an admission policy.
    """

    USER_CODE = "user code"
    CONFIGURATION = "configuration"
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


@dataclass(frozen=True)
class Cause:
    """Why a job failed. Its texts are `clean` and `clipped`, whatever logs and messages they were taken from.

    :param category: see :class:`Category`.
    :param summary: one line: who, what, and the program's own words where there are any.
    :param detail: what else was seen: the operator's message, restarts, the last lines of the replica's log.
    :param resolution: what to do; empty where nobody can say.
    :param replica: `Worker 3`; empty where it is the whole job's.
    :param retryable: whether the same job, submitted again, may succeed. False only where the API server, the kubelet
        or the operator refused what the manifest says.
    """

    category: Category
    summary: str
    detail: str = ""
    resolution: str = ""
    replica: str = ""
    retryable: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", clean(clipped(self.summary)))
        object.__setattr__(self, "detail", clean(clipped(self.detail, DETAIL)))

    def __str__(self) -> str:
        return "\n".join(text for text in (self.summary, self.detail, self.resolution) if text)


class Limit(enum.StrEnum):
    """The limits that a task sets; see the operators' parameters of these names."""

    QUEUE = "queue_timeout"
    SCHEDULE = "schedule_timeout"
    STARTUP = "startup_timeout"
    EXECUTION = "execution_timeout"
    LOG_STALL = "log_stall_timeout"
    RESTARTS = "max_restarts"
    CRASH_LOOP = "crash_loop_limit"


def as_dict(cause: Cause) -> dict[str, Any]:
    """For XCom and events of triggers."""
    return {"category": str(cause.category)} | {
        k: getattr(cause, k) for k in ("summary", "detail", "resolution", "replica", "retryable")
    }
