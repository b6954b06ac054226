"""Creates the default objects of each namespace, and deletes the contents of a deleted namespace."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ktrain_embedded.controllers.common import is_terminating
from ktrain_embedded.controllers.runtime import Clock, Controller, Key, itself
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Store

DESCRIPTION = (
    "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such as the "
    "internal service IP or kubernetes.default.svc. No other usage is guaranteed across distributions of Kubernetes "
    "clusters."
)
CHECK_INTERVAL = 0.2  # seconds between checks of a namespace that is being deleted


class NamespaceController(Controller[Key]):
    """Maintains the default ServiceAccount and the ConfigMap kube-root-ca.crt, and empties deleted namespaces.

    :param root_ca: the CA of the API server as PEM.
    """

    def __init__(
        self, store: Store, resources: Iterable[Resource], root_ca: str = "", clock: Clock = time.time
    ) -> None:
        super().__init__(store, clock)
        # custom resources are last in the table and are deleted first, so that their controllers don't recreate objects
        self._resources = [resource for resource in reversed([*resources]) if resource.namespaced]
        self._standard: dict[Resource, Obj] = {
            r.SERVICE_ACCOUNT: {"metadata": {"name": "default"}},
            r.CONFIG_MAP: {
                "metadata": {"name": "kube-root-ca.crt", "annotations": {"kubernetes.io/description": DESCRIPTION}},
                "data": {"ca.crt": root_ca},
            },
        }
        self.watch(r.NAMESPACE, itself)
        for resource in self._standard:
            self.watch(resource, lambda change: [("", change.object["metadata"]["namespace"])])

    def reconcile(self, key: Key) -> float | None:
        """Create missing default objects, or delete the contents and then the namespace. Returns seconds to wait."""
        namespace, name = self.store.find(r.NAMESPACE, *key), key[1]
        if namespace is None:
            return None
        if not is_terminating(namespace):
            for resource, obj in self._standard.items():
                if self.store.find(resource, name, obj["metadata"]["name"]) is None:
                    self.store.create(resource, {**obj, "metadata": {**obj["metadata"], "namespace": name}})
            return None
        namespace = self.store.update_status(r.NAMESPACE, namespace, {"phase": "Terminating"})
        for resource in self._resources:
            for obj in self.store.list(resource, name):
                if not is_terminating(obj):
                    self.store.delete(resource, name, obj["metadata"]["name"])
        if any(self.store.list(resource, name) for resource in self._resources):
            return CHECK_INTERVAL
        self.store.update(r.NAMESPACE, {**namespace, "spec": {**namespace.get("spec", {}), "finalizers": []}})
        return None
