"""Patches: JSON merge patch, JSON patch, and strategic merge patch for built-in types."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import jsonpointer

from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj

MERGE, JSON_PATCH, STRATEGIC = (f"application/{t}+json" for t in ("merge-patch", "json-patch", "strategic-merge-patch"))
MAX_OPERATIONS = 10_000

#: lists that a strategic merge patch merges, by field name: the key of their items, "" for lists of plain values.
#: The same name means the same list wherever it occurs, but for ports.
MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "ephemeralContainers": "name", "env": "name", "volumes": "name",
    "volumeMounts": "mountPath", "volumeDevices": "devicePath", "imagePullSecrets": "name", "secrets": "name",
    "hostAliases": "ip", "topologySpreadConstraints": "topologyKey", "ownerReferences": "uid", "finalizers": "",
    "conditions": "type", "addresses": "type", "taints": "key", "podIPs": "ip", "resourceClaims": "name",
}  # fmt: skip


def media_types(resource: Resource) -> tuple[str, ...]:
    """The patches that a resource takes: strategic merge is not for custom resources."""
    return (JSON_PATCH, MERGE) if resource.custom else (JSON_PATCH, MERGE, STRATEGIC)


def apply(media: str, obj: Obj, patch: Any) -> Obj:
    """The patched object, a new one. ApiError 400 or 422 where the patch means nothing or does not fit."""
    if media == JSON_PATCH:
        return _json_patch(obj, patch)
    if not isinstance(patch, dict):
        kind = "array" if isinstance(patch, list) else "string" if isinstance(patch, str) else "number"
        raise ApiError(
            400, f"error decoding patch: json: cannot unmarshal {kind} into Go value of type map[string]interface {{}}"
        )
    merged = merge(obj, patch) if media == MERGE else strategic(copy.deepcopy(obj), patch, _ports_key(obj))
    return dict(merged)


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def _json_patch(obj: Obj, patch: Any) -> Obj:
    rejected = ApiError(422, "the server rejected our request due to an error in our request", "Invalid", details={})
    if not isinstance(patch, list):
        raise ApiError(400, "error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    if len(patch) > MAX_OPERATIONS:
        raise ApiError(413, f"The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {len(patch)}")
    try:
        patched = jsonpatch.apply_patch(obj, patch)
    except (
        jsonpatch.JsonPatchException,
        jsonpointer.JsonPointerException,
        TypeError,
        AttributeError,
        KeyError,
        ValueError,
    ):
        raise rejected from None
    if not isinstance(patched, dict):
        raise rejected
    return patched


def _ports_key(obj: Obj) -> str:
    return "port" if obj.get("kind") == "Service" else "containerPort"


def strategic(target: Any, patch: Any, ports_key: str) -> Any:
    """A strategic merge patch of one map; changes and returns `target`."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if not isinstance(target, dict) or patch.get("$patch") == "replace":
        return _plain({k: v for k, v in patch.items() if not k.startswith("$")})
    if patch.get("$patch") == "delete":
        return {}
    if isinstance(keep := patch.get("$retainKeys"), list):
        target = {k: v for k, v in target.items() if k in keep}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.split("/", 1)[1]
            target[name] = [v for v in target.get(name) or () if v not in value]
        elif key.startswith("$"):
            continue
        elif value is None:
            target.pop(key, None)
        elif isinstance(value, list):
            target[key] = _list(key, target.get(key), value, ports_key)
        else:
            target[key] = strategic(target.get(key), value, ports_key)
    for key, order in patch.items():
        if key.startswith("$setElementOrder/") and isinstance(order, list):
            name = key.split("/", 1)[1]
            if isinstance(target.get(name), list):
                target[name] = _ordered(target[name], order, _merge_key(name, ports_key) or "")
    return target


def _merge_key(name: str, ports_key: str) -> str | None:
    """The key that items of a list are merged by, "" for a set of values, None for a list that is replaced."""
    return ports_key if name == "ports" else MERGE_KEYS.get(name)


def _list(name: str, target: Any, patch: list[Any], ports_key: str) -> list[Any]:
    key = _merge_key(name, ports_key)
    if key is None or not isinstance(target, list) or {"$patch": "replace"} in patch:
        return [_plain(v) for v in patch if not (isinstance(v, dict) and "$patch" in v)]
    if not key:
        return [*target, *(v for v in patch if v not in target)]
    merged = list(target)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise ApiError(400, f"map: {item!r} does not contain declared merge key: {key}")
        at = next((i for i, t in enumerate(merged) if isinstance(t, dict) and t.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            merged = [t for t in merged if not (isinstance(t, dict) and t.get(key) == item[key])]
        elif at is None:
            merged.append(_plain(item))
        else:
            merged[at] = strategic(merged[at], item, ports_key)
    return merged


def _ordered(items: list[Any], order: list[Any], key: str) -> list[Any]:
    """Items in the order that the patch gives; what it does not name stays behind its neighbours, at the end."""

    def value(item: Any) -> Any:
        return item.get(key) if key and isinstance(item, dict) else item

    places = [value(o) for o in order]
    return sorted(items, key=lambda item: places.index(value(item)) if value(item) in places else len(places))


def _plain(value: Any) -> Any:
    """A part of a patch as a value: without directives and nulls."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if not k.startswith("$") and v is not None}
    return [_plain(v) for v in value] if isinstance(value, list) else value
