"""Airflow provider for distributed training with Kubeflow's PyTorchJob and MPIJob."""

__version__ = "0.1.0"
