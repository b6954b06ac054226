"""Writes fidelity.md: what a real cluster does, and whether the embedded one does the same.

    python embedded_cluster/scripts/fidelity.py [--check]

--check writes nothing and fails if the file is not what it would be.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from conformance.facts import facts  # noqa: E402
from conformance.scenario import HERE, Scenario, load  # noqa: E402

PAGE = ROOT / "fidelity.md"

HEAD = """# What the embedded cluster does as a real one

Made by `python embedded_cluster/scripts/fidelity.py` from the conformance suite (`tests/conformance`). Do not edit.

Each row is a scenario: a manifest, steps, and what must be observed. The same expectations are compared with

- **real**: what was recorded on {recorded} ({versions}), in each test run. The extracts are in
  `tests/conformance/recorded`.
- **embedded**: the embedded cluster, in each test run.

| | |
|---|---|
| scenarios | {scenarios} |
| requests whose answers are compared | {answers} |
| conditions of jobs, in their order | {conditions} |
| events | {events} |
| pods, container by container | {pods} |

What has been run: the recordings and the embedded cluster. `make test-kind` and `.github/workflows/kind.yml` run the
same suite on kind. They need Docker and **have not been run** where this was written.

Equal means: the same states, reasons, messages, exit codes, objects, answers and order of events. It does not mean the
same number of milliseconds: a container starts sooner here, and nothing is pulled.
"""

AGREEMENT = """
## How much agrees

A fact is one state, reason, message, label, answer, event or mark of an order that a real cluster showed. The embedded
cluster agrees on all facts but the differences listed here. Each test run compares them, and fails if another differs.

| recordings | agreement | differences, each with its reason |
|---|---|---|
"""
GROUPS = {
    "01 to 30, PyTorchJob and the API": ("0", "1", "2", "30"),
    "31 to 46, MPIJob": ("3", "4"),
    "50 to 61, TrainJob": ("5", "6"),
    "100 to 107, disruptions": ("100", "101", "102", "103", "104", "105", "106", "107"),
}

DIFFERENCES = """
## What differs on purpose

| behaviour | real | embedded, and why |
|---|---|---|
"""

ALWAYS = [
    (
        "Containers",
        "namespaces and cgroups of their own",
        "process groups on this machine: no isolation, one machine only",
    ),
    (
        "Names of pods and services",
        "DNS",
        "no DNS; addresses of a job are rewritten to loopback when a container starts",
    ),
    ("Images", "pulled from a registry", "a name mapped to a directory; other names get the registry's error"),
    (
        "PersistentVolumeClaims",
        'found and bound, else the pod stays Pending: `persistentvolumeclaim "x" not found`',
        "the same, but a claim is bound to a directory of the state folder, without limits of size and access",
    ),
    (
        "Limits of ephemeral-storage and emptyDir",
        "measured by the kubelet",
        "the same, but only logs, emptyDirs and working directories of images without a directory are measured",
    ),
    (
        "Failed nodes",
        "unreachable after 40 to 50 s, pods deleted after 300 s more; quarantine of deleted nodes 40 s, period 20 s",
        "the same, times a factor (`node_times`): 0.05 in these scenarios. A fault switch silences a kubelet",
    ),
    (
        "Node pressure",
        "a condition and a taint of the node beside the evictions",
        "a fault switch evicts one pod; the node shows nothing",
    ),
    ("What is stored", "etcd", "memory: a restart loses it, versions expire by a fault switch instead of by time"),
]


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def counted(scenarios: list[Scenario]) -> Counter[str]:
    found: Counter[str] = Counter(scenarios=len(scenarios))
    for scenario in scenarios:
        expect = scenario.expect
        found["answers"] += sum("answer" in step for step in scenario.steps)
        found["conditions"] += sum(len(job.get("conditions", [])) for job in expect.get("jobs", {}).values())
        found["events"] += sum(len([e for e in lines if e != "..."]) for lines in expect.get("events", {}).values())
        found["pods"] += sum(len(p) if isinstance(p, list) else 1 for p in expect.get("pods", {}).values())
    return found


def group_of(scenario: Scenario) -> str:
    """The group of recordings that a scenario belongs to, by the longest prefix of its number."""
    prefixes = {prefix: name for name, known in GROUPS.items() for prefix in known}
    return prefixes[max((p for p in prefixes if scenario.recording.stem.startswith(p)), key=len)]


def agreement(name: str, scenarios: list[Scenario]) -> str:
    differ = "; ".join(f"{why} (`{s.name}`)" for s in scenarios for why in s.differs)
    return f"| {name} | {facts(scenarios)} | {cell(differ) or 'none'} |\n"


def page() -> str:
    files = {path.stem: load(path) for path in sorted((HERE / "scenarios").glob("*.yaml"))}
    scenarios = [scenario for found in files.values() for scenario in found]
    recorded = [json.loads(s.recording.read_text())["recorded"] for s in scenarios]
    versions = " and ".join(sorted({r["cluster"] for r in recorded}))
    operators = ", ".join(sorted({name for r in recorded for name in r["operator"].split(", ") if name != "none"}))
    parts = [
        HEAD.format(versions=f"{versions} with {operators}", recorded=recorded[0]["at"][:10], **counted(scenarios))
    ]
    for stem, found in files.items():
        parts.append(f"\n## {stem}\n\n| behaviour | real | embedded |\n|---|---|---|\n")
        for s in found:
            embedded = "the same, except: " + "; ".join(s.differs) if s.differs else "the same"
            parts.append(f"| {cell(s.title)} (`{s.name}`) | {cell(s.observed)} | {cell(embedded)} |\n")
    parts.append(AGREEMENT)
    parts += [agreement(name, [s for s in scenarios if group_of(s) == name]) for name in GROUPS]
    parts.append(DIFFERENCES)
    parts += [f"| {cell(what)} | {cell(real)} | {cell(why)} |\n" for what, real, why in ALWAYS]
    parts += [
        f"| {cell(s.title)} (`{s.name}`) | {cell(s.observed)} | {cell(why)} |\n" for s in scenarios for why in s.differs
    ]
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = page()
    if not args.check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not up to date: run python embedded_cluster/scripts/fidelity.py")


if __name__ == "__main__":
    main()
