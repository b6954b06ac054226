"""Which rank keeps the others waiting in a collective operation, by what PyTorch logs in each rank.

The lines are those of ProcessGroupNCCL.cpp and TraceUtils.h in torch/csrc/distributed/c10d, from PyTorch 1.12 to 2.13,
and the exceptions of gloo.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from airflow_provider_ktrain.core.diagnosis.evidence import Evidence
from airflow_provider_ktrain.core.diagnosis.failure_patterns import PROGRAM_ERRORS, first_match
from airflow_provider_ktrain.core.diagnosis.hangs import (
    ABSENT,
    MISSING,
    SILENT,
    Group,
    Hang,
    Place,
    Process,
    find_odd,
    grouped,
)
from airflow_provider_ktrain.core.diagnosis.log_lines import process_of
from airflow_provider_ktrain.core.diagnosis.log_parser import count_replaced, is_end_of_processes, prefix_of, read_tail
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.pod_failures import log_key
from airflow_provider_ktrain.core.state.pods.objects import Json, main_containers, name_of

_RANK = re.compile(r"\[rank(\d{1,9})\]:")
_RANK_OF_GROUP = re.compile(r"\bRank (\d{1,9})\]")
_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d{1,19}), OpType=(?P<operation>\w{1,64})\W.{0,400}?"
    r" ran for (?P<milliseconds>\d{1,15}) milliseconds"
)
_OF_GLOO = (
    re.compile(r"Timed out waiting (?P<milliseconds>\d{1,15})ms for (?P<operation>recv|send) operation"),
    re.compile(r"failed to pass (?P<operation>monitoredBarrier) in (?P<milliseconds>\d{1,15}) ms"),
)
#: `PG 1`, `PG 0 (default_pg)` or, with a name that is the same in all ranks, `PG ID 2 PG GUID 9`.
_STATUS = re.compile(
    r"(?i)\[PG (ID \d+ PG GUID )?(?P<group>\w{1,64}).{0,400}?"
    r"last enqueued (NCCL )?work: (?P<enqueued>-?\d{1,19}), last completed (NCCL )?work: (?P<completed>-?\d{1,19})"
)
_DUMP = "flight recorder dump signal"
_NEVER_JOINED = re.compile(
    r"\[(?P<ranks>\d{1,9}(?:, *\d{1,9})*)\] (finished collective #\d+, but didn't join|are the lagging ranks)|"
    r"Ranks? (?P<at_barrier>\d{1,9}(?:, *\d{1,9})*) failed to pass monitoredBarrier"
)
_DEFAULT_GROUPS = {"0", "default_pg"}
_PROCESSES = re.compile(r"\s(?:--nproc[-_]per[-_]node|--?np?)[\s=]+(\d{1,6})\s")


@dataclass
class _Rank:
    """What a rank reports.

    :param waits_for: number and name of the first operation that timed out; None if none did.
    :param works: last enqueued and last completed work, by process group.
    :param in_subgroup: whether it has another number in a process group whose operation timed out.
    """

    replica: str
    waits_for: tuple[int, str] | None = None
    works: dict[str, tuple[int, int]] = field(default_factory=dict)
    in_subgroup: bool = False


def is_report(line: str) -> bool:
    """Whether a line of a log may be one of those that are read here, or ends what belongs together."""
    return "collective" in line or "last enqueued" in line or _DUMP in line or is_end_of_processes(line)


def explain_timeout(evidence: Evidence, lost: Cause) -> Cause | None:
    """Why the ranks lost their peers, if a collective operation timed out in at least one and another can be compared.

    :param lost: the cause of the replica that lost a peer first.
    """
    logs = {replica: evidence.logs[key] for key, replica in _main_containers(evidence) if evidence.logs.get(key)}
    ranks, never_joined, seconds = _read(logs)
    reporting = {rank.replica for rank in ranks.values()} | {failure.replica for failure in evidence.failures}
    silent = () if evidence.kind.launchers else logs.keys() - reporting  # a Launcher's log is that of its Workers
    kind, job = evidence.kind, evidence.job
    replicas = max(len(logs), kind.size(job) - sum(kind.count(job, role) for role in kind.launchers))
    own = _ranks_of(evidence, ranks, replicas)
    processes = _processes(ranks, never_joined, sorted(silent), own)
    if len(processes) < 2 or all(process.place.why for process in processes):
        return None
    groups = grouped(processes)
    odd = find_odd(groups)
    if _are_comparable(ranks.values()):
        odd = _behind(groups) or odd
    elif not all(group.place.why for group in odd):
        odd = []
    ordered = (*odd, *(group for group in groups if group not in odd))
    hang = Hang(ordered, len(odd), replicas, len({process.replica for process in processes}))
    advice = (
        "Look at what the named rank did: uneven batches, a slow data loader or checkpoint, a branch that others take. "
        "Raise the timeout of init_process_group if it needs longer."
    )
    who = "NCCL" if any(rank.waits_for and rank.waits_for[0] for rank in ranks.values()) else "gloo"
    summary = f"{who} timed out after {seconds:.0f} s: {hang.sentence}"
    if error := _own_error(hang, logs, own):
        return replace(error, detail="\n".join((summary, *hang.lines)))
    resolution = lost.resolution if len(groups) == 1 else advice
    return Cause(lost.category, summary, "\n".join((lost.summary, *hang.lines)), resolution, hang.replica)


def _own_error(hang: Hang, logs: Mapping[str, Sequence[str]], ranks: Mapping[str, range]) -> Cause | None:
    """The last error of a process that keeps the others waiting, if it has logged one.

    :param ranks: of the replicas whose ranks are known.
    """
    odd = (process for group in hang.groups[: hang.odd] if group.place.why for process in group.processes)
    for process in odd:
        lines, who = logs.get(process.replica, ()), ""
        if process.rank:
            first = ranks.get(process.replica)
            prefix = prefix_of(process.pid, process.pid - first.start if first else None)
            lines = [line for line in lines if prefix.fullmatch(process_of(line)[0])]
            who = f"rank {process.rank}, "
        tail = read_tail(lines)
        if (error := tail.exception or tail.crash_line or tail.record) and not tail.is_peer_loss:
            known = first_match(PROGRAM_ERRORS, error)
            what = f"{process.replica} {known.description if known else 'failed'}"
            summary = f"{what}: {error} ({who}for which {hang.waiting})"
            resolution = known.resolution if known else f"Read the log of {process.replica}."
            category = known.category if known else Category.USER_CODE
            return Cause(category, summary, "", resolution, process.replica, unquoted=f"{what}: {hang.sentence}")
    return None


def _processes_of(pod: Json) -> int:
    """How many processes the command of a pod, or its variables, start; 0 if they don't say it."""
    found = [0]
    for container in (pod.get("spec") or {}).get("containers") or ():
        words = " ".join(str(word) for key in ("command", "args") for word in container.get(key) or ())
        values = [str(e.get("value")) for e in container.get("env") or () if e.get("name") == "PET_NPROC_PER_NODE"]
        found += [int(value) for value in (*_PROCESSES.findall(f"{words} "), *values) if value.isdecimal()]
    return max(found)


def _ranks_of(evidence: Evidence, ranks: Mapping[int, _Rank], replicas: int) -> dict[str, range]:
    """The ranks of each replica that reports of some and has several; empty if they aren't known.

    torchrun numbers those of a replica without a gap. Of a job with one replica, the highest one that reports anything
    shows how many there are at least.
    """
    groups = _needed(ranks.values()).keys()
    if not ranks or any(rank.in_subgroup for rank in ranks.values()) or groups - _DEFAULT_GROUPS:
        return {}
    size = max(map(_processes_of, evidence.pods))
    if replicas == 1 or evidence.kind.launchers:
        size = max(size, max(ranks) + 1)
    begins: dict[str, set[int]] = {}
    for number, rank in ranks.items():
        begins.setdefault(rank.replica, set()).add(number - number % max(size, 1))
    return {of: range(min(found), min(found) + size) for of, found in begins.items() if len(found) == 1 < size}


def _main_containers(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for pod in evidence.pods:
        for container in main_containers(pod):
            if evidence.kind.is_main_container(str(container.get("name"))):
                yield log_key(name_of(pod), str(container.get("name"))), evidence.kind.replica(pod)


def _read(logs: Mapping[str, Sequence[str]]) -> tuple[dict[int, _Rank], set[int], float]:
    """What the ranks report, those that never joined by a report of a desync, and after how long the first timed out.

    A subgroup numbers its ranks from 0. So only the number that PyTorch 2.2 and newer put before a line is that of the
    job. They don't put it before what() of the exception that ends the process, which repeats a line. If two replicas
    report the same number, it isn't that of the job: then nobody can be named.
    """
    ranks: dict[int, _Rank] = {}
    never_joined: set[int] = set()
    seconds = 0.0
    reports = {replica: [*filter(_is_read, log[count_replaced(log) :])] for replica, log in logs.items()}
    numbered = {replica for replica, lines in reports.items() if any(map(_RANK.search, lines))}
    for replica, line in ((replica, line) for replica, lines in reports.items() for line in lines):
        if desync := _NEVER_JOINED.search(line):
            never_joined |= {int(number) for number in (desync["ranks"] or desync["at_barrier"]).split(",")}
        timeout, status = _timeout(line), _STATUS.search(line)
        of_job, of_group = _RANK.search(line), _RANK_OF_GROUP.search(line)
        named = of_job if replica in numbered else of_group
        if named is None or not (timeout or status or _DUMP in line):
            continue
        rank = ranks.setdefault(int(named[1]), _Rank(replica))
        if rank.replica != replica:
            return {}, set(), 0.0
        if timeout:
            rank.in_subgroup |= of_group is not None and of_group[1] != named[1]
            found = int(timeout.groupdict().get("number") or 0), timeout["operation"]
            rank.waits_for = min(rank.waits_for or found, found)
            seconds = seconds or int(timeout["milliseconds"]) / 1000
        if status:
            rank.works[status["group"]] = int(status["enqueued"]), int(status["completed"])
    if any(rank.in_subgroup for rank in ranks.values()):
        never_joined = set()  # the report of a desync has the numbers of its process group
    return ranks, never_joined, seconds


def _is_read(line: str) -> bool:
    return is_report(line) or "Timed out waiting" in line or "monitoredBarrier" in line


def _timeout(line: str) -> re.Match[str] | None:
    patterns = (_TIMEOUT, *_OF_GLOO)
    return next((match for pattern in patterns if (match := pattern.search(line))), None)


def _are_comparable(ranks: Collection[_Rank]) -> bool:
    """Whether the works that ranks wait for are of one process group: numbers of several mean nothing together."""
    unknown = any(rank.in_subgroup and not rank.works for rank in ranks)
    return not unknown and len(_needed(ranks)) < 2


def _needed(ranks: Iterable[_Rank]) -> dict[str, int]:
    """By process group, the first work that ranks wait for."""
    found: dict[str, int] = {}
    for rank in ranks:
        number, _ = rank.waits_for or (0, "")
        for group, (enqueued, completed) in rank.works.items():
            if completed < number <= enqueued:
                found[group] = min(number, found.get(group, number))
    return found


def _processes(
    ranks: Mapping[int, _Rank], never_joined: set[int], silent: Iterable[str], own: Mapping[str, range]
) -> list[Process]:
    """Where the ranks are; without those that have joined and report nothing more.

    :param silent: replicas that have a log, have not failed, and report no timeout.
    :param own: see `_ranks_of`.
    """
    needed, found = _needed(ranks.values()), []
    only = {rank.replica for rank in ranks.values()}
    of = {number: replica for replica, numbers in own.items() for number in numbers}
    for number in sorted(ranks.keys() | never_joined | of.keys()):
        rank = ranks.get(number) or _Rank(of.get(number, next(iter(only)) if len(only) == 1 else ""))
        behind = any(rank.works[group][0] < work for group, work in needed.items() if group in rank.works)
        if rank.waits_for:
            work, operation = rank.waits_for
            place = Place(at=f"work {work}" if work else "gloo", inner=operation)
        elif number in never_joined or behind:
            place = Place(why=ABSENT)
        elif not rank.works:
            place = Place(why=SILENT if number in ranks else MISSING)
        else:
            continue
        found.append(Process(rank.replica, number, str(number), place, ()))
    found += [Process(replica, 0, "", Place(why=SILENT), ()) for replica in silent]
    heard = [process for process in found if process.place.why not in (SILENT, MISSING)]
    # most of them were silent: the job has ended before they could report anything
    return found if len(heard) > len(found) / 2 else heard


def _behind(groups: Sequence[Group]) -> list[Group]:
    """The groups that wait for the first of several works; none if they are the most, or some don't wait."""
    if any(group.place.why or not group.place.at.startswith("work") for group in groups):
        return []
    numbers = [int(group.place.at.split()[1]) for group in groups]
    behind = [group for group, number in zip(groups, numbers, strict=True) if number == min(numbers)]
    size, of_all = (sum(len(group.processes) for group in some) for some in (behind, groups))
    return behind if size <= of_all / 2 and len(behind) < len(groups) else []
