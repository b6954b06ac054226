"""Replays of recorded scenarios: Kueue's writes in recorded order, and the operators of the cluster for the rest."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import TestCluster

from . import library
from .api import MERGE, Api, path_of
from .conftest import Replay, with_test_image
from .conftest import driver as driver_of
from .driver import GRACE, Driver, ReplayError
from .recording import Actor, Obj, Recording, Step, load

ONE_OF_EACH_KIND = ("70e-kueue-delete-queued", "71-kueue-mpijob", "72b-kueue-trainjob-preemption")
PAUSED = "74c-kueue-workload-inactive"


@pytest.fixture
def raw(kueue: TestCluster) -> Api:
    return Api(kueue.kubeconfig)


def steps(recording: Recording, actor: Actor, verb: str = "") -> list[Step]:
    return [step for step in recording.steps if step.actor is actor and verb in ("", step.verb)]


def test_writes_of_client_and_kueue_are_distinguished() -> None:
    recording = load(library.KEPT / PAUSED)
    titles = [step.title for step in steps(recording, Actor.CLIENT) if step.verb != "create"]
    assert titles == ["inactive", "queue changed while suspended", "active"]  # rejected writes are omitted
    suspended = [step.body["spec"]["runPolicy"]["suspend"] for step in steps(recording, Actor.KUEUE, "job")]
    assert suspended == [False, True, False]
    assert not steps(recording, Actor.KUEUE, "spec")


def test_kueue_removes_only_what_it_added_to_pod_templates() -> None:
    stopped = steps(load(library.KEPT / PAUSED), Actor.KUEUE, "job")[1]
    labels = stopped.body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["metadata"]["labels"]
    assert labels == dict.fromkeys(labels)  # each label is set to null; `labels` itself isn't
    assert all(label.startswith("kueue.x-k8s.io/") for label in labels)


def test_other_objects_and_removed_pods_of_a_scenario_are_steps_of_its_client(tmp_path: Path) -> None:
    """A TrainingRuntime beside the job, and what the recorder did to pods."""
    folder = Path(shutil.copytree(library.KEPT / PAUSED, tmp_path / PAUSED))
    pods, runtimes = "/api/v1/namespaces/n/pods", "/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainingruntimes"
    writes: list[tuple[str, str, Obj | None]] = [
        ("POST", runtimes, {"metadata": {"name": "own"}}),
        ("POST", f"{pods}/train-master-0/eviction", {"kind": "Eviction"}),
        ("DELETE", f"{pods}/train-worker-0", None),
        ("POST", f"{pods}?dryRun=All", {"metadata": {"name": "tried"}}),
    ]
    with (folder / "http.jsonl").open("a") as requests:
        for number, (method, path, body) in enumerate(writes):
            request = {"method": method, "path": path, "body": body}
            record = {"t": float(number), "name": path, "status": 201, "request": request, "body": {}}
            requests.write(f"{json.dumps(record)}\n")
    added = [step for step in steps(load(folder), Actor.CLIENT) if step.about[0] in ("pods", "trainingruntimes")]
    assert [(step.verb, "/".join(step.about)) for step in added] == [
        ("create", "trainingruntimes/own"), ("evict", "pods/train-master-0"), ("delete", "pods/train-worker-0"),
    ]  # fmt: skip
    assert path_of("trainingruntimes", "other") == runtimes.replace("/n/", "/other/")


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_recorded_scenario_is_reproduced(replay: Replay, raw: Api, name: str) -> None:
    with replay(name) as driver:
        driver.finish()
        assert finished(raw, driver) == expected(library.recording(name))


def finished(api: Api, driver: Driver) -> dict[str, str]:
    """The outcome of each Workload's job, by the recorded name of the Workload."""
    found = {}
    for step in driver.done:
        if step.about[0] == "workloads" and step.verb == "create":
            obj = api.find(path_of("workloads", driver.namespace, driver.names.workload(step.about[1])))
            found[step.about[1]] = outcome(obj or {})
    return found


def expected(recording: Recording) -> dict[str, str]:
    found = {}
    for step in recording.steps:
        if step.about[0] == "workloads" and step.verb in ("create", "delete"):
            found[step.about[1]] = ""
        elif step.about[0] == "workloads" and step.verb == "status":
            found[step.about[1]] = outcome({"status": step.body})
    return found


def outcome(workload: Obj) -> str:
    conditions = workload.get("status", {}).get("conditions") or ()
    return next((c["reason"] for c in conditions if c["type"] == "Finished"), "")


def test_replay_waits_for_the_writes_of_the_test(replay: Replay, raw: Api) -> None:
    """The test makes each write that the recorded client made to the job."""
    with replay(PAUSED, ours={"train": None}) as driver:
        submit(raw, driver, "mine-1")
        job = path_of("pytorchjobs", driver.namespace, "mine-1")
        driver.until(lambda: condition(raw, job, "Running"))
        (found,) = raw.request("GET", path_of("workloads", driver.namespace))["items"]
        assert found["metadata"]["name"].startswith("pytorchjob-mine-1-")
        assert found["metadata"]["ownerReferences"][0]["uid"] == raw.request("GET", job)["metadata"]["uid"]
        assert "inactive" not in [step.title for step in driver.done]
        workload = path_of("workloads", driver.namespace, found["metadata"]["name"])
        raw.request("PATCH", workload, {"spec": {"active": False}}, MERGE)
        driver.wait_for("inactive")
        driver.until(lambda: condition(raw, job, "Suspended"))
        raw.request("PATCH", job, {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "other"}}}, MERGE)
        driver.wait_for("queue changed while suspended")
        raw.request("PATCH", workload, {"spec": {"active": True}}, MERGE)


def test_replay_fails_without_the_write_of_the_test(kueue: TestCluster) -> None:
    """It fails GRACE seconds after its recorded length."""
    short = replace(library.recording(PAUSED), seconds=2 - GRACE)
    awaited = "not within 2 s: 'create': client create pytorchjobs/train"
    with pytest.raises(ReplayError, match=awaited), driver_of(kueue.kubeconfig, short, ours={"train": None}):
        pass


def submit(api: Api, driver: Driver, name: str) -> None:
    """Create the recorded job with another name, as a test of the provider would."""
    created = next(s for s in steps(library.recording(PAUSED), Actor.CLIENT, "create") if s.about[0] == "pytorchjobs")
    job = with_test_image(created.body)
    job["metadata"]["name"] = name
    driver.until(lambda: any(s.about == ("localqueues", "other") for s in driver.done))
    api.request("POST", path_of("pytorchjobs", driver.namespace), job)


def condition(api: Api, path: str, type_: str) -> bool:
    obj: Any = api.find(path) or {}
    return any(c["type"] == type_ and c["status"] == "True" for c in obj.get("status", {}).get("conditions") or ())
