"""Bodies in and out: media types, JSON and YAML, and the forms (Table, metadata only) that an answer may have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from aiohttp import web

from airflow_provider_ktrain.local import protobuf
from airflow_provider_ktrain.local.errors import ApiError

JSON = "application/json"
YAML = "application/yaml"
READ = (JSON, YAML, protobuf.MEDIA)
PRODUCED = {JSON: JSON, YAML: YAML, "*/*": JSON, "application/*": JSON}
SERVED = "application/json, application/yaml, application/vnd.kubernetes.protobuf"
MAX_BODY = 3 * 1024 * 1024  # bytes, as an API server's default
MAX_DEPTH = 200  # levels of nesting; a real one takes 10,000, which nothing that it serves has
MAX_NODES = 1_000_000  # of a YAML document, aliases written out
HEADERS = {"Cache-Control": "no-cache, private"}


@dataclass(frozen=True)
class Form:
    """How an answer is wanted: media type, and `kind` Table, PartialObjectMetadata(List) or "", the object itself."""

    media: str = JSON
    kind: str = ""
    group: str = ""
    version: str = ""


def accepted(accept: str) -> Form:
    """The first form of an Accept header that is served; ApiError 406 where there is none."""
    for part in (accept or "*/*").split(","):
        media, *parameters = (p.strip() for p in part.split(";"))
        options = dict(p.split("=", 1) for p in parameters if "=" in p)
        kind = options.get("as", "")
        known = kind in ("", "Table", "PartialObjectMetadata", "PartialObjectMetadataList", "APIGroupDiscoveryList")
        if media in PRODUCED and known:
            return Form(PRODUCED[media], kind, options.get("g", ""), options.get("v", ""))
    raise ApiError(406, f"only the following media types are accepted: {SERVED}")


def encode(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def answer(
    value: Any, status: int = 200, *, media: str = JSON, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A whole answer: `value` as JSON (or YAML), already encoded where it is bytes."""
    body = value if isinstance(value, bytes) else encode(value) if media == JSON else yaml.safe_dump(value).encode()
    return web.Response(status=status, body=body, headers={**HEADERS, "Content-Type": media, **(headers or {})})


def text(value: str, status: int = 200) -> web.Response:
    return web.Response(
        status=status, text=value, content_type="text/plain", headers={**HEADERS, "X-Content-Type-Options": "nosniff"}
    )


def page_not_found() -> web.Response:
    """What any path that nothing serves answers."""
    return text("404 page not found\n", 404)


async def read_body(request: web.Request) -> bytes:
    """The body; ApiError 413 where it is longer than an API server takes."""
    too_long = ApiError(413, f"Request entity too large: limit is {MAX_BODY}")
    if (request.content_length or 0) > MAX_BODY:
        raise too_long
    body = bytearray()
    async for chunk in request.content.iter_chunked(65536):
        body += chunk
        if len(body) > MAX_BODY:
            raise too_long
    return bytes(body)


class _Loader(yaml.SafeLoader):
    """YAML as Kubernetes reads it (times stay text), noting keys that are given twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: a key is not a scalar")
            if key.value in seen:
                self.duplicates.append(f'line {key.start_mark.line + 1}: key "{key.value}" already set in map')
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def value(self) -> Any:
        """The document as JSON would have it."""
        node = self.get_single_node()
        if node is None:
            return None
        if _expanded(node, {}) > MAX_NODES:
            raise yaml.YAMLError("document contains excessive aliasing")
        try:
            return json.loads(json.dumps(self.construct_document(node), allow_nan=False))
        except TypeError as e:
            raise yaml.YAMLError(str(e)) from None


def _expanded(node: yaml.Node, known: dict[int, float]) -> float:
    """How many nodes a document has when each alias is written out: infinitely many where one contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inside = [n for pair in node.value for n in pair] if isinstance(node, yaml.MappingNode) else node.value
        parts = inside if isinstance(node, yaml.CollectionNode) else ()
        known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load(body: bytes, media: str) -> tuple[Any, list[str]]:
    """The value of a body and what a strict decoder objects to. ValueError says what is wrong with the syntax."""
    if media == protobuf.MEDIA:
        return protobuf.load(body), []
    content = body.decode(errors="replace")
    notes: list[str] = []
    try:
        if media == YAML:
            loader = _Loader(content)
            value = loader.value()
            notes = loader.duplicates
        else:
            value = json.loads(content, object_pairs_hook=lambda pairs: _object(pairs, notes), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("exceeded max depth") from None
    except yaml.YAMLError as e:
        raise ValueError(f"yaml: {' '.join(str(e).split())}") from None
    except json.JSONDecodeError as e:
        raise ValueError(_go_message(content, e)) from None
    if _deeper_than(value, MAX_DEPTH):
        raise ValueError("exceeded max depth")
    return value, notes


def _object(pairs: list[tuple[str, Any]], notes: list[str]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        notes += [f'duplicate field "{name}"' for i, name in enumerate(names) if name in names[:i]]
    return made


def _refuse(constant: str) -> Any:
    raise ValueError(f"invalid character '{constant[0]}' looking for beginning of value")


def _go_message(content: str, e: json.JSONDecodeError) -> str:
    """The message of Go's encoding/json where it is easily told."""
    if e.pos >= len(content.rstrip()):
        return "unexpected end of JSON input"
    where = "object key string" if "property name" in e.msg else "value"
    return f"invalid character {content[e.pos]!r} looking for beginning of {where}"


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child for parent in level if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]  # fmt: skip
        if not level:
            return False
    return True
