"""The status server of the Trainer's feature gate TrainJobStatus. Trainings post their progress to it (recording 61).

The server listens on a separate port. A pod authenticates with a token whose audience is the path of its TrainJob, so
that it can report only for this TrainJob. Each post replaces status.trainerStatus completely.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ktrain_embedded.apiserver import negotiation
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects import schema
from ktrain_embedded.objects.errors import ApiError, Problem, invalid
from ktrain_embedded.objects.store import Obj, Store

#: The address of the status server on a real cluster. The kubelet replaces it by an address on loopback.
HOST = "kubeflow-trainer-controller-manager.kubeflow-system.svc:10443"
MAX_BODY = 64 * 1024  # bytes
FIELDS = {"progressPercentage": int, "estimatedRemainingSeconds": int, "metrics": list, "lastUpdatedTime": str}
MAX_PERCENTAGE = 100

#: Whether a token is valid for an audience.
TokenCheck = Callable[[str, str], bool]


def audience(namespace: str, name: str) -> str:
    """The audience of the tokens that a TrainJob's pods use to post its status."""
    return f"{r.TRAINJOB.api_version}/namespaces/{namespace}/trainjobs/{name}/status"


def url(namespace: str, name: str) -> str:
    """The URL to which a TrainJob's pods post its status."""
    return f"https://{HOST}/apis/{audience(namespace, name)}"


class StatusServer:
    """Receives the status of trainings. `app` is the aiohttp application.

    :param valid: checks whether a token is valid for an audience.
    """

    def __init__(self, store: Store, valid: TokenCheck) -> None:
        self._store = store
        self._valid = valid
        self.app = web.Application(client_max_size=MAX_BODY)
        self.app.router.add_post(f"/apis/{audience('{namespace}', '{name}')}", self._post)

    async def _post(self, request: web.Request) -> web.Response:
        try:
            return negotiation.answer(self._update(request, await negotiation.read_body(request)))
        except ApiError as error:
            return _failed(error)

    def _update(self, request: web.Request, body: bytes) -> Obj:
        """Store the posted status and return it. ApiError 403, 404, 422."""
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        _, _, token = request.headers.get("Authorization", "").partition(" ")
        if not self._valid(token.strip(), audience(namespace, name)):
            raise ApiError(403, "Forbidden")
        posted = _payload(body)
        if posted is None:
            return {}
        if problems := _problems(posted):
            raise invalid(r.TRAINJOB.kind, problems, name=name, group=r.TRAINJOB.group)
        job = self._store.get(r.TRAINJOB, namespace, name)
        self._store.update_status(r.TRAINJOB, job, {**(job.get("status") or {}), "trainerStatus": posted})
        return {"trainerStatus": posted}


def _failed(error: ApiError) -> web.Response:
    """The response to an error: a Status without kind and details. HTML characters are escaped, as in Go's JSON."""
    kept = ("metadata", "status", "message", "reason", "code")
    status = {key: value for key, value in error.status().items() if key in kept}
    body = negotiation.encode(status).replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    return web.Response(status=error.code, body=body, content_type=negotiation.JSON)


def _payload(body: bytes) -> Obj | None:
    """The posted trainerStatus without unknown fields, or None if it is null or missing. ApiError 422."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    posted = value.get("trainerStatus") if isinstance(value, dict) else ()
    if posted is None:
        return None
    if not isinstance(posted, dict) or not all(_fits(key, posted.get(key)) for key in FIELDS):
        raise ApiError(422, "Invalid payload")
    kept: Obj = {key: posted[key] for key in FIELDS if posted.get(key) is not None}
    if "metrics" in kept:
        kept["metrics"] = [{key: metric.get(key, "") for key in ("name", "value")} for metric in kept["metrics"]]
    return kept


def _fits(field: str, value: Any) -> bool:
    """Whether a value has the field's type in Go. Go accepts null for every type."""
    if value is None:
        return True
    if field == "metrics":
        return isinstance(value, list) and all(_is_metric(metric) for metric in value)
    return isinstance(value, FIELDS[field]) and not isinstance(value, bool)


def _is_metric(metric: Any) -> bool:
    return isinstance(metric, dict) and all(isinstance(metric.get(key, ""), str) for key in ("name", "value"))


def _problems(posted: Obj) -> list[Problem]:
    """The errors that the API server's validation finds in the status."""
    found: list[Problem] = []
    percentage = posted.get("progressPercentage", 0)
    if percentage > MAX_PERCENTAGE:
        why = f"trainerStatus.progressPercentage in body should be less than or equal to {MAX_PERCENTAGE}"
        found.append(("FieldValueInvalid", f"Invalid value: {percentage}: {why}", _at("progressPercentage")))
    if "lastUpdatedTime" not in posted:
        why = 'Invalid value: "null": trainerStatus.lastUpdatedTime in body must be of type string: "null"'
        found += [("FieldValueTypeInvalid", why, _at("lastUpdatedTime")), schema.INCOMPLETE]
    return found


def _at(field: str) -> str:
    return f"status.trainerStatus.{field}"
