"""What each namespace has from the start, and how one is emptied when it is deleted."""

from __future__ import annotations

import time
from collections.abc import Iterable

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.controllers.job_common import is_terminating
from airflow_provider_ktrain.local.controllers.runtime import Clock, Controller, Key, itself
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Change, Obj, Store

ROOT_CA = "kube-root-ca.crt"
DESCRIPTION = (
    "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such as the "
    "internal service IP or kubernetes.default.svc. No other usage is guaranteed across distributions of Kubernetes "
    "clusters."
)
LOOK_AGAIN = 0.2  # seconds between two looks at what is left of a namespace


class NamespaceController:
    """Keeps the default ServiceAccount and the ConfigMap kube-root-ca.crt, and empties namespaces.

    :param root_ca: the CA of the API server as PEM.
    """

    def __init__(
        self, store: Store, resources: Iterable[Resource], root_ca: str = "", clock: Clock = time.time
    ) -> None:
        self._store = store
        # custom resources last in the table, first to go: what they own is not made anew
        self._resources = [resource for resource in reversed([*resources]) if resource.namespaced]
        self._clock = clock
        annotations = {"kubernetes.io/description": DESCRIPTION}
        self._standard: list[tuple[Resource, Obj]] = [
            (r.SERVICE_ACCOUNT, {"metadata": {"name": "default"}}),
            (r.CONFIG_MAP, {"metadata": {"name": ROOT_CA, "annotations": annotations}, "data": {"ca.crt": root_ca}}),
        ]

    def controller(self) -> Controller[Key]:
        controller = Controller(self._store, self.reconcile, self._clock)
        controller.watch(r.NAMESPACE, itself)
        for resource, _ in self._standard:
            controller.watch(resource, self._deleted)
        return controller

    def _deleted(self, change: Change) -> Iterable[Key]:
        standard = {obj["metadata"]["name"] for _, obj in self._standard}
        meta = change.object["metadata"]
        return [("", meta["namespace"])] if change.type == "DELETED" and meta["name"] in standard else []

    def reconcile(self, key: Key) -> float | None:
        """Complete a namespace, or delete what is in it and then itself; seconds until the next look."""
        namespace = self._store.find(r.NAMESPACE, *key)
        if namespace is None:
            return None
        if is_terminating(namespace):
            return self._empty(namespace)
        for resource, obj in self._standard:
            if self._store.find(resource, key[1], obj["metadata"]["name"]) is None:
                self._store.create(resource, {**obj, "metadata": {**obj["metadata"], "namespace": key[1]}})
        return None

    def _empty(self, namespace: Obj) -> float | None:
        name = namespace["metadata"]["name"]
        if namespace.get("status", {}).get("phase") != "Terminating":
            namespace = self._store.update_status(r.NAMESPACE, namespace, {"phase": "Terminating"})
        for resource in self._resources:
            for obj in self._store.list(resource, name):
                if not is_terminating(obj):
                    self._store.delete(resource, name, obj["metadata"]["name"])
        if any(self._store.list(resource, name) for resource in self._resources):
            return LOOK_AGAIN
        self._store.update(r.NAMESPACE, {**namespace, "spec": {**namespace.get("spec", {}), "finalizers": []}})
        return None
