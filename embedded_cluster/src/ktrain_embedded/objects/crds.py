"""The types of training-operator 1.9 (PyTorchJob, MPIJob v1) and mpi-operator 0.8 (MPIJob v2beta1).

Fields, defaults and enums are from the CustomResourceDefinitions that the operators install. The types of the Kubeflow
Trainer and of JobSet are in `crds_trainer.py`, the types of Kueue in `crds_kueue.py`.
"""

from __future__ import annotations

from ktrain_embedded.objects import crds_kueue, crds_trainer
from ktrain_embedded.objects.structs import Struct, struct_of


def _job(kind: str, spec: str) -> Struct:
    return struct_of(f"apiVersion:str kind:str metadata:V1ObjectMeta spec:{spec} status:JobStatus", go_name=kind)


STRUCTS: dict[str, Struct] = {
    "PyTorchJob/v1": _job("PyTorchJob", "PyTorchJobSpec"),
    "MPIJob/v1": _job("MPIJob", "MPIJobSpec/v1"),
    "MPIJob/v2beta1": _job("MPIJob", "MPIJobSpec/v2beta1"),
    "PyTorchJobSpec": struct_of(
        "elasticPolicy:ElasticPolicy nprocPerNode:str pytorchReplicaSpecs:dict[str,ReplicaSpec] runPolicy:RunPolicy",
        required="pytorchReplicaSpecs",
    ),
    "MPIJobSpec/v1": struct_of(
        "cleanPodPolicy:str mainContainer:str mpiReplicaSpecs:dict[str,ReplicaSpec] runPolicy:RunPolicy "
        "slotsPerWorker:int",
        required="mpiReplicaSpecs",
    ),
    "MPIJobSpec/v2beta1": struct_of(
        "launcherCreationPolicy:str mpiImplementation:str mpiReplicaSpecs:dict[str,ReplicaSpec] "
        "runLauncherAsWorker:bool runPolicy:RunPolicy slotsPerWorker:int sshAuthMountPath:str",
        required="mpiReplicaSpecs",
        defaults={
            "launcherCreationPolicy": "AtStartup", "mpiImplementation": "OpenMPI", "runLauncherAsWorker": False,
            "slotsPerWorker": 1, "sshAuthMountPath": "/root/.ssh",
        },
        enums={
            "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
            "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
        },
    ),
    "ElasticPolicy": struct_of(
        "maxReplicas:int maxRestarts:int metrics:list[V2MetricSpec] minReplicas:int nProcPerNode:int rdzvBackend:str "
        "rdzvConf:list[RDZVConf] rdzvHost:str rdzvId:str rdzvPort:int standalone:bool"
    ),
    "RDZVConf": struct_of("key:str value:str"),
    "RunPolicy": struct_of(
        "activeDeadlineSeconds:int backoffLimit:int cleanPodPolicy:str managedBy:str schedulingPolicy:SchedulingPolicy "
        "suspend:bool ttlSecondsAfterFinished:int",
        defaults={"suspend": False},
    ),
    "SchedulingPolicy": struct_of(
        "minAvailable:int minResources:dict[str,quantity] priorityClass:str queue:str scheduleTimeoutSeconds:int"
    ),
    "ReplicaSpec": struct_of("replicas:int restartPolicy:str template:PodTemplate"),
    "PodTemplate": struct_of("metadata:TemplateMeta spec:V1PodSpec"),
    "TemplateMeta": struct_of(
        "annotations:dict[str,str] finalizers:list[str] labels:dict[str,str] name:str namespace:str"
    ),
    "JobStatus": struct_of(
        "completionTime:datetime conditions:list[JobCondition] lastReconcileTime:datetime "
        "replicaStatuses:dict[str,ReplicaStatus] startTime:datetime"
    ),
    "JobCondition": struct_of(
        "lastTransitionTime:str lastUpdateTime:str message:str reason:str status:str type:str", required="status type"
    ),
    "ReplicaStatus": struct_of("active:int failed:int labelSelector:V1LabelSelector selector:str succeeded:int"),
    **crds_trainer.STRUCTS,
    **crds_kueue.STRUCTS,
}  # fmt: skip
