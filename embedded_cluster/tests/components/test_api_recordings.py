"""The API server answers as a real one did: requests recorded on a real cluster, sent again, answers compared.

Resource versions, uids, made-up names, times and tokens differ; what is learned of them from one answer is put into the
requests that follow. `recordings/` holds each request with its answer, without managedFields.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from components.raw_client import Answer, Client, eventually
from ktrain_embedded.cluster import EmbeddedCluster

RECORDINGS = Path(__file__).parent / "recordings"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
UNTOLD = ("resourceVersion", "uid", "nodeName")

#: Answers that differ on purpose, or by what only a real server has; where a status is given that is what we answer.
DIFFERENT: dict[str, tuple[int, str]] = {
    "server-side apply creates": (415, "no server-side apply"),
    "server-side apply again, same": (415, "no server-side apply"),
    "server-side apply of another manager: conflict": (415, "no server-side apply"),
    "the same with force": (415, "no server-side apply"),
    "server-side apply without fieldManager": (415, "no server-side apply"),
    "server-side apply with an unknown field, Strict": (415, "no server-side apply"),
    "server-side apply with an unknown field, default": (415, "no server-side apply"),
    "delete with no body": (404, "what server-side apply made is not there"),
    "patch of an immutable field": (422, "the message has no diff of Go structs"),
    "jobs as protobuf": (406, "the Status comes as JSON"),
    "version": (200, "versions are our own"),
    "version, anonymous": (200, "versions are our own"),
    "discovery": (200, "fewer kinds are served"),
    "continue token that is nonsense": (400, "the message does not name the wrong byte"),
    "another version in the body": (400, "no warning beside the refusal"),
    "strategic merge patch on a custom resource": (415, "server-side apply is not among what is accepted"),
    "patch with Content-Type application/json": (415, "server-side apply is not among what is accepted"),
    "events fieldSelector involvedObject": (200, "our operator is quicker to tell"),
    "watch of all namespaces": (200, "other namespaces hold other jobs"),
    "what may I do": (201, "no OpenID discovery"),
    "merge patch with an unknown field, Strict": (
        422,
        "the message contains the patched object with its managedFields",
    ),
}


def steps(scenario: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDINGS / f"{scenario}.jsonl").read_text().splitlines()]


class Replay:
    """Sends recorded requests in a namespace of its own."""

    def __init__(self, cluster: EmbeddedCluster, namespace: str) -> None:
        self.namespace = namespace
        self.admin = Client(cluster)
        self.users = {"admin": self.admin, "badtoken": Client(cluster, "nonsense"), "anonymous": Client(cluster, "")}
        self.learned: dict[str, str] = {}
        self.admin("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        path = f"/api/v1/namespaces/{namespace}"
        for made in ("serviceaccounts/default", "configmaps/kube-root-ca.crt"):
            eventually(lambda made=made: self.admin("GET", f"{path}/{made}").status == 200)

    def account(self, cluster: EmbeddedCluster, name: str) -> None:
        path = "/api/v1/namespaces/default/serviceaccounts"
        self.admin("POST", path, {"metadata": {"name": name}})
        token = self.admin("POST", f"{path}/{name}/token", {"spec": {}}).json["status"]["token"]
        self.users[name] = Client(cluster, token)

    def fill(self, value: Any) -> Any:
        """A recorded value with our namespace and what was learned."""
        text = json.dumps(value)
        for recorded, ours in {"NS": self.namespace, **self.learned}.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(recorded)}(?![\w.-])", ours, text)
        # nothing comes after the first second of a watch but bookmarks, at the end
        return json.loads(re.sub(r"timeoutSeconds=[0246]\b", "timeoutSeconds=1", text))

    def send(self, step: dict[str, Any]) -> Answer:
        method, path = self.fill(step["request"]).split(" ", 1)
        client = self.users[step.get("as", "admin")]
        return client(method, path, self.fill(step.get("sent")), step.get("headers"))

    def learn(self, recorded: Any, ours: Any) -> None:
        """Remember what stands for a recorded version, uid or made-up name."""
        if isinstance(recorded, dict) and isinstance(ours, dict):
            for key in recorded.keys() & ours.keys():
                if key in ("resourceVersion", "uid", "name", "continue") and isinstance(recorded[key], str):
                    if recorded[key] and len(recorded[key]) > 3:
                        self.learned[recorded[key]] = str(ours[key])
                else:
                    self.learn(recorded[key], ours[key])
        elif isinstance(recorded, list) and isinstance(ours, list):
            for a, b in zip(recorded, ours, strict=False):
                self.learn(a, b)

    def shown(self, value: Any) -> Any:
        """A value as it is compared: without times, and without what controllers and nodes add in their own time."""
        if isinstance(value, dict):
            shown = {k: self.shown(v) for k, v in value.items() if k not in UNTOLD and not _live(k, v)}
            return {**shown, "continue": "TOKEN"} if shown.get("continue") else shown
        if isinstance(value, list):
            return [self.shown(v) for v in value]
        if not isinstance(value, str):
            return value
        text = "CA" if "BEGIN CERT" in value else TIME.sub("TIME", value).replace(self.namespace, "NS")
        text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UID", text)
        text = re.sub(r"kube-api-access-\w{5}", "kube-api-access", re.sub(r"^gen-\w{5}$", "gen", text))
        return re.sub(r"(record \(|current: |version: )\d+( \(\d+\))?", r"\1N", text)


def _live(key: str, value: Any) -> bool:
    """The status of a job or pod, which changes by itself."""
    return key == "status" and isinstance(value, dict) and bool(value.keys() & {"conditions", "phase"})


def warnings(answer: Answer) -> list[list[str]]:
    return [[k, v] for k, v in answer.headers if k in ("Warning", "Retry-After")]


def compare_status(replay: Replay, step: dict[str, Any], answer: Answer) -> None:
    assert answer.status == DIFFERENT[step["name"]][0], answer.body


def compare(replay: Replay, step: dict[str, Any], answer: Answer) -> None:
    assert answer.status == step["status"], answer.body
    body = step.get("body")
    ours = answer.body if body is not None else None
    if isinstance(body, dict) and body.get("kind") == "Table":
        body, ours = table(body), table(answer.json)
    assert replay.shown(ours) == replay.shown(body)
    assert warnings(answer) == [h for h in step.get("told", ()) if h[0] in ("Warning", "Retry-After")]
    replay.learn(body, ours)


def table(body: dict[str, Any]) -> dict[str, Any]:
    """Columns, and cells but the age."""
    return {"columns": body["columnDefinitions"], "cells": [row["cells"][:1] for row in body["rows"]]}


def compare_stream(replay: Replay, step: dict[str, Any], answer: Answer) -> None:
    assert answer.status == step["status"]
    ours = [json.loads(line) for line in answer.data.splitlines()]
    replay.learn(step["stream"], ours)
    if step["status"] != 200:
        assert replay.shown(ours) == replay.shown(step["stream"])
        return
    assert events(ours) == events(step["stream"])


def events(lines: list[Any]) -> list[Any]:
    """Type, name and what else identifies an event; later bookmarks and changes of status count for nothing."""
    seen: list[Any] = []
    for line in lines:
        obj = line.get("object", line)
        if line.get("type") == "BOOKMARK":
            mark = ["BOOKMARK", obj["kind"], obj["metadata"].get("annotations")]
            seen += [] if seen and seen[-1][0] == "BOOKMARK" else [mark]
        elif obj.get("kind") == "Table":
            seen.append([line["type"], obj["columnDefinitions"] is None, [row["cells"][0] for row in obj["rows"]]])
        elif obj.get("kind") == "Status":  # of an ERROR
            seen.append([line.get("type"), re.sub(r"\d+", "N", obj["message"]), obj["reason"], obj["code"]])
        elif line.get("type") != "MODIFIED":
            seen.append([line.get("type"), obj["kind"], obj["metadata"]["name"], obj["metadata"].get("labels")])
    return seen


SCENARIOS = (
    "21-pt-rejected", "28b-http-expired", "29-http-write", "29b-http-write-pods", "30-http-rbac",
    pytest.param("28-http-watch", marks=pytest.mark.thorough),  # each of its watches lasts a second
)  # fmt: skip
#: Watches that ran beside other steps, for which there are tests of their own.
BESIDE = ("watch fieldSelector metadata.name: create, change, delete", "watch with bookmarks, timeoutSeconds 70")


@pytest.fixture
def replay(cluster: EmbeddedCluster, scenario: str) -> Replay:
    """A namespace for the scenario, and its accounts: one without rights, and a viewer of pods."""
    replay = Replay(cluster, scenario)
    for name in ("nobody", "viewer"):
        replay.account(cluster, name)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    role, subjects = {"kind": "Role", "name": "viewer"}, [{"kind": "ServiceAccount", "name": "viewer"}]
    rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    replay.admin("POST", f"{rbac}/roles", {"metadata": {"name": "viewer"}, "rules": rules})
    binding = {"metadata": {"name": "viewer"}, "roleRef": role, "subjects": subjects}
    replay.admin("POST", f"{rbac}/rolebindings", binding)
    return replay


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_answers_match_the_recordings(cluster: EmbeddedCluster, replay: Replay, scenario: str) -> None:
    """Steps of a scenario build on each other: each is sent once, in order."""
    failures = []
    for step in steps(scenario):
        if step["name"] in BESIDE:
            continue
        if step["name"] == "continue token after 640 s":
            cluster.admin("expire")
        if step["name"] == "delete with grace period 3":  # of a pod that runs, or it would be gone at once
            eventually(
                lambda: (
                    replay.admin("GET", f"/api/v1/namespaces/{scenario}/pods/p").json["status"]["phase"] == "Running"
                )
            )
        try:
            play(replay, step)
        except AssertionError as e:
            failures.append(f"{step['name']}: {step['request']}\n{e}")
    assert not failures, "\n\n".join(failures)


def play(replay: Replay, step: dict[str, Any]) -> None:
    """Send a step and compare; what only reads is sent again until controllers have done their part."""
    check = compare_status if step["name"] in DIFFERENT else compare_stream if "stream" in step else compare
    answer = replay.send(step)
    if step["request"].startswith("GET ") and "stream" not in step:
        eventually(lambda: check(replay, step, replay.send(step)) or True)
    else:
        check(replay, step, answer)
