"""Submit: create a job, or take over the one that stands where it would be. Create is the lock.

Runs in workers only, so that no manifest enters trigger kwargs.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from airflow_provider_ktrain.core.errors import (
    AccessError,
    ClusterError,
    ForeignJobError,
    ManifestError,
    NoRightError,
    OperatorMissingError,
    UnreachableError,
)
from airflow_provider_ktrain.core.identity import (
    DEADLINE_ANNOTATION,
    FINISH_ANNOTATION,
    MANIFEST_ANNOTATION,
    OWNER_ANNOTATION,
    PREFIX,
    SUBMISSION_LABEL,
    SUSPENDED_ANNOTATION,
    Action,
    JobRef,
    Owner,
    Reattach,
    decide,
    differences,
)
from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.timestamps import parse_timestamp
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.release import (
    MERGE_PATCH,
    Mode,
    foreground,
    is_going,
    job_pods,
    passing,
    patiently,
    pods_before,
    read,
    release,
)

Object = dict[str, Any]
T = TypeVar("T")
DELETION_PATIENCE = 600.0  #: seconds that a job which is being deleted is waited for
OVERDUE = 30.0  #: seconds after its time at which a pod's node, rather than its grace period, is suspected


class Log(Protocol):
    """What the engine says, and to whom: structlog's and Airflow's loggers fit."""

    def info(self, event: Any, *args: Any, **kw: Any) -> Any: ...

    def warning(self, event: Any, *args: Any, **kw: Any) -> Any: ...


@dataclass(frozen=True)
class Submitted:
    """The job that this try follows from now on.

    :param job: as the API server answered.
    :param created: False where an earlier try's job was adopted, or its result is taken.
    """

    ref: JobRef
    job: Object
    created: bool


async def served_version(api: Api, kind: Kind, *, patience: float = 0) -> str:
    """The API version in which this cluster serves the kind: discovered, never guessed.

    :param patience: seconds that an unreachable or overloaded API server is asked again.
    :raises OperatorMissingError: no version that we know is served.
    :raises AccessError, UnreachableError, ClusterError: other ends of a request.
    """
    end = time.monotonic() + patience

    async def discover(path: str) -> Object:
        try:
            return await patiently(lambda: api.request("GET", path), end)
        except ApiStatusError as e:
            if e.status == 404:
                return {}
            raise explain(e, "GET", path) from e
        except ApiUnavailable as e:
            raise unreachable(e) from e

    group = await discover(f"/apis/{kind.group}")
    offered = [v["version"] for v in group.get("versions") or ()]
    for version in [v for v in kind.versions if v in offered]:
        served = await discover(f"/apis/{kind.group}/{version}")
        if any(r["name"] == kind.plural for r in served.get("resources") or ()):
            return version
    raise OperatorMissingError(
        f"the cluster serves no {kind.name}: expected {' or '.join(kind.api_versions)}, found "
        f"{', '.join(f'{kind.group}/{v}' for v in offered) or f'no version of {kind.group}'}. Install "
        f"{' or '.join(kind.operators)}, or check the connection"
    )


@dataclass(frozen=True)
class _Claim:
    """What one try wants to have under its job's name.

    :param manifest: stamped. Of an invalid one only the metadata.
    :param invalid: why the manifest cannot be submitted; empty where it can.
    :param changed: whether it counts as changed; None compares it with the job that is found.
    """

    kind: Kind
    version: str
    manifest: Object
    me: Owner
    first_try: int
    reattach: Reattach
    invalid: str = ""
    changed: bool | None = None

    @property
    def namespace(self) -> str:
        return str(self.manifest["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def path(self) -> str:
        return paths.jobs(self.kind, self.version, self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.kind.name} {self.namespace}/{self.name}"


async def submit(
    api: Api,
    kind: Kind,
    version: str,
    build: Callable[[str], Object],
    me: Owner,
    first_try: int,
    *,
    reattach: Reattach = "always",
    patience: float = 120,
    deletion_patience: float = DELETION_PATIENCE,
    log: Log,
) -> Submitted:
    """Create the job, or adopt, take over, replace or wait for the one that has its name.

    From the second try on, the job of an earlier try is looked for before a create is tried: an API server that refuses
    the create (a quota, a manifest that has become invalid) does not say that the name is taken.

    :param build: the stamped manifest, given the value of its submission label.
    :param first_try: of `core.identity.first_try_since_clear`.
    :param patience: seconds that an unreachable or overloaded API server is asked again.
    :param deletion_patience: seconds that a job of that name which is being deleted is waited for.
    :raises ManifestError: the API server or the operator's webhook refuses the manifest for what stands in it.
    :raises ForeignJobError: the name is taken by a job that is not ours.
    :raises AccessError, UnreachableError, ClusterError: other ends of a request; ClusterError also for a deletion that
        does not end.
    """
    claim = _Claim(kind, version, build(uuid.uuid4().hex[:12]), me, first_try, reattach)
    old = _Old(deletion_patience, log)
    look_first = me.try_number > 1
    while True:
        if look_first and (taken := await _asking("patch", lambda: _take(api, claim, old, log), claim, patience, log)):
            return taken
        look_first = True
        if created := await _asking("create", lambda: _create(api, claim), claim, patience, log):
            return created


async def adopt(
    api: Api,
    kind: Kind,
    version: str,
    metadata: Object,
    me: Owner,
    first_try: int,
    *,
    reattach: Reattach,
    invalid: ManifestError,
    patience: float = 120,
    deletion_patience: float = DELETION_PATIENCE,
    log: Log,
) -> Submitted:
    """Take over the job of an earlier try where this try's manifest is invalid, so that none can be created.

    Under `if_unchanged` an invalid manifest counts as changed, so the job is released; one that only cannot be read now
    (not `final`) proves no change.

    :param metadata: of the stamped manifest: namespace, name, annotations.
    :raises ManifestError: `invalid`, where no job of an earlier try is left.
    :raises ForeignJobError, AccessError, UnreachableError, ClusterError: as `submit`.
    """
    claim = _Claim(
        kind, version, {"metadata": metadata}, me, first_try, reattach, invalid=str(invalid), changed=invalid.final
    )
    old = _Old(deletion_patience, log)
    while await _asking("get", lambda: _find(api, claim), claim, patience, log) is not None:
        if taken := await _asking("patch", lambda: _take(api, claim, old, log), claim, patience, log):
            return taken
    raise invalid


async def _asking(verb: str, ask: Callable[[], Awaitable[T]], claim: _Claim, patience: float, log: Log) -> T:
    """What `ask` returns; an API server that is away or overloaded is asked again for `patience` seconds."""
    end, delay = time.monotonic() + patience, 0.5
    while True:
        try:
            return await ask()
        except (ApiStatusError, ApiUnavailable) as e:
            again = passing(e) or (isinstance(e, ApiStatusError) and e.conflict)  # a quota that changed meanwhile
            if not again or time.monotonic() + delay > end:
                raise explain(e, verb, f"{claim.kind.plural}.{claim.kind.group}", claim.namespace) from e
            # it may have been carried out all the same: then the next create answers 409
            log.warning(f"The API server cannot take {claim} now ({e}); trying again")
            await asyncio.sleep(delay)
            delay = min(delay * 2, 10)


async def _create(api: Api, claim: _Claim) -> Submitted | None:
    """Create the job; None where its name is taken."""
    collection = paths.jobs(claim.kind, claim.version, claim.namespace)
    try:
        job = await api.request("POST", collection, body=claim.manifest, query={"fieldValidation": "Strict"})
    except ApiStatusError as e:
        if e.status == 409 and e.reason == "AlreadyExists":
            return None
        raise
    return Submitted(await _ref(api, claim.kind, claim.version, job, claim.me), job, created=True)


async def _find(api: Api, claim: _Claim) -> Object | None:
    """The job that has the claim's name, whoever it belongs to."""
    try:
        return await api.request("GET", claim.path)
    except ApiStatusError as e:
        if e.status == 404:
            return None
        raise


async def _take(api: Api, claim: _Claim, old: _Old, log: Log) -> Submitted | None:
    """Decide over the job that has our name and carry it out; None where the name may be free now: look again."""
    found = await _find(api, claim)
    if found is None:
        return None
    differs = _annotation(found, MANIFEST_ANNOTATION) != _annotation(claim.manifest, MANIFEST_ANNOTATION)
    changed = differs if claim.changed is None else claim.changed
    decision = decide(found, claim.me, claim.first_try, reattach=claim.reattach, changed=changed)
    log.info(f"{claim} exists: {decision.reason}. Decision: {decision.action.value}")
    match decision.action:
        case Action.REFUSE:
            raise ForeignJobError(
                f"{claim} exists and is not for this try to take: {decision.reason}. Expected: no job of that name, or "
                f"one of an earlier try of this task. Give this task another `name`, or delete the job: kubectl delete "
                f"-n {claim.namespace} {claim.kind.plural} {claim.name}"
            )
        case Action.WAIT:
            await old.gone(api, await _ref(api, claim.kind, claim.version, found, claim.me))
            return None
        case Action.REPLACE:
            await _replace(api, claim, found, log)
            return None
        case Action.TAKE_RESULT | Action.ADOPT:
            adopted = decision.action is Action.ADOPT
            if adopted and (changed or claim.invalid):
                log.warning(_what_differs(claim, found))
            suspended = adopted and bool(_annotation(found, SUSPENDED_ANNOTATION))
            if suspended:
                await old.pods_gone(api, await _ref(api, claim.kind, claim.version, found, claim.me))
                log.info(f"{claim} was suspended when an earlier try ended: it is resumed")
            return await _own(api, claim, found, resume=suspended)


async def _replace(api: Api, claim: _Claim, found: Object, log: Log) -> None:
    """Release the job that was found, unless it has changed since."""
    ref = await _ref(api, claim.kind, claim.version, found, Owner.of(found) or claim.me)
    pods = await pods_before(api, ref)
    try:  # what was decided holds for what was read: it may have succeeded since
        await api.request("DELETE", claim.path, body=foreground(found))
    except ApiStatusError as e:
        if e.status in (404, 409):
            return
        raise
    log.info((await release(api, ref, Mode.DELETE, before=pods)).text)


async def _own(api: Api, claim: _Claim, found: Object, *, resume: bool) -> Submitted | None:
    """Make this try the owner of the job that was found; None where the job has changed since."""
    patch: Object = {
        "metadata": {
            "resourceVersion": found["metadata"]["resourceVersion"],
            "annotations": {
                OWNER_ANNOTATION: claim.me.annotation(),
                FINISH_ANNOTATION: _annotation(claim.manifest, FINISH_ANNOTATION),
                SUSPENDED_ANNOTATION: None,
            },
        }
    }
    if resume:
        # its time begins anew, as it does for the operator: a resumed job gets another startTime
        patch["metadata"]["annotations"][DEADLINE_ANNOTATION] = _annotation(claim.manifest, DEADLINE_ANNOTATION)
        patch["spec"] = {"runPolicy": {"suspend": False}}
    try:
        job = await api.request("PATCH", claim.path, body=patch, content_type=MERGE_PATCH)
    except ApiStatusError as e:
        if e.status in (404, 409):
            return None
        raise
    # the answer to our own create may have been lost
    created = not claim.invalid and _label(found, SUBMISSION_LABEL) == _label(claim.manifest, SUBMISSION_LABEL)
    return Submitted(await _ref(api, claim.kind, claim.version, job, claim.me), job, created)


def _what_differs(claim: _Claim, found: Object) -> str:
    """The warning about a job that is adopted although this try's manifest is another, or invalid."""
    if claim.invalid:
        return (
            f"The manifest cannot be submitted any more, so {claim} goes on with the one that it was submitted with. "
            f"A new submission would fail: {claim.invalid}"
        )
    differing = [p for p in differences(claim.manifest["spec"], found.get("spec")) if PREFIX not in p]
    return (
        f"The manifest has changed since {claim} was submitted; the running job keeps its own. It differs "
        f"in {', '.join(differing[:20]) or 'its metadata'}. Use reattach='if_unchanged' to replace such a job"
    )


class _Old:
    """The wait for the job before ours, which is being deleted, or for its pods before it is resumed.

    :param patience: seconds, of which each tenth is said.
    """

    def __init__(self, patience: float, log: Log) -> None:
        self._patience, self._log = patience, log
        self._began: float | None = None  # lost connections in between do not begin it anew
        self._said: float | None = None

    async def gone(self, api: Api, ref: JobRef) -> None:
        """Wait until it is gone. ClusterError where it stays: what holds it, and what to do."""
        while (job := await read(api, ref)) is not None:
            if self._due():
                pods = await job_pods(api, ref)
                self._say(ref, "being deleted", "; ".join(map(_going, pods)) or _finalizers(job), pods)
            await asyncio.sleep(0.5)

    async def pods_gone(self, api: Api, ref: JobRef) -> None:
        """Wait until no pod is left that its suspension deletes. ClusterError where one stays."""
        while pods := [pod for pod in await job_pods(api, ref) if is_going(pod)]:
            if self._due():
                self._say(ref, "being suspended", "; ".join(map(_going, pods)), pods)
            await asyncio.sleep(0.5)

    def _due(self) -> bool:
        """Whether it is time to say how long this has taken, or to give up."""
        now = time.monotonic()
        self._began = self._began or now
        self._said = self._said or now
        return now - self._said >= self._patience / 10 or now - self._began >= self._patience

    def _say(self, ref: JobRef, what: str, held: str, pods: Sequence[Object]) -> None:
        self._said = time.monotonic()
        seconds = self._said - (self._began or self._said)
        if seconds >= self._patience:
            raise ClusterError(_stuck(ref, what, seconds, held, pods))
        self._log.info(f"{ref} is still {what} after {seconds:.0f} s, held by {held}")


def _stuck(ref: JobRef, what: str, seconds: float, held: str, pods: Sequence[Object]) -> str:
    names = " ".join(p["metadata"]["name"] for p in pods)
    remedy = (
        "It goes once they have ended. Where a node is lost for good, and only there: kubectl delete pod -n "
        f"{ref.namespace} {names} --force --grace-period=0"
        if pods
        else f"See kubectl get -n {ref.namespace} {kind_of(ref.kind).plural} {ref.name} -o yaml"
    )
    return f"{ref} is still {what} after {seconds:.0f} s of waiting, held by {held}. {remedy}"


def _going(pod: Mapping[str, Any]) -> str:
    """What is known of a pod that is to go; its node we have no right to read."""
    meta, spec = pod["metadata"], pod.get("spec") or {}
    due = parse_timestamp(meta.get("deletionTimestamp"))  # the grace period is in it
    grace = meta.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30))
    if due is None:
        why = "not asked to end yet"
    elif (datetime.now(UTC) - due).total_seconds() > OVERDUE:
        why = f"was to end by {due:%H:%M:%S} UTC: is its node ready?"
    else:
        why = f"may end until {due:%H:%M:%S} UTC: its grace period is {grace} s"
    return f"pod {meta['name']} on {spec.get('nodeName') or 'no node'} ({why})"


def _finalizers(job: Mapping[str, Any]) -> str:
    names = ", ".join(job["metadata"].get("finalizers") or ())
    return f"its finalizers: {names}" if names else "nothing that shows"


def _annotation(job: Mapping[str, Any], name: str) -> str | None:
    value = (job["metadata"].get("annotations") or {}).get(name)
    return None if value is None else str(value)


def _label(job: Mapping[str, Any], name: str) -> str | None:
    value = (job["metadata"].get("labels") or {}).get(name)
    return None if value is None else str(value)


async def _ref(api: Api, kind: Kind, version: str, job: Mapping[str, Any], owner: Owner) -> JobRef:
    meta = job["metadata"]
    return JobRef(
        kind=kind.name,
        version=version,
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta.get("uid", ""),
        owner=owner.ti_id,
        deployment=owner.key.deployment,
        submission=(meta.get("labels") or {}).get(SUBMISSION_LABEL, ""),
        cluster=await api.cluster(),
    )


async def check_cluster(api: Api, ref: JobRef) -> None:
    """See that the job is in this cluster: in another one it would look deleted, and a retry would submit it again.

    The same URL and authority are the same cluster. Where they differ, a cluster may have got another address: the
    job's uid tells.

    :raises AccessError: the connection means another cluster than the one that the job was submitted to.
    :raises UnreachableError: that cannot be seen.
    """
    here = await api.cluster()
    if ref.cluster in ("", here):
        return
    try:
        if await read(api, ref) is not None:
            return
        said = "has no such job"
    except ApiUnavailable as e:
        raise unreachable(e) from e
    except ApiStatusError as e:
        said = f"says {e}"
    raise AccessError(
        f"{ref} was submitted to {ref.cluster}, but the connection means {here} by now, which {said}. Nothing was "
        f"deleted. Put the connection back; if {ref.cluster} is no more, clear the task"
    )


def unreachable(error: ApiUnavailable) -> UnreachableError:
    """The error for a cluster that can't be reached."""
    return UnreachableError(
        f"the cluster cannot be reached: {error}. Check the `kubernetes` connection (kube_config_path, kube_config, "
        "in_cluster), or KUBECONFIG, and that the API server answers: kubectl version"
    )


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
