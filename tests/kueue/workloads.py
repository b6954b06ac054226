"""Workloads and service accounts for tests that need no recording."""

from __future__ import annotations

import secrets
from typing import Any

from airflow_provider_ktrain.core.checks.rbac import rules
from airflow_provider_ktrain.engine.api import kueue as requests
from airflow_provider_ktrain.engine.api.client import Api


async def write_workload(
    api: Api, job: dict[str, Any], conditions: list[Any], *, active: bool = True,
    resources: dict[str, Any] | None = None, count: int = 1,
) -> None:  # fmt: skip
    """Create a Workload for the job as Kueue does, with one pod set."""
    meta, namespace = job["metadata"], job["metadata"]["namespace"]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": meta["name"], "uid": meta["uid"]}
    template = {"spec": {"containers": [{"name": "main", "image": "scratch", "resources": resources or {}}]}}
    pod_sets = [{"name": "main", "count": count, "template": template}]
    spec = {"queueName": "team-a", "podSets": pod_sets, "active": active}
    name = f"{job['kind'].lower()}-{meta['name']}-12345"
    body = {
        "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "spec": spec,
        "metadata": {"name": name, "ownerReferences": [{**owner, "controller": True}]},
    }  # fmt: skip
    await api.request("POST", requests.workloads_path("v1beta2", namespace), body=body)
    path = requests.workloads_path("v1beta2", namespace, name)
    await api.request("PATCH", f"{path}/status", body={"status": {"conditions": conditions}})


async def allow(api: Api, namespace: str, name: str) -> None:
    """Give an account the rights for Kueue."""
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/{name}"
    await api.request("PATCH", path, body={"rules": rules(kueue=True)})


async def account(api: Api, namespace: str, *, name: str = "", kueue: bool = False) -> str:
    """The token of a new service account with the rights of the Role, by default without those for Kueue."""
    name = name or f"account-{secrets.token_hex(4)}"
    base, rbac = f"/api/v1/namespaces/{namespace}", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    await api.request("POST", f"{base}/serviceaccounts", body={"metadata": {"name": name}})
    await api.request("POST", f"{rbac}/roles", body={"metadata": {"name": name}, "rules": rules(kueue=kueue)})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
    binding = {"metadata": {"name": name}, "roleRef": role, "subjects": subjects}
    await api.request("POST", f"{rbac}/rolebindings", body=binding)
    question = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = await api.request("POST", f"{base}/serviceaccounts/{name}/token", body=question)
    return str(answer["status"]["token"])
