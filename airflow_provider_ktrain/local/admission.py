"""What may enter the store: open namespaces, valid objects, and what the training-operator's webhook lets through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from airflow_provider_ktrain.local import names, schema, validation
from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.listing import invalid
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj, Store, details

WEBHOOK = "validator.pytorchjob.training-operator.kubeflow.org"
REPLICA_TYPES = ("Master", "Worker")
MANAGERS = ("kueue.x-k8s.io/multikueue", "kubeflow.org/training-operator")


def namespace_open(store: Store, resource: Resource, namespace: str, name: str) -> None:
    """ApiError 404 where the namespace is not there, 403 where it is being deleted."""
    if not resource.namespaced or "deletionTimestamp" not in store.get(r.NAMESPACE, None, namespace)["metadata"]:
        return
    cause = {
        "reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated",
        "field": "metadata.namespace",
    }  # fmt: skip
    raise ApiError(
        403,
        f'{resource} "{name}" is forbidden: unable to create new content in namespace {namespace} because it is being '
        "terminated",
        details={**details(resource, name), "causes": [cause]},
    )


def validate(store: Store, resource: Resource, obj: Obj, old: Obj | None) -> list[str]:
    """Look at an object that is created, or replaces `old`; warnings for the client. ApiError 403 or 422."""
    problems = [*validation.metadata(resource, obj, old), *(schema.problems(resource, obj) if resource.custom else ())]
    problems += validation.built_in(resource, obj, old)
    if problems:
        raise invalid(resource.kind, problems, name=obj["metadata"].get("name", ""), group=resource.group)
    if resource == r.POD and old is None:
        _service_account(store, obj)
    if resource == r.PYTORCHJOB:
        denied = list(webhook(obj))
        if denied:
            why = denied[0] if len(denied) == 1 else f"[{', '.join(denied)}]"
            raise ApiError(403, f'admission webhook "{WEBHOOK}" denied the request: {why}')
        return list(_deprecated(obj.get("spec") or {}))
    return []


def _service_account(store: Store, pod: Obj) -> None:
    meta, name = pod["metadata"], pod["spec"].get("serviceAccountName") or "default"
    if store.find(r.SERVICE_ACCOUNT, meta["namespace"], name) is None:
        raise ApiError(
            403,
            f'pods "{meta.get("name", "")}" is forbidden: error looking up service account {meta["namespace"]}/{name}: '
            f'serviceaccount "{name}" not found',
            details={"name": meta.get("name", ""), "kind": "pods"},
        )


def webhook(job: Obj) -> Iterator[str]:
    """What the training-operator's validating webhook has against a PyTorchJob (pkg/webhooks/pytorch, 1.9)."""
    name, spec = job["metadata"].get("name") or "", job.get("spec") or {}
    breaches = list(names.DNS_1035.breaches(name)) if name else []
    if breaches:
        yield f'metadata.name: Invalid value: "{name}": should match: {",".join(breaches)}'
    manager = (spec.get("runPolicy") or {}).get("managedBy")
    if manager is not None and manager not in MANAGERS:
        supported = ", ".join(f'"{m}"' for m in MANAGERS)
        yield f'spec.runPolicy.managedBy: Unsupported value: "{manager}": supported values: {supported}'
    specs: Mapping[str, Obj] = spec.get("pytorchReplicaSpecs") or {}
    elastic = spec.get("elasticPolicy")
    if elastic is not None and "Worker" not in specs:
        yield "spec.pytorchReplicaSpecs[Worker]: Required value: must be configured if elastic policy is used"
    if elastic is not None and "nProcPerNode" in elastic and "nprocPerNode" in spec:
        yield "spec.elasticPolicy.nProcPerNode: Forbidden: must not be used with spec.nprocPerNode"
    for type_, replica in sorted(specs.items()):
        yield from _replica(f"spec.pytorchReplicaSpecs[{type_}]", type_, replica)


def _replica(path: str, type_: str, replica: Obj) -> Iterator[str]:
    if type_ not in REPLICA_TYPES:
        yield f'{path}: Unsupported value: "{type_}": supported values: "Master", "Worker"'
    containers = ((replica.get("template") or {}).get("spec") or {}).get("containers") or []
    place = f"{path}.template.spec.containers"
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


def _deprecated(spec: Obj) -> Iterator[str]:
    if "nProcPerNode" in (spec.get("elasticPolicy") or {}):
        yield "spec.elasticPolicy.nProcPerNode is deprecated, use spec.nprocPerNode instead"
