"""A cluster that runs one small training at a time, and lives in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.core.ending import Successor
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome, event_of
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.training import Training
from airflow_provider_ktrain.hooks.training import TrainingHook
from tests.apiserver import NAMESPACE, ApiServer, InThread, Object, kubeconfig, stamp
from tests.clusters import TestCluster

TRAINS_FOR = 0.4  # seconds of a training
RESULT = {"loss": 0.5}
JOBS = PYTORCHJOB.plural


class Operator:
    """What a training operator and a kubelet do with a job of one replica: its pod runs, prints a result and succeeds.

    :ivar created: number of jobs that were created.
    :ivar deleted_alive: number of jobs that were deleted before they had ended.
    :ivar trains_for: seconds of a training.
    """

    def __init__(self) -> None:
        self.created = self.deleted_alive = 0
        self.trains_for = TRAINS_FOR
        self.api = ApiServer(self.on_write)

    def on_write(self, method: str, resource: str, obj: Object) -> None:
        if resource != JOBS:
            return
        if method == "DELETE":
            self.deleted_alive += not _has_ended(obj)
            return
        self.created += 1
        name, uid = obj["metadata"]["name"], obj["metadata"]["uid"]
        self._show(name, uid, "Running", {"running": {"startedAt": stamp()}})
        self.api.log(f"{name}-{uid}").line(f"KTRAIN_RESULT {json.dumps(RESULT)}")
        asyncio.get_running_loop().call_later(self.trains_for, self._succeed, name, uid)

    def _succeed(self, name: str, uid: str) -> None:
        job = self.api.objects[JOBS].get(name)
        if job is not None and job["metadata"]["uid"] == uid and not job["spec"]["runPolicy"].get("suspend"):
            ended = {"exitCode": 0, "startedAt": stamp(), "finishedAt": stamp()}
            self._show(name, uid, "Succeeded", {"terminated": ended})

    def _show(self, name: str, uid: str, phase: str, state: Object) -> None:
        condition = {"type": phase, "status": "True", "lastTransitionTime": stamp()}
        job = self.api.change(JOBS, name, lambda job: job.update(status={"conditions": [condition]}))
        labels = {
            **job["metadata"]["labels"], PYTORCHJOB.behavior.pod_name_label: name,
            "training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0",
        }  # fmt: skip
        owners = [{"kind": job["kind"], "name": name, "uid": uid}]
        container = {"name": "pytorch", "restartCount": 0, "state": state, "lastState": {}}
        self.api.put(
            "pods",
            {
                "metadata": {"name": f"{name}-{uid}", "labels": labels, "ownerReferences": owners},
                "spec": {
                    "nodeName": "node-1",
                    "terminationGracePeriodSeconds": 0,
                    "containers": [{"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
                },
                "status": {"phase": phase, "containerStatuses": [container]},
            },
        )

    def alive(self) -> list[Object]:
        """The jobs that train."""
        found = list(self.api.objects[JOBS].values())
        return [job for job in found if not _has_ended(job) and not job["spec"]["runPolicy"].get("suspend")]


def _has_ended(job: Object) -> bool:
    return any(one["type"] == "Succeeded" for one in (job.get("status") or {}).get("conditions") or ())


@contextlib.contextmanager
def small_cluster(directory: Path) -> Iterator[tuple[Operator, TestCluster]]:
    """The API server in a thread of its own, and how to reach it.

    :param directory: for its kubeconfig.
    """
    made: list[Operator] = []

    def make() -> ApiServer:
        made.append(Operator())
        return made[0].api

    with InThread(make) as thread:
        yield made[0], TestCluster(kubeconfig(directory, thread.url, NAMESPACE), NAMESPACE)


async def event_of_trigger(arguments: Mapping[str, Any], state: str, log: Log) -> Object:
    """The event of a trigger, which follows the job without the 10 s that Airflow needs before an event.

    :param arguments: of the trigger.
    :param state: of the task, as Airflow answers.
    """

    async def ask(seconds: float) -> str:
        return state

    host = Host(None, ask, Successor.OTHER_PROCESS, shared=True)
    training = Training(TrainingHook().api, host, log)
    training.handover = Handover.from_dict(arguments["handover"])
    try:
        outcome = await training.follow(JobRef.from_dict(arguments["job"]), Options.from_dict(arguments["options"]))
    except Exception as e:
        return event_of(f"{type(e).__name__}: {e}")
    finally:
        await training.close()
    assert isinstance(outcome, Outcome)
    return event_of(outcome)
