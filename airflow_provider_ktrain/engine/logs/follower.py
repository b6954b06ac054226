"""Follows the logs of a job: each wanted container live, each line once and in order.

One asyncio task per container reads its runs one after the other: see `container_follower`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.container_run import Pod, run_of, started_at
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.api import Api
from airflow_provider_ktrain.engine.logs.container_follower import ContainerFollower
from airflow_provider_ktrain.engine.logs.emitter import Inspect, LogLine, Tally, ignore
from airflow_provider_ktrain.engine.logs.reader import JobLogs
from airflow_provider_ktrain.engine.logs.stream_budget import process_budget

WHOLE = Tally(complete=True)  #: of no container; one object for all jobs
LATE_LINES_SECONDS = 5.0  #: at the end of a drain in which lines are only counted, at most


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
    ) -> None:
        self.cursor = Cursor() if cursor is None else cursor
        self.budget = process_budget()
        self.budget.gate.watch_for_stalls()
        self._job = JobLogs(api, sink, kind, self.cursor, self.budget, inspector)
        self._chosen = chosen
        self._followed: dict[tuple[str, str], ContainerFollower] = {}
        self._observed: dict[str, Pod] = {}  # by uid, as last observed
        # in the cursor, but the pod was not observed yet
        self._unseen = {key: at for key, at in self.cursor.positions.items() if not at.complete}
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
                self.cursor.resume(*key, run.restart, started_at(pod, container["name"]))
                followed = ContainerFollower(self._job, pod, container["name"], self._forget)
                self._followed[key] = followed
            followed.observe(run, deleted=deleted)
            if deleted and followed.task.done():
                self._forget(followed)

    def _forget(self, container: ContainerFollower) -> None:
        """Keep only the tally of a container whose pod was deleted and whose log was read."""
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

        Containers that still run are read up to now. In the last seconds (LATE_LINES_SECONDS, at most a quarter of the
        time), lines are only inspected and counted, because inspecting is much faster than logging.

        :param timeout: seconds without progress after which this ends, except those in which lines are held back.
        :param longest: seconds after which it ends in any case. Default: `timeout`.
        :param keep_open: go on following containers that still run, until `drain_deleted` or `close`. If other streams
            of this process wait for their turn, none is kept. Default: False.
        """
        longest = timeout if longest is None else longest
        counting = min(LATE_LINES_SECONDS, longest / 4)
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
                container.emitter.count_only = True
            await asyncio.wait(rest, timeout=counting)
        await _cancel(rest)
        return self.report()

    async def drain_deleted(self, timeout: float, longest: float) -> DrainReport:
        """Read the containers that `drain` has kept open to their end, after their pods were deleted, and stop.

        :param timeout, longest: as of `drain`.
        """
        for container in list(self._followed.values()):
            if not container.task.done():
                container.mark_deleted()
        return await self.drain(timeout, longest)

    async def _wait_while_lines_come(self, tasks: list[asyncio.Task[None]], timeout: float, longest: float) -> bool:
        """Wait for the tasks; returns whether lines were still coming when the longest time was over.

        While the process holds lines back, none comes, although there may be more: that time doesn't count.
        """
        loop = asyncio.get_running_loop()
        progress, last = self._lines_read(), loop.time()
        end = last + longest
        pending = set(tasks)
        while pending:
            now = loop.time()
            if (read := self._lines_read()) != progress or self.budget.gate.holds_lines_back or self._is_emitting:
                progress, last = read, now
            if now >= end:
                return now - last < timeout
            if now >= last + timeout:
                return False
            _, pending = await asyncio.wait(pending, timeout=min(1.0, end - now, last + timeout - now))
        return False

    @property
    def _is_emitting(self) -> bool:
        """Whether lines of a container that hasn't caught up were received and not emitted yet."""
        return any(container.emitter.is_emitting for container in self._followed.values() if not container.caught_up)

    def _lines_read(self) -> int:
        """A number that changes while there is progress."""
        behind = (container for container in self._followed.values() if not container.caught_up)
        return self._gone_whole.lines + sum(container.emitter.read for container in behind)

    def read_span(self, uid: str, container: str, restart: int) -> tuple[float, float]:
        """From when until when a run's log was read without a gap, in epoch seconds; zeros: nothing was read.

        :param uid: of the pod.
        :param restart: the run.
        """
        followed = self._followed.get((uid, container))
        return (0.0, 0.0) if followed is None else followed.read_span(restart)

    def report(self) -> DrainReport:
        """What became of the logs so far, including pods in the cursor that were never observed here."""
        found = dict(self._gone)
        for position, at in self._unseen.items():
            since = f"after {at.last}" if at.last else "from its beginning"
            gap = f"lines {since} may be missing: the pod was deleted before its log could be resumed"
            pod, _, name = self.cursor.names.get(position, "an unknown pod/").partition("/")
            tally = Tally(gaps=(gap,), complete=True)
            found[pod, name] = found[pod, name] + tally if (pod, name) in found else tally
        for container in self._followed.values():
            key, tally = (container.pod, container.name), container.tally()
            found[key] = found[key] + tally if key in found else tally
        return DrainReport(found, self._gone_whole)

    async def close(self) -> None:
        """Stop at once. The cursor then stands after the last line that the sink received."""
        await _cancel([container.task for container in self._followed.values()])


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
