"""The embedded cluster's process: one event loop with API server, controllers, scheduler and kubelets.

`python -m ktrain_embedded.server --config JSON` serves until SIGTERM (or until its parent has gone) and
prints one line of JSON when it is ready. Everything that it started ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from ktrain_embedded import controllers, credentials, scheduler, trainer_status
from ktrain_embedded.apiserver.app import ApiServer
from ktrain_embedded.apiserver.faults import Faults
from ktrain_embedded.cluster import Config
from ktrain_embedded.controllers import runtimes
from ktrain_embedded.controllers.nodes import NodeTimes
from ktrain_embedded.node import gpus
from ktrain_embedded.node.kubelet import Kubelet
from ktrain_embedded.node.nodes import node_objects
from ktrain_embedded.node.podworker import GPUS, Timing
from ktrain_embedded.objects import definitions, priorities
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.store import Obj, Store
from ktrain_embedded.ports import LOOPBACK, free_port
from ktrain_embedded.trainer_status import StatusServer

log = logging.getLogger(__name__)

PORTS = range(30_000, 32_000)  # below the kernel's range of ephemeral ports
NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
PARENT_CHECK_INTERVAL = 0.5  # seconds between checks whether the parent is still running
STATE_FILE = "cluster.json"
MAX_HEADER = 64 * 1024  # bytes of the request line and of each header
#: Faults of a node that need nothing but its name.
OF_NODE: dict[str, Callable[[Kubelet], None]] = {
    "lose": Kubelet.lose, "silence": Kubelet.silence, "shutdown": Kubelet.shut_down, "recover": Kubelet.recover,
}  # fmt: skip


class Cluster:
    """All components of one embedded cluster."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = Path(config.state_dir).absolute()
        self._volumes = self._directory / "volumes"
        self._certificate, self._admin, self._ssl = credentials.make_tls(self._directory)
        self._token = secrets.token_urlsafe(32)
        self._port = config.port or free_port(PORTS)
        self._store = Store()
        self._faults = Faults()
        self._served = r.served(config.mpi_api, config.trainer, kueue=config.kueue)
        self._api = ApiServer(
            self._store, self._served, admin_token=self._token, address=f"{LOOPBACK}:{self._port}",
            root=self._directory, faults=self._faults, switch=self._switch,
        )  # fmt: skip
        self._runner = web.AppRunner(
            self._api.app, access_log=None, handle_signals=False, handler_cancellation=True, max_line_size=MAX_HEADER,
            max_field_size=MAX_HEADER,
        )  # fmt: skip
        self._site: web.TCPSite | None = None
        self._status_port = free_port(PORTS) if config.trainer_status else 0
        self._status = web.AppRunner(StatusServer(self._store, self._api.authenticator.valid).app, access_log=None)
        self._background: set[asyncio.Task[None]] = set()
        self._kubelets: dict[str, Kubelet] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Then end all containers and close the port."""
        await self._runner.setup()
        await self._status.setup()
        self._bootstrap()
        tasks = [asyncio.ensure_future(loop) for loop in self._loops()]
        waiting = asyncio.create_task(stop.wait())
        try:
            await self._listen()
            if self._status_port:
                await web.TCPSite(self._status, LOOPBACK, self._status_port, ssl_context=self._ssl).start()
            self._announce()
            done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waiting}:
                task.result()  # raises an exception, because loops don't end without one
        finally:
            for task in (waiting, *tasks, *self._background):
                task.cancel()
            await asyncio.gather(waiting, *tasks, *self._background, return_exceptions=True)
            self._cut_connections()
            await self._runner.cleanup()
            await self._status.cleanup()

    def _bootstrap(self) -> None:
        """Create the initial objects of the cluster."""
        for name in dict.fromkeys((*NAMESPACES, self._config.namespace)):
            self._store.create(r.NAMESPACE, {"metadata": {"name": name}})
        for priority_class in priorities.SYSTEM:
            self._store.create(r.PRIORITY_CLASS, priority_class)
        definitions.install(self._store, self._served)
        if r.TRAINJOB in self._served:
            runtimes.install(self._store)
        GPUS.offer(gpus.devices())
        images = {name: Path(path) if path else None for name, path in self._config.images.items()}
        for node in node_objects(self._config.nodes, self._config.gpus_per_node, self._config.resources):
            name = self._store.create(r.NODE, node)["metadata"]["name"]
            token = self._api.authenticator.account_token
            hosts = {trainer_status.HOST: f"{LOOPBACK}:{self._status_port}"} if self._status_port else {}
            self._kubelets[name] = Kubelet(
                self._store, name, self._directory, images, token=token, hosts=hosts,
                timing=Timing(unreachable=Timing.unreachable * self._config.node_times),
            )  # fmt: skip

    def _loops(self) -> Iterator[Awaitable[None]]:
        yield scheduler.run(self._store)
        for kubelet in self._kubelets.values():
            yield kubelet.run()
        ca = self._certificate.public.decode()
        status_ca = ca if self._status_port else ""
        times = NodeTimes.scaled(self._config.node_times)
        for controller in controllers.all_controllers(self._store, self._served, self._volumes, ca, status_ca, times):
            yield controller()

    async def _listen(self) -> None:
        self._site = web.TCPSite(
            self._runner, LOOPBACK, self._port, ssl_context=self._ssl, reuse_address=True, backlog=1024
        )
        await self._site.start()

    def _announce(self) -> None:
        """Write the kubeconfig and the state file, and print the state for the parent process."""
        url, ca_file = f"https://{LOOPBACK}:{self._port}", self._directory / "ca.crt"
        kubeconfig = Path(self._config.kubeconfig or self._directory / "kubeconfig").absolute()
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        user = {"token": self._token}
        if self._config.client_certificate:
            pair = {"certificate": self._admin.public, "key": self._admin.key}
            user = {f"client-{what}-data": credentials.encoded(pem) for what, pem in pair.items()}
        content = credentials.kubeconfig(url, self._certificate.public, user, self._config.namespace)
        credentials.write_private(kubeconfig, content)
        ca_file.write_bytes(self._certificate.public)
        files = {"kubeconfig": str(kubeconfig), "ca_file": str(ca_file)}
        state = {"pid": os.getpid(), "url": url, **files, "token": self._token}
        credentials.write_private(self._directory / STATE_FILE, json.dumps(state).encode())
        print(json.dumps(state), flush=True)  # noqa: T201

    # fault switches

    async def _switch(self, options: Obj, requester: asyncio.Transport | None) -> Obj:
        """Execute a request to the fault switches. The connection of `requester` isn't cut. ApiError 400, 404."""
        match options.get("fault"):
            case "clear":
                self._faults.clear()
            case "expire":
                self._store.expire()
            case "evict":
                pod = self._store.get(r.POD, str(options.get("namespace") or "default"), str(options.get("pod")))
                message = str(options.get("message") or "The node was low on resource: memory.")
                self._kubelet(pod["spec"].get("nodeName")).evict(pod, message)
            case str(fault) if fault in OF_NODE:
                OF_NODE[fault](self._kubelet(options.get("node")))
            case "pressure":
                await self._kubelet(options.get("node")).run_out_of_disk()
            case "break_devices":
                message = str(options.get("message") or "rpc error: code = Internal desc = device d0 is lost")
                self._kubelet(options.get("node")).break_devices(message)
            case _:
                kind = self._faults.set(options).kind
                if kind in ("refuse", "drop"):
                    task = asyncio.create_task(self._cut(kind, float(options["seconds"]), requester))
                    self._background.add(task)
                    task.add_done_callback(self._background.discard)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _kubelet(self, node: Any) -> Kubelet:
        if str(node) not in self._kubelets:
            raise ApiError(404, f"node {node!r} does not exist")
        return self._kubelets[str(node)]

    async def _cut(self, kind: str, seconds: float, requester: asyncio.Transport | None) -> None:
        """Cut all connections except the requester's. With `refuse`, also refuse new ones for `seconds`."""
        if kind == "refuse" and self._site is not None:
            await self._site.stop()
        self._cut_connections(requester)
        if kind == "refuse":
            await asyncio.sleep(seconds)
            await self._listen()

    def _cut_connections(self, spared: asyncio.Transport | None = None) -> None:
        server = self._runner.server
        for connection in server.connections if server else ():
            if connection.transport not in (None, spared):
                connection.transport.abort()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a state directory. ApiError 409 if another process holds it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(directory / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ApiError(409, f"a cluster is already running in {directory}") from None
        yield


def _stop_without(parent: int, stop: asyncio.Event) -> None:
    """Set `stop` when this process is no longer a child of `parent`."""
    if os.getppid() != parent:
        stop.set()
    else:
        asyncio.get_running_loop().call_later(PARENT_CHECK_INTERVAL, _stop_without, parent, stop)


async def serve(config: Config) -> None:
    """Run a cluster in this process until SIGTERM or SIGINT, or until the parent has ended."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if config.parent:
        _stop_without(config.parent, stop)
    await Cluster(config).run(stop)


def main(arguments: list[str] | None = None) -> int:
    """Run a cluster until it is stopped, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ktrain_embedded.server", description=__doc__)
    parser.add_argument("--config", required=True, help="the Config as JSON")
    config = Config(**json.loads(parser.parse_args(arguments).config))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # it logs a traceback for requests that aren't HTTP
    try:
        with locked(Path(config.state_dir)):
            asyncio.run(serve(config))
    except ApiError as e:
        print(e.message, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
