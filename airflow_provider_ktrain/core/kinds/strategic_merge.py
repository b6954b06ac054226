"""Kubernetes' strategic merge: what `kubectl patch` does with a patch, and Kubeflow Trainer with patches of a runtime.

Mappings are merged, and null removes a key. A list whose entries have a merge key is merged by it: the order of the
present entries is kept, and new ones follow. Every other list is replaced (`args`, `envFrom`, `tolerations`).

MERGE_KEYS has the fields of a pod template with a `patchMergeKey` in Kubernetes' k8s.io/api/core/v1/types.go, which the
OpenAPI document publishes as `x-kubernetes-patch-merge-key`. Two lists have a second key that only server-side apply
uses (`listMapKey`); it is used here too, because a port may be open for TCP and UDP. `replicatedJobs` is JobSet's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError

Json = dict[str, Any]

PATCH = "$patch"  #: The only directive.
REPLACE, DELETE, MERGE = "replace", "delete", "merge"  #: Values of `$patch`.
MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "env": ("name",),
    "ephemeralContainers": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ports": ("containerPort", "protocol"),
    "replicatedJobs": ("name",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
_DEFAULTS = {"protocol": "TCP"}  #: Default values of keys that may be left out.


def merged(base: Mapping[str, Any], patch: Mapping[str, Any], path: str = "$") -> Json:
    """A copy of `base` with the patch applied.

    :param patch: what to change. The only directive is `$patch: replace` or `delete`, in a mapping or in an entry of a
        merged list.
    :param path: of the patch, for errors. Default: `$`.
    :raises ManifestError: an entry of a merged list has no merge key; a directive isn't supported.
    """
    _check_directives(patch, path)
    result = {} if patch.get(PATCH) == REPLACE else dict(base)
    for key, value in patch.items():
        if key == PATCH:
            continue
        if value is None or (isinstance(value, Mapping) and value.get(PATCH) == DELETE):
            result.pop(key, None)
        else:
            result[key] = _merged_value(result.get(key), value, key, member(path, key))
    return copy.deepcopy(result)


def _merged_value(before: Any, value: Any, key: str, path: str) -> Any:
    if isinstance(value, Mapping):
        return merged(before if isinstance(before, Mapping) else {}, value, path)
    if isinstance(value, list) and key in MERGE_KEYS:
        return _merged_list(before if isinstance(before, list) else [], value, MERGE_KEYS[key], path)
    return value


def _merged_list(base: Sequence[Any], patch: Sequence[Any], keys: tuple[str, ...], path: str) -> list[Any]:
    """A list merged by the keys of its entries. An entry that is only `$patch: replace` drops what was there."""
    result = [] if {PATCH: REPLACE} in patch else list(base)
    for i, entry in enumerate(patch):
        if entry == {PATCH: REPLACE}:
            continue
        identity = _identity(entry, keys)
        if identity is None:
            raise ManifestError(
                f"an entry has no {keys[0]}, by which entries are merged",
                where=f"{path}[{i}]",
                found=", ".join(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__,
                expected=keys[0],
                remedy=f"add {keys[0]}",
            )
        at = next((n for n, present in enumerate(result) if _identity(present, keys) == identity), None)
        if entry.get(PATCH) == DELETE:
            result = [present for n, present in enumerate(result) if n != at]
        elif at is None:
            result.append(merged({}, entry, f"{path}[{i}]"))
        else:
            result[at] = merged(result[at], entry, f"{path}[{i}]")
    return result


def _identity(entry: Any, keys: tuple[str, ...]) -> tuple[Any, ...] | None:
    """The values of an entry's merge keys; None if it has none."""
    if not isinstance(entry, Mapping) or entry.get(keys[0]) is None:
        return None
    return tuple(entry.get(key, _DEFAULTS.get(key)) for key in keys)


def removals(patch: Any, path: str) -> Iterator[str]:
    """The paths in a patch that remove something: null, and directives."""
    if isinstance(patch, Mapping):
        for key, value in patch.items():
            if value is None or key.startswith("$"):
                yield member(path, key)
            else:
                yield from removals(value, member(path, key))
    elif isinstance(patch, list):
        for i, entry in enumerate(patch):
            yield from removals(entry, f"{path}[{i}]")


def member(path: str, key: str) -> str:
    """The JSON path of a member of a mapping: `$.a.b`, `$.a['b/c']`."""
    return f"{path}.{key}" if re.fullmatch(r"[A-Za-z_$][\w-]*", key) else f"{path}['{key}']"


def _check_directives(patch: Mapping[str, Any], path: str) -> None:
    """A patch has no other keys that begin with `$` than the directives that are supported."""
    for key, value in patch.items():
        if key.startswith("$") and (key != PATCH or value not in (REPLACE, DELETE, MERGE)):
            raise ManifestError(
                f"the directive {key} is not supported, or not with this value",
                where=path,
                found=repr(value)[:80],
                expected=f"{PATCH} with {REPLACE}, {DELETE} or {MERGE}",
                remedy="remove it: merged lists keep their order, and others are replaced",
            )
