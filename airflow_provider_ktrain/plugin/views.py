"""What the pages show, from Airflow's record of a task and the status that its worker or trigger wrote.

Statuses may come from another release: a field that is missing or has another type is shown as unknown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlencode

from airflow_provider_ktrain.compat_server import ACTIVE_STATES, UNREADABLE, Listed, TaskRecord
from airflow_provider_ktrain.core.formats import NEXT_DUE, is_step, mapping, total_usage, usage_of_other_tries
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.core.reporting.status_document import COLUMNS, FINE, MAX_LINE_CHARS
from airflow_provider_ktrain.core.state.accelerators import GPU, described, read_stored, unit_of
from airflow_provider_ktrain.core.state.pods.pod_state import RUNNING, SUCCEEDED, TERMINATING
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text.output import ends_of, format_duration, masked
from airflow_provider_ktrain.links.training import page_query

LATE_SECONDS = 120.0  #: How long after the next status was due the data of a training counts as old.
DUE_SECONDS = 60.0  #: How long after a status of an earlier release, which has no such time, the next one is due.
#: Phases in which statuses are written at intervals. In others one is written only when something changes.
REFRESHED = (Phase.RUNNING, Phase.RESTARTING)
WAITING_STATES = ("", "none", "scheduled", "queued", "up_for_retry", "up_for_reschedule")
FAILED_STATES = ("failed", "up_for_retry", "upstream_failed")
STATE_WORDS = {"success": "succeeded", "": "none"}  #: Others are shown as Airflow names them.
USAGE = {
    "held": "Held", "wasted": "Held without training", "queued": "Waiting for {}", "requested": "Requested",
}  # fmt: skip
#: Rows of a comparison, and fields of `training_row`.
COMPARED = (
    ("State", "state"), ("Cause", "cause"), ("Began (UTC)", "started"), ("Duration", "lasted"), ("Tries", "tries"),
    ("GPU time", "held"), ("Code", "code"),
)  # fmt: skip
ALL_TRIES = (("Held in all tries", "held"), ("Of it without training", "wasted"))  #: Labels, and names of amounts.
LARGEST = 1e15  #: A limit above all times, numbers of steps and GPU-seconds.
ENDED = tuple(phase for phase in Phase if phase.ended)
#: Terminal control sequences (ECMA-48: CSI, OSC and two-character ones), which a browser can't show.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
UNQUOTED = ("category", "resolution", "replica")  #: Texts of a cause that never quote a log.
OF_CAUSE = (*UNQUOTED, "summary", "detail")
HIDDEN_CAUSE = "It failed. The cause may quote the log, which you have no right to read."
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
#: How much of each end of a text is kept, more than any of ours has: to hide secrets in megabytes takes long.
MAX_TEXT_CHARS = 16_384
UNREADABLE_PHASE = "can't be read"  #: Stands for the phase in a row whose status can't be read.
NOT_FOLLOWED = (
    "No triggerer follows the training at present: none is running, or all are full. The training itself continues. "
    "The data is updated again when a triggerer has taken the task over."
)


class Ticking(str):
    """A duration that the browser lets run on: at a time in epoch seconds it has a length, and a rate of growth."""

    _html: str

    @classmethod
    def of(cls, now: float, at: float, *, seconds: float = 0.0, rate: float = 1.0) -> Ticking:
        """The duration at the time `now`."""
        self = cls(format_duration(max(seconds + rate * (now - at), 0)))
        self._html = f'<span data-at="{at:.1f}" data-seconds="{seconds:.1f}" data-rate="{rate:g}">{self}</span>'
        return self

    def __html__(self) -> str:
        return self._html


def training_view(
    record: TaskRecord,
    status: Mapping[str, Any] | None,
    stored: Mapping[str, Any],
    *,
    with_logs: bool,
    now: float,
) -> SimpleNamespace:
    """What the page of one task instance shows. Texts are plain; the templates escape them.

    `data` is what the view was made of: if it is the same as before, at most a minute has passed. A status or tries
    that can't be read break no page: it says so.

    :param stored: about the tries: `core.formats.with_try`.
    :param with_logs: whether the user may read the task's log; else its lines, and texts that may quote them, are left
        out.
    """
    try:
        return _training_view(record, status, stored, with_logs, now)
    except Exception:  # any task can store anything under our keys
        return _training_view(record, UNREADABLE, {}, with_logs, now)


def _training_view(
    record: TaskRecord,
    status: Mapping[str, Any] | None,
    stored: Mapping[str, Any],
    with_logs: bool,
    now: float,
) -> SimpleNamespace:
    read, key = mapping(status), record.key
    tries = [mapping(one) for one in _list(stored.get("tries"))]
    written_at, active = number(read.get("written_at")), record.state in ACTIVE_STATES
    due = number(read.get(NEXT_DUE)) or (written_at or now) + DUE_SECONDS
    stale = active and read.get("phase") in REFRESHED and written_at is not None and now > due + LATE_SECONDS
    job = {name: _text(value) for name, value in mapping(read.get("job")).items()}
    phases = _phases(read)
    replicas = mapping(read.get("replicas"))
    rows = [row for row in (_replica(row, read) for row in _list(replicas.get("rows"))) if row]
    until = now if active else record.ended_at or written_at or now
    found = mapping(read.get("cause")) or mapping(read.get("conclusion"))  # stored before the job is released
    cause = {name: _text(value) for name, value in found.items() if name in OF_CAUSE}
    if cause and not with_logs:
        cause = {**{name: cause.get(name, "") for name in UNQUOTED}, "summary": HIDDEN_CAUSE}
    lines = mapping(read.get("last_lines"))
    series, labels = _curves_of_all_tries(record, read, tries)
    dag = f"/dags/{quote(key.dag_id, safe='')}"
    run = f"{dag}/runs/{quote(key.run_id, safe='')}"
    mapped = f"/mapped/{key.map_index}" if key.map_index >= 0 else ""
    return SimpleNamespace(
        data=(record, status, stored, with_logs, stale, active and minute_of(now)),
        key=key,
        query=page_query(key),
        same_dag=urlencode({"dag_id": key.dag_id}),
        state=STATE_WORDS.get(record.state, record.state.replace("_", " ")),
        active=active or record.state in WAITING_STATES,
        phase=_text(read.get("phase")),
        shown_phase=_shown_phase(record, read),
        # by a limit, before the job did
        ended_early=bool(cause) and not active and read.get("phase") not in (None, *ENDED),
        since=clock(number(read.get("phase_since"))),
        age="" if not active or written_at is None else Ticking.of(now, written_at),
        stale=stale,
        notes=_notes(record, read, stale),
        cause=cause,
        timeline=_timeline(phases, until, runs=active),
        job=job,
        replicas=rows,
        replica_count=int(number(replicas.get("count")) or 0),
        facts=_facts(job, replicas, read),
        gpus_name=_heading(replicas),
        metrics=_metrics(read),
        series=series,
        labels=labels,
        last_lines=[(_text(name), _line(line)) for name, line in lines.items()] if with_logs else (),
        lines_hidden=bool(lines) and not with_logs,
        usage=_usage(read, now if active else None) + _usage_of_all_tries(record, read, stored),
        unit=unit_of(str(mapping(read.get("usage")).get("resource") or GPU)),
        limits=_limits(read, now) if active else (),
        queue=_text(read.get("queue")) if active else "",
        tries=[_try(one, with_logs) for one in reversed(tries)],
        tries_unknown=record.try_number > 1 and not tries,
        commands=[] if read.get("job_deleted") is True else _commands(job, rows, may_run=_may_run(record, read)),
        path=[(key.dag_id, dag), (key.run_id, run)],
        log_path=f"{run}/tasks/{quote(key.task_id, safe='')}{mapped}",
        code_path=f"{dag}/code",
    )


def training_row(listed: Listed, status: Mapping[str, Any] | None, *, with_logs: bool, now: float) -> dict[str, Any]:
    """One row of the table of trainings. One that can't be read says so, and breaks no table.

    :param status: of a training that runs. None: it has none.
    """
    try:
        return _training_row(listed.record, listed.summary, status, with_logs, now)
    except Exception:  # any task can store anything under our keys
        return _training_row(listed.record, UNREADABLE, None, with_logs, now)


def _training_row(
    record: TaskRecord, summary: Mapping[str, Any], status: Mapping[str, Any] | None, with_logs: bool, now: float
) -> dict[str, Any]:
    key, read, active = record.key, mapping(status), record.state in ACTIVE_STATES
    usage, own = mapping(summary.get("usage")), mapping(read.get("usage")) if active else {}
    lasted = None if record.started_at is None else (now if active else record.ended_at or now) - record.started_at
    held, began = (number(usage.get("held")) or 0.0) + (number(own.get("held")) or 0.0), number(read.get("phase_since"))
    metrics = mapping(read.get("metrics")) if active else mapping(summary.get("metrics"))
    counted = (number(usage.get("tries")) or 0) + (1 if active else 0)
    cause = _text(summary.get("cause")) if record.state not in (*ACTIVE_STATES, "success") else ""
    broken = UNREADABLE in (summary, read)
    state = _text(read.get("phase")) if active else STATE_WORDS.get(record.state, record.state.replace("_", " "))
    replicas = mapping(read.get("replicas"))
    return {
        "key": key,
        "query": page_query(key),
        "dag_id": key.dag_id,
        "task": key.task_id if key.map_index < 0 else f"{key.task_id} [{key.map_index}]",
        "run_id": key.run_id,
        "state": UNREADABLE_PHASE if broken else state.capitalize() or "No data",
        "gpus": _accelerators(replicas) if active and replicas else "",
        "in_state": "" if not active or began is None else Ticking.of(now, began),
        "started": clock(record.started_at).removesuffix(" UTC"),
        "lasted": (
            "" if lasted is None else Ticking.of(now, now - lasted) if active else format_duration(max(lasted, 0))
        ),
        "seconds": round(lasted or 0),
        "tries": record.try_number,
        "held": _running_on(held, read, now if active else None) if held else "",
        "held_seconds": round(held),
        "one_try": bool(held) and record.try_number > 1 and counted < record.try_number,
        "metrics": [(_text(name), *_last_and_best(value)) for name, value in metrics.items()],
        "parameters": {_text(name): _text(value) for name, value in mapping(summary.get("parameters")).items()},
        "code": _text(summary.get("code")),
        "cause": HIDDEN_CAUSE if cause and not with_logs else cause,
        "category": _text(summary.get("category")) if cause else "",
    }


def _last_and_best(value: Any) -> tuple[str, str]:
    """Of a metric, from a summary or a status."""
    both = (value.get("last"), value.get("best")) if isinstance(value, Mapping) else (*_list(value), None, None)
    return _value(both[0], digits=4), _value(both[1], digits=4)


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
        return _series(mapping(status))
    except Exception:  # any task can store anything under our keys
        return {}


def overlaid(found: Sequence[Mapping[str, Sequence[Sequence[Any]]]]) -> dict[str, list[list[Any]]]:
    """Curves of several trainings over each other: by name all steps, then the values of each, None where it has none.

    :param found: of each training, by name `[steps, values]`.
    """
    lines = {}
    for name in dict.fromkeys(name for one in found for name in one):
        values = [dict(zip(*one.get(name, ((), ())), strict=True)) for one in found]
        steps = sorted({step for one in values for step in one})
        if len(steps) > 1:
            lines[name] = [steps, *([one.get(step) for step in steps] for one in values)]
    return lines


def differing(found: Sequence[Mapping[str, str]]) -> list[str]:
    """The names whose values are not the same in all mappings, in their order."""
    names = dict.fromkeys(name for one in found for name in one)
    return [name for name in names if len({one.get(name) for one in found}) > 1]


def sums(count: int, held: float, wasted: float) -> dict[str, str]:
    """The number of trainings, and their GPU time, as text."""
    return {"count": f"{count:,}", "held": f"{held / 3600:,.1f} h", "wasted": f"{wasted / 3600:,.1f} h"}


def _shown_phase(record: TaskRecord, read: Mapping[str, Any]) -> str:
    """The phase of the job, except for a task that failed although its job succeeded, or that has no job."""
    phase = _text(read.get("phase"))
    return str(Phase.FAILED) if record.state in FAILED_STATES and phase in ("", Phase.SUCCEEDED) else phase


def _notes(record: TaskRecord, read: Mapping[str, Any], stale: bool) -> list[str]:
    """What the page can't know."""
    if read == UNREADABLE:
        return ["The status that is stored for this task can't be read: something else was stored in its place."]
    if number(read.get("written_at")) is None:
        if record.state in WAITING_STATES:
            return ["The training has not begun: the task waits for a worker."]
        if record.followed is False:
            return [NOT_FOLLOWED]
        if record.state in ACTIVE_STATES:
            return ["There is no data yet. It appears when the job has a phase."]
        return ["This try left no data: it ended before its job had a phase, or an older release ran it."]
    notes = [NOT_FOLLOWED] if record.followed is False else []
    if record.state in FAILED_STATES and read.get("phase") == Phase.SUCCEEDED:
        notes.append("The job succeeded, but the task failed: its result could not be returned or stored.")
    if record.state in ACTIVE_STATES and (notice := _text(read.get("notice"))):
        notes.append(notice)
    if read.get("try_number") != record.try_number:
        notes.append(f"The data is of try {_text(read.get('try_number'))}. Try {record.try_number} has none yet.")
    if stale and record.followed is not False:
        notes.append("The data is old. The triggerer or worker that follows the job may be gone, or is overloaded.")
    if record.state not in (*ACTIVE_STATES, *WAITING_STATES) and not read.get("ended"):
        notes.append(
            f"The task is {record.state}, but its last status could not be stored: it was killed, or its worker was "
            "lost. The page shows the status before that. Its job may still hold GPUs: the first command ends it."
        )
    return notes


def _phases(read: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(_text(name), at) for name, began in _pairs(read.get("phases")) if (at := number(began)) is not None]


def _timeline(phases: Sequence[tuple[str, float]], until: float, *, runs: bool) -> list[dict[str, Any]]:
    """The phases, each with its part of the whole time, 0 to 100. A phase that ends the job has no length.

    :param runs: whether the last one still lasts.
    """
    ends = [at for _, at in phases[1:]] + [phases[-1][1] if phases and phases[-1][0] in ENDED else until]
    lengths = [max(end - at, 0.0) for (_, at), end in zip(phases, ends, strict=True)] if phases else []
    whole = sum(lengths) or 1.0
    return [
        {
            "phase": name,
            "began": clock(at),
            "lasted": Ticking.of(until, at) if runs and (name, at) == phases[-1] else format_duration(length),
            "share": round(100 * length / whole, 2),
            "ends": name in ENDED,
        }
        for (name, at), length in zip(phases, lengths, strict=True)
    ]


def _accelerators(fields: Mapping[str, Any]) -> str:
    """An amount of the status: a number of GPUs, or as text what else it is."""
    amounts = read_stored(fields)
    return str(amounts[GPU]) if amounts.keys() <= {GPU} else _text(described(amounts, "0"))


def _heading(fields: Mapping[str, Any]) -> str:
    return "GPUs" if read_stored(fields).keys() <= {GPU} else "Accelerators"


def _facts(job: Mapping[str, str], replicas: Mapping[str, Any], read: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if job.get("name"):
        facts.append((job.get("kind") or "Job", f"{job.get('namespace', '')}/{job['name']}"))
    states = mapping(replicas.get("states"))
    if states:
        shown = [
            (_stopped(_text(state), read) or _text(state), int(number(count) or 0)) for state, count in states.items()
        ]
        counts = [
            f"{sum(n for name, n in shown if name == one)} {one}" for one in dict.fromkeys(name for name, _ in shown)
        ]
        facts += [("Replicas", ", ".join(counts)), (_heading(replicas), _accelerators(replicas))]
    elif read_stored(asked := _requested(read)):
        facts.append((f"{_heading(asked)} requested", _accelerators(asked)))
    return facts


def _requested(read: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "requested_"
    return {name.removeprefix(prefix): value for name, value in read.items() if name.startswith(prefix)}


def _replica(row: Any, read: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(row, list | tuple) or len(row) != len(COLUMNS):
        return {}
    found = dict(zip(COLUMNS, row, strict=True))
    shown: dict[str, Any] = {name: _text(value) for name, value in found.items()}
    stopped = _stopped(shown["state"], read)
    return {**shown, "state": stopped or shown["state"], "fine": bool(stopped) or found["state"] in FINE}


def _stopped(state: str, read: Mapping[str, Any]) -> str:
    """How a replica ended that was stopped because the job had; empty if it ended by itself, or the job has not."""
    if not read.get("ended") or state == SUCCEEDED:
        return ""
    if read.get("phase") == Phase.SUCCEEDED:
        return "stopped after the success"
    return "stopped after the failure" if state in (RUNNING, TERMINATING) else ""


def _running_on(held: float, read: Mapping[str, Any], now: float | None) -> str:
    """The accelerator time of a job: it grows as long as all of its replicas run.

    :param now: epoch seconds; None if the task has ended.
    """
    replicas, written_at = mapping(read.get("replicas")), number(read.get("written_at"))
    gpus = number(replicas.get("gpus")) if mapping(replicas.get("states")).keys() == {RUNNING} else None
    same = replicas.get("resource") == mapping(read.get("usage")).get("resource")
    if now is None or not gpus or not same or written_at is None or now < written_at:
        return format_duration(held)
    return Ticking.of(now, written_at, seconds=held, rate=gpus)


def _metrics(read: Mapping[str, Any]) -> list[dict[str, str]]:
    found = []
    for name, value in mapping(read.get("metrics")).items():
        one = mapping(value)
        shown = {column: _value(one.get(column)) for column in ("last", "best")}
        shown |= {column: _step(one.get(column)) for column in ("step", "best_step")}
        found.append({"name": _text(name), **shown})
    return found


def _series(read: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """Points for the curves: `[steps, values]` of each metric; values that are not finite stay text."""
    found = {}
    for name, points in mapping(read.get("series")).items():
        pairs = [pair for pair in _pairs(points) if is_step(pair[0])]
        found[_text(name)] = [[step for step, _ in pairs], [value for _, value in pairs]]
    return found


def _curves_of_all_tries(
    record: TaskRecord, read: Mapping[str, Any], tries: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[list[Any]]], list[str]]:
    """The curves of the tries since the last clear, and the name of each; no names if there is only one try."""
    numbers = {one.get("try_number"): one for one in tries if one.get("max_tries") == record.max_tries}
    earlier = {n: one for n, one in numbers.items() if n != read.get("try_number") and one.get("series")}
    own = _series(read)
    if not earlier:
        return own, []
    return overlaid([*map(_series, earlier.values()), own]), [*(f"try {n}" for n in earlier), "this try"]


def _usage_of_all_tries(
    record: TaskRecord, read: Mapping[str, Any], stored: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What all tries used whose usage is stored, if it is known that there are several."""
    own = mapping(read.get("usage")) if read.get("try_number") == record.try_number else {}
    used = total_usage([*usage_of_other_tries(stored, record.try_number), {**own, "tries": 1}])
    if record.try_number < 2 or not (used["held"] or number(own.get("held"))):
        return []
    if used["tries"] < 2:
        return [("Of earlier tries", "not known: this try only")]
    return [(label, format_duration(used[name])) for label, name in ALL_TRIES]


def _usage(read: Mapping[str, Any], now: float | None) -> list[tuple[str, str]]:
    """Accelerator time by what it was used for; nothing as long as the job has used none.

    :param now: epoch seconds; None if the task has ended. The status of a job in a queue has the time until it was
        written, and nothing is written while the job waits.
    """
    used = dict(mapping(read.get("usage")))
    written_at, gpus = number(read.get("written_at")), number(read.get("requested_gpus"))
    if now is not None and written_at is not None and gpus and read.get("phase") == Phase.QUEUED:
        since_then = gpus * max(now - written_at, 0)
        used |= {name: (number(used.get(name)) or 0) + since_then for name in ("queued", "requested")}
    shown = []
    for resource, amounts in ((None, used), *mapping(used.get("others")).items()):
        noun = _text(unit_of(str(resource or used.get("resource") or GPU))[1])
        found = {name: number(mapping(amounts).get(name)) for name in USAGE}
        if resource or any(found.values()):
            of = f": {noun}" if resource else ""
            for name, seconds in found.items():
                if seconds is not None:
                    is_own = name == "held" and not resource
                    amount = _running_on(seconds, read, now) if is_own else format_duration(seconds)
                    shown.append((USAGE[name].format(noun) + of, amount))
    if number(used.get("unknown_claims")):
        shown.append(("Devices of ResourceClaims", "not counted"))
    return shown + _repeated(used)


def _repeated(used: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a retry trained again after an earlier try had trained it; nothing if that isn't known."""
    steps, seconds = number(used.get("repeated_steps")), number(used.get("repeated"))
    if steps is None:
        return []
    time = f" in {format_duration(seconds)}" if steps and seconds is not None else ""
    return [("Repeated steps", f"{int(steps):,}{time}" if steps else "none")]


def _limits(read: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    """The running limits, each with the time until it expires; empty if it has."""
    found = []
    for limit in map(mapping, _list(read.get("limits"))):
        due = number(limit.get("due"))
        if due is not None:
            left = "" if due <= now else Ticking.of(now, due, rate=-1.0)
            found.append((_text(limit.get("name")), left))
    return found


def _try(one: Mapping[str, Any], with_logs: bool) -> dict[str, str]:
    began, ended = (_text(one.get(name))[:19].replace("T", " ") for name in ("started_at", "ended_at"))
    cause = _text(one.get("cause")) and (_text(one["cause"]) if with_logs else HIDDEN_CAUSE)
    held = number(mapping(one.get("usage")).get("held"))
    return {
        "number": _text(one.get("try_number")), "began": began, "ended": ended, "cause": cause or "succeeded",
        "step": _step(one.get("step")), "held": "" if held is None else format_duration(held),
    }  # fmt: skip


def _may_run(record: TaskRecord, read: Mapping[str, Any]) -> bool:
    """Whether the job of a task that has ended may still run: nobody has stored how it ended."""
    return record.state not in (*ACTIVE_STATES, *WAITING_STATES) and not read.get("ended")


def _commands(job: Mapping[str, str], rows: Sequence[Mapping[str, Any]], *, may_run: bool) -> list[str]:
    kind = KINDS.get(job.get("kind", ""))
    if kind is None or not job.get("name"):
        return []
    where = f"--namespace {shlex.quote(job.get('namespace', ''))}"
    resource = f"{kind.plural}.{kind.group}"
    name = shlex.quote(job["name"])
    selector = shlex.quote(f"{kind.behavior.pod_name_label}={job['name']}")
    commands = [f"kubectl delete {resource} {name} {where}"] if may_run else []
    commands += [
        f"kubectl get {resource} {name} {where} --output yaml",
        f"kubectl get pods {where} --selector {selector} --output wide",
        f"kubectl describe {resource} {name} {where}",
    ]
    if rows:
        pod = next((row for row in rows if not row["fine"]), rows[0])
        commands.append(f"kubectl logs {where} {shlex.quote(pod['pod'])} --all-containers --follow")
    return commands


def clock(at: float | None) -> str:
    """A time in UTC, to the second; empty for none."""
    if at is None or not 0 <= at < 1e11:
        return ""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _value(value: Any, digits: int = 6) -> str:
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return _text(value)


def _step(value: Any) -> str:
    known = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    return f"{value:,}" if known else _value(value)


def minute_of(now: float) -> int:
    """The minute of a time: views of trainings that run show durations, also while nothing else changes."""
    return int(now // 60)


def _text(value: Any) -> str:
    return "" if value is None else printable(ends_of(str(value), MAX_TEXT_CHARS))


def number(value: Any) -> float | None:
    """The value if it is a number that isn't absurdly large; else None."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if known else None


def printable(text: str) -> str:
    """The text as it is `masked`, without terminal control sequences; U+FFFD for what a browser can't show."""
    return CONTROLS.sub("\ufffd", masked(ESCAPES.sub("", text)))


def _line(value: Any) -> str:
    """A log line; the status has its first MAX_LINE_CHARS characters."""
    cut = isinstance(value, str) and len(value) >= MAX_LINE_CHARS
    return _text(value) + ("…" if cut else "")


def _pairs(value: Any) -> list[Sequence[Any]]:
    return [pair for pair in _list(value) if isinstance(pair, list | tuple) and len(pair) == 2]


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
