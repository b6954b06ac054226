"""A small Kubernetes API over HTTP for the engine's tests: list, watch and logs from a store in the test.

It behaves as the recordings of a real cluster show. It also simulates a bad network: it cuts responses after any byte,
ends them as if they were complete, expires resource versions, rejects tokens and becomes unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from airflow_provider_ktrain.engine.api.client import Api, MakeClient

Object = dict[str, Any]
PODS = "/api/v1/namespaces/ns/pods"
EPOCH = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


def stamp(seconds: float, nanos: int = 0) -> str:
    """A timestamp in the format of the kubelet, a number of seconds after EPOCH."""
    moment = EPOCH + timedelta(seconds=int(seconds))
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{round((seconds % 1) * 1e9) + nanos:09d}Z"


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
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, time: str, text: str | bytes, *, partial: bool = False) -> None:
        self.files[-1].append(Record(time, text.encode() if isinstance(text, str) else text, partial))
        self.grown.set()

    def rotate(self) -> None:
        self.files.append([])

    def fail(self, text: bytes, times: int = 1000) -> None:
        """The kubelet can't read the log on: so many responses end with its error."""
        self.errors = [text] * times
        self.grown.set()

    def end(self) -> None:
        self.ended = True
        self.grown.set()


class FakeKube:
    """Pods, their logs, and faults of requests."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.history: list[tuple[int, str, Object]] = []
        self.version = 1
        self.oldest = 0
        self.logs: dict[tuple[str, str, int], LogFile] = {}
        self.requests: Counter[str] = Counter()
        self.queries: list[dict[str, str]] = []
        self.token = "t0"
        self.away = False
        self.rejected: Counter[str] = Counter()
        self.refusal: tuple[int, str] | None = None
        self.streams: dict[int, web.BaseRequest] = {}
        self.cut_after: Callable[[], int | None] = lambda: None  # bytes of a stream until it is cut
        self.clean_cuts = False  # whether a cut looks like the end of the response
        self.cuts = 0
        self.refused = 0  # requests that got `refusal`
        self.sent = 0  # pieces of streams that were sent
        self._watchers: set[asyncio.Event] = set()
        self._uids = itertools.count(1)

    # the store

    def put(self, name: str, labels: dict[str, str] | None = None, **content: Any) -> Object:
        """Create or replace an object."""
        self.version += 1
        old = self.objects.get(name)
        meta = {
            "name": name,
            "namespace": "ns",
            "uid": old["metadata"]["uid"] if old else f"u{next(self._uids)}",
            "labels": labels or {},
            "resourceVersion": str(self.version),
            "managedFields": [{"manager": "test"}],
            **content.pop("metadata", {}),
        }
        obj = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, **content}
        self.objects[name] = obj
        self._record("MODIFIED" if old else "ADDED", obj)
        return obj

    def delete(self, name: str) -> Object:
        self.version += 1
        obj = copy.deepcopy(self.objects.pop(name))
        obj["metadata"]["resourceVersion"] = str(self.version)
        self._record("DELETED", obj)
        return obj

    def expire(self) -> None:
        """Expire all resourceVersions so far."""
        self.version += 1
        self.oldest = self.version

    def bookmark(self) -> str:
        """Send a bookmark to all watches."""
        self.version += 1
        self._record("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}})
        return str(self.version)

    def forget(self, name: str) -> Object:
        """Delete an object without an event."""
        return self.objects.pop(name)

    def cut(self) -> None:
        """Cut all open streams."""
        for request in list(self.streams.values()):
            if request.transport is not None:
                request.transport.abort()

    def _record(self, kind: str, obj: Object) -> None:
        self.history.append((self.version, kind, obj))
        for watcher in self._watchers:
            watcher.set()

    # pods with logs

    def pod(
        self, name: str, *, restart: int = 0, state: str = "running", phase: str = "Running", init: Iterable[str] = (),
        containers: Iterable[str] = ("main",), labels: dict[str, str] | None = None, last: bool | None = None,
    ) -> Object:  # fmt: skip
        """Create a pod or set its status: all containers get the same state and run."""
        status = {"restartCount": restart, "state": {state: {"exitCode": 1} if state == "terminated" else {}}}
        if restart if last is None else last:
            status["lastState"] = {"terminated": {"exitCode": 1}}
        containers, init = list(containers), list(init)
        return self.put(
            name,
            labels or {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "0"},
            spec={
                "restartPolicy": "OnFailure",
                "containers": [{"name": c} for c in containers],
                "initContainers": [{"name": c} for c in init],
            },
            status={
                "phase": phase,
                "containerStatuses": [{"name": c, **status} for c in containers],
                "initContainerStatuses": [{"name": c, **status} for c in init],
            },
        )

    def log(self, pod: str, container: str = "main", restart: int = 0) -> LogFile:
        """The log of a run; created if it doesn't exist."""
        uid = self.objects[pod]["metadata"]["uid"]
        return self.logs.setdefault((uid, container, restart), LogFile())

    # HTTP

    @property
    def open(self) -> int:
        """Streams that the client hasn't closed."""
        return sum(r.transport is not None and not r.transport.is_closing() for r in self.streams.values())

    def _selected(self, query: Any) -> Callable[[Object], bool]:
        labels = [tuple(term.split("=")) for term in query.get("labelSelector", "").split(",") if term]
        return lambda obj: all(obj["metadata"]["labels"].get(k) == v for k, v in labels)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.away:
            self.rejected[request.path] += 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return status(401, "Unauthorized", "Unauthorized")
        if self.refusal:
            self.refused += 1
            return status(*self.refusal, "no")
        path, query = request.path, dict(request.query)
        self.queries.append(query)
        if path.endswith("/log"):
            self.requests["log"] += 1
            return await self._log(request, path.split("/")[-2], query)
        if path != PODS:
            self.requests["get"] += 1
            found = self.objects.get(path.rsplit("/", 1)[1])
            return web.json_response(found) if found else status(404, "NotFound", "not found")
        if "watch" in query:
            self.requests["watch"] += 1
            return await self._watch(request, query)
        self.requests["list"] += 1
        return self._list(query)

    def _list(self, query: dict[str, str]) -> web.Response:
        match = self._selected(query)
        names = sorted(name for name, obj in self.objects.items() if match(obj))
        version, after = query.get("continue", f"{self.version}/").split("/")
        if int(version) < self.oldest:
            return status(410, "Expired", "the continue token is too old")
        names = [name for name in names if name > after]
        limit = int(query.get("limit", 0)) or len(names)
        meta = {"resourceVersion": version}
        if len(names) > limit:
            meta["continue"] = f"{version}/{names[limit - 1]}"
        items = [{k: v for k, v in self.objects[n].items() if k not in ("apiVersion", "kind")} for n in names[:limit]]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items})

    async def _watch(self, request: web.BaseRequest, query: dict[str, str]) -> web.StreamResponse:
        match, at = self._selected(query), int(query["resourceVersion"])
        async with self._stream(request) as write:
            if at < self.oldest:
                error = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await write(json.dumps({"type": "ERROR", "object": error}).encode() + b"\n")
                return write.response
            held: set[str] = set()
            news = asyncio.Event()
            self._watchers.add(news)
            over = asyncio.get_running_loop().call_later(float(query["timeoutSeconds"]), news.set)
            until = over.when()
            try:
                for version, kind, obj in self.history:
                    if version <= at:
                        seen(held, kind, obj, match)
                while True:
                    for version, kind, obj in [change for change in self.history if change[0] > at]:
                        at, reported = version, seen(held, kind, obj, match)
                        if reported:
                            obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}}
                            await write(json.dumps({"type": reported, "object": obj}).encode() + b"\n")
                    news.clear()
                    if asyncio.get_running_loop().time() >= until:
                        break
                    if not self.history or self.history[-1][0] <= at:
                        await news.wait()
            finally:
                over.cancel()
                self._watchers.discard(news)
        return write.response

    async def _log(self, request: web.BaseRequest, name: str, query: dict[str, str]) -> web.StreamResponse:
        pod = self.objects.get(name)
        if pod is None:
            return status(404, "NotFound", f'pods "{name}" not found')
        uid, container = pod["metadata"]["uid"], query["container"]
        runs = sorted(run for u, c, run in self.logs if (u, c) == (uid, container))
        if "previous" in query:
            # during a back-off, the previous run is also the current one
            statuses = pod["status"]["containerStatuses"] + pod["status"]["initContainerStatuses"]
            now = next(s for s in statuses if s["name"] == container)
            runs = [run for run in runs if run == now["restartCount"] - ("waiting" not in now["state"])]
            if not runs:
                return status(400, "BadRequest", f'previous terminated container "{container}" not found')
        if not runs:
            return status(400, "BadRequest", f'container "{container}" is waiting to start: PodInitializing')
        file = self.logs[uid, container, runs[-1]]
        async with self._stream(request, query.get("limitBytes")) as write:
            since, new_line = query.get("sinceTime", "")[:19], True
            records = file.files[-1]
            at = max(0, len(records) - int(query["tailLines"])) if "tailLines" in query else 0
            while True:
                file.grown.clear()
                out, new = bytearray(), records[at:]
                at += len(new)
                for record in new:
                    if record.time[:19] >= since:
                        out += (record.time.encode() + b" " if new_line and record.time else b"") + record.text
                        out += b"" if record.partial else b"\n"
                    new_line = not record.partial
                if file.errors:
                    await write(bytes(out) + file.errors.pop())
                    break
                if out:
                    await write(bytes(out))
                elif records is not file.files[-1]:  # it continues with the newest file and skips files in between
                    records, at = file.files[-1], 0
                elif "follow" not in query or file.ended:
                    break
                else:
                    await file.grown.wait()
        return write.response

    @contextlib.asynccontextmanager
    async def _stream(self, request: web.BaseRequest, most: str | None = None) -> AsyncIterator[Writer]:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        self.streams[id(request)] = request
        try:
            with contextlib.suppress(Cut):
                yield Writer(self, request, response, self.cut_after(), None if most is None else int(most))
        finally:
            self.streams.pop(id(request))


class Cut(Exception):
    """The stream was cut or has reached its limit."""


@dataclass
class Writer:
    kube: FakeKube
    request: web.BaseRequest
    response: web.StreamResponse
    left: int | None  # bytes until the cut
    most: int | None  # bytes until limitBytes

    async def __call__(self, data: bytes) -> None:
        if self.most is not None:
            data, over = data[: self.most], len(data) >= self.most
            self.most -= len(data)
            await self._send(data)
            if over:
                raise Cut
        else:
            await self._send(data)

    async def _send(self, data: bytes) -> None:
        if self.left is None or len(data) < self.left:
            await self.response.write(data)
            self.kube.sent += 1
            self.left = None if self.left is None else self.left - len(data)
            return
        await self.response.write(data[: self.left])
        self.kube.cuts += 1
        if not self.kube.clean_cuts:
            await asyncio.sleep(0)
            assert self.request.transport is not None
            self.request.transport.close()
        raise Cut


def seen(held: set[str], kind: str, obj: Object, match: Callable[[Object], bool]) -> str | None:
    """The watch event that a change causes for a selector, given the uids that the watch has sent."""
    if kind == "BOOKMARK":
        return kind
    uid = obj["metadata"]["uid"]
    if kind != "DELETED" and match(obj):
        reported = "MODIFIED" if uid in held else "ADDED"
        held.add(uid)
        return reported
    if uid in held:
        held.discard(uid)
        return "DELETED"
    return None


def status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code)


@contextlib.asynccontextmanager
async def serving(kube: FakeKube) -> AsyncIterator[Api]:
    """Serve the API and yield an Api for it."""
    async with clients(kube) as make_client:
        api = Api(make_client)
        try:
            yield api
        finally:
            await api.close()


@contextlib.asynccontextmanager
async def clients(kube: FakeKube) -> AsyncIterator[MakeClient]:
    """Serve the API and yield a function that builds clients for it."""
    from kubernetes_asyncio import client

    runner = web.ServerRunner(web.Server(kube.handle), shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()

    async def make_client() -> client.ApiClient:
        configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        configuration.api_key["BearerToken"] = f"Bearer {kube.token}"
        return client.ApiClient(configuration)

    try:
        yield make_client
    finally:
        kube.cut()
        await runner.cleanup()


async def until(condition: Callable[..., Any], seconds: float = 240) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def cutter(rng: random.Random, largest: int, times: int) -> Callable[[], int | None]:
    """Cuts a number of streams, each after a random number of bytes."""
    left = itertools.count(times, -1)
    return lambda: rng.randrange(largest) if next(left) > 0 else None
