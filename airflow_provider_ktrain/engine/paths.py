"""Paths of the Kubernetes API that the engine asks."""

from __future__ import annotations

from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.kinds import Kind, kind_of


def jobs(kind: Kind, version: str, namespace: str, name: str = "") -> str:
    base = f"/apis/{kind.group}/{version}/namespaces/{namespace}/{kind.plural}"
    return f"{base}/{name}" if name else base


def job(ref: JobRef) -> str:
    return jobs(kind_of(ref.kind), ref.version, ref.namespace, ref.name)


def core(namespace: str, plural: str, name: str = "") -> str:
    base = f"/api/v1/namespaces/{namespace}/{plural}"
    return f"{base}/{name}" if name else base
