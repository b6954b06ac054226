"""What the API server fills in where a manifest says nothing."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.names import random_suffix
from airflow_provider_ktrain.local.podstatus import qos_class
from airflow_provider_ktrain.local.resources import Resource

Obj = dict[str, Any]

POD_SPEC: Obj = {
    "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst", "securityContext": {},
    "schedulerName": "default-scheduler",
}  # fmt: skip
POD_ADMISSION: Obj = {
    "serviceAccountName": "default", "priority": 0, "enableServiceLinks": True,
    "preemptionPolicy": "PreemptLowerPriority",
}  # fmt: skip
CONTAINER: Obj = {"resources": {}, "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}
PROBE: Obj = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
NO_EXECUTE: list[Obj] = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for taint in ("not-ready", "unreachable")
]
MODE = 0o644  # of files in volumes
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
TOKEN_SOURCES: list[Obj] = [
    {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    {
        "downwardAPI": {
            "items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]
        }
    },
]
SERVICE_SPEC: Obj = {
    "type": "ClusterIP", "sessionAffinity": "None", "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
    "internalTrafficPolicy": "Cluster",
}  # fmt: skip
JOB_SPEC: Obj = {
    "parallelism": 1, "completions": 1, "backoffLimit": 6, "manualSelector": False, "completionMode": "NonIndexed",
    "suspend": False, "podReplacementPolicy": "TerminatingOrFailed",
}  # fmt: skip


def apply(resource: Resource, obj: Obj) -> Obj:
    """The object with the defaults of its type, as it first enters the store; changes and returns `obj`."""
    if fill := BY_RESOURCE.get(resource):
        fill(obj)
    return obj


def _fill(target: Obj, defaults: Obj) -> None:
    for key, value in defaults.items():
        target.setdefault(key, value.copy() if isinstance(value, dict | list) else value)


def containers(spec: Obj) -> Iterator[Obj]:
    """All containers of a pod's spec, init containers first."""
    for key in ("initContainers", "containers"):
        yield from spec.get(key) or ()


def pod_spec(spec: Obj) -> None:
    """Defaults of a pod, and of the template of one."""
    _fill(spec, POD_SPEC)
    if spec.get("serviceAccountName"):
        spec.setdefault("serviceAccount", spec["serviceAccountName"])
    for container in containers(spec):
        _fill(container, CONTAINER)
        container.setdefault("imagePullPolicy", _pull_policy(container.get("image") or ""))
        for port in container.get("ports") or ():
            port.setdefault("protocol", "TCP")
        for variable in container.get("env") or ():
            _variable(variable)
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            if isinstance(container.get(probe), dict):
                _fill(container[probe], PROBE)
        amounts = container.get("resources") or {}
        if amounts.get("limits"):
            # what is limited and not requested is requested to the limit
            amounts["requests"] = {**amounts["limits"], **(amounts.get("requests") or {})}
    for volume in spec.get("volumes") or ():
        _volume(volume)


def _pull_policy(image: str) -> str:
    name = image.rpartition("/")[2]
    return "Always" if "@" not in name and (":" not in name or name.endswith(":latest")) else "IfNotPresent"


def _variable(variable: Obj) -> None:
    if variable.get("value") == "":
        del variable["value"]
    field = (variable.get("valueFrom") or {}).get("fieldRef")
    if field:
        field.setdefault("apiVersion", "v1")


def _volume(volume: Obj) -> None:
    if not volume.keys() - {"name"}:
        volume["emptyDir"] = {}
    for source in ("configMap", "secret", "projected", "downwardAPI"):
        if isinstance(volume.get(source), dict):
            volume[source].setdefault("defaultMode", MODE)
    if isinstance(volume.get("hostPath"), dict):
        volume["hostPath"].setdefault("type", "")


def _pod(pod: Obj) -> None:
    spec = pod["spec"]
    pod_spec(spec)
    _fill(spec, POD_ADMISSION)
    spec.setdefault("serviceAccount", spec["serviceAccountName"])
    tolerations = spec.setdefault("tolerations", [])
    tolerated = {t.get("key") for t in tolerations}
    spec["tolerations"] = tolerations + [dict(t) for t in NO_EXECUTE if t["key"] not in tolerated]
    if spec.get("automountServiceAccountToken", True):
        _mount_token(spec)
    pod["status"] = {"phase": "Pending", "qosClass": qos_class(pod)}


def _mount_token(spec: Obj) -> None:
    """The volume with the token of the service account, for each container that mounts nothing there."""
    open_ = [c for c in containers(spec) if all(m.get("mountPath") != TOKEN_PATH for m in c.get("volumeMounts") or ())]
    if not open_:
        return
    name = f"kube-api-access-{random_suffix()}"
    projected = {"sources": [dict(s) for s in TOKEN_SOURCES], "defaultMode": MODE}
    spec.setdefault("volumes", []).append({"name": name, "projected": projected})
    for container in open_:
        mount = {"name": name, "readOnly": True, "mountPath": TOKEN_PATH}
        container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]


def _service(service: Obj) -> None:
    spec = service.setdefault("spec", {})
    for port in spec.get("ports") or ():
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port.get("port"))
    _fill(spec, SERVICE_SPEC)
    if spec.get("clusterIP"):
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
    service["status"] = {"loadBalancer": {}}


def _job(job: Obj) -> None:
    """Defaults of a Job, and the labels by which it knows its pods."""
    spec, uid, name = job["spec"], job["metadata"]["uid"], job["metadata"]["name"]
    _fill(spec, JOB_SPEC)
    template = spec.setdefault("template", {})
    pod_spec(template.setdefault("spec", {}))
    if not spec["manualSelector"]:
        labels = template.setdefault("metadata", {}).setdefault("labels", {})
        for prefix in ("batch.kubernetes.io/", ""):
            labels.update({f"{prefix}controller-uid": uid, f"{prefix}job-name": name})
        spec.setdefault("selector", {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}})
    job["status"] = {}


def _namespace(namespace: Obj) -> None:
    name = namespace["metadata"]["name"]
    namespace["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = name
    namespace["spec"] = {"finalizers": ["kubernetes"]}
    namespace["status"] = {"phase": "Active"}


def _secret(secret: Obj) -> None:
    for key, value in (secret.pop("stringData", None) or {}).items():
        secret.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
    secret.setdefault("type", "Opaque")


BY_RESOURCE: dict[Resource, Callable[[Obj], None]] = {
    r.POD: _pod,
    r.SERVICE: _service,
    r.BATCH_JOB: _job,
    r.NAMESPACE: _namespace,
    r.SECRET: _secret,
}
