"""`execute` for several tries in sequence: the target of the job, the number of the attempt, and the stored state."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

import pytest
import yaml
from airflow.sdk.bases.operator import TriggerFailureReason
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, Owner
from airflow_provider_ktrain.exceptions import (
    TrainingClusterError,
    TrainingConfigurationError,
    TrainingJobError,
    TrainingTimeoutError,
    TrainingUserCodeError,
)
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from tests.operators.task_instance import TRAINS, Instance, Object, Store, of_each_kind

FORMATS = pathlib.Path(__file__).parents[1] / "formats" / "v1"


def environment(job: Object) -> dict[str, str]:
    container = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    return {e["name"]: e["value"] for e in container["env"] if "value" in e}


def attempt(job: Object) -> str:
    return environment(job)["KTRAIN_ATTEMPT"]


def test_retry_keeps_the_attempt(instance: Instance) -> None:
    instance.execute(number=1, retries=2)
    (first,) = instance.jobs()
    instance.execute(number=2, retries=2)
    (second,) = instance.jobs()
    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    assert (attempt(first), attempt(second)) == ("1", "1")
    instance.delete()
    instance.execute(number=3, retries=2)
    (third,) = instance.jobs()
    assert attempt(third) == "2", "two jobs were submitted in this life of the task"


def test_fewer_retries_do_not_count_as_a_clear(instance: Instance) -> None:
    """`retries` is lowered in the DAG file while try 1 trains; then its worker is lost."""
    retries: dict[str, Any] = {"checkpoint_dir": "/checkpoints", "max_tries": 3}
    instance.execute(number=1, retries=3, **retries)
    (first,) = instance.jobs()
    instance.execute(number=2, retries=1, **retries)
    (second,) = instance.jobs()
    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    instance.delete()
    instance.execute(number=3, retries=0, **retries)
    (third,) = instance.jobs()
    assert attempt(third) == "2"
    assert environment(third)["KTRAIN_CHECKPOINT_DIR"] == environment(first)["KTRAIN_CHECKPOINT_DIR"]


@pytest.mark.parametrize("missing", ["version", "max_tries", "first_try", "place", "attempt", "nothing"])
def test_submission_state_of_another_release_is_read(instance: Instance, missing: str) -> None:
    """The state lacks one field, and has fields of a later release."""
    instance.execute(number=1, retries=1)
    (first,) = instance.jobs()
    state = instance.store["ktrain_submission"]
    assert set(state) == set(json.loads((FORMATS / "state_ktrain_submission.json").read_text()))
    state["of_a_later_release"] = {"any": "thing"}
    state["place"]["of_a_later_release"] = "thing"
    state.pop(missing, None)
    instance.execute(number=2, retries=1)
    (second,) = instance.jobs()
    assert second["metadata"]["uid"] == first["metadata"]["uid"]


def test_owner_is_the_current_try(instance: Instance) -> None:
    instance.execute(number=1, retries=1)
    instance.execute(number=2, retries=1)
    (job,) = instance.jobs()
    assert instance.ti is not None
    assert Owner.of(job) == Owner(instance.key, 2, instance.ti.id)


@of_each_kind
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"namespace": "kube-system"}, "namespace changed"),
        ({"name": "other"}, "name changed"),
        ({"kubernetes_conn_id": "other"}, "kubernetes_conn_id changed"),
        ({"cluster_context": "other"}, "cluster_context changed"),
    ],
    ids=["namespace", "name", "connection", "context"],
)
def test_retry_to_another_place_fails_and_names_both(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], message: str
) -> None:
    """Otherwise the retry would start a second job in another place."""
    instance.execute(number=1, retries=1)
    other = {"conn_type": "kubernetes", "extra": {"namespace": instance.cluster.namespace}}
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", json.dumps(other))
    before = instance.all_jobs()
    with pytest.raises(TrainingJobError, match=message) as error:
        instance.execute(number=2, retries=1, **changed)
    assert not isinstance(error.value, AirflowFailException), "it may be put back before the next try"
    assert next(iter(changed.values())) in str(error.value)
    assert f"'name': '{instance.job_name}'" in str(error.value)
    assert instance.all_jobs() <= before
    assert instance.jobs(), "the job of the first try"


# a retry with an invalid manifest or invalid parameters, while the job of the previous try still runs

TWO_MASTERS: dict[str, Any] = {"replicas": {"Master": 2}}


@pytest.mark.parametrize(
    "parameters",
    [
        TWO_MASTERS,
        {"rendered": {"gpus": "two"}},
        {"manifest": "kind: [PyTorchJob\nspec: {}"},
        {"manifest": "jobs/missing.yaml"},
    ],
    ids=["two masters", "a parameter of the manifest", "no YAML", "a missing file"],
)
def test_invalid_manifest_does_not_end_a_running_job(
    instance: Instance, capsys: pytest.CaptureFixture[str], parameters: dict[str, Any]
) -> None:
    instance.execute(number=1, retries=1)
    (first,) = instance.jobs()
    deferred = instance.execute(number=2, retries=1, **parameters)
    assert deferred.trigger.job["uid"] == first["metadata"]["uid"]
    assert "A new submission would fail" in capsys.readouterr().out
    (job,) = instance.jobs()
    assert instance.ti is not None
    assert instance.ti.id in job["metadata"]["annotations"][OWNER_ANNOTATION]


@pytest.mark.parametrize(
    "parameters",
    [
        {**TWO_MASTERS, "reattach": "if_unchanged"},
        {"rendered": {"logs": "some"}},
        {"rendered": {"queue_timeout": "10m"}},
    ],
    ids=["if_unchanged", "it cannot be followed", "a limit"],
)
def test_a_job_that_cannot_be_taken_over_is_released_before_the_error(
    instance: Instance, parameters: dict[str, Any]
) -> None:
    """A configuration error is final: no later try would release the job."""
    instance.execute(number=1, retries=1)
    with pytest.raises(TrainingConfigurationError):
        instance.execute(number=2, retries=1, **parameters)
    assert not instance.jobs()


class Impatient(PyTorchJobOperator):
    """Doesn't wait for an API server that can't be reached."""

    patience = 0.0


def test_invalid_manifest_releases_nothing_while_the_cluster_is_unreachable(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.execute(number=1, retries=2)
    away = {"kube_config": json.dumps(_elsewhere(instance.cluster.kubeconfig)), "namespace": instance.cluster.namespace}
    with monkeypatch.context() as patched:
        patched.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": away}))
        with pytest.raises(TrainingClusterError, match="can't be reached"):
            instance.execute(number=2, retries=2, operator=Impatient, **TWO_MASTERS, reattach="if_unchanged")
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]


def test_resumed_job_gets_a_new_deadline(instance: Instance) -> None:
    """Otherwise a job that was kept at its timeout would time out again immediately, in each retry."""
    hour = datetime.timedelta(hours=1)
    kept: dict[str, Any] = {"on_finish_action": "keep_job", "retries": 2}
    first = instance.execute(number=1, execution_timeout=hour, **kept)
    alive = instance.execute(number=2, execution_timeout=3 * hour, **kept)
    assert alive.trigger.options["deadline"] == first.trigger.options["deadline"], "an adoption alone does not renew it"
    with pytest.raises(TrainingTimeoutError):
        instance.fail(TriggerFailureReason.TRIGGER_TIMEOUT)
    (suspended,) = instance.jobs()
    resumed = instance.execute(number=3, execution_timeout=3 * hour, **kept)
    assert resumed.trigger.job["uid"] == suspended["metadata"]["uid"]
    assert resumed.trigger.options["deadline"] > first.trigger.options["deadline"] + hour.total_seconds()


def test_another_airflow_with_the_same_deployment_id_is_refused(instance: Instance) -> None:
    instance.execute()
    (theirs,) = instance.jobs()
    instance.store = Store()
    with pytest.raises(TrainingClusterError, match=r"Another Airflow has the same \[ktrain\] deployment_id"):
        instance.execute()
    (job,) = instance.jobs()
    assert job["metadata"]["uid"] == theirs["metadata"]["uid"]
    assert "deletionTimestamp" not in job["metadata"]


@pytest.mark.parametrize(
    ("setting", "value", "warns"),
    [
        ("KTRAIN__DEPLOYMENT_ID", "prod", False),
        ("KTRAIN__DEPLOYMENT_ID", "", True),
        ("API__BASE_URL", "http://localhost:8080", True),
        ("API__BASE_URL", "https://airflow.example.com", False),
    ],
)
def test_shared_deployment_id_gives_a_warning(
    instance: Instance,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    value: str,
    warns: bool,
) -> None:
    monkeypatch.delenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID")
    monkeypatch.setenv(f"AIRFLOW__{setting}", value)
    instance.execute()
    assert capsys.readouterr().out.count("Set [ktrain] deployment_id: ") == warns


def test_clear_can_change_the_place(instance: Instance) -> None:
    instance.execute(number=1)
    instance.execute(number=2, max_tries=1, name="other")
    assert {job["metadata"]["name"] for job in instance.jobs()} >= {instance.key.job_name("other")}


def test_reference_is_stored_before_the_create(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the worker is lost between the two, the next try finds the reference."""
    extra = {"kube_config": json.dumps(_elsewhere(instance.cluster.kubeconfig))}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    with pytest.raises(Exception, match="can't be reached"):
        instance.execute(number=1, retries=1)
    assert instance.store["ktrain_submission"]["place"]["name"] == instance.job_name


@of_each_kind
def test_retry_of_a_worker_lost_before_the_create_creates_the_job(instance: Instance) -> None:
    class LosesTheWorker(Store):
        def set(self, key: str, value: Any) -> None:
            super().set(key, value)
            if key == "ktrain_submission":
                raise SystemExit

    instance.store = LosesTheWorker()
    with pytest.raises(SystemExit):
        instance.execute(number=1, retries=1)
    assert not instance.jobs()
    instance.store = Store(instance.store)
    instance.execute(number=2, retries=1)
    assert [job["metadata"]["name"] for job in instance.jobs()] == [instance.job_name]


def _elsewhere(kubeconfig: pathlib.Path) -> Any:
    config = yaml.safe_load(kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    return config


# from the worker to the triggerer and back


def test_trigger_arguments_have_no_secrets_and_no_manifest(instance: Instance) -> None:
    deferred = instance.execute(env={"PASSWORD": "of-a-database"})
    assert isinstance(deferred, TaskDeferred)
    sent = json.dumps(deferred.trigger.serialize())
    secrets = yaml.safe_load(instance.cluster.kubeconfig.read_text())["users"][0]["user"]
    for secret in [*map(str, secrets.values()), "of-a-database", TRAINS[-1], "kube_config", "certificate"]:
        assert secret not in sent
    assert instance.jobs()[0]["metadata"]["uid"] in sent


def test_short_job_does_not_defer(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "60")
    assert instance.execute(command=["true"]) is None
    assert not instance.jobs()


@pytest.mark.parametrize(("action", "kept"), [("delete_job", False), ("keep_job", True)])
def test_a_failed_job_raises_its_category(instance: Instance, action: str, kept: bool) -> None:
    with pytest.raises(TrainingUserCodeError, match=r"^Master 0 failed with exit code 3") as raised:
        instance.execute(command=["sh", "-c", "exit 3"], deferrable=False, on_finish_action=action)
    assert ("kept without running pods" in str(raised.value)) is kept
    assert bool(instance.jobs()) is kept


@of_each_kind
def test_release_that_failed_in_the_trigger_is_repeated(instance: Instance) -> None:
    """It doesn't hide why the job failed."""
    instance.execute()
    cause = {"category": "user code", "summary": "Master 0 failed with exit code 3"}
    outcome = {"phase": "Failed", "succeeded": False, "cause": cause, "release_error": "the API server is away"}
    with pytest.raises(TrainingUserCodeError, match="Master 0 failed with exit code 3"):
        instance.resume({"outcome": outcome})
    assert not instance.jobs()


def test_deferral_timeout_releases_the_job(instance: Instance) -> None:
    """`defer(timeout=)`: neither `on_kill` nor `execute_complete` runs in this case."""
    instance.execute()
    with pytest.raises(TrainingTimeoutError):
        instance.fail(TriggerFailureReason.TRIGGER_TIMEOUT)
    assert not instance.jobs()


@pytest.mark.parametrize(("action", "kept"), [("delete_job", False), ("keep_job", True)])
def test_late_release_applies_on_finish_action(instance: Instance, action: str, kept: bool) -> None:
    instance.execute(on_finish_action=action)
    with pytest.raises(TrainingTimeoutError):
        instance.fail(TriggerFailureReason.TRIGGER_TIMEOUT)
    assert bool(instance.jobs()) is kept
    assert not instance.running()
