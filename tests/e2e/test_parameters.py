"""Parameters that users of KubernetesPodOperator know, under Airflow's own scheduler, triggerer and API server."""

from __future__ import annotations

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube, selector_of, watching

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-3")]


def test_pod_override_reaches_the_pod_of_a_function(airflow: Airflow, kube: Kube) -> None:
    """A service account, a pull secret, an init container, a volume and a secret's variables, without a manifest."""
    secret = {"metadata": {"name": "private-settings"}, "stringData": {"GREETING": "hello"}}
    kube.create(kube.core.create_namespaced_secret, secret)
    kube.create(kube.core.create_namespaced_service_account, {"metadata": {"name": "trainer"}})
    with watching(kube) as pods:
        run = airflow.trigger("private")
        airflow.wait_state("private", run, "reads", "success")
    assert airflow.xcom("private", run, "reads") == ["hello", "of private"]
    (spec,) = pods.specs("private", run).values()
    assert spec.service_account_name == "trainer"
    assert [reference.name for reference in spec.image_pull_secrets] == ["registry"]
    wait_for("the job is gone", lambda: not kube.jobs(selector_of("private", run)))


def test_result_that_looks_like_secrets_is_the_same_in_the_next_task(airflow: Airflow) -> None:
    """Of each kind of secret, read by a worker and by a triggerer."""
    run = airflow.trigger("secret_results")
    airflow.wait_state("secret_results", run, "same", "success")
    assert airflow.xcom("secret_results", run, "same") == [True, True]


def test_return_value_with_nan_is_stored_as_text(airflow: Airflow) -> None:
    run = airflow.trigger("diverges")
    airflow.wait_state("diverges", run, "diverges", "success")
    assert airflow.xcom("diverges", run, "diverges") == {"epochs": 3, "loss": "nan"}
    log = airflow.log("diverges", run, "diverges")
    assert "Its result is stored with a change: loss is stored as text: the number is not finite" in log


def test_default_deferrable_and_do_xcom_push(airflow: Airflow, kube: Kube) -> None:
    """The configuration of this DAG's processes sets default_deferrable to False."""
    dag = "worker_without_xcoms"
    run = airflow.trigger(dag)
    airflow.wait_state(dag, run, "train", "success")
    assert "the triggerer now follows" not in airflow.log(dag, run, "train")
    links = {"_link_TrainingJobLink", "_link_TrainingPageLink"}
    assert airflow.xcom_keys(dag, run, "train") == {"job", "ktrain_status", "ktrain_summary", *links}
    assert airflow.links(dag, run, "train")["Training job"]
    wait_for("the job is gone", lambda: not kube.jobs(selector_of(dag, run)))


def test_job_that_has_only_a_part_of_its_nodes_is_released(airflow: Airflow, kube: Kube) -> None:
    run = airflow.trigger("partial_start")
    airflow.wait_state("partial_start", run, "train", "up_for_retry")
    log = airflow.log("partial_start", run, "train")
    assert "holds 32 GPUs in 4 pods, but Worker" in log
    assert "(partial_start_timeout): " in log
    wait_for("the job is gone", lambda: not kube.jobs(selector_of("partial_start", run)))
    wait_for("the GPUs are free", lambda: kube.gpus_held(selector_of("partial_start", run)) == 0)
