"""Numbers of a program that Airflow's transport refuses. A triggerer that sends one ends, with the triggers of all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import clusters
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, running, wait_for
from tests.e2e.conftest import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-absurd-numbers")]
DAGS = r"""
import datetime
import os

from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

ABSURD = '''echo 'KTRAIN_METRIC {"step": 1e300, "loss": 1e300}'
sleep 6
{% if ti.try_number == 1 %}exit 3{% endif %}
echo 'KTRAIN_METRIC {"step": 0, "loss": 1}'
echo 'KTRAIN_METRIC {"step": 1e300, "loss": -1e300, "other": NaN}'
echo 'KTRAIN_RESULT {"loss": 1e300, "steps": 100000000000000000000000000}'
'''
QUIET = "sleep 25; echo 'KTRAIN_RESULT 1'"
for name, program in (("absurd", ABSURD), ("quiet", QUIET)):
    with DAG(name, schedule=None, start_date=datetime.datetime(2026, 1, 1)):
        PyTorchJobOperator(
            task_id="train", image=os.environ.get("TEST_IMAGE", "scratch"), command=["sh", "-c", program],
            gpus=1, retries=2, retry_delay=datetime.timedelta(seconds=1),
        )
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with clusters.cluster() as reached:
        yield reached


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """An Airflow of its own: the test may end its triggerer."""
    dags = tmp_path_factory.mktemp("dags")
    (dags / "absurd.py").write_text(DAGS)
    settings = {**PATIENCE, "AIRFLOW__KTRAIN__WORKER_SECONDS": "0.5"}
    with running(tmp_path_factory.mktemp("airflow"), cluster, dags, **settings) as started:
        yield started


def test_absurd_numbers_of_a_training_touch_no_other(airflow: Airflow) -> None:
    quiet, absurd = airflow.trigger("quiet"), airflow.trigger("absurd")
    airflow.wait_state("quiet", quiet, "train", "deferred")
    airflow.wait_state("absurd", absurd, "train", "success")
    airflow.wait_state("quiet", quiet, "train", "success")
    assert airflow.processes["triggerer"].poll() is None, "the triggerer has ended"
    assert airflow.task("quiet", quiet, "train")["try_number"] == 1
    assert airflow.xcom("absurd", absurd, "train") == {"loss": "1e+300", "steps": "100000000000000000000000000"}
    wait_for("the usage", lambda: "usage" in airflow.xcom_keys("absurd", absurd, "train"))
    assert "repeated_steps" not in airflow.xcom("absurd", absurd, "train", "usage")
    assert "the step 1e+300 is ignored" in airflow.log("absurd", absurd, "train", 2)
