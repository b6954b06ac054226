"""What a cluster serves for one job, as far as it decides what is sent: fields of its kind, and the job's runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RuntimeRef:
    """The runtime that a job refers to: an object that holds the job's pod templates.

    :param kind: its kind: ClusterTrainingRuntime.
    :param plural: the resource's path segment.
    :param namespaced: whether it is in the job's namespace.
    :param name: its name.
    """

    kind: str
    plural: str
    namespaced: bool
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Served:
    """What the cluster serves for one job.

    :param fields: the fields of the job's `spec` in the served schema. None: the schema can't be read.
    :param runtime: the runtime that the job refers to. None: the connection can't read it.
    :param unreadable: why schema or runtime can't be read. Default: empty.
    """

    fields: frozenset[str] | None = None
    runtime: Mapping[str, Any] | None = None
    unreadable: str = ""
