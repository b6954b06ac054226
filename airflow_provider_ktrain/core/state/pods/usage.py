"""The time for which a job used accelerators: requested, queued, held and wasted, from the timestamps of its pods."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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

MAX_STORED = 1e15  #: A larger number is not one that `as_dict` has written.
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
    :param at_least: whether an earlier process may have counted more, which is not stored. Default: False.
    """

    requested: float = 0.0
    queued: float = 0.0
    held: float = 0.0
    wasted: float = 0.0
    gpus: int = 0
    resource: str = GPU
    others: tuple[Usage, ...] = ()
    unknown_claims: int = 0
    at_least: bool = False

    @classmethod
    def of_each(cls, each: Mapping[str, Usage], unknown_claims: int = 0, *, at_least: bool = False) -> Usage:
        """The usage of several kinds of accelerators."""
        used = ordered(name for name, one in each.items() if any(getattr(one, field) for field in AMOUNTS))
        if not used and not unknown_claims and not at_least:
            return NO_USAGE
        of_one: dict[str, Any] = {"others": (), "unknown_claims": 0, "at_least": False}
        first, *others = [replace(each[name], resource=name, **of_one) for name in used] or [cls()]
        return replace(first, others=tuple(others), unknown_claims=unknown_claims, at_least=at_least)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Usage:
        """Read what `as_dict` returned, in this release or another one."""
        by_name = {str(data.get("resource") or GPU): data, **mapping(data.get("others"))}
        read = {name: replace(cls(), **_numbers(mapping(one))) for name, one in by_name.items()}
        unknown = data.get("unknown_claims")
        at_least = data.get("at_least") is True
        return cls.of_each(read, unknown if isinstance(unknown, int) else 0, at_least=at_least)

    @property
    def each(self) -> dict[str, Usage]:
        """The usage of each kind, by what is counted."""
        return {one.resource: one for one in (self, *self.others)}

    def __add__(self, other: Usage) -> Usage:
        """The sum of the device-seconds; the numbers of devices are the first one's."""
        sums = self._with_seconds(other, lambda one, another: one + another)
        at_least = self.at_least or other.at_least
        return Usage.of_each(sums, self.unknown_claims + other.unknown_claims, at_least=at_least)

    def beyond(self, other: Usage) -> Usage:
        """What this usage has that the other one lacks, and all of its devices."""
        more = self._with_seconds(other, lambda one, another: max(one - another, 0.0))
        claims = max(self.unknown_claims - other.unknown_claims, 0)
        return Usage.of_each(more, claims, at_least=self.at_least)

    def with_gone(self, gone: Usage) -> Usage:
        """This usage and that of pods that are gone. Pods that replaced them have the same devices."""
        each = {
            name: replace(one, gpus=max(one.gpus, gone.each.get(name, NO_USAGE).gpus))
            for name, one in (self + gone).each.items()
        }
        return Usage.of_each(each, self.unknown_claims + gone.unknown_claims, at_least=self.at_least or gone.at_least)

    def _with_seconds(self, other: Usage, combined: Callable[[float, float], float]) -> dict[str, Usage]:
        """This usage by kind, with device-seconds that are made from those of both."""
        mine, others = self.each, other.each

        def seconds(name: str, one: Usage) -> dict[str, Any]:
            another = others.get(name, NO_USAGE)
            return {field: combined(getattr(one, field), getattr(another, field)) for field in AMOUNTS[:4]}

        each = {name: mine.get(name, NO_USAGE) for name in {**mine, **others}}
        return {name: replace(one, **seconds(name, one)) for name, one in each.items()}

    @property
    def is_unknown(self) -> bool:
        """Whether nothing of what was used is counted."""
        return bool(self.unknown_claims) and not (self.requested or self.gpus)

    def __str__(self) -> str:
        """For the log: `GPU time: 12.5 GPU-minutes on 4 GPUs (0.8 GPU-minutes wasted), plus 3.1 GPU-minutes queued`."""
        if self.is_unknown:
            return f"Accelerator time: {NOT_COUNTED}."
        if not (self.requested or self.gpus):
            return "GPU time: not known." if self.at_least else "GPU time: none."
        lines = [replace(one, at_least=self.at_least)._line for one in self.each.values()]
        return "\n".join([*lines, *([f"{capitalized(NOT_COUNTED)}."] if self.unknown_claims else [])])

    @property
    def _line(self) -> str:
        noun = unit_of(self.resource)[0]
        size, unit = next((s, u) for s, u in _UNITS if self.requested >= 2 * s or s == 1)
        per = f"{noun.replace(' ', '-')}-{unit}"
        held, wasted, queued = (f"{value / size:.1f} {per}" for value in (self.held, self.wasted, self.queued))
        plus = f", plus {queued} queued" if self.queued >= size / 20 else ""
        spent = "not known" if self.at_least else "none"
        if self.gpus:
            bound = "at least " if self.at_least else ""
            spent = f"{bound}{held} on {counted_units(self.gpus, self.resource)} ({wasted} wasted)"
        return f"{noun} time: {spent}{plus}."

    def as_dict(self) -> dict[str, Any]:
        """The fields for XComs and metrics, in device-seconds rounded to milliseconds.

        Numbers are left out if nothing is counted. `resource`, `others`, `unknown_claims` and `at_least` are there if
        they differ from their defaults.
        """
        numbers = {} if self.is_unknown else self._numbers
        numbers |= {} if self.resource == GPU else {"resource": self.resource}
        numbers |= {"others": {one.resource: one._numbers for one in self.others}} if self.others else {}
        numbers |= {"unknown_claims": self.unknown_claims} if self.unknown_claims else {}
        return numbers | ({"at_least": True} if self.at_least else {})

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
    found = {name: data.get(name) for name in AMOUNTS}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and abs(value) < MAX_STORED}


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
