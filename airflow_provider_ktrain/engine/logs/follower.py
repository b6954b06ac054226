"""Logs: every container that is wanted, followed live, each line once and in order.

Each container has a task that reads one run after the other: the run's log is followed, a cut stream is resumed from
the position (`core.logcursor`), and a run is complete when a request that was made after its end brings nothing new.
Before a request that could reach something else than what was observed (another run, another pod of the same name) the
pod is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.cursor import Cursor, Position, Replay, normal_time
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable, pause_after
from airflow_provider_ktrain.engine.logs.budget import StreamBudget, process_budget
from airflow_provider_ktrain.engine.logs.container_run import Pod, Run, run_of, started_at
from airflow_provider_ktrain.engine.logs.emitter import Inspect, Lines, LogLine, Outlet, Rate, ignore
from airflow_provider_ktrain.engine.logs.report import DrainReport, Tally

log = logging.getLogger(__name__)

SILENCE = 300.0  #: seconds without a byte until a followed stream is asked for anew: it may be dead
NO_LOG = b"unable to retrieve container logs"  #: what a kubelet says, with 200, when it has no such log
DOUBTS = 3  #: answers without what was seen before until that is believed to be gone
BACKOFF = (0.1, 10.0)  #: seconds: the first and the longest pause
ANOTHER = (
    5.0  #: seconds that a status may lag behind its container: until then a log that begins anew may be another run's
)
PEEK = 10.0  #: seconds without a byte until a few lines that were asked for are given up
ASKING = 60.0  #: seconds that asking whether all containers are silent may take
PROOF = 5  #: last lines that are asked for to see that they are those that were read last
PROOF_BYTES = 4096  #: of what was read last that are kept for it
REFUSED_SLOWLY = 600.0  #: seconds of refusals (403) after which a container is asked once a minute
REFUSED_PAUSE = 60.0  #: seconds between these requests
REFUSED_AT_END = 10.0  #: seconds that a refused log is asked for in the final drain: GPUs wait for it
COUNTING = 5.0  #: seconds at the end of a drain in which lines are only counted, at most
ROTATABLE = 1024 * 1024  #: bytes of a run from which on its log may have been rotated; a kubelet's default is 10 MiB


class LogFollower:
    """Follows the chosen containers of one job as its pods appear, and hands each line to `sink`.

    Its tasks run in the context of the caller of `observe`.

    :param sink: called in the loop for each line; it must not block for long.
    :param kind: tells a pod's role and index from its labels.
    :param cursor: where to go on from; moved on in place, so that `cursor.to_dict()` is right at any time.
    :param budget: of streams; None is the process's own.
    :param chosen: whether to follow a container of a pod; asked again whenever the pod has changed until it says yes.
    :param rate: how much of each container is handed on.
    :param inspector: called once per container with a line that names it; what it returns is called with text,
        time and run of every new line before the rate limit drops any. Default: nothing looks at them.
    """

    def __init__(
        self,
        api: Api,
        sink: Callable[[LogLine], None],
        *,
        kind: Kind,
        cursor: Cursor | None = None,
        budget: StreamBudget | None = None,
        chosen: Callable[[Pod, str], bool] = lambda pod, container: True,
        rate: Rate | None = None,
        inspector: Callable[[LogLine], Inspect] = lambda source: ignore,
    ) -> None:
        self.api = api
        self.sink = sink
        self.kind = kind
        self.cursor = Cursor() if cursor is None else cursor
        self.budget = budget or process_budget()
        self.budget.watch_for_stalls()
        self.rate = rate or Rate()
        self.inspector = inspector
        self._chosen = chosen
        self._followed: dict[tuple[str, str], _Container] = {}
        self._observed: dict[str, Pod] = {}  # by uid, as they last were
        self._unseen = self.cursor.unfinished()  # handed over, and no pod of theirs was observed yet
        self._gone: dict[tuple[str, str], Tally] = {}  # of pods that are gone, where there is something to report
        self._gone_whole = Tally(complete=True)  # the sum of all others
        self._refused = False  # whether the last answer to a request for a log was a refusal
        self._draining = False

    @property
    def held(self) -> int:
        """How many containers and pods are in memory: it doesn't grow with pods that are gone."""
        return len(self._followed) + len(self._observed) + len(self.cursor.positions)

    def observe(self, pod: Pod, *, deleted: bool = False) -> None:
        """Take note of a pod as it is now, or as it was last seen before it was deleted: then, if it was not followed,
        to report a gap.

        What is known of a deleted pod's containers is forgotten once their logs were read to the end.
        """
        meta, spec = pod["metadata"], pod.get("spec") or {}
        if self._observed.get(meta["uid"]) is pod and not deleted:
            return  # of a job of thousands, all but a few at each call
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
                followed = self._followed[key] = _Container(self, pod, container["name"])
            followed.observe(run, deleted=deleted)
            if deleted and followed.task.done():
                self.forget(followed)

    def forget(self, container: _Container) -> None:
        """A container whose pod is gone from the API server and whose log is read: only its tally is kept."""
        if self._followed.pop((container.uid, container.name), None) is None:
            return
        key, tally = (container.pod, container.name), container.tally()
        self.cursor.forget(container.uid, container.name)
        if tally.complete and not tally.gaps and not tally.dropped and not tally.late:
            self._gone_whole += tally
        else:
            self._gone[key] = self._gone[key] + tally if key in self._gone else tally

    def refused(self, error: ApiStatusError) -> str:
        """What to say about a refusal; "" where it was said already."""
        first, self._refused = not self._refused, True
        return REFUSED.format(error) if first else ""

    def accepted(self) -> None:
        """The API server answered a request for a log."""
        self._refused = False

    async def drain(self, timeout: float, longest: float | None = None) -> DrainReport:
        """Read what the server still has, and stop following.

        Containers that still run are read up to now. The last seconds, COUNTING or a quarter of all, are for
        lines for which there is no time: they are inspected and counted, but not handed on.

        :param timeout: seconds without progress after which this ends.
        :param longest: seconds after which it ends in any case. Default: `timeout`.
        """
        longest = timeout if longest is None else longest
        counting = min(COUNTING, longest / 4)
        self._draining = True
        for container in self._followed.values():
            container.drain()
        tasks = [container.task for container in self._followed.values()]
        if await self._wait_while_lines_come(tasks, timeout, longest - counting):
            for container in self._followed.values():
                container.count_only()
            await asyncio.wait(tasks, timeout=counting)
        await self.close()
        return self.report()

    async def _wait_while_lines_come(self, tasks: list[asyncio.Task[None]], timeout: float, longest: float) -> bool:
        """Wait for the tasks; whether lines still came when the longest time was over."""
        loop = asyncio.get_running_loop()
        progress, last = self._progress(), loop.time()
        end = last + longest
        pending = set(tasks)
        while pending:
            now = loop.time()
            if (read := self._progress()) != progress:
                progress, last = read, now
            if now >= end:
                return now - last < timeout
            if now >= last + timeout:
                return False
            _, pending = await asyncio.wait(pending, timeout=min(1.0, end - now, last + timeout - now))
        return False

    def _progress(self) -> int:
        """A number that changes as lines are read."""
        return self._gone_whole.lines + sum(container.progress for container in self._followed.values())

    async def silent(self) -> bool:
        """Whether the containers that are followed and run have written nothing since their last line that was handed
        on, or since this was last asked.

        The server is asked for the last line of each: a stream from which nothing comes may be cut, late, refused or
        without a server. False where none runs, where one has written, and where that is not known of one of them.
        """
        running = [container for container in self._followed.values() if container.runs]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASKING):
                return bool(running) and all(await asyncio.gather(*(container.silent() for container in running)))
        return False

    def report(self) -> DrainReport:
        """What became of the logs so far; of pods that a cursor knows and nobody has seen here, that too."""
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
        """Stop at once. The cursor stands where the sink stands."""
        tasks = [container.task for container in self._followed.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


REFUSED = (
    "Logs are refused for now; the right `get` on `pods/log` may be missing. Retrying until the job has ended.\n"
    "The API server says: {}"
)


class _End(enum.Enum):
    """How the answer to a request ended."""

    WHOLE = "the server ended it"
    OURS = "we ended it: its turn was over, or a drain began"
    CUT = "anything else"
    NO_LOG = "there is no such log"
    OTHER = "it does not begin with what it should"


@dataclass(frozen=True)
class _Answer:
    """What came of a request: how it ended, how many lines came and were new, what followed the last line end, and
    whether all that was seen before came again.
    """

    end: _End
    lines: int = 0
    fresh: int = 0
    rest: bytes = b""
    caught_up: bool = False


class _Container:
    """One container of one pod, and the task that reads its runs one after the other."""

    def __init__(self, follower: LogFollower, pod: Pod, name: str) -> None:
        meta = pod["metadata"]
        self.pod: str = meta["name"]
        self.name = name
        self.uid: str = meta["uid"]
        self._follower = follower
        key = Cursor.key(self.uid, name)
        follower.cursor.names[key] = f"{self.pod}/{name}"
        known = follower.cursor.positions.get(key)
        self._resumes = known is not None and bool(known.last)  # another process read it: its run may have ended since
        self._path = paths.core(meta["namespace"], "pods", self.pod)
        role, index = follower.kind.pod_role(meta.get("labels") or {})
        source = LogLine(self.pod, name, role, index, 0, "", "")
        self._at = follower.cursor.position(self.uid, name)
        self._outlet = Outlet(follower.sink, follower.budget, follower.rate, source, follower.inspector(source))
        self._run = Run()
        self._deleted = False  # the pod is gone, as the watch or a read of it says
        self._reported_deleted = False  # the watch says so
        self._draining = False
        self._drain_began = 0.0
        self._news = asyncio.Event()
        self._interrupt: Callable[[], None] | None = None  # ends the stream that is followed
        self._rest: bytes | None = None  # what the last answer that seemed whole left without a line end
        self._end = b""  # what that answer ended with
        self._bytes = 0  # read of this run
        self._rotated = False  # an answer that does not go on where the last one ended is of this run nevertheless
        self._doubts = 0  # answers in a row that brought nothing new
        self._failures = 0
        self._refused_since: float | None = None  # when the API server began to refuse the log (403)
        self._finished = False
        self._newest = ""  # the time of the last line when the server was last asked for it alone
        self.task = asyncio.get_running_loop().create_task(self._follow(), name=f"log of {self.pod}/{name}")

    def observe(self, run: Run, *, deleted: bool = False) -> None:
        if run.restart >= self._run.restart:  # a watch can be behind what was read here
            self._run = run
        self._reported_deleted = self._reported_deleted or deleted
        self._deleted = self._deleted or deleted
        if deleted and (self._finished or self._at.complete):  # nothing is left that another process could read
            self._follower.cursor.forget(self.uid, self.name)
        self._news.set()

    def drain(self) -> None:
        self._draining = True
        self._drain_began = asyncio.get_running_loop().time()
        self._news.set()
        if self._interrupt is not None and not self._ends:
            self._interrupt()

    def count_only(self) -> None:
        """From now on lines are inspected and counted, but not handed on."""
        self._outlet.closed = True

    @property
    def progress(self) -> int:
        """A number that grows as lines are read."""
        return self._outlet.read

    def tally(self) -> Tally:
        out = self._outlet
        return Tally(
            out.lines,
            out.bytes,
            out.dropped,
            out.dropped_bytes,
            tuple(out.gaps),
            self._finished or self._at.complete,
            out.late,
        )

    @property
    def runs(self) -> bool:
        """Whether it may write, as far as is known."""
        return self._run.started and not self._ends

    async def silent(self) -> bool:
        """Whether it has certainly written nothing since what was read, or since this was last asked."""
        known = max(self._at.last, self._newest)
        last = await self._peek(64, tailLines="1")
        if not last:
            return last is not None and not known
        self._newest = normal_time(last.partition(b" ")[0].decode(errors="replace")) or ""
        return "" < self._newest <= known

    @property
    def _ends(self) -> bool:
        """Whether a followed stream comes to its end by itself."""
        return self._run.ended or self._deleted

    # which request comes next

    async def _follow(self) -> None:
        try:
            await self._read_runs()
        finally:
            self._outlet.tell_dropped(self._at)
        if self._reported_deleted:
            self._follower.forget(self)

    async def _read_runs(self) -> None:
        try:
            while await self._step():
                pass
        except ApiStatusError as error:
            self._outlet.gap(f"the log can't be read: {error}", self._at)
        except Exception:
            log.exception("Following the log of %s/%s failed", self.pod, self.name)

    async def _step(self) -> bool:
        """One request, or one wait; False when nothing is left to read."""
        run, at = self._run, self._at
        if self._deleted:
            if run.started and not (at.complete or self._finished):
                self._outlet.gap("the pod was deleted before its log was read to the end", at)
            elif not at.complete:
                await self._hand_on_rest()
            return False
        if at.restart < run.restart:
            await self._previous(run, at)
            return True
        if run.started and not at.complete:
            return await self._current(run, at)
        if run.final or self._draining:
            self._finished = True
            return False
        await self._pause(None)
        return True

    async def _previous(self, run: Run, at: Position) -> None:
        """The container was restarted: read what is left of the run before this one, and begin this one."""
        before = run.restart - 1
        if at.restart < before:
            if not at.complete or at.restart + 1 < before:
                self._outlet.gap(f"of the runs before restart {run.restart}, only the last one's log is kept", at)
            self._begin(before)
        elif at.complete or await self._proved(previous="true"):
            self._begin(run.restart)
        elif run.backing_off:  # this run is the previous one already, and the one before it is out of reach
            self._outlet.gap(f"the log of run {before} is no longer kept", at)
            self._begin(run.restart)
        else:
            answer = await self._ask(previous="true")
            if answer.end is _End.NO_LOG:
                self._outlet.gap(f"the log of run {before} is no longer kept", at)
                self._begin(run.restart)
            elif await self._settled(answer, previous="true"):
                self._begin(run.restart)

    async def _current(self, run: Run, at: Position) -> bool:
        over = run.ended or self._draining
        if self._resumes:
            self._resumes = False
            await self._look()
            return True
        if not over:
            answer = await self._ask(follow="true")
            self._finished = answer.end is _End.WHOLE
            self._rest = answer.rest if self._finished else None
            if answer.end in (_End.WHOLE, _End.NO_LOG):  # has it ended? the watch will say, or else the pod
                if self._run == run:
                    await self._pause(1)
                if self._run == run:
                    await self._look()
        elif run.restarting and not self._draining:
            # what is current may be another run any moment: wait until this one can be asked for as the previous one
            await self._pause(5)
            if self._run == run:
                await self._look()
        else:
            query = {"previous": "true"} if run.backing_off else {}
            if run.ended and await self._proved(**query):
                whole = True
            else:
                answer = await self._ask(**query)
                whole = answer.end is _End.NO_LOG or await self._settled(answer, once=not run.ended, **query)
            if whole:
                self._finished = True
                at.complete = run.ended
                return run.ended
        return True

    async def _proved(self, **query: str) -> bool:
        """Whether the last lines of a run that has ended are those that were read last.

        That spares reading again what was written in the last seconds, which can be much.
        """
        if not (self._rest is not None and self._end):
            return False
        known, self._end = self._end, b""
        last = await self._peek(PROOF_BYTES + 1, tailLines=str(PROOF), **query) or b""
        lines = last.split(b"\n")
        if not last or not known.endswith(last) or (len(lines) > PROOF and len(set(lines[:PROOF])) == 1):
            return False
        await self._close_run(**query)
        return True

    async def _close_run(self, **query: str) -> None:
        """All was read: hand on a last line without an end, and say where lines may be missing nevertheless."""
        await self._hand_on_rest()
        at = self._at
        if self._bytes < ROTATABLE:
            return
        head = await self._peek(64, **query) or b""
        first = normal_time(head.partition(b" ")[0].decode(errors="replace"))
        if first is not None and first > at.first:
            self._outlet.gap(
                f"lines before {first} may be missing: the node rotated the log while it was followed, and a stream "
                "goes on with the newest file whether or not it has come to the end of the last one",
                at,
            )

    async def _hand_on_rest(self) -> None:
        """The last line, if it has no end."""
        if self._rest:
            replay = Replay(self._at)
            replay.live = True
            await self._outlet.hand_on(self._rest, replay)

    async def _settled(self, answer: _Answer, *, once: bool = False, **query: str) -> bool:
        """Whether an answer that was asked for after the end of a run shows that nothing is left to read.

        A server that loses its kubelet ends an answer as if it were whole: only one that repeats what is known and
        brings nothing new proves it, except where the run goes on and `once` has to do.
        """
        if answer.end is not _End.WHOLE:
            return False
        same, self._rest = answer.rest == self._rest and not answer.fresh, answer.rest
        self._doubts = 0 if answer.fresh else self._doubts + 1
        if not once and not (same and (answer.caught_up or self._doubts > DOUBTS)):
            return False
        await self._close_run(**query)
        return True

    def _begin(self, restart: int) -> None:
        self._at = self._follower.cursor.begin(self.uid, self.name, restart)
        self._rest, self._end, self._bytes, self._doubts, self._rotated = None, b"", 0, 0, False

    # requests

    async def _ask(self, **query: str) -> _Answer:
        """One request, and its lines handed on. Where it fails, the pod is read again before this returns."""
        answer = await self._read(query)
        if answer.fresh:
            self._failures = 0
        if answer.end is _End.OTHER:
            await self._await_another()
        if answer.end is _End.CUT:
            self._failures += 1
            if self._refused_long and not self._draining:
                await self._pause(REFUSED_PAUSE)
            elif self._failures > 1:
                longest = BACKOFF[1] if not self._draining else 1.0
                await asyncio.sleep(pause_after(max(self._failures - 1, 1), BACKOFF[0], longest))
            await self._look()
        return answer

    async def _await_another(self) -> None:
        """Find out why the log starts from its beginning.

        Either it is the log of another container run, which the pod's status doesn't show yet, or the log was rotated,
        or its end was requested, which is far from what was read.
        """
        run, loop = self._run, asyncio.get_running_loop()
        until = loop.time() + ANOTHER
        while self._run == run and not self._deleted and loop.time() < until:
            await self._look()
            if self._run == run:
                await self._pause(1)
        self._rotated = self._run == run

    async def _read(self, query: Mapping[str, str]) -> _Answer:
        at = self._at
        sure, self._rotated = self._rotated, False
        query = {"container": self.name, "timestamps": "true", **query}
        if at.since is not None:
            query["sinceTime"] = at.since
        lines, replay, count, fresh = Lines(), Replay(at), 0, 0
        end, kept = _End.CUT, b""
        async with self._follower.budget.slot() as slot:
            try:
                async with self._follower.api.stream(
                    f"{self._path}/log", query=query, pool="logs", read_timeout=SILENCE
                ) as response:
                    self._refused_since = None
                    self._follower.accepted()
                    if "follow" in query:
                        self._interrupt = response.close
                        slot.on_revoke(response.close)
                        if self._draining and not self._ends:
                            response.close()
                    async for chunk in response.content.iter_any():
                        self._bytes += len(chunk)
                        kept = (kept + chunk if len(chunk) < PROOF_BYTES else chunk)[-PROOF_BYTES:]
                        block = lines.feed(chunk)
                        if block is not None:
                            sure = sure or _begins_as_it_should(block, replay)
                            if not sure:
                                return _Answer(_End.OTHER)
                            count += block.count(b"\n") + 1
                            fresh += await self._outlet.hand_on(block, replay)
                    end = _End.NO_LOG if lines.rest.startswith(NO_LOG) else _End.WHOLE
            except ApiUnavailable:
                if slot.revoked or (self._draining and self._interrupt is not None):
                    end = _End.OURS
            except ApiStatusError as error:
                if error.status == 400:
                    end = _End.NO_LOG  # waiting to start, no previous run, no such container
                elif error.status == 403:
                    self._refuse(error)
                elif error.status not in (401, 404, 410) and not error.transient:
                    raise
            finally:
                self._interrupt = None
                self._outlet.dropped_bytes += lines.cut
        self._end = kept if end is _End.WHOLE else b""
        return _Answer(end, count, fresh, lines.rest, replay.live)

    def _refuse(self, error: ApiStatusError) -> None:
        """A refusal may pass: an API server that restarts refuses until it has read the rules. The final drain has less
        time for it.
        """
        now = asyncio.get_running_loop().time()
        if self._refused_since is None:
            self._refused_since = now
        if text := self._follower.refused(error):
            self._outlet.note(text, self._at)
        patience = 0.0 if self._refused_long else REFUSED_AT_END
        if self._draining and now - max(self._drain_began, self._refused_since) >= patience:
            raise error

    @property
    def _refused_long(self) -> bool:
        since = self._refused_since
        return since is not None and asyncio.get_running_loop().time() - since >= REFUSED_SLOWLY

    async def _peek(self, most: int, **query: str) -> bytes | None:
        """So many bytes of the log at most, which are not handed on; None where they cannot be had."""
        asked = {"container": self.name, "timestamps": "true", "limitBytes": str(most), **query}
        try:
            async with (
                self._follower.budget.slot(),
                self._follower.api.stream(f"{self._path}/log", query=asked, pool="logs", read_timeout=PEEK) as response,
            ):
                return await response.content.read(-1)
        except (ApiUnavailable, ApiStatusError):
            return None

    async def _look(self) -> None:
        """Read the pod: is it still the one that is followed, and which run is its newest?"""
        while not self._deleted:
            try:
                pod = await self._follower.api.request("GET", self._path)
            except ApiStatusError as error:
                if error.not_found:
                    self._deleted = True
                elif not error.transient and error.status != 401:
                    return  # no right to read pods: the watch must do
            except ApiUnavailable:
                pass
            else:
                self._deleted = pod["metadata"]["uid"] != self.uid
                if not self._deleted:
                    self.observe(run_of(pod, self.name))
                return
            self._failures += 1
            await asyncio.sleep(pause_after(max(self._failures - 1, 1), *BACKOFF))

    async def _pause(self, longest: float | None) -> None:
        """Wait until something is observed, at most that many seconds."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest):
                await self._news.wait()


def _begins_as_it_should(block: bytes, replay: Replay) -> bool:
    """Of the first block of an answer; a line without a time says nothing about it."""
    time = normal_time(block.partition(b" ")[0].decode(errors="replace"))
    return time is None or replay.follows(time)
