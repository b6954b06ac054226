"""The provider's metadata for Airflow: name, decorators, links and configuration options."""

from __future__ import annotations

from typing import Any

from airflow_provider_ktrain.core.state.accelerators import COMMON_NAMES, DEFAULT_RESOURCE

DOCUMENTATION = "https://pypi.org/project/airflow-provider-ktrain/"  #: The same as in pyproject.toml.


def get_provider_info() -> dict[str, Any]:
    """The provider's metadata, read by Airflow's provider manager."""
    return {
        "package-name": "airflow-provider-ktrain",
        "name": "Kubeflow training",
        # the form of Apache's own providers: Airflow strips the markup and shows the URL
        "description": "Distributed training with Kubeflow's PyTorchJob, MPIJob and TrainJob as Airflow tasks. "
        f"`Documentation <{DOCUMENTATION}>`__",
        "task-decorators": [
            {"name": "pytorchjob", "class-name": "airflow_provider_ktrain.decorators.pytorchjob.pytorchjob_task"},
            {"name": "mpijob", "class-name": "airflow_provider_ktrain.decorators.mpijob.mpijob_task"},
            {"name": "trainjob", "class-name": "airflow_provider_ktrain.decorators.trainjob.trainjob_task"},
        ],
        "extra-links": [
            "airflow_provider_ktrain.links.training.TrainingJobLink",
            "airflow_provider_ktrain.links.training.TrainingPageLink",
        ],
        "config": {
            "ktrain": {
                "description": "Distributed training with Kubeflow's PyTorchJob, MPIJob and TrainJob.",
                "options": {
                    "deployment_id": {
                        "description": "Identifies this Airflow among those that share a cluster; part of each job's "
                        "name, label and owner. Default: a hash of [api] base_url. Set it if base_url may change, is "
                        "not set or is localhost: other deployments then have the same default.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "team-a-prod",
                        "default": "",
                    },
                    "worker_seconds": {
                        "description": "Seconds that a deferrable task follows its job in the worker before it defers. "
                        "Shorter jobs never defer: Airflow 3.3 fails some tasks whose trigger fires within seconds.",
                        "version_added": "0.1.0",
                        "type": "float",
                        "example": None,
                        "default": "10",
                    },
                    "default_accelerator": {
                        "description": "The resource that the parameter `gpus` of operators requests.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": COMMON_NAMES[2],
                        "default": DEFAULT_RESOURCE,
                    },
                    "accelerators": {
                        "description": "Resources that are counted as accelerators, besides those that the provider "
                        "knows: NAME=UNIT or NAME=UNIT|UNITS, separated by commas. `*` in a name stands for any text.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "example.com/wafer=wafer, example.com/die-*=die|dice",
                        "default": "",
                    },
                    "training_tab": {
                        "description": "Show the training page as a tab of every task. Only for Airflow below 3.4, "
                        "which can't limit a tab to some operators; newer versions always have it on trainings.",
                        "version_added": "0.1.0",
                        "type": "boolean",
                        "example": None,
                        "default": "False",
                    },
                    "repeat_logs": {
                        "description": "Whether a worker logs its trigger's lines again: `auto` (where Airflow stops "
                        "showing them), `always` or `never`.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": None,
                        "default": "auto",
                    },
                    "job_url": {
                        "description": "URL of a dashboard's page about a job, for a button of its task, with the "
                        "placeholders {kind}, {plural}, {namespace}, {name} and {uid}. Default: no button.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "https://grafana.example.com/d/training?var-namespace={namespace}&var-job={name}",
                        "default": "",
                    },
                },
            },
        },
    }
