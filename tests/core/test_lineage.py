"""The names of datasets for OpenLineage."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.reporting.lineage import dataset


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("s3://bucket/models/7", ("s3://bucket", "models/7")),
        ("s3a://bucket/models/7/", ("s3://bucket", "models/7")),
        ("gs://bucket", ("gs://bucket", "/")),
        ("hdfs://user:password@name:8020/models", ("hdfs://name:8020", "models")),
        (
            "abfss://container@account.dfs.core.windows.net/models",
            ("abfss://container@account.dfs.core.windows.net", "models"),
        ),
        ("wasb://container:key@account.blob.core.windows.net/m", ("wasbs://account.blob.core.windows.net", "m")),
        ("s3://bucket/models?X-Amz-Signature=abc#part", ("s3://bucket", "models")),
        ("/checkpoints/7", None),  # in a pod
        ("models:/mnist/7", None),  # MLflow's: the place isn't known
        ("https://example.com/model", None),
        ("s3://[", None),
        (7, None),
    ],
)
def test_datasets_have_the_names_of_openlineage(uri: object, named: tuple[str, str] | None) -> None:
    assert dataset(uri) == named
