"""Finds the rule that applies to what may end a training, by a read of the job and its pods for this decision."""

from __future__ import annotations

from airflow_provider_ktrain.core.end_rules import ALIVE, LIMITS, Event, Ownership, Rule
from airflow_provider_ktrain.core.state.pods.exit_code import EndedPrimary
from airflow_provider_ktrain.core.state.status import Seen
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.api.job_calls import JobRead, Log
from airflow_provider_ktrain.engine.conclusion_store import ConclusionStore
from airflow_provider_ktrain.engine.follow.following import Following, Noticed
from airflow_provider_ktrain.engine.owned_job import OwnedJob

#: Events after which nothing is ended.
NEEDS_NO_READ = (Event.HAND_OVER, Event.TRIGGER_FAILED, Event.SUSPENDED, Event.STOPPED_POD)
STATUS_LAG_SECONDS = 20.0  #: How long the job's status may take to show that its primary container has ended.


class Decisions:
    """Decides on one job while it is followed."""

    def __init__(self, job: OwnedJob, store: ConclusionStore, log: Log) -> None:
        self._job, self._store, self._log = job, store, log
        #: The `timing.now()` at which a decision about an event first saw this end of the primary.
        self._near_end: dict[tuple[Event, EndedPrimary | None], float] = {}
        self._unread_logged = False  # whether it was logged that the job can't be read

    async def rule_for(self, following: Following, noticed: Noticed) -> tuple[Rule, JobRead | None]:
        """The rule that applies, and the read by which it was found; None if nothing was read."""
        event, job = noticed.event, self._job
        unread = job.rule(event, None)
        if job.owner_in(None) is Ownership.FOREIGN or event in NEEDS_NO_READ:
            return unread, None
        asked = timing.epoch()
        try:
            read = await job.read()
            seen = await following.observe(read)
            holds = await following.still_holds(noticed) if event in LIMITS and seen in ALIVE else True
        except (ApiStatusError, ApiUnavailable) as e:
            following.record_unread(asked)
            self._log_unread(noticed, e)
            return unread, None
        self._unread_logged = False
        if holds is None:
            return unread, None
        may_wait, stored = self._may_wait(event, following), False
        if job.owner_in(read) is Ownership.MINE and (seen is Seen.GONE or event is Event.BEING_DELETED):
            found = event is Event.RELEASE_FAILED or await self._store.find(job.known_ref)
            if found is None:
                return unread, None
            stored = found
        return job.rule(event, read, seen=seen, holds=holds, may_wait=may_wait, cause_stored=stored), read

    def _may_wait(self, event: Event, following: Following) -> bool:
        """Whether there is time to look again: a job's status shows its end some seconds after its program's."""
        if following.state.seen is not Seen.PRIMARY_ENDED:
            return True
        since = self._near_end.setdefault((event, following.state.ended_primary), timing.now())
        return timing.now() - since < STATUS_LAG_SECONDS

    def _log_unread(self, noticed: Noticed, error: Exception) -> None:
        """Log once per outage that nothing is decided."""
        if not self._unread_logged:
            what = noticed.limit or noticed.event
            ref = self._job.ref
            self._log.warning(f"{ref} can't be read now ({what}). Nothing is done until it is.\n{error}")
        self._unread_logged = True
