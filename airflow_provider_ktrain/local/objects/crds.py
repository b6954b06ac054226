"""The types of the Kubeflow operators: training-operator 1.9 (PyTorchJob, MPIJob v1), mpi-operator 0.8 (v2beta1).

Fields, defaults and enumerations are those of the CustomResourceDefinitions that the operators install.
"""

from __future__ import annotations

from typing import Any

from airflow_provider_ktrain.local.objects import resources as r
from airflow_provider_ktrain.local.objects.resources import Resource
from airflow_provider_ktrain.local.objects.schema import Struct
from airflow_provider_ktrain.local.objects.store import Obj, Store, now


def _struct(fields: str, required: str = "", **more: Any) -> Struct:
    """The struct of `name:type` pairs, and names of those fields that must be there."""
    return Struct(dict(pair.split(":") for pair in fields.split()), frozenset(required.split()), **more)


def _job(kind: str, spec: str) -> Struct:
    return _struct(f"apiVersion:str kind:str metadata:V1ObjectMeta spec:{spec} status:JobStatus", go_name=kind)


STRUCTS: dict[str, Struct] = {
    "PyTorchJob/v1": _job("PyTorchJob", "PyTorchJobSpec"),
    "MPIJob/v1": _job("MPIJob", "MPIJobSpec/v1"),
    "MPIJob/v2beta1": _job("MPIJob", "MPIJobSpec/v2beta1"),
    "PyTorchJobSpec": _struct(
        "elasticPolicy:ElasticPolicy nprocPerNode:str pytorchReplicaSpecs:dict[str,ReplicaSpec] runPolicy:RunPolicy",
        required="pytorchReplicaSpecs",
    ),
    "MPIJobSpec/v1": _struct(
        "cleanPodPolicy:str mainContainer:str mpiReplicaSpecs:dict[str,ReplicaSpec] runPolicy:RunPolicy "
        "slotsPerWorker:int",
        required="mpiReplicaSpecs",
    ),
    "MPIJobSpec/v2beta1": _struct(
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
    "ElasticPolicy": _struct(
        "maxReplicas:int maxRestarts:int metrics:list[V2MetricSpec] minReplicas:int nProcPerNode:int rdzvBackend:str "
        "rdzvConf:list[RDZVConf] rdzvHost:str rdzvId:str rdzvPort:int standalone:bool"
    ),
    "RDZVConf": _struct("key:str value:str"),
    "RunPolicy": _struct(
        "activeDeadlineSeconds:int backoffLimit:int cleanPodPolicy:str managedBy:str schedulingPolicy:SchedulingPolicy "
        "suspend:bool ttlSecondsAfterFinished:int",
        defaults={"suspend": False},
    ),
    "SchedulingPolicy": _struct(
        "minAvailable:int minResources:dict[str,quantity] priorityClass:str queue:str scheduleTimeoutSeconds:int"
    ),
    "ReplicaSpec": _struct("replicas:int restartPolicy:str template:PodTemplate"),
    "PodTemplate": _struct("metadata:TemplateMeta spec:V1PodSpec"),
    "TemplateMeta": _struct(
        "annotations:dict[str,str] finalizers:list[str] labels:dict[str,str] name:str namespace:str"
    ),
    "JobStatus": _struct(
        "completionTime:datetime conditions:list[JobCondition] lastReconcileTime:datetime "
        "replicaStatuses:dict[str,ReplicaStatus] startTime:datetime"
    ),
    "JobCondition": _struct(
        "lastTransitionTime:str lastUpdateTime:str message:str reason:str status:str type:str", required="status type"
    ),
    "ReplicaStatus": _struct("active:int failed:int labelSelector:V1LabelSelector selector:str succeeded:int"),
}  # fmt: skip


def definition(resource: Resource) -> Obj:
    """The CustomResourceDefinition of a resource. Its schema is not published: the server checks by `schema.py`."""
    names = {
        "kind": resource.kind, "listKind": f"{resource.kind}List",
        "plural": resource.plural, "singular": resource.singular,
    }  # fmt: skip
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": resource.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything},
        "subresources": {name: {} for name in resource.subresources},
    }  # fmt: skip
    established = {
        "type": "Established", "status": "True", "lastTransitionTime": now(), "reason": "InitialNamesAccepted",
        "message": "the initial names have been accepted",
    }  # fmt: skip
    return {
        "metadata": {"name": resource.group_resource},
        "spec": {"group": resource.group, "names": names, "scope": "Namespaced", "versions": [version]},
        "status": {"conditions": [established], "acceptedNames": names, "storedVersions": [resource.version]},
    }


def install(store: Store, resources: tuple[Resource, ...]) -> None:
    """Add the definitions of all custom resources."""
    for resource in resources:
        if resource.custom:
            store.create(r.CRD, definition(resource))
