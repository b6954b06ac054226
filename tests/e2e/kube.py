"""Requests of the end-to-end tests to the cluster, by the official client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import urllib3
from kubernetes import client, config, watch
from kubernetes.stream import stream

from airflow_provider_ktrain.core.identity.names import PREFIX, label_value
from airflow_provider_ktrain.core.kinds import PYTORCHJOB, Kind
from tests.e2e.airflow import wait_for

ROLE = "training.kubeflow.org/replica-type"
#: Ends `until [ -e "/tmp/$HOSTNAME.go" ]; do sleep 0.2; done` in a pod's program.
LET_GO = 'touch "/tmp/$HOSTNAME.go"'


def selector_of(dag: str, run: str = "", task: str = "") -> str:
    """The label selector of the jobs and pods of a DAG, of one run of it, or of one task."""
    labels = {"dag-id": dag, "run-id": run, "task-id": task}
    return ",".join(f"{PREFIX}/{name}={label_value(value)}" for name, value in labels.items() if value)


class Kube:
    """Jobs of one kind, and pods, in one namespace.

    :param kind: of the jobs. Default: PyTorchJob.
    :param version: of the kind. Default: its newest one.
    """

    def __init__(self, kubeconfig: str, namespace: str = "default", kind: Kind = PYTORCHJOB, version: str = "") -> None:
        self.kind = kind
        self.resource = kind.group, version or kind.versions[0], namespace, kind.plural
        configuration = client.Configuration()
        config.load_kube_config(kubeconfig, client_configuration=configuration)
        self.api = client.ApiClient(configuration)
        self.custom = client.CustomObjectsApi(self.api)
        self.core = client.CoreV1Api(self.api)
        self.namespace = namespace

    def jobs(self, selector: str = "") -> list[dict[str, Any]]:
        found = self.custom.list_namespaced_custom_object(*self.resource, label_selector=selector)
        return list(found["items"])

    def version(self) -> str:
        """The current resource version."""
        found = self.custom.list_namespaced_custom_object(*self.resource)
        return str(found["metadata"]["resourceVersion"])

    def delete(self, job: str) -> None:
        self.custom.delete_namespaced_custom_object(*self.resource, job)

    def evict(self, pod: str) -> None:
        """Evict a pod as `kubectl drain` does."""
        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=pod, namespace=self.namespace))
        self.core.create_namespaced_pod_eviction(pod, self.namespace, body)

    def create(self, create: Callable[[str, Any], Any], body: dict[str, Any]) -> None:
        """Create an object in the namespace, unless it exists."""
        try:
            create(self.namespace, body)
        except client.ApiException as e:
            if e.status != 409:
                raise

    def pods(self, selector: str = "") -> list[Any]:
        return list(self.core.list_namespaced_pod(self.namespace, label_selector=selector).items)

    def let_go(self, selector: str, number: int) -> None:
        """Let the programs of these pods continue, which wait for a file, as soon as this number of pods runs."""

        def running() -> bool:
            return [pod.status.phase for pod in self.pods(selector)] == ["Running"] * number

        wait_for(f"{number} pods run", running)
        core = client.CoreV1Api(client.ApiClient(self.api.configuration))  # `stream` changes its client
        for pod in self.pods(selector):
            stream(
                core.connect_get_namespaced_pod_exec, pod.metadata.name, self.namespace,
                command=["sh", "-c", LET_GO], stdout=True, stderr=True,
            )  # fmt: skip

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


class Pods:
    """The history of pods while a test watched them. A watch misses no state."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def of(self, role: str = "") -> list[Any]:
        return [p for p in self.states if (p.metadata.labels or {}).get(ROLE, "").startswith(role)]

    def specs(self, dag: str, run: str) -> dict[str, Any]:
        """The specs of the pods of a run, by pod name."""
        labels = dict(pair.split("=") for pair in selector_of(dag, run).split(","))
        return {p.metadata.name: p.spec for p in self.states if labels.items() <= (p.metadata.labels or {}).items()}

    @property
    def nodes(self) -> dict[str, str]:
        """Nodes by pod name, of all pods that got a node."""
        return {p.metadata.name: p.spec.node_name for p in self.states if p.spec.node_name}

    def running(self, role: str) -> list[int]:
        """The running number of a role, at each change. A pod that is being deleted doesn't count."""
        now: set[str] = set()
        counts = [0]
        for pod in self.of(role):
            runs = pod.status.phase == "Running" and not pod.metadata.deletion_timestamp
            now = now | {pod.metadata.name} if runs else now - {pod.metadata.name}
            if len(now) != counts[-1]:
                counts.append(len(now))
        return counts


@contextlib.contextmanager
def watching(kube: Kube) -> Iterator[Pods]:
    """Watch the namespace's pods, one second at a time. Each watch continues where the previous one ended.

    The last one begins after the end, so that no change before the end is missed.
    """
    pods, ended = Pods(), threading.Event()
    version = kube.core.list_namespaced_pod(kube.namespace).metadata.resource_version

    def look(version: str) -> None:
        last = False
        while not last:
            last = ended.is_set()
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                for event in watch.Watch().stream(
                    kube.core.list_namespaced_pod, kube.namespace, resource_version=version, timeout_seconds=1
                ):
                    pods.states.append(event["object"])
                    version = event["object"].metadata.resource_version

    thread = threading.Thread(target=look, args=(version,))
    thread.start()
    try:
        yield pods
    finally:
        ended.set()
        thread.join()
