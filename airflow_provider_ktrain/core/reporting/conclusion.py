"""The conclusion: why a job that has not ended is released, stored in the status XCom before the release.

If the process dies after the release, the job is gone. The next process of the same try reads the cause here.
docs/reference/status.md describes the fields.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from airflow_provider_ktrain.core.formats import MAX_FAILED_NODES, VERSION, json_size, known_fields, mapping
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.text.output import MAX_LINE_CHARS, masked

MAX_BYTES = 4 * 1024  #: Size of a conclusion's JSON, with other characters than ASCII escaped.
OF_CAUSE = ("category", "summary", "resolution", "replica", "failed_nodes")  #: Fields that say why.
IDENTITY = ("uid", "owner", "submission")  #: Fields that are never shortened.


@dataclass(frozen=True)
class Conclusion:
    """Why a job that has not ended is released. `failed_nodes` has the latest node last."""

    uid: str
    owner: str
    submission: str
    event: str = ""
    category: str = "unknown"
    summary: str = ""
    resolution: str = ""
    replica: str = ""
    limit: str = ""
    failed_nodes: Mapping[str, str] = field(default_factory=dict)

    def belongs_to(self, ref: JobRef) -> bool:
        """Whether it concerns this job: uid, owner and submission are the same."""
        return all(getattr(self, name) == getattr(ref, name) for name in IDENTITY)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types of at most MAX_BYTES, with texts as they are `masked`, except for the identifiers of IDENTITY.

        If it is larger, the longest texts are shortened to the same number of characters. Nodes are left out, the
        earliest first, only if names alone take more than half of MAX_BYTES. The identifiers, which Kubernetes and
        Airflow limit, are never shortened.
        """
        document = {"version": VERSION, **masked(asdict(self)), **{name: getattr(self, name) for name in IDENTITY}}
        nodes = list(document["failed_nodes"].items())[-MAX_FAILED_NODES:]
        while nodes and json_size(_shortened(document | {"failed_nodes": dict(nodes)}, 0)) > MAX_BYTES // 2:
            nodes.pop(0)
        document["failed_nodes"] = dict(nodes)
        fitting = bisect.bisect(range(MAX_LINE_CHARS + 1), MAX_BYTES, key=lambda n: json_size(_shortened(document, n)))
        return _shortened(document, max(fitting - 1, 0))

    @classmethod
    def from_dict(cls, data: Any) -> Conclusion | None:
        """Read what `to_dict` returned, in this release or another one; None if it identifies no job.

        :param data: unknown fields are ignored; fields of another type get their defaults.
        """
        known = known_fields(cls, data)
        texts = {f.name: known[f.name] for f in fields(cls) if f.type == "str" and isinstance(known.get(f.name), str)}
        nodes = mapping(known.get("failed_nodes"))
        if not texts.get("uid"):
            return None
        return cls(
            **{**dict.fromkeys(IDENTITY, ""), **texts},
            failed_nodes={name: reason for name, reason in nodes.items() if isinstance(reason, str)},
        )

    def cause(self) -> dict[str, Any]:
        """The `cause` of an `engine.follow.outcome.Outcome`."""
        return {name: getattr(self, name) for name in OF_CAUSE}


def _shortened(document: Mapping[str, Any], chars: int) -> dict[str, Any]:
    """The document with texts of at most `chars` characters."""

    def short(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: short(reason) for name, reason in value.items()}
        if not isinstance(value, str) or len(value) <= chars:
            return value
        return f"{value[: max(chars - 3, 0)]}{'...'[:chars]}"

    return {name: value if name in IDENTITY else short(value) for name, value in document.items()}
