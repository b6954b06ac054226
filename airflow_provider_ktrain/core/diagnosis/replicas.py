"""Why a replica failed: the rules about the failure of a container or a pod, the most specific first."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

from airflow_provider_ktrain.core.diagnosis import failure_patterns as words
from airflow_provider_ktrain.core.diagnosis.evidence import Seen
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.pod_failures import (
    SIGKILLED,
    SIGTERMED,
    Failure,
    exit_code_text,
    signal_name,
)
from airflow_provider_ktrain.core.diagnosis.startup import find_obstacle, not_started
from airflow_provider_ktrain.core.text import first_line


def replica_failed(seen: Seen) -> Cause | None:
    found = seen.failures
    if not found:
        return None
    failure = found[0]
    cause = next((c for rule in _FAILURES if (c := rule(failure))), None) or _program_failed(failure)
    obstacle = find_obstacle(seen)
    waits_for_others = failure.is_effect or failure.role == "Launcher"
    if obstacle and obstacle.replica != failure.replica and waits_for_others:
        # it could not wait for a replica that never came
        meanwhile = f"{obstacle.summary}; meanwhile {failure.replica} failed ({exit_code_text(failure.exit_code)})"
        cause = replace(obstacle, summary=meanwhile)
    return replace(
        cause,
        summary=" ".join(cause.summary.split())[:500],
        replica=cause.replica or failure.replica,
        detail="\n".join(text for text in (cause.detail, *_surroundings(seen, failure)) if text),
    )


def _surroundings(seen: Seen, failure: Failure) -> Iterator[str]:
    """What else was seen of and around a failure."""
    yield seen.failed.message.strip() if seen.failed else ""
    anew = sum(not f.final and f.replica == failure.replica for f in seen.all_failures)
    yield ", ".join(
        text
        for text in (
            f"{failure.replica} is pod {failure.pod}",
            f"container {failure.container}" if failure.container else "",
            f"restarted {_times(failure.restarts)}" if failure.restarts else "",
            f"made anew {_times(anew)}" if anew else "",
        )
        if text
    )
    others = dict.fromkeys(f.replica for f in seen.failures[1:] if f.replica != failure.replica)
    yield f"later failed: {', '.join(others)}" if others else ""
    if failure.tail.lines:
        yield "\n".join(["last lines:", *(f"  {line}" for line in failure.tail.lines)])


def _taken_away(f: Failure) -> Cause | None:
    for known in words.TAKEN:
        if re.search(known.pattern, f.reason):
            said = f": {first_line(f.message)}" if f.message else ""
            remedy = words.OWN_DISK_REMEDY if re.search(words.OWN_DISK_LIMIT, f.message) else known.resolution
            return Cause(known.category, f"{f.replica} {known.what} ({f.reason}){said}", "", remedy)
    return None


def _out_of_memory(f: Failure) -> Cause | None:
    remedy = "raise the memory limit, or lower batch size, prefetching or the number of DataLoader workers"
    if f.reason == "OOMKilled":
        return Cause(Category.OUT_OF_MEMORY, f"{f.replica} ran out of memory (OOMKilled, exit code 137)", "", remedy)
    shells_word = f.exit_code == SIGKILLED and re.search(r"^Killed$|\bKilled  ", f.tail.last)
    if (f.tail.child == -9 or shells_word) and not f.tail.exception:
        said = f"{f.replica}: a process was killed by SIGKILL, most likely for memory ({exit_code_text(f.exit_code)})"
        return Cause(Category.OUT_OF_MEMORY, said, "", remedy)
    return None


def _command_missing(f: Failure) -> Cause | None:
    """A shell's exit codes: some command of the program is missing, perhaps after hours of training."""
    what = {126: "a command is not executable", 127: "a command was not found"}.get(f.exit_code or 0)
    if what is None or f.tail.exception:
        return None
    said = f": {f.tail.last}" if f.tail.last else ""
    resolution = "correct the command, or use an image that has it"
    return Cause(
        Category.USER_CODE, f"{f.replica} failed with {exit_code_text(f.exit_code)}, {what}{said}", "", resolution
    )


def _known_words(f: Failure) -> Cause | None:
    """A known message in the exception, or near the end of the log and behind the exception.

    A message explains what ended by itself. A kill from outside needs no explanation by the program, and the crash of a
    process is explained by its exception only.
    """
    signalled = _signal_of(f)
    if signalled in (signal.SIGKILL, signal.SIGTERM):
        return None
    _, _, behind = f.tail.end.rpartition(f.tail.exception) if f.tail.exception else ("", "", f.tail.end)
    texts = (f.tail.exception, behind) if signalled in (0, signal.SIGABRT) else (f.tail.exception,)
    for text, known in itertools.product(texts, words.PROGRAMS):
        if match := re.search(known.pattern, text):
            said = f.tail.exception or _line_at(text, match.start())
            summary = f"{f.replica} {known.what}: {said} ({exit_code_text(f.exit_code)})"
            category = known.category_with_gpus if f.gpus and known.category_with_gpus else known.category
            return Cause(category, summary, "", known.resolution)
    return None


def _bus_error(f: Failure) -> Cause | None:
    if _signal_of(f) != signal.SIGBUS or f.tail.exception:
        return None
    summary = f"{f.replica} died of SIGBUS ({exit_code_text(f.exit_code)}), most likely for lack of shared memory"
    return Cause(Category.USER_CODE, summary, "", words.SHM)


def _signal_of(f: Failure) -> int:
    """The signal that ended the container, or the process that its launcher reports; 0 where none did."""
    for code in (f.tail.child, (128 - f.exit_code) if f.exit_code else None):
        if code is not None and code < 0:
            return -code
    return 0


def _line_at(text: str, place: int) -> str:
    return text[text.rfind("\n", 0, place) + 1 :].partition("\n")[0].strip()


def _lost_a_peer(f: Failure) -> Cause | None:
    if not f.is_effect:
        return None
    said = f.tail.exception or f.tail.last
    known = next(known for known in words.PEERS if re.search(known.pattern, said))
    return Cause(
        known.category, f"{f.replica} {known.what}: {said} ({exit_code_text(f.exit_code)})", "", known.resolution
    )


def _killed(f: Failure) -> Cause | None:
    if f.exit_code not in (SIGKILLED, SIGTERMED) or f.tail.exception:
        return None
    name = signal_name(f.exit_code)
    return Cause(
        Category.INFRASTRUCTURE,
        f"{f.replica} was killed from outside by {name} (exit code {f.exit_code})",
        "",
        "look at the node: memory pressure, a reboot, somebody's kill; a failed liveness probe kills too",
    )


_FAILURES: tuple[Callable[[Failure], Cause | None], ...] = (
    _taken_away,
    _out_of_memory,
    not_started,
    _command_missing,
    _known_words,
    _bus_error,
    _lost_a_peer,
    _killed,
)


def _program_failed(f: Failure) -> Cause:
    who = f"init container {f.container} of {f.replica}" if f.is_init else f.replica
    if f.tail.exception:
        summary = f"{who} failed: {f.tail.exception} ({exit_code_text(f.exit_code)})"
    elif f.tail.child:
        summary = f"{who} failed: one of its processes ended with {exit_code_text(f.tail.child)}"
        summary += f"; its last line: {f.tail.last}" if f.tail.last else ""
    elif f.tail.last:
        summary = f"{who} failed with {exit_code_text(f.exit_code)}; its last line: {f.tail.last}"
    else:
        summary = f"{who} failed with {exit_code_text(f.exit_code)}" + (" and wrote no output" if f.tail.heard else "")
    return Cause(Category.USER_CODE, summary, "", "see the log of this replica")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
