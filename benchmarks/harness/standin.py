"""A script of the tests' API server for benchmarks: PyTorchJobs with their pods and logs.

    python benchmarks/harness/standin.py '{"jobs": 300, "replicas": 16, "running": 300, "rate": 0.3}'

The first `running` jobs (default: none) run, the others are suspended. The first `ours` (default: all) belong to the
deployment `bench-0`, the others to `bench-1`.

The embedded cluster runs a process per pod and writes real log files, so it can't carry thousands of pods on a machine
that also runs what is measured. Here the line `n` of a log is made from its number, so that no log is stored, and a
deletion ends the pods half a second later.

With `lines` and `age`, each container started `age` seconds ago, has written that many lines since then, and goes on at
this rate.

Besides Kubernetes' paths: POST /begin starts the logs, POST /end lets all jobs fail, with CAUSE and its number as the
last line of each container, and returns how many lines each of them has written. GET /stats has the number of requests
and the CPU time, POST /touch changes jobs, and GET /probe is a watch that sends the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.apiserver import ApiServer, LogFile, Object, Request, Response
from tests.apiserver.http import respond
from tests.apiserver.logs import Logs
from tests.apiserver.resources import Resource
from tests.apiserver.server import Stream
from tests.apiserver.watches import Watch

JOBS = "pytorchjobs"
TICK = 0.1  # seconds between two looks at a log, as of a kubelet
TERMINATION = 0.5  # seconds from the deletion of a job until its pods are gone
BOOKMARK = 60.0  # seconds
BLOCK = 1000  # lines of a log that are sent together, and kept for the next request
CAUSE = "torch.OutOfMemoryError: CUDA out of memory."  #: Of a failure. The line's number follows.
DEPLOYMENT = "bench"


def stamp(at: float) -> str:
    """RFC 3339 with nanoseconds, as kubelets write it."""
    return f"{datetime.fromtimestamp(int(at), UTC):%Y-%m-%dT%H:%M:%S}.{int(at % 1 * 1e9):09d}Z"


def job_name(number: int) -> str:
    return f"job-{number:05}"


class Lines(LogFile):
    """The log of a pod, whose lines are due at times that follow from their number."""

    def __init__(self, stand_in: StandIn, pod: str) -> None:
        super().__init__()
        self._stand_in, self._pod = stand_in, pod

    async def read(self, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        of, pod, first, follow = self._stand_in, self._pod, 0, "follow" in query
        if (since := query.get("sinceTime", "")[:19]) and of.began is not None:
            second = datetime.fromisoformat(since).replace(tzinfo=UTC).timestamp()
            first = max(int((second - of.due(pod, 0)) * of.rate), 0)
            while first < of.written(pod) and of.due(pod, first) < second:
                first += 1
        if "tailLines" in query:
            first = max(first, of.written(pod) - int(query["tailLines"]))
        limit = int(query.get("limitBytes", 0))
        of.log_streams += follow
        of.most_streams = max(of.log_streams, of.most_streams)
        try:
            while pod in of.pods:
                written = of.written(pod)
                while first < written:
                    after = min(first - first % BLOCK + BLOCK, written)
                    data = of.block(pod, first, after)
                    yield data[:limit] if limit else data
                    if limit:
                        return
                    first = after
                if not follow or limit or of.ended_at is not None:
                    break
                pause = 1.0 if of.began is None or first >= of.lines else of.due(pod, first) - time.time()
                await asyncio.sleep(max(pause, TICK))
        finally:
            of.log_streams -= follow


class AllLogs(Logs):
    """The logs of all pods."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__(stand_in.pods.get)
        self._stand_in = stand_in

    def requested(self, name: str, query: Mapping[str, str]) -> LogFile | None:
        if name in self._stand_in.pods and "previous" not in query:
            return Lines(self._stand_in, name)
        return super().requested(name, query)


class CountedWatch:
    """A watch whose bytes are counted."""

    def __init__(self, stand_in: StandIn, watch: Watch) -> None:
        self._stand_in, self._watch, self.content_type = stand_in, watch, watch.content_type

    async def pieces(self) -> AsyncIterator[bytes]:
        self._stand_in.watches += 1
        try:
            async for piece in self._watch.pieces():
                self._stand_in.bytes["watches"] += len(piece)
                yield piece
        finally:
            self._stand_in.watches -= 1


class StandIn(ApiServer):
    """All objects and the log clock."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(namespace="default")
        self.logs, self.ends_logs = AllLogs(self), False
        self.bytes: Counter[str] = Counter()  # of lists and watches
        self.watches = 0
        self.deletions: dict[str, dict[str, float]] = {}
        self.rate = float(parameters.get("rate", 0))
        self.metrics = bool(parameters.get("metrics"))
        self.age = float(parameters.get("age", 0))
        self.lines = int(parameters.get("lines", 0))
        self.began: float | None = None
        if self.lines:
            self.began, self.rate, self.lines = time.time() - self.age, self.lines / self.age, sys.maxsize
        self.ended_at: float | None = None
        self.log_streams = self.most_streams = 0
        self._index: dict[str, int] = {}
        self._blocks: dict[tuple[str, int], bytes] = {}
        ours = int(parameters.get("ours") or parameters["jobs"])
        replicas, running = int(parameters.get("replicas", 1)), int(parameters.get("running", 0))
        for number in range(int(parameters["jobs"])):
            self._add(job_name(number), f"{DEPLOYMENT}-{int(number >= ours)}", replicas, number < running)
        if self.age:  # a node reads such a log from its disk, much faster than its lines are made here
            for pod in self._index:
                for first in range(0, self.written(pod) - BLOCK, BLOCK):
                    self.block(pod, first, first + BLOCK)

    def _add(self, name: str, deployment: str, replicas: int, running: bool) -> None:
        labels = {"ktrain.airflow/deployment": deployment, "ktrain.airflow/submission": name}
        now = stamp(time.time() - self.age)[:19] + "Z"
        key = {"deployment": deployment, "dag_id": "bench", "task_id": "t", "run_id": "r", "map_index": -1}
        owner = {"ktrain.airflow/owner": json.dumps({**key, "try_number": 1, "ti_id": name})}
        container = {"name": "pytorch", "image": "none:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
        spec: Object = {
            "runPolicy": {"suspend": not running},
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "restartPolicy": "Never", "template": template},
                **({"Worker": {"replicas": replicas - 1, "template": template}} if replicas > 1 else {}),
            },
        }
        kinds = ("Created", "Running") if running else ("Created", "Suspended")
        conditions = [{"type": k, "status": "True", "lastTransitionTime": now, "reason": k} for k in kinds]
        meta = {"labels": labels, "annotations": owner}
        status = {"conditions": conditions, "startTime": now}
        self.put(JOBS, {"metadata": {**meta, "name": name, "uid": f"uid-{name}"}, "spec": spec, "status": status})
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
            owners = [{"uid": f"uid-{name}", "kind": "PyTorchJob"}]
            of_pod: Object = {"name": pod, "uid": f"uid-{pod}", "labels": {**labels, **more}, "ownerReferences": owners}
            pod_spec = {**template["spec"], "nodeName": f"node-{index % 8}", "terminationGracePeriodSeconds": 30}
            status = {"phase": "Running", "startTime": now, "conditions": ready, "containerStatuses": [state]}
            self.put("pods", {"metadata": of_pod, "spec": pod_spec, "status": status})

    # requests

    def answer(self, request: Request) -> Response | Stream:
        answer = super().answer(request)
        if isinstance(answer, Watch):
            return CountedWatch(self, answer)
        if isinstance(answer, Response) and request.verb == "list":
            self.bytes["lists"] += len(answer.data)
        return answer

    def carry_out_deletion(self, resource: Resource, obj: Object, options: Mapping[str, Any]) -> Response:
        """In the foreground: first the pods of a job end, then it is gone."""
        name = obj["metadata"]["name"]
        if resource.plural == JOBS and name not in self.deletions:
            now = time.time()
            self.deletions[name] = {"requested": now}
            shown = self.change(JOBS, name, lambda job: job["metadata"].update(deletionTimestamp=f"{stamp(now)[:19]}Z"))
            asyncio.get_running_loop().call_later(TERMINATION, self._terminated, name)
            return Response(200, shown)
        return Response(200, obj)

    def _terminated(self, name: str) -> None:
        self.deletions[name]["gone"] = time.time()
        self.remove(JOBS, name)

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, also to one of the paths that are not Kubernetes'."""
        if request.path == "/stats":
            return web.json_response(self._stats())
        if request.path == "/begin":
            self.began, self.lines = time.time() + 1.0, int(request.query["lines"])
            return web.json_response({"began": self.began})
        if request.path == "/end":
            return web.json_response(self._end())
        if request.path == "/touch":
            for name in await request.json():
                if (job := self.objects[JOBS].get(name)) is not None:
                    job["metadata"]["annotations"]["touched"] = str(self.version)
                    self.put(JOBS, job)
            return web.json_response({})
        if request.path == "/probe":
            return await self._probe(request)
        return await respond(self, request)

    def _end(self) -> dict[str, int]:
        """Let all jobs fail; returns the lines of each pod."""
        self.ended_at = time.time()
        now = stamp(self.ended_at)[:19] + "Z"
        terminated = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": now}}
        for pod in list(self.pods.values()):
            statuses = [{**status, "state": terminated} for status in pod["status"]["containerStatuses"]]
            self.put("pods", {**pod, "status": {**pod["status"], "phase": "Failed", "containerStatuses": statuses}})
        failed = {"type": "Failed", "status": "True", "lastTransitionTime": now, "reason": "Failed"}
        for job in list(self.objects[JOBS].values()):
            conditions = [*job["status"]["conditions"], failed]
            self.put(JOBS, {**job, "status": {**job["status"], "conditions": conditions}})
        return {pod: self.written(pod) for pod in self._index}

    def _stats(self) -> Object:
        return {
            "requests": dict(self.verbs),
            "bytes": dict(self.bytes),
            "watches": self.watches,
            "cpu": time.process_time(),
            "streams": self.log_streams,
            "most streams": self.most_streams,
            "deletions": self.deletions,
        }

    async def _probe(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(f"{time.monotonic()}\n".encode())
                await asyncio.sleep(TICK)
        return response

    # logs

    def block(self, pod: str, first: int, after: int) -> bytes:
        """The lines from `first` to before `after`, of the same BLOCK. A whole one that won't change is kept."""
        key = pod, first
        if key in self._blocks and after - first == BLOCK:
            return self._blocks[key]
        data = b"".join(self._line(pod, n) for n in range(first, after))
        if after - first == BLOCK and self.ended_at is None:
            self._blocks[key] = data
        return data

    def _line(self, pod: str, n: int) -> bytes:
        if self.ended_at is not None and n == self.written(pod) - 1:
            return f"{stamp(self.ended_at)} {CAUSE} line {n:08}\n".encode()
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

    def written(self, pod: str) -> int:
        """Number of lines written so far."""
        ended = self.ended_at is not None
        if self.began is None:
            return int(ended)
        since = (self.ended_at or time.time()) - self.due(pod, 0)
        return int(ended) + max(0, min(self.lines, int(since * self.rate + 1) if since >= 0 else 0))


async def serve(parameters: Mapping[str, Any]) -> None:
    """Serve until stdin is closed; prints the URL."""
    server = StandIn(parameters)
    runner = web.ServerRunner(web.Server(server.respond, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    while not ended.done():
        await asyncio.wait([ended], timeout=BOOKMARK)
        server.bookmark()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
