"""Requests the log of one container and emits the lines of the responses.

`container_follower` decides which request comes next.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.cursor import Cursor, Position, Replay, normal_time
from airflow_provider_ktrain.core.logs.exec_trace import KnownJob
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.logs.container_state import ObservedContainer
from airflow_provider_ktrain.engine.logs.emitter import Inspect, LineSplitter, RateLimitedEmitter
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.stream_budget import StreamBudget

#: How long a followed stream may be silent before it is requested again: it may be dead.
STREAM_SILENCE_SECONDS = 300.0
PEEK_TIMEOUT_SECONDS = 10.0  #: How long a request for a few lines may be silent before it is given up.
NO_LOG_TEXT = b"unable to retrieve container logs"  #: A kubelet's answer, with status 200, if it has no such log.
TAIL_CHECK_BYTES = 4096  #: How much of the end of a response is kept for the tail check.
#: How long a log must have been refused (403) before it is requested only once a minute.
SLOW_RETRY_AFTER_SECONDS = 600.0
FORBIDDEN_GRACE_SECONDS = 10.0  #: How long a refused log is requested in the final drain: GPUs are held meanwhile.


class ResponseEnd(enum.Enum):
    """How the response to a request ended."""

    COMPLETE = "the server ended it"
    STOPPED = "we ended it, because its turn was over or the final drain began"
    CUT = "the connection failed, or the request was refused"
    NO_LOG = "the kubelet has no such log"
    UNREADABLE = "the kubelet could not read the log on, and wrote why instead of a last line"
    OTHER_LOG = "it doesn't begin with the expected line, so nothing of it was emitted"


@dataclass(frozen=True)
class Response:
    """The response to one request.

    :param unended_line: what followed the last line end.
    :param caught_up: whether it repeated all lines that were known from its beginning on.
    :param tail: the last TAIL_CHECK_BYTES; empty unless it is COMPLETE.
    """

    end: ResponseEnd
    size: int = 0
    new_lines: int = 0
    unended_line: bytes = b""
    caught_up: bool = False
    tail: bytes = b""


@dataclass
class JobLogs:
    """What the followers of a job's containers share.

    :param known_job: called for the job, whose Secrets are masked in what kubexec.sh prints.
    :param began: when the trigger began, by the loop's time.
    :param refused: whether the API server refuses their logs (403); then this was logged once for all containers.
    """

    api: Api
    sink: Callable[[LogLine], None]
    kind: Kind
    cursor: Cursor
    budget: StreamBudget
    inspector: Callable[[LogLine], Inspect]
    known_job: KnownJob
    began: float
    refused: bool = False


class LogReader:
    """Makes the requests for the log of one container.

    :param emit: takes the lines of a block. Default: the emitter inspects and logs them.
    :param silence: seconds without a byte after which a stream is given up. Default: STREAM_SILENCE_SECONDS.
    """

    def __init__(
        self,
        job: JobLogs,
        path: str,
        container: str,
        emitter: RateLimitedEmitter,
        observed: ObservedContainer,
        *,
        emit: Callable[[bytes, Replay], Awaitable[int]] | None = None,
        silence: float = STREAM_SILENCE_SECONDS,
    ) -> None:
        self._job = job
        self._path = f"{path}/log"
        self._container = container
        self._emitter, self._emit, self._silence = emitter, emit or emitter.emit, silence
        self._observed = observed
        self._forbidden_since: float | None = None
        self._close_stream: Callable[[], None] | None = None  # of the stream that is followed

    def stop_following(self) -> None:
        """End the stream that is followed, if there is one: in a drain, only the log up to now matters."""
        if self._close_stream is not None:
            self._close_stream()

    @property
    def is_following(self) -> bool:
        """Whether the server has answered a request to follow the log, and may still send lines."""
        return self._close_stream is not None

    @property
    def retries_slowly(self) -> bool:
        """Whether the log has been refused (403) for so long that requests get rare."""
        since = self._forbidden_since
        return since is not None and asyncio.get_running_loop().time() - since >= SLOW_RETRY_AFTER_SECONDS

    async def read(self, position: Position, query: Mapping[str, str], *, any_start: bool) -> Response:
        """Request the log from a position on, emit the new lines, and move the position.

        ApiStatusError where the API server refuses the log for good.

        :param any_start: whether to accept a response that doesn't begin with the expected line.
        """
        query = {"container": self._container, "timestamps": "true", **query}
        if position.since is not None:
            query["sinceTime"] = position.since
        lines, replay, size, new_lines = LineSplitter(), Replay(position), 0, 0
        end, tail = ResponseEnd.CUT, b""
        async with self._job.budget.slot() as slot:
            try:
                async with self._job.api.stream(
                    self._path, query=query, pool="logs", read_timeout=self._silence
                ) as response:
                    self._forbidden_since = None
                    self._job.refused = False
                    if "follow" in query:
                        self._close_stream = response.close
                        slot.on_revoke(response.close)
                        if self._observed.draining and not self._observed.stream_ends_by_itself:
                            response.close()
                    async for chunk in response.content.iter_any():
                        size += len(chunk)
                        tail = (tail + chunk if len(chunk) < TAIL_CHECK_BYTES else chunk)[-TAIL_CHECK_BYTES:]
                        block = lines.feed(chunk)
                        if block is not None:
                            any_start = any_start or replay.follows(time_of_line(block))
                            if not any_start:
                                return Response(ResponseEnd.OTHER_LOG, size)
                            new_lines += await self._emit(block, replay)
                    if lines.unended_line.startswith(NO_LOG_TEXT):
                        end = ResponseEnd.NO_LOG
                    else:
                        unreadable = is_of_kubelet(lines.unended_line)
                        end = ResponseEnd.UNREADABLE if unreadable else ResponseEnd.COMPLETE
            except ApiUnavailable:
                if slot.revoked or (self._observed.draining and self._close_stream is not None):
                    end = ResponseEnd.STOPPED
            except ApiStatusError as error:
                if error.status == 400:
                    end = ResponseEnd.NO_LOG  # waiting to start, no previous run, no such container
                elif error.status == 403:
                    self._tolerate(error, position)
                elif error.status not in (401, 404, 410) and not error.transient:
                    raise
            finally:
                self._close_stream = None
                self._emitter.tally.dropped_bytes += lines.bytes_cut
        tail = tail if end is ResponseEnd.COMPLETE else b""
        return Response(end, size, new_lines, lines.unended_line, replay.live, tail)

    async def peek(self, limit_bytes: int, **query: str) -> bytes | None:
        """Request a few bytes of the log without emitting them; None if they can't be had."""
        query = {"container": self._container, "timestamps": "true", "limitBytes": str(limit_bytes), **query}
        try:
            async with (
                self._job.budget.slot(),
                self._job.api.stream(
                    self._path, query=query, pool="logs", read_timeout=PEEK_TIMEOUT_SECONDS
                ) as response,
            ):
                return await response.content.read(-1)
        except (ApiUnavailable, ApiStatusError):
            return None

    def _tolerate(self, error: ApiStatusError, position: Position) -> None:
        """Warn about a refusal (403), which may pass; raise it once it has lasted too long for the final drain.

        An API server that restarts refuses everything until it has read the RBAC rules.
        """
        now = asyncio.get_running_loop().time()
        if self._forbidden_since is None:
            self._forbidden_since = now
        if not self._job.refused:
            self._job.refused = True
            self._emitter.add_notice(
                "Logs are refused for now; the right `get` on `pods/log` may be missing. Retrying until the job has "
                f"ended.\nThe API server answered: {error}",
                position,
            )
        grace = 0.0 if self.retries_slowly else FORBIDDEN_GRACE_SECONDS
        draining_since = self._observed.draining_since
        if draining_since is not None and now - max(draining_since, self._forbidden_since) >= grace:
            raise error


def is_of_kubelet(unended_line: bytes) -> bool:
    """Whether what follows the last line end of a response is the kubelet's own text: it has no timestamp.

    Seen on Kubernetes 1.36, with status 200: `failed to create fsnotify watcher: too many open files`, `failed to open
    log file`, `failed to try resolving symlinks in path "/var/log/pods/...": ... no such file or directory`.
    """
    return bool(unended_line) and time_of_line(unended_line) is None


def time_of_line(line: bytes) -> str | None:
    """The timestamp at the beginning of a line; None if there is none."""
    return normal_time(line.partition(b" ")[0].decode(errors="replace"))
