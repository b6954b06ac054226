"""What the recordings of TrainJobs do not show, or not quickly: Indexed Jobs, JobSets that restart, builds, races."""

from __future__ import annotations

from typing import Any

import pytest

from components.controller_play import NAMESPACE, Play
from ktrain_embedded.controllers import jobpods, runtimes, trainjob, trainjob_build
from ktrain_embedded.controllers.batchjob import JobController
from ktrain_embedded.controllers.common import is_active
from ktrain_embedded.controllers.jobset import JobSetController
from ktrain_embedded.controllers.trainjob import TrainJobController
from ktrain_embedded.objects import jobsets
from ktrain_embedded.objects import resources as r

Obj = dict[str, Any]


def template(policy: str = "Never") -> Obj:
    return {"spec": {"restartPolicy": policy, "containers": [{"name": "node", "image": "i"}]}}


def indexed(pods: int, **spec: Any) -> Play:
    """A play with the Indexed Job `job`."""
    play = Play(JobController)
    counts = {"completionMode": "Indexed", "parallelism": pods, "completions": pods}
    play.create(r.BATCH_JOB, {"metadata": {"name": "job"}, "spec": {**counts, "template": template(), **spec}})
    return play


def jobset(*names: str, **spec: Any) -> Play:
    """A play with the JobSet `set` of replicated jobs with one pod each."""
    play = Play(JobSetController, JobController)
    job = {"parallelism": 1, "completions": 1, "backoffLimit": 0, "template": template()}
    replicated = [{"name": name, "template": {"spec": job}} for name in names]
    made: Obj = {"metadata": {"name": "set"}, "spec": {"replicatedJobs": replicated, **spec}}
    jobsets.complete(made)
    play.create(r.JOBSET, made)
    return play


def train(**spec: Any) -> Play:
    """A play with the TrainJob `train` on torch-distributed."""
    play = Play(TrainJobController, JobSetController, JobController)
    runtimes.install(play.store)
    reference = {"name": "torch-distributed", "apiGroup": r.TRAINER, "kind": "ClusterTrainingRuntime"}
    play.create(r.TRAINJOB, {"metadata": {"name": "train"}, "spec": {"runtimeRef": reference, "trainer": {}, **spec}})
    return play


def pod_of(play: Play, prefix: str) -> str:
    """The name of the pod that begins so and has not ended."""
    found = [p["metadata"]["name"] for p in play.store.list(r.POD, NAMESPACE) if is_active(p)]
    return next(name for name in found if name.startswith(prefix))


class TestIndexedJobs:
    @pytest.mark.parametrize(
        ("found", "text"), [([], ""), ([0, 1], "0,1"), ([0, 1, 2], "0-2"), ([1, 3, 4, 5, 7], "1,3-5,7")]
    )
    def test_completed_indexes_are_written_as_ranges(self, found: list[int], text: str) -> None:
        assert jobpods.format_indexes(found) == text
        assert jobpods.parse_indexes(text) == set(found)

    def test_each_index_has_one_pod(self) -> None:
        play = indexed(2)
        pods = play.store.list(r.POD, NAMESPACE)
        assert [p["spec"]["hostname"] for p in pods] == ["job-0", "job-1"]
        assert [p["metadata"]["labels"][jobpods.COMPLETION_INDEX] for p in pods] == ["0", "1"]
        assert all(p["spec"]["containers"][0]["env"] == [jobpods.INDEX_VARIABLE] for p in pods)

    def test_no_more_pods_than_parallelism_run_at_once(self) -> None:
        play = indexed(3, parallelism=1)
        for index in range(3):
            assert play.names(r.POD)[index:] == [pod_of(play, f"job-{index}-")]
            play.exit(pod_of(play, f"job-{index}-"), 0)
            play.wait(1)
        assert play.types(r.BATCH_JOB, "job") == ["SuccessCriteriaMet=True", "Complete=True"]
        assert play.store.get(r.BATCH_JOB, NAMESPACE, "job")["status"]["completedIndexes"] == "0-2"

    def test_failed_index_is_retried_after_ten_seconds(self) -> None:
        play = indexed(2, backoffLimit=2)
        play.exit(pod_of(play, "job-1-"), 1)
        play.wait(5)
        assert len(play.names(r.POD)) == 2
        play.wait(6)
        assert [n[:6] for n in play.names(r.POD)] == ["job-0-", "job-1-", "job-1-"]

    def test_job_without_completions_is_complete_at_once(self) -> None:
        play = indexed(0)
        assert play.names(r.POD) == []
        assert play.types(r.BATCH_JOB, "job") == ["SuccessCriteriaMet=True", "Complete=True"]

    def test_a_job_without_indexes_counts_its_successes(self) -> None:
        play = indexed(2, completionMode="NonIndexed", parallelism=1, completions=2)
        for _ in range(2):
            play.exit(pod_of(play, "job-"), 0)
            play.wait(1)
        assert len(play.names(r.POD)) == 2
        assert play.types(r.BATCH_JOB, "job") == ["SuccessCriteriaMet=True", "Complete=True"]


class TestJobSets:
    def test_a_failure_restarts_all_jobs_with_the_next_attempt(self) -> None:
        play = jobset("a", "b", failurePolicy={"maxRestarts": 1})
        play.exit(pod_of(play, "set-a-0-"), 1)
        play.wait(1)
        play.reap()
        play.wait(1)
        status = play.store.get(r.JOBSET, NAMESPACE, "set")["status"]
        assert (status["restarts"], status["restartsCountTowardsMax"]) == (1, 1)
        pods = play.store.list(r.POD, NAMESPACE)
        assert [p["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] for p in pods] == ["1", "1"]
        play.exit(pod_of(play, "set-b-0-"), 1)
        play.wait(1)
        assert "ReachedMaxRestarts" in play.conditions(r.JOBSET, "set")[-1]

    def test_failure_policy_rule_fails_the_jobset_at_once(self) -> None:
        rules = [{"name": "r", "action": "FailJobSet", "targetReplicatedJobs": ["a"]}]
        play = jobset("a", "b", failurePolicy={"maxRestarts": 9, "rules": rules})
        play.exit(pod_of(play, "set-a-0-"), 1)
        play.wait(1)
        assert "FailJobSetFailurePolicyAction" in play.conditions(r.JOBSET, "set")[-1]

    def test_jobs_start_in_order(self) -> None:
        play = jobset("a", "b", startupPolicy={"startupPolicyOrder": "InOrder"})
        assert play.names(r.BATCH_JOB) == ["set-a-0"]
        play.run(pod_of(play, "set-a-0-"))
        play.wait(1)
        assert play.names(r.BATCH_JOB) == ["set-a-0", "set-b-0"]

    def test_end_of_the_jobset_deletes_running_jobs(self) -> None:
        play = jobset("a", "b", successPolicy={"operator": "Any"})
        play.exit(pod_of(play, "set-a-0-"), 0)
        play.wait(1)
        play.reap()
        play.wait(1)
        assert play.names(r.BATCH_JOB) == ["set-a-0"]


class TestTrainJobs:
    def test_restarts_in_place_fail_the_job_at_the_backoff_limit(self) -> None:
        play = train()
        pod = pod_of(play, "train-node-0-0-")
        play.run(pod, restarts=5)
        play.wait(1)
        assert play.types(r.TRAINJOB, "train") == []
        play.run(pod, restarts=6)
        play.wait(1)
        play.reap()
        play.wait(1)
        assert play.types(r.TRAINJOB, "train") == ["Failed=True"]
        assert play.names(r.POD) == []

    def test_foreground_deletion_recreates_the_jobset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trainjob, "DELAYED_DELETION_SHARE", 0.0)
        play = train()
        first = play.store.get(r.JOBSET, NAMESPACE, "train")["metadata"]["uid"]
        play.store.delete(r.TRAINJOB, NAMESPACE, "train", propagation="Foreground")
        play.wait(1)
        play.reap()
        play.wait(1)
        assert play.store.get(r.JOBSET, NAMESPACE, "train")["metadata"]["uid"] != first

    def test_orphaned_snapshot_gives_an_event(self) -> None:
        play = train()
        play.store.delete(r.TRAINJOB, NAMESPACE, "train", propagation="Orphan")
        play.settle()
        play.wait(1)
        assert play.names(r.TRAINJOB) == []
        assert any(trainjob.FOREIGN_SNAPSHOT in event for event in play.events("train"))

    @pytest.mark.parametrize(
        ("resources", "processes"),
        [({}, "1"), ({"limits": {"cpu": "2500m"}}, "3"), ({"limits": {"nvidia.com/gpu": 4}}, "auto")],
    )
    def test_processes_per_node_follow_the_resources(self, resources: Obj, processes: str) -> None:
        assert env_of(build({"resourcesPerNode": resources}))["PET_NPROC_PER_NODE"] == processes

    def test_the_users_environment_comes_before_the_policys(self) -> None:
        names = list(env_of(build({"env": [{"name": "A", "value": "1"}], "numNodes": 3})))
        assert names[:2] == ["A", "PET_NNODES"]

    def test_patch_of_an_unknown_container_is_added_first(self) -> None:
        mount = {"name": "main", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
        job = {"spec": {"template": {"spec": {"containers": [mount]}}}}
        changes = {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": job}]}}}
        patches = [{"manager": "a/b", "trainingRuntimeSpec": changes}]
        assert [x["name"] for x in containers(build({}, runtimePatches=patches))] == ["main", "node"]

    def test_mpi_counts_the_launcher_as_a_node(self) -> None:
        built = build({"numNodes": 3, "numProcPerNode": 2}, runtimes.mpi_distributed())
        assert built.hostfile == (
            "train-node-0-0.train slots=2\ntrain-node-0-1.train slots=2\ntrain-launcher-0-0.train slots=2\n"
        )

    @pytest.mark.parametrize(("trainer", "node", "launcher"), [({}, 3, 1), ({"numNodes": 2}, 1, 1)])
    def test_the_runtime_of_mpi_has_its_own_number_of_nodes(self, trainer: Obj, node: int, launcher: int) -> None:
        """The policy's numNodes is that of the job with the label of the trainer: the launcher."""
        runtime = runtimes.mpi_distributed()
        runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = 3
        jobs = build(trainer, runtime).jobset["spec"]["replicatedJobs"]
        assert [job["template"]["spec"]["parallelism"] for job in jobs] == [node, launcher]

    def test_errors_are_reported_by_events_of_the_new_api(self) -> None:
        play = train()
        play.create(r.TRAINJOB, {
            "metadata": {"name": "n" * 49},
            "spec": play.store.get(r.TRAINJOB, NAMESPACE, "train")["spec"],
        })  # fmt: skip
        event = next(e for e in play.store.list(r.EVENT) if e["reason"] == "TrainJobResourcesCreationFailed")
        assert event["message"].endswith("pod names generated for this JobSet will exceed 63 characters")
        assert (event["lastTimestamp"], event.get("count"), event["source"]) == (None, None, {})


def build(trainer: Obj, runtime: Obj | None = None, **spec: Any) -> trainjob_build.Built:
    head = {"apiVersion": r.TRAINJOB.api_version, "kind": "TrainJob"}
    job = {
        **head,
        "metadata": {"name": "train", "namespace": NAMESPACE, "uid": "u"},
        "spec": {"trainer": trainer, **spec},
    }
    return trainjob_build.build(job, runtime or runtimes.torch_distributed())


def containers(built: trainjob_build.Built) -> list[Obj]:
    found: list[Obj] = built.jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    return found


def env_of(built: trainjob_build.Built) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in containers(built)[0]["env"]}
