"""Create, update, patch and delete: what happens to an object between the body of a request and the store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from airflow_provider_ktrain.local import admission, decoding, negotiation, patch, schema
from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.listing import integer, invalid
from airflow_provider_ktrain.local.requestinfo import flag
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj, Store, conflict, details

POLICIES = ("Foreground", "Background", "Orphan")
RETURNS_DELETED = (r.POD, r.SERVICE, r.SERVICE_ACCOUNT)  # the others answer a Status


@dataclass(frozen=True)
class Written:
    """What a write answers: the object, a status code, and warnings for the client."""

    obj: Obj
    code: int = 200
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeleteOptions:
    """How to delete. `policy` is "" where the request does not say."""

    grace: int | None = None
    policy: str = ""
    uid: str | None = None
    version: str | None = None
    dry_run: bool = False
    cascade: bool | None = None


class Writes:
    """The writing verbs on one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(
        self, resource: Resource, namespace: str, name: str, body: bytes, media: str, query: Mapping[str, str]
    ) -> Written:
        """Add the object of a body. ApiError 400, 403, 404, 409, 422."""
        validation = decoding.options("CreateOptions", query)
        obj, warnings = decoding.decode(resource, body, media, validation)
        with _told(warnings):
            _place(resource, namespace, obj)
            meta = obj["metadata"]
            if name:
                meta.setdefault("name", name)
            if meta.get("resourceVersion"):
                raise ApiError(500, "resourceVersion should not be set on objects to be created", "")
            admission.namespace_open(self._store, resource, namespace, meta.get("name", ""))
            warnings += admission.validate(self._store, resource, obj, None)
            made = self._store.create(resource, obj, dry_run=bool(query.get("dryRun")))
        return Written(made, 201, tuple(warnings))

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        subresource: str,
        body: bytes,
        media: str,
        query: Mapping[str, str],
    ) -> Written:
        """Replace an object, or its status or scale. ApiError 400, 403, 404, 409, 422."""
        validation = decoding.options("UpdateOptions", query)
        if not name:
            raise ApiError(400, "name must be provided")
        if subresource == "scale":
            value, _ = decoding.load_map(body, media)
            return self._scale(resource, namespace, name, value, bool(query.get("dryRun")))
        obj, warnings = decoding.decode(resource, body, media, validation)
        _place(resource, namespace, obj)
        meta = obj["metadata"]
        if meta.get("name", name) != name:
            raise ApiError(400, f"the name of the object ({meta['name']}) does not match the name on the URL ({name})")
        meta["name"] = name
        old = self._store.get(resource, namespace, name)
        if not meta.get("resourceVersion") and (resource.custom or resource in (r.LEASE, r.CRD)):
            problem = (
                "FieldValueInvalid",
                "Invalid value: 0: must be specified for an update",
                "metadata.resourceVersion",
            )
            raise invalid(resource.plural, [problem], name=name, group=resource.group)
        return self._replace(resource, old, obj, subresource, warnings, bool(query.get("dryRun")))

    def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        subresource: str,
        body: bytes,
        content_type: str,
        query: Mapping[str, str],
    ) -> Written:
        """Patch an object, or its status or scale. ApiError 400, 403, 404, 409, 415, 422."""
        media = decoding.media_type(content_type, patch.media_types(resource))
        validation = decoding.options("PatchOptions", query)
        try:
            changes, _ = negotiation.load(body, negotiation.JSON)
        except ValueError as e:
            raise ApiError(400, f"error decoding patch: {e}") from None
        old = self._store.get(resource, namespace, name)
        dry_run = bool(query.get("dryRun"))
        if subresource == "scale":
            return self._scale(resource, namespace, name, patch.apply(media, scale_of(resource, old), changes), dry_run)
        patched = patch.apply(media, old, changes)
        if not isinstance(patched.get("metadata"), dict):
            raise invalid(
                resource.kind, [("FieldValueRequired", "Required value", "metadata")], name=name, group=resource.group
            )
        meta = patched["metadata"]
        if meta.get("name") != name or meta.get("namespace", "") != namespace:
            why = f"the name of the object ({meta.get('name')}) does not match the name on the URL ({name})"
            raise ApiError(400, why)
        obj, notes = schema.decode(resource, patched)
        if notes and validation == "Strict":
            value = json.dumps(json.dumps(patched, separators=(",", ":"), ensure_ascii=False), ensure_ascii=False)
            why = f"Invalid value: {value}: strict decoding error: {', '.join(notes)}"
            raise invalid("", [("FieldValueInvalid", why, "patch")], group="")
        warnings = [] if validation == "Ignore" else notes
        return self._replace(resource, old, obj, subresource, warnings, dry_run)

    def _replace(
        self, resource: Resource, old: Obj, obj: Obj, subresource: str, warnings: list[str], dry_run: bool
    ) -> Written:
        status = subresource == "status"
        name, version = old["metadata"]["name"], obj["metadata"].get("resourceVersion")
        with _told(warnings):
            if version and version != old["metadata"]["resourceVersion"]:
                raise conflict(resource, name)
            if status:
                # the rest of what was sent does not count
                obj = {**old, "status": obj.get("status", {})}
            warnings = [*warnings, *admission.validate(self._store, resource, obj, old)]
            updated = self._store.update(resource, obj, status=status, dry_run=dry_run)
        return Written(updated, 200, tuple(warnings))

    def _scale(self, resource: Resource, namespace: str, name: str, wanted: Obj, dry_run: bool) -> Written:
        old = self._store.get(resource, namespace, name)
        scale_of(resource, old)
        replicas = (wanted.get("spec") or {}).get("replicas", 0)
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            why = f"Invalid value: {replicas}: must be greater than or equal to 0"
            raise invalid("Scale", [("FieldValueInvalid", why, "spec.replicas")], name=name, group="autoscaling")
        specs = old["spec"]["pytorchReplicaSpecs"]
        worker = {**specs["Worker"], "replicas": replicas}
        new = {**old, "spec": {**old["spec"], "pytorchReplicaSpecs": {**specs, "Worker": worker}}}
        version = (wanted.get("metadata") or {}).get("resourceVersion")
        new["metadata"] = {**old["metadata"], **({"resourceVersion": version} if version else {})}
        return Written(scale_of(resource, self._replace(resource, old, new, "", [], dry_run).obj))

    def delete(self, resource: Resource, namespace: str, name: str, options: DeleteOptions) -> Written:
        """Delete one object, or begin to. ApiError 404, 409."""
        old = self._store.get(resource, namespace, name)
        warnings: tuple[str, ...] = ()
        policy = options.policy
        if not policy and resource == r.BATCH_JOB:
            policy = "Orphan"
            warnings = (
                "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove "
                "them or set propagationPolicy=Orphan to suppress this warning",
            )
        if not policy:
            kept = old["metadata"].get("finalizers") or ()
            policy = "Foreground" if "foregroundDeletion" in kept else "Orphan" if "orphan" in kept else "Background"
        if options.dry_run:
            return Written(old if resource in RETURNS_DELETED else _deleted(resource, old), 200, warnings)
        gone = self._store.delete(
            resource, namespace, name,
            grace=options.grace, propagation=policy, uid=options.uid, version=options.version,
        )  # fmt: skip
        still = self._store.find(resource, namespace, name)
        if still is None and resource not in RETURNS_DELETED:
            return Written(_deleted(resource, gone), 200, warnings)
        return Written(gone, 202 if still is not None and options.cascade else 200, warnings)


@contextmanager
def _told(warnings: list[str]) -> Iterator[None]:
    """Errors take the warnings so far with them."""
    try:
        yield
    except ApiError as e:
        e.warnings += warnings
        raise


def _place(resource: Resource, namespace: str, obj: Obj) -> None:
    """Put the namespace of the request into the object; ApiError 400 where it names another."""
    meta = obj.setdefault("metadata", {})
    if not isinstance(meta, dict):
        version = f'{resource.kind} in version "{resource.version}"'
        raise ApiError(400, f"{version} cannot be handled as a {resource.kind}: metadata is not an object")
    if not resource.namespaced:
        meta.pop("namespace", None)
        return
    if meta.get("namespace", namespace) != namespace:
        raise ApiError(400, "the namespace of the provided object does not match the namespace sent on the request")
    meta["namespace"] = namespace


def _deleted(resource: Resource, obj: Obj) -> Obj:
    about = {**details(resource, obj["metadata"]["name"]), "uid": obj["metadata"]["uid"]}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": about}


def scale_of(resource: Resource, obj: Obj) -> Obj:
    """The Scale of a job: its Worker replicas. ApiError 500 where it has none, as the API server answers."""
    specs = (obj.get("spec") or {}).get("pytorchReplicaSpecs") or {}
    worker = specs.get("Worker") or {}
    if "replicas" not in worker:
        why = 'the spec replicas field ".spec.pytorchReplicaSpecs.Worker.replicas" does not exist'
        raise ApiError(500, f"Internal error occurred: {why}", details={"causes": [{"message": why}]})
    status = ((obj.get("status") or {}).get("replicaStatuses") or {}).get("Worker") or {}
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {k: obj["metadata"][k] for k in kept if k in obj["metadata"]},
        "spec": {"replicas": worker["replicas"]},
        "status": {
            "replicas": status.get("active", 0),
            **({"selector": status["selector"]} if isinstance(status.get("selector"), str) else {}),
        },
    }


def delete_options(body: bytes, content_type: str, query: Mapping[str, str]) -> DeleteOptions:
    """The DeleteOptions of a body or, where there is none, of the query. ApiError 400, 415, 422."""
    given: Obj = {k: query[k] for k in ("propagationPolicy",) if k in query}
    if "orphanDependents" in query:
        given["orphanDependents"] = flag(query, "orphanDependents")
    if (seconds := integer(query, "gracePeriodSeconds")) is not None:
        given["gracePeriodSeconds"] = seconds
    if body:
        given, _ = decoding.load_map(body, decoding.media_type(content_type))
    grace, policy, cascade = (given.get(k) for k in ("gracePeriodSeconds", "propagationPolicy", "orphanDependents"))
    preconditions = given.get("preconditions") or {}
    uid_and_version = preconditions.items() if isinstance(preconditions, dict) else ()
    expected: list[tuple[str, object, type | tuple[type, ...]]] = [
        ("gracePeriodSeconds", grace, int), ("propagationPolicy", policy, str), ("orphanDependents", cascade, bool),
        ("preconditions", preconditions, dict),
        *((f"preconditions.{k}", v, str) for k, v in uid_and_version),
    ]  # fmt: skip
    for field, value, type_ in expected:
        if value is not None and not isinstance(value, type_):
            found = decoding.JSON_TYPES.get(type(value), "object")
            why = f"json: cannot unmarshal {found} into Go struct field DeleteOptions.{field}"
            raise ApiError(400, f"DeleteOptions: {why}")
    problems = []
    if policy and policy not in POLICIES:
        names = ", ".join(f'"{p}"' for p in (*POLICIES, "nil"))
        problems.append(
            ("FieldValueNotSupported", f'Unsupported value: "{policy}": supported values: {names}', "propagationPolicy")
        )
    if policy and cascade is not None:
        why = f'Invalid value: "{policy}": orphanDependents and deletionPropagation cannot be both set'
        problems.append(("FieldValueInvalid", why, "propagationPolicy"))
    if problems:
        raise invalid("DeleteOptions", problems)
    decoding.options("DeleteOptions", query)
    return DeleteOptions(
        grace, policy or {None: "", True: "Orphan", False: "Background"}[cascade],
        preconditions.get("uid"), preconditions.get("resourceVersion"),
        bool(query.get("dryRun") or given.get("dryRun")), cascade is False,
    )  # fmt: skip
