"""Create a job, or take over the job that already has its name.

All tries of a task use one job name, which is computed from the task's key. So the create request is the lock: if two
tries race, one create succeeds and the other one gets 409 AlreadyExists. The other try reads the job and decides by the
owner annotation (`core.adoption.decide`): it adopts a running job, replaces a failed job, takes the result of a job
that succeeded, waits for a job that is being deleted, and refuses a job of another task.

A try adopts a job by a patch of the owner annotation. This patch, like every delete, carries the resourceVersion of the
read on which the decision is based. If the job has changed in between, the API server answers 409, nothing happens, and
the loop reads and decides again. A try that has lost its job in this way can't delete it, because its own requests are
fenced by the old version and by the owner.

Only workers submit, so that no manifest becomes a part of trigger kwargs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from airflow_provider_ktrain.core.adoption import Action, Decision, decide, may_have_begun
from airflow_provider_ktrain.core.errors import ForeignJobError, KtrainError, ManifestError
from airflow_provider_ktrain.core.existing_job import describe_existing, what_differs
from airflow_provider_ktrain.core.identity import (
    DEADLINE_ANNOTATION,
    FINISH_ANNOTATION,
    MANIFEST_ANNOTATION,
    OWNER_ANNOTATION,
    SUBMISSION_LABEL,
    SUSPENDED_ANNOTATION,
    JobRef,
    Owner,
    Reattach,
    code_hash,
)
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.manifest.code import Code
from airflow_provider_ktrain.engine import api_paths, code_delivery, kueue
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.deletion_waiter import DeletionWaiter
from airflow_provider_ktrain.engine.job_requests import (
    MERGE_PATCH,
    JobRead,
    Log,
    is_terminating,
    job_pods,
    list_pods,
    read_training,
)
from airflow_provider_ktrain.engine.quota_wait import QuotaWait
from airflow_provider_ktrain.engine.release import JobChanged
from airflow_provider_ktrain.engine.request_errors import explain, is_transient

Object = dict[str, Any]
T = TypeVar("T")
CREATE_SECONDS = 30.0  #: for the response to the create request
DELETION_TIMEOUT_SECONDS = 600.0  #: how long to wait for a job that is being deleted


class CodeRefusedError(KtrainError):
    """The API server refuses the ConfigMap with the code of a job that this try owns.

    :param submitted: the job.
    :param reason: the error with which the task fails if the job is released.
    """

    def __init__(self, submitted: Submitted, reason: KtrainError) -> None:
        super().__init__(str(reason))
        self.submitted, self.reason = submitted, reason


@dataclass(frozen=True)
class Submitted:
    """The job that this try follows from now on.

    :param ref: reference to the job.
    :param job: the job as the API server returned it.
    :param created: False if the job of an earlier try was adopted, or if its result is used.
    """

    ref: JobRef
    job: Object
    created: bool


#: releases a job as it was read; raises JobChanged if it has changed since
EndJob = Callable[[JobRef, JobRead], Awaitable[None]]


class Posting:
    """The create request of a try. It goes on if the try is interrupted: the job exists as soon as it is processed."""

    def __init__(self) -> None:
        self._request: asyncio.Future[Object] | None = None
        self.until = 0.0  #: time.monotonic() from which the API server doesn't process it any more

    async def send(self, api: Api, path: str, body: Object) -> Object:
        """Send the request and return the response.

        :raises ApiStatusError, ApiUnavailable: as `Api.request`.
        """
        self.until = time.monotonic() + CREATE_SECONDS
        query = {"fieldValidation": "Strict"}
        request = api.request("POST", path, body=body, query=query, timeout=CREATE_SECONDS)
        self._request = asyncio.ensure_future(request)
        job = await asyncio.shield(self._request)
        self.until = 0.0
        return job

    async def wait(self) -> None:
        """Wait for the response, if a request is on its way.

        A signal handler may have raised an error while it was sent. That is no response.
        """
        if self._request is not None:
            await asyncio.wait([self._request])
            error = asyncio.CancelledError() if self._request.cancelled() else self._request.exception()
            if error is None or (isinstance(error, KtrainError) and not isinstance(error, ApiUnavailable)):
                self.until = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no job can be created any more: there was a response, or its time has passed."""
        return time.monotonic() >= self.until


@dataclass(frozen=True)
class _Claim:
    """The job that one try wants to own.

    :param manifest: the stamped manifest. If it is invalid, only its metadata.
    :param invalid: why the manifest can't be submitted; empty if it can.
    :param changed: whether the manifest counts as changed. None: compare it with the existing job.
    :param code: files with which the program runs. Default: None, the job has none.
    """

    kind: Kind
    version: str
    manifest: Object
    me: Owner
    first_try: int
    reattach: Reattach
    end_job: EndJob
    invalid: str = ""
    changed: bool | None = None
    code: Code | None = None
    posting: Posting = field(default_factory=lambda: Posting())

    @property
    def namespace(self) -> str:
        return str(self.manifest["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def path(self) -> str:
        return api_paths.jobs(self.kind, self.version, self.namespace, self.name)

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
    quota_patience: float = 0,
    deletion_patience: float = DELETION_TIMEOUT_SECONDS,
    code: Code | None = None,
    posting: Posting,
    end_job: EndJob,
    log: Log,
) -> Submitted:
    """Create the job, or adopt, replace or wait for the job that has its name.

    From the second try on, look for the job of an earlier try before the create: if the API server rejects the create
    because of a quota or of a manifest that has become invalid, its response doesn't show that the name is taken.

    :param build: returns the stamped manifest for the value of its submission label.
    :param me: this try.
    :param first_try: first try since the task was cleared, by `core.adoption.first_try_since_clear`.
    :param reattach: whether a live job of an earlier try is adopted. Default: "always".
    :param patience: how long to repeat requests to an unreachable or overloaded API server, in seconds. Default: 120.
    :param quota_patience: how long to repeat a create that exceeds a ResourceQuota, in seconds. Default: 0.
    :param deletion_patience: how long to wait for a job of this name that is being deleted, in seconds. Default: 600.
    :param code: files that the job's pods wait for. Default: None, the manifest mounts none.
    :param posting: the create request, which goes on if this is canceled.
    :param end_job: releases the job of an earlier try that is replaced.
    :param log: where decisions are logged.
    :raises CodeRefusedError: the API server refuses the job's code.
    :raises ManifestError: the API server or the operator's webhook rejects the content of the manifest.
    :raises ForeignJobError: another task or person owns the job of this name.
    :raises AccessError, UnreachableError, ClusterError: a request fails; ClusterError also if a deletion doesn't end.
    """
    claim = _Claim(
        kind, version, build(uuid.uuid4().hex[:12]), me, first_try, reattach, end_job, code=code, posting=posting
    )
    waiter = DeletionWaiter(deletion_patience, log, patience=patience)
    waits = QuotaWait(quota_patience, str(claim), log)
    look_first = me.try_number > 1
    while True:
        if look_first and (
            taken := await _retry("patch", lambda: _take_existing(api, claim, waiter, log), claim, patience, log)
        ):
            return taken
        look_first = True
        if not await _retry("list", lambda: _without_pods(api, claim, waiter), claim, patience, log):
            continue
        created = await _retry("create", lambda: waits.on(lambda: _create(api, claim)), claim, patience, log)
        if created is not None and not await _undone(api, claim, created, patience, log):
            give = functools.partial(_give_code, api, claim, created, log)
            await _retry("create", give, claim, patience, log)
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
    end_job: EndJob,
    log: Log,
) -> Submitted:
    """Take over the job of an earlier try although the manifest of this try is invalid, so that it can't create one.

    With `if_unchanged`, an invalid manifest counts as changed, so the job is released. A manifest that can't be read
    now (its error isn't `final`) doesn't prove a change.

    :param metadata: namespace, name and annotations of the stamped manifest.
    :param invalid: why the manifest can't be submitted.
    :raises ManifestError: `invalid`, if there is no job of an earlier try.
    :raises ForeignJobError, AccessError, UnreachableError, ClusterError: as `submit`.
    """
    claim = _Claim(
        kind, version, {"metadata": metadata}, me, first_try, reattach, end_job,
        invalid=str(invalid), changed=invalid.final,
    )  # fmt: skip
    waiter = DeletionWaiter(deletion_patience, log, patience=patience)
    while await _retry("get", lambda: _find(api, claim), claim, patience, log) is not None:
        if taken := await _retry("patch", lambda: _take_existing(api, claim, waiter, log), claim, patience, log):
            return taken
    raise invalid


async def _retry(verb: str, ask: Callable[[], Awaitable[T]], claim: _Claim, patience: float, log: Log) -> T:
    """Result of `ask`, repeated for `patience` seconds while the API server is unreachable or overloaded.

    They count from the first failure, because `ask` may wait for minutes until pods have stopped.
    """
    failing_since: float | None = None
    delay = 0.5
    while True:
        try:
            return await ask()
        except (ApiStatusError, ApiUnavailable) as e:
            again = is_transient(e) or (
                isinstance(e, ApiStatusError) and e.conflict
            )  # a quota was updated at the same time
            now = time.monotonic()
            failing_since = failing_since or now
            if not again or now + delay > failing_since + patience:
                raise explain(e, verb, f"{claim.kind.plural}.{claim.kind.group}", claim.namespace) from None
            if now == failing_since:
                log.warning(
                    f"The API server can't process the request for {claim} now. Trying again for {patience:.0f} s.\n{e}"
                )
            # the API server may have created the job although its response was lost: the next create then gets 409
            await asyncio.sleep(delay)
            delay = min(delay * 2, 10)


async def _create(api: Api, claim: _Claim) -> Submitted | None:
    """Create the job. None: a job of this name exists."""
    collection = api_paths.jobs(claim.kind, claim.version, claim.namespace)
    try:
        job = await claim.posting.send(api, collection, claim.manifest)
    except ApiStatusError as e:
        if e.status == 409 and e.reason == "AlreadyExists":
            return None
        raise
    return Submitted(await _ref(api, claim.kind, claim.version, job, claim.me), job, created=True)


async def find_own(api: Api, kind: Kind, version: str, namespace: str, name: str, me: Owner) -> Submitted | None:
    """The job of this name, if this try or an earlier one of its task has created it; else None.

    The name alone doesn't prove that the job is ours.

    :raises ApiStatusError, ApiUnavailable: the request fails.
    """
    try:
        job = await api.request("GET", api_paths.jobs(kind, version, namespace, name), timeout=1)
    except ApiStatusError as e:
        if e.not_found:
            return None
        raise
    owner = Owner.of(job)
    if owner is None or not (owner == me or (owner.key == me.key and owner.try_number < me.try_number)):
        return None
    return Submitted(await _ref(api, kind, version, job, owner), job, created=owner == me)


async def _without_pods(api: Api, claim: _Claim, waiter: DeletionWaiter) -> bool:
    """Wait until no pod of an earlier job has the claim's name. False: a job has it."""
    if not claim.kind.pods_outlive_job:
        return True
    return await waiter.wait_for_earlier_pods(
        api, JobRef(claim.kind.name, claim.version, claim.namespace, claim.name, uid="")
    )


async def _undone(api: Api, claim: _Claim, created: Submitted, patience: float, log: Log) -> bool:
    """Delete the job that this try has just created if pods of an earlier job of this name are left. False: none are.

    There were none before, but another try may have created and deleted a job since. The deletion frees the name before
    the pods have ended. A job that another try has adopted by now isn't deleted.
    """
    if not claim.kind.pods_outlive_job:
        return False
    selector, since = created.ref.pod_selector, created.job["metadata"].get("creationTimestamp", "")
    pods = await _retry("list", lambda: list_pods(api, claim.namespace, selector), claim, patience, log)
    if not any(is_terminating(pod) or pod["metadata"].get("creationTimestamp", "~") < since for pod in pods):
        return False
    log.warning(
        f"{created.ref} is deleted and created again: pods of an earlier job of this name are left.\n"
        "Another try created and deleted that job after this try had looked for pods."
    )
    read = JobRead(created.job, pods)
    while read.job is not None and Owner.of(read.job) == claim.me:
        try:
            await claim.end_job(created.ref, read)
            break
        except JobChanged:  # the operator writes the status of a new job
            read = await _retry("get", lambda: read_training(api, created.ref), claim, patience, log)
    return True


async def _find(api: Api, claim: _Claim) -> Object | None:
    """The job that has the claim's name, no matter who owns it. None: there is no such job."""
    try:
        return await api.request("GET", claim.path)
    except ApiStatusError as e:
        if e.status == 404:
            return None
        raise


async def _take_existing(api: Api, claim: _Claim, waiter: DeletionWaiter, log: Log) -> Submitted | None:
    """Decide what to do with the job that has our name, and do it. None: the name may be free now, so try again."""
    found = await _find(api, claim)
    if found is None:
        return None
    differs = _annotation(found, MANIFEST_ANNOTATION) != _annotation(claim.manifest, MANIFEST_ANNOTATION)
    changed = differs if claim.changed is None else claim.changed
    decision = decide(found, claim.me, claim.first_try, reattach=claim.reattach, changed=changed)
    lacks_code = decision.action is Action.ADOPT and await _lacks_code(api, claim, found, log)
    if lacks_code and await _is_useless(api, claim, found):
        decision = Decision(Action.REPLACE, "its code was never sent, and has changed since", "No pod has started.")
    message = describe_existing(str(claim), decision)
    if decision.action is not Action.REFUSE:
        log.info(message)
    match decision.action:
        case Action.REFUSE:
            raise ForeignJobError(
                f"{message}\nSet another `name` for this task, or delete the job: "
                f"kubectl delete -n {claim.namespace} {claim.kind.plural} {claim.name}"
            )
        case Action.WAIT:
            await waiter.wait_for_job(api, await _ref(api, claim.kind, claim.version, found, claim.me))
            return None
        case Action.REPLACE:
            await _replace(api, claim, found)
            return None
        case Action.TAKE_RESULT | Action.ADOPT:
            adopted = decision.action is Action.ADOPT
            if adopted and (changed or claim.invalid):
                log.warning(what_differs(str(claim), claim.manifest, found, invalid=claim.invalid))
            suspended = adopted and bool(_annotation(found, SUSPENDED_ANNOTATION))
            if suspended:
                await waiter.wait_for_pods(api, await _ref(api, claim.kind, claim.version, found, claim.me))
                log.info(f"Resuming {claim}: it was suspended when an earlier try ended.")
            own = _own_paused if suspended and kueue.queue_of(found) else functools.partial(_own, resume=suspended)
            taken = await own(api, claim, found)
            if taken is not None and lacks_code:
                await _give_code(api, claim, taken, log)
            return taken


async def _give_code(api: Api, claim: _Claim, taken: Submitted, log: Log) -> None:
    """Create the ConfigMap that the pods of the job wait for.

    :param taken: the job, which this try owns.
    :raises CodeRefusedError: the API server refuses the ConfigMap.
    """
    code, ref = claim.code, taken.ref
    wanted = code_hash(taken.job)
    if not wanted:
        return
    if code is None or code.hash != wanted:
        log.warning(
            f"The code of {claim} is missing. This try can't send it.\nPods that start from now on wait for the code "
            f"with the hash {wanted}. Clear the task to train with the present code."
        )
        return
    try:
        await code_delivery.create(api, ref, taken.job, code)
    except ApiStatusError as e:
        if not code_delivery.is_refused(e):
            raise
        raise CodeRefusedError(taken, code_delivery.refusal(e, ref.namespace)) from None
    log.info(f"Code: {code}.")


async def _lacks_code(api: Api, claim: _Claim, found: Object, log: Log) -> bool:
    """Whether the pods of the existing job wait for code: the try that created the job has not sent it."""
    if not code_hash(found):
        return False
    try:
        return not await code_delivery.exists(api, await _ref(api, claim.kind, claim.version, found, claim.me))
    except ApiStatusError as e:
        if is_transient(e):
            raise
        log.warning(f"Can't check whether {claim} has its code.\n{e}")
        return False


async def _is_useless(api: Api, claim: _Claim, found: Object) -> bool:
    """Whether a job without code can't get the code that it was created for, and has certainly not begun."""
    if claim.invalid or (claim.code is not None and claim.code.hash == code_hash(found)):
        return False
    ref = await _ref(api, claim.kind, claim.version, found, claim.me)
    return not may_have_begun(found, await job_pods(api, ref))


async def _replace(api: Api, claim: _Claim, found: Object) -> None:
    """Release the existing job, unless it has changed since it was read: it may have succeeded."""
    ref = await _ref(api, claim.kind, claim.version, found, Owner.of(found) or claim.me)
    with contextlib.suppress(JobChanged):
        await claim.end_job(ref, JobRead(found, await job_pods(api, ref)))


async def _own(api: Api, claim: _Claim, found: Object, *, resume: bool, keep_mark: bool = False) -> Submitted | None:
    """Adopt the job: make this try its owner. None: the job has changed since it was read.

    From then on, requests of the previous owner are rejected, because the owner and the resourceVersion are different.
    """
    patch: Object = {
        "metadata": {
            "resourceVersion": found["metadata"]["resourceVersion"],
            "annotations": {
                OWNER_ANNOTATION: claim.me.annotation(),
                FINISH_ANNOTATION: _annotation(claim.manifest, FINISH_ANNOTATION),
                **({} if keep_mark else {SUSPENDED_ANNOTATION: None}),
            },
        }
    }
    if resume or keep_mark:
        # The operator sets a new startTime when a job is resumed. Its deadline (`core/deadline.py`) starts again, too.
        patch["metadata"]["annotations"][DEADLINE_ANNOTATION] = _annotation(claim.manifest, DEADLINE_ANNOTATION)
    if resume:
        patch["spec"] = claim.kind.suspension(False)
    try:
        job = await api.request("PATCH", claim.path, body=patch, content_type=MERGE_PATCH)
    except ApiStatusError as e:
        if e.status in (404, 409):
            return None
        raise
    # True also if this try created the job and the response to the create was lost
    created = not claim.invalid and _label(found, SUBMISSION_LABEL) == _label(claim.manifest, SUBMISSION_LABEL)
    return Submitted(await _ref(api, claim.kind, claim.version, job, claim.me), job, created)


async def _own_paused(api: Api, claim: _Claim, found: Object) -> Submitted | None:
    """Adopt a job that was paused by its Workload, then activate the Workload. None: something has changed meanwhile.

    The mark of the suspension is removed last: a try that ends in between leaves it to the next one.
    """
    ref = await _ref(api, claim.kind, claim.version, found, claim.me)
    workload = await kueue.find_workload(api, ref)
    if workload is None:
        return await _own(api, claim, found, resume=True)
    taken = await _own(api, claim, found, resume=False, keep_mark=True)
    if taken is None:
        return None
    try:
        await kueue.set_active(api, ref.namespace, workload, True)
        job = await kueue.mark_suspended(api, taken.ref, await _find(api, claim) or taken.job, "")
    except ApiStatusError as e:
        if e.status in (404, 409):
            return None
        raise
    return replace(taken, job=job)


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
