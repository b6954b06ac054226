"""What Airflow asks of every provider: its name and what it brings."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """The provider's metadata, read by Airflow's provider manager."""
    return {
        "package-name": "airflow-provider-ktrain",
        "name": "Kubeflow training",
        "description": "Distributed training with Kubeflow's PyTorchJob and MPIJob as Airflow tasks.",
    }
