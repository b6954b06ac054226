"""Submit and inspect jobs with the official client."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from kubernetes import client, config

from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, Owner, TaskKey
from airflow_provider_ktrain.core.kinds import KINDS, kind_of
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from tests.clusters import IMAGE, TestCluster, require, serves

Object = dict[str, Any]
T = TypeVar("T")
WAIT = ["sh", "-c", "echo started; sleep 600"]


class Jobs:
    """Jobs in one namespace; a context manager that deletes the jobs that it has created."""

    def __init__(self, cluster: TestCluster) -> None:
        configuration = client.Configuration()
        config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)
        api = client.ApiClient(configuration)
        self._cluster, self.namespace = cluster, cluster.namespace
        self.kubeconfig = cluster.kubeconfig
        self._api: Any = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)
        self._made: list[Object] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._made:
            self.delete(job)

    def build(
        self, kind: str = "PyTorchJob", version: str = "v1", *, spec: Object | None = None, **options: Any
    ) -> Object:
        """A manifest with a unique name; `spec` is merged into its spec."""
        given: dict[str, Any] = {"image": IMAGE, "command": WAIT, "gpus": 1, **options}
        manifest = build(kind, JobOptions(**given), f"kubeflow.org/{version}")
        manifest["spec"] |= spec or {}
        for _, template in kind_of(manifest["kind"]).form.templates(manifest):
            template["spec"]["terminationGracePeriodSeconds"] = 1  # as the first process, a shell ignores SIGTERM
        manifest["metadata"] |= {"name": f"life-{secrets.token_hex(4)}", "namespace": self.namespace}
        return manifest

    def submit(self, manifest: Object | None = None, *, owned: bool = False, **how: Any) -> Object:
        """Submit a job: with `owned` as a task's job, otherwise without an owner."""
        manifest = copy.deepcopy(manifest) if manifest else self.build(**how)
        require(self._cluster, kind_of(manifest["kind"]), manifest["apiVersion"].rpartition("/")[2])
        if owned:
            owner = Owner(TaskKey("elsewhere", "dag", "train", "run"), 1, "ti")
            manifest["metadata"]["annotations"] = {OWNER_ANNOTATION: owner.annotation()}
        job: Object = self._api.create_namespaced_custom_object(*self._place(manifest), manifest)
        self._made.append(job)
        return job

    def submitted(self, manifest: Object) -> Object:
        """The job created from a manifest."""
        found: Object = self._api.get_namespaced_custom_object(*self._place(manifest), manifest["metadata"]["name"])
        return found

    def names(self) -> set[str]:
        """Names of all jobs in the namespace."""
        listed = [
            self._api.list_namespaced_custom_object(kind.group, version, self.namespace, kind.plural)
            for kind in KINDS.values()
            for version in kind.versions
            if serves(self._cluster, kind.group, version, kind.plural)
        ]
        return {job["metadata"]["name"] for found in listed for job in found["items"]}

    def read(self, job: Object) -> Object | None:
        """The current job. None: it doesn't exist; a new job of the same name doesn't count."""
        try:
            found: Object = self._api.get_namespaced_custom_object(*self._place(job), job["metadata"]["name"])
        except client.ApiException as e:
            if e.status == 404:
                return None
            raise
        return found if found["metadata"]["uid"] == job["metadata"].get("uid") else None

    def patch(self, job: Object, patch: Object) -> Object:
        found: Object = self._api.patch_namespaced_custom_object(*self._place(job), job["metadata"]["name"], patch)
        return found

    def delete(self, job: Object) -> None:
        try:
            self._api.delete_namespaced_custom_object(*self._place(job), job["metadata"]["name"])
        except client.ApiException as e:
            if e.status != 404:
                raise

    def pods(self, job: Object, phase: str = "") -> list[str]:
        """Names of the job's pods (in a phase), sorted."""
        selector = f"training.kubeflow.org/job-name={job['metadata']['name']}"
        found = self._core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return sorted(p.metadata.name for p in found if phase in ("", p.status.phase))

    def condition(self, job: Object, condition_type: str) -> bool:
        found = self.read(job) or {}
        conditions = (found.get("status") or {}).get("conditions") or ()
        return any(c["type"] == condition_type and c["status"] == "True" for c in conditions)

    def wait(self, job: Object, condition_type: str) -> None:
        self.wait_for(f"{job['metadata']['name']} is {condition_type}", lambda: self.condition(job, condition_type))

    def wait_pods(self, job: Object, number: int) -> list[str]:
        return self.wait_for(f"{number} pods run", lambda: len(p := self.pods(job, "Running")) == number and p) or []

    def wait_none(self, job: Object, phase: str) -> None:
        self.wait_for(f"no pod is {phase}", lambda: not self.pods(job, phase))

    def wait_exactly(self, job: Object, names: list[str]) -> None:
        self.wait_for(f"the pods are {names}", lambda: self.pods(job) == names)

    def wait_number(self, job: Object, number: int) -> None:
        self.wait_for(f"there are {number} pods", lambda: len(self.pods(job)) == number)

    def wait_for(self, what: str, look: Callable[[], T]) -> T:
        """The result of `look` as soon as it is true."""
        end = time.monotonic() + 240
        while not (found := look()):
            assert time.monotonic() < end, f"not within 240 s: {what}"
            time.sleep(0.05)
        return found

    def _place(self, job: Object) -> tuple[str, str, str, str]:
        group, _, version = job["apiVersion"].partition("/")
        return group, version, self.namespace, kind_of(job["kind"]).plural
