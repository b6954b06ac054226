"""What Kueue and the operators write in tests that need no recording."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.engine.api import kueue as requests
from airflow_provider_ktrain.engine.api.client import Api
from tests.apiserver import ApiServer, Object, stamp
from tests.apiserver.store import copied
from tests.engine.tasks import Task, until

STOP_SECONDS = 2  #: Time until a program ends after SIGTERM, and then until its pod is gone.
QUEUE = "kueue.x-k8s.io/queue-name"


def has_queue(job: Object) -> bool:
    return QUEUE in (job["metadata"].get("labels") or {})


def suspend(job: Object, suspended: bool) -> None:
    """Set `suspend` in a job's spec."""
    spec = job["spec"] if job["kind"] == TRAINJOB.name else job["spec"].setdefault("runPolicy", {})
    spec["suspend"] = suspended


def is_suspended(job: Object) -> bool:
    return bool((job["spec"].get("runPolicy") or job["spec"]).get("suspend"))


def workload_name(task: Task) -> str:
    """The name of the Workload that `write_workload` has created for the task's job."""
    return f"{task.kind.name.lower()}-{task.name}-12345"


async def write_workload(
    api: Api, job: dict[str, Any], conditions: list[Any], *, active: bool = True,
    resources: dict[str, Any] | None = None, count: int = 1,
) -> None:  # fmt: skip
    """Create a Workload for the job as Kueue does, with one pod set."""
    meta, namespace = job["metadata"], job["metadata"]["namespace"]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": meta["name"], "uid": meta["uid"]}
    template = {"spec": {"containers": [{"name": "main", "image": "scratch", "resources": resources or {}}]}}
    pod_sets = [{"name": "main", "count": count, "template": template}]
    spec = {"queueName": "team-a", "podSets": pod_sets, "active": active}
    name = f"{job['kind'].lower()}-{meta['name']}-12345"
    body = {
        "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "spec": spec,
        "metadata": {"name": name, "ownerReferences": [{**owner, "controller": True}]},
    }  # fmt: skip
    await api.request("POST", requests.workloads_path("v1beta2", namespace), body=body)
    path = requests.workloads_path("v1beta2", namespace, name)
    await api.request("PATCH", f"{path}/status", body={"status": {"conditions": conditions}})


async def until_logged(task: Task, text: str) -> None:
    async def logged() -> bool:
        return any(text in line for line in task.log.messages)

    await until(logged)


def admit(server: ApiServer, task: Task, admitted: bool = True) -> None:
    """Admit the task's job, or take its admission."""
    server.change(task.kind.plural, task.name, lambda job: suspend(job, not admitted))


def report(server: ApiServer, task: Task, **values: str) -> None:
    """Set conditions of the task's job."""

    def write(job: Object) -> None:
        old = (job.get("status") or {}).get("conditions") or []
        new = [{"type": name, "status": value, "lastTransitionTime": stamp()} for name, value in values.items()]
        job.setdefault("status", {})["conditions"] = [*(one for one in old if one["type"] not in values), *new]

    server.change(task.kind.plural, task.name, write)


def end(server: ApiServer, task: Task, exit_code: int = 0) -> None:
    """The program of the task's job ends, and so does the job."""
    end_pods(server, exit_code)
    succeeded = "Complete" if task.kind is TRAINJOB else "Succeeded"
    report(server, task, **{"Failed" if exit_code else succeeded: "True"})


def end_pods(server: ApiServer, exit_code: int) -> None:
    """The programs of all pods end."""
    for pod in list(server.pods.values()):
        began = pod["metadata"]["creationTimestamp"]
        state = {"terminated": {"exitCode": exit_code, "startedAt": began, "finishedAt": stamp()}}
        status = _pod_status(pod, "Failed" if exit_code else "Succeeded", state)
        server.put("pods", {**copied(pod), "status": status})


@contextlib.asynccontextmanager
async def operated(server: ApiServer, task: Task, *, exit_code: int = 143) -> AsyncIterator[None]:
    """An operator: the task's job has one pod that runs while the job isn't suspended.

    :param exit_code: of the program, after SIGTERM. Default: 143.
    """

    async def stop() -> None:
        deletion = {"deletionTimestamp": stamp(-STOP_SECONDS), "deletionGracePeriodSeconds": STOP_SECONDS}
        for name in list(server.pods):
            server.change("pods", name, lambda pod: pod["metadata"].update(deletion))
        await asyncio.sleep(STOP_SECONDS)
        end_pods(server, exit_code)
        await asyncio.sleep(STOP_SECONDS)
        for name in list(server.pods):
            server.remove("pods", name)

    async def operate() -> None:
        while True:
            job = server.objects[task.kind.plural].get(task.name)
            ended = {"Succeeded", "Failed", "Complete"} & _true(job or {})
            if job is not None and not ended and is_suspended(job) is bool(server.pods):
                report(server, task, Suspended=str(is_suspended(job)), Running=str(not is_suspended(job)))
                if is_suspended(job):
                    await stop()
                else:
                    server.put("pods", _pod(job))
            else:
                await server.news.wait()

    operating = asyncio.create_task(operate())
    try:
        yield
    finally:
        operating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await operating


def _pod(job: Object) -> Object:
    meta, train = job["metadata"], job["kind"] == TRAINJOB.name
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": meta["name"], "uid": meta["uid"]}
    labels = {
        "jobset.sigs.k8s.io/jobset-name": meta["name"], "jobset.sigs.k8s.io/replicatedjob-name": "node",
        "jobset.sigs.k8s.io/jobset-uid": "jobset", "batch.kubernetes.io/job-completion-index": "0",
    } if train else {
        "training.kubeflow.org/job-name": meta["name"], "training.kubeflow.org/replica-type": "master",
        "training.kubeflow.org/replica-index": "0", "training.kubeflow.org/job-role": "master",
    }  # fmt: skip
    container = "node" if train else "pytorch"
    replicas = job["spec"].get("pytorchReplicaSpecs", {}).get("Master", {})
    resources = (
        job["spec"]["trainer"]["resourcesPerNode"]
        if train
        else replicas["template"]["spec"]["containers"][0]["resources"]
    )
    pod = {
        "metadata": {
            "name": f"{meta['name']}-master-0", "labels": {**(meta.get("labels") or {}), **labels},
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"nodeName": "node-1", "containers": [{"name": container, "resources": resources}]},
    }  # fmt: skip
    return {**pod, "status": _pod_status(pod, "Running", {"running": {"startedAt": stamp()}})}


def _pod_status(pod: Object, phase: str, state: Object) -> Object:
    scheduled = pod["metadata"].get("creationTimestamp") or stamp()
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": scheduled}]
    container = pod["spec"]["containers"][0]["name"]
    status = {"name": container, "restartCount": 0, "state": state, "lastState": {}, "ready": phase == "Running"}
    return {"phase": phase, "conditions": conditions, "containerStatuses": [status]}


def _true(job: Object) -> set[str]:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return {condition["type"] for condition in conditions if condition["status"] == "True"}
