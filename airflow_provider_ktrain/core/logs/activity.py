"""Which logs are read before `log_stall_timeout` or `progress_timeout` ends a job, and what a response contains.

Both limits mean every replica, followed or not. Megatron prints its steps on the last rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.container_run import run_of
from airflow_provider_ktrain.core.logs.cursor import normal_time
from airflow_provider_ktrain.core.logs.selection import is_followed
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

Object = Mapping[str, Any]
MAX_REPLICAS = 256  #: How many replicas' logs are read, beside the primary's.


@dataclass(frozen=True)
class Container:
    """A container that may have written lines since a time.

    :param started: when its newest run started, in epoch seconds; 0 if this isn't known.
    """

    pod: str
    uid: str
    name: str
    replica: str
    run: int
    started: float
    ended: bool


@dataclass(frozen=True)
class Selection:
    """The containers to read, in this order.

    :param left_out: which replicas were left out, for the cause; empty if none was. Default: "".
    """

    containers: tuple[Container, ...]
    left_out: str = ""

    @property
    def last_start(self) -> float:
        """When the last of them started, in epoch seconds; 0 if none has."""
        return max((container.started for container in self.containers), default=0.0)


def containers_to_read(kind: Kind, job: Object, pods: Sequence[Object], since: float) -> Selection:
    """The main and init containers that may have written since a time: the primary's first, then by index, downwards.

    :param since: in epoch seconds; containers that ended before are left out.
    """
    primary = kind.primary(job), 0
    found = [(kind.role_of(pod), list(_containers(kind, job, pod, since))) for pod in pods]
    replicas = [(role, containers) for role, containers in found if containers]
    replicas.sort(key=lambda replica: (replica[0] != primary, -replica[0][1]))
    kept = MAX_REPLICAS + sum(role == primary for role, _ in replicas)
    left_out = ""
    if len(replicas) > kept:
        left_out = (
            f"Of {len(replicas)} replicas, only the logs of {kind.replica_name(*primary)} and of the {MAX_REPLICAS} "
            "with the highest index were read."
        )
    return Selection(tuple(container for _, containers in replicas[:kept] for container in containers), left_out)


def _containers(kind: Kind, job: Object, pod: Object, since: float) -> Iterator[Container]:
    meta, spec = pod["metadata"], pod.get("spec") or {}
    for container in [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]:
        name = container["name"]
        run = run_of(pod, name)
        started, finished = epoch_seconds(run.started_at) or 0.0, epoch_seconds(run.finished_at)
        if not run.started or not is_followed(kind, job, pod, name) or (finished is not None and finished < int(since)):
            continue
        yield Container(meta["name"], meta["uid"], name, kind.replica(pod), run.restart, started, run.ended)


def timed_lines(block: bytes) -> Iterator[tuple[float, str]]:
    """When each line of a response was written, in epoch seconds, and its text.

    Lines without a timestamp are left out: they are ends of lines that began before.
    """
    for line in block.decode("utf-8", "replace").split("\n"):
        stamp, _, text = line.partition(" ")
        time = normal_time(stamp)
        at = None if time is None else epoch_seconds(time)
        if at is not None:
            yield at, text
