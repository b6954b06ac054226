"""The default values that the API server sets for missing fields."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable

from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.names import random_suffix
from ktrain_embedded.objects.pods import containers, qos_class
from ktrain_embedded.objects.resources import Obj, Resource

POD_SPEC: Obj = {
    "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst", "securityContext": {},
    "schedulerName": "default-scheduler",
}  # fmt: skip
POD_ADMISSION: Obj = {
    "serviceAccountName": "default", "serviceAccount": "default", "priority": 0, "enableServiceLinks": True,
    "preemptionPolicy": "PreemptLowerPriority",
}  # fmt: skip
CONTAINER: Obj = {"resources": {}, "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}
NO_EXECUTE: list[Obj] = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for taint in ("not-ready", "unreachable")
]
MODE = 0o644  # file mode in volumes
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
NAMESPACE_FILE: Obj = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
TOKEN: Obj = {
    "defaultMode": MODE,
    "sources": [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [NAMESPACE_FILE]}},
    ],
}
JOB_SPEC: Obj = {
    "parallelism": 1, "completions": 1, "backoffLimit": 6, "manualSelector": False, "completionMode": "NonIndexed",
    "suspend": False, "podReplacementPolicy": "TerminatingOrFailed",
}  # fmt: skip


def apply(resource: Resource, obj: Obj) -> Obj:
    """Set the defaults of the object's type when it is created. Change and return `obj`."""
    if fill := BY_RESOURCE.get(resource):
        fill(obj)
    return obj


def _fill(target: Obj, defaults: Obj) -> None:
    target.update({key: copy.deepcopy(value) for key, value in defaults.items() if key not in target})


def pod_spec(spec: Obj) -> None:
    """Set the defaults of a pod spec, also in pod templates."""
    _fill(spec, POD_SPEC)
    if account := spec.get("serviceAccountName"):
        spec.setdefault("serviceAccount", account)
    for container in containers(spec):
        _fill(container, CONTAINER)
        container.setdefault("imagePullPolicy", _pull_policy(container.get("image", "")))
        for port in container.get("ports", ()):
            port.setdefault("protocol", "TCP")
        for variable in container.get("env", ()):
            if variable.get("value") == "":
                del variable["value"]
            if field := variable.get("valueFrom", {}).get("fieldRef"):
                field.setdefault("apiVersion", "v1")
        amounts = container["resources"]
        if limits := amounts.get("limits"):  # a missing request defaults to the limit
            amounts["requests"] = {**limits, **amounts.get("requests", {})}
    for volume in spec.get("volumes", ()):
        if not volume.keys() - {"name"}:
            volume["emptyDir"] = {}
        for source in volume.keys() & {"configMap", "secret", "projected", "downwardAPI"}:
            volume[source].setdefault("defaultMode", MODE)
        if "hostPath" in volume:
            volume["hostPath"].setdefault("type", "")


def _pull_policy(image: str) -> str:
    name = image.rpartition("/")[2]
    return "Always" if "@" not in name and (":" not in name or name.endswith(":latest")) else "IfNotPresent"


def _pod(pod: Obj) -> None:
    spec = pod["spec"]
    pod_spec(spec)
    _fill(spec, POD_ADMISSION)
    tolerations = spec.get("tolerations", [])
    tolerated = {t.get("key") for t in tolerations}
    spec["tolerations"] = tolerations + [dict(t) for t in NO_EXECUTE if t["key"] not in tolerated]
    if spec.get("automountServiceAccountToken", True):
        _mount_token(spec)
    pod["status"] = {"phase": "Pending", "qosClass": qos_class(pod)}


def _mount_token(spec: Obj) -> None:
    """Mount the service account's token into each container that mounts nothing else at its path."""
    name = f"kube-api-access-{random_suffix()}"
    mount = {"name": name, "readOnly": True, "mountPath": TOKEN_PATH}
    without = [c for c in containers(spec) if all(m["mountPath"] != TOKEN_PATH for m in c.get("volumeMounts", ()))]
    for container in without:
        container["volumeMounts"] = [*container.get("volumeMounts", ()), dict(mount)]
    if without:
        spec.setdefault("volumes", []).append({"name": name, "projected": copy.deepcopy(TOKEN)})


def _service(service: Obj) -> None:
    spec = service.setdefault("spec", {})
    for port in spec.get("ports", ()):
        _fill(port, {"protocol": "TCP", "targetPort": port.get("port")})
    _fill(spec, {"type": "ClusterIP"})
    service["status"] = {"loadBalancer": {}}


def _job(job: Obj) -> None:
    """Set the defaults of a Job, and the labels by which the Job selects its pods."""
    spec, uid, name = job["spec"], job["metadata"]["uid"], job["metadata"]["name"]
    _fill(spec, JOB_SPEC)
    template = spec["template"]
    pod_spec(template["spec"])
    labels = template.setdefault("metadata", {}).setdefault("labels", {})
    for prefix in ("batch.kubernetes.io/", ""):
        labels.update({f"{prefix}controller-uid": uid, f"{prefix}job-name": name})
    _fill(spec, {"selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}})
    job["status"] = {}


def _namespace(namespace: Obj) -> None:
    meta = namespace["metadata"]
    meta["labels"] = {**meta.get("labels", {}), "kubernetes.io/metadata.name": meta["name"]}
    namespace.update(spec={"finalizers": ["kubernetes"]}, status={"phase": "Active"})


def _secret(secret: Obj) -> None:
    given = {k: base64.b64encode(v.encode()).decode() for k, v in secret.pop("stringData", {}).items()}
    if given:
        secret["data"] = {**secret.get("data", {}), **given}
    _fill(secret, {"type": "Opaque"})


def _budget(budget: Obj) -> None:
    counts = ("disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods")
    _fill(budget.setdefault("status", {}), dict.fromkeys(counts, 0))


BY_RESOURCE: dict[Resource, Callable[[Obj], None]] = {
    r.POD: _pod, r.SERVICE: _service, r.BATCH_JOB: _job, r.NAMESPACE: _namespace, r.SECRET: _secret,
    r.DISRUPTION_BUDGET: _budget,
}  # fmt: skip
