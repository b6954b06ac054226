"""A training that has ended is never repeated and its outcome is never lost, whichever component fails to report it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from airflow.sdk.exceptions import AirflowException

from airflow_provider_ktrain.core.state.status import phase_of
from airflow_provider_ktrain.exceptions import TrainingReleaseError, TrainingTimeoutError, TrainingUserCodeError
from tests.clusters import IMAGE
from tests.operators.task_instance import Instance, Store, of_each_kind
from tests.operators.virtual_instance import VirtualInstance

RESULT = ["sh", "-c", """echo 'KTRAIN_RESULT {"loss": 0.5}'; sleep 3"""]
FAILS = ["sh", "-c", "echo no such file >&2; sleep 3; exit 3"]


def test_outcome_that_could_not_be_reported_is_taken_by_the_next_try(instance: Instance) -> None:
    """The next try adopts the result. The job is deleted when Airflow has the result."""
    with pytest.raises(ConnectionError):
        instance.execute(command=RESULT, deferrable=False, retries=1, refuses="return_value")
    (job,) = instance.jobs()
    assert not instance.running()
    assert instance.execute(command=RESULT, deferrable=False, number=2, retries=1) == {"loss": 0.5}
    assert instance.ti is not None
    assert instance.ti.xcoms["job"]["uid"] == job["metadata"]["uid"]
    assert not instance.jobs()


def test_job_that_succeeded_after_a_deferral_timeout_is_a_success(instance: Instance) -> None:
    """Airflow timed the deferral out because no triggerer was available; the training continued and succeeded."""
    instance.execute(command=RESULT)
    instance.wait_ended()
    assert instance.fail("Trigger timeout") == {"loss": 0.5}
    assert not instance.jobs()


def test_job_that_failed_after_a_deferral_timeout_raises_its_cause(instance: Instance) -> None:
    instance.execute(command=FAILS)
    instance.wait_ended()
    with pytest.raises(TrainingUserCodeError, match="exit code 3"):
        instance.fail("Trigger timeout")
    assert not instance.jobs()


@of_each_kind
def test_running_job_is_released_after_a_deferral_timeout(instance: Instance) -> None:
    instance.execute()
    with pytest.raises(TrainingTimeoutError):
        instance.fail("Trigger timeout")
    assert not instance.jobs()


# the outcome is stored and pushed to Airflow before the job is deleted


def away(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection points to no cluster."""
    config = yaml.safe_load(instance.cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    extra = {"kube_config": json.dumps(config)}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))


@of_each_kind
def test_worker_lost_after_execute_returned(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """Airflow hasn't heard of the success: the next try returns the same, and creates no job."""
    assert instance.execute(command=RESULT, deferrable=False, retries=1) == {"loss": 0.5}
    assert instance.ti is not None
    job = instance.ti.xcoms["job"]
    assert not instance.jobs()
    capsys.readouterr()
    assert instance.execute(command=RESULT, number=2, retries=1) == {"loss": 0.5}
    assert instance.ti.xcoms["job"] == job
    assert instance.ti.xcoms["usage"]["held"] > 0
    assert not instance.jobs()
    assert "its result is returned and nothing is submitted" in capsys.readouterr().out


def test_earlier_success_needs_no_cluster(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no valid parameters either."""
    instance.execute(command=RESULT, deferrable=False, retries=1, on_finish_action="keep_job")
    away(instance, monkeypatch)
    again: dict[str, Any] = {"number": 2, "retries": 1, "on_finish_action": "keep_job"}
    assert instance.execute(command=RESULT, rendered={"gpus": "no number"}, **again) == {"loss": 0.5}


def test_xcom_backend_fails_in_push(instance: Instance) -> None:
    """The job stays until Airflow has the result; the next try returns it and deletes the job."""
    with pytest.raises(ConnectionError):
        instance.execute(command=RESULT, deferrable=False, retries=2, refuses="return_value")
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]
    assert not instance.running()
    with pytest.raises(ConnectionError):
        instance.execute(command=RESULT, deferrable=False, number=2, retries=2, refuses="return_value")
    assert [kept["metadata"]["uid"] for kept in instance.jobs()] == [job["metadata"]["uid"]]
    assert instance.execute(command=RESULT, deferrable=False, number=3, retries=2) == {"loss": 0.5}
    assert not instance.jobs()


@pytest.mark.parametrize("key", ["usage", "metrics", "ktrain_status"])
def test_xcom_that_is_only_shown_fails_no_training(instance: Instance, key: str) -> None:
    program = f"""echo 'KTRAIN_METRIC {{"step": 1, "loss": 0.5}}'; {RESULT[-1]}"""
    assert instance.execute(command=["sh", "-c", program], deferrable=False, refuses=key) == {"loss": 0.5}
    assert not instance.jobs()


@of_each_kind
def test_result_is_pushed_before_the_job_is_deleted(instance: Instance) -> None:
    assert instance.execute(command=RESULT, deferrable=False, multiple_outputs=True) == {"loss": 0.5}
    assert instance.ti is not None
    assert (instance.ti.xcoms["return_value"], instance.ti.xcoms["loss"]) == ({"loss": 0.5}, 0.5)
    assert (instance.ti.jobs_at["return_value"], instance.ti.jobs_at["loss"]) == (1, 1)
    assert not instance.jobs()


def test_do_xcom_push_false_pushes_no_result(instance: Instance) -> None:
    instance.execute(command=RESULT, deferrable=False, do_xcom_push=False)
    assert instance.ti is not None
    assert "return_value" not in instance.ti.xcoms


@pytest.mark.embedded("sets fault switches")
def test_worker_lost_during_a_deletion_that_takes_long(instance: Instance) -> None:
    """Airflow has the result by then, and the next try returns it and deletes the job."""
    instance.cluster.admin("status", status=503, verb="delete", path="/pytorchjobs")  # the deletion is retried for 60 s
    instance.on_interrupt(stop)
    instance.when(lambda: instance.ti is not None and "return_value" in instance.ti.xcoms, instance.interrupt)
    with pytest.raises(Lost):
        instance.execute(command=RESULT, deferrable=False, retries=1)
    instance.cluster.admin("clear")
    (job,) = instance.jobs()
    assert instance.execute(command=RESULT, number=2, retries=1) == {"loss": 0.5}
    assert instance.ti is not None
    assert instance.ti.xcoms["job"]["uid"] == job["metadata"]["uid"]
    assert not instance.jobs()


class Lost(SystemExit):
    """Ends the worker's process here. asyncio swallows other exceptions that a signal handler raises in a callback."""


def stop() -> None:
    raise Lost


@pytest.mark.embedded("sets fault switches")
@pytest.mark.parametrize(("retries", "kept"), [(1, True), (0, False)])
def test_job_that_cannot_be_followed_is_kept_for_a_retry(instance: Instance, retries: int, kept: bool) -> None:
    """A rejected watch proves nothing about the training; without a retry nobody would release the job."""
    instance.cluster.admin("status", status=403, verb="watch", path="/pods|/pytorchjobs")
    try:
        with pytest.raises(AirflowException, match="no right to watch"):
            instance.execute(deferrable=False, retries=retries)
    finally:
        instance.cluster.admin("clear")
    assert bool([job for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]) is kept


def test_failed_outcome_belongs_to_its_try(instance: Instance) -> None:
    with pytest.raises(TrainingUserCodeError):
        instance.execute(command=["sh", "-c", "exit 3"], deferrable=False, retries=1)
    assert instance.ti is not None
    first = instance.ti.xcoms["job"]["uid"]
    assert instance.execute(command=RESULT, deferrable=False, number=2, retries=1) == {"loss": 0.5}
    assert instance.ti.xcoms["job"]["uid"] != first
    tries = instance.store["ktrain_tries"]["tries"]
    assert [one["try_number"] for one in tries] == [1, 2]
    assert "exit code 3" in tries[0]["cause"]
    assert tries[1]["cause"] == ""
    assert all(one["usage"]["gpus"] == 1 and one["ended_at"] for one in tries)


def test_clear_starts_another_training(instance: Instance) -> None:
    instance.execute(command=RESULT, deferrable=False)
    assert instance.ti is not None
    first = instance.ti.xcoms["job"]["uid"]
    instance.execute(command=RESULT, deferrable=False, number=2, max_tries=1)
    assert instance.ti.xcoms["job"]["uid"] != first


@of_each_kind
def test_outcome_that_cannot_be_stored_keeps_the_job(instance: Instance) -> None:
    """A broken store doesn't fail a training; a retry then reads the result from the job."""

    class Unwell(Store):
        def set(self, key: str, value: Any) -> None:
            if key == "ktrain_outcome":
                raise OSError("Airflow is unwell")
            super().set(key, value)

    instance.store = Unwell()
    assert instance.execute(command=RESULT, deferrable=False, retries=1) == {"loss": 0.5}
    (job,) = instance.jobs()
    assert not instance.running()
    instance.store = Store(instance.store)
    assert instance.execute(command=RESULT, deferrable=False, number=2, retries=1) == {"loss": 0.5}
    assert instance.ti is not None
    assert instance.ti.xcoms["job"]["uid"] == job["metadata"]["uid"]
    assert not instance.jobs()


def test_released_gpus_are_reported_once(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """A Worker still runs at the Master's end: its pod is deleted at the end, and the job when the result is stored."""
    command = ["sh", "-c", "trap 'exit 143' TERM; [ $RANK = 0 ] && sleep 6 || { sleep 600 & wait; }"]
    instance.execute(command=command, deferrable=False, workers=1, gpus=1)
    assert not instance.jobs()
    log = capsys.readouterr().out
    assert log.count("GPU released") + log.count("GPUs released") <= 1, log  # the operator may have deleted the pod


# a job that is kept, whose pods could not be deleted


def kept(retries: int = 1) -> dict[str, Any]:
    """A Worker runs at the Master's end, and the operator deletes no pods."""
    programs = {"Master": "sleep 3", "Worker": "trap 'exit 143' TERM; sleep 600 & wait"}
    roles = {
        role: {
            "replicas": 1,
            "template": {
                "spec": {"containers": [{"name": "pytorch", "image": IMAGE, "command": ["sh", "-c", program]}]}
            },
        }
        for role, program in programs.items()
    }
    spec = {"runPolicy": {"cleanPodPolicy": "None"}, "pytorchReplicaSpecs": roles}
    manifest = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {}, "spec": spec}
    return {"manifest": manifest, "retries": retries, "on_finish_action": "keep_job", "deferrable": False}


@pytest.mark.embedded("sets fault switches")
def test_retry_deletes_the_pods_of_a_kept_job(instance: Instance) -> None:
    """It looks at the cluster, keeps the job, and returns the stored result."""
    instance.cluster.admin("status", status=403, verb="delete", path="/pods")
    with pytest.raises(TrainingReleaseError):
        instance.execute(**kept())
    assert instance.running()
    instance.cluster.admin("clear")
    assert instance.execute(number=2, **kept()) is None
    assert not instance.running()
    assert len(instance.jobs()) == 1


@pytest.mark.embedded("sets fault switches")
def test_last_try_names_the_pods_of_a_kept_job(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    instance.cluster.admin("status", status=403, verb="delete", path="/pods")
    for number in (1, 2):
        capsys.readouterr()
        if number == 1:
            with pytest.raises(TrainingReleaseError):
                instance.execute(number=number, **kept())
        else:
            assert instance.execute(number=number, **kept()) is None
    assert (
        "To delete them, run: kubectl delete -n default pods -l ktrain.airflow/submission=" in capsys.readouterr().out
    )


@pytest.mark.embedded("sets fault switches")
def test_retry_returns_the_result_of_a_kept_job_that_is_gone(instance: Instance) -> None:
    instance.cluster.admin("status", status=403, verb="delete", path="/pods")
    with pytest.raises(TrainingReleaseError):
        instance.execute(**kept(2))
    instance.cluster.admin("clear")
    instance.delete()
    assert instance.execute(number=2, **kept(2)) is None
    assert not instance.jobs()


@pytest.mark.embedded("sets fault switches")
@pytest.mark.parametrize("action", ["delete_job", "keep_job"])
@pytest.mark.parametrize("is_read", [True, False])
def test_retry_deletes_the_pods_that_a_deleted_job_has_left(
    instance: VirtualInstance, action: str, is_read: bool
) -> None:
    """The job is deleted without its pods, which can't be deleted, before or after its end was read."""

    def orphan(*_: object) -> Any:
        for job in instance.jobs():
            if phase_of(job).ended:
                for pod in instance.pods():
                    name = pod["metadata"]["name"]
                    instance.api.change("pods", name, lambda one: one["metadata"].pop("ownerReferences"))
                instance.api.remove(instance.kind.plural, job["metadata"]["name"])

    instance.api.replace("GET", r"/pods$|/pods\?" if is_read else "/pytorchjobs/", orphan, 1_000, processed=False)
    instance.cluster.admin("status", status=403, verb="delete", path="/pods")
    for number in (1, 2):
        with pytest.raises(TrainingReleaseError):
            instance.execute(number=number, **kept(2) | {"on_finish_action": action})
        assert not instance.jobs()
        assert instance.running()
    instance.cluster.admin("clear")
    assert instance.execute(number=3, **kept(2) | {"on_finish_action": action}) is None
    assert not instance.running()
