"""The embedded cluster, which the extra `local` installs: no other module imports `ktrain_embedded`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain.core.errors import ClusterError

if TYPE_CHECKING:
    from ktrain_embedded import EmbeddedCluster

__all__ = ["EmbeddedCluster", "command", "mpi_api_for", "number_of_gpus", "running"]


@contextlib.contextmanager
def running(images: Mapping[str, Any], **options: Any) -> Iterator[EmbeddedCluster]:
    """A cluster that runs until the end of the `with` block.

    :raises ClusterError: it isn't installed, or it doesn't start.
    """
    package = _installed()
    try:
        with package.EmbeddedCluster(images, **options) as cluster:
            yield cluster
    except package.ClusterError as e:
        raise ClusterError(str(e)) from None


def number_of_gpus() -> int:
    """The number of this machine's GPUs, which containers use."""
    return len(_installed().devices())


def mpi_api_for(api_version: str) -> str:
    """The version of MPIJob that a cluster must serve for a job."""
    return str(_installed().mpi_api_for(api_version))


def command(arguments: Sequence[str]) -> int:
    """Run `ktrain-cluster`; returns its exit status."""
    _installed()
    from ktrain_embedded.cli import main

    return main(arguments)


def _installed() -> Any:
    """The package `ktrain_embedded`.

    :raises ClusterError: the provider was installed without its extra `local`.
    """
    if importlib.util.find_spec("ktrain_embedded") is None:
        remedy = "install the extra `local` of airflow-provider-ktrain (docs/how-to/embedded-cluster.md)"
        raise ClusterError(f"The embedded cluster (ktrain-cluster) isn't installed; {remedy}")
    return importlib.import_module("ktrain_embedded")
