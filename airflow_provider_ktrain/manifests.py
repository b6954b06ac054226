"""Manifests in DAG files: load one, count its GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from airflow_provider_ktrain.core.errors import ManifestUnreadableError
from airflow_provider_ktrain.core.kinds import Manifest
from airflow_provider_ktrain.core.manifest.loader import SUFFIXES, load_documents, parse, the_job
from airflow_provider_ktrain.core.state.accelerators import stored
from airflow_provider_ktrain.core.state.pods.devices import accelerators_of_job

__all__ = ["gpus_of", "load"]


def load(source: object) -> Manifest:
    """The one training job of a source, as a new dict.

    :param source: a mapping; YAML or JSON text (templates already rendered); the path of a .yaml, .yml or .json file;
        or an object of a Kubernetes SDK (`to_dict()`). Of several documents exactly one must be a training job; the
        others are ignored.
    :raises ManifestError: naming file, line, what was found, what was expected and the remedy.
    """
    if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_path(source)):
        documents = parse(text_of(Path(source)), str(source))
    else:
        documents = load_documents(source)
    manifest: Manifest = the_job(documents).content
    return manifest


def gpus_of(source: object) -> int:
    """The GPUs that all replicas of a job request together: the task's `pool_slots` in a pool that counts GPUs.

    Of a job without GPUs, these are its other accelerators, such as TPUs; of several kinds, the first one in the table
    of `core.state.accelerators`. Of a TrainJob, these are the nodes and GPUs that its manifest sets; its runtime is not
    known.

    :param source: a manifest: a mapping, YAML text, or the path of a YAML or JSON file.
    :raises ManifestError: if it isn't the manifest of a training job.
    """
    return int(stored(accelerators_of_job(load(source)))["gpus"])


def text_of(path: Path) -> str:
    """The content of a manifest's file.

    :raises ManifestUnreadableError: it can't be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ManifestUnreadableError(
            f"{path} can't be read: {e.strerror if isinstance(e, OSError) else 'it is not UTF-8'}",
            expected="a YAML or JSON file",
            remedy=f"correct the path, which is absolute or relative to {Path.cwd()}, or the file",
        ) from None


def _is_path(text: str) -> bool:
    return "\n" not in text and text.strip().endswith(SUFFIXES) and not text.lstrip().startswith(("{", "---"))
