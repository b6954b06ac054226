"""Extracts from recordings of a real cluster what the conformance suite compares: tests/conformance/recorded/*.json.

    python embedded_cluster/scripts/recorded.py FOLDER...

Each folder holds what was recorded of one scenario: scenario.yaml (steps, versions), events.jsonl (every change of
every object in the scenario's namespace) and, where requests were made, http.jsonl and kubectl.jsonl.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from conformance.observe import answer, observe, scrubber, version_of  # noqa: E402

WITH_LOGS = ("61-trainjob-status",)  # recordings whose logs are compared
IMAGES = ("busybox", "python", "openmpi")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def text_of(record: dict[str, Any]) -> str:
    if "stream" in record:
        return "".join(chunk.get("text", "") for chunk in record["stream"])
    body = record.get("body")
    return body if isinstance(body, str) else json.dumps(body) if body is not None else ""


def extract(folder: Path) -> dict[str, Any]:
    scenario = yaml.safe_load((folder / "scenario.yaml").read_text())
    names = {scenario["recorded"]["namespace"]: "{ns}", "rk8s-node": "{node}", "realnode": "{node}"}
    names |= {f"docker.io/library/{image}:local": "{image}" for image in IMAGES}
    scrub = scrubber(names)
    answers: dict[str, list[Any]] = {}
    kubectl: dict[str, list[Any]] = {}
    versions: dict[str, str] = {}
    for record in lines(folder / "http.jsonl"):
        seen = answer(record["status"], record["headers"], text_of(record), "stream" in record, scrub)
        seen |= version_of(text_of(record), versions)
        if "stream" in record:
            seen["ended"] = "by the client" if record["ended"] == "closed by the client" else "by the server"
        answers.setdefault(record["name"], []).append(seen)
    for record in lines(folder / "kubectl.jsonl"):
        seen = {"exit": record["exit"], "stdout": record["stdout"], "stderr": record["stderr"]}
        kubectl.setdefault(record["name"], []).append(scrub(seen))
    return {
        "recorded": {"at": scenario["recorded"]["at"], **scenario["versions"]},
        "seconds": scenario["recorded"]["seconds"],
        "waits": [step["result"] for step in scenario["steps"] if "wait" in step or "wait_count" in step],
        "answers": answers,
        "kubectl": kubectl,
        **({"logs": logs(folder, scrub)} if folder.name in WITH_LOGS else {}),
        **observe(lines(folder / "events.jsonl"), scrub),
    }


def logs(folder: Path, scrub: Callable[[Any], Any]) -> dict[str, list[str]]:
    """The lines of each pod's first container, without their times."""
    found = sorted((folder / "logs").glob("*.log"))
    return {
        scrub(path.name.rsplit(".", 2)[0]): [scrub(line.partition(" ")[2]) for line in path.read_text().splitlines()]
        for path in found
    }


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        path = ROOT / "tests/conformance/recorded" / f"{folder.name}.json"
        path.write_text(json.dumps(extract(folder), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
