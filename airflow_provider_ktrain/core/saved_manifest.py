"""Manifests that were saved from a job, for example by `kubectl get -o yaml`, and are submitted again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.identity import CODE_ANNOTATION, code_hash
from airflow_provider_ktrain.core.kinds import Manifest
from airflow_provider_ktrain.core.manifest.code import remove_code
from airflow_provider_ktrain.core.manifest.loader import plain

CODE_REMOVED = "The code of the job from which this manifest was saved is removed. To send files, set code"


def without_code(manifest: Mapping[str, Any]) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest without the code of the job from which it was saved, and a note if it had any.

    The code is deleted with its job, so the pods of a new job would wait for it.

    :param manifest: of an author, or saved from a job; its form has not been checked.
    """
    result: Manifest = plain(manifest)
    if not code_hash(result):
        return result, ()
    del result["metadata"]["annotations"][CODE_ANNOTATION]
    remove_code(result.get("spec"))
    return result, (CODE_REMOVED,)
