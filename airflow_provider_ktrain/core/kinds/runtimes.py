"""The runtimes that the jobs of some kinds refer to: objects of the cluster with the job's image and pod templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.kinds.manifest_fields import Manifest


@dataclass(frozen=True)
class RuntimeRef:
    """The runtime that a job refers to: an object that holds the job's pod templates.

    :param namespaced: whether it is in the job's namespace.
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

    :param supported: whether the served schema is that of a supported operator. False: it can't be read.
    :param runtime: the runtime that the job refers to. None: the connection can't read it.
    :param unreadable: why schema or runtime can't be read. Default: empty.
    """

    supported: bool = False
    runtime: Mapping[str, Any] | None = None
    unreadable: str = ""


@dataclass(frozen=True)
class Runtimes:
    """How jobs of a kind use runtimes. The runtime of a job is read before the job is sent.

    :param in_namespaces: the path segments of the kinds of runtimes that are in a namespace.
    :param in_cluster: the path segments of the kinds of runtimes that all namespaces share.
    :param ref: returns the runtime that a manifest refers to. None: there is none, or of an unknown kind.
    :param of_other_kind: returns the runtime of this name in the namespace, or for all namespaces if this is that one.
    :param require_supported: raises a RuntimeMismatchError if the fields of `spec` in the served schema are those of an
        operator to which no job can be submitted.
    :param lacks: returns what a job lacks on this cluster, for the log; empty if nothing.
    :param require_code: raises a RuntimeMismatchError if a job can't get code.
    :param expand: returns the manifest with what the runtime decides: see `trainjob/patches.py`.
    """

    in_namespaces: tuple[str, ...]
    in_cluster: tuple[str, ...]
    ref: Callable[[Mapping[str, Any]], RuntimeRef | None]
    of_other_kind: Callable[[RuntimeRef], RuntimeRef]
    require_supported: Callable[[frozenset[str]], None]
    lacks: Callable[[Served], str]
    require_code: Callable[[Served], None]
    expand: Callable[..., Manifest]
