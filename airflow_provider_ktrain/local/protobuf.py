"""Kubernetes' protobuf, as far as `kubectl create namespace` needs it, which sends nothing else; answers are JSON."""

from __future__ import annotations

from typing import Any

from airflow_provider_ktrain.local.errors import ApiError

MEDIA = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\0"
VARINT, BYTES = 0, 2  # wire types
#: numbers of fields in the `generated.proto` files of k8s.io/apimachinery
TYPE_META, RAW, KIND, METADATA, NAME = 1, 2, 2, 1, 1


def load(body: bytes) -> dict[str, Any]:
    """The Namespace of a protobuf body: its name. ValueError where it is no protobuf, ApiError 415 for other kinds."""
    if not body.startswith(MAGIC):
        raise ValueError("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")
    envelope = _fields(body[len(MAGIC) :])
    kind = _fields(envelope.get(TYPE_META, b"")).get(KIND, b"").decode()
    if kind != "Namespace":
        raise ApiError(
            415,
            f"a {kind} is not read as protobuf here, send JSON or YAML: "
            "kubectl create ... --dry-run=client -o yaml | kubectl create -f -",
        )
    metadata = _fields(_fields(envelope.get(RAW, b"")).get(METADATA, b""))
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": metadata.get(NAME, b"").decode()}}


def _fields(data: bytes) -> dict[int, bytes]:
    """The fields of a message that hold bytes, by number."""
    found, at = {}, 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type not in (VARINT, BYTES):
            raise ValueError(f"wire type {wire_type} is not expected")
        length, at = _varint(data, at)  # of a number it is the value
        if wire_type == BYTES:
            found[number] = data[at : at + length]
            at += length
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where what follows it begins."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise ValueError("unexpected EOF")
