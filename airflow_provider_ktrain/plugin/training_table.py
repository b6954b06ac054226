"""The table of trainings, and their comparison, from summaries and the statuses of those that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

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
    ("GPU time", "held"), ("Code", "code"),
)  # fmt: skip
UNREADABLE_PHASE = "can't be read"  #: Stands for the phase in a row whose status can't be read.


def training_row(listed: Listed, status: Mapping[str, Any] | None, *, with_logs: bool, now: float) -> dict[str, Any]:
    """One row of the table of trainings. One that can't be read says so, and breaks no table.

    :param status: of one that `is_unfinished`. None: it has none.
    """
    try:
        return _training_row(listed.record, listed.summary, status, is_unfinished(listed), with_logs, now)
    except Exception:  # any task can store anything under our keys
        return _training_row(listed.record, UNREADABLE, None, False, with_logs, now)


def is_unfinished(listed: Listed) -> bool:
    """Whether a training runs, or nobody has stored how it ended: its status has the newest metrics and GPU time."""
    return listed.record.state in ACTIVE_STATES or listed.summary.get("state") == "running"


def _training_row(
    record: TaskRecord,
    summary: Mapping[str, Any],
    status: Mapping[str, Any] | None,
    unfinished: bool,
    with_logs: bool,
    now: float,
) -> dict[str, Any]:
    key, read, active = record.key, mapping(status), record.state in ACTIVE_STATES
    usage, own = mapping(summary.get("usage")), mapping(read.get("usage")) if unfinished else {}
    lasted = None if record.started_at is None else (now if active else record.ended_at or now) - record.started_at
    held, began = (number(usage.get("held")) or 0.0) + (number(own.get("held")) or 0.0), number(read.get("phase_since"))
    metrics = mapping(read.get("metrics")) if unfinished else mapping(summary.get("metrics"))
    counted = (number(usage.get("tries")) or 0) + (1 if unfinished else 0)
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
        "held": running_on(held, read, now if active else None) if held else "",
        "held_seconds": round(held),
        "one_try": bool(held) and record.try_number > 1 and counted < record.try_number,
        "metrics": [(text_of(name), *_last_and_best(value)) for name, value in metrics.items()],
        "parameters": {text_of(name): text_of(value) for name, value in mapping(summary.get("parameters")).items()},
        "code": text_of(summary.get("code")),
        "cause": HIDDEN_CAUSE if cause and not with_logs else cause,
        "category": text_of(summary.get("category")) if cause else "",
    }


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
    facts = [(title, [str(row[field]) for row in rows]) for title, field in COMPARED]
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


def sums_as_text(count: int, held: float, wasted: float) -> dict[str, str]:
    """The number of trainings, and their GPU time, as text."""
    return {"count": f"{count:,}", "held": f"{held / 3600:,.1f} h", "wasted": f"{wasted / 3600:,.1f} h"}
