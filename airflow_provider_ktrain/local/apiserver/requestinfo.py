"""What a request asks for, read from its method and path as Kubernetes' RequestInfo resolver reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from airflow_provider_ktrain.local.objects.errors import ApiError

VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class RequestInfo:
    """One request in Kubernetes' terms. A path that names no resource has no `plural`, and the verb of its method."""

    verb: str
    path: str
    group: str = ""
    version: str = ""
    namespace: str = ""
    plural: str = ""
    name: str = ""
    subresource: str = ""
    #: parts after the subresource: nothing that is served
    rest: tuple[str, ...] = ()

    @property
    def resource_path(self) -> str:
        """`pods`, `pods/log`: how rules of a Role name it."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural


def flag(query: Mapping[str, str], name: str) -> bool:
    """A boolean of the query string: everything but "", "0" and "false" is true."""
    return query.get(name, "false").lower() not in ("", "0", "false")


def integer(query: Mapping[str, str], name: str) -> int | None:
    """An integer of the query string; ApiError 400 where it is none."""
    value = query.get(name, "")
    if not value:
        return None
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", value):
        why = "value out of range" if re.fullmatch(r"[+-]?[0-9]+", value) else "invalid syntax"
        raise ApiError(400, f'strconv.ParseInt: parsing "{value}": {why}')
    return int(value)


def parse(method: str, path: str, query: Mapping[str, str]) -> RequestInfo:
    """The RequestInfo of a method, a decoded path and the query's parameters."""
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
        # /namespaces/x and its status are about the namespace itself
        if len(parts) > 2 and parts[2] != "status":
            parts = parts[2:]
    plural, name, subresource, *rest = (*parts, "", "")[: max(len(parts), 3)]
    if not name:
        verb = {"get": "list", "delete": "deletecollection"}.get(verb, verb)
    if watching or (verb == "list" and flag(query, "watch")):
        verb = "watch"
    if verb in ("list", "watch") and not name:
        # a selector for one name is a request about that name: rules with resourceNames allow it
        field, _, value = query.get("fieldSelector", "").partition("=")
        name = value.lstrip("=") if field == "metadata.name" and "," not in value else ""
    return RequestInfo(verb, path, group, version, namespace, plural, name, subresource, tuple(rest))
