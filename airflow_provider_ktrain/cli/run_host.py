"""The third host of the engine, beside worker and trigger: follows one job for a user at a terminal, without Airflow.

After a signal, the job is deleted, and the host waits until its pods are gone. A second signal cancels that, and the
host reports what is left. A job is never deleted because the API server can't be reached: following it is retried until
the job's deadline or a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass

from airflow_provider_ktrain.core.deadline import deadline_of
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.errors import ClusterError, KtrainError, NoRightError
from airflow_provider_ktrain.core.identity import JobRef, Owner
from airflow_provider_ktrain.core.job_request import JobRequest
from airflow_provider_ktrain.core.kill_decision import KillAction, KillDecision
from airflow_provider_ktrain.core.kinds.served import Served
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.manifest.resources import pod_gpus
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.text import counted
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.last_lines import last_lines
from airflow_provider_ktrain.engine.follow.loop import follow
from airflow_provider_ktrain.engine.follow.messages import Handover, HostPolicy, Options, Outcome, StopSignal
from airflow_provider_ktrain.engine.job_requests import (
    Log,
    find,
    has_ended,
    is_terminating,
    job_pods,
    read_job,
    served_version,
)
from airflow_provider_ktrain.engine.release import Mode, ReleaseError, release
from airflow_provider_ktrain.engine.runtimes import read_served
from airflow_provider_ktrain.engine.submit import Submitted, submit

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  #: that delete the job
LIMITS = Limits(startup=3600, partial_start=3600, crash_loop=6)  #: those of an operator without parameters
CREATE_SECONDS = 5.0  #: for a create request that is in flight when a signal arrives
DISCOVERY_SECONDS = 15.0  #: to repeat the first requests to an unreachable API server
RETRY_SECONDS = 5.0  #: between two attempts to follow a job
FRESH_SECONDS = 120.0  #: in which a job has made no progress worth keeping
LOOK_SECONDS = 2.0  #: to find out what is left after a second signal


class InterruptedTwice(KtrainError):
    """A second signal canceled the release. The message names what is left."""


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    :param outcome: of following the job.
    :param unreleased: why the job could not be deleted. Default: "", it was.
    """

    outcome: Outcome
    unreleased: str = ""


class RunHost:
    """Submits one job, follows it to its end, and deletes it.

    :param api: client for the cluster.
    :param request: the job; its owner names this run.
    :param namespace: of the job.
    :param log: where everything is logged.
    """

    def __init__(self, api: Api, request: JobRequest, namespace: str, log: Log) -> None:
        self._api, self._request, self._namespace, self._log = api, request, namespace, log
        self._version = ""
        self._served: Served | None = None
        self._ref: JobRef | None = None
        self._created_at = 0.0
        self._handover, self._cursor = Handover(), Cursor.from_dict({})
        self._stop, self._stopped = StopSignal(self._keep_for_release), asyncio.Event()
        self._running: asyncio.Task[Ended] | None = None
        self.interrupted_by: int | None = None  #: the number of the first signal

    async def run(self) -> Ended:
        """Submit the job and follow it to its end.

        :raises ManifestError: the API server rejects the manifest.
        :raises ClusterError: the job can't be created or watched.
        :raises InterruptedTwice: a second signal.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self._interrupt, number)
        self._running = asyncio.ensure_future(self._run())
        try:
            return await self._running
        except asyncio.CancelledError:
            raise InterruptedTwice(await self.describe_rest()) from None

    def _interrupt(self, number: int) -> None:
        """Handle a signal."""
        if self.interrupted_by is not None:
            assert self._running is not None
            self._running.cancel()
            return
        self.interrupted_by = number
        self._log.warning(f"{signal.Signals(number).name}: deleting the job. Interrupt again to leave it as it is.")
        self._stop.request(f"Interrupted by {signal.Signals(number).name}.")
        self._stopped.set()

    async def _keep_for_release(self) -> KillDecision:
        """The engine has seconds after a kill. This host has time: it releases the job itself, and verifies that."""
        return KillDecision(KillAction.KEEP, self._stop.reason or "")

    async def _run(self) -> Ended:
        """Submit the job, follow it and delete it."""
        submitted = await self._submit_or_delete()
        if submitted is None:
            return Ended(self._killed())
        self._ref, self._created_at = submitted.ref, time.monotonic()
        self._log.info(f"{submitted.ref} created.")
        outcome = await self._follow(submitted)
        return Ended(outcome, await self._release(submitted.ref, outcome))

    # submit

    async def _submit_or_delete(self) -> Submitted | None:
        """Create the job with its code; if that fails, delete the job, whose pods would wait for the code forever."""
        try:
            return await self._submit_unless_stopped()
        except KtrainError:
            left = await self._find() if self._request.code is not None else None
            if left is not None and (unreleased := await self._delete(left.ref)):
                self._log.warning(f"The job could not be deleted.\n{unreleased}")
            raise

    async def _submit_unless_stopped(self) -> Submitted | None:
        """Create the job. Returns None if a signal arrived before the job was created."""
        creating, stopped = asyncio.ensure_future(self._submit()), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([creating, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not creating.done():  # the request may be in flight
                await asyncio.wait([creating], timeout=CREATE_SECONDS)
            if creating.done():
                return await creating
            creating.cancel()
            await asyncio.wait([creating])
            return await self._find()
        finally:
            creating.cancel()
            stopped.cancel()

    async def _submit(self) -> Submitted:
        request, kind = self._request, self._request.kind
        self._version = await served_version(self._api, kind, patience=DISCOVERY_SECONDS)
        fitted = request.fitted(f"{kind.group}/{self._version}")
        self._served = await read_served(
            self._api, kind, self._version, fitted, self._namespace, patience=DISCOVERY_SECONDS, log=self._log
        )

        def stamped(submission: str) -> dict[str, object]:
            return request.stamped(fitted, self._namespace, submission, attempt=1, now=time.time(), served=self._served)

        return await submit(
            self._api, kind, self._version, stamped, request.owner, request.first_try, code=request.code, log=self._log
        )

    async def _find(self) -> Submitted | None:
        """The job, if the create request that was canceled has created it."""
        kind, name = self._request.kind, self._request.job_name
        if not self._version:
            return None
        try:
            found = await find(self._api, kind, self._version, self._namespace, name, timeout=CREATE_SECONDS)
        except ClusterError as e:
            raise ClusterError(
                f"{kind.name} {self._namespace}/{name} may exist: the API server doesn't respond. When it does, run "
                f"`kubectl delete -n {self._namespace} {kind.plural} {name}`\n{e}"
            ) from None
        if found is None or (owner := Owner.of(found[1])) != self._request.owner:
            return None
        ref, job = found
        return Submitted(JobRef(**{**ref.to_dict(), "owner": owner.ti_id}), job, created=True)

    # follow

    async def _follow(self, submitted: Submitted) -> Outcome:
        """Follow the job to its end. After an error, try again: an error proves nothing about the training."""
        options = Options(limits=LIMITS, deadline=deadline_of(submitted.job))
        while self._stop.reason is None:
            try:
                outcome = await follow(
                    submitted.ref,
                    self._api,
                    options,
                    log=self._log,
                    stop=self._stop,
                    handover=self._handover,
                    host=HostPolicy(fail_fast_on_forbidden=True),
                    cursor=self._cursor,
                    on_failure=self._go_on_from,
                )
            except KtrainError as e:
                if isinstance(e, NoRightError) and time.monotonic() - self._created_at < FRESH_SECONDS:
                    if unreleased := await self._delete(submitted.ref):
                        self._log.warning(f"The job could not be deleted.\n{unreleased}")
                    raise
                if options.deadline is not None and time.time() > options.deadline:
                    raise ClusterError(f"{e}\n{await self.describe_rest()}") from None
                self._log.warning(f"Following {submitted.ref} failed. Retrying in {RETRY_SECONDS:.0f} s.\n{e}")
            else:
                assert not isinstance(outcome, Handover)  # only with `until`
                return outcome
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), RETRY_SECONDS)
        return self._killed()

    def _go_on_from(self, handover: Handover) -> None:
        self._handover = handover

    def _killed(self) -> Outcome:
        return Outcome("Pending", False, cause=Cause(Category.KILLED, self._stop.reason or "").as_dict())

    # release

    async def _release(self, ref: JobRef, outcome: Outcome) -> str:
        """Delete the job, unless following it has done that. Returns why that failed, or an empty string.

        At its deadline, following a job only requests its deletion, as Airflow's timeout would interrupt a worker that
        waits for the pods.
        """
        category = (outcome.cause or {}).get("category")
        killed, late = category == Category.KILLED, category == Category.TIMEOUT
        if outcome.superseded or not (killed or late or outcome.kept or outcome.release_error):
            return ""
        if not killed:
            return await self._delete(ref)
        async with last_lines(self._api, ref, "auto", self._cursor, self._log):
            return await self._delete(ref)

    async def _delete(self, ref: JobRef) -> str:
        try:
            self._log.info((await release(self._api, ref, Mode.DELETE)).text)
        except ReleaseError as e:
            return str(e)
        return ""

    async def describe_rest(self) -> str:
        """What is left of the job, and how to delete it."""
        kind, name = self._request.kind, self._request.job_name
        command = f"kubectl delete -n {self._namespace} {kind.plural} {name}"
        title = f"{kind.name} {self._namespace}/{name}"
        if self._ref is None:
            return f"{title} may have been created. To delete it, run `{command}`"
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                job, pods = await read_job(self._api, self._ref), await job_pods(self._api, self._ref)
        except (ApiStatusError, ApiUnavailable, TimeoutError):
            return f"{title} may still hold GPUs: the API server doesn't respond. To delete it, run `{command}`"
        active = [pod for pod in pods if not has_ended(pod)]
        gpus = sum(pod_gpus(pod.get("spec") or {}) for pod in active)
        held = f"{counted(len(active), 'pod')} with {counted(gpus, 'GPU')}"
        if job is not None and not is_terminating(job):
            return f"{title} was not deleted: {held} may run on. To delete it, run `{command}`"
        return f"{title} is being deleted: {held} not gone yet." if active else f"{title} is deleted: nothing is left."
