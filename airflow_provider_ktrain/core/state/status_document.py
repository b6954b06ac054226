"""The XCom `ktrain_status`: what the training page shows about one try of a task.

Whoever follows the job writes it, worker or trigger. Its size is limited, because Airflow stores it in its database and
each write costs the triggerer time. docs/reference/formats.md describes its fields.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.formats import VERSION
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.manifest.resources import pod_gpus
from airflow_provider_ktrain.core.state.pod_state import RUNNING, SUCCEEDED, state_of_pod
from airflow_provider_ktrain.core.state.training_metrics import MAX_SERIES_BYTES, TrainingMetrics
from airflow_provider_ktrain.core.text import clean

Pod = Mapping[str, Any]
MAX_BYTES = 16 * 1024  #: of the document's JSON
MAX_REPLICAS = 64  #: shown one by one; of more, only those that are not fine, and counts
MAX_LINES = 16  #: replicas whose last line is shown
MAX_LINE_CHARS = 120  #: of a last line
MAX_PHASES = 20  #: the latest ones
MAX_TEXT_CHARS = 500  #: of each text of the cause and the queue
FINE = (RUNNING, SUCCEEDED)  #: states of replicas that need no attention
#: columns of `replicas.rows`
COLUMNS = ("role", "index", "pod", "node", "gpus", "state", "restarts")


@dataclass(frozen=True)
class TrainingStatus:
    """The state of a training at one moment.

    :param job: `kind`, `namespace`, `name` and `uid`; `code`, the hash of its code, if it has any.
    :param try_number: of the task instance.
    :param written_at: epoch seconds.
    :param host: `worker` or `trigger`: who follows the job.
    :param phases: phase and epoch seconds since when, oldest first.
    :param rows: of the replicas: see COLUMNS.
    :param last_lines: last log line by replica, most important replica first. Default: none.
    :param metrics: what the program reports. Default: nothing.
    :param usage: GPU-seconds so far: see `core.state.usage`. Default: empty.
    :param limits: the running limits: `name`, `due` in epoch seconds, `seconds`. Default: none.
    :param queue: what the queue does with the job, in one sentence. Default: "".
    :param ended: whether the try has ended. Default: False.
    :param cause: why it failed: a `core.diagnosis.model.Cause` as a dict. Default: None.
    """

    job: Mapping[str, str]
    try_number: int
    written_at: float
    host: str
    phases: Sequence[tuple[str, float]]
    rows: Sequence[Sequence[Any]]
    last_lines: Mapping[str, str] = field(default_factory=dict)
    metrics: TrainingMetrics = field(default_factory=TrainingMetrics)
    usage: Mapping[str, float] = field(default_factory=dict)
    limits: Sequence[Mapping[str, Any]] = ()
    queue: str = ""
    ended: bool = False
    cause: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON types of at most MAX_BYTES. If it is too large, series give way first, then lines, then replicas."""
        series = self.metrics.points()
        needed = len(json.dumps(series))
        document: dict[str, Any] = {}
        for size in _SIZES:
            document = self._document(size)
            room = MAX_BYTES - len(json.dumps(document))
            if room >= min(needed, size.series_bytes):
                fits = series if room >= needed else self.metrics.points(room)
                return document | {"series": fits if size.series_bytes else {}}
        return document

    def _document(self, size: _Size) -> dict[str, Any]:
        phase, since = self.phases[-1] if self.phases else ("", self.written_at)
        rows, metrics = self.rows, self.metrics
        if len(rows) > MAX_REPLICAS:
            rows = [row for row in rows if row[-2] not in FINE or row[-1]]
        return clean(
            {
                "version": VERSION,
                "try_number": self.try_number,
                "written_at": round(self.written_at, 1),
                "host": self.host,
                "job": {name: str(value) for name, value in self.job.items()},
                "phase": phase,
                "phase_since": round(since, 1),
                "phases": [[name, round(at, 1)] for name, at in self.phases[-MAX_PHASES:]],
                "replicas": {
                    "count": len(self.rows),
                    "gpus": sum(int(row[4]) for row in self.rows),
                    "states": dict(Counter(str(row[-2]) for row in self.rows)),
                    "rows": [list(row) for row in rows[: size.rows]],
                },
                "last_lines": {
                    name: line[:MAX_LINE_CHARS] for name, line in list(self.last_lines.items())[: size.lines]
                },
                "metrics": metrics.summary() if size.text_chars == MAX_TEXT_CHARS else {},
                "series": {},
                "usage": dict(self.usage),
                "limits": [dict(limit) for limit in self.limits],
                "queue": self.queue[: size.text_chars],
                "ended": self.ended,
                "cause": None if self.cause is None else _short_cause(self.cause, size.text_chars),
            }
        )


class _Size(NamedTuple):
    """How much a document may contain.

    :param series_bytes: for which there must be room, if the series need as much. 0: no series.
    :param lines: number of last lines.
    :param rows: number of replicas.
    :param text_chars: of each text.
    """

    series_bytes: int
    lines: int
    rows: int
    text_chars: int


_SIZES = (
    _Size(MAX_SERIES_BYTES // 2, MAX_LINES, MAX_REPLICAS, MAX_TEXT_CHARS),
    _Size(MAX_SERIES_BYTES // 5, MAX_LINES // 2, MAX_REPLICAS, MAX_TEXT_CHARS),
    _Size(1024, MAX_LINES // 4, MAX_REPLICAS // 2, MAX_TEXT_CHARS),
    _Size(0, 0, MAX_REPLICAS // 8, MAX_TEXT_CHARS // 5),
    _Size(0, 0, 0, MAX_TEXT_CHARS // 10),
)


def _short_cause(cause: Mapping[str, Any], chars: int) -> dict[str, Any]:
    """The cause with shortened texts. The end of the detail has the last lines of the log."""
    kept = {name: str(cause.get(name) or "")[:chars] for name in ("category", "summary", "resolution", "replica")}
    return {**kept, "detail": str(cause.get("detail") or "")[-3 * chars :]}


def replica_rows(kind: Kind, pods: Iterable[Pod]) -> list[list[Any]]:
    """One row for each replica, by role and index: see COLUMNS. Of several pods of a replica, the newest counts."""
    newest: dict[tuple[str, int], Pod] = {}
    for pod in sorted(pods, key=lambda p: str((p.get("metadata") or {}).get("creationTimestamp"))):
        newest[kind.pod_role((pod.get("metadata") or {}).get("labels") or {})] = pod

    def rank(replica: tuple[str, int]) -> tuple[int, str, int]:
        role, index = replica
        return (kind.roles.index(role) if role in kind.roles else len(kind.roles), role, index)

    return [_row(kind, role, index, newest[role, index]) for role, index in sorted(newest, key=rank)]


def _row(kind: Kind, role: str, index: int, pod: Pod) -> list[Any]:
    spec, meta = pod.get("spec") or {}, pod.get("metadata") or {}
    restarts = sum(int(c.get("restartCount") or 0) for c in _statuses(pod))
    node = str(spec.get("nodeName") or "")
    return [role, index, str(meta.get("name")), node, pod_gpus(spec), state_of_pod(pod, kind), restarts]


def last_lines(kind: Kind, job: Pod, pods: Iterable[Pod], lines: Mapping[str, str]) -> dict[str, str]:
    """The last line of the primary, then of replicas that are not fine, then of the others.

    :param kind: of the job.
    :param job: as last seen.
    :param pods: all pods.
    :param lines: the last line of each pod, by its name.
    """
    primary = kind.primary(job), 0
    found = []
    for pod in pods:
        meta = pod.get("metadata") or {}
        if line := lines.get(str(meta.get("name"))):
            role = kind.pod_role(meta.get("labels") or {})
            found.append((role != primary, state_of_pod(pod, kind) in FINE, kind.replica_name(*role), line))
    return {name: line for _, _, name, line in sorted(found, key=lambda entry: entry[:2])}


def _statuses(pod: Pod) -> list[Mapping[str, Any]]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
