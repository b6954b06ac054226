"""The result of a training: JSON that the primary replica writes to its log or its termination message.

The last line with `KTRAIN_RESULT {"accuracy": 0.97}` in the log of the primary (index 0) counts. If there is none, the
termination message of its container counts: what the program writes to /dev/termination-log, of which the kubelet keeps
4,096 bytes. This needs no sidecar and no exec.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.storable import MAX_DEPTH, storable

RESULT_MARKER = "KTRAIN_RESULT "
MAX_BYTES = 48 * 1024  #: of the JSON text, because Airflow stores it as an XCom in its database
TERMINATION_MESSAGE_BYTES = 4096  #: the limit of the kubelet
LEFT_OUT = "Its result is left out: "
CHANGED = "Its result is stored with a change: "
MAX_MARKERS = 8  #: tried per line


def keep_result_line(held: str, line: str) -> str:
    """The result line to hold after one more line of the primary's log.

    The marker may stand anywhere in a line: `print(..., end="")` puts text before it, and `set -x` repeats the command
    that prints it. The last line whose text after a marker is JSON wins. A line without JSON is held only as long as
    there is none with JSON, so that it can be reported.

    :param held: what this function returned for the lines before; an empty string at first.
    :param line: the text of the line.
    :return: an empty string, or text that begins with RESULT_MARKER and is at most a little longer than MAX_BYTES.
    """
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
) -> tuple[Any, str]:
    """The result (None without one), and one warning per line: an invalid result doesn't fail the training.

    :param result_line: what `keep_result_line` held after the primary's last line.
    """
    if result_line:
        return _parsed(result_line.removeprefix(RESULT_MARKER), "the line with KTRAIN_RESULT")
    message = _termination_message(kind, job, pods)
    if marked := functools.reduce(keep_result_line, message.splitlines(), ""):
        return _parsed(marked.removeprefix(RESULT_MARKER), "the termination message")
    if not message.lstrip().startswith(("{", "[")):
        return None, ""  # a message for humans
    return _parsed(message, "the termination message")


def _parsed(text: str, where: str) -> tuple[Any, str]:
    if len(text.encode(errors="replace")) > MAX_BYTES:
        return (
            None,
            f"{LEFT_OUT}{where} has more than {MAX_BYTES:,} bytes. Store the result elsewhere and give its path",
        )
    try:
        value, warnings = storable(_json(text))
    except RecursionError:
        return None, f"{LEFT_OUT}{where} is nested more than {MAX_DEPTH} deep"
    except ValueError as e:
        return None, f"{LEFT_OUT}{where} is not valid JSON ({e}): {text[:200]!r}"
    return value, "\n".join(f"{CHANGED}{warning}" for warning in warnings)


def _json(text: str) -> Any:
    """The value, also of text that only Python takes for JSON (NaN), and of integers of any length."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= 20 else Decimal(digits))


def _termination_message(kind: Kind, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> str:
    primary = kind.primary(job)
    for pod in pods:
        if kind.pod_role((pod.get("metadata") or {}).get("labels") or {}) != (primary, 0):
            continue
        for status in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (status.get("state") or {}).get("terminated") or {}
            if ended.get("exitCode") == 0 and ended.get("message"):
                return str(ended["message"])
    return ""
