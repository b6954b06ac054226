"""Reduces the memory of the objects that a watch keeps: removes fields that nothing reads, and shares equal parts."""

from __future__ import annotations

import sys
from typing import Any

from airflow_provider_ktrain.core.kinds.manifest_fields import REQUIRED_NODES
from airflow_provider_ktrain.core.logs.exec_trace import secret_variables
from airflow_provider_ktrain.core.manifest.start import without_start
from airflow_provider_ktrain.engine.api.client import Object

#: Parts of a pod that are equal in all pods of a role.
COMMON_PARTS = (("metadata", "ownerReferences"), ("spec", "containers"), ("spec", "initContainers"))
#: Fields of pods and their containers that are removed.
POD_FIELDS = frozenset({"args", "command", "env", "envFrom", "tolerations", "volumeMounts", "volumes"})
#: Fields that are removed from the pod templates of a job. A Launcher's command is read.
TEMPLATE_FIELDS = POD_FIELDS - {"args", "command"}


def stripped(obj: Object) -> Object:
    """The object without large fields that nothing here reads. They are removed from the object itself."""
    obj["metadata"].pop("managedFields", None)
    (obj["metadata"].get("annotations") or {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    spec = obj.get("spec") or {}
    for name, roles in spec.items():
        if name.endswith("ReplicaSpecs"):  # the pods that a job describes, by role
            for role in (roles or {}).values():
                _strip_pod(((role or {}).get("template") or {}).get("spec") or {}, TEMPLATE_FIELDS)
            _share_templates([role for role in (roles or {}).values() if role])
    if isinstance(spec.get("trainer"), dict):
        _strip_starter(spec["trainer"])
    pods = [spec, *(((of.get("template") or {}).get("spec") or {}) for of in spec.get("podSets") or ())]
    for pod in pods:  # the pod itself, or the pods that a Workload of Kueue describes
        _strip_pod(pod, POD_FIELDS)
        nodes = (pod.pop("affinity", None) or {}).get("nodeAffinity") or {}
        if REQUIRED_NODES in nodes and "nodeName" not in pod:  # it explains why a pod can't be scheduled
            pod["affinity"] = {"nodeAffinity": {REQUIRED_NODES: nodes[REQUIRED_NODES]}}
    return obj


def with_shared_names(value: Any) -> Any:
    """The value with one string for each name of a field.

    The JSON parser creates these strings for each event. In a list, it creates them once for all objects of a page.
    """
    if isinstance(value, dict):
        return {sys.intern(name): with_shared_names(of) for name, of in value.items()}
    if isinstance(value, list):
        return [with_shared_names(of) for of in value]
    return value


def share_parts(obj: Object, earlier: Object) -> None:
    """Keep one of equal parts of two objects.

    This saves memory, and full collections of Python's garbage collector, each of which holds the event loop: one is
    due when the number of new objects reaches a quarter of the old ones.
    """
    for section, name in COMMON_PARTS:
        mine, others = obj.get(section) or {}, earlier.get(section) or {}
        if name in mine and mine[name] == others.get(name):
            mine[name] = others[name]


def _share_templates(roles: list[Object]) -> None:
    """Keep one of equal pod templates: the roles of many jobs differ only in their number of replicas."""
    for number, role in enumerate(roles):
        for earlier in roles[:number]:
            if "template" in role and role["template"] == earlier.get("template"):
                role["template"] = earlier["template"]


def _strip_pod(spec: dict[str, Any], fields: frozenset[str]) -> None:
    for part in (spec, *(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        secrets = secret_variables(part.get("env") or ()) if fields is TEMPLATE_FIELDS else []  # masked in logs
        for name in fields & part.keys():
            del part[name]
        if secrets:
            part["env"] = secrets
        _strip_starter(part)


def _strip_starter(part: dict[str, Any]) -> None:
    """Remove the text of the starter from a command: 20 KB in each role of each job."""
    if isinstance(part.get("command"), list):
        part["command"] = without_start(part["command"])
