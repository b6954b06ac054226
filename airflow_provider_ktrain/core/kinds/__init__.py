"""The kinds of training job: one file or folder each. To add a kind, name it in KINDS."""

from __future__ import annotations

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.base import Kind
from airflow_provider_ktrain.core.kinds.manifest_fields import Manifest
from airflow_provider_ktrain.core.kinds.mpijob import MPIJOB
from airflow_provider_ktrain.core.kinds.pytorchjob import PYTORCHJOB
from airflow_provider_ktrain.core.kinds.trainjob.kind import TRAINJOB
from airflow_provider_ktrain.core.text.output import SUGGESTION

__all__ = ["KINDS", "MPIJOB", "PYTORCHJOB", "TRAINJOB", "Kind", "Manifest", "did_you_mean", "kind_of"]

KINDS: dict[str, Kind] = {kind.name: kind for kind in (PYTORCHJOB, MPIJOB, TRAINJOB)}


def kind_of(name: object) -> Kind:
    """The kind of this name.

    :raises ManifestError: naming the kinds that there are.
    """
    if isinstance(name, str) and name in KINDS:
        return KINDS[name]
    raise ManifestError(
        f"unsupported kind {name}" if name else "kind is not set",
        where="kind",
        found=repr(name) if name else "nothing",
        expected=f"one of {', '.join(sorted(KINDS))}",
        remedy=did_you_mean(name) or "use one of these kinds",
    )


def did_you_mean(name: object) -> str:
    """A hint for a kind whose name is misspelled; empty for a kind of ours and for one that isn't like any of them."""
    import difflib  # not loaded when a DAG file is parsed

    known = {kind.lower(): kind for kind in KINDS}
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.8)
    return f"{SUGGESTION}{known[near[0]]}?" if near and name not in KINDS else ""
