"""The resource types that the embedded cluster serves. The API server, discovery and the controllers use this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Obj = dict[str, Any]  #: An object of a resource.
ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True)
class Resource:
    """A served resource type, with the attributes of a discovery document."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    #: Names of the subresources, such as ("status", "scale").
    subresources: tuple[str, ...] = ()
    #: Whether this is a custom resource: no strategic merge patch, and each change of spec increments the generation.
    custom: bool = False
    verbs: tuple[str, ...] = ALL_VERBS

    @property
    def api_version(self) -> str:
        """The `apiVersion` of the objects: `v1`, `batch/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def singular(self) -> str:
        """The singular name of the resource: `pytorchjob`."""
        return self.kind.lower()

    @property
    def group_resource(self) -> str:
        """The plural name and the group, as in error messages: `pods`, `pytorchjobs.kubeflow.org`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def group_kind(self) -> str:
        """The kind and the group, as in error messages: `Pod`, `PyTorchJob.kubeflow.org`."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    def __str__(self) -> str:
        return self.group_resource


POD = Resource(
    "", "v1", "Pod", "pods", short_names=("po",), categories=("all",),
    subresources=("status", "log", "exec", "eviction"),
)  # fmt: skip
SERVICE = Resource("", "v1", "Service", "services", short_names=("svc",), categories=("all",), subresources=("status",))
CONFIG_MAP = Resource("", "v1", "ConfigMap", "configmaps", short_names=("cm",))
SECRET = Resource("", "v1", "Secret", "secrets")
SERVICE_ACCOUNT = Resource("", "v1", "ServiceAccount", "serviceaccounts", short_names=("sa",), subresources=("token",))
EVENT = Resource("", "v1", "Event", "events", short_names=("ev",))
NAMESPACE = Resource(
    "", "v1", "Namespace", "namespaces", namespaced=False, short_names=("ns",), subresources=("status",),
    verbs=tuple(verb for verb in ALL_VERBS if verb != "deletecollection"),
)  # fmt: skip
NODE = Resource("", "v1", "Node", "nodes", namespaced=False, short_names=("no",), subresources=("status",))
BATCH_JOB = Resource("batch", "v1", "Job", "jobs", categories=("all",), subresources=("status",))
CLAIM = Resource(
    "", "v1", "PersistentVolumeClaim", "persistentvolumeclaims", short_names=("pvc",), subresources=("status",)
)
VOLUME = Resource(
    "", "v1", "PersistentVolume", "persistentvolumes", namespaced=False, short_names=("pv",), subresources=("status",)
)
PRIORITY_CLASS = Resource(
    "scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", namespaced=False, short_names=("pc",)
)
DISRUPTION_BUDGET = Resource(
    "policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", short_names=("pdb",), subresources=("status",)
)
LEASE = Resource("coordination.k8s.io", "v1", "Lease", "leases")
HPA = Resource(
    "autoscaling",
    "v2",
    "HorizontalPodAutoscaler",
    "horizontalpodautoscalers",
    short_names=("hpa",),
    categories=("all",),
)
ROLE = Resource("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = Resource("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
CLUSTER_ROLE = Resource("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False)
CLUSTER_ROLE_BINDING = Resource(
    "rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False
)
CRD = Resource(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions",
    namespaced=False, short_names=("crd", "crds"), subresources=("status",),
)  # fmt: skip
PYTORCHJOB = Resource("kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", subresources=("status", "scale"), custom=True)
MPIJOB_V1 = Resource("kubeflow.org", "v1", "MPIJob", "mpijobs", subresources=("status",), custom=True)
MPIJOB_V2BETA1 = Resource("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", subresources=("status",), custom=True)
TRAINER, JOBSETS, KUEUE = "trainer.kubeflow.org", "jobset.x-k8s.io", "kueue.x-k8s.io"
TRAINJOB = Resource(TRAINER, "v1alpha1", "TrainJob", "trainjobs", subresources=("status",), custom=True)
TRAINING_RUNTIME = Resource(TRAINER, "v1alpha1", "TrainingRuntime", "trainingruntimes", custom=True)
CLUSTER_TRAINING_RUNTIME = Resource(
    TRAINER, "v1alpha1", "ClusterTrainingRuntime", "clustertrainingruntimes", namespaced=False, custom=True
)
JOBSET = Resource(JOBSETS, "v1alpha2", "JobSet", "jobsets", subresources=("status",), custom=True)
RESOURCE_FLAVOR = Resource(
    KUEUE, "v1beta2", "ResourceFlavor", "resourceflavors", namespaced=False, short_names=("flavor", "flavors", "rf"),
    custom=True,
)  # fmt: skip
CLUSTER_QUEUE = Resource(
    KUEUE, "v1beta2", "ClusterQueue", "clusterqueues", namespaced=False, short_names=("cq",), subresources=("status",),
    custom=True,
)  # fmt: skip
LOCAL_QUEUE = Resource(
    KUEUE, "v1beta2", "LocalQueue", "localqueues", short_names=("queue", "queues", "lq"), subresources=("status",),
    custom=True,
)  # fmt: skip
WORKLOAD = Resource(
    KUEUE, "v1beta2", "Workload", "workloads", short_names=("wl",), subresources=("status",), custom=True
)
WORKLOAD_PRIORITY_CLASS = Resource(
    KUEUE, "v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False, custom=True
)

KUEUE_RESOURCES = (RESOURCE_FLAVOR, CLUSTER_QUEUE, LOCAL_QUEUE, WORKLOAD, WORKLOAD_PRIORITY_CLASS)
BUILT_IN = (
    POD, SERVICE, CONFIG_MAP, SECRET, SERVICE_ACCOUNT, EVENT, NAMESPACE, NODE, BATCH_JOB, LEASE, HPA,
    CLAIM, VOLUME, PRIORITY_CLASS, DISRUPTION_BUDGET,
    ROLE, ROLE_BINDING, CLUSTER_ROLE, CLUSTER_ROLE_BINDING, CRD,
)  # fmt: skip


def served(mpi_api: str = "v1", trainer: bool = True, *, kueue: bool = False) -> tuple[Resource, ...]:
    """Return all resource types of a cluster.

    :param mpi_api: the only served version of MPIJob: v1 or v2beta1. A real cluster also serves only one of them.
    :param trainer: whether to serve the resources of the Trainer and of JobSet.
    :param kueue: whether to serve the resources of Kueue.
    """
    mpijob = {"v1": MPIJOB_V1, "v2beta1": MPIJOB_V2BETA1}[mpi_api]
    trainer_resources = (JOBSET, CLUSTER_TRAINING_RUNTIME, TRAINING_RUNTIME, TRAINJOB)
    return (
        *BUILT_IN, PYTORCHJOB, mpijob, *(trainer_resources if trainer else ()),
        *(KUEUE_RESOURCES if kueue else ()),
    )  # fmt: skip
