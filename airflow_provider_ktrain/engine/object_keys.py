"""Keys by which the objects of a shared informer are found and subscribed to."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
Key = tuple[str, ...]


def by_uid(uid: str) -> Key:
    """Key of the object with this uid."""
    return ("uid", uid)


def by_name(name: str) -> Key:
    """Key of objects with this name; several objects may have it in turn."""
    return ("name", name)


def by_owner(uid: str) -> Key:
    """Key of objects with an ownerReference to this uid."""
    return ("owner", uid)


def by_label(key: str, value: str) -> Key:
    """Key of objects with this label."""
    return ("label", key, value)


def by_involved_uid(uid: str) -> Key:
    """Key of events about the object with this uid."""
    return ("involved", uid)


def by_involved_name(kind: str, name: str) -> Key:
    """Key of events about objects of this kind and name."""
    return ("involved", kind, name)


def keys_of(obj: Object) -> frozenset[Key]:
    """All keys by which an object can be subscribed to."""
    meta = obj["metadata"]
    keys: list[Key] = [by_uid(meta["uid"]), by_name(meta["name"])]
    keys += (by_owner(ref["uid"]) for ref in meta.get("ownerReferences") or ())
    keys += (by_label(key, value) for key, value in (meta.get("labels") or {}).items())
    if about := obj.get("involvedObject"):
        keys += (by_involved_uid(about.get("uid", "")), by_involved_name(about.get("kind", ""), about.get("name", "")))
    return frozenset(keys)
