"""Decode the protobuf messages that kubectl sends: the kinds that its typed commands create, and its reviews.

Commands such as `kubectl create namespace` send only protobuf, but accept JSON responses. The field numbers are from
the `generated.proto` files of k8s.io/api.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MEDIA = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\0"

#: Fields of a message: number -> name and type. A type is str, int, bool, bytes, map, bytesmap or a message's name. The
#: prefix [] means a repeated field.
Fields = dict[int, tuple[str, str]]
META: Fields = {
    1: ("name", "str"), 2: ("generateName", "str"), 3: ("namespace", "str"), 5: ("uid", "str"),
    6: ("resourceVersion", "str"), 11: ("labels", "map"), 12: ("annotations", "map"),
    13: ("ownerReferences", "[]OwnerReference"), 14: ("finalizers", "[]str"),
}  # fmt: skip
MESSAGES: dict[str, Fields] = {
    "Unknown": {1: ("typeMeta", "TypeMeta"), 2: ("raw", "bytes")},
    "TypeMeta": {1: ("apiVersion", "str"), 2: ("kind", "str")},
    "ObjectMeta": META,
    "OwnerReference": {
        1: ("kind", "str"), 3: ("name", "str"), 4: ("uid", "str"), 5: ("apiVersion", "str"), 6: ("controller", "bool"),
        7: ("blockOwnerDeletion", "bool"),
    },
    "Namespace": {},
    "ServiceAccount": {3: ("imagePullSecrets", "[]LocalObjectReference"), 4: ("automountServiceAccountToken", "bool")},
    "LocalObjectReference": {1: ("name", "str")},
    "ConfigMap": {2: ("data", "map"), 3: ("binaryData", "bytesmap"), 4: ("immutable", "bool")},
    "Secret": {2: ("data", "bytesmap"), 3: ("type", "str"), 4: ("stringData", "map"), 5: ("immutable", "bool")},
    "Role": {2: ("rules", "[]PolicyRule")},
    "ClusterRole": {2: ("rules", "[]PolicyRule")},
    "PolicyRule": {
        1: ("verbs", "[]str"), 2: ("apiGroups", "[]str"), 3: ("resources", "[]str"), 4: ("resourceNames", "[]str"),
        5: ("nonResourceURLs", "[]str"),
    },
    "RoleBinding": {2: ("subjects", "[]Subject"), 3: ("roleRef", "RoleRef")},
    "ClusterRoleBinding": {2: ("subjects", "[]Subject"), 3: ("roleRef", "RoleRef")},
    "Subject": {1: ("kind", "str"), 2: ("apiGroup", "str"), 3: ("name", "str"), 4: ("namespace", "str")},
    "RoleRef": {1: ("apiGroup", "str"), 2: ("kind", "str"), 3: ("name", "str")},
    "SelfSubjectReview": {},
    "SelfSubjectAccessReview": {2: ("spec", "AccessSpec")},
    "AccessSpec": {1: ("resourceAttributes", "ResourceAttributes"), 2: ("nonResourceAttributes", "PathAttributes")},
    "ResourceAttributes": {
        1: ("namespace", "str"), 2: ("verb", "str"), 3: ("group", "str"), 4: ("version", "str"), 5: ("resource", "str"),
        6: ("subresource", "str"), 7: ("name", "str"),
    },
    "PathAttributes": {1: ("path", "str"), 2: ("verb", "str")},
    "SelfSubjectRulesReview": {2: ("spec", "RulesSpec")},
    "RulesSpec": {1: ("namespace", "str")},
    "TokenRequest": {2: ("spec", "TokenSpec")},
    "TokenSpec": {1: ("audiences", "[]str"), 4: ("expirationSeconds", "int")},
    "DeleteOptions": {
        1: ("gracePeriodSeconds", "int"), 2: ("preconditions", "Preconditions"), 3: ("orphanDependents", "bool"),
        4: ("propagationPolicy", "str"), 5: ("dryRun", "[]str"),
    },
    "Preconditions": {1: ("uid", "str"), 2: ("resourceVersion", "str")},
}  # fmt: skip
WITHOUT_METADATA = ("DeleteOptions", "SelfSubjectReview")  # kinds without metadata, or whose metadata isn't used


def load(body: bytes) -> dict[str, Any]:
    """Decode a protobuf body. Raise ValueError if it is invalid or its kind is not supported."""
    if not body.startswith(MAGIC):
        raise ValueError("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")
    envelope = _message("Unknown", body[len(MAGIC) :])
    type_ = envelope.get("typeMeta") or {}
    kind = str(type_.get("kind", ""))
    if kind not in MESSAGES:
        raise ValueError(f"{kind} is not read as protobuf here: send JSON")
    fields = MESSAGES[kind] if kind in WITHOUT_METADATA else {1: ("metadata", "ObjectMeta"), **MESSAGES[kind]}
    return {**type_, **_fields(fields, envelope.get("raw", b""))}


def _message(name: str, data: bytes) -> dict[str, Any]:
    return _fields(MESSAGES[name], data)


def _fields(known: Fields, data: bytes) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for number, value in _wire(data):
        if number not in known:
            continue
        name, type_ = known[number]
        if type_.startswith("[]"):
            made.setdefault(name, []).append(_value(type_[2:], value))
        elif type_ in ("map", "bytesmap"):
            entry = dict(_wire(_bytes(value)))
            content = _bytes(entry.get(2, b""))
            shown = content.decode() if type_ == "map" else base64.b64encode(content).decode()
            made.setdefault(name, {})[_bytes(entry.get(1, b"")).decode()] = shown
        elif (read := _value(type_, value)) not in ("", {}):
            made[name] = read  # an empty value means an unset field
    return made


def _value(type_: str, value: int | bytes) -> Any:
    if type_ in ("int", "bool"):
        if not isinstance(value, int):
            raise ValueError("a number was expected")
        return bool(value) if type_ == "bool" else value - (1 << 64 if value >> 63 else 0)
    data = _bytes(value)
    return data if type_ == "bytes" else data.decode() if type_ == "str" else _message(type_, data)


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("bytes were expected")
    return value


def _wire(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the field numbers and raw values of a message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        length, at = _varint(data, at) if tag & 7 == 2 else ({1: 8, 5: 4}.get(tag & 7, -1), at)
        if length < 0 or at + length > len(data):
            raise ValueError("unexpected EOF")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("unexpected EOF")
