"""A model of Airflow: one task instance and its tries, what they have stored, and the status XCom."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.identity.adoption import first_try_since_clear
from airflow_provider_ktrain.core.identity.names import JobRef, Owner
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.engine.model_cluster import KEY

RETRIES = 2
OVER = ("success", "failed")


@dataclass
class Deferral:
    """The arguments of a trigger."""

    ref: JobRef
    options: Options
    handover: Handover


@dataclass
class Try:
    """One try of the task."""

    owner: Owner
    began: int  # first try since the task was cleared
    first: int  # the same, as the task computes it
    deferral: Deferral | None = None
    event: Outcome | str | None = None  # of its trigger
    stored: tuple[Outcome, JobRef] | None = None  # in the task store
    stored_in_time: bool = False  # before the next try began
    conclusion: Mapping[str, Any] | None = None  # in the status XCom
    was_rejected: bool = False  # Airflow did not accept its deferral: it had declared the process dead
    processes: list[Any] = field(default_factory=list)  # of model_hosts

    @property
    def name(self) -> str:
        return self.owner.ti_id


class Airflow:
    """One task instance: its state, its tries, and Airflow's rules for starting the next try."""

    def __init__(self) -> None:
        self.state = "none"  # none, running, deferred, queued, up_for_retry, success, failed
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

    def has_retry(self, me: Try) -> bool:
        """Whether Airflow retries the task if this try fails."""
        return me.owner.try_number <= self.max_tries

    def move(self, me: Try, before: str, after: str) -> bool:
        """Change the state for a process of this try, if it is what the process expects; returns whether it was."""
        if me is not self.current or self.state != before:
            return False
        self.state = after
        return True

    def end(self, ended: Try, succeeded: bool, *, final: bool = False) -> None:
        """A try reports its end. Airflow ignores the report of any try but the current one.

        :param final: no retry may follow.
        """
        if ended is self.current and self.state in ("running", "deferred", "queued"):
            retried = self.has_retry(ended) and not final
            self.state = "success" if succeeded else "up_for_retry" if retried else "failed"

    def clear(self) -> None:
        """Clear the task. Nothing else changes max_tries, and clearing a running task doesn't change it."""
        if self.state not in ("running", "deferred", "queued"):
            self.max_tries = self.try_number + RETRIES
        self.state = "none"

    def earlier_success(self, me: Try) -> tuple[Outcome, JobRef] | None:
        """What an earlier try of the same life has stored, if it succeeded."""
        earlier = (t.stored for t in self.tries if t is not me and t.owner.max_tries == me.owner.max_tries)
        return next((stored for stored in earlier if stored is not None and stored[0].succeeded), None)


class Sink:
    """The status XCom of one try, for one process.

    :param rng: decides whether a write is answered in time.
    :param is_dead: whether the process was killed.
    """

    def __init__(self, me: Try, rng: random.Random, is_dead: Callable[[], bool]) -> None:
        self.host, self.try_number = "worker", me.owner.try_number
        self.earlier: Mapping[str, Any] | None = None
        self.answered: Mapping[str, Any] | None = None  #: The conclusion, when its write was answered or given up.
        self._known: Mapping[str, Any] | None = None  # the conclusion, which is a part of each later status
        self._retracted = False
        self._me, self._rng, self._is_dead = me, rng, is_dead

    def offer(self, build: object, *, urgent: bool) -> None:
        if self._retracted and not self._is_dead():
            self._me.conclusion = None

    async def read_earlier(self) -> None: ...

    async def store_conclusion(self, document: Mapping[str, Any]) -> bool:
        self._known, self._retracted = document, False
        kept, answered = self._rng.random() < 0.95, self._rng.random() < 0.9
        await asyncio.sleep(self._rng.choice([0, 0.3, 2]))
        if kept and not self._is_dead():
            self._me.conclusion = document
        await asyncio.sleep(self._rng.choice([0, 0.3]) if answered else 10)
        self.answered = document
        return kept and answered

    def retract(self) -> None:
        self._known, self._retracted = None, True

    async def stored_conclusion(self) -> Mapping[str, Any] | None:
        await asyncio.sleep(self._rng.choice([0, 0.3]))
        self._known = self._known or self._me.conclusion
        return self._known
