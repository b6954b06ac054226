"""Scenarios as data: what is created, what is done with it, what must be observed. README.md describes the language."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tables import table

Obj = dict[str, Any]

HERE = Path(__file__).parent
RUNTIME = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime"}
KINDS = {"pytorchjob": ("PyTorchJob", "pytorchReplicaSpecs"), "mpijob": ("MPIJob", "mpiReplicaSpecs")}
RUNTIME_KEYS = ("replicatedJobs", "failurePolicy", "successPolicy", "network", "ttlSecondsAfterFinished")
ROLES = ("Master", "Launcher", "Worker")
REPLICA_KEYS = ("restartPolicy",)
CONTAINER_NAMES = {"pytorchjob": "pytorch", "mpijob": "mpi"}


@dataclass(frozen=True)
class Scenario:
    """One behaviour; `recording` is the extract that shows it on a real cluster."""

    name: str
    title: str
    observed: str
    steps: tuple[Obj, ...]
    expect: Obj
    manifest: tuple[Obj, ...] = ()
    recorded_as: str = ""  # the name of its recording, if that is another
    api: str = "any"  # the version of MPIJob that the cluster must serve: any, v1 or v2beta1
    needs: str = ""  # what the cluster must have beyond the usual, in words: mpirun, trainer, torch
    gates: str = ""  # feature gates of the Trainer that must be on: the embedded cluster starts with them
    nodes: int = 0  # nodes of its own, {node} and {other}: for what happens to nodes
    alone: bool = False  # a fault switch of the embedded cluster that all would feel
    timeout: float = 60  # seconds for the expectations to come true after the last step
    hold: float = 1.5  # seconds for which they must then stay true
    differs: tuple[str, ...] = field(default=())  # what is otherwise on the embedded cluster on purpose, and why

    @property
    def recording(self) -> Path:
        return HERE / "recorded" / f"{self.recorded_as or self.name}.json"

    @property
    def capacity(self) -> set[str]:
        """The resources of its node that it sets."""
        patches = [step["body"] for step in self.steps if "/nodes/{node}/status" in step.get("http", "")]
        merged = {name for patch in patches if isinstance(patch, dict) for name in patch["status"]["capacity"]}
        paths = {operation["path"] for patch in patches if isinstance(patch, list) for operation in patch}
        return merged | {path.rpartition("/")[2].replace("~1", "/") for path in paths}

    @property
    def seconds(self) -> float:
        """How long it took when it was recorded."""
        return float(json.loads(self.recording.read_text())["seconds"])


def load(path: Path) -> list[Scenario]:
    found = []
    for name, data in table(path).items():
        manifest = tuple(expand(doc) for doc in data.pop("manifest", []))
        steps = tuple(expand_bodies(step) for step in data.pop("steps"))
        differs = tuple(data.pop("differs", ()))
        found.append(Scenario(name=name, manifest=manifest, steps=steps, differs=differs, **data))
    return found


def load_all() -> list[Scenario]:
    return [scenario for path in sorted((HERE / "scenarios").glob("*.yaml")) for scenario in load(path)]


def expand_bodies(step: Obj) -> Obj:
    body = step.get("body")
    return {**step, "body": expand(body)} if isinstance(body, dict) else step


def expand(doc: Obj) -> Obj:
    """The document that a short form stands for; a document with an apiVersion stands for itself."""
    for short, (kind, replicas_key) in KINDS.items():
        if short in doc:
            rest = {k: v for k, v in doc.items() if k not in (short, "api", "metadata", *ROLES)}
            roles = {
                role: replica(doc[role], CONTAINER_NAMES[short], role, doc.get("api", "v1"))
                for role in ROLES
                if role in doc
            }
            return {
                "apiVersion": f"kubeflow.org/{doc.get('api', 'v1')}",
                "kind": kind,
                "metadata": {"name": doc[short], **doc.get("metadata", {})},
                "spec": rest | {replicas_key: roles},
            }
    if "trainjob" in doc:
        return trainjob(doc)
    if "runtime" in doc and "apiVersion" not in doc:
        spec = {"mlPolicy": doc["mlPolicy"], "template": {"spec": {k: doc[k] for k in RUNTIME_KEYS if k in doc}}}
        return {**RUNTIME, "metadata": {"name": doc["runtime"]}, "spec": spec}
    if "pod" in doc and "apiVersion" not in doc:
        meta = {"name": doc["pod"], "labels": {"app": doc["pod"]}, **doc.get("metadata", {})}
        spec = pod_spec({k: v for k, v in doc.items() if k not in ("pod", "metadata")}, "main")
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    return doc


def trainjob(short: Obj) -> Obj:
    """Keys: runtime (of the namespace where it begins with ./), sh (the trainer's script); the rest is the spec's."""
    spec = {k: v for k, v in short.items() if k not in ("trainjob", "runtime", "sh", "metadata")}
    name = short["runtime"]
    spec["runtimeRef"] = {"name": name.removeprefix("./"), **({"kind": "TrainingRuntime"} if "./" in name else {})}
    if "sh" in short:
        spec["trainer"] = {**short.get("trainer", {}), "command": ["sh", "-c", short["sh"]]}
    meta = {"name": short["trainjob"], **short.get("metadata", {})}
    return {"apiVersion": RUNTIME["apiVersion"], "kind": "TrainJob", "metadata": meta, "spec": spec}


def replica(short: Obj, container: str, role: str, api: str) -> Obj:
    name = f"mpi-{role.lower()}" if api == "v2beta1" else container
    spec = {"replicas": short.get("replicas", 1)} | {k: short[k] for k in REPLICA_KEYS if k in short}
    return spec | {
        "template": {"spec": pod_spec({k: v for k, v in short.items() if k not in ("replicas", *REPLICA_KEYS)}, name)}
    }


def pod_spec(short: Obj, name: str) -> Obj:
    """Keys: sh or python (a script), command, container (more of it), init, beside, near; the rest is the pod's."""
    own = ("sh", "python", "command", "container", "init", "beside", "near")
    spec = {k: v for k, v in short.items() if k not in own}
    if "near" in short:
        spec["affinity"] = near(short["near"])
    spec.setdefault("terminationGracePeriodSeconds", 1)
    if "init" in short:
        spec["initContainers"] = [container_of(c, n) for n, c in short["init"].items()]
    main = container_of(
        {**short.get("container", {}), **{k: short[k] for k in ("sh", "python", "command") if k in short}}, name
    )
    spec["containers"] = [main, *(container_of(c, n) for n, c in short.get("beside", {}).items())]
    return spec


def near(node: str) -> Obj:
    """Affinity to the scenario's own nodes that prefers one of them."""

    def one_of(*nodes: str) -> Obj:
        return {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [*nodes]}]}

    preferred = {"weight": 100, "preference": one_of(node)}
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [one_of("{node}", "{other}")]},
            "preferredDuringSchedulingIgnoredDuringExecution": [preferred],
        }
    }


def container_of(short: Obj, name: str) -> Obj:
    commands = {"sh": ["sh", "-c"], "python": ["python3", "-c"]}
    made: Obj = {"name": name, "image": "{image}", "imagePullPolicy": "IfNotPresent"}
    for script, command in commands.items():
        if script in short:
            made["command"] = [*command, short[script]]
    return made | {k: v for k, v in short.items() if k not in commands}
