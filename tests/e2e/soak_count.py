"""The results of `make soak`, counted from outside: by watches of jobs and pods, and by what the programs recorded.

A program records each step with its time in a file of its training. Nothing there is lost or delayed by an outage, so
the records and the pods' timestamps show whether a limit had really passed, whatever the provider saw of them.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from airflow_provider_ktrain.core.identity.names import PREFIX
from airflow_provider_ktrain.core.kinds.conditions import incomplete_annotation
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from tests.e2e.scenario import terminal

Object = dict[str, Any]
LABELS = tuple(f"{PREFIX}/{name}" for name in ("dag-id", "run-id", "task-id", "map-index"))
#: Limits of all trainings in seconds: a program prints a step each second, and an outage takes 20 to 60 s.
LIMITS = {
    "schedule_timeout": 20,
    "startup_timeout": 20,
    "partial_start_timeout": 20,
    "log_stall_timeout": 15,
    "progress_timeout": 15,
    "execution_timeout": 1200,
}
END = "end"  # recorded by a program that gets SIGTERM
DONE = "done"  # recorded by a program after its last step


@dataclass(frozen=True)
class Observed:
    """What a soak observed.

    :param jobs: all jobs ever created, in their last state, those of one training in order of creation.
    :param deleted: the uids of deleted jobs.
    :param suspended: the uids of jobs that were suspended before they had ended. Default: none.
    :param pods: all pods ever created, in their last state. Default: none.
    :param records: what the programs recorded, by DAG and map index: each step, END or DONE, and its epoch seconds.
        Default: none.
    """

    jobs: list[Object]
    deleted: Collection[str]
    suspended: Collection[str] = ()
    pods: list[Object] = field(default_factory=list)
    records: Mapping[str, list[tuple[str, float]]] = field(default_factory=dict)


@dataclass
class Count:
    """The results of the trainings; each list names jobs or trainings.

    :param repeated: jobs that were created after another job of their training had succeeded.
    :param deleted_alive: jobs that were deleted before they had ended, although none of their limits had passed.
    :param set_back: trainings that recorded a lower step than before without a failure of their own, and jobs that were
        suspended before they had ended, although none of their limits had passed.
    :param incomplete: trainings whose task succeeded, and whose program has not recorded its last step.
    :param limits_passed: jobs that were deleted or suspended after one of their limits had passed.
    """

    created: int = 0
    repeated: list[str] = field(default_factory=list)
    deleted_alive: list[str] = field(default_factory=list)
    set_back: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    limits_passed: list[str] = field(default_factory=list)
    gpus: int = 0
    states: collections.Counter[str] = field(default_factory=collections.Counter)
    tries: int = 0

    @property
    def defects(self) -> dict[str, list[str]]:
        """The lists that must be empty."""
        return {
            "trained twice": self.repeated, "deleted alive": self.deleted_alive, "set back": self.set_back,
            "succeeded without its last step": self.incomplete,
        }  # fmt: skip

    def clean(self) -> bool:
        return not any(self.defects.values()) and not self.gpus and set(self.states) == {"success"}


def read_records(folder: pathlib.Path) -> dict[str, list[tuple[str, float]]]:
    """The programs' records, by the names of their files."""
    return {
        file.name: [(step, float(at)) for step, at in map(str.split, file.read_text().splitlines())]
        for file in sorted(folder.iterdir())
    }


def counted(observed: Observed, tasks: list[dict[str, Any]], gpus: int = 0) -> Count:
    """The results of the trainings.

    :param tasks: as Airflow's API returns them.
    :param gpus: that pods still hold. Default: 0.
    """
    count = Count(created=len(observed.jobs), gpus=gpus)
    by_training = collections.defaultdict(list)
    for job in observed.jobs:
        by_training[_training(job)].append(job)
    for training, jobs in by_training.items():
        _count_training(count, observed, training, jobs)
    count.states.update(str(task["state"]) for task in tasks)
    count.tries = sum(task["try_number"] for task in tasks)
    succeeded = [f"{task['dag_id']}.{task['map_index']}" for task in tasks if task["state"] == "success"]
    recorded = observed.records
    count.incomplete = [name for name in succeeded if name in recorded and DONE not in dict(recorded[name])]
    return count


def _count_training(count: Count, observed: Observed, training: tuple[str, ...], jobs: list[Object]) -> None:
    succeeded = [terminal(job) == "Succeeded" and not incomplete_annotation(job) for job in jobs]
    count.repeated += [_described(job) for n, job in enumerate(jobs) if any(succeeded[:n])]
    pods = [pod for pod in observed.pods if _training(pod) == training]
    name = f"{training[0]}.{training[-1]}"
    record = observed.records.get(name, [])
    excused = sum(terminal(job) == "Failed" for job in jobs)  # failures of its own
    for job, end in zip(jobs, [*map(_created, jobs[1:]), float("inf")], strict=True):
        began, uid = _created(job), job["metadata"]["uid"]
        deleted, suspended = uid in observed.deleted and not terminal(job), uid in observed.suspended
        if not deleted and not suspended:
            continue
        of_job = [pod for pod in pods if began <= _created(pod) < end]
        if passed := _limits_passed(began, of_job, [entry for entry in record if began <= entry[1] < end]):
            count.limits_passed.append(f"{_described(job)}: {', '.join(passed)}")
            excused += 1
        else:
            count.deleted_alive += [_described(job)] if deleted else []
            count.set_back += [f"{_described(job)} was suspended"] if suspended else []
    drops = list(_drops(record))
    if len(drops) > excused:
        count.set_back.append(f"{name} went from step {', then '.join(drops)}")


def _drops(record: Iterable[tuple[str, float]]) -> Iterator[str]:
    """Where a step is not higher than the one before."""
    for before, after in pairwise(int(step) for step, _ in record if step.isdigit()):
        if after <= before:
            yield f"{before} to {after}"


def _limits_passed(began: float, pods: Iterable[Object], record: list[tuple[str, float]]) -> list[str]:
    """The limits that a job had passed by the timestamps of the cluster and of its program."""
    pods = list(pods)
    starts = [at for pod in pods if (at := _started(pod)) is not None]
    waits = {"startup_timeout": [_seconds(began, min(map(_created, pods), default=None))]}
    waits["schedule_timeout"] = waits["partial_start_timeout"] = [
        _seconds(_created(pod), _scheduled(pod) or _released(pod)) for pod in pods
    ]
    waits["startup_timeout"] += [_seconds(_scheduled(pod), _started(pod) or _released(pod)) for pod in pods]
    waits["log_stall_timeout"] = waits["progress_timeout"] = [
        _seconds(min(starts, default=None), record[0][1] if record else None),
        # step 0 begins another run: between two runs a program can't print anything
        *(later - at for (_, at), (step, later) in pairwise(record) if step != "0"),
    ]
    waits["execution_timeout"] = [_seconds(began, at) for _, at in record[-1:]]
    return [limit for limit, seconds in LIMITS.items() if max(waits[limit], default=0.0) >= seconds]


def _seconds(began: float | None, ended: float | None) -> float:
    """From one time to the other; 0 if one of them isn't known."""
    return 0.0 if began is None or ended is None else ended - began


def _created(obj: Object) -> float:
    return epoch_seconds(obj["metadata"].get("creationTimestamp")) or 0.0


def _scheduled(pod: Object) -> float | None:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    scheduled = (c for c in conditions if c["type"] == "PodScheduled" and c["status"] == "True")
    return next((epoch_seconds(c.get("lastTransitionTime")) for c in scheduled), None)


def _started(pod: Object) -> float | None:
    """When the pod's container started."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    states = [status.get("state") or {} for status in statuses]
    runs = [state.get("running") or state.get("terminated") or {} for state in states]
    return next((at for run in runs if (at := epoch_seconds(run.get("startedAt")))), None)


def _released(pod: Object) -> float | None:
    """When the deletion of the pod was requested."""
    at = epoch_seconds(pod["metadata"].get("deletionTimestamp"))
    return None if at is None else at - (pod["metadata"].get("deletionGracePeriodSeconds") or 0)


def _training(obj: Object) -> tuple[str, ...]:
    labels = obj["metadata"].get("labels") or {}
    return tuple(str(labels.get(name)) for name in LABELS)


def _described(job: Object) -> str:
    return f"{job['metadata']['name']} of {'/'.join(_training(job))}"
