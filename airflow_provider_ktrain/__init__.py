"""Airflow provider for distributed training with Kubeflow's PyTorchJob, MPIJob and TrainJob.

What DAGs import:

- `airflow_provider_ktrain.operators.training`: `PyTorchJobOperator`, `MPIJobOperator`, `TrainJobOperator`
- `airflow_provider_ktrain.operators.job_control`: operators that scale, suspend, resume and delete jobs
- `airflow_provider_ktrain.operators.reaper`: `ReapTrainingJobsOperator`
- `airflow_provider_ktrain.sensors.training`: `PyTorchJobSensor`, `MPIJobSensor`, `TrainJobSensor`
- `airflow_provider_ktrain.volumes`: `SharedMemory`, `ClaimVolume`, `HostPath`, and the protocol `Volume`
- `airflow_provider_ktrain.manifests`: `load` and `gpus_of`
- `airflow_provider_ktrain.exceptions`: the exceptions that tasks raise
- `airflow_provider_ktrain.hooks.training`: `TrainingHook`

`@task.pytorchjob`, `@task.trainjob` and `@task.mpijob` need no import beside `airflow.sdk.task`. Other modules may
change without notice.
"""

__version__ = "0.1.0"
