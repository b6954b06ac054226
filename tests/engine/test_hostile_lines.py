"""What programs print through the real inspectors: nothing raises, what is sent can be encoded, memory is bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.logs.cursor import Position
from airflow_provider_ktrain.core.logs.stacks import MAX_RECORDS
from airflow_provider_ktrain.core.state.steps.training_metrics import MAX_POINTS
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow import stacks
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.outcome import Outcome, event_of
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.logs.emitter import MAX_GAPS, RateLimitedEmitter
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from tests.core.test_hostile_input import JSON_VALUES, MARKERS, seconds
from tests.operators.test_transport import encode

from .tasks import Lines

ROLES: dict[str, Any] = {"pytorchReplicaSpecs": {"Master": {}}}
JOB: dict[str, Any] = {"kind": "PyTorchJob", "metadata": {"name": "train"}, "spec": ROLES}
MASTER = LogLine("train-master-0", "pytorch", "Master", 0, 0, "", "", pod_uid="uid-0")


async def nobody() -> Any:
    raise AssertionError("there must be no request")


class Output:
    """What a Master's lines are inspected for.

    :param log: where warnings are logged. Default: one that keeps them.
    :param earlier: whether its lines are from before a takeover. Default: False.
    """

    def __init__(self, log: Lines | None = None, *, earlier: bool = False) -> None:
        self.log = log or Lines()
        state = JobState(JobRef("PyTorchJob", "v1", "ns", "train", "uid"), Handover())
        state.job = JOB
        self.output = JobOutput(FollowContext(Api(nobody), state, self.log))
        inspector = self.output._inspector_of_earlier_lines if earlier else self.output._inspector
        self._inspect, self._written = inspector(MASTER), 0

    def write(self, *lines: bytes) -> None:
        for line in lines:
            self._written += 1
            hour, second = divmod(self._written, 3600)
            stamp = f"2026-11-21T{hour:02}:{second // 60:02}:{second % 60:02}.000000001Z"
            self._inspect(line.decode("utf-8", "replace"), stamp, 0, False)

    def sent(self) -> dict[str, Any]:
        """All of it that leaves for Airflow."""
        metrics, result = self.output.training_metrics, self.output.result
        value, error, _ = result.find()
        usage = metrics.steps.usage(8, 1e6)
        outcome = Outcome(
            "Succeeded", True, result=value, result_error=error, usage=usage, training_metrics=metrics.summary()
        )
        crashes = self.output.restarts.handover()
        handover = Handover(
            result_line=result.line, training_metrics=metrics.handover(), pod_history={"crashes": crashes}
        )
        return {"event": event_of(outcome), "handover": handover.to_dict(), "log": self.log.messages}


BYTES = st.binary(max_size=40)
FIELDS = st.dictionaries(st.sampled_from(["step", "loss", "pid", "frames", "end"]), JSON_VALUES, max_size=3)
MARKED = st.tuples(BYTES, st.sampled_from(MARKERS), JSON_VALUES | FIELDS)
LOG_LINES = BYTES | MARKED.map(lambda parts: parts[0] + parts[1].encode() + json.dumps(parts[2]).encode())


@given(st.lists(LOG_LINES, max_size=10), st.booleans())
def test_any_line_is_inspected_and_what_is_sent_can_be_encoded(lines: list[bytes], earlier: bool) -> None:
    async def read() -> None:
        output = Output(earlier=earlier)
        output.write(*lines)
        assert "could not be inspected" not in str(output.log)
        encode(output.sent())

    asyncio.run(read())


class FailsOnce(Lines):
    """A log of which the first warning is an error."""

    has_failed = False

    def warning(self, event: Any, *args: Any, **kw: Any) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise BrokenPipeError("nobody reads it")
        super().warning(event)


async def test_inspector_that_raises_is_reported_once_and_stops_no_other() -> None:
    output = Output(FailsOnce())
    output.write(b'KTRAIN_METRIC {"step": 1e300, "loss": 1} KTRAIN_RESULT 7', b"KTRAIN_RESULT 8")
    assert str(output.log).startswith("The metrics of Master 0 may be incomplete: a line could not be inspected.")
    assert len(output.log.messages) == 1
    assert output.output.result.find()[0] == 8
    assert output.output.evidence.newest_lines() == {MASTER.pod: "KTRAIN_RESULT 8"}


LONG = 5 * 1024
THINNED = MAX_POINTS + 1  #: Points after which a series of a metric is thinned again.
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
#: What a program may print, by what it aims at; each line is another one.
HOSTILE: dict[str, Callable[[int], str]] = {
    "names of metrics": lambda n: f'KTRAIN_METRIC {{"step": {n}, "loss-{n}": {n}}}',
    "steps": lambda n: f'KTRAIN_METRIC {{"step": {n}, "loss": {n}.5}}',
    "steps before all others": lambda n: f'KTRAIN_METRIC {{"step": {10**6 * (n == 0) + n}, "loss": {n}}}',
    "absurd steps": lambda n: f'KTRAIN_METRIC {{"step": {10**1000 + n}, "loss": 1e30{n}}}',
    "long lines": lambda n: f"{n} {'x' * LONG}\U0001f600",
    "records": lambda n: f'KTRAIN_STACK {{"pid": {n}}}',
    "numbered lines": lambda n: f"KTRAIN_RESULT_PART 00000000 1/1 {n:08} {'x' * 4 * LONG}\U0001f600",
    "results": lambda n: f'KTRAIN_RESULT [{n}, "{"x" * LONG}"]',
    "results that are none": lambda n: f"KTRAIN_RESULT {n} {'x' * LONG}",
    "reports of NCCL": lambda n: f"[rank{n}]: {WATCHDOG}{n}, {'x' * LONG}",
    "tracebacks": lambda n: f"[rank{n}]: Traceback (most recent call last):{'x' * LONG}",
    "bytes that are no text": lambda n: f"{n}\x00\ufffd" * 1000,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", HOSTILE)
async def test_what_is_kept_of_lines_does_not_grow_with_them(kind: str) -> None:
    """Neither of live lines nor of those from before a takeover, which all precede a later step."""
    live, earlier = Output(), Output(earlier=True)
    earlier.output._inspector(MASTER)('KTRAIN_METRIC {"step": 1000000, "loss": 1}', "2026-11-22T00:00:00.0Z", 0, False)

    def held_after(*numbers: int) -> int:
        for line in (HOSTILE[kind](n).encode() for n in range(*numbers)):
            live.write(line)
            earlier.write(line)
        live.log.messages.clear()
        earlier.log.messages.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    gc.freeze()  # a collection needn't look at what was there before
    tracemalloc.start()
    try:
        empty, full, later = held_after(0), held_after(THINNED), held_after(THINNED, 3 * THINNED)
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert later - full < 32 * 1024
    assert full - empty < 6 * 1024 * 1024
    encode(live.sent())
    encode(earlier.sent())


async def test_long_line_after_a_traceback_is_inspected_as_fast_as_any_other() -> None:
    output = Output()
    output.write(b"Traceback (most recent call last):")
    hostile, ordinary = (unit * (200_000 // len(unit)) for unit in (b"\x1b[m", b"epoch 3 step 120: loss 0.31 "))
    assert seconds(output.write, hostile) < 5 * seconds(output.write, ordinary)


async def test_what_is_kept_of_gaps_and_stacks_is_bounded() -> None:
    emitter = RateLimitedEmitter(lambda line: None, MASTER)
    for number in range(10 * MAX_GAPS):
        emitter.gap(f"lines may be missing: {number}", Position())
    assert len(emitter.tally.gaps) == MAX_GAPS
    source = stacks._Source("train-master-0", "pytorch", "Master 0")
    stacks._take(source, b'KTRAIN_STACK {"pid": 1}\n' * 10 * MAX_RECORDS)
    assert len(source.stacks) == MAX_RECORDS
