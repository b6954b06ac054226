"""Types of objects: decoding that knows its fields, and the schema of custom resources.

Built-in types are read from the models of the official Python client, which is made from Kubernetes' own description;
what the operators define is written down in `crds.py` in the same words: `str`, `int`, `bool`, `float`, `object`
(anything), `quantity`, `list[X]`, `dict[str, X]`, or the name of a struct.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kubernetes.client import Configuration, models

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.resources import Resource

Obj = dict[str, Any]
Problem = tuple[str, str, str]  # reason, message and field of a cause

MODELS = {r.EVENT: "CoreV1Event", r.HPA: "V2HorizontalPodAutoscaler"}  # the others are V1 and their kind
QUANTITY = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
#: fields that the client's models call strings
QUANTITIES = {
    "V1EmptyDirVolumeSource": ("size_limit",), "V1ResourceFieldSelector": ("divisor",),
    "V2MetricTarget": ("value", "average_value"), "V1ResourceRequirements": ("limits", "requests"),
    "V1PodSpec": ("overhead",), "V1NodeStatus": ("allocatable", "capacity"),
}  # fmt: skip
#: what a list of this name must not have twice
LIST_KEYS = {
    "containers": ("name",), "initContainers": ("name",), "env": ("name",), "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",), "volumeDevices": ("devicePath",), "volumes": ("name",),
    "imagePullSecrets": ("name",), "hostAliases": ("ip",), "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}  # fmt: skip
#: defaults that the generated schemas of custom resources hold
GENERATED_DEFAULTS: dict[str, Obj] = {
    "V1ContainerPort": {"protocol": "TCP"}, "V1GRPCAction": {"service": ""},
    **{
        f"V1{name}": {"name": ""}
        for name in (
            "LocalObjectReference", "ConfigMapKeySelector", "SecretKeySelector", "ConfigMapEnvSource",
            "SecretEnvSource", "ConfigMapVolumeSource", "ConfigMapProjection", "SecretProjection",
        )
    },
}  # fmt: skip
GO = {"str": "string", "int": "int32", "bool": "bool", "float": "float64", "datetime": "string"}
JSON = {"str": "string", "int": "integer", "bool": "boolean", "float": "number", "datetime": "string"}
INCOMPLETE: Problem = (
    "FieldValueInvalid",
    "Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing "
    "errors to complete validation",
    "<nil>",
)
BLOCKING = ("FieldValueNotSupported", "FieldValueRequired", "FieldValueTypeInvalid", "FieldValueDuplicate")


@dataclass(frozen=True)
class Struct:
    """A JSON object with known fields: the type of each, which must be there, defaults, and values that are allowed."""

    fields: Mapping[str, str]
    required: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    enums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    go_name: str = ""


@cache
def struct(name: str) -> Struct:
    """The struct of a name: of an operator's, or of a model of the client."""
    from airflow_provider_ktrain.local import crds

    return crds.STRUCTS.get(name) or _of_model(name)


def _of_model(name: str) -> Struct:
    model = getattr(models, name)
    fields = {}
    for attribute, type_ in model.openapi_types.items():
        if attribute in QUANTITIES.get(name, ()):
            type_ = "dict[str, quantity]" if type_.startswith("dict") else "quantity"
        fields[model.attribute_map[attribute]] = type_
    blank = model.__new__(model)
    blank.local_vars_configuration = VALIDATING
    required = {key for attribute, key in model.attribute_map.items() if _refuses_none(blank, attribute)}
    return Struct(
        fields, frozenset(required), GENERATED_DEFAULTS.get(name, {}), {}, re.sub(r"^[A-Za-z]*?V\d+", "", name)
    )


def _refuses_none(blank: Any, attribute: str) -> bool:
    """Whether a model's field is required: its setter says so."""
    try:
        setattr(blank, attribute, None)
    except ValueError:
        return True
    return False


VALIDATING = Configuration()


def type_of(resource: Resource) -> str:
    """The type of a resource's objects."""
    if resource.custom:
        return f"{resource.kind}/{resource.version}"
    return MODELS.get(resource, f"V1{resource.kind}")


def decode(resource: Resource, value: Obj) -> tuple[Obj, list[str]]:
    """The object without unknown fields and nulls (a new one), and a note for each unknown field.

    ApiError 400 where a field of a built-in type, or of metadata, is of another type; `problems` checks the rest of
    custom resources.
    """
    notes: list[str] = []
    decoder = _Decoder(resource, notes)
    obj: Obj = decoder.value(
        type_of(resource), {**value, "apiVersion": resource.api_version, "kind": resource.kind}, "", ""
    )
    return obj, sorted(notes)


class _Decoder:
    """Walks a value along its type."""

    def __init__(self, resource: Resource, notes: list[str]) -> None:
        self._resource = resource
        self._notes = notes

    def value(self, type_: str, value: Any, path: str, go_path: str) -> Any:
        """The value as its type has it; `go_path` is its place without indexes, as Go's decoder tells it."""
        if type_ == "object" or value is None:
            return value
        if type_ == "quantity":
            return self._quantity(value, go_path)
        if type_ in JSON:
            return value if fits(type_, value) else self._misfit(type_, value, go_path)
        if type_.startswith("list["):
            if not isinstance(value, list):
                return self._misfit(type_, value, go_path)
            return [self.value(type_[5:-1], v, f"{path}[{i}]", go_path) for i, v in enumerate(value)]
        if not isinstance(value, dict):
            return self._misfit(type_, value, go_path)
        if type_.startswith("dict["):
            inner = type_[5:-1].partition(",")[2].strip()
            return {k: self.value(inner, v, f"{path}.{k}", go_path) for k, v in value.items() if v is not None}
        return self._struct(struct(type_), value, path, go_path)

    def _struct(self, known: Struct, value: Obj, path: str, go_path: str) -> Obj:
        made: Obj = {}
        for key, inner in value.items():
            at = f"{path}.{key}" if path else key
            if key not in known.fields:
                self._notes.append(f'unknown field "{at}"')
            elif inner is not None:
                go_field = f"{go_path}.{key}" if go_path else f"{known.go_name}.{key}"
                made[key] = self.value(known.fields[key], inner, at, f"{known.go_name}.{go_field.partition('.')[2]}")
        if self._resource.custom:
            made.update({k: v for k, v in known.defaults.items() if k not in made})
        return made

    def _quantity(self, value: Any, go_path: str) -> Any:
        if self._resource.custom:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return self._misfit("str", value, go_path)
        if not re.fullmatch(QUANTITY[1:-1], str(value)):
            raise self._refused(f"quantities must match the regular expression '{QUANTITY}'")
        return str(value)

    def _misfit(self, type_: str, value: Any, go_path: str) -> Any:
        if self._resource.custom and not go_path.partition(".")[2].startswith("metadata"):
            return value
        raise self._refused(
            f"json: cannot unmarshal {_go_value(value)} into Go struct field {go_path} of type {_go_type(type_)}"
        )

    def _refused(self, why: str) -> ApiError:
        kind = self._resource.kind
        return ApiError(400, f'{kind} in version "{self._resource.version}" cannot be handled as a {kind}: {why}')


def fits(type_: str, value: Any) -> bool:
    """Whether a JSON value is of a plain type."""
    if type_ == "bool" or isinstance(value, bool):
        return type_ == "bool" and isinstance(value, bool)
    if type_ == "int":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, int | float) if type_ == "float" else isinstance(value, str)


def _go_value(value: Any) -> str:
    names = {bool: "bool", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _go_type(type_: str) -> str:
    if type_.startswith("list["):
        return f"[]{_go_type(type_[5:-1])}"
    if type_.startswith("dict["):
        return f"map[string]{_go_type(type_[5:-1].partition(',')[2].strip())}"
    return GO.get(type_) or f"v1.{struct(type_).go_name}"


# the schema of custom resources


def problems(resource: Resource, obj: Obj) -> list[Problem]:
    """What a custom resource's schema has against an object, as causes of a Status."""
    found = [*_check(type_of(resource), obj, ""), *_duplicates(type_of(resource), obj, "", "")]
    if resource in CHECKED_FURTHER and any(p[0] in BLOCKING for p in found):
        found.append(INCOMPLETE)
    return found


#: resources whose schema has rules (CEL) that are not looked at while it has other objections
CHECKED_FURTHER = (r.PYTORCHJOB, r.MPIJOB_V1)


def _check(type_: str, value: Any, path: str) -> Iterator[Problem]:
    if type_ == "object":
        return
    if type_ == "quantity":
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield _wrong_type("integer or string", value, path)
        elif isinstance(value, str) and not re.fullmatch(QUANTITY[1:-1], value):
            yield (
                "FieldValueInvalid",
                f"Invalid value: {_quoted(value)}: {path} in body should match '{QUANTITY}'",
                path,
            )
    elif type_ in JSON:
        if not fits(type_, value):
            yield _wrong_type(JSON[type_], value, path)
    elif type_.startswith("list["):
        if not isinstance(value, list):
            yield _wrong_type("array", value, path)
            return
        for i, item in enumerate(value):
            yield from _check(type_[5:-1], item, f"{path}[{i}]")
    elif not isinstance(value, dict):
        yield _wrong_type("object", value, path)
    elif type_.startswith("dict["):
        for key, item in value.items():
            yield from _check(type_[5:-1].partition(",")[2].strip(), item, f"{path}.{key}")
    else:
        yield from _check_struct(struct(type_), value, path)


def _check_struct(known: Struct, value: Obj, path: str) -> Iterator[Problem]:
    prefix = f"{path}." if path else ""
    for key in sorted(known.required - value.keys()):
        yield "FieldValueRequired", "Required value", f"{prefix}{key}"
    for key, item in value.items():
        if key not in known.fields or prefix == "metadata.":
            continue
        yield from _check(known.fields[key], item, f"{prefix}{key}")
        allowed = known.enums.get(key)
        if allowed and isinstance(item, str) and item not in allowed:
            names = ", ".join(map(_quoted, allowed))
            yield (
                "FieldValueNotSupported",
                f"Unsupported value: {_quoted(item)}: supported values: {names}",
                f"{prefix}{key}",
            )


def _duplicates(type_: str, value: Any, path: str, name: str) -> Iterator[Problem]:
    """Items of a list whose keys are the same. Here the place of a map's entry is told as `[key]`."""
    if type_ in JSON or type_ in ("object", "quantity"):
        return
    if type_.startswith("list[") and isinstance(value, list):
        seen: list[Obj] = []
        for i, item in enumerate(value):
            yield from _duplicates(type_[5:-1], item, f"{path}[{i}]", "")
            if name in LIST_KEYS and isinstance(item, dict):
                keys = {k: item[k] for k in LIST_KEYS[name] if k in item}
                if keys in seen:
                    yield "FieldValueDuplicate", f"Duplicate value: {_json(keys)}", f"{path}[{i}]"
                seen.append(keys)
    elif type_.startswith("dict[") and isinstance(value, dict):
        for key, item in value.items():
            yield from _duplicates(type_[5:-1].partition(",")[2].strip(), item, f"{path}[{key}]", "")
    elif isinstance(value, dict) and not type_.startswith("list["):
        for key, item in value.items():
            known = struct(type_).fields.get(key)
            if known and key != "metadata":
                yield from _duplicates(known, item, f"{path}.{key}" if path else key, key)


def _wrong_type(wanted: str, value: Any, path: str) -> Problem:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    told = _quoted(names.get(type(value), "null"))
    return "FieldValueTypeInvalid", f"Invalid value: {told}: {path} in body must be of type {wanted}: {told}", path


def _quoted(text: str) -> str:
    return _json(text)


def _json(value: Any) -> str:
    from airflow_provider_ktrain.local.negotiation import encode

    return encode(value).decode()


def published(type_: str) -> Obj:
    """The schema of a type as a CustomResourceDefinition holds it."""
    if type_ == "object":
        return {"x-kubernetes-preserve-unknown-fields": True}
    if type_ == "quantity":
        either = [{"type": "integer"}, {"type": "string"}]
        return {"anyOf": either, "pattern": QUANTITY, "x-kubernetes-int-or-string": True}
    if type_ in JSON:
        return {"type": JSON[type_], **({"format": "date-time"} if type_ == "datetime" else {})}
    if type_.startswith("list["):
        return {"type": "array", "items": published(type_[5:-1])}
    if type_.startswith("dict["):
        return {"type": "object", "additionalProperties": published(type_[5:-1].partition(",")[2].strip())}
    known = struct(type_)
    properties: dict[str, Obj] = {}
    for key, inner in known.fields.items():
        properties[key] = {"type": "object"} if inner == "V1ObjectMeta" else published(inner)
        if key in known.enums:
            properties[key]["enum"] = list(known.enums[key])
        if key in known.defaults:
            properties[key]["default"] = known.defaults[key]
        if inner.startswith("list[") and key in LIST_KEYS:
            properties[key].update(
                {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(LIST_KEYS[key])}
            )
    return {
        "type": "object",
        "properties": properties,
        **({"required": sorted(known.required)} if known.required else {}),
    }
