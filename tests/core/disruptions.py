"""Replays recordings of disruptions: what is known of a job and its pods after each change.

`recordings/disruptions` has changes of recordings 100 to 107 of a real cluster (Kubernetes 1.36): jobs without pod
templates, pods with the fields that decisions read. Those of endless loops are cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.core.diagnosis.crash_loop import RestartHistory
from airflow_provider_ktrain.core.diagnosis.evidence import Evidence, make_evidence
from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.state.pods.pod_history import PodHistory
from airflow_provider_ktrain.core.state.pods.stopped_pods import pods_until_end
from airflow_provider_ktrain.core.state.status import Phase, phase_of

FOLDER = Path(__file__).parent / "recordings" / "disruptions"
NOW = datetime(2026, 11, 23, 16, tzinfo=UTC)
Object = dict[str, Any]


@dataclass
class Known:
    """What is known after a change.

    :param t: seconds since the beginning of the recording.
    :param warnings: about restarts, all until now.
    """

    t: float
    job: Object
    pods: PodHistory
    restarts: RestartHistory
    warnings: list[str]

    @property
    def kind(self) -> Kind:
        return kind_of(self.job["kind"])

    @property
    def phase(self) -> Phase:
        return phase_of(self.job, self.pods.live)

    @property
    def evidence(self) -> Evidence:
        return make_evidence(self.job, pods_until_end(self.kind, self.job, self.pods.all))

    @property
    def doubts(self) -> list[str]:
        return [one.text for one in self.pods.stopped(self.job)]


def changes(name: str, folder: Path = FOLDER) -> list[Object]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def replay(recorded: list[Object], *, handover: bool = False) -> Iterator[Known]:
    """What is known after each change of the job or its pods, from when the job is known.

    :param handover: another process takes over after each change.
    """
    known: Known | None = None
    for change in recorded:
        obj = change["object"]
        if change["watch"] != "pods":
            if known is None:
                kind = kind_of(obj["kind"])
                known = Known(0, obj, PodHistory(kind), RestartHistory(kind), [])
            known.job = obj
        elif known is not None:
            uid = obj["metadata"]["uid"]
            if change["type"] == "DELETED":
                known.pods.mark_deleted(obj)
                restarts = known.restarts.mark_deleted(obj)
            else:
                known.pods.update({uid: obj}, (), NOW)
                restarts = known.restarts.update(known.job, {uid: obj})
            known.warnings += [restart.describe(None) for restart in restarts]
        if known is not None:
            known.t = change["t"]
            yield known
            if handover:
                live = {pod["metadata"]["uid"]: pod for pod in known.pods.live}
                known.pods = PodHistory(known.kind, json.loads(json.dumps(known.pods.handover(known.job, NOW))))
                known.pods.update(live, (), NOW)


def until(name: str, holds: Callable[[Known], object], **how: Any) -> Known:
    """What is known when something holds first."""
    return next(known for known in replay(changes(name), **how) if holds(known))


def at_the_end(name: str, **how: Any) -> Known:
    """What is known when the job has ended by its status."""
    return until(name, lambda known: known.phase.ended, **how)
