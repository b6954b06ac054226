"""What a benchmark runs inside a real triggerer: a probe of its event loop, and our trigger with its kills timed.

The triggerer imports this module as `in_triggerer`. It imports only what a triggerer needs anyway.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_ktrain.compat import task_state
from airflow_provider_ktrain.status_writer import TaskStatusSink
from airflow_provider_ktrain.triggers import training

INTERVAL = 0.005  # seconds between two measurements of the loop lag

if os.environ.get("BENCH_STATUS") == "off":
    setattr(TaskStatusSink, "of", classmethod(lambda cls, ti, host: None))  # noqa: B010


class Probe(BaseTrigger):
    """Writes measurements to a file, a line each second: the loop lag, the loop's CPU time, the delay of a watch.

    The CPU time is that of the event loop between two looks, which are INTERVAL apart. It is what the lag would be on a
    machine that runs nothing else.

    :param file: path.
    :param url: of the stand-in server.
    """

    def __init__(self, *, file: str, url: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.file, self.url = file, url

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "in_triggerer.Probe", {"file": self.file, "url": self.url}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fires no event."""
        await self._measure()
        no_events: tuple[TriggerEvent, ...] = ()
        for event in no_events:
            yield event

    async def _measure(self) -> None:
        late: list[float] = []
        busy: list[float] = []
        watch: list[float] = []
        loop = asyncio.get_running_loop()
        due, used = loop.time(), time.thread_time()

        def look() -> None:
            nonlocal due, used
            now, before, used = loop.time(), used, time.thread_time()
            late.append(round(now - due, 5))
            busy.append(round(used - before, 5))
            due = now + INTERVAL
            loop.call_at(due, look)

        look()
        ti: Any = self.task_instance
        warming = asyncio.create_task(asyncio.to_thread(task_state, ti))
        watching = asyncio.create_task(self._watch(watch)) if self.url else None
        while watching is None or not watching.done():
            await asyncio.sleep(1)
            row = {"at": time.monotonic(), "warm": warming.done(), "late": late, "busy": busy, "watch": watch}
            with open(self.file, "a") as out:  # noqa: ASYNC230
                out.write(json.dumps(row) + "\n")
            for values in (late, busy, watch):
                values.clear()

    async def _watch(self, delays: list[float]) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{self.url}/probe") as response:
            async for line in response.content:
                delays.append(round(time.monotonic() - float(line), 5))


class Training(training.TrainingJobTrigger):
    """Our trigger. The steps of its kill, and its event, are written to the file $BENCH_KILLS."""

    def _note(self, step: str) -> None:
        if path := os.environ.get("BENCH_KILLS"):
            with open(path, "a") as out:
                out.write(json.dumps({"job": self.job["name"], "step": step, "at": time.time()}) + "\n")

    async def _event(self) -> dict[str, Any]:
        event = await super()._event()
        self._note("event")
        return event

    async def on_kill(self) -> None:
        self._note("cancelled")
        await super().on_kill()

    async def _task_state(self, seconds: float) -> str:
        state = await super()._task_state(seconds)
        self._note("decided")
        return state

    async def _stop_owner(self) -> bool:
        stopped = await super()._stop_owner()
        self._note("released")
        return stopped
