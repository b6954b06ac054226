"""S3 for tests: moto's server on loopback with one bucket, as the remote log storage of an Airflow under test."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3

from tests.e2e.airflow import wait_for
from tests.e2e.database import ends_with_parent, free_port

BUCKET = "airflow-logs"
CREDENTIALS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}


@dataclass(frozen=True)
class S3:
    """:param client: the client of boto3."""

    url: str
    client: Any

    @property
    def settings(self) -> dict[str, str]:
        """Airflow's settings for remote logs in the bucket."""
        connection = {"conn_type": "aws", "login": "test", "password": "test"}
        extra = {"endpoint_url": self.url, "region_name": "us-east-1"}
        return {
            "AIRFLOW__LOGGING__REMOTE_LOGGING": "True",
            "AIRFLOW__LOGGING__REMOTE_BASE_LOG_FOLDER": f"s3://{BUCKET}/logs",
            "AIRFLOW__LOGGING__REMOTE_LOG_CONN_ID": "s3_of_test",
            "AIRFLOW_CONN_S3_OF_TEST": json.dumps({**connection, "extra": extra}),
        }

    def objects(self, below: str) -> dict[str, str]:
        """Text of the objects whose key begins with `logs/` and `below`."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"logs/{below}").get("Contents", ())
        keys = [item["Key"] for item in found]
        return {key: self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read().decode() for key in keys}


@contextlib.contextmanager
def running(home: pathlib.Path) -> Iterator[S3]:
    """A context manager: S3."""
    port = free_port()
    with (home / "moto.out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            preexec_fn=ends_with_parent(signal.SIGTERM),
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        client = boto3.client("s3", endpoint_url=url, **CREDENTIALS)

        def created() -> bool:
            with contextlib.suppress(Exception):  # the server doesn't listen yet
                client.create_bucket(Bucket=BUCKET)
                return True
            return False

        wait_for("the S3 stand-in answers", created, 60)
        yield S3(url, client)
    finally:
        process.kill()
        process.wait(30)
