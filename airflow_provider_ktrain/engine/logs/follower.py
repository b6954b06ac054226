"""Follows the logs of a job: each wanted container live, each line once and in order.

One asyncio task per container reads its runs one after the other: see `container_follower`. It never waits for
Airflow's log. A second one, a late one, logs what the first can't:

- Lines for which the log has no room. From there on, the first one only inspects the lines, until the late one has
  caught up with it.
- After a takeover, lines since the handover. The first one begins where the takeover was, and the late one ends there.
  Another triggerer may have logged these lines before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.container_run import Pod, Run, run_of
from airflow_provider_ktrain.core.logs.cursor import Cursor, Position, normal_time
from airflow_provider_ktrain.core.logs.exec_trace import KnownJob
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.logs.container_follower import ContainerFollower
from airflow_provider_ktrain.engine.logs.emitter import Inspect, Tally, ignore
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.log_socket import log_socket
from airflow_provider_ktrain.engine.logs.reader import JobLogs
from airflow_provider_ktrain.engine.logs.stream_budget import process_budget

WHOLE = Tally(complete=True)  #: of no container; one object for all jobs
COUNT_SECONDS = 5.0  #: at the end of a drain in which lines are only inspected and counted, at most
LOOK_SECONDS = 0.05  #: until it is looked again whether all lines are logged


@dataclass(frozen=True)
class Takeover:
    """Of a job whose lines another triggerer may have logged since the handover.

    :param cursor: the positions that were handed over.
    :param at: when it was, as `core.logs.cursor.normal_time` returns it.
    :param inspector: as that of `LogFollower`, for lines before that time.
    """

    cursor: Cursor
    at: str
    inspector: Callable[[LogLine], Inspect]

    def ends(self, restart: int) -> Callable[[Position, str], bool]:
        """Whether a late reader has read a container up to the takeover, in which it had that run."""
        return lambda position, time: (
            position.restart > restart or (position.restart == restart and (position.complete or time >= self.at))
        )


@dataclass(frozen=True)
class DrainReport:
    """What became of a job's logs, by (pod, container). Successive pods with the same name count as one.

    :param gone: the sum of containers that were read to their end without a gap and whose pods are deleted.
    """

    containers: Mapping[tuple[str, str], Tally]
    gone: Tally = field(default_factory=Tally)

    @property
    def total(self) -> Tally:
        """The sum of existing and of deleted pods."""
        return sum(self.containers.values(), self.gone)

    @property
    def unread(self) -> list[tuple[str, str]]:
        """Containers whose logs were not read to the end."""
        return [key for key, tally in self.containers.items() if not tally.complete]


class LogFollower:
    """Follows the chosen containers of one job as its pods appear, and calls `sink` with each line.

    Its tasks run in the context of the caller of `observe`.

    :param sink: called in the event loop for each line; it must not block for long.
    :param kind: of the job; it derives role and index from a pod's labels.
    :param cursor: the positions to resume from; updated in place, so that `cursor.to_dict()` is current at any time.
        Default: the beginning of each log.
    :param chosen: whether to follow a container of a pod; called whenever the pod has changed, until it returns True.
        Default: all containers.
    :param inspector: called once per container with a line that names it; what it returns is called with text,
        time and run of every new line before the rate limit drops any. Default: lines aren't inspected.
    :param takeover: if there was one; then `cursor` is empty. Default: None.
    :param job: called for the job, as far as it is known. Default: nothing is.
    """

    def __init__(
        self,
        api: Api,
        sink: Callable[[LogLine], None],
        *,
        kind: Kind,
        cursor: Cursor | None = None,
        chosen: Callable[[Pod, str], bool] = lambda pod, container: True,
        inspector: Callable[[LogLine], Inspect] = lambda source: ignore,
        takeover: Takeover | None = None,
        job: KnownJob = dict,
    ) -> None:
        self.cursor = Cursor() if cursor is None else cursor
        self.budget = process_budget()
        log_socket().watch_for_stalls()
        self._job = JobLogs(api, sink, kind, self.cursor, self.budget, inspector, job)
        self._overflow = JobLogs(api, sink, kind, Cursor(), self.budget.late, lambda source: ignore, job)
        self._takeover, self._earlier = takeover, self._overflow
        if takeover is not None:
            logs = replace(self._overflow, cursor=takeover.cursor, inspector=takeover.inspector, again=True)
            self._earlier = logs
        self._late: list[ContainerFollower] = []
        self._again: list[ContainerFollower] = []  # those of the takeover among them, also when they have ended
        self._chosen = chosen
        self._followed: dict[tuple[str, str], ContainerFollower] = {}
        self._observed: dict[str, Pod] = {}  # by uid, as last observed
        # in the cursor, but the pod was not observed yet
        self._handed_over = self.cursor if takeover is None else takeover.cursor
        self._unseen = {key: at for key, at in self._handed_over.positions.items() if not at.complete}
        self._gone: dict[tuple[str, str], Tally] = {}  # of deleted pods, if there is something to report
        self._gone_whole = WHOLE  # the sum of all others
        self._draining = False

    def observe(self, pod: Pod, *, deleted: bool = False) -> None:
        """Take note of the state of a pod.

        Containers of a deleted pod are forgotten once their logs were read to the end.

        :param pod: as it is now, or as it was before its deletion.
        :param deleted: whether it was deleted; if its containers weren't followed yet, a gap is reported.
        """
        meta, spec = pod["metadata"], pod.get("spec") or {}
        if self._observed.get(meta["uid"]) is pod and not deleted:
            return  # unchanged, like most pods of a large job at each call
        if deleted:
            self._observed.pop(meta["uid"], None)
        else:
            self._observed[meta["uid"]] = pod
        for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
            key = meta["uid"], container["name"]
            self._unseen.pop(Cursor.key(*key), None)
            run = run_of(pod, container["name"])
            followed = self._followed.get(key)
            if followed is None:
                if self._draining or not run.started or not self._chosen(pod, container["name"]):
                    if deleted:
                        self.cursor.forget(*key)
                    continue
                self._begin(pod, container["name"], run)
                followed = ContainerFollower(self._job, pod, container["name"], self._forget, on_full=self._fall_behind)
                self._followed[key] = followed
            for reader in (followed, *self._late_of(followed)):
                reader.observe(run, deleted=deleted)
            if deleted and followed.task.done():
                self._forget(followed)

    def _begin(self, pod: Pod, container: str, run: Run) -> None:
        uid, started = pod["metadata"]["uid"], run.started_at
        takeover = self._takeover
        if takeover is None:
            self.cursor.resume(uid, container, run.restart, started)
            return
        takeover.cursor.resume(uid, container, run.restart, started)
        known = takeover.cursor.position(uid, container)
        if known.restart == run.restart and (known.complete or (normal_time(started) or "") >= takeover.at):
            self.cursor.positions[Cursor.key(uid, container)] = known
            return
        self.cursor.positions[Cursor.key(uid, container)] = Position.at(run.restart, takeover.at)
        self._again.append(self._read_late(self._earlier, pod, container, takeover.ends(run.restart)))

    def _read_late(
        self, logs: JobLogs, pod: Pod, container: str, until: Callable[[Position, str], bool]
    ) -> ContainerFollower:
        late = ContainerFollower(logs, pod, container, lambda _: None, until=until)
        self._late.append(late)
        late.task.add_done_callback(lambda _: self._late.remove(late))
        return late

    def _late_of(self, container: ContainerFollower) -> list[ContainerFollower]:
        return [late for late in self._late if (late.uid, late.name) == (container.uid, container.name)]

    def _fall_behind(self, live: ContainerFollower, at: Position) -> None:
        """Let a late reader log the lines of a container from a position on, until it has caught up."""
        self._overflow.cursor.positions[Cursor.key(live.uid, live.name)] = at

        def caught_up(position: Position, _: str) -> bool:
            if position.is_at(live.position):
                log_again()
            return live.emitter.logs

        def log_again(_: object = None) -> None:
            if not live.emitter.logs:
                live.emitter.logs = True
                late.emitter.queue.put_after(live.emitter.queue)

        late = self._read_late(self._overflow, live.source_pod, live.name, caught_up)
        late.emitter.tally, late.emitter.repays = live.emitter.tally, True
        late.task.add_done_callback(log_again)
        late.observe(live.run)

    def _forget(self, container: ContainerFollower) -> None:
        """Keep only the tally of a container whose pod was deleted and whose log was read, once no line waits."""
        if late := self._late_of(container):
            late[-1].task.add_done_callback(lambda _: self._forget(container))
            return
        if container.emitter.queue:
            container.emitter.queue.when_empty(lambda: self._forget(container))
            return
        if self._followed.pop((container.uid, container.name), None) is None:
            return
        key, tally = (container.pod, container.name), container.tally()
        self.cursor.forget(container.uid, container.name)
        if tally.complete and not tally.gaps and not tally.dropped and not tally.late:
            self._gone_whole += tally
        else:
            self._gone[key] = self._gone[key] + tally if key in self._gone else tally

    async def drain(self, timeout: float, longest: float | None = None, *, keep_open: bool = False) -> DrainReport:
        """Read what the server still has, and stop following.

        Containers that still run are read up to now. In the last seconds (COUNT_SECONDS, at most a quarter of the
        time), lines are only inspected and counted, because inspecting is much faster than logging. This doesn't wait
        for lines that were read and are not logged: see `log_rest`.

        :param timeout: seconds without progress after which this ends.
        :param longest: seconds after which it ends in any case. Default: `timeout`.
        :param keep_open: go on following containers that still run, until `drain_deleted` or `close`. If other streams
            of this process wait for their turn, none is kept. Default: False.
        """
        longest = timeout if longest is None else longest
        counting = min(COUNT_SECONDS, longest / 4)
        self._draining = True
        containers = list(self._followed.values())
        kept = [c for c in containers if keep_open and c.runs and not c.task.done() and not self.budget.is_crowded]
        drained = [container for container in containers if container not in kept]
        for container in drained:
            container.drain()
        catching_up = [asyncio.ensure_future(container.catch_up()) for container in kept]
        tasks = [*(container.task for container in drained), *catching_up]
        try:
            lines_come = await self._wait_while_lines_come(tasks, timeout, longest - counting)
        finally:
            await _cancel(catching_up)
        late = [container for container in kept if not container.caught_up]
        rest = [container.task for container in (*drained, *late)]
        if lines_come and rest:
            for container in late:
                container.drain()
            for container in (*drained, *late):
                container.emitter.logs = False
            await asyncio.wait(rest, timeout=counting)
        await _cancel(rest)
        return self.report()

    async def drain_deleted(self, timeout: float, longest: float) -> DrainReport:
        """Read the containers that `drain` has kept open to their end, after their pods were deleted, and stop."""
        for container in list(self._followed.values()):
            if not container.task.done():
                container.mark_deleted()
        return await self.drain(timeout, longest)

    async def _wait_while_lines_come(self, tasks: list[asyncio.Task[None]], timeout: float, longest: float) -> bool:
        """Wait for the tasks; returns whether lines were still coming when the longest time was over."""
        loop = asyncio.get_running_loop()
        progress, last = self._lines_read(), loop.time()
        end = last + longest
        pending = set(tasks)
        while pending:
            now = loop.time()
            if (read := self._lines_read()) != progress:
                progress, last = read, now
            if now >= end:
                return now - last < timeout
            if now >= last + timeout:
                return False
            _, pending = await asyncio.wait(pending, timeout=min(1.0, end - now, last + timeout - now))
        return False

    def _lines_read(self) -> int:
        """A number that changes while there is progress."""
        behind = (container for container in self._followed.values() if not container.caught_up)
        return self._gone_whole.lines + sum(container.emitter.read for container in behind)

    async def log_rest(self, timeout: float, longest: float, earlier: float) -> DrainReport:
        """Wait until what was read is logged. Late readers end then, and what is left is counted.

        :param timeout: seconds after which this ends if no line was logged.
        :param longest: seconds after which it ends in any case.
        :param earlier: seconds for lines since the handover, after a takeover; in the second half, at most
            COUNT_SECONDS, they are only counted.
        """
        loop = asyncio.get_running_loop()
        began = last = loop.time()
        logged, counting = 0, min(COUNT_SECONDS, earlier / 2)
        while self._late or any(container.emitter.queue for container in self._readers()):
            now, written = loop.time(), sum(container.emitter.queue.written for container in self._readers())
            last, logged = now if written != logged else last, written
            if now - began >= earlier - counting:
                await self._count_earlier(counting)
            if now - began >= longest or now - last >= timeout:
                break
            await asyncio.sleep(LOOK_SECONDS)
        await _cancel([late.task for late in self._late])
        self._discard()
        return self.report()

    async def _count_earlier(self, seconds: float) -> None:
        """End late readers of lines since the handover; what is left is only counted."""
        reading = [late for late in self._again if not late.task.done()]
        for late in self._again:
            late.emitter.logs = False
            late.emitter.queue.discard()
        if reading:
            await asyncio.wait([late.task for late in reading], timeout=seconds)
        await _cancel([late.task for late in reading])

    def _discard(self) -> None:
        for container in list(self._readers()):  # those of deleted pods are forgotten
            container.emitter.queue.discard()

    def _readers(self) -> Iterator[ContainerFollower]:
        yield from self._followed.values()
        yield from self._late
        yield from self._again

    def earlier_report(self) -> DrainReport:
        """What became of the lines since the handover, after a takeover."""
        found: dict[tuple[str, str], Tally] = {}
        for late in self._again:
            key = late.pod, late.name
            found[key] = found.get(key, WHOLE) + late.tally()
        return DrainReport(found)

    def read_span(self, uid: str, container: str, restart: int) -> tuple[float, float]:
        """From when until when a run's log was read without a gap, in epoch seconds; zeros: nothing was read."""
        followed = self._followed.get((uid, container))
        return (0.0, 0.0) if followed is None else followed.read_span(restart)

    def report(self) -> DrainReport:
        """What became of the logs so far, including pods in the cursor that were never observed here."""
        found = dict(self._gone)
        for position, at in self._unseen.items():
            since = f"after {at.last}" if at.last else "from its beginning"
            gap = f"lines {since} may be missing: the pod was deleted before its log could be resumed"
            pod, _, name = self._handed_over.names.get(position, "an unknown pod/").partition("/")
            tally = Tally(gaps=(gap,), complete=True)
            found[pod, name] = found[pod, name] + tally if (pod, name) in found else tally
        for container in self._followed.values():
            key, tally = (container.pod, container.name), container.tally()
            found[key] = found[key] + tally if key in found else tally
        return DrainReport(found, self._gone_whole)

    async def close(self) -> int:
        """Stop at once. The cursor then stands after the last line that was accepted for the log.

        After a stall, the job may have been assigned to another triggerer, which logs what is not logged here.

        :return: number of lines that are therefore discarded.
        """
        repaying = [reader for reader in self._late if reader.emitter.repays]
        await _cancel([container.task for container in (*self._followed.values(), *self._late)])
        for reader in repaying:
            self.cursor.positions[Cursor.key(reader.uid, reader.name)] = reader.position
        late = self.report().total.late
        if log_socket().settling_seconds():
            self._discard()
        return self.report().total.late - late


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
