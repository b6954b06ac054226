"""The minimal rights that workers and triggerers need in a namespace."""

from __future__ import annotations

from typing import Any

from airflow_provider_ktrain.core.kinds import KINDS

_RBAC = "rbac.authorization.k8s.io"
_WITH_RUNTIMES = tuple((kind.group, kind.runtimes) for kind in KINDS.values() if kind.runtimes)
_POD_OWNERS = tuple(kind.behavior.pod_owner for kind in KINDS.values())
_JOB_VERBS = ("create", "get", "list", "watch", "patch", "delete")

#: (API group, resources, verbs) of the engine's requests, each with their purpose.
RULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    # submit, adopt, suspend, follow, release
    *(
        (group, tuple(k.plural for k in KINDS.values() if k.group == group), _JOB_VERBS)
        for group in dict.fromkeys(k.group for k in KINDS.values())
    ),
    # optional: patch the pods of a TrainJob, and check it against its runtime
    *((group, runtimes.in_namespaces, ("get",)) for group, runtimes in _WITH_RUNTIMES),
    # to whom pods without our label belong; without it, to the job of their name
    *(
        (group, (plural,), ("get",))
        for group, _, plural in dict.fromkeys(tuple(owner.split("/")) for owner in _POD_OWNERS if owner)
    ),
    # follow; delete what a finished job that is kept left running
    ("", ("pods",), ("get", "list", "watch", "delete")),
    ("", ("pods/log",), ("get",)),
    # the cause in the first line
    ("", ("events",), ("list", "watch")),
    # optional: whether a claim exists that a pod waits for, and what the API server has refused to create
    ("", ("persistentvolumeclaims", "services"), ("get",)),
    ("batch", ("jobs",), ("get",)),
)


#: Rules that are added where jobs get their code from tasks (`code`): for the ConfigMap of a job, which is deleted with
#: the job.
CODE_RULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (("", ("configmaps",), ("create", "get")),)

#: Rules that are added where Kueue queues jobs: to read why a job waits, and to pause it by its Workload.
KUEUE_RULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("kueue.x-k8s.io", ("workloads",), ("get", "list", "watch", "patch")),
    # optional: the checks of a job before it is created
    ("kueue.x-k8s.io", ("localqueues",), ("get",)),
    # optional: the job's place in its queue
    ("visibility.kueue.x-k8s.io", ("localqueues/pendingworkloads",), ("get",)),
)
_KUEUE_CLUSTER_RULE = {
    "apiGroups": ["kueue.x-k8s.io"], "resources": ["clusterqueues", "workloadpriorityclasses"], "verbs": ["get"],
}  # fmt: skip

#: A rule for the whole cluster: to read what is wrong with a node, and whether any can match a pod that waits for one.
_NODE_RULE = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}


def rules(*, kueue: bool = False, code: bool = False) -> list[dict[str, Any]]:
    """The rules of a Role. The parameters are those of `objects`."""
    known = (*RULES, *(CODE_RULES if code else ()), *(KUEUE_RULES if kueue else ()))
    return [{"apiGroups": [g], "resources": list(r), "verbs": list(v)} for g, r, v in known]


def objects(
    namespace: str,
    name: str = "ktrain",
    service_account: str = "",
    *,
    cluster_runtimes: bool = False,
    kueue: bool = False,
    code: bool = False,
    nodes: bool = False,
) -> list[dict[str, Any]]:
    """A Role, and the objects that belong to it.

    The switches are options of `ktrain rbac`.

    :param service_account: `NAMESPACE:NAME`, or a name in `namespace`: adds bindings. Default: none.
    """
    made = [_role("Role", {"name": name, "namespace": namespace}, rules(kueue=kueue, code=code))]
    if cluster_runtimes:
        readable = [
            {"apiGroups": [group], "resources": list(runtimes.in_cluster), "verbs": ["get"]}
            for group, runtimes in _WITH_RUNTIMES
        ]
        made.append(_role("ClusterRole", {"name": f"{name}-runtimes-{namespace}"}, readable))
    if kueue:
        made.append(_role("ClusterRole", {"name": f"{name}-kueue-{namespace}"}, [_KUEUE_CLUSTER_RULE]))
    if nodes:
        made.append(_role("ClusterRole", {"name": f"{name}-nodes-{namespace}"}, [_NODE_RULE]))
    if not service_account:
        return made
    where, _, account = service_account.rpartition(":")
    subject = {"kind": "ServiceAccount", "name": account, "namespace": where or namespace}
    return [*made, *(_binding(role, subject) for role in made)]


def _role(kind: str, metadata: dict[str, str], granted: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": metadata, "rules": granted}


def _binding(role: dict[str, Any], subject: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": f"{role['kind']}Binding",
        "metadata": role["metadata"],
        "roleRef": {"apiGroup": _RBAC, "kind": role["kind"], "name": role["metadata"]["name"]},
        "subjects": [subject],
    }
