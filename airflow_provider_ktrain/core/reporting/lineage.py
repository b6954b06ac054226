"""The facts about a training that OpenLineage gets: the content of its run facet `ktrain_training`, and its datasets.

docs/reference/openlineage describes the facet. Its keys are camelCase, as OpenLineage requires. Environment variables
and commands are not in it, because they may contain secrets. Of the logs, it has only the error in a cause's summary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.accelerators import stored
from airflow_provider_ktrain.core.state.pods.devices import accelerators_of_job, pod_of

JOB_KEYS = ("kind", "namespace", "name", "uid")
GPU_SECONDS = ("requested", "queued", "held", "wasted")  #: Keys of the usage that are GPU-seconds.
CAUSE_KEYS = ("category", "summary", "resolution", "replica")  #: `detail` may have lines of a log.
#: Schemes of storage, with the scheme that OpenLineage's naming conventions use.
SCHEMES = {
    "s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "gcs": "gs", "hdfs": "hdfs",
    "abfs": "abfss", "abfss": "abfss", "wasb": "wasbs", "wasbs": "wasbs",
}  # fmt: skip


def of_manifest(kind: Kind, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a job requests: number of replicas and image by role, and accelerators.

    A runtime's own values are not known here: see `Kind.count`.
    """
    specs = kind.replicas(manifest)
    images = {role: _image(kind, manifest, pod_of(spec)) for role, spec in specs.items()}
    requested = stored(accelerators_of_job(manifest))
    requested["others"] = {name: {"gpus": number} for name, number in requested.get("others", {}).items()}
    return {
        "replicas": {role: kind.count(manifest, role) for role in specs},
        "images": {role: image for role, image in images.items() if image},
        **_accelerators(requested),
    }


def of_outcome(outcome: Mapping[str, Any], job: Mapping[str, str]) -> dict[str, Any]:
    """What has run, what it used and why it failed; without what isn't known.

    :param outcome: `engine.follow.outcome.Outcome` as a dict; may be empty.
    :param job: the XCom `job`; may be empty.
    """
    status, usage = mapping(outcome.get("status")), mapping(outcome.get("usage"))
    job = {**mapping(outcome.get("kept")), **mapping(status.get("job")), **job}
    cause = mapping(outcome.get("cause"))
    found = {
        "job": {key: str(job[key]) for key in JOB_KEYS if job.get(key)},
        "codeHash": job.get("code"),
        "phase": outcome.get("phase"),
        "cause": {key: cause[key] for key in CAUSE_KEYS if cause.get(key) not in (None, "")},
    }
    return {key: value for key, value in found.items() if value} | _accelerators(usage)


def _accelerators(used: Mapping[str, Any]) -> dict[str, Any]:
    """The facet's fields of an amount or a usage, as `stored` and `Usage.as_dict` write them."""
    seconds = {key: used[key] for key in GPU_SECONDS if key in used}
    found = {
        "gpus": used.get("gpus"),
        "gpuSeconds": seconds or None,
        "resource": used.get("resource"),
        "otherAccelerators": {name: _accelerators(one) for name, one in mapping(used.get("others")).items()} or None,
        "unknownClaims": used.get("unknown_claims"),
    }
    return {key: value for key, value in found.items() if value is not None}


def dataset(uri: object) -> tuple[str, str] | None:
    """Namespace and name of a dataset in storage, by OpenLineage's naming conventions.

    A password and a query, which may have a signature, are left out.

    :return: None for anything else than the URI of a known storage.
    """
    try:
        parts = urlsplit(uri if isinstance(uri, str) else "")
    except ValueError:
        return None
    scheme = SCHEMES.get(parts.scheme)
    if scheme is None or not parts.netloc:
        return None
    user, at, host = parts.netloc.rpartition("@")
    is_container = at and scheme in ("abfss", "wasbs") and ":" not in user
    return f"{scheme}://{f'{user}@{host}' if is_container else host}", parts.path.strip("/") or "/"


def _image(kind: Kind, manifest: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
    """The image of the training's container; empty if the manifest sets none."""
    main = kind.main_container_name(manifest, {"spec": pod})
    return next((str(c.get("image") or "") for c in pod.get("containers") or () if c.get("name") == main), "")
