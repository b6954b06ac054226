"""The end of a process that owns a training: a kill, a stop, Ctrl-C, or an error that ends the try.

Airflow's word that a task is over is the evidence of a kill. A worker has seconds, so it sends one request, fenced by
the last resourceVersion that was seen; on a conflict, one read decides. A trigger and a terminal have time to read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType

from airflow_provider_ktrain.core.end_rules import ACTS, Action, Event, Rule, Successor, Task, task_of, why_ended
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.state.status import Seen
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.job_calls import JobChanged, JobRead, Log, Observed
from airflow_provider_ktrain.engine.api.request_errors import is_canceled, retry_any
from airflow_provider_ktrain.engine.follow.last_lines import last_lines
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.owned_job import OwnedJob, Result

REFUSED_READ_SECONDS = 1.0  #: Time for the last read if the API server has refused a request.
LAST_READ_SECONDS = 5.0  #: Time for the last read of a process that ends.
LATE_SECONDS = 30.0  #: How long a process that outlives its time keeps trying.
READ_INTERVAL = 0.5  #: Pause between two reads of the job by a process that ends.
DELETE_SECONDS = 1.0  #: Time that such a process keeps for its one request.
STATE_SECONDS = 1.5  #: Time for one answer about the task's state in a process that has only seconds.
STATE_INTERVAL = 5.0  #: Pause between two questions about the task's state.
AFTER_ERROR_SECONDS = 90.0  #: Time for a release after an error that ends the try.
RELEASE_SECONDS = 300.0  #: How long after a kill to retry an unreachable API server and to wait for the pods.
NO_JOB = "The task was killed before it had submitted a job."
ENDED_JOB = "The task was killed after its training had ended."
UNKNOWN_JOB = "The task was killed while it submitted a job, which may exist: the API server did not answer."
UNDECIDED = (Task.CHANGING, Task.UNKNOWN)


class _errors_suppressed:  # is used as contextlib.suppress is
    """Go on after any error of what a decision can do without; see `is_canceled`."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        return isinstance(error, Exception | asyncio.CancelledError) and not is_canceled(error)


class ProcessEnd:
    """Ends the part that one process has in a training's life."""

    def __init__(self, job: OwnedJob, host: Host, cursor: Callable[[], Cursor], log: Log) -> None:
        self._job, self._host, self._cursor, self._log = job, host, cursor, log
        #: How a task was killed whose job is this try's, if the job was released or this process has only seconds.
        self.killed = ""

    async def stop(self) -> tuple[str, str]:
        """The process was asked to stop. Returns the sentence for the user, and why a release failed."""
        event = Event.INTERRUPT if self._host.ask_state is None else Event.KILL
        stop = self._in_seconds if self._host.seconds is not None else self._with_time
        result = await stop(event)
        self._job.let_go()
        return result

    async def interrupted(self, event: Event) -> None:
        """An error ends the try. It is raised afterwards, so nothing is raised here.

        :param event: ERROR, NO_RIGHT, FINAL_ERROR, DEADLINE, INTERRUPT, KILL or WAIT_EXPIRED.
        """
        job = self._job
        if job.is_mine and job.rule(event, None).action is not Action.LET_GO:
            hurried = job.situation(event, None).hurried
            await (self._in_seconds(event) if hurried else self._after_error(event))
        job.let_go()

    async def _after_error(self, event: Event) -> None:
        job = self._job
        seconds = REFUSED_READ_SECONDS if event is Event.NO_RIGHT else LAST_READ_SECONDS
        await job.find_submitted(max(timing.now(), job.posting.until) + seconds)
        if job.ref is None:
            self._log_unknown_job()
            return
        nobody = self._host.successor is Successor.NOBODY or event is Event.FINAL_ERROR
        read = await self._last_read(timing.now() + (LATE_SECONDS if nobody else LAST_READ_SECONDS))
        rule = job.rule(event, read, may_wait=False)
        self._log.warning(job.text(rule, event))
        if read is not None and job.mode(rule, read.job) is not None:
            await self._release(event, Task.NOT_ASKED, AFTER_ERROR_SECONDS)

    def _log_unknown_job(self) -> None:
        """Log that nobody knows yet whether the job was created."""
        if self._job.submission is not None:
            self._log.warning(
                "The API server can't be asked whether the job was created. If no try of the task follows, "
                f"run: {self._job.submission.delete_command}"
            )

    # within seconds

    async def _in_seconds(self, event: Event) -> tuple[str, str]:
        """End with one request, fenced by what was seen last. A process that is still alive then goes on to try."""
        job = self._job
        assert self._host.seconds is not None
        end = timing.now() + self._host.seconds
        late = end + LATE_SECONDS
        task, state = await self._ask_twice() if event is Event.KILL else (Task.NOT_ASKED, "")
        await job.find_submitted(end - 1.0)
        if job.submission is not None:
            self._log_unknown_job()
            await job.find_submitted(max(late, job.posting.until + 1.0))
        if job.ref is None:
            known = ENDED_JOB if job.is_followed else NO_JOB
            return (known if job.submission is None else UNKNOWN_JOB), ""
        read: JobRead | Observed | None
        # what was seen last fences the one request of a kill: an end and another owner are final
        read, conflicts = job.observed if event is Event.KILL else await self._last_read(end), 0
        while True:
            if self._end_is_near(event, read, task) and timing.now() + READ_INTERVAL + DELETE_SECONDS < end:
                await asyncio.sleep(READ_INTERVAL)
                read = await self._last_read(end - DELETE_SECONDS) or read
                continue
            rule = job.rule(event, read, task=task, may_wait=False)
            text, error = job.text(rule, event, state), ""
            is_killed = event is Event.KILL and rule.action is not Action.LET_GO
            self.killed = why_ended(event, state) if is_killed else ""
            try:
                async with asyncio.timeout(max(end - timing.now(), 0.5)):
                    text = f"{text}\n{await self._carry_out(rule, event, read, task, end)}".rstrip()
            except JobChanged:
                changed, conflicts = await self._read_job(end), conflicts + 1
                read = changed or read
                if changed is not None and timing.now() < end:
                    if conflicts > 1:
                        await asyncio.sleep(READ_INTERVAL)
                    continue
                why = "It could not be read" if changed is None else "It keeps changing"
                error = f"{why}. To delete it, run: {job.delete_command}"
            except (Exception, asyncio.CancelledError) as e:
                if is_canceled(e):
                    raise
                error = f"The request was not answered. To delete the job, run: {job.delete_command}\n{e}".rstrip()
            self._log.warning(f"{text}\n{error}".rstrip())
            unread = read is None and rule.action is Action.LEAVE and event is not Event.KILL
            if not (error or unread) or timing.now() > late:
                return text, error
            end = late
            await asyncio.sleep(READ_INTERVAL)
            if unread:
                read = await self._last_read(late)

    async def _carry_out(
        self, rule: Rule, event: Event, evidence: JobRead | Observed | None, task: Task, end: float
    ) -> str:
        """Carry out a rule, which was found by this evidence, by one request; returns what was done."""
        job = self._job
        if rule.action is Action.RELEASE_NOW:
            return (await job.release_at_once(rule, evidence, max(end - timing.now(), 0.5))).text
        if rule.action not in ACTS:
            return ""
        read = await job.read()  # the job has ended, but pods of it may run
        rule = job.rule(event, read, task=task, may_wait=False)
        released, error = await job.write(rule, read, verify=False)
        if error:
            raise KtrainError(error)
        return released.text if released is not None else ""

    def _end_is_near(self, event: Event, read: JobRead | Observed | None, task: Task) -> bool:
        """Whether the program has ended, so that the job's status shows its end some seconds later."""
        looks_again = self._job.rule(event, read, task=task).action is Action.LOOK_AGAIN
        return looks_again and self._job.situation(event, read).seen is Seen.PRIMARY_ENDED

    async def _read_job(self, end: float) -> Observed | None:
        """The job as it is now, after a conflict; None if it can't be read."""
        with _errors_suppressed():
            async with asyncio.timeout(max(end - timing.now(), 0.5)):
                return await self._job.read_job()
        return None

    async def _last_read(self, end: float) -> JobRead | None:
        """Read the job and its pods. A failed read is repeated until `end`, by `timing.now`; then None."""
        while (left := end - timing.now()) > 0:
            with _errors_suppressed():
                async with asyncio.timeout(left):
                    return await self._job.read()
            await asyncio.sleep(min(READ_INTERVAL, max(end - timing.now(), 0.0)))
        return None

    # with time

    async def _with_time(self, event: Event) -> tuple[str, str]:
        """End after as many reads as that takes."""
        job = self._job
        if not job.options.release:
            return "", ""
        await job.find_submitted(max(timing.now(), job.posting.until) + LAST_READ_SECONDS)
        if job.ref is None:
            self._log_unknown_job()
            return "Interrupted before a job was submitted.", ""
        rule, task, state = await self._ask_until_decided(event)
        if rule.action is Action.LEAVE:
            text = job.text(rule, event, state)
            self._log.warning(f"{text}\nThe task is {state or 'in an unknown state'}.")
            return text, ""
        if event is Event.KILL:
            self._log.info(f"The task is {state}. Releasing {job.ref}.")
        released, error = await self._release(event, task, RELEASE_SECONDS, logs=True)
        if event is Event.KILL and released is not None:
            self.killed = why_ended(event, state)
        return error.partition("\n")[0] or f"{job.ref} is left as it is." if released is None else released.text, error

    async def _release(self, event: Event, task: Task, seconds: float, *, logs: bool = False) -> Result:
        """Release the job by the rule that applies, again after any error, until it is released or the time is over.

        :param logs: whether to log the last lines of the containers meanwhile. Default: False.
        """
        job, end = self._job, timing.now() + seconds
        lines = contextlib.AsyncExitStack()

        async def attempt() -> Result:
            nonlocal logs
            api = await job.api()
            if logs:
                logs = False
                with _errors_suppressed():
                    await lines.enter_async_context(
                        last_lines(api, job.known_ref, job.options.logs, self._cursor(), self._log)
                    )
            released, error = await job.release_by_rule(event, task=task, timeout=max(end - timing.now(), 0.5))
            if error and timing.now() + READ_INTERVAL < end:
                raise KtrainError(error)
            return released, error

        try:
            result = await retry_any(attempt, end, pause=READ_INTERVAL, warn=self._log.warning)
        except (Exception, asyncio.CancelledError) as e:
            if is_canceled(e):
                raise
            result = None, f"{job.ref} could not be released. To delete it, run: {job.known_ref.delete_command}\n{e}"
        finally:
            with _errors_suppressed():
                await lines.aclose()
        if result[1]:  # last: it names the command
            self._log.warning(result[1])
        return result

    async def _ask_until_decided(self, event: Event) -> tuple[Rule, Task, str]:
        """Ask for the task's state until it decides, or the host's patience is over."""
        end, before = timing.now() + self._host.patience, ""
        while True:
            task, state = await self._ask(max(end - timing.now(), STATE_SECONDS))
            may_wait = timing.now() < end or task not in UNDECIDED
            rule = self._job.rule(event, None, task=task, may_wait=may_wait)
            if rule.action is not Action.LOOK_AGAIN or task not in UNDECIDED:
                return rule, task, state
            if state != before:
                self._log.info(
                    f"The trigger was canceled while its task is {state or 'in an unknown state'}. "
                    "Waiting for that state to change."
                )
            before = state
            await asyncio.sleep(min(STATE_INTERVAL, self._host.patience))

    async def _ask(self, seconds: float) -> tuple[Task, str]:
        """What Airflow answers about the task, and the state itself."""
        if self._host.ask_state is None:
            return Task.NOT_ASKED, ""
        state = ""
        with _errors_suppressed():
            state = await self._host.ask_state(seconds)
        return task_of(state), state

    async def _ask_twice(self) -> tuple[Task, str]:
        task, state = await self._ask(STATE_SECONDS)
        return await self._ask(STATE_SECONDS) if task is Task.UNKNOWN else (task, state)
