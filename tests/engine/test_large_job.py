"""What a change of one pod costs doesn't grow with the job."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from tests.engine.large_job import LargeJob
from tests.engine.tasks import Lines, Sink
from tests.until import until

CHANGES = [("Pending", "node"), ("Running", "node")]  # phase and node of a pod


class OfferCounter(Sink):
    """Takes statuses and builds none, like a host whose budget is used up."""

    def __init__(self) -> None:
        super().__init__()
        self.offered = 0

    def offer(self, build: Any, *, urgent: bool) -> None:
        self.offered += 1


class LineCounter:
    """Counts the lines of the package that are executed in this thread, by function; a context manager."""

    def __init__(self) -> None:
        self.lines = Counter[str]()

    def __enter__(self) -> LineCounter:
        self._earlier = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._earlier)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if "airflow_provider_ktrain" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines[frame.f_code.co_qualname] += 1
        return self._trace


async def lines_executed(size: int) -> tuple[int, list[str]]:
    """Lines of the package that are executed for two changes of one pod, and the busiest functions."""
    job, sink, counter = LargeJob(size), OfferCounter(), LineCounter()
    async with job.followed(Lines(), sink):
        for index in range(3):  # until nothing is done for the first time
            for phase, node in CHANGES:
                job.change(index, phase, node)
                await job.handled()
        before = sink.offered
        with counter:
            for phase, node in CHANGES:
                job.change(3, phase, node)
                await job.handled()
        assert sink.offered == before + len(CHANGES), "both changes were handled"
    return counter.lines.total(), [f"{name}: {lines}" for name, lines in counter.lines.most_common(5)]


async def test_a_change_of_a_pod_executes_the_same_lines_in_a_job_of_any_size() -> None:
    small, _ = await lines_executed(20)
    large, busiest = await lines_executed(600)
    assert large <= 1.1 * small, busiest


@pytest.mark.thorough
async def test_pods_add_few_objects_for_the_garbage_collector() -> None:
    """It looks at all objects of the process when the new ones are a quarter of the others, and holds the loop then."""
    job, size = LargeJob(600), 600
    gc.collect()
    before = len(gc.get_objects())
    async with job.followed(Lines()):
        for _ in range(2 * size // 50):
            await job.handled()
        gc.collect()
        assert (len(gc.get_objects()) - before) / size < 12  # 11.6 with Python 3.14


async def test_the_first_list_of_a_large_job_is_processed_in_slices() -> None:
    """Other jobs in the same event loop don't wait until all pods are known."""
    job, steps, lines = LargeJob(800), [0], Lines()

    async def note_steps() -> None:
        while True:
            before = counter.lines.total()
            await asyncio.sleep(0)
            steps.append(counter.lines.total() - before)

    with LineCounter() as counter:
        noting = asyncio.create_task(note_steps())
        async with job.followed(lines):
            await until(lambda: any("0/800 Running" in line for line in lines.messages))
        noting.cancel()
    assert max(steps) < sum(steps) / 8, (max(steps), sum(steps))
