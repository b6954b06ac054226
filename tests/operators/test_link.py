"""The button that links to the job's page."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_ktrain.links.training import TrainingJobLink, url_of
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from tests.operators.task_instance import Instance

JOB = {"kind": "MPIJob", "namespace": "ns", "name": "train-1", "uid": "u-1"}


def link_of(instance: Instance) -> Any:
    assert instance.ti is not None
    return instance.ti.xcoms[TrainingJobLink().xcom_key]


def test_link_has_the_url_of_the_job(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__JOB_URL", "https://board.example/{plural}/{namespace}/{name}?uid={uid}")
    instance.execute()
    (job,) = instance.jobs()
    meta = job["metadata"]
    assert link_of(instance) == (
        f"https://board.example/pytorchjobs/{meta['namespace']}/{meta['name']}?uid={meta['uid']}"
    )


def test_link_is_empty_without_a_template(instance: Instance) -> None:
    instance.execute()
    assert link_of(instance) == ""
    nobody: Any = SimpleNamespace()
    assert TrainingJobLink().get_link(nobody, ti_key=nobody) == "", "Airflow is not even asked for the job"


class WithOwnLinks(PyTorchJobOperator):
    operator_extra_links: Any = (TrainingJobLink(),)


def test_operator_may_have_links_of_its_own(instance: Instance) -> None:
    instance.execute(operator=WithOwnLinks)
    assert instance.ti is not None
    assert "job" in instance.ti.xcoms


@pytest.mark.parametrize("template", ["https://x/{pod}", "https://x/{", "https://x/{}"])
def test_template_with_unknown_fields_gives_a_warning_and_no_link(
    template: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A template with an unknown field doesn't fail a training."""
    monkeypatch.setenv("AIRFLOW__KTRAIN__JOB_URL", template)
    with caplog.at_level(logging.WARNING):
        assert url_of(JOB) == ""
    assert template in caplog.text
    assert "Its placeholders are {kind} {plural}" in caplog.text
