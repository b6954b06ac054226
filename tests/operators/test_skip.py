"""Parameters that users of KubernetesPodOperator know: skip_on_exit_code and do_xcom_push."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowSkipException

from airflow_provider_ktrain.exceptions import TrainingUserCodeError
from tests.operators.task_instance import Instance, of_each_kind

NO_DATA = ["sh", "-c", "echo no new data; exit 99"]
RESULT = ["sh", "-c", """echo 'KTRAIN_RESULT {"loss": 0.5}'; sleep 1"""]


@pytest.mark.parametrize("codes", [99, [3, 99]])
def test_exit_code_skips_the_task_and_releases_the_job(instance: Instance, codes: Any) -> None:
    with pytest.raises(AirflowSkipException, match="exit code 99"):
        instance.execute(command=NO_DATA, deferrable=False, skip_on_exit_code=codes)
    assert not instance.jobs()


def test_other_exit_codes_fail_the_task(instance: Instance) -> None:
    with pytest.raises(TrainingUserCodeError, match="exit code 99"):
        instance.execute(command=NO_DATA, deferrable=False, skip_on_exit_code=[3, 98])


@of_each_kind
def test_exit_code_in_the_event_of_a_trigger_skips_the_task(instance: Instance) -> None:
    instance.execute(skip_on_exit_code=99)  # the job runs on
    cause = {"category": "user code", "summary": "Master 0 failed"}
    with pytest.raises(AirflowSkipException, match="exit code 99"):
        instance.resume({"outcome": {"phase": "Failed", "succeeded": False, "cause": cause, "exit_code": 99}})


def test_event_of_an_older_triggerer_fails_the_task(instance: Instance) -> None:
    """Its outcome has no exit code."""
    instance.execute(skip_on_exit_code=99)  # the job runs on
    cause = {"category": "user code", "summary": "Master 0 failed"}
    with pytest.raises(TrainingUserCodeError):
        instance.resume({"outcome": {"phase": "Failed", "succeeded": False, "cause": cause}})


def test_invalid_exit_code_is_refused(instance: Instance) -> None:
    with pytest.raises(ValueError, match="skip_on_exit_code"):
        instance.execute(command=NO_DATA, deferrable=False, skip_on_exit_code="99")


def test_without_xcom_push_only_the_job_its_links_and_its_page_are_pushed(instance: Instance) -> None:
    assert instance.execute(command=RESULT, deferrable=False, do_xcom_push=False) == {"loss": 0.5}
    assert instance.ti is not None
    links = {"_link_TrainingJobLink", "_link_TrainingPageLink"}
    assert instance.ti.xcoms.keys() == {"job", "ktrain_status", "ktrain_summary", *links}


def test_without_xcom_push_a_retry_still_finds_the_outcome(instance: Instance) -> None:
    instance.execute(command=RESULT, deferrable=False, do_xcom_push=False, retries=1)
    again = instance.execute(command=RESULT, deferrable=False, do_xcom_push=False, number=2, retries=1)
    assert again == {"loss": 0.5}
    assert not instance.jobs()
