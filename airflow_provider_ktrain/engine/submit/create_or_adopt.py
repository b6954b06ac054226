"""Create a job, or take over the job that already has its name.

All tries of a task use one job name, which is computed from the task's key. So the create request is the lock: if two
tries race, one create succeeds and the other one gets 409 AlreadyExists. The other try reads the job and decides by the
owner annotation (`core.identity.adoption`): it adopts a running job, replaces a failed job, takes the result of
a job that succeeded, waits for a job that is being deleted, and refuses a job of another task.

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
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from airflow_provider_ktrain.core.absent import ABSENT, Absent
from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.errors import ClusterError, ForeignJobError, KtrainError, ManifestError
from airflow_provider_ktrain.core.identity.adoption import Adoption, Decision, decide_adoption, may_have_begun
from airflow_provider_ktrain.core.identity.adoption_messages import describe_existing, what_differs
from airflow_provider_ktrain.core.identity.names import (
    DEADLINE_ANNOTATION,
    FINISH_ANNOTATION,
    MANIFEST_ANNOTATION,
    OWNER_ANNOTATION,
    SUBMISSION_LABEL,
    SUSPENDED_ANNOTATION,
    JobRef,
    Owner,
    Reattach,
    Unreadable,
    annotation,
    code_hash,
    label,
)
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.manifest.code import Code
from airflow_provider_ktrain.core.state.pods.objects import is_being_deleted
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths, kueue
from airflow_provider_ktrain.engine.api.client import AbsentError, Api, ApiStatusError, ApiUnavailable, Object, get
from airflow_provider_ktrain.engine.api.job_calls import (
    ConflictPauses,
    JobChanged,
    JobRead,
    Log,
    annotate,
    job_pods,
    list_pods,
    patch_fenced,
    read_pod,
    read_training,
)
from airflow_provider_ktrain.engine.api.request_errors import QuotaWait, explain
from airflow_provider_ktrain.engine.release import DecidedEnd, release
from airflow_provider_ktrain.engine.submit import code_delivery
from airflow_provider_ktrain.engine.submit.deletion_waiter import DeletionWaiter

T = TypeVar("T")
CREATE_SECONDS = 30.0  #: Timeout of the create request.
CONFLICT_SECONDS = 60.0  #: How long to pause in all before a job that others keep changing is an error.
DELETION_TIMEOUT_SECONDS = 600.0  #: How long to wait for a job that is being deleted.


class CodeRefusedError(KtrainError):
    """The API server refuses the ConfigMap with the code of a job that this try owns.

    :param reason: the error with which the task fails if the job is released.
    """

    def __init__(self, submitted: Submitted, reason: KtrainError) -> None:
        super().__init__(str(reason))
        self.submitted, self.reason = submitted, reason


@dataclass(frozen=True)
class Submitted:
    """The job that this try follows from now on.

    :param created: False if the job of an earlier try was adopted, or if its result is used.
    """

    ref: JobRef
    job: Object
    created: bool


class Posting:
    """The create request of a try. It goes on if the try is interrupted: the job exists as soon as it is processed."""

    def __init__(self) -> None:
        self._request: asyncio.Future[Object] | None = None
        self.until = 0.0  #: The `timing.now()` from which the API server doesn't process it any more.
        #: Whether a job of the task may exist: an earlier try's, or one of a request that was not refused.
        self.may_have_job = True

    async def send(self, api: Api, path: str, body: Object) -> Object:
        """Send the request and return the response."""
        before = self.until, self.may_have_job
        self.until, self.may_have_job = timing.now() + CREATE_SECONDS, True
        query = {"fieldValidation": "Strict"}
        sent = api.request("POST", path, body=body, query=query, timeout=CREATE_SECONDS)
        self._request = asyncio.ensure_future(sent)
        self._request.add_done_callback(lambda request: self._record_response(request, *before))
        return await asyncio.shield(self._request)

    def _record_response(self, request: asyncio.Future[Object], until: float, may_have_job: bool) -> None:
        """Record what the response proves. A refusal says nothing about an earlier request without response.

        A signal handler may have raised an error while it was sent. That is no response. After a 504 or 500, the API
        server may still process the request.
        """
        error = asyncio.CancelledError() if request.cancelled() else request.exception()
        status = error.status if isinstance(error, ApiStatusError) else 0
        if error is None:
            self.until = 0.0
        elif isinstance(error, KtrainError) and not isinstance(error, ApiUnavailable) and status not in (500, 504):
            self.until = until
            if status == 403:  # the right is missing, or something forbids the job: nothing was created
                self.may_have_job = may_have_job

    async def wait(self) -> None:
        """Wait for the response, if a request is on its way."""
        if self._request is not None:
            await asyncio.wait([self._request])

    @property
    def is_over(self) -> bool:
        """Whether no job can be created any more: there was a response, or its time has passed."""
        return timing.now() >= self.until


@dataclass(frozen=True)
class _Claim:
    """The job that one try wants to own, and what it needs to get it.

    :param manifest: the stamped manifest. If it is invalid, only its metadata.
    :param invalid: why the manifest can't be submitted. None: it can.
    :param has_submitted: whether an earlier try of this run may have submitted a job.
    :param code: files with which the program runs. None: the job has none.
    """

    api: Api
    kind: Kind
    version: str
    manifest: Object
    me: Owner
    first_try: int
    reattach: Reattach
    patience: float
    waiter: DeletionWaiter
    log: Log
    posting: Posting
    code: Code | None
    invalid: ManifestError | None
    has_submitted: bool
    pauses: ConflictPauses = field(default_factory=ConflictPauses)

    @functools.cached_property
    def target(self) -> JobRef:
        """Place and name of the job, which may not exist."""
        metadata = self.manifest["metadata"]
        return JobRef(self.kind.name, self.version, metadata["namespace"], metadata["name"], uid="")

    async def ref(self, job: Object) -> JobRef:
        """A reference to a job of this name, with this try as its owner."""
        return JobRef.of(self.kind, self.version, job, self.me, await self.api.cluster())

    async def retry(self, verb: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Result of `ask`, repeated for `patience` seconds while the API server is unreachable or overloaded.

        They count from the first failure, because `ask` may wait for minutes until pods have stopped.
        """
        failing_since: float | None = None
        delay = 0.5
        while True:
            try:
                return await ask()
            except (ApiStatusError, ApiUnavailable) as e:
                # 409: a quota was updated at the same time
                again = e.transient or (e.status == 409)
                now = timing.now()
                failing_since = failing_since or now
                if not again or now + delay > failing_since + self.patience:
                    raise explain(e, verb, f"{self.kind.plural}.{self.kind.group}", self.target.namespace) from None
                if now == failing_since:
                    self.log.warning(
                        f"The API server can't process the request for {self.target} now. "
                        f"Trying again for {self.patience:.0f} s.\n{e}"
                    )
                # the API server may have created the job although its response was lost: the next create then gets 409
                await asyncio.sleep(delay)
                delay = min(delay * 2, 10)

    async def pause(self) -> None:
        """Wait before what others have changed is read, and decided on, again."""
        if self.pauses.total > CONFLICT_SECONDS:
            command = self.target.delete_command
            raise ClusterError(
                f"{self.target} keeps changing: each write met another one. To delete it, run: {command}"
            )
        await self.pauses.wait()

    async def create(self) -> Submitted | None:
        """Create the job. None: a job of this name exists.

        If the request is refused, an earlier one may still have created the job, for example if that has used up a
        quota. So the job is looked for.
        """
        collection = api_paths.jobs(self.kind, self.version, self.target.namespace)
        may_exist = self.posting.may_have_job
        try:
            job = await self.posting.send(self.api, collection, self.manifest)
        except ApiStatusError as e:
            if e.status == 409 and e.reason == "AlreadyExists":
                return None
            if may_exist and not e.transient and await self.find() is not ABSENT:
                return None
            raise
        if not self.is_created_as(job):
            raise ApiUnavailable(f"POST {collection}: the response is about another job of this name")
        return Submitted(await self.ref(job), job, created=True)

    async def without_pods(self) -> bool:
        """Wait until no pod of an earlier job has the claim's name. False: a job has it."""
        if not self.kind.behavior.pods_outlive_job:
            return True
        return await self.waiter.wait_for_earlier_pods(self.api, self.target)

    async def undone(self, created: Submitted) -> bool:
        """Delete the job that this try has created if pods of an earlier job of this name are left. False: none are.

        There were none before, but another try may have created and deleted a job since. The deletion frees the name
        before the pods have ended. A job that another try has adopted by now isn't deleted.
        """
        if not self.kind.behavior.pods_outlive_job:
            return False
        selector, since = created.ref.pod_selector, created.job["metadata"].get("creationTimestamp", "")
        pods = await self.retry("list", lambda: list_pods(self.api, self.target.namespace, selector))
        earlier = [p for p in pods if is_being_deleted(p) or p["metadata"].get("creationTimestamp", "~") < since]
        read_again = functools.partial(read_pod, self.api, self.target.namespace)  # the list may be older than the job
        if all([await self.retry("get", functools.partial(read_again, pod)) is ABSENT for pod in earlier]):
            return False
        self.log.warning(
            f"{created.ref} is deleted and created again: pods of an earlier job of this name are left.\n"
            "Another try created and deleted that job after this try had looked for pods."
        )
        read = JobRead(created.job, pods)
        while read.job is not ABSENT and Owner.of(read.job) == self.me:
            try:
                await self._release(created.ref, read)
                break
            except JobChanged:  # the operator writes the status of a new job
                await self.pause()
                read = await self.retry("get", lambda: read_training(self.api, created.ref))
        return True

    async def find(self) -> Object | Absent:
        """The job of the claim's name, whoever owns it."""
        return await get(self.api, api_paths.job(self.target))

    async def take_existing(self) -> Submitted | None:
        """Decide what to do with the job that has our name, and do it. None: the name may be free now, so try again."""
        found = await self.find()
        if found is ABSENT:
            return None
        differs = annotation(found, MANIFEST_ANNOTATION) != annotation(self.manifest, MANIFEST_ANNOTATION)
        changed = differs if self.invalid is None else self.invalid.final
        decision = decide_adoption(
            found, self.me, self.first_try, reattach=self.reattach, changed=changed, has_submitted=self.has_submitted
        )
        lacks_code = decision.action is Adoption.ADOPT and await self.lacks_code(found)
        if lacks_code and await self.is_useless(found):
            decision = Decision(
                Adoption.REPLACE, "its code was never sent, and has changed since", "No pod has started."
            )
        message = describe_existing(str(self.target), decision)
        if decision.action is not Adoption.REFUSE:
            self.log.info(message)
        match decision.action:
            case Adoption.REFUSE:
                raise ForeignJobError(
                    f"{message}\nSet another `name` for this task, or delete the job: "
                    f"{(await self.ref(found)).delete_command}"
                )
            case Adoption.WAIT:
                await self.waiter.wait_for_job(self.api, await self.ref(found))
                return None
            case Adoption.REPLACE:
                await self.replace(found)
                return None
            case Adoption.TAKE_RESULT | Adoption.ADOPT:
                adopted = decision.action is Adoption.ADOPT
                if adopted and (changed or self.invalid):
                    self.log.warning(
                        what_differs(str(self.target), self.manifest, found, invalid=str(self.invalid or ""))
                    )
                suspended = adopted and bool(annotation(found, SUSPENDED_ANNOTATION))
                if suspended:
                    await self.waiter.wait_for_pods(self.api, await self.ref(found))
                    self.log.info(f"Resuming {self.target}: it was suspended when an earlier try ended.")
                if Owner.of(found) == self.me and not suspended:
                    taken: Submitted | None = Submitted(await self.ref(found), found, self.is_created_as(found))
                else:
                    taken = await self.own(found, suspended=suspended)
                if taken is not None and lacks_code:
                    await self.give_code(taken)
                return taken

    async def give_code(self, taken: Submitted) -> None:
        """Create the ConfigMap that the pods of the job wait for.

        :raises CodeRefusedError: the API server refuses the ConfigMap.
        """
        wanted = code_hash(taken.job)
        if not wanted:
            return
        if self.code is None or self.code.hash != wanted:
            self.log.warning(
                f"The code of {self.target} is missing. This try can't send it.\n"
                f"Pods that start from now on wait for the code with the hash {wanted}. "
                "Clear the task to train with the present code."
            )
            return
        try:
            await code_delivery.create(self.api, taken.ref, taken.job, self.code)
        except ApiStatusError as e:
            if not code_delivery.is_refused(e):
                raise
            raise CodeRefusedError(taken, code_delivery.refusal(e, self.target.namespace)) from None
        self.log.info(f"Code: {self.code}.")

    async def lacks_code(self, found: Object) -> bool:
        """Whether the pods of the existing job wait for code: the try that created the job has not sent it."""
        if not code_hash(found):
            return False
        try:
            return not await code_delivery.exists(self.api, await self.ref(found))
        except ApiStatusError as e:
            if e.transient:
                raise
            self.log.warning(f"Can't check whether {self.target} has its code.\n{e}")
            return False

    async def is_useless(self, found: Object) -> bool:
        """Whether a job without code can't get the code that it was created for, and has certainly not begun."""
        if self.invalid or (self.code is not None and self.code.hash == code_hash(found)):
            return False
        return not may_have_begun(found, await job_pods(self.api, await self.ref(found)))

    async def replace(self, found: Object) -> None:
        """Release the existing job, unless it has changed since it was read: it may have succeeded."""
        owner = Owner.of(found)
        assert isinstance(owner, Owner)  # another job is refused
        ref = JobRef.of(self.kind, self.version, found, owner, await self.api.cluster())
        with contextlib.suppress(JobChanged):
            await self._release(ref, JobRead(found, await job_pods(self.api, ref)))

    async def _release(self, ref: JobRef, read: JobRead) -> None:
        self.log.info((await release(self.api, ref, DecidedEnd(Mode.DELETE, read), say=self.log.info)).text)

    async def own(self, found: Object, *, suspended: bool) -> Submitted | None:
        """Adopt the job: make this try its owner, and resume it. None: something has changed since it was read.

        From then on, requests of the previous owner are rejected, because the owner and the resourceVersion are
        different. If the job was paused by its Workload, that is activated, and then the mark of the suspension is
        removed: a try that ends in between leaves it to the next one.
        """
        paused = suspended and kueue.queue_of(found)
        workload = await kueue.find_workload(self.api, await self.ref(found)) if paused else None
        annotations: Object = {
            OWNER_ANNOTATION: self.me.annotation(),
            FINISH_ANNOTATION: annotation(self.manifest, FINISH_ANNOTATION),
        }
        if workload is None:
            annotations[SUSPENDED_ANNOTATION] = None
        if suspended:
            # a resumed job gets a new startTime and a new deadline (`core/manifest/deadline.py`)
            annotations[DEADLINE_ANNOTATION] = annotation(self.manifest, DEADLINE_ANNOTATION)
        resumed = self.kind.form.suspension(False) if suspended and workload is None else None
        try:
            job = await patch_fenced(self.api, self.target, found, annotations, resumed)
            ref = await self.ref(job)
            if workload is not None:
                await kueue.set_active(self.api, self.target.namespace, workload, True)
                present = await self.find()
                if present is ABSENT:
                    return None
                job = await annotate(self.api, ref, present, {SUSPENDED_ANNOTATION: ""})
        except ApiStatusError as e:
            if e.status == 409 or isinstance(e, AbsentError):
                return None
            raise
        return Submitted(ref, job, self.is_created_as(found))

    def is_created_as(self, found: Object) -> bool:
        """Whether this try has created the job: the response to the create was lost."""
        return not self.invalid and label(found, SUBMISSION_LABEL) == label(self.manifest, SUBMISSION_LABEL)


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
    invalid: ManifestError | None = None,
    has_submitted: bool = True,
    posting: Posting,
    log: Log,
) -> Submitted:
    """Create the job, or adopt, replace or wait for the job that has its name.

    From the second try on, look for the job of an earlier try before the create: if the API server rejects the create
    because of a quota or of a manifest that has become invalid, its response doesn't show that the name is taken.

    :param build: returns the stamped manifest for the value of its submission label. If it is invalid: its metadata.
    :param first_try: first try since the task was cleared, by `core.identity.adoption.first_try_since_clear`.
    :param patience: how long to repeat requests to an unreachable or overloaded API server, in seconds. Default: 120.
    :param quota_patience: how long to repeat a create that exceeds a ResourceQuota, in seconds. Default: 0.
    :param deletion_patience: how long to wait for a job of this name that is being deleted, in seconds. Default: 600.
    :param invalid: why this try can't create a job. It can take over the job of an earlier try. With `if_unchanged`, an
        invalid manifest counts as changed, so the job is released; one that can't be read now (the error isn't `final`)
        doesn't prove a change. Default: None, the manifest is valid.
    :param has_submitted: False if the task store shows that no try of this run has submitted a job. Default: True.
    :raises CodeRefusedError: the API server refuses the job's code.
    :raises ManifestError: the API server or the operator's webhook rejects the content of the manifest; or `invalid` is
        set, and no earlier try has left a job.
    :raises ForeignJobError: another task or person owns the job of this name.
    :raises AccessError, UnreachableError, ClusterError: a request fails; ClusterError also if a deletion doesn't end.
    """
    posting.may_have_job = has_submitted or me.try_number > 1
    waiter = DeletionWaiter(deletion_patience, log, patience=patience)
    claim = _Claim(
        api, kind, version, build(uuid.uuid4().hex[:12]), me, first_try, reattach, patience, waiter, log,
        posting, code, invalid, has_submitted,
    )  # fmt: skip
    waits = QuotaWait(quota_patience, str(claim.target), log.warning)
    look_first = invalid is not None or me.try_number > 1
    while True:
        await claim.pause()
        if invalid is not None and await claim.retry("get", claim.find) is ABSENT:
            raise invalid
        if look_first and (taken := await claim.retry("patch", claim.take_existing)):
            return taken
        look_first = True
        if invalid is not None or not await claim.retry("list", claim.without_pods):
            continue
        created = await claim.retry("create", lambda: waits.on(claim.create))
        if created is not None and not await claim.undone(created):
            await claim.retry("create", functools.partial(claim.give_code, created))
            return created


async def find_own(api: Api, kind: Kind, version: str, namespace: str, name: str, me: Owner) -> Submitted | None:
    """The job of this name, if this try or an earlier one of its task has created it; else None.

    The name alone doesn't prove that the job is ours.

    :raises ForeignJobError: its owner can't be read.
    """
    job = await get(api, api_paths.jobs(kind, version, namespace, name), timeout=1)
    owner = None if job is ABSENT else Owner.of(job)
    if owner is Unreadable.OWNER:
        raise ForeignJobError(f"{kind.name} {namespace}/{name}: {owner.value}")
    if job is ABSENT or owner is None:
        return None
    if owner != me and not (owner.key == me.key and owner.try_number < me.try_number):
        return None
    return Submitted(JobRef.of(kind, version, job, owner, await api.cluster()), job, created=owner == me)
