"""The table of trainings, running and ended. All viewers share what is read from the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import ACTIVE_STATES, MAX_LISTED, Cost, Listed, Selection
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.core.reporting.summary import CLUSTER, CONFIGURATION
from airflow_provider_ktrain.plugin.stored_texts import clock, minute_of
from airflow_provider_ktrain.plugin.training_table import (
    Used,
    is_unfinished,
    keep_differing_parameters,
    sums_as_text,
    training_row,
)

MAX_ROWS = 50  #: How many rows one page has.
CACHE_SECONDS = 10.0
OLD_READS = 3  #: A read is shown until it is this many times as old as the cache may be.
MAX_KEPT = 32  #: Different reads that are kept.
CATEGORIES = (*(category.value for category in Category), CONFIGURATION, CLUSTER)
STATES: Mapping[str, tuple[str, ...]] = {
    "running": ACTIVE_STATES, "succeeded": ("success",), "failed": ("failed",),
    "waiting for a retry": ("up_for_retry",), "skipped": ("skipped",),
}  # fmt: skip


@dataclass(frozen=True)
class Filters:
    """What the query of a request asks for. Empty fields, and those that can't be read, ask for nothing.

    :param since, until: the first and the last day, in UTC, on which a training began: `2026-11-29`.
    :param text: is a part of the cause, in upper or lower case.
    :param after: the position of the last training of the page before.
    """

    dag_id: str = ""
    state: str = ""
    since: str = ""
    until: str = ""
    category: str = ""
    text: str = ""
    after: str = ""

    @property
    def is_about_causes(self) -> bool:
        """Whether causes are searched."""
        return bool(self.category or self.text)

    def query(self, **changes: str) -> str:
        """The query of a request with some changes."""
        return urlencode({name: value for name, value in asdict(replace(self, **changes)).items() if value})

    def selection(self, rights: Mapping[str, bool]) -> Selection:
        """What the database selects. Causes quote logs, so only DAGs whose logs the user may read are searched."""
        mine = {
            name for name, logs in rights.items() if self.dag_id in ("", name) and (logs or not self.is_about_causes)
        }
        first, last = _day(self.since), _day(self.until)
        until = None if last is None else last + timedelta(days=1)
        return Selection(frozenset(mine), STATES.get(self.state, ()), first, until)

    def match(self, one: Cost) -> bool:
        """Whether the cause of a training is one of those that are asked for."""
        cause = one.summary.get("cause")
        found = not self.text or (isinstance(cause, str) and self.text.strip().lower() in cause.lower())
        return found and self.category in ("", one.summary.get("category"))


def _day(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        return None


@dataclass
class _Kept:
    value: Any = None
    at: float = float("-inf")
    reading: threading.Lock = field(default_factory=threading.Lock)


class Shared:
    """Reads the same at most once in `cache_seconds`, for all viewers.

    Requests are answered in threads. While one of them reads again, the others show what was read before. If that is
    older than OLD_READS times `cache_seconds`, they read themselves: no viewer waits for another one's query.

    :param clock: the time in seconds, from any origin. Default: `time.monotonic`.
    """

    def __init__(self, cache_seconds: float = CACHE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache_seconds, self._clock = cache_seconds, clock
        self._kept: dict[Any, _Kept] = {}  # what was used last is at the end
        self._lock = threading.Lock()

    def get(self, key: Any, read: Callable[[], Any]) -> Any:
        """What `read` returns, or returned a few seconds ago for the same key."""
        with self._lock:
            kept = self._kept[key] = self._kept.pop(key, _Kept())
            while len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        age = self._clock() - kept.at
        if age < self._cache_seconds:
            return kept.value
        is_first = kept.reading.acquire(blocking=False)
        try:
            if not is_first and age < self._cache_seconds * OLD_READS:
                return kept.value
            value = read()
            kept.value, kept.at = value, self._clock()
            return value
        finally:
            if is_first:
                kept.reading.release()


class Trainings:
    """The trainings that Airflow's database has, by pages.

    :param shared: keeps what was read. Default: a new one.
    """

    def __init__(self, shared: Shared | None = None) -> None:
        self._shared = shared or Shared()

    def view(self, user: Any, filters: Filters, now: float) -> SimpleNamespace:
        """One page of the trainings of DAGs that the user may read, newest first, and sums over all pages."""
        began = self._shared.get("dags", compat_server.summarized_dags)
        rights = compat_server.rights(user, began)
        selection = filters.selection(rights)
        whole = replace(filters, after="")
        sums = self._shared.get(("sums", selection, whole), lambda: _sums(whole, selection))
        listed, statuses, more = [], {}, False
        if sums[1]:
            listed, statuses, more = self._shared.get((selection, filters), lambda: _page(filters, selection))
        rows = [
            training_row(one, statuses.get(one.record.key), with_logs=rights[one.record.key.dag_id], now=now)
            for one in listed
        ]
        keep_differing_parameters(rows)
        return SimpleNamespace(
            rows=rows,
            filters=filters,
            sums=sums_as_text(*sums[1:]),
            is_cut=sums[0] >= MAX_LISTED,
            most=f"{MAX_LISTED:,}",
            next=filters.query(after=listed[-1].position) if more else "",
            first=filters.query(after="") if filters.after else None,
            since=clock(min((began[name] for name in rights), default=None)),
            unsearched=filters.is_about_causes and not all(rights.values()),
            data=(listed, statuses, sums, sorted(rights.items()), minute_of(now)),
        )

    def dag_ids(self, user: Any) -> list[str]:
        """The DAGs that the filter offers."""
        return sorted(compat_server.rights(user, self._shared.get("dags", compat_server.summarized_dags)))


def _page(filters: Filters, selection: Selection) -> tuple[list[Listed], Mapping[TaskInstanceId, Any], bool]:
    """The trainings of a page, the statuses of the unfinished ones, and whether there are more."""
    if filters.is_about_causes:
        with closing(compat_server.costs(selection, filters.after)) as found:
            matching = (one.id for one in found if filters.match(one))
            selection = replace(selection, ids=tuple(islice(matching, MAX_ROWS + 1)))
    listed = compat_server.trainings(selection, filters.after, MAX_ROWS + 1)
    shown = listed[:MAX_ROWS]
    keys = [one.record.key for one in shown if is_unfinished(one.record.state, one.summary)]
    return shown, compat_server.read_statuses(keys) if keys else {}, len(listed) > MAX_ROWS


def _sums(filters: Filters, selection: Selection) -> tuple[int, int, float, float, bool]:
    """How many trainings were looked at and match, how many seconds these held and wasted accelerators, and whether
    that is only the least: some run, or were killed, or tries of theirs are not stored.
    """
    read, count, held, wasted, at_least = 0, 0, 0.0, 0.0, False
    for one in compat_server.costs(selection) if selection.dag_ids else ():
        read += 1
        if filters.match(one):
            count += 1
            used = Used.of(one.state, one.summary, one.status)
            held, wasted = held + used.held, wasted + used.wasted
            at_least |= used.tries < one.try_number or is_unfinished(one.state, one.summary)
    return read, count, held, wasted, at_least
