# PYTHON_ARGCOMPLETE_OK
"""Run a training job without Airflow, check manifests, print RBAC rules, and run an embedded cluster."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from airflow_provider_ktrain import __version__


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. Each sets `run`, a function from arguments to exit code, and `parser`, its own."""
    from airflow_provider_ktrain.cli import check, rbac, run

    made = argparse.ArgumentParser(prog="ktrain", description=__doc__)
    made.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = made.add_subparsers(dest="command", required=True)
    run.add_parser(subparsers)
    check.add_parser(subparsers)
    rbac.add_parser(subparsers)
    for command in subparsers.choices.values():
        command.set_defaults(parser=command)
    subparsers.add_parser(
        "cluster", help="a cluster on this machine, for development and tests: the same as ktrain-cluster"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    made = parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell requests completions
        import argcomplete

        argcomplete.autocomplete(made)
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["cluster"]:
        return _cluster(words[1:])
    # argparse doesn't distinguish arguments before and after `--`
    program = words.index("--") if words[:1] == ["run"] and "--" in words else len(words)
    args, unknown = made.parse_known_args(words[:program])
    if unknown:
        args.parser.error(f"unexpected arguments: {shlex.join(unknown)}{_before_command(words, args, unknown)}")
    args.program = words[program + 1 :]
    _count_configured_accelerators(args.parser)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
    except BrokenPipeError:  # `ktrain check . | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the stream at its exit
        return 128 + signal.SIGPIPE
    return status


def _count_configured_accelerators(made: argparse.ArgumentParser) -> None:
    """Count as Airflow does what its environment variables add. An invalid one is an error of the command line."""
    from airflow_provider_ktrain.cli.arguments import ACCELERATORS, DEFAULT_ACCELERATOR, default_accelerator
    from airflow_provider_ktrain.core.state.accelerators import add_host_rows, configured_rows

    def refuse(problem: str) -> None:
        made.error(f"{ACCELERATORS} or {DEFAULT_ACCELERATOR}: {problem}")

    rows = configured_rows(os.environ.get(ACCELERATORS, ""), default_accelerator(), refuse)
    add_host_rows(lambda: rows)


def _before_command(words: Sequence[str], args: argparse.Namespace, unknown: Sequence[str]) -> str:
    """What to do if the arguments of `ktrain run` are those of a command without `--` before it; empty if not."""
    if args.command != "run" or "--" in words:
        return ""
    is_manifest = args.file is None or args.file == "-" or Path(args.file).suffix in (".yaml", ".yml", ".json")
    at = words.index(unknown[0] if is_manifest else args.file)
    shown = shlex.join(["ktrain", *words[:at]])
    return f"\nIf they belong to the command of the replicas, put -- before it: {shown} -- {shlex.join(words[at:])}"


def _cluster(words: Sequence[str]) -> int:
    from airflow_provider_ktrain import embedded
    from airflow_provider_ktrain.cli import exit_codes
    from airflow_provider_ktrain.cli.console import Console
    from airflow_provider_ktrain.core.errors import ClusterError

    try:
        return embedded.command(words)
    except ClusterError as e:
        Console().error(e)
        return exit_codes.of_error(e)
