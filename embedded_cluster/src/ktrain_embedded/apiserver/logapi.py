"""pods/log: read the log files of containers (CRI format) as a kubelet does. The container's parent writes them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import mmap
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ktrain_embedded.apiserver.requestinfo import flag, integer
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError, invalid
from ktrain_embedded.objects.pods import container_of, container_status
from ktrain_embedded.objects.store import Obj, Store, at

POLL = 0.1  # seconds between reads of a followed file
#: Text of a waiting reason in the error message of a log request, if it differs from the reason.
WAITING = {"ErrImagePull": "image can't be pulled", "ImagePullBackOff": "trying and failing to pull image"}
BLOCK = 1 << 16  # bytes per read


@dataclass(frozen=True)
class LogOptions:
    """PodLogOptions. `since` is an RFC 3339 time in UTC without Z, so that it can be compared with a record's time."""

    container: str = ""
    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    since: str = ""
    tail: int | None = None
    limit: int | None = None


def options(pod: str, query: Mapping[str, str]) -> LogOptions:
    """Return the LogOptions of a query. Raise ApiError 400 or 422 with the API server's message if one is invalid."""
    seconds, tail, limit = (integer(query, name) for name in ("sinceSeconds", "tailLines", "limitBytes"))
    since = _time(query["sinceTime"]) if query.get("sinceTime") else None
    problems_of_fields: list[tuple[str, str]] = []
    if tail is not None and tail < 0:
        problems_of_fields.append(("tailLines", f"Invalid value: {tail}: must be greater than or equal to 0"))
    if limit is not None and limit < 1:
        problems_of_fields.append(("limitBytes", f"Invalid value: {limit}: must be greater than 0"))
    if seconds is not None and since is not None:
        problems_of_fields.append(("[]", "Forbidden: at most one of `sinceTime` or `sinceSeconds` may be specified"))
    elif seconds is not None and seconds < 1:
        problems_of_fields.append(("sinceSeconds", f"Invalid value: {seconds}: must be greater than 0"))
    if query.get("stream"):
        problems_of_fields.append(("stream", "Forbidden: may not be specified"))
    if problems_of_fields:
        problems = [(f"FieldValue{why.split()[0].rstrip(':')}", why, field) for field, why in problems_of_fields]
        raise invalid("PodLogOptions", problems, name=pod, group="")
    if seconds is not None:
        since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=min(seconds, 10**9))
    return LogOptions(
        query.get("container", ""), flag(query, "follow"), flag(query, "previous"), flag(query, "timestamps"),
        since.strftime("%Y-%m-%dT%H:%M:%S.%f") if since else "", tail, limit,
    )  # fmt: skip


def _time(text: str) -> datetime.datetime:
    """Parse an RFC 3339 time. The result has whole seconds, as in the API server's request to the kubelet."""
    try:
        time = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        if time.tzinfo is None or "T" not in text:
            raise ValueError
        return time.astimezone(datetime.UTC).replace(microsecond=0)
    except (ValueError, OverflowError):
        layout = "2006-01-02T15:04:05Z07:00"
        raise ApiError(400, f'parsing time "{text}" as "{layout}": cannot parse "{text}" as "2006"') from None


@dataclass(frozen=True)
class Run:
    """One run of a container, and its log file."""

    pod: Obj
    container: str
    restart: int
    path: Path


def find_run(root: Path, pod: Obj, options: LogOptions) -> Run | None:
    """Return the run whose log is requested, None if the pod isn't bound to a node yet.

    :raises ApiError: 400 if the container's name is missing or invalid, or if the container has no such run.
    """
    container = container_of(pod, options.container)
    if not pod["spec"].get("nodeName"):
        return None
    restart = _restart(pod, container, options.previous)
    return Run(pod, container, restart, root / "pods" / pod["metadata"]["uid"] / container / f"{restart}.log")


def _restart(pod: Obj, container: str, previous: bool) -> int:
    """Return the restart number of the run that a kubelet would choose. Raise ApiError 400 if no run has started."""
    status, name = container_status(pod, container), pod["metadata"]["name"]
    restart, last = int(status.get("restartCount", 0)), at(status, "lastState.terminated.containerID")
    started = bool(at(status, "state.running") or at(status, "state.terminated.containerID"))
    if previous:
        if not last:
            raise ApiError(400, f'previous terminated container "{container}" in pod "{name}" not found')
        return restart - 1 if started else restart
    if started or last:
        return restart
    reason = at(status, "state.waiting.reason") or ("no logs yet" if status.get("state") else "ContainerCreating")
    raise ApiError(400, f'container "{container}" in pod "{name}" is waiting to start: {WAITING.get(reason, reason)}')


async def read(store: Store, run: Run, options: LogOptions) -> AsyncIterator[bytes]:
    """Yield the bytes of a log. With follow, stop at the end of the log after the run has ended or the pod is gone."""
    file = _open(run.path)
    if file is None and (not options.follow or _ended(store, run)):
        identity = container_status(run.pod, run.container).get("containerID", "containerd://")
        yield f"unable to retrieve container logs for {identity}".encode()
        return
    while file is None and not _ended(store, run):
        await asyncio.sleep(POLL)
        file = _open(run.path)
    if file is None:
        return
    try:
        if options.tail is not None:
            file.seek(tail_offset(file, options.tail))
        shown = Shown(options)
        while True:
            ended = not options.follow or _ended(store, run)
            successor = _successor(file, run.path) if options.follow else None
            while block := file.read(BLOCK):
                data = b"".join(shown.lines(block))
                if data:
                    yield data
                if shown.full:
                    return
                await asyncio.sleep(0)
            if successor:
                file.close()
                file = successor
            elif ended:
                return
            else:
                await asyncio.sleep(POLL)
    finally:
        file.close()


def _open(path: Path) -> BinaryIO | None:
    """Open the file. Return None if it doesn't exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.open("rb")
    return None


def _successor(file: BinaryIO, path: Path) -> BinaryIO | None:
    """Return the new log file if the log was rotated. After a rotation, the old file doesn't change any more."""
    with contextlib.suppress(FileNotFoundError):
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return _open(path)
    return None


def _ended(store: Store, run: Run) -> bool:
    """Whether the run's log is complete."""
    meta = run.pod["metadata"]
    pod = store.find(r.POD, meta["namespace"], meta["name"])
    if pod is None or pod["metadata"]["uid"] != meta["uid"]:
        return True
    status = container_status(pod, run.container)
    return not at(status, "state.running") or status.get("restartCount", 0) != run.restart


class Shown:
    """Convert blocks of a CRI log to the lines that the client receives."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self._rest = b""
        self._new_line = True
        self._left = sys.maxsize if options.limit is None else options.limit

    @property
    def full(self) -> bool:
        """Whether limitBytes is reached."""
        return self._left <= 0

    def lines(self, block: bytes) -> Iterator[bytes]:
        """Yield the lines of the complete records. An incomplete record is kept for the next block."""
        *records, self._rest = (self._rest + block).split(b"\n")
        for record in records:
            time, _, tag, content = (*record.split(b" ", 3), b"", b"", b"")[:4]
            if self._options.since and time.rstrip(b"Z").decode() < self._options.since:
                continue
            partial = tag.startswith(b"P")
            head = time + b" " if self._options.timestamps and self._new_line else b""
            self._new_line = not partial
            line = head + content + (b"" if partial else b"\n")
            line, self._left = line[: self._left], self._left - len(line)
            yield line
            if self.full:
                return


def tail_offset(file: BinaryIO, count: int) -> int:
    """Return the offset of the last `count` records of a file."""
    at = size = file.seek(0, os.SEEK_END)
    if not count or not size:
        return size
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as records:
        for _ in range(count + 1):  # + 1 for the newline at the end of the last record
            if (at := records.rfind(b"\n", 0, at)) < 0:
                return 0
    return at + 1
