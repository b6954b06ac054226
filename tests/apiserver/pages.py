"""Lists, in pages that show one state."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.apiserver.messages import Object, Refused, Request, Response
from tests.apiserver.resources import Resource
from tests.apiserver.selectors import selector
from tests.apiserver.store import Store

_TOO_OLD = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter."
)
KEPT = 50  #: States of lists whose last page wasn't requested yet, at most.


class Pages:
    """Answers lists. All pages of a list show the state at its first one, until that version expires."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._states: dict[tuple[int, str], list[Object]] = {}  # by version and token of the first page

    def answer(self, resource: Resource, request: Request) -> Response:
        query, store = request.query, self._store
        token = query.get("continue", "")
        version, start = _parsed(token) if token else (store.version, 0)
        if version < store.oldest:
            raise Refused(410, _TOO_OLD)
        key = version, f"{resource.plural} {query.get('labelSelector')} {query.get('fieldSelector')}"
        found = self._states.get(key) if token else None
        if found is None:
            found = self._selected(resource, request)
        limit = max(int(query.get("limit") or 0), 0) or len(found)
        meta: Object = {"resourceVersion": str(version)}
        if start + limit < len(found):
            if key not in self._states:
                self._states[key] = [store.snapshot(obj) for obj in found]
                for old in list(self._states)[:-KEPT]:
                    del self._states[old]
            meta["continue"] = _token(version, start + limit)
            if not {"labelSelector", "fieldSelector"} & query.keys():
                meta["remainingItemCount"] = len(found) - start - limit
        items = found[start : start + limit]
        if not resource.group:  # the items of built-in kinds don't have them
            items = [{key: value for key, value in obj.items() if key not in ("apiVersion", "kind")} for obj in items]
        head = {
            "kind": f"{resource.kind}List",
            "apiVersion": request.where.api_version,
        }
        return Response(200, {**head, "metadata": meta, "items": items})

    def _selected(self, resource: Resource, request: Request) -> list[Object]:
        matches, where = selector(resource.plural, request.query), request.where
        if where.namespace not in ("", self._store.namespace):
            return []
        return [obj for _, obj in sorted(self._store.objects[resource.plural].items()) if matches(obj)]


def _token(version: int, start: int) -> str:
    return base64.urlsafe_b64encode(
        json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start}).encode()
    ).decode()


def _parsed(token: str) -> tuple[int, int]:
    try:
        found: Any = json.loads(base64.urlsafe_b64decode(token))
        return int(found["rv"]), int(found["start"])
    except (ValueError, KeyError, TypeError):
        raise Refused(400, "invalid continue token: continue key is not valid") from None
