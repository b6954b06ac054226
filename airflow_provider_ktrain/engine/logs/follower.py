"""Follows the logs of a job: each wanted container live, each line once and in order.

One asyncio task per container reads its runs one after the other: see `container_follower`. It inspects the lines and
never waits for Airflow's log. One further task of the job logs what they can't, with one request at a time, which ends
when the log has no more room:

- Lines for which the log had no room, from where the log stopped.
- After a takeover, lines since the handover, which another triggerer may have logged. The containers' tasks begin where
  the takeover was. The last AGAIN_LINES of the job are logged again, for AGAIN_SECONDS at most; all others are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.container_run import Pod, Run, run_of
from airflow_provider_ktrain.core.logs.cursor import Cursor, Position, normal_time
from airflow_provider_ktrain.core.logs.exec_trace import KnownJob
from airflow_provider_ktrain.core.text.output import listed, masked_log
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.logs.backlog_lines import BacklogLines
from airflow_provider_ktrain.engine.logs.container_follower import ContainerFollower
from airflow_provider_ktrain.engine.logs.earlier_lines import EarlierLines
from airflow_provider_ktrain.engine.logs.emitter import Inspect, RateLimitedEmitter, Tally, ignore
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.log_socket import log_socket
from airflow_provider_ktrain.engine.logs.reader import JobLogs
from airflow_provider_ktrain.engine.logs.stream_budget import process_budget

log = masked_log(__name__)

WHOLE = Tally(complete=True)  #: The tally of a job without containers. All jobs share this object.
COUNT_SECONDS = 5.0  #: How long lines are only inspected and counted at the end of a drain, at most.
LOOK_SECONDS = 0.05  #: Pause before checking again whether there is room in the log, or all lines are logged.
AGAIN_LINES = 10_000  #: How many lines of a job are logged again after a takeover.
AGAIN_SECONDS = 15.0  #: How long after the takeover they are logged again.
MAX_NAMED_CONTAINERS = 3  #: How many containers one message names.


@dataclass(frozen=True)
class Takeover:
    """Of a job whose lines another triggerer may have logged since the handover.

    :param cursor: the positions that were handed over.
    :param at: when it was, as `core.logs.cursor.normal_time` returns it.
    :param inspector: as that of `LogFollower`, for lines before that time that may be a report: see `EarlierEmitter`.
    """

    cursor: Cursor
    at: str
    inspector: Callable[[LogLine], Inspect]


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


def names_of(containers: Iterable[tuple[str, str]]) -> str:
    """The first of these containers for a message, and the number of others."""
    return listed([f"{pod}/{container}" for pod, container in containers], MAX_NAMED_CONTAINERS)


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
    :param began: when the trigger began, by the loop's time. Default: now.
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
        began: float | None = None,
    ) -> None:
        self._began = asyncio.get_running_loop().time() if began is None else began
        self.cursor = Cursor() if cursor is None else cursor
        self.budget = process_budget()
        log_socket().watch_for_stalls()
        self._job = JobLogs(api, sink, kind, self.cursor, self.budget, inspector, job, self._began)
        self._takeover = takeover
        self._behind: dict[ContainerFollower, BacklogLines] = {}
        self._earlier: list[EarlierLines] = []  # also those that are done
        self._stop_again_at = asyncio.get_running_loop().time() + AGAIN_SECONDS
        self._logging_later: asyncio.Task[None] | None = None
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
        """Record the state of a pod.

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
                followed = self._begin(pod, container["name"], run)
                self._followed[key] = followed
            followed.observe(run, deleted=deleted)
            if deleted and followed.task.done():
                self._forget(followed)

    def _begin(self, pod: Pod, container: str, run: Run) -> ContainerFollower:
        uid, started, takeover = pod["metadata"]["uid"], run.started_at, self._takeover
        if takeover is None:
            self.cursor.resume(uid, container, run.restart, started)
            return self._follow(pod, container)
        takeover.cursor.resume(uid, container, run.restart, started)
        known, key = takeover.cursor.position(uid, container), Cursor.key(uid, container)
        if known.restart == run.restart and (known.complete or (normal_time(started) or "") >= takeover.at):
            self.cursor.positions[key] = known
            return self._follow(pod, container)
        self.cursor.positions[key] = Position.at(run.restart, takeover.at)
        followed = self._follow(pod, container)
        inspect = takeover.inspector(followed.source)
        self._earlier.append(EarlierLines(self._job, followed, inspect, known, run.restart, takeover.at))
        self._log_later()
        return followed

    def _follow(self, pod: Pod, container: str) -> ContainerFollower:
        return ContainerFollower(self._job, pod, container, self._forget, self._fall_behind)

    def _fall_behind(self, container: ContainerFollower) -> None:
        if container not in self._behind:
            self._behind[container] = BacklogLines(self._job, container)
        self._log_later()

    # lines that the containers' tasks can't log

    def _log_later(self) -> None:
        if self._logging_later is None or self._logging_later.done():
            self._logging_later = asyncio.get_running_loop().create_task(self._log_rest_of_lines())

    async def _log_rest_of_lines(self) -> None:
        """Make one request after the other, as long as there are lines to log or to count."""
        while self._behind or self._unread_earlier:
            new = next((lines for lines in self._unread_earlier if not lines.is_started), None)
            behind = next((container for container, lines in self._behind.items() if lines.can_read), None)
            earlier = next((lines for lines in self._unread_earlier if lines.can_read), None)
            if asyncio.get_running_loop().time() >= self._stop_again_at:
                for lines in self._unread_earlier:
                    lines.emitter.stop_logging()
            if new is not None:
                await new.start(max(AGAIN_LINES // len(self._earlier), 1))
            elif behind is not None:
                await self._log_backlog(behind)
            elif earlier is not None:
                await earlier.read()
            else:
                await asyncio.sleep(LOOK_SECONDS)

    @property
    def _unread_earlier(self) -> list[EarlierLines]:
        return [lines for lines in self._earlier if not lines.is_done]

    async def _log_backlog(self, container: ContainerFollower) -> None:
        """Make a request for lines of one container. An unexpected error costs the rest of them."""
        lines = self._behind.pop(container)
        if not container.emitter.only_counts:
            try:
                await lines.read()
            except Exception:
                container.emitter.only_counts = True
                log.exception("Lines of %s/%s can't be logged any longer", container.pod, container.name)
            if container.emitter.backlog is not None and not container.emitter.only_counts:
                self._behind.pop(container, None)
                self._behind[container] = lines  # after the others
                return
        if container.task.done() and container.observed.deletion_reported:
            self._forget(container)

    def _forget(self, container: ContainerFollower) -> None:
        """Keep only the tally of a container whose pod was deleted and whose log was read, once no line waits."""
        if container.emitter.backlog is not None and not container.emitter.only_counts:
            return  # this is called again when it has ended
        if container.emitter.queue:
            container.emitter.queue.when_empty(lambda: self._forget(container))
            return
        if self._followed.pop((container.uid, container.name), None) is None:
            return
        key, tally = (container.pod, container.name), container.tally()
        self.cursor.forget(container.uid, container.name)
        if tally.complete and not tally.gaps and not tally.dropped and not tally.unlogged:
            self._gone_whole += tally
        else:
            self._gone[key] = self._gone[key] + tally if key in self._gone else tally

    async def drain(self, timeout: float, longest: float | None = None, *, keep_open: bool = False) -> DrainReport:
        """Read what the server still has, and stop following.

        Containers that still run are read up to now. In the last seconds (COUNT_SECONDS, at most a quarter of the
        time), lines are only inspected and counted, because inspecting is much faster than logging. This doesn't wait
        for lines that are inspected and not logged: see `log_remainder`.

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
                container.emitter.only_counts = True
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

    async def log_remainder(self, timeout: float, longest: float, earlier: float) -> DrainReport:
        """Wait until what was inspected is logged; what is left then is counted.

        :param timeout: seconds after which this ends if no line was logged.
        :param longest: seconds after which it ends in any case.
        :param earlier: seconds for lines since the handover, after a takeover; in the second half, at most
            COUNT_SECONDS, they are only counted.
        """
        loop = asyncio.get_running_loop()
        began = last = loop.time()
        logged, counting = 0, min(COUNT_SECONDS, earlier / 2)
        while self._behind or self._unread_earlier or any(emitter.queue for emitter in self._emitters()):
            now, written = loop.time(), sum(emitter.queue.written for emitter in self._emitters())
            last, logged = now if written != logged else last, written
            if now - began >= earlier - counting:
                self._count_earlier()
            if now - began >= earlier and self._unread_earlier:
                await self._stop_logging_later(keep_backlogs=True)
            if now - began >= longest or now - last >= timeout:
                break
            await asyncio.sleep(LOOK_SECONDS)
        await self._stop_logging_later()
        self._discard()
        return self.report()

    def _count_earlier(self) -> None:
        """Lines since the handover are only counted from now on."""
        for lines in self._earlier:
            lines.emitter.stop_logging()
            lines.emitter.queue.discard()

    async def _stop_logging_later(self, *, keep_backlogs: bool = False) -> None:
        """End the task that logs lines later.

        :param keep_backlogs: whether lines for which the log had no room are still logged. Default: False.
        """
        if self._logging_later is not None:
            await _cancel([self._logging_later])
        for lines in self._earlier:
            lines.is_done = True
        if keep_backlogs:
            self._log_later()
        else:
            self._behind.clear()

    def _discard(self) -> None:
        for emitter in list(self._emitters()):  # those of deleted pods are forgotten
            emitter.queue.discard()

    def _emitters(self) -> Iterator[RateLimitedEmitter]:
        yield from (container.emitter for container in self._followed.values())
        yield from (lines.emitter for lines in self._earlier)

    def earlier_report(self) -> DrainReport:
        """What became of the lines since the handover, after a takeover."""
        found: dict[tuple[str, str], Tally] = {}
        for lines in self._earlier:
            found[lines.key] = found.get(lines.key, WHOLE) + lines.tally()
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
            tally = Tally(gaps=(gap,), unsaid=(gap,), complete=True)
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
        await _cancel([container.task for container in self._followed.values()])
        await self._stop_logging_later()
        unlogged = self.report().total.unlogged
        if log_socket().settling_seconds(self._began):
            self._discard()
        return self.report().total.unlogged - unlogged


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
