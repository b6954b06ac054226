"""Runs the owner of a training for a user at a terminal, without Airflow.

After a signal, the job is deleted, and the command waits until its pods are gone. A second signal cancels that, and the
command reports what is left. A job is never deleted because the API server can't be reached: following it is retried
until a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from dataclasses import replace

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.end_rules import Event
from airflow_provider_ktrain.core.errors import KtrainError, NoRightError
from airflow_provider_ktrain.core.identity.names import JobRef, delete_command
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.manifest.deadline import deadline_of
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.state.accelerators import Amounts, described
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.state.pods.devices import amounts_of
from airflow_provider_ktrain.core.state.pods.objects import has_ended, is_being_deleted
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.api.job_calls import Log, read_training, served_version
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.submit.create_or_adopt import Posting, Submitted, find_own, submit
from airflow_provider_ktrain.engine.submit.runtimes import read_served
from airflow_provider_ktrain.engine.training_owner import Stopped, Training
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  #: Signals on which the job is deleted.
LIMITS = Limits(startup=3600, partial_start=3600, crash_loop=6)  #: The limits of an operator without parameters.
DISCOVERY_SECONDS = 15.0  #: How long to repeat the first requests to an unreachable API server.
LOOK_SECONDS = 2.0  #: How long to look at what is left after a second signal.


class InterruptedTwice(KtrainError):
    """A second signal canceled the release. The message names what is left."""


class RunHost:
    """Submits one job, follows it to its end, and deletes it: an `engine.owned_job.Submission`.

    :param request: the job; its owner names this run.
    :param owns_cluster: whether the cluster ends with this command. Default: False.
    """

    def __init__(self, api: Api, request: JobRequest, namespace: str, log: Log, *, owns_cluster: bool = False) -> None:
        self._api, self._request, self._namespace, self._log = api, request, namespace, log
        self.delete_command = delete_command(request.kind, namespace, request.job_name)
        self._version = ""
        self._ref: JobRef | None = None
        self._stop = StopSignal()
        self._owns_cluster = owns_cluster
        # the caller closes the client
        self._training = Training(lambda: contextlib.nullcontext(api), Host(), log, self._stop)
        self._running: asyncio.Task[Outcome] | None = None
        self.interrupted_by: int | None = None  #: The number of the first signal.

    async def run(self) -> Outcome:
        """Submit the job, follow it to its end and delete it. `release_error` of the outcome says why that failed.

        :raises ManifestError: the API server rejects the manifest.
        :raises ClusterError: the job can't be created or watched.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self._interrupt, number)
        self._running = asyncio.ensure_future(self._run())
        try:
            return await self._running
        except asyncio.CancelledError:
            raise InterruptedTwice(await self.describe_remainder()) from None

    def _interrupt(self, number: int) -> None:
        """Handle a signal."""
        if self.interrupted_by is not None:
            assert self._running is not None
            self._running.cancel()
            return
        self.interrupted_by = number
        name = signal.Signals(number).name
        self._log.warning(
            f"{name}: deleting the job, and waiting until its pods are gone. Interrupt again to stop waiting."
        )
        self._stop.request(f"Interrupted by {name}.")

    async def _run(self) -> Outcome:
        """Submit the job, follow it and delete it."""
        training = self._training
        training.job.options = Options(limits=LIMITS)
        try:
            try:
                submitted = await training.submit(self)
            except Stopped:
                cause = Cause(Category.KILLED, str(self._stop.reason)).as_dict()
                return Outcome("Pending", False, cause=cause)
            self._ref = submitted.ref
            self._log.info(f"{submitted.ref} created.")
            options = Options(limits=LIMITS, deadline=deadline_of(submitted.job))
            outcome = await training.follow(submitted.ref, options, patience=math.inf)
            assert not isinstance(outcome, Handover)  # only with `until`
        except Exception as e:
            await training.interrupted(Event.NO_RIGHT if isinstance(e, NoRightError) else Event.ERROR)
            raise
        finally:
            await training.close()
        if not outcome.kept or (self.interrupted_by is not None and not outcome.succeeded):
            return outcome
        return replace(outcome, release_error=await training.outcome_stored(submitted.ref, Event.OUTCOME_STORED))

    # what is submitted

    async def carry_out(self, api: Api, log: Log, *, posting: Posting) -> Submitted:
        """Create the job."""
        request, kind = self._request, self._request.kind
        self._version = await served_version(api, kind, patience=DISCOVERY_SECONDS)
        fitted = request.fitted(f"{kind.group}/{self._version}")
        served: Served | None = await read_served(
            api, kind, self._version, fitted, self._namespace, patience=DISCOVERY_SECONDS, log=log
        )

        def stamped(submission: str) -> dict[str, object]:
            return request.stamped(fitted, self._namespace, submission, attempt=1, now=timing.epoch(), served=served)

        return await submit(
            api, kind, self._version, stamped, request.owner, request.first_try,
            code=request.code, has_submitted=False, posting=posting, log=log,
        )  # fmt: skip

    async def find(self, api: Api) -> Submitted | None:
        """The job, if the create request was processed."""
        kind, name = self._request.kind, self._request.job_name
        if not self._version:
            return None
        return await find_own(api, kind, self._version, self._namespace, name, self._request.owner)

    # what is left

    async def describe_remainder(self) -> str:
        """What is left of the job, and how to delete it."""
        if self._owns_cluster:
            return "The embedded cluster ends now, and all pods with it."
        title, command = f"{self._request.kind.name} {self._namespace}/{self._request.job_name}", self.delete_command
        if self._ref is None:
            return f"{title} may have been created. To delete it, run `{command}`"
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                read = await read_training(self._api, self._ref)
        except (ApiStatusError, ApiUnavailable, TimeoutError):
            return f"{title} may still hold accelerators: the API server doesn't respond. To delete it, run `{command}`"
        job = read.job
        active = [pod for pod in read.pods if not has_ended(pod)]
        amounts = sum(map(amounts_of, active), Amounts())
        held = f"{counted(len(active), 'pod')} with {described(amounts, '0 GPUs')}"
        if job is not ABSENT and not is_being_deleted(job):
            return f"{title} was not deleted: {held} may run on. To delete it, run `{command}`"
        if not active:
            return f"{title} is deleted: nothing is left."
        look = f"kubectl get pods -n {self._ref.namespace} -l {self._ref.pod_selector}"
        return f"{title} is being deleted: {held} not gone yet. To see them, run `{look}`"
