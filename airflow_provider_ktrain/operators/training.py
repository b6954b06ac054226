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

    The job's name is derived from the task's identity, so that a retry finds and adopts the job of an earlier try. A
    cleared task submits a new job. However the task ends, the job's pods are released. Options such as `image` and
    `gpus` override fields of the manifest; the other fields keep the manifest's values.

    A template renders to text. The text of a whole number is converted; a list or a mapping needs
    `render_template_as_native_obj=True` on the DAG.

    :param manifest: the job: a dict, YAML text, or the path of a YAML file (absolute, or relative to the DAG's
        folder). Templated. Default: None, a job is built from `image`, `command`, `workers` and `gpus`.
    :param name: prefix of the job's name. Templated. Default: the task's id.
    :param namespace: namespace of the job. Templated. Default: the manifest's, else the connection's, else
        `default`.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param deferrable: wait in the triggerer, without a worker slot; logs are still live. Default: None, `[operators]
        default_deferrable` where an environment variable sets it, else True.
    :param on_finish_action: what happens to the job at the end: `delete_job` (default), `keep_job` or
        `delete_succeeded_job`. A finished job that is kept loses its running pods. An unfinished job is deleted, and
        only `keep_job` suspends it instead: a job of a Kueue queue by its Workload, or it is deleted if the right or
        the time to do this is missing.
    :param reattach: what a retry does with the job of an earlier try: `always` (default) adopts it, even if the
        manifest has changed; `if_unchanged` replaces it if the manifest has changed.
    :param logs: whose logs to follow: `auto` (default: all replicas of a job with up to 16, else the primary
        replica), `all`, `primary`, `none`, or replica indexes by role: `{"Worker": [0, 1]}`.
    :param queue_timeout: how long a queue may suspend the job, in seconds or as a timedelta. Default: None, no
        limit.
    :param schedule_timeout: how long a pod may wait for a node or a ResourceQuota, in seconds or as a timedelta. The
        worker waits as long if the job itself exceeds a quota. Default: None: pods wait without limit, and a job that
        exceeds a quota fails.
    :param startup_timeout: how long a scheduled pod may take until its containers run, in seconds or as a
        timedelta; None means no limit. Default: one hour.
    :param partial_start_timeout: how long some pods may hold GPUs while others have no node, in seconds or as a
        timedelta; None means no limit. Elastic jobs with their minimum of Workers are exempt. Default: one hour.
    :param log_stall_timeout: how long no replica of a running job, followed or not, may log a line, in seconds or as a
        timedelta. Default: None, no limit.
    :param progress_timeout: how long no replica of a running job, followed or not, may report a higher step
        (`KTRAIN_METRIC`) before the job counts as hung, in seconds or as a timedelta. This includes a job that never
        reports a step. Default: None, no limit.
    :param max_restarts: maximum number of container restarts and replaced pods (restart policy ExitCode), over all
        pods. Default: None, no limit.
    :param crash_loop_limit: number of consecutive failures of one container, each less than 10 minutes after its
        start, after which the job fails. Failures count once every replica has run; elastic jobs are exempt. None
        means no limit. Default: 6.
    :param image: image of the container `pytorch` in every role. Templated. Default: the manifest's.
    :param command: command of the container `pytorch` in every role. Templated. Default: the manifest's.
    :param args: arguments of the container `pytorch` in every role. Templated. Default: the manifest's.
    :param code: a directory or file that is sent to the pods, at most 700 KiB packed. Files that match a pattern in its
        `.ktrainignore` are left out. The program runs in the directory. Requires a `command`, and `python3` in the
        image. A relative path is below the DAG file's folder or a `template_searchpath`. Templated. Default: None, the
        program uses the files of the image.
    :param hang_traces: whether a program that is sent as code or as a function prints the stacks of its Python
        processes when its pod is stopped, so that a hang names the replica and the line where it waits. The program
        then isn't process 1 of its container. Default: True.
    :param env: environment variables of every role, by name; they replace the manifest's. A mapping as value
        becomes `valueFrom`. Templated. Default: None.
    :param workers: number of Workers; the Master is not counted. Templated. Default: the manifest's.
    :param replicas: number of replicas by role, such as `{"Worker": 3}`; takes precedence over `workers`.
        Templated. Default: the manifest's.
    :param gpus: GPUs of each replica, as limit and request (`nvidia.com/gpu`); 0 removes the manifest's. Templated.
        Default: the manifest's.
    :param container_resources: other resources of each replica, as limits and requests, such as `{"rdma/hca": 1}`.
        Templated. Default: the manifest's.
    :param nproc_per_node: processes per replica: a number, `auto`, `gpu` or `cpu` (`nprocPerNode`;
        training-operator 1.7 and newer). Templated. Default: the manifest's.
    :param hosts: names of the nodes that may run the replicas (label `kubernetes.io/hostname`). Templated. Default:
        any node.
    :param node_selector: labels that a node must have, added to the manifest's. Templated. Default: None.
    :param tolerations: tolerations of the pods, added to the manifest's. Templated. Default: none.
    :param affinity: affinity of the pods, in place of the manifest's; `hosts` is added to it. Templated. Default:
        the manifest's.
    :param priority_class_name: a PriorityClass of the cluster. Templated. Default: the manifest's.
    :param queue_name: a Kueue LocalQueue of the namespace, set as a label of the job. (`queue` is Airflow's own
        parameter.) Templated. Default: the manifest's.
    :param workload_priority_class: a WorkloadPriorityClass of Kueue, set as a label of the job. It orders the queue;
        `priority_class_name` orders the pods. Templated. Default: the manifest's.
    :param volumes: volumes (`SharedMemory`, `ClaimVolume`, `HostPath`) to mount into the main container of every
        role; each replaces a mount at the same path. Templated. Default: none.
    :param pod_override: a pod template (`metadata` and `spec`), or one by role, that is merged into every replica's by
        Kubernetes' strategic merge, after all other parameters: service account, pull secrets, security context,
        `envFrom`, init containers, sidecars. The main container is named `pytorch`. Templated. Default: None.
    :param labels: labels added to the job and its pods. Templated. Default: None.
    :param annotations: annotations added to the job and its pods. Templated. Default: None.
    :param checkpoint_dir: base directory of the environment variable KTRAIN_CHECKPOINT_DIR. Its value is the same
        for all tries of one run of the task, and different for each run, each mapped task and, without
        `resume_on_clear`, each clear. It is a path in the pods or a URL. In `s3://CONNECTION@bucket/path`, the worker
        uses the connection to list the directory, and the program doesn't get it. Templated. Default: None, the
        variable is not set.
    :param resume_on_clear: whether a cleared task keeps its checkpoint directory and continues to count
        KTRAIN_ATTEMPT. Default: False, it trains from the beginning.
    :param avoid_failed_nodes: keep new jobs of later tries away from up to 8 nodes on which a try failed
        because of the infrastructure: a broken GPU, a lost node, an eviction because of a shortage. Airflow 3.3 and
        newer. Default: False.
    :param skip_on_exit_code: one or more exit codes of the primary replica's main container for which the task is
        skipped instead of failed. The job is released as after a failure. Default: None, no exit code.
    :param dry_run: create nothing; run the checks of `ktrain check --server`: served versions, namespace, rights,
        queue, schema, and a dry run on the API server. Default: False.
    :param kwargs: parameters of `BaseOperator`. `execution_timeout` counts from the submission of the job, also
        while deferred and over retries that adopt it; it restarts when a kept job is resumed. The job is released
        shortly before this time is over. The asset events of `outlets` contain the job, its result, metrics and
        GPU-seconds; an `AssetAlias` becomes the asset of the result's `model_uri`. Set `retries` to 1 or more: Airflow
        may fail a try by mistake (apache/airflow#72716), and only a retry then returns the result of the training.
    :raises TrainingJobError: the job did not succeed; a subclass for each category of causes (see `exceptions`).
    :raises ValueError: when the DAG is parsed: a parameter without a template is invalid.
    :raises TrainingConfigurationError: the manifest or a parameter is invalid; never retried.
    :raises TrainingClusterError: the cluster can't run the job now: missing access, a quota, a missing object.
    """

    kind = PYTORCHJOB


class MPIJobOperator(_ReplicaSpecsOperator):
    """Run an MPIJob: v1 (training-operator) or v2beta1 (mpi-operator), whichever version the cluster serves.

    The job's name is derived from the task's identity, so that a retry finds and adopts the job of an earlier try. A
    cleared task submits a new job. However the task ends, the job's pods are released. Options such as `image` and
    `gpus` override fields of the manifest; the other fields keep the manifest's values.

    A template renders to text. The text of a whole number is converted; a list or a mapping needs
    `render_template_as_native_obj=True` on the DAG.

    :param manifest: the job: a dict, YAML text, or the path of a YAML file (absolute, or relative to the DAG's
        folder). Templated. Default: None, a job is built from `image`, `command`, `workers` and `gpus`.
    :param name: prefix of the job's name. Templated. Default: the task's id.
    :param namespace: namespace of the job. Templated. Default: the manifest's, else the connection's, else
        `default`.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param deferrable: wait in the triggerer, without a worker slot; logs are still live. Default: None, `[operators]
        default_deferrable` where an environment variable sets it, else True.
    :param on_finish_action: what happens to the job at the end: `delete_job` (default), `keep_job` or
        `delete_succeeded_job`. A finished job that is kept loses its running pods. An unfinished job is deleted, and
        only `keep_job` suspends it instead: a job of a Kueue queue by its Workload, or it is deleted if the right or
        the time to do this is missing.
    :param reattach: what a retry does with the job of an earlier try: `always` (default) adopts it, even if the
        manifest has changed; `if_unchanged` replaces it if the manifest has changed.
    :param logs: whose logs to follow: `auto` (default: all replicas of a job with up to 16, else the primary
        replica), `all`, `primary`, `none`, or replica indexes by role: `{"Worker": [0, 1]}`.
    :param queue_timeout: how long a queue may suspend the job, in seconds or as a timedelta. Default: None, no
        limit.
    :param schedule_timeout: how long a pod may wait for a node or a ResourceQuota, in seconds or as a timedelta. The
        worker waits as long if the job itself exceeds a quota. Default: None: pods wait without limit, and a job that
        exceeds a quota fails.
    :param startup_timeout: how long a scheduled pod may take until its containers run, in seconds or as a
        timedelta; None means no limit. Default: one hour.
    :param partial_start_timeout: how long some pods may hold GPUs while others have no node, in seconds or as a
        timedelta; None means no limit. Elastic jobs with their minimum of Workers are exempt. Default: one hour.
    :param log_stall_timeout: how long no replica of a running job, followed or not, may log a line, in seconds or as a
        timedelta. Default: None, no limit.
    :param progress_timeout: how long no replica of a running job, followed or not, may report a higher step
        (`KTRAIN_METRIC`) before the job counts as hung, in seconds or as a timedelta. This includes a job that never
        reports a step. Default: None, no limit.
    :param max_restarts: maximum number of container restarts and replaced pods (restart policy ExitCode), over all
        pods. Default: None, no limit.
    :param crash_loop_limit: number of consecutive failures of one container, each less than 10 minutes after its
        start, after which the job fails. Failures count once every replica has run; elastic jobs are exempt. None
        means no limit. Default: 6.
    :param image: image of the main container (`spec.mainContainer`, else the first one) in every role. Templated.
        Default: the manifest's.
    :param command: command of the Launcher's main container. Templated. Default: the manifest's.
    :param args: arguments of the Launcher's main container. Templated. Default: the manifest's.
    :param code: a directory or file that is sent to the Launcher and the Workers, at most 700 KiB packed. Files that
        match a pattern in its `.ktrainignore` are left out. The program and its ranks run in the directory. Requires a
        `command`, and `python3` in the image. A relative path is below the DAG file's folder or a
        `template_searchpath`. Templated. Default: None, the program uses the files of the image.
    :param hang_traces: whether a program that is sent as code or as a function prints the stacks of its Python
        processes when its pod is stopped, so that a hang names the replica and the line where it waits. The program
        then isn't process 1 of its container. Default: True.
    :param env: environment variables of every role, by name; they replace the manifest's. A mapping as value
        becomes `valueFrom`. Templated. Default: None.
    :param workers: number of Workers; the Launcher is not counted. Templated. Default: the manifest's.
    :param replicas: number of replicas by role, such as `{"Worker": 3}`; takes precedence over `workers`.
        Templated. Default: the manifest's.
    :param gpus: GPUs of each Worker, as limit and request (`nvidia.com/gpu`); 0 removes the manifest's. Templated.
        Default: the manifest's.
    :param container_resources: other resources of each Worker, as limits and requests, such as `{"rdma/hca": 1}`.
        Templated. Default: the manifest's.
    :param nproc_per_node: processes per Worker: a number (`slotsPerWorker`). Templated. Default: the manifest's.
    :param hosts: names of the nodes that may run the replicas (label `kubernetes.io/hostname`). Templated. Default:
        any node.
    :param node_selector: labels that a node must have, added to the manifest's. Templated. Default: None.
    :param tolerations: tolerations of the pods, added to the manifest's. Templated. Default: none.
    :param affinity: affinity of the pods, in place of the manifest's; `hosts` is added to it. Templated. Default:
        the manifest's.
    :param priority_class_name: a PriorityClass of the cluster. Templated. Default: the manifest's.
    :param queue_name: a Kueue LocalQueue of the namespace, set as a label of the job. (`queue` is Airflow's own
        parameter.) Templated. Default: the manifest's.
    :param workload_priority_class: a WorkloadPriorityClass of Kueue, set as a label of the job. It orders the queue;
        `priority_class_name` orders the pods. Templated. Default: the manifest's.
    :param volumes: volumes (`SharedMemory`, `ClaimVolume`, `HostPath`) to mount into the main container of every
        role; each replaces a mount at the same path. Templated. Default: none.
    :param pod_override: a pod template (`metadata` and `spec`), or one by role, that is merged into every replica's by
        Kubernetes' strategic merge, after all other parameters: service account, pull secrets, security context,
        `envFrom`, init containers, sidecars. Without a manifest, the containers are named `launcher` and `worker`:
        pass a template for each role. Templated. Default: None.
    :param labels: labels added to the job and its pods. Templated. Default: None.
    :param annotations: annotations added to the job and its pods. Templated. Default: None.
    :param checkpoint_dir: base directory of the environment variable KTRAIN_CHECKPOINT_DIR. Its value is the same
        for all tries of one run of the task, and different for each run, each mapped task and, without
        `resume_on_clear`, each clear. It is a path in the pods or a URL. In `s3://CONNECTION@bucket/path`, the worker
        uses the connection to list the directory, and the program doesn't get it. Templated. Default: None, the
        variable is not set.
    :param resume_on_clear: whether a cleared task keeps its checkpoint directory and continues to count
        KTRAIN_ATTEMPT. Default: False, it trains from the beginning.
    :param avoid_failed_nodes: keep new jobs of later tries away from up to 8 nodes on which a try failed
        because of the infrastructure: a broken GPU, a lost node, an eviction because of a shortage. Airflow 3.3 and
        newer. Default: False.
    :param skip_on_exit_code: one or more exit codes of the primary replica's main container for which the task is
        skipped instead of failed. The job is released as after a failure. Default: None, no exit code.
    :param dry_run: create nothing; run the checks of `ktrain check --server`: served versions, namespace, rights,
        queue, schema, and a dry run on the API server. Default: False.
    :param kwargs: parameters of `BaseOperator`. `execution_timeout` counts from the submission of the job, also
        while deferred and over retries that adopt it; it restarts when a kept job is resumed. The job is released
        shortly before this time is over. The asset events of `outlets` contain the job, its result, metrics and
        GPU-seconds; an `AssetAlias` becomes the asset of the result's `model_uri`. Set `retries` to 1 or more: Airflow
        may fail a try by mistake (apache/airflow#72716), and only a retry then returns the result of the training.
    :raises TrainingJobError: the job did not succeed; a subclass for each category of causes (see `exceptions`).
    :raises ValueError: when the DAG is parsed: a parameter without a template is invalid.
    :raises TrainingConfigurationError: the manifest or a parameter is invalid; never retried.
    :raises TrainingClusterError: the cluster can't run the job now: missing access, a quota, a missing object.
    """

    kind = MPIJOB


class TrainJobOperator(TrainingJobOperator):
    """Run a TrainJob of Kubeflow Trainer 2: nodes that run one program on a training runtime of the cluster.

    The job's name is derived from the task's identity, so that a retry finds and adopts the job of an earlier try. A
    cleared task submits a new job. However the task ends, the job's pods are released. Options such as `image` and
    `gpus` override fields of the manifest; the other fields keep the manifest's values.

    The pod templates are in the runtime. Node selection, volumes, and labels of pods are sent as `runtimePatches`,
    which need Trainer 2.2 or newer and the right to read the runtime. An older Trainer runs jobs without them.

    A template renders to text. The text of a whole number is converted; a list or a mapping needs
    `render_template_as_native_obj=True` on the DAG.

    :param manifest: the job: a dict, YAML text, or the path of a YAML file (absolute, or relative to the DAG's
        folder). Templated. Default: None, a job is built from `runtime`, `image`, `command`, `nodes` and `gpus`.
    :param runtime: the name of a ClusterTrainingRuntime, or a mapping: `{"kind": "TrainingRuntime", "name": "mine"}`.
        Templated. Default: the manifest's; without a manifest `torch-distributed`.
    :param name: prefix of the job's name. Templated. Default: the task's id.
    :param namespace: namespace of the job. Templated. Default: the manifest's, else the connection's, else
        `default`.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param deferrable: wait in the triggerer, without a worker slot; logs are still live. Default: None, `[operators]
        default_deferrable` where an environment variable sets it, else True.
    :param on_finish_action: what happens to the job at the end: `delete_job` (default), `keep_job` or
        `delete_succeeded_job`. A finished job that is kept loses its running pods. An unfinished job is deleted, and
        only `keep_job` suspends it instead: a job of a Kueue queue by its Workload, or it is deleted if the right or
        the time to do this is missing.
    :param reattach: what a retry does with the job of an earlier try: `always` (default) adopts it, even if the
        manifest has changed; `if_unchanged` replaces it if the manifest has changed.
    :param logs: whose logs to follow: `auto` (default: all replicas of a job with up to 16, else the primary
        replica), `all`, `primary`, `none`, or completion indexes by role: `{"node": [0, 1]}`.
    :param queue_timeout: how long a queue may suspend the job, in seconds or as a timedelta. Default: None, no
        limit.
    :param schedule_timeout: how long a pod may wait for a node or a ResourceQuota, in seconds or as a timedelta. The
        worker waits as long if the job itself exceeds a quota. Default: None: pods wait without limit, and a job that
        exceeds a quota fails.
    :param startup_timeout: how long a scheduled pod may take until its containers run, in seconds or as a
        timedelta; None means no limit. Default: one hour.
    :param partial_start_timeout: how long some pods may hold GPUs while others have no node, in seconds or as a
        timedelta; None means no limit. Elastic jobs with their minimum of Workers are exempt. Default: one hour.
    :param log_stall_timeout: how long no replica of a running job, followed or not, may log a line, in seconds or as a
        timedelta. Default: None, no limit.
    :param progress_timeout: how long no replica of a running job, followed or not, may report a higher step
        (`KTRAIN_METRIC`) before the job counts as hung, in seconds or as a timedelta. This includes a job that never
        reports a step. Default: None, no limit.
    :param max_restarts: maximum number of container restarts, replaced pods and restarts of the JobSet, over all
        pods. Default: None, no limit but the runtime's.
    :param crash_loop_limit: number of consecutive failures of one container, each less than 10 minutes after its
        start, after which the job fails. Failures count once every replica has run. None means no limit. Default: 6.
    :param image: image of the container `node`. Templated. Default: the manifest's, else the runtime's.
    :param command: command of the container `node`; the launcher's on an MPI runtime. Start the program by torchrun:
        the Trainer sets no RANK or WORLD_SIZE. Templated. Default: the manifest's, else the runtime's.
    :param args: arguments of the container `node`; the launcher's on an MPI runtime. Templated. Default: the
        manifest's, else the runtime's.
    :param code: a directory or file that is sent to the container `node`, at most 700 KiB packed. Files that match a
        pattern in its `.ktrainignore` are left out. The program runs in the directory. Requires a `command`, `python3`
        in the image, Trainer 2.2 or newer, and a runtime that isn't for MPI. A relative path is below the DAG file's
        folder or a `template_searchpath`. Templated. Default: None, the program uses the files of the image.
    :param hang_traces: whether a program that is sent as code or as a function prints the stacks of its Python
        processes when its pod is stopped, so that a hang names the replica and the line where it waits. The program
        then isn't process 1 of its container. Default: True.
    :param env: environment variables of the container `node`, by name; they replace the manifest's. A mapping as value
        becomes `valueFrom`. Templated. Default: None.
    :param nodes: number of nodes (`numNodes`); on MPI runtimes the launcher usually is one of them. Templated. Default:
        the manifest's, else the runtime's.
    :param gpus: GPUs of each node, as limit and request (`nvidia.com/gpu`); 0 removes the manifest's. Templated.
        Default: the manifest's, else the runtime's.
    :param container_resources: other resources of each node, as limits and requests, such as `{"rdma/hca": 1}`.
        Resources of the manifest or of this operator replace all of the runtime's. Templated. Default: the manifest's.
    :param nproc_per_node: processes per node: a number (`numProcPerNode`), or `auto`: one for each GPU, or for each CPU
        if the nodes have no GPUs. Templated. Default: the manifest's, else the runtime's.
    :param hosts: names of the cluster's nodes that may run the pods (label `kubernetes.io/hostname`), beside what the
        runtime requires. Templated. Default: any node.
    :param node_selector: labels that the cluster's node must have, added to the runtime's. Templated. Default: None.
    :param tolerations: tolerations of the pods, added to the runtime's. Templated. Default: none.
    :param affinity: affinity of the pods, added to the runtime's. Templated. Default: None.
    :param priority_class_name: refused: only the runtime can set a PriorityClass. Default: None.
    :param queue_name: a Kueue LocalQueue of the namespace, set as a label of the job. (`queue` is Airflow's own
        parameter.) Templated. Default: the manifest's.
    :param workload_priority_class: a WorkloadPriorityClass of Kueue, set as a label of the job. It orders the queue;
        `priority_class_name` orders the pods. Templated. Default: the manifest's.
    :param volumes: volumes (`SharedMemory`, `ClaimVolume`, `HostPath`) to mount into the container `node`; each
        replaces a mount at the same path. Templated. Default: none.
    :param pod_override: a pod template (`metadata` and `spec`), or one by role, that is merged into every replica's by
        Kubernetes' strategic merge, after all other parameters: service account, pull secrets, security context,
        `envFrom`, init containers, sidecars. The main container is named `node`. It is sent as
        `runtimePatches`, which can't add containers. Fields that they can't set are refused. Templated. Default: None.
    :param labels: labels added to the job and its pods. Templated. Default: None.
    :param annotations: annotations added to the job and its pods. Templated. Default: None.
    :param checkpoint_dir: base directory of the environment variable KTRAIN_CHECKPOINT_DIR. Its value is the same
        for all tries of one run of the task, and different for each run, each mapped task and, without
        `resume_on_clear`, each clear. It is a path in the pods or a URL. In `s3://CONNECTION@bucket/path`, the worker
        uses the connection to list the directory, and the program doesn't get it. Templated. Default: None, the
        variable is not set.
    :param resume_on_clear: whether a cleared task keeps its checkpoint directory and continues to count
        KTRAIN_ATTEMPT. Default: False, it trains from the beginning.
    :param avoid_failed_nodes: keep new jobs of later tries away from up to 8 nodes on which a try failed
        because of the infrastructure: a broken GPU, a lost node, an eviction because of a shortage. Airflow 3.3 and
        newer. Default: False.
    :param skip_on_exit_code: one or more exit codes of the primary replica's main container for which the task is
        skipped instead of failed. The job is released as after a failure. Default: None, no exit code.
    :param dry_run: create nothing; run the checks of `ktrain check --server`: served versions, namespace, rights,
        queue, schema, and a dry run on the API server. Default: False.
    :param kwargs: parameters of `BaseOperator`. `execution_timeout` counts from the submission of the job, also
        while deferred and over retries that adopt it; it restarts when a kept job is resumed. The job is released
        shortly before this time is over. The asset events of `outlets` contain the job, its result, metrics and
        GPU-seconds; an `AssetAlias` becomes the asset of the result's `model_uri`. Set `retries` to 1 or more: Airflow
        may fail a try by mistake (apache/airflow#72716), and only a retry then returns the result of the training.
    :raises TrainingJobError: the job did not succeed; a subclass for each category of causes (see `exceptions`).
    :raises ValueError: when the DAG is parsed: a parameter without a template is invalid.
    :raises TrainingConfigurationError: the manifest or a parameter is invalid; never retried.
    :raises TrainingClusterError: the cluster can't run the job now: missing access, a quota, a runtime that is missing
        or doesn't fit the job.
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
