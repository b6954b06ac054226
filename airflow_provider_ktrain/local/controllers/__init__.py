"""The controllers of the embedded cluster: those of Kubernetes that the jobs need, and both Kubeflow operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.controllers.gc import GarbageCollector
from airflow_provider_ktrain.local.controllers.pytorchjob import PyTorchJobController
from airflow_provider_ktrain.local.store import Store


def all_controllers(store: Store, mpi_api: str) -> list[Callable[[], Awaitable[None]]]:
    """The main loops of all controllers of a cluster that serves MPIJob as `mpi_api` (v1 or v2beta1)."""
    controllers = [PyTorchJobController(store).controller().run]
    return [*controllers, GarbageCollector(store, r.served(mpi_api)).controller().run]
