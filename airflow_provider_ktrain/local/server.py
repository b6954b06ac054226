"""The embedded cluster's process: one event loop with API server, controllers, scheduler and kubelets.

`python -m airflow_provider_ktrain.local.server --state-dir DIR` serves until SIGTERM (or until its parent has gone) and
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from airflow_provider_ktrain.local import controllers, credentials, rbac, scheduler
from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.apiserver import ApiServer
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.faults import Faults
from airflow_provider_ktrain.local.node import node_objects
from airflow_provider_ktrain.local.store import Obj, Store

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
PARENT_LOOK = 0.5  # seconds between looks whether the parent is still there
MAX_HEADER = 64 * 1024  # bytes of the request line and of each header


@dataclass(frozen=True)
class Config:
    """How an embedded cluster is set up.

    :param state_dir: holds `kubeconfig`, `cluster.json`, logs and the files of pods.
    :param kubeconfig: where the kubeconfig is written; "" is `<state_dir>/kubeconfig`.
    :param port: 0 for any free one.
    :param images: directory by image name; "" for an empty scratch directory.
    :param resources: more resources of each node, such as {"cpu": "96"}.
    :param mpi_api: v1 or v2beta1, the version in which MPIJob is served.
    :param die_with_parent: end when the process that started this one has ended.
    """

    state_dir: str
    kubeconfig: str = ""
    port: int = 0
    images: dict[str, str] = field(default_factory=dict)
    nodes: int = 1
    gpus_per_node: int = 0
    resources: dict[str, str] = field(default_factory=dict)
    mpi_api: str = "v1"
    die_with_parent: bool = False

    def arguments(self) -> list[str]:
        """The command line that `parse_args` turns back into this."""
        return ["--config", json.dumps(asdict(self))]


class Cluster:
    """Everything of one embedded cluster, put together."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = Path(config.state_dir)
        self._store = Store()
        self._faults = Faults()
        self._runner: web.AppRunner | None = None
        self._port = config.port
        self._ssl: Any = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then end every container and let go of the port."""
        tls = credentials.make_tls()
        token = secrets.token_urlsafe(32)
        self._ssl = tls.context(self._directory)
        sock = await asyncio.get_running_loop().create_server(asyncio.Protocol, HOST, self._port)
        self._port = sock.sockets[0].getsockname()[1]
        sock.close()
        await sock.wait_closed()
        served = r.served(self._config.mpi_api)
        address = f"{HOST}:{self._port}"
        api = ApiServer(
            self._store,
            served,
            admin_token=token,
            address=address,
            root=self._directory,
            faults=self._faults,
            switch=self.switch,
        )
        self._runner = web.AppRunner(
            api.app, access_log=None, handle_signals=False, max_line_size=MAX_HEADER, max_field_size=MAX_HEADER
        )
        await self._runner.setup()
        self._bootstrap()
        tasks = [asyncio.create_task(loop()) for loop in self._loops()]
        try:
            await self._listen()
            self._announce(f"https://{address}", token, tls.ca)
            waiting = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waiting}:
                task.result()  # a loop that ended is a bug: say so
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._drop_connections()
            await self._runner.cleanup()

    async def _listen(self) -> None:
        assert self._runner is not None
        site = web.TCPSite(self._runner, HOST, self._port, ssl_context=self._ssl, reuse_address=True, backlog=1024)
        await site.start()
        self._site = site

    def _bootstrap(self) -> None:
        for name in NAMESPACES:
            self._store.create(r.NAMESPACE, {"metadata": {"name": name}})
        rbac.bootstrap(self._store)
        for node in node_objects(self._config.nodes, self._config.gpus_per_node, self._config.resources):
            self._store.create(r.NODE, node)

    def _loops(self) -> Iterator[Any]:
        yield lambda: scheduler.run(self._store)
        yield from controllers.all_controllers(self._store, self._config.mpi_api)

    def _announce(self, url: str, token: str, ca: bytes) -> None:
        """Write kubeconfig and state, and tell whoever started this process."""
        kubeconfig = Path(self._config.kubeconfig or self._directory / "kubeconfig")
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        credentials.write_private(kubeconfig, credentials.kubeconfig(url, ca, token))
        (self._directory / "ca.crt").write_bytes(ca)
        state = {
            "pid": os.getpid(),
            "url": url,
            "kubeconfig": str(kubeconfig.resolve()),
            "config": asdict(self._config),
        }
        credentials.write_private(self._directory / "cluster.json", json.dumps(state).encode())
        print(json.dumps({**state, "token": token, "ca_file": str(self._directory / "ca.crt")}), flush=True)  # noqa: T201

    async def switch(self, wanted: Obj) -> Obj:
        """Carry out a request to the fault switches and tell what is in force."""
        match wanted.get("fault"):
            case "clear":
                self._faults.clear()
            case "expire":
                self._store.expire()
            case _:
                fault = self._faults.set(wanted)
                loop = asyncio.get_running_loop()
                if fault.kind in ("refuse", "drop"):
                    # after the answer has left
                    loop.call_later(
                        0.05, lambda: asyncio.ensure_future(self._cut(fault.kind, float(wanted["seconds"])))
                    )
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    async def _cut(self, kind: str, seconds: float) -> None:
        """Cut every connection, and with `refuse` take no new ones for a while."""
        if kind == "refuse":
            await self._site.stop()
            self._drop_connections()
            await asyncio.sleep(seconds)
            await self._listen()
        else:
            self._drop_connections()

    def _drop_connections(self) -> None:
        server = self._runner.server if self._runner else None
        for connection in server.connections if server else ():
            if connection.transport is not None:
                connection.transport.abort()


def parse_args(arguments: list[str]) -> Config:
    parser = argparse.ArgumentParser(prog="python -m airflow_provider_ktrain.local.server", description=__doc__)
    parser.add_argument("--config", required=True, help="the Config as JSON")
    return Config(**json.loads(parser.parse_args(arguments).config))


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the state directory's lock, which tells that a cluster is up. ApiError 409 where another one holds it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(directory / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ApiError(409, f"a cluster is up already in {directory}") from None
        yield


async def _parent_gone(stop: asyncio.Event, parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_LOOK)
    stop.set()


async def serve(config: Config) -> None:
    """Run a cluster in this process until SIGTERM or SIGINT, or until the parent has gone."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watcher = asyncio.create_task(_parent_gone(stop, os.getppid())) if config.die_with_parent else None
    try:
        await Cluster(config).run(stop)
    finally:
        if watcher:
            watcher.cancel()


def main(arguments: list[str] | None = None) -> int:
    config = parse_args(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with locked(Path(config.state_dir)):
            asyncio.run(serve(config))
    except ApiError as e:
        print(e.message, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
