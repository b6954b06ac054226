"""Decode a request body into an object of a resource: check the syntax, kind, version and fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from ktrain_embedded.apiserver import negotiation, protobuf
from ktrain_embedded.objects import schema
from ktrain_embedded.objects.errors import ApiError, invalid, unsupported, wrong
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, at

GO_HEAD = 'struct { APIVersion string "json:\\"apiVersion,omitempty\\""; Kind string "json:\\"kind,omitempty\\"" }'
JSON_TYPES = {list: "array", str: "string", bool: "bool", int: "number", float: "number"}
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_DEPTH = 200  # levels of nesting. A real API server accepts 10,000; the served types don't need that many.


def options(kind: str, query: Mapping[str, str]) -> str:
    """Validate the parameters fieldValidation and dryRun of a write.

    :param kind: the kind of the options in the error message, such as CreateOptions.
    :return: the value of fieldValidation, "Warn" if it isn't set.
    :raises ApiError: 422 if a value is not supported.
    """
    problems = []
    dry_run, validation = query.get("dryRun", ""), query.get("fieldValidation", "")
    if dry_run not in ("", "All"):
        why = f'Unsupported value: ["{dry_run}"]: supported values: "All"'
        problems.append(("FieldValueNotSupported", why, "dryRun"))
    if validation not in ("", "Ignore", "Strict", "Warn"):
        problems.append(unsupported("fieldValidation", validation, ("", "Ignore", "Strict", "Warn")))
    if problems:
        raise invalid(kind, problems)
    return validation or "Warn"


def decode(resource: Resource, body: bytes, media: str, validation: str) -> tuple[Obj, list[str]]:
    """Decode a body.

    :return: the object without unknown fields, and warnings about these fields.
    :raises ApiError: 400 or 422 if the body is not a valid object of the resource.
    """
    try:
        value, notes = _map(body, media)
    except ValueError as e:
        raise _unrecognized(resource, str(e), body) from None
    _check_type(resource, value, body)
    strict = validation == "Strict"
    if media == negotiation.YAML and notes and strict:
        notes = ["yaml: unmarshal errors:\n  " + "\n  ".join(notes)]
    obj, unknown = schema.decode(resource, value)
    notes += unknown
    if notes and strict:
        raise _unfit(resource, resource.kind, f": strict decoding error: {', '.join(notes)}")
    return obj, [] if validation == "Ignore" else notes


def load_map(body: bytes, media: str = negotiation.JSON) -> Obj:
    """Decode a body whose kind is not a stored resource, such as DeleteOptions. Raise ApiError 400 if it is invalid."""
    try:
        return _map(body, media)[0]
    except ValueError as e:
        raise ApiError(400, str(e)) from None


def _map(body: bytes, media: str) -> tuple[Obj, list[str]]:
    try:
        value, notes = load(body, media)
        if not isinstance(value, dict):
            what = JSON_TYPES.get(type(value), "null")
            raise ValueError(f"json: cannot unmarshal {what} into Go value of type {GO_HEAD}")
        return value, notes
    except ValueError as e:
        raise ValueError(f"couldn't get version/kind; json parse error: {e}") from None


def _unfit(resource: Resource, kind: Any, why: str = "") -> ApiError:
    return ApiError(400, f'{kind} in version "{resource.version}" cannot be handled as a {resource.kind}{why}')


def _check_type(resource: Resource, value: dict[str, Any], body: bytes) -> None:
    kind, version = value.get("kind"), value.get("apiVersion")
    if not kind and not version and not resource.custom:
        return  # optional for built-in types
    for key, found in (("Kind", kind), ("apiVersion", version)):
        if not isinstance(found, str):
            text = body.decode(errors="replace")
            raise _unrecognized(resource, f"Object '{key}' is missing in '{text}'", body)
    if version != resource.api_version:
        expected = resource.api_version
        raise ApiError(
            400, f"the API version in the data ({version}) does not match the expected API version ({expected})"
        )
    if kind != resource.kind and resource.custom:
        problem = wrong("kind", kind, f"must be {resource.kind}")
        raise invalid(str(kind), [problem], name=str(at(value, "metadata.name", "")), group=resource.group)
    if kind != resource.kind:
        raise _unfit(resource, kind)


def _unrecognized(resource: Resource, why: str, body: bytes) -> ApiError:
    shown = body[:30].decode(errors="replace") if body[:1] == b"{" else body[:30].hex()
    summary = (shown + " ..." if len(body) > 30 else shown) or "<empty>"
    return ApiError(400, f"the object provided is unrecognized (must be of type {resource.kind}): {why} ({summary})")


def load(body: bytes, media: str = negotiation.JSON) -> tuple[Any, list[str]]:
    """Parse a body.

    :return: the value, and the problems that a strict decoder reports.
    :raises ValueError: if the syntax is invalid.
    """
    if media == protobuf.MEDIA:
        return protobuf.load(body), []
    content, notes = body.decode(errors="replace"), list[str]()
    try:
        if media == negotiation.YAML:
            value = json.loads(json.dumps(_Loader(content, notes).get_single_data(), allow_nan=False))
        else:
            value = json.loads(content, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("exceeded max depth") from None
    except json.JSONDecodeError as e:
        raise ValueError(_go_message(content, e)) from None
    except (yaml.YAMLError, TypeError) as e:  # TypeError: JSON can't represent a value or a key
        raise ValueError(f"yaml: {' '.join(str(e).split())}") from None
    if _deeper(value, MAX_DEPTH):
        raise ValueError("exceeded max depth")
    if SURROGATE.search(content):  # Go replaces a lone surrogate with the replacement character
        half = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
        value = json.loads(half.decode("utf-16", "replace"))
    return value, notes


class _Loader(yaml.SafeLoader):
    """Load YAML as Kubernetes does: timestamps stay strings, and duplicate keys are noted. Aliases are an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, content: str, notes: list[str]) -> None:
        super().__init__(content)
        self._notes = notes

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not supported: write out what they stand for")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                self._notes.append(f'line {key.start_mark.line + 1}: key "{key.value}" already set in map')
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _refuse(constant: str) -> Any:
    raise ValueError(f"invalid character '{constant[0]}' looking for beginning of value")


def _go_message(content: str, e: json.JSONDecodeError) -> str:
    """Return the error message of Go's encoding/json for the common errors."""
    if e.pos >= len(content.rstrip()):
        return "unexpected end of JSON input"
    where = "object key string" if "property name" in e.msg else "value"
    return f"invalid character {content[e.pos]!r} looking for beginning of {where}"


def _deeper(value: Any, levels: int) -> bool:
    """Whether a value has more than `levels` levels of nesting."""
    if not isinstance(value, (dict, list)):
        return False
    return not levels or any(_deeper(v, levels - 1) for v in (value.values() if isinstance(value, dict) else value))
