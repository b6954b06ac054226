"""The resources that the server knows, and its discovery documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    """A resource of an API group."""

    group: str
    versions: tuple[str, ...]
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.versions[0]}" if self.group else self.versions[0]

    @property
    def qualified(self) -> str:
        """As messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def _resources(group: str, version: str, *names: str, namespaced: bool = True) -> list[Resource]:
    pairs = (name.split("/") for name in names)
    return [Resource(group, tuple(version.split()), plural, kind, namespaced) for plural, kind in pairs]


RESOURCES = [
    *_resources(
        "", "v1", "pods/Pod", "events/Event", "services/Service", "secrets/Secret", "configmaps/ConfigMap",
        "persistentvolumeclaims/PersistentVolumeClaim", "serviceaccounts/ServiceAccount",
        "resourcequotas/ResourceQuota",
    ),
    *_resources("", "v1", "nodes/Node", "namespaces/Namespace", namespaced=False),
    *_resources("batch", "v1", "jobs/Job"),
    *_resources("apiextensions.k8s.io", "v1", "customresourcedefinitions/CustomResourceDefinition", namespaced=False),
    *_resources("authorization.k8s.io", "v1", "selfsubjectaccessreviews/SelfSubjectAccessReview", namespaced=False),
    *_resources("kubeflow.org", "v1", "pytorchjobs/PyTorchJob"),
    *_resources("kubeflow.org", "v2beta1 v1", "mpijobs/MPIJob"),
    *_resources("trainer.kubeflow.org", "v1alpha1", "trainjobs/TrainJob", "trainingruntimes/TrainingRuntime"),
    *_resources("trainer.kubeflow.org", "v1alpha1", "clustertrainingruntimes/ClusterTrainingRuntime", namespaced=False),
    *_resources("jobset.x-k8s.io", "v1alpha2", "jobsets/JobSet"),
    *_resources("kueue.x-k8s.io", "v1beta2 v1beta1", "workloads/Workload", "localqueues/LocalQueue"),
    *_resources(
        "kueue.x-k8s.io", "v1beta2 v1beta1", "clusterqueues/ClusterQueue",
        "workloadpriorityclasses/WorkloadPriorityClass", namespaced=False,
    ),
]  # fmt: skip
BY_PLURAL = {resource.plural: resource for resource in RESOURCES}
#: Groups that are served from the first object of theirs on; the others always.
OPTIONAL_GROUPS = {"kueue.x-k8s.io"}
_VERBS = ["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"]


def group_document(name: str, served: Iterable[Resource]) -> Object | None:
    """The document at /apis/<group>. None: it isn't served."""
    names = dict.fromkeys(version for resource in served if resource.group == name for version in resource.versions)
    if not names:
        return None
    versions = [{"groupVersion": f"{name}/{version}", "version": version} for version in names]
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": versions, "preferredVersion": versions[0]}


def groups_document(served: Iterable[Resource]) -> Object:
    """The document at /apis."""
    served = list(served)
    names = dict.fromkeys(resource.group for resource in served if resource.group)
    groups = [document for name in names if (document := group_document(name, served)) is not None]
    for group in groups:
        del group["kind"], group["apiVersion"]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def version_document(group: str, version: str, served: Iterable[Resource]) -> Object | None:
    """The document at /apis/<group>/<version> or /api/<version>. None: it isn't served."""
    found = [resource for resource in served if resource.group == group and version in resource.versions]
    if not found:
        return None
    entries: list[Object] = []
    for resource in found:
        base = {"namespaced": resource.namespaced, "kind": resource.kind}
        singular = resource.kind.lower()
        entries.append({"name": resource.plural, "singularName": singular, **base, "verbs": _VERBS})
        entries.append({"name": f"{resource.plural}/status", "singularName": "", **base, "verbs": _VERBS[2:7:2]})
    name = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": entries}
