"""Odd and long lines: what a program writes, and what of it stands in the log files of its task."""

from __future__ import annotations

import inspect
import json
import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from airflow_provider_ktrain.core.text.output import clean
from airflow_provider_ktrain.engine.logs.line_logger import AGAIN
from tests.e2e.airflow import Airflow


def odd_lines() -> tuple[list[bytes], list[bytes]]:
    """Lines that are written at once, and others that come one after the other. Sent to the program as source code.

    Those of 2 MiB are few, because a node rotates a log of 10 MiB.
    """
    odd = [b"10%|#   |\r20%|##  |\r", b"\xff\xfe\xfa", b"\0", b"\xed\xa0\x80", "\u00e9\U0001f600".encode(), b'"\\']
    number, blocks = 0, []
    for sizes in ([1, 10, 1000, 5000, 70_000, 256 * 1024, 2 * 1024 * 1024], [1, 10, 1000, 5000, 70_000]):
        lines = []
        for size in sizes:
            for text in odd[:2] if size > 1024 * 1024 else odd:
                line = b"[%05d]" % number + text * (size // len(text) + 1)
                lines.append(line[-1:] if size == 1 else line[:size])
                number += 1
        blocks.append(lines)
    return blocks[0], blocks[1]


# SECONDS pass between the two blocks of lines, or less if `Stage.finish` ends that time, and some tenths of a second
# between the lines of the second one
PROGRAM = f"""
until [ -e "/tmp/$HOSTNAME.go" ]; do sleep 0.2; done
exec python3 - <<'END'
import os, time
{inspect.getsource(odd_lines)}
def write(lines):
    data = b"".join(line + b"\\n" for line in lines)
    while data:
        data = data[os.write(1, data):]

at_once, later = odd_lines()
write(at_once)
end = time.monotonic() + {{{{ dag_run.conf["seconds"] }}}}
while time.monotonic() < end and not os.path.exists("STEPS/{{{{ ti.dag_id }}}}.{{{{ ti.run_id }}}}.finish"):
    time.sleep(0.1)
for line in later:
    write([line])
    time.sleep(0.2)
END
"""
#: The message of a log about missing lines, with their number.
MISSING = re.compile(
    r"^Missing: ([\d,]+) lines? of |([\d,]+) lines? of \S+ between \S+ and \S+ are not logged again", re.MULTILINE
)
CUT = re.compile(r" \.\.\. \((\d+) bytes cut\)$")
PART = re.compile(r" \(part (\d+) of (\d+)\)$")
PREFIX = "[Master 0] "


@dataclass
class Logged:
    """What one process has logged.

    :param lines: in order.
    :param again: the lines of a lost process that were logged again.
    :param counted: the number of lines that are missing by the log's own words.
    """

    lines: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    counted: int = 0


def trigger_logs(airflow: Airflow, dag: str, run: str) -> set[pathlib.Path]:
    """The log files of the triggers that follow the job. Until then, a triggerer imports modules in its event loop."""
    folder = airflow.log_folder("triggerer") / f"dag_id={dag}" / f"run_id={run}" / "task_id=train"
    return {file for file in folder.glob("attempt=1.log.trigger.*") if " is Running" in file.read_text()}


def read_log(file: pathlib.Path) -> Logged:
    """What stands in the log file of a process, with the parts of long lines joined."""
    logged = Logged()
    parts: dict[bool, list[str]] = {True: [], False: []}
    for row in file.read_text().split("\n")[:-1]:
        record = json.loads(row)
        text = record["event"]
        logged.counted += sum(int((a or b).replace(",", "")) for a, b in MISSING.findall(text))
        if record.get("logger") != "Master 0" or record["level"] != "info":
            continue
        again = AGAIN in text
        for piece in text.split("\n"):
            assert piece.startswith(PREFIX), piece[:200]
            line = piece.removeprefix(PREFIX)
            if line == AGAIN:
                continue
            part = PART.search(line)
            parts[again].append(line[: part.start()] if part else line)
            assert part is None or int(part[1]) == len(parts[again]), f"part {part[0]} after {len(parts[again]) - 1}"
            if part is None or part[1] == part[2]:
                (logged.again if again else logged.lines).append("".join(parts[again]))
                parts[again].clear()
    return logged


def check_lines(logged: Sequence[str], written: Sequence[bytes], *, missing: int = 0) -> None:
    """The lines were logged once and in order, without those that are known to be missing.

    Only the beginning of a line of more than 256 KiB is logged, with the number of bytes that follow on it.
    """
    expected = [clean(line.decode(errors="replace")) for line in written]
    rest = iter(range(len(expected)))
    for number, line in enumerate(logged):
        cut = CUT.search(line)
        found = next((n for n in rest if _equal(line, expected[n], written[n], cut)), None)
        assert found is not None, f"line {number} was not written, or not in this place: {line[:100]!r}"
    assert len(logged) == len(expected) - missing


def _equal(line: str, text: str, written: bytes, cut: re.Match[str] | None) -> bool:
    if cut is None:
        return line == text
    kept = len(written) - int(cut[1])
    return kept > 250_000 and line[: cut.start()] == clean(written[:kept].decode(errors="replace"))
