"""Whether a node of the cluster can ever take a pod: by its labels and resource names, not by its free capacity."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from airflow_provider_ktrain.core.kinds.manifest_fields import REQUIRED_NODES
from airflow_provider_ktrain.core.state.pods.objects import NODE_NAME, Json, labels_of, metadata_of, name_of

#: The schemes of `spec.providerID` of clusters whose nodes nobody creates on demand; nodes of a cloud have others.
_LOCAL_PROVIDERS = ("kind", "k3s", "rke2")
_AUTOSCALER = re.compile(r"autoscal|karpenter", re.IGNORECASE)
#: Reasons of the events about a pod by which cluster-autoscaler and Karpenter show that they look at it.
_AUTOSCALER_REASONS = ("TriggeredScaleUp", "NotTriggerScaleUp", "Nominated")


@dataclass(frozen=True)
class Node:
    """What selects a node.

    :param resources: the names of its resources, with or without capacity.
    :param is_of_pool: whether more nodes may be created on demand, as far as this one shows: it is of a cloud, whose
        node pools may be empty, or has labels or annotations of an autoscaler.
    """

    name: str
    labels: Mapping[str, str]
    resources: frozenset[str]
    is_of_pool: bool

    @classmethod
    def of(cls, node: Json) -> Node:
        """From the node as the API server has it."""
        status, provider = node.get("status") or {}, str((node.get("spec") or {}).get("providerID") or "")
        keys = (*labels_of(node), *(metadata_of(node).get("annotations") or {}))
        of_cloud = bool(provider) and provider.partition(":")[0] not in _LOCAL_PROVIDERS
        return cls(
            name_of(node),
            labels_of(node),
            frozenset(name for key in ("capacity", "allocatable") for name in status.get(key) or {}),
            of_cloud or any(map(_AUTOSCALER.search, keys)),
        )


def is_of_autoscaler(event: Json) -> bool:
    """Whether an event shows that an autoscaler looks at the pod: it may create a node, now or later."""
    source = (event.get("source") or {}).get("component"), event.get("reportingComponent")
    return event.get("reason") in _AUTOSCALER_REASONS or any(_AUTOSCALER.search(str(name or "")) for name in source)


def selects(pod: Json, node: Node) -> bool:
    """Whether nodeSelector and the required node affinity of a pod match a node. An empty term matches none."""
    spec = pod.get("spec") or {}
    if any(node.labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    terms, fields = _node_terms(spec), {NODE_NAME: node.name}
    return terms is None or any(
        (term.get("matchExpressions") or term.get("matchFields"))
        and all(expression_matches(e, node.labels) for e in term.get("matchExpressions") or ())
        and all(expression_matches(e, fields) for e in term.get("matchFields") or ())
        for term in terms
    )


def expression_matches(expression: Json, labels: Mapping[str, str]) -> bool:
    """Whether an expression of a selector matches labels. An operator that isn't known here counts as a match."""
    value, values = labels.get(str(expression.get("key"))), expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            numbers = [text for text in (value, *values) if re.fullmatch(r"-?\d+", str(text))]
            if len(numbers) != 2:
                return False
            return int(numbers[0]) > int(numbers[1]) if operator == "Gt" else int(numbers[0]) < int(numbers[1])
    return True


def describe_selection(pod: Json) -> str:
    """The pod's nodeSelector and required node affinity, as text. Empty: none."""
    spec = pod.get("spec") or {}
    selector = ", ".join(f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items())
    described = [
        " and ".join(_described(e) for key in ("matchExpressions", "matchFields") for e in term.get(key) or ())
        for term in _node_terms(spec) or ()
    ]
    affinity = " or ".join(dict.fromkeys(filter(None, described)))
    parts = ("nodeSelector ", selector), ("node affinity ", affinity)
    return ", ".join(f"{label}{text}" for label, text in parts if text)


def selected_keys(pod: Json) -> Iterator[str]:
    """The labels that nodeSelector and the required node affinity of a pod name."""
    spec = pod.get("spec") or {}
    yield from spec.get("nodeSelector") or {}
    for term in _node_terms(spec) or ():
        yield from (str(e.get("key")) for e in term.get("matchExpressions") or ())


def unknown_resources(pod: Json, nodes: Collection[Node]) -> list[str]:
    """The names of extended resources that the pod requests and no node has, sorted."""
    spec, known = pod.get("spec") or {}, {name for node in nodes for name in node.resources}
    asked = {
        name
        for key in ("initContainers", "containers")
        for container in spec.get(key) or ()
        for side in ("requests", "limits")
        for name in (container.get("resources") or {}).get(side) or {}
        if "/" in name
    }
    return sorted(asked - known)


def _node_terms(spec: Json) -> Sequence[Json] | None:
    """The terms of the required node affinity; None without one."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED_NODES)
    return required.get("nodeSelectorTerms") or () if isinstance(required, Mapping) else None


def _described(expression: Json) -> str:
    values = ", ".join(map(str, expression.get("values") or ()))
    return f"{expression.get('key')} {expression.get('operator')}{f' ({values})' if values else ''}"
