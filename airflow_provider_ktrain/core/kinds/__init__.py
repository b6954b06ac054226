"""The kinds of training job: one file or folder each. To add a kind, name it in KINDS."""

from __future__ import annotations

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.base import Kind
from airflow_provider_ktrain.core.kinds.manifest_fields import Manifest
from airflow_provider_ktrain.core.kinds.mpijob import MPIJOB
from airflow_provider_ktrain.core.kinds.operators import JOB_NAME_LABEL, OPERATOR_LABEL
from airflow_provider_ktrain.core.kinds.pytorchjob import PYTORCHJOB
from airflow_provider_ktrain.core.kinds.trainjob.kind import TRAINJOB

__all__ = [
    "JOB_NAME_LABEL",
    "KINDS",
    "MPIJOB",
    "OPERATOR_LABEL",
    "PYTORCHJOB",
    "TRAINJOB",
    "Kind",
    "Manifest",
    "kind_of",
]

KINDS: dict[str, Kind] = {kind.name: kind for kind in (PYTORCHJOB, MPIJOB, TRAINJOB)}


def kind_of(name: object) -> Kind:
    """The kind of this name.

    :raises ManifestError: naming the kinds that there are.
    """
    if isinstance(name, str) and name in KINDS:
        return KINDS[name]
    near = next((known for known in KINDS if known.lower() == str(name).lower()), None)
    raise ManifestError(
        f"unsupported kind {name}" if name else "kind is not set",
        where="kind",
        found=repr(name) if name else "nothing",
        expected=f"one of {', '.join(sorted(KINDS))}",
        remedy=f"did you mean {near}?" if near else "use one of these kinds",
    )
