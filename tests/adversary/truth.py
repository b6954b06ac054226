"""What truly happens in a life, and what must be so. Nothing here imports the product.

The server tells of each write with its author, of pods and of the ends of programs; the life tells of Airflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
GONE_SECONDS = 60.0  #: How long after a kill, or the last lie after it, pods may run.
OUTCOME_SECONDS = 120.0  #: How long after an end, or the last lie after it, the task may take to have its outcome.
CRASH_LOOP = 6  #: Failures of one replica, after which the default crash_loop_limit ends the job.
OVER = ("success", "failed")
REAPER = "reaper"  #: The name of the reaper as an actor.
#: The roles of the replicas whose programs decide, by kind.
DECIDING = {"PyTorchJob": "Master", "MPIJob": "Launcher", "TrainJob": "node"}


class Wrong(AssertionError):
    """Something happened that must not."""


@dataclass
class End:
    """The end of a program."""

    at: float
    code: int
    by_itself: bool  # no SIGTERM was sent before


@dataclass
class Job:
    """A job that was created.

    :ivar since: when the try began that has created it: from then on its execution_timeout counts.
    :ivar gone: when it was removed.
    :ivar complete: whether its deciding programs have ended with 0 by themselves; None while the job has no end.
    """

    uid: str
    kind: str
    of_try: str
    since: float
    elastic: bool = False
    programs: dict[str, list[End]] = field(default_factory=dict)  # by replica
    running: dict[str, str] = field(default_factory=dict)  # pods that hold GPUs: uid -> name
    restarts: int = 0
    ended: float | None = None
    succeeded: bool = False
    complete: bool | None = None
    gone: float | None = None
    deleted_by_user: bool = False
    taken_by: set[str] = field(default_factory=set)  # tries that have created or changed it before its end

    def end(self, at: float, succeeded: bool) -> None:
        """The operator has noticed its end."""
        role = "Worker" if self.elastic else DECIDING[self.kind]
        last = [ends[-1] for replica, ends in self.programs.items() if replica.startswith(role) and ends]
        whole = [end.code == 0 and end.by_itself for end in last]
        self.ended, self.succeeded = at, succeeded
        self.complete = succeeded and (any(whole) if self.elastic else bool(whole) and all(whole))


@dataclass
class Try:
    """A try of the task."""

    name: str
    number: int
    life: int  # number of clears before
    began: float
    posts: int = 0


class Truth:
    """The truth about one task and its jobs.

    :param now: returns the time.
    :param timeout: the task's execution_timeout. None: it has none.
    :param max_restarts: None: no limit.
    """

    def __init__(self, now: Callable[[], float], timeout: float | None, max_restarts: int | None) -> None:
        self._now, self._timeout, self._max_restarts = now, timeout, max_restarts
        self.story: list[str] = []
        self.requests: list[str] = []  # what each was for, but those of the reaper
        self.wrong: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.actor = "nobody"
        self.state = "none"  # of the task, in Airflow
        self.tries: list[Try] = []
        self.clears = 0
        self.killed_at: float | None = None  # when a user has marked or cleared the task
        self.marked = False  # a user has set the final state
        self.worker_stopped = False  # SIGTERM to the worker of the present try
        self.expired = False  # the timeout of the deferral has expired, by Airflow's word
        self.has_retry = False
        self.compacted = False  # changes of pods can't be watched any more
        self.last_lie = float("-inf")
        self.lies = 0
        self.began: float = now()
        self.task_ended: float | None = None

    # the story

    def tell(self, text: str) -> None:
        self.story.append(f"{self._now() - self.began:8.2f}  {text}")

    def object(self, text: str) -> None:
        """Note that something is wrong."""
        self.tell(f"WRONG: {text}")
        self.wrong.append(text)

    # Airflow

    def set_state(self, state: str) -> None:
        if state != self.state:
            self.tell(f"the task is {state}")
        self.state = state
        if state in OVER and self.task_ended is None:
            self.task_ended = self._now()

    def start_try(self, name: str, number: int, has_retry: bool) -> None:
        self.tries.append(Try(name, number, self.clears, self._now()))
        self.has_retry, self.worker_stopped, self.expired = has_retry, False, False
        self.task_ended = None
        self.set_state("running")

    def kill(self, state: str) -> None:
        """A user marks or clears the task."""
        self.killed_at, self.marked = self._now(), state in OVER
        self.set_state(state)

    # the cluster

    def lied(self) -> None:
        """A lie is told now."""
        self.last_lie = self._now()
        self.lies += 1

    def _job_of(self, uid: str) -> Job | None:
        return self.jobs.get(uid)

    def created(self, kind: str, uid: str, *, elastic: bool = False) -> None:
        """A job was created."""
        me = self.tries[-1]
        me.posts += 1
        alive = [job for job in self.jobs.values() if job.running]
        lives = {one.name: one.life for one in self.tries}
        job = self.jobs[uid] = Job(uid, kind, me.name, me.began, elastic, taken_by={me.name})
        self.tell(f"    {kind} {uid} is created")
        if me.posts > 1:
            self.object(f"{self.actor} submits a second time in one try")
        if alive:
            self.object(f"{self.actor} submits while pods of {alive[0].uid} run")
        for other in self.jobs.values():
            if other is not job and other.complete and lives[other.of_try] == me.life and not other.deleted_by_user:
                self.object(f"{self.actor} trains again although {other.uid} has succeeded")
            if other is not job and other.ended is not None and me.name in other.taken_by:
                self.object(f"{self.actor} submits again after the end of {other.uid}, which its try had taken")

    def changed(self, uid: str) -> None:
        """The present actor patches a job: if it is a process of a try, that has taken the job."""
        if (job := self._job_of(uid)) is not None and job.ended is None and self.actor != REAPER:
            job.taken_by.add(self.tries[-1].name)

    def job_ended(self, uid: str, succeeded: bool) -> None:
        job = self._job_of(uid)
        if job is not None and job.ended is None:
            job.end(self._now(), succeeded)
            how = "failed" if not succeeded else "succeeded, complete" if job.complete else "succeeded, but incomplete"
            self.tell(f"    {uid} has {how}")

    def job_gone(self, uid: str) -> None:
        if (job := self._job_of(uid)) is not None and job.gone is None:
            job.gone = self._now()
            self.tell(f"    {uid} is gone")

    def pod_runs(self, uid: str, job: str, name: str) -> None:
        if (owner := self._job_of(job)) is not None and uid not in owner.running:
            owner.running[uid] = name
            self.tell(f"    pod {name} runs")

    def pod_over(self, uid: str, job: str) -> None:
        if (owner := self._job_of(job)) is not None and uid in owner.running:
            self.tell(f"    pod {owner.running[uid]} holds nothing any more")
            self.watch_clock()
            del owner.running[uid]

    def program_ended(self, job: str, replica: str, code: int, *, by_itself: bool, again: bool) -> None:
        self.tell(f"    the program of {replica} ends with {code}{'' if by_itself else ', after SIGTERM'}")
        if (owner := self._job_of(job)) is not None:
            owner.programs.setdefault(replica, []).append(End(self._now(), code, by_itself))
            owner.restarts += again

    # what may be written

    def _may_end(self, job: Job) -> bool:
        """Whether somebody may end a job that has not ended."""
        over = self.state in (*OVER, "none", "restarting", "removed")
        late = self._timeout is not None and self._now() >= job.since + 0.9 * self._timeout - 1.5
        restarts = self._max_restarts is not None and job.restarts > self._max_restarts
        failures = [sum(end.code != 0 for end in ends) for ends in job.programs.values()]
        restarts = restarts or max(failures, default=0) >= CRASH_LOOP
        nobody = self.worker_stopped and not self.has_retry
        lives = {one.name: one.life for one in self.tries}
        cleared = lives[job.of_try] < self.clears
        return over or late or self.expired or restarts or nobody or cleared

    def check_end(self, uid: str, what: str) -> None:
        """A job, or pods of it, are about to be ended."""
        job = self._job_of(uid)
        if self.actor == REAPER and self.state not in OVER:
            self.object(f"the reaper {what} of {uid}, whose task is {self.state}")
        elif job is not None and job.ended is None and job.gone is None and not self._may_end(job):
            self.object(f"{self.actor} {what} of {uid}, which has not ended, without a kill, a limit or a user")

    # what is reported

    def _of_this_life(self) -> list[Job]:
        lives = {one.name: one.life for one in self.tries}
        return [job for job in self.jobs.values() if lives[job.of_try] == self.clears]

    def try_ended(self, succeeded: bool, text: str) -> None:
        """A try has reported its outcome."""
        jobs = self._of_this_life()
        self.tell(f"the try ends: {'success' if succeeded else 'failure: ' + text.splitlines()[0]}")
        complete = [job for job in jobs if job.complete]
        killed = self.marked or self.killed_at is not None or self.worker_stopped
        is_unknown = self.compacted and any(job.succeeded for job in jobs)
        if succeeded and not complete and not is_unknown:
            self.object("success is reported, and no training was completed")
        if not succeeded and "incomplete" in text and complete:
            self.object("a complete training is reported as incomplete")
        if not succeeded and "deleted by" in text and not any(job.deleted_by_user for job in jobs) and not killed:
            self.object("a deletion by someone else is reported, and nobody has deleted the job")
        if not succeeded and complete and not killed and not self.has_retry and not self._was_late(complete[-1]):
            self.object("a failure is reported for good, and a training was completed")
        goes_on = bool(jobs) and jobs[-1].ended is None and jobs[-1].gone is None and not jobs[-1].deleted_by_user
        if not succeeded and not killed and goes_on and not self._may_end(jobs[-1]):
            self.object("a failure is reported while the training goes on")
        if not jobs or killed:
            return
        last = jobs[-1]
        is_incomplete = last.succeeded and not last.complete and self.tries[-1].name in last.taken_by
        is_known = not self.compacted and not self._was_late(last)
        if not succeeded and is_incomplete and is_known and "incomplete" not in text:
            self.object("an incomplete training is reported as something else")
        end = last.gone if last.ended is None else last.ended
        if end is not None and (late := self._now() - max(end, self.last_lie)) > OUTCOME_SECONDS:
            self.object(f"the outcome comes {late:.0f} s after the end of {last.uid}")

    def _was_late(self, job: Job) -> bool:
        return (
            self._timeout is not None and job.ended is not None and job.ended >= job.since + 0.9 * self._timeout - 6.0
        )

    def watch_clock(self) -> None:
        """Called now and then, and when a pod goes: after a kill, pods must go."""
        now = self._now()
        if self.killed_at is not None and self.state in OVER:
            since = max(self.killed_at, self.last_lie)
            left = [name for job in self.jobs.values() for name in job.running.values()]
            if left and now - since > GONE_SECONDS:
                self.object(f"{', '.join(left)} still run {now - since:.0f} s after the kill")
                self.killed_at = None

    def reaped(self) -> None:
        """The reaper says that it has released the task's job."""
        left = [name for job in self.jobs.values() for name in job.running.values()]
        if left:
            self.object(f"{', '.join(left)} still run, and the reaper says that it has released the job")

    def over(self) -> None:
        """The last process has ended, and the reaper was there."""
        left = [name for job in self.jobs.values() for name in job.running.values()]
        if left:
            self.object(f"{', '.join(left)} still run after the last process and one pass of the reaper")
