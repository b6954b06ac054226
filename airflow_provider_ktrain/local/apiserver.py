"""The HTTP face of the embedded cluster: who is let in, which handler a request goes to, errors as Status objects."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from aiohttp import web

from airflow_provider_ktrain.local import decoding, listing, logapi, negotiation, requestinfo, tables, writes
from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.discovery import Discovery
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.faults import Faults
from airflow_provider_ktrain.local.negotiation import Form
from airflow_provider_ktrain.local.rbac import Authenticator, Authorizer, Reviews, User
from airflow_provider_ktrain.local.requestinfo import RequestInfo
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj, Store
from airflow_provider_ktrain.local.watchapi import Watch
from airflow_provider_ktrain.local.writes import Writes, Written

log = logging.getLogger(__name__)

HEALTH = ("healthz", "livez", "readyz")
FAULTS_PATH = "/ktrain/faults"
#: a request for the fault switches, from its body to the answer
FaultSwitch = Callable[[Obj], Awaitable[Obj]]
#: subresources that can be read, and that can be written like the object itself
READABLE, WRITABLE = ("status", "scale"), ("status", "scale")


class ApiServer:
    """Serves a store over HTTP. `app` is the aiohttp application."""

    def __init__(
        self,
        store: Store,
        resources: Iterable[Resource],
        *,
        admin_token: str,
        address: str,
        root: Path,
        faults: Faults,
        switch: FaultSwitch,
    ) -> None:
        """
        :param address: host:port where it is served; requests for another host are refused.
        :param root: directory whose `pods/` holds the logs of containers.
        :param switch: carries out a request to the fault switches.
        """
        self._store = store
        self._resources = {(x.group, x.version, x.plural): x for x in resources}
        self._hosts = {address, f"localhost:{address.rpartition(':')[2]}"}
        self._root = root
        self._faults = faults
        self._switch = switch
        self.authenticator = Authenticator(store, admin_token)
        self._authorizer = Authorizer(store)
        self._reviews = Reviews(self._authorizer)
        self._discovery = Discovery(self._resources.values(), address)
        self._writes = Writes(store)
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:(?s:.*)}", self._handle)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Answer any request: an ApiError as its Status, anything unforeseen as an InternalError."""
        try:
            return await self._admit(request)
        except ApiError as e:
            return _failed(e)
        except ConnectionError:
            return web.Response(status=503)  # nobody is there to read it
        except Exception as e:
            log.exception("%s %s", request.method, request.rel_url)
            return _failed(ApiError(500, f"Internal error occurred: {e!r}", details={"causes": [{"message": repr(e)}]}))

    async def _admit(self, request: web.Request) -> web.StreamResponse:
        """The request, if it comes from a client that may come, and no fault switch has it fail."""
        if request.host not in self._hosts:
            raise ApiError(403, f"Host {request.host!r} is refused: this cluster is for this machine only", details={})
        if "Origin" in request.headers:
            raise ApiError(403, "requests with an Origin are refused: this cluster is not for browsers", details={})
        info = requestinfo.parse(request.method, request.path, request.query)
        if info.path != FAULTS_PATH:
            if self._faults.found("drop", info.verb, info.path):
                _abort(request)
            self._faults.check(info.verb, info.path)
        user = self.authenticator.user(request.headers.get("Authorization"))
        self._authorizer.check(user, info)
        return await (self._resource(request, info, user) if info.plural else self._path(request, info))

    async def _path(self, request: web.Request, info: RequestInfo) -> web.StreamResponse:
        """Paths that name no resource: health, discovery, fault switches."""
        if info.path == FAULTS_PATH and request.method == "POST":
            value, _ = decoding.load_map(await negotiation.read_body(request), negotiation.JSON)
            return negotiation.answer(await self._switch(value))
        if request.method not in ("GET", "HEAD"):
            return negotiation.page_not_found()
        if info.path.strip("/").split("/")[0] in HEALTH:
            return negotiation.text("ok")
        form = negotiation.accepted(request.headers.get("Accept", ""))
        document = self._discovery.document(info.path, form)
        if document is None:
            return negotiation.page_not_found()
        headers = {"Vary": "Accept"}
        if form.kind == "APIGroupDiscoveryList":
            headers["Content-Type"] = f"{form.media};g={form.group};v={form.version};as={form.kind}"
        return negotiation.answer(document, media=form.media, headers=headers)

    async def _resource(self, request: web.Request, info: RequestInfo, user: User) -> web.StreamResponse:
        """Requests about resources."""
        if request.method == "POST" and (info.group, info.version, info.plural) in self._reviews.kinds:
            question, _ = decoding.load_map(await negotiation.read_body(request), _media(request))
            return negotiation.answer(self._reviews.answer(user, info, question), 201)
        resource = info.find(self._resources)
        if resource is None or info.rest or not _scoped(resource, info):
            return negotiation.page_not_found()
        if info.subresource and info.subresource not in (*resource.subresources, "finalize"):
            return negotiation.page_not_found()
        form = negotiation.accepted(request.headers.get("Accept", ""))
        if info.verb == "watch":
            return await self._watch(request, info, resource, form)
        if info.verb == "list":
            return await self._list(request, info, resource, form)
        if info.subresource and info.subresource not in WRITABLE:
            return await self._subresource(request, info, resource)
        if info.verb == "get":
            obj = self._store.get(resource, _namespace(resource, info), info.name)
            return self._shown(
                request, resource, writes.scale_of(resource, obj) if info.subresource == "scale" else obj, form
            )
        body = await negotiation.read_body(request)
        written = self._write(request, info, resource, body)
        return self._shown(request, resource, written.obj, form, written.code, written.warnings)

    def _write(self, request: web.Request, info: RequestInfo, resource: Resource, body: bytes) -> Written:
        namespace = _namespace(resource, info) or ""
        content_type = request.headers.get("Content-Type", negotiation.JSON)
        match info.verb:
            case "create" if not info.subresource:
                if info.name and not resource.custom:
                    raise _not_allowed()
                return self._writes.create(
                    resource, namespace, info.name, body, decoding.media_type(content_type), request.query
                )
            case "update" if info.name or resource.custom:
                media = decoding.media_type(content_type)
                return self._writes.update(resource, namespace, info.name, info.subresource, body, media, request.query)
            case "patch" if info.name:
                return self._writes.patch(
                    resource, namespace, info.name, info.subresource, body, content_type, request.query
                )
            case "delete" if not info.subresource:
                options = writes.delete_options(body, content_type, request.query)
                return self._writes.delete(resource, namespace, info.name, options)
            case "deletecollection" if "deletecollection" in resource.verbs:
                return self._delete_all(
                    request, info, resource, writes.delete_options(body, content_type, request.query)
                )
        raise _not_allowed()

    def _delete_all(
        self, request: web.Request, info: RequestInfo, resource: Resource, options: writes.DeleteOptions
    ) -> Written:
        wanted = listing.options(resource, request.query, watch=False)
        namespace = _namespace(resource, info)
        found = [o for o in self._store.list(resource, namespace) if wanted.selector.matches(o)]
        version = self._store.version
        for obj in found:
            meta = obj["metadata"]
            self._writes.delete(resource, meta.get("namespace", ""), meta["name"], options)
        return Written(listing.wrapped(resource, listing.Page(found, version)))

    async def _list(
        self, request: web.Request, info: RequestInfo, resource: Resource, form: Form
    ) -> web.StreamResponse:
        wanted = listing.options(resource, request.query, watch=False)
        page = await listing.page(self._store, resource, _namespace(resource, info), wanted)
        metadata = page.metadata()
        if form.kind == "Table":
            include = request.query.get("includeObject", "Metadata")
            return negotiation.answer(tables.table(resource, page.items, metadata, include=include), media=form.media)
        if form.kind.startswith("PartialObjectMetadata"):
            items = [tables.partial(o) for o in page.items]
            head = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
            return negotiation.answer({**head, "items": items}, media=form.media)
        return negotiation.answer(listing.wrapped(resource, page), media=form.media)

    async def _watch(
        self, request: web.Request, info: RequestInfo, resource: Resource, form: Form
    ) -> web.StreamResponse:
        wanted = listing.options(resource, request.query, watch=True)
        watch = Watch(
            self._store, resource, _namespace(resource, info), wanted,
            render=_render(resource, form, request.query.get("includeObject", "Metadata")),
            delay=lambda: fault.amount if (fault := self._faults.found("delay_watch", "watch", info.path)) else 0.0,
        )  # fmt: skip
        response = web.StreamResponse(headers=negotiation.HEADERS)
        with contextlib.suppress(ConnectionError):  # a client that goes is how most watches end
            await watch.serve(request, response)
        return response

    def _shown(
        self,
        request: web.Request,
        resource: Resource,
        obj: Obj,
        form: Form,
        code: int = 200,
        warnings: Iterable[str] = (),
    ) -> web.Response:
        if obj["kind"] == resource.kind and form.kind == "Table":
            version = {"resourceVersion": obj["metadata"].get("resourceVersion", "")}
            obj = tables.table(resource, [obj], version, include=request.query.get("includeObject", "Metadata"))
        elif obj["kind"] == resource.kind and form.kind == "PartialObjectMetadata":
            obj = tables.partial(obj)
        return _warned(negotiation.answer(obj, code, media=form.media), warnings)

    async def _subresource(self, request: web.Request, info: RequestInfo, resource: Resource) -> web.StreamResponse:
        """Subresources that are not a view of the object: log, token, eviction."""
        body = await negotiation.read_body(request)
        obj = self._store.get(resource, _namespace(resource, info), info.name)
        match info.subresource, info.verb:
            case "log", "get":
                return await self._log(request, info, obj)
            case "token", "create":
                question, _ = decoding.load_map(body, _media(request)) if body else ({}, [])
                return negotiation.answer(self.authenticator.issue(obj, question), 201)
            case "eviction", "create":
                question, _ = decoding.load_map(body, _media(request)) if body else ({}, [])
                options = writes.delete_options(
                    negotiation.encode(question.get("deleteOptions") or {}), negotiation.JSON, request.query
                )
                self._writes.delete(resource, info.namespace, info.name, options)
                return negotiation.answer(
                    {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}, 201
                )
        raise _not_allowed()

    async def _log(self, request: web.Request, info: RequestInfo, pod: Obj) -> web.StreamResponse:
        wanted = logapi.options(info.name, request.query)
        run = logapi.find_run(self._root, pod, wanted)
        if run is None:
            return web.Response(status=204, headers=negotiation.HEADERS)
        response = web.StreamResponse(headers=negotiation.HEADERS)
        response.content_type = "text/plain"
        response.enable_chunked_encoding()
        fault = self._faults.found("cut_logs", "get", info.path)
        left = int(fault.amount) if fault else sys.maxsize
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            async for data in logapi.read(self._store, run, wanted):
                await response.write(data[:left])
                left -= len(data)
                if left <= 0:
                    _abort(request)
        return response


def _render(resource: Resource, form: Form, include: str) -> Callable[[Obj], bytes] | None:
    """How objects of a watch are shown; a Table has its columns in the first event only."""
    if form.kind == "Table":
        head = iter([True])

        def row(obj: Obj) -> bytes:
            version = {"resourceVersion": obj["metadata"]["resourceVersion"]}
            return negotiation.encode(tables.table(resource, [obj], version, head=next(head, False), include=include))

        return row
    if form.kind.startswith("PartialObjectMetadata"):
        return lambda obj: negotiation.encode(tables.partial(obj))
    return None


def _scoped(resource: Resource, info: RequestInfo) -> bool:
    """Whether the path has a namespace where the resource has one."""
    if resource == r.NAMESPACE:
        return not info.namespace or info.namespace == info.name
    if not resource.namespaced:
        return not info.namespace
    return bool(info.namespace) or (info.verb in ("list", "watch") and not info.subresource)


def _namespace(resource: Resource, info: RequestInfo) -> str | None:
    return (info.namespace or None) if resource.namespaced else None


def _media(request: web.Request) -> str:
    return decoding.media_type(request.headers.get("Content-Type", negotiation.JSON))


def _not_allowed() -> ApiError:
    return ApiError(405, "the server does not allow this method on the requested resource", details={})


def _failed(e: ApiError) -> web.Response:
    retry = (e.details or {}).get("retryAfterSeconds")
    headers = {"Retry-After": str(retry)} if retry else {}
    return _warned(negotiation.answer(e.status(), e.code, headers=headers), e.warnings)


def _warned(response: web.Response, warnings: Iterable[str]) -> web.Response:
    for warning in dict.fromkeys(warnings):
        printable = "".join(c for c in warning.replace("\n", " ") if c.isprintable())
        quoted = printable.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def _abort(request: web.Request) -> None:
    """Cut the connection without a word."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("cut by a fault switch")
