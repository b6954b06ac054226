"""`ktrain`: the embedded cluster, checks of manifests, RBAC rules."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from airflow_provider_ktrain.core import rbac
from airflow_provider_ktrain.core.checks import ERROR, Problem, check
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.core.source import parse, the_job


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ktrain", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)

    from airflow_provider_ktrain.local import cli as cluster

    cluster.add_parser(subparsers)
    _add_check(subparsers)
    _add_rbac(subparsers)
    args = parser.parse_args(argv)
    return int(args.run(args))


def _add_check(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check",
        help="find mistakes in manifests before they cost anything",
        description="Exit status: 0 no errors (warnings are no errors), 1 errors, 2 a file cannot be read.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML or JSON; - for standard input")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    found: list[tuple[str, int, Problem]] = []
    try:
        for file in args.files:
            found += ((file, line, problem) for line, problem in _problems(file))
    except OSError as e:
        print(f"ktrain check: {e}", file=sys.stderr)
        return 2
    if args.output == "json":
        print(json.dumps([{"file": f, "line": n, **dataclasses.asdict(p)} for f, n, p in found], indent=2))
    else:
        for file, line, problem in found:
            print(f"{file}:{line}: {problem}")
        errors = sum(p.level is ERROR for _, _, p in found)
        print(f"{len(args.files)} files: {errors} errors, {len(found) - errors} warnings")
    return int(any(p.level is ERROR for _, _, p in found))


def _add_rbac(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "rbac",
        help="print the least Role that workers and triggerers need in a namespace",
        description="For `kubectl apply -f -`. Give it to the identity of the connection that Airflow uses.",
    )
    parser.add_argument("--namespace", "-n", required=True)
    parser.add_argument("--name", default="ktrain", help="of the Role (default: ktrain)")
    parser.add_argument("--service-account", default="", help="[NAMESPACE:]NAME: print a RoleBinding for it as well")
    parser.set_defaults(run=_rbac)


def _rbac(args: argparse.Namespace) -> int:
    print(yaml.safe_dump_all(rbac.objects(args.namespace, args.name, args.service_account), sort_keys=False), end="")
    return 0


def _problems(file: str) -> Iterator[tuple[int, Problem]]:
    """The problems of each training job in a file, with their lines."""
    if file == "-":
        text = sys.stdin.read()
    else:
        with open(file, encoding="utf-8", errors="replace") as f:
            text = f.read()
    try:
        documents = parse(text, file)
        jobs = [d for d in documents if isinstance(d.content, dict) and d.content.get("kind") in KINDS]
        for document in jobs or [the_job(documents)]:
            for problem in check(document.content):
                yield document.line_of(problem.path), problem
    except ManifestError as e:
        line = e.where.rpartition(":")[2]
        yield (
            int(line) if line.isdigit() else 1,
            Problem(ERROR, "manifest", "$", e.message, e.found, e.expected, e.remedy),
        )


if __name__ == "__main__":
    sys.exit(main())
