"""Label and field selectors: what a list or watch lets through. Errors are worded as the API server words them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.resources import Resource

TOKEN = re.compile(r"\s*(==|!=|[=!(),<>]|[^\s=!(),<>]+|$)")
SYMBOLS = {"=", "==", "!=", "!", "(", ")", ",", "<", ">", ""}
OPERATORS = ("in", "notin", "=", "==", "!=", ">", "<")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

#: fields that may be selected beside metadata.name and metadata.namespace
FIELDS: dict[Resource, tuple[str, ...]] = {
    r.POD: (
        "spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.hostNetwork",
        "status.phase", "status.podIP", "status.nominatedNodeName",
    ),
    r.EVENT: (
        "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
        "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath", "reason",
        "reportingComponent", "source", "type",
    ),
    r.NAMESPACE: ("status.phase",),
    r.NODE: ("spec.unschedulable",),
    r.SECRET: ("type",),
    r.SERVICE: ("spec.clusterIP", "spec.type"),
    r.BATCH_JOB: ("status.successful",),
}  # fmt: skip


@dataclass(frozen=True)
class Requirement:
    """One condition on one label or field: `operator` is in, notin, exists or !."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def holds(self, value: str | None) -> bool:
        if self.operator == "exists":
            return value is not None
        if self.operator == "!":
            return value is None
        if self.operator in "<>":
            return _compares(value, self.operator, min(self.values))
        return (value in self.values) is (self.operator == "in")


@dataclass(frozen=True)
class Selector:
    """All requirements on labels and fields of one list or watch."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels or self.fields)

    def matches(self, obj: Mapping[str, Any]) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(q.holds(labels.get(q.key)) for q in self.labels) and all(
            q.holds(_field(obj, q.key)) for q in self.fields
        )


EVERYTHING = Selector()


def parse(resource: Resource, labels: str, fields: str) -> Selector:
    """The selector of `labelSelector` and `fieldSelector`; ApiError 400 where they mean nothing or are unsupported."""
    return Selector(tuple(parse_labels(labels)), tuple(parse_fields(resource, fields)))


def parse_labels(text: str) -> Iterator[Requirement]:
    """`a=b,c!=d,e in (f,g),!h`; ApiError 400 with the words of labels.Parse."""
    tokens = TOKEN.findall(text)
    while not tokens or tokens[-1]:
        tokens.append("")
    tokens.reverse()
    while tokens[-1]:
        if tokens[-1] in SYMBOLS and tokens[-1] != "!":
            raise ApiError(400, f"found '{tokens[-1]}', expected: !, identifier, or 'end of string'")
        try:
            yield _requirement(tokens)
        except ValueError as e:
            raise ApiError(400, f"unable to parse requirement: {e}") from None
        after = tokens.pop()
        if not after:
            return
        if after != ",":
            raise ApiError(400, f"found '{after}', expected: ',' or 'end of string'")
        if tokens[-1] in SYMBOLS and tokens[-1] != "!":
            raise ApiError(400, f"found '{tokens[-1]}', expected: identifier after ','")


def _requirement(tokens: list[str]) -> Requirement:
    negated = tokens[-1] == "!" and bool(tokens.pop())
    key = tokens.pop()
    if key in SYMBOLS:
        raise ValueError(f"found '{key}', expected: identifier")
    if not LABEL_KEY.fullmatch(key):
        raise ValueError(
            f"<nil>: Invalid value: \"{key}\": name part must consist of alphanumeric characters, '-', '_' or '.', "
            "and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex "
            "used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
        )
    if negated or tokens[-1] in ("", ","):
        return Requirement(key, "!" if negated else "exists")
    operator = tokens.pop()
    if operator not in OPERATORS:
        raise ValueError(f"found '{operator}', expected: {', '.join(OPERATORS)}")
    values = _set(tokens) if operator in ("in", "notin") else {_exact(tokens)}
    for value in values:
        if operator in "<>" and not re.fullmatch(r"[+-]?\d+", value):
            raise ValueError(
                f"values[0][{key}]: Invalid value: \"{value}\": for 'Gt', 'Lt' operators, the value must be an integer"
            )
        if not LABEL_VALUE.fullmatch(value):
            raise ValueError(
                f'values[0][{key}]: Invalid value: "{value}": a valid label must be an empty string or consist of '
                "alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character"
            )
    return Requirement(key, {"=": "in", "==": "in", "!=": "notin"}.get(operator, operator), frozenset(values))


def _exact(tokens: list[str]) -> str:
    if tokens[-1] in ("", ","):
        return ""
    value = tokens.pop()
    if value in SYMBOLS:
        raise ValueError(f"found '{value}', expected: identifier")
    return value


def _set(tokens: list[str]) -> set[str]:
    if (opening := tokens.pop()) != "(":
        raise ValueError(f"found '{opening}' expected: '('")
    values: set[str] = set()
    while True:
        values.add("" if tokens[-1] in (",", ")") else _exact(tokens))
        after = tokens.pop() if len(tokens) > 1 else tokens[-1]
        if after == ")":
            return values
        if after != ",":
            raise ValueError(f"found '{after}', expected: ',' or ')'")


def parse_fields(resource: Resource, text: str) -> Iterator[Requirement]:
    """`metadata.name=a,status.phase!=Running`; ApiError 400 for a field that the resource does not select by."""
    known = ("metadata.name", *(("metadata.namespace",) if resource.namespaced else ()), *FIELDS.get(resource, ()))
    for term in filter(None, text.split(",")):
        found = re.fullmatch(r"([^=!]*)(!=|==?)(.*)", term, re.DOTALL)
        if not found:
            raise ApiError(400, f"invalid selector: '{text}'; can't understand '{term}'")
        key, operator, value = found.groups()
        if key not in known:
            raise ApiError(400, f"field label not supported: {key}")
        yield Requirement(key, "notin" if operator == "!=" else "in", frozenset({value}))


def _field(obj: Mapping[str, Any], path: str) -> str:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if path == "source" and isinstance(value, Mapping):
        value = value.get("component")
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def _compares(value: str | None, operator: str, limit: str) -> bool:
    if value is None or not re.fullmatch(r"[+-]?\d+", value):
        return False
    return int(value) > int(limit) if operator == ">" else int(value) < int(limit)
