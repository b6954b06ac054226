"""Checks of `pod_override`, a pod template that a task merges into those of its job. Messages name paths inside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_provider_ktrain.core.checks.job import Field, Job
from airflow_provider_ktrain.core.checks.problem import Level, Problem, raise_errors
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.names import PREFIX
from airflow_provider_ktrain.core.kinds import KINDS, Kind
from airflow_provider_ktrain.core.kinds.pod_override import POD_OVERRIDE, POD_TEMPLATE_FIELDS, all_patches, pod_patches
from airflow_provider_ktrain.core.kinds.strategic_merge import MERGE_KEYS, identity_of, member, merged
from airflow_provider_ktrain.core.kinds.trainjob.form import TRAINER_FIELDS
from airflow_provider_ktrain.core.kinds.trainjob.patches import ANY_JOB, NODE, PATCHES
from airflow_provider_ktrain.core.manifest import schema as schemas
from airflow_provider_ktrain.core.manifest.loader import plain

RESERVED_VARIABLES = "KTRAIN_"  #: environment variables with this prefix are set by the task
_TOKEN = re.compile(r"\.([A-Za-z_][\w-]*)|\['(.*?)'\]|\[(\d+)\]")


def check_pod_override(override: Any, kind: Kind) -> None:
    """Check the parameter itself, without the job that it is merged into.

    :param override: the value of the parameter.
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
    raise_errors([*_roles(given, kind), *(p for _, path, patch in all_patches(given) for p in _problems(patch, path))])


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
            if variable["name"].text.startswith(RESERVED_VARIABLES):
                expected = f"a name without the prefix {RESERVED_VARIABLES}"
                yield _reserved(variable.path, variable["name"].text, expected)


def _reserved(path: str, found: str, expected: str) -> Problem:
    """A label, an annotation or a variable is set that the task sets itself."""
    message = f"{found} is reserved for the task"
    return Problem(Level.ERROR, "parameter", path, message, found, expected, "remove it, or rename it")


def name_paths(
    problems: Sequence[Problem], before: Sequence[Problem], manifest: Mapping[str, Any], override: Any
) -> list[Problem]:
    """The problems of a job, those that `pod_override` causes with the path inside it.

    :param before: of the same job without `pod_override`.
    :param manifest: the job, with `pod_override` merged into it.
    :param override: the value of the parameter.
    """
    known = set(before)
    places = list(_places(manifest, plain(override)))
    return [p if p in known else replace(p, path=_path_inside(p.path, places)) for p in problems]


Place = tuple[str, Any, Any, str]  #: path and value in the manifest, value and path in the parameter


def _places(manifest: Mapping[str, Any], override: Mapping[str, Any]) -> Iterator[Place]:
    """The places of the manifest that the parameter was merged into."""
    kind = KINDS[str(manifest.get("kind"))]
    job = Job(Field(manifest), kind)
    if not job.kind.runtimes:
        for role, replica in job.replicas.items():
            template = replica.at["template"]
            for path, patch in pod_patches(override, role):
                yield template.path, template.value, patch, path
        return
    for role in (ANY_JOB, NODE):
        for path, patch in pod_patches(override, role):
            for i, container in enumerate((patch.get("spec") or {}).get("containers") or ()):
                if isinstance(container, Mapping) and container.get("name") == NODE:
                    program = {TRAINER_FIELDS.get(key, key): value for key, value in container.items()}
                    trainer = job.spec["trainer"]
                    yield trainer.path, trainer.value, program, f"{path}.spec.containers[{i}]"
    for entry in job.spec[PATCHES]:
        for replicated in entry["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            template = replicated["template"]["spec"]["template"]
            for path, patch in pod_patches(override, replicated["name"].text):
                yield template.path, template.value, patch, path


def _path_inside(path: str, places: Sequence[Place]) -> str:
    """The path in the parameter of what is at a path of the manifest; the same path if it has no such place."""
    for start, value, patch, inside in places:
        if not path.startswith((f"{start}.", f"{start}[")):
            continue
        found = _descend(path[len(start) :], value, patch, inside)
        if found != inside:
            return found
    return path


def _descend(rest: str, value: Any, patch: Any, inside: str) -> str:
    """Follow a path through the manifest and the parameter as far as the parameter goes, then append its end."""
    key = ""
    for token in _TOKEN.finditer(rest):
        step: Any = int(token[3]) if token[3] else token[1] or token[2]
        if isinstance(patch, Mapping) and step in patch:
            key, patch = step, patch[step]
            inside = member(inside, {v: k for k, v in TRAINER_FIELDS.items()}.get(step, step))
            value = value.get(step) if isinstance(value, Mapping) else None
        elif isinstance(patch, list) and isinstance(step, int) and isinstance(value, list) and step < len(value):
            at = _index(patch, value[step], step, key)
            if at is None:
                return inside + rest[token.start() :]
            value, patch, inside = value[step], patch[at], f"{inside}[{at}]"
        else:
            return inside + rest[token.start() :]
    return inside


def _index(patch: Sequence[Any], entry: Any, index: int, key: str) -> int | None:
    """The index in a list of the parameter of an entry of the manifest's list."""
    if key not in MERGE_KEYS:
        return index if index < len(patch) else None
    keys = MERGE_KEYS[key]
    wanted = identity_of(entry, keys)
    return next((i for i, given in enumerate(patch) if identity_of(given, keys) == wanted), None)
