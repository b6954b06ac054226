"""API errors with the messages of a Kubernetes API server: an exception that is returned as a Status object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Problem = tuple[str, str, str]  # reason, message and field of a cause in a Status

REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
    406: "NotAcceptable", 409: "Conflict", 410: "Expired", 413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
    503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip


class ApiError(Exception):
    """The error of a request. The response has a Status object with `code` and `reason`, and `warnings` as headers."""

    def __init__(
        self,
        code: int,
        message: str,
        reason: str | None = None,
        details: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = REASONS.get(code, "") if reason is None else reason
        self.details = details
        self.metadata = metadata or {}
        self.warnings: list[str] = []

    def status(self) -> dict[str, Any]:
        """Return the Status object of this error."""
        status = {
            "kind": "Status", "apiVersion": "v1", "metadata": self.metadata, "status": "Failure",
            "message": self.message, "reason": self.reason or None, "details": self.details, "code": self.code,
        }  # fmt: skip
        return {key: value for key, value in status.items() if value is not None}


def invalid(kind: str, problems: Sequence[Problem], name: str = "", group: str = "meta.k8s.io") -> ApiError:
    """Return the error 422 for invalid options or an invalid object."""
    what = joined(list(dict.fromkeys(map(described, problems))))
    return ApiError(
        422,
        f'{kind}{"." if group else ""}{group} "{name}" is invalid: {what}',
        details={
            **({"name": name} if name else {}),
            **({"group": group} if group else {}),
            "kind": kind,
            "causes": [{"reason": reason, "message": message, "field": field} for reason, message, field in problems],
        },
    )


def denied(webhook: str, messages: Sequence[str]) -> ApiError:
    """Return the error 403 of a webhook that denies a request."""
    return ApiError(403, f'admission webhook "{webhook}" denied the request: {joined(messages)}')


def joined(messages: Sequence[str]) -> str:
    """Join messages as Go's aggregate errors do: a single one has no brackets."""
    return messages[0] if len(messages) == 1 else f"[{', '.join(messages)}]"


def described(problem: Problem) -> str:
    """Return the message of a problem, with its field."""
    _, why, field = problem
    return f"{field}: {why}"


def wrong(field: str, value: object, why: str) -> Problem:
    """Return the problem of an invalid value, with the reason `why`."""
    return "FieldValueInvalid", f'Invalid value: "{value}": {why}', field


def unsupported(field: str, value: object, supported: Iterable[str]) -> Problem:
    """Return the problem of an unsupported value."""
    values = ", ".join(f'"{s}"' for s in supported)
    return "FieldValueNotSupported", f'Unsupported value: "{value}": supported values: {values}', field
