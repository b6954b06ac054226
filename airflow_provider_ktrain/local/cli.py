"""`ktrain cluster start|stop|status|fault`."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_provider_ktrain.local.server import Config


def add_parser(subparsers: Any) -> None:
    """Register the command; what it needs (extra `[local]`) is imported when it runs."""
    cluster = subparsers.add_parser("cluster", help="the embedded cluster: Kubernetes for one machine, on loopback")
    cluster.add_argument("--state-dir", type=Path, help="where it keeps its files (default: $KTRAIN_HOME or ~/.ktrain)")
    verbs = cluster.add_subparsers(dest="verb", required=True)

    start = verbs.add_parser("start", help="start it in the background and print its kubeconfig")
    start.add_argument(
        "--kubeconfig", default="", help="where to write the kubeconfig (default: in the state directory)"
    )
    start.add_argument("--port", type=int, default=0, help="default: any free one")
    start.add_argument(
        "--image", action="append", default=[], metavar="NAME[=DIR]",
        help="map an image to a directory, the container's working directory; without DIR: an empty one",
    )  # fmt: skip
    start.add_argument("--nodes", type=int, default=1)
    start.add_argument("--gpus-per-node", type=int, default=0, help="pretended nvidia.com/gpu of each node")
    start.add_argument(
        "--resource", action="append", default=[], metavar="NAME=COUNT", help="more of each node: rdma/hca=16, cpu=96"
    )
    start.add_argument(
        "--mpi-api", choices=("v1", "v2beta1"), default="v1", help="the version in which MPIJob is served"
    )
    start.add_argument("--foreground", action="store_true", help="stay until interrupted")
    start.set_defaults(run=_start)

    verbs.add_parser("stop", help="end it and every process that it started").set_defaults(run=_stop)
    verbs.add_parser("status", help="whether it runs, and where").set_defaults(run=_status)

    fault = verbs.add_parser("fault", help="let something go wrong, for tests")
    fault.add_argument("fault", help="refuse, drop, status, cut_logs, delay_watch, expire, evict, lose_node, ...")
    fault.add_argument("options", nargs="*", metavar="NAME=VALUE", help="seconds=10, status=503, path=/log, bytes=1000")
    fault.set_defaults(run=_fault)


def _state_dir(args: argparse.Namespace) -> Path:
    from airflow_provider_ktrain.local.cluster import default_state_dir

    return args.state_dir or default_state_dir()


def _config(args: argparse.Namespace) -> Config:
    from airflow_provider_ktrain.local.server import Config

    images = {}
    for entry in args.image:
        name, _, directory = entry.partition("=")
        if directory and not Path(directory).is_dir():
            raise SystemExit(f"--image {entry}: {directory} is no directory")
        images[name] = str(Path(directory).absolute()) if directory else ""
    resources = {}
    for entry in args.resource:
        name, _, count = entry.rpartition("=")
        if not name:
            raise SystemExit(f"--resource {entry}: expected NAME=COUNT, such as rdma/hca=16")
        resources[name] = count
    return Config(
        state_dir=str(_state_dir(args).absolute()),
        kubeconfig=str(Path(args.kubeconfig).absolute()) if args.kubeconfig else "",
        port=args.port,
        images=images,
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        resources=resources,
        mpi_api=args.mpi_api,
        die_with_parent=args.foreground,
    )


def _start(args: argparse.Namespace) -> int:
    from airflow_provider_ktrain.local.cluster import ClusterError, running, start, stop

    directory = _state_dir(args)
    if running(directory):
        print(f"a cluster with the state directory {directory} runs already: ktrain cluster stop", file=sys.stderr)
        return 1
    try:
        process, told = start(_config(args))
    except ClusterError as e:
        print(e, file=sys.stderr)
        return 1
    print(f"the embedded cluster answers at {told['url']}\nexport KUBECONFIG={told['kubeconfig']}", flush=True)
    if args.foreground:
        try:
            return process.wait()
        except KeyboardInterrupt:
            stop(directory)
    return 0


def _stop(args: argparse.Namespace) -> int:
    from airflow_provider_ktrain.local.cluster import stop

    print("stopped" if stop(_state_dir(args)) else "no cluster was running")
    return 0


def _status(args: argparse.Namespace) -> int:
    from airflow_provider_ktrain.local.cluster import running

    state = running(_state_dir(args))
    print(f"runs at {state['url']}, kubeconfig {state['kubeconfig']}" if state else "not running")
    return 0 if state else 1


def _fault(args: argparse.Namespace) -> int:
    from airflow_provider_ktrain.local.cluster import admin, running

    state = running(_state_dir(args))
    if state is None:
        print("no cluster is running", file=sys.stderr)
        return 1
    wanted: dict[str, Any] = {"fault": args.fault}
    for option in args.options:
        name, _, value = option.partition("=")
        wanted[name] = json.loads(value) if value.replace(".", "", 1).isdigit() else value
    try:
        print(json.dumps(admin(state["url"], state["token"], state["ca_file"], wanted)))
    except urllib.error.HTTPError as e:
        print(json.loads(e.read())["message"], file=sys.stderr)
        return 1
    return 0
