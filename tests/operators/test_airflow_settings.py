"""One line of the log names the settings of Airflow that can lose the result of a training."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.operators import airflow_settings
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from tests.operators.task_instance import Instance

RETRIES, TIMEOUT = "Set retries to 1 or more", "visibility_timeout (now 86400 s)"


@pytest.mark.parametrize("deferrable", [True, False])
@pytest.mark.parametrize("retries", [0, 1])
def test_settings_are_checked_at_the_submission(
    instance: Instance, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, retries: int,
    deferrable: bool, celery_provider: Callable[[str], None],
) -> None:  # fmt: skip
    celery_provider("3.17.3")
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    instance.execute(command=["true"], retries=retries, deferrable=deferrable)
    log = capsys.readouterr().out
    assert log.count(RETRIES) == (retries == 0)
    assert log.count(TIMEOUT) == (not deferrable)


@pytest.mark.parametrize(
    ("cluster", "level"), [("https://10.0.0.1:6443 (CA 1)", "warning"), ("https://127.0.0.1:6443", "info")]
)
def test_settings_are_a_warning_unless_the_cluster_runs_on_this_machine(
    cluster: str, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = PyTorchJobOperator(task_id="train", image="train:1", deferrable=True)
    airflow_settings.check(operator, JobRef("PyTorchJob", "v1", "default", "train", "uid", cluster=cluster))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if RETRIES in line]
    assert f"[{level}" in line
