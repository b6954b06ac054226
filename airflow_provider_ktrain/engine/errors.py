"""What a failed request means: whether to repeat it, and the error that tells the user what to do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from airflow_provider_ktrain.core.errors import AccessError, ClusterError, ManifestError, NoRightError, UnreachableError
from airflow_provider_ktrain.engine.api import ApiStatusError, ApiUnavailable

T = TypeVar("T")
#: how the API server words a missing right, and a refusal by the admission of a ResourceQuota or of a webhook
_NO_RIGHT = re.compile(r"cannot \S+ (resource|path) ")
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>.+), used: (?P<used>.+), limited: (?P<limit>.+)"
)
_WEBHOOK = re.compile(r'admission webhook "(?P<name>[^"]+)" denied the request: (?P<why>.*)', re.DOTALL)
#: webhooks of the job's own operators; another one's rules, such as Kueue's or a policy engine's, may change
_OPERATORS_OWN = (".kubeflow.org", "jobset.x-k8s.io")
#: the denial is about another object, such as the runtime of a TrainJob (recording 55): that may be created
_OTHER_OBJECT = re.compile(r"\bnot found\b|^spec\.runtimeRef: ", re.IGNORECASE)
_WRITES = ("create", "patch", "delete")


def is_transient(error: ApiUnavailable | ApiStatusError) -> bool:
    """Whether the same request may well succeed later."""
    return isinstance(error, ApiUnavailable) or error.transient


async def retry_transient(ask: Callable[[], Awaitable[T]], end: float) -> T:
    """Ask again while the API server is away or overloaded, until `end` of `time.monotonic`."""
    delay = 0.2
    while True:
        try:
            return await ask()
        except (ApiUnavailable, ApiStatusError) as e:
            if not is_transient(e) or time.monotonic() + delay > end:
                raise
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5)


def unreachable(error: ApiUnavailable) -> UnreachableError:
    """The error for a cluster that can't be reached."""
    return UnreachableError(
        f"the cluster cannot be reached: {error}. Check the `kubernetes` connection (kube_config_path, kube_config, "
        "in_cluster), or KUBECONFIG, and that the API server answers: kubectl version"
    )


def refuses_manifest(error: ApiStatusError) -> bool:
    """Whether the answer to a create proves that this manifest is refused for what stands in it.

    Recordings 21, 29 and 55: the schema and validation answer 400 and 422, a webhook of the operator 403 or 400.
    """
    if webhook := _WEBHOOK.match(error.message):
        return webhook["name"].endswith(_OPERATORS_OWN) and not _OTHER_OBJECT.search(webhook["why"])
    if error.status == 413:  # may come from a proxy, without a reason
        return True
    return error.status in (400, 422) and bool(error.reason)


def explain(
    error: ApiStatusError | ApiUnavailable, verb: str, resource: str, namespace: str = ""
) -> ManifestError | AccessError | ClusterError:
    """The error of a refused request: what was expected, what was found, what to do.

    ManifestError, which is final, only where the refusal is about the manifest itself (`refuses_manifest`).
    """
    if isinstance(error, ApiUnavailable):
        return unreachable(error)
    where = f" in namespace {namespace!r}" if namespace else ""
    if error.status == 401:
        return AccessError(
            f"the API server refused the credentials (401): {error.message}. Expected a valid token or certificate; "
            "check the connection's kubeconfig, or renew its token"
        )
    if error.status == 404 and error.details.get("kind") == "namespaces":
        return ClusterError(
            f"namespace: found {namespace!r}, which does not exist in the cluster. Create it: kubectl create namespace "
            f"{namespace}"
        )
    if error.status == 403 and "because it is being terminated" in error.message:
        return ClusterError(
            f"namespace: {namespace!r} is being terminated ({error.message}). Create it again once it is gone"
        )
    if error.status == 403 and (quota := _QUOTA.search(error.message)):
        return ClusterError(
            f"the quota {quota['name']!r} of namespace {namespace!r} is exceeded (403): asked for {quota['asked']}, "
            f"used {quota['used']}, limit {quota['limit']}. Wait until others are done (the task's `retries`), let a "
            f"Kueue queue admit the job (`queue_name`), or have the quota raised: kubectl describe quota -n "
            f"{namespace} {quota['name']}"
        )
    # only writes are admitted, and only Kubernetes gives a reason: what else is refused is a right that is missing
    if error.status == 403 and (_NO_RIGHT.search(error.message) or verb not in _WRITES or not error.reason):
        return NoRightError(
            f"no right to {verb} {resource}{where} (403): {error.message}. Grant it: `ktrain rbac --namespace "
            f"{namespace or 'NAMESPACE'}` prints the least Role, or: kubectl create role ktrain-{verb} -n "
            f"{namespace or 'NAMESPACE'} --verb={verb} --resource={resource}"
        )
    if verb == "create" and refuses_manifest(error):
        return ManifestError(f"the API server refused the manifest ({error.status} {error.reason}): {error.message}")
    if webhook := _WEBHOOK.match(error.message):
        return ClusterError(
            f"the admission webhook {webhook['name']!r} denied the job ({error.status}): {webhook['why']}. Ask whoever "
            "runs that webhook, or create the object that it names; the task's `retries` try again"
        )
    return ClusterError(f"the API server could not {verb} {resource}{where} ({error.status}): {error.message}")
