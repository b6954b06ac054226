"""Run an embedded cluster, check manifests, and print RBAC rules."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import yaml

from airflow_provider_ktrain import __version__
from airflow_provider_ktrain.core import rbac
from airflow_provider_ktrain.core.checks import ERROR, Level, Problem, check
from airflow_provider_ktrain.core.errors import ClusterError, ManifestError
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.core.manifest.loader import parse, the_job, unknown, unrendered
from airflow_provider_ktrain.core.text import counted


class Judge(Protocol):
    """Finds the problems of a manifest; `rendered` is False if some of its values are templates."""

    def __call__(self, manifest: Mapping[str, Any], *, rendered: bool) -> list[Problem]:
        """The problems; an empty list for a manifest without any."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ktrain", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
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
        help="check manifests for errors",
        description="Exit status: 0: no errors (there may be warnings), 1: errors, 2: a file can't be read or the "
        "cluster can't be reached. Jinja templates are only checked when the task renders them.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML or JSON file; - for standard input")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    server = parser.add_argument_group("cluster")
    server.add_argument(
        "--server",
        action="store_true",
        help="also check against the cluster, without creating anything: served versions, schema, namespace, rights, "
        "queue, and a dry run on the API server",
    )
    server.add_argument("--kubeconfig", metavar="PATH", help="default: KUBECONFIG, else ~/.kube/config")
    server.add_argument("--context", help="context of the kubeconfig; default: its current context")
    server.add_argument("--namespace", "-n", help="default: the manifest's, else the context's, else default")
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    """Run `ktrain check`."""
    found: list[tuple[str, int, Problem]] = []
    hints: dict[str, None] = {}  # each is printed once
    if (args.kubeconfig or args.context or args.namespace) and not args.server:
        print("ktrain check: --kubeconfig, --context and --namespace need --server", file=sys.stderr)
        return 2
    try:
        with _asking(args) if args.server else contextlib.nullcontext(_offline) as judge:
            for file in args.files:
                found += ((file, line, problem) for line, problem in _problems(file, judge, hints))
    except OSError as e:
        print(f"ktrain check: {e.filename} cannot be read: {e.strerror}", file=sys.stderr)
        return 2
    except ClusterError as e:
        print(f"ktrain check: {e}", file=sys.stderr)
        return 2
    for hint in hints:
        print(f"hint: {hint}", file=sys.stderr)
    if args.output == "json":
        print(json.dumps([{"file": f, "line": n, **dataclasses.asdict(p)} for f, n, p in found], indent=2))
    else:
        for file, line, problem in found:
            print(f"{file}:{line}: {problem}")
        errors = sum(p.level is ERROR for _, _, p in found)
        totals = ((len(args.files), "file"), (errors, "error"), (len(found) - errors, "warning"))
        print("{}: {}, {}".format(*(counted(number, noun) for number, noun in totals)))
    return int(any(p.level is ERROR for _, _, p in found))


def _add_rbac(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "rbac",
        help="print the minimal Role for workers and triggerers in a namespace",
        description="Pipe it into `kubectl apply -f -`. Bind it to the identity that Airflow's connection uses.",
    )
    parser.add_argument("--namespace", "-n", required=True)
    parser.add_argument("--name", default="ktrain", help="name of the Role (default: ktrain)")
    parser.add_argument(
        "--service-account", default="", help="[NAMESPACE:]NAME of a ServiceAccount: also print a RoleBinding for it"
    )
    parser.add_argument(
        "--cluster-runtimes",
        action="store_true",
        help="also print a ClusterRole that reads ClusterTrainingRuntimes: TrainJobs with node selection, volumes or "
        "labels of pods need it",
    )
    parser.add_argument("--kueue", action="store_true", help="also the rights to read and pause Kueue's Workloads")
    parser.set_defaults(run=_rbac)


def _rbac(args: argparse.Namespace) -> int:
    made = rbac.objects(
        args.namespace,
        args.name,
        args.service_account,
        cluster_runtimes=args.cluster_runtimes,
        kueue=args.kueue,
    )
    print(yaml.safe_dump_all(made, sort_keys=False), end="")
    return 0


def _problems(file: str, judge: Judge, hints: dict[str, None]) -> Iterator[tuple[int, Problem]]:
    """The problems of each training job in a file, with their lines.

    :param hints: the hints about its kind are added as keys.
    """
    if file == "-":
        text = sys.stdin.read()
    else:
        with open(file, encoding="utf-8", errors="replace") as f:
            text = f.read()
    try:
        documents = parse(unrendered(text), file)
        jobs = [d for d in documents if isinstance(d.content, dict) and d.content.get("kind") in KINDS]
        for document in jobs if len(jobs) > 1 else [the_job(documents)]:
            for text in document.left_out:
                yield document.line, Problem(Level.WARNING, "beside", "$", text)
            kind = KINDS.get(str(document.content.get("kind")))
            hints |= {kind.platform_hint: None} if kind and kind.platform_hint else {}
            templates = set(unknown(document.content))
            for problem in judge(document.content, rendered=not templates):
                if problem.path not in templates:
                    yield document.line_of(problem.path), problem
    except ManifestError as e:
        line = e.where.rpartition(":")[2]
        yield (
            int(line) if line.isdigit() else 1,
            Problem(ERROR, "manifest", "$", e.message, e.found, e.expected, e.remedy),
        )


def _offline(manifest: Mapping[str, Any], *, rendered: bool) -> list[Problem]:
    return check(manifest)


@contextlib.contextmanager
def _asking(args: argparse.Namespace) -> Iterator[Judge]:
    """A check that also queries the cluster of a kubeconfig.

    :raises ClusterError: the kubeconfig or context does not exist.
    """
    import asyncio

    from kubernetes_asyncio import client, config

    from airflow_provider_ktrain.engine.api import Api
    from airflow_provider_ktrain.engine.preflight import preflight

    place = args.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    remedy = "set --kubeconfig or KUBECONFIG"
    if not any(os.path.exists(os.path.expanduser(path)) for path in place.split(os.pathsep)):
        raise ClusterError(f"the kubeconfig {place} does not exist: {remedy}")
    try:
        contexts, current = config.list_kube_config_contexts(args.kubeconfig)
    except (config.ConfigException, yaml.YAMLError, TypeError) as e:
        raise ClusterError(f"the kubeconfig {place} is invalid: {e}: {remedy}") from None
    chosen = next((c for c in contexts if c["name"] == args.context), None) if args.context else current
    if chosen is None:
        names = ", ".join(c["name"] for c in contexts)
        raise ClusterError(f"--context: found {args.context!r}, expected one of {names}")

    async def make_client() -> client.ApiClient:
        configuration = client.Configuration()
        await config.load_kube_config(args.kubeconfig, chosen["name"], client_configuration=configuration)
        return client.ApiClient(configuration)

    def judge(manifest: Mapping[str, Any], *, rendered: bool) -> list[Problem]:
        metadata = manifest.get("metadata")
        own = metadata.get("namespace") if isinstance(metadata, Mapping) else None
        namespace = args.namespace or own or chosen["context"].get("namespace") or "default"
        found: list[Problem] = runner.run(preflight(api, manifest, namespace, rendered=rendered))
        return found

    api = Api(make_client)
    with asyncio.Runner() as runner:
        try:
            yield judge
        finally:
            runner.run(api.close())


if __name__ == "__main__":
    sys.exit(main())
