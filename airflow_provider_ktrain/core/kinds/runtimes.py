"""The runtimes that the jobs of some kinds refer to: objects of the cluster with the job's image and pod templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from airflow_provider_ktrain.core.kinds.manifest_fields import Manifest


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


class Runtimes(Protocol):
    """How jobs of a kind use runtimes. The runtime of a job is read before the job is sent."""

    @property
    def in_namespaces(self) -> tuple[str, ...]:
        """The path segments of the kinds of runtimes that are in a namespace."""

    @property
    def in_cluster(self) -> tuple[str, ...]:
        """The path segments of the kinds of runtimes that all namespaces share."""

    def ref(self, manifest: Mapping[str, Any]) -> RuntimeRef | None:
        """The runtime that a manifest refers to. None: there is none, or of an unknown kind."""

    def lacks(self, served: Served) -> str:
        """What a job lacks on this cluster, for the log; empty if nothing."""

    def can_end_job(self, served: Served) -> bool:
        """Whether the cluster ends a job at a deadline of its manifest."""

    def require_code(self, served: Served) -> None:
        """Check that a job can get code.

        :raises RuntimeMismatchError: it can't, on this cluster or with this runtime.
        """

    def expand(self, manifest: Mapping[str, Any], served: Served, *, name_length: int, policy: str = "") -> Manifest:
        """The manifest with what the runtime decides.

        :param name_length: number of characters of the job's name.
        :param policy: the ML policy that the runtime must have. Default: empty, any.
        :raises RuntimeMismatchError: the job doesn't fit the runtime or the cluster.
        """
