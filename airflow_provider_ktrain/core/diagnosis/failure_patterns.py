"""Known messages of programs, the kubelet, container runtimes and the scheduler: what they mean and what to do.

The tables are in failure_patterns.toml. The rules in replica_rules.py and startup_rules.py search them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from airflow_provider_ktrain.core.diagnosis.model import Category

REJECTED = "was rejected by its node"
CODE_PATH = r"[^'\s]*/ktrain[-/]code/"  #: Path of the code that a task sends, in the pods and in the embedded cluster.
CREATE_MISSING = "Create the missing object in the job's namespace, or correct its name in the manifest."


@dataclass(frozen=True)
class FailurePattern:
    """A regular expression for a known message, and what the message means.

    A match explains a failure, but isn't proof: it never forbids a retry.

    :param description: predicate of the summary, as in `Worker 0 <description>: <message>`.
    :param category_with_gpus: category if the pod requests GPUs. Default: None, the same as `category`.
    :param blames_node: whether the failure is the node's, so that `avoid_failed_nodes` avoids the node. Default: False.
    :param is_survivable: whether programs survive it, so that it isn't the cause if they make a step afterwards.
        Default: False.
    :param is_root: whether an exception with it counts before those to which it leads. Default: False.
    """

    pattern: str
    category: Category
    description: str
    resolution: str
    category_with_gpus: Category | None = None
    blames_node: bool = False
    is_survivable: bool = False
    is_root: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """A pattern of the tables."""
        pattern = fields["pattern"]
        categories = {name: Category(fields[name]) for name in ("category", "category_with_gpus") if name in fields}
        return cls(**{**fields, **categories, "pattern": pattern if isinstance(pattern, str) else "|".join(pattern)})


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _table(name: str) -> tuple[FailurePattern, ...]:
    return tuple(map(FailurePattern.of, _TABLES[name]))


PROGRAM_ERRORS = _table("program_errors")
PEER_LOSSES = _table("peer_losses")
DISRUPTIONS = _table("disruptions")
START_ERRORS = _table("start_errors")
MOUNT_ERRORS = _table("mount_errors")
SANDBOX_ERRORS = _table("sandbox_errors")
POD_REFUSALS = _table("pod_refusals")
CREATION_ERRORS = _table("creation_errors")
PULL_ERRORS = _table("pull_errors")
SIGNALS = _table("signals")
SCHEDULING_HINTS = _table("scheduling_hints")  #: Hints about scheduling. All that match are reported.
MISSING_CLAIM = SCHEDULING_HINTS[0]
_BY_MESSAGE = {
    "Evicted": _table("evictions"),
    "UnexpectedAdmissionError": _table("broken_devices"),
}  #: Hints by the reason.
_RENDEZVOUS_WORDS = ("store", "barrier", "rendezvous")  #: What a replica waited for if `timed out in` precedes it.


def first_match(patterns: Iterable[FailurePattern], text: str) -> FailurePattern | None:
    """The first of the patterns that matches the text; None if none does."""
    return next((known for known in patterns if re.search(known.pattern, text)), None)


def explain(patterns: Iterable[FailurePattern], text: str) -> FailurePattern:
    """The first of the patterns that matches the text, of which the last matches everything."""
    return next(known for known in patterns if re.search(known.pattern, text))


def explain_disruption(reason: str, message: str = "") -> FailurePattern | None:
    """What the reason and message mean for which Kubernetes ended a pod; None if that isn't known."""
    return first_match(_BY_MESSAGE.get(reason, ()), message) or first_match(DISRUPTIONS, reason)


def is_survivable(line: str) -> bool:
    """Whether a line of a log is a message of a program that programs survive."""
    return any(known.is_survivable and re.search(known.pattern, line) for known in PROGRAM_ERRORS)


def names_network_error(text: str) -> bool:
    """Whether a text that reports a lost peer shows an error of the network device: more than that the peer is gone."""
    return "NET/IB" in text or "NET/OFI" in text


def reports_peer_loss(text: str) -> bool:
    """Whether a line of a log, or an exception, reports a lost peer: a consequence, and not a cause."""
    lower = text.lower()
    timed_out = lower.partition("timed out in ")[2]
    if any(phrase in lower for phrase in _TABLES["peer_loss_phrases"]):
        return not any(word in lower for word in _TABLES["no_peer_words"])
    return any(word in timed_out for word in _RENDEZVOUS_WORDS)
