"""Lists: options of the query string, and consistent pages with continue tokens."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ktrain_embedded.apiserver.requestinfo import flag, integer
from ktrain_embedded.objects import selectors
from ktrain_embedded.objects.errors import ApiError, Problem, invalid, unsupported
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.selectors import EVERYTHING, Selector
from ktrain_embedded.objects.store import Obj, Store

FUTURE_WAIT, CHECK_INTERVAL = 3.0, 0.05  # seconds that a list waits for a future resource version, and between checks


@dataclass(frozen=True)
class ListOptions:
    """Options of a list or watch. `version` is None if it isn't set. Times are in seconds."""

    selector: Selector = EVERYTHING
    version: int | None = None
    match: str = ""
    limit: int = 0
    continue_: str = ""
    timeout: int | None = None
    bookmarks: bool = False
    initial_events: bool | None = None


def options(resource: Resource, query: Mapping[str, str], *, watch: bool) -> ListOptions:
    """Return the ListOptions of a query.

    :raises ApiError: 400 or 422 with the API server's message if an option is invalid; 500 if the resourceVersion of
        a watch is not a number.
    """
    version = _version(query.get("resourceVersion", ""), watch)
    match = query.get("resourceVersionMatch", "")
    initial = flag(query, "sendInitialEvents") if "sendInitialEvents" in query else None
    problems = list(_problems(version, match, initial, watch=watch))
    if problems:
        raise invalid("ListOptions", problems)
    return ListOptions(
        selectors.parse(resource, query.get("labelSelector", ""), query.get("fieldSelector", "")),
        version, match, integer(query, "limit") or 0, query.get("continue", ""), integer(query, "timeoutSeconds"),
        flag(query, "allowWatchBookmarks"), initial,
    )  # fmt: skip


def _version(text: str, watch: bool) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        why = f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
        raise ApiError(500, why, "") if watch else ApiError(400, f"invalid resource version: {why}")
    return int(text)


def _problems(version: int | None, match: str, initial: bool | None, *, watch: bool) -> Iterator[Problem]:
    supported = ("NotOlderThan",) if watch else ("Exact", "NotOlderThan")
    forbidden = ""
    if watch and initial is not None and match != "NotOlderThan":
        forbidden = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
    elif watch and initial is None and match:
        forbidden = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
    elif not watch and match and version is None:
        forbidden = "resourceVersionMatch is forbidden unless resourceVersion is provided"
    elif not watch and match == "Exact" and version == 0:
        forbidden = 'resourceVersionMatch "exact" is forbidden for resourceVersion "0"'
    if forbidden:
        yield "FieldValueForbidden", f"Forbidden: {forbidden}", "resourceVersionMatch"
    if match and match not in supported:
        yield unsupported("resourceVersionMatch", match, supported)


async def page(store: Store, resource: Resource, namespace: str | None, options: ListOptions) -> tuple[list[Obj], Obj]:
    """Return the objects and the metadata of a page of a list.

    :raises ApiError: 400 if the continue token is invalid, 410 if the token or the version has expired, 504 if the
        store doesn't reach a future version in time.
    """
    version, start = _place(store, options)
    if version > store.version:
        await _reached(store, version)
    exact = bool(version) and (bool(options.continue_) or options.match == "Exact")
    if exact and version < store.oldest:
        raise _expired(start) if start else ApiError(410, "The resourceVersion for the provided list is too old.")
    objects = store.list_at(resource, namespace, version) if exact else store.list(resource, namespace)
    found = [o for o in objects if options.selector.matches(o) and (not start or _key(o) >= start)]
    metadata: Obj = {"resourceVersion": str(version if exact else store.version)}
    if 0 < options.limit < len(found):
        metadata["continue"] = _token(int(metadata["resourceVersion"]), _key(found[options.limit - 1]) + "\0")
        if not options.selector:  # the API server omits the remaining count if there is a selector
            metadata["remainingItemCount"] = len(found) - options.limit
        found = found[: options.limit]
    return found, metadata


def _place(store: Store, options: ListOptions) -> tuple[int, str]:
    """Return the version to list at (0 is any version) and the key to continue from."""
    if not options.continue_:
        return options.version or 0, ""
    if options.version is not None:
        raise ApiError(400, "specifying resource version is not allowed when using continue")
    try:
        token = json.loads(base64.urlsafe_b64decode(options.continue_ + "=" * (-len(options.continue_) % 4)))
        version, start = int(token["rv"]), str(token["start"])
    except (ValueError, TypeError, KeyError):
        raise ApiError(400, "invalid continue token: continue key is not valid") from None
    return (store.version if version < 0 else version), start.removeprefix("/")


def _token(version: int, start: str) -> str:
    data = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start}, separators=(",", ":"))
    return base64.urlsafe_b64encode(data.encode()).decode().rstrip("=")


def _expired(start: str) -> ApiError:
    """Return the error 410 with a token that continues from the same key at the latest version."""
    return ApiError(
        410,
        "The provided continue parameter is too old to display a consistent list result. You can start a new list "
        "without the continue parameter, or use the continue token in this response to retrieve the remainder of the "
        "results. Continuing with the provided token results in an inconsistent list - objects that were created, "
        "modified, or deleted between the time the first chunk was returned and now may show up in the list.",
        metadata={"continue": _token(-1, start)},
    )


async def _reached(store: Store, version: int) -> None:
    """Wait until the store reaches `version`. Raise ApiError 504 after FUTURE_WAIT seconds."""
    for _ in range(int(FUTURE_WAIT / CHECK_INTERVAL)):
        if store.version >= version:
            return
        await asyncio.sleep(CHECK_INTERVAL)
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    raise ApiError(
        504,
        f"Timeout: Too large resource version: {version}, current: {store.version}",
        details={"causes": [cause], "retryAfterSeconds": 1},
    )


def _key(obj: Obj) -> str:
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}" if meta.get("namespace") else str(meta["name"])
