"""Types of objects: decode and validate a value in one traversal of its type.

Built-in types are read from the models of the official Python client, which are generated from the OpenAPI document of
Kubernetes. The operators' types are defined in `crds.py` in the same notation: `str`, `int`, `bool`, `float`, `object`
(any value), `quantity`, `list[X]`, `dict[str,X]`, or the name of a struct.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from kubernetes.client import Configuration, models

from ktrain_embedded.objects import crds
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError, Problem
from ktrain_embedded.objects.resources import Obj, Resource
from ktrain_embedded.objects.structs import Struct

#: Names of the client's models by kind. For other kinds, the name is V1 and the kind.
MODELS = {
    "Event": "CoreV1Event", "HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
    "TokenRequest": "AuthenticationV1TokenRequest",
}  # fmt: skip
QUANTITY = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
#: Quantity fields. The client's models declare them as strings.
QUANTITIES = {
    "V1EmptyDirVolumeSource": ("size_limit",), "V1ResourceFieldSelector": ("divisor",),
    "V2MetricTarget": ("value", "average_value"), "V1ResourceRequirements": ("limits", "requests"),
    "V1PodSpec": ("overhead",), "V1NodeStatus": ("allocatable", "capacity"),
}  # fmt: skip
#: Fields whose combined values must be unique among the items of a list, by the list's name.
LIST_KEYS = {
    "containers": ("name",), "initContainers": ("name",), "env": ("name",), "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",), "volumeDevices": ("devicePath",), "volumes": ("name",),
    "imagePullSecrets": ("name",), "hostAliases": ("ip",), "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"), "runtimePatches": ("manager",),
    "replicatedJobs": ("name",),
}  # fmt: skip
GENERATED_DEFAULTS: dict[str, Obj] = {"V1ContainerPort": {"protocol": "TCP"}}  # for custom resources
#: Primitive types: their names in JSON and Go.
PLAIN = {
    "str": ("string", "string"), "int": ("integer", "int32"), "bool": ("boolean", "bool"),
    "float": ("number", "float64"), "datetime": ("string", "string"), "int64": ("integer", "int64"),
}  # fmt: skip
#: Python types of decoded JSON values: their names in JSON and in the messages of Go's decoder.
VALUES: dict[type, tuple[str, str]] = {
    bool: ("boolean", "bool"), int: ("integer", "number"), float: ("number", "number"), str: ("string", "string"),
    list: ("array", "array"), dict: ("object", "object"), type(None): ("null", "null"),
}  # fmt: skip
INCOMPLETE: Problem = (
    "FieldValueInvalid",
    "Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing "
    "errors to complete validation",
    "<nil>",
)
#: Resources whose schema has CEL rules. The API server doesn't evaluate these rules if an object has a problem whose
#: reason is in BLOCKING.
WITH_CEL_RULES = (r.PYTORCHJOB, r.MPIJOB_V1, r.TRAINJOB, r.JOBSET)
#: Resources whose defaulting webhook decodes the object, and rejects wrong types, before the schema validation.
DEFAULTERS = {r.TRAINJOB: "defaulter.trainjob.trainer.kubeflow.org"}
WEBHOOK_QUANTITY = "^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"
BLOCKING = ("FieldValueNotSupported", "FieldValueRequired", "FieldValueTypeInvalid", "FieldValueDuplicate")


@cache
def struct(name: str) -> Struct:
    """Return the struct of an operator's type or of a model of the client."""
    return crds.STRUCTS.get(name) or _of_model(name)


def _of_model(name: str) -> Struct:
    model = getattr(models, name)
    fields = {}
    for attribute, type_ in model.openapi_types.items():
        type_ = re.sub(r"^dict\((.*)\)$", r"dict[\1]", type_)  # version 35 of the client has dict(str, str)
        if attribute in QUANTITIES.get(name, ()):
            type_ = "dict[str, quantity]" if type_.startswith("dict") else "quantity"
        fields[model.attribute_map[attribute]] = type_
    blank, required = model.__new__(model), set()
    blank.local_vars_configuration = Configuration()
    for attribute, key in model.attribute_map.items():
        try:
            setattr(blank, attribute, None)
        except ValueError:  # the setter of a required field rejects None
            required.add(key)
    go_name = re.sub(r"^[A-Za-z]*?V\d+", "", name)
    return Struct(fields, frozenset(required), GENERATED_DEFAULTS.get(name, {}), go_name=go_name)


def type_of(resource: Resource) -> str:
    """Return the type of a resource's objects."""
    if resource.custom:
        return f"{resource.kind}/{resource.version}"
    return MODELS.get(resource.kind, f"V1{resource.kind}")


def decode(resource: Resource, value: Obj) -> tuple[Obj, list[str]]:
    """Decode an object.

    :return: a new object without unknown fields and nulls, and a note for each unknown field.
    :raises ApiError: 400 if a field of a built-in type or of metadata has the wrong type. `problems` checks the other
        fields of custom resources.
    """
    walk = _Walk(resource)
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    obj: Obj = walk.value(type_of(resource), {**value, **head}, (), "")
    return obj, sorted(walk.notes)


def problems(resource: Resource, obj: Obj) -> list[Problem]:
    """Validate an object: required fields, and all other constraints in the schema of a custom resource.

    :return: the problems, as the causes of a Status.
    """
    walk = _Walk(resource)
    walk.value(type_of(resource), obj, (), "")
    found = sorted(walk.problems, key=lambda problem: problem[0] == "FieldValueDuplicate")  # checked last
    blocking = BLOCKING[:-1] if resource in DEFAULTERS else BLOCKING
    if resource in WITH_CEL_RULES and any(reason in blocking for reason, _, _ in found):
        found.append(INCOMPLETE)
    return found


class _Key(str):
    """A map key in a Place. A plain str in a Place is a field."""


Place = tuple[str | int, ...]  # the path to a value: fields, map keys and indexes


def _path(place: Place, key: str = ".{}") -> str:
    """Format a place for messages: spec.containers[0].name. `key` is the format of map keys."""
    forms = {str: ".{}", int: "[{}]", _Key: key}
    return "".join(forms[type(part)].format(part) for part in place)[1:]


class _Walk:
    """Traverse a value and its type. Collect the notes and problems."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self.notes: list[str] = []
        self.problems: list[Problem] = []

    def value(self, type_: str, value: Any, place: Place, owner: str) -> Any:
        """Decode a value of this type. `owner` is the Go name of the enclosing struct."""
        if type_ == "object":
            return value
        if type_ == "quantity":
            return self._quantity(value, place, owner)
        container, inner = parts(type_)
        expected = {"list": "array", "dict": "object"}.get(container) or PLAIN.get(type_, ("object", ""))[0]
        if value is None and not self._has_schema(place):
            return next(zero for zero, (text, _) in VALUES.items() if text == expected)()  # Go's value for null
        if not _fits(expected, value):
            return self._misfit(expected, type_, value, place, owner)
        if container == "list":
            self._look_for_duplicates(value, place)
            return [self.value(inner, v, (*place, i), owner) for i, v in enumerate(value)]
        if container == "dict":
            return {k: self.value(inner, v, (*place, _Key(k)), owner) for k, v in value.items() if v is not None}
        return value if type_ in PLAIN else self._struct(struct(type_), value, place)

    def _struct(self, known: Struct, value: Obj, place: Place) -> Obj:
        made: Obj = {}
        empty = () if self._resource.custom else ("",)  # Go doesn't distinguish "" from a missing field
        for key in sorted(known.required - {k for k, v in value.items() if v not in empty}):
            self.problems.append(("FieldValueRequired", "Required value", _path((*place, key))))
        for key, inner in value.items():
            at = (*place, key)
            if key not in known.fields:
                self.notes.append(f'unknown field "{_path(at)}"')
            elif inner is not None:
                made[key] = self.value(known.fields[key], inner, at, known.go_name)
                allowed = known.enums.get(key)
                if allowed and isinstance(inner, str) and inner not in allowed:
                    why = f"Unsupported value: {_json(inner)}: supported values: {', '.join(map(_json, allowed))}"
                    self._object_to("FieldValueNotSupported", why, at)
                least = known.minimums.get(key)
                if least is not None and isinstance(inner, int) and inner < least:
                    why = f"{_path(at)} in body should be greater than or equal to {least}"
                    self._object_to("FieldValueInvalid", f"Invalid value: {inner}: {why}", at)
        return {**known.defaults, **made} if self._resource.custom else made

    def _quantity(self, value: Any, place: Place, owner: str) -> Any:
        custom = self._resource.custom
        if isinstance(value, bool) or not isinstance(value, int | str if custom else int | str | float):
            return self._misfit("integer or string", "str", value, place, owner)
        good = re.fullmatch(QUANTITY[1:-1], str(value))
        if not good and self._has_schema(place) and self._resource in DEFAULTERS:
            raise self._denied(f"quantities must match the regular expression '{WEBHOOK_QUANTITY}'")
        if custom:
            if not good:
                why = f"Invalid value: {_json(value)}: {_path(place)} in body should match '{QUANTITY}'"
                self._object_to("FieldValueInvalid", why, place)
            return value
        if not good:
            raise self._refused(f"quantities must match the regular expression '{QUANTITY}'")
        return str(value)

    def _look_for_duplicates(self, items: list[Any], place: Place) -> None:
        seen: set[str] = set()
        keys = LIST_KEYS.get(str(place[-1]), ()) if self._has_schema(place) else ()
        for i, item in enumerate(items if keys else ()):
            if isinstance(item, dict):
                text = _json({k: item[k] for k in keys if k in item})
                if text in seen:
                    at = _path((*place, i), key="[{}]")
                    self.problems.append(("FieldValueDuplicate", f"Duplicate value: {text}", at))
                seen.add(text)

    def _misfit(self, expected: str, type_: str, value: Any, place: Place, owner: str) -> Any:
        text, found = VALUES[type(value)]
        field_ = ".".join([owner, *(part for part in place if type(part) is str)])
        unfit = f"json: cannot unmarshal {found} into Go struct field {field_} of type {_go_type(type_)}"
        if self._has_schema(place) and self._resource in DEFAULTERS:
            raise self._denied(unfit)
        if self._has_schema(place):
            why = f'Invalid value: "{text}": {_path(place)} in body must be of type {expected}: "{text}"'
            self._object_to("FieldValueTypeInvalid", why, place)
            return value
        raise self._refused(unfit)

    def _has_schema(self, place: Place) -> bool:
        """Whether the schema validates this place, and not the decoder."""
        return self._resource.custom and place[:1] != ("metadata",)

    def _object_to(self, reason: str, why: str, place: Place) -> None:
        if self._has_schema(place):
            self.problems.append((reason, why, _path(place)))

    def _denied(self, why: str) -> ApiError:
        return ApiError(400, f'admission webhook "{DEFAULTERS[self._resource]}" denied the request: {why}', "")

    def _refused(self, why: str) -> ApiError:
        kind = self._resource.kind
        return ApiError(400, f'{kind} in version "{self._resource.version}" cannot be handled as a {kind}: {why}')


def _fits(expected: str, value: Any) -> bool:
    """Whether a value has a JSON type. An integer is also a number, and a number without a fraction is an integer."""
    found = VALUES[type(value)][0]
    if expected == "integer" and found == "number":
        return bool(value.is_integer())
    return found == expected or (expected, found) == ("number", "integer")


def parts(type_: str) -> tuple[str, str]:
    """Return `list` or `dict` and the type of its items, or "" and the type itself for other types."""
    container, bracket, inner = type_.partition("[")
    return (container, inner[:-1].removeprefix("str,").strip()) if bracket else ("", type_)


def _go_type(type_: str) -> str:
    container, inner = parts(type_)
    if container:
        return {"list": "[]", "dict": "map[string]"}[container] + _go_type(inner)
    known = {"quantity": "resource.Quantity", "object": "interface {}", **{name: go for name, (_, go) in PLAIN.items()}}
    return known.get(type_) or f"v1.{struct(type_).go_name}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
