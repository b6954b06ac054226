"""The pause between a reaper's two looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_ktrain.compat import EARLIEST_EVENT
from airflow_provider_ktrain.core.text import clean


class SecondLookTrigger(BaseTrigger):
    """Hands the candidates of the first look to the second.

    :param candidates: owner's ti_id by the job's uid.
    :param due: epoch seconds of the second look.
    """

    def __init__(self, *, candidates: Mapping[str, str], due: float) -> None:
        super().__init__()
        self.candidates = clean(dict(candidates))  # owners are text of annotations
        self.due = due

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {"candidates": self.candidates, "due": self.due}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.sleep(max(self.due - time.time(), EARLIEST_EVENT))
        yield TriggerEvent(self.candidates)
