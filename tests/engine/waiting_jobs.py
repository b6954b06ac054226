"""Many suspended jobs in a scripted API server, in the process that follows them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import tracemalloc
from collections import Counter
from typing import Any, cast

from airflow_provider_ktrain.core.identity.names import DEPLOYMENT_LABEL, JobRef
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.training_owner import Training
from tests.apiserver import ApiServer
from tests.apiserver.in_process import InProcessApi
from tests.engine.large_job import AT, STEPS_UNTIL_IDLE
from tests.engine.tasks import host_of

MANAGED: dict[str, Any] = {f"f:field-{number}": {"f:value": {}} for number in range(60)}


def job(number: int) -> dict[str, Any]:
    container = {
        "name": "pytorch",
        "image": "registry.example/train:1",
        "command": ["torchrun", "train.py", "--epochs", "90", "--data", "/data"],
        "env": [{"name": f"VARIABLE_{n}", "value": f"value of variable {n}"} for n in range(16)],
        "resources": {"limits": {"nvidia.com/gpu": "8"}, "requests": {"memory": "64Gi", "cpu": "16"}},
        "volumeMounts": [{"name": f"volume-{n}", "mountPath": f"/data/{n}"} for n in range(4)],
    }
    pod = {
        "containers": [container],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "volumes": [{"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": f"claim-{n}"}} for n in range(4)],
        "nodeSelector": {"pool": "gpu"},
    }
    replica = {"replicas": 4, "restartPolicy": "Never", "template": {"metadata": {"labels": {"a": "b"}}, "spec": pod}}
    suspended = {"type": "Suspended", "status": "True", "reason": "PyTorchJobSuspended", "lastTransitionTime": AT}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": f"train-{number}",
            "namespace": "ns",
            "uid": f"uid-{number}",
            "resourceVersion": "1",
            "creationTimestamp": AT,
            "labels": {DEPLOYMENT_LABEL: "bench", "team": "research"},
            "annotations": {"ktrain.airflow/deadline": "1", "note": "x" * 200},
            "managedFields": [{"manager": "ktrain", "fieldsV1": MANAGED}],
        },
        "spec": {
            "runPolicy": {"suspend": True},
            "pytorchReplicaSpecs": {"Master": replica | {"replicas": 1}, "Worker": replica},
        },
        "status": {"conditions": [suspended], "startTime": None},
    }


async def memory_of_jobs(count: int) -> Counter[str]:
    """The bytes that following takes for each job, by the file that allocated them.

    The same is done twice: the first time loads the modules and fills the caches that all jobs share, and Python gives
    the first objects of a class more space than later ones.
    """
    await _memory_of_jobs(count)
    return await _memory_of_jobs(count)


async def _memory_of_jobs(count: int) -> Counter[str]:
    server, log = ApiServer(), logging.getLogger("waiting-jobs")
    for number in range(count):
        server.put("pytorchjobs", job(number))
    api = InProcessApi(server, "trigger")
    log.setLevel(logging.CRITICAL)
    host = host_of(shared=True)

    gc.collect()  # objects that Python keeps for further use would not be counted
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    following = [
        asyncio.create_task(_follow(number, Training(lambda: contextlib.nullcontext(cast(Api, api)), host, log)))
        for number in range(count)
    ]
    while server.verbs["watch"] < 2:  # of jobs and pods  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(STEPS_UNTIL_IDLE):
        await asyncio.sleep(0)
    gc.collect()
    differences = tracemalloc.take_snapshot().compare_to(before, "filename")
    tracemalloc.stop()
    for task in following:
        task.cancel()
    await asyncio.wait(following)
    await api.close()
    return Counter({of.traceback[0].filename: of.size_diff // count for of in differences})


async def _follow(number: int, training: Training) -> None:
    ref = JobRef("PyTorchJob", "v1", "ns", f"train-{number}", f"uid-{number}", deployment="bench", submission="s")
    await training.follow(ref, Options())
