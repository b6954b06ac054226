"""A model of Airflow: one task instance and its tries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from airflow_provider_ktrain.core.adoption import first_try_since_clear
from airflow_provider_ktrain.core.identity import JobRef, Owner
from tests.engine.model_cluster import KEY, Client

RETRIES = 2


@dataclass
class Try:
    """One try of the task, with its processes."""

    owner: Owner
    began: int  # first try since the task was cleared
    first: int  # the same, as the task computes it
    ref: JobRef | None = None
    client: Client | None = None  # of its process
    process: asyncio.Task[None] | None = None
    others: list[asyncio.Task[None]] = field(default_factory=list)
    killed: bool = False  # a kill has released the job of this try

    @property
    def name(self) -> str:
        return self.owner.ti_id


class Airflow:
    """One task instance: its state, its tries, and Airflow's rules for starting the next try."""

    def __init__(self) -> None:
        self.state = "none"  # none, running, up_for_retry, success, failed
        self.try_number = 0
        self.max_tries = RETRIES
        self.tries: list[Try] = []

    @property
    def current(self) -> Try:
        return self.tries[-1]

    def start(self, retries: int = RETRIES) -> Try:
        """Start the next try. `retries` in the DAG file may have changed."""
        self.try_number += 1
        self.state = "running"
        began, first = (
            min(first_try_since_clear(self.max_tries, value), self.try_number) for value in (RETRIES, retries)
        )
        self.tries.append(Try(Owner(KEY, self.try_number, f"ti-{self.try_number}", self.max_tries), began, first))
        return self.current

    def end(self, ended: Try, succeeded: bool) -> None:
        """A try reports its end. Airflow ignores the report of any try but the current one."""
        if ended is self.current and self.state == "running":
            again = self.try_number <= self.max_tries
            self.state = "success" if succeeded else "up_for_retry" if again else "failed"

    def clear(self) -> None:
        """Clear the task. Nothing else changes max_tries, and clearing a running task doesn't change it."""
        if self.state != "running":
            self.max_tries = self.try_number + RETRIES
        self.state = "none"
