"""The cncf-kubernetes provider's own pod manager, which its pod operator works with, as an independent client."""

from __future__ import annotations

import asyncio

import pytest
from airflow.providers.cncf.kubernetes.utils.pod_manager import PodManager, PodPhase
from kubernetes import client, config

from tests.clusters import IMAGE, TestCluster


@pytest.mark.parametrize(("script", "phase"), [("echo one; echo two", PodPhase.SUCCEEDED), ("exit 3", PodPhase.FAILED)])
def test_pod_manager_follows_a_pod_to_its_end(cluster: TestCluster, script: str, phase: str) -> None:
    with config.new_client_from_config(str(cluster.kubeconfig)) as api:
        core = client.CoreV1Api(api)
        manager = PodManager(core)
        container = client.V1Container(name="base", image=IMAGE, command=["sh", "-c", script])
        spec = client.V1PodSpec(restart_policy="Never", containers=[container])
        meta = client.V1ObjectMeta(generate_name="operated-", namespace=cluster.namespace)
        pod = manager.create_pod(client.V1Pod(api_version="v1", kind="Pod", metadata=meta, spec=spec))
        asyncio.run(manager.await_pod_start(pod, schedule_timeout=240, startup_timeout=240, check_interval=1))
        manager.fetch_container_logs(pod=pod, container_name="base", follow=True)
        assert manager.await_pod_completion(pod).status.phase == phase
        logs = core.read_namespaced_pod_log(pod.metadata.name, cluster.namespace, _preload_content=False).data
        assert logs == (b"one\ntwo\n" if phase == PodPhase.SUCCEEDED else b"")
        manager.delete_pod(pod)
