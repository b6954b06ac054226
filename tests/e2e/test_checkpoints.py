"""Checkpoints in S3, for which moto's server stands in: what a retry finds there, and what it repeats."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.e2e import s3
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.s3 import BUCKET, CREDENTIALS, S3

DAG = "keeps_checkpoints_in_s3"
CONNECTION = "checkpoints_of_test"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.embedded("its programs import boto3 and reach a server on loopback"),
    pytest.mark.xdist_group("e2e-3"),
]


@pytest.fixture
def storage(airflow: Airflow, tmp_path: pathlib.Path) -> Iterator[S3]:
    """S3, and a connection of Airflow to it."""
    with s3.running(tmp_path) as started:
        extra = f'{{"endpoint_url": "{started.url}", "region_name": "{CREDENTIALS["region_name"]}"}}'
        body = {"connection_id": CONNECTION, "conn_type": "aws", "login": "test", "password": "test", "extra": extra}
        airflow.call("POST", "/api/v2/connections", body)
        try:
            yield started
        finally:
            airflow.call("DELETE", f"/api/v2/connections/{CONNECTION}")


def test_retry_resumes_from_s3_and_counts_what_it_repeats(airflow: Airflow, storage: S3) -> None:
    run_id = airflow.trigger(DAG, {"connection": CONNECTION, "bucket": BUCKET, "endpoint": storage.url})
    airflow.wait_state(DAG, run_id, "train", "success")
    wait_for("the result is stored", lambda: "return_value" in airflow.xcom_keys(DAG, run_id, "train"))
    assert airflow.xcom(DAG, run_id, "train")["resumed_from"] == 8
    usage = airflow.xcom(DAG, run_id, "train", "usage")
    assert usage["repeated_steps"] == 2, "steps 9 and 10"
    assert 0 <= usage["repeated"] <= usage["held"]
    # Airflow's file system for S3 needs s3fs. Without it, the log names what is missing, and the training goes on
    found = "has 1 file" if importlib.util.find_spec("s3fs") else "can't be listed: the worker lacks the library"
    line = rf"Checkpoints: s3://{BUCKET}/runs/train-\w+ {found}"
    wait_for("what was there", lambda: re.search(line, airflow.log(DAG, run_id, "train", 2)))
    wait_for(
        "what was repeated",
        lambda: "Repeated: steps 9 to 10, which an earlier try had reached" in airflow.log(DAG, run_id, "train", 2),
    )
    assert "Checkpoints: " not in airflow.log(DAG, run_id, "train", 1)
