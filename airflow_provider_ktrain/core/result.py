"""The result of a training: JSON that the primary replica hands over, by its log or its termination message.

A line with `KTRAIN_RESULT {"accuracy": 0.97}` in the log of the primary (index 0; the last such line), or, if there is
none, the termination message of its container (what the program writes to /dev/termination-log; the kubelet keeps
4,096 bytes). No sidecar and no exec.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.text import UNFIT

RESULT_MARKER = "KTRAIN_RESULT "
MAX_BYTES = 48 * 1024  #: of the JSON text: it becomes an XCom, in Airflow's database
TERMINATION_MESSAGE_BYTES = 4096  #: that the kubelet keeps
MAX_MARKERS = 8  #: markers in one line that are tried
MAX_DEPTH = 64  #: of lists and objects in one another: encoders walk them by recursion
INTEGERS = range(-(2**63), 2**64)  #: what msgpack has, in which Airflow's processes talk


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
        json.loads(text)
    except RecursionError:
        return True  # too deep to be read: the report says so
    except ValueError:
        return False
    return True


def find_result(
    kind: Kind, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], result_line: str
) -> tuple[Any, str]:
    """The result (None without one), and what is wrong with it: a bad result never loses the training.

    :param result_line: what `keep_result_line` held after the primary's last line.
    """
    if result_line:
        return _parsed(result_line.removeprefix(RESULT_MARKER), "the line with KTRAIN_RESULT")
    message = _termination_message(kind, job, pods)
    if marked := functools.reduce(keep_result_line, message.splitlines(), ""):
        return _parsed(marked.removeprefix(RESULT_MARKER), "the termination message")
    if not message.lstrip().startswith(("{", "[")):
        return None, ""  # a message for people
    return _parsed(message, "the termination message")


def _parsed(text: str, where: str) -> tuple[Any, str]:
    if len(text.encode(errors="replace")) > MAX_BYTES:
        return None, f"{where} has more than {MAX_BYTES:,} bytes. Store the result elsewhere and give its path"
    try:
        value = json.loads(text, parse_constant=_refuse)
        refused = _refused(value)
    except RecursionError:
        refused = _TOO_DEEP
    except ValueError as e:
        return None, f"{where} is no JSON ({e}): {text[:200]!r}"
    return (None, f"{where} cannot be stored: {refused}: {text[:200]!r}") if refused else (value, "")


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def _refused(value: Any, depth: int = 0) -> str:
    """What Airflow's processes or its database would refuse, and not only for this task; empty where nothing is."""
    if depth > MAX_DEPTH:
        return _TOO_DEEP
    if isinstance(value, str) and (found := UNFIT.search(value)):
        return f"a string has the character {found[0]!a}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"a number is not finite ({value})"
    if isinstance(value, int) and value not in INTEGERS:
        return "an integer has more than 64 bits"
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((said for part in parts if (said := _refused(part, depth + 1))), "")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


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
