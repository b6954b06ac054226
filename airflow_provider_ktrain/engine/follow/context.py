"""What the parts that follow one job share."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.follow.options import FollowPolicy, Options
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.watch.wakeup import Wakeup


@dataclass(frozen=True)
class FollowContext:
    """What the parts that follow one job share.

    :param state: the job as last observed, and what the process that followed it before has handed over.
    :param cursor: positions in the logs, updated in place. Default: the beginning of each log.
    :param news: set when a watch has changes. Default: a new one.
    """

    api: Api
    state: JobState
    log: Log
    options: Options = field(default_factory=Options)
    policy: FollowPolicy = field(default_factory=FollowPolicy)
    cursor: Cursor = field(default_factory=Cursor)
    news: Wakeup = field(default_factory=Wakeup)
