"""What may enter the store: open namespaces and valid objects."""

from __future__ import annotations

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj, Store, details


def namespace_open(store: Store, resource: Resource, namespace: str, name: str) -> None:
    """ApiError 404 where the namespace is not there, 403 where it is being deleted."""
    if not resource.namespaced:
        return
    if "deletionTimestamp" in store.get(r.NAMESPACE, None, namespace)["metadata"]:
        raise ApiError(
            403,
            f'{resource} "{name}" is forbidden: unable to create new content in namespace {namespace} because it is being '
            "terminated",
            details={
                **details(resource, name),
                "causes": [
                    {
                        "reason": "NamespaceTerminating",
                        "message": f"namespace {namespace} is being terminated",
                        "field": "metadata.namespace",
                    }
                ],
            },
        )


def validate(store: Store, resource: Resource, obj: Obj, old: Obj | None) -> None:
    pass
