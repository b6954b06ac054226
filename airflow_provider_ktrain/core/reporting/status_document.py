"""The XCom `ktrain_status`: what the training page shows about one try of a task.

Whoever follows the job writes it, worker or trigger. Its size is limited, because Airflow stores it in its database and
each write costs the triggerer time. docs/reference/status.md describes its fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.formats import VERSION, json_size, larger_usage
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.accelerators import GPU, Amounts, described, stored
from airflow_provider_ktrain.core.state.pods.devices import amounts_of
from airflow_provider_ktrain.core.state.pods.objects import created, name_of, node_of, restarts_of
from airflow_provider_ktrain.core.state.pods.pod_state import RUNNING, SUCCEEDED, state_of_pod
from airflow_provider_ktrain.core.state.steps.training_metrics import MAX_SERIES_BYTES, TrainingMetrics
from airflow_provider_ktrain.core.text.output import masked

Pod = Mapping[str, Any]
MAX_BYTES = 16 * 1024  #: Size of the document's JSON.
MAX_REPLICAS = 64  #: How many are shown one by one. Of more, counts and those that are not fine are shown.
MAX_STATES = 12  #: How many states are counted, the most frequent ones.
MAX_STATE_CHARS = 40  #: Length of a state that is counted.
MAX_LINES = 16  #: Replicas whose last line is shown.
MAX_LINE_CHARS = 120  #: Length of a last line.
MAX_PHASES = 20  #: How many phases are shown, the latest ones.
MAX_TEXT_CHARS = 500  #: Length of each text of the cause and the queue.
FINE = (RUNNING, SUCCEEDED)  #: States of replicas that need no attention.
#: Columns of `replicas.rows`.
COLUMNS = ("role", "index", "pod", "node", "gpus", "state", "restarts")
#: Bytes of the series, last lines, replicas, characters of each text, and whether last and best values of the metrics
#: are included: what is tried in turn until the document fits.
_LIMITS = (
    (MAX_SERIES_BYTES, MAX_LINES, MAX_REPLICAS, MAX_TEXT_CHARS, True),
    (6 * 1024, MAX_LINES, MAX_REPLICAS, MAX_TEXT_CHARS, True),
    (2 * 1024, MAX_LINES, MAX_REPLICAS, MAX_TEXT_CHARS, True),
    (2 * 1024, 4, MAX_REPLICAS, MAX_TEXT_CHARS, True),
    (2 * 1024, 4, 16, MAX_TEXT_CHARS // 2, True),
    (0, 4, 8, MAX_TEXT_CHARS // 5, False),
    (0, 0, 0, MAX_TEXT_CHARS // 10, False),
)


@dataclass(frozen=True)
class TrainingStatus:
    """The state of a training at one moment. Most of its fields are those of the document.

    :param phases: phase and epoch seconds since when, oldest first.
    :param rows: of the replicas: see COLUMNS. `gpus` is a number of GPUs, or amounts of other accelerators.
    :param last_lines: last log line by replica, most important replica first. Default: none.
    :param requested: the accelerators that the job asks for; none if not known. Default: none.
    """

    job: Mapping[str, str]
    try_number: int
    written_at: float
    host: str
    phases: Sequence[tuple[str, float]]
    rows: Sequence[Sequence[Any]]
    last_lines: Mapping[str, str] = field(default_factory=dict)
    metrics: TrainingMetrics = field(default_factory=TrainingMetrics)
    usage: Mapping[str, Any] = field(default_factory=dict)
    limits: Sequence[Mapping[str, Any]] = ()
    queue: str = ""
    notice: str = ""
    requested: Mapping[str, int] = field(default_factory=dict)
    ended: bool = False
    cause: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON types of at most MAX_BYTES, as it is shown: without secrets.

        What doesn't fit is left out: points of the series, then last lines, then replicas. Texts are shortened.
        """
        for limits in _LIMITS:
            document = self._document(*limits)
            if json_size(document) <= MAX_BYTES:
                break
        return document

    def _document(self, points: int, lines: int, replicas: int, chars: int, with_metrics: bool) -> dict[str, Any]:
        """The document with these limits: see `_LIMITS`."""
        phase, since = self.phases[-1] if self.phases else ("", self.written_at)
        states = Counter[str]()
        for state, count in Counter(str(row[-2]) for row in self.rows).items():
            states[masked(state)[:MAX_STATE_CHARS]] += count
        return masked(
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
                    **stored(sum((_amounts(row[4]) for row in self.rows), Amounts())),
                    "states": dict(states.most_common(MAX_STATES)),
                    "rows": self._listed_rows()[:replicas],
                },
                "last_lines": {
                    name: masked(line)[:MAX_LINE_CHARS] for name, line in [*self.last_lines.items()][:lines]
                },
                "metrics": self.metrics.summary() if with_metrics else {},
                "series": self.metrics.points(points) if points else {},
                "usage": dict(self.usage),
                "limits": [dict(limit) for limit in self.limits],
                "queue": masked(self.queue)[:chars],
                "notice": masked(self.notice)[:chars],
                **{f"requested_{name}": value for name, value in stored(self.requested).items()},
                "ended": self.ended,
                "cause": None if self.cause is None else _short_cause(self.cause, chars),
            }
        )

    def _listed_rows(self) -> list[list[Any]]:
        rows = self.rows
        if len(rows) > MAX_REPLICAS:
            rows = [row for row in rows if row[-2] not in FINE or row[-1]]
        return [[*row[:4], _cell(row[4]), *row[5:]] for row in rows]


def with_earlier(status: Mapping[str, Any], before: Mapping[str, Any], try_number: int) -> dict[str, Any]:
    """The last status of a killed try.

    Fields that only following shows, and that it lacks, keep the values of what an earlier process of the same try has
    stored.
    """
    if before.get("try_number") != try_number:
        return dict(status)
    kept = {} if "phases" in status else before
    whole = {**kept, **status, "usage": larger_usage(before.get("usage"), status.get("usage"))}
    return {**whole, **({"series": {}} if json_size(whole) > MAX_BYTES else {})}


def _short_cause(cause: Mapping[str, Any], chars: int) -> dict[str, Any]:
    """The cause with shortened texts. The end of the detail has the last lines of the log."""
    kept = {name: str(cause.get(name) or "")[:chars] for name in ("category", "summary", "resolution", "replica")}
    return {**kept, "detail": str(cause.get("detail") or "")[-3 * chars :]}


def _amounts(cell: Any) -> Amounts:
    return Amounts(cell if isinstance(cell, Mapping) else {GPU: int(cell)})


def _cell(cell: Any) -> int | str:
    """What the row of a replica has: a number of GPUs, or as text what else it is."""
    amounts = _amounts(cell)
    return amounts[GPU] if amounts.keys() <= {GPU} else described(amounts, "0")


def replica_rows(kind: Kind, pods: Iterable[Pod]) -> list[list[Any]]:
    """One row for each replica, by role and index: see COLUMNS. Of several pods of a replica, the newest counts."""
    newest: dict[tuple[str, int], Pod] = {}
    for pod in sorted(pods, key=created):
        newest[kind.role_of(pod)] = pod
    amounts = {id(pod): amounts_of(pod) for pod in newest.values()}
    cells = {key: of_pod[GPU] if of_pod.keys() <= {GPU} else of_pod for key, of_pod in amounts.items()}
    return [
        [role, index, name_of(pod), node_of(pod), cells[id(pod)], state_of_pod(pod, kind), sum(restarts_of(pod))]
        for role, index in sorted(newest, key=lambda replica: (kind.rank(replica[0]), replica))
        for pod in [newest[role, index]]
    ]


def last_lines(kind: Kind, job: Pod, pods: Iterable[Pod], lines: Mapping[str, str]) -> dict[str, str]:
    """The last line of the primary, then of replicas that are not fine, then of the others."""
    primary = kind.primary(job), 0
    found = []
    for pod in pods:
        if line := lines.get(name_of(pod)):
            role = kind.role_of(pod)
            found.append((role != primary, state_of_pod(pod, kind) in FINE, kind.replica_name(*role), line))
    return {name: line for _, _, name, line in sorted(found, key=lambda entry: entry[:2])}
