"""The logs of containers: records in CRI format, rotated files, and one log for each run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from tests.apiserver.messages import Object, Refused
from tests.apiserver.news import News
from tests.apiserver.stamps import precise_stamp

Run = tuple[str, str, int]  # pod uid, container, restartCount


@dataclass
class Record:
    """One record of a log file in CRI format: a line, or a part of a line (`partial`)."""

    time: str
    text: bytes
    partial: bool = False


@dataclass
class LogFile:
    """The log of one run of one container: its rotated files. Only the last file is served."""

    files: list[list[Record]] = field(default_factory=lambda: [[]])
    ended: bool = False
    errors: list[bytes] = field(default_factory=list)
    grown: News = field(default_factory=News)

    def write(self, time: str, text: str | bytes, *, partial: bool = False) -> None:
        self.store(time, text, partial=partial)
        self.grown.tell()

    def line(self, text: str, seconds_ago: float = 0.0) -> None:
        """Write a line now, or some seconds ago."""
        self.write(precise_stamp(seconds_ago), text)

    def store(self, time: str, text: str | bytes, *, partial: bool = False) -> None:
        """Write without telling open streams: they deliver it with what comes next."""
        self.files[-1].append(Record(time, text.encode() if isinstance(text, str) else text, partial))

    def rotate(self) -> None:
        self.files.append([])

    def fail(self, text: bytes, times: int = 1000) -> None:
        """The kubelet can't read the log on: so many responses end with its error."""
        self.errors = [text] * times
        self.grown.tell()

    def end(self) -> None:
        """Streams end when they have delivered everything."""
        self.ended = True
        self.grown.tell()

    async def read(self, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The pieces of a response."""
        left = int(query["limitBytes"]) if "limitBytes" in query else None
        async for piece in self._pieces(query):
            if left is None:
                yield piece
            elif left > len(piece):
                left -= len(piece)
                yield piece
            else:
                yield piece[:left]
                return

    async def _pieces(self, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        since, new_line, stamped = query.get("sinceTime", "")[:19], True, query.get("timestamps") == "true"
        follows, records = query.get("follow") == "true", self.files[-1]
        at = max(0, len(records) - int(query["tailLines"])) if "tailLines" in query else 0
        while True:
            out, new = bytearray(), records[at:]
            at += len(new)
            for record in new:
                if record.time[:19] >= since:
                    out += record.time.encode() + b" " if stamped and new_line and record.time else b""
                    out += record.text if record.partial else record.text + b"\n"
                new_line = not record.partial
            if self.errors:
                yield bytes(out) + self.errors.pop()
                return
            if out:
                yield bytes(out)
            if not follows:  # what is written meanwhile isn't sent
                return
            if out:
                continue
            if records is not self.files[-1]:  # it continues with the newest file and skips files in between
                records, at = self.files[-1], 0
            elif self.ended:
                return
            elif at == len(records):
                await self.grown.wait()


class Logs:
    """The logs of all runs.

    :param pod: returns a pod by name.
    """

    def __init__(self, pod: Callable[[str], Object | None]) -> None:
        self.files: dict[Run, LogFile] = {}
        self._pod = pod

    def of(self, name: str, container: str = "", restart: int | None = None) -> LogFile:
        """The log of a run; created if it doesn't exist.

        :param container: Default: the pod's first one.
        :param restart: Default: the present run.
        """
        pod = self._pod(name)
        assert pod is not None, f"no pod {name}"
        container = container or pod["spec"]["containers"][0]["name"]
        if restart is None:
            restart = int((status_of(pod, container) or {}).get("restartCount", 0))
        return self.files.setdefault((pod["metadata"]["uid"], container, restart), LogFile())

    def requested(self, name: str, query: Mapping[str, str]) -> LogFile | None:
        """The log that a request asks for. None: the pod has no node.

        :raises Refused: there is no such log.
        """
        pod = self._pod(name)
        if pod is None:
            raise Refused(404, f'pods "{name}" not found', name=name, kind="pods")
        container = _container_of(pod, query.get("container", ""))
        if not pod["spec"].get("nodeName") and status_of(pod, container) is None:
            return None
        uid, status = pod["metadata"]["uid"], status_of(pod, container) or {}
        state = status.get("state") or {}
        runs = {run for at, of, run in self.files if (at, of) == (uid, container)}
        if query.get("previous") == "true":
            # during a back-off, the previous run is also the current one
            run = int(status.get("restartCount", 0)) - ("waiting" not in state)
            if run not in runs:
                raise Refused(400, f'previous terminated container "{container}" in pod "{name}" not found')
            return self.files[uid, container, run]
        if not runs and not ({"running", "terminated"} & state.keys()):
            why = (state.get("waiting") or {}).get("reason") or "PodInitializing"
            raise Refused(400, f'container "{container}" in pod "{name}" is waiting to start: {why}')
        return self.files[uid, container, max(runs)] if runs else self.of(name, container)

    def end_with(self, pod: Object, *, gone: bool = False) -> None:
        """End the logs of the runs that have ended by the pod's status, and all if it is gone."""
        for (uid, container, run), file in self.files.items():
            if uid == pod["metadata"]["uid"] and not file.ended and (gone or _has_ended(pod, container, run)):
                file.end()


def status_of(pod: Object, container: str) -> Object | None:
    """The status of a container."""
    status = pod.get("status") or {}
    statuses = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    return next((one for one in statuses if one["name"] == container), None)


def has_ended(pod: Object) -> bool:
    """Whether all containers of a pod have ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _has_ended(pod: Object, container: str, run: int) -> bool:
    status = status_of(pod, container) or {}
    count, state, last = int(status.get("restartCount", 0)), status.get("state") or {}, status.get("lastState") or {}
    waits = "waiting" in state and "terminated" in last  # in a back-off, this run is the one that has ended
    return count > run or (count == run and ("terminated" in state or waits)) or has_ended(pod)


def _container_of(pod: Object, container: str) -> str:
    """The container that a request means."""
    name, spec = pod["metadata"]["name"], pod["spec"]
    init, main = ([one["name"] for one in spec.get(key) or ()] for key in ("initContainers", "containers"))
    if not container and len(main) == 1 and not init:
        return str(main[0])
    if not container:
        choice = " ".join([*init, *main])
        raise Refused(400, f"a container name must be specified for pod {name}, choose one of: [{choice}]")
    if container not in [*init, *main]:
        raise Refused(400, f"container {container} is not valid for pod {name}")
    return container
