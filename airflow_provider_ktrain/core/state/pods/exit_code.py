"""The end of a job's program: the exit code of its primary replica's main container."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json


def primary_exit_code(kind: Kind, job: Json, pods: Sequence[Json]) -> int | None:
    """The exit code with which the program of a failed job ended by itself.

    None if that is not known: the primary replica has not failed, or its pod was evicted or deleted.
    """
    pod, container = _primary(kind, job, pods)
    failed = [run for run in objects.failed_runs(container) if not objects.was_ended_by_deletion(run, pod)]
    return failed[-1].get("exitCode") if failed and not objects.disruption_of(pod)[0] else None


@dataclass(frozen=True)
class EndedPrimary:
    """The end of the primary replica's main container, which the job's status may not show yet."""

    replica: str
    exit_code: int
    finished_at: str

    def __str__(self) -> str:
        return f"{self.replica} had ended with exit code {self.exit_code} at {self.finished_at}"


def find_ended_primary(kind: Kind, job: Json, pods: Sequence[Json]) -> EndedPrimary | None:
    """How the primary replica's main container has ended; None if it runs, or isn't known.

    The job's status shows this 1.1 to 2.2 s later (recordings 01, 31, 41, 50, 57), and longer on a loaded cluster.
    """
    _, container = _primary(kind, job, pods)
    ended = objects.state_of(container, "terminated")
    if not ended:
        return None
    code, at = int(ended.get("exitCode") or 0), str(ended.get("finishedAt") or "")
    return EndedPrimary(kind.replica_name(kind.primary(job), 0), code, at)


def _primary(kind: Kind, job: Json, pods: Sequence[Json]) -> tuple[Json, Json]:
    """The newest pod of the primary replica, and the status of its main container; empty if they aren't known."""
    primary = kind.primary(job), 0
    own = (pod for pod in pods if kind.role_of(pod) == primary)
    newest: Json = max(own, key=objects.created, default={})
    return newest, objects.container_status(newest, kind.main_container_name(job, newest))
