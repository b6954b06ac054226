"""Masks values of Secrets in what kubexec.sh prints.

horovodrun passes all variables of the Launcher to its ranks in a command line. The kubexec.sh of
training-operator, by which it reaches the Workers of an MPIJob v1, prints this line (`set -x`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds.mpijob import launcher_containers
from airflow_provider_ktrain.core.text.secret_rules import MASK

KnownJob = Callable[[], Mapping[str, Any]]  #: returns the job, as far as it is known
_TRACE = re.compile(r"(?:\[\d+\]<stderr>:)?\++ .*kubectl exec ")  # horovodrun writes the rank before it


def masked_trace(text: str, role: str, job: KnownJob) -> str:
    """A line of the Launcher's log, without what follows a variable that the job takes from a Secret.

    All that follows is masked: the quotes of several shells make it unclear where a value ends. Further lines of a
    value are not recognized.
    """
    if role != "Launcher" or not _TRACE.match(text):
        return text
    names = (e["name"] for c in launcher_containers(job()) for e in c.get("env") or () if is_from_secret(e))
    found = re.search(rf"(?<!\w)(?:{'|'.join(map(re.escape, names)) or '(?!)'})=", text)
    return text[: found.end()] + MASK if found else text


def is_from_secret(entry: Mapping[str, Any]) -> bool:
    """Whether a variable of a container has its value from a Secret."""
    return "secretKeyRef" in (entry.get("valueFrom") or {})
