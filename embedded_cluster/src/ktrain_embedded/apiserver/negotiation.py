"""Content negotiation: media types, body sizes, headers, and the requested form (Table, metadata only)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from ktrain_embedded.apiserver import protobuf
from ktrain_embedded.objects.errors import ApiError

JSON = "application/json"
YAML = "application/yaml"
READ = (JSON, YAML, protobuf.MEDIA)
SERVED = ", ".join(READ)  # the list in a real server's error message. Responses are always JSON here.
FORMS = ("", "Table", "PartialObjectMetadata", "PartialObjectMetadataList")
MAX_BODY = 3 * 1024 * 1024  # bytes: the default of the API server
HEADERS = {"Cache-Control": "no-cache, private"}


def accepted(request: web.Request) -> str:
    """Return the requested form, one of FORMS; "" is the object itself. Raise ApiError 406 if it isn't supported."""
    for part in (request.headers.get("Accept") or "*/*").split(","):
        media, *parameters = (p.strip() for p in part.split(";"))
        form = dict(p.split("=", 1) for p in parameters if "=" in p).get("as", "")
        if media in (JSON, "*/*", "application/*") and form in FORMS:
            return form
    raise ApiError(406, f"only the following media types are accepted: {SERVED}")


def media_type(content_type: str, accepted: tuple[str, ...] = READ) -> str:
    """Return the media type of a body. Raise ApiError 415 if it is not in `accepted`."""
    media = content_type.partition(";")[0].strip().lower()
    if media not in accepted:
        media_types = ", ".join(accepted)
        raise ApiError(
            415, f"the body of the request was in an unknown format - accepted media types include: {media_types}"
        )
    return media


async def read_body(request: web.Request) -> bytes:
    """Read the body. Raise ApiError 413 if it is larger than the API server's limit."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"Request entity too large: limit is {MAX_BODY}") from None


def encode(value: Any) -> bytes:
    """Encode a value as compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def answer(value: Any, status: int = 200, warnings: Iterable[str] = ()) -> web.Response:
    """Return a JSON response. Each distinct warning is sent once, in a header that kubectl prints."""
    response = web.Response(status=status, body=encode(value), content_type=JSON, headers=HEADERS)
    for warning in dict.fromkeys(warnings):
        printable = "".join(c for c in warning.replace("\n", " ") if c.isprintable())
        quoted = printable.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def text(value: str, status: int = 200) -> web.Response:
    """Return a plain text response."""
    return web.Response(status=status, text=value, headers=HEADERS)


def page_not_found() -> web.Response:
    """Return the response for an unknown path."""
    return text("404 page not found\n", 404)
