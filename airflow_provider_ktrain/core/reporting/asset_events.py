"""What the asset events of a training contain: the `extra` of each outlet. See docs/reference/formats.md."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.formats import VERSION, json_size, mapping
from airflow_provider_ktrain.core.identity.task_variables import CHECKPOINT_DIR
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.reporting.redaction import redacted
from airflow_provider_ktrain.core.text.output import clean, masked

MODEL_URI = "model_uri"  #: Key of the result under which a program reports where its model is.
MAX_URI_CHARS = 1500  #: Airflow rejects longer URIs of assets.
MAX_EXTRA_BYTES = 16 * 1024  #: Size of the extra's JSON.
LEFT_OUT = "left_out"  #: Key of the extra that names the fields that were too large.
_DISPENSABLE = ("result", "metrics", "checkpoint_dir", MODEL_URI)  #: Fields, in the order in which they are left out.


def model_uri(result: Any) -> str:
    """The URI of the model that a training reports in its result.

    :raises ValueError: there is none, with the reason.
    """
    if not isinstance(result, Mapping) or MODEL_URI not in result:
        raise ValueError(f"its result has no {MODEL_URI}")
    uri = result[MODEL_URI]
    if not isinstance(uri, str):
        raise ValueError(f"{MODEL_URI} is of type {type(uri).__name__}, expected text")
    if len(uri) > MAX_URI_CHARS:
        raise ValueError(f"{MODEL_URI} has more than {MAX_URI_CHARS:,} characters")
    if masked(uri) != clean(uri):
        raise ValueError(f"{MODEL_URI} contains a secret")
    return uri


def checkpoint_dir(kind: Kind, job: Mapping[str, Any]) -> str:
    """The value of KTRAIN_CHECKPOINT_DIR in a job; empty if it isn't set, or is set by a reference."""
    copied = {"spec": copy.deepcopy(dict(mapping(job.get("spec"))))}  # the kind adds missing fields
    with contextlib.suppress(ManifestError):
        for role, template in kind.form.option_templates(copied):
            program = kind.form.program(copied["spec"], template.get("spec") or {}, role)
            for variable in program.get("env") or ():
                if variable.get("name") == CHECKPOINT_DIR:
                    return str(variable.get("value") or "")
    return ""


def event_extra(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The extra with these fields, without secrets and empty fields.

    `left_out` names the fields that would make it larger than MAX_EXTRA_BYTES.

    :param fields: `job`, `usage`, `metrics`, `result`, `checkpoint_dir`, `model_uri`.
    """
    filled = {name: value for name, value in fields.items() if value is not None and value not in ("", {})}
    kept, left_out = {"version": VERSION, **redacted(filled)}, list[str]()
    for name in _DISPENSABLE:
        if name in kept and json_size(kept) > MAX_EXTRA_BYTES:
            del kept[name]
            left_out.append(name)
            kept[LEFT_OUT] = left_out
    return kept
