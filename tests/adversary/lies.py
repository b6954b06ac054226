"""Lies: wrong answers of an API server, or of what is between it and its clients."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.apiserver.messages import Object, Request, Response, failure
from tests.apiserver.selectors import selector
from tests.apiserver.store import Store
from tests.apiserver.watches import encoded

LOGIN = "/login"  #: Path to which redirects lead.
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body><form>...</form></body></html>"
OTHER = "someone-elses"  #: Name of an object that nobody has asked for.
#: Makes the answer to a request from the true one (None: the request was not carried out). It returns None if it can't
#: lie here.
Tell = Callable[[Request, Response | None, Store, random.Random], Response | None]


def _page(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response:
    response = Response(200, PAGE)
    response.content_type = "text/html"
    return response


def _text_404(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response:
    return Response(404, b"404 page not found\n")


def _other_404(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response:
    where = request.where
    kind, group = where.resource or "pods", where.group
    message = f'{kind}{"." if group else ""}{group} "{OTHER}" not found'
    return failure(404, message, name=OTHER, group=group, kind=kind)


def _namespace_404(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response | None:
    namespace = request.where.namespace
    if not namespace:
        return None
    return failure(404, f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")


def _proxy_404(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response | None:
    """A proxy's text, as a client library dresses it up."""
    where = request.where
    if not where.name:
        return None
    message = f"the server could not find the requested resource (get {where.resource} {where.name})"
    cause = {"reason": "UnexpectedServerResponse", "message": "404 page not found"}
    return failure(404, message, name=where.name, group=where.group, kind=where.resource, causes=[cause])


def _empty(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response:
    return Response(200, b"")


def _half(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response | None:
    if request.verb == "watch":
        return Response(200, b'{"type": "MODIFIED", "object": {"kind"')
    if true is None or len(true.data) < 2:
        return None
    response = Response(true.status, true.data[: len(true.data) // 2])
    response.content_type = true.content_type
    return response


def _other_status(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response:
    where = request.where
    details = {"name": OTHER, "group": where.group, "kind": where.resource, "uid": "uid-of-another"}
    return Response(200, {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
        "details": {key: value for key, value in details.items() if value},
    })  # fmt: skip


def _redirect(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response:
    return Response(rng.choice([301, 302, 303, 307, 308]), b"", {"Location": LOGIN})


def _unauthorized(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response:
    return failure(401, "Unauthorized")


def _gone(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response:
    """A watch may begin with it, too."""
    response = failure(410, "The provided resource version is too old")
    if request.verb == "watch" and rng.random() < 0.5:
        return Response(200, encoded([{"type": "ERROR", "object": response.body}]))
    return response


def _older_list(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response | None:
    """A list that shows an earlier state, as a cache that is behind serves it."""
    where = request.where
    history = store.history[where.resource]
    if true is None or request.verb != "list" or not history or "continue" in request.query:
        return None
    back = rng.randint(1, min(6, len(history)))
    version = history[-back].version - 1
    objects: dict[str, Object] = {}
    for change in history[: len(history) - back]:
        if change.before is not None:
            objects.pop(change.before["metadata"]["name"], None)
        if change.after is not None:
            objects[change.after["metadata"]["name"]] = change.after
    matches, body = selector(where.resource, request.query), true.body
    body["items"] = [obj for _, obj in sorted(objects.items()) if matches(obj)]
    body["metadata"] = {"resourceVersion": str(version)}
    return Response(200, body)


def _missing_pod(request: Request, true: Response | None, store: Store, rng: random.Random) -> Response | None:
    """A list without one of the pods."""
    if true is None or request.verb != "list" or request.where.resource != "pods" or true.status != 200:
        return None
    body = true.body
    if not body["items"]:
        return None
    body["items"].pop(rng.randrange(len(body["items"])))
    return Response(200, body)


@dataclass(frozen=True)
class Lie:
    """A kind of lies.

    :param tell: the answer.
    :param carried_out: whether the request is carried out. None: either, by chance.
    :param undetectable: whether nobody can see that it is one. Such lies never come twice in a row.
    :param once: whether it never comes twice in a row, although it can be detected.
    """

    name: str
    tell: Tell
    carried_out: bool | None = False
    undetectable: bool = False
    once: bool = False


LIES: Sequence[Lie] = (
    Lie("a text 404", _text_404),
    Lie("a 404 of another object", _other_404),
    Lie("a 404 of the namespace", _namespace_404),
    Lie("a 404 of a proxy", _proxy_404),
    Lie("a login page", _page),
    Lie("an empty 200", _empty, None),
    Lie("half a body", _half, True),
    Lie("a Status of another object", _other_status, None),
    Lie("a redirect", _redirect),
    Lie("a 401", _unauthorized, once=True),
    Lie("a 410", _gone),
    Lie("an older list", _older_list, True, True),
    Lie("a list without a pod", _missing_pod, True, True),
)


def kind_of(request: Request) -> str:
    """What a request is for, for example `get pytorchjobs`."""
    where = request.where
    if not where.resource:
        return f"discover {'/'.join(request.path.strip('/').split('/')[:3])}"
    return f"{request.verb} {where.resource}"


def shown(body: Any) -> str:
    """The beginning of a body, for the story."""
    return json.dumps(body)[:160]
