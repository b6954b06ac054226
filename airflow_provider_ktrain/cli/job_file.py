"""The job of `ktrain run` and `ktrain check`: a file with a training job, and what is submitted of it."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.names import Owner, TaskKey
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.manifest.code import Code
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.manifest.loader import Document, parse, templates, the_job
from airflow_provider_ktrain.core.prepare import Prepared
from airflow_provider_ktrain.manifests import text_of

DAG_ID = "ktrain-run"  #: Value of the label ktrain.airflow/dag-id of all jobs of this command.


def load(file: str) -> Document:
    """Read the training job of a file.

    :raises ManifestError: the file can't be read, has no training job, or contains templates.
    """
    name, text = ("<stdin>", sys.stdin.read()) if file == "-" else (file, text_of(Path(file)))
    for line, expression in templates(text):
        raise ManifestError(
            "`ktrain run` doesn't render templates",
            where=f"{name}:{line}",
            found=expression,
            expected="a value",
            remedy="replace it, or run the manifest in a task",
        )
    return the_job(parse(text, name))


def request(
    prepared: Prepared, name: str = "", *, code: Code | None = None, run_seconds: float | None = None
) -> JobRequest:
    """The job that is submitted. Each run has a deployment of its own, so no reaper knows it."""
    run = uuid.uuid4().hex[:12]
    owner = Owner(TaskKey(f"{DAG_ID}-{run}", DAG_ID, name.strip("-") or "job", run), 1, str(uuid.uuid4()))
    kind = kind_of(prepared.manifest.get("kind"))
    return JobRequest(kind, owner, 1, prepared.manifest, run_seconds=run_seconds, code=code)
