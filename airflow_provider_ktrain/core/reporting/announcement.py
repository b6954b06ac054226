"""What the log shows of a job when it is submitted, and when it has succeeded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import yaml

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.reporting.lineage import of_manifest
from airflow_provider_ktrain.core.state.accelerators import described
from airflow_provider_ktrain.core.state.pods.devices import pod_of, requested_by
from airflow_provider_ktrain.core.text.output import clipped, counted, format_duration
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp

MAX_MANIFEST_CHARS = 64 * 1024  #: Length of the logged YAML: Airflow loses messages of megabytes.


def describe_job(ref: JobRef, kind: Kind, job: Mapping[str, Any], *, created: bool) -> str:
    """The job's replicas and image, and commands to look at it, one a line.

    :param created: whether this try created the job; otherwise it adopted it.
    """
    requested = of_manifest(kind, job)
    each = {role: described(requested_by(pod_of(spec)), "0 GPUs") for role, spec in kind.replicas(job).items()}
    roles = [f"{counted(n, role)} x {each[role]}" for role, n in requested["replicas"].items() if n]
    images = ", ".join(dict.fromkeys(requested["images"].values()))
    resource = f"{kind.plural}.{kind.group}/{ref.name}"
    return "\n".join(
        [
            f"{'Submitted' if created else 'Following'} {ref}: {', '.join(roles)}",
            f"image: {images or 'that of the runtime'}",
            f"kubectl get {resource} -n {ref.namespace}",
            f"kubectl get pods -n {ref.namespace} -l {ref.pod_selector}",
            f"kubectl logs -n {ref.namespace} -l {ref.pod_selector} --all-containers --prefix --follow",
            f"kubectl describe {resource} -n {ref.namespace}",
        ]
    )


def summary_of_success(ref: JobRef, kind: Kind, job: Mapping[str, Any], now: datetime) -> str:
    """One line for the log: the job, its run time and its replicas.

    :param now: the current time, used if the job has no completionTime.
    """
    status = job.get("status") or {}
    created = (job.get("metadata") or {}).get("creationTimestamp")
    began = parse_timestamp(status.get("startTime") or created)
    ended = parse_timestamp(status.get("completionTime")) or now
    run_time = f" after {format_duration((ended - began).total_seconds())}" if began else ""
    replicas = counted(kind.size(job), "replica")
    return f"{ref} succeeded{run_time} with {replicas}."


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The manifest as YAML. Texts aren't folded, so that a masker finds secrets in them."""
    plain = json.loads(json.dumps(manifest, default=str))
    text = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)
    return clipped(text.rstrip(), MAX_MANIFEST_CHARS)


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such."""


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represented)
