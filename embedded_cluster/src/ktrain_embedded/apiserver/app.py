"""The HTTP server of the embedded cluster: access control, routing to handlers, and errors as Status objects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from aiohttp import web

from ktrain_embedded.apiserver import (
    decoding,
    discovery,
    execapi,
    listing,
    logapi,
    negotiation,
    requestinfo,
    writes,
)
from ktrain_embedded.apiserver.faults import Faults
from ktrain_embedded.apiserver.rbac import Authenticator, Authorizer, Reviews, User
from ktrain_embedded.apiserver.requestinfo import RequestInfo
from ktrain_embedded.apiserver.tables import View
from ktrain_embedded.apiserver.watchapi import Watch
from ktrain_embedded.apiserver.writes import Write, Writes
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Store

log = logging.getLogger(__name__)

HEALTH = ("/healthz", "/livez", "/readyz")
FAULTS_PATH = "/ktrain/faults"
#: Handles a request to the fault switches: takes its body and its connection, returns the response body.
FaultSwitch = Callable[[Obj, asyncio.Transport | None], Awaitable[Obj]]
VIEWS = ("", "status", "scale")  # subresources with the read and write verbs of the object


class ApiServer:
    """Serve a store over HTTP. `app` is the aiohttp application."""

    def __init__(
        self, store: Store, resources: Iterable[Resource], *, admin_token: str, address: str, root: Path,
        faults: Faults, switch: FaultSwitch,
    ) -> None:  # fmt: skip
        """
        :param address: host:port of the server. Requests with another Host header get a 403 error.
        :param root: directory whose subdirectory `pods/` contains the container logs.
        :param switch: handles a request to the fault switches.
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
        reviews = (resource for resource, _ in self._reviews.kinds.values())
        self._discovery = discovery.documents((*self._resources.values(), *reviews), address)
        self._writes = Writes(store, kueue=r.WORKLOAD in self._resources.values())
        self.app = web.Application(client_max_size=negotiation.MAX_BODY)
        self.app.router.add_route("*", "/{path:(?s:.*)}", self._handle)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Handle a request. Return an ApiError as its Status, and any other exception as an InternalError."""
        try:
            return await self._admit(request)
        except ApiError as e:
            return _failed(e)
        except ConnectionError:
            return web.Response(status=503)  # the client has disconnected
        except Exception as e:
            log.exception("%s %s", request.method, request.rel_url)
            return _failed(ApiError(500, f"Internal error occurred: {e!r}", details={"causes": [{"message": repr(e)}]}))

    async def _admit(self, request: web.Request) -> web.StreamResponse:
        """Check the Host and Origin headers, the fault switches and the user's permissions, then route the request."""
        if request.host not in self._hosts:
            raise ApiError(403, f"Host {request.host!r} is refused: this cluster is for this machine only", details={})
        origin = request.headers.get("Origin")
        if origin is not None and origin.removeprefix("https://") not in self._hosts:  # WebSocket clients send ours
            raise ApiError(403, "requests with an Origin are refused: this cluster is not for browsers", details={})
        info = requestinfo.parse(request.method, request.path, request.query)
        if info.path != FAULTS_PATH:
            if self._faults.found("drop", info.verb, info.path):
                _abort(request)
            self._faults.check(info.verb, info.path)
        certificate = request.get_extra_info("peercert")
        user = self.authenticator.user(request.headers.get("Authorization"), certificate)
        self._authorizer.check(user, info)
        return await (self._resource(request, info, user) if info.plural else self._path(request, info))

    async def _path(self, request: web.Request, info: RequestInfo) -> web.StreamResponse:
        """Handle requests to non-resource paths: health, discovery, fault switches."""
        if info.path == FAULTS_PATH and info.verb == "create":
            return negotiation.answer(await self._switch(await _map(request), request.transport))
        path = f"/{info.path.strip('/')}"
        if info.verb == "get" and path in HEALTH:
            return negotiation.text("ok")
        if info.verb == "get" and path in self._discovery:
            return negotiation.answer(self._discovery[path])
        return negotiation.page_not_found()

    async def _resource(self, request: web.Request, info: RequestInfo, user: User) -> web.StreamResponse:
        """Handle requests to resources."""
        served = (info.group, info.version, info.plural)
        if info.verb == "create" and served in self._reviews.kinds:
            return negotiation.answer(self._reviews.answer(user, info, await _map(request)), 201)
        resource = self._resources.get(served)
        if resource is None or info.rest or not _scoped(resource, info):
            return negotiation.page_not_found()
        if resource == r.POD and info.subresource in execapi.UNSUPPORTED:
            raise ApiError(400, execapi.UNSUPPORTED[info.subresource])
        if info.subresource and info.subresource not in resource.subresources:
            return negotiation.page_not_found()
        view = View(resource, negotiation.accepted(request), request.query.get("includeObject") == "Object")
        namespace = (info.namespace or None) if resource.namespaced else None
        match info.verb, info.subresource:
            case "watch", _:
                return await self._watch(request, info, view, namespace)
            case "list", _:
                options = listing.options(resource, request.query, watch=False)
                return negotiation.answer(view.all(*await listing.page(self._store, resource, namespace, options)))
            case "get", "log":
                return await self._log(request, info, self._store.get(resource, namespace, info.name))
            case (("get" | "create"), "exec"):
                return await execapi.run(request, self._root, self._store.get(resource, namespace, info.name))
            case "create", "token":
                question = await _map(request)
                account = self._store.get(resource, namespace, info.name)
                return negotiation.answer(self.authenticator.issue(account, question), 201)
            case "get", subresource if subresource in VIEWS:
                obj = self._store.get(resource, namespace, info.name)
                return negotiation.answer(view.one(writes.scale_of(obj) if subresource == "scale" else obj))
        content_type = request.headers.get("Content-Type", negotiation.JSON)
        body = await negotiation.read_body(request)
        written = self._writes.write(Write(info, resource, namespace or "", request.query, content_type, body))
        return negotiation.answer(view.one(written.obj), written.code, written.warnings)

    async def _watch(
        self, request: web.Request, info: RequestInfo, view: View, namespace: str | None
    ) -> web.StreamResponse:
        def delay() -> float:
            fault = self._faults.found("delay_watch", "watch", info.path)
            return fault.amount if fault else 0.0

        options = listing.options(view.resource, request.query, watch=True)
        watch = Watch(self._store, view, namespace, options, delay)
        response = web.StreamResponse(headers=negotiation.HEADERS)
        with contextlib.suppress(ConnectionError):  # most watches end when the client disconnects
            await watch.serve(request, response)
        return response

    async def _log(self, request: web.Request, info: RequestInfo, pod: Obj) -> web.StreamResponse:
        options = logapi.options(info.name, request.query)
        run = logapi.find_run(self._root, pod, options)
        if run is None:
            return web.Response(status=204, headers=negotiation.HEADERS)
        response = web.StreamResponse(headers=negotiation.HEADERS)
        response.content_type = "text/plain"
        response.enable_chunked_encoding()
        fault = self._faults.found("cut_logs", "get", info.path)
        left = int(fault.amount) if fault else sys.maxsize
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            async for data in logapi.read(self._store, run, options):
                await response.write(data[:left])
                left -= len(data)
                if left <= 0:
                    _abort(request)
        return response


def _scoped(resource: Resource, info: RequestInfo) -> bool:
    """Whether the scope of the path, a namespace or the whole cluster, is valid for the resource."""
    if resource == r.NAMESPACE:
        return not info.namespace or info.namespace == info.name
    if not resource.namespaced:
        return not info.namespace
    return bool(info.namespace) or (info.verb in ("list", "watch") and not info.subresource)


async def _map(request: web.Request) -> Obj:
    """Return the body of a request whose kind is not a stored resource, {} if the body is empty."""
    body = await negotiation.read_body(request)
    media = negotiation.media_type(request.headers.get("Content-Type", negotiation.JSON))
    return decoding.load_map(body, media) if body else {}


def _failed(e: ApiError) -> web.Response:
    response = negotiation.answer(e.status(), e.code, e.warnings)
    if retry := (e.details or {}).get("retryAfterSeconds"):
        response.headers["Retry-After"] = str(retry)
    return response


def _abort(request: web.Request) -> None:
    """Abort the connection without a response."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("cut by a fault switch")
