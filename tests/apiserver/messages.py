"""Requests, answers and Status objects. Their texts are those of Kubernetes 1.36."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

Object = dict[str, Any]

REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed", 409: "Conflict",
    410: "Expired", 415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
    503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip


@dataclass(frozen=True)
class Where:
    """What a path names: a collection, an object, or a subresource of one."""

    group: str = ""
    version: str = ""
    namespace: str = ""
    resource: str = ""
    name: str = ""
    sub: str = ""

    @classmethod
    def of(cls, path: str) -> Where:
        root, *parts = path.strip("/").split("/")
        if root not in ("api", "apis"):
            return cls()
        group = parts.pop(0) if root == "apis" and parts else ""
        version = parts.pop(0) if parts else ""
        namespace = ""
        if parts[:1] == ["namespaces"] and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        return cls(group, version, namespace, *[*parts, "", "", ""][:3])

    @property
    def api_version(self) -> str:
        """As objects have it."""
        return f"{self.group}/{self.version}".lstrip("/")


@dataclass
class Request:
    """One request.

    :param line: method and path with query, as tests look for it. Default: made of the others.
    :param actor: who sends it. A client of HTTP is named by its token.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    actor: str = ""
    line: str = ""
    sender: object = None  #: The client, if it is in this process.

    def __post_init__(self) -> None:
        self.where = Where.of(self.path)
        self.line = self.line or f"{self.method} {self.path}{'?' if self.query else ''}{urlencode(self.query)}"

    @property
    def verb(self) -> str:
        """As in the rules of RBAC; `log` for the log of a pod."""
        if self.where.sub == "log":
            return "log"
        if self.method == "GET":
            return "watch" if "watch" in self.query else "get" if self.where.name else "list"
        return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[self.method]


class Response:
    """An answer that is sent as a whole, as it was when it was made.

    :param body: sent as JSON, unless it is bytes.
    """

    def __init__(self, status: int = 200, body: Any = None, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.headers = status, dict(headers or {})
        if isinstance(body, bytes):
            self.data, self.content_type = body, "text/plain"
        else:
            self.data, self.content_type = b"" if body is None else json.dumps(body).encode(), "application/json"

    @property
    def body(self) -> Any:
        """A copy of what is sent as JSON."""
        return json.loads(self.data)


class Refused(Exception):
    """A request that gets an error status."""

    def __init__(self, status: int, message: str, reason: str = "", **details: Any) -> None:
        super().__init__(f"{status}: {message}")
        self.response = failure(status, message, reason, **details)


def failure(status: int, message: str = "", reason: str = "", **details: Any) -> Response:
    """An error status with its body.

    :param reason: Default: the one that usually belongs to the status.
    :param details: of the Status object; empty values are left out.
    """
    reason = reason or REASONS.get(status, "")
    body = {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message or f"the test's API server answers {status}", "reason": reason,
        "details": {key: value for key, value in details.items() if value}, "code": status,
    }  # fmt: skip
    return Response(status, {key: value for key, value in body.items() if value or key == "metadata"})
