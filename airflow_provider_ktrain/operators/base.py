"""The operator of all kinds of training jobs, as Airflow calls it: `task_run.py` does what it is called for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.links.training import TrainingJobLink, TrainingPageLink
from airflow_provider_ktrain.operators.job_parameters import JobParameters

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

    from airflow_provider_ktrain.operators.task_run import TaskRun


class TrainingJobOperator(JobParameters):
    """Base of the operators of all kinds of jobs. It submits a job, follows it to its end and releases its GPUs.

    The job's name is derived from the task's identity, so that a retry finds and adopts the job of an earlier try. A
    cleared task submits a new job. However the task ends, the job's pods are released. Options such as `image` and
    `gpus` override fields of the manifest; the other fields keep the manifest's values.

    A template renders to text. The text of a whole number is converted; a list or a mapping needs
    `render_template_as_native_obj=True` on the DAG.

    The main container is named `pytorch` in a PyTorchJob and `node` in a TrainJob. In an MPIJob it is the one that
    `spec.mainContainer` names, else the first one.

    :param manifest: the job: a dict, YAML text, or the path of a YAML file (absolute, or relative to the DAG's
        folder). Templated. Default: None, a job is built from the other parameters.
    :param name: prefix of the job's name. Templated. Default: the task's id.
    :param namespace: namespace of the job. Templated. Default: the manifest's, else the connection's, else
        `default`.
    :param kubernetes_conn_id: connection of type `kubernetes`. Templated. Default: `kubernetes_default`.
    :param cluster_context: context of the connection's kubeconfig. Templated. Default: its current context.
    :param deferrable: wait in the triggerer, without a worker slot; logs are still live. Default: None, `[operators]
        default_deferrable` where an environment variable sets it, else True.
    :param reattach: what a retry does with the job of an earlier try: `always` (default) adopts it, even if the
        manifest has changed; `if_unchanged` replaces it if the manifest has changed.
    :param labels: labels added to the job and its pods. Templated. Default: None.
    :param annotations: annotations added to the job and its pods. Templated. Default: None.
    :param pod_override: a pod template (`metadata` and `spec`), or one by role, that is merged into every replica's by
        Kubernetes' strategic merge, after all other parameters: service account, pull secrets, security context,
        `envFrom`, init containers, sidecars. Templated. Default: None.
    :param dry_run: create nothing; run the checks of `ktrain check --server`: served versions, namespace, rights,
        queue, schema, and a dry run on the API server. Default: False.
    :param image: image of the main container. Templated. Default: the manifest's.
    :param command: command of the main container; for an MPIJob the Launcher's. Templated. Default: the manifest's.
    :param args: arguments of the main container; for an MPIJob the Launcher's. Templated. Default: the manifest's.
    :param code: a directory or file that is sent to the pods, at most 700 KiB packed. Files that match a pattern in its
        `.ktrainignore` are left out. The program runs in the directory. Requires a `command`, and `python3` in the
        image. A relative path is below the DAG file's folder or a `template_searchpath`. Templated. Default: None, the
        program uses the files of the image.
    :param env: environment variables of the main containers, by name; they replace the manifest's. A mapping as value
        becomes `valueFrom`. Templated. Default: None.
    :param volumes: volumes (`SharedMemory`, `ClaimVolume`, `HostPath`) to mount into the main containers; each
        replaces a mount at the same path. Templated. Default: none.
    :param nproc_per_node: processes per replica. Its values depend on the kind. Templated. Default: the manifest's.
    :param checkpoint_dir: base directory of the environment variable KTRAIN_CHECKPOINT_DIR. Its value is the same
        for all tries of one run of the task, and different for each run, each mapped task and, without
        `resume_on_clear`, each clear. It is a path in the pods or a URL. Templated. Default: None, the variable is
        not set.
    :param resume_on_clear: whether a cleared task keeps its checkpoint directory and continues to count
        KTRAIN_ATTEMPT. Default: False, it trains from the beginning.
    :param gpus: GPUs of each replica, as limit and request of `[ktrain] default_accelerator`; 0 removes the manifest's.
        In an MPIJob those of each Worker. Templated. Default: the manifest's.
    :param container_resources: other resources of each replica, as limits and requests, such as `{"rdma/hca": 1}`. In
        an MPIJob those of each Worker. Templated. Default: the manifest's.
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
    :param avoid_failed_nodes: keep new jobs of later tries away from up to 8 nodes on which a try failed
        because of the infrastructure: a broken GPU, a lost node, an eviction because of a shortage. Airflow 3.3 and
        newer. Default: False.
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
    :param max_restarts: maximum number of container restarts and replaced pods (after an eviction, by restart policy
        ExitCode, or by a restart of the JobSet), over all pods. Default: None, no limit.
    :param crash_loop_limit: number of consecutive failures of one container, each less than 10 minutes after its
        start, after which the job fails. Failures count once every replica has run, or waits for the Master that
        fails; elastic jobs are exempt. None means no limit. Default: 6.
    :param fail_on_nan: names of metrics (`KTRAIN_METRIC`), or True for all. The training ends early when a container
        that is followed (`logs`) has reported one of them three times in a row as NaN or infinity, and its log still
        ends so. It fails as by an exception, and is retried. Default: False.
    :param logs: whose logs to follow: `auto` (default: all replicas of a job with up to 16, else the primary
        replica), `all`, `primary`, `none`, or indexes by role: `{"Worker": [0, 1]}`.
    :param hang_traces: whether a program that is sent as code or as a function prints the stacks of its Python
        processes when its pod is stopped, so that a hang names the replica and the line where it waits. The program
        then isn't process 1 of its container. Default: True.
    :param on_finish_action: what happens to the job at the end: `delete_job` (default), `keep_job` or
        `delete_succeeded_job`. A finished job that is kept loses its running pods. An unfinished job is deleted, and
        only `keep_job` suspends it instead: a job of a Kueue queue by its Workload, or it is deleted if the right or
        the time to do this is missing.
    :param skip_on_exit_code: one or more exit codes of the primary replica's main container for which the task is
        skipped instead of failed. The job is released as after a failure. Default: None, no exit code.
    :param require: what a successful training must have reached, by name: a comparison with a number (`>= 0.9`), or
        `finite`. The value of that name is the result's, else the last one of the metric. If it isn't reached, or
        there is none, the task fails for good (`TrainingRequirementError`), without a return value and asset events.
        Each bound is templated, and the one that was rendered before the submission counts. Default: None.
    :param kwargs: parameters of `BaseOperator`. `execution_timeout` counts from the submission of the job, also
        while deferred and over retries that adopt it; it restarts when a kept job is resumed. The job is released
        shortly before this time is over. The asset events of `outlets` contain the job, its result, metrics and
        GPU-seconds; an `AssetAlias` becomes the asset of the result's `model_uri`. Set `retries` to 1 or more: Airflow
        may fail a try by mistake (apache/airflow#72716), and only a retry then returns the result of the training.
    :raises TrainingJobError: the job did not succeed; a subclass for each category of causes (see `exceptions`).
    :raises ValueError: when the DAG is parsed: a parameter without a template is invalid.
    :raises TrainingConfigurationError: the manifest or a parameter is invalid; never retried.
    :raises TrainingClusterError: the cluster can't run the job now: missing access, a quota, a missing object,
        a runtime that doesn't fit the job.
    """

    log_source = compat.JOB_SOURCE
    operator_extra_links = (TrainingPageLink(), TrainingJobLink())
    ui_color = "#e8f0fe"

    _run: TaskRun | None = None  # what this process does for the task
    _killed = False

    @contextlib.contextmanager
    def _begin(self, context: Context) -> Iterator[TaskRun]:
        from airflow_provider_ktrain.exceptions import as_airflow_errors
        from airflow_provider_ktrain.operators.task_run import TaskRun

        with as_airflow_errors(), TaskRun(self, context) as run:
            self._run = run
            if self._killed:
                run.kill()
            yield run

    def execute(self, context: Context) -> Any:
        """Submit or adopt the job, then follow it: to its end, or for some seconds before the task defers."""
        with self._begin(context) as run:
            return run.execute()

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Resume after the trigger."""
        with self._begin(context) as run:
            return run.resume(event)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume a deferred task; called by Airflow.

        If the deferral timed out, the GPUs are released before the task fails. If the trigger failed, the worker
        follows the job: a trigger that can't be loaded proves nothing about the training.
        """
        resume = partial(super().resume_execution, next_method, next_kwargs, context)
        if next_method != compat.TRIGGER_FAILED:
            return resume()
        with self._begin(context) as run:
            return run.resume_after_failure(next_kwargs, resume)

    def on_kill(self) -> None:
        """Handle SIGTERM, in a signal handler. Whether it is a kill depends on the task's state in Airflow."""
        self._killed = True
        if self._run is not None:
            self._run.kill()

    # OpenLineage: its provider calls these methods in the process that runs the task, or in a fork of it. They make no
    # requests to Airflow: the provider ends a fork at its timeout, and the worker would then read a wrong answer.

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        """The job that the task requests. It is called before `execute` and before each resume."""
        from airflow_provider_ktrain.operators import openlineage

        return openlineage.lineage(self._requested(with_code=True))

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage:
        """What has run, what it used and why it failed. It is called at the end of a try.

        :param task_instance: of this try; not used.
        """
        from airflow_provider_ktrain.operators import openlineage

        job, outcome = ({}, None) if self._run is None else (self._run.job, self._run.outcome)
        declared = bool(self.inlets or self.outlets)
        return openlineage.at_end(self._requested(with_code=False), job, outcome, declares_datasets=declared)

    get_openlineage_facets_on_failure = get_openlineage_facets_on_complete
