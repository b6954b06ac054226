"""Extracts from recordings how the pods of succeeded jobs ended, for tests/core/recorded_ends.py.

    python scripts/recorded_ends.py ../shared/recordings tests/core/recordings/ends.json

Of each job whose status became a success in recordings 100 to 113, it keeps the pods on which that depends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.core.kinds import KINDS, kind_of

Object = dict[str, Any]


def main(recordings: Path, to: Path) -> None:
    """Write the extract of all recordings."""
    found = {}
    for folder in sorted(recordings.iterdir()):
        if (number := folder.name[:3]).isdigit() and 100 <= int(number) <= 113 and (ends := _extract(folder)):
            found[folder.name] = ends
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(ends, separators=(',', ':'))}" for name, ends in found.items())
    to.write_text(f"{{\n{rows}\n}}\n")


def _extract(folder: Path) -> Object | None:
    """The job, its pods by uid, and their changes in order; None if the job has not succeeded."""
    changes = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    jobs = [change["object"] for change in changes if change["object"].get("kind") in KINDS]
    if not any(c["type"] in ("Succeeded", "Complete") and c["status"] == "True" for c in _conditions(jobs)):
        return None
    kind, job = kind_of(jobs[0]["kind"]), jobs[-1]
    pods: Object = {}
    rows: list[list[Any]] = []
    last: dict[str, list[Any]] = {}
    for change in changes:
        obj = change["object"]
        meta, status, key = obj["metadata"], obj.get("status") or {}, obj["metadata"]["uid"]
        if obj.get("kind") in KINDS:
            true = [c for c in status.get("conditions") or () if c["status"] == "True"]
            row: list[Any] = [
                [c["type"], c["lastTransitionTime"], c["message"] if c["type"] == "Restarting" else ""] for c in true
            ]
        elif change["watch"] == "pods" and kind.completes(job, *kind.role_of(obj)):
            labels = {name: value for name, value in meta["labels"].items() if name in LABELS}
            pods.setdefault(key, {
                "name": meta["name"], "creationTimestamp": meta["creationTimestamp"], "labels": labels,
                "containers": [c["name"] for c in obj["spec"]["containers"]],
                "grace": obj["spec"]["terminationGracePeriodSeconds"],
            })  # fmt: skip
            conditions = [c for c in status.get("conditions") or () if c["type"] == "DisruptionTarget"]
            row = [
                change["type"] == "DELETED", status.get("phase"), meta.get("deletionTimestamp"),
                meta.get("deletionGracePeriodSeconds"), meta.get("generation"), status.get("observedGeneration"),
                [[c["status"], c["reason"], c["lastTransitionTime"]] for c in conditions],
                {c["name"]: _state(c) for c in status.get("containerStatuses") or ()},
            ]  # fmt: skip
        else:
            continue
        if last.get(key) != row:
            last[key] = row
            rows.append([int(meta["resourceVersion"]), key if change["watch"] == "pods" else "", *row])
    rows.sort(key=lambda row: row[0])
    spec = {name: _roles(value) for name, value in job["spec"].items() if name in SPEC}
    meta = {name: job["metadata"][name] for name in ("name", "uid", "creationTimestamp")}
    return {"kind": kind.name, "metadata": meta, "spec": spec, "pods": pods, "changes": rows}


LABELS = (
    "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index", "training.kubeflow.org/job-role",
    "jobset.sigs.k8s.io/replicatedjob-name", "batch.kubernetes.io/job-completion-index",
)  # fmt: skip
SPEC = ("pytorchReplicaSpecs", "mpiReplicaSpecs", "elasticPolicy", "trainer")


def _conditions(jobs: list[Object]) -> list[Object]:
    return [condition for job in jobs for condition in (job.get("status") or {}).get("conditions") or ()]


def _roles(value: Object) -> Object:
    """Replica specs without what isn't about the number of pods."""
    kept = ("replicas", "restartPolicy", "minReplicas", "maxReplicas", "numNodes")
    return {
        name: {key: of[key] for key in kept if key in of} if isinstance(of, dict) else of
        for name, of in value.items()
        if isinstance(of, dict) or name in kept
    }


def _state(container: Object) -> list[Any]:
    ((name, of),) = (container.get("state") or {"waiting": {}}).items()
    return [name, of.get("exitCode"), of.get("reason"), of.get("finishedAt")] if name == "terminated" else [name]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
