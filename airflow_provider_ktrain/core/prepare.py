"""The one path from what a user writes to a checked manifest: of operators, `ktrain run` and `ktrain check`.

`core/manifest/job_request.py` then fits the manifest to the cluster and stamps it. A manifest is input, not evidence:
what another job's submission has added to it says nothing about the new job, and is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from airflow_provider_ktrain.core.checks import ERROR, WARNING, Problem, check
from airflow_provider_ktrain.core.identity.names import PREFIX, code_hash
from airflow_provider_ktrain.core.identity.task_variables import CHECKPOINT_DIR, UNHASHED_VARIABLES
from airflow_provider_ktrain.core.kinds import Manifest, kind_of
from airflow_provider_ktrain.core.kinds.form import POD_OVERRIDE
from airflow_provider_ktrain.core.kinds.trainjob.patches import DEADLINE, PATCHES
from airflow_provider_ktrain.core.manifest.deadline import backstops_of
from airflow_provider_ktrain.core.manifest.loader import Document, plain
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build, overlay
from airflow_provider_ktrain.core.manifest.start import CODE_VOLUMES, without_start
from airflow_provider_ktrain.core.manifest.transform import modernize
from airflow_provider_ktrain.core.state.pods.objects import avoids_node

KUEUE_MANAGER = "kueue.x-k8s.io/manager"  #: Manager of Kueue's entry of runtimePatches.
SAVED = "this manifest was saved from a job of ktrain, and what had been added to that job is left out"
CODE_HINT = "its code is left out, too: to send files, set code"
_OUR_VARIABLES = (*UNHASHED_VARIABLES, CHECKPOINT_DIR)
#: Lists whose entries are left out if they have lost everything but what identifies them.
_NAMED = ("containers", "initContainers", "replicatedJobs", PATCHES)
_NAMES = {"name", "manager", "time"}


@dataclass(frozen=True)
class Prepared:
    """A manifest with the options, as far as it can be known without the cluster.

    :param manifest: not to be submitted if one of the problems is an error.
    :param found: the problems of this manifest, errors first.
    :param changes: warnings about what was changed in the document.
    :param document: what the user wrote. Without content: the manifest was built from the options.
    """

    manifest: Manifest
    found: list[Problem]
    changes: list[Problem]
    document: Document

    @property
    def problems(self) -> list[Problem]:
        """All problems, errors first."""
        return [*self.found, *self.changes]

    @property
    def errors(self) -> list[Problem]:
        """The problems for which the manifest can't be submitted."""
        return [problem for problem in self.problems if problem.level is ERROR]


def prepare(
    document: Document | None, options: JobOptions, kind: str | None = None, *, keeps_name: bool = False
) -> Prepared:
    """The manifest of a job with the options, and its problems.

    :param document: what the user wrote; any part of it may be wrong. None builds a manifest from the options.
    :param kind: the kind that the job must have, and that is built. Default: None, any training job.
    :param keeps_name: whether the name is checked, for users who create the job themselves. Default: False, the job
        gets a name of its own, and the manifest has none.
    :raises ManifestError: an option doesn't fit the manifest, or a manifest can't be built from the options.
    """
    loaded, changes = (None, []) if document is None else _as_input(document.content)

    def checked(applied: JobOptions) -> tuple[Manifest, list[Problem]]:
        manifest = build(str(kind), applied) if loaded is None else overlay(loaded, applied)
        if not keeps_name and isinstance(metadata := manifest.get("metadata"), dict):
            metadata.pop("name", None)
        return manifest, check(manifest, kind)

    document = document or Document(None)
    try:
        manifest, problems = checked(options)
    except Exception:  # an option can't be applied to a manifest of another shape: its own problems say more
        if loaded is None or not (broken := Prepared(loaded, check(loaded, kind), changes, document)).errors:
            raise
        return broken
    if options.pod_override:
        before = checked(replace(options, pod_override={}))[1]
        problems = [p if p in before else replace(p, message=f"{POD_OVERRIDE}: {p.message}") for p in problems]
    return Prepared(manifest, problems, changes, document)


def _as_input(given: Mapping[str, Any]) -> tuple[Manifest, list[Problem]]:
    """The manifest without what another job's submission has added, and with the fields of its operator; the changes.

    Only labels and annotations of ours prove that it was saved from a job. Then the rest is removed, too. What options
    of the earlier task have set can't be told from what the user wrote, and is kept.
    """
    result, changes = plain(given), list[Problem]()
    if _without_ours(result) != result:
        changes.append(Problem(WARNING, "saved", "$.metadata", SAVED, hint=CODE_HINT if code_hash(given) else ""))
        result = _without_ours(result, backstops_of(given))
    result, moved = modernize(result)
    for key in moved:
        operator = kind_of(result["kind"]).operator_of(str(result.get("apiVersion"))).name
        message, there = f"{operator} ignores {key} at the top of spec", f"spec.runPolicy.{key}"
        hint = "it is submitted there; move it under runPolicy"
        changes.append(Problem(WARNING, "legacy-run-policy", f"$.spec.{key}", message, f"spec.{key}", there, hint))
    return result, changes


def _without_ours(value: Any, backstops: frozenset[int] | None = None, key: str = "") -> Any:
    """A copy of a manifest, or of the part of it at a key, without what a task has added. What this empties is removed.

    :param backstops: activeDeadlineSeconds that a task has set in a saved manifest. Default: None, only labels and
        annotations are removed.
    """
    if isinstance(value, dict):
        left = [(k, v, _without_ours(v, backstops, k)) for k, v in value.items() if not _is_ours(k, v, key, backstops)]
        return {k: after for k, before, after in left if after or not before}
    if not isinstance(value, list):
        return value
    if backstops is None:
        return [_without_ours(item, backstops, key) for item in value]
    if key == "command":
        return without_start(value)
    kept = [(item, _without_ours(item, backstops, key)) for item in value if not _is_addition(item, key)]
    named = [after for before, after in kept if after or not before]  # an emptied node selector term matches no node
    return [item for item in named if not (key in _NAMED and isinstance(item, dict) and item.keys() <= _NAMES)]


def _is_ours(key: str, value: Any, holder: str, backstops: frozenset[int] | None) -> bool:
    """Whether an entry of the mapping at the key `holder` was added by a task."""
    if holder in ("labels", "annotations"):
        return key.startswith(f"{PREFIX}/")
    if backstops is None:
        return False
    suspends = key == "suspend" and holder in ("spec", "runPolicy")
    return suspends or (key == DEADLINE and isinstance(value, int) and value in backstops)


def _is_addition(item: Any, key: str) -> bool:
    """Whether an entry of the list at a key was added by a task, or by Kueue."""
    return isinstance(item, dict) and (
        (key == "env" and item.get("name") in _OUR_VARIABLES)
        or (key in ("volumes", "volumeMounts") and item.get("name") in CODE_VOLUMES)
        or (key == "matchFields" and avoids_node(item))
        or (key == PATCHES and item.get("manager") == KUEUE_MANAGER)
    )
