"""A trigger that measures the event loop of its triggerer, and what a test reads of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import pathlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

INTERVAL = 0.005  # seconds between two looks
STOP = ".stop"  # suffix of the file that ends the trigger


class LoopProbe(BaseTrigger):
    """Writes how late its looks are to a file, a row each second, until a file with the suffix STOP exists.

    Time in which the thread was ready to run, and other processes had the CPUs, doesn't count, nor do Python's full
    garbage collections: a triggerer needs 0.2 to 0.3 s for each, whatever its triggers do.

    :param file: path. A process that starts later appends to it.
    """

    def __init__(self, *, file: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.file = file

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.LoopProbe", {"file": self.file}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        loop, late, own = asyncio.get_running_loop(), list[float](), _Excused()
        due, excused = loop.time(), own.seconds()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal due, excused, timer
            now, before, excused = loop.time(), excused, own.seconds()
            late.append(round(max(now - due - (excused - before), 0.0), 4))
            due = now + INTERVAL
            timer = loop.call_at(due, look)

        timer = loop.call_at(due, look)
        try:
            while not os.path.exists(self.file + STOP):  # noqa: ASYNC240
                await asyncio.sleep(1)
                with open(self.file, "a") as out:  # noqa: ASYNC230
                    out.write(json.dumps({"at": time.time(), "pid": os.getpid(), "late": late}) + "\n")
                late.clear()
        finally:
            timer.cancel()
            own.close()
        yield TriggerEvent(None)  # type: ignore[no-untyped-call]


class _Excused:
    """Counts the time that a thread has waited for a CPU, as Linux counts it, and that garbage collections took."""

    def __init__(self) -> None:
        self._schedstat = open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb")  # noqa: SIM115
        self._collected = self._began = 0.0
        gc.callbacks.append(self._count)

    def _count(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._collected += time.thread_time() - self._began

    def seconds(self) -> float:
        return int(os.pread(self._schedstat.fileno(), 100, 0).split()[1]) / 1e9 + self._collected

    def close(self) -> None:
        gc.callbacks.remove(self._count)
        self._schedstat.close()


def lag(file: pathlib.Path, quantile: float, *, since: float, until: float, pid: int = 0) -> float:
    """A quantile of the loop lag, in seconds. A look that came late stands for all looks that were due meanwhile.

    :param since, until: epoch seconds.
    :param pid: of the process. Default: any.
    """
    late: list[float] = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the process was killed while it wrote
            row = json.loads(line)
            if since <= row["at"] <= until and pid in (0, row["pid"]):
                late += row["late"]
    due = sorted(one - INTERVAL * n for one in late for n in range(int(one / INTERVAL) + 1))
    assert due, f"{file} has no rows"
    return due[int(len(due) * quantile)]
