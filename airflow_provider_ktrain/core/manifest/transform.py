"""The steps that turn a manifest into what is submitted.

`modernize`, `change_version` and `fit` rewrite it for the operator that the cluster runs; `stamp` names and labels it;
`expire` lets the cluster delete the job if no task is left to do it (`core/manifest/deadline.py`: end it). Each step
returns a new manifest and leaves its argument unchanged. What differs between kinds is in `core/kinds`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.errors import VersionNotServedError
from airflow_provider_ktrain.core.kinds import KINDS, Manifest, kind_of
from airflow_provider_ktrain.core.manifest.loader import plain

TTL = "ttlSecondsAfterFinished"
TTL_MINIMUM = 86_400  #: Seconds: a triggerer or a worker may be away for hours.
_SERVER_FIELDS = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "managedFields",
    "selfLink",
    "clusterName",
    "generateName",
    "ownerReferences",
)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def modernize(manifest: Mapping[str, Any]) -> tuple[Manifest, tuple[str, ...]]:
    """Move fields that only an older operator reads to spec.runPolicy; returns the manifest and their names.

    The legacy pytorch-operator read the run policy at the top of spec; training-operator drops it there without an
    error. A field that is set in both places keeps the value under runPolicy. Also cleanPodPolicy of an MPIJob v2beta1.
    """
    result: Manifest = plain(manifest)
    kind, spec = KINDS.get(str(result.get("kind"))), result.get("spec")
    if kind is None or not isinstance(spec, dict):
        return result, ()
    operator = kind.operator_of(str(result.get("apiVersion")))
    policy = spec.get("runPolicy") or {}
    moved = {key: spec.pop(key) for key in operator.ignored if key in spec and isinstance(policy, dict)}
    if moved:
        spec["runPolicy"] = moved | policy
    return result, tuple(moved)


def change_version(manifest: Mapping[str, Any], api_version: str) -> Manifest:
    """A manifest that was built from options alone, for the API version that the cluster serves.

    The defaults of its run policy are replaced.
    """
    result: Manifest = plain(manifest)
    kind, given = kind_of(result.get("kind")), result["apiVersion"]
    if given != api_version:
        before = kind.operator_of(given).run_policy
        policy = result["spec"].get("runPolicy") or {}
        kept = {key: value for key, value in policy.items() if key not in before or value != before[key]}
        result["spec"]["runPolicy"] = {**kind.operator_of(api_version).run_policy, **kept}
        result["apiVersion"] = api_version
    return result


def fit(manifest: Mapping[str, Any], api_version: str) -> Manifest:
    """The manifest as the operator of this cluster reads it. A missing apiVersion is set to the served one.

    :raises VersionNotServedError: if the manifest is written for another version.
    """
    result: Manifest = plain(manifest)
    given = result.setdefault("apiVersion", api_version)
    name, spec = result.get("kind"), result.get("spec")
    kind = KINDS.get(str(name))
    if given != api_version:
        raise VersionNotServedError(
            f"this cluster does not serve {given} of {name}",
            where="$.apiVersion",
            found=str(given),
            expected=api_version,
            remedy=(kind.operator_of(api_version).rewrite_hint if kind else "")
            or f"write the manifest for {api_version}",
        )
    if kind and isinstance(spec, dict):
        kind.form.fit(spec)
        for key, value in kind.operator_of(api_version).defaults.items():
            if spec.get(key) is None:
                spec[key] = copy.deepcopy(value)
    return result


def stamp(
    manifest: Mapping[str, Any],
    name: str,
    namespace: str,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest with our name, namespace, labels and annotations. Pod templates get the labels as well.

    Fields that a server sets (status, uid, resourceVersion, ...; in a manifest saved by `kubectl get -o yaml`) are
    removed. A ttlSecondsAfterFinished below TTL_MINIMUM is raised to it: the ended job shows how it ended until Airflow
    has read it, and the task itself deletes it.
    """
    result: Manifest = plain(manifest)
    result.pop("status", None)
    policy = (result.get("spec") or {}).get("runPolicy") or {}
    if isinstance(ttl := policy.get(TTL), int) and ttl < TTL_MINIMUM:
        policy[TTL] = TTL_MINIMUM
    metadata = result.get("metadata") or {}
    kept = {k: v for k, v in metadata.items() if k not in _SERVER_FIELDS}
    kept_annotations = {k: v for k, v in (kept.pop("annotations", None) or {}).items() if k != _LAST_APPLIED}
    result["metadata"] = {
        **kept,
        "name": name,
        "namespace": namespace,
        "labels": {**(kept.get("labels") or {}), **(labels or {})},
        "annotations": {**kept_annotations, **(annotations or {})},
    }
    for _, template in kind_of(result.get("kind")).form.templates(result):
        # `creationTimestamp: null`, which tools write into templates, is an unknown field to a strict server
        inner = {k: v for k, v in (template.get("metadata") or {}).items() if v is not None and k not in _SERVER_FIELDS}
        template["metadata"] = {**inner, "labels": {**(inner.get("labels") or {}), **(labels or {})}}
    return result


def expire(manifest: Mapping[str, Any], seconds: int) -> Manifest:
    """Let the cluster delete the job some time after its end, if the kind's operator does that.

    A TTL of the manifest is replaced.
    """
    result: Manifest = plain(manifest)
    if kind_of(result.get("kind")).operator_of(str(result.get("apiVersion"))).expires:
        spec = result.setdefault("spec", {})
        spec["runPolicy"] = {**(spec.get("runPolicy") or {}), TTL: seconds}
    return result
