"""The types of the Kubeflow operators: training-operator 1.9 (PyTorchJob, MPIJob v1), mpi-operator 0.8 (v2beta1).

Fields, defaults and enumerations are those of the CustomResourceDefinitions that the operators install.
"""

from __future__ import annotations

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.schema import Struct
from airflow_provider_ktrain.local.store import Obj, Store, now


def _job(kind: str, spec: str) -> Struct:
    fields = {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": spec, "status": "JobStatus"}
    return Struct(fields, go_name=kind)


STRUCTS: dict[str, Struct] = {
    "PyTorchJob/v1": _job("PyTorchJob", "PyTorchJobSpec"),
    "MPIJob/v1": _job("MPIJob", "MPIJobSpec/v1"),
    "MPIJob/v2beta1": _job("MPIJob", "MPIJobSpec/v2beta1"),
    "PyTorchJobSpec": Struct(
        {
            "elasticPolicy": "ElasticPolicy", "nprocPerNode": "str", "pytorchReplicaSpecs": "dict[str, ReplicaSpec]",
            "runPolicy": "RunPolicy",
        },
        frozenset(["pytorchReplicaSpecs"]),
    ),
    "MPIJobSpec/v1": Struct(
        {
            "cleanPodPolicy": "str", "mainContainer": "str", "mpiReplicaSpecs": "dict[str, ReplicaSpec]",
            "runPolicy": "RunPolicy", "slotsPerWorker": "int",
        },
        frozenset(["mpiReplicaSpecs"]),
    ),
    "MPIJobSpec/v2beta1": Struct(
        {
            "launcherCreationPolicy": "str", "mpiImplementation": "str", "mpiReplicaSpecs": "dict[str, ReplicaSpec]",
            "runLauncherAsWorker": "bool", "runPolicy": "RunPolicy", "slotsPerWorker": "int", "sshAuthMountPath": "str",
        },
        frozenset(["mpiReplicaSpecs"]),
        {
            "launcherCreationPolicy": "AtStartup", "mpiImplementation": "OpenMPI", "runLauncherAsWorker": False,
            "slotsPerWorker": 1, "sshAuthMountPath": "/root/.ssh",
        },
        {
            "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
            "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
        },
    ),
    "ElasticPolicy": Struct({
        "maxReplicas": "int", "maxRestarts": "int", "metrics": "list[V2MetricSpec]", "minReplicas": "int",
        "nProcPerNode": "int", "rdzvBackend": "str", "rdzvConf": "list[RDZVConf]", "rdzvHost": "str", "rdzvId": "str",
        "rdzvPort": "int", "standalone": "bool",
    }),
    "RDZVConf": Struct({"key": "str", "value": "str"}),
    "RunPolicy": Struct(
        {
            "activeDeadlineSeconds": "int", "backoffLimit": "int", "cleanPodPolicy": "str", "managedBy": "str",
            "schedulingPolicy": "SchedulingPolicy", "suspend": "bool", "ttlSecondsAfterFinished": "int",
        },
        defaults={"suspend": False},
    ),
    "SchedulingPolicy": Struct({
        "minAvailable": "int", "minResources": "dict[str, quantity]", "priorityClass": "str", "queue": "str",
        "scheduleTimeoutSeconds": "int",
    }),
    "ReplicaSpec": Struct({"replicas": "int", "restartPolicy": "str", "template": "PodTemplate"}),
    "PodTemplate": Struct({"metadata": "TemplateMeta", "spec": "V1PodSpec"}),
    "TemplateMeta": Struct({
        "annotations": "dict[str, str]", "finalizers": "list[str]", "labels": "dict[str, str]", "name": "str",
        "namespace": "str",
    }),
    "JobStatus": Struct({
        "completionTime": "datetime", "conditions": "list[JobCondition]", "lastReconcileTime": "datetime",
        "replicaStatuses": "dict[str, ReplicaStatus]", "startTime": "datetime",
    }),
    "JobCondition": Struct(
        dict.fromkeys(("lastTransitionTime", "lastUpdateTime", "message", "reason", "status", "type"), "str"),
        frozenset(["status", "type"]),
    ),
    "ReplicaStatus": Struct({
        "active": "int", "failed": "int", "labelSelector": "V1LabelSelector", "selector": "str", "succeeded": "int",
    }),
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
    conditions = [
        {"type": type_, "status": "True", "lastTransitionTime": now(), "reason": reason, "message": message}
        for type_, reason, message in (
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        )
    ]
    return {
        "metadata": {"name": resource.group_resource},
        "spec": {"group": resource.group, "names": names, "scope": "Namespaced", "versions": [version]},
        "status": {"conditions": conditions, "acceptedNames": names, "storedVersions": [resource.version]},
    }


def install(store: Store, resources: tuple[Resource, ...]) -> None:
    """Add the definitions of all custom resources."""
    for resource in resources:
        if resource.custom:
            store.create(r.CRD, definition(resource))
