"""The result of a training: JSON that the primary replica writes to its log or its termination message.

The last line with `KTRAIN_RESULT {"accuracy": 0.97}` in the log of the primary (index 0) counts. If there is none, the
termination message counts: what the program writes to /dev/termination-log, of which the kubelet keeps 4,096 bytes.
Only the main container counts, no sidecar and no init container.

mpirun forwards output in pieces, so lines of several ranks can be mixed or cut. A function under mpirun therefore
prints its return value in short numbered lines with checksums, twice: see `core/manifest/program.py`.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.text.output import clipped, ends_of, masked
from airflow_provider_ktrain.core.text.xcom_values import MAX_DEPTH, storable

MARKER_PREFIX = "KTRAIN_RESULT"  #: The beginning of both markers.
RESULT_MARKER = "KTRAIN_RESULT "
#: Marker of a part. It is followed by a CRC-32 of the rest of the line, `number/count`, a CRC-32 of the whole text, and
#: a part of the text.
PART_MARKER = "KTRAIN_RESULT_PART "
NOT_RETURNED = "the return value "  #: Text that stands in for a return value that can't be sent begins like this.
MAX_BYTES = 48 * 1024  #: Size of the JSON text, because Airflow stores it as an XCom in its database.
TERMINATION_MESSAGE_BYTES = 4096  #: The limit of the kubelet.
LEFT_OUT = "Its result is left out: "
UNKNOWN = "Its result is unknown: "
EARLIER = "Its result may be an earlier one: "
METRICS_UNKNOWN = "Its metrics are unknown: "
CHANGED = "Its result is stored with a change: "
MAX_REASON_CHARS = 400  #: Length of the text that stands in for a return value.
MAX_MARKERS = 8  #: How many markers are tried per line.
PART_BYTES = 1900  #: Size of the text in a numbered line, which has less than 2,000 bytes in all.
MAX_PART_CHARS = PART_BYTES + 100  #: Length of a numbered line from its marker on.
MAX_PARTS = -(-MAX_BYTES // PART_BYTES)
_PART = re.compile(rf"{PART_MARKER}([0-9a-f]{{8}}) (([1-9]\d?)/([1-9]\d?) ([0-9a-f]{{8}}) ([ -~]+))\r?\Z")


class _Part(NamedTuple):
    """One intact numbered line.

    :param line: from the marker on.
    :param whole: number of lines and checksum of the whole text; equal in all lines of one text.
    :param number: of this line, from 1 to `total`.
    """

    line: str
    whole: str
    number: int
    total: int
    text: str


def keep_result_line(held: str, line: str) -> str:
    """The result line to hold after one more line of the primary's log.

    The marker may stand anywhere in a line: `print(..., end="")` puts text before it, and `set -x` repeats the command
    that prints it. The last line whose text after a marker is JSON wins. A line without JSON is held only as long as
    there is none with JSON, so that it can be reported.

    Numbered lines win over result lines. The intact lines of the last text are held, one per line.

    :param held: what this function returned for the lines before; an empty string at first.
    :return: an empty string, or text that begins with one of the markers and is at most a little longer than MAX_BYTES.
    """
    numbered = line[line.rfind(PART_MARKER) :] if PART_MARKER in line else ""
    if numbered and len(numbered) <= MAX_PART_CHARS and (part := _part(numbered)):
        return _with_part(held, part)
    if held.startswith(PART_MARKER):
        return held
    first = ""
    start = line.find(RESULT_MARKER)
    for _ in range(MAX_MARKERS):
        if start < 0:
            break
        found = line[start : start + len(RESULT_MARKER) + MAX_BYTES + 1]
        if _has_json(found):
            return found
        first = first or found
        start = line.find(RESULT_MARKER, start + len(RESULT_MARKER))
    return held if not first or _has_json(held) else first


def _with_part(held: str, part: _Part) -> str:
    """The held lines with one more. Lines of another text, of an earlier run of the Launcher, are dropped."""
    if f"\n{part.line}\n" in f"\n{held}\n":  # a search is cheaper than to read the held lines
        return held
    before = [found for text in held.split("\n") if (found := _part(text)) and found.whole == part.whole]
    if any(found.number == part.number for found in before):
        return held
    return "\n".join([*(found.line for found in before), part.line])


@functools.lru_cache(maxsize=4 * MAX_PARTS)  # the lines that are held are read again for each further one
def _part(text: str) -> _Part | None:
    """The numbered line that the text is; None if it isn't one, or is damaged."""
    match = _PART.match(text)
    if match is None or zlib.crc32(match[2].encode()) != int(match[1], 16):
        return None
    part = _Part(match[0].rstrip("\r"), f"{match[4]} {match[5]}", int(match[3]), int(match[4]), match[6])
    return part if part.number <= part.total <= MAX_PARTS and len(part.text) <= PART_BYTES else None


@functools.lru_cache(maxsize=64)  # the line that is held is looked at again for each further one
def _has_json(result_line: str) -> bool:
    """Whether JSON follows the marker. Text over MAX_BYTES has been cut, so its first character decides."""
    text = result_line.removeprefix(RESULT_MARKER)
    if len(text) > MAX_BYTES:
        return text.lstrip().startswith(("{", "[", '"'))
    try:
        _json(text)
    except RecursionError:
        return True  # too deep to parse: the report says so
    except ValueError:
        return False
    return True


def find_result(
    kind: Kind, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], result_line: str
) -> tuple[Any, str, bool]:
    """The result (None without one), one warning per line, and whether the program has reported a result.

    An invalid result doesn't fail the training.

    :param result_line: what `keep_result_line` held after the primary's last line.
    """
    if result_line.startswith(PART_MARKER):
        return *_joined(result_line), True
    if result_line:
        return *_parsed(result_line.removeprefix(RESULT_MARKER), "the line with KTRAIN_RESULT"), True
    message = _termination_message(kind, job, pods)
    if marked := functools.reduce(keep_result_line, message.splitlines(), ""):
        return *_parsed(marked.removeprefix(RESULT_MARKER), "the termination message"), True
    if not message.lstrip().startswith(("{", "[")):
        return None, "", False  # a message for humans
    return *_parsed(message, "the termination message"), True


def _joined(held: str) -> tuple[Any, str]:
    """The result in numbered lines."""
    parts = {part.number: part for line in held.split("\n") if (part := _part(line))}
    count = next((part.total for part in parts.values()), 0)
    if not count or len(parts) < count:
        return None, f"{LEFT_OUT}{count - len(parts)} of its {count} numbered lines are missing or damaged"
    return _parsed("".join(parts[number].text for number in sorted(parts)), "the return value")


def _parsed(text: str, where: str) -> tuple[Any, str]:
    """The result in the text, with what had to be changed or left out."""
    if text.startswith(NOT_RETURNED):
        return None, f"{LEFT_OUT}{clipped(text, MAX_REASON_CHARS)}"
    if len(text.encode(errors="replace")) > MAX_BYTES:
        return (
            None,
            f"{LEFT_OUT}{where} has more than {MAX_BYTES:,} bytes. Store the result elsewhere and return its path",
        )
    try:
        value, warnings = storable(_json(text))
    except RecursionError:
        return None, f"{LEFT_OUT}{where} is nested more than {MAX_DEPTH} deep"
    except ValueError as e:
        return None, f"{LEFT_OUT}{where} is not valid JSON ({e}): {clipped(masked(ends_of(text)), 200)!r}"
    return value, "\n".join(f"{CHANGED}{warning}" for warning in warnings)


def _json(text: str) -> Any:
    """The value, also of text that only Python takes for JSON (NaN), and of integers of any length."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= 20 else Decimal(digits))


def _termination_message(kind: Kind, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> str:
    primary = kind.primary(job)
    for pod in pods:
        if kind.role_of(pod) != (primary, 0):
            continue
        main = kind.main_container_name(job, pod)
        for status in (pod.get("status") or {}).get("containerStatuses") or ():
            if status.get("name", "") != main:
                continue
            ended = (status.get("state") or {}).get("terminated") or {}
            if ended.get("exitCode") == 0 and ended.get("message"):
                return str(ended["message"])
    return ""
