"""Checks of `pod_override`, a pod template that a task merges into those of its job. Messages name paths inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from airflow_provider_ktrain.core.checks.job import Field
from airflow_provider_ktrain.core.checks.problem import Level, Problem, raise_errors
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.names import PREFIX
from airflow_provider_ktrain.core.identity.task_variables import VARIABLE_PREFIX
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.kinds.form import POD_OVERRIDE, POD_TEMPLATE_FIELDS, override_patches
from airflow_provider_ktrain.core.kinds.strategic_merge import member, merged
from airflow_provider_ktrain.core.manifest import schema as schemas
from airflow_provider_ktrain.core.manifest.loader import plain


def check_pod_override(override: Any, kind: Kind) -> None:
    """Check the parameter itself, without the job that it is merged into.

    :raises ManifestError: listing all errors.
    """
    given = plain(override)
    if not isinstance(given, dict):
        text = "rendered templates are text: set render_template_as_native_obj=True on the DAG"
        raise ManifestError(
            "invalid parameter",
            where=POD_OVERRIDE,
            found=type(given).__name__,
            expected="a pod template with metadata and spec, or pod templates by role",
            remedy=text if isinstance(given, str) else 'write {"spec": {"serviceAccountName": "trainer"}}',
        )
    raise_errors(
        [*_roles(given, kind), *(p for _, path, patch in override_patches(given) for p in _problems(patch, path))]
    )


def _roles(override: Mapping[str, Any], kind: Kind) -> Iterator[Problem]:
    """The parameter is a pod template, or has one for each of some roles."""
    if override.keys() <= POD_TEMPLATE_FIELDS:
        return
    for key, value in override.items():
        path = member(POD_OVERRIDE, key)
        if key in POD_TEMPLATE_FIELDS or not kind.has_role(key):
            message = "a role is beside a field of a pod template" if key in POD_TEMPLATE_FIELDS else "unknown role"
            expected = f"metadata and spec, or {' and '.join(kind.roles)}"
            near = next((role for role in kind.roles if role.lower() == key.lower()), None)
            hint = f"did you mean {near}?" if near else "write one pod template, or one for each role"
            yield Problem(Level.ERROR, "parameter", path, message, key, expected, hint)
        elif not isinstance(value, dict) or not value.keys() <= POD_TEMPLATE_FIELDS:
            found = " and ".join(value) if isinstance(value, dict) else type(value).__name__
            hint = 'write {"spec": {...}}'
            yield Problem(Level.ERROR, "parameter", path, "invalid pod template", found, "metadata and spec", hint)


def _problems(patch: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """A pod template has valid types and sets nothing that the task sets itself.

    :raises ManifestError: it can't be merged.
    """
    complete = merged({}, patch, path)
    for mismatch in schemas.compare(complete, schemas.compiled("PodTemplate"), path):
        if mismatch.code in ("type", "value"):
            found = "another value" if ".env[" in mismatch.path else mismatch.found  # it may be a secret
            message = f"`{mismatch.path.rpartition('.')[2]}` has an invalid value"
            hint = mismatch.hint or f"write {mismatch.expected}"
            yield Problem(Level.ERROR, "parameter", mismatch.path, message, found, mismatch.expected, hint)
    root = Field(complete, path)
    for holder in ("labels", "annotations"):
        for key, at in root["metadata"][holder].members():
            if key.startswith(f"{PREFIX}/"):
                yield _reserved(at.path, key, f"a key without the prefix {PREFIX}/")
    for container in (*root["spec"]["containers"], *root["spec"]["initContainers"]):
        for variable in container["env"]:
            if variable["name"].text.startswith(VARIABLE_PREFIX):
                expected = f"a name without the prefix {VARIABLE_PREFIX}"
                yield _reserved(variable.path, variable["name"].text, expected)


def _reserved(path: str, found: str, expected: str) -> Problem:
    """A label, an annotation or a variable is set that the task sets itself."""
    message = f"{found} is reserved for the task"
    return Problem(Level.ERROR, "parameter", path, message, found, expected, "remove it, or rename it")
