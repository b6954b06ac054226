"""`ktrain check`: find mistakes in manifests."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.cli import job_file, kubeconfig
from airflow_provider_ktrain.cli.wording import for_run
from airflow_provider_ktrain.core.checks import ERROR, Level, Problem
from airflow_provider_ktrain.core.errors import ClusterError, ManifestError, OperatorMissingError, VersionNotServedError
from airflow_provider_ktrain.core.kinds import KINDS, did_you_mean
from airflow_provider_ktrain.core.manifest.loader import SUFFIXES, parse, the_job, unknown, unrendered
from airflow_provider_ktrain.core.manifest.overlay import JobOptions
from airflow_provider_ktrain.core.prepare import Prepared, prepare
from airflow_provider_ktrain.core.text.output import counted, masked

KIND = re.compile(r"""\bkind["']?\s*:\s*["']?(\w+)""")  #: Finds the kind in a file of a directory.

#: Finds the problems of a job; the flag is False if some of its values are templates.
Judge = Callable[[Prepared, bool], list[Problem]]


def add_parser(subparsers: Any) -> None:
    """Add the command to `ktrain`."""
    parser = subparsers.add_parser(
        "check",
        help="check manifests for errors",
        description="Exit status: 0: no errors (there may be warnings), 1: errors, 2: a file can't be read or the "
        "cluster can't be reached. Jinja templates are only checked when the task renders them.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="YAML or JSON file; a directory, whose files with training jobs are checked; - for standard input",
    )
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--strict", action="store_true", help="an unknown field is an error")
    server = parser.add_argument_group("cluster")
    server.add_argument(
        "--server",
        action="store_true",
        help="also check against the cluster, without creating anything: served versions, schema, namespace, rights, "
        "queue, the objects that the manifest names, and a dry run on the API server",
    )
    kubeconfig.add_options(server)
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    found: list[tuple[str, int, Problem]] = []
    hints: dict[str, None] = {}  # each is printed once
    if (args.kubeconfig or args.context or args.namespace) and not args.server:
        return _fails("--kubeconfig, --context and --namespace need --server")
    try:
        with _asking(args) if args.server else contextlib.nullcontext(lambda prepared, _: prepared.problems) as judge:
            files = list(_files(args.files))
            for file in files:
                problems = sorted(_problems(file, judge, hints), key=lambda at: (at[1].level is not ERROR, at[0]))
                found += ((file, line, problem) for line, problem in problems)
    except OSError as e:
        return _fails(f"{e.filename} can't be read: {e.strerror}")
    except (ClusterError, ManifestError) as e:
        return _fails(for_run(str(e)))
    if args.strict:
        found = [(f, n, dataclasses.replace(p, level=ERROR) if p.code == "unknown-field" else p) for f, n, p in found]
    for hint in hints:
        print(masked(f"hint: {hint}"), file=sys.stderr)
    if args.output == "json":
        print(json.dumps(masked([{"file": f, "line": n, **dataclasses.asdict(p)} for f, n, p in found]), indent=2))
    else:
        for file, line, problem in found:
            print(masked(f"{file}:{line}: {problem}"))
        errors = sum(p.level is ERROR for _, _, p in found)
        totals = ((len(files), "file"), (errors, "error"), (len(found) - errors, "warning"))
        print("{}: {}, {}".format(*(counted(number, noun) for number, noun in totals)))
    return int(any(p.level is ERROR for _, _, p in found))


def _fails(why: str) -> int:
    """Say why nothing was checked; returns the exit status."""
    print(masked(f"ktrain check: {why}"), file=sys.stderr)
    return 2


def _files(names: Iterable[str]) -> Iterator[str]:
    """The files to check: those that were named, and those in named directories that contain a training job.

    A kind that is like that of a training job is probably misspelled: the file is checked, too.
    """
    for name in names:
        if not os.path.isdir(name):
            yield name
            continue
        found = [str(path) for path in sorted(_manifests(Path(name))) if _has_job(path.read_text("utf-8", "replace"))]
        if not found:
            endings = ", ".join(SUFFIXES)
            raise ManifestError(f"{name} contains no training job in a file that ends in {endings}")
        yield from found


def _has_job(text: str) -> bool:
    """Whether a file names a kind of training job, or one like it. Other groups have kinds such as TorchJob, too."""
    kinds, of_kubeflow = dict.fromkeys(KIND.findall(text)), "kubeflow.org/" in text
    return any(kind in KINDS or (of_kubeflow and did_you_mean(kind)) for kind in kinds)


def _manifests(directory: Path) -> Iterator[Path]:
    """The YAML and JSON files below a directory, without those in hidden directories."""
    for parent, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if name.endswith(SUFFIXES))


def _problems(file: str, judge: Judge, hints: dict[str, None]) -> Iterator[tuple[int, Problem]]:
    """The problems of each training job in a file, with their lines."""
    text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8", "replace")
    try:
        documents = parse(unrendered(text), file)
        jobs = [d for d in documents if isinstance(d.content, dict) and d.content.get("kind") in KINDS]
        for other in jobs[1:]:
            message = "another training job in this file: tasks and `ktrain run` take a manifest with one only"
            found = f"{len(jobs)} training jobs"
            yield other.line, Problem(ERROR, "several-jobs", "$", message, found, "one", "move it to a file of its own")
        for document in jobs if len(jobs) > 1 else [the_job(documents)]:
            for text in document.left_out:
                yield document.line, Problem(Level.WARNING, "beside", "$", text)
            kind = KINDS.get(str(document.content.get("kind")))
            hints |= {kind.platform_hint: None} if kind and kind.platform_hint else {}
            templates = set(unknown(document.content))
            for problem in judge(prepare(document, JobOptions(), keeps_name=True), not templates):
                if problem.path not in templates:
                    yield document.line_of(problem.path), problem
    except ManifestError as e:
        line = e.where.rpartition(":")[2]
        yield (
            int(line) if line.isdigit() else 1,
            Problem(ERROR, "manifest", "$", e.message, e.found, e.expected, e.remedy),
        )


@contextlib.contextmanager
def _asking(args: argparse.Namespace) -> Iterator[Judge]:
    """A check that also queries the cluster of a kubeconfig."""
    import asyncio

    from airflow_provider_ktrain.engine.api.client import Api
    from airflow_provider_ktrain.engine.submit.preflight import preflight

    chosen = kubeconfig.target(args)

    def judge(prepared: Prepared, rendered: bool) -> list[Problem]:
        if prepared.manifest.get("kind") not in KINDS:
            return prepared.problems
        request, namespace = job_file.request(prepared), chosen.namespace_of(prepared.manifest)
        try:
            found = runner.run(preflight(api, request, namespace, rendered=rendered))
        except OperatorMissingError as e:
            found = [*prepared.found, Problem(ERROR, "not-served", "$.kind", str(e))]
        except ManifestError as e:
            code = "not-served" if isinstance(e, VersionNotServedError) else "runtime"
            found = [*prepared.found, Problem.of(code, e, "$.spec")]
        return [*found, *prepared.changes]

    api = Api(chosen.make_client)
    with asyncio.Runner() as runner:
        try:
            yield judge
        finally:
            runner.run(api.close())
