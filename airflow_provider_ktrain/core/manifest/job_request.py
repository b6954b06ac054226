"""The job that one try of a task requests, and the manifest that is sent for it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity import names
from airflow_provider_ktrain.core.identity.task_variables import ATTEMPT, CHECKPOINT_DIR, task_variables
from airflow_provider_ktrain.core.kinds import Kind, Manifest
from airflow_provider_ktrain.core.kinds.manifest_fields import mapping_at
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.manifest import transform
from airflow_provider_ktrain.core.manifest.code import Code, config_map_name
from airflow_provider_ktrain.core.manifest.deadline import BACKSTOP_SECONDS, backstop
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, overlay
from airflow_provider_ktrain.core.manifest.start import run_with_code, runs_function

#: An Airflow connection in a URL, as ObjectStoragePath accepts it. In other schemes, such as abfs, a container is
#: there.
_CONNECTION = re.compile(r"^(s3[an]?|gs|gcs)://[^/@]+@")


@dataclass(frozen=True)
class JobRequest:
    """The job that one try of a task requests. Nothing in it depends on the cluster.

    The fields that are not listed are parameters of the operators, whose docstrings describe them.

    :param manifest: the manifest with all options, valid as far as it can be checked without a cluster. None if it, or
        a parameter, is invalid.
    :param generated: whether the manifest was built from options alone, so that its API version may be changed.
    :param invalid: why `manifest` is None. Default: None, it isn't.
    :param name_prefix: readable prefix of the job's name. Default: None, the task's id.
    :param namespace: namespace of the job. Default: None, the manifest's, else the connection's, else `default`.
    :param run_seconds: seconds from the creation of the job to its deadline. Default: None, no deadline.
    :param schedule_seconds: how long a create waits for a ResourceQuota. Default: None, it fails at once.
    :param expire_seconds: seconds from the end of the job until the cluster deletes it. Default: None, what the
        manifest sets.
    :param checkpoint_root: base of the task's checkpoint directory. Default: None, the task has none.
    :param runtime_policy: ML policy that the job's runtime must have, such as `torch`. Default: empty, any.
    :param avoid_nodes: nodes that a new job avoids, each with the reason. Default: none.
    """

    kind: Kind
    owner: names.Owner
    first_try: int
    manifest: Manifest | None
    generated: bool = False
    invalid: ManifestError | None = None
    name_prefix: str | None = None
    namespace: str | None = None
    kubernetes_conn_id: str = "kubernetes_default"
    cluster_context: str | None = None
    on_finish_action: names.OnFinishAction = names.OnFinishAction.DELETE_JOB
    reattach: names.Reattach = "always"
    run_seconds: float | None = None
    schedule_seconds: float | None = None
    expire_seconds: int | None = None
    checkpoint_root: str | None = None
    resume_on_clear: bool = False
    dry_run: bool = False
    runtime_policy: str = ""
    avoid_nodes: Mapping[str, str] = field(default_factory=dict)
    code: Code | None = None
    hang_traces: bool = True

    @property
    def job_name(self) -> str:
        """The name of the job: the same for all tries."""
        return self.owner.key.job_name(self.name_prefix, self.kind.name_length)

    def namespace_or(self, default: str) -> str:
        """The namespace of the job."""
        metadata = (self.manifest or {}).get("metadata") or {}
        return self.namespace or metadata.get("namespace") or default

    @property
    def checkpoint_dir(self) -> str | None:
        """The checkpoint directory, as the program gets it."""
        return None if self.checkpoint_location is None else without_connection(self.checkpoint_location)

    @property
    def checkpoint_location(self) -> str | None:
        """The checkpoint directory: the same for all tries. A clear changes it, unless `resume_on_clear` is set.

        Its URL may contain the connection with which a worker reads it.
        """
        if self.checkpoint_root is None:
            return None
        directory = f"{self.checkpoint_root.rstrip('/')}/{self.owner.key.job_name()}"
        cleared = self.first_try > 1 and not self.resume_on_clear
        return f"{directory}/from-try-{self.first_try}" if cleared else directory

    def fitted(self, api_version: str) -> Manifest:
        """The manifest in the API version that the cluster serves, with the checkpoint directory and the code's hash.

        :raises ManifestError: `invalid`; or the manifest is written for another version; or it has code and no command.
        """
        if self.manifest is None:
            raise self.invalid or ManifestError("the job has no manifest")
        manifest = transform.change_version(self.manifest, api_version) if self.generated else self.manifest
        env = {CHECKPOINT_DIR: self.checkpoint_dir} if self.checkpoint_dir is not None else {}
        fitted = overlay(transform.fit(manifest, api_version), JobOptions(env=env))
        if self.code is not None:
            run_with_code(fitted, "")
            mapping_at(mapping_at(fitted, "metadata"), "annotations")[names.CODE_ANNOTATION] = self.code.hash
        return fitted

    def stamped(
        self,
        fitted: Manifest,
        namespace: str,
        submission: str,
        *,
        attempt: int,
        now: float,
        served: Served | None = None,
    ) -> Manifest:
        """The manifest to send: with name, labels, owner, variables of the task, and deadlines for the cluster.

        :param attempt: number of the submission in this life of the task, from 1.
        :param served: what the cluster serves for the job. Default: None, the kind has no runtimes.
        :raises RuntimeMismatchError: the job doesn't fit the runtime or the version of the Trainer.
        """
        key = self.owner.key
        env = task_variables(key.dag_id, key.run_id, key.task_id, key.map_index, self.owner.try_number)
        avoided = tuple(self.avoid_nodes) if self.can_avoid_nodes(served) else ()
        manifest = overlay(fitted, JobOptions(env={ATTEMPT: str(attempt), **env}, avoid_nodes=avoided))
        runtimes = self.kind.runtimes
        if self.code is not None and runtimes and served is not None:
            runtimes.require_code(served)
        stacks, printed = f"ktrain-{submission}" if self.hang_traces else "", dict[str, str]()
        if self.code is not None or (stacks and runs_function(manifest)):
            config_map = None if self.code is None else config_map_name(self.job_name, submission)
            runtime = None if served is None else served.runtime
            manifest = run_with_code(manifest, config_map, stacks=stacks, runtime=runtime)
            printed = {names.STACKS_ANNOTATION: "true"} if stacks else {}
        if runtimes and served is not None:
            manifest = runtimes.expand(manifest, served, name_length=len(self.job_name), policy=self.runtime_policy)
        if self.run_seconds is not None:
            manifest = backstop(manifest, self.run_seconds + BACKSTOP_SECONDS, served=served)
        labels, annotations = self.owner.key.labels(submission), self.annotations(fitted, now=now) | printed
        manifest = transform.stamp(manifest, self.job_name, namespace, labels, annotations)
        return manifest if self.expire_seconds is None else transform.expire(manifest, self.expire_seconds)

    def can_avoid_nodes(self, served: Served | None) -> bool:
        """Whether the pods of a new job can get an affinity: those of a runtime can't on every cluster."""
        return served is None or self.kind.runtimes is None or not self.kind.runtimes.lacks(served)

    def annotations(self, fitted: Manifest | None, *, now: float) -> dict[str, str]:
        """The annotations that this task adds to its job.

        :param fitted: from `fitted`; None if the manifest is invalid, so that only a job that exists can get them.
        """
        annotations = {
            names.OWNER_ANNOTATION: self.owner.annotation(),
            names.MANIFEST_ANNOTATION: "" if fitted is None else manifest_hash(fitted),
            names.FINISH_ANNOTATION: self.on_finish_action.value,
        }
        if self.run_seconds is not None:
            annotations[names.DEADLINE_ANNOTATION] = f"{now + self.run_seconds:.0f}"
            annotations[names.BACKSTOP_ANNOTATION] = str(int(self.run_seconds + BACKSTOP_SECONDS))
        return annotations


def manifest_hash(fitted: Mapping[str, Any]) -> str:
    """A hash of a manifest before name, labels, attempt and deadline are added: `reattach` compares it."""
    return hashlib.sha256(json.dumps(fitted, sort_keys=True, default=str).encode()).hexdigest()[:16]


def without_connection(directory: str) -> str:
    """The directory as the program gets it: without the id of an Airflow connection, `s3://CONNECTION@bucket/path`."""
    return _CONNECTION.sub(r"\1://", directory)
