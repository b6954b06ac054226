"""A small API server for tests of rare moments: it has jobs and pods that a test writes, and no operator.

What a watch shows and what a read shows are apart: `frozen` keeps events from watches, while lists and GETs are up to
date. `away` cuts all connections. `fail` answers requests with an error status.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
import itertools
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from kubernetes_asyncio import client

from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api

Object = dict[str, Any]
NAMESPACE = "ns"
STREAM_INTERVAL = 0.02  # seconds between two looks of a log stream


def stamp(seconds_ago: float = 0.0) -> str:
    """A timestamp of Kubernetes, which has no fractions of a second."""
    moment = datetime.datetime.fromtimestamp(timing.epoch() - seconds_ago, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def precise_stamp(seconds_ago: float = 0.0) -> str:
    """A timestamp of a log line."""
    moment = datetime.datetime.fromtimestamp(timing.epoch() - seconds_ago, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


@dataclass
class Failure:
    """Requests that get an error status. `count` is the number of requests that still get it."""

    method: str
    path: re.Pattern[str]
    status: int
    count: float


@dataclass(frozen=True)
class Where:
    """What a path names: the collection's resource, the object, and a subresource; empty if it names none."""

    resource: str
    name: str = ""
    sub: str = ""

    @classmethod
    def of(cls, path: str) -> Where:
        parts = path.strip("/").split("/")
        at = parts.index("namespaces") + 2 if "namespaces" in parts else 2 if "nodes" in parts else len(parts)
        return cls(*[*parts[at:], "", "", ""][:3])


class SmallApi:
    """The server. All methods are called in its event loop.

    :param on_write: called after each create and delete with the method, the resource and the object. Default: nothing.
    """

    def __init__(self, on_write: Callable[[str, str, Object], None] = lambda method, resource, obj: None) -> None:
        self.objects: dict[str, dict[str, Object]] = defaultdict(dict)  # by resource and name
        self.logs: dict[str, list[tuple[str, str]]] = defaultdict(list)  # by pod: time and text
        self.requests: list[str] = []  #: method and path with query of each request
        self.frozen: set[str] = set()  #: resources whose watches show nothing new
        self.on_request: Callable[[str], None] = lambda line: None
        self.paused = asyncio.Event()  #: set when a request waits at the point that `pause` has set
        self._pause = re.compile(r"(?!)")
        self._slow: tuple[re.Pattern[str], float] = re.compile(r"(?!)"), 0.0
        self._on_write = on_write
        self._failures: list[Failure] = []
        self._history: dict[str, list[tuple[int, str, Object]]] = defaultdict(list)
        self._version = 100
        self._oldest = 0  # watches from an older version fail
        self._uids = itertools.count(1)
        self._away = False
        self._changed = asyncio.Event()
        self._open: dict[int, web.BaseRequest] = {}

    # faults

    @property
    def away(self) -> bool:
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away = away
        if away:
            for request in list(self._open.values()):
                if request.transport is not None:
                    request.transport.abort()

    def fail(self, method: str, path: str, status: int = 503, count: float = 1) -> None:
        self._failures.append(Failure(method, re.compile(path), status, count))

    def clear_failures(self) -> None:
        self._failures.clear()

    def pause(self, moment: str) -> None:
        """Never answer the request whose moment matches: `before GET /path`, or `after GET /path` if it is processed.

        An empty pattern ends that for later requests.
        """
        self._pause = re.compile(moment or r"(?!)")
        self.paused.clear()

    def slow(self, moment: str, seconds: float) -> None:
        """Wait at moments that match, as in `pause`."""
        self._slow = re.compile(moment or r"(?!)"), seconds

    async def _wait(self, moment: str) -> None:
        pattern, seconds = self._slow
        if pattern.match(moment):
            await asyncio.sleep(seconds)
        if self._pause.match(moment):
            self.paused.set()
            await asyncio.Event().wait()

    def freeze(self, *resources: str) -> None:
        self.frozen |= set(resources)

    def expire(self) -> None:
        """Forget all changes so far: a watch from an older resourceVersion gets 410 Gone."""
        self._oldest = self._version

    def thaw(self) -> None:
        self.frozen.clear()
        self._notify()

    def writes(self) -> list[str]:
        """The requests that have changed something."""
        return [line for line in self.requests if not line.startswith("GET ")]

    def watched(self, resource: str) -> bool:
        return any(f"/{resource}?" in line and "watch=true" in line for line in self.requests)

    # the store

    def put(self, resource: str, obj: Object) -> Object:
        """Create or replace an object."""
        old = self.objects[resource].get(obj["metadata"]["name"])
        self._version += 1
        meta = obj["metadata"]
        meta.setdefault("uid", old["metadata"]["uid"] if old else f"uid-{next(self._uids)}")
        meta.setdefault("creationTimestamp", stamp())
        meta |= {"namespace": NAMESPACE, "resourceVersion": str(self._version)}
        self.objects[resource][meta["name"]] = obj
        self._record(resource, "MODIFIED" if old else "ADDED", obj)
        return obj

    def change(self, resource: str, name: str, change: Callable[[Object], object]) -> Object:
        """Change a copy of an object, and store it."""
        obj = copy.deepcopy(self.objects[resource][name])
        change(obj)
        return self.put(resource, obj)

    def remove(self, resource: str, name: str) -> None:
        """Delete an object and everything that it owns."""
        obj = copy.deepcopy(self.objects[resource].pop(name))
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._record(resource, "DELETED", obj)
        for other, objects in list(self.objects.items()):
            for owned in list(objects.values()):
                owners = owned["metadata"].get("ownerReferences") or ()
                if any(owner["uid"] == obj["metadata"]["uid"] for owner in owners):
                    self.remove(other, owned["metadata"]["name"])

    def _record(self, resource: str, event: str, obj: Object) -> None:
        self._history[resource].append((self._version, event, copy.deepcopy(obj)))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # HTTP

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        line = f"{request.method} {request.rel_url}"
        if self._away:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.requests.append(line)
        self.on_request(line)
        for failure in self._failures:
            if failure.count and request.method == failure.method and failure.path.search(str(request.rel_url)):
                failure.count -= 1
                return _status(failure.status, "Failure")
        self._open[id(request)] = request
        try:
            await self._wait(f"before {line}")
            answer = await self._answer(request, Where.of(request.path))
            await self._wait(f"after {line}")
            return answer
        finally:
            self._open.pop(id(request), None)

    async def _answer(self, request: web.BaseRequest, where: Where) -> web.StreamResponse:
        query = dict(request.query)
        if not where.resource:
            return web.json_response(self._discovery())
        if request.method == "POST":
            return self._create(where, await request.json())
        if not where.name:
            return await (self._watch(request, where, query) if "watch" in query else self._list(where, query))
        obj = self.objects[where.resource].get(where.name)
        if obj is None:
            return _status(404, "NotFound")
        if where.sub == "log":
            return await self._log(request, where.name, query)
        if request.method == "GET":
            return web.json_response(obj)
        body = await request.json() if request.can_read_body else {}
        if request.method == "DELETE":
            fence = body.get("preconditions") or {}
        else:
            fence = {"resourceVersion": (body.get("metadata") or {}).pop("resourceVersion", None)}
        if any(value and obj["metadata"][key] != value for key, value in fence.items()):
            return _status(409, "Conflict")
        if request.method == "DELETE":
            if obj["metadata"].get("finalizers"):
                deleted = {"metadata": {"deletionTimestamp": stamp()}}
                return web.json_response(self.put(where.resource, _merged(obj, deleted)))
            self.remove(where.resource, where.name)
            self._on_write("DELETE", where.resource, obj)
            return web.json_response({})
        return web.json_response(self.put(where.resource, _merged(obj, body)))

    def _discovery(self) -> Object:
        """All kinds are served in all versions, and Kueue if there is a Workload."""
        plurals = ("pytorchjobs", "mpijobs", "trainjobs")
        versions = [{"version": "v1beta2"}] if self.objects["workloads"] else []
        return {"resources": [{"name": plural} for plural in plurals], "versions": versions}

    def _create(self, where: Where, body: Object) -> web.Response:
        if body["metadata"]["name"] in self.objects[where.resource]:
            return _status(409, "AlreadyExists")
        created = copy.deepcopy(self.put(where.resource, body))
        self._on_write("POST", where.resource, created)
        return web.json_response(created, status=201)

    async def _list(self, where: Where, query: Mapping[str, str]) -> web.Response:
        items = [obj for obj in self.objects[where.resource].values() if _selects(query, obj)]
        return web.json_response(
            {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": str(self._version)}, "items": items}
        )

    async def _watch(self, request: web.BaseRequest, where: Where, query: Mapping[str, str]) -> web.StreamResponse:
        if not query["resourceVersion"].isdigit():
            return _status(400, "BadRequest")
        response, at = await _stream(request), int(query["resourceVersion"])
        if at < self._oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        end = timing.now() + float(query["timeoutSeconds"])
        while timing.now() < end:
            changed = self._changed
            history = () if where.resource in self.frozen else self._history[where.resource]
            for version, event, obj in [one for one in history if one[0] > at and _selects(query, one[2])]:
                at = version
                await response.write(json.dumps({"type": event, "object": obj}).encode() + b"\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end - timing.now()):
                    await changed.wait()
        return response

    async def _log(self, request: web.BaseRequest, pod: str, query: Mapping[str, str]) -> web.StreamResponse:
        uid = self.objects["pods"][pod]["metadata"]["uid"]
        response, sent, since = await _stream(request), 0, query.get("sinceTime", "")
        while True:
            found = self.objects["pods"].get(pod)
            if found is not None and found["metadata"]["uid"] != uid:  # the lines are another pod's
                await response.write_eof()
                return response
            lines = [line for line in self.logs[pod] if line[0][:19] >= since[:19]]
            for at, text in lines[sent:]:
                await response.write(f"{at} {text}\n".encode())
            sent = len(lines)
            if "follow" not in query or found is None or found["status"]["phase"] in ("Succeeded", "Failed"):
                await response.write_eof()
                return response
            await asyncio.sleep(STREAM_INTERVAL)


async def _stream(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    await response.write(b"")
    return response


def _status(code: int, reason: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason}
    return web.json_response(body, status=code)


def _selects(query: Mapping[str, str], obj: Object) -> bool:
    labels, meta = obj["metadata"].get("labels") or {}, obj["metadata"]
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.partition("=")
        if key not in labels or (value and labels[key] != value):
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = term.partition("=")
        if key == "metadata.name" and meta["name"] != value:
            return False
        if key.startswith("involvedObject."):
            return bool(obj["involvedObject"].get(key.partition(".")[2]) == value)
    return True


def _merged(obj: Object, patch: Object) -> Object:
    """A JSON merge patch."""
    result = copy.deepcopy(obj)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _merged(result.get(key) or {}, value)
        else:
            result[key] = value
    return result


@contextlib.asynccontextmanager
async def served(api: SmallApi) -> AsyncIterator[str]:
    """Serve the API; yields its URL."""
    runner = web.ServerRunner(web.Server(api.handle), shutdown_timeout=0.01)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        api.away = True
        await runner.cleanup()


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Api]:
    """A client of the API at this URL."""

    async def make_client() -> client.ApiClient:
        return client.ApiClient(client.Configuration(host=url))

    api = Api(make_client)
    try:
        yield api
    finally:
        await api.close()
