"""Which rank is named if a collective operation of NCCL times out. Real messages: corpus/nccl_timeouts.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.collectives import is_report
from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause

from .test_diagnosis import PEER_LOST, TRACEBACK, failed, logs, pod
from .test_node_conditions import PRESSURE, XID, node, on

TIMEOUT = (
    "[rank{rank}]:[E626 06:24:44 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={work}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds "
    "before timing out.\n"
    "[rank{rank}]:[E626 06:24:44 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure "
    "detected by watchdog at work sequence id: {work} PG status: last enqueued work: {work}, last completed work: 7\n"
)
DUMP = (
    "[rank{rank}]:[E626 06:24:44 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a "
    "dump signal due to a collective timeout from  rank 1 and we will try our best to dump the debug info. "
    "Last enqueued NCCL work: {work}, last completed NCCL work: {work}."
)


def waits(*ranks: int, work: int = 8) -> str:
    return "".join(TIMEOUT.format(rank=rank, work=work) for rank in ranks)


def cause_of(workers: int, ended: dict[int, int | None], nodes: Sequence[dict[str, Any]] = (), **by: str) -> Cause:
    """Of a job whose Workers, each on a node of its own, have these exit codes."""
    pods = [
        on(f"gpu-{n}", pod("Worker", n, code=ended.get(n, 134), at=600) if ended.get(n, 134) else pod("Worker", n))
        for n in range(workers)
    ]
    job = failed() | {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": workers}}}}
    return diagnose(make_evidence(job, pods, (), logs(**by), nodes=nodes))


def test_replica_that_has_not_failed_and_reports_no_timeout_is_named() -> None:
    cause = cause_of(3, {2: None}, worker_0=waits(0), worker_1=waits(1), worker_2="epoch 3\nSaving checkpoint\n")
    assert cause.summary == (
        "NCCL timed out after 600 s: Worker 2 reports no timeout, 2 other replicas wait in ALLREDUCE (work 8)"
    )
    assert (cause.category, cause.replica) == (Category.INFRASTRUCTURE, "Worker 2")
    assert "1: reports no timeout [Worker 2]" in cause.detail
    assert "Worker 0 lost a peer" in cause.detail
    assert cause.failed_nodes == {}, "its silence doesn't prove that its node is broken"


def test_most_replicas_are_not_named_for_their_silence() -> None:
    """The job ends with the first replica that fails: the others are deleted before they report anything."""
    silent: dict[int, int | None] = {2: None, 3: None}
    cause = cause_of(4, silent, worker_0=waits(0), worker_1=waits(1), worker_2="epoch 3", worker_3="epoch 3")
    assert cause.summary == "NCCL timed out after 600 s: both replicas that were read wait in ALLREDUCE (work 8)"
    assert cause.category is Category.INFRASTRUCTURE


def test_replica_whose_log_is_not_known_is_not_named() -> None:
    assert "Worker 2" not in cause_of(3, {2: None}, worker_0=waits(0), worker_1=waits(1)).summary


@pytest.mark.parametrize(
    "line",
    [
        DUMP.format(rank=2, work=7),
        "\t     [2] finished collective #7, but didn't join collective #8 (count from 1)",
        "\t - To our best knowledge, ranks [2] are the lagging ranks that caused this timeout. They never joined any "
        "collectives",
    ],
    ids=["flight recorder", "desync", "desync, never joined"],
)
def test_rank_that_has_not_joined_is_named(line: str) -> None:
    cause = cause_of(2, {}, worker_0=waits(0, 1) + line, worker_1=waits(3, 4))
    name = "rank 2 of Worker 0" if "rank2" in line else "rank 2"  # a report of a desync doesn't show where the rank is
    assert (
        cause.summary == f"NCCL timed out after 600 s: {name} has not joined, 4 other ranks wait in ALLREDUCE (work 8)"
    )


def test_rank_that_has_joined_and_reports_no_timeout_is_not_named() -> None:
    dump = DUMP.format(rank=2, work=8)
    assert cause_of(1, {}, worker_0=waits(0, 1) + dump).summary.endswith("both ranks wait in ALLREDUCE (work 8)")


def test_last_error_of_a_missing_rank_is_the_cause() -> None:
    """The operator sets how many ranks a replica has. The highest one is missing, which no gap shows."""
    own = "[default3]:ERROR:data:shard 7 is locked by another reader\n"
    job = {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2}}}}
    pods = [pod("Worker", n, code=134, at=600) for n in range(2)]
    for one in pods:
        one["spec"]["containers"] = [{"name": "pytorch", "env": [{"name": "PET_NPROC_PER_NODE", "value": "4"}]}]
    read = logs(worker_0=waits(0, 1, 2, 3), worker_1=own + waits(4, 5, 6))
    cause = diagnose(make_evidence(failed() | job, pods, (), read))
    assert cause.summary == (
        "Worker 1 failed: shard 7 is locked by another reader "
        "(rank 7, for which 7 of 8 ranks wait in ALLREDUCE (work 8))"
    )
    assert (cause.category, cause.replica) == (Category.USER_CODE, "Worker 1")
    assert "7 of 8 ranks wait in ALLREDUCE (work 8); rank 7 of Worker 1 is missing" in cause.detail
    read = logs(worker_0=own + waits(0, 1, 2, 3), worker_1=waits(4, 5, 6))  # rank 3's own, which waits
    assert "rank 7 of Worker 1 is missing" in diagnose(make_evidence(failed() | job, pods, (), read)).summary


def test_ranks_of_a_subgroup_are_not_counted_against_the_world() -> None:
    cause = cause_of(1, {}, worker_0="".join(of_group(n, n, 8, "7") for n in (0, 1, 3)))
    assert cause.summary == "NCCL timed out after 600 s: all 3 ranks wait in ALLREDUCE (work 8)"


def test_rank_that_is_behind_is_named_and_not_the_first_that_complains() -> None:
    cause = cause_of(3, {}, worker_0=waits(0, work=9), worker_1=waits(1), worker_2=waits(2, work=9))
    assert cause.summary == (
        "NCCL timed out after 600 s: Worker 1 waits in ALLREDUCE (work 8), 2 other replicas wait in ALLREDUCE (work 9)"
    )
    assert cause.replica == "Worker 1"


def test_failure_with_a_reason_of_its_own_is_the_cause() -> None:
    cause = cause_of(3, {2: 1}, worker_0=waits(0), worker_1=waits(1, work=7), worker_2=TRACEBACK)
    assert cause.replica == "Worker 2"
    assert "ValueError: negative loss" in cause.summary


def test_replica_that_only_lost_its_connection_is_not_named() -> None:
    cause = cause_of(3, {}, worker_0=PEER_LOST, worker_1=waits(1), worker_2=waits(2))
    assert "Worker 0" not in cause.summary


@pytest.mark.parametrize(("condition", "named"), [(XID, True), (PRESSURE, False)])
def test_broken_node_of_the_replica_that_hangs_is_named(condition: dict[str, Any], named: bool) -> None:
    nodes = (node("gpu-2", condition),)
    cause = cause_of(3, {2: None}, nodes, worker_0=waits(0), worker_1=waits(1), worker_2="epoch 3\n")
    problem = "Node gpu-2 of Worker 2: AcceleratedHardwareReady is False since 10:00 UTC (NvidiaXID79Error). NCCL timed"
    assert cause.summary.startswith(problem) is named
    assert "gpu-2" in cause.failed_nodes


def test_stacks_and_the_report_of_torchrun_follow() -> None:
    """More lines than are kept, so that only the reports of the watchdog precede them."""
    terminated = (
        "[rank{0}]:[E626 06:24:44 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Process group "
        "watchdog thread terminated with exception: [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=8, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds before "
        "timing out.\n"
    )
    end = "".join(f"frame #{number}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x233\n" for number in range(30))
    end += (
        "E0626 06:24:45 42 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -6) local_rank: 0\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/local/bin/torchrun", line 8, in <module>\n'
        "    sys.exit(main())\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "Root Cause (first observed failure):\n"
        "  exitcode  : -6 (pid: 49)\n"
    )
    by = {"worker_0": waits(0) + terminated.format(0) + end, "worker_1": waits(1, work=7) + terminated.format(1) + end}
    cause = cause_of(2, {0: 1, 1: 1}, worker_0=by["worker_0"], worker_1=by["worker_1"])
    assert cause.replica == "Worker 1"
    assert cause.summary.startswith(
        "NCCL timed out after 600 s: Worker 1 waits in ALLREDUCE (work 7), Worker 0 waits in"
    )


# several process groups

OF_GROUP = (
    "[rank{job}]:[E626 06:24:44 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={work}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds "
    "before timing out.\n"
)
STATUS = (
    "[rank{job}]:[E626 06:24:44 ProcessGroupNCCL.cpp:2271] [PG ID 1 PG GUID {group} Rank {rank}]  failure detected by "
    "watchdog at work sequence id: {work} PG status: last enqueued work: {work}, last completed work: {before}\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 1 PG GUID {group} Rank {rank}] Process group watchdog thread terminated with exception: "
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={work}, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
)


def of_group(job: int, rank: int, work: int, group: str = "") -> str:
    text = OF_GROUP + (STATUS if group else "")
    return text.format(job=job, rank=rank, work=work, group=group, before=work - 1)


def test_what_of_the_exception_does_not_name_a_rank_of_the_job() -> None:
    """The first numbers of both are 0 and 1 in their groups: those of other ranks of the job."""
    cause = cause_of(
        2, {}, worker_0=of_group(4, 0, 100, "7") + of_group(5, 1, 100, "7"), worker_1=of_group(7, 1, 50, "9")
    )
    assert "; " in cause.summary, "nobody is named"
    assert "1: ALLREDUCE (work 50) [rank 7 of Worker 1]" in cause.detail
    assert "2: ALLREDUCE (work 100) [rank 4 of Worker 0, rank 5 of Worker 0]" in cause.detail


def test_numbers_of_groups_are_not_compared_without_their_status() -> None:
    zero, one, three = (of_group(n, n % 2, 900) for n in (0, 1, 3))
    cause = cause_of(4, {}, worker_0=zero, worker_1=one, worker_2=of_group(2, 0, 5), worker_3=three)
    assert "; " in cause.summary


def test_ranks_of_groups_in_the_report_of_a_desync_are_not_ranks_of_the_job() -> None:
    desync = "[1] finished collective #182, but didn't join collective #183 (count from 1)\n"
    cause = cause_of(2, {}, worker_0=of_group(0, 0, 900) + of_group(1, 1, 900), worker_1=of_group(2, 0, 900) + desync)
    assert cause.summary == "NCCL timed out after 600 s: all 3 ranks wait in ALLREDUCE (work 900)"


def test_nobody_is_named_if_two_replicas_report_the_same_rank() -> None:
    """PyTorch before 2.2 numbers the ranks of each group from 0."""
    old = {n: OF_GROUP.replace("[rank{job}]:", "").format(rank=0, work=n) for n in (50, 100)}
    cause = cause_of(2, {}, worker_0=old[100], worker_1=old[50])
    assert cause.summary.startswith("Worker 0 lost a peer, and no replica reports why")


PROCESS_FAILED = (
    "E0626 06:25:44.697000 24034 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -6) "
    "local_rank: 0 (pid: 24067) of binary: /opt/venv/bin/python\n"
)


def test_timeout_of_processes_that_torchrun_has_replaced_is_not_compared() -> None:
    """The first ones waited for work 3, of which the last ones know nothing."""
    zero, one, two = (f"{waits(n, work=3 if n else 2)}{PROCESS_FAILED}step 1\n" for n in range(3))
    one, others = one + waits(1, work=8), (zero + waits(0, work=9), two + waits(2, work=9))
    cause = cause_of(3, {}, worker_0=others[0], worker_1=one, worker_2=others[1])
    assert cause.summary == (
        "NCCL timed out after 600 s: Worker 1 waits in ALLREDUCE (work 8), 2 other replicas wait in ALLREDUCE (work 9)"
    )


def test_only_lines_of_the_watchdog_and_ends_of_processes_are_kept() -> None:
    assert all(map(is_report, (*waits(0).splitlines(), PROCESS_FAILED)))
    assert not is_report("step 12 loss 0.5")
