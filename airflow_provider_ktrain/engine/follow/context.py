"""What the parts that follow one job share."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.watch.wakeup import Wakeup


@dataclass(frozen=True)
class FollowContext:
    """What the parts that follow one job share.

    :param state: the job as last observed, and what the process that followed it before has handed over.
    :param fail_fast: fail if a watch is rejected (401, 403) in the first minute: for a job that was just created, or
        that isn't ours to release. Any other job was followed before, and an API server may reject requests for a while
        after its restart. Default: False.
    :param cursor: positions in the logs, updated in place. Default: the beginning of each log.
    :param news: set when a watch has changes. Default: a new one.
    """

    api: Api
    state: JobState
    log: Log
    options: Options = field(default_factory=Options)
    host: Host = field(default_factory=Host)
    fail_fast: bool = False
    cursor: Cursor = field(default_factory=Cursor)
    news: Wakeup = field(default_factory=Wakeup)


class Part:
    """One of the parts that follow a job: it observes, says when it is due, and closes."""

    @property
    def due(self) -> float | None:
        """When to look again although nothing has changed, by `timing.now`; None: not at all."""
        return None

    async def observe(self) -> None:
        """Look at the job as it is now, and log or publish what is new."""

    async def close(self) -> None:
        """Give up what is open."""
