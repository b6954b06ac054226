"""Bodies in and answers out: media types, sizes, headers, and the form (Table, metadata only) that is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from airflow_provider_ktrain.local.apiserver import protobuf
from airflow_provider_ktrain.local.objects.errors import ApiError

JSON = "application/json"
YAML = "application/yaml"
READ = (JSON, YAML, protobuf.MEDIA)
SERVED = ", ".join(READ)  # as a real server tells it; answers are JSON here
FORMS = ("", "Table", "PartialObjectMetadata", "PartialObjectMetadataList")
MAX_BODY = 3 * 1024 * 1024  # bytes, as an API server's default
HEADERS = {"Cache-Control": "no-cache, private"}


def accepted(request: web.Request) -> str:
    """The form that is asked for, of FORMS; "" is the object itself. ApiError 406 where none is served."""
    for part in (request.headers.get("Accept") or "*/*").split(","):
        media, *parameters = (p.strip() for p in part.split(";"))
        form = dict(p.split("=", 1) for p in parameters if "=" in p).get("as", "")
        if media in (JSON, "*/*", "application/*") and form in FORMS:
            return form
    raise ApiError(406, f"only the following media types are accepted: {SERVED}")


def media_type(content_type: str, accepted: tuple[str, ...] = READ) -> str:
    """The media type of a body; ApiError 415 where it is not among those accepted."""
    media = content_type.partition(";")[0].strip().lower()
    if media not in accepted:
        told = ", ".join(accepted)
        raise ApiError(415, f"the body of the request was in an unknown format - accepted media types include: {told}")
    return media


async def read_body(request: web.Request) -> bytes:
    """The body; ApiError 413 where it is longer than an API server takes."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"Request entity too large: limit is {MAX_BODY}") from None


def encode(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def answer(value: Any, status: int = 200, warnings: Iterable[str] = ()) -> web.Response:
    """A whole answer as JSON; each warning once, as kubectl prints it."""
    response = web.Response(status=status, body=encode(value), content_type=JSON, headers=HEADERS)
    for warning in dict.fromkeys(warnings):
        printable = "".join(c for c in warning.replace("\n", " ") if c.isprintable())
        quoted = printable.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def text(value: str, status: int = 200) -> web.Response:
    """A response in plain text."""
    return web.Response(status=status, text=value, headers=HEADERS)


def page_not_found() -> web.Response:
    """What any path that nothing serves answers."""
    return text("404 page not found\n", 404)
