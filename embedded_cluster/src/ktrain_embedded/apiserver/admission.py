"""Admission of writes: namespace state, object validation, and the webhooks of the training operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ktrain_embedded.objects import jobsets, names, podspecs, schema, trainingruntimes, trainjobs
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError, Problem, denied, described, invalid, unsupported, wrong
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Store, at, details

NAME_RULES = {  # names of other resources are DNS subdomains
    r.NAMESPACE: names.LABEL, r.SERVICE: names.DNS_1035,
    **dict.fromkeys((r.ROLE, r.ROLE_BINDING, r.CLUSTER_ROLE, r.CLUSTER_ROLE_BINDING), names.PATH_SEGMENT),
}  # fmt: skip
POD_UPDATES = (
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)
WEBHOOK = "validator.pytorchjob.training-operator.kubeflow.org"
REPLICA_TYPES = ("Master", "Worker")
MANAGERS = ("kueue.x-k8s.io/multikueue", "kubeflow.org/training-operator")


#: CEL rules in the schemas of custom resources. They are evaluated only if the rest of the schema is valid.
RUNTIMES = (r.TRAINING_RUNTIME, r.CLUSTER_TRAINING_RUNTIME)
RULES = {r.TRAINJOB: trainjobs.rules, **dict.fromkeys(RUNTIMES, trainingruntimes.rules)}
#: Validating webhooks, called for objects that match the schema; they return warnings for the client.
VALIDATORS: dict[Resource, Callable[[Store, Obj, Obj | None], list[str]]] = {
    r.TRAINJOB: trainjobs.validate,
    r.JOBSET: lambda _, obj, old: jobsets.validate(obj, old),
    **{resource: trainingruntimes.validator(resource.kind) for resource in RUNTIMES},
}
#: Defaulting webhooks, called for each create and update.
DEFAULTERS: dict[Resource, Callable[[Obj, Obj | None], None]] = {
    r.TRAINJOB: trainjobs.complete,
    r.JOBSET: lambda obj, _: jobsets.complete(obj),
}


def complete(resource: Resource, obj: Obj, old: Obj | None) -> None:
    """Call the defaulting webhook of the resource, if it has one, for an object that is created or replaces `old`."""
    if defaulter := DEFAULTERS.get(resource):
        defaulter(obj, old)


def namespace_open(store: Store, resource: Resource, namespace: str, name: str) -> None:
    """Raise ApiError 404 if the namespace doesn't exist, 403 if it is being deleted."""
    if not resource.namespaced or "deletionTimestamp" not in store.get(r.NAMESPACE, None, namespace)["metadata"]:
        return
    message = f"namespace {namespace} is being terminated"
    cause = {"reason": "NamespaceTerminating", "message": message, "field": "metadata.namespace"}
    raise ApiError(
        403,
        f'{resource} "{name}" is forbidden: unable to create new content in namespace {namespace} because it is being '
        "terminated",
        details={**details(resource, name), "causes": [cause]},
    )


def validate(store: Store, resource: Resource, obj: Obj, old: Obj | None) -> list[str]:
    """Validate an object that is created or replaces `old`.

    :return: warnings for the client.
    :raises ApiError: 403 if a webhook or the admission denies the object, 422 if the object is invalid.
    """
    name = obj["metadata"].get("name", "")
    problems = [*_metadata(resource, obj["metadata"]), *_updated(resource, obj, old or obj)]
    problems += _built_in(resource, obj, new=old is None)
    problems += schema.problems(resource, obj if resource.custom else {**obj, "status": {}})
    if rules := RULES.get(resource):
        problems += [] if schema.INCOMPLETE in problems else rules(obj, old)
    if problems:
        raise invalid(resource.kind, problems, name=name, group=resource.group)
    if resource == r.POD and old is None:
        namespace, account = obj["metadata"]["namespace"], obj["spec"].get("serviceAccountName") or "default"
        if store.find(r.SERVICE_ACCOUNT, namespace, account) is None:
            why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            raise ApiError(403, f'pods "{name}" is forbidden: {why}', details=details(resource, name))
    warnings = VALIDATORS[resource](store, obj, old) if resource in VALIDATORS else []
    if resource != r.PYTORCHJOB:
        return warnings
    if refused := list(webhook(obj)):
        raise denied(WEBHOOK, refused)
    deprecated = "nProcPerNode" in ((obj.get("spec") or {}).get("elasticPolicy") or {})
    return ["spec.elasticPolicy.nProcPerNode is deprecated, use spec.nprocPerNode instead"] if deprecated else []


def _metadata(resource: Resource, meta: Obj) -> Iterator[Problem]:
    name = meta.get("name") or ""
    if not name and not meta.get("generateName"):
        yield "FieldValueRequired", "Required value: name or generateName is required", "metadata.name"
        if resource in schema.WITH_CEL_RULES:
            yield schema.INCOMPLETE
    elif name:
        rule = NAME_RULES.get(resource, names.SUBDOMAIN)
        yield from (wrong("metadata.name", name, why) for why in rule.breaches(name))
    for key, value in (meta.get("labels") or {}).items():
        yield from (wrong("metadata.labels", key, why) for why in names.qualified(key))
        yield from (wrong("metadata.labels", value, why) for why in names.LABEL_VALUE.breaches(value))
    for key in meta.get("annotations") or {}:
        yield from (wrong("metadata.annotations", key, why) for why in names.qualified(key.lower()))


def _updated(resource: Resource, obj: Obj, old: Obj) -> Iterator[Problem]:
    """Yield a problem for each change of an immutable field."""
    meta, was = obj["metadata"], old["metadata"]
    problems = [
        wrong(f"metadata.{key}", meta[key], "field is immutable")
        for key in ("uid", "creationTimestamp")
        if meta.get(key) and meta[key] != was.get(key)
    ]
    added = [f for f in meta.get("finalizers") or () if f not in (was.get("finalizers") or ())]
    if added and "deletionTimestamp" in was:
        names = ", ".join(f'"{f}"' for f in added)
        why = "no new finalizers can be added if the object is being deleted, found new finalizers"
        problems.append(("FieldValueForbidden", f"Forbidden: {why} []string{{{names}}}", "metadata.finalizers"))
    yield from problems * (2 if resource.custom else 1)  # two validators check custom resources
    if resource == r.POD and _fixed(obj.get("spec") or {}) != _fixed(old.get("spec") or {}):
        yield "FieldValueForbidden", POD_UPDATES, "spec"


def _fixed(spec: Obj) -> Obj:
    """Return a pod's spec without the mutable fields."""
    kept = {k: v for k, v in spec.items() if k not in ("activeDeadlineSeconds", "tolerations")}
    for key in ("initContainers", "containers"):
        kept[key] = [{k: v for k, v in c.items() if k != "image"} for c in spec.get(key) or ()]
    return kept


def _built_in(resource: Resource, obj: Obj, *, new: bool) -> Iterator[Problem]:
    """Validate the built-in types that users create directly."""
    if resource == r.POD and new:
        yield from podspecs.problems(obj.get("spec", podspecs.NO_CONTAINERS), "spec", podspecs.RESTART_POLICIES)
    elif resource == r.BATCH_JOB and new:
        yield from podspecs.job_problems(obj)
    elif resource == r.CLAIM:
        if not at(obj, "spec.accessModes"):
            yield "FieldValueRequired", "Required value: at least 1 access mode is required", "spec.accessModes"
        if not at(obj, "spec.resources.requests.storage"):
            yield "FieldValueRequired", "Required value", "spec.resources[storage]"
    elif resource in (r.ROLE_BINDING, r.CLUSTER_ROLE_BINDING):
        kind = obj.get("roleRef", {}).get("kind")
        if kind not in ("Role", "ClusterRole", None):
            yield unsupported("roleRef.kind", kind, ("Role", "ClusterRole"))


def webhook(job: Obj) -> Iterator[str]:
    """Validate a PyTorchJob as the training-operator's webhook does (pkg/webhooks/pytorch, 1.9)."""
    name, spec = job["metadata"].get("name"), job.get("spec") or {}
    breaches = list(names.DNS_1035.breaches(name)) if name else []
    if breaches:
        yield f'metadata.name: Invalid value: "{name}": should match: {",".join(breaches)}'
    manager = (spec.get("runPolicy") or {}).get("managedBy")
    if manager is not None and manager not in MANAGERS:
        yield described(unsupported("spec.runPolicy.managedBy", manager, MANAGERS))
    specs, elastic = spec.get("pytorchReplicaSpecs") or {}, spec.get("elasticPolicy")
    if elastic is not None and "Worker" not in specs:
        yield "spec.pytorchReplicaSpecs[Worker]: Required value: must be configured if elastic policy is used"
    if elastic is not None and "nProcPerNode" in elastic and "nprocPerNode" in spec:
        yield "spec.elasticPolicy.nProcPerNode: Forbidden: must not be used with spec.nprocPerNode"
    for type_, replica in sorted(specs.items()):
        yield from _replica(f"spec.pytorchReplicaSpecs[{type_}]", type_, replica)


def _replica(path: str, type_: str, replica: Obj) -> Iterator[str]:
    if type_ not in REPLICA_TYPES:
        yield described(unsupported(path, type_, REPLICA_TYPES))
    place = f"{path}.template.spec.containers"
    containers = ((replica.get("template") or {}).get("spec") or {}).get("containers") or ()
    if not containers:
        yield f"{place}: Required value: must be specified"
    for i, container in enumerate(containers):
        if not container.get("image"):
            yield f"{place}[{i}].image: Required value: must be required"
    if containers and all(c.get("name") != "pytorch" for c in containers):
        yield f"{place}: Required value: must have at least one container with name pytorch"
    replicas = replica.get("replicas")
    if type_ == "Master" and replicas != 1:
        yield f"{path}.replicas: Forbidden: must be 1"
    elif type_ == "Worker" and replicas is not None and replicas < 1:
        yield f"{path}.replicas: Forbidden: must be at least 1"
