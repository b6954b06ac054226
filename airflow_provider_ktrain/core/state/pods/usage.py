"""The time for which a job used accelerators: requested, queued, held and wasted, from the timestamps of its pods."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.state.accelerators import CLAIMS, GPU, counted_units, ordered, unit_of
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.devices import amounts_of
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.text.output import capitalized
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp

AMOUNTS = ("requested", "queued", "held", "wasted", "gpus")  #: The fields of `Usage` that are numbers.


@dataclass(frozen=True)
class Usage:
    """Device-seconds of one try. `requested` = `queued` + `held`; `wasted` is a part of `held`.

    :param requested: from the creation of each pod to its end, and while the job was queued. Default: 0.
    :param queued: while a queue kept the job suspended, and before its pods had a node. Default: 0.
    :param held: the part on a node, in which no one else could use the devices. Default: 0.
    :param wasted: the part of `held` before the first container ran (image, volumes, init containers) and after the job
        ended (Workers that still run). Default: 0.
    :param gpus: devices of all pods that ever had a node; recreated pods count once. Default: 0.
    :param resource: what all this counts: a key of `core.state.accelerators.Amounts`. Default: GPUs.
    :param others: what was used of other accelerators. Default: nothing.
    :param unknown_claims: pods with ResourceClaims, whose devices aren't counted. Default: 0.
    """

    requested: float = 0.0
    queued: float = 0.0
    held: float = 0.0
    wasted: float = 0.0
    gpus: int = 0
    resource: str = GPU
    others: tuple[Usage, ...] = ()
    unknown_claims: int = 0

    @classmethod
    def of_each(cls, each: Mapping[str, Usage], unknown_claims: int = 0) -> Usage:
        """The usage of several kinds of accelerators."""
        used = ordered(name for name, one in each.items() if any(getattr(one, field) for field in AMOUNTS))
        if not used and not unknown_claims:
            return NO_USAGE
        first, *others = [replace(each[name], resource=name, others=(), unknown_claims=0) for name in used] or [cls()]
        return replace(first, others=tuple(others), unknown_claims=unknown_claims)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Usage:
        """Read what `as_dict` returned, in this release or another one."""
        by_name = {str(data.get("resource") or GPU): data, **mapping(data.get("others"))}
        read = {name: replace(cls(), **_numbers(mapping(one))) for name, one in by_name.items()}
        unknown = data.get("unknown_claims")
        return cls.of_each(read, unknown if isinstance(unknown, int) else 0)

    @property
    def each(self) -> dict[str, Usage]:
        """The usage of each kind, by what is counted."""
        return {one.resource: one for one in (self, *self.others)}

    def __add__(self, other: Usage) -> Usage:
        """The sum of the device-seconds; the numbers of devices are the first one's."""
        mine, others = self.each, other.each
        sums = {
            name: replace(one, **{f: getattr(one, f) + getattr(others.get(name, Usage()), f) for f in AMOUNTS[:4]})
            for name in {**mine, **others}
            for one in [mine.get(name, Usage())]
        }
        return Usage.of_each(sums, self.unknown_claims + other.unknown_claims)

    @property
    def is_unknown(self) -> bool:
        """Whether nothing of what was used is counted."""
        return bool(self.unknown_claims) and not (self.requested or self.gpus)

    def __str__(self) -> str:
        """For the log: `GPU time: 12.5 GPU-minutes on 4 GPUs (0.8 GPU-minutes wasted), plus 3.1 GPU-minutes queued`."""
        if self.is_unknown:
            return f"Accelerator time: {NOT_COUNTED}."
        if not (self.requested or self.gpus):
            return "GPU time: none."
        lines = [one._line for one in self.each.values()]
        return "\n".join([*lines, *([f"{capitalized(NOT_COUNTED)}."] if self.unknown_claims else [])])

    @property
    def _line(self) -> str:
        noun = unit_of(self.resource)[0]
        size, unit = next((s, u) for s, u in _UNITS if self.requested >= 2 * s or s == 1)
        per = f"{noun.replace(' ', '-')}-{unit}"
        held, wasted, queued = (f"{value / size:.1f} {per}" for value in (self.held, self.wasted, self.queued))
        plus = f", plus {queued} queued" if self.queued >= size / 20 else ""
        spent = f"{held} on {counted_units(self.gpus, self.resource)} ({wasted} wasted)" if self.gpus else "none"
        return f"{noun} time: {spent}{plus}."

    def as_dict(self) -> dict[str, Any]:
        """The fields for XComs and metrics, in device-seconds rounded to milliseconds.

        Numbers are left out if nothing is counted. `resource`, `others` and `unknown_claims` are there if they differ
        from their defaults.
        """
        numbers = {} if self.is_unknown else self._numbers
        numbers |= {} if self.resource == GPU else {"resource": self.resource}
        numbers |= {"others": {one.resource: one._numbers for one in self.others}} if self.others else {}
        return numbers | ({"unknown_claims": self.unknown_claims} if self.unknown_claims else {})

    @property
    def _numbers(self) -> dict[str, Any]:
        return {name: round(getattr(self, name), 3) for name in AMOUNTS}


NOT_COUNTED = "devices of ResourceClaims not counted"
NO_USAGE = Usage()  #: The jobs that wait share this object.
Span = tuple[datetime, datetime]
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def usage(
    pods: Iterable[Json],
    now: datetime,
    job_ended: datetime | None = None,
    evicted: Container[str] = (),
    in_queue: Sequence[Span] = (),
) -> Usage:
    """The time for which a job's pods used accelerators.

    :param job_ended: when the job ended. Default: None, it has not.
    :param evicted: uids of pods that a queue took from the job: all that they held is wasted. Default: none.
    :param in_queue: when the job was queued. Who counts all devices of the job then has counted those of evicted pods
        that still existed, too: so they are subtracted from `queued`. Default: never.
    """
    spent: dict[str, list[float]] = {}  # requested, queued, held and wasted, by kind
    numbers: dict[str, dict[str, int]] = {}  # by kind and name of the pod
    unknown = 0
    for pod in pods:
        meta, amounts = objects.metadata_of(pod), amounts_of(pod)
        unknown += amounts.pop(CLAIMS, 0)
        created = parse_timestamp(meta.get("creationTimestamp"))
        if created is None or not amounts:
            continue
        end = max(created, min(now, _ended(pod) or now))
        placed = _clamped(created, _placed(pod), end)
        started = end if meta.get("uid") in evicted else _clamped(placed, _started(pod), end)
        idle_from = _clamped(started, job_ended, end)
        soonest = created + objects.TIMESTAMP_RESOLUTION
        queued, held, wasted = (
            span.total_seconds() for span in (placed - created, end - placed, started - placed + end - idle_from)
        )
        queued -= sum((min(end, to) - since).total_seconds() for since, to in in_queue if soonest < since < end)
        for name, count in amounts.items():
            if placed < end or objects.node_of(pod):
                of_kind = numbers.setdefault(name, {})
                of_kind[objects.name_of(pod)] = max(count, of_kind.get(objects.name_of(pod), 0))
            seconds = (count * s for s in (queued + held, queued, held, wasted))
            spent[name] = [a + b for a, b in zip(spent.get(name, [0.0] * 4), seconds, strict=True)]
    each = {
        name: Usage(requested, queued, held, wasted, sum(numbers.get(name, {}).values()))
        for name, (requested, queued, held, wasted) in spent.items()
    }
    return Usage.of_each(each, unknown)


def _numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name in AMOUNTS if isinstance(value := data.get(name), int | float)}


def _clamped(low: datetime, at: datetime | None, high: datetime) -> datetime:
    """`at` limited to the bounds, since clocks of nodes differ; the upper bound if `at` is None."""
    return high if at is None else max(low, min(at, high))


def _placed(pod: Json) -> datetime | None:
    """When the pod was scheduled to a node; None if it has none."""
    condition = objects.scheduling(pod)
    if condition.get("status") == "True":
        return parse_timestamp(condition.get("lastTransitionTime"))
    return parse_timestamp((pod.get("status") or {}).get("startTime")) if objects.node_of(pod) else None


def _runs(pod: Json) -> Iterable[Json]:
    return (run for container in objects.main_containers(pod) for run in objects.runs_of(container))


def _started(pod: Json) -> datetime | None:
    """When the first container ran; of a restarted container only the last two runs are known."""
    return min((at for run in _runs(pod) if (at := parse_timestamp(run.get("startedAt")))), default=None)


def _ended(pod: Json) -> datetime | None:
    """When the pod released its accelerators; None while it holds them."""
    if objects.has_ended(pod):
        conditions = (pod.get("status") or {}).get("conditions") or ()
        runs = [at for run in _runs(pod) if (at := parse_timestamp(run.get("finishedAt")))]
        changes = [at for c in conditions if (at := parse_timestamp(c.get("lastTransitionTime")))]
        return max(runs or changes, default=objects.deletion_requested_at(pod))
    return parse_timestamp(objects.metadata_of(pod).get("deletionTimestamp"))
