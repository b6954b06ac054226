"""The least rights that workers and triggerers need in a namespace, and nothing else."""

from __future__ import annotations

from typing import Any

from airflow_provider_ktrain.core.kinds import KINDS

_JOB_VERBS = ("create", "get", "list", "watch", "patch", "delete")

#: (API group, resources, verbs): what the engine asks, and why
RULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    # submit, adopt, suspend, follow, release
    *(
        (group, tuple(k.plural for k in KINDS.values() if k.group == group), _JOB_VERBS)
        for group in dict.fromkeys(k.group for k in KINDS.values())
    ),
    # follow; delete what a finished job that is kept left running
    ("", ("pods",), ("get", "list", "watch", "delete")),
    ("", ("pods/log",), ("get",)),
    # the cause in the first line
    ("", ("events",), ("list",)),
)


def rules() -> list[dict[str, Any]]:
    """The rules of a Role."""
    return [{"apiGroups": [g], "resources": list(r), "verbs": list(v)} for g, r, v in RULES]


def objects(namespace: str, name: str = "ktrain", service_account: str = "") -> list[dict[str, Any]]:
    """A Role, and with `service_account` (`NAMESPACE:NAME`, or a name in `namespace`) its RoleBinding."""
    role: dict[str, Any] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name, "namespace": namespace},
        "rules": rules(),
    }
    if not service_account:
        return [role]
    where, _, account = service_account.rpartition(":")
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": where or namespace}],
    }
    return [role, binding]
