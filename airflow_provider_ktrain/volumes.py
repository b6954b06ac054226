"""Volumes for the parameter `volumes` of the operators and decorators."""

from __future__ import annotations

from airflow_provider_ktrain.core.manifest.volumes import ClaimVolume, HostPath, SharedMemory, Volume

__all__ = ["ClaimVolume", "HostPath", "SharedMemory", "Volume"]
