"""The objects of a cluster that are read before a TrainJob is submitted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_provider_ktrain.core.errors import ClusterError, RuntimeMismatchError
from airflow_provider_ktrain.core.kinds import PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.engine.submit.runtimes import read_served
from tests.clusters import TestCluster
from tests.core.manifests import pytorchjob, trainjob
from tests.engine.tasks import Lines, api_of

pytestmark = pytest.mark.embedded("sets fault switches")

OPENAPI, DEFINITIONS = "^/openapi/v3/apis/trainer", "/customresourcedefinitions/"


@pytest.fixture
def faulty(cluster: TestCluster) -> Iterator[TestCluster]:
    yield cluster
    cluster.admin("clear")


async def test_schema_and_runtime_are_read(cluster: TestCluster) -> None:
    async with api_of(cluster) as api:
        served = await read_served(api, TRAINJOB, "v1alpha1", trainjob(), "default", log=(log := Lines()))
    assert served is not None
    assert served.supported
    assert served.runtime is not None
    assert served.runtime["metadata"]["name"] == "torch-distributed"
    assert log.messages == []


@pytest.mark.parametrize("status", [403, 404, 500, 503])
async def test_without_openapi_the_definition_is_read(faulty: TestCluster, status: int) -> None:
    faulty.admin("status", status=status, path=OPENAPI)
    async with api_of(faulty) as api:
        served = await read_served(api, TRAINJOB, "v1alpha1", trainjob(), "default")
    assert served is not None
    assert served.supported


@pytest.mark.parametrize("status", [403, 500, 503])
async def test_a_schema_that_cannot_be_read_is_unknown(faulty: TestCluster, status: int) -> None:
    faulty.admin("status", status=status, path=f"{OPENAPI}|{DEFINITIONS}")
    async with api_of(faulty) as api:
        served = await read_served(api, TRAINJOB, "v1alpha1", trainjob(), "default", log=(log := Lines()))
    assert served is not None
    assert (served.supported, served.unreadable) == (False, "the schema of TrainJob can't be read")
    assert "no activeDeadlineSeconds as a backstop: the schema of TrainJob can't be read" in str(log)


async def test_requests_are_repeated_while_the_server_is_overloaded(faulty: TestCluster) -> None:
    faulty.admin("status", status=503, path=f"{OPENAPI}|/clustertrainingruntimes/", count=2)
    async with api_of(faulty) as api:
        assert await read_served(api, TRAINJOB, "v1alpha1", trainjob(), "default", patience=30) is not None


async def test_other_errors_do_not_count_as_a_missing_runtime(faulty: TestCluster) -> None:
    faulty.admin("status", status=500, path="/clustertrainingruntimes/")
    async with api_of(faulty) as api:
        with pytest.raises(ClusterError, match="500") as e:
            await read_served(api, TRAINJOB, "v1alpha1", trainjob(), "default")
    assert not isinstance(e.value, RuntimeMismatchError)


async def test_other_kinds_have_no_runtime(cluster: TestCluster) -> None:
    async with api_of(cluster) as api:
        assert await read_served(api, PYTORCHJOB, "v1", pytorchjob(), "default") is None
        assert api.stats["requests"] == 0


async def test_runtime_of_the_same_name_and_of_another_kind_is_the_remedy(cluster: TestCluster) -> None:
    manifest = trainjob()
    manifest["spec"]["runtimeRef"] = {"kind": "TrainingRuntime", "name": "torch-distributed"}
    async with api_of(cluster) as api:
        with pytest.raises(RuntimeMismatchError) as e:
            await read_served(api, TRAINJOB, "v1alpha1", manifest, "default")
    remedy = "there is a ClusterTrainingRuntime torch-distributed: set runtimeRef.kind to ClusterTrainingRuntime"
    assert e.value.remedy == remedy
