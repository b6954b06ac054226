"""The evidence of a container that failed, and whose log could not be followed to its end, as on a loaded machine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.evidence_collector import TAIL_LINES, EvidenceCollector
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.logs.follower import LogFollower
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from tests.apiserver import PodServer, log_time, serving

from .log_following import numbered, write
from .tasks import Lines

pytestmark = pytest.mark.virtual_time

REF = JobRef("PyTorchJob", "v1", "ns", "train", "u")
JOB: dict[str, Any] = {"kind": "PyTorchJob", "metadata": {"name": "train"}, "spec": {}}
WATCHDOG = (
    "[rank1]:[E626 06:24:44 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout",
    "[rank1]:[E626 06:24:44 ProcessGroupNCCL.cpp:1785] [PG 0 (default_pg) Rank 1] Timeout at NCCL work: 808, "
    "last enqueued NCCL work: 811, last completed NCCL work: 807.",
)
ERROR = "ValueError: the data set has a damaged file"


@pytest.mark.parametrize(
    ("lines_read", "served", "summary"),
    [
        (0, True, f"Worker 0 failed: {ERROR} (exit code 1)"),
        (3, True, f"Worker 0 failed: {ERROR} (exit code 1)"),
        (0, False, "Worker 0 failed with exit code 1"),  # whether it wrote something isn't known
        (3, False, "Worker 0 failed with exit code 1. Last log line: line 2"),
    ],
)
async def test_end_of_an_unread_log_is_read_for_the_diagnosis(lines_read: int, served: bool, summary: str) -> None:
    kube, log = PodServer(), Lines()
    pod = kube.pod("w", state="terminated", phase="Failed")
    if served:
        written = kube.log("w")
        write(written, 0, 500)
        written.write(log_time(5), ERROR)
        written.end()
    else:
        kube.fail("GET", "/log", 400, math.inf)
    async with serving(kube) as api:
        state = JobState(REF, Handover())
        state.job = JOB
        state.pods.update({pod["metadata"]["uid"]: pod}, (), timing.utc_now())
        evidence = EvidenceCollector(FollowContext(api, state, log))
        keep = evidence.recorder(LogLine("w", "main", "Worker", 0, 0, "", ""))
        for number in range(lines_read):
            keep(f"line {number}", "2026-11-22T10:00:00Z", 0, False)
        found = await evidence.gather({("w", "main")}, [pod])
    assert diagnose(make_evidence(JOB, [pod], **found)).summary == summary
    assert ERROR not in log.messages, "the follower logs the lines"


async def test_container_that_never_began_has_no_missing_lines() -> None:
    kube = PodServer()
    kube.fail("GET", "/log", 400, math.inf)
    async with serving(kube) as api:
        follower = LogFollower(api, lambda line: None, kind=PYTORCHJOB)
        for restart in (1, 4):
            pod = kube.pod("w", state="waiting", restart=restart)
            (status,) = pod["status"]["containerStatuses"]
            status["lastState"] = {"terminated": {"exitCode": 128, "reason": "StartError"}}
            follower.observe(pod)
            await asyncio.sleep(20)
        report = await follower.drain(60)
        await follower.close()
    assert not [gap for tally in report.containers.values() for gap in tally.gaps]


@pytest.mark.parametrize("begin", [0, 30, 460])
async def test_cause_in_a_large_block_is_found_and_its_last_lines_are_kept(begin: int) -> None:
    """Most lines of a block without a sign of an error aren't inspected: the cost of a flood."""
    kube = PodServer()
    pod = kube.pod("w", state="terminated", phase="Failed")
    log = kube.log("w")
    write(log, 0, begin)
    for line in ("Traceback (most recent call last):", '  File "/srv/fit.py", line 9, in <module>', "fit.Diverged"):
        log.write(log_time(begin / 100), line)
    write(log, begin, 500)
    write(log, 500, 900, begin=1)
    log.end()
    async with serving(kube) as api:
        state = JobState(REF, Handover())
        state.job = JOB
        state.pods.update({pod["metadata"]["uid"]: pod}, (), timing.utc_now())
        evidence = EvidenceCollector(FollowContext(api, state, Lines()))
        follower = LogFollower(api, lambda line: None, kind=PYTORCHJOB, inspector=evidence.recorder)
        follower.observe(pod)
        await follower.drain(60)
        found = await evidence.gather((), [pod])
        await follower.close()
    assert diagnose(make_evidence(JOB, [pod], **found)).summary == "Worker 0 failed: fit.Diverged (exit code 1)"
    assert [line for line in found["logs"]["w/main"] if line.startswith("line 8")][-50:] == numbered(850, 900)


async def gathered(kube: PodServer, pod: Any, lines: Sequence[tuple[int, str]], is_followed: bool) -> Any:
    """The evidence of a pod with these lines, each with its second, if its log is followed or read at the end."""
    for second, line in lines:
        kube.log("w").write(log_time(second), line)
    kube.log("w").end()
    async with serving(kube) as api:
        state = JobState(REF, Handover())
        state.job = JOB
        state.pods.update({pod["metadata"]["uid"]: pod}, (), timing.utc_now())
        evidence = EvidenceCollector(FollowContext(api, state, Lines()))
        if is_followed:
            keep = evidence.recorder(LogLine("w", "main", "Worker", 0, 0, "", ""))
            for second, line in lines:
                keep(line, log_time(second), 0, False)
        return await evidence.gather((), [pod])


@pytest.mark.parametrize("is_followed", [True, False])
async def test_reports_of_a_timeout_are_kept_before_the_last_lines(is_followed: bool) -> None:
    """The C++ stacks of all ranks, and torchrun's own report, follow them."""
    kube = PodServer()
    pod = kube.pod("w", state="terminated", phase="Failed")
    lines = [*WATCHDOG, *(f"frame #{number}: <unknown function>" for number in range(2 * TAIL_LINES)), "SIGABRT"]
    found = await gathered(kube, pod, list(enumerate(lines)), is_followed)
    (log,) = found["logs"].values()
    assert (log[: len(WATCHDOG)], log[-1], len(log)) == ([*WATCHDOG], "SIGABRT", len(WATCHDOG) + TAIL_LINES)


@pytest.mark.parametrize("is_followed", [True, False])
@pytest.mark.parametrize("began", [3600, 300])
async def test_reports_of_a_timeout_that_the_program_survived_explain_no_later_end(
    is_followed: bool, began: int
) -> None:
    """torchrun has started its processes again in the same container. They trained for an hour, or for minutes."""
    kube = PodServer()
    pod = kube.pod("w", state="terminated", phase="Failed")
    ended = (
        "[rank1]:[E626 06:24:44 ProcessGroupNCCL.cpp:1895] [PG 0 Rank 1] Process group watchdog thread terminated with "
        "exception: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, "
        "Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
    )
    torchrun = (
        "E0626 06:24:45.697000 24034 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -6) "
        "local_rank: 1 (pid: 24067) of binary: /opt/venv/bin/python"
    )
    lines = [(0, line) for line in (*WATCHDOG, ended, torchrun)]
    lines += [(began + n, f"step {n}") for n in range(2 * TAIL_LINES)]
    lines.append((began + 2 * TAIL_LINES, "the data set has a damaged file"))
    found = await gathered(kube, pod, lines, is_followed)
    cause = diagnose(make_evidence(JOB, [pod], **found))
    assert cause.summary == "Worker 0 failed with exit code 1. Last log line: the data set has a damaged file"
    assert cause.category == "user code"


async def test_error_of_the_kubelet_is_not_the_last_line() -> None:
    kube = PodServer()
    pod = kube.pod("w", state="terminated", phase="Failed")
    kube.log("w").write(log_time(5), "the data set has a damaged file")
    kube.log("w").fail(b"failed to create fsnotify watcher: too many open files")
    async with serving(kube) as api:
        state = JobState(REF, Handover())
        state.job = JOB
        state.pods.update({pod["metadata"]["uid"]: pod}, (), timing.utc_now())
        found = await EvidenceCollector(FollowContext(api, state, Lines())).gather({("w", "main")}, [pod])
    cause = diagnose(make_evidence(JOB, [pod], **found))
    assert cause.summary == "Worker 0 failed with exit code 1. Last log line: the data set has a damaged file"


async def test_last_lines_of_the_container_that_waits_for_the_master_are_read_when_it_fails() -> None:
    """Its log isn't followed."""
    kube = PodServer()
    pod = kube.pod("w", state="terminated", phase="Failed", init=["init-pytorch"], containers=[])
    for n, line in enumerate(("** server can't find train-master-0: NXDOMAIN", "waiting for master")):
        kube.log("w", "init-pytorch").write(log_time(n), line)
    async with serving(kube) as api:
        state = JobState(REF, Handover())
        state.job = JOB
        state.pods.update({pod["metadata"]["uid"]: pod}, (), timing.utc_now())
        found = await EvidenceCollector(FollowContext(api, state, Lines())).gather((), [pod])
    (log,) = found["logs"].values()
    assert log == ["** server can't find train-master-0: NXDOMAIN", "waiting for master"]
