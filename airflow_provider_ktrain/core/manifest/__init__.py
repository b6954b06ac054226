"""Manifests: loaded (`loader`), changed by options (`overlay`), compared with a schema, and made ready to submit."""

from __future__ import annotations

from typing import Any

#: imported from here by DAGs written for 0.1.0
_MOVED = {
    **dict.fromkeys(("ClaimVolume", "HostPath", "SharedMemory", "Volume"), "airflow_provider_ktrain.volumes"),
    **dict.fromkeys(("gpus_of", "load"), "airflow_provider_ktrain.manifests"),
}


def __getattr__(name: str) -> Any:
    """Import a name from its old module."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    import warnings

    message = f"Import {name} from {_MOVED[name]}; {__name__}.{name} is deprecated."
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(_MOVED[name]), name)
