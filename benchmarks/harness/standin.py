"""A stand-in for the Kubernetes API server: PyTorchJobs with their pods and logs, as cheap as possible to serve.

    python benchmarks/harness/standin.py '{"jobs": 300, "replicas": 16, "running": 300, "rate": 0.3}'

The first `running` jobs (default: none) run, the others are suspended. The first `ours` (default: all) belong to the
deployment `bench-0`, the others to `bench-1`.

The embedded cluster runs a process per pod and writes real log files, so it can't carry thousands of pods on a machine
that also runs what is measured. This server has only the endpoints that the provider uses: list, watch, get, patch and
delete of jobs and pods, follow of logs, and lists of events. It knows labels, bookmarks, `limit`, `sinceTime`, and a
deletion in the foreground. It forgets nothing and never fails. The line `n` of a log is made from its number, so that
no log is stored.

With `lines` and `age`, each container started `age` seconds ago and has written that many lines since then, evenly.

Besides Kubernetes' paths: POST /begin starts the logs, POST /end lets all jobs succeed, GET /stats has the number of
requests and the CPU time, POST /touch changes jobs, and GET /probe is a watch that sends the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

Json = dict[str, Any]
JOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
PODS = "/api/v1/namespaces/default/pods"
TICK = 0.1  # seconds between two looks at a log, as of a kubelet
TERMINATION = 0.5  # seconds from the deletion of a job until its pods are gone
BOOKMARK = 60.0  # seconds
DEPLOYMENT = "bench"


def stamp(at: float) -> str:
    """RFC 3339 with nanoseconds, as kubelets write it."""
    return f"{datetime.fromtimestamp(int(at), UTC):%Y-%m-%dT%H:%M:%S}.{int(at % 1 * 1e9):09d}Z"


def job_name(number: int) -> str:
    return f"job-{number:05}"


class Collection:
    """The objects of one path, their history, and the watches of it."""

    def __init__(self, kind: str, api_version: str) -> None:
        self.kind, self.api_version = kind, api_version
        self.objects: dict[str, Json] = {}
        self.history: list[tuple[int, str, Json]] = []
        self.grown = asyncio.Event()


class StandIn:
    """All objects and the log clock."""

    def __init__(self, parameters: Json) -> None:
        self.version = 1
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # of lists and watches
        self.watches = 0
        self.deletions: dict[str, dict[str, float]] = {}
        self.collections = {
            JOBS: Collection("PyTorchJob", "kubeflow.org/v1"),
            PODS: Collection("Pod", "v1"),
        }
        self.rate = float(parameters.get("rate", 0))
        self.metrics = bool(parameters.get("metrics"))
        self.age = float(parameters.get("age", 0))
        self.lines = int(parameters.get("lines", 0))
        self.began: float | None = None
        if self.lines:
            self.began, self.rate = time.time() - self.age, self.lines / self.age
        self.ended = False
        self.streams = 0
        self.most_streams = 0
        self._index: dict[str, int] = {}
        self._later: set[asyncio.Task[None]] = set()
        ours = int(parameters.get("ours") or parameters["jobs"])
        replicas, running = int(parameters.get("replicas", 1)), int(parameters.get("running", 0))
        for number in range(int(parameters["jobs"])):
            self._add(job_name(number), f"{DEPLOYMENT}-{int(number >= ours)}", replicas, number < running)

    def _add(self, name: str, deployment: str, replicas: int, running: bool) -> None:
        labels = {"ktrain.airflow/deployment": deployment, "ktrain.airflow/submission": name}
        now = stamp(time.time() - self.age)[:19] + "Z"
        key = {"deployment": deployment, "dag_id": "bench", "task_id": "t", "run_id": "r", "map_index": -1}
        owner = {"ktrain.airflow/owner": json.dumps({**key, "try_number": 1, "ti_id": name})}
        container = {"name": "pytorch", "image": "none:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
        spec: Json = {
            "runPolicy": {"suspend": not running},
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "restartPolicy": "Never", "template": template},
                **({"Worker": {"replicas": replicas - 1, "template": template}} if replicas > 1 else {}),
            },
        }
        kinds = ("Created", "Running") if running else ("Created", "Suspended")
        conditions = [{"type": k, "status": "True", "lastTransitionTime": now, "reason": k} for k in kinds]
        meta = {"labels": labels, "annotations": owner}
        self.put(JOBS, name, meta, spec=spec, status={"conditions": conditions, "startTime": now})
        for index in range(replicas if running else 0):
            role = ("master", 0) if index == 0 else ("worker", index - 1)
            pod = f"{name}-{role[0]}-{role[1]}"
            self._index[pod] = len(self._index)
            more = {
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/replica-type": role[0],
                "training.kubeflow.org/replica-index": str(role[1]),
            }
            state = {
                "name": "pytorch", "image": "none:1", "imageID": "", "restartCount": 0, "ready": True, "started": True,
                "containerID": f"containerd://{pod}", "state": {"running": {"startedAt": now}},
            }  # fmt: skip
            ready = [
                {"type": t, "status": "True", "lastTransitionTime": now}
                for t in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            ]
            self.put(
                PODS,
                pod,
                {"labels": {**labels, **more}, "ownerReferences": [{"uid": f"uid-{name}", "kind": "PyTorchJob"}]},
                spec={**template["spec"], "nodeName": f"node-{index % 8}", "terminationGracePeriodSeconds": 30},
                status={"phase": "Running", "startTime": now, "conditions": ready, "containerStatuses": [state]},
            )

    # the store

    def put(self, path: str, name: str, meta: Json, **content: Any) -> Json:
        """Create or replace an object."""
        held = self.collections[path]
        old = held.objects.get(name)
        self.version += 1
        base = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
        times = {"creationTimestamp": stamp(time.time())[:19] + "Z", "resourceVersion": str(self.version)}
        obj = {
            "apiVersion": held.api_version,
            "kind": held.kind,
            "metadata": {**times, **base, **meta, "resourceVersion": str(self.version)},
            **content,
        }
        held.objects[name] = obj
        self._record(held, "MODIFIED" if old else "ADDED", obj)
        return obj

    def remove(self, path: str, name: str) -> None:
        held = self.collections[path]
        if (obj := held.objects.pop(name, None)) is not None:
            self.version += 1
            gone = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
            self._record(held, "DELETED", gone)

    def _record(self, held: Collection, kind: str, obj: Json) -> None:
        held.history.append((self.version, kind, obj))
        held.grown.set()
        held.grown = asyncio.Event()

    def touch(self, names: list[str]) -> None:
        """Change an annotation of jobs."""
        for name in names:
            if obj := self.collections[JOBS].objects.get(name):
                notes = {**obj["metadata"]["annotations"], "touched": str(self.version)}
                rest = {k: v for k, v in obj.items() if k in ("spec", "status")}
                self.put(JOBS, name, {**obj["metadata"], "annotations": notes}, **rest)

    # requests

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, query = request.path, dict(request.query)
        if path == "/stats":
            return web.json_response(self._stats())
        if path == "/begin":
            self.began, self.lines = time.time() + 1.0, int(query["lines"])
            return web.json_response({"began": self.began})
        if path == "/end":
            self._end()
            return web.json_response({"ended": time.time()})
        if path == "/touch":
            self.touch(await request.json())
            return web.json_response({})
        if path == "/probe":
            return await self._probe(request)
        if path.endswith("/events"):
            self.requests["list events"] += 1
            return web.json_response(
                {"kind": "EventList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []}
            )
        if path.endswith("/log"):
            self.requests["log"] += 1
            return await self._log(request, path.split("/")[-2], query)
        if path in self.collections:
            verb = "watch" if "watch" in query else "list"
            self.requests[f"{verb} {self.collections[path].kind}s"] += 1
            held = self.collections[path]
            return await self._watch(request, held, query) if verb == "watch" else self._list(held, query)
        collection, _, name = path.rpartition("/")
        if collection not in self.collections or name not in self.collections[collection].objects:
            self.requests[f"{request.method} not found"] += 1
            return _status(404, "NotFound")
        self.requests[f"{request.method} {self.collections[collection].kind}"] += 1
        if request.method == "DELETE":
            self._delete(name)
        return web.json_response(self.collections[collection].objects[name])

    def _end(self) -> None:
        """Let all jobs succeed."""
        self.ended, now = True, stamp(time.time())[:19] + "Z"
        terminated = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": now}}
        for name, pod in list(self.collections[PODS].objects.items()):
            statuses = [{**status, "state": terminated} for status in pod["status"]["containerStatuses"]]
            status = {**pod["status"], "phase": "Succeeded", "containerStatuses": statuses}
            self.put(PODS, name, pod["metadata"], spec=pod["spec"], status=status)
        succeeded = {"type": "Succeeded", "status": "True", "lastTransitionTime": now, "reason": "Succeeded"}
        for name, job in list(self.collections[JOBS].objects.items()):
            conditions = [*job["status"]["conditions"], succeeded]
            status = {**job["status"], "conditions": conditions, "completionTime": now}
            self.put(JOBS, name, job["metadata"], spec=job["spec"], status=status)

    def _stats(self) -> Json:
        return {
            "requests": dict(self.requests),
            "bytes": dict(self.bytes),
            "watches": self.watches,
            "cpu": time.process_time(),
            "streams": self.streams,
            "most streams": self.most_streams,
            "deletions": self.deletions,
        }

    def _delete(self, name: str) -> None:
        """Delete a job in the foreground: first its pods end, then it is gone."""
        if name in self.deletions or name not in self.collections[JOBS].objects:
            return
        self.deletions[name] = {"requested": time.time()}
        obj = self.collections[JOBS].objects[name]
        meta = {**obj["metadata"], "deletionTimestamp": stamp(time.time())[:19] + "Z"}
        self.put(JOBS, name, meta, spec=obj["spec"], status=obj["status"])

        async def end() -> None:
            await asyncio.sleep(TERMINATION)
            for pod in [p for p in self.collections[PODS].objects if p.startswith(f"{name}-")]:
                self.remove(PODS, pod)
            self.deletions[name]["gone"] = time.time()
            self.remove(JOBS, name)

        task = asyncio.create_task(end())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def _list(self, held: Collection, query: dict[str, str]) -> web.Response:
        match = _selector(query)
        found = [obj for name, obj in sorted(held.objects.items()) if match(obj)]
        skip, limit = int(query.get("continue", 0)), int(query.get("limit", 0)) or len(found)
        meta: Json = {"resourceVersion": str(self.version)}
        if skip + limit < len(found):
            meta["continue"] = str(skip + limit)
        body = {"kind": f"{held.kind}List", "apiVersion": held.api_version, "metadata": meta}
        text = json.dumps({**body, "items": found[skip : skip + limit]})
        self.bytes["lists"] += len(text)
        return web.Response(text=text, content_type="application/json")

    async def _watch(self, request: web.BaseRequest, held: Collection, query: dict[str, str]) -> web.StreamResponse:
        match, at = _selector(query), int(query.get("resourceVersion") or self.version)
        response = await _streaming(request)
        loop = asyncio.get_running_loop()
        end = loop.time() + float(query.get("timeoutSeconds", 3600))
        position = next((i for i, change in enumerate(held.history) if change[0] > at), len(held.history))
        self.watches += 1
        try:
            with contextlib.suppress(ConnectionError):
                await self._send_changes(response, held, match, position, end)
        finally:
            self.watches -= 1
        return response

    async def _send_changes(
        self, response: web.StreamResponse, held: Collection, match: Any, position: int, end: float
    ) -> None:
        """Send what changes from a position in the history on, and bookmarks."""
        loop = asyncio.get_running_loop()
        bookmark = loop.time() + BOOKMARK
        while loop.time() < end:
            grown = held.grown
            new, position = held.history[position:], len(held.history)
            events = [{"type": kind, "object": obj} for _, kind, obj in new if match(obj)]
            if loop.time() >= bookmark:
                bookmark = loop.time() + BOOKMARK
                mark = {"kind": held.kind, "apiVersion": held.api_version}
                events.append(
                    {"type": "BOOKMARK", "object": {**mark, "metadata": {"resourceVersion": str(self.version)}}}
                )
            if events:
                data = b"".join(json.dumps(event).encode() + b"\n" for event in events)
                self.bytes["watches"] += len(data)
                await response.write(data)
            if position == len(held.history):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(grown.wait(), max(min(bookmark, end) - loop.time(), 0))

    async def _probe(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await _streaming(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(f"{time.monotonic()}\n".encode())
                await asyncio.sleep(TICK)
        return response

    # logs

    def _line(self, pod: str, n: int) -> bytes:
        at = self.due(pod, n)
        text = f"line {n:08} {at:.6f} "
        if self.metrics and "-master-" in pod:
            values = {"step": n, "loss": 1 / (n + 1), "accuracy": n / (n + 9), "lr": 1e-4, "grad_norm": 1.5}
            text += f"KTRAIN_METRIC {json.dumps(values)}"
        return f"{stamp(at)} {text:x<100}\n".encode()

    def due(self, pod: str, n: int) -> float:
        """When a line is written: the pods write one after the other, so that the load is even."""
        assert self.began is not None
        return self.began + (n + self._index[pod] / len(self._index)) / self.rate

    def _written(self, pod: str, now: float) -> int:
        """Number of lines written so far."""
        if self.began is None:
            return 0
        return max(0, min(self.lines, int((now - self.due(pod, 0)) * self.rate + 1) if now >= self.due(pod, 0) else 0))

    async def _log(self, request: web.BaseRequest, pod: str, query: dict[str, str]) -> web.StreamResponse:
        if pod not in self.collections[PODS].objects:
            return _status(404, "NotFound")
        if "previous" in query:
            return _status(400, "BadRequest")
        response = await _streaming(request)
        first, follow = 0, "follow" in query
        if since := query.get("sinceTime", "")[:19]:
            second = datetime.fromisoformat(since).replace(tzinfo=UTC).timestamp()
            first = max(int((second - self.due(pod, 0)) * self.rate), 0) if self.began is not None else 0
            while first < self._written(pod, time.time()) and self.due(pod, first) < second:
                first += 1
        if "tailLines" in query:
            first = max(first, self._written(pod, time.time()) - int(query["tailLines"]))
        limit = int(query.get("limitBytes", 0))
        self.streams += follow
        self.most_streams = max(self.streams, self.most_streams)
        try:
            with contextlib.suppress(ConnectionError):
                while pod in self.collections[PODS].objects:
                    written = self._written(pod, time.time())
                    if written > first:
                        data = b"".join(self._line(pod, n) for n in range(first, written))
                        await response.write(data[:limit] if limit else data)
                        first = written
                    if not follow or limit or self.ended:
                        break
                    pause = 1.0 if self.began is None or first >= self.lines else self.due(pod, first) - time.time()
                    await asyncio.sleep(max(pause, TICK))
        finally:
            self.streams -= follow
        return response


def _selector(query: dict[str, str]) -> Any:
    terms = [term.split("=") for term in query.get("labelSelector", "").split(",") if term]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")

    def match(obj: Json) -> bool:
        labels = obj["metadata"].get("labels") or {}
        if name and obj["metadata"]["name"] != name:
            return False
        return all(labels.get(t[0]) == t[1] if len(t) == 2 else t[0] in labels for t in terms)

    return match


async def _streaming(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


def _status(code: int, reason: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": "no"}
    return web.json_response(body, status=code)


async def serve(parameters: Json) -> None:
    """Serve until stdin is closed; prints the URL."""
    server = StandIn(parameters)
    runner = web.ServerRunner(web.Server(server.handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
