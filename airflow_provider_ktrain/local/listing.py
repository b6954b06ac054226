"""Lists: options of the query string, consistent pages by continue token, and how a list is wrapped."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from airflow_provider_ktrain.local import selectors
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.requestinfo import flag
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.selectors import EVERYTHING, Selector
from airflow_provider_ktrain.local.store import Obj, Store

FUTURE_WAIT = 3.0  # seconds that a list waits for a resource version that is not there yet


@dataclass(frozen=True)
class ListOptions:
    """Options of a list or watch. Versions are None where not given; times are seconds."""

    selector: Selector = EVERYTHING
    version: int | None = None
    match: str = ""
    limit: int = 0
    continue_: str = ""
    timeout: int | None = None
    bookmarks: bool = False
    initial_events: bool | None = None


def options(resource: Resource, query: Mapping[str, str], *, watch: bool) -> ListOptions:
    """The ListOptions of a query; ApiError 400, 422 (or 500: a watch from no number) as the API server refuses them."""
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


def invalid(kind: str, problems: list[tuple[str, str, str]], name: str = "", group: str = "meta.k8s.io") -> ApiError:
    """422 for options or an object: `problems` are (reason, message, field) as causes of a Status name them."""
    told = list(dict.fromkeys(f"{field}: {message}" for _, message, field in problems))
    return ApiError(
        422,
        f'{kind}{"." if group else ""}{group} "{name}" is invalid: '
        + (told[0] if len(told) == 1 else f"[{', '.join(told)}]"),
        details={
            **({"name": name} if name else {}),
            **({"group": group} if group else {}),
            "kind": kind,
            "causes": [{"reason": reason, "message": message, "field": field} for reason, message, field in problems],
        },
    )


def integer(query: Mapping[str, str], name: str) -> int | None:
    """An integer of the query; ApiError 400 where it is none."""
    value = query.get(name, "")
    if not value:
        return None
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", value):
        why = "value out of range" if re.fullmatch(r"[+-]?[0-9]+", value) else "invalid syntax"
        raise ApiError(400, f'strconv.ParseInt: parsing "{value}": {why}')
    return int(value)


def _version(text: str, watch: bool) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        why = f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
        raise ApiError(500, why, "") if watch else ApiError(400, f"invalid resource version: {why}")
    return int(text)


def _problems(version: int | None, match: str, initial: bool | None, *, watch: bool) -> Iterator[tuple[str, str, str]]:
    field = "resourceVersionMatch"

    def forbidden(why: str) -> tuple[str, str, str]:
        return "FieldValueForbidden", f"Forbidden: {why}", field

    if initial is not None:
        if not watch:
            yield "FieldValueForbidden", "Forbidden: sendInitialEvents is forbidden for list", "sendInitialEvents"
        elif match != "NotOlderThan":
            yield forbidden("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan")
    elif match:
        if watch:
            yield forbidden("resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided")
        elif version is None:
            yield forbidden("resourceVersionMatch is forbidden unless resourceVersion is provided")
        elif match == "Exact" and version == 0:
            yield forbidden('resourceVersionMatch "exact" is forbidden for resourceVersion "0"')
    supported = ("NotOlderThan",) if watch else ("Exact", "NotOlderThan")
    if match and match not in supported:
        names = ", ".join(f'"{s}"' for s in supported)
        yield "FieldValueNotSupported", f'Unsupported value: "{match}": supported values: {names}', field


@dataclass(frozen=True)
class Page:
    """The objects of one answer to a list."""

    items: list[Obj]
    version: int
    continue_: str = ""
    remaining: int = 0

    def metadata(self, *, whole: bool = False) -> Obj:
        """The list's metadata; with `whole`, continue is there though it is empty, as in lists of custom resources."""
        meta: Obj = {"continue": self.continue_} if whole or self.continue_ else {}
        return {
            **meta,
            **({"remainingItemCount": self.remaining} if self.remaining else {}),
            "resourceVersion": str(self.version),
        }


async def page(store: Store, resource: Resource, namespace: str | None, wanted: ListOptions) -> Page:
    """The page of a list that the options ask for. ApiError 400, 410 for the token, 504 for a version of the future."""
    version, start = _place(store, wanted)
    if version is not None and version > store.version:
        await _reached(store, version)
    exact = version is not None and (bool(wanted.continue_) or wanted.match == "Exact")
    if exact and version is not None and version < store.oldest:
        raise (
            _expired(start)
            if wanted.continue_
            else ApiError(410, "The resourceVersion for the provided list is too old.")
        )
    objects = store.list_at(resource, namespace, version) if exact and version else store.list(resource, namespace)
    at = version if exact and version is not None else store.version
    found = [o for o in objects if _key(o) >= start and wanted.selector.matches(o)] if start else [
        o for o in objects if wanted.selector.matches(o)
    ]  # fmt: skip
    if wanted.limit <= 0 or len(found) <= wanted.limit:
        return Page(found, at)
    head = found[: wanted.limit]
    # selectors hide how many are left
    remaining = 0 if wanted.selector else len(found) - wanted.limit
    return Page(head, at, _token(at, _key(head[-1]) + "\0"), remaining)


def wrapped(resource: Resource, found: Page) -> Obj:
    """The List object of a page. Only items of custom resources say their kind."""
    head = {
        "kind": f"{resource.kind}List",
        "apiVersion": resource.api_version,
        "metadata": found.metadata(whole=resource.custom),
    }
    if resource.custom:
        return {**head, "items": found.items}
    return {**head, "items": [{k: v for k, v in o.items() if k not in ("kind", "apiVersion")} for o in found.items]}


def _place(store: Store, wanted: ListOptions) -> tuple[int | None, str]:
    """The version to list at and the key to go on from."""
    if not wanted.continue_:
        return wanted.version, ""
    if wanted.version is not None:
        raise ApiError(400, "specifying resource version is not allowed when using continue")
    try:
        token = json.loads(base64.urlsafe_b64decode(wanted.continue_ + "=" * (-len(wanted.continue_) % 4)))
        version, start = int(token["rv"]), str(token["start"])
    except (ValueError, TypeError, KeyError, binascii.Error):
        raise ApiError(400, "invalid continue token: continue key is not valid") from None
    return (store.version if version < 0 else version), start.removeprefix("/")


def _token(version: int, start: str) -> str:
    data = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start}, separators=(",", ":"))
    return base64.urlsafe_b64encode(data.encode()).decode().rstrip("=")


def _expired(start: str) -> ApiError:
    """410 with a token that goes on from the same place in the present state."""
    return ApiError(
        410,
        "The provided continue parameter is too old to display a consistent list result. You can start a new list "
        "without the continue parameter, or use the continue token in this response to retrieve the remainder of the "
        "results. "
        "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
        "deleted between the time the first chunk was returned and now may show up in the list.",
        metadata={"continue": _token(-1, start)},
    )


async def _reached(store: Store, version: int) -> None:
    """Wait until the store has come to `version`; ApiError 504 after some seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + FUTURE_WAIT
    while store.version < version:
        if loop.time() > until:
            raise ApiError(
                504,
                f"Timeout: Too large resource version: {version}, current: {store.version}",
                details={
                    "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
                    "retryAfterSeconds": 1,
                },
            )
        await asyncio.sleep(0.05)


def _key(obj: Obj) -> str:
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}" if meta.get("namespace") else str(meta["name"])
