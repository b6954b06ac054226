"""What a cluster says of a job before there is one: `ktrain check --server`, and the operators' `dry_run`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core import rbac
from airflow_provider_ktrain.core.checks import ERROR, Problem, check
from airflow_provider_ktrain.core.checks.server import Answer, Answers, Right, judge, queue_of
from airflow_provider_ktrain.core.errors import ManifestError, OperatorMissingError
from airflow_provider_ktrain.core.kinds import KINDS, Kind
from airflow_provider_ktrain.core.manifest import schema
from airflow_provider_ktrain.core.manifest.transform import fit, modernize, stamp
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.errors import explain, unreachable
from airflow_provider_ktrain.engine.jobs import served_version

PLACEHOLDER_NAME = "ktrain-check"  #: of a job whose manifest has none; nothing of that name is ever made
KUEUE_GROUP = "kueue.x-k8s.io"


async def preflight(api: Api, manifest: Mapping[str, Any], namespace: str, *, rendered: bool = True) -> list[Problem]:
    """All that speaks against a job: by our own rules, by the schema that the server publishes, and by its answers.

    Asked are the API version that is served, the namespace, the rights of `ktrain rbac`, the Kueue LocalQueue, and,
    where nothing else is wrong, a dry run of the create (as it would be sent), which runs the operator's webhook.
    Nothing is created.

    :param rendered: False where values are still templates: there is no dry run of such a manifest.
    :raises UnreachableError, AccessError, ClusterError: the cluster cannot be asked.
    """
    kind = KINDS.get(str(manifest.get("kind")))
    if kind is None:
        return check(manifest)
    try:
        version = await served_version(api, kind)
        api_version = f"{kind.group}/{version}"
        sent = fit(modernize(manifest)[0], api_version)
    except OperatorMissingError as e:
        return [*check(manifest), Problem(ERROR, "not-served", "$.kind", str(e))]
    except ManifestError as e:
        return [*check(manifest), Problem(ERROR, "not-served", e.where, e.message, e.found, e.expected, e.remedy)]
    published = await _get(api, f"/openapi/v3/apis/{api_version}")
    problems = check(manifest, schema=schema.published(published.body, kind.name, api_version))
    problems += judge(manifest, await _read_answers(api, kind, manifest, namespace))
    if rendered and not any(p.level is ERROR for p in problems):
        problems += await _dry_run(api, kind, version, sent, namespace)
    return sorted(problems, key=lambda p: p.level is not ERROR)


async def _read_answers(api: Api, kind: Kind, manifest: Mapping[str, Any], namespace: str) -> Answers:
    there, denied = await asyncio.gather(_get(api, f"/api/v1/namespaces/{namespace}"), _denied(api, kind, namespace))
    queue = queue_of(manifest).text
    if not queue:
        return Answers((namespace, there), denied)
    kueue = await _get(api, f"/apis/{KUEUE_GROUP}")
    version = (kueue.body.get("preferredVersion") or {}).get("version")
    if kueue.status != 200 or not version:
        return Answers((namespace, there), denied, kueue)
    path = f"/apis/{KUEUE_GROUP}/{version}/namespaces/{namespace}/localqueues/{queue}"
    return Answers((namespace, there), denied, kueue, await _get(api, path))


async def _get(api: Api, path: str) -> Answer:
    """What is there, or that there is nothing, or that this connection may not look."""
    try:
        return Answer(200, await api.request("GET", path))
    except ApiUnavailable as e:
        raise unreachable(e) from e
    except ApiStatusError as e:
        if e.status not in (403, 404):
            raise explain(e, "get", path) from e
        return Answer(e.status, {})


async def _denied(api: Api, kind: Kind, namespace: str) -> tuple[Right, ...] | None:
    """Those of the rights that we need which this connection has not; None where it may not even ask."""
    needed = [
        Right(verb, resource, group)
        for group, resources, verbs in rbac.RULES
        for resource in resources
        for verb in verbs
        if not group or resource == kind.plural
    ]
    try:
        allowed = await asyncio.gather(*(_may(api, right, namespace) for right in needed))
    except ApiUnavailable as e:
        raise unreachable(e) from e
    except ApiStatusError as e:
        if e.status in (403, 404):
            return None
        raise explain(e, "create", "selfsubjectaccessreviews.authorization.k8s.io") from e
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


async def _dry_run(api: Api, kind: Kind, version: str, manifest: Mapping[str, Any], namespace: str) -> list[Problem]:
    name = (manifest.get("metadata") or {}).get("name") or PLACEHOLDER_NAME
    try:
        await api.request(
            "POST",
            paths.jobs(kind, version, namespace),
            body=stamp(manifest, name, namespace),
            query={"fieldValidation": "Strict", "dryRun": "All"},
        )
    except ApiUnavailable as e:
        raise unreachable(e) from e
    except ApiStatusError as e:
        if e.reason == "AlreadyExists":  # said only of what is valid
            return []
        error = explain(e, "create", f"{kind.plural}.{kind.group}", namespace)
        if isinstance(error, ManifestError) or e.status == 403:
            return [Problem(ERROR, "refused", "$", str(error))]
        raise error from e
    return []
