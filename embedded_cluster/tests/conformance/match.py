"""Whether what was observed is what was expected.

Dictionaries: each expected key must be there and match. Lists: equal, unless they say otherwise (see `sequence`).
`<any>` in a text stands for any text. Events and pods have rules of their own, because clusters may differ in what they
repeat, but not in what they do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Obj = dict[str, Any]
MORE = "..."


def differences(expected: Obj, observed: Obj) -> list[str]:
    """One line for each difference; none means that all expectations hold."""
    found = list(nested("", {k: v for k, v in expected.items() if k not in ("events", "order", "pods")}, observed))
    for about, lines in expected.get("events", {}).items():
        found += of_events(about, lines, observed["events"].get(about, []))
    if "pods" in expected:
        found += of_pods(expected["pods"], observed["pods"])
    if "order" in expected:
        found += in_order(expected["order"], observed["order"])
    return found


def nested(path: str, expected: Any, observed: Any) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(observed, dict):
        for key, value in expected.items():
            place = f"{path}.{key}" if path else str(key)
            if key not in observed:
                yield f"{place}: expected {value!r}, found nothing"
            else:
                yield from nested(place, value, observed[key])
    elif isinstance(expected, list) and isinstance(observed, list):
        yield from sequence(path, expected, observed)
    elif not same(expected, observed):
        yield f"{path}: expected {expected!r}, found {observed!r}"


def sequence(path: str, expected: list[Any], observed: list[Any]) -> Iterator[str]:
    """Lists are equal, but `...` stands for any number of anything, and a text that begins with `? ` may be missing."""
    if not follows(expected, observed):
        yield f"{path}: expected {expected!r}, found {observed!r}"


def follows(expected: list[Any], observed: list[Any]) -> bool:
    if not expected:
        return not observed
    first, rest = expected[0], expected[1:]
    if first == MORE:
        return any(follows(rest, observed[i:]) for i in range(len(observed) + 1))
    optional = isinstance(first, str) and first.startswith("? ")
    want = first[2:] if optional else first
    if observed and not any(nested("", want, observed[0])) and follows(rest, observed[1:]):
        return True
    return optional and follows(rest, observed)


def same(expected: Any, observed: Any) -> bool:
    if isinstance(expected, str) and isinstance(observed, str) and "<any>" in expected:
        pattern = ".*".join(re.escape(part) for part in expected.split("<any>"))
        return re.fullmatch(pattern, observed, re.DOTALL) is not None
    return bool(expected == observed)


def of_events(about: str, expected: list[str], observed: list[str]) -> Iterator[str]:
    """Events are a set: order and number are the cluster's affair. `? `: may be missing, `...`: allows more."""
    lines = [(line.removeprefix("? "), line.startswith("? ")) for line in expected if line != MORE]
    for line, optional in lines:
        if not optional and not any(same(line, seen) for seen in observed):
            yield f"events.{about}: expected {line!r}, found {observed!r}"
    if MORE not in expected:
        for seen in observed:
            if not any(same(line, seen) for line, _ in lines):
                yield f"events.{about}: did not expect {seen!r}"


def of_pods(expected: Obj, observed: Obj) -> Iterator[str]:
    """Exactly these pods; a pod that was recreated under its name is a list of pods."""
    for name in expected.keys() | observed.keys():
        if name not in observed:
            yield f"pods.{name}: expected, not found"
        elif name not in expected:
            yield f"pods.{name}: not expected"
        else:
            want = expected[name]
            if isinstance(want, list):
                yield from sequence(f"pods.{name}", want, observed[name])
            elif len(observed[name]) > 1:
                yield f"pods.{name}: expected one, found {observed[name]!r}"
            else:
                yield from nested(f"pods.{name}", want, observed[name][0])


def in_order(expected: list[str], observed: list[str]) -> Iterator[str]:
    """The expected marks appear in this order; what is not expected may come in between."""
    rest = iter(observed)
    for mark in expected:
        if not any(same(mark, seen) for seen in rest):
            yield f"order: expected {mark!r} after the marks before it, found {observed!r}"
            return
