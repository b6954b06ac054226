"""Owner references: who controls an object, and how a controller makes one its own."""

from __future__ import annotations

from airflow_provider_ktrain.local.store import Obj


def controller_of(obj: Obj) -> Obj | None:
    """The owner reference that has `controller: true`, or None."""
    return next((r for r in obj["metadata"].get("ownerReferences") or () if r.get("controller")), None)


def is_controlled_by(obj: Obj, owner: Obj) -> bool:
    reference = controller_of(obj)
    return reference is not None and reference["uid"] == owner["metadata"]["uid"]


def owner_reference(owner: Obj) -> Obj:
    """A reference that makes `owner` the controller, as client-go's NewControllerRef."""
    return {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip


def child(owner: Obj, name: str, labels: dict[str, str], **fields: object) -> Obj:
    """An object in the namespace of `owner` and under its control, to be created."""
    meta = {
        "name": name, "namespace": owner["metadata"]["namespace"], "labels": labels,
        "ownerReferences": [owner_reference(owner)],
    }  # fmt: skip
    return {"metadata": meta, **fields}
