"""`ktrain cluster`: start, stop and look at an embedded cluster, and switch its faults."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import urllib.error
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.local import cluster
from airflow_provider_ktrain.local.cluster import ClusterError
from airflow_provider_ktrain.local.config import Config

NEEDED = ("aiohttp", "cryptography", "jsonpatch", "kubernetes")
FAULTS = {
    "refuse": "take no connections for --seconds; what runs goes on",
    "drop": "cut all connections, and each new one at its first request, for --seconds",
    "status": "answer --status to requests of --verb whose path matches --path",
    "cut_logs": "cut log streams after --bytes",
    "delay_watch": "hold back events of watches for --delay seconds",
    "expire": "forget old resource versions: what resumes from one gets 410",
    "evict": "evict --pod of --namespace",
    "lose": "lose --node: its processes die and nothing is heard of it",
    "recover": "let --node come back",
    "clear": "end all faults",
}


def add_parser(subparsers: Any) -> None:
    """Add `cluster` to the commands of `ktrain`; each sets `run`: arguments to exit code."""
    parser = subparsers.add_parser(
        "cluster", help="a Kubernetes of one's own, for development and tests", description=__doc__
    )
    commands = parser.add_subparsers(dest="action", required=True)
    _add_start(commands)
    for name, run, about in (
        ("stop", _stop, "end the cluster and everything it started"),
        ("status", _status, "say whether a cluster is up; exit code 3 where none is"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        _add_state_dir(command)
        command.set_defaults(run=run)
    _add_fault(commands)


def _add_state_dir(parser: argparse.ArgumentParser) -> None:
    about = "where the cluster keeps its files (default: $KTRAIN_HOME or ~/.ktrain)"
    parser.add_argument("--state-dir", type=Path, default=None, help=about)


def _add_start(commands: Any) -> None:
    parser = commands.add_parser(
        "start", help="start a cluster on this machine", description="Start a cluster on this machine."
    )
    _add_state_dir(parser)
    parser.add_argument(
        "--kubeconfig", type=Path, help="where to write the kubeconfig (default: in the state directory)"
    )
    parser.add_argument("--port", type=int, default=0, help="of the API server (default: any free one)")
    parser.add_argument(
        "--image", action="append", default=[], metavar="NAME[=DIR]", type=_image,
        help="an image name, and the directory that its containers work in (default: an empty one); may be repeated",
    )  # fmt: skip
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="how many hosts to show (default: 1)")
    parser.add_argument(
        "--gpus-per-node", type=_count, default=0, metavar="N", help="nvidia.com/gpu of each (default: 0)"
    )
    parser.add_argument(
        "--resource", action="append", default=[], metavar="NAME=COUNT", type=_pair,
        help="another resource of each node, such as cpu=96; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--mpi-api", choices=("v1", "v2beta1"), default="v1", help="the version of MPIJob (default: v1)"
    )
    parser.add_argument("--foreground", action="store_true", help="serve until interrupted")
    parser.set_defaults(run=_start)


def _add_fault(commands: Any) -> None:
    listed = "\n".join(f"  {name:12} {about}" for name, about in FAULTS.items())
    parser = commands.add_parser(
        "fault", help="let something go wrong", description=f"Let something go wrong:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _add_state_dir(parser)
    parser.add_argument("fault", choices=FAULTS, metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--seconds", type=float, help="for how long (default: until clear)")
    parser.add_argument("--status", type=int, help="HTTP status to answer")
    parser.add_argument("--verb", help="get, list, watch, create, update, patch or delete; several with commas")
    parser.add_argument("--path", help="a regular expression that paths contain")
    parser.add_argument("--count", type=int, help="how many requests it meets")
    parser.add_argument("--bytes", type=int, help="of a log stream")
    parser.add_argument("--delay", type=float, help="seconds")
    for name in ("namespace", "pod", "node", "message"):
        parser.add_argument(f"--{name}")
    parser.set_defaults(run=_fault)


def _image(text: str) -> tuple[str, str]:
    name, _, directory = text.partition("=")
    if directory and not Path(directory).is_dir():
        raise argparse.ArgumentTypeError(f"{directory!r} is not a directory")
    if not name:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME or NAME=DIR")
    return name, str(Path(directory).resolve()) if directory else ""


def _pair(text: str) -> tuple[str, str]:
    name, _, count = text.partition("=")
    if not name or not count:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME=COUNT")
    return name, count


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number of 0 or more")
    return int(text)


def _state_dir(args: argparse.Namespace) -> Path:
    directory: Path = args.state_dir or cluster.default_state_dir()
    return directory.expanduser().resolve()


def _start(args: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return _fail(f"not installed: {', '.join(missing)}; run: pip install 'airflow-provider-ktrain[local]'")
    directory = _state_dir(args)
    if known := cluster.running(directory):
        return _fail(f"a cluster is up already in {directory}: {known['url']}; end it with: ktrain cluster stop")
    config = Config(
        str(directory), str(args.kubeconfig.expanduser().resolve()) if args.kubeconfig else "", args.port,
        dict(args.image), args.nodes, args.gpus_per_node, dict(args.resource), args.mpi_api,
    )  # fmt: skip
    if args.foreground:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            return subprocess.call([*cluster.COMMAND, config.dump()], stdout=subprocess.DEVNULL)
        except KeyboardInterrupt:
            return 130
    try:
        process, told = cluster.start(config)
    except ClusterError as e:
        return _fail(str(e))
    if process.stdout:
        process.stdout.close()
    print(f"The cluster is up (process {told['pid']}, {told['url']}). To use it:")
    print(f"  export KUBECONFIG={told['kubeconfig']}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    try:
        stopped = cluster.stop(_state_dir(args))
    except ClusterError as e:
        return _fail(str(e))
    print("The cluster has ended." if stopped else "No cluster is up.")
    return 0


def _status(args: argparse.Namespace) -> int:
    state = cluster.running(_state_dir(args))
    if state is None:
        print("No cluster is up.")
        return 3
    print(f"A cluster is up: process {state['pid']}, {state['url']}, kubeconfig {state['kubeconfig']}")
    return 0


def _fault(args: argparse.Namespace) -> int:
    state = cluster.running(_state_dir(args))
    if state is None:
        return _fail("no cluster is up")
    known = (
        "fault",
        "seconds",
        "status",
        "verb",
        "path",
        "count",
        "bytes",
        "delay",
        "namespace",
        "pod",
        "node",
        "message",
    )
    wanted = {k: v for k in known if (v := getattr(args, k)) is not None}
    try:
        cluster.admin(state["url"], state["token"], state["ca_file"], wanted)
    except urllib.error.HTTPError as e:
        return _fail(json.load(e).get("message", str(e)))
    except OSError as e:
        return _fail(f"the cluster does not answer: {e}")
    return 0


def _fail(message: str) -> int:
    print(f"ktrain cluster: {message}", file=sys.stderr)
    return 1
