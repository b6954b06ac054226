"""The process in which the owner of a training works: worker, trigger or terminal. It is data, not code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from airflow_provider_ktrain.core.ending import Successor
from airflow_provider_ktrain.engine.follow.options import FollowPolicy


@dataclass(frozen=True)
class Host:
    """What differs between the processes in which a training is owned.

    :param seconds: that the process may still take when it was asked to stop, or when the deadline has passed. Default:
        None, as long as it needs.
    :param ask_state: returns the task's state in Airflow, in at most the given seconds; empty if there is no answer.
        Default: None: there is no task, and only the user asks the process to stop.
    :param successor: who continues with the job when this process stops while its task goes on. Default: nobody.
    :param patience: seconds for which the task's state is asked for again while it decides nothing. Default: 0.
    :param policy: how the job is followed, and where statuses and conclusions go. Default: as in a worker, nowhere.
    """

    seconds: float | None = None
    ask_state: Callable[[float], Awaitable[str]] | None = None
    successor: Successor = Successor.NOBODY
    patience: float = 0.0
    policy: FollowPolicy = field(default_factory=FollowPolicy)
