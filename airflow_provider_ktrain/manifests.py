"""Manifests in DAG files: load one, count its GPUs."""

from __future__ import annotations

from airflow_provider_ktrain.core.manifest.loader import load
from airflow_provider_ktrain.core.manifest.resources import gpus_of

__all__ = ["gpus_of", "load"]
