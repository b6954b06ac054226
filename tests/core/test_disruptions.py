"""Disruptions as a real cluster has shown them: recordings 100 to 107."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose, diagnose_crash_loop, diagnose_limit, lost_replica
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.diagnosis.node_rules import describe_silence, silent_nodes
from airflow_provider_ktrain.core.identity.adoption import Adoption, decide_adoption
from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, Owner, TaskKey
from airflow_provider_ktrain.core.kinds import MPIJOB, kind_of
from airflow_provider_ktrain.core.kinds.conditions import INCOMPLETE_ANNOTATION
from airflow_provider_ktrain.core.kinds.trainjob.patches import ROLES_ANNOTATION, SUCCESS_POLICY_ANNOTATION
from airflow_provider_ktrain.core.state.limits import RUNS_ON_SECONDS, Limit, Limits, clocks
from airflow_provider_ktrain.core.state.pods.pod_history import PodHistory
from airflow_provider_ktrain.core.state.pods.pod_state import SILENT, state_of_pod
from airflow_provider_ktrain.core.state.pods.replica_status import replica_status
from airflow_provider_ktrain.core.state.pods.stopped_pods import (
    STOPPED_PODS_ANNOTATION,
    StoppedPod,
    annotated_stopped_pods,
    annotation_of_proof,
    ends_in_events,
    stopped_pods_annotation,
)
from airflow_provider_ktrain.core.state.status import Phase, Seen, phase_of, seen_in
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from tests.core.disruptions import FOLDER, NOW, Known, at_the_end, changes, replay, until
from tests.kueue.recording import changes_in

# a success that is none

DOUBTS = {
    "100b-pt-evicted-exit-0-master-onfailure": "Master 0 ended with exit code 0 after it was evicted from node-1",
    "100b-mpi-evicted-exit-0-launcher": "Launcher ended with exit code 0 after it was evicted from node-1",
    "100b-trainjob-evicted-exit-0-default": "node 1 ended with exit code 0 after it was evicted from node-1",
    "107c-pt-deleted-by-hand-exit-0-master-onfailure": "Master 0 ended with exit code 0 after its pod was deleted",
}
RECORDED = sorted(path.stem for path in FOLDER.iterdir())


@pytest.mark.parametrize("handover", [False, True], ids=["one process", "a process for each change"])
@pytest.mark.parametrize("name", DOUBTS)
def test_success_of_a_program_that_was_stopped_is_doubtful(name: str, handover: bool) -> None:
    known = at_the_end(name, handover=handover)
    assert (known.phase, known.doubts) == (Phase.SUCCEEDED, [DOUBTS[name]])


@pytest.mark.parametrize("seen_before", [False, True], ids=["seen at the end", "seen when it was evicted"])
def test_success_in_the_second_of_the_eviction_is_doubtful(seen_before: bool) -> None:
    """A program may end at once (seen in a soak on 2026-11-26)."""
    known = at_the_end("100b-pt-evicted-exit-0-master-onfailure")
    evicted: Any = next(pod for pod in known.pods.all if pod["status"]["phase"] == "Succeeded")
    evicted["status"]["conditions"][0]["lastTransitionTime"] = known.job["status"]["completionTime"]
    evicted["metadata"]["deletionTimestamp"] = "2026-11-23T14:35:30Z"  # five seconds of grace later
    running = copy.deepcopy(evicted)
    running["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": "2026-11-23T14:35:16Z"}}
    history = PodHistory(known.kind)
    for pod in [running, evicted] if seen_before else [evicted]:
        history.update({evicted["metadata"]["uid"]: pod}, (), NOW)
    assert [one.text for one in history.stopped(known.job)] == known.doubts


def test_master_that_is_created_after_the_success_changes_nothing() -> None:
    """It trains to its end, in a job that had succeeded 43 s before (107c)."""
    *_, last = replay(changes("107c-pt-deleted-by-hand-exit-0-master-onfailure"))
    masters = [pod for pod in last.pods.all if pod["metadata"]["name"] == "run-master-0"]
    assert [pod["status"]["phase"] for pod in masters] == ["Succeeded", "Succeeded"]
    assert last.doubts == ["Master 0 ended with exit code 0 after its pod was deleted"]


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in DOUBTS])
def test_other_disruptions_leave_no_doubt(name: str) -> None:
    """The pods were replaced, and their successors ended by themselves; or the job has not succeeded."""
    assert not any(known.doubts for known in replay(changes(name)) if known.phase is Phase.SUCCEEDED)


def recorded_jobs() -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """All recorded ends of jobs below tests/: name, job, and its pods."""
    found = []
    for file in sorted((FOLDER.parent).glob("*.json")):
        record = json.loads(file.read_text())
        if isinstance(record, dict) and "pods" in record and "job" in record:
            found.append((file.stem, record["job"], record["pods"]))
    return found


def test_recorded_successes_stay_successes() -> None:
    names = []
    for name, job, pods in recorded_jobs():
        if job and phase_of(job, pods) is Phase.SUCCEEDED:
            names.append(name)
            history = PodHistory(kind_of(job["kind"]))
            history.update({pod["metadata"]["uid"]: pod for pod in pods}, (), NOW)
            assert not history.stopped(job), name
    assert names


@pytest.mark.parametrize("folder", sorted((Path(__file__).parents[1] / "kueue" / "recordings").iterdir()), ids=str)
def test_jobs_that_kueue_stops_and_admits_again_succeed(folder: Path) -> None:
    """Their pods are deleted while they run; those that are created later end by themselves."""
    by_job: dict[str, list[dict[str, Any]]] = {}
    for change in changes_in(folder / "events.jsonl"):
        obj, labels = change["object"], change["object"]["metadata"].get("labels") or {}
        name = labels.get("training.kubeflow.org/job-name") or labels.get("jobset.sigs.k8s.io/jobset-name")
        if change["watch"] in ("pytorchjobs", "mpijobs", "trainjobs"):
            by_job.setdefault(obj["metadata"]["name"], []).append(change)
        elif change["watch"] == "pods" and name:
            by_job.setdefault(str(name), []).append({**change, "t": change["t"]})
    for name, recorded in by_job.items():
        succeeded = [known.doubts for known in replay(recorded) if known.phase is Phase.SUCCEEDED]
        assert not any(succeeded), name


def test_the_mark_makes_a_success_doubtful_for_every_later_try() -> None:
    known = at_the_end("100b-mpi-evicted-exit-0-launcher")
    assert seen_in(known.job, []) is Seen.SUCCEEDED
    key = TaskKey("prod", "dag", "train", "run")
    annotations = {INCOMPLETE_ANNOTATION: known.doubts[0], OWNER_ANNOTATION: Owner(key, 1, "ti-1").annotation()}
    known.job["metadata"]["annotations"] = annotations
    assert seen_in(known.job, []) is Seen.INCOMPLETE
    decision = decide_adoption(known.job, Owner(key, 2, "ti-2"), 1)
    assert (decision.action, decision.detail) == (Adoption.REPLACE, f"{known.doubts[0]}.")


LAST_STATE = {"deletionTimestamp": "2026-11-23T14:39:22Z", "deletionGracePeriodSeconds": 0}


@pytest.mark.parametrize(
    ("generation", "observed", "doubtful"), [(2, 2, True), (2, 1, False), (None, None, False)],
    ids=["as recorded", "a clean-up after the end", "before Kubernetes 1.34"],
)  # fmt: skip
def test_the_last_state_of_a_deleted_pod_shows_whether_its_deletion_came_first(
    generation: int | None, observed: int | None, doubtful: bool
) -> None:
    """The time of the request is lost in it, but not which generation of the pod the kubelet knew when it ended."""
    known = at_the_end("107c-pt-deleted-by-hand-exit-0-master-onfailure")
    pod: Any = next(pod for pod in known.pods.all if pod["status"]["phase"] == "Succeeded")
    assert {name: pod["metadata"][name] for name in LAST_STATE} == LAST_STATE
    assert (pod["metadata"]["generation"], pod["status"]["observedGeneration"]) == (2, 2)
    pod["metadata"]["generation"], pod["status"]["observedGeneration"] = generation, observed
    history = PodHistory(known.kind)
    history.mark_deleted(pod)
    assert bool(history.stopped(known.job)) is doubtful


SHOWN = "Master 0 ended with exit code 0 after its pod was stopped (condition Restarting)"


@pytest.mark.parametrize("name", RECORDED)
def test_conditions_of_a_job_show_that_its_master_was_stopped(name: str) -> None:
    """Nobody has seen a pod. Of all recorded successes, exactly those of a Master that was stopped are doubtful."""
    *_, last = replay(changes(name))
    stopped = name in DOUBTS and "-pt-" in name
    assert seen_by_next(last) == ([SHOWN] if stopped else [])
    if stopped:
        late = [pod for pod in last.pods.live if pod["metadata"]["name"] == "run-master-0"]
        assert seen_by_next(last, late) == [SHOWN], "the Master that was created after the end is not its reason"


@pytest.mark.parametrize(
    ("restarting", "created", "doubtful"),
    [
        ("12:10:35", "", True),
        ("12:08:00", "", False),  # the new Master may have trained to its end while no operator ran
        ("12:10:35", "12:10:36", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("failed", ["Master", "Worker"])
def test_master_that_replaced_the_stopped_one_explains_the_success(
    restarting: str, created: str, doubtful: bool, failed: str
) -> None:
    """The success doesn't depend on a Worker that was stopped."""
    job = job_that_succeeded("2026-01-01T12:10:40Z")
    why = {
        "reason": "PyTorchJobRestarting",
        "message": f"PyTorchJob j is restarting because 1 {failed} replica(s) failed.",
    }
    job["status"]["conditions"].append(
        {"type": "Restarting", "status": "True", "lastTransitionTime": f"2026-01-01T{restarting}Z", **why}
    )
    pod = master("a", ended="2026-01-01T12:10:39Z")
    pod["metadata"]["creationTimestamp"] = f"2026-01-01T{created}Z"
    worker = master("w", disrupted="2026-01-01T12:05:00Z")
    worker["metadata"]["labels"] = {**worker["metadata"]["labels"], "training.kubeflow.org/replica-type": "worker"}
    history = history_of(worker)
    history.update({"a": pod} if created else {}, (), NOW)
    assert bool(history.stopped(job)) is (doubtful and failed == "Master")
    assert stopped_pods_annotation(job, history.stopped(job)) is None, "the conditions stay"


# what is recorded on the job for the next process


def annotating(name: str) -> tuple[list[str], Known]:
    """What a process that follows the job writes to it while it is alive, and what is known at the end."""
    annotations: list[str] = []
    for known in replay(changes(name)):
        known.job["metadata"]["annotations"] = {STOPPED_PODS_ANNOTATION: annotations[-1]} if annotations else {}
        if known.phase.ended:
            break
        if (value := stopped_pods_annotation(known.job, known.pods.stopped(known.job))) is not None:
            annotations.append(value)
    return annotations, known


def seen_by_next(known: Known, pods: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """The doubts of a process that knows the job and these pods only."""
    history = PodHistory(known.kind)
    history.update({pod["metadata"]["uid"]: pod for pod in pods}, (), NOW)
    return [one.text for one in history.stopped(known.job)]


@pytest.mark.parametrize("name", DOUBTS)
def test_next_process_knows_of_a_stopped_pod_that_is_gone(name: str) -> None:
    annotations, known = annotating(name)
    assert seen_by_next(known) == [DOUBTS[name]]
    assert len(annotations) == 2, "one when the pod is stopped, and one when its program has ended with exit code 0"
    known.job["metadata"]["uid"] = "a job that was created of this one's manifest"
    assert seen_by_next(known) != [DOUBTS[name]]


#: How many pods were stopped, of replicas that a success depends on, while the job was alive.
STOPPED = {
    "100-pt-evicted-master-onfailure": 1,
    "100f-trainjob-evicted-deaf-30s-default": 1,
    "101-pt-ephemeral-storage-worker-never": 1,
    "101b-pt-emptydir-limit-worker-never": 1,
    "104-pt-silent-node-master-onfailure": 1,
    "104-trainjob-silent-node-default": 2,
    "104b-pt-silent-node-out-of-service-master-onfailure": 1,
}


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in DOUBTS])
def test_annotation_is_no_doubt_of_a_later_success(name: str) -> None:
    annotations, known = annotating(name)
    assert len(annotations) == STOPPED.get(name, 0), (
        "rejected pods, and those that no success depends on, are no reason"
    )
    if known.phase is Phase.SUCCEEDED:
        assert not seen_by_next(known, known.pods.live)


@pytest.mark.parametrize("name", DOUBTS)
def test_result_that_was_found_once_ends_all_doubts(name: str) -> None:
    known = at_the_end(name)
    known.job["metadata"]["annotations"] = {STOPPED_PODS_ANNOTATION: annotation_of_proof(known.job)}
    assert not known.doubts
    assert not seen_by_next(known)


@pytest.mark.parametrize(
    "recorded",
    [
        "", "{", "[]", '{"job": "None"}', '{"job": "None", "pods": 3}', '{"job": "None", "pods": [3, {}]}',
        '{"job": "None", "pods": [{"role": "Master", "index": "x", "uid": "u", "created": "", "text": ""}]}',
    ],
)  # fmt: skip
def test_unreadable_record_says_nothing(recorded: str) -> None:
    job = job_that_succeeded("")
    job["metadata"]["annotations"] = {STOPPED_PODS_ANNOTATION: recorded}
    assert annotated_stopped_pods(job) == []


def test_annotation_is_removed_when_the_rank_that_had_ended_runs_again() -> None:
    """JobSet has recreated all pods, and the next process would not know of them."""
    pod = master("a", ended="2026-01-01T12:10:01Z", disrupted="2026-01-01T12:10:00Z", deleted="2026-01-01T12:10:30Z")
    history, job = history_of(pod), job_that_succeeded("")
    written = stopped_pods_annotation(job, history.stopped(job))
    job["metadata"]["annotations"] = {STOPPED_PODS_ANNOTATION: written}
    assert stopped_pods_annotation(job, history.stopped(job)) is None
    later = master("b")
    later["metadata"]["creationTimestamp"] = "2026-01-01T12:11:00Z"
    history.update({"b": later}, (), NOW)
    assert stopped_pods_annotation(job, history.stopped(job)) == ""


def test_pod_that_was_stopped_and_has_failed_is_no_doubt_of_its_successor() -> None:
    """It was recorded while it still ran; its successor, which nobody saw, succeeded within a minute."""
    pod = master("a", disrupted="2026-01-01T12:10:00Z", deleted="2026-01-01T12:10:30Z")
    job = job_that_succeeded("")
    job["metadata"]["annotations"] = {
        STOPPED_PODS_ANNOTATION: stopped_pods_annotation(job, history_of(pod).stopped(job))
    }
    pod["status"]["phase"] = "Failed"
    job["status"] = job_that_succeeded("2026-01-01T12:10:50Z")["status"]
    assert PodHistory(kind_of("PyTorchJob")).stopped(job)
    assert not history_of(pod).stopped(job)


def test_only_rank_0_counts_if_the_runtime_s_job_has_a_success_policy() -> None:
    kind, job = kind_of("TrainJob"), {"kind": "TrainJob", "metadata": {"annotations": {ROLES_ANNOTATION: "node"}}}
    assert [kind.completes(job, "node", rank) for rank in (0, 1)] == [True, True]
    job["metadata"] = {"annotations": {ROLES_ANNOTATION: "node", SUCCESS_POLICY_ANNOTATION: "node"}}
    assert [kind.completes(job, "node", rank) for rank in (0, 1)] == [True, False]


T0 = "2026-01-01T12:00:00Z"


def master(uid: str, *, ended: str = "", deleted: str = "", disrupted: str = "") -> dict[str, Any]:
    """A pod of Master 0, whose deletion was requested 30 s before `deleted`."""
    labels = {"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}
    meta: dict[str, Any] = {"name": f"j-master-0-{uid}", "uid": uid, "creationTimestamp": T0, "labels": labels}
    if deleted:
        meta |= {"deletionTimestamp": deleted, "deletionGracePeriodSeconds": 30}
    state: dict[str, Any] = {"running": {"startedAt": T0}}
    if ended:
        state = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": ended}}
    status: dict[str, Any] = {"containerStatuses": [{"name": "pytorch", "state": state}]}
    if disrupted:
        reason = {"reason": "EvictionByEvictionAPI", "lastTransitionTime": disrupted}
        status["conditions"] = [{"type": "DisruptionTarget", "status": "True", **reason}]
    return {"metadata": meta, "spec": {"nodeName": "n1", "containers": [{"name": "pytorch"}]}, "status": status}


def job_that_succeeded(at: str) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "pytorch"}]}}
    spec = {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": template}}}
    conditions = [{"type": "Succeeded", "status": "True", "lastTransitionTime": at}] if at else []
    return {"kind": "PyTorchJob", "metadata": {"name": "j"}, "spec": spec, "status": {"conditions": conditions}}


def history_of(pod: dict[str, Any], earlier: dict[str, Any] | None = None) -> PodHistory:
    history = PodHistory(kind_of("PyTorchJob"), earlier or {})
    history.update({pod["metadata"]["uid"]: pod}, (), NOW)
    return history


@pytest.mark.parametrize(("succeeded", "doubts"), [("2026-01-01T12:10:40Z", 1), ("2026-01-01T18:00:00Z", 0)])
def test_doubt_of_an_earlier_process_ends_with_the_pod_that_it_saw(succeeded: str, doubts: int) -> None:
    """A Master was evicted, and nobody followed while its successor trained to the end and was deleted."""
    first = history_of(master("a", disrupted="2026-01-01T12:10:00Z", deleted="2026-01-01T12:10:30Z"))
    later = PodHistory(kind_of("PyTorchJob"), first.handover(job_that_succeeded(""), NOW))
    assert len(later.stopped(job_that_succeeded(succeeded))) == doubts


@pytest.mark.parametrize("resumed_at", ["12:10:05", "12:10:00"], ids=["later", "in the same second"])
def test_pod_that_a_suspension_deleted_is_no_doubt_after_the_job_was_resumed(resumed_at: str) -> None:
    pod = master("a", deleted="2026-01-01T12:10:30Z")
    job = job_that_succeeded("2026-01-01T12:10:40Z")
    assert history_of(pod).stopped(job)
    recorded = PodHistory(kind_of("PyTorchJob"), history_of(pod).handover(job_that_succeeded(""), NOW))
    assert recorded.stopped(job)
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": f"2026-01-01T{resumed_at}Z"}
    job["status"]["conditions"].append(resumed)
    assert not history_of(pod).stopped(job)
    assert not recorded.stopped(job)


def test_eviction_counts_also_if_the_clock_of_the_node_is_slow() -> None:
    pod = master("a", ended="2026-01-01T12:09:58Z", disrupted="2026-01-01T12:10:00Z", deleted="2026-01-01T12:10:30Z")
    assert history_of(pod).stopped(job_that_succeeded("2026-01-01T12:10:02Z"))


def pod_event(
    reason: str, at: str, uid: str, container: str = "mpi-launcher", pod: str = "run-launcher-29nzj", posted: str = ""
) -> dict[str, Any]:
    """As recorded in 100b.

    :param at: by the clock of the node.
    :param posted: by the clock of the API server. Default: at the same time.
    """
    about = {"uid": uid, "name": pod, "fieldPath": f"spec.containers{{{container}}}"}
    source, last = {"component": "kubelet", "host": "node-1"}, f"2026-11-23T{at}Z"
    metadata = {"creationTimestamp": f"2026-11-23T{posted or at}Z"}
    return {"metadata": metadata, "reason": reason, "lastTimestamp": last, "involvedObject": about, "source": source}


STARTED, KILLED = ("Started", "14:34:59", "a"), ("Killing", "14:35:23", "a")
STOPPED_LAUNCHER = "Launcher ended with exit code 0 after it was stopped on node-1"


def texts_of(ends: Mapping[Any, StoppedPod | None]) -> dict[Any, str]:
    """The text of each stop; empty for a replica that ended by itself."""
    return {replica: stop.text if stop else "" for replica, stop in ends.items()}


@pytest.mark.parametrize(
    ("events", "ended"),
    [
        ((STARTED, KILLED), "stopped"),
        ((KILLED, STARTED), "stopped"),  # events have no order
        ((STARTED,), "by itself"),
        ((STARTED, KILLED, ("Started", "14:35:25", "b")), "by itself"),  # replaced, or restarted
        (((*KILLED[:1], "14:35:25", "a"), ("Started", "14:35:25", "a")), "by itself"),  # restarted in the same second
        ((("Killing", "14:30:00", "a"),), None),  # an earlier job had the same name
        ((STARTED, ("Killing", "14:35:28", "a")), "stopped"),  # the job ended in this second
        ((("Killing", "14:35:29", "a"),), None),  # of a pod that the operator has created after the end
        ((STARTED, KILLED, ("Started", "14:35:29", "b"), ("Killing", "14:35:50", "b")), "stopped"),  # the same
        ((STARTED, ("Started", "14:35:10", "b"), ("Killing", "14:35:23", "a")), "by itself"),  # a silent node returns
        ((STARTED, ("Killing", "14:35:23", "a", "istio-proxy")), "by itself"),  # a sidecar
        ((STARTED, ("Killing", "14:35:23", "a", "mpi-launcher", "run-launcher-x-launcher-29nzj")), "by itself"),
        ((("Killing", "14:35:23", "a", "mpi-launcher", "run-worker-0"),), None),  # no success depends on it
        ((), None),
    ],
)
def test_events_show_how_an_unseen_pod_ended(events: Sequence[tuple[str, ...]], ended: str | None) -> None:
    """Times and names of recording 100b-mpi-evicted-exit-0-launcher, whose job ended at 14:35:28."""
    job = at_the_end("100b-mpi-evicted-exit-0-launcher").job
    listed = [pod_event(*event) for event in events]
    expected = {} if ended is None else {("Launcher", 0): STOPPED_LAUNCHER if ended == "stopped" else ""}
    assert texts_of(ends_in_events(MPIJOB, job, listed, [("Launcher", 0)])) == expected


@pytest.mark.parametrize(
    ("events", "ended"),
    [
        ((KILLED,), None),  # the suspension has stopped it
        ((KILLED, ("Started", "14:35:23", "b")), ""),
        ((KILLED, ("Started", "14:35:23", "b"), ("Killing", "14:35:25", "b")), "stopped"),
    ],
)
def test_events_before_a_resumption_in_the_same_second_show_no_end(
    events: Sequence[tuple[str, ...]], ended: str | None
) -> None:
    job = at_the_end("100b-mpi-evicted-exit-0-launcher").job
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-11-23T14:35:23Z"}
    job["status"]["conditions"].append(resumed)
    found = ends_in_events(MPIJOB, job, [pod_event(*event) for event in events], [("Launcher", 0)])
    expected = {} if ended is None else {("Launcher", 0): STOPPED_LAUNCHER if ended else ""}
    assert texts_of(found) == expected


@pytest.mark.parametrize("node", ["ahead", "behind"])
def test_clock_of_the_node_hides_no_stop(node: str) -> None:
    """The launcher is stopped 5 s before the end of the job, and another one starts 2 s after the end."""
    killed, started = ("14:35:38", "14:35:45") if node == "ahead" else ("14:35:08", "14:35:15")
    listed = [
        pod_event("Killing", killed, "a", posted="14:35:23"), pod_event("Started", started, "b", posted="14:35:30"),
    ]  # fmt: skip
    job = at_the_end("100b-mpi-evicted-exit-0-launcher").job
    assert ends_in_events(MPIJOB, job, listed, [("Launcher", 0)])["Launcher", 0]


@pytest.mark.parametrize(
    ("killed", "posted", "first", "at"),
    [
        ("14:35:23", "14:35:58", "", "14:35:23"),  # posted late
        ("14:35:26", "14:35:58", "14:35:23", "14:35:23"),  # and repeated before
        ("14:35:28", "14:35:23", "", "14:35:23"),  # repeated since
    ],
)
def test_stop_that_is_reported_late_or_repeatedly_has_its_first_time(
    killed: str, posted: str, first: str, at: str
) -> None:
    """The kubelet posts an event again while the API server is away. Nobody stops a container that has ended."""
    job = at_the_end("100b-mpi-evicted-exit-0-launcher").job
    event = pod_event("Killing", killed, "a", posted=posted) | (
        {"firstTimestamp": f"2026-11-23T{first}Z"} if first else {}
    )
    stop = ends_in_events(MPIJOB, job, [pod_event(*STARTED), event], [("Launcher", 0)])["Launcher", 0]
    assert stop is not None
    assert stop.at == epoch_seconds(f"2026-11-23T{at}Z")


def test_suffix_of_a_launcher_may_have_digits_only() -> None:
    job = at_the_end("100b-mpi-evicted-exit-0-launcher").job
    listed = [pod_event(*event, pod="run-launcher-20417") for event in (STARTED, KILLED)]
    assert ends_in_events(MPIJOB, job, listed, [("Launcher", 0)])["Launcher", 0]


@pytest.mark.parametrize(("killed", "stopped"), [("12:09:59", True), ("12:10:00", False)])
@pytest.mark.parametrize("node", ["12:09:50", "12:10:10"])
def test_worker_of_an_elastic_job_is_stopped_when_another_one_has_succeeded(
    node: str, killed: str, stopped: bool
) -> None:
    """training-operator ends such a job with its first Worker, and cleanPodPolicy stops the others at once."""
    job = job_that_succeeded("2026-01-01T12:10:00Z")
    template = {"spec": {"containers": [{"name": "pytorch"}]}}
    job["spec"] = {"elasticPolicy": {}, "pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": template}}}
    at, posted = (f"2026-01-01T{time}Z" for time in (node, killed))
    event = pod_event("Killing", "00:00:00", "a", "pytorch", "j-worker-0")
    event |= {"lastTimestamp": at, "metadata": {"creationTimestamp": posted}}
    found = ends_in_events(kind_of("PyTorchJob"), job, [event], [("Worker", 0)])
    assert bool(found.get(("Worker", 0))) is stopped


@pytest.mark.parametrize(
    ("events", "stopped"),
    [
        ((), False),
        ((("Killing", "12:10:00"),), False),  # by the operator, or just before: an eviction (recordings 111, 111e)
        ((("Killing", "12:09:59"),), True),
    ],
    ids=["it may train on", "in the second of the end", "before"],
)
def test_events_of_an_elastic_job_never_show_that_a_worker_has_completed(
    events: Sequence[tuple[str, str]], stopped: bool
) -> None:
    job = job_that_succeeded("2026-01-01T12:10:00Z")
    template = {"spec": {"containers": [{"name": "pytorch"}]}}
    job["spec"] = {"elasticPolicy": {}, "pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": template}}}
    listed, history = [], PodHistory(kind_of("PyTorchJob"))
    for name in ("j-worker-0", "j-worker-1"):
        for reason, time in (("Started", "12:01:00"), *(events if name == "j-worker-0" else ())):
            listed.append(pod_event(reason, "00:00:00", name, "pytorch", name))
            stamp = f"2026-01-01T{time}Z"
            listed[-1] |= {"lastTimestamp": stamp, "metadata": {"creationTimestamp": stamp}}
    lost = {("Worker", 0), ("Worker", 1)}
    for replica, stop in ends_in_events(kind_of("PyTorchJob"), job, listed, lost).items():
        history.record_end(replica, stop)
    ends = history.ends(job, lost)
    assert ends.unknown == ({("Worker", 1)} if stopped else lost), "so the success counts, with a warning"


# a failure that is not final

EVICTED_WORKER = "101-mpi-ephemeral-storage-worker"


def test_job_with_an_evicted_worker_ends_with_its_launcher() -> None:
    phases = [known.phase for known in replay(changes(EVICTED_WORKER))]
    assert Phase.FAILED not in phases
    assert phases[-1] is Phase.SUCCEEDED


def test_it_fails_if_the_launcher_fails() -> None:
    known = until(EVICTED_WORKER, lambda known: known.kind.runs_on(known.job))
    known.job["spec"]["runPolicy"] = {"backoffLimit": 1}
    known.job["status"]["replicaStatuses"]["Launcher"] = {"failed": 1}
    assert known.kind.runs_on(known.job), "its batch Job creates another pod"
    known.job["status"]["replicaStatuses"]["Launcher"] = {"failed": 2}
    assert known.phase is Phase.FAILED
    known.job["apiVersion"], known.job["status"]["replicaStatuses"] = "kubeflow.org/v1", {}
    assert known.phase is Phase.FAILED, "training-operator deletes the Launcher"


def test_the_lost_worker_is_said_at_once() -> None:
    known = until(EVICTED_WORKER, lambda known: known.kind.runs_on(known.job))
    assert lost_replica(known.job, known.pods.all) == (
        "MPIJob run has lost a replica for good. Its Launcher runs on.\n"
        "Worker 0 wrote more to its local disk than its ephemeral-storage limit allows (Evicted): "
        "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi.\n"
        "The job fails after 5 minutes without a log line."
    )


@pytest.mark.parametrize("log_stall", [None, 1000.0, 60.0])
def test_its_silence_has_a_limit(log_stall: float | None) -> None:
    known = until(EVICTED_WORKER, lambda known: known.kind.runs_on(known.job))
    failed = epoch_seconds(known.evidence.conditions["Failed"].since) or 0
    limits, groups = Limits(log_stall=log_stall), known.pods.groups
    (clock,) = clocks(known.job, groups, known.phase, limits, deadline=None, last_line=failed - 1000)
    seconds = min(log_stall or RUNS_ON_SECONDS, RUNS_ON_SECONDS)
    assert (clock.limit, clock.seconds, clock.due) == (Limit.LOG_STALL, seconds, failed + seconds)
    cause = diagnose_limit(clock.limit, clock.seconds, known.evidence)
    assert cause.category is Category.USER_CODE
    assert "Worker 0 wrote more to its local disk" in cause.summary + cause.detail
    assert f"Launcher wrote no line for {seconds:.0f} s after that" in cause.summary + cause.detail


# limits of a pod, and of its node


@pytest.mark.parametrize(
    ("name", "category", "first", "resolution", "nodes"),
    [
        (
            "101-pt-ephemeral-storage-worker-never", Category.USER_CODE,
            "Worker 0 wrote more to its local disk than its ephemeral-storage limit allows (Evicted): "
            "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi.", "ephemeral-storage", {},
        ),
        (
            "101b-pt-emptydir-limit-worker-never", Category.USER_CODE,
            "Worker 0 wrote more to an emptyDir volume than its sizeLimit allows (Evicted): "
            'Usage of EmptyDir volume "scratch" exceeds the limit "10Mi".', "sizeLimit", {},
        ),
        (
            "101c-pt-node-pressure-master-never", Category.INFRASTRUCTURE,
            "Master 0 was evicted from its node (Evicted): The node was low on resource: ephemeral-storage.", "Retry",
            {"node-2": "Master 0 was evicted from its node (Evicted)"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value[:3].isdigit() else "",
)  # fmt: skip
def test_limit_of_a_pod_is_not_infrastructure(
    name: str, category: Category, first: str, resolution: str, nodes: dict[str, str]
) -> None:
    known = at_the_end(name)
    cause = diagnose(known.evidence)
    assert (cause.category, cause.failed_nodes) == (category, nodes)
    assert cause.summary.startswith(first)
    assert resolution in cause.resolution


# loops without back-off


@pytest.mark.parametrize(
    ("name", "replica", "why"),
    [
        ("107-pt-rejected-out-of-cpu-worker-onfailure", "Worker 0", "was rejected by its node (OutOfcpu)"),
        ("107-pt-rejected-out-of-cpu-master-onfailure", "Master 0", "was rejected by its node (OutOfcpu)"),
        ("107d-pt-admission-error-worker-onfailure", "Worker 0", "was rejected by its node (UnexpectedAdmissionError)"),
        ("101d-pt-node-pressure-pinned-worker-onfailure", "Worker 0", "was rejected by its node (Evicted)"),
        ("101-pt-ephemeral-storage-worker-onfailure", "Worker 0", "wrote more to its local disk"),
    ],
)
def test_pods_that_are_replaced_without_end_are_a_crash_loop(name: str, replica: str, why: str) -> None:
    limit = 3
    known = until(name, lambda known: known.restarts.crash_loop(limit))
    loop = known.restarts.crash_loop(limit)
    assert loop is not None
    assert (loop.replica, loop.failures, loop.of_pods) == (replica, limit, True)
    cause = diagnose_crash_loop(loop, known.evidence)
    assert cause.summary.startswith(f"{replica} failed 3 times in a row, each within 10 minutes of its start (crash_")
    assert why in cause.summary + cause.detail
    assert known.pods.restarts >= limit - 1, "max_restarts counts those that were replaced"


def test_a_rejected_pod_counts_once() -> None:
    recorded = changes("107d-pt-admission-error-worker-onfailure")
    rejected = {
        c["object"]["metadata"]["uid"] for c in recorded if c["object"]["status"].get("reason", "").startswith("Unexp")
    }
    *_, known = replay(recorded)
    loop = known.restarts.crash_loop(1)
    assert loop is not None
    assert loop.failures == len(rejected)


def test_evictions_by_the_api_are_no_crash_loop() -> None:
    for name in ("100-pt-evicted-master-onfailure", "104-pt-silent-node-master-onfailure"):
        assert not any(known.restarts.crash_loop(1) for known in replay(changes(name)))


# silence


@pytest.mark.parametrize("name", [name for name in RECORDED if name.startswith("104")])
def test_silent_node_is_said_before_its_pods_are_evicted(name: str) -> None:
    known = until(name, lambda known: silent_nodes(known.pods.live))
    evicted = until(name, lambda known: any("DisruptionTarget" in json.dumps(pod) for pod in known.pods.live))
    assert evicted.t - known.t > 290
    ((node, since),) = silent_nodes(known.pods.live).items()
    text = describe_silence(node, since)
    assert text.startswith(f"Node {node} has not reported since 14:3")
    assert text.endswith(" UTC. Kubernetes evicts its pods after 5 minutes.")
    silent = [pod for pod in known.pods.live if state_of_pod(pod, known.kind) == SILENT]
    assert silent
    line = replica_status(known.kind, known.job, known.pods.groups, NOW).line
    assert f" {SILENT} " in line


ANNOUNCED_SHUTDOWN = "105c-pt-node-shutdown-master-never"  # the kubelet of its node announces that it ends


@pytest.mark.parametrize("name", [n for n in RECORDED if not n.startswith("104") and n != ANNOUNCED_SHUTDOWN])
def test_pods_that_are_not_ready_for_another_reason_are_not_silent(name: str) -> None:
    assert not any(silent_nodes(known.pods.live) for known in replay(changes(name)))


STILL_RUNS = "Its earlier pod may still run on node-{}: both may write the same checkpoint."


@pytest.mark.parametrize(
    ("name", "warnings"),
    [
        ("100f-trainjob-evicted-deaf-30s-default", 1),
        ("103-pt-node-deleted-master-onfailure", 1),
        ("104-trainjob-silent-node-default", 2),
        ("104b-pt-silent-node-out-of-service-master-onfailure", 1),
        ("104-pt-silent-node-master-onfailure", 0),
        ("100-pt-evicted-master-onfailure", 0),
    ],
)
def test_successor_beside_a_pod_that_may_still_run(name: str, warnings: int) -> None:
    *_, last = replay(changes(name))
    found = [text for text in last.warnings if "may still run" in text]
    assert len(found) == warnings, last.warnings
    assert all(text.splitlines()[1] in [STILL_RUNS.format(n) for n in range(1, 5)] for text in found)


# pods after the end


@pytest.mark.parametrize("name", ["103-pt-node-deleted-master-never", "105c-pt-node-shutdown-master-never"])
def test_master_that_is_created_after_the_failure_is_not_its_cause(name: str) -> None:
    end, (*_, last) = at_the_end(name), replay(changes(name))
    masters = [pod for pod in last.pods.all if pod["metadata"]["name"] == "run-master-0"]
    assert len(masters) == 2
    assert diagnose(last.evidence).summary == diagnose(end.evidence).summary
    assert diagnose(last.evidence).summary.startswith("Master 0 ")
