"""Each feature once through Airflow's own processes. All runs share one Airflow and start together.

CONTRIBUTING.md lists the features. The other modules of this directory run only in `make test-all`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from tests import clusters
from tests.clusters import TestCluster, require, served_version
from tests.e2e.airflow import Airflow, running
from tests.e2e.conftest import DAGS, PATIENCE
from tests.e2e.kube import Kube
from tests.e2e.page import get, page, run_of, token
from tests.e2e.scenario import Stage, Watcher
from tests.engine.tasks import api_of
from tests.job_control.jobs import Jobs
from tests.kueue.workloads import write_workload
from tests.smtp import Mailbox, mailbox

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-features"), pytest.mark.timeout(1500)]
KINDS = {"mpijob": MPIJOB, "trainjob": TRAINJOB, "killed_while_deferred": TRAINJOB}  # the others: PyTorchJob
#: Runs that a test starts itself, after what it prepares.
LATER = ("job_control",)
ORPHANS = "orphans"  # the namespace of the reaper, which leaves the jobs of the other runs alone
WRONG = """
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG("wrong_literal"):
    PyTorchJobOperator(task_id="train", image="train:1", workers=-1)
"""
PENDING = {
    "type": "QuotaReserved", "status": "False", "reason": "Pending", "lastTransitionTime": "2026-11-22T02:00:00Z",
    "message": "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor f, 2 more needed",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with clusters.cluster(nodes=4, gpus=8, kueue=True) as reached:
        yield reached


@pytest.fixture(scope="module")
def mails() -> Iterator[Mailbox]:
    """What the callbacks of docs/how-to/notifications.md send."""
    with mailbox() as box:
        yield box


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, mails: Mailbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """An Airflow with the DAGs of this module alone."""
    dags = tmp_path_factory.mktemp("dags")
    for name in ("features.py", "training"):
        (dags / name).symlink_to(DAGS / name)
    (dags / "wrong_literal.py").write_text(WRONG)
    settings = {
        **PATIENCE,
        "TEST_CHECKPOINTS": str(tmp_path_factory.mktemp("checkpoints")),
        "AIRFLOW__KTRAIN__WORKER_SECONDS": "2",
        "AIRFLOW_CONN_SMTP_DEFAULT": mails.connection,
    }
    with running(tmp_path_factory.mktemp("airflow"), cluster, dags, **settings) as started:
        yield started


@pytest.fixture(scope="module")
def stages(request: pytest.FixtureRequest, airflow: Airflow, cluster: TestCluster) -> Iterator[dict[str, Stage]]:
    """The runs of all tests that were selected, by the names of their DAGs. They have started."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params["stage"] for item in items if "stage" in item.fixturenames}
    if "orphan" in names:
        clusters.core(cluster.kubeconfig).create_namespace({"metadata": {"name": ORPHANS}})
    if "asset" in names:
        unpause(airflow, "feature_asset_consumer")
    made: dict[str, Stage] = {}
    with contextlib.ExitStack() as watchers:
        kubes: dict[Kind, Kube] = {kind: kube_of(cluster, kind) for kind in (PYTORCHJOB, MPIJOB, TRAINJOB)}
        jobs = {kind: watchers.enter_context(Watcher(kube)) for kind, kube in kubes.items()}
        pods = watchers.enter_context(Watcher(kubes[PYTORCHJOB], pods=True))
        for name in sorted(names):
            kind = KINDS.get(name, PYTORCHJOB)
            made[name] = Stage(airflow, cluster, kubes[kind], jobs[kind], f"feature_{name}", pods)
            if name not in LATER:
                made[name].start()
        yield made


def kube_of(cluster: TestCluster, kind: Kind) -> Kube:
    return Kube(str(cluster.kubeconfig), cluster.namespace, kind, served_version(cluster, kind))


@pytest.fixture
def stage(request: pytest.FixtureRequest, stages: dict[str, Stage]) -> Stage:
    made = stages[request.param]
    require(made.cluster, made.kube.kind, runtime="torch-distributed")
    return made


def of(*names: str) -> pytest.MarkDecorator:
    """The names of the DAGs, without their prefix, whose runs a test gets as `stage`."""
    return pytest.mark.parametrize("stage", names, indirect=True)


def unpause(airflow: Airflow, dag: str) -> None:
    airflow.wait(f"the DAG {dag} is known", lambda: airflow.known(dag))
    airflow.call("PATCH", f"/api/v2/dags/{dag}", {"is_paused": False})


def xcom(stage: Stage, key: str = "return_value", task: str = "train") -> Any:
    stage.wait(f"the XCom {key}", lambda: key in stage.airflow.xcom_keys(stage.dag, stage.run, task))
    return stage.airflow.xcom(stage.dag, stage.run, task, key)


def wait_mail(mails: Mailbox, stage: Stage) -> str:
    """The cause in the only mail about a task."""
    (cause,) = stage.wait("a mail", lambda: mails.subjects(f"{stage.dag}.train: "))
    return str(cause)


def wait_gone(stage: Stage) -> None:
    """Wait until the job is gone. Below Airflow 3.3, a job that has succeeded is kept for a retry, without pods."""
    if compat.calls_on_kill() or not stage.ended_as("Succeeded"):
        stage.wait("the job is gone", lambda: not stage.kube.jobs(stage.selector))
    stage.check_freed()


@of("worker")
def test_worker_follows_a_training_with_its_code(stage: Stage) -> None:
    stage.wait_state("success")
    assert xcom(stage) == {"trained": True}
    log = stage.log()
    assert "Code: 2 files" in log
    assert "[Master 0] greeting: hello from the code" in log
    assert "API_KEY" in log
    assert "swordfish" not in log
    wait_gone(stage)
    if not stage.kube.jobs(stage.selector):
        found = stage.kube.core.list_namespaced_config_map(stage.kube.namespace, label_selector=stage.selector)
        assert not found.items, "the ConfigMap of the code is gone with the job"


@of("deferred")
def test_deferred_training_logs_live_and_its_page_follows(stage: Stage) -> None:
    airflow, admin = stage.airflow, token(stage.airflow)
    stage.wait_state("deferred")
    job = stage.wait_created()["metadata"]["name"]
    stage.wait_line("[Worker 0] line 4")
    stage.wait_line("[Master 0] line 4")
    assert stage.wait_state("deferred")["try_number"] == 1
    stage.wait(
        "no worker has the task", lambda: not airflow.task_processes(airflow.task(stage.dag, stage.run, "train")["id"])
    )
    listed = f"{run_of(stage.run)}&amp;task_id=train"
    stage.wait("the table of trainings has it", lambda: listed in get(airflow.url, "/ktrain/trainings", admin)[1])
    update = page(stage.dag, stage.run, "train", "/update")
    stage.wait("the page has points", lambda: len(series(get(airflow.url, update, admin))) == 4)
    links = airflow.links(stage.dag, stage.run, "train")
    assert links["Training job"] == f"https://board.example/pytorchjobs/{job}"
    assert str(links["Training"]).startswith(f"/ktrain/training?dag_id={stage.dag}&run_id=")

    stage.kube.let_go(stage.selector, 2)
    stage.wait_state("success")
    assert xcom(stage) == {"loss": 0.1}
    assert xcom(stage, "metrics")["loss"] == {"last": 0.1, "step": 8, "best": 0.1, "best_step": 8}
    assert xcom(stage, "usage")["held"] > 0
    _, text, headers = get(airflow.url, page(stage.dag, stage.run, "train"), admin)
    assert "script-src 'self'" in headers["content-security-policy"]
    _, _, headers = get(airflow.url, update, admin)
    assert get(airflow.url, update, admin, tag=headers["etag"])[0] == 304
    assert all(shown in text for shown in ("Succeeded", "Master 0", "Worker 0"))
    records = airflow.records(stage.dag, stage.run, "train")
    for replica in stage.replicas:
        mine = [record for record in records if record.get("logger") == replica]
        lines = [line for record in mine for line in record["event"].splitlines() if "] line" in line]
        assert lines == [f"[{replica}] line {n}" for n in range(1, 9)], "each once and in order"
        assert {record["level"] for record in mine} == {"info"}
    wait_gone(stage)
    assert airflow.links(stage.dag, stage.run, "train") == links


def series(answer: tuple[int, str, Any]) -> list[Any]:
    """The points of the loss in an update of the page."""
    return list(json.loads(answer[1])["series"].get("loss", [[]])[0]) if answer[0] == 200 else []


@of("failure")
def test_failure_begins_with_its_cause(stage: Stage, mails: Mailbox) -> None:
    stage.wait_state("failed")
    assert wait_mail(mails, stage) == "Master 0 failed: ValueError: bad shard (exit code 3)"
    records = stage.airflow.records(stage.dag, stage.run, "train")
    errors = [record["event"] for record in records if record["level"] == "error" and record.get("logger") == "job"]
    assert errors
    assert errors[0].startswith("Master 0 failed: ValueError: bad shard")
    assert "TrainingUserCodeError: Master 0 failed: ValueError: bad shard" in stage.log()
    text = get(stage.airflow.url, page(stage.dag, stage.run, "train"), token(stage.airflow))[1]
    assert text.index("Why it failed") < text.index("ValueError: bad shard") < text.index("Replicas")
    wait_gone(stage)


@of("killed_in_worker")
def test_kill_of_a_worker_releases_the_job(stage: Stage, mails: Mailbox) -> None:
    stage.wait_line("[Master 0] begins")
    stage.set_state("failed")
    stage.check_freed()
    stage.check_created(1)
    assert stage.wait_state("failed")["try_number"] == 1
    stage.wait_line("TrainingKilledError: The task was killed")
    assert wait_mail(mails, stage).startswith("The task was killed")


@of("killed_while_deferred")
def test_kill_of_a_deferred_task_releases_the_job(stage: Stage, mails: Mailbox) -> None:
    stage.wait_followed()
    stage.set_state("failed")
    wait_gone(stage)
    stage.check_created(1)
    assert stage.wait_state("failed")["try_number"] == 1
    stage.wait_line("2 GPUs released")
    assert not mails.subjects(f"{stage.dag}.train: ")


@of("adopted")
def test_retry_adopts_the_job_of_a_lost_worker(stage: Stage, mails: Mailbox) -> None:
    stage.wait_line("[Master 0] begins")
    stage.kill_task(signal.SIGKILL)
    stage.wait_try(2)
    stage.wait_line("Adopting it.", 2)
    stage.kube.let_go(stage.selector, 1)
    assert stage.wait_state("success")["try_number"] == 2
    assert "[Master 0] goes on" in stage.log(2)
    assert wait_mail(mails, stage) == "Airflow lost the worker, see the log"
    stage.check_created(1)
    wait_gone(stage)


@of("cleared")
def test_clear_replaces_the_job(stage: Stage) -> None:
    """The trigger of the old try is killed while the new try already runs: it must not change the new job."""
    stage.wait_followed()
    stage.clear()
    stage.wait_try(2)
    stage.wait_created(2)
    stage.wait_state("success")
    stage.check_created(2)
    wait_gone(stage)


@of("deadline")
def test_deadline_ends_a_deferred_training(stage: Stage, mails: Mailbox) -> None:
    assert stage.wait_state("failed")["try_number"] == 1
    assert "(execution_timeout)" in wait_mail(mails, stage)
    assert "the triggerer now follows" in stage.log()
    assert "TrainingTimeoutError" in stage.log()
    assert "1 GPU released" in stage.log()
    wait_gone(stage)


@of("progress_timeout")
def test_limit_ends_a_training_that_hangs(stage: Stage) -> None:
    stage.wait_state("failed")
    assert "reported no step higher than 7 for 5 s (progress_timeout)" in stage.log()
    wait_gone(stage)


@of("skip")
def test_exit_code_skips_the_task(stage: Stage) -> None:
    stage.wait_state("skipped")
    stage.airflow.wait_state(stage.dag, stage.run, "after", "skipped")
    assert "Master 0 failed with exit code 99" in stage.log()
    wait_gone(stage)


@of("checkpoint")
def test_retry_resumes_from_the_checkpoint_on_another_node(stage: Stage, mails: Mailbox) -> None:
    assert stage.wait_state("success")["try_number"] == 2
    assert wait_mail(mails, stage).startswith("Master 0 has a broken GPU")
    assert "Master 0 has a broken GPU" in stage.log()
    assert "[Master 0] resumed after step 4" in stage.log(2)
    if compat.calls_on_kill():  # Airflow 3.3 or newer
        assert "The job avoids 1 node on which earlier tries failed." in stage.log(2)
        tries = stage.airflow.stored(stage.dag, stage.run, "train", "ktrain_tries")["tries"]
        assert [one["try_number"] for one in tries] == [1, 2]
        assert all("held" in one["usage"] for one in tries)  # 0 if a try ended within a second
    stage.check_created(2)
    wait_gone(stage)


@of("mpijob")
def test_mpijob(stage: Stage) -> None:
    stage.wait_state("success")
    assert xcom(stage) == {"kind": "MPIJob"}
    assert "[Launcher 0] launched" in stage.log()
    wait_gone(stage)


@of("trainjob")
def test_deferred_trainjob_that_is_kept(stage: Stage) -> None:
    stage.wait_followed()
    stage.kube.let_go(stage.selector, 2)
    stage.wait_state("success")
    assert xcom(stage) == {"kind": "TrainJob"}
    assert {"[node 0] node 0", "[node 1] node 1"} <= set(stage.log().splitlines())
    stage.check_freed()
    (job,) = stage.kube.jobs(stage.selector)
    assert job["metadata"]["uid"] == stage.wait_created()["metadata"]["uid"]


@of("function")
def test_mapped_function_returns_its_values(stage: Stage) -> None:
    stage.airflow.wait_state(stage.dag, stage.run, "total", "success")
    assert stage.airflow.xcom(stage.dag, stage.run, "total") == 30
    wait_gone(stage)


@of("asset")
def test_evicted_training_is_retried_before_its_asset_is_updated(stage: Stage) -> None:
    """The program saves and exits with 0 when it is evicted: its job succeeds, and the task does not."""
    stage.wait_line("[Master 0] begins")
    (pod,) = stage.kube.pods(stage.selector)
    stage.kube.evict(pod.metadata.name)
    assert stage.wait_state("success")["try_number"] == 2
    assert "Master 0 ended with exit code 0 after it was evicted from " in stage.log(1)
    assert "[Master 0] complete" in stage.log(2)

    def consumed() -> list[Any]:
        runs = stage.airflow.runs("feature_asset_consumer")
        return [run for run in runs if run["state"] == "success"]

    (run,) = stage.wait("the run of the consumer", consumed)
    (extra,) = stage.airflow.xcom("feature_asset_consumer", run["dag_run_id"], "receive")
    assert (extra["job"], extra["usage"]) == (xcom(stage, "job"), xcom(stage, "usage"))
    assert len(stage.airflow.runs("feature_asset_consumer")) == 1
    wait_gone(stage)


@pytest.mark.embedded("writes the Workload itself, where no Kueue runs")
@of("queue")
def test_queued_training_reports_its_queue(stage: Stage, cluster: TestCluster) -> None:
    stage.wait_followed()
    job = stage.wait_created()
    assert job["spec"]["runPolicy"]["suspend"]
    asyncio.run(write(cluster, job))
    stage.wait_line(f"Queued in LocalQueue team-a: Pending: {PENDING['message']}")
    assert stage.gpus() == 0
    name, unsuspended = job["metadata"]["name"], {"spec": {"runPolicy": {"suspend": False}}}
    stage.kube.custom.patch_namespaced_custom_object(*stage.kube.resource, name, unsuspended)
    assert stage.wait_state("success")["try_number"] == 1
    assert "[Master 0] admitted" in stage.log()
    wait_gone(stage)


async def write(cluster: TestCluster, job: dict[str, Any]) -> None:
    async with api_of(cluster) as api:
        await write_workload(api, job, [PENDING])


@of("job_control")
def test_sensor_and_job_control_act_on_a_job_of_others(stage: Stage) -> None:
    with Jobs(stage.cluster) as jobs:
        manifest = jobs.build(workers=1, spec={"elasticPolicy": {"minReplicas": 1, "maxReplicas": 2}})
        del manifest["spec"]["pytorchReplicaSpecs"]["Master"]
        manifest["metadata"]["name"] = "background"
        job = jobs.submit(manifest)
        stage.start()
        stage.airflow.wait_state(stage.dag, stage.run, "delete", "success")
        assert jobs.read(job) is None
    done = {task: xcom(stage, task=task) for task in ("scale", "suspend", "resume", "delete")}
    assert "scaled from 1 to 2 Workers" in done["scale"]
    assert "suspended" in done["suspend"]
    assert "resumed" in done["resume"]
    assert "deleted" in done["delete"]


@of("orphan")
def test_reaper_releases_the_job_of_a_lost_worker(stage: Stage) -> None:
    """The worker is killed, and its task has no retry: only the reaper's second check releases the job."""
    stage.wait_line("[Master 0] begins")
    orphans = Kube(str(stage.cluster.kubeconfig), ORPHANS)
    stage.kill_task(signal.SIGKILL)
    stage.wait_state("failed")
    assert orphans.gpus_held() == 1
    (job,) = (job["metadata"]["name"] for job in orphans.jobs())
    reaper = Stage(stage.airflow, stage.cluster, orphans, stage.watcher, "feature_reaper", stage.pods).start()
    reaper.airflow.wait_state(reaper.dag, reaper.run, "reap", "success")
    assert not orphans.jobs()
    assert orphans.gpus_held() == 0
    log = reaper.airflow.log(reaper.dag, reaper.run, "reap")
    assert "is left over: its task is failed" in log
    assert f"{job} deleted. 1 GPU released, 1 pod deleted." in log


def test_invalid_literal_is_an_import_error(airflow: Airflow) -> None:
    def error() -> str | None:
        errors = airflow.call("GET", "/api/v2/importErrors?limit=100")["import_errors"]
        return next((e["stack_trace"] for e in errors if e["filename"].endswith("wrong_literal.py")), None)

    assert "workers: invalid parameter; found -1" in airflow.wait("the import error", error)
