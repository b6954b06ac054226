"""PyTorchJob: kubeflow.org/v1, run by training-operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds.base import Kind
from airflow_provider_ktrain.core.kinds.conditions import true_conditions
from airflow_provider_ktrain.core.kinds.form import ManifestForm
from airflow_provider_ktrain.core.kinds.training_operators import OperatorBehavior, OperatorVersion, Scaling


class _Form(ManifestForm):
    """A Master and Workers, or Workers alone."""

    def set_processes(self, spec: dict[str, Any], count: int | str) -> None:
        """In elasticPolicy if the number is set there: the webhook refuses a job that sets both fields."""
        elastic = spec.get("elasticPolicy")
        if isinstance(elastic, dict) and "nProcPerNode" in elastic:  # the webhook refuses a job that sets both
            elastic["nProcPerNode"] = int(count)
        else:
            super().set_processes(spec, count)

    def fit(self, spec: dict[str, Any]) -> None:
        """The webhook of training-operator 1.9 refuses a Worker with 0 replicas, so it is left out."""
        specs = spec.get(self.replica_specs) or {}
        if "Master" in specs and (specs.get("Worker") or {}).get("replicas") == 0:
            spec[self.replica_specs] = {"Master": specs["Master"]}


class _Behavior(OperatorBehavior):
    """It replaces pods that it has lost, also at the end of the job."""

    def may_create_pods_late(self, job: Mapping[str, Any]) -> bool:
        """A new Master came 0.1 s after the end, and trained on, in recordings 103 and 105c (Failed) and 107c."""
        true = true_conditions(job)
        return "Restarting" in true or ("Failed" in true and "backoff limit" in true["Failed"].message)


class _Scaling(Scaling):
    """By an elasticPolicy."""

    def is_elastic(self, job: Mapping[str, Any]) -> bool:
        """With an elasticPolicy, torchrun continues with the Workers that are left."""
        return isinstance((job.get("spec") or {}).get("elasticPolicy"), Mapping)

    def worker_bounds(self, job: Mapping[str, Any]) -> tuple[int, int | None]:
        """From elasticPolicy; as in training-operator, minReplicas and maxReplicas default to each other."""
        policy = (job.get("spec") or {}).get("elasticPolicy")
        if not isinstance(policy, Mapping):
            return 1, None
        low, high = policy.get("minReplicas"), policy.get("maxReplicas")
        return low or high or 1, high or low


class PyTorchJob(Kind):
    """A Master and Workers."""

    def stopped_primary(self, job: Mapping[str, Any]) -> str:
        """Restarting says that a pod was lost, and stays if its program then exits with 0 (recordings 100b, 107c, 111).

        When a new pod runs, the condition Running replaces it.
        """
        restarting = true_conditions(job).get("Restarting")
        names_it = restarting and f"{self.primary(job)} replica(s) failed" in restarting.message
        return restarting.since if restarting and names_it else ""


_TRAINING_OPERATOR = OperatorVersion(
    version="v1",
    name="training-operator",
    # the legacy pytorch-operator read them there
    ignored=("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"),
    expires=True,  # recording 12-pt-ttl
)

PYTORCHJOB = PyTorchJob(
    name="PyTorchJob",
    plural="pytorchjobs",
    operators=(_TRAINING_OPERATOR,),
    form=_Form(
        replica_specs="pytorchReplicaSpecs",
        container="pytorch",
        processes_field="nprocPerNode",
        schema_types={
            "PyTorchJob": "apiVersion:s kind:s metadata:Metadata spec!:PyTorchJobSpec status:any",
            "PyTorchJobSpec": "runPolicy:RunPolicy elasticPolicy:ElasticPolicy pytorchReplicaSpecs!:{ReplicaSpec} "
            "nprocPerNode:s",  # it can be auto, cpu or gpu
            "ElasticPolicy": "minReplicas:i maxReplicas:i rdzvBackend:s rdzvPort:i rdzvHost:s rdzvId:s "
            "rdzvConf:[RdzvConf] standalone:b nProcPerNode:i maxRestarts:i metrics:any",
            "RdzvConf": "key:s value:s",
        },
    ),
    roles=("Master", "Worker"),
    primaries=("Master", "Worker"),
    main_containers=("pytorch",),
    behavior=_Behavior(waiting_container="init-pytorch"),
    scaling=_Scaling(),
    # kubeflow/community-distribution, pull request 3540
    platform_hint="Kubeflow's platform releases after 26.03 contain Kubeflow Trainer 2, which runs TrainJobs "
    "(TrainJobOperator), instead of training-operator, which runs PyTorchJobs",
)
