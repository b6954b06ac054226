"""A follower of the logs of a fake cluster, and a sink that collects its lines."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.engine.logs.follower import DrainReport, LogFollower
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from tests.apiserver import LogFile, PodServer, log_time, serving

#: Parametrizes a test over kinds: it passes the kind to `following`.
of_each_kind = pytest.mark.parametrize("kind", [PYTORCHJOB, TRAINJOB], ids=["pytorchjob", "trainjob"])


class Sink:
    """Collects the lines of the containers and the notices of the follower separately."""

    def __init__(self) -> None:
        self.lines: list[LogLine] = []
        self.notices: list[str] = []

    def __call__(self, line: LogLine) -> None:
        if line.notice:
            self.notices.append(line.text)
        else:
            self.lines.append(line)

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    def by_run(self) -> dict[tuple[str, str, int], list[str]]:
        found = defaultdict(list)
        for line in self.lines:
            found[line.pod, line.container, line.restart].append(line.text)
        return dict(found)


@contextlib.asynccontextmanager
async def following(kube: PodServer, sink: Callable[[LogLine], None], **options: Any) -> AsyncIterator[LogFollower]:
    async with serving(kube) as api:
        follower = LogFollower(api, sink, **{"kind": PYTORCHJOB, **options})
        for pod in list(kube.pods.values()):
            follower.observe(pod)
        try:
            yield follower
        finally:
            await follower.close()


def gaps_of(report: DrainReport) -> dict[tuple[str, str], tuple[str, ...]]:
    """Where lines may be missing, and why, by pod and container."""
    return {key: tally.gaps for key, tally in report.containers.items() if tally.gaps}


def write(log: LogFile, start: int, stop: int, rate: float = 100, begin: float = 0) -> None:
    """Write numbered lines with `rate` timestamps a second."""
    for n in range(start, stop):
        log.write(log_time(begin + n / rate), f"line {n}")


def numbered(start: int, stop: int) -> list[str]:
    return [f"line {n}" for n in range(start, stop)]
