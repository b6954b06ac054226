"""Types of objects: one walk along a type decodes a value and says what is wrong with it.

Built-in types are read from the models of the official Python client, which is made from Kubernetes' own description;
what the operators define is written down in `crds.py` in the same words: `str`, `int`, `bool`, `float`, `object`
(anything), `quantity`, `list[X]`, `dict[str,X]`, or the name of a struct.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from kubernetes.client import Configuration, models

from airflow_provider_ktrain.local.objects import crds
from airflow_provider_ktrain.local.objects import resources as r
from airflow_provider_ktrain.local.objects.errors import ApiError, Problem
from airflow_provider_ktrain.local.objects.resources import Resource
from airflow_provider_ktrain.local.objects.structs import Struct

Obj = dict[str, Any]

#: models by kind; the others are V1 and their kind
MODELS = {
    "Event": "CoreV1Event", "HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
    "TokenRequest": "AuthenticationV1TokenRequest",
}  # fmt: skip
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
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"), "runtimePatches": ("manager",),
    "replicatedJobs": ("name",),
}  # fmt: skip
GENERATED_DEFAULTS: dict[str, Obj] = {"V1ContainerPort": {"protocol": "TCP"}}  # of the schemas of custom resources
#: plain types: what JSON and Go call them
PLAIN = {
    "str": ("string", "string"), "int": ("integer", "int32"), "bool": ("boolean", "bool"),
    "float": ("number", "float64"), "datetime": ("string", "string"), "int64": ("integer", "int64"),
}  # fmt: skip
#: what JSON and Go's decoder call the values that Python's decoder makes
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
#: resources whose schema has rules (CEL) that are not looked at while it has other objections, and these objections
CHECKED_FURTHER = (r.PYTORCHJOB, r.MPIJOB_V1, r.TRAINJOB, r.JOBSET)
#: resources whose defaulting webhook decodes them, and objects to wrong types, before the schema is looked at
DEFAULTERS = {r.TRAINJOB: "defaulter.trainjob.trainer.kubeflow.org"}
WEBHOOK_QUANTITY = "^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"
BLOCKING = ("FieldValueNotSupported", "FieldValueRequired", "FieldValueTypeInvalid", "FieldValueDuplicate")


@cache
def struct(name: str) -> Struct:
    """The struct of a name: of an operator's, or of a model of the client."""
    return crds.STRUCTS.get(name) or _of_model(name)


def _of_model(name: str) -> Struct:
    model = getattr(models, name)
    fields = {}
    for attribute, type_ in model.openapi_types.items():
        type_ = re.sub(r"^dict\((.*)\)$", r"dict[\1]", type_)  # client 35 writes dict(str, str)
        if attribute in QUANTITIES.get(name, ()):
            type_ = "dict[str, quantity]" if type_.startswith("dict") else "quantity"
        fields[model.attribute_map[attribute]] = type_
    blank, required = model.__new__(model), set()
    blank.local_vars_configuration = Configuration()
    for attribute, key in model.attribute_map.items():
        try:
            setattr(blank, attribute, None)
        except ValueError:  # so the setter of a required field says
            required.add(key)
    go_name = re.sub(r"^[A-Za-z]*?V\d+", "", name)
    return Struct(fields, frozenset(required), GENERATED_DEFAULTS.get(name, {}), go_name=go_name)


def type_of(resource: Resource) -> str:
    """The type of a resource's objects."""
    if resource.custom:
        return f"{resource.kind}/{resource.version}" + (f"/{resource.release}" if resource.release else "")
    return MODELS.get(resource.kind, f"V1{resource.kind}")


def decode(resource: Resource, value: Obj) -> tuple[Obj, list[str]]:
    """The object without unknown fields and nulls (a new one), and a note for each unknown field.

    ApiError 400 where a field of a built-in type, or of metadata, is of another type; `problems` checks the rest of
    custom resources.
    """
    walk = _Walk(resource)
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    obj: Obj = walk.value(type_of(resource), {**value, **head}, (), "")
    return obj, sorted(walk.notes)


def problems(resource: Resource, obj: Obj) -> list[Problem]:
    """What an object lacks, and all else that a custom resource's schema has against it, as causes of a Status."""
    walk = _Walk(resource)
    walk.value(type_of(resource), obj, (), "")
    found = sorted(walk.problems, key=lambda problem: problem[0] == "FieldValueDuplicate")  # these are looked for last
    blocking = BLOCKING[:-1] if resource in DEFAULTERS else BLOCKING
    if resource in CHECKED_FURTHER and any(reason in blocking for reason, _, _ in found):
        found.append(INCOMPLETE)
    return found


class _Key(str):
    """A key of a map in a place, where other text is a field."""


Place = tuple[str | int, ...]  # fields, keys and indexes that lead to a value


def _path(place: Place, key: str = ".{}") -> str:
    """A place as it is told: spec.containers[0].name; keys of maps as `key` has it."""
    forms = {str: ".{}", int: "[{}]", _Key: key}
    return "".join(forms[type(part)].format(part) for part in place)[1:]


class _Walk:
    """Along a type through a value; collects what is to be said of it."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self.notes: list[str] = []
        self.problems: list[Problem] = []

    def value(self, type_: str, value: Any, place: Place, owner: str) -> Any:
        """The value as its type has it; `owner` is what Go calls the struct around it."""
        if type_ == "object":
            return value
        if type_ == "quantity":
            return self._quantity(value, place, owner)
        container, inner = parts(type_)
        wanted = {"list": "array", "dict": "object"}.get(container) or PLAIN.get(type_, ("object", ""))[0]
        if value is None and not self._has_schema(place):
            return next(zero for zero, (told, _) in VALUES.items() if told == wanted)()  # as Go decodes a null
        if not _fits(wanted, value):
            return self._misfit(wanted, type_, value, place, owner)
        if container == "list":
            self._look_for_duplicates(value, place)
            return [self.value(inner, v, (*place, i), owner) for i, v in enumerate(value)]
        if container == "dict":
            return {k: self.value(inner, v, (*place, _Key(k)), owner) for k, v in value.items() if v is not None}
        return value if type_ in PLAIN else self._struct(struct(type_), value, place)

    def _struct(self, known: Struct, value: Obj, place: Place) -> Obj:
        made: Obj = {}
        empty = () if self._resource.custom else ("",)  # which Go cannot tell from none
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
                told = _json({k: item[k] for k in keys if k in item})
                if told in seen:
                    at = _path((*place, i), key="[{}]")
                    self.problems.append(("FieldValueDuplicate", f"Duplicate value: {told}", at))
                seen.add(told)

    def _misfit(self, wanted: str, type_: str, value: Any, place: Place, owner: str) -> Any:
        told, found = VALUES[type(value)]
        field_ = ".".join([owner, *(part for part in place if type(part) is str)])
        unfit = f"json: cannot unmarshal {found} into Go struct field {field_} of type {_go_type(type_)}"
        if self._has_schema(place) and self._resource in DEFAULTERS:
            raise self._denied(unfit)
        if self._has_schema(place):
            why = f'Invalid value: "{told}": {_path(place)} in body must be of type {wanted}: "{told}"'
            self._object_to("FieldValueTypeInvalid", why, place)
            return value
        raise self._refused(unfit)

    def _has_schema(self, place: Place) -> bool:
        """Whether a schema tells of mistakes here, and not the decoder."""
        return self._resource.custom and place[:1] != ("metadata",)

    def _object_to(self, reason: str, why: str, place: Place) -> None:
        if self._has_schema(place):
            self.problems.append((reason, why, _path(place)))

    def _denied(self, why: str) -> ApiError:
        return ApiError(400, f'admission webhook "{DEFAULTERS[self._resource]}" denied the request: {why}', "")

    def _refused(self, why: str) -> ApiError:
        kind = self._resource.kind
        return ApiError(400, f'{kind} in version "{self._resource.version}" cannot be handled as a {kind}: {why}')


def _fits(wanted: str, value: Any) -> bool:
    """Whether a value is of a type of JSON: a number without a fraction is an integer, and an integer a number."""
    found = VALUES[type(value)][0]
    if wanted == "integer" and found == "number":
        return bool(value.is_integer())
    return found == wanted or (wanted, found) == ("number", "integer")


def parts(type_: str) -> tuple[str, str]:
    """`list` or `dict` and the type of what it holds; nothing and the type itself where it is neither."""
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
