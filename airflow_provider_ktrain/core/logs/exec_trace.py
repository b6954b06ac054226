"""Masks values of Secrets in the command lines that horovodrun and kubexec.sh print.

horovodrun passes all variables of the Launcher to its ranks in a command line. The kubexec.sh of
training-operator, by which it reaches the Workers of an MPIJob v1, prints this line (`set -x`), and so does
horovodrun itself with --verbose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds.mpijob import launcher_containers
from airflow_provider_ktrain.core.text.secret_rules import MASK

KnownJob = Callable[[], Mapping[str, Any]]  #: Returns the job, as far as it is known.
#: horovodrun writes the rank before it, and the time with --prefix-output-with-timestamp.
_TRACE = re.compile(r"^(?:(?:[^\[]{0,32}\[\d+\]<stderr>:)?\++ .*kubectl exec |.*\benv HOROVOD_HOSTNAME=)")


def masked_trace(text: str, role: str, job: KnownJob) -> str:
    """A line of the Launcher's log, without what follows a variable that contains a value of a Secret.

    All that follows is masked: the quotes of several shells make it unclear where a value ends. Further lines of a
    value are not recognized.
    """
    if role != "Launcher" or not _TRACE.match(text):
        return text
    names = (e["name"] for c in launcher_containers(job()) for e in secret_variables(c.get("env") or ()))
    found = re.search(rf"(?<!\w)(?:{'|'.join(map(re.escape, names)) or '(?!)'})=", text)
    return text[: found.end()] + MASK if found else text


def secret_variables(env: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The variables of a container with values of Secrets: by `secretKeyRef`, or by `$(NAME)` of an earlier one."""
    found: list[Mapping[str, Any]] = []
    for entry in env:
        value = str(entry.get("value") or "")
        if "secretKeyRef" in (entry.get("valueFrom") or {}) or any(f"$({e['name']})" in value for e in found):
            found.append(entry)
    return found
