"""Restarts are reported with their reason, and only real crash loops are detected."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.crash_loop import (
    SHORT_RUN_SECONDS,
    Restart,
    RestartHistory,
)
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB
from airflow_provider_ktrain.core.state.pods.objects import uid_of
from tests.factories import replica_pod

RECORDINGS = Path(__file__).parent / "data" / "restarts"
START = datetime(2026, 11, 21, 10, tzinfo=UTC)
Pods = dict[str, Any]


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def job(workers: int = 0, **spec: Any) -> Any:
    replicas = {"Master": {"replicas": 1}} | ({"Worker": {"replicas": workers}} if workers else {})
    return {"kind": "PyTorchJob", "metadata": {"name": "train"}, "spec": {"pytorchReplicaSpecs": replicas, **spec}}


def run(began: float, ended: float, code: int = 1, **more: Any) -> Any:
    reason = "Error" if code else "Completed"
    return {"startedAt": at(began), "finishedAt": at(ended), "exitCode": code, "reason": reason, **more}


def pod(
    replica: str = "master-0",
    *,
    uid: str = "",
    restarts: int = 0,
    running: float | None = None,
    ended: Any = None,
    before: Any = None,
    created: float = 0,
    policy: str = "OnFailure",
    **status: Any,
) -> Any:
    """One pod: `running` since a time, or `ended`, or else waiting. `before` is the previous run."""
    state = {"running": {"startedAt": at(running)}} if running is not None else {"waiting": {}}
    container = {
        "name": "pytorch",
        "restartCount": restarts,
        "state": {"terminated": ended} if ended else state,
        "lastState": {"terminated": before} if before else {},
    }
    meta = {"uid": uid or replica, "creationTimestamp": at(created)}
    status = {"phase": "Running", "startTime": at(created), "containerStatuses": [container], **status}
    return replica_pod(*replica.split("-"), meta=meta, spec={"restartPolicy": policy}, **status)


def by_uid(*pods: Any) -> Pods:
    return {p["metadata"]["uid"]: p for p in pods}


class History(RestartHistory):
    """A history that is given all pods each time, and finds out which have changed."""

    def see(self, job: Any, pods: Pods) -> list[Restart]:
        return self.update(job, pods, [uid for uid in map(uid_of, self._pods.values()) if uid not in pods])


def described(restarts: list[Restart]) -> list[str]:
    return [restart.describe(None) for restart in restarts]


def crashes(
    history: History, number: int, *beside: Any, of: Any = None, replica: str = "master-0", lasts: float = 5
) -> None:
    """The kubelet restarts a container `number` times, each time after a run of `lasts` seconds and a pause of 10."""
    for n in range(number):
        began = 100 + n * (lasts + 10)
        again = began + lasts + 10
        crashed = pod(replica, restarts=n + 1, running=again, before=run(began, began + lasts))
        history.see(of or job(len(beside)), by_uid(crashed, *beside))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "06-pt-onfailure-retry",
            [
                "Master 0 restarted (1st time) after exit code 1.",
                "Master 0 restarted (2nd time) after exit code 1. Back-off 14 s.",
            ],
        ),
        ("09-pt-exitcode-130", ["Master 0 restarted (1st time) after exit code 130, SIGINT."]),
    ],
)
@pytest.mark.parametrize("handed_over", [False, True])
def test_recorded_restarts_are_counted(name: str, lines: list[str], handed_over: bool) -> None:
    """Each restart is reported once, also if another process takes over after each event."""
    (_, recorded), *events = [json.loads(line) for line in (RECORDINGS / f"{name}.jsonl").read_text().splitlines()]
    history = History(PYTORCHJOB)
    pods: Pods = {}
    restarts = []
    for kind, it in events:
        if kind == "DELETED":
            del pods[it["metadata"]["uid"]]
            restarts += history.mark_deleted(it)
        else:
            pods[it["metadata"]["uid"]] = it
        restarts += history.see(recorded, pods)
        if handed_over and kind == "MODIFIED":
            history = History(PYTORCHJOB, json.loads(json.dumps(history.handover())))
            restarts += history.see(recorded, pods)
    assert described(restarts) == lines
    assert history.crash_loop(1 if name.startswith("09") else 2) is None  # the container succeeded


def test_a_restart_names_the_exception_of_the_previous_run() -> None:
    history = History(PYTORCHJOB)
    (restart,) = history.see(job(), by_uid(pod(restarts=3, running=145, before=run(100, 105))))
    log = ["Traceback (most recent call last):", "  x", "KeyError: 'label_map'"]
    assert restart.describe(log) == "Master 0 restarted (3rd time) after KeyError: 'label_map'. Back-off 40 s."
    assert (
        restart.describe(["bye"])
        == "Master 0 restarted (3rd time) after exit code 1; last log line: bye. Back-off 40 s."
    )
    assert restart.describe(None) == "Master 0 restarted (3rd time) after exit code 1. Back-off 40 s."


def test_a_restart_names_the_kubelets_reason() -> None:
    history = History(PYTORCHJOB)
    oom = run(100, 105, 137) | {"reason": "OOMKilled"}
    assert described(history.see(job(), by_uid(pod(restarts=1, running=105, before=oom)))) == [
        "Master 0 restarted (1st time) after OOMKilled, exit code 137, SIGKILL."
    ]


def test_a_recreated_pod_is_a_restart() -> None:
    history = History(PYTORCHJOB)
    lines = []
    for n in range(3):
        failed = pod(uid=str(n), created=n * 100, ended=run(n * 100, n * 100 + 5, 130), phase="Failed")
        lines += described(history.see(job(), by_uid(failed)))
        lines += described(history.mark_deleted(failed))
    assert lines == [
        "Master 0 restarted (1st time) after exit code 130, SIGINT.",
        "Master 0 restarted (2nd time) after exit code 130, SIGINT.",
    ]
    assert history.crash_loop(3)


def test_restarts_of_an_init_container_are_counted_in_each_pod() -> None:
    """The kubelet counts from 0 again in a new pod."""
    history = History(PYTORCHJOB)
    lines = []
    for uid in "ab":
        status = {"name": "data", "restartCount": 1, "lastState": {"terminated": run(100, 105)}}
        waiting = pod(uid=uid, phase="Pending", initContainerStatuses=[status])
        lines += described(history.see(job(), by_uid(waiting)))
    assert [line for line in lines if line.startswith("Init")] == [
        f"Init container data of Master 0 restarted ({number} time) after exit code 1." for number in ("1st", "3rd")
    ]


def test_launchers_of_a_batch_job_are_restarts_of_one_replica() -> None:
    """The failed pods still exist, also for the next process."""
    pods: Pods = {}
    history = History(MPIJOB)
    lines = []
    for n in range(3):
        launcher = pod("launcher-0", uid=str(n), created=n * 100, ended=run(n * 100, n * 100 + 5), phase="Failed")
        launcher["metadata"] |= {
            "name": f"train-launcher-{n}",
            "labels": {"training.kubeflow.org/job-role": "launcher"},
        }
        pods |= by_uid(launcher)
        lines += described(history.see({"spec": {"mpiReplicaSpecs": {"Launcher": {}}}}, pods))
    assert lines == [f"Launcher restarted ({n} time) after exit code 1." for n in ("1st", "2nd")]
    assert history.crash_loop(3)
    after = History(MPIJOB, history.handover())
    assert after.see({"spec": {"mpiReplicaSpecs": {"Launcher": {}}}}, pods) == []
    late = History(MPIJOB)
    assert described(late.see({"spec": {"mpiReplicaSpecs": {"Launcher": {}}}}, pods)) == lines


def test_an_evicted_pod_is_a_restart() -> None:
    history = History(PYTORCHJOB)
    history.see(job(), by_uid(pod(running=0, uid="a")))
    history.mark_deleted(pod(uid="a", phase="Failed", reason="Evicted", ended=run(0, 9, 137)))
    assert described(history.see(job(), by_uid(pod(uid="b", created=10)))) == [
        "Master 0 restarted (1st time) after its pod was evicted from its node (Evicted)."
    ]


@pytest.mark.parametrize(("number", "ends"), [(5, False), (6, True)])
def test_six_short_failures_in_a_row_are_a_crash_loop(number: int, ends: bool) -> None:
    history = History(PYTORCHJOB)
    crashes(history, number, pod("worker-0", running=0))
    loop = history.crash_loop(6)
    assert (loop is not None) is ends
    if loop:
        assert (loop.replica, loop.failures) == ("Master 0", 6)
    assert history.crash_loop(None) is None


def test_failures_before_every_replica_has_run_do_not_count() -> None:
    """Workers crash while the master still pulls its image."""
    history = History(PYTORCHJOB)
    crashes(history, 20, pod("master-0"), replica="worker-0")
    assert history.crash_loop(1) is None
    last = pod("worker-0", restarts=20, running=400, before=run(385, 390))
    history.see(job(1), by_uid(last, pod("master-0", running=395)))
    assert history.crash_loop(1) is None, "they failed before the master ran"
    last = pod("worker-0", restarts=21, running=420, before=run(400, 410))
    history.see(job(1), by_uid(last, pod("master-0", running=395)))
    assert history.crash_loop(1)


def waiting(replica: str, *, runs: bool = True) -> Any:
    """A pod whose init container waits for the Master, or has not started."""
    state = {"running": {"startedAt": at(0)}} if runs else {"waiting": {}}
    return pod(replica, phase="Pending", initContainerStatuses=[{"name": "init-pytorch", "state": state}])


def test_master_for_which_all_workers_wait_is_in_a_crash_loop() -> None:
    history = History(PYTORCHJOB)
    crashes(history, 6, waiting("worker-0"), waiting("worker-1"))
    assert history.crash_loop(6)


@pytest.mark.parametrize("other", [[waiting("worker-1", runs=False)], []], ids=["not started", "not created"])
def test_master_for_which_not_all_workers_wait_yet_may_fail(other: list[Any]) -> None:
    history = History(PYTORCHJOB)
    crashes(history, 20, waiting("worker-0"), *other, of=job(2))
    assert history.crash_loop(1) is None


def test_long_runs_are_not_a_crash_loop() -> None:
    history = History(PYTORCHJOB)
    crashes(history, 20, lasts=SHORT_RUN_SECONDS)
    assert history.crash_loop(1) is None


def test_a_long_run_resets_the_count() -> None:
    history = History(PYTORCHJOB)
    crashes(history, 5)
    long = pod(restarts=6, running=900, before=run(180, 180 + SHORT_RUN_SECONDS))
    history.see(job(), by_uid(long))
    history.see(job(), by_uid(pod(restarts=7, running=920, before=run(900, 910))))
    assert history.crash_loop(2) is None
    assert history.crash_loop(1)


def test_a_gap_in_the_observations_resets_the_count() -> None:
    """No process followed the job for an hour."""
    history = History(PYTORCHJOB)
    crashes(history, 5)
    history = History(PYTORCHJOB, history.handover())
    history.see(job(), by_uid(pod(restarts=9, running=4000, before=run(3900, 3905))))
    assert history.crash_loop(2) is None


@pytest.mark.parametrize(
    ("reason", "gone"), [("Evicted", False), ("Preempting", False), ("NodeLost", False), ("", True)], ids=str
)
def test_loss_of_a_pod_resets_the_count(reason: str, gone: bool) -> None:
    """The other replicas fail in NCCL until it runs again."""
    history = History(PYTORCHJOB)
    crashes(history, 5, pod("worker-0", running=0))
    crashed = pod(restarts=5, running=175, before=run(160, 165))
    lost = pod("worker-0", phase="Failed", reason=reason)
    history.see(job(1), by_uid(crashed, *([] if gone else [lost])))
    waiting = pod("worker-0", uid="again", created=180)
    for n in range(6, 12):
        crashed = pod(restarts=n, running=n * 100 + 10, before=run(n * 100, n * 100 + 5))
        history.see(job(1), by_uid(crashed, waiting))
    assert history.crash_loop(2 if reason == "Evicted" else 1) is None  # an evicted pod counts apart
    back = pod("worker-0", uid="again", created=180, running=1150)
    for n in range(12, 18):
        assert history.crash_loop(6) is None
        crashed = pod(restarts=n, running=n * 100 + 10, before=run(n * 100, n * 100 + 5))
        history.see(job(1), by_uid(crashed, back))
    assert history.crash_loop(6)


def test_suspension_resets_the_count() -> None:
    history = History(PYTORCHJOB)
    crashes(history, 5)
    history.see(job(runPolicy={"suspend": True}), {})
    assert described(history.see(job(), by_uid(pod(uid="b", created=200)))) == []
    history.see(job(), by_uid(pod(uid="b", created=200, restarts=1, running=220, before=run(205, 210))))
    assert history.crash_loop(2) is None


def test_a_kill_by_a_pod_deletion_is_not_a_failure() -> None:
    history = History(PYTORCHJOB)
    history.see(job(), by_uid(pod(running=0)))
    deleted = pod(ended=run(0, 5, 143))
    deleted["metadata"] |= {"deletionTimestamp": at(34), "deletionGracePeriodSeconds": 30}
    history.mark_deleted(deleted)
    assert history.crash_loop(1) is None


@pytest.mark.parametrize("elastic", [job(elasticPolicy={"minReplicas": 1})], ids=["elasticPolicy"])
def test_elastic_jobs_are_exempt(elastic: Any) -> None:
    history = History(PYTORCHJOB)
    crashes(history, 20, of=elastic)
    assert history.crash_loop(1) is None


def test_horovodrun_with_min_np_is_elastic() -> None:
    launcher = {"template": {"spec": {"containers": [{"command": ["horovodrun", "--min-np", "1"]}]}}}
    elastic = {"spec": {"mpiReplicaSpecs": {"Launcher": launcher}}}
    history = History(MPIJOB)
    crashes(history, 20, of=elastic, replica="launcher-0")
    assert history.crash_loop(1) is None


def handed_over(history: History, *, earlier_pods: bool = False) -> History:
    return History(PYTORCHJOB, json.loads(json.dumps(history.handover())), earlier_pods=earlier_pods)


def test_no_restart_is_reported_again_after_a_handover() -> None:
    history = History(PYTORCHJOB)
    crashes(history, 4)
    crashed = pod(restarts=4, running=160, before=run(145, 150))
    after = handed_over(history)
    assert after.see(job(), by_uid(crashed)) == []
    assert described(after.see(job(), by_uid(pod(restarts=5, running=175, before=run(160, 165))))) == [
        "Master 0 restarted (5th time) after exit code 1. Back-off 10 s."
    ]


def test_run_that_ended_before_a_handover_is_reported_when_it_restarts() -> None:
    """Another replica restarted after that end, and was reported."""
    history = History(PYTORCHJOB)
    master = pod(before=run(100, 105))
    history.see(job(1), by_uid(master, pod("worker-0", restarts=1, running=120, before=run(100, 110))))
    after = handed_over(history)
    worker = pod("worker-0", restarts=1, running=120, before=run(100, 110))
    assert after.see(job(1), by_uid(master, worker)) == []
    again = pod(restarts=1, running=140, before=run(100, 105))
    assert described(after.see(job(1), by_uid(again, worker))) == [
        "Master 0 restarted (1st time) after exit code 1. Back-off 35 s."
    ]


def test_replaced_pod_is_not_reported_again_after_a_handover() -> None:
    """The pods that a batch Job has replaced still exist."""
    evicted = pod("launcher-0", uid="a", phase="Failed", reason="Evicted")
    again = pod("launcher-0", uid="b", created=10, running=20)
    history = History(MPIJOB)
    launcher: Any = {"spec": {"mpiReplicaSpecs": {"Launcher": {}}}}
    for each in (evicted, again):
        each["metadata"]["labels"] = {"training.kubeflow.org/job-role": "launcher"}
    assert len(history.see(launcher, by_uid(evicted, again))) == 1
    after = History(MPIJOB, json.loads(json.dumps(history.handover())))
    assert after.see(launcher, by_uid(evicted, again)) == []


def test_number_of_restarts_is_not_known_after_a_handover_without_the_earlier_pods() -> None:
    after = handed_over(History(PYTORCHJOB), earlier_pods=True)
    after.see(job(), by_uid(pod(uid="b", created=10, running=20)))
    assert described(
        after.see(job(), by_uid(pod(uid="b", created=10, restarts=1, running=40, before=run(20, 30))))
    ) == ["Master 0 restarted after exit code 1. Back-off 10 s."]


def test_number_of_recreated_pods_is_not_known_after_a_handover_without_the_earlier_ones() -> None:
    after = handed_over(History(PYTORCHJOB), earlier_pods=True)
    failed = pod(uid="b", created=10, ended=run(20, 30), phase="Failed")
    after.see(job(), by_uid(failed))
    after.mark_deleted(failed)
    again = after.see(job(), by_uid(pod(uid="c", created=40)))
    assert described(again) == ["Master 0 restarted after exit code 1."]


def test_handover_does_not_grow_with_the_replicas() -> None:
    history = History(PYTORCHJOB)
    workers = [pod(f"worker-{i}", restarts=2, running=120, before=run(100, 110)) for i in range(1000)]
    history.see(job(1000), by_uid(pod(running=0), *workers))
    assert len(json.dumps(history.handover())) < 200
    assert handed_over(history).see(job(1000), by_uid(pod(running=0), *workers)) == []


def test_history_of_another_release_can_be_read() -> None:
    past = {"since": 1.0, "containers": {"Master 0/pytorch": {"failures": 5, "shape": "round"}}, "more": 1}
    assert History(PYTORCHJOB, past).crash_loop(1) is None, "counting starts again"
    assert History(PYTORCHJOB, {}).crash_loop(1) is None


# which runs count


def test_pods_that_nobody_saw_may_have_trained() -> None:
    history = History(PYTORCHJOB)
    for uid, created in (("a", 0), ("b", 100 + SHORT_RUN_SECONDS)):
        history.see(job(), by_uid(pod(uid=uid, created=created, ended=run(created, created + 5), phase="Failed")))
    assert history.crash_loop(1)
    assert history.crash_loop(2) is None


def test_end_of_a_preempted_pod_is_no_failure() -> None:
    history = History(PYTORCHJOB)
    history.see(job(), by_uid(pod(running=0)))
    history.mark_deleted(pod(phase="Failed", reason="Preempting", ended=run(0, 9, 137)))
    assert history.crash_loop(1) is None


def test_next_process_counts_the_restarts_of_a_young_pod() -> None:
    history = History(PYTORCHJOB)
    crashes(history, 4)
    after = handed_over(history)
    after.see(job(), by_uid(pod(restarts=5, running=175, before=run(160, 165))))
    assert after.crash_loop(6) is None
    after.see(job(), by_uid(pod(restarts=6, running=190, before=run(175, 180))))
    assert after.crash_loop(6)


#: Why the runs before the last one may have been long, or may not have failed by themselves, by what is different.
UNPROVED: dict[str, Any] = {
    "older pod": {"created": 1000 - SHORT_RUN_SECONDS},
    "a pod that was not started": {"startTime": None},
    "restarted after a success": {"policy": "Always"},
    "policy that is not known": {"policy": None},
}


@pytest.mark.parametrize("case", UNPROVED)
def test_next_process_counts_only_what_restart_count_proves(case: str) -> None:
    history = History(PYTORCHJOB)
    for n in range(5, 11):
        assert history.crash_loop(6) is None
        began = 1000 + 10 * (n - 5)
        crashed = pod(
            **{"created": 900, "restarts": n, "running": began + 8, "before": run(began, began + 5)} | UNPROVED[case]
        )
        history.see(job(), by_uid(crashed))
    assert history.crash_loop(6)


def test_restarts_before_the_other_replicas_ran_are_not_proved() -> None:
    """The Worker has failed while the Master pulled its image, and nobody has seen in which of its runs that ended."""
    history = History(PYTORCHJOB)
    crashed = pod("worker-0", restarts=8, running=200, before=run(150, 190))
    history.see(job(1), by_uid(pod(running=140), crashed))
    assert history.crash_loop(2) is None
    assert history.crash_loop(1)


def test_restarts_while_all_workers_wait_now_are_not_proved() -> None:
    history = History(PYTORCHJOB)
    history.see(job(1), by_uid(waiting("worker-0"), pod(restarts=8, running=200, before=run(150, 190))))
    assert history.crash_loop(2) is None
    assert history.crash_loop(1)


@pytest.mark.parametrize(("policy", "failures"), [("OnFailure", 6), ("Always", 1)])
def test_runs_between_two_observations_count_if_only_failures_restart(policy: str, failures: int) -> None:
    history = History(PYTORCHJOB)
    for restarts, began in ((1, 100), (6, 175)):
        crashed = pod(restarts=restarts, running=began + 15, before=run(began, began + 5), policy=policy)
        history.see(job(), by_uid(crashed))
    assert history.crash_loop(failures)
    assert history.crash_loop(failures + 1) is None


def test_restarts_by_a_policy_of_the_container_are_not_proved_to_be_failures() -> None:
    """Kubernetes 1.34: `restartPolicy` of a container, which may restart it after a success, too."""
    history = History(PYTORCHJOB)
    crashed = pod(restarts=5, running=115, before=run(100, 105))
    crashed["spec"]["containers"] = [{"name": "pytorch", "restartPolicy": "Always"}]
    history.see(job(), by_uid(crashed))
    assert history.crash_loop(1)
    assert history.crash_loop(2) is None


def test_replica_lost_between_two_followers_stops_the_count() -> None:
    """A node is lost with the triggerer and a worker: the master crashes until the worker has a node again."""
    history = History(PYTORCHJOB)
    crashes(history, 2, pod("worker-0", running=0))
    after = handed_over(history)
    waits = pod("worker-0", uid="again", created=300)
    for n in range(3, 12):
        crashed = pod(restarts=n, running=n * 100 + 10, before=run(n * 100, n * 100 + 5))
        after.see(job(1), by_uid(crashed, waits))
    assert after.crash_loop(1) is None
    back = pod("worker-0", uid="again", created=300, running=1200)
    for n in range(12, 18):
        assert after.crash_loop(6) is None
        crashed = pod(restarts=n, running=n * 100 + 10, before=run(n * 100 + 1, n * 100 + 5))
        after.see(job(1), by_uid(crashed, back))
    assert after.crash_loop(6)


def test_a_crashing_sidecar_is_not_a_crash_loop() -> None:
    """The training container continues to run."""
    history = History(PYTORCHJOB)
    for n in range(20):
        training = pod(running=0)
        exporter = pod(restarts=n + 1, running=115 + 15 * n, before=run(100 + 15 * n, 105 + 15 * n))
        (status,) = exporter["status"]["containerStatuses"]
        training["status"]["containerStatuses"].append(status | {"name": "metrics-exporter"})
        history.see(job(), by_uid(training))
    assert history.crash_loop(1) is None


def deleted(pod: Any, requested: float, grace: float = 30) -> Any:
    pod["metadata"] |= {"deletionTimestamp": at(requested + grace), "deletionGracePeriodSeconds": grace}
    return pod


@pytest.mark.parametrize("code", [1, 143])
@pytest.mark.parametrize("clock_lag", [0, 20, 50])
def test_deleted_pods_are_not_a_crash_loop_if_clocks_differ(code: int, clock_lag: float) -> None:
    """The node's clock is `clock_lag` the API server's, so the run seems to end before its pod's deletion."""
    history = History(PYTORCHJOB)
    for n in range(10):
        began = 200 * n
        history.see(job(), by_uid(pod(uid=str(n), created=began, running=began + 5 - clock_lag)))
        ended = pod(
            uid=str(n), created=began, ended=run(began + 5 - clock_lag, began + 101 - clock_lag, code), phase="Failed"
        )
        restarts = history.mark_deleted(deleted(ended, began + 100))
    assert history.crash_loop(1) is None
    assert described(restarts) == []


@pytest.mark.parametrize("clock_lag", [0, 20, 50])
def test_peers_of_a_deleted_pod_are_not_a_crash_loop_if_clocks_differ(clock_lag: float) -> None:
    history = History(PYTORCHJOB)
    crashes(history, 5, pod("worker-0", running=0))
    crashed = pod(restarts=5, running=175, before=run(160, 165))
    lost = pod("worker-0", ended=run(0, 181 - clock_lag, 143), phase="Failed")
    history.mark_deleted(deleted(lost, 180))
    for n in range(6, 12):
        crashed = pod(restarts=n, running=n * 100 + 10, before=run(n * 100, n * 100 + 5))
        history.see(job(1), by_uid(crashed, pod("worker-0", uid="again", created=185)))
    assert history.crash_loop(1) is None


def test_a_run_with_a_negative_duration_is_not_a_crash() -> None:
    """The node's clock was set back, so the run time is unknown."""
    history = History(PYTORCHJOB)
    crashes(history, 20, lasts=-3)
    assert history.crash_loop(1) is None


def test_crashes_of_peers_after_a_preemption_do_not_end_the_job() -> None:
    """NCCL reports the loss only after the replica runs again."""
    history = History(PYTORCHJOB)
    peers = [pod(f"worker-{i}", running=0) for i in range(1, 8)]
    history.see(job(8), by_uid(pod(running=0), pod("worker-0", running=0), *peers))
    lost = pod("worker-0", phase="Failed", reason="Preempting")
    history.see(job(8), by_uid(pod(running=0), lost, *peers))
    back = pod("worker-0", uid="again", created=10, running=20)
    for n in range(1, 8):
        peers[n - 1] = pod(f"worker-{n}", restarts=1, running=60 + n, before=run(0, 50 + n))
        history.see(job(8), by_uid(pod(running=0), back, *peers))
    assert history.crash_loop(2) is None


def test_alternating_long_and_short_runs_are_not_a_crash_loop() -> None:
    """Five short runs, then one that trains for longer than 10 minutes, again and again."""
    history, began, restarts = History(PYTORCHJOB), 0.0, 0
    for _ in range(5):
        for lasts in (5, 60, 300, 599, 20, SHORT_RUN_SECONDS):
            restarts += 1
            again = began + lasts + 10
            history.see(job(), by_uid(pod(restarts=restarts, running=again, before=run(began, began + lasts))))
            assert history.crash_loop(6) is None
            began = again


def test_a_suspension_shown_only_by_its_condition_resets_the_count() -> None:
    """The job is resumed, but its operator has not updated the condition yet."""
    history = History(PYTORCHJOB)
    crashes(history, 5)
    suspended = job() | {"status": {"conditions": [{"type": "Suspended", "status": "True"}]}}
    history.see(suspended, by_uid(pod(restarts=5, running=300, before=run(200, 205))))
    history.see(job(), by_uid(pod(uid="b", created=400, restarts=1, running=420, before=run(405, 410))))
    assert history.crash_loop(2) is None


def test_three_hundred_recreated_pods_do_not_grow_the_history() -> None:
    history, sizes = History(PYTORCHJOB), []
    for n in range(300):
        failed = pod(uid=str(n), created=n * 100, ended=run(n * 100, n * 100 + 5, 130), phase="Failed")
        history.see(job(), by_uid(failed))
        history.mark_deleted(failed)
        sizes.append(len(repr(vars(history))))
    assert sizes[-1] <= sizes[5] * 1.1
