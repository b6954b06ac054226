"""The table of trainings, and their comparison, from summaries and the statuses of those that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from airflow_provider_ktrain.compat_server import ACTIVE_STATES, UNREADABLE, Listed, TaskRecord
from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.text.output import format_duration
from airflow_provider_ktrain.links.training import page_query
from airflow_provider_ktrain.plugin.stored_texts import (
    HIDDEN_CAUSE,
    STATE_WORDS,
    Ticking,
    accelerators_of,
    clock,
    list_of,
    minute_of,
    number,
    overlaid,
    running_on,
    series_of,
    text_of,
    value_of,
)

#: Rows of a comparison, and fields of `training_row`.
COMPARED = (
    ("State", "state"), ("Cause", "cause"), ("Began (UTC)", "started"), ("Duration", "lasted"), ("Tries", "tries"),
    ("GPU time", "held"), ("GPU time counted", "held_note"), ("Code", "code"),
)  # fmt: skip
UNREADABLE_PHASE = "can't be read"  #: Stands for the phase in a row whose status can't be read.


def training_row(listed: Listed, status: Mapping[str, Any] | None, *, with_logs: bool, now: float) -> dict[str, Any]:
    """One row of the table of trainings. One that can't be read says so, and breaks no table.

    :param status: of one that `is_unfinished`. None: it has none.
    """
    try:
        return _training_row(listed.record, listed.summary, status, with_logs, now)
    except Exception:  # any task can store anything under our keys
        return _training_row(listed.record, UNREADABLE, None, with_logs, now)


def is_unfinished(state: str, summary: Mapping[str, Any]) -> bool:
    """Whether a training runs, or nobody has stored how it ended: its status has the newest metrics and GPU time.

    :param state: of the task in Airflow.
    """
    return state in ACTIVE_STATES or summary.get("state") == "running"


class Used(NamedTuple):
    """GPU-seconds of a training, and the number of tries that are counted. Numbers of a database may be texts."""

    held: float
    wasted: float
    tries: float

    @classmethod
    def of(cls, state: str, summary: Mapping[str, Any], status: Mapping[str, Any]) -> Used:
        """What its tries have used, with the last one so far."""
        found = [mapping(summary.get("usage"))]
        if is_unfinished(state, summary):
            own = mapping(status.get("usage"))
            found.append({**own, "tries": int(not own.get("at_least"))})
        return cls(*(sum(_amount(one.get(name)) for one in found) for name in cls._fields))


def _amount(value: Any) -> float:
    """A number, also as text; 0 for what is none."""
    try:
        return number(float(value)) or 0.0
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _training_row(
    record: TaskRecord,
    summary: Mapping[str, Any],
    status: Mapping[str, Any] | None,
    with_logs: bool,
    now: float,
) -> dict[str, Any]:
    key, read, active = record.key, mapping(status), record.state in ACTIVE_STATES
    unfinished, used = is_unfinished(record.state, summary), Used.of(record.state, summary, read)
    lasted = None if record.started_at is None else (now if active else record.ended_at or now) - record.started_at
    began = number(read.get("phase_since"))
    metrics = mapping(read.get("metrics")) if unfinished else mapping(summary.get("metrics"))
    cause = text_of(summary.get("cause")) if record.state not in (*ACTIVE_STATES, "success") else ""
    broken = UNREADABLE in (summary, read)
    state = text_of(read.get("phase")) if active else STATE_WORDS.get(record.state, record.state.replace("_", " "))
    replicas = mapping(read.get("replicas"))
    return {
        "key": key,
        "query": page_query(key),
        "dag_id": key.dag_id,
        "task": key.task_id if key.map_index < 0 else f"{key.task_id} [{key.map_index}]",
        "run_id": key.run_id,
        "state": UNREADABLE_PHASE if broken else state.capitalize() or "No data",
        "gpus": accelerators_of(replicas) if active and replicas else "",
        "in_state": "" if not active or began is None else Ticking.of(now, began),
        "started": clock(record.started_at).removesuffix(" UTC"),
        "lasted": (
            "" if lasted is None else Ticking.of(now, now - lasted) if active else format_duration(max(lasted, 0))
        ),
        "seconds": round(lasted or 0),
        "tries": record.try_number,
        "held": running_on(used.held, read, now if active else None) if used.held else "",
        "held_seconds": round(used.held),
        "held_note": _lack(used, record.try_number, summary, read, killed=unfinished and not active),
        "metrics": [(text_of(name), *_last_and_best(value)) for name, value in metrics.items()],
        "parameters": {text_of(name): text_of(value) for name, value in mapping(summary.get("parameters")).items()},
        "code": text_of(summary.get("code")),
        "cause": HIDDEN_CAUSE if cause and not with_logs else cause,
        "category": text_of(summary.get("category")) if cause and with_logs else "",
    }


def _lack(used: Used, try_number: int, summary: Mapping[str, Any], status: Mapping[str, Any], *, killed: bool) -> str:
    """What the GPU time lacks, in words; empty if it is all of it.

    :param killed: whether nobody has stored what the last try had used at its end.
    """
    if used.held and used.tries < try_number:
        is_bound = any(mapping(one.get("usage")).get("at_least") for one in (summary, status))
        return "at least" if used.tries > 1 or is_bound else "this try only"
    return "at least" if used.held and killed else ""


def _last_and_best(value: Any) -> tuple[str, str]:
    """Of a metric, from a summary or a status."""
    both = (value.get("last"), value.get("best")) if isinstance(value, Mapping) else (*list_of(value), None, None)
    return value_of(both[0], digits=4), value_of(both[1], digits=4)


def keep_differing_parameters(rows: Sequence[dict[str, Any]]) -> None:
    """Of several rows of one task, keep only parameters that are not the same in all of them."""
    tasks: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        tasks.setdefault((row["dag_id"], row["key"].task_id), []).append(row)
    for same in tasks.values():
        names = differing([row["parameters"] for row in same]) if len(same) > 1 else same[0]["parameters"]
        for row in same:
            row["parameters"] = {name: value for name, value in row["parameters"].items() if name in names}


def comparison(found: Sequence[tuple[Listed, Mapping[str, Any] | None, bool]], now: float) -> SimpleNamespace:
    """Trainings beside each other: results, cost, the parameters that differ, and curves of the same metrics.

    :param found: each with its status, and whether the user may read its log.
    """
    rows = [training_row(listed, status, with_logs=with_logs, now=now) for listed, status, with_logs in found]
    metrics = [{name: f"{last} ({best})" for name, last, best in row["metrics"]} for row in rows]
    parameters = [row["parameters"] for row in rows]
    # `str` would stop a duration that runs on in the browser
    facts = [
        (title, [one if isinstance(one := row[field], str) else str(one) for row in rows]) for title, field in COMPARED
    ]
    facts += [
        (f"{name}: last (best)", [one.get(name, "") for one in metrics])
        for name in dict.fromkeys(n for one in metrics for n in one)
    ]
    facts += [(name, [one.get(name, "") for one in parameters]) for name in differing(parameters)]
    return SimpleNamespace(
        rows=rows,
        labels=list("ABCDEFGHIJ"[: len(rows)]),
        facts=[(title, values) for title, values in facts if any(values)],
        series=overlaid([_readable_series(status) for _, status, _ in found]),
        active=any(listed.record.state in ACTIVE_STATES for listed, _, _ in found),
        data=(found, minute_of(now)),
    )


def _readable_series(status: Mapping[str, Any] | None) -> dict[str, list[list[Any]]]:
    try:
        return series_of(mapping(status))
    except Exception:  # any task can store anything under our keys
        return {}


def differing(found: Sequence[Mapping[str, str]]) -> list[str]:
    """The names whose values are not the same in all mappings, in their order."""
    names = dict.fromkeys(name for one in found for name in one)
    return [name for name in names if len({one.get(name) for one in found}) > 1]


def sums_as_text(count: int, held: float, wasted: float, at_least: bool) -> dict[str, str]:
    """The number of trainings, and their GPU time, as text.

    :param at_least: whether some of the time is not stored.
    """
    bound = "at least " if at_least else ""
    return {"count": f"{count:,}", "held": f"{bound}{held / 3600:,.1f} h", "wasted": f"{wasted / 3600:,.1f} h"}
