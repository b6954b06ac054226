"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.apiserver.messages import Object, Refused

Selector = Callable[[Object], bool]
_SET = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")
_TERM = re.compile(r"([^=!\s]+)\s*(==|!=|=)\s*([^=!\s]*)")
_COMMON = ("metadata.name", "metadata.namespace")
_FIELDS = {
    "pods": ("status.phase", "spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName"),
    "events": (
        *(f"involvedObject.{name}" for name in ("kind", "name", "uid", "namespace", "fieldPath")),
        *("reason", "type", "source", "reportingComponent"),
    ),
    "nodes": ("spec.unschedulable",),
    "secrets": ("type",),
    "jobs": ("status.successful",),
}


def selector(resource: str, query: Mapping[str, str]) -> Selector:
    """Whether an object matches the selectors of a request.

    :raises Refused: one of them isn't valid.
    """
    labels = [_label_term(term) for term in _terms(query.get("labelSelector", ""))]
    fields = [_field_term(resource, term) for term in _terms(query.get("fieldSelector", ""))]
    if not labels and not fields:
        return lambda obj: True

    def matches(obj: Object) -> bool:
        own = obj["metadata"].get("labels") or {}
        return all(test(own) for test in labels) and all(test(obj) for test in fields)

    return matches


def _terms(text: str) -> list[str]:
    return [term.strip() for term in re.split(r",(?![^(]*\))", text) if term.strip()]


def _label_term(term: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.fullmatch(term):
        key, values = found[1], {value.strip() for value in found[3].split(",")}
        if found[2] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _TERM.fullmatch(term):
        key, wanted = found[1], found[3]
        if found[2] == "!=":
            return lambda labels: labels.get(key) != wanted
        return lambda labels: labels.get(key) == wanted
    if not re.fullmatch(r"!?[\w./-]+", term):
        raise Refused(400, f"found '{term}', expected: !, identifier, or 'end of string'")
    if term.startswith("!"):
        return lambda labels: term[1:] not in labels
    return lambda labels: term in labels


def _field_term(resource: str, term: str) -> Callable[[Object], bool]:
    found = _TERM.fullmatch(term)
    if found is None:
        raise Refused(400, f"invalid selector: '{term}'; can't understand '{term}'")
    path, operator, wanted = found[1], found[2], found[3]
    if path not in (*_COMMON, *_FIELDS.get(resource, ())):
        raise Refused(400, f"field label not supported: {path}")
    return lambda obj: (_value(obj, path) == wanted) is (operator != "!=")


def _value(obj: Object, path: str) -> str:
    value: Any = obj
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)
