"""Paths of the Kubernetes API that the engine uses."""

from __future__ import annotations

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.kinds.runtimes import RuntimeRef


def jobs(kind: Kind, version: str, namespace: str, name: str = "") -> str:
    """Path of the jobs of a kind, or of one job."""
    base = f"/apis/{kind.group}/{version}/namespaces/{namespace}/{kind.plural}"
    return f"{base}/{name}" if name else base


def pod_owner(ref: JobRef) -> str:
    """Path of the object between the job and its pods, for a kind that has one."""
    group, version, plural = kind_of(ref.kind).behavior.pod_owner.split("/")
    return f"/apis/{group}/{version}/namespaces/{ref.namespace}/{plural}/{ref.name}"


def job(ref: JobRef) -> str:
    """Path of the job of a reference."""
    return jobs(kind_of(ref.kind), ref.version, ref.namespace, ref.name)


def core(namespace: str, plural: str, name: str = "") -> str:
    """Path of objects of the core API group, or of one object."""
    base = f"/api/v1/namespaces/{namespace}/{plural}"
    return f"{base}/{name}" if name else base


def nodes(name: str = "") -> str:
    """Path of all nodes, or of one."""
    return f"/api/v1/nodes/{name}" if name else "/api/v1/nodes"


def runtime(kind: Kind, version: str, ref: RuntimeRef, namespace: str) -> str:
    """Path of the runtime of a job in this namespace; without a name, of all runtimes of its kind."""
    where = f"/namespaces/{namespace}" if ref.namespaced else ""
    base = f"/apis/{kind.group}/{version}{where}/{ref.plural}"
    return f"{base}/{ref.name}" if ref.name else base


def definition(kind: Kind) -> str:
    """Path of the CustomResourceDefinition of a kind."""
    return f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind.plural}.{kind.group}"
