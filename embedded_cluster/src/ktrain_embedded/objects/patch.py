"""Patches: JSON merge patch, JSON patch, and the part of strategic merge patch that kubectl apply uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonpatch
import jsonpointer

from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.schema import VALUES
from ktrain_embedded.objects.store import Obj

MERGE, JSON_PATCH, STRATEGIC = (f"application/{t}+json" for t in ("merge-patch", "json-patch", "strategic-merge-patch"))
MAX_OPERATIONS = 10_000
DOES_NOT_FIT = (
    TypeError, AttributeError, KeyError, ValueError, jsonpatch.JsonPatchException, jsonpointer.JsonPointerException,
)  # fmt: skip

#: Merge keys of the lists that a strategic merge patch merges, by field name; "" for lists of primitive values. A field
#: name has the same merge key in all types, except `ports`.
MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "ephemeralContainers": "name", "env": "name", "volumes": "name",
    "volumeMounts": "mountPath", "volumeDevices": "devicePath", "imagePullSecrets": "name", "secrets": "name",
    "hostAliases": "ip", "topologySpreadConstraints": "topologyKey", "ownerReferences": "uid", "finalizers": "",
    "conditions": "type", "addresses": "type", "taints": "key", "podIPs": "ip", "resourceClaims": "name",
}  # fmt: skip


def media_types(resource: Resource) -> tuple[str, ...]:
    """Return the supported media types of patches. Custom resources don't support strategic merge patches."""
    return (JSON_PATCH, MERGE) if resource.custom else (JSON_PATCH, MERGE, STRATEGIC)


def apply(media: str, obj: Obj, patch: Any) -> Obj:
    """Apply a patch and return a new object.

    :raises ApiError: 400 if the patch has the wrong type, 413 if it has too many operations, 422 if it doesn't apply.
    """
    expected, go = ("array", "jsonpatch.Patch") if media == JSON_PATCH else ("object", "map[string]interface {}")
    found = VALUES[type(patch)][1]
    if found != expected:
        raise ApiError(400, f"error decoding patch: json: cannot unmarshal {found} into Go value of type {go}")
    if media == MERGE:
        return merge(obj, patch)
    if media == JSON_PATCH and len(patch) > MAX_OPERATIONS:
        raise ApiError(413, f"The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {len(patch)}")
    try:
        if media == STRATEGIC:
            ports = {"ports": "port" if obj["kind"] == "Service" else "containerPort"}
            return strategic(obj, patch, MERGE_KEYS | ports)
        return dict(jsonpatch.apply_patch(obj, patch))
    except DOES_NOT_FIT:
        why = "the server rejected our request due to an error in our request"
        raise ApiError(422, why, "Invalid", details={}) from None


def merge(target: Any, patch: Obj) -> Obj:
    """Apply a JSON merge patch (RFC 7386) and return a new map."""
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value) if isinstance(value, dict) else value
    return merged


def strategic(target: Any, patch: Obj, keys: Mapping[str, str]) -> Obj:
    """Apply a strategic merge patch to a map and return a new map. `keys` has the format of MERGE_KEYS."""
    merged = dict(target) if isinstance(target, dict) and "$patch" not in patch else {}
    if "$retainKeys" in patch:
        merged = {k: v for k, v in merged.items() if k in patch["$retainKeys"]}
    for field, value in patch.items():
        directive, _, name = field.partition("/")
        if directive == "$deleteFromPrimitiveList":
            merged[name] = [v for v in merged.get(name, ()) if v not in value]
        elif directive.startswith("$"):
            continue
        elif value is None:
            merged.pop(field, None)
        elif isinstance(value, dict):
            merged[field] = strategic(merged.get(field), value, keys)
        elif isinstance(value, list) and field in keys:
            merged[field] = _merged(merged.get(field, ()), value, keys[field], keys)
        else:
            merged[field] = value
    for field, order in patch.items():
        directive, _, name = field.partition("/")
        if directive == "$setElementOrder" and name in merged and name in keys:
            merged[name] = _ordered(merged[name], order, keys[name])
    return merged


def _merged(items: Any, patch: list[Any], key: str, keys: Mapping[str, str]) -> list[Any]:
    """Merge the items of a patch into a list by the merge key `key`.

    New items come first, as in Kubernetes. If `key` is "", new values are appended.
    """
    if not key:
        return [*items, *(v for v in patch if v not in items)]
    merged, new = list(items), list[Any]()
    for item in patch:
        at = next((i for i, known in enumerate(merged) if known[key] == item[key]), None)
        delete = item.get("$patch") == "delete"
        if at is None:
            new += [] if delete else [strategic(None, item, keys)]
        else:
            merged[at : at + 1] = [] if delete else [strategic(merged[at], item, keys)]
    return [*new, *merged]


def _ordered(items: list[Any], order: list[Any], key: str) -> list[Any]:
    """Sort items in the order of the patch. Items that the patch doesn't list come last."""
    places = {o[key] if key else o: place for place, o in enumerate(order)}
    return sorted(items, key=lambda item: places.get(item[key] if key else item, len(places)))
