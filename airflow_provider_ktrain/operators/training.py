"""Operators that run a training job as a task: PyTorchJobOperator, MPIJobOperator and TrainJobOperator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain.core.checks import parameters
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.core.kinds.trainjob.patches import NODE
from airflow_provider_ktrain.operators.base import TrainingJobOperator

if TYPE_CHECKING:
    from airflow_provider_ktrain.core.manifest.overlay import JobOptions

__all__ = ["MPIJobOperator", "PyTorchJobOperator", "TrainJobOperator", "TrainingJobOperator"]


class _ReplicaSpecsOperator(TrainingJobOperator):
    """Base of the operators of jobs that have a replica spec for each role."""

    template_fields: Sequence[str] = (*TrainingJobOperator.template_fields, "workers", "replicas")

    def __init__(
        self,
        *,
        workers: int | str | None = None,
        replicas: Mapping[str, int | str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.workers = workers
        self.replicas = replicas

    def _job_options(self) -> JobOptions:
        numbers = parameters.converted({"workers": self.workers, "replicas": self.replicas})
        return replace(super()._job_options(), workers=numbers["workers"], replicas=numbers["replicas"] or {})


class PyTorchJobOperator(_ReplicaSpecsOperator):
    """Run a PyTorchJob of the training-operator: a Master and Workers, or only Workers.

    All other parameters, and the errors raised, are those of `TrainingJobOperator`.

    :param workers: number of Workers; the Master is not counted. Templated. Default: the manifest's.
    :param replicas: number of replicas by role, such as `{"Worker": 3}`; takes precedence over `workers`.
        Templated. Default: the manifest's.
    :param nproc_per_node: processes per replica: a number, `auto`, `gpu` or `cpu` (`nprocPerNode`;
        training-operator 1.7 and newer). Templated. Default: the manifest's.
    """

    kind = PYTORCHJOB


class MPIJobOperator(_ReplicaSpecsOperator):
    """Run an MPIJob: v1 (training-operator) or v2beta1 (mpi-operator), whichever version the cluster serves.

    All other parameters, and the errors raised, are those of `TrainingJobOperator`. Without a manifest, the containers
    are named `launcher` and `worker`: a `pod_override` then needs a template for each role.

    :param workers: number of Workers; the Launcher is not counted. Templated. Default: the manifest's.
    :param replicas: number of replicas by role, such as `{"Worker": 3}`; takes precedence over `workers`.
        Templated. Default: the manifest's.
    :param nproc_per_node: processes per Worker: a number (`slotsPerWorker`). Templated. Default: the manifest's.
    """

    kind = MPIJOB


class TrainJobOperator(TrainingJobOperator):
    """Run a TrainJob of Kubeflow Trainer 2: nodes that run one program on a training runtime of the cluster.

    All other parameters, and the errors raised, are those of `TrainingJobOperator`. What neither they nor the manifest
    set is the runtime's, to whose node selection, tolerations and affinity theirs are added. The launcher of an MPI
    runtime gets the command. Otherwise, start the program by torchrun: the Trainer sets no RANK or WORLD_SIZE.

    The pod templates are in the runtime. Node selection, volumes, and labels of pods are sent as `runtimePatches`,
    which need Trainer 2.2 or newer and the right to read the runtime. An older Trainer runs jobs without them. Patches
    can't add containers; fields that they can't set are refused. `code` needs them, and a runtime that isn't for MPI.

    :param runtime: the name of a ClusterTrainingRuntime, or a mapping: `{"kind": "TrainingRuntime", "name": "mine"}`.
        Templated. Default: the manifest's; without a manifest `torch-distributed`.
    :param nodes: number of nodes (`numNodes`); on MPI runtimes the launcher usually is one of them. Templated. Default:
        the manifest's, else the runtime's.
    :param container_resources: other resources of each node. If these or the manifest set any, all of the runtime's
        are replaced. Templated. Default: the manifest's.
    :param nproc_per_node: processes per node: a number (`numProcPerNode`), or `auto`: one for each GPU, or for each CPU
        if the nodes have no GPUs. Templated. Default: the manifest's, else the runtime's.
    :param priority_class_name: refused: only the runtime can set a PriorityClass. Default: None.
    """

    kind = TRAINJOB
    template_fields: Sequence[str] = (*TrainingJobOperator.template_fields, "runtime", "nodes")

    def __init__(
        self,
        *,
        runtime: str | Mapping[str, str] | None = None,
        nodes: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.runtime = runtime
        self.nodes = nodes

    def _job_options(self) -> JobOptions:
        nodes = parameters.converted({"nodes": self.nodes})["nodes"]
        counts = {} if nodes is None else {NODE: nodes}
        return replace(super()._job_options(), runtime=self.runtime, replicas=counts)
