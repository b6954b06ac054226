"""Problems of a manifest before it costs anything: each with a JSON path, what was found, what to do.

A check is one small function in a registry (`refused.py`: errors, `advice.py`: warnings); fields and types are compared
with a schema (`core/manifest/schema.py`, or what the server publishes).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from airflow_provider_ktrain.core.checks import error_rules as refused
from airflow_provider_ktrain.core.checks import warning_rules as advice
from airflow_provider_ktrain.core.checks.job import RULES, At, Job, Level, Problem
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.base import KINDS
from airflow_provider_ktrain.core.manifest import schema as schemas

__all__ = ["RULES", "Level", "Problem", "advice", "check", "raise_errors", "refused"]

ERROR, WARNING = Level.ERROR, Level.WARNING
#: of the schema's mismatches: code, message, and the hint where the mismatch has none
_CODES = {
    "unknown": (
        "unknown-field",
        "{field} is no field that we know here: jobs are created strictly, and a server that does not know it either "
        "refuses the job",
        "correct it, or leave it out",
    ),
    "unknown to the server": (
        "unknown-field", "the server knows no field {field} here, and refuses the job", "correct it, or leave it out",
    ),
    "type": ("type", "{field} is of the wrong type", "write {expected}"),
    "value": ("value", "{field} has a value that is not one of those allowed", "write {expected}"),
    "missing": ("missing", "{field} is missing", "add {field}"),
    "duplicate": ("duplicate", "an entry of this list stands twice", "leave one of them out"),
}  # fmt: skip


def check(
    manifest: Mapping[str, Any], kind: str | None = None, schema: Mapping[str, Any] | None = None
) -> list[Problem]:
    """All problems of a manifest, errors first, each group in the order of the manifest's rules.

    :param kind: the kind that is wanted (`PyTorchJob`); any training job by default.
    :param schema: the JSON schema that the server publishes for this kind and version, `$ref`s to
        `#/components/schemas/` allowed. With it an unknown field is an error, as under strict field validation; without
        it, a warning by our own table of fields.
    """
    root = At(manifest)
    identity = list(_identity(root, kind))
    said = root["kind"].text
    if said not in KINDS or (kind and said != kind):
        return identity
    known = KINDS[said]
    version = root["apiVersion"].text.rpartition("/")[2]
    job = Job(root, known, version if version in known.versions else known.versions[0])
    strict = schema is not None
    shape = [_mismatch(m, strict) for m in schemas.compare(manifest, schema or schemas.schema_of(said, job.version))]
    found = [problem for registered in RULES for problem in registered.problems(job)]
    return sorted([*identity, *_without_echo(found, shape)], key=lambda p: p.level is not ERROR)


def raise_errors(problems: Iterable[Problem]) -> None:
    """:raises ManifestError: where there is an error among the problems; it tells all of them, one a line."""
    errors = [p for p in problems if p.level is ERROR]
    if not errors:
        return
    first = errors[0]
    more = "".join(f"\n  {p}" for p in errors[1:])
    raise ManifestError(
        first.message, where=first.path, found=first.found, expected=first.expected, remedy=first.hint + more
    )


def _identity(root: At, wanted: str | None) -> Iterator[Problem]:
    kind, version = root["kind"], root["apiVersion"]
    kinds = [wanted] if wanted else sorted(KINDS)
    if kind.text not in kinds:
        near = next(iter(difflib.get_close_matches(kind.text, kinds, n=1)), None)
        hint = f"did you mean {near}?" if near and near.lower() == kind.text.lower() else "give a training job"
        if kind.text in KINDS:
            hint = f"use {kind.text}Operator for it"
        found = repr(kind.value) if kind.here else "nothing"
        yield Problem(ERROR, "kind", kind.path, "this is no job of the wanted kind", found, " or ".join(kinds), hint)
    elif version.text not in KINDS[kind.text].api_versions:
        expected = " or ".join(KINDS[kind.text].api_versions)
        found = repr(version.value) if version.here else "nothing"
        hint = f"write apiVersion: {expected}" if not version.here else "rewrite the manifest for this version"
        yield Problem(ERROR, "api-version", version.path, "no such API version of this kind", found, expected, hint)


def _mismatch(m: schemas.Mismatch, strict: bool) -> Problem:
    code, message, hint = _CODES["unknown to the server" if strict and m.code == "unknown" else m.code]
    lenient = m.code == "unknown" or (m.code == "duplicate" and ".env[" in m.path)  # older CRDs take the last one
    level = WARNING if lenient and not strict else ERROR
    quoted = re.search(r"\['(.*?)'\]$", m.path)
    field = quoted[1] if quoted else m.path.rpartition(".")[2]
    hint = m.hint or hint.format(field=field, expected=m.expected)
    return Problem(level, code, m.path, message.format(field=field), m.found, m.expected, hint)


def _without_echo(found: list[Problem], shape: list[Problem]) -> Iterator[Problem]:
    """One cause, one problem: a rule knows better than the schema at its path, and what is of the wrong type or in the
    wrong list explains whatever lies within."""
    by_rule = {p.path for p in found}
    broken = tuple(p.path for p in (*shape, *found) if p.code in ("type", "wrong-list"))

    def within(problem: Problem) -> bool:
        return any(problem.path.startswith((f"{path}.", f"{path}[")) for path in broken)

    mistyped = {p.path for p in shape if p.code == "type"}
    yield from (p for p in found if not within(p) and p.path not in mistyped)
    yield from (p for p in shape if not within(p) and (p.path not in by_rule or p.code == "type"))
