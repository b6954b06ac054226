"""Follow one job until it has ended: phases, logs, limits, cause, release. One coroutine for worker and triggerer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_provider_ktrain.core import diagnosis
from airflow_provider_ktrain.core.diagnosis import Category, Cause
from airflow_provider_ktrain.core.identity import DEPLOYMENT_LABEL, SUBMISSION_LABEL, JobRef, Owner, label_value
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.limits import Clock, Limits, clocks, restarts
from airflow_provider_ktrain.core.logcursor import Cursor
from airflow_provider_ktrain.core.selection import LogChoice, chooser
from airflow_provider_ktrain.core.status import Phase, phase_of, true_conditions
from airflow_provider_ktrain.core.usage import usage
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.logs import LogFollower, LogLine, stream_budget
from airflow_provider_ktrain.engine.release import ReleaseError, mode_of, release
from airflow_provider_ktrain.engine.submit import Log
from airflow_provider_ktrain.engine.watch import by_label, by_uid, hub

Object = dict[str, Any]
TAIL = 50  # last lines kept of every container: operators delete pods with their logs
LOOK_EVERY = 15.0  # seconds between looks at the events of a job that does not start


@dataclass(frozen=True)
class Options:
    """How a job is followed; travels in trigger kwargs.

    :param logs: whose logs to bring: see `core.selection`.
    :param deadline: epoch seconds at which the execution is over, or None.
    :param on_finish_action: delete_job, keep_job or delete_succeeded_job; whatever is kept, GPUs are not.
    :param drain_timeout: seconds that logs may take after the end before the pods are deleted.
    :param release_timeout: seconds until pods must be seen to be gone.
    :param release: False for jobs that others submitted: nothing is ever deleted.
    """

    logs: LogChoice = "auto"
    limits: Limits = field(default_factory=Limits)
    deadline: float | None = None
    on_finish_action: str = "delete_job"
    drain_timeout: float = 30
    release_timeout: float = 90
    release: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Options:
        return cls(**{**data, "limits": Limits(**data["limits"])})


class Stop:
    """A request to end early, from a signal handler or another task."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._wake: Callable[[], object] | None = None

    def request(self, reason: str) -> None:
        """Ask for the end; safe in a signal handler while the loop runs."""
        self.reason = reason
        if self._wake is not None:
            self._wake()

    def attach(self, event: asyncio.Event) -> None:
        """From now on, a request sets `event` in the running loop."""
        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.is_running() and loop.call_soon_threadsafe(event.set)
        if self.reason is not None:
            event.set()


@dataclass(frozen=True)
class Outcome:
    """How following ended; travels as the trigger's event.

    :param phase: the job's last phase.
    :param succeeded: True where the training did.
    :param superseded: True where another try owns the job by now: nothing was touched.
    :param cause: why it failed, of `core.diagnosis.Cause`, as a dict.
    :param released: the release's line for the log; empty where nothing was released.
    :param release_error: why the release failed, or empty; the caller must try again.
    """

    phase: str
    succeeded: bool
    superseded: bool = False
    cause: dict[str, Any] | None = None
    released: str = ""
    release_error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    result_error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Handover:
    """The job goes on; somebody else follows it from this cursor."""

    cursor: dict[str, Any]


async def follow(
    ref: JobRef,
    api: Api,
    options: Options,
    *,
    log: Log,
    stop: Stop,
    cursor: Mapping[str, Any] | None = None,
    until: float | None = None,
) -> Outcome | Handover:
    """Follow the job to its end and release it; or, with `until` (of `time.monotonic`), hand it over then.

    Whatever ends this normally has released the job or says why not. Cancelling it touches nothing: a triggerer that
    stops is no reason to end a training.
    """
    supervisor = _Supervisor(ref, api, options, log, stop, cursor)
    try:
        return await supervisor.run(until)
    finally:
        await supervisor.close()


class _Supervisor:
    def __init__(
        self, ref: JobRef, api: Api, options: Options, log: Log, stop: Stop, cursor: Mapping[str, Any] | None
    ) -> None:
        self.ref = ref
        self.kind = kind_of(ref.kind)
        self.api = api
        self.options = options
        self.log = log
        self.stop = stop
        self.phase: Phase | None = None
        self.job: Object | None = None  # as last seen; kept when it is gone
        self.pods: dict[str, Object] = {}  # by uid; the last state of those that are gone, too
        self.tails: dict[tuple[str, str], deque[str]] = {}
        self.last_line = time.time()
        self.logs = LogFollower(
            api, self._line, namespace=ref.namespace, kind=self.kind, cursor=Cursor.from_dict(cursor or {}),
            budget=stream_budget(), say=log.warning,
        )  # fmt: skip

    async def close(self) -> None:
        await self.logs.close()

    # following

    async def run(self, until: float | None) -> Outcome | Handover:
        stopped = asyncio.Event()
        self.stop.attach(stopped)
        jobs_path = paths.jobs(self.kind, self.ref.version, self.ref.namespace)
        pods_path = paths.core(self.ref.namespace, "pods")
        if self.ref.submission:  # ours: one watch for all jobs of the deployment
            selector = f"{DEPLOYMENT_LABEL}={label_value(self.ref.deployment)}"
            jobs_hub = hub(self.api, jobs_path, label_selector=selector)
            pods_hub = hub(self.api, pods_path, label_selector=selector)
        else:
            jobs_hub = hub(self.api, jobs_path, field_selector=f"metadata.name={self.ref.name}")
            pods_hub = hub(self.api, pods_path, label_selector=self.ref.pod_selector)
        async with (
            jobs_hub.listen(key=by_uid(self.ref.uid)) as jobs,
            pods_hub.listen(self._is_mine, key=by_label(*self.ref.pod_selector.split("="))) as pods,
        ):
            waits = [asyncio.ensure_future(stopped.wait())]
            looked, hopeless = time.monotonic(), None
            try:
                while True:
                    self._take(jobs.objects, pods.objects)
                    if self.stop.reason is not None:
                        return await self._killed(self.stop.reason)
                    if self._superseded():
                        self.log.warning(
                            f"{self.ref} belongs to another try of this task by now; this one lets go of it"
                        )
                        return Outcome(str(self.phase), False, superseded=True)
                    if self.phase is not None and self.phase.ended:
                        return await self._ended()
                    if self.phase in (Phase.PENDING, Phase.STARTING) and time.monotonic() - looked > LOOK_EVERY:
                        looked = time.monotonic()
                        hopeless = diagnosis.hopeless(
                            self.job or {}, list(self.pods.values()), await self._events(), now=time.time()
                        )
                    cause = hopeless or self._overdue()
                    if cause is not None:
                        return await self._fail(cause)
                    if until is not None and time.monotonic() >= until:
                        await self.logs.close()
                        return Handover(self.logs.cursor.to_dict())
                    await self._wait(jobs, pods, waits, until)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _wait(self, jobs: Any, pods: Any, waits: list[asyncio.Future[Any]], until: float | None) -> None:
        """Until something changes, is asked for or is due."""
        changes = [asyncio.ensure_future(jobs.changed()), asyncio.ensure_future(pods.changed())]
        due = min((clock.due - time.time() for clock in self._clocks()), default=3600.0)
        if until is not None:
            due = min(due, until - time.monotonic())
        if self.phase in (Phase.PENDING, Phase.STARTING):
            due = min(due, LOOK_EVERY)
        try:
            done, _ = await asyncio.wait(
                [*waits, *changes], timeout=max(due, 0.01), return_when=asyncio.FIRST_COMPLETED
            )
            for change in done & set(changes):
                change.result()  # a watch that is refused (403) ends the following
        finally:
            for change in changes:
                change.cancel()

    def _is_mine(self, pod: Mapping[str, Any]) -> bool:
        if self.ref.submission:
            return bool((pod["metadata"].get("labels") or {}).get(SUBMISSION_LABEL) == self.ref.submission)
        owners = pod["metadata"].get("ownerReferences") or ()
        return any(o["uid"] == self.ref.uid or o["name"] == f"{self.ref.name}-launcher" for o in owners)

    def _take(self, jobs: Mapping[str, Object], pods: Mapping[str, Object]) -> None:
        """What the watches know becomes what we know."""
        job = jobs.get(self.ref.uid)
        if job is not None and self.job is None:
            self.logs.choose(chooser(self.options.logs, self.kind, job))
        self.job = job or self.job
        for uid, pod in pods.items():
            self.pods[uid] = pod
            self.logs.observe(pod)
        phase = phase_of(job, pods.values())
        if phase is not self.phase:
            self._say_phase(phase)
        self.phase = phase

    def _say_phase(self, phase: Phase) -> None:
        true = true_conditions(self.job or {})
        names = {Phase.QUEUED: "Suspended", Phase.PENDING: "Created", Phase.STARTING: "Created"}
        condition = true.get(names.get(phase, str(phase)))
        why = f": {condition.message or condition.reason}" if condition else ""
        self.log.info(f"{self.ref} is {phase}{why}", phase=str(phase))

    def _superseded(self) -> bool:
        owner = Owner.of(self.job or {})
        return bool(self.ref.owner and owner is not None and owner.ti_id != self.ref.owner)

    def _clocks(self) -> list[Clock]:
        if self.job is None or self.phase is None:
            return []
        return list(
            clocks(
                self.job, self.pods.values(), self.phase, self.options.limits,
                deadline=self.options.deadline, last_line=self.last_line,
            )
        )  # fmt: skip

    def _overdue(self) -> Cause | None:
        """The limit that has passed, as a cause."""
        now = time.time()
        over = min((c for c in self._clocks() if c.due <= now), key=lambda c: c.due, default=None)
        if over is not None:
            return diagnosis.over_limit(over.name, over.seconds, over.what)
        most = self.options.limits.max_restarts
        if most is not None and (count := restarts(self.pods.values())) > most:
            return diagnosis.over_limit("max_restarts", float(most), f"containers were restarted {count} times")
        return None

    def _line(self, line: LogLine) -> None:
        self.last_line = time.time()
        self.tails.setdefault((line.pod, line.container), deque(maxlen=TAIL)).append(line.text)
        where = f"[{line.role} {line.index}]"
        self.log.info(f"{where} {line.text}", role=line.role, index=line.index, pod=line.pod)

    # ending

    async def _ended(self) -> Outcome:
        """The job succeeded, failed or is gone: logs, cause, release, in this order."""
        report = await self.logs.drain(self.options.drain_timeout)
        for text in report.warnings():
            self.log.warning(text)
        if self.phase is Phase.SUCCEEDED:
            return await self._release(None)
        cause = diagnosis.diagnose(
            self.job or {},
            list(self.pods.values()),
            await self._events(),
            await self._tails(),
            gone=self.phase is Phase.GONE,
        )
        return await self._release(cause)

    async def _fail(self, cause: Cause) -> Outcome:
        """A limit has passed, or the job can never start: what it wrote is read, then it is released."""
        self.log.warning(cause.summary)
        report = await self.logs.drain(min(self.options.drain_timeout, 5), following=False)
        for text in report.warnings():
            self.log.warning(text)
        return await self._release(cause)

    async def _killed(self, reason: str) -> Outcome:
        """A kill has seconds: the request first, everything else where time allows."""
        cause = Cause(Category.KILLED, reason, "", "", None, False)
        return await self._release(cause, verify=False, timeout=4)

    async def _release(self, cause: Cause | None, *, verify: bool = True, timeout: float | None = None) -> Outcome:
        succeeded = cause is None
        spent = usage(list(self.pods.values()), now=time.time(), job=self.job or {})
        released = error = ""
        if self.options.release:
            ended = self.phase is not None and self.phase.ended
            mode = mode_of(self.options.on_finish_action, succeeded=succeeded, ended=ended)
            try:
                done = await release(
                    self.api, self.ref, mode, verify=verify, timeout=timeout or self.options.release_timeout
                )
                released = done.text
                self.log.info(released)
            except ReleaseError as e:
                error = str(e)
                self.log.warning(error)
        self.log.info(spent.text)
        return Outcome(
            str(self.phase),
            succeeded,
            cause=None if cause is None else cause.to_dict(),
            released=released,
            release_error=error,
            usage=spent.to_dict(),
        )

    async def _events(self) -> list[Object]:
        """Events about the job and its pods; none where they cannot be read: a cause is better than none."""
        uids = [self.ref.uid, *self.pods][:20]
        found: list[Object] = []
        for uid in uids:
            try:
                answer = await self.api.request(
                    "GET",
                    paths.core(self.ref.namespace, "events"),
                    query={"fieldSelector": f"involvedObject.uid={uid}"},
                )
            except (ApiStatusError, ApiUnavailable) as e:
                self.log.warning(f"The events of {self.ref} cannot be read: {e}")
                break
            found += answer.get("items") or []
        return found

    async def _tails(self) -> dict[tuple[str, str], list[str]]:
        """The last lines of each container: of those that were followed, and of failed ones that were not."""
        return {key: list(lines) for key, lines in self.tails.items()}
