"""What horovodrun prints about the ends of its processes: which one ended the job, and which it went on without.

Horovod 0.28: gloo_run.py and elastic/driver.py in horovod/runner. Each line of a process begins with the rank with
which it was started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from airflow_provider_ktrain.core.text.output import listed

_END = re.compile(r"Process (\d{1,6}) exit with status code (-?\d{1,9})\.\s*$")
_REPORT = re.compile(r"Process name: ((?P<host>\S+)\[\d{1,6}\]|(?P<rank>\d{1,6}))\s*\nExit code: (?P<code>-?\d+)")
_LAST_ROUND = re.compile(r"(?:failure|blacklisted slots) count == (\d{1,6}) -> stop running")
_SPEAKS = re.compile(r"\[(\d{1,6})\]<stdout>:")
_KILLED = (137, 143, 255)  #: Exit codes of ranks whose Worker is deleted; 255 is of ssh.
_MAX_NAMED = 5


@dataclass(frozen=True)
class ReportedEnd:
    """The end of the process that Horovod names as the first to end the job.

    :param name: the process as messages name it: `rank 0 on train-worker-0`.
    :param exit_code: negative for a signal.
    :param lines: numbers of the lines that it wrote. If that isn't known, of those that no other ended process wrote.
    """

    name: str
    exit_code: int
    lines: tuple[int, ...]


def reported_end(lines: Sequence[str]) -> ReportedEnd | None:
    """The end that Horovod reports; None if the lines have no report.

    :param lines: the last ones of the launcher's log, with the prefixes of processes.
    """
    text = "\n".join(lines)
    if "Process name: " not in text or (found := _REPORT.search(text)) is None:
        return None
    code = int(found["code"])
    ends = [(int(m[1]), int(m[2])) for line in lines if (m := _END.match(line))]
    rank = int(found["rank"]) if found["rank"] else _rank_on(found["host"], code, ends, lines)
    own = tuple(at for at, line in enumerate(lines) if line.startswith(f"[{rank}]<"))
    others = tuple(f"[{ended}]<" for ended, _ in ends)
    report = next((i for i, line in enumerate(lines) if line.startswith("Traceback")), len(lines))  # horovodrun's own
    where = [f"rank {rank}" if rank is not None else "", f"on {found['host']}" if found["host"] else ""]
    return ReportedEnd(
        " ".join(filter(None, where)),
        128 - code if 128 < code <= 128 + 64 else code,  # 255 is of ssh
        own or tuple(i for i, line in enumerate(lines[:report]) if not (line.startswith(others) or _END.match(line))),
    )


def _rank_on(host: str, code: int, ends: Sequence[tuple[int, int]], lines: Sequence[str]) -> int | None:
    """The rank with which the process was started that Horovod names; None if no end with its exit code is known.

    It is one of those that ended with this code: the one whose host kubexec.sh has printed, else the first that ended
    with the job. Horovod says how many these are. Ranks aren't in the order of the hosts' names.
    """
    together = next((int(m[1]) for line in reversed(lines) if (m := _LAST_ROUND.search(line))), 1)
    candidates = [rank for rank, ended in ends if ended == code]
    last = [rank for rank, ended in ends[-together:] if ended == code]
    traced = re.compile(rf"\[(\d{{1,6}})\]<stderr>:\++ .* exec {re.escape(host)} ")
    on_host = [int(m[1]) for line in reversed(lines) if (m := traced.match(line))]
    return next((rank for rank in (*on_host, *last, *candidates) if rank in candidates), None)


class LostRanks:
    """The ranks that an elastic horovodrun lost, and went on without."""

    def __init__(self) -> None:
        self._failed: dict[int, int] = {}  # exit codes by rank, of which no line shows yet that others go on

    def lost_by(self, line: str, is_scaled_down: Callable[[], bool]) -> str:
        """What a line of the launcher's log shows about lost ranks, for a warning; empty if nothing.

        Another rank's line shows that the training goes on.

        :param is_scaled_down: tells whether Workers have left the job: their ranks were killed, and are not lost.
        """
        if line.startswith("Process ") and (found := _END.match(line)):
            rank, code = int(found[1]), int(found[2])
            if code not in _KILLED or not is_scaled_down():
                self._failed[rank] = code
        elif self._failed and (speaks := _SPEAKS.match(line)) and int(speaks[1]) not in self._failed:
            lost = [f"rank {rank} (exit code {code})" for rank, code in sorted(self._failed.items())]
            self._failed = {}
            return f"Horovod goes on without {listed(lost, _MAX_NAMED)}."
        return ""
