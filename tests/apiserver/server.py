"""A scripted API server: the test writes its objects, and decides what happens to requests.

It answers as the recordings of a real cluster show. It has no operator, scheduler or kubelet: scripts act on its store.
What a watch shows and what a read shows are apart: `freeze` keeps events from watches, while reads are up to date.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tests.apiserver.faults import Faults
from tests.apiserver.logs import LogFile, Logs, has_ended
from tests.apiserver.messages import Object, Refused, Request, Response, Where
from tests.apiserver.pages import Pages
from tests.apiserver.resources import (
    BY_PLURAL,
    OPTIONAL_GROUPS,
    RESOURCES,
    Resource,
    group_document,
    groups_document,
    version_document,
)
from tests.apiserver.stamps import stamp
from tests.apiserver.store import NAMESPACE, Store, copied
from tests.apiserver.watches import Watch


class Stream(Protocol):
    """An answer that is sent in pieces."""

    content_type: str

    def pieces(self) -> Any: ...


class LogStream:
    """The answer to a request for a log."""

    content_type = "text/plain"

    def __init__(self, file: LogFile, query: Mapping[str, str]) -> None:
        self._file, self._query = file, query

    def pieces(self) -> Any:
        return self._file.read(self._query)


def allowed(request: Request, obj: Object | None) -> None:
    """An admission that refuses nothing."""


class ApiServer(Faults, Store):
    """The server. Its methods are called in its event loop; only `put`, `change` and `remove` may be called elsewhere.

    :param on_write: called after each create and delete with the method, the resource and the object. Default: nothing.
    :param admit: called before each write with the request and the object as it is (None: a create); raises `Refused`,
        as a webhook does. Default: nothing.
    :ivar requests: method and path with query of each request that has reached the server.
    :ivar queries: of the requests that were processed.
    :ivar verbs: numbers of processed requests by verb: get, list, watch, log, create, update, patch, delete.
    :ivar on_request: called with each of `requests`.
    :ivar has_logs: whether logs are served in-process. False: they are not found.
    :ivar ends_logs: whether a log ends with its container, by the pod's status. Otherwise the test ends it.
    """

    def __init__(
        self,
        on_write: Callable[[str, str, Object], None] = lambda method, resource, obj: None,
        admit: Callable[[Request, Object | None], None] = allowed,
        *,
        namespace: str = NAMESPACE,
    ) -> None:
        Faults.__init__(self)
        Store.__init__(self, namespace)
        self.requests: list[str] = []
        self.queries: list[Mapping[str, str]] = []
        self.verbs: Counter[str] = Counter()
        self.on_request: Callable[[str], None] = lambda line: None
        self.ends_logs = self.has_logs = True
        self.logs = Logs(lambda name: self.pods.get(name))
        self._on_write, self._admit = on_write, admit
        self._pages = Pages(self)

    # what tests ask

    def writes(self) -> list[str]:
        """The requests that have changed something."""
        return [line for line in self.requests if not line.startswith("GET ")]

    def watched(self, resource: str) -> bool:
        """Whether a watch of the resource was requested."""
        return any(f"/{resource}?" in line and "watch=true" in line for line in self.requests)

    # the store

    def put(self, resource: str, obj: Object) -> Object:
        old = self.objects[resource].get(obj["metadata"]["name"])
        put = super().put(resource, obj)
        if resource == "pods" and self.ends_logs:
            if old is not None and old["metadata"]["uid"] != put["metadata"]["uid"]:
                self.logs.end_with(old, gone=True)
            self.logs.end_with(put)
        return put

    def remove(self, resource: str, name: str) -> Object:
        obj = super().remove(resource, name)
        if resource == "pods" and self.ends_logs:
            self.logs.end_with(obj, gone=True)
        return obj

    def log(self, pod: str, container: str = "", restart: int | None = None) -> LogFile:
        """The log of a run; created if it doesn't exist. Default: the present run of the pod's first container."""
        return self.logs.of(pod, container, restart)

    def freeze(self, *resources: str) -> None:
        """Show nothing new in watches of these resources."""
        self.frozen |= set(resources)

    def thaw(self) -> None:
        """Show in all watches what they have missed."""
        self.frozen.clear()
        self.news.tell()

    # requests

    async def handle(self, request: Request) -> Response | Stream:
        """Answer a request, with the faults that the test has set.

        :raises Lost: the request or its answer is lost.
        """
        if not self._hold.match(f"before {request.line}"):  # one that is held is on its way
            self.check_reached(request)
        self.requests.append(request.line)
        self.on_request(request.line)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return Refused(401, "Unauthorized").response
        if (instead := self._replaced(request, None)) is not None:
            return instead
        await self._wait(request, processed=False)
        answer = self.answer(request)
        await self._wait(request, processed=True)
        if isinstance(answer, Response):
            return self._replaced(request, answer) or answer
        return answer

    def answer(self, request: Request) -> Response | Stream:
        """Process a request, without faults."""
        where, document = request.where, self._document(request.path)
        if document is not None:
            return Response(200, document)
        resource = self._resource(where)
        if resource is None:
            return Response(404, b"404 page not found\n")
        self.verbs[request.verb] += 1
        self.queries.append(request.query)
        try:
            return self._process(request, where, resource)
        except Refused as refused:
            return refused.response

    def _process(self, request: Request, where: Where, resource: Resource) -> Response | Stream:
        if request.verb == "watch":
            return Watch(self, where.resource, request.query, self.frozen)
        if request.verb == "list":
            return self._pages.answer(resource, request)
        if request.verb == "create":
            return self._create(request, resource)
        obj = self._found(where, resource)
        if request.verb == "log":
            file = self.logs.requested(where.name, request.query)
            return Response(204) if file is None else LogStream(file, request.query)
        if request.verb == "get":
            if "PartialObjectMetadata" in request.headers.get("Accept", ""):
                return Response(200, _metadata(obj))
            return Response(200, {**obj, "apiVersion": where.api_version})
        if request.verb == "delete":
            return self._delete(request, resource, obj)
        return self._update(request, resource, obj)

    def _found(self, where: Where, resource: Resource) -> Object:
        obj = self.objects[where.resource].get(where.name)
        if obj is None and where.resource == "namespaces" and where.name == self.namespace:
            return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace, "uid": "namespace"}}
        if obj is None or (resource.namespaced and where.namespace != self.namespace):
            raise self._refused(404, resource, where.name, "not found")
        return obj

    @staticmethod
    def _refused(status: int, resource: Resource, name: str, what: str, reason: str = "") -> Refused:
        message = f'{resource.qualified} "{name}" {what}'
        return Refused(status, message, reason, name=name, group=resource.group, kind=resource.plural)

    # discovery

    @property
    def served(self) -> list[Resource]:
        """The resources that the server has. A group such as Kueue's is served if there is one of its objects."""
        return [resource for resource in RESOURCES if self._is_served(resource.group)]

    def _is_served(self, group: str) -> bool:
        return group not in OPTIONAL_GROUPS or any(self.objects[one.plural] for one in RESOURCES if one.group == group)

    def _document(self, path: str) -> Object | None:
        """The discovery document at a path."""
        parts = path.strip("/").split("/")
        if parts == ["version"]:
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.2"}
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        if parts == ["apis"]:
            return groups_document(self.served)
        if parts[0] == "apis" and len(parts) == 2:
            return group_document(parts[1], self.served)
        if parts[0] in ("api", "apis") and len(parts) == (2 if parts[0] == "api" else 3):
            group, version = ["", *parts[1:]][-2:]
            return version_document(group, version, self.served)
        return None

    def _resource(self, where: Where) -> Resource | None:
        known = BY_PLURAL.get(where.resource)
        found = known is not None and known.group == where.group and where.version in known.versions
        return known if found and self._is_served(where.group) else None

    # writes

    def _create(self, request: Request, resource: Resource) -> Response:
        body, where = request.body, request.where
        if resource.plural == "selfsubjectaccessreviews":
            return Response(201, {**body, "status": {"allowed": True}})
        if not isinstance(body, dict) or "metadata" not in body:
            what = f"the object provided is unrecognized (must be of type {resource.kind})"
            raise Refused(400, what)
        if resource.namespaced and where.namespace != self.namespace:
            message = f'namespaces "{where.namespace}" not found'
            raise Refused(404, message, name=where.namespace, kind="namespaces")
        meta = body["metadata"]
        if "name" not in meta and meta.get("generateName"):
            meta["name"] = f"{meta['generateName']}{self.version:05}"
        if meta["name"] in self.objects[resource.plural]:
            raise self._refused(409, resource, meta["name"], "already exists", "AlreadyExists")
        self._admit(request, None)
        if request.query.get("dryRun") == "All":
            return Response(201, {**body, "metadata": {**meta, "uid": "dry-run", "namespace": self.namespace}})
        created = copied(self.put(resource.plural, body))
        self._on_write("POST", resource.plural, created)
        return Response(201, created)

    def _update(self, request: Request, resource: Resource, obj: Object) -> Response:
        if request.method == "PATCH" and "merge-patch" not in request.headers.get("Content-Type", "merge-patch"):
            raise Refused(415, "the body of the request was in an unknown format")
        body = request.body if isinstance(request.body, dict) else {}
        sent = body.get("metadata") or {}
        if sent.get("resourceVersion", obj["metadata"]["resourceVersion"]) != obj["metadata"]["resourceVersion"]:
            what = "the object has been modified; please apply your changes to the latest version and try again"
            message = f'Operation cannot be fulfilled on {resource.qualified} "{request.where.name}": {what}'
            raise Refused(409, message, name=request.where.name, group=resource.group, kind=resource.plural)
        if sent.get("uid", obj["metadata"]["uid"]) != obj["metadata"]["uid"]:
            what = f"metadata.uid: Invalid value: {sent['uid']}: field is immutable"
            message = f'{resource.kind}.{resource.group} "{request.where.name}" is invalid: {what}'
            raise Refused(422, message, name=request.where.name, group=resource.group, kind=resource.kind)
        self._admit(request, obj)
        changed = merged(obj, body) if request.method == "PATCH" else {**copied(obj), **body}
        if request.where.sub == "status":
            changed = {**obj, "status": changed.get("status")}
        elif "status" in obj:
            changed["status"] = obj["status"]
        else:
            changed.pop("status", None)
        if changed == obj:  # keeps its version
            return Response(200, {**obj, "apiVersion": request.where.api_version})
        put = copied(self.put(resource.plural, changed))
        if "deletionTimestamp" in put["metadata"] and not put["metadata"].get("finalizers"):
            self.remove(resource.plural, put["metadata"]["name"])
        return Response(200, {**put, "apiVersion": request.where.api_version})

    def _delete(self, request: Request, resource: Resource, obj: Object) -> Response:
        options = request.body if isinstance(request.body, dict) else {}
        name, meta = obj["metadata"]["name"], obj["metadata"]
        for key, value in (options.get("preconditions") or {}).items():
            if value and meta[key] != value:
                title = {"uid": "UID", "resourceVersion": "ResourceVersion"}[key]
                what = f"the {title} in the precondition ({value}) does not match the {title} in record ({meta[key]})"
                qualified = f"{resource.kind}.{resource.group}".rstrip(".")
                message = f'Operation cannot be fulfilled on {qualified} "{name}": {what}'
                raise Refused(409, message, name=name, group=resource.group, kind=resource.kind)
        self._admit(request, obj)
        return self.carry_out_deletion(resource, obj, options)

    def carry_out_deletion(self, resource: Resource, obj: Object, options: Mapping[str, Any]) -> Response:
        """Carry out a deletion, and answer it. Scripts may do it as their operators would."""
        name, meta, propagation = obj["metadata"]["name"], obj["metadata"], options.get("propagationPolicy")
        if propagation == "Orphan":
            self.release(meta["uid"])
        if meta.get("finalizers") or _terminates(resource, obj, options):
            if "deletionTimestamp" in meta:
                return Response(200, obj)
            return Response(200, self.change(resource.plural, name, lambda one: _mark(one, options)))
        if resource.plural == "pods" or propagation == "Foreground":
            answer = Response(200, self.change(resource.plural, name, lambda one: _mark(one, options)))
        else:
            details = {"name": name, "group": resource.group, "kind": resource.plural, "uid": meta["uid"]}
            success = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
            answer = Response(200, {**success, "details": {key: value for key, value in details.items() if value}})
        if propagation == "Foreground":
            self.collect(meta["uid"])
        self._on_write("DELETE", resource.plural, self.remove(resource.plural, name))
        return answer


def _terminates(resource: Resource, obj: Object, options: Mapping[str, Any]) -> bool:
    """Whether a pod runs on for its grace period after a deletion, until the test removes it."""
    grace = options.get("gracePeriodSeconds", obj.get("spec", {}).get("terminationGracePeriodSeconds", 0))
    placed = bool(obj.get("spec", {}).get("nodeName"))
    return resource.plural == "pods" and placed and bool(grace) and not has_ended(obj)


def _mark(obj: Object, options: Mapping[str, Any]) -> None:
    """Show that an object is being deleted."""
    meta = obj["metadata"]
    grace = options.get("gracePeriodSeconds", obj.get("spec", {}).get("terminationGracePeriodSeconds", 0))
    meta |= {"deletionTimestamp": stamp(-float(grace)), "deletionGracePeriodSeconds": grace}
    if options.get("propagationPolicy") == "Foreground":
        meta["finalizers"] = [*(meta.get("finalizers") or ()), "foregroundDeletion"]


def _metadata(obj: Object) -> Object:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def merged(obj: Object, patch: Object) -> Object:
    """The result of a JSON merge patch."""
    result = copied(obj)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(result.get(key) or {}, value)
        else:
            result[key] = value
    return result
