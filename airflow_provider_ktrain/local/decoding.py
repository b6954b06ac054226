"""From the body of a request to an object of the resource: media type, kind and version, and the fields it may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.local import negotiation, schema
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.listing import invalid
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj

GO_HEAD = 'struct { APIVersion string "json:\\"apiVersion,omitempty\\""; Kind string "json:\\"kind,omitempty\\"" }'
JSON_TYPES = {list: "array", str: "string", bool: "bool", int: "number", float: "number"}


def media_type(content_type: str, accepted: tuple[str, ...] = negotiation.READ) -> str:
    """The media type of a body; ApiError 415 where it is not among those accepted."""
    media = content_type.partition(";")[0].strip().lower()
    if media not in accepted:
        told = negotiation.SERVED if negotiation.JSON in accepted else ", ".join(accepted)
        raise ApiError(415, f"the body of the request was in an unknown format - accepted media types include: {told}")
    return media


def options(kind: str, query: Mapping[str, str]) -> str:
    """Checks fieldValidation and dryRun of a write and returns the former; ApiError 422 as `kind` is refused."""
    problems = []
    dry_run, validation = query.get("dryRun", ""), query.get("fieldValidation", "")
    if dry_run not in ("", "All"):
        why = f'Unsupported value: ["{dry_run}"]: supported values: "All"'
        problems.append(("FieldValueNotSupported", why, "dryRun"))
    if validation not in ("", "Ignore", "Strict", "Warn"):
        why = f'Unsupported value: "{validation}": supported values: "", "Ignore", "Strict", "Warn"'
        problems.append(("FieldValueNotSupported", why, "fieldValidation"))
    if problems:
        raise invalid(kind, problems)
    return validation or "Warn"


def decode(resource: Resource, body: bytes, media: str, validation: str) -> tuple[Obj, list[str]]:
    """The object of a body without the fields that its type has not, and warnings about them. ApiError 400, 422."""
    try:
        value, notes = negotiation.load(body, media)
    except ValueError as e:
        raise _unrecognized(resource, f"couldn't get version/kind; json parse error: {e}", body) from None
    if not isinstance(value, dict):
        what = JSON_TYPES.get(type(value), "null")
        why = f"json: cannot unmarshal {what} into Go value of type {GO_HEAD}"
        raise _unrecognized(resource, f"couldn't get version/kind; json parse error: {why}", body)
    _check_type(resource, value, body)
    if media == negotiation.YAML and notes and validation == "Strict":
        notes = ["yaml: unmarshal errors:\n  " + "\n  ".join(notes)]
    obj, unknown = schema.decode(resource, value)
    return obj, strictly(resource, [*notes, *unknown], validation)


def load_map(body: bytes, media: str) -> tuple[Obj, list[str]]:
    """The map of a body that is no resource of its own, such as DeleteOptions. ApiError 400."""
    try:
        value, notes = negotiation.load(body, media)
    except ValueError as e:
        raise ApiError(400, f"couldn't get version/kind; json parse error: {e}") from None
    if not isinstance(value, dict):
        raise ApiError(
            400, f"json: cannot unmarshal {JSON_TYPES.get(type(value), 'null')} into Go value of type {GO_HEAD}"
        )
    return value, notes


def strictly(resource: Resource, notes: list[str], validation: str) -> list[str]:
    """Warnings for what a strict decoder objects to; ApiError 400 where it is to be strict."""
    if validation == "Ignore":
        return []
    if notes and validation == "Strict":
        raise ApiError(400, f"{_handled(resource, resource)}: strict decoding error: {', '.join(notes)}")
    return notes


def _handled(resource: Resource, as_: Resource) -> str:
    return f'{resource.kind} in version "{resource.version}" cannot be handled as a {as_.kind}'


def _check_type(resource: Resource, value: dict[str, Any], body: bytes) -> None:
    kind, version = value.get("kind"), value.get("apiVersion")
    if not kind and not version and not resource.custom:
        return  # a built-in type goes without saying
    for key in ("Kind", "apiVersion"):
        if not isinstance(value.get(key[0].lower() + key[1:]), str):
            text = body.decode(errors="replace")
            raise _unrecognized(resource, f"Object '{key}' is missing in '{text}'", body)
    if version != resource.api_version:
        raise ApiError(
            400,
            f"the API version in the data ({version}) does not match the expected API version ({resource.api_version})",
        )
    if kind != resource.kind and resource.custom:
        problem = ("FieldValueInvalid", f'Invalid value: "{kind}": must be {resource.kind}', "kind")
        meta = value.get("metadata")
        name = meta.get("name") if isinstance(meta, dict) else None
        raise invalid(str(kind), [problem], name=str(name or ""), group=resource.group)
    if kind != resource.kind:
        raise ApiError(400, f'{kind} in version "{resource.version}" cannot be handled as a {resource.kind}')


def _unrecognized(resource: Resource, why: str, body: bytes) -> ApiError:
    shown = body[:30].decode(errors="replace") if body[:1] == b"{" else body[:30].hex()
    summary = (shown + " ..." if len(body) > 30 else shown) or "<empty>"
    return ApiError(400, f"the object provided is unrecognized (must be of type {resource.kind}): {why} ({summary})")
