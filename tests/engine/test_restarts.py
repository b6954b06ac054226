"""A restart is reported with the last log lines of the run that failed, and of no other run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.evidence_collector import EvidenceCollector
from airflow_provider_ktrain.engine.follow.restarts import RestartReporter
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from tests.engine.tasks import Lines

JOB: dict[str, Any] = {"spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}}}}
LABELS = {"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}


async def nobody() -> Any:
    raise AssertionError("there must be no request")


def run(second: int) -> dict[str, Any]:
    at = f"2026-11-21T10:00:{second:02}Z"
    return {"terminated": {"startedAt": at, "finishedAt": at, "exitCode": 1, "reason": "Error"}}


def pod(uid: str, second: int, restarts: int, **states: Any) -> dict[str, Any]:
    """The Master's pod, created at this second."""
    status = {"name": "pytorch", "restartCount": restarts, **states}
    meta = {"name": "p-master-0", "uid": uid, "labels": LABELS, "creationTimestamp": f"2026-11-21T10:00:{second:02}Z"}
    return {"metadata": meta, "spec": {"containers": [{"name": "pytorch"}]}, "status": {"containerStatuses": [status]}}


class Followed:
    """A job whose restarts are reported; a test gives it lines and states of its pods."""

    def __init__(self) -> None:
        self.log = Lines()
        state = JobState(JobRef("PyTorchJob", "v1", "ns", "p", "uid"), Handover())
        state.job = JOB
        context = FollowContext(Api(nobody), state, self.log)
        self.evidence = EvidenceCollector(context)
        self.restarts = RestartReporter(context, self.evidence.lines_of_run)

    def write(self, uid: str, run: int, text: str, second: int) -> None:
        source = LogLine("p-master-0", "pytorch", "Master", 0, 0, "", "", pod_uid=uid)
        self.evidence.recorder(source)(text, f"2026-11-21T10:00:{second:02}.500000000Z", run, False)

    def observe(self, pod: dict[str, Any]) -> list[str]:
        self.restarts.update({pod["metadata"]["uid"]: pod})
        self.restarts.report(at_once=True)
        return self.log.messages


@pytest.mark.parametrize("second", [9, 10, 11])
async def test_line_belongs_to_its_run_whatever_its_time(second: int) -> None:
    """The node may record the start of a container after its first line, and its end before its last one."""
    job = Followed()
    job.write("a", 0, "KeyError: 'first'", second)
    job.observe(pod("a", 0, 0, state=run(10)))
    job.write("a", 1, "KeyError: 'second'", second)
    (message,) = job.observe(pod("a", 0, 1, state={"running": {}}, lastState=run(10)))
    assert message.startswith("Master 0 restarted (1st time) after KeyError: 'first'.")


async def test_recreated_pod_has_its_own_lines() -> None:
    """Recreated pods have the same name, and their first run is run 0."""
    job = Followed()
    job.write("a", 0, "KeyError: 'first'", 10)
    job.observe(pod("a", 0, 0, state=run(10)))
    job.observe(pod("b", 10, 0, state={"waiting": {}}))
    job.observe(pod("b", 10, 0, state=run(10)))
    messages = job.observe(pod("c", 11, 0, state={"waiting": {}}))
    assert [message.partition(" after ")[2] for message in messages] == ["KeyError: 'first'.", "exit code 1."]


async def test_restart_of_a_container_that_never_began_is_reported_at_once() -> None:
    """It wrote no line for which to wait. Its runs follow each other too fast for each to be seen."""
    job = Followed()
    job.evidence.recorder(LogLine("p-master-0", "pytorch", "Master", 0, 0, "", "", pod_uid="a"))
    epoch, end = "1970-01-01T00:00:00Z", "2026-11-21T10:00:10Z"
    ended = {"terminated": {"startedAt": epoch, "finishedAt": end, "exitCode": 128, "reason": "StartError"}}
    for restarts in (0, 1, 3):
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
        job.restarts.update({"a": pod("a", 0, restarts, state=waiting, lastState=ended)})
    first, second = (f"Master 0 restarted ({n} time) after StartError, exit code 128." for n in ("1st", "3rd"))
    assert job.log.messages == [first, second]


@pytest.mark.virtual_time
async def test_restart_is_not_reported_before_a_line_arrives() -> None:
    job, began = Followed(), timing.now()
    job.restarts.update({"a": pod("a", 0, 1, state={"running": {}}, lastState=run(10))})
    job.write("a", 1, "of the next run", 11)
    while not job.log.messages:
        assert job.restarts.due is not None
        assert job.restarts.due > timing.now()
        await asyncio.sleep(job.restarts.due - timing.now())
        if timing.now() > began + 10:
            job.write("a", 0, "KeyError: 'late'", 10)
        job.restarts.report()
    assert job.log.messages[0].startswith("Master 0 restarted (1st time) after KeyError: 'late'.")
    assert timing.now() < began + 15
