"""`ktrain run`: submit a training job, follow it to its end, and delete it. It needs no Airflow."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.cli import exit_codes, job_file, kubeconfig, local_objects
from airflow_provider_ktrain.cli.arguments import DEFAULT_ACCELERATOR, count, default_accelerator, duration, image
from airflow_provider_ktrain.cli.console import Console
from airflow_provider_ktrain.cli.exit_codes import ExitCode
from airflow_provider_ktrain.cli.kubeconfig import Target
from airflow_provider_ktrain.cli.wording import for_run
from airflow_provider_ktrain.core.checks import Problem
from airflow_provider_ktrain.core.errors import KtrainError, ManifestError, ManifestUnreadableError
from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.manifest.code import Code
from airflow_provider_ktrain.core.manifest.overlay import JobOptions
from airflow_provider_ktrain.core.prepare import Prepared, prepare
from airflow_provider_ktrain.core.state.accelerators import DEFAULT_RESOURCE, GPU, accelerator_of, ordered, unit_of
from airflow_provider_ktrain.core.text.output import counted, masked
from airflow_provider_ktrain.engine.submit.code_directory import read_code

KIND = "PyTorchJob"  #: Kind of a job without a file.
WORKERS = 1  #: Workers of a job without a file, beside its Master.
#: How much an embedded node has of each resource that the job requests and that isn't an accelerator.
AMPLE = str(10**18)
#: Image of a job without a file in an embedded cluster, which runs it in the working directory.
LOCAL_IMAGE = "local:latest"


def add_parser(subparsers: Any) -> None:
    """Add the command to `ktrain`."""
    parser = subparsers.add_parser(
        "run",
        help="run a training job and follow it to its end, without Airflow",
        usage="ktrain run [options] [FILE] [-- COMMAND...]",
        description="Submits the job under a new name, prints the log of its replicas, and deletes it at the end. "
        "Ctrl-C deletes it, too. Exit status: 0: succeeded, 1: the training failed, 2: invalid arguments or manifest, "
        "3: the cluster couldn't run the job, 4: the cluster can't be reached or refuses, 124: --timeout, 129, 130 and "
        "143: interrupted.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="YAML or JSON of a PyTorchJob, MPIJob or TrainJob; - for standard input (default: a PyTorchJob that runs "
        "COMMAND)",
    )
    _add_program_options(parser.add_argument_group("program"))
    parser.add_argument(
        "--timeout",
        type=duration,
        metavar="DURATION",
        help="delete the job after this time, such as 90s, 15m or 2h (default: no limit)",
    )
    kubeconfig.add_options(parser.add_argument_group("cluster"))
    _add_local_options(parser.add_argument_group("embedded cluster"))
    parser.set_defaults(run=_run)


def _add_program_options(group: Any) -> None:
    group.add_argument(
        "--code",
        metavar="DIR",
        help="a directory or file that is sent to the pods, without what its .ktrainignore names; the command runs in "
        "it (default: the files of the image)",
    )
    group.add_argument(
        "--workers", type=count, metavar="N", help="number of Workers (default: the file's; without a file 1)"
    )
    group.add_argument(
        "--gpus",
        type=count,
        metavar="N",
        help="GPUs of each replica, or units of the resource that "
        f"{DEFAULT_ACCELERATOR} names (default: the file's, or none)",
    )


def _add_local_options(group: Any) -> None:
    group.add_argument(
        "--local", action="store_true", help="run on an embedded cluster, which is started and stopped by this command"
    )
    group.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="NAME[=DIR]",
        type=image,
        help="the directory in which the containers of an image run (default: the working directory); may be repeated. "
        "Without FILE, the first one is the job's image, with or without --local",
    )
    group.add_argument(
        "--gpus-per-node",
        type=count,
        metavar="N",
        help=f"{DEFAULT_RESOURCE} of the node (default: those that nvidia-smi lists; if there are none, as many "
        "simulated ones as the job requests)",
    )


def _run(args: argparse.Namespace) -> int:
    console = Console()
    if wrong := _conflict(args):
        console.error(wrong)
        return ExitCode.INVALID
    # signals that would end the process without cleaning up; SIGINT raises KeyboardInterrupt, and nohup ignores SIGHUP
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _terminate) for number in numbers}
    try:
        prepared, code = load(args, console)
        local = _local_cluster(args, prepared.manifest, console) if args.local else None
        with local or contextlib.nullcontext(kubeconfig.target(args)) as target:
            return asyncio.run(_follow(target, args, prepared, code, console))
    except KeyboardInterrupt:
        return exit_codes.of_signal(signal.SIGINT)
    except InvalidManifest as e:
        print(masked(for_run(str(e))), file=sys.stderr)
        return ExitCode.INVALID
    except KtrainError as e:
        console.error(e)
        return exit_codes.of_error(e)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(number: int, frame: object) -> None:
    """Handle a signal while no event loop does."""
    sys.exit(exit_codes.of_signal(number))


def _conflict(args: argparse.Namespace) -> str:
    """What is wrong with the combination of the options; empty if nothing is."""
    if args.local and (args.kubeconfig or args.context):
        return "--local: found --kubeconfig or --context, expected neither: it starts a cluster of its own"
    if args.file is None and not args.program:
        return "found neither FILE nor a command, expected a manifest, or a command after --"
    if args.file is not None and not args.program and not Path(args.file).exists() and shutil.which(args.file):
        return f"FILE: found the command {args.file!r}, expected a manifest; put `--` before a command"
    if args.file is None and not args.image and not args.local:
        return "--image is missing: add --image NAME, or --local to run the command on this machine"
    is_of_job = args.file is None and not any(directory for _, directory in args.image)
    of_cluster = args.image[1:] if is_of_job else args.image  # the first one may be the job's
    if not args.local and (of_cluster or args.gpus_per_node is not None):
        return "--image NAME=DIR and --gpus-per-node need --local: they configure the embedded cluster"
    return ""


# the cluster


@contextlib.contextmanager
def _local_cluster(args: argparse.Namespace, manifest: Mapping[str, Any], console: Console) -> Iterator[Target]:
    """A new embedded cluster."""
    from airflow_provider_ktrain import embedded
    from airflow_provider_ktrain.core.state.pods.devices import accelerators_of_job, resources_of_job

    real, requested = embedded.number_of_gpus(), accelerators_of_job(manifest)
    names = resources_of_job(manifest)
    gpus = {name for name in names if accelerator_of(name) == GPU} or {DEFAULT_RESOURCE}
    default = requested[GPU] if DEFAULT_RESOURCE in gpus else 0
    number = next(n for n in (args.gpus_per_node, real or None, default) if n is not None)
    others = dict.fromkeys(sorted(gpus - {DEFAULT_RESOURCE}), requested[GPU])  # GPUs of other vendors
    others |= {name: requested[name] for name in ordered(requested) if name != GPU}
    images = {"*": os.getcwd(), **dict(args.image)}
    offered = [counted(number, "GPU" if real else "simulated GPU")] if number or not others else []
    offered += [f"{n:,} simulated {unit_of(name)[n != 1]}{f' ({name})' * (name in gpus)}" for name, n in others.items()]
    kind = "Other containers" if any(directory and name != "*" for name, directory in args.image) else "Containers"
    where = "" if args.code is not None else f" {kind} run in {images['*']}."
    console.info(f"Starting an embedded cluster: 1 node, {', '.join(offered)}.{where}")
    mpi_api = embedded.mpi_api_for(str(manifest.get("apiVersion")))
    resources = dict.fromkeys(names - gpus, AMPLE) | {name: str(amount) for name, amount in others.items()}
    with embedded.running(images, gpus_per_node=number, resources=resources, mpi_api=mpi_api) as cluster:
        args.kubeconfig = str(cluster.kubeconfig)
        yield kubeconfig.target(args)
        console.info("Stopping the embedded cluster.")


# the job


class InvalidManifest(Exception):
    """The manifest has errors. The text names them as `ktrain check` does."""


def load(args: argparse.Namespace, console: Console) -> tuple[Prepared, Code | None]:
    """The job of the file, or one that runs the command after `--`, with the options; and the code sent with it.

    :raises InvalidManifest: the manifest has errors.
    :raises ManifestError: the file or the code can't be read, an option doesn't fit the job, or the code is too large.
    """
    code = _code(Path(args.code)) if args.code is not None else None
    options = JobOptions(
        command=args.program or None, args=[] if args.program else None, workers=args.workers, gpus=args.gpus,
        gpu_resource=default_accelerator(),
    )  # fmt: skip
    if args.file is not None:
        prepared = prepare(job_file.load(args.file), options)
    else:
        image = args.image[0][0] if args.image else LOCAL_IMAGE
        workers = WORKERS if args.workers is None else args.workers
        prepared = prepare(None, replace(options, image=image, workers=workers), KIND)
    document = prepared.document

    def at(problem: Problem) -> str:
        return f"{document.file}:{document.line_of(problem.path)}: " if document.file else ""

    if prepared.errors:
        raise InvalidManifest("\n".join(f"{at(problem)}{problem}" for problem in prepared.errors))
    for problem in prepared.problems:
        console.warning(f"{at(problem)}{problem.text}")
    return prepared, code


def _code(path: Path) -> Code:
    try:
        return read_code(path)
    except ManifestUnreadableError as e:  # of a task it may appear later
        raise ManifestError(
            e.message,
            where="--code",
            found=e.found,
            expected=f"a readable file or directory, absolute or relative to {Path.cwd()}",
            remedy="correct the path or the permissions",
        ) from None


async def _follow(
    target: Target, args: argparse.Namespace, prepared: Prepared, code: Code | None, console: Console
) -> int:
    from airflow_provider_ktrain.cli.run_host import InterruptedTwice, RunHost
    from airflow_provider_ktrain.engine.api.client import Api

    namespace, document = target.namespace_of(prepared.manifest), prepared.document
    api = Api(target.make_client)
    try:
        if args.local:
            others = [other.content for other in document.beside if isinstance(other.content, dict)]
            await local_objects.create(api, namespace, others, console)
        else:
            for warning in document.left_out:
                console.warning(warning)
        request = job_file.request(prepared, _name(args, prepared), code=code, run_seconds=args.timeout)
        host = RunHost(api, request, namespace, console, owns_cluster=args.local)
        try:
            outcome = await host.run()
        except InterruptedTwice as e:
            console.error(e)
            assert host.interrupted_by is not None
            return exit_codes.of_signal(host.interrupted_by)
        except Exception as e:
            if isinstance(e, KtrainError):
                raise
            console.error(f"{''.join(traceback.format_exception(e))}{await host.describe_remainder()}")
            return ExitCode.CLUSTER
    finally:
        await api.close()
    if outcome.release_error:
        console.error(outcome.release_error)
    if host.interrupted_by is not None and not outcome.succeeded:
        return exit_codes.of_signal(host.interrupted_by)
    return _report(outcome, console)


def _report(outcome: Any, console: Console) -> int:
    """Print the metrics and the result. The cause was logged before the release. Returns the exit code."""
    if metrics := "\n".join(_metric(name, of) for name, of in outcome.training_metrics.items()):
        console.info(f"Metrics:\n{metrics}")
    if outcome.succeeded:
        for line in outcome.result_error.splitlines():
            console.warning(line)
        if outcome.result is not None:
            console.info(f"Result: {json.dumps(outcome.result)}")
        return ExitCode.CLUSTER if outcome.release_error else ExitCode.SUCCEEDED
    if not outcome.cause:
        console.error("The training did not succeed.")
    return exit_codes.of_cause(outcome.cause or {})


def _metric(name: str, values: Mapping[str, Any]) -> str:
    """A line about one metric: `loss: 0.25 at step 300, best 0.2 at step 280`."""
    is_last = values.get("best_step", values["step"]) == values["step"]
    best = "" if is_last else f", best {values['best']} at step {values['best_step']}"
    return f"{name}: {values['last']} at step {values['step']}{best}"


def _name(args: argparse.Namespace, prepared: Prepared) -> str:
    """The readable prefix of the job's name: from the manifest, the file, the code or the command."""
    metadata = mapping(mapping(prepared.document.content).get("metadata"))
    given = metadata.get("name") or metadata.get("generateName")
    return str(given or Path(args.file or Path(args.code or args.program[0]).resolve()).stem)
