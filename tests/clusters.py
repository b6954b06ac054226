"""The cluster of the tests, accessed only by HTTP: the embedded one, or a real one given by KTRAIN_TEST_KUBECONFIG.

On a real cluster each session has its own namespace, KTRAIN_TEST_IMAGE replaces `scratch` (an image with sh and
python3), and a node is patched to have GPUs if none has any, as Kubernetes documents for extended resources. Tests that
need the fault switches or the images of `examples/` are marked `embedded`, with the reason, and skipped there;
`require` skips those of kinds, versions and runtimes that the cluster lacks. `tests/other_cluster.py` runs tests in
this way without a real cluster.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from airflow_provider_ktrain.core.checks import rbac
from airflow_provider_ktrain.core.kinds import TRAINJOB, Kind
from ktrain_embedded import EmbeddedCluster
from tests.isolation import directory_of_pods

REAL = os.path.expanduser(os.environ.get("KTRAIN_TEST_KUBECONFIG", ""))
IMAGE = os.environ.get("KTRAIN_TEST_IMAGE", "scratch") if REAL else "scratch"
GPUS = "nvidia.com/gpu"


@dataclass(frozen=True)
class TestCluster:
    """:param embedded: None if the cluster is a real one."""

    kubeconfig: Path
    namespace: str
    embedded: EmbeddedCluster | None = None

    __test__ = False

    def admin(self, fault: str, **how: Any) -> None:
        """Set a fault switch of the embedded cluster."""
        assert self.embedded is not None, "only the embedded cluster has fault switches: mark the test `embedded`"
        self.embedded.admin(fault, **how)


@contextlib.contextmanager
def cluster(
    *, images: Mapping[str, Path | None] | None = None, gpus: int = 8, **embedded: Any
) -> Iterator[TestCluster]:
    """A cluster with `gpus` on a node.

    :param images: of the embedded cluster, besides `scratch`, which is an empty directory.
    :param embedded: further arguments of `EmbeddedCluster`.
    """
    if REAL:
        with _namespace(Path(REAL)) as namespace, _pretended_gpus(Path(REAL), gpus):
            yield TestCluster(Path(REAL), namespace)
        return
    with contextlib.ExitStack() as stack:
        with directory_of_pods():
            made = EmbeddedCluster(images={IMAGE: None, **(images or {})}, gpus_per_node=gpus, **embedded)
            started = stack.enter_context(made)
        yield TestCluster(started.kubeconfig, "default", started)


def require(cluster: TestCluster, kind: Kind, *versions: str, runtime: str = "") -> None:
    """Skip the test if a real cluster can't run its jobs.

    :param versions: of the kind, of which the cluster must serve one. Default: any that we can write.
    :param runtime: the ClusterTrainingRuntime of the test's TrainJobs. Default: none.
    """
    versions = versions or kind.versions
    if REAL and not any(serves(cluster, kind.group, version, kind.plural) for version in versions):
        pytest.skip(f"the cluster doesn't serve {kind.plural} of {kind.group}/{' or '.join(versions)}")
    if REAL and runtime and kind is TRAINJOB and runtime not in _runtimes(cluster.kubeconfig):
        pytest.skip(f"the cluster has no ClusterTrainingRuntime {runtime}")


@functools.cache
def _runtimes(kubeconfig: Path) -> frozenset[str]:
    api = client.CustomObjectsApi(config.new_client_from_config(str(kubeconfig)))
    found = api.list_cluster_custom_object(TRAINJOB.group, TRAINJOB.versions[0], "clustertrainingruntimes")
    return frozenset(runtime["metadata"]["name"] for runtime in found["items"])


def served_version(cluster: TestCluster, kind: Kind) -> str:
    """The newest version of a kind that the cluster serves. Skips the test if a real cluster serves none."""
    require(cluster, kind)
    return next(v for v in kind.versions if serves(cluster, kind.group, v, kind.plural))


def serves(cluster: TestCluster, group: str, version: str, plural: str) -> bool:
    """Whether the cluster serves a resource."""
    return plural in _served(cluster.kubeconfig, group, version)


@functools.cache
def _served(kubeconfig: Path, group: str, version: str) -> frozenset[str]:
    api = client.CustomObjectsApi(config.new_client_from_config(str(kubeconfig)))
    try:
        found = json.loads(api.get_api_resources(group, version, _preload_content=False).data)
        return frozenset(resource["name"] for resource in found["resources"])
    except client.ApiException as e:
        if e.status != 404:
            raise
        return frozenset()


def most_gpus(cluster: TestCluster, *, pods: int) -> int:
    """GPUs of a pod, so many that only this number of pods has a node."""
    nodes = [int(node.status.allocatable.get(GPUS, 0)) for node in core(cluster.kubeconfig).list_node().items]
    if max(nodes) < sum(nodes):
        pytest.skip("several nodes have GPUs")
    return sum(nodes) // (pods + 1) + 1


def core(kubeconfig: Path) -> client.CoreV1Api:
    configuration = client.Configuration()
    config.load_kube_config(str(kubeconfig), client_configuration=configuration)
    return client.CoreV1Api(client.ApiClient(configuration))


def with_token(kubeconfig: Path, token: str) -> Any:
    """The kubeconfig with only a token as credentials: a server prefers a client certificate to a token."""
    content = yaml.safe_load(kubeconfig.read_text())
    content["users"] = [{"name": "token", "user": {"token": token}}]
    for context in content["contexts"]:
        context["context"]["user"] = "token"
    return content


def least_rights(cluster: TestCluster, name: str, rules: list[dict[str, Any]] | None = None) -> Any:
    """A kubeconfig of a service account with few rights in the namespace of the tests.

    :param name: of the service account and its Role, to which random letters are added.
    :param rules: of its Role. Default: those that `ktrain rbac` prints.
    """
    api = config.new_client_from_config(str(cluster.kubeconfig))
    accounts, rights = client.CoreV1Api(api), client.RbacAuthorizationV1Api(api)
    name, namespace = f"{name}-{secrets.token_hex(3)}", cluster.namespace
    role, binding = rbac.objects(namespace, name, name)
    accounts.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
    rights.create_namespaced_role(namespace, role if rules is None else {**role, "rules": rules})
    rights.create_namespaced_role_binding(namespace, binding)
    asked = {"spec": {"expirationSeconds": 3600, "audiences": []}}
    token = accounts.create_namespaced_service_account_token(name, namespace, asked).status.token
    return in_namespace(with_token(cluster.kubeconfig, token), namespace)


def in_namespace(kubeconfig: Any, namespace: str) -> Any:
    """The kubeconfig with this namespace in each context."""
    for context in kubeconfig["contexts"]:
        context["context"]["namespace"] = namespace
    return kubeconfig


@contextlib.contextmanager
def _namespace(kubeconfig: Path) -> Iterator[str]:
    api, name = core(kubeconfig), f"ktrain-test-{secrets.token_hex(3)}"
    api.create_namespace({"metadata": {"name": name}})
    try:
        yield name
    finally:
        api.delete_namespace(name)


@contextlib.contextmanager
def _pretended_gpus(kubeconfig: Path, number: int) -> Iterator[None]:
    """https://kubernetes.io/docs/tasks/administer-cluster/extended-resource-node: unless there are real ones."""
    api = core(kubeconfig)
    nodes = api.list_node().items
    if any(int(node.status.capacity.get(GPUS, 0)) for node in nodes):
        yield
        return
    # a taint keeps the pods of the tests away; a cordoned node and one that isn't ready have one, too
    name = next(node.metadata.name for node in reversed(nodes) if not node.spec.taints)
    api.patch_node_status(name, {"status": {"capacity": {GPUS: str(number)}}})
    try:
        yield
    finally:
        api.patch_node_status(name, {"status": {"capacity": {GPUS: None}}})
