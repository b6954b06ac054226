"""Check a manifest against a cluster without creating the job: `ktrain check --server` and the operators' `dry_run`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from airflow_provider_ktrain.core.checks import ERROR, WARNING, Problem, check, rbac
from airflow_provider_ktrain.core.checks.job import Field, Job
from airflow_provider_ktrain.core.checks.references import Reference, references
from airflow_provider_ktrain.core.checks.server_rules import (
    Answers,
    Right,
    cluster_queue_of,
    judge,
    priority_class_of,
    queue_of,
)
from airflow_provider_ktrain.core.checks.trainjob_rules import judge_runtime
from airflow_provider_ktrain.core.errors import KtrainError, ManifestError, RuntimeMismatchError
from airflow_provider_ktrain.core.identity.names import code_hash
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.manifest import schema
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.state.queue.kueue_status import runs_elsewhere
from airflow_provider_ktrain.core.state.status import wants_suspension
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.api.job_calls import Log, served_version
from airflow_provider_ktrain.engine.api.request_errors import explain
from airflow_provider_ktrain.engine.submit.runtimes import answer_to, read_served

SUBMISSION = "dry-run"  #: Value of the label of a job that is never created.
KUEUE_GROUP = "kueue.x-k8s.io"
#: Codes of errors that a dry run doesn't find. It ignores unknown fields after one was found.
_NOT_OF_DRY_RUN = ("unknown-field", "reference")


async def preflight(
    api: Api,
    request: JobRequest,
    namespace: str,
    *,
    rendered: bool = True,
    patience: float = 0,
    log: Log | None = None,
) -> list[Problem]:
    """All problems of a job: by our own checks, by the schema that the server publishes, and by its responses.

    This requests the API version that the server serves, the namespace, the rights of `ktrain rbac`, the queues and the
    priority class of Kueue, the metadata of the objects that the manifest names, and the runtime of a TrainJob. Unless
    these checks find an error that would be met again, it requests a dry run of the creation, which also runs the
    operator's webhook. Nothing is created.

    :param rendered: False if values are still templates: then there is no dry run. Default: True.
    :param patience: how long to repeat requests to an unreachable or overloaded API server, in seconds. Default: 0.
    :raises OperatorMissingError, VersionNotServedError, RuntimeMismatchError: the cluster can't run the job as it is.
    """
    kind = request.kind
    version = await served_version(api, kind, patience=patience)
    api_version = f"{kind.group}/{version}"
    manifest = request.fitted(api_version)
    published = await answer_to(api, f"/openapi/v3/apis/{api_version}")
    fields = schema.published(published.body, kind.name, api_version)
    problems = check(manifest, schema=fields)
    answers = await _read_answers(api, kind, manifest, namespace)
    problems += judge(manifest, answers)
    if rendered and not any(p.code == "type" for p in problems):
        try:
            served = await read_served(api, kind, version, manifest, namespace, patience=patience, log=log)
        except RuntimeMismatchError as e:
            if not problems:
                raise
            return sorted([*problems, Problem.of("runtime", e, "$.spec")], key=lambda p: p.level is not ERROR)
        if served is not None and served.runtime is not None:
            known = {(p.level, p.code, p.path) for p in problems}
            found = judge_runtime(manifest, served.runtime, len(request.job_name))
            problems += [p for p in found if (p.level, p.code, p.path) not in known]
        errors = [p for p in problems if p.level is ERROR]
        try:
            sent = request.stamped(manifest, namespace, SUBMISSION, attempt=1, now=timing.epoch(), served=served)
        except RuntimeMismatchError as e:
            if not errors:
                raise
            if not any(p.code == "runtime-patch" for p in errors):  # that says the same
                problems.append(Problem.of("runtime", e, "$.spec"))
        if all(p.code in _NOT_OF_DRY_RUN for p in errors):
            queued, strict = answers.queue is not None, not errors
            try:
                of_run = await _dry_run(api, kind, version, sent, namespace, queued=queued, strict=strict)
                problems = _merged(problems, of_run)
            except KtrainError:
                if strict:  # else there are errors to be shown
                    raise
    return sorted(problems, key=lambda p: p.level is not ERROR)


async def _read_answers(api: Api, kind: Kind, manifest: Mapping[str, Any], namespace: str) -> Answers:
    queue = queue_of(manifest).text
    kueue = await answer_to(api, f"/apis/{KUEUE_GROUP}") if queue else None
    version = (kueue.body.get("preferredVersion") or {}).get("version") if kueue else None
    there, denied = await asyncio.gather(
        answer_to(api, f"/api/v1/namespaces/{namespace}"),
        _denied(api, kind, namespace, kueue=bool(version), code=bool(code_hash(manifest))),
    )
    missing = () if there.status == 404 else await _missing(api, kind, manifest, namespace)
    answers = Answers((namespace, there), denied, kueue, missing=missing)
    if not version:
        return answers
    base = f"/apis/{KUEUE_GROUP}/{version}"
    local = await answer_to(api, f"{base}/namespaces/{namespace}/localqueues/{queue}")
    cluster, priority = cluster_queue_of(local), priority_class_of(manifest).text
    return replace(
        answers,
        queue=local,
        cluster_queue=await answer_to(api, f"{base}/clusterqueues/{cluster}") if cluster else None,
        priority_class=await answer_to(api, f"{base}/workloadpriorityclasses/{priority}") if priority else None,
    )


async def _missing(api: Api, kind: Kind, manifest: Mapping[str, Any], namespace: str) -> tuple[Reference, ...]:
    """The objects that the manifest names and that don't exist. What the connection may not read is left out."""

    async def is_missing(reference: Reference) -> bool:
        if not reference.may_exist:
            return True
        path = api_paths.core(namespace, reference.plural, reference.at.text)
        return (await answer_to(api, path, metadata_only=True)).status == 404

    named = references(Job(Field(manifest), kind))
    missing = await asyncio.gather(*map(is_missing, named))
    return tuple(reference for reference, is_absent in zip(named, missing, strict=True) if is_absent)


async def _denied(api: Api, kind: Kind, namespace: str, *, kueue: bool, code: bool) -> tuple[Right, ...] | None:
    """The rights that the provider needs and this connection lacks. None: it may not check its rights."""
    needed = [
        Right(verb, resource, group)
        for rule in rbac.rules(kueue=kueue, code=code)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if not group or group == KUEUE_GROUP or resource == kind.plural
    ]
    try:
        allowed = await asyncio.gather(*(_may(api, right, namespace) for right in needed))
    except (ApiStatusError, ApiUnavailable) as e:
        if e.status in (403, 404):
            return None
        raise explain(e, "create", "selfsubjectaccessreviews.authorization.k8s.io") from None
    return tuple(right for right, may in zip(needed, allowed, strict=True) if not may)


async def _may(api: Api, right: Right, namespace: str) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {"namespace": namespace, "verb": right.verb, "group": right.group, "resource": resource}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes | ({"subresource": subresource} if subresource else {})},
    }
    answer = await api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
    return bool((answer.get("status") or {}).get("allowed"))


def _merged(problems: list[Problem], found: list[Problem]) -> list[Problem]:
    """Both, where a refusal of unknown fields makes the warnings about these fields errors."""
    fields = [re.findall(r'unknown field "([^"]+)"', p.message) if p.code == "refused" else [] for p in found]
    refused = {f"$.{field}" for names in fields for field in names}
    known = {p.path for p in problems if p.code == "unknown-field"}
    said = (p for p, names in zip(found, fields, strict=True) if not names or not {f"$.{n}" for n in names} <= known)
    return [*(replace(p, level=ERROR) if p.path in refused & known else p for p in problems), *said]


async def _dry_run(
    api: Api, kind: Kind, version: str, manifest: Mapping[str, Any], namespace: str, *, queued: bool, strict: bool
) -> list[Problem]:
    """The problems of a create that changes nothing.

    Kueue's webhook suspends a job that it manages, and sets `managedBy` for a queue of MultiKueue.

    :param strict: whether unknown fields are problems.
    """
    try:
        created = await api.request(
            "POST",
            api_paths.jobs(kind, version, namespace),
            body=manifest,
            query={"fieldValidation": "Strict" if strict else "Ignore", "dryRun": "All"},
        )
    except (ApiStatusError, ApiUnavailable) as e:
        if isinstance(e, ApiStatusError) and e.reason == "AlreadyExists":  # by an earlier try of the task: it is valid
            return []
        error = explain(e, "create", f"{kind.plural}.{kind.group}", namespace)
        if isinstance(error, ManifestError) or e.status in (403, 422):
            return [Problem(ERROR, "refused", "$", str(error))]
        raise error from None
    if runs_elsewhere(created):
        at = queue_of(manifest)
        message = "MultiKueue would run the job in another cluster: its pods can't be followed or released from here"
        return [Problem(ERROR, "multikueue", at.path, message, at.text, "a queue of this cluster", "use another queue")]
    if queued and not wants_suspension(created):
        at = queue_of(manifest)
        message = f"Kueue doesn't manage {kind.plural} in namespace {namespace}: the job starts at once, without quota"
        hint = (
            f"ask an administrator to add {kind.group}/{kind.name.lower()} to integrations.frameworks of Kueue's "
            "configuration (PyTorchJob is off by default since Kueue 0.19), or remove the queue"
        )
        return [Problem(WARNING, "queue", at.path, message, at.text, "a kind that Kueue manages", hint)]
    return []
