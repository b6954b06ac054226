"""Keys by which the objects of a shared informer are found and subscribed to."""

from __future__ import annotations

from airflow_provider_ktrain.core.identity.names import SUBMISSION_LABEL
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.engine.api.client import Object

Key = tuple[str, ...]
#: Labels by which objects can be found: those in `JobRef.pod_selector`. Others would only take memory, for each object.
INDEXED_LABELS = frozenset({SUBMISSION_LABEL, *(kind.behavior.pod_name_label for kind in KINDS.values())})


def by_uid(uid: str) -> Key:
    """Key of the object with this uid."""
    return ("uid", uid)


def by_name(name: str) -> Key:
    """Key of objects with this name; several objects may have it in turn."""
    return ("name", name)


def by_owner(uid: str) -> Key:
    """Key of objects with an ownerReference to this uid."""
    return ("owner", uid)


def uid_of(key: Key) -> str | None:
    """The uid of a key that `by_uid` returned, which needs no index; None for other keys."""
    return key[1] if key[0] == "uid" else None


def by_label(key: str, value: str) -> Key:
    """Key of objects with this label, one of INDEXED_LABELS."""
    assert key in INDEXED_LABELS, key
    return ("label", key, value)


def by_involved_uid(uid: str) -> Key:
    """Key of events about the object with this uid."""
    return ("involved", uid)


def by_involved_name(kind: str, name: str) -> Key:
    """Key of events about objects of this kind and name."""
    return ("involved", kind, name)


def keys_of(obj: Object) -> tuple[Key, ...]:
    """All keys by which an object can be subscribed to, except that of its uid."""
    meta = obj["metadata"]
    labels = meta.get("labels") or {}
    keys: list[Key] = [by_name(meta["name"])]
    keys += (by_owner(ref["uid"]) for ref in meta.get("ownerReferences") or ())
    keys += (by_label(key, labels[key]) for key in labels if key in INDEXED_LABELS)
    if about := obj.get("involvedObject"):
        keys += (by_involved_uid(about.get("uid", "")), by_involved_name(about.get("kind", ""), about.get("name", "")))
    return tuple(keys)
