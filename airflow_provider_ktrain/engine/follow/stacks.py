"""Reads the stacks that the containers of a job print when a limit releases it, followed or not."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.hangs import Hang, explain_hang, find_hang
from airflow_provider_ktrain.core.diagnosis.model import Cause
from airflow_provider_ktrain.core.diagnosis.node_conditions import NodeProblem
from airflow_provider_ktrain.core.diagnosis.node_rules import problem_of_hanging
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity.names import STACKS_ANNOTATION
from airflow_provider_ktrain.core.logs.container_run import run_of
from airflow_provider_ktrain.core.logs.stacks import MAX_RECORDS, End, Stack, read_record
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.state.pods.objects import node_of
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import ApiStatusError, ApiUnavailable, Object, get_if_allowed
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.logs.emitter import LineSplitter

MAX_REPLICAS = 64  #: How many replicas' stacks are read.
RETRY_SECONDS = 0.5  #: Pause before a stream that failed is opened again.
OPEN_SECONDS = 2.0  #: How long before the release the streams may take to open.
SECONDS = 10.0  #: How long after the release the error line is logged in any case.
TAIL_LINES = MAX_RECORDS + 100  #: A stream that waits for its turn may be opened after the stacks were printed.
MAX_BYTES = 4 * 1024 * 1024  #: How many bytes of one container are read.
MAX_SHOWN = 12  #: Processes whose stacks are logged.


@dataclass
class _Source:
    """One container and what it has printed."""

    pod: str
    container: str
    replica: str
    stacks: list[Stack] = field(default_factory=list)
    left_out: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)


class StackReader:
    """Reads stacks while the owner releases the job; a context manager.

    :param limit: that has passed. None: nothing is read.
    :param pods: of the job, as they were read for the decision.
    """

    def __init__(
        self, context: FollowContext, output: JobOutput, limit: Limit | None, seconds: float, pods: Sequence[Object]
    ) -> None:
        self._api, self._state, self._log = context.api, context.state, context.log
        self._output, self._limit, self._seconds = output, limit, seconds
        self._ended: list[str] = []  # replicas of which no pod runs any more
        self._pods, self._sources = pods, [] if limit is None else self._chosen(pods)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def are_expected(self) -> bool:
        """Whether containers of the job will print stacks."""
        return bool(self._sources)

    async def open(self) -> None:
        """Open the streams, before the pods are deleted. The release waits for them for a short time."""
        if self._tasks:
            return
        self._tasks = [asyncio.create_task(self._read(source)) for source in self._sources]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_SECONDS):
                for source in self._sources:
                    await source.opened.wait()

    async def explain(self, cause: Cause) -> tuple[Cause, list[str]]:
        """Wait for the stacks, and add to the cause of the limit what they show; and the stacks, as lines of a log.

        All of this takes SECONDS at most, whatever the containers print and the API server answers.
        """
        deadline = asyncio.get_running_loop().time() + SECONDS
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SECONDS)
        found = {source.replica: source.stacks for source in self._sources if source.stacks}
        kind, job = self._state.kind, self._state.known_job
        replicas = kind.size(job) - sum(kind.count(job, role) for role in kind.launchers)
        hang = find_hang(found, replicas, self._ended)
        if hang is None or self._limit is None:
            return cause, []
        problem = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                problem = await self._problem_of(hang.replica)
        return explain_hang(cause, self._limit, self._seconds, hang, problem), [*hang.lines, *self._shown(hang)]

    async def _problem_of(self, replica: str) -> NodeProblem | None:
        """What is wrong with the node of a replica; None if nothing is, or if the connection may not read it."""
        kind = self._state.kind
        for pod in self._pods:
            if kind.replica(pod) == replica and (name := node_of(pod)):
                with contextlib.suppress(KtrainError):
                    path = api_paths.nodes(name)
                    node = await get_if_allowed(self._api, path)
                    evidence = make_evidence(
                        self._state.known_job, self._pods, nodes=[node] if isinstance(node, dict) else []
                    )
                    return problem_of_hanging(replica, evidence)
        return None

    def _chosen(self, pods: Sequence[Object]) -> list[_Source]:
        """The running containers that print stacks: the primary's, the lowest last steps, the highest indices."""
        kind, job = self._state.kind, self._state.known_job
        if STACKS_ANNOTATION not in (job["metadata"].get("annotations") or {}):
            return []
        steps, primary = self._output.training_metrics.last_steps, (kind.primary(job), 0)
        found, ended = [], set()
        for pod in pods:
            name = kind.main_container_name(job, pod)
            run = run_of(pod, str(name))
            role, index = kind.role_of(pod)
            replica = kind.replica_name(role, index)
            if run.final:
                ended.add(replica)
            if not run.started or run.ended:
                continue
            order = (role, index) != primary, steps.get(replica, math.inf), -index
            found.append((order, _Source(pod["metadata"]["name"], str(name), replica)))
        self._ended = sorted(ended - {source.replica for _, source in found})
        return [source for _, source in sorted(found, key=lambda entry: entry[0])][:MAX_REPLICAS]

    async def _read(self, source: _Source) -> None:
        """Read a container's log from its last lines on, until its stacks are complete or the container has ended."""
        path = f"{api_paths.core(self._state.ref.namespace, 'pods', source.pod)}/log"
        # a line that is there makes the server answer at once
        query = {"container": source.container, "follow": "true", "tailLines": str(TAIL_LINES)}
        while True:
            splitter, size = LineSplitter(), 0
            try:
                async with (
                    self._output.follower.budget.slot(),
                    self._api.stream(path, query=query, pool="logs", read_timeout=OPEN_SECONDS + SECONDS) as response,
                ):
                    source.opened.set()
                    source.stacks.clear()
                    async for chunk in response.content.iter_any():
                        size += len(chunk)
                        block = splitter.feed(chunk)
                        if (block is not None and _take(source, block)) or size > MAX_BYTES:
                            return
                    return
            except (ApiStatusError, ApiUnavailable) as e:
                source.opened.set()
                if not e.transient:
                    return
            await asyncio.sleep(RETRY_SECONDS)

    def _shown(self, hang: Hang) -> list[str]:
        """The stacks of one process of each group, and of all that keep the others waiting."""
        odd = [process for group in hang.groups[: hang.odd] for process in group.processes]
        chosen = [*odd, *(group.processes[0] for group in hang.groups[hang.odd :])]
        lines = []
        for process in chosen[:MAX_SHOWN]:
            if process.frames:
                lines.append(f"{hang.name(process)}, innermost call first:")
                lines += [f"  {frame.path}:{frame.line} in {frame.function}" for frame in process.frames]
        if left_out := sum(source.left_out for source in self._sources):
            lines.append(f"{counted(left_out, 'stack')} did not fit into the logs of the pods.")
        return lines


def _take(source: _Source, block: bytes) -> bool:
    for line in block.decode("utf-8", "replace").split("\n"):
        record = read_record(line)
        if isinstance(record, End):
            source.left_out = record.left_out
            return True
        if record is not None and len(source.stacks) < MAX_RECORDS:
            source.stacks.append(record)
    return False
