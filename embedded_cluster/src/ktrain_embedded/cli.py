"""`ktrain-cluster`: start and stop an embedded cluster, show its status, and inject faults."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ktrain_embedded import __version__, cluster
from ktrain_embedded.cluster import ClusterError, Config
from ktrain_embedded.objects import quantity

FAULTS = {
    "refuse": "cut all connections and refuse new ones for --seconds; containers continue to run",
    "drop": "cut all connections now, and each new one at its first request, for --seconds",
    "status": "respond with --status to requests of --verb whose path matches --path",
    "cut_logs": "cut log streams after --bytes",
    "delay_watch": "delay watch events by --delay seconds",
    "expire": "forget old resource versions: a watch that resumes from one gets 410",
    "evict": "evict --pod of --namespace as a kubelet under node pressure does",
    "lose": "lose --node: its processes are killed, it reports nothing, and it is unreachable at once",
    "silence": "--node reports nothing, but its containers run on; it is unreachable after 45 s (see --node-times)",
    "shutdown": "shut --node down gracefully: its pods fail, it rejects new ones, and it is not ready",
    "pressure": "--node runs out of disk: it evicts the pod that uses most, and rejects new ones; DiskPressure follows",
    "break_devices": "--node rejects new pods that request devices, with --message",
    "recover": "bring --node back",
    "clear": "end all faults",
}
#: The option that a fault can't do without.
NEEDED = {
    "refuse": "seconds", "drop": "seconds", "status": "status", "evict": "pod",
    **dict.fromkeys(("lose", "silence", "shutdown", "pressure", "break_devices", "recover"), "node"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = parser().parse_args(argv)
    return int(args.run(args))


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. Each sets `run`, a function from arguments to exit code."""
    whole = argparse.ArgumentParser(prog="ktrain-cluster", description=__doc__)
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = whole.add_subparsers(dest="action", required=True)
    faults = "".join(f"\n  {name:12} {about}" for name, about in FAULTS.items())
    made = {}
    for name, run, about, more in (
        ("start", _start, "start a cluster on this machine", ""),
        ("stop", _stop, "stop the cluster and everything it started", ""),
        ("status", _status, "report whether a cluster is running; exit code 3 if none is", ""),
        ("fault", _fault, "inject a fault into the running cluster", faults),
    ):
        made[name] = parser = commands.add_parser(
            name, help=about, description=about + more, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.set_defaults(run=functools.partial(_run, run))
        parser.add_argument(
            "--state-dir", type=_path, default=os.environ.get("KTRAIN_HOME") or "~/.ktrain",
            help="where the cluster keeps its files (default: $KTRAIN_HOME or ~/.ktrain)",
        )  # fmt: skip
    made["status"].add_argument("--output", choices=("text", "json"), default="text")
    _add_start_options(made["start"].add_argument)
    made["fault"].add_argument("fault", choices=FAULTS, metavar="FAULT", help=", ".join(FAULTS))
    for name, (type_, about_option) in FAULT_OPTIONS.items():
        made["fault"].add_argument(f"--{name}", type=type_, help=about_option)
    return whole


def _add_start_options(add: Callable[..., argparse.Action]) -> None:
    add("--kubeconfig", type=_path, help="where to write the kubeconfig (default: in the state directory)")
    add("--port", type=_port, default=0, help="port of the API server (default: any free port)")
    add(
        "--image", action="append", default=[], metavar="NAME[=DIR]", type=_image,
        help="an image name, and the directory in which its containers run (default: an empty one); may be repeated",
    )  # fmt: skip
    add("--nodes", type=_positive, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--gpus-per-node", type=_count, default=0, metavar="N", help="nvidia.com/gpu of each node (default: 0)")
    add(
        "--resource", action="append", default=[], metavar="NAME=COUNT", type=_pair,
        help="another resource of each node, such as cpu=96; may be repeated",
    )  # fmt: skip
    add(
        "--node-times", type=_seconds, default=1.0, metavar="FACTOR",
        help="factor for the times after which a failed node counts as unreachable and its pods are deleted "
        "(default: 1, as on a real cluster: 45 s and 300 s)",
    )  # fmt: skip
    add("--mpi-api", choices=("v1", "v2beta1"), default="v1", help="the version of MPIJob to serve (default: v1)")


def _path(text: str) -> Path:
    return Path(text).expanduser().resolve()


def _image(text: str) -> tuple[str, str]:
    """Parse NAME or NAME=DIR."""
    name, _, directory = text.partition("=")
    if directory and not Path(directory).is_dir():
        raise argparse.ArgumentTypeError(f"{directory!r} is not a directory")
    if not name:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME or NAME=DIR")
    return name, str(Path(directory).resolve()) if directory else ""


def _number(least: int, most: float, expected: str) -> Callable[[str], int]:
    """A function that parses a number within these bounds."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
        return int(text)

    return parse


_count = _number(0, math.inf, "a whole number, 0 or more")
_positive = _number(1, math.inf, "a whole number, 1 or more")
_port = _number(0, 65535, "a port, 0 to 65535")
_status_code = _number(400, 599, "an HTTP status, 400 to 599")


def _seconds(text: str) -> float:
    """Parse a number of seconds, 0 or more."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of seconds, 0 or more")
    return seconds


def _pair(text: str) -> tuple[str, str]:
    name, _, count = text.partition("=")
    if not name or not count:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME=COUNT")
    try:
        quantity.parse(count)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{name} is {e}") from None
    return name, count


#: Options of a fault: type and help text.
FAULT_OPTIONS: dict[str, tuple[Callable[[str], Any], str | None]] = {
    "seconds": (_seconds, "duration; required for refuse and drop (default: until clear)"),
    "status": (_status_code, "HTTP status of the responses, 400 to 599"),
    "verb": (str, "get, list, watch, create, update, patch or delete; separate several with commas"),
    "path": (str, "regular expression that matches a part of the path"),
    "count": (_positive, "number of requests that get the fault (default: all)"),
    "bytes": (_positive, "bytes of a log stream after which it is cut"),
    "delay": (_seconds, "seconds by which watch events are delayed"),
    **dict.fromkeys(("namespace", "pod", "node", "message"), (str, None)),
}


def _run(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    try:
        return command(args)
    except ClusterError as e:
        print(f"ktrain-cluster: {e}", file=sys.stderr)
        return 1


def _start(args: argparse.Namespace) -> int:
    if known := cluster.running(args.state_dir):
        remedy = "stop it with: ktrain-cluster stop"
        raise ClusterError(f"a cluster is already running in {args.state_dir}: {known['url']}; {remedy}")
    config = Config(
        str(args.state_dir), str(args.kubeconfig or ""), args.port,
        dict(args.image), args.nodes, args.gpus_per_node, dict(args.resource), args.node_times,
        args.mpi_api,
    )  # fmt: skip
    _, state = cluster.start(config)
    print(f"The cluster is running (process {state['pid']}, {state['url']}). To use it:")
    print(f"  export KUBECONFIG={state['kubeconfig']}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    print("The cluster is stopped." if cluster.stop(args.state_dir) else "No cluster is running.")
    return 0


def _status(args: argparse.Namespace) -> int:
    state = cluster.running(args.state_dir)
    if args.output == "json":
        shown = {name: state[name] for name in ("pid", "url", "kubeconfig", "ca_file")} if state else {}
        print(json.dumps({"running": state is not None, **shown}, indent=2))
        return 0 if state else 3
    if state is None:
        print("No cluster is running.")
        return 3
    print(f"A cluster is running: process {state['pid']}, {state['url']}, kubeconfig {state['kubeconfig']}")
    return 0


def _fault(args: argparse.Namespace) -> int:
    state = cluster.running(args.state_dir)
    if state is None:
        raise ClusterError("no cluster is running; start one with: ktrain-cluster start")
    needed = NEEDED.get(args.fault)
    if needed and getattr(args, needed) is None:
        raise ClusterError(f"{args.fault} needs --{needed}")
    options = {name: getattr(args, name) for name in ("fault", *FAULT_OPTIONS)}
    cluster.admin(state, {name: value for name, value in options.items() if value is not None})
    return 0
