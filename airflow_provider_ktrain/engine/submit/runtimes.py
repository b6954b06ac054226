"""Read what decides how a job with a runtime is sent: the schema that the cluster serves, and the runtime."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from airflow_provider_ktrain.core.checks.server_rules import Answer
from airflow_provider_ktrain.core.errors import RuntimeMismatchError
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.kinds.runtimes import RuntimeRef, Served
from airflow_provider_ktrain.core.manifest import schema
from airflow_provider_ktrain.core.state.pods.objects import name_of
from airflow_provider_ktrain.core.text.output import SUGGESTION
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.answers import Target
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.api.request_errors import explain, retry_transient

Read = Callable[..., Awaitable[Answer]]  #: `answer_to` with the parameters of all requests.
MAX_NAMES = 10  #: How many runtimes a message names.
SCHEMA_PATIENCE_SECONDS = 15.0  #: Limit to repeat requests for a schema that the API server can't serve (5xx).


async def read_served(
    api: Api,
    kind: Kind,
    version: str,
    manifest: Mapping[str, Any],
    namespace: str,
    *,
    patience: float = 0,
    log: Log | None = None,
) -> Served | None:
    """What the cluster serves for a job. None: jobs of this kind have no runtime.

    :param patience: how long to repeat requests to an unreachable or overloaded API server, in seconds. Default: 0.
    :param log: where to log what is left out because of a missing right. Default: None, nowhere.
    :raises RuntimeMismatchError: the runtime does not exist, or the operator is too old for a submission.
    """
    if kind.runtimes is None:
        return None
    read = functools.partial(answer_to, api, end=timing.now() + patience, log=log)
    fields = await _spec_fields(read, kind, version)
    if fields is not None:
        kind.runtimes.require_supported(fields)
    runtime, unreadable = None, f"the schema of {kind.name} can't be read" if fields is None else ""
    if ref := kind.runtimes.ref(manifest):
        found = await read(api_paths.runtime(kind, version, ref, namespace))
        if found.status == 404:
            others = await read(api_paths.runtime(kind, version, replace(ref, name=""), namespace), optional=True)
            other = kind.runtimes.of_other_kind(ref)
            same = await read(api_paths.runtime(kind, version, other, namespace), optional=True)
            where = f" in namespace {namespace}" if ref.namespaced else ""
            raise RuntimeMismatchError(
                f"the {ref} does not exist{where}",
                where="$.spec.runtimeRef",
                found=ref.name,
                expected=f"a {ref.kind}",
                remedy=f"there is a {other}: set runtimeRef.kind to {other.kind}"
                if same.status == 200
                else _remedy(ref, [name_of(runtime) for runtime in others.body.get("items") or ()]),
            )
        if found.status == 200:
            runtime = found.body
        else:
            unreadable = f"no right to get {ref.plural}.{kind.group}"
    served = Served(fields is not None, runtime, unreadable)
    if log is not None and (lacks := kind.runtimes.lacks(served)):
        log.info(lacks)
    return served


def _remedy(ref: RuntimeRef, names: list[str]) -> str:
    """What to do about a runtime that doesn't exist.

    :param names: of the runtimes that exist; empty if there are none, or the connection may not list them.
    """
    if near := difflib.get_close_matches(ref.name, names):
        return f"{SUGGESTION}{' or '.join(near)}?"
    there = f"there are {', '.join(sorted(names)[:MAX_NAMES])}; " if names else ""
    return f"{there}create it, or correct the name: `kubectl get {ref.plural}` lists them"


async def _spec_fields(read: Read, kind: Kind, version: str) -> frozenset[str] | None:
    """The fields of `spec` that the cluster serves. None: the schema can't be read.

    Versions of the Trainer differ in their fields, but not in their API version. An API server that can't publish its
    schema may still run jobs: its errors 5xx are handled like a missing right.
    """
    api_version = f"{kind.group}/{version}"
    document = await read(f"/openapi/v3/apis/{api_version}", optional=True)
    published = schema.published(document.body, kind.name, api_version)
    if published is None:
        crd = await read(api_paths.definition(kind), optional=True)
        versions = (crd.body.get("spec") or {}).get("versions") or ()
        published = next((v["schema"]["openAPIV3Schema"] for v in versions if v.get("name") == version), None)
    return schema.spec_fields(published) or None if published is not None else None


async def answer_to(
    api: Api,
    path: str,
    *,
    end: float = 0,
    log: Log | None = None,
    optional: bool = False,
    metadata_only: bool = False,
) -> Answer:
    """The object at a path, or that it isn't found (404) or may not be read (403).

    :param end: value of `timing.now()` until which requests are repeated. Default: 0, not at all.
    :param optional: after SCHEMA_PATIENCE_SECONDS, errors of the API server (5xx) are answers, too. Default: False.
    """
    schema_end = timing.now() + SCHEMA_PATIENCE_SECONDS

    async def ask() -> Answer:
        try:
            return Answer(200, await api.request("GET", path, metadata_only=metadata_only))
        except ApiStatusError as e:
            if optional and e.status >= 500 and timing.now() > schema_end:
                return Answer(e.status, {})
            raise
        except ApiUnavailable as e:  # what isn't served has no Status; nothing irreversible follows from that here
            if e.page == 404 and not Target.of(path).name:
                return Answer(404, {})
            if optional and e.page >= 500 and timing.now() > schema_end:  # errors of /openapi have none, too
                return Answer(e.page, {})
            raise

    try:
        return await retry_transient(ask, end, warn=log.warning if log else None)
    except (ApiStatusError, ApiUnavailable) as e:
        if e.status not in (403, 404) and not (optional and e.status >= 500):
            raise explain(e, "get", path) from None
        return Answer(e.status, {})
