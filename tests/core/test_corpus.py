"""The share of a corpus of real messages whose cause is found: see corpus/README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.evidence import Evidence, make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose
from airflow_provider_ktrain.core.diagnosis.pod_failures import log_key
from airflow_provider_ktrain.core.text.output import MAX_FIRST_LINE_CHARS
from tests.tables import table

from .test_diagnosis import failed, pod

CORPUS = Path(__file__).parent / "corpus"
#: How many causes are found; docs/how-to/failures.md states the share.
FOUND = 245


def cases() -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(CORPUS.glob("*.yaml")):
        for number, case in enumerate(table(file), 1):
            sources = case["source"] if isinstance(case["source"], list) else [case["source"]]
            found[f"{file.stem} {number}: {', '.join(sources)}"] = case | {"sources": sources}
    return found


CASES = cases()


def evidence_of(case: dict[str, Any]) -> Evidence:
    replicas = case.get("replicas") or {"Worker 0": case}
    starts = any(it.keys() & {"terminated", "log", "pod"} for it in replicas.values())
    job: dict[str, Any] = {
        "kind": "MPIJob" if "Launcher" in replicas else "PyTorchJob",
        "metadata": {"name": "train"},
        "status": failed(at=3000, message="")["status"] if starts else {"conditions": []},
    }
    if "job_events" in case:
        return make_evidence(job, [], [event | {"involvedObject": {"name": "train"}} for event in case["job_events"]])
    pods, logs, events = [], {}, []
    for name, it in replicas.items():
        role, _, index = name.partition(" ")
        made = pod(role, int(index or 0), code=it.get("exit", 1) if starts else None, at=it.get("ended", 60))
        meta, status = made["metadata"], made["status"]
        (container,) = status["containerStatuses"]
        made["spec"] = {
            "nodeName": f"node-of-{meta['name']}",
            "containers": [{"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": str(case.get("gpus", 8))}}}],
        }
        if "terminated" in it:
            container["state"]["terminated"].update(it["terminated"])
        if "pod" in it and "log" not in it and "exit" not in it:
            del status["containerStatuses"]  # the pod was rejected or evicted
        if "unschedulable" in it:
            del status["containerStatuses"], made["spec"]["nodeName"]
            reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            status.update(phase="Pending", conditions=[reason | {"message": it["unschedulable"]}])
        if "waiting" in it:
            container["state"] = {"waiting": it["waiting"]}
            status["phase"] = "Pending"
        status.update(it.get("pod", {}))
        pods.append(made)
        if "log" in it:
            logs[log_key(meta["name"], "pytorch")] = it["log"].splitlines()
        events += [e | {"involvedObject": {"name": meta["name"], "uid": meta["uid"]}} for e in it.get("events", ())]
    return make_evidence(job, pods, events, logs)


def problem_of(case: dict[str, Any]) -> str:
    """What is wrong with the cause; empty if it is right."""
    evidence = evidence_of(case)
    cause = diagnose(evidence)
    replica = case.get("replica", "Worker 0")
    expected = case["line"] if isinstance(case["line"], list) else [case["line"]]
    wrong = [f"lacks {part!r}" for part in expected if part not in cause.summary]
    if case.get("advice", "") not in cause.resolution:
        wrong.append(f"advice {cause.resolution!r}")
    if cause.category != case["category"]:
        wrong.append(f"category {cause.category} instead of {case['category']}")
    if cause.replica != replica:
        wrong.append(f"replica {cause.replica} instead of {replica}")
    node = f"node-of-train-{replica.lower().replace(' ', '-') if ' ' in replica else f'{replica.lower()}-0'}"
    if "blames" in case and (node in cause.failed_nodes) != case["blames"]:
        wrong.append(f"blames {sorted(cause.failed_nodes)}")
    if len(cause.summary) > MAX_FIRST_LINE_CHARS:
        wrong.append("too long")
    return f"{cause.summary}: {', '.join(wrong)}" if wrong else ""


def test_share_of_the_corpus() -> None:
    problems = {name: problem for name, case in CASES.items() if (problem := problem_of(case))}
    found = len(CASES) - len(problems)
    print(f"{found} of {len(CASES)} causes found: {found / len(CASES):.1%}")
    print("\n".join(f"{name}\n    {problem}" for name, problem in problems.items()))
    assert found >= FOUND


def test_corpus_is_large_and_each_case_has_a_source() -> None:
    assert len(CASES) >= 150
    assert sum("replicas" in case and len(case["replicas"]) > 1 for case in CASES.values()) >= 15
    for name, case in CASES.items():
        for source in case["sources"]:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+)?", source), name
        assert case.keys() <= {
            "source", "sources", "log", "exit", "terminated", "pod", "waiting", "unschedulable", "events", "job_events",
            "replicas", "gpus", "category", "line", "replica", "blames", "advice",
        }, name  # fmt: skip


@pytest.mark.parametrize("ended", [{"Worker 0": 40, "Worker 1": 43}, {"Worker 0": 43, "Worker 1": 40}], ids=str)
def test_of_two_failures_the_earlier_counts(ended: dict[str, int]) -> None:
    logs = {"Worker 0": "OSError: [Errno 116] Stale file handle\n", "Worker 1": "ValueError: bad shard\n"}
    case = {"replicas": {name: {"ended": at, "log": logs[name]} for name, at in ended.items()}}
    assert diagnose(evidence_of(case)).replica == min(ended, key=lambda name: ended[name])


@pytest.mark.parametrize(
    "line",
    [
        "wandb: ERROR Error while calling W&B API: 401 Client Error: Unauthorized",
        "wandb: Network error (HTTPError), entering retry loop. 502 Server Error: Bad Gateway",
    ],
)
def test_upload_of_wandb_at_the_end_does_not_explain_an_exception(line: str) -> None:
    log = f'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: bad shard\n{line}\n'
    assert diagnose(evidence_of({"log": log})).summary == "Worker 0 failed: ValueError: bad shard (exit code 1)"


@pytest.mark.parametrize(
    "line",
    [
        "INFO:hub:401 Client Error: Unauthorized for url: https://huggingface.co/api/whoami-v2",
        "2026-11-26 10:00:00 DEBUG hub: 401 Client Error: Unauthorized for url: https://huggingface.co/api/whoami-v2",
        "401 Client Error: Unauthorized for url: https://huggingface.co/api/whoami-v2\nRetrying in 1s [Retry 1/5].",
        "503 Server Error: Service Unavailable, will retry",
        "wandb: Network error (HTTPError), entering retry loop. 502 Server Error: Bad Gateway",
        "INFO:pool:closed: [Errno 104] Connection reset by peer",
        *(f"ERROR: {text}\nstep 13 loss 0.5" for text in (
            "401 Client Error: Unauthorized", "[Errno 104] Connection reset by peer", "503 Server Error",
            "[Errno 98] Address already in use", "[Errno 28] No space left on device", "[Errno 116] Stale file handle",
        )),
    ],
)  # fmt: skip
def test_what_a_program_has_survived_explains_no_end(line: str) -> None:
    cause = diagnose(evidence_of({"log": f"step 12 loss 0.6\n{line}\nvalidation failed\n"}))
    assert cause.summary == "Worker 0 failed with exit code 1. Last log line: validation failed"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ERROR: 401 Client Error: Unauthorized", "has no access to a service or to its data"),
        ("ERROR: Connection reset by peer", "lost a peer, and no replica reports why: ERROR: Connection reset by peer"),
        ("step 13: Connection reset by peer", "lost a peer"),
        ("step 13: 503 Server Error", "can't download what it needs"),
        (
            "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "can't communicate with its peers over NCCL: NCCL error: unhandled",
        ),
        ("DefaultCPUAllocator: can't allocate memory\nstep 13 loss 0.5", "ran out of memory"),
    ],
)
def test_what_a_program_has_not_survived_explains_its_end(line: str, expected: str) -> None:
    cause = diagnose(evidence_of({"log": f"step 12 loss 0.6\n{line}\nvalidation failed\n"}))
    assert cause.summary.startswith(f"Worker 0 {expected}")


@pytest.mark.parametrize(
    "line",
    [
        "<frozen importlib>:228: RuntimeWarning: numpy.ufunc size changed, may indicate binary incompatibility.",
        "hub.py:12: UserWarning: 403 Client Error: Forbidden for url: https://example.com/telemetry",
    ],
)
def test_python_warning_explains_no_end(line: str) -> None:
    cause = diagnose(evidence_of({"log": f"{line}\nvalidation failed\n"}))
    assert cause.summary == "Worker 0 failed with exit code 1. Last log line: validation failed"
