"""What a response of the API server is: an object, the proof that an object is absent, a refusal, or no answer at all.

`interpret` is the one function that tells them apart, for all verbs. It returns the object and raises for the others:
`AbsentError`, `ApiStatusError` (refused; if it is `transient`, the server isn't available now), and `ApiUnavailable`
(no answer, which proves nothing). No answer are also the pages of proxies with any status, redirects, and responses
about another object.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from airflow_provider_ktrain.core.errors import ClusterError
from airflow_provider_ktrain.core.text.output import clean

Object = dict[str, Any]  #: An object of Kubernetes, as JSON.
SHOWN_BYTES = 200  #: How much of a response that the API server did not write is quoted.


class ApiUnavailable(ClusterError):
    """No answer: connection refused or cut, timeout, DNS or TLS failure, or a response that isn't the API server's.

    The request wasn't repeated. It may have been processed.

    :param page: the status of a response that isn't the API server's. Default: 0, there was no response.
    :param retry_after: pause that it requires before the next request, in seconds. Default: none.
    """

    status = 0  #: 0: there was no response.
    transient = True  #: Whether the same request may succeed later.

    def __init__(self, message: str = "", *, page: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.page, self.retry_after = page, retry_after


class ApiStatusError(ClusterError):
    """The API server answers with an error status.

    :param reason: the Status' reason, such as NotFound or AlreadyExists.
    :param details: the Status' details: name, kind, causes, retryAfterSeconds.
    """

    def __init__(
        self, status: int, reason: str = "", message: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.details = dict(details or {})

    @property
    def transient(self) -> bool:
        """Whether the server isn't available now: the same request may succeed later. False: it is refused."""
        return self.status in (408, 410, 429) or self.status >= 500

    @property
    def retry_after(self) -> float | None:
        """Pause that the server requires before the next request, in seconds. None: it requires none."""
        seconds = self.details.get("retryAfterSeconds")
        return float(seconds) if isinstance(seconds, int | float) else None


class AbsentError(ApiStatusError):
    """The API server proves that the object that the path names doesn't exist."""


@dataclass(frozen=True)
class Target:
    """What a path names: an object, a subresource of one, a collection, or a document about the API."""

    group: str = ""
    version: str = ""
    namespace: str = ""
    resource: str = ""
    name: str = ""
    sub: str = ""

    @classmethod
    def of(cls, path: str) -> Target:
        """The target of an absolute path."""
        root, *parts = map(unquote, path.strip("/").split("/"))
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
        return f"{self.group}/{self.version}" if self.group else self.version


def interpret(method: str, path: str, sent: Any, status: int, body: bytes, retry_after: str | None = None) -> Object:
    """The object with which the API server answers a request.

    :param sent: the body of the request. None: it had none.
    :param retry_after: the header.
    :raises AbsentError: the object doesn't exist.
    :raises ApiStatusError: the request is refused; or, if the error is transient, the server isn't available.
    :raises ApiUnavailable: the response has no error status, and isn't that of an API server to this request.
    """
    try:
        answer = _parse(body) if body.lstrip()[:1] == b"{" else None
    except ValueError:
        answer = None
    target = Target.of(path)
    if status >= 300:
        error = _error(method, target, status, answer, retry_after)
        if error is None and status in (413, 429):  # a proxy's limit, which lasts; kube-apiserver's own 429 is text
            error = ApiStatusError(status, message=_shown(body), details=_pause_of(retry_after))
        if error is not None:
            raise error
    elif isinstance(answer, dict) and _answers(method, path, target, sent if isinstance(sent, dict) else {}, answer):
        return answer
    pause = _pause_of(retry_after).get("retryAfterSeconds")
    done = "" if method == "GET" else " The request may have been processed."
    message = f"{method} {path}: the response, with status {status}, isn't the API server's.{done}\n{_shown(body)}"
    raise ApiUnavailable(message, page=status, retry_after=pause)


def _pause_of(retry_after: str | None) -> dict[str, Any]:
    """What the header says, as in the details of a Status."""
    return {"retryAfterSeconds": float(retry_after)} if retry_after and retry_after.isdigit() else {}


def _shown(body: bytes) -> str:
    """The beginning of a response, which may be binary: messages go to logs and databases."""
    return str(clean(body[:SHOWN_BYTES].decode(errors="replace").strip()))


def _parse(body: bytes) -> Any:
    """Parse JSON with the garbage collector disabled.

    A page of pods makes thousands of objects, which would trigger a full collection, and that blocks the event loop.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return json.loads(body)
    finally:
        if collects:
            gc.enable()


def _error(method: str, target: Target, status: int, answer: Any, retry_after: str | None) -> ApiStatusError | None:
    """The error of a Status that answers this request; None if the response is none."""
    if (
        not isinstance(answer, dict)
        or (answer.get("kind"), answer.get("status")) != ("Status", "Failure")
        or status < 400
    ):
        return None
    answer = clean(answer)
    reason, message = str(answer.get("reason") or ""), str(answer.get("message") or "")
    found = answer.get("details")
    details = _pause_of(retry_after) | (found if isinstance(found, dict) else {})
    named = (details.get("name"), details.get("kind"), details.get("group") or "")
    if status == 404 and method == "POST" and named != (target.namespace, "namespaces", ""):
        return ApiStatusError(status, reason, message, details) if "admission webhook" in message else None
    if status == 404 and method != "POST" and not target.sub:  # a list of a namespace that doesn't exist is empty
        dressed_up = any(cause.get("reason") == "UnexpectedServerResponse" for cause in details.get("causes") or ())
        proved = (
            target.name
            and reason == "NotFound"
            and named == (target.name, target.resource, target.group)
            and not dressed_up
        )
        return AbsentError(status, reason, message, details) if proved else None
    about_another = bool(target.name) and details.get("name", target.name) != target.name
    if about_another and "admission webhook" not in message:
        return None
    return ApiStatusError(status, reason, message, details)


def _metadata(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    found = obj.get("metadata")
    return found if isinstance(found, dict) else {}


def _answers(method: str, path: str, target: Target, sent: Mapping[str, Any], answer: Object) -> bool:
    """Whether an object answers the request: it is what the path names, or what was sent."""
    kind, meta = str(answer.get("kind") or ""), _metadata(answer)
    if not target.resource:
        return _is_document(path, target, kind, answer)
    if method == "DELETE":
        uid = (sent.get("preconditions") or {}).get("uid")
        about = meta if kind != "Status" else answer.get("details") if answer.get("status") == "Success" else None
        deleted = kind == "Status" or bool(meta.get("deletionTimestamp"))
        names = isinstance(about, dict) and about.get("name") == target.name and uid in (None, about.get("uid"))
        return names and deleted
    if not kind or kind == "Status":
        return False
    if target.sub:
        return True
    if method == "POST":
        name = _metadata(sent).get("name")
        same = kind == sent.get("kind", kind) and answer.get("apiVersion") == target.api_version
        return same and (not name or (meta.get("name") == name and bool(meta.get("uid"))))
    if not kind.startswith("PartialObjectMetadata"):
        singular = kind.removesuffix("List").lower()
        # all but its last letter are in the plural, also of a policy
        if answer.get("apiVersion") != target.api_version or not target.resource.startswith(singular[:-1]):
            return False
    if not target.name:
        items = answer.get("items", ())
        complete = isinstance(items, list | None) and bool(meta.get("resourceVersion"))
        return kind.endswith("List") and complete
    here = meta.get("name") == target.name and meta.get("namespace", "") == target.namespace
    return here and bool(meta.get("uid"))


def _is_document(path: str, target: Target, kind: str, answer: Object) -> bool:
    """Whether an object is the document about the API that a path names."""
    if path.startswith("/openapi/"):
        return "openapi" in answer
    if not path.startswith("/api"):
        return bool(answer)
    if target.version:
        return kind == "APIResourceList" and answer.get("groupVersion") == target.api_version
    if target.group:
        return kind == "APIGroup" and answer.get("name") == target.group
    return kind in ("APIGroupList", "APIVersions")
