"""`make chaos`: many tasks at once, under an Airflow with its own heartbeat timeout.

Each worker starts its heartbeats late while eight of them start on two CPUs: with the 20 s of the other chaos tests,
Airflow fails some of these tasks as lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, running, wait_for
from tests.e2e.chaos import QUICK, begin, cluster
from tests.e2e.conftest import DAGS
from tests.e2e.scenario import Begin

__all__ = ["airflow", "begin", "cluster"]  # fixtures
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
PATIENT = {name: value for name, value in QUICK.items() if "TASK_INSTANCE_HEARTBEAT" not in name}


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    dags, home = tmp_path_factory.mktemp("dags"), tmp_path_factory.mktemp("airflow")
    (dags / "chaos.py").symlink_to(DAGS / "chaos.py")
    with running(home, cluster, dags, **PATIENT) as started:
        yield started


def test_fifty_jobs_end_a_second_after_the_deferral(begin: Begin, airflow: Airflow) -> None:
    """A very fast event fails a task of Airflow 3.3; none of these may fail."""
    stage = begin("chaos_many", seconds=3, wait=0)

    def states() -> list[str]:
        return [t["state"] for t in airflow.tasks("chaos_many", stage.run)]

    def done() -> bool:
        now = states()
        assert "failed" not in now
        return len(now) == 50 and set(now) == {"success"}

    wait_for("all have succeeded", done, 600)
    assert {t["try_number"] for t in airflow.tasks("chaos_many", stage.run)} == {1}
    stage.check_freed()
    stage.check_created(50)
