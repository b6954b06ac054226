"""The result of a training: JSON that the primary replica hands over, by its log or its termination message.

A line `KTRAIN_RESULT {"accuracy": 0.97}` of the primary's log (index 0, the last such line), or, where there is none,
the termination message of its container (what the program writes to /dev/termination-log; the kubelet keeps 4,096
bytes). No sidecar and no exec.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind

RESULT_MARKER = "KTRAIN_RESULT "
MAX_BYTES = 48 * 1024  #: of the JSON text: it becomes an XCom, in Airflow's database


def marked_line(line: str) -> str:
    """A line that may be the result, as it is kept and handed over: of one that is too long enough to tell that."""
    return line[: len(RESULT_MARKER) + MAX_BYTES + 1] if line.startswith(RESULT_MARKER) else ""


def find_result(kind: Kind, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], marked: str) -> tuple[Any, str]:
    """The result (None without one), and what is wrong with it: a bad result never loses the training.

    :param marked: the primary's last line that begins with RESULT_MARKER, or an empty string.
    """
    if marked:
        return _parsed(marked.removeprefix(RESULT_MARKER), "the line that begins with KTRAIN_RESULT")
    message = _termination_message(kind, job, pods)
    if not message.lstrip().startswith(("{", "[")):
        return None, ""  # a message for people
    return _parsed(message, "the termination message")


def _parsed(text: str, where: str) -> tuple[Any, str]:
    if len(text.encode()) > MAX_BYTES:
        return None, f"{where} has more than {MAX_BYTES:,} bytes. Store the result elsewhere and give its path"
    try:
        return json.loads(text, parse_constant=_refuse), ""
    except ValueError as e:
        return None, f"{where} is no JSON ({e}): {text[:200]!r}"


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
