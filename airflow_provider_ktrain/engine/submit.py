"""Submit: create a job, or take over the one that stands where it would be. Create is the lock.

Runs in workers only, so that no manifest enters trigger kwargs.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from airflow_provider_ktrain.core.errors import (
    ForeignJobError,
    ManifestError,
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
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.deletion import DeletionWaiter
from airflow_provider_ktrain.engine.errors import explain, is_transient
from airflow_provider_ktrain.engine.jobs import MERGE_PATCH, Log, delete_fenced
from airflow_provider_ktrain.engine.release import Mode, pods_before, release

Object = dict[str, Any]
T = TypeVar("T")
DELETION_TIMEOUT_SECONDS = 600.0  #: seconds that a job which is being deleted is waited for


@dataclass(frozen=True)
class Submitted:
    """The job that this try follows from now on.

    :param job: as the API server answered.
    :param created: False where an earlier try's job was adopted, or its result is taken.
    """

    ref: JobRef
    job: Object
    created: bool


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
    deletion_patience: float = DELETION_TIMEOUT_SECONDS,
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
    waiter = DeletionWaiter(deletion_patience, log)
    look_first = me.try_number > 1
    while True:
        if look_first and (
            taken := await _retry("patch", lambda: _take_existing(api, claim, waiter, log), claim, patience, log)
        ):
            return taken
        look_first = True
        if created := await _retry("create", lambda: _create(api, claim), claim, patience, log):
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
    deletion_patience: float = DELETION_TIMEOUT_SECONDS,
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
    waiter = DeletionWaiter(deletion_patience, log)
    while await _retry("get", lambda: _find(api, claim), claim, patience, log) is not None:
        if taken := await _retry("patch", lambda: _take_existing(api, claim, waiter, log), claim, patience, log):
            return taken
    raise invalid


async def _retry(verb: str, ask: Callable[[], Awaitable[T]], claim: _Claim, patience: float, log: Log) -> T:
    """What `ask` returns; an API server that is away or overloaded is asked again for `patience` seconds."""
    end, delay = time.monotonic() + patience, 0.5
    while True:
        try:
            return await ask()
        except (ApiStatusError, ApiUnavailable) as e:
            again = is_transient(e) or (isinstance(e, ApiStatusError) and e.conflict)  # a quota that changed meanwhile
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


async def _take_existing(api: Api, claim: _Claim, waiter: DeletionWaiter, log: Log) -> Submitted | None:
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
            await waiter.wait_for_job(api, await _ref(api, claim.kind, claim.version, found, claim.me))
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
                await waiter.wait_for_pods(api, await _ref(api, claim.kind, claim.version, found, claim.me))
                log.info(f"{claim} was suspended when an earlier try ended: it is resumed")
            return await _own(api, claim, found, resume=suspended)


async def _replace(api: Api, claim: _Claim, found: Object, log: Log) -> None:
    """Release the job that was found, unless it has changed since."""
    ref = await _ref(api, claim.kind, claim.version, found, Owner.of(found) or claim.me)
    pods = await pods_before(api, ref)
    try:  # what was decided holds for what was read: it may have succeeded since
        await delete_fenced(api, claim.path, found)
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
