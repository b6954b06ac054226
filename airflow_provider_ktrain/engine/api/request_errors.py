"""What a failed request means: whether to repeat it, and the error for the user."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from airflow_provider_ktrain.core.errors import AccessError, ClusterError, ManifestError, NoRightError, UnreachableError
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import ApiStatusError, ApiUnavailable

T = TypeVar("T")
#: First and longest pause between two creates that exceed a quota.
FIRST_QUOTA_PAUSE_SECONDS, MAX_QUOTA_PAUSE_SECONDS = 1.0, 30.0
# messages of the API server about a missing right, an exceeded ResourceQuota, and a webhook that denied a request
_ASKED = re.compile(r'cannot (\w{1,20}) resource "([\w/-]{1,100})"')
_NO_RIGHT = re.compile(r"cannot \S+ (resource|path) ")
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>.+), used: (?P<used>.+), limited: (?P<limit>.+)"
)
_WEBHOOK = re.compile(r'admission webhook "(?P<name>[^"]+)" denied the request(?:: | )(?P<why>.*)', re.DOTALL)
#: Webhooks of the operators of the job; the rules of other webhooks, such as Kueue's or a policy engine's, may change.
_OPERATORS_OWN = tuple({kind.behavior.webhooks for kind in KINDS.values()})
#: Another object is the reason, such as the runtime of a TrainJob (recording 55), which may be created or changed.
_OTHER_OBJECT = re.compile(r"\bnot found\b|\bspec\.runtimeRef\b", re.IGNORECASE)
_POLICY = "ValidatingAdmissionPolicy '"  # in the message if a policy of the cluster refuses the object, with any status
_WRITES = ("create", "patch", "delete")
_RBAC_OPTIONS = {"configmaps": "--code "}  # of `ktrain rbac`, by the resource that is only in the Role with it


async def retry_transient(
    ask: Callable[[], Awaitable[T]],
    end: float,
    *,
    refused_until: float = 0,
    warn: Callable[[str], object] | None = None,
) -> T:
    """Repeat `ask` while the API server is unreachable or overloaded.

    :param end: value of `timing.now()` from which the error is raised instead.
    :param refused_until: value of `timing.now()` until which a refused request (401, 403) is repeated as well: an
        API server that has just started refuses everything until it has read the rights. Default: it isn't repeated.
    :param warn: gets one message before the first repetition. Default: None, nothing is logged.
    """
    delay = 0.2
    while True:
        try:
            return await ask()
        except (ApiUnavailable, ApiStatusError) as e:
            refused = e.status in (401, 403)
            last = min(end, refused_until) if refused else end
            if not (refused or e.transient) or timing.now() + delay > last:
                raise
            if warn is not None:
                seconds = last - timing.now()
                warn(f"The API server can't be reached or is overloaded. Trying again for {seconds:.0f} s.\n{e}")
                warn = None
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5)


async def retry_any(ask: Callable[[], Awaitable[T]], end: float, *, pause: float, warn: Callable[[str], object]) -> T:
    """Repeat `ask` after any error: nobody comes after a kill or a release.

    That of a task that others share and somebody has canceled is such an error; a cancellation of this task isn't.

    :param end: value of `timing.now()` from which the error is raised instead.
    :param pause: seconds between two attempts.
    :param warn: gets each new error.
    """
    before = ""
    while True:
        try:
            return await ask()
        except (Exception, asyncio.CancelledError) as e:
            if is_canceled(e) or timing.now() + pause > end:
                raise
            if repr(e) != before:
                warn(f"Trying again for {end - timing.now():.0f} s.\n{e}")
            before = repr(e)
        await asyncio.sleep(pause)


def is_canceled(error: BaseException) -> bool:
    """Whether an error is the cancellation of the present task, and not that of a task that it waits for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


class QuotaWait:
    """Repeats a request while a ResourceQuota rejects it: other jobs release the quota when they end.

    :param patience: for how long, in seconds, from the first rejection. 0: not at all.
    :param warn: gets a message when the wait begins, and when it ends in vain.
    """

    def __init__(self, patience: float, job: str, warn: Callable[[str], object]) -> None:
        self._patience, self._job, self.warn = patience, job, warn
        self._since: float | None = None
        self._pause = FIRST_QUOTA_PAUSE_SECONDS

    async def on(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`.

        :raises ApiStatusError, ApiUnavailable: the request fails; also if the quota is still exceeded at the end.
        """
        while True:
            try:
                return await ask()
            except ApiStatusError as e:
                if not self._patience or e.status != 403 or not _QUOTA.search(e.message):
                    raise
                now, limit = timing.now(), f"{self._patience:.0f} s (schedule_timeout)"
                if self._since is None:
                    self._since = now
                    self.warn(f"{self._job} exceeds a ResourceQuota. Trying for up to {limit}.")
                if now + self._pause > self._since + self._patience:
                    self.warn(f"The ResourceQuota for {self._job} is still exceeded after {limit}.")
                    raise
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, MAX_QUOTA_PAUSE_SECONDS)


def refuses_manifest(error: ApiStatusError) -> bool:
    """Whether the response to a create proves that the content of the manifest is the reason for the refusal.

    Schema and validation respond with 400, 413 and 422, a webhook of the operator with 403 or 400 (recordings 21, 29,
    55). Without Kubernetes' reason, the response may be that of a proxy.
    """
    if webhook := _WEBHOOK.match(error.message):
        return webhook["name"].endswith(_OPERATORS_OWN) and not _OTHER_OBJECT.search(webhook["why"])
    return error.status in (400, 413, 422) and bool(error.reason) and _POLICY not in error.message


def explain(
    error: ApiStatusError | ApiUnavailable, verb: str, resource: str, namespace: str = ""
) -> ManifestError | AccessError | ClusterError:
    """The error for a failed request: its first line contains what happened and what to do, the next one details.

    It is a ManifestError, which forbids retries, only if the content of the manifest is the reason.

    :param resource: plural and group, such as pytorchjobs.kubeflow.org.
    """
    if isinstance(error, ApiUnavailable):
        return UnreachableError(
            "the cluster can't be reached. Check the `kubernetes` connection (kube_config_path, kube_config, "
            f"in_cluster) or KUBECONFIG, and `kubectl version`.\n{error}"
        )
    where = f" in namespace {namespace!r}" if namespace else ""
    if error.status == 401:
        return AccessError(
            "the API server refused the credentials (401). Check the connection's kubeconfig, or renew its token.\n"
            f"The API server answered: {error.message}"
        )
    if error.status == 404 and error.details.get("kind") == "namespaces":
        return ClusterError(f"namespace {namespace!r} does not exist. Create it: kubectl create namespace {namespace}")
    if error.status == 403 and "because it is being terminated" in error.message:
        return ClusterError(
            f"namespace {namespace!r} is being terminated. Create it again when its deletion has finished.\n"
            f"The API server answered: {error.message}"
        )
    if error.status == 403 and (quota := _QUOTA.search(error.message)):
        return ClusterError(
            f"the quota {quota['name']!r} of namespace {namespace!r} is exceeded (403). Set `schedule_timeout` or "
            f"`retries` to wait, use a Kueue queue (`queue_name`), or raise the quota.\n"
            f"Requested: {quota['asked']}; used: {quota['used']}; "
            f"limit: {quota['limit']}. See: kubectl describe quota -n {namespace} {quota['name']}"
        )
    # Only writes go through admission, and only Kubernetes sets a reason. Any other 403 is a missing right.
    if error.status == 403 and (_NO_RIGHT.search(error.message) or verb not in _WRITES or not error.reason):
        asked = _ASKED.search(error.message)
        if asked and asked[2] == resource.partition(".")[0]:
            verb = asked[1]  # of several requests
        rbac = f"ktrain rbac {_RBAC_OPTIONS.get(resource, '')}--namespace {namespace or 'NAMESPACE'}"
        rbac += " --service-account NAMESPACE:NAME"
        return NoRightError(
            f"no right to {verb} {resource}{where} (403). `{rbac}` prints the Role and its binding.\n"
            f"The API server answered: {error.message}"
        )
    if verb == "create" and refuses_manifest(error):
        return ManifestError(f"the API server refused the manifest ({error.status} {error.reason}): {error.message}")
    if webhook := _WEBHOOK.match(error.message):
        return ClusterError(
            f"the admission webhook {webhook['name']!r} denied the job ({error.status}). Ask its administrator, or "
            f"create the object that it names; a retry tries again.\nThe webhook answered: {webhook['why']}"
        )
    return ClusterError(f"the API server could not {verb} {resource}{where} ({error.status}): {error.message}")
