"""Jobs in virtual time: `Jobs` whose client is the store of the scripted API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kubernetes.client import ApiException

from airflow_provider_ktrain.core.kinds import kind_of
from tests.apiserver import Object
from tests.apiserver.server import merged
from tests.job_control.jobs import Jobs
from tests.operators.virtual_cluster import VirtualCluster

T = TypeVar("T")


class StoreClient:
    """The methods of `CustomObjectsApi` that `Jobs` uses."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._api, self._world = cluster.api, cluster.world

    def create_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, body: Any) -> Any:
        return self._world.call(lambda: self._api.put(plural, body))

    def get_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, name: str) -> Any:
        if name not in self._api.objects[plural]:
            raise ApiException(404)
        return self._api.objects[plural][name]

    def patch_namespaced_custom_object(
        self, group: str, version: str, namespace: str, plural: str, name: str, patch: Any
    ) -> Any:
        found = self.get_namespaced_custom_object(group, version, namespace, plural, name)
        return self._world.call(lambda: self._api.put(plural, merged(found, patch)))

    def delete_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, name: str) -> Any:
        self.get_namespaced_custom_object(group, version, namespace, plural, name)
        self._world.call(lambda: self._api.remove(plural, name))


class VirtualJobs(Jobs):
    """Jobs in virtual time."""

    def __init__(self, cluster: VirtualCluster) -> None:
        super().__init__(cluster)
        self.cluster, self.world, self.api = cluster, cluster.world, cluster.api
        self._api = StoreClient(cluster)

    def pods(self, job: Object, phase: str = "") -> list[str]:
        label = kind_of(job["kind"]).behavior.pod_name_label
        found = [one for one in self.api.pods.values() if one["metadata"]["labels"][label] == job["metadata"]["name"]]
        return sorted(one["metadata"]["name"] for one in found if phase in ("", one["status"]["phase"]))

    def wait_for(self, what: str, look: Callable[[], T]) -> T:
        self.world.wait(what, look)
        return look()
