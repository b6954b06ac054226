"""Create, update, patch and delete: process the body of a request and write the object to the store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ktrain_embedded.apiserver import admission, decoding, listing, negotiation
from ktrain_embedded.apiserver.requestinfo import RequestInfo, integer
from ktrain_embedded.apiserver.tables import View
from ktrain_embedded.objects import disruptions, kueue, patch, schema
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError, invalid, unsupported, wrong
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Store, at, conflict, details

POLICIES = ("Foreground", "Background", "Orphan")
#: Fields of DeleteOptions and their types.
DELETE_OPTIONS = {
    "gracePeriodSeconds": int, "propagationPolicy": str, "orphanDependents": bool, "preconditions": dict,
    "preconditions.uid": str, "preconditions.resourceVersion": str,
}  # fmt: skip
RETURNS_DELETED = (r.POD, r.SERVICE, r.SERVICE_ACCOUNT)  # a delete of other resources returns a Status


@dataclass(frozen=True)
class Write:
    """A write request with its body. `namespace` is "" for cluster-scoped resources."""

    info: RequestInfo
    resource: Resource
    namespace: str
    query: Mapping[str, str]
    content_type: str
    body: bytes

    @property
    def dry_run(self) -> bool:
        """Whether the request has `dryRun=All`: the object is validated but not stored."""
        return bool(self.query.get("dryRun"))


@dataclass(frozen=True)
class Written:
    """The response to a write: the object, the HTTP status code, and warnings for the client."""

    obj: Obj
    code: int = 200
    warnings: tuple[str, ...] = ()


class Writes:
    """Handle the write verbs for a store.

    :param kueue: whether Kueue's webhooks are installed.
    """

    def __init__(self, store: Store, *, kueue: bool = False) -> None:
        self._store = store
        self._kueue = kueue

    def write(self, request: Write) -> Written:
        """Handle a write request. Raise ApiError if it fails: 405 if the path doesn't support the verb."""
        info, resource = request.info, request.resource
        match info.verb:
            case "create" if info.subresource == "eviction":
                return self._evict(request)
            case "create" if not info.subresource and (resource.custom or not info.name):
                return self._create(request)
            case "update" if info.name or resource.custom:
                return self._update(request)
            case "patch" if info.name:
                return self._patch(request)
            case "delete" if not info.subresource:
                return self._delete(resource, request.namespace, info.name, delete_options(request))
            case "deletecollection" if info.verb in resource.verbs:
                return self._delete_all(request)
        raise ApiError(405, "the server does not allow this method on the requested resource", details={})

    def _create(self, request: Write) -> Written:
        resource, namespace = request.resource, request.namespace
        validation = decoding.options("CreateOptions", request.query)
        media = negotiation.media_type(request.content_type)
        obj, warnings = decoding.decode(resource, request.body, media, validation)
        with _add_warnings(warnings):
            meta = _place(request, obj)
            if request.info.name:
                meta.setdefault("name", request.info.name)
            if meta.get("resourceVersion"):
                raise ApiError(500, "resourceVersion should not be set on objects to be created", "")
            admission.namespace_open(self._store, resource, namespace, meta.get("name", ""))
            warnings += self._admit(resource, obj, None)
            made = self._store.create(resource, obj, dry_run=request.dry_run)
        return Written(made, 201, tuple(warnings))

    def _evict(self, request: Write) -> Written:
        name = request.info.name
        eviction = decoding.load_map(request.body, negotiation.media_type(request.content_type))
        named = at(eviction, "metadata.name")
        if named not in (None, name):
            raise ApiError(400, f"name in URL does not match name in Eviction object: {named} != {name}")
        pod, options = self._store.get(r.POD, request.namespace, name), at(eviction, "deleteOptions", {})
        disruptions.evict(self._store, pod, options, dry_run=request.dry_run or bool(options.get("dryRun")))
        return Written({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}, 201)

    def _update(self, request: Write) -> Written:
        resource, name = request.resource, request.info.name
        media = negotiation.media_type(request.content_type)
        validation = decoding.options("UpdateOptions", request.query)
        if not name:
            raise ApiError(400, "name must be provided")
        if request.info.subresource == "scale":
            return self._scale(request, decoding.load_map(request.body, media))
        obj, warnings = decoding.decode(resource, request.body, media, validation)
        meta = _place(request, obj)
        if meta.setdefault("name", name) != name:
            raise ApiError(400, f"the name of the object ({meta['name']}) does not match the name on the URL ({name})")
        old = self._store.get(resource, request.namespace, name)
        if not meta.get("resourceVersion") and (resource.custom or resource in (r.LEASE, r.CRD)):
            why = "Invalid value: 0: must be specified for an update"
            problem = ("FieldValueInvalid", why, "metadata.resourceVersion")
            raise invalid(resource.plural, [problem], name=name, group=resource.group)
        return self._replace(request, old, obj, warnings)

    def _patch(self, request: Write) -> Written:
        resource, name = request.resource, request.info.name
        media = negotiation.media_type(request.content_type, patch.media_types(resource))
        validation = decoding.options("PatchOptions", request.query)
        try:
            changes, _ = decoding.load(request.body)
        except ValueError as e:
            raise ApiError(400, f"error decoding patch: {e}") from None
        old = self._store.get(resource, request.namespace, name)
        if request.info.subresource == "scale":
            return self._scale(request, patch.apply(media, scale_of(old), changes))
        patched = patch.apply(media, old, changes)
        meta = patched.get("metadata")
        if not isinstance(meta, dict):
            problem = ("FieldValueRequired", "Required value", "metadata")
            raise invalid(resource.kind, [problem], name=name, group=resource.group)
        if meta.get("name") != name or meta.get("namespace", "") != request.namespace:
            why = f"the name of the object ({meta.get('name')}) does not match the name on the URL ({name})"
            raise ApiError(400, why)
        obj, notes = schema.decode(resource, patched)
        if notes and validation == "Strict":
            value = json.dumps(json.dumps(patched, separators=(",", ":"), ensure_ascii=False), ensure_ascii=False)
            why = f"Invalid value: {value}: strict decoding error: {', '.join(notes)}"
            raise invalid("", [("FieldValueInvalid", why, "patch")], group="")
        return self._replace(request, old, obj, [] if validation == "Ignore" else notes)

    def _replace(self, request: Write, old: Obj, obj: Obj, warnings: list[str]) -> Written:
        resource, status = request.resource, request.info.subresource == "status"
        version = obj["metadata"].get("resourceVersion")
        with _add_warnings(warnings):
            if version and version != old["metadata"]["resourceVersion"]:
                raise conflict(resource, old["metadata"]["name"])
            if status:  # only the status of the sent object is used
                obj = {**old, "status": obj.get("status", {})}
            warnings = [*warnings, *self._admit(resource, obj, old, status=status)]
            updated = self._store.update(resource, obj, status=status, dry_run=request.dry_run)
        return Written(updated, 200, tuple(warnings))

    def _admit(self, resource: Resource, obj: Obj, old: Obj | None, *, status: bool = False) -> list[str]:
        """Call the webhooks and validate the object. Return warnings for the client. Raise ApiError 403 or 422."""
        if not status:
            admission.complete(resource, obj, old)
        if self._kueue and not status:
            kueue.complete(resource, obj, old)
            kueue.validate(resource, obj, old)
        return admission.validate(self._store, resource, obj, old)

    def _scale(self, request: Write, scale: Obj) -> Written:
        resource, name = request.resource, request.info.name
        old = self._store.get(resource, request.namespace, name)
        scale_of(old)
        replicas = at(scale, "spec.replicas", 0)
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            why = f"Invalid value: {replicas}: must be greater than or equal to 0"
            raise invalid("Scale", [("FieldValueInvalid", why, "spec.replicas")], name=name, group="autoscaling")
        version = at(scale, "metadata.resourceVersion") or old["metadata"]["resourceVersion"]
        change = {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": replicas}}}}
        new = patch.merge(old, {**change, "metadata": {"resourceVersion": version}})
        return Written(scale_of(self._replace(request, old, new, []).obj))

    def _delete(self, resource: Resource, namespace: str, name: str, options: Obj) -> Written:
        """Delete an object, or start its deletion, according to the DeleteOptions."""
        obj = self._store.get(resource, namespace, name)
        kept = at(obj, "metadata.finalizers", ())
        policy = "Foreground" if "foregroundDeletion" in kept else "Orphan" if "orphan" in kept else "Background"
        if not options.get("dryRun"):
            obj = self._store.delete(
                resource, namespace, name,
                grace=options.get("gracePeriodSeconds"), propagation=options.get("propagationPolicy") or policy,
                uid=at(options, "preconditions.uid"), version=at(options, "preconditions.resourceVersion"),
            )  # fmt: skip
            if self._store.find(resource, namespace, name) is not None:
                return Written(obj)
        if resource in RETURNS_DELETED:
            return Written(obj)
        about = {**details(resource, name), "uid": obj["metadata"]["uid"]}
        return Written({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": about})

    def _delete_all(self, request: Write) -> Written:
        resource, options = request.resource, delete_options(request)
        selector = listing.options(resource, request.query, watch=False).selector
        found = [o for o in self._store.list(resource, request.namespace or None) if selector.matches(o)]
        version = {"resourceVersion": str(self._store.version)}
        for obj in found:
            self._delete(resource, obj["metadata"].get("namespace", ""), obj["metadata"]["name"], options)
        return Written(View(resource).all(found, version))


@contextmanager
def _add_warnings(warnings: list[str]) -> Iterator[None]:
    """Add the warnings to an ApiError."""
    try:
        yield
    except ApiError as e:
        e.warnings += warnings
        raise


def _place(request: Write, obj: Obj) -> Obj:
    """Set the object's namespace to the request's and return the metadata. Raise ApiError 400 if they differ."""
    resource, meta = request.resource, obj.setdefault("metadata", {})
    if not isinstance(meta, dict):
        version = f'{resource.kind} in version "{resource.version}"'
        raise ApiError(400, f"{version} cannot be handled as a {resource.kind}: metadata is not an object")
    if not resource.namespaced:
        meta.pop("namespace", None)
    elif meta.setdefault("namespace", request.namespace) != request.namespace:
        raise ApiError(400, "the namespace of the provided object does not match the namespace sent on the request")
    return meta


def scale_of(obj: Obj) -> Obj:
    """Return the Scale of a job: its Worker replicas. Raise ApiError 500, as the API server does, if it has none."""
    replicas = at(obj, "spec.pytorchReplicaSpecs.Worker.replicas")
    if replicas is None:
        why = 'the spec replicas field ".spec.pytorchReplicaSpecs.Worker.replicas" does not exist'
        raise ApiError(500, f"Internal error occurred: {why}", details={"causes": [{"message": why}]})
    status = at(obj, "status.replicaStatuses.Worker", {})
    selector = {"selector": status["selector"]} if status.get("selector") else {}
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {k: obj["metadata"][k] for k in kept if k in obj["metadata"]},
        "spec": {"replicas": replicas},
        "status": {"replicas": status.get("active", 0), **selector},
    }


def delete_options(request: Write) -> Obj:
    """Return the DeleteOptions of the body, or of the query if the body is empty.

    :raises ApiError: 400, 415 or 422 if the options are invalid.
    """
    query = request.query
    given: Obj = {"gracePeriodSeconds": integer(query, "gracePeriodSeconds")}
    given["propagationPolicy"] = query.get("propagationPolicy")
    if request.body:
        given = decoding.load_map(request.body, negotiation.media_type(request.content_type))
    for path, type_ in DELETE_OPTIONS.items():
        value = at(given, path)
        if value is not None and not isinstance(value, type_):
            found = decoding.JSON_TYPES.get(type(value), "object")
            raise ApiError(
                400, f"DeleteOptions: json: cannot unmarshal {found} into Go struct field DeleteOptions.{path}"
            )
    policy, orphan, problems = given.get("propagationPolicy"), given.get("orphanDependents"), []
    if policy and policy not in POLICIES:
        problems.append(unsupported("propagationPolicy", policy, (*POLICIES, "nil")))
    if policy and orphan is not None:
        why = "orphanDependents and deletionPropagation cannot be both set"
        problems.append(wrong("propagationPolicy", policy, why))
    if problems:
        raise invalid("DeleteOptions", problems)
    decoding.options("DeleteOptions", query)
    if orphan is not None:
        given["propagationPolicy"] = "Orphan" if orphan else "Background"
    return {**given, "dryRun": query.get("dryRun") or given.get("dryRun")}
