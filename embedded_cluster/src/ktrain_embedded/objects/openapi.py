"""OpenAPI v3 schemas of custom resources, generated from the structs that the server uses for validation."""

from __future__ import annotations

from ktrain_embedded.objects.resources import Obj, Resource
from ktrain_embedded.objects.schema import parts, struct, type_of

ANYTHING: Obj = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
PLAIN: dict[str, Obj] = {
    "str": {"type": "string"}, "bool": {"type": "boolean"}, "float": {"type": "number"},
    "int": {"type": "integer", "format": "int32"}, "int64": {"type": "integer", "format": "int64"},
    "datetime": {"type": "string", "format": "date-time"}, "object": ANYTHING,
    "quantity": {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True},
}  # fmt: skip


def schema_of(resource: Resource) -> Obj:
    """Return the schema of a resource's objects. It doesn't contain the fields of built-in types."""
    described = _schema(type_of(resource))
    return {**described, "properties": {**described["properties"], "metadata": {"type": "object"}}}


def component(resource: Resource) -> str:
    """Return the name of a resource's schema in an OpenAPI document: org.kubeflow.trainer.v1alpha1.TrainJob."""
    return ".".join([*reversed(resource.group.split(".")), resource.version, resource.kind])


def _schema(type_: str) -> Obj:
    container, inner = parts(type_)
    if container == "list":
        return {"type": "array", "items": _schema(inner)}
    if container == "dict":
        return {"type": "object", "additionalProperties": _schema(inner)}
    if type_ in PLAIN:
        return PLAIN[type_]
    if type_.startswith(("V1", "V2")):
        return ANYTHING
    known = struct(type_)
    properties = {}
    for name, field_type in known.fields.items():
        properties[name] = {
            **_schema(field_type),
            **({"enum": list(known.enums[name])} if name in known.enums else {}),
            **({"default": known.defaults[name]} if name in known.defaults else {}),
            **({"minimum": known.minimums[name]} if name in known.minimums else {}),
        }
    required = {"required": sorted(known.required)} if known.required else {}
    return {"type": "object", "properties": properties, **required}
