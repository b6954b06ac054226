"""A Kubernetes API server with Kubeflow's training operators, a scheduler and nodes, in one process on this machine.

The names in `__all__` are the public API. Other modules may change without notice.
"""

from ktrain_embedded.cluster import ClusterError, EmbeddedCluster, mpi_api_for
from ktrain_embedded.node.gpus import devices

__all__ = ["ClusterError", "EmbeddedCluster", "devices", "mpi_api_for"]
__version__ = "0.1.0"
