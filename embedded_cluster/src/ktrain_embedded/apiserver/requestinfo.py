"""Parse the method and path of a request as Kubernetes' RequestInfo resolver does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ktrain_embedded.objects.errors import ApiError

VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class RequestInfo:
    """The attributes of a request. For a non-resource path, `plural` is "" and `verb` follows from the HTTP method."""

    verb: str
    path: str
    group: str = ""
    version: str = ""
    namespace: str = ""
    plural: str = ""
    name: str = ""
    subresource: str = ""
    #: Path segments after the subresource. No served path has any.
    rest: tuple[str, ...] = ()

    @property
    def resource_path(self) -> str:
        """The resource as in the rules of a Role: `pods`, `pods/log`."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural


def flag(query: Mapping[str, str], name: str) -> bool:
    """Return a boolean of the query string: every value except "", "0" and "false" is true."""
    return query.get(name, "false").lower() not in ("", "0", "false")


def integer(query: Mapping[str, str], name: str) -> int | None:
    """Return an integer of the query string, None if it isn't set. Raise ApiError 400 if it isn't an integer."""
    value = query.get(name, "")
    if not value:
        return None
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", value):
        why = "value out of range" if re.fullmatch(r"[+-]?[0-9]+", value) else "invalid syntax"
        raise ApiError(400, f'strconv.ParseInt: parsing "{value}": {why}')
    return int(value)


def parse(method: str, path: str, query: Mapping[str, str]) -> RequestInfo:
    """Return the RequestInfo of a method, a decoded path and the query's parameters."""
    verb = VERBS.get(method, method.lower())
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 3:
        group, version, parts = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        group, version, parts = parts[1], parts[2], parts[3:]
    else:
        return RequestInfo(verb, path)
    watching = parts[0] == "watch" and len(parts) > 1
    parts = parts[1:] if watching else parts
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 1:
        namespace = parts[1]
        # /namespaces/x and /namespaces/x/status refer to the namespace itself
        if len(parts) > 2 and parts[2] != "status":
            parts = parts[2:]
    plural, name, subresource, *rest = (*parts, "", "")[: max(len(parts), 3)]
    if not name:
        verb = {"get": "list", "delete": "deletecollection"}.get(verb, verb)
    if watching or (verb == "list" and flag(query, "watch")):
        verb = "watch"
    if verb in ("list", "watch") and not name:
        # a field selector for one name sets the name, so that rules with resourceNames allow the request
        field, _, value = query.get("fieldSelector", "").partition("=")
        name = value.lstrip("=") if field == "metadata.name" and "," not in value else ""
    return RequestInfo(verb, path, group, version, namespace, plural, name, subresource, tuple(rest))
