"""Between how many Workers an elastic job may be scaled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds.base import Kind

MIN_FLAGS = ("--min-np", "--min-num-proc")
MAX_FLAGS = ("--max-np", "--max-num-proc")


def keeps_world_size(kind: Kind, job: Mapping[str, Any]) -> bool:
    """Whether scaling leaves pods that do not know of it: WORLD_SIZE is set as a pod is made, where there is a Master.

    An elastic program does not read it; another one waits for the number of peers that it was started with.
    """
    said = (job.get("spec") or {}).get("elasticPolicy")
    return kind.name == "PyTorchJob" and "Master" in kind.replicas(job) and not isinstance(said, Mapping)


def is_elastic(kind: Kind, job: Mapping[str, Any]) -> bool:
    """Whether the job goes on with fewer Workers: an elasticPolicy, or horovodrun's `--min-np` or `--max-np`."""
    if kind.name == "PyTorchJob":
        return isinstance((job.get("spec") or {}).get("elasticPolicy"), Mapping)
    words = _launcher_words(kind, job)
    return any(_flag(words, flags) is not None for flags in (MIN_FLAGS, MAX_FLAGS))


def bounds(kind: Kind, job: Mapping[str, Any]) -> tuple[int, int | None]:
    """The least and the most Workers; (1, None) where the job says nothing, MPIJobs may go down to 0.

    A PyTorchJob says it in `elasticPolicy` (training-operator's defaults: min and max from each other, or from the
    Workers there are), an MPIJob in horovodrun's arguments, which count processes: slotsPerWorker to a Worker.
    """
    spec = job.get("spec") or {}
    if kind.name == "PyTorchJob":
        policy = spec.get("elasticPolicy")
        if not isinstance(policy, Mapping):
            return 1, None
        low, high = policy.get("minReplicas"), policy.get("maxReplicas")
        return low or high or 1, high or low
    words = _launcher_words(kind, job)
    slots = int(spec.get("slotsPerWorker") or 1)
    low, high = (_flag(words, flags) for flags in (MIN_FLAGS, MAX_FLAGS))
    return -(-low // slots) if low else 0, high // slots if high else None


def _launcher_words(kind: Kind, job: Mapping[str, Any]) -> list[str]:
    template = kind.replicas(job).get("Launcher", {}).get("template") or {}
    containers = (template.get("spec") or {}).get("containers") or [{}]
    return [str(w) for key in ("command", "args") for w in containers[0].get(key) or ()]


def _flag(words: list[str], flags: tuple[str, ...]) -> int | None:
    """The number behind a flag: `--min-np 1` or `--min-np=1`."""
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name in flags and (value or following).isdigit():
            return int(value or following)
    return None
