"""The controllers against recordings of a real cluster: what users and kubelet did is replayed, and compared."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.controller_play import NAMESPACE, Play
from ktrain_embedded.controllers.batchjob import JobController
from ktrain_embedded.controllers.common import timestamp
from ktrain_embedded.controllers.mpijob_v1 import MPIJobV1Controller
from ktrain_embedded.controllers.mpijob_v2beta1 import MPIJobV2Controller
from ktrain_embedded.controllers.pytorchjob import PyTorchJobController
from ktrain_embedded.objects import resources as r

DATA = Path(__file__).parent / "data" / "recordings"
RESOURCES = {
    ("kubeflow.org/v1", "PyTorchJob"): r.PYTORCHJOB,
    ("kubeflow.org/v1", "MPIJob"): r.MPIJOB_V1,
    ("kubeflow.org/v2beta1", "MPIJob"): r.MPIJOB_V2BETA1,
}


# the launcher's pod is gone, or not yet, when mpi-operator looks for the reason of its failure
RACES = {
    "32d-mpi-launcher-backoff-0": (
        "BackoffLimitExceeded{}Job has reached the specified backoff limit",
        "BackoffLimitExceeded/{}Job has reached the specified backoff limit: ",
    ),
}
# Running and Restarting take turns, as Go's maps are walked: there are more turns in the recording
FLAPPING = {"20-pt-pod-deleted-onfailure"}


class Replay(Play):
    """A recording played against the controllers: the test is the user and the kubelet."""

    def __init__(self, recording: dict[str, Any]) -> None:
        created = [s["create"] for s in recording["steps"] if "create" in s]
        self.resource = RESOURCES[created[0]["apiVersion"], created[0]["kind"]]
        mpijob = MPIJobV2Controller if self.resource == r.MPIJOB_V2BETA1 else MPIJobV1Controller
        kinds = (PyTorchJobController, mpijob, JobController)
        mpi_api = "v2beta1" if self.resource == r.MPIJOB_V2BETA1 else "v1"
        super().__init__(*kinds, mpi_api=mpi_api)
        whole = float(int(self.time))
        self.time = whole + recording["began"]
        self.statuses: defaultdict[str, list[Any]] = defaultdict(list)
        self.pods: dict[str, Any] = {}
        self.made: list[tuple[str, str]] = []  # generateName and name
        self.configs: defaultdict[str, list[Any]] = defaultdict(list)
        self.launchers: defaultdict[str, list[Any]] = defaultdict(list)
        self.services: dict[str, Any] = {}
        self.store.subscribe(self.resource, self._job_changed)
        self.store.subscribe(r.POD, self._pod_changed)
        self.store.subscribe(r.CONFIG_MAP, lambda change: self._config_changed(change.object))
        self.store.subscribe(r.BATCH_JOB, self._launcher_changed)
        self.store.subscribe(
            r.SERVICE, lambda change: self.services.update({change.object["metadata"]["name"]: change.object})
        )
        self.whole, self.begin = whole, self.time
        for step in recording["steps"]:
            self.wait(self.begin + step["t"] - self.time)
            self.play(step)
            self.settle()
        self.wait(2)  # for what the Job controller gathers

    def _job_changed(self, change: Any) -> None:
        status = change.object.get("status", {})
        conditions = [f"{c['type']}={c['status']}/{c['reason']}/{c['message']}" for c in status.get("conditions", ())]
        counts = status.get("replicaStatuses", {})
        seen = [conditions, {t: {k: v for k, v in s.items() if k != "selector"} for t, s in counts.items()}]
        statuses = self.statuses[change.object["metadata"]["name"]]
        if status and change.type == "MODIFIED" and statuses[-1:] != [seen]:
            statuses.append(seen)

    def _pod_changed(self, change: Any) -> None:
        meta = change.object["metadata"]
        if change.type == "ADDED":
            self.pods[meta["name"]] = change.object
            self.made.append((meta.get("generateName", ""), meta["name"]))

    def _config_changed(self, config: Any) -> None:
        seen = self.configs[config["metadata"]["name"]]
        if seen[-1:] != [config["data"]]:
            seen.append(config["data"])

    def _launcher_changed(self, change: Any) -> None:
        status = change.object.get("status", {})
        dropped = ("startTime", "completionTime", "uncountedTerminatedPods")
        kept = {k: v for k, v in status.items() if k not in dropped}
        kept["conditions"] = [
            f"{c['type']}={c['status']}/{c['reason']}/{c['message']}" for c in kept.get("conditions", ())
        ]
        seen = self.launchers[change.object["metadata"]["name"]]
        if change.type != "DELETED" and seen[-1:] != [kept]:
            seen.append(kept)

    def name(self, key: str) -> str:
        """A pod's name; `prefix-#n` is the n-th that has a generated name."""
        prefix, _, number = key.partition("#")
        return [name for generated, name in self.made if generated == prefix][int(number)] if number else key

    def play(self, step: dict[str, Any]) -> None:
        if "create" in step:
            self.create(self.resource, step["create"])
        elif "spec" in step:
            job = self.store.get(self.resource, NAMESPACE, step["spec"])
            self.store.update(self.resource, {**job, "spec": step["value"]})
        elif "delete" in step:
            self.store.delete(self.resource, NAMESPACE, step["delete"], propagation=step["propagation"])
        elif "delete_pod" in step:
            self.store.delete(r.POD, NAMESPACE, self.name(step["delete_pod"]), grace=step["grace"])
        elif "pod" in step:
            status = {"conditions": [], **step["status"]}
            for container in status.get("containerStatuses", []):
                ended = container["state"].get("terminated", {})
                if "finishedAt" in ended:
                    ended["finishedAt"] = timestamp(self.whole + ended["finishedAt"])
            self.status(self.name(step["pod"]), **status)
        else:  # the kubelet lets a pod go that a controller or the user has deleted
            pod = self.store.find(r.POD, NAMESPACE, self.name(step["gone"]))
            if pod and "deletionTimestamp" in pod["metadata"]:
                self.store.delete(r.POD, NAMESPACE, pod["metadata"]["name"], grace=0)


def recordings() -> list[str]:
    return sorted(path.stem for path in DATA.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text().replace("NAMESPACE", NAMESPACE))
    if name in RACES:
        text = json.dumps(recording["jobs"])
        for separator in "/", " ":
            ours, theirs = (wording.format(separator) for wording in RACES[name])
            text = text.replace(ours, theirs)
        recording["jobs"] = json.loads(text)
    return recording


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", recordings())
def test_status_matches_the_recordings(name: str) -> None:
    recording = load(name)
    replay = Replay(recording)
    pods = replay.store.list(r.POD, NAMESPACE)
    left = {p["metadata"]["name"] for p in pods if "deletionTimestamp" not in p["metadata"]}
    assert left == {replay.name(key) for key in recording["left"]}
    for job, expected in recording["jobs"].items():
        seen, recorded = replay.statuses[job], expected["statuses"]
        assert seen[-1:] == recorded[-1:]
        assert (replay.store.find(replay.resource, NAMESPACE, job) is None) == expected.get("gone", False)
        if name not in FLAPPING:
            assert conditions(seen) == conditions(recorded)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", recordings())
def test_objects_match_the_recordings(name: str) -> None:
    recording = load(name)
    replay = Replay(recording)
    for key, expected in recording["objects"].items():
        kind, _, rest = key.rpartition("/")
        seen = OBJECTS[kind or "pods"](replay, rest)
        if kind == "configmaps":  # changes that came together were written together
            seen["data"] = [data for data in seen["data"] if data in expected["data"]]
        assert seen == expected


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", recordings())
def test_events_match_the_recordings(name: str) -> None:
    """What a recording lacks is what the operator had no budget left for: it reconciles more often than we do."""
    recording = load(name)
    replay = Replay(recording)
    for job, expected in recording["jobs"].items():
        seen = {
            f"{e['type']} {e['reason']} {e['message']}"
            for e in replay.seen
            if (e["involvedObject"]["name"], e["involvedObject"]["kind"]) == (job, expected["kind"])
        }
        assert set(expected["events"]) <= seen
        assert not expected["allEvents"] or seen <= set(expected["events"])


def pod(replay: Replay, key: str) -> dict[str, Any]:
    pod = replay.pods[replay.name(key)]
    spec, meta = pod["spec"], pod["metadata"]
    own = meta["ownerReferences"][0]
    containers = [
        {
            **{k: c[k] for k in ("name", "env", "ports") if k in c},
            "volumeMounts": [m for m in c.get("volumeMounts", ()) if not m["name"].startswith("kube-api")],
        }
        for c in spec["containers"]
    ]
    optional = {k: spec[k] for k in ("restartPolicy", "hostname", "subdomain", "dnsConfig") if k in spec}
    account = spec["serviceAccountName"]
    return {
        "labels": {k: v for k, v in meta["labels"].items() if "controller-uid" not in k},
        "owner": f"{own['kind']}/{own['name']}",
        "containers": containers,
        "initContainers": [c["name"] for c in spec.get("initContainers", ())],
        "volumes": [v for v in spec.get("volumes", ()) if not v["name"].startswith("kube-api")],
        **optional,
        **({"serviceAccountName": account} if account != "default" else {}),
    }


def service(replay: Replay, name: str) -> dict[str, Any]:
    spec = replay.services[name]["spec"]
    return {k: spec[k] for k in ("selector", "ports", "clusterIP", "publishNotReadyAddresses") if k in spec}


def fields(resource: r.Resource, *names: str) -> Callable[[Replay, str], dict[str, Any]]:
    def get(replay: Replay, name: str) -> dict[str, Any]:
        obj = replay.store.get(resource, NAMESPACE, name)
        return {field: obj[field] for field in names}

    return get


OBJECTS: dict[str, Callable[[Replay, str], Any]] = {
    "pods": pod,
    "services": service,
    "configmaps": lambda replay, name: {"data": replay.configs[name]},
    "jobs": lambda replay, name: {"statuses": replay.launchers[name]},
    "roles": fields(r.ROLE, "rules"),
    "rolebindings": fields(r.ROLE_BINDING, "subjects", "roleRef"),
    "serviceaccounts": fields(r.SERVICE_ACCOUNT),
    "secrets": fields(r.SECRET),
    "horizontalpodautoscalers": fields(r.HPA, "spec"),
}


def conditions(statuses: list[Any]) -> list[Any]:
    """The sets of conditions that followed each other."""
    seen = [s[0] for s in statuses]
    return [c for i, c in enumerate(seen) if i == 0 or c != seen[i - 1]]
