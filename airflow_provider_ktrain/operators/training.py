"""Operators that run a training job as a task: PyTorchJobOperator, MPIJobOperator and TrainJobOperator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_ktrain.core.checks import parameters
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.core.kinds.trainjob.patches import NODE
from airflow_provider_ktrain.operators.base import TrainingJobOperator

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

    from airflow_provider_ktrain.core.identity.names import Reattach
    from airflow_provider_ktrain.core.logs.selection import LogChoice
    from airflow_provider_ktrain.core.manifest.overlay import JobOptions
    from airflow_provider_ktrain.core.manifest.volumes import Volume

__all__ = ["MPIJobOperator", "PyTorchJobOperator", "TrainJobOperator", "TrainingJobOperator"]


class _ReplicaSpecsOperator(TrainingJobOperator):
    """Base of the operators of jobs that have a replica spec for each role."""

    template_fields: Sequence[str] = (*TrainingJobOperator.template_fields, "workers", "replicas")

    def __init__(
        self,
        *,
        workers: int | str | None = None,
        replicas: Mapping[str, int | str] | None = None,
        # of JobParameters: scripts/signatures.py
        manifest: Mapping[str, Any] | str | None = None,
        name: str | None = None,
        namespace: str | None = None,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        deferrable: bool | None = None,
        reattach: Reattach = "always",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        pod_override: Mapping[str, Any] | None = None,
        dry_run: bool = False,
        image: str | None = None,
        command: Sequence[str] | None = None,
        args: Sequence[str] | None = None,
        code: str | os.PathLike[str] | None = None,
        env: Mapping[str, Any] | None = None,
        volumes: Sequence[Volume] = (),
        nproc_per_node: int | str | None = None,
        checkpoint_dir: str | None = None,
        resume_on_clear: bool = False,
        gpus: int | str | None = None,
        container_resources: Mapping[str, str | int] | None = None,
        hosts: Sequence[str] = (),
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] = (),
        affinity: Mapping[str, Any] | None = None,
        priority_class_name: str | None = None,
        queue_name: str | None = None,
        workload_priority_class: str | None = None,
        avoid_failed_nodes: bool = False,
        queue_timeout: timedelta | float | None = None,
        schedule_timeout: timedelta | float | None = None,
        startup_timeout: timedelta | float | None = timedelta(hours=1),
        partial_start_timeout: timedelta | float | None = timedelta(hours=1),
        log_stall_timeout: timedelta | float | None = None,
        progress_timeout: timedelta | float | None = None,
        max_restarts: int | None = None,
        crash_loop_limit: int | None = 6,
        fail_on_nan: bool | str | Collection[str] = False,
        logs: LogChoice = "auto",
        hang_traces: bool = True,
        on_finish_action: Literal["delete_job", "keep_job", "delete_succeeded_job"] = "delete_job",
        skip_on_exit_code: int | Collection[int] | None = None,
        require: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            # of JobParameters: scripts/signatures.py
            manifest=manifest, name=name, namespace=namespace, kubernetes_conn_id=kubernetes_conn_id,
            cluster_context=cluster_context, deferrable=deferrable, reattach=reattach, labels=labels,
            annotations=annotations, pod_override=pod_override, dry_run=dry_run, image=image, command=command,
            args=args, code=code, env=env, volumes=volumes, nproc_per_node=nproc_per_node,
            checkpoint_dir=checkpoint_dir, resume_on_clear=resume_on_clear, gpus=gpus,
            container_resources=container_resources, hosts=hosts, node_selector=node_selector, tolerations=tolerations,
            affinity=affinity, priority_class_name=priority_class_name, queue_name=queue_name,
            workload_priority_class=workload_priority_class, avoid_failed_nodes=avoid_failed_nodes,
            queue_timeout=queue_timeout, schedule_timeout=schedule_timeout, startup_timeout=startup_timeout,
            partial_start_timeout=partial_start_timeout, log_stall_timeout=log_stall_timeout,
            progress_timeout=progress_timeout, max_restarts=max_restarts, crash_loop_limit=crash_loop_limit,
            fail_on_nan=fail_on_nan, logs=logs, hang_traces=hang_traces, on_finish_action=on_finish_action,
            skip_on_exit_code=skip_on_exit_code, require=require,
            **kwargs,
        )  # fmt: skip
        self.workers = workers
        self.replicas = replicas

    def _job_options(self) -> JobOptions:
        numbers = parameters.converted({"workers": self.workers, "replicas": self.replicas})
        return replace(super()._job_options(), workers=numbers["workers"], replicas=numbers["replicas"] or {})


class PyTorchJobOperator(_ReplicaSpecsOperator):
    """Run a PyTorchJob of the training-operator: a Master and Workers, or only Workers.

    ```python
    PyTorchJobOperator(task_id="train", image="train:1", command=["python3", "train.py"], workers=3, gpus=1, retries=1)
    ```

    Guide: docs/tutorial.md. All other parameters, and the errors raised, are those of `TrainingJobOperator`.

    :param workers: number of Workers; the Master is not counted. Templated. Default: the manifest's.
    :param replicas: number of replicas by role, such as `{"Worker": 3}`; takes precedence over `workers`.
        Templated. Default: the manifest's.
    :param nproc_per_node: processes per replica: a number, `auto`, `gpu` or `cpu` (`nprocPerNode`;
        training-operator 1.7 and newer). Templated. Default: the manifest's.
    """

    kind = PYTORCHJOB


class MPIJobOperator(_ReplicaSpecsOperator):
    """Run an MPIJob: v1 (training-operator) or v2beta1 (mpi-operator), whichever version the cluster serves.

    ```python
    MPIJobOperator(task_id="train", image="mpi:1", command=["mpirun", "python3", "train.py"], workers=4, retries=1)
    ```

    Guide: docs/tutorial.md. All other parameters, and the errors raised, are those of `TrainingJobOperator`. Without a
    manifest, the containers are named `launcher` and `worker`: a `pod_override` then needs a template for each role.

    :param workers: number of Workers; the Launcher is not counted. Templated. Default: the manifest's.
    :param replicas: number of replicas by role, such as `{"Worker": 3}`; takes precedence over `workers`.
        Templated. Default: the manifest's.
    :param nproc_per_node: processes per Worker: a number (`slotsPerWorker`). Templated. Default: the manifest's.
    """

    kind = MPIJOB


class TrainJobOperator(TrainingJobOperator):
    """Run a TrainJob of Kubeflow Trainer 2: nodes that run one program on a training runtime of the cluster.

    ```python
    TrainJobOperator(task_id="train", image="train:1", command=["torchrun", "train.py"], nodes=4, gpus=1, retries=1)
    ```

    Guide: docs/how-to/migrate-to-trainjob.md.

    All other parameters, and the errors raised, are those of `TrainingJobOperator`. What neither they nor the manifest
    set is the runtime's, to whose node selection, tolerations and affinity theirs are added. The launcher of an MPI
    runtime gets the command. Otherwise, start the program by torchrun: the Trainer sets no RANK or WORLD_SIZE.

    The Trainer must be 2.2 or newer, or the submission is refused; a retry still adopts a job on an older one. The pod
    templates are in the runtime. Node selection, volumes, and labels of pods are sent as `runtimePatches`, which need
    the right to read the runtime. Patches can't add containers; fields that they can't set are refused. `code` needs
    them, and a runtime that isn't for MPI.

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
        # of JobParameters: scripts/signatures.py
        manifest: Mapping[str, Any] | str | None = None,
        name: str | None = None,
        namespace: str | None = None,
        kubernetes_conn_id: str = "kubernetes_default",
        cluster_context: str | None = None,
        deferrable: bool | None = None,
        reattach: Reattach = "always",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        pod_override: Mapping[str, Any] | None = None,
        dry_run: bool = False,
        image: str | None = None,
        command: Sequence[str] | None = None,
        args: Sequence[str] | None = None,
        code: str | os.PathLike[str] | None = None,
        env: Mapping[str, Any] | None = None,
        volumes: Sequence[Volume] = (),
        nproc_per_node: int | str | None = None,
        checkpoint_dir: str | None = None,
        resume_on_clear: bool = False,
        gpus: int | str | None = None,
        container_resources: Mapping[str, str | int] | None = None,
        hosts: Sequence[str] = (),
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] = (),
        affinity: Mapping[str, Any] | None = None,
        priority_class_name: str | None = None,
        queue_name: str | None = None,
        workload_priority_class: str | None = None,
        avoid_failed_nodes: bool = False,
        queue_timeout: timedelta | float | None = None,
        schedule_timeout: timedelta | float | None = None,
        startup_timeout: timedelta | float | None = timedelta(hours=1),
        partial_start_timeout: timedelta | float | None = timedelta(hours=1),
        log_stall_timeout: timedelta | float | None = None,
        progress_timeout: timedelta | float | None = None,
        max_restarts: int | None = None,
        crash_loop_limit: int | None = 6,
        fail_on_nan: bool | str | Collection[str] = False,
        logs: LogChoice = "auto",
        hang_traces: bool = True,
        on_finish_action: Literal["delete_job", "keep_job", "delete_succeeded_job"] = "delete_job",
        skip_on_exit_code: int | Collection[int] | None = None,
        require: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            # of JobParameters: scripts/signatures.py
            manifest=manifest, name=name, namespace=namespace, kubernetes_conn_id=kubernetes_conn_id,
            cluster_context=cluster_context, deferrable=deferrable, reattach=reattach, labels=labels,
            annotations=annotations, pod_override=pod_override, dry_run=dry_run, image=image, command=command,
            args=args, code=code, env=env, volumes=volumes, nproc_per_node=nproc_per_node,
            checkpoint_dir=checkpoint_dir, resume_on_clear=resume_on_clear, gpus=gpus,
            container_resources=container_resources, hosts=hosts, node_selector=node_selector, tolerations=tolerations,
            affinity=affinity, priority_class_name=priority_class_name, queue_name=queue_name,
            workload_priority_class=workload_priority_class, avoid_failed_nodes=avoid_failed_nodes,
            queue_timeout=queue_timeout, schedule_timeout=schedule_timeout, startup_timeout=startup_timeout,
            partial_start_timeout=partial_start_timeout, log_stall_timeout=log_stall_timeout,
            progress_timeout=progress_timeout, max_restarts=max_restarts, crash_loop_limit=crash_loop_limit,
            fail_on_nan=fail_on_nan, logs=logs, hang_traces=hang_traces, on_finish_action=on_finish_action,
            skip_on_exit_code=skip_on_exit_code, require=require,
            **kwargs,
        )  # fmt: skip
        self.runtime = runtime
        self.nodes = nodes

    def _job_options(self) -> JobOptions:
        nodes = parameters.converted({"nodes": self.nodes})["nodes"]
        counts = {} if nodes is None else {NODE: nodes}
        return replace(super()._job_options(), runtime=self.runtime, replicas=counts)
