"""The whole life of a job with exactly the Role that `ktrain rbac` prints, on a cluster that enforces RBAC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import yaml

from airflow_provider_ktrain.core.errors import AccessError
from airflow_provider_ktrain.core.identity.names import Owner, TaskKey
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.manifest.transform import stamp
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import served_version
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from tests import clusters
from tests.clusters import TestCluster
from tests.engine.tasks import Lines, api_of, follow, submit


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with clusters.cluster(gpus=2) as reached:
        yield reached


async def token_with(cluster: TestCluster, name: str, *missing_verbs: str, options: Iterable[str] = ()) -> str:
    """A token of a service account that has the printed Role without some verbs.

    :param options: of `ktrain rbac`.
    """
    printed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "airflow_provider_ktrain.cli", "rbac", "-n", cluster.namespace, "--name", name,
         "--service-account", name, *options],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    role, binding = yaml.safe_load_all(printed.stdout)
    for rule in role["rules"]:
        rule["verbs"] = [verb for verb in rule["verbs"] if verb not in missing_verbs]
    role["rules"] = [rule for rule in role["rules"] if rule["verbs"]]  # the API server refuses a rule without verbs
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}"
    accounts = f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts"
    async with api_of(cluster) as admin:
        await admin.request("POST", accounts, body={"metadata": {"name": name}})
        await admin.request("POST", f"{rbac}/roles", body=role)
        await admin.request("POST", f"{rbac}/rolebindings", body=binding)
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        answer = await admin.request("POST", f"{accounts}/{name}/token", body=asked)
    return str(answer["status"]["token"])


async def submit_one(api: Api, namespace: str, run_id: str, program: str, log: Lines) -> Submitted:
    owner = Owner(TaskKey("rbac", "dag", "task", run_id), 1, run_id)
    manifest = build("PyTorchJob", JobOptions(image=clusters.IMAGE, command=["sh", "-c", program], gpus=1))

    def stamped(submission: str) -> dict[str, Any]:
        annotations = {"ktrain.airflow/owner": owner.annotation()}
        return stamp(manifest, owner.key.job_name(), namespace, owner.key.labels(submission), annotations)

    version = await served_version(api, PYTORCHJOB)
    return await submit(api, PYTORCHJOB, version, stamped, owner, 1, log=log)


@pytest.mark.parametrize(
    ("program", "phase"),
    [
        ("echo trained", "Succeeded"),
        pytest.param("echo broken >&2; exit 3", "Failed", marks=pytest.mark.thorough),
    ],
)
async def test_printed_role_is_enough_for_a_whole_job(cluster: TestCluster, program: str, phase: str) -> None:
    log = Lines()
    async with api_of(cluster, token=await token_with(cluster, f"least-{phase.lower()}")) as api:
        submitted = await submit_one(api, cluster.namespace, phase, program, log)
        outcome = await follow(submitted.ref, api, log=log, created=True)
        assert isinstance(outcome, Outcome)
        assert outcome.phase == phase
        assert outcome.released
        assert not outcome.release_error
        assert "[Master 0] " + ("trained" if phase == "Succeeded" else "broken") in log.messages
        assert not [line for line in log.messages if "cannot" in line or "forbidden" in line]
        if outcome.cause:
            assert "exit code 3" in outcome.cause["summary"]


@pytest.mark.parametrize("verb", ["create", "watch"])
async def test_error_names_a_missing_right_and_its_remedy(cluster: TestCluster, verb: str) -> None:
    log = Lines()
    async with api_of(cluster, token=await token_with(cluster, f"without-{verb}", verb)) as api:
        if verb == "create":
            with pytest.raises(AccessError) as error:
                await submit_one(api, cluster.namespace, verb, "true", log)
            message = str(error.value)
            assert f"create pytorchjobs.kubeflow.org in namespace {cluster.namespace!r}" in message
            assert f"ktrain rbac --namespace {cluster.namespace}" in message
            return
        submitted = await submit_one(api, cluster.namespace, verb, "sleep 60", log)
        with pytest.raises(AccessError, match=f"no right to watch .*ktrain rbac --namespace {cluster.namespace}"):
            await follow(submitted.ref, api, log=log, created=True)
