"""Checks of a manifest before it is submitted: each problem has a JSON path, what was found, and what to do.

A rule is a small function in a registry: `error_rules.py`, `warning_rules.py` and `silent_rules.py` hold those for
every kind, `<kind>_rules.py` those for one. `server_rules.py` judges what a cluster answers. Fields and types are
compared with a schema: `core/manifest/schema.py`, or the one that the server publishes. `rbac.py` has what
`ktrain rbac` prints.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain.core.checks.problem import ERROR, WARNING, Level, Problem, raise_errors
from airflow_provider_ktrain.core.kinds import KINDS, did_you_mean
from airflow_provider_ktrain.core.text.output import SUGGESTION

if TYPE_CHECKING:  # imported in functions: a DAG file that is only parsed checks no manifest
    from airflow_provider_ktrain.core.checks.job import Field, Rule
    from airflow_provider_ktrain.core.manifest.schema import Mismatch

__all__ = ["ERROR", "WARNING", "Level", "Problem", "check", "raise_errors", "rules"]

#: Code, message, and a hint for mismatches without one, by the schema's kind of mismatch.
_MISMATCHES = {
    "unknown": (
        "unknown-field", "unknown field `{field}`: the API server will probably reject it", "correct or remove it",
    ),
    "unknown to the server": (
        "unknown-field", "unknown field `{field}`: the API server will reject it", "correct or remove it",
    ),
    "type": ("type", "`{field}` has the wrong type", "write {expected}"),
    "value": ("value", "`{field}` has a value that is not allowed", "write {expected}"),
    "missing": ("missing", "`{field}` is missing", "add `{field}`"),
    "duplicate": ("duplicate", "duplicate entry in a list", "remove one of them"),
}  # fmt: skip

_SUGGESTED = re.compile(rf"{SUGGESTION}`(.*)`\?$")
_OF_MISSING = ("missing", "no-replicas", "no-container")  #: Codes of fields that are missing.


def rules() -> tuple[Rule, ...]:
    """All rules. Their modules are imported on the first call, so that a DAG file which is only parsed skips them."""
    from airflow_provider_ktrain.core.checks.job import REGISTRY

    for name in ("error_rules", "warning_rules", "silent_rules", *(f"{kind.lower()}_rules" for kind in sorted(KINDS))):
        importlib.import_module(f"{__name__}.{name}")
    return tuple(REGISTRY)


def check(
    manifest: Mapping[str, Any], kind: str | None = None, schema: Mapping[str, Any] | None = None
) -> list[Problem]:
    """All problems of a manifest, errors first, each group in the order of the rules.

    :param kind: the kind that the manifest must have (`PyTorchJob`). Default: any training job.
    :param schema: the JSON schema that the server publishes for this kind and version, `$ref`s to
        `#/components/schemas/` allowed. With it an unknown field is an error, as under strict field validation.
        Default: our own table of fields, as for parts of which the schema says nothing. An unknown field that isn't
        similar to a known one is then a warning.
    """
    from airflow_provider_ktrain.core.checks.job import Field, Job
    from airflow_provider_ktrain.core.manifest import schema as schemas

    root = Field(manifest)
    identity = list(_identity(root, kind))
    name = root["kind"].text
    if name not in KINDS or (kind and name != kind):
        return identity
    job = Job(root, KINDS[name])
    own = schemas.schema_of(name, job.operator.version)
    shape = [_mismatch(m, schema is not None) for m in schemas.compare(manifest, own if schema is None else schema)]
    parts = schemas.undescribed(manifest, schema, own) if schema is not None else ()
    shape += [_mismatch(m, False) for part, of, path in parts for m in schemas.compare(part, of, path)]
    found = [problem for rule in rules() for problem in rule.problems(job)]
    return sorted([*identity, *_without_consequences(found, shape)], key=lambda p: p.level is not ERROR)


def _identity(root: Field, expected_kind: str | None) -> Iterator[Problem]:
    """Kind and apiVersion are those of a training job."""
    kind, version = root["kind"], root["apiVersion"]
    kinds = [expected_kind] if expected_kind else sorted(KINDS)
    if kind.text not in kinds:
        hint = f"use {kind.text}Operator for it" if kind.text in KINDS else did_you_mean(kind.text)
        found, expected = repr(kind.value) if kind.present else "nothing", " or ".join(kinds)
        yield Problem(ERROR, "kind", kind.path, "unsupported kind", found, expected, hint or "use a training job")
    elif version.text not in KINDS[kind.text].api_versions:
        expected = " or ".join(KINDS[kind.text].api_versions)
        found = repr(version.value) if version.present else "nothing"
        hint = "rewrite the manifest for this version" if version.present else f"write apiVersion: {expected}"
        message = f"unsupported apiVersion of {kind.text}"
        yield Problem(ERROR, "api-version", version.path, message, found, expected, hint)


def _mismatch(m: Mismatch, strict: bool) -> Problem:
    """The manifest matches the schema of its kind."""
    code, message, hint = _MISMATCHES["unknown to the server" if strict and m.code == "unknown" else m.code]
    # another version may have an unknown field, while the API server refuses one that is misspelt
    unknown = m.code == "unknown" and not m.hint.startswith(SUGGESTION)
    lenient = unknown or (m.code == "duplicate" and ".env[" in m.path)  # older CRDs take the last one
    level = WARNING if lenient and not strict else ERROR
    quoted = re.search(r"\['(.*?)'\]$", m.path)
    field = quoted[1] if quoted else m.path.rpartition(".")[2]
    hint = m.hint or hint.format(field=field, expected=m.expected)
    return Problem(level, code, m.path, message.format(field=field), m.found, m.expected, hint)


def _without_consequences(found: list[Problem], shape: list[Problem]) -> Iterator[Problem]:
    """One problem for one mistake.

    At the same path, a rule's finding is more precise than the schema's. Problems within a value of the wrong type or
    in the wrong list are consequences of that. A field is missing because its name is misspelt.
    """
    suggested = [(p.path.rpartition(".")[0], _SUGGESTED.match(p.hint)) for p in shape if p.code == "unknown-field"]
    meant = {f"{parent}.{match[1]}" for parent, match in suggested if match}
    found, shape = ([p for p in ps if p.path not in meant or p.code not in _OF_MISSING] for ps in (found, shape))
    by_rule = {p.path for p in found}
    broken = tuple(p.path for p in (*shape, *found) if p.code in ("type", "wrong-list"))

    def within(problem: Problem) -> bool:
        return any(problem.path.startswith((f"{path}.", f"{path}[")) for path in broken)

    mistyped = {p.path for p in shape if p.code == "type"}
    yield from (p for p in found if not within(p) and p.path not in mistyped)
    yield from (p for p in shape if not within(p) and (p.path not in by_rule or p.code == "type"))
