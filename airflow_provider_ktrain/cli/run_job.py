"""The job of `ktrain run`: that of a file, or one that runs the command after `--`; and its code."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from airflow_provider_ktrain.cli import job_file
from airflow_provider_ktrain.cli.console import Console
from airflow_provider_ktrain.cli.job_file import JobFile
from airflow_provider_ktrain.core.errors import ManifestError, ManifestUnreadableError
from airflow_provider_ktrain.core.manifest.code import Code
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build, overlay
from airflow_provider_ktrain.engine.code_directory import read_code

KIND = "PyTorchJob"  #: of a job without a file
WORKERS = 1  #: of a job without a file, beside its Master
LOCAL_IMAGE = "local"  #: of a job without a file in an embedded cluster, which runs it in the working directory


def load(args: argparse.Namespace, console: Console) -> tuple[JobFile, Code | None]:
    """The job with the options of the command line, and the code that is sent with it.

    :param args: of `ktrain run`.
    :param console: where warnings about the manifest are printed.
    :raises InvalidManifest: the manifest has errors.
    :raises ManifestError: the file or the code can't be read, an option doesn't fit the job, or the code is too large.
    """
    code = _code(Path(args.code)) if args.code is not None else None
    options = JobOptions(
        command=args.program or None, args=[] if args.program else None, workers=args.workers, gpus=args.gpus
    )
    if args.file is not None:
        loaded = job_file.load(args.file, console)
        return replace(loaded, manifest=overlay(loaded.manifest, options)), code
    image = args.image[0][0] if args.image else LOCAL_IMAGE
    workers = WORKERS if args.workers is None else args.workers
    manifest = build(KIND, replace(options, image=image, workers=workers))
    manifest["metadata"]["name"] = Path(args.code or args.program[0]).resolve().stem
    return JobFile(manifest, (), ()), code


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
