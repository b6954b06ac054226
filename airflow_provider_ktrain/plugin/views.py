"""What the pages show, from Airflow's record of a task and the status that its worker or trigger wrote.

Statuses may come from another release: a field that is missing or has another type is shown as unknown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlencode

from airflow_provider_ktrain.compat_server import ACTIVE_STATES, UNREADABLE, TaskRecord
from airflow_provider_ktrain.core.formats import NEXT_DUE, mapping, total_usage, usage_of_other_tries
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.core.reporting.status_document import COLUMNS, FINE
from airflow_provider_ktrain.core.reporting.summary import status_of
from airflow_provider_ktrain.core.state.accelerators import GPU, read_stored, unit_of
from airflow_provider_ktrain.core.state.pods.pod_state import SUCCEEDED, passes_by_itself
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text.output import format_duration
from airflow_provider_ktrain.links.training import page_query
from airflow_provider_ktrain.plugin.stored_texts import (
    HIDDEN_CAUSE,
    STATE_WORDS,
    Ticking,
    accelerators_of,
    clock,
    line_of,
    list_of,
    minute_of,
    number,
    overlaid,
    pairs_of,
    running_on,
    series_of,
    step_of,
    text_of,
    value_of,
)

LATE_SECONDS = 120.0  #: How long after the next status was due the data of a training counts as old.
DUE_SECONDS = 60.0  #: How long after a status of an earlier release, which has no such time, the next one is due.
#: Phases in which statuses are written at intervals. In others one is written only when something changes.
REFRESHED = (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)
#: States of a task whose next try has not begun. In `up_for_retry`, what is stored is still that of the last try.
WAITING_STATES = ("", "none", "scheduled", "queued", "restarting", "up_for_reschedule")
FAILED_STATES = ("failed", "up_for_retry", "upstream_failed")
USAGE = {
    "held": "Held", "wasted": "Held without training", "queued": "Waiting for {}", "requested": "Requested",
}  # fmt: skip
ENDED = tuple(phase for phase in Phase if phase.ended)
UNQUOTED = ("category", "resolution", "replica")  #: Texts of a cause that never quote a log.
OF_CAUSE = (*UNQUOTED, "summary", "detail")
NOT_FOLLOWED = (
    "No triggerer follows the training at present: none is running, or all are full. The training itself continues. "
    "The data is updated again when a triggerer has taken the task over."
)


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
    read, key = mapping(status) or status_of(record.summary, record.try_number), record.key
    tries = [mapping(one) for one in list_of(stored.get("tries"))]
    written_at, active = number(read.get("written_at")), record.state in ACTIVE_STATES
    due = number(read.get(NEXT_DUE)) or (written_at or now) + DUE_SECONDS
    stale = active and read.get("phase") in REFRESHED and written_at is not None and now > due + LATE_SECONDS
    job = {name: text_of(value) for name, value in mapping(read.get("job")).items()}
    phases = [one for one in _phases(read) if one[0] != Phase.SUCCEEDED or record.state not in FAILED_STATES]
    replicas = mapping(read.get("replicas"))
    rows = [row for row in (_replica(row, read) for row in list_of(replicas.get("rows"))) if row]
    until = now if active else record.ended_at or written_at or now
    found = mapping(read.get("cause")) or mapping(read.get("conclusion"))  # stored before the job is released
    cause = {name: text_of(value) for name, value in found.items() if name in OF_CAUSE}
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
        state=_state_words(record),
        active=active or record.state in (*WAITING_STATES, "up_for_retry"),
        phase=text_of(read.get("phase")),
        shown_phase=_shown_phase(record, read),
        # by a limit, before the job did
        ended_early=bool(cause) and not active and read.get("phase") not in (None, *ENDED),
        since=clock(number(read.get("phase_since"))),
        age="" if not active or written_at is None else Ticking.of(now, written_at),
        stale=stale,
        notes=_notes(record, read, stale) + ([f"Note in Airflow: {text_of(record.note)}"] if record.note else []),
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
        last_lines=[(text_of(name), line_of(line)) for name, line in lines.items()] if with_logs else (),
        lines_hidden=bool(lines) and not with_logs,
        usage=_usage(read, now if active else None) + _usage_of_all_tries(record, read, stored),
        unit=unit_of(str(mapping(read.get("usage")).get("resource") or GPU)),
        limits=_limits(read, now) if active else (),
        queue=text_of(read.get("queue")) if active else "",
        tries=[_try(one, with_logs) for one in reversed(tries)],
        tries_unknown=record.try_number > 1 and not tries,
        tries_missing=_missing_tries(record, tries, has_older=bool(stored.get("older"))),
        commands=[] if read.get("job_deleted") is True else _commands(job, rows, may_run=_may_run(record, read)),
        path=[(key.dag_id, dag), (key.run_id, run)],
        log_path=f"{run}/tasks/{quote(key.task_id, safe='')}{mapped}",
        code_path=f"{dag}/code",
    )


def _state_words(record: TaskRecord) -> str:
    return STATE_WORDS.get(record.state, record.state.replace("_", " "))


def _shown_phase(record: TaskRecord, read: Mapping[str, Any]) -> str:
    """The phase of the job, except for a task that failed although its job succeeded, or that has no job."""
    phase = text_of(read.get("phase"))
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
        if not read.get("job"):
            ended = f" The task ended at {clock(record.ended_at)}." if record.ended_at else ""
            return [f"This try left no data: it ended before its job had a phase, or an older release ran it.{ended}"]
    notes = [NOT_FOLLOWED] if record.followed is False else []
    if record.state in FAILED_STATES and read.get("phase") == Phase.SUCCEEDED:
        notes.append("The job succeeded, but the task failed: its result could not be returned or stored.")
    if record.state in ACTIVE_STATES and (notice := text_of(read.get("notice"))):
        notes.append(notice)
    if read.get("try_number") != record.try_number:
        notes.append(f"The data is of try {text_of(read.get('try_number'))}. Try {record.try_number} has none yet.")
    if stale and record.followed is not False:
        notes.append("The data is old. The triggerer or worker that follows the job may be gone, or is overloaded.")
    if record.state not in (*ACTIVE_STATES, *WAITING_STATES) and not read.get("ended"):
        ended = f" at {clock(record.ended_at)}" if record.ended_at else ""
        why = "and its job was not released."
        if "job_deleted" not in read:  # which each last status has
            why = "but its last status could not be stored: it was killed, or its worker was lost. The page shows what "
            why += "was stored before that."
        notes.append(
            f"The try ended{ended} ({_state_words(record)}), {why} Its job may still hold GPUs: the first command ends "
            "it."
        )
    return notes


def _phases(read: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(text_of(name), at) for name, began in pairs_of(read.get("phases")) if (at := number(began)) is not None]


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


def _heading(fields: Mapping[str, Any]) -> str:
    return "GPUs" if read_stored(fields).keys() <= {GPU} else "Accelerators"


def _facts(job: Mapping[str, str], replicas: Mapping[str, Any], read: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if job.get("name"):
        facts.append((job.get("kind") or "Job", f"{job.get('namespace', '')}/{job['name']}"))
    states = mapping(replicas.get("states"))
    if states:
        shown = [
            (_stopped(text_of(state), read) or text_of(state), int(number(count) or 0))
            for state, count in states.items()
        ]
        counts = [
            f"{sum(n for name, n in shown if name == one)} {one}" for one in dict.fromkeys(name for name, _ in shown)
        ]
        facts += [("Replicas", ", ".join(counts)), (_heading(replicas), accelerators_of(replicas))]
    elif read_stored(asked := _requested(read)):
        facts.append((f"{_heading(asked)} requested", accelerators_of(asked)))
    if job.get("cluster"):  # of a try that has no status
        facts.append(("Cluster", job["cluster"]))
    if parameters := mapping(read.get("parameters")):
        facts.append(
            ("Parameters", ", ".join(f"{text_of(name)}={text_of(value)}" for name, value in parameters.items()))
        )
    return facts


def _requested(read: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "requested_"
    return {name.removeprefix(prefix): value for name, value in read.items() if name.startswith(prefix)}


def _replica(row: Any, read: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(row, list | tuple) or len(row) != len(COLUMNS):
        return {}
    found = dict(zip(COLUMNS, row, strict=True))
    shown: dict[str, Any] = {name: text_of(value) for name, value in found.items()}
    stopped = _stopped(shown["state"], read)
    return {**shown, "state": stopped or shown["state"], "fine": bool(stopped) or found["state"] in FINE}


def _stopped(state: str, read: Mapping[str, Any]) -> str:
    """How a replica ended that was stopped because the job had; empty if it ended by itself, or the job has not."""
    if not read.get("ended") or state == SUCCEEDED:
        return ""
    if read.get("phase") == Phase.SUCCEEDED:  # SIGTERM ends most programs with an error
        return "stopped after the success" if passes_by_itself(state) or state == "Error" else ""
    when = "after the failure" if read.get("phase") == Phase.FAILED else "with the training"
    return f"stopped {when}" if passes_by_itself(state) else ""


def _metrics(read: Mapping[str, Any]) -> list[dict[str, str]]:
    found = []
    for name, value in mapping(read.get("metrics")).items():
        one = mapping(value)
        shown = {column: value_of(one.get(column)) for column in ("last", "best")}
        shown |= {column: step_of(one.get(column)) for column in ("step", "best_step")}
        found.append({"name": text_of(name), **shown})
    return found


def _curves_of_all_tries(
    record: TaskRecord, read: Mapping[str, Any], tries: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[list[Any]]], list[str]]:
    """The curves of the tries since the last clear, and the name of each; no names if there is only one try."""
    numbers = {one.get("try_number"): one for one in tries if one.get("max_tries") == record.max_tries}
    earlier = {n: one for n, one in numbers.items() if n != read.get("try_number") and one.get("series")}
    own = series_of(read)
    if not earlier:
        return own, []
    return overlaid([*map(series_of, earlier.values()), own]), [*(f"try {n}" for n in earlier), "this try"]


def _usage_of_all_tries(
    record: TaskRecord, read: Mapping[str, Any], stored: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What all tries used whose usage is stored, if it is known that there are several."""
    is_own = read.get("try_number") == record.try_number
    own = mapping(read.get("usage")) if is_own else {}
    returned_earlier = record.state == "success" and not is_own  # an earlier success: this try has used nothing
    active = record.state in ACTIVE_STATES
    others = total_usage(usage_of_other_tries(stored, record.try_number))
    is_known = returned_earlier or ((active or own) and not own.get("at_least"))
    used = total_usage([others, {**own, "tries": int(bool(is_known))}])
    if record.try_number < 2 or not used["held"]:
        return []
    if not others["tries"] and not others["held"]:
        return [("Of earlier tries", "not known: this try only")]
    all_known = used["tries"] >= record.try_number and (active or returned_earlier or read.get("ended"))
    held, wasted = (format_duration(used[name]) for name in ("held", "wasted"))
    return [("Held in all tries", held if all_known else f"at least {held}"), ("Of it without training", wasted)]


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
        noun = text_of(unit_of(str(resource or used.get("resource") or GPU))[1])
        found = {name: number(mapping(amounts).get(name)) for name in USAGE}
        if resource or any(found.values()):
            of = f": {noun}" if resource else ""
            for name, seconds in found.items():
                if seconds is not None:
                    is_own = name == "held" and not resource
                    amount = running_on(seconds, read, now) if is_own else format_duration(seconds)
                    bound = " at least" if is_own and used.get("at_least") is True else ""
                    shown.append((USAGE[name].format(noun) + bound + of, amount))
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
    for limit in map(mapping, list_of(read.get("limits"))):
        due = number(limit.get("due"))
        if due is not None:
            left = "" if due <= now else Ticking.of(now, due, rate=-1.0)
            found.append((text_of(limit.get("name")), left))
    return found


def _try(one: Mapping[str, Any], with_logs: bool) -> dict[str, str]:
    began, ended = (text_of(one.get(name))[:19].replace("T", " ") for name in ("started_at", "ended_at"))
    cause = text_of(one.get("cause")) and (text_of(one["cause"]) if with_logs else HIDDEN_CAUSE)
    held = number(mapping(one.get("usage")).get("held"))
    return {
        "number": text_of(one.get("try_number")), "began": began, "ended": ended, "cause": cause or "succeeded",
        "step": step_of(one.get("step")), "held": "" if held is None else format_duration(held),
    }  # fmt: skip


def _missing_tries(record: TaskRecord, tries: Sequence[Mapping[str, Any]], *, has_older: bool) -> str:
    """The numbers of earlier tries of which nothing is stored, although something is of others.

    :param has_older: whether tries before the stored ones are no longer listed.
    """
    known = {number for one in tries if isinstance(number := one.get("try_number"), int)}
    if not known:
        return ""
    numbers = range(min(known) if has_older else 1, record.try_number)
    return ", ".join(str(number) for number in numbers if number not in known)


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
