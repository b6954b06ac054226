"""The file of `ktrain run`: a training job, checked, and the other documents beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.cli.console import Console
from airflow_provider_ktrain.core.checks import ERROR, check
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.manifest import transform
from airflow_provider_ktrain.core.manifest.loader import parse, templates, the_job
from airflow_provider_ktrain.core.saved_manifest import without_code

Object = dict[str, Any]


class InvalidManifest(Exception):
    """The manifest has errors. The text names them as `ktrain check` does."""


@dataclass(frozen=True)
class JobFile:
    """The content of a file.

    :param manifest: of the training job.
    :param others: the other documents.
    :param left_out: a warning for each of these if they aren't submitted.
    """

    manifest: Object
    others: Sequence[Object]
    left_out: Sequence[str]


def load(file: str, console: Console) -> JobFile:
    """Read a file and check its job.

    :param file: its path; `-` is standard input.
    :param console: where warnings about the manifest are printed.
    :raises InvalidManifest: the manifest has errors.
    :raises ManifestError: the file can't be read, has no training job, or contains templates.
    """
    name, text = _text(file)
    for line, expression in templates(text):
        raise ManifestError(
            "`ktrain run` doesn't render templates",
            where=f"{name}:{line}",
            found=expression,
            expected="a value",
            remedy="replace it, or run the manifest in a task",
        )
    documents = parse(text, name)
    document = the_job(documents)
    manifest, removed = without_code(document.content)
    manifest, moved = transform.modernize(manifest)
    for note in (*removed, *moved):
        console.warning(note)
    problems = check(manifest)
    errors = [f"{name}:{document.line_of(p.path)}: {p}" for p in problems if p.level is ERROR]
    if errors:
        raise InvalidManifest("\n".join(errors))
    for problem in problems:
        console.warning(f"{name}:{document.line_of(problem.path)}: {problem.text}")
    others = [d.content for d in documents if d.content is not document.content and isinstance(d.content, dict)]
    return JobFile(dict(manifest), others, list(document.left_out))


def _text(file: str) -> tuple[str, str]:
    """The name of a file as messages show it, and its content.

    :raises ManifestError: it can't be read.
    """
    if file == "-":
        return "<stdin>", sys.stdin.read()
    try:
        return file, Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise ManifestError(f"{file} can't be read: {why}") from None
