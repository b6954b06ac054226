"""What happens to a container and its log, step by step, and what a follower reads of it."""

from __future__ import annotations

import ast
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.logs.emitter import ignore
from airflow_provider_ktrain.engine.logs.follower import DrainReport, LogFollower, Takeover
from tests.apiserver import LogFile, Object, PodServer, log_time, serving
from tests.until import until

from .log_following import Sink, gaps_of

Run = tuple[str, int]  #: A container of the pod, and its restartCount.


class Story:
    """The container `main` of the pod `p`. It is followed from `follow` on, by one process after the other.

    :ivar written: what must be read, by container and run.
    :ivar report: of the last drain.
    """

    def __init__(self, api: Api, kube: PodServer) -> None:
        self.api, self.kube, self.sink = api, kube, Sink()
        self._seen: Object = {}  # the pod as it was observed last
        self.written: dict[Run, list[str]] = defaultdict(list)
        self.report = DrainReport({})
        self._follower: LogFollower | None = None
        self._cursor = Cursor()
        self._run = self._lines = self._new = self._before = 0
        self._logs: dict[Run, LogFile] = {}
        self._begin, self._since_begin = 0.0, 0
        self._most_requests = math.inf

    @property
    def follower(self) -> LogFollower:
        assert self._follower is not None
        return self._follower

    @property
    def log(self) -> LogFile:
        """That of the newest run."""
        return self._log_of("main")

    def _log_of(self, container: str) -> LogFile:
        key = container, self._run
        if key not in self._logs:
            self._logs[key] = self.kube.log("p", *key)
        return self._logs[key]

    @property
    def read(self) -> Mapping[Run, list[str]]:
        found: dict[Run, list[str]] = defaultdict(list)
        before, since = self.sink.lines[: self._before], self.sink.lines[self._before :]
        for line in [*before, *sorted(since, key=lambda line: not line.again)]:  # lines that are repeated come later
            found[line.container, line.restart] += line.text.split("\n")
        return found

    # the container

    def status(self, **status: Any) -> None:
        """Set the pod's status; it is not observed."""
        self.kube.pod("p", **{"restart": self._run, **status})

    def write(self, count: int, *, container: str = "main", begin: float | None = None) -> None:
        """Write numbered lines, 100 a second.

        :param begin: time of the first one. Default: that after the last one.
        """
        if begin is not None:
            self._begin, self._since_begin = begin, 0
        for _ in range(count):
            text = f"line {self._lines}"
            self._log_of(container).write(self._now, text)
            self.written[container, self._run].append(text)
            self._lines, self._since_begin = self._lines + 1, self._since_begin + 1
        self._new = count

    @property
    def _now(self) -> str:
        return log_time(self._begin + self._since_begin / 100)

    def write_part(self, text: str, *, ends: bool = False) -> None:
        """Write a part of a line."""
        lines = self.written["main", self._run]
        lines += [lines.pop() + text if ends else text]
        self.log.write(self._now, text, partial=not ends)

    def lose(self) -> None:
        """The lines that were written last can't be read by anybody."""
        del self.written["main", self._run][-self._new :]

    def end(self, *, container: str = "main") -> None:
        """The run writes nothing more; its status doesn't show this yet."""
        self._log_of(container).end()

    def run_again(self) -> None:
        """The container restarts, and its status doesn't show this yet."""
        self._run += 1

    def recreate(self) -> None:
        """Another pod gets the pod's name; this is not observed."""
        self.kube.delete_pod("p")
        self.kube.pod("p")
        self._logs.clear()

    def fail(self, text: bytes, times: int = 1000) -> None:
        """The kubelet answers so many requests for the log with an error."""
        self.log.fail(text, times)

    def rotate(self) -> None:
        """The node begins another file of the log."""
        self.log.rotate()

    def delete_unseen(self) -> None:
        """The pod is deleted, and this is not observed."""
        self.kube.delete_pod("p")

    def refuse(self) -> None:
        """The API server refuses all logs."""
        self.kube.refuse(403)

    def cut(self) -> None:
        """All streams are cut."""
        self.kube.cut()

    def cut_off(self) -> None:
        """All connections fail from now on."""
        self.kube.away = True
        self.kube.cut()

    def come_back(self) -> None:
        """Connections succeed again."""
        self.kube.away = False

    # the follower

    def observe(self, **status: Any) -> None:
        """Set the pod's status; the follower sees it."""
        self.status(**status)
        self._see()

    def _see(self) -> None:
        if "p" in self.kube.pods:
            self._seen = self.kube.pods["p"]
            self.follower.observe(self._seen)

    def delete(self) -> None:
        """The follower sees that the pod is deleted."""
        self.follower.observe(self.kube.delete_pod("p"), deleted=True)

    def skip(self) -> None:
        """A process begins, and hasn't observed the pod yet."""
        self._seen = {}
        self.follow(late=True)

    def follow(self, *, late: bool = False, **options: Any) -> None:
        """A process begins to follow the log where the last one has stopped.

        :param late: whether its watch shows the pod as it was observed last.
        """
        saved = json.loads(json.dumps(self._cursor.to_dict()))
        self._follower = LogFollower(
            self.api, self.sink, **{"kind": PYTORCHJOB, "cursor": Cursor.from_dict(saved), **options}
        )
        if not late:
            self._see()
        elif self._seen:
            self._follower.observe(self._seen)

    def take_over(self, at: float) -> None:
        """A process begins to follow the log, and another one may have followed it before that time."""
        self._before = len(self.sink.lines)
        handed_over = Cursor.from_dict(self._cursor.to_dict())
        self.follow(cursor=Cursor(), takeover=Takeover(handed_over, log_time(at), lambda source: ignore))

    async def hand_over(self) -> None:
        """The process stops."""
        await self.follower.close()
        self._cursor, self._follower = self.follower.cursor, None

    async def wait(self) -> None:
        """Wait until all lines were read."""
        expected = sum(map(len, self.written.values()))
        await until(lambda: sum(map(len, self.read.values())) == expected)

    async def wait_for_pod_reads(self, count: int) -> None:
        """Wait until the follower has read the pod so many times more, and has read no further line meanwhile."""
        lines, end = len(self.sink.lines), self.kube.verbs["get"] + count
        await until(lambda: self.kube.verbs["get"] >= end)
        assert len(self.sink.lines) == lines

    async def wait_for_streams(self, count: int) -> None:
        """So many requests have followed a log until now."""
        await until(lambda: sum("follow" in query for query in self.kube.queries) >= count)
        assert sum("follow" in query for query in self.kube.queries) == count

    def forbid_reading(self) -> None:
        """Nothing of the log is requested from now on."""
        self._most_requests = self.kube.verbs["log"]

    async def wait_for_errors(self) -> None:
        """Wait until all errors of the kubelet were sent."""
        await until(lambda: not self.log.errors)

    async def drain(self, seconds: float = 60, **options: Any) -> None:
        self.report = await self.follower.drain(seconds, **options)

    async def drain_deleted(self) -> None:
        self.report = await self.follower.drain_deleted(60, 60)

    async def close(self) -> None:
        if self._follower is not None:
            await self._follower.close()

    def check(self, gaps: tuple[str, ...], unread: bool) -> None:
        """All lines were read once and in order, and the gaps were reported."""
        for run, written in self.written.items():
            assert self.read[run] == written, f"{run}: {sorted({*written}.symmetric_difference(self.read[run]))}"
        assert self.read.keys() <= self.written.keys()
        found = [gap for reported in gaps_of(self.report).values() for gap in reported]
        assert len(found) == len(gaps), found
        assert all(expected in gap for expected, gap in zip(gaps, found, strict=True)), found
        assert gaps or self.sink.notices == []
        assert bool(self.report.unread) is unread
        assert self.kube.verbs["log"] <= self._most_requests


async def tell(steps: str, **words: Any) -> Story:
    """Let something happen: `write 5, drain 0.2 keep_open=True` calls these methods of `Story`.

    :param words: values that steps name.
    """
    kube = PodServer()
    async with serving(kube) as api:
        story = Story(api, kube)
        try:
            for step in steps.split(","):
                name, *given = step.split()
                options = dict(one.split("=") for one in given if "=" in one)
                done = getattr(story, name)(
                    *(_value(one, words) for one in given if "=" not in one),
                    **{key: _value(one, words) for key, one in options.items()},
                )
                if done is not None:
                    await done
        finally:
            await story.close()
    return story


def _value(word: str, words: Mapping[str, Any]) -> Any:
    if word in words:
        return words[word]
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word
