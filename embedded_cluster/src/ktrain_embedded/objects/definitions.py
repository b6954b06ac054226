"""The CustomResourceDefinitions of the resources that the embedded cluster serves."""

from __future__ import annotations

from ktrain_embedded.objects import openapi
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Store, now


def definition(resource: Resource) -> Obj:
    """Return the CustomResourceDefinition of a resource, with the schema that the server uses for validation."""
    names = {
        "kind": resource.kind, "listKind": f"{resource.kind}List",
        "plural": resource.plural, "singular": resource.singular,
    }  # fmt: skip
    version = {
        "name": resource.version, "served": True, "storage": True,
        "schema": {"openAPIV3Schema": openapi.schema_of(resource)},
        "subresources": {name: {} for name in resource.subresources},
    }  # fmt: skip
    established = {
        "type": "Established", "status": "True", "lastTransitionTime": now(), "reason": "InitialNamesAccepted",
        "message": "the initial names have been accepted",
    }  # fmt: skip
    return {
        "metadata": {"name": resource.group_resource},
        "spec": {
            "group": resource.group,
            "names": names,
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "versions": [version],
        },
        "status": {"conditions": [established], "acceptedNames": names, "storedVersions": [resource.version]},
    }


def install(store: Store, resources: tuple[Resource, ...]) -> None:
    """Create the CustomResourceDefinitions of all custom resources in the store."""
    for resource in resources:
        if resource.custom:
            store.create(r.CRD, definition(resource))
