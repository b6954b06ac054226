"""The conclusion: why a job that has not ended is released, stored in the status XCom before the release.

If the process dies after the release, the job is gone. The next process of the same try reads the cause here.
docs/reference/status.md describes the fields.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.formats import MAX_FAILED_NODES, VERSION, json_size, mapping
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.text.output import MAX_LINE_CHARS, masked

MAX_BYTES = 4 * 1024  #: Size of a conclusion's JSON, with other characters than ASCII escaped.
IDENTITY = ("uid", "owner", "submission")  #: Fields that are never shortened.
#: All fields that are texts.
TEXTS = (*IDENTITY, "event", "limit", "category", "summary", "resolution", "replica")


@dataclass(frozen=True)
class Conclusion:
    """The cause for which a job that has not ended is released, and which job that is.

    :param cause: its detail, and what it quotes of logs, are not stored; `failed_nodes` has the latest node last.
    """

    uid: str
    owner: str
    submission: str
    cause: Cause
    event: str = ""
    limit: str = ""

    def belongs_to(self, ref: JobRef) -> bool:
        """Whether it concerns this job: uid, owner and submission are the same."""
        return all(getattr(self, name) == getattr(ref, name) for name in IDENTITY)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types of at most MAX_BYTES, with texts as they are `masked`, except for the identifiers of IDENTITY.

        If it is larger, the longest texts are shortened to the same number of characters. Nodes are left out, the
        earliest first, only if names alone take more than half of MAX_BYTES. The identifiers, which Kubernetes and
        Airflow limit, are never shortened.
        """
        cause, identity = self.cause, (self.uid, self.owner, self.submission)
        texts = (self.event, self.limit, str(cause.category), cause.unquoted, cause.resolution, cause.replica)
        document: dict[str, Any] = dict(zip(TEXTS, (*identity, *map(masked, texts)), strict=True))
        document["version"] = VERSION
        nodes = list(masked(cause.failed_nodes).items())[-MAX_FAILED_NODES:]
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
        known = {name: value for name, value in mapping(data).items() if isinstance(value, str)}
        nodes = mapping(mapping(data).get("failed_nodes"))
        failed = {name: reason for name, reason in nodes.items() if isinstance(reason, str)}
        uid, owner, submission, event, limit, category, summary, resolution, replica = (
            known.get(text, "") for text in TEXTS
        )
        cause = Cause(Category.of(category), summary, "", resolution, replica, failed)
        return cls(uid, owner, submission, cause, event, limit) if uid else None


def _shortened(document: Mapping[str, Any], chars: int) -> dict[str, Any]:
    """The document with texts of at most `chars` characters."""

    def short(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: short(reason) for name, reason in value.items()}
        if not isinstance(value, str) or len(value) <= chars:
            return value
        return f"{value[: max(chars - 3, 0)]}{'...'[:chars]}"

    return {name: value if name in IDENTITY else short(value) for name, value in document.items()}
