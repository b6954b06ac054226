"""The trigger that waits between the two passes of the reaper."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_ktrain.compat import EARLIEST_EVENT
from airflow_provider_ktrain.core.formats import VERSION, mapping
from airflow_provider_ktrain.core.text.output import clean
from airflow_provider_ktrain.engine import timing


class SecondLookTrigger(BaseTrigger):
    """Waits, then passes the candidates of the first pass to the second.

    :param candidates: the owner's task instance id, by the job's uid. Default: none.
    :param due: time of the second pass, in epoch seconds. Default: now.
    :param version: version of the format of these arguments. Default: this release's.
    :param unknown: arguments of newer releases; ignored.
    """

    def __init__(
        self,
        *,
        candidates: Mapping[str, str] | None = None,
        due: float = 0.0,
        version: int = VERSION,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.candidates = clean(dict(mapping(candidates)))  # owners come from annotations
        self.due = due
        self.version = version

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The classpath is that of this module: Airflow imports the trigger by it."""
        arguments = {"version": self.version, "candidates": self.candidates, "due": self.due}
        return f"{__name__}.{type(self).__name__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the second look. A trigger that is restarted keeps the time at which it is due."""
        await asyncio.sleep(max(self.due - timing.epoch(), EARLIEST_EVENT))
        yield TriggerEvent({"version": VERSION, "candidates": self.candidates})
