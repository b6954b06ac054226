"""Label and field selectors of lists and watches, with the error messages of the API server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.names import LABEL_VALUE, qualified
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, at

WORD = r"[^\s=!(),]++"
#: One label requirement and the comma or end of text that follows it: `a`, `!a`, `a=b`, `a!=b`, `a in (b,c)`.
LABEL_TERM = re.compile(
    rf"\s*+(?P<absent>!\s*+)?(?P<key>{WORD})\s*+"
    rf"(?(absent)|(?:(?P<is>==?|!=)\s*+(?P<value>(?:{WORD})?)|(?P<set>(?:not)?in)\s*+\((?P<values>[^=!()]*)\))?)"
    r"\s*+(?:,(?!$)|$)"
)
UNEXPECTED_OPERATOR = re.compile(r"\s*(==|!=|[=(),])")

#: Supported fields in field selectors, in addition to metadata.name and metadata.namespace.
FIELDS: dict[Resource, tuple[str, ...]] = {
    r.POD: ("spec.nodeName", "status.phase"),
    r.EVENT: ("type", "reason", *(f"involvedObject.{f}" for f in ("kind", "namespace", "name", "uid", "fieldPath"))),
}


@dataclass(frozen=True)
class Requirement:
    """A condition on a label or field: its value is in `values`, or not if `negated`. The value None means unset."""

    key: str
    negated: bool
    values: frozenset[str | None]

    def holds(self, value: str | None) -> bool:
        """Whether a value satisfies this requirement. The value is None if the key is not set."""
        return (value in self.values) is not self.negated


@dataclass(frozen=True)
class Selector:
    """The label and field requirements of a list or watch."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels or self.fields)

    def matches(self, obj: Obj) -> bool:
        """Whether an object satisfies all requirements."""
        labels = obj["metadata"].get("labels") or {}
        return all(q.holds(labels.get(q.key)) for q in self.labels) and all(
            q.holds(str(at(obj, q.key, ""))) for q in self.fields
        )


EVERYTHING = Selector()


def parse(resource: Resource, labels: str, fields: str) -> Selector:
    """Parse `labelSelector` and `fieldSelector`. Raise ApiError 400 if one is invalid or not supported."""
    return Selector(tuple(parse_labels(labels)), tuple(parse_fields(resource, fields)))


def parse_labels(text: str) -> Iterator[Requirement]:
    """Parse a label selector such as `a=b,c!=d,e in (f,g),!h`. Raise ApiError 400 if it is invalid."""
    text, at = text.strip(), 0
    while at < len(text):
        if symbol := UNEXPECTED_OPERATOR.match(text, at):
            raise ApiError(400, f"found '{symbol[1]}', expected: !, identifier, or 'end of string'")
        found = LABEL_TERM.match(text, at)
        if not found:
            raise ApiError(400, f"unable to parse requirement: '{text[at:]}'")
        key, operator = found["key"], found["is"] or found["set"]
        values = [found["value"]] if found["is"] else [v.strip() for v in (found["values"] or "").split(",")]
        breaches = [(key, why) for why in qualified(key)]
        breaches += [(value, why) for value in values for why in LABEL_VALUE.breaches(value)]
        for value, why in breaches:
            raise ApiError(400, f'unable to parse requirement: <nil>: Invalid value: "{value}": {why}')
        if operator:
            yield Requirement(key, operator in ("!=", "notin"), frozenset(values))
        else:  # the key exists or, with `!`, doesn't exist
            yield Requirement(key, not found["absent"], frozenset([None]))
        at = found.end()


def of_labels(selector: Obj, labels: dict[str, str]) -> bool:
    """Whether labels match a LabelSelector (matchLabels and matchExpressions)."""
    wanted = [Requirement(key, False, frozenset([value])) for key, value in (selector.get("matchLabels") or {}).items()]
    for term in selector.get("matchExpressions") or ():
        negated = term["operator"] in ("NotIn", "Exists")
        values = term.get("values") or [None] if term["operator"] in ("In", "NotIn") else [None]
        wanted.append(Requirement(term["key"], negated, frozenset(values)))
    return all(q.holds(labels.get(q.key)) for q in wanted)


def parse_fields(resource: Resource, text: str) -> Iterator[Requirement]:
    """Parse a field selector such as `metadata.name=a,status.phase!=Running`.

    :raises ApiError: 400 if the selector is invalid, or if the resource doesn't support a field.
    """
    known = ("metadata.name", *(("metadata.namespace",) if resource.namespaced else ()), *FIELDS.get(resource, ()))
    for term in filter(None, text.split(",")):
        found = re.fullmatch(r"([^=!]*)(!=|==?)(.*)", term, re.DOTALL)
        if not found:
            raise ApiError(400, f"invalid selector: '{text}'; can't understand '{term}'")
        key, operator, value = found.groups()
        if key not in known:
            raise ApiError(400, f"field label not supported: {key}")
        yield Requirement(key, operator == "!=", frozenset([value]))
