"""Requests of the end-to-end tests to the cluster, by the official client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import urllib3
from kubernetes import client, config, watch

from airflow_provider_ktrain.core.kinds import PYTORCHJOB, Kind


class Kube:
    """Jobs of one kind, and pods, in one namespace.

    :param kind: of the jobs. Default: PyTorchJob.
    """

    def __init__(self, kubeconfig: str, namespace: str = "default", kind: Kind = PYTORCHJOB) -> None:
        self.kind = kind
        self.resource = kind.group, kind.versions[0], namespace, kind.plural
        configuration = client.Configuration()
        config.load_kube_config(kubeconfig, client_configuration=configuration)
        self.api = client.ApiClient(configuration)
        self.custom = client.CustomObjectsApi(self.api)
        self.core = client.CoreV1Api(self.api)
        self.namespace = namespace

    def jobs(self) -> list[dict[str, Any]]:
        found = self.custom.list_namespaced_custom_object(*self.resource)
        return list(found["items"])

    def version(self) -> str:
        """The current resource version."""
        found = self.custom.list_namespaced_custom_object(*self.resource)
        return str(found["metadata"]["resourceVersion"])

    def delete(self, job: str) -> None:
        self.custom.delete_namespaced_custom_object(*self.resource, job)

    def pods(self, selector: str = "") -> list[Any]:
        return list(self.core.list_namespaced_pod(self.namespace, label_selector=selector).items)

    def watch_pods(self, selector: str, over: threading.Event) -> Iterator[Any]:
        """Changes of pods until `over` is set."""
        while not over.is_set():
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                yield from watch.Watch().stream(
                    self.core.list_namespaced_pod, self.namespace, label_selector=selector, timeout_seconds=2
                )

    def gpus_held(self, selector: str = "") -> int:
        """The number of GPUs of unfinished pods."""
        held = [p for p in self.pods(selector) if p.status.phase not in ("Succeeded", "Failed")]
        limits = [c.resources.limits or {} for p in held for c in p.spec.containers if c.resources]
        return sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)
