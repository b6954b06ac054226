"""The deadline of a training: how `execution_timeout` is enforced by the task, Airflow and the cluster.

Airflow enforces `execution_timeout` only while a worker runs the task, not while the task is deferred, and it counts
from the start of each try. So the provider enforces a deadline of its own. It is an absolute time, and it comes before
Airflow's timeout:

1. `run_seconds`: the job may run for a little less than `execution_timeout`.
2. An annotation of the job has the deadline. A retry that adopts the job finds it there, so the time also counts over
   retries. A job that was suspended gets a new deadline when it is resumed (`engine/submit/create_or_adopt.py`).
3. Worker and trigger treat it as one of the limits (`core/state/limits.py`).
4. `deferral_timeout`: if the trigger doesn't end in time, Airflow ends the deferral, and a worker releases the job.
5. `backstop`: if no process is left, the cluster ends the job.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow_provider_ktrain.core.identity.names import BACKSTOP_ANNOTATION, DEADLINE_ANNOTATION, annotation
from airflow_provider_ktrain.core.kinds import Manifest, kind_of
from airflow_provider_ktrain.core.kinds.manifest_fields import POD_DEADLINE_MARGIN
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.manifest.loader import plain

RELEASE_SECONDS = 30.0  #: Time from the deadline to Airflow's own timeout, in which the job is released.
BACKSTOP_SECONDS = 300.0  #: Time from the deadline to the job's activeDeadlineSeconds.


def run_seconds(execution_timeout: timedelta | None) -> float | None:
    """Seconds from the creation of the job to its deadline; None without an execution_timeout."""
    if execution_timeout is None:
        return None
    whole = execution_timeout.total_seconds()
    return whole - min(RELEASE_SECONDS, whole / 10)


def deadline_of(job: Mapping[str, Any]) -> float | None:
    """The job's deadline, in epoch seconds; None if it has none, or if its annotation is not a number."""
    with contextlib.suppress(ValueError, TypeError):
        if math.isfinite(deadline := float(annotation(job, DEADLINE_ANNOTATION) or "")):
            return deadline
    return None


def seconds_to_deadline(job: Mapping[str, Any]) -> float | None:
    """What `run_seconds` was when the job was created, in whole seconds; None if its annotation doesn't show that."""
    with contextlib.suppress(ValueError, TypeError):
        return int(annotation(job, BACKSTOP_ANNOTATION) or "") - BACKSTOP_SECONDS
    return None


def backstops_of(job: Mapping[str, Any]) -> frozenset[int]:
    """What a task has set as activeDeadlineSeconds of a job and of its pods, where the manifest had nothing less."""
    with contextlib.suppress(ValueError):
        seconds = int(str(annotation(job, BACKSTOP_ANNOTATION)))
        return frozenset({seconds, seconds + POD_DEADLINE_MARGIN})
    return frozenset()


def backstop(manifest: Mapping[str, Any], seconds: float, *, served: Served | None = None) -> Manifest:
    """Let the cluster end the job by itself after some time, in case no task is left to do it.

    A shorter deadline, or a cleanPodPolicy, of the manifest is kept. How it works: `ManifestForm.set_backstop`. The
    manifest is unchanged if it isn't known whether the cluster serves the field for it.

    :param seconds: from the job's start to its deadline.
    :param served: what the cluster serves. Default: None, it was not read, as for kinds without runtimes.
    """
    result: Manifest = plain(manifest)
    kind = kind_of(result.get("kind"))
    if served is None or kind.runtimes is None or served.supported:
        kind.form.set_backstop(result, seconds)
    return result


def deferral_timeout(deadline: float | None, now: float, padding: float) -> timedelta | None:
    """How long a task may be deferred; None for no limit.

    :param deadline: in epoch seconds.
    :param padding: seconds from the deadline to the end of the deferral.
    """
    return None if deadline is None else timedelta(seconds=max(deadline - now, 0) + padding)
