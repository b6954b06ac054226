"""The real Horovod trains while its job is scaled: `make test-horovod`, with an image in KTRAIN_TEST_HOROVOD."""

from __future__ import annotations

import pytest

from tests.e2e.airflow import Airflow
from tests.e2e.kube import Kube
from tests.e2e.test_examples import check_elastic_horovod, scale

pytestmark = [pytest.mark.horovod, pytest.mark.embedded("needs an image with Horovod")]


def test_the_example_continues_while_it_is_scaled(airflow: Airflow, kube: Kube) -> None:
    check_elastic_horovod(airflow, kube)


def test_removed_workers_come_back_after_a_cooldown(airflow: Airflow, kube: Kube) -> None:
    changes = {"shrink": "from 2 to 1 Worker", "grow": "from 1 to 2 Workers"}
    sizes = scale(airflow, kube, "horovod_cooldown", **changes)
    assert sizes == [2, 1, 2]
