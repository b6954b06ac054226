"""What was observed of a scenario, in a form that two clusters can share.

A cluster shows itself as a stream of changes, `{"watch": "pods", "type": "MODIFIED", "object": {...}}`, and as answers
to requests. `observe` and `answer` reduce both to what does not depend on the cluster at hand: no uids, versions,
addresses, times or names of nodes; texts in place of trees, so that an expectation is a line that one can read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Obj = dict[str, Any]

# what every namespace has, and what comes and goes on its own
UNREMARKABLE = {"configmaps/kube-root-ca.crt", "configmaps/openshift-service-ca.crt", "serviceaccounts/default"}
# waiting without a cause for concern
STARTING = {"ContainerCreating", "PodInitializing"}
JOBS = {"pytorchjobs", "mpijobs", "trainjobs", "jobsets", "jobs"}
PLAIN = re.compile(r"^[\w.:/{}<>-]+$")

VOLATILE: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<uid>"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), "<time>"),
    (re.compile(r"containerd://[0-9a-f]+"), "<container>"),
    (re.compile(r"\b(\d{1,3}\.){3}\d{1,3}(:\d+)?\b"), "<address>"),
    (re.compile(r"(?<=-launcher-)[a-z0-9]{5}(?![a-z0-9])"), "<random>"),
    (re.compile(r"(?<=-\d-\d-)[a-z0-9]{5}(?![a-z0-9])"), "<random>"),  # pods of Indexed Jobs
    (re.compile(r"\b[0-9a-f]{40}\b"), "<hash>"),
    (re.compile(r"kube-api-access-\w{5}\b"), "<token volume>"),
    (re.compile(r"((.)\2{99,})"), lambda found: f"<{len(found[1])} x {found[2]}>"),
]


def scrubber(names: Mapping[str, str]) -> Callable[[Any], Any]:
    """A function that replaces names of this run (text -> placeholder) and all that changes with each run."""
    known = sorted(names.items(), key=lambda pair: -len(pair[0]))

    def scrub(value: Any) -> Any:
        if isinstance(value, dict):
            return {scrub(k): scrub(v) for k, v in value.items() if k != "managedFields"}
        if isinstance(value, list):
            return [scrub(v) for v in value]
        if not isinstance(value, str):
            return value
        for text, name in known:
            value = value.replace(text, name)
        for pattern, replacement in VOLATILE:
            value = pattern.sub(replacement, value)
        return value

    return scrub


def observe(changes: Iterable[Obj], scrub: Callable[[Any], Any]) -> Obj:
    """The observation of a whole scenario: jobs, pods, other objects, events, and the order of coming and going."""
    jobs: dict[str, Job] = {}
    pods: dict[str, Pod] = {}
    others: dict[str, Obj] = {}
    events: dict[str, dict[str, None]] = {}
    marks: list[tuple[int, str]] = []
    going: set[str] = set()
    for change in changes:
        obj, plural = change["object"], change["watch"]
        meta = obj["metadata"]
        key = f"{plural}/{meta['name']}"
        if key in UNREMARKABLE:
            continue
        if plural == "events":
            about = obj["involvedObject"]
            if about["kind"] != "Namespace":
                events.setdefault(f"{about['kind']}/{about['name']}", {})[event_line(obj)] = None
            continue
        version = int(meta["resourceVersion"])
        if change["type"] != "MODIFIED":
            marks.append((version, f"{change['type']} {key}"))
        if meta.get("deletionTimestamp") and meta["uid"] not in going and change["type"] == "MODIFIED":
            going.add(meta["uid"])
            marks.append((version, f"DELETING {key}"))
        gone = change["type"] == "DELETED"
        if plural in JOBS:
            jobs.setdefault(key, Job()).see(obj, gone)
        elif plural == "pods":
            pods.setdefault(meta["uid"], Pod()).see(obj, gone)
        else:
            others[key] = {**other(plural, obj), "there": not gone}
    by_name: dict[str, list[Obj]] = {}
    for pod in pods.values():
        by_name.setdefault(pod.name, []).append(pod.seen())
    return scrub(
        {
            "jobs": {key: job.seen() for key, job in jobs.items()},
            "pods": by_name,
            "objects": others,
            "events": {about: list(lines) for about, lines in events.items()},
            "order": [mark for _, mark in sorted(marks)],
        }
    )


def event_line(event: Obj) -> str:
    """Type, reason and message; for a normal event of a pod, type and reason only."""
    line = f"{event['type']} {event['reason']}"
    quiet = event["type"] == "Normal" and event["involvedObject"]["kind"] == "Pod"
    return line if quiet and event["reason"] != "BackOff" else f"{line}: {event['message']}"


def owner(meta: Obj) -> str | None:
    return next((f"{o['kind']}/{o['name']}" for o in meta.get("ownerReferences", []) if o.get("controller")), None)


class Job:
    """The changes of a job's conditions, and its last status."""

    def __init__(self) -> None:
        self.conditions: list[str] = []
        self.known: dict[str, str] = {}
        self.finalizers: list[str] = []
        self.progress: list[str] = []
        self.obj: Obj = {}
        self.gone = False

    def see(self, obj: Obj, gone: bool) -> None:
        self.obj, self.gone = obj, gone
        self.finalizers += [f for f in obj["metadata"].get("finalizers", []) if f not in self.finalizers]
        now = {c["type"]: condition_line(c) for c in obj.get("status", {}).get("conditions") or []}
        removed = [f"{kind} removed" for kind in self.known if kind not in now]
        self.conditions += removed + [line for kind, line in now.items() if self.known.get(kind) != line]
        self.known = now
        posted = progress_line(obj.get("status", {}).get("trainerStatus") or {})
        if posted and self.progress[-1:] != [posted]:
            self.progress.append(posted)

    def seen(self) -> Obj:
        meta, status = self.obj["metadata"], self.obj.get("status", {})
        counts = status.get("replicaStatuses") or {}
        return {
            "conditions": self.conditions,
            "replicas": {role: count_line(of_role) for role, of_role in counts.items()},
            "counts": count_line(status),
            "started": "startTime" in status,
            "completed": "completionTime" in status,
            "there": not self.gone,
            "owner": owner(meta),
            "finalizers": self.finalizers,
            "spec": {k: v for k, v in self.obj["spec"].items() if not isinstance(v, (dict, list))},
            **({"progress": self.progress} if self.progress else {}),
            **self.of_jobs(status),
        }

    @staticmethod
    def of_jobs(status: Obj) -> Obj:
        """The counts of Jobs in the status of a TrainJob or JobSet, and the restarts of a JobSet."""
        counts = status.get("jobsStatus") or status.get("replicatedJobsStatus")
        restarts = {k: status[k] for k in ("restarts", "terminalState") if k in status}
        states = ("active", "ready", "succeeded", "failed", "suspended")
        return restarts | ({"jobs": {of["name"]: count_line(of, states) for of in counts}} if counts else {})


def progress_line(posted: Obj) -> str:
    """A trainerStatus without its time: 10 % 30 s loss=1.5."""
    parts = {"progressPercentage": "%", "estimatedRemainingSeconds": "s"}
    progress = [f"{posted[key]} {unit}" for key, unit in parts.items() if key in posted]
    return " ".join([*progress, *(f"{metric['name']}={metric['value']}" for metric in posted.get("metrics", []))])


def condition_line(condition: Obj) -> str:
    line = f"{condition['type']} {condition['status']}"
    if condition.get("reason"):
        line += f" {condition['reason']}"
    return f"{line}: {condition['message']}" if condition.get("message") else line


def count_line(counts: Obj, names: Iterable[str] = ("active", "succeeded", "failed")) -> str:
    return " ".join(f"{name} {counts[name]}" for name in names if counts.get(name)) or "none"


class Pod:
    """One pod (a recreated pod is another one): the history of its containers, and what it looked like in the end."""

    def __init__(self) -> None:
        self.history: dict[str, list[str]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.latest: dict[str, str] = {}
        self.phases: list[str] = []
        self.obj: Obj = {}
        self.gone = False

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    def see(self, obj: Obj, gone: bool) -> None:
        self.obj, self.gone = obj, gone
        status = obj.get("status", {})
        phase = status.get("phase", "Pending")
        if self.phases[-1:] != [phase]:
            self.phases.append(phase)
        for c in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
            self.see_container(c)

    def see_container(self, c: Obj) -> None:
        name, run, history = c["name"], c["restartCount"], self.history.setdefault(c["name"], [])
        for of_run, state in ((run - 1, c.get("lastState", {})), (run, c.get("state", {}))):
            end = state.get("terminated")
            if end and of_run >= 0 and (name, of_run) not in self.ended:
                self.ended.add((name, of_run))
                history.append(exit_line(end))
        waiting = c["state"].get("waiting")
        if waiting and waiting["reason"] not in STARTING:
            line = f"{waiting['reason']}: {waiting['message']}" if waiting.get("message") else waiting["reason"]
            if history[-1:] != [line]:
                history.append(line)
        self.latest[name] = next((waiting or {}).get("reason", how) for how in c["state"] or {"waiting": {}})

    def seen(self) -> Obj:
        meta, spec, status = self.obj["metadata"], self.obj["spec"], self.obj.get("status", {})
        ends = {name: [now] if now in {*STARTING, "running"} else [] for name, now in self.latest.items()}
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        return {
            "phase": self.phases[-1],
            "phases": self.phases,
            "why": ": ".join(status[k] for k in ("reason", "message") if status.get(k)),
            "there": not self.gone,
            "containers": {name: self.history[name] + ends[name] for name in self.history},
            "conditions": [condition_line(c) for c in status.get("conditions", [])],
            "owner": owner(meta),
            "labels": meta.get("labels", {}),
            "annotations": meta.get("annotations", {}),
            "env": {c["name"]: {e["name"]: e.get("value", "<from>") for e in c.get("env", [])} for c in containers},
            "ports": {c["name"]: [p["containerPort"] for p in c.get("ports", [])] for c in containers},
            "init": [c["name"] for c in spec.get("initContainers", [])],
            "spec": {k: v for k, v in spec.items() if not isinstance(v, (dict, list)) and k != "nodeName"},
        }


def exit_line(end: Obj) -> str:
    line = f"exit {end['exitCode']} {end.get('reason', '')}".rstrip()
    return f"{line}: {end['message'].strip()}" if end.get("message") else line


def other(plural: str, obj: Obj) -> Obj:
    """What matters of a Service, ConfigMap, Secret, ..."""
    meta, spec = obj["metadata"], obj.get("spec", {})
    seen: Obj = {"owner": owner(meta), "labels": meta.get("labels", {})}
    if plural == "services":
        ports = [f"{p.get('name', '')} {p['port']}".strip() for p in spec.get("ports", [])]
        seen |= {"clusterIP": spec.get("clusterIP"), "ports": ports, "selector": spec.get("selector", {})}
        seen |= {"publishNotReadyAddresses": spec.get("publishNotReadyAddresses", False)}
    elif plural == "configmaps":
        seen |= {"data": obj.get("data", {})}
    elif plural == "secrets":
        seen |= {"keys": sorted(obj.get("data", {})), "type": obj.get("type")}
    elif plural in ("roles", "rolebindings"):
        seen |= {k: obj[k] for k in ("rules", "roleRef", "subjects") if k in obj}
    elif plural == "horizontalpodautoscalers":
        seen |= {k: spec.get(k) for k in ("minReplicas", "maxReplicas", "scaleTargetRef")}
    return seen


def answer(
    status: int, headers: Iterable[tuple[str, str]], text: str, streamed: bool, scrub: Callable[[Any], Any]
) -> Obj:
    """One HTTP answer: status, warnings, and a summary of its body.

    :param streamed: the text is that of a watch or of a followed log: one line per message.
    """
    named = [(name.title(), value) for name, value in headers]
    seen: Obj = {"status": status}
    kind = next((value for name, value in named if name == "Content-Type"), "")
    seen |= {"type": kind.split(";")[0]} if kind else {}
    for name in ("Warning", "Retry-After", "Allow"):
        values = [value for n, value in named if n == name]
        seen |= {name: values if name == "Warning" else values[0]} if values else {}
    if not kind.startswith("application/json"):
        return seen | {"says": shortened(scrub(text))}
    if streamed and status == 200:
        messages = [json.loads(line) for line in text.splitlines() if line]
        if all("type" in m and "object" in m for m in messages):
            return scrub(seen | {"says": [f"{m['type']} {says(m['object'])}" for m in messages]})
    body = json.loads(text) if text else {}
    return scrub(seen | {"says": says(body)} | details(body))


def shortened(text: str) -> str:
    """A long text by its ends and its digest."""
    lines = text.splitlines()
    if len(lines) <= 20:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return "\n".join([*lines[:2], f"<{len(lines) - 4} lines, {digest}>", *lines[-2:]])


def says(body: Any) -> str:
    """One line for a Status, a list, a Table, an object."""
    if not isinstance(body, dict) or "kind" not in body:
        return json.dumps(body, sort_keys=True) if not isinstance(body, dict) or len(body) < 4 else "an object"
    kind, meta = body["kind"], body.get("metadata", {})
    if kind == "Status":
        if body.get("status") == "Success":
            about = body.get("details", {})
            return f"Success {about.get('kind', '')} {about.get('name', '')}".rstrip()
        return f"{body.get('reason', 'Failure')}: {body.get('message', '')}"
    if kind == "Table":
        cells = [row["cells"] for row in body["rows"]]
        columns = [c["name"] for c in body.get("columnDefinitions") or []]
        return f"Table {columns} of {[row[0] for row in cells]}"
    if kind.endswith("List") and "items" in body:
        return " ".join([kind, *(item["metadata"]["name"] for item in body["items"])])
    if kind in ("APIResourceList", "APIGroupList", "APIGroup", "APIVersions"):
        return kind
    marks = [k for k in meta.get("annotations", {}) if k == "k8s.io/initial-events-end"]
    return " ".join([kind, *([meta["name"]] if "name" in meta else []), *marks])


def details(body: Any) -> Obj:
    """Conditions on a body that an expectation may contain besides its one line."""
    if not isinstance(body, dict):
        return {}
    kind, meta = body.get("kind", ""), body.get("metadata", {})
    if kind == "Status":
        about = body.get("details", {})
        causes = [f"{c.get('reason', '')} {c.get('field', '')}".strip() for c in about.get("causes", [])]
        seen: Obj = {"causes": causes} if causes else {}
        seen |= {"about": about_line(about)} if about_line(about) else {}
        return seen | ({"continue": True} if meta.get("continue") else {})
    if "items" in body:
        return {"continue": bool(meta.get("continue")), "remaining": meta.get("remainingItemCount")}
    if kind == "APIResourceList":
        return {"resources": {r["name"]: f"{r['kind']} {' '.join(sorted(r['verbs']))}" for r in body["resources"]}}
    if kind == "APIGroupList":
        return {"groups": {g["name"]: [v["version"] for v in g["versions"]] for g in body["groups"]}}
    if kind == "APIGroup":
        return {"versions": [v["version"] for v in body["versions"]], "preferred": body["preferredVersion"]["version"]}
    if "name" in meta:
        kept = ("labels", "annotations", "finalizers", "generation", "deletionGracePeriodSeconds")
        seen = {k: meta[k] for k in kept if k in meta}
        plain = {k: v for k, v in body.get("spec", {}).items() if k != "pytorchReplicaSpecs"}
        seen |= {"spec": plain} if kind.endswith("Job") else {}
        counts = body.get("status", {}).get("replicaStatuses")
        return seen | ({"replicas": counts} if counts else {}) | ({"data": body["data"]} if "data" in body else {})
    result = {"result": body["status"]} if "status" in body else {}
    return result | {k: body[k] for k in ("versions", "major", "paths") if k in body}


def about_line(about: Obj) -> str:
    kind = ".".join(about[k] for k in ("kind", "group") if about.get(k))
    return f"{kind} {about.get('name', '')}".strip()


def version_of(text: str, known: dict[str, str]) -> Obj:
    """Whether the object has another resourceVersion than in the answer before: `version: same` or `new`."""
    try:
        meta = json.loads(text)["metadata"]
        uid, version = meta["uid"], meta["resourceVersion"]
    except (ValueError, KeyError, TypeError):
        return {}
    before, known[uid] = known.get(uid), version
    return {"version": "same" if before == version else "new"} if before else {}
