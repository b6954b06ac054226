"""`make chaos`: processes are killed, stalled or made unavailable while a task trains; then the job's state is checked.

After each test: the expected number of jobs were ever created, no pod of a finished task holds a GPU within a minute
(or the log reports that the reaper's next run frees it), the task's state is right, and its log is correct.
"""

from __future__ import annotations

import re
import signal

import pytest

from airflow_provider_ktrain.core.kinds import TRAINJOB, Kind
from airflow_provider_ktrain.core.state.status import wants_suspension
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.chaos import airflow, begin, check_end, check_reaped, cluster, triggerers
from tests.e2e.scenario import Begin, Stage, of_each_kind

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
needs_faults = pytest.mark.embedded("sets fault switches")
AWAY = 60  # seconds without an API server
JOBS = "/pytorchjobs"


# the worker


@needs_faults
def test_worker_killed_before_the_create(begin: Begin, cluster: TestCluster, airflow: Airflow) -> None:
    """Its create was sent, and the API server rejected it."""
    cluster.admin("status", status=503, verb="create", path=JOBS)
    stage = begin("chaos_worker_retries", seconds=5)
    stage.wait_line("can't process the request for PyTorchJob")
    stage.kill_task(signal.SIGKILL)
    stage.wait_state("up_for_retry", "queued", "running")
    stage.wait_try(2)
    assert not stage.created()
    cluster.admin("clear")
    check_end(stage, "success", try_number=2)
    stage.check_lines(5, try_number=2)


@of_each_kind
@needs_faults
def test_worker_killed_after_the_create(begin: Begin, kind: Kind, cluster: TestCluster, airflow: Airflow) -> None:
    """The job was created, but its next requests get no response."""
    stage = begin("chaos_worker_retries", kind, start=False)
    cluster.admin("status", status=503, verb="get,list,watch", path=f"/{kind.plural}")
    stage.start(seconds=15)
    wait_for("the job's pods", lambda: stage.gpus() == 2)
    stage.kill_task(signal.SIGKILL)
    stage.wait_try(2)
    cluster.admin("clear")
    check_end(stage, "success", try_number=2)
    stage.check_lines(15, try_number=2)
    # try 1 left it, or it succeeded for try 1 before a slow machine started try 2
    assert re.search(r"exists: .*try 1", stage.log(2))


@of_each_kind
def test_worker_lost_while_following(begin: Begin, kind: Kind, airflow: Airflow) -> None:
    """The process and its supervisor are killed: no process reports it. The retry continues with the job."""
    stage = begin("chaos_worker_retries", kind, seconds=60)
    stage.wait_line(f"[{stage.replicas[1]}] line 3")
    airflow.kill_worker()
    check_end(stage, "success", try_number=2)
    stage.check_lines(60, try_number=2)
    assert "Adopting it." in stage.log(2)


def test_worker_killed_after_execute_returned(begin: Begin) -> None:
    """Airflow doesn't have the success yet: the retry returns the result without another training.

    The result is stored. Below Airflow 3.3 it is read from the log of the kept job.
    """
    stage = begin("chaos_worker_ended", seconds=3)
    stage.wait_line("execute has returned")
    stage.kill_task(signal.SIGKILL)
    check_end(stage, "success", try_number=2)
    stage.check_succeeded_job()
    if stage.job() is None:
        assert "line 0" not in stage.log(2)


def test_worker_killed_after_it_released_a_job_that_is_not_good_enough(begin: Begin) -> None:
    """Airflow doesn't know yet that the task has failed for good: the retry fails without another training."""
    stage = begin("chaos_worker_unmet", seconds=3)
    stage.wait_line("the job is released")
    stage.check_succeeded_job()
    stage.kill_task(signal.SIGKILL)
    check_end(stage, "failed", try_number=2)
    assert "TrainingRequirementError: loss is 0.5, required < 0.1" in stage.log(2)


@of_each_kind
def test_worker_lost_for_good(begin: Begin, kind: Kind, airflow: Airflow) -> None:
    """Without a retry only the reaper is left to act."""
    stage = begin("chaos_worker", kind, seconds=600)
    stage.wait_line(f"[{stage.replicas[1]}] line 3")
    airflow.kill_worker()
    stage.wait_state("failed")
    check_reaped(stage)


def test_sigterm_to_the_worker(begin: Begin) -> None:
    """Airflow lets such a task continue and even succeed; it must not."""
    stage = begin("chaos_worker", seconds=600)
    stage.wait_line("[Worker 0] line 3")
    stage.kill_task(signal.SIGTERM)
    check_end(stage, "failed")
    assert "TrainingKilledError: The worker was stopped. No retry is left" in stage.log()


# the triggerer


def test_triggerer_killed_with_a_second_one_beside(begin: Begin, triggerers: Airflow) -> None:
    stage = begin("chaos_deferred", seconds=60)
    stage.wait_followed()
    triggerers.run("triggerer", "triggerer-2")
    triggerers.wait_triggerers(2)
    triggerers.signal("triggerer", signal.SIGKILL)
    check_end(stage, "success")
    stage.check_lines(60)
    assert len(stage.segments(1)) == 3, "the worker and two triggerers"


def replace_triggerer_after_the_end(stage: Stage, triggerers: Airflow) -> None:
    """Before its event: it delays that until it has run for ten seconds."""
    wait_for("the job has ended", stage.ended)
    wait_for("its pods have ended", lambda: not stage.gpus())
    triggerers.signal("triggerer", signal.SIGKILL)
    stage.wait_state("deferred", timeout=0)
    triggerers.run("triggerer", "triggerer-2")


def test_triggerer_killed_between_the_end_and_its_event(begin: Begin, triggerers: Airflow) -> None:
    """The job has ended, but Airflow hasn't been notified."""
    stage = begin("chaos_deferred_retries", seconds=6, wait=0)
    replace_triggerer_after_the_end(stage, triggerers)
    check_end(stage, "success")
    stage.check_succeeded_job()


def test_triggerer_killed_between_the_end_and_the_judgement(begin: Begin, triggerers: Airflow) -> None:
    """No process has compared the values with `require` yet: they are read again from the ended job."""
    stage = begin("chaos_deferred_unmet", seconds=6, wait=0)
    replace_triggerer_after_the_end(stage, triggerers)
    check_end(stage, "failed")
    assert "TrainingRequirementError: loss is 0.5, required < 0.1" in stage.log()


def test_nan_in_the_middle_ends_a_deferred_training(begin: Begin) -> None:
    """Two NaN in a row don't."""
    stage = begin("chaos_deferred_nan", seconds=600, nan_steps="3 4 30 31 32 33 34 35 36 37 38 39 40")
    stage.excuse()
    check_end(stage, "failed")
    assert "since step 30 (fail_on_nan)" in stage.log()


def test_triggerer_stalled_with_a_second_one_beside(begin: Begin, triggerers: Airflow) -> None:
    """When it resumes, Airflow kills its trigger, which the other one already runs: the job must not be affected.

    On a loaded machine, it takes more than a minute until both have noticed.
    """
    stage = begin("chaos_deferred", seconds=150)
    stage.wait_followed()
    triggerers.run("triggerer", "triggerer-2")
    triggerers.wait_triggerers(2)
    triggerers.signal("triggerer", signal.SIGSTOP)
    wait_for("the other one has it", lambda: len(stage.segments(1)) == 3)
    triggerers.signal("triggerer", signal.SIGCONT)
    stage.wait_line("The task is deferred")
    check_end(stage, "success")
    stage.check_lines(150)


def test_marked_failed_before_a_triggerer_has_it(begin: Begin, triggerers: Airflow) -> None:
    """Between the worker's end and the trigger's start none of our code runs: the reaper releases the job."""
    stage = begin("chaos_deferred", seconds=600)
    wait_for("the job's pods", lambda: stage.gpus() == 2)
    triggerers.end("triggerer")
    stage.wait_state("deferred")
    stage.set_state("failed")
    stage.wait_state("failed")
    triggerers.run("triggerer")  # the reaper needs a triggerer, which has nothing to do with the job
    check_reaped(stage)


def test_deferral_times_out_with_its_triggerer(begin: Begin, triggerers: Airflow) -> None:
    """Airflow's own timeout, because the trigger could not enforce the deadline: the worker frees the GPUs."""
    stage = begin("chaos_timeout", seconds=600)
    stage.excuse()
    stage.wait_followed()
    triggerers.signal("triggerer", signal.SIGSTOP)
    check_end(stage, "failed")
    assert "2 GPUs released" in stage.log()
    assert "TrainingTimeoutError" in stage.log()


# what users do to a deferred task


def test_deadline_while_deferred(begin: Begin) -> None:
    stage = begin("chaos_deadline", seconds=600)
    stage.excuse()
    check_end(stage, "failed")
    assert "TrainingTimeoutError" in stage.log()
    assert "2 GPUs released" in stage.log()


def test_mark_success_while_deferred(begin: Begin) -> None:
    stage = begin("chaos_deferred", seconds=600)
    stage.wait_followed()
    stage.set_state("success")
    check_end(stage, "success")
    wait_for("the job is gone", lambda: stage.job() is None)


@of_each_kind
def test_mark_failed_while_deferred_with_keep_job(begin: Begin, kind: Kind) -> None:
    """The job is kept; its GPUs are released."""
    stage = begin("chaos_deferred_keeps", kind, seconds=600)
    stage.wait_followed()
    stage.set_state("failed")
    check_end(stage, "failed")
    job = stage.job()
    assert job is not None
    assert wants_suspension(job)


@of_each_kind
def test_clear_while_running(begin: Begin, kind: Kind) -> None:
    """The old worker's kill releases its job; the new try creates another job."""
    stage = begin("chaos_worker", kind, seconds=10)
    stage.wait_line(f"[{stage.replicas[1]}] line 3")
    stage.clear()
    stage.wait_try(2)
    check_end(stage, "success", jobs=2, try_number=2)
    stage.check_lines(10, try_number=2)


# the cluster


@needs_faults
def test_api_server_away_while_waiting(begin: Begin, cluster: TestCluster) -> None:
    seconds = 2 * AWAY + 30  # the program runs before, during and after it, also on a slow machine
    stage = begin("chaos_deferred", seconds=seconds)
    stage.wait_followed()
    cluster.admin("drop", seconds=AWAY)
    check_end(stage, "success")
    stage.check_lines(seconds)


@needs_faults
def test_api_server_away_while_releasing(begin: Begin, cluster: TestCluster) -> None:
    """The deletion is rejected until the API server is unavailable."""
    stage = begin("chaos_deferred", seconds=8)
    stage.wait_followed()
    cluster.admin("status", status=503, verb="delete", path=JOBS)
    stage.wait_line("is Succeeded")
    cluster.admin("clear")
    cluster.admin("drop", seconds=AWAY)
    check_end(stage, "success")
    stage.check_lines(8)


@needs_faults
def test_api_server_away_while_marked_failed(begin: Begin, cluster: TestCluster) -> None:
    """The triggerer retries for longer than Airflow allows for a kill."""
    stage = begin("chaos_deferred", seconds=600)
    stage.wait_followed()
    cluster.admin("drop", seconds=AWAY)
    stage.set_state("failed")
    wait_for("the API server is back", stage.answers)
    check_end(stage, "failed")
    stage.wait_line("2 GPUs released")


@of_each_kind
@pytest.mark.parametrize("dag", ["chaos_worker", "chaos_deferred"])
def test_job_deleted_under_us(begin: Begin, kind: Kind, dag: str) -> None:
    stage = begin(dag, kind, seconds=600)
    stage.wait_line(f"[{stage.replicas[1]}] line 3")
    if dag == "chaos_deferred":
        stage.wait_followed()
    stage.delete_job()
    check_end(stage, "failed")
    assert "TrainingInfrastructureError" in stage.log()


@of_each_kind
def test_job_deleted_under_us_with_a_retry(begin: Begin, kind: Kind) -> None:
    stage = begin("chaos_deferred_retries", kind, seconds=10)
    stage.wait_followed()
    stage.delete_job()
    check_end(stage, "success", jobs=2, try_number=2)
    stage.check_lines(10, try_number=2)


def test_trainjob_is_created_again_after_the_pods_of_the_old_one_have_stopped(begin: Begin) -> None:
    """Its name is free as soon as it is deleted, but its pods need some seconds to stop."""
    stage = begin("chaos_deferred_retries", TRAINJOB, seconds=10, stop_seconds=12)
    stage.wait_followed()
    stage.wait_line("[node 1] line 1")
    first = stage.wait_created()["metadata"]
    old = {pod.metadata.uid for pod in stage.kube.pods(stage.selector)}
    stage.delete_job()
    second = stage.wait_created(2)["metadata"]
    assert second["name"] == first["name"]
    assert not [pod.metadata.name for pod in stage.kube.pods(stage.selector) if pod.metadata.uid in old]
    check_end(stage, "success", jobs=2, try_number=2)
    stage.check_lines(10, try_number=2)
