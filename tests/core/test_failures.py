"""Failures that were not recorded: messages of Kubernetes and of programs, and the resulting first line."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.cause_scanner import CauseScanner, count_plain
from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose, find_startup_cause
from airflow_provider_ktrain.core.diagnosis.pod_failures import log_key
from airflow_provider_ktrain.core.diagnosis.startup_rules import GRACE_SECONDS, find_unstartable_command
from airflow_provider_ktrain.core.state.pods.pod_groups import MAX_START_RESTARTS
from airflow_provider_ktrain.core.text.output import MAX_FIRST_LINE_CHARS
from airflow_provider_ktrain.engine.follow.evidence_collector import TAIL_LINES
from tests.tables import table

from .test_diagnosis import assert_sentences, failed, pod

HERE = Path(__file__).parent
GROUPS = table(HERE / "failures.yaml") | table(HERE / "causes.yaml")
CASES = {f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()}
ENDED = {"startedAt": "2026-11-21T10:00:00Z", "finishedAt": "2026-11-21T10:01:00Z"}


def evidence(case: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    role = case.get("is", "Worker")
    job: dict[str, Any] = {"kind": "MPIJob" if role == "Launcher" else "PyTorchJob", "metadata": {"name": "train"}}
    created = {"type": "Created", "status": "True", "reason": "Created", "message": "created"}
    job["status"] = {"conditions": [created]} if case.get("waits") else failed(message="")["status"]
    it = pod(role, 0)
    it["metadata"]["name"] = "train-pod"
    it["spec"] = {} if "conditions" in case.get("status", {}) or "spec" in case else it["spec"]
    it["spec"] |= case.get("spec", {})
    container = it["status"]["containerStatuses"][0]
    if "ended" in case or case.keys() <= {"log", "first", "category"}:
        container["state"] = {"terminated": ENDED | case.get("ended", {"exitCode": 1, "reason": "Error"})}
        it["status"]["phase"] = "Failed"
    if "waiting" in case:
        container["state"] = {"waiting": case["waiting"]}
        it["status"]["phase"] = "Pending"
    if "last" in case:
        container["lastState"] = {"terminated": ENDED | case["last"]}
    if "init" in case:
        it["status"]["initContainerStatuses"] = [case["init"]]
    if case.get("status", {}).get("phase") == "Pending" and "waiting" not in case:
        del it["status"]["containerStatuses"]  # the pod has no node
    it["status"] |= case.get("status", {})
    events = [e | {"involvedObject": {"name": "train-pod" if e.get("of") else "train"}} for e in case.get("events", ())]
    return job, [it] if case.get("pods", True) else [], events


def kept(log: str) -> list[str]:
    """What is kept of a log that is followed, and comes in one block."""
    lines: list[str] = []
    for line in log.splitlines():
        repeated = re.match(r"#lines (\d+) (.*)", line)
        lines += [repeated[2]] * int(repeated[1]) if repeated else [line]
    scanner, end = CauseScanner[int](), max(len(lines) - TAIL_LINES, 0)
    for number in range(count_plain("\n".join(lines).encode(), len(lines)), len(lines)):
        scanner.see(lines[number], number)
    return [*(lines[number] for number in scanner.kept() if number < end), *lines[end:]]


@pytest.mark.parametrize("name", CASES)
def test_the_first_line_of_a_failure(name: str) -> None:
    case = CASES[name]
    logs = {"pytorch": case.get("log"), "fetch": case.get("init log")}
    tails = {log_key("train-pod", container): kept(text) for container, text in logs.items() if text}
    cause = diagnose(make_evidence(*evidence(case), tails))
    assert (cause.summary, cause.category) == (" ".join(case["first"].split()), case.get("category", "user code"))
    assert case.get("resolution", "") in cause.resolution
    assert_sentences(cause.resolution)
    assert len(cause.summary) <= MAX_FIRST_LINE_CHARS


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "given up" in case])
def test_denied_pods_fail_the_job_after_the_grace_time(name: str) -> None:
    seen = evidence(CASES[name])
    assert find_startup_cause(make_evidence(*seen), 0) is None
    cause = find_startup_cause(make_evidence(*seen), max(GRACE_SECONDS.values()))
    assert cause
    assert cause.summary == f"{CASES[name]['first']}. Giving up after waiting 300 s."


@pytest.mark.parametrize(("waited", "gives_up"), [(20, False), (179, False), (180, True)])
@pytest.mark.parametrize("downloads", [False, True], ids=["gets its node", "has run its init container"])
def test_the_grace_time_of_a_pod_starts_when_its_image_can_be_pulled(
    waited: float, gives_up: bool, downloads: bool
) -> None:
    """The job waited for hours until this worker got a node; the registry may have become unavailable only then."""
    why = {"reason": "ErrImagePull", "message": "429 Too Many Requests"}
    job, (it,), _ = evidence({"waits": True, "status": {"phase": "Pending"}, "waiting": why})
    now = datetime.fromisoformat(it["metadata"]["creationTimestamp"]) + timedelta(hours=2)
    since, earlier = ((now - timedelta(seconds=seconds)).isoformat() for seconds in (waited, 3600))
    scheduled = earlier if downloads else since
    it["status"]["conditions"] = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": scheduled}]
    if downloads:
        it["status"]["initContainerStatuses"] = [{"name": "fetch", "state": {"terminated": {"finishedAt": since}}}]
    cause = find_startup_cause(make_evidence(job, [it], now=now), 7200)
    assert (cause is not None) is gives_up
    assert cause is None or cause.summary.endswith("Giving up after waiting 180 s.")


@pytest.mark.parametrize("refused", ["train-worker-0", "train-launcher-x7k2p", ""])
def test_a_denied_pod_that_exists_now_does_not_fail_the_job(refused: str) -> None:
    """Its service account was created later; now the pod exists and waits for a node."""
    job, (it,), _ = evidence({"waits": True, "status": {"phase": "Pending"}})
    why = f'pods "{refused}" is forbidden: no service account' if refused else 'webhook "x" denied the request'
    event = {"reason": "FailedCreatePod", "message": f"Error creating: {why}"}
    it["metadata"]["name"] = refused.replace("x7k2p", "9qwer") or "train-worker-0"
    assert find_startup_cause(make_evidence(job, [it], [event]), 3600) is None
    it["metadata"]["name"] = "train-worker-1"
    assert (find_startup_cause(make_evidence(job, [it], [event]), 3600) is None) is (refused == "")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("communication: ") and "GPU" not in name])
def test_a_replica_that_only_lost_a_peer_is_not_the_cause(name: str) -> None:
    """It failed first, but the cause is the replica that ran out of memory."""
    job, (missed,), events = evidence(CASES[name])
    cause = pod("Worker", 1, code=1, at=600)
    tails = {
        log_key("train-pod", "pytorch"): CASES[name]["log"].splitlines(),
        log_key("train-worker-1", "pytorch"): ["torch.OutOfMemoryError: CUDA out of memory."],
    }
    summary = "Worker 1 ran out of GPU memory: torch.OutOfMemoryError: CUDA out of memory. (exit code 1)"
    assert diagnose(make_evidence(job, [missed, cause], events, tails)).summary == summary


def test_image_without_python_is_named() -> None:
    """The program of a job with `code` may be a shell script."""
    message = 'failed to create containerd task: exec: "python3": executable file not found in $PATH: unknown'
    end = {"exitCode": 128, "reason": "StartError", "message": message}
    (it,) = evidence({"waits": True, "status": {"phase": "Running"}, "waiting": {"reason": "Error"}, "last": end})[1]
    it["status"]["containerStatuses"][0] |= {"restartCount": MAX_START_RESTARTS}
    cause = find_unstartable_command(make_evidence({"kind": "PyTorchJob"}, [it]))
    assert cause is not None
    assert 'can\'t start its command: exec: "python3": executable file not found in $PATH.' in cause.summary
    assert cause.resolution.startswith("Use an image that contains python3")


def test_a_sidecar_that_cannot_be_started_does_not_end_the_training() -> None:
    end = {"exitCode": 128, "reason": "StartError", "message": 'exec: "exporter": executable file not found'}
    case = {"waits": True, "status": {"phase": "Running"}, "waiting": {"reason": "CrashLoopBackOff"}, "last": end}
    job, (it,), _ = evidence(case)
    it["status"]["containerStatuses"][0] |= {"restartCount": 9, "name": "metrics-exporter"}
    assert find_unstartable_command(make_evidence(job, [it])) is None


@pytest.mark.parametrize(
    ("restarts", "end", "gives_up"),
    [
        (
            MAX_START_RESTARTS,
            {"exitCode": 128, "reason": "StartError", "message": 'exec: "trian": executable file not found'},
            True,
        ),
        (
            MAX_START_RESTARTS - 1,
            {"exitCode": 128, "reason": "StartError", "message": 'exec: "trian": not found'},
            False,
        ),  # not failed yet
        (
            MAX_START_RESTARTS,
            {"exitCode": 127, "reason": "Error"},
            False,
        ),  # output of a shell: the program may have run before
        (MAX_START_RESTARTS, {"exitCode": 1, "reason": "Error"}, False),  # the program starts: max_restarts
        (
            MAX_START_RESTARTS,
            {"exitCode": 128, "reason": "StartError", "message": "nvidia-container-cli: no driver"},
            False,
        ),
    ],
)
def test_a_command_that_cannot_be_started_is_given_up(restarts: int, end: dict[str, Any], gives_up: bool) -> None:
    case = {"waits": True, "status": {"phase": "Running"}, "waiting": {"reason": "CrashLoopBackOff"}, "last": end}
    job, (it,), _ = evidence(case)
    it["status"]["containerStatuses"][0]["restartCount"] = restarts
    cause = find_unstartable_command(make_evidence(job, [it]))
    assert (cause is not None) is gives_up
    if cause:
        assert cause.summary.startswith("Worker 0 can't start its command: ")
        assert cause.summary.endswith(". Giving up after 4 attempts.")
        assert cause.category == "image"


@pytest.mark.parametrize(("seconds_ago", "gives_up"), [(20, True), (300, False)])
def test_sandbox_error_counts_while_the_kubelet_repeats_it(seconds_ago: int, gives_up: bool) -> None:
    """A pod whose network came late may pull its image for a long time."""
    why = {"reason": "ContainerCreating"}
    job, (it,), _ = evidence({"waits": True, "status": {"phase": "Pending"}, "waiting": why})
    now = datetime.fromisoformat(it["metadata"]["creationTimestamp"]) + timedelta(hours=2)
    event = {
        "reason": "FailedCreatePodSandBox", "message": "failed to set up the network",
        "lastTimestamp": (now - timedelta(seconds=seconds_ago)).isoformat(),
        "involvedObject": {"kind": "Pod", "name": it["metadata"]["name"], "uid": it["metadata"].get("uid")},
    }  # fmt: skip
    cause = find_startup_cause(make_evidence(job, [it], [event], now=now), 7200)
    assert (cause is not None) is gives_up
