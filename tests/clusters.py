"""The cluster of the tests, accessed only by HTTP: the embedded one, or a real one given by KTRAIN_TEST_KUBECONFIG.

On a real cluster each session has its own namespace, KTRAIN_TEST_IMAGE replaces `scratch` (an image with sh and
python3), and a node is patched to have GPUs if none has any, as Kubernetes documents for extended resources. Tests that
need the fault switches or the images of `examples/` are marked `embedded` and skipped there, and so are those of kinds
that the cluster doesn't serve. `tests/other_cluster.py` runs tests in this way without a real cluster.
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

from airflow_provider_ktrain.core.kinds import Kind
from ktrain_embedded import EmbeddedCluster

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
    with EmbeddedCluster(images={IMAGE: None, **(images or {})}, gpus_per_node=gpus, **embedded) as started:
        yield TestCluster(started.kubeconfig, "default", started)


def require(cluster: TestCluster, kind: Kind, *versions: str) -> None:
    """Skip the test if a real cluster serves none of these versions of a kind. Default: any that we can write."""
    versions = versions or kind.versions
    if REAL and not any(serves(cluster, kind.group, version, kind.plural) for version in versions):
        pytest.skip(f"the cluster doesn't serve {kind.plural} of {kind.group}/{' or '.join(versions)}")


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
    name = nodes[-1].metadata.name
    api.patch_node_status(name, {"status": {"capacity": {GPUS: str(number)}}})
    try:
        yield
    finally:
        api.patch_node_status(name, {"status": {"capacity": {GPUS: None}}})
