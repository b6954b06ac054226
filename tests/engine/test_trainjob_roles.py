"""TrainJobs whose runtime has more than nodes: initializers before them, or a launcher and workers."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.state.status import Phase
from tests import clusters
from tests.engine.tasks import TrainTask, create_runtime

Object = dict[str, Any]
TASK = TrainTask  #: Class of the fixture `task`.
pytestmark = pytest.mark.thorough
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
SERVES = "trap 'exit 143' TERM; echo waits for the launcher; sleep 600 & wait"


def replicated(
    name: str, program: str, *, container: str = "node", step: str = "", after: tuple[str, ...] = ()
) -> Object:
    """A replicated job of a runtime.

    :param step: the step of the TrainJob that it is. Default: none, as the workers of an MPI runtime.
    :param after: the jobs that must be complete before.
    """
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": container, "image": clusters.IMAGE, "command": ["sh", "-c", program]}],
    }
    return {
        "name": name,
        "dependsOn": [{"name": other, "status": "Complete"} for other in after],
        "template": {
            "metadata": {"labels": {STEP: step}} if step else {},
            "spec": {"backoffLimit": 0, "template": {"spec": pod}},
        },
    }


async def use_runtime(task: TrainTask, policy: Object, *jobs: Object, **jobset: Any) -> None:
    """Create the runtime of the task's job."""
    runtime = {
        "apiVersion": f"{TRAINJOB.group}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": task.name, "labels": {"trainer.kubeflow.org/framework": next(iter(policy))}},
        "spec": {"mlPolicy": policy, "template": {"spec": {"replicatedJobs": list(jobs), **jobset}}},
    }
    await create_runtime(task.api, task.namespace, runtime)


async def initialized(task: TrainTask, dataset: str = "echo loads data", model: str = "echo loads model") -> None:
    """A runtime with two initializers, after which the node starts."""
    initializers = ("dataset-initializer", "model-initializer")
    before = [
        replicated(name, program, container=name, step=name)
        for name, program in zip(initializers, (dataset, model), strict=True)
    ]
    await use_runtime(task, {"torch": {}}, *before, replicated("node", "true", step="trainer", after=initializers))


async def test_logs_of_initializers_come_before_those_of_the_nodes(task: TrainTask) -> None:
    await initialized(task)
    ref = (await task.submit(1, "echo trains; echo KTRAIN_RESULT 3")).ref
    outcome = await task.ended(ref)
    assert (outcome.succeeded, outcome.result) == (True, 3)
    lines = [line for line in task.log.messages if line.endswith((" loads data", " loads model", " trains"))]
    assert sorted(lines[:2]) == ["[dataset-initializer 0] loads data", "[model-initializer 0] loads model"]
    assert lines[2:] == ["[node 0] trains"]


async def test_an_initializer_that_fails_is_the_cause(task: TrainTask) -> None:
    await initialized(task, model="echo no token for the model; exit 3")
    outcome = await task.ended((await task.submit(1, "echo trains")).ref)
    assert outcome.phase is Phase.FAILED
    assert "model-initializer" in (outcome.cause or {})["summary"]
    assert "[model-initializer 0] no token for the model" in task.log.messages
    assert "[node 0] trains" not in task.log.messages


async def test_the_launcher_of_an_mpi_runtime_is_the_primary(task: TrainTask) -> None:
    """Its log has the result, and its end is the job's. The workers end with the job."""
    await use_runtime(
        task,
        {"mpi": {"runLauncherAsNode": True}},
        replicated("node", SERVES),
        replicated("launcher", "true", step="trainer"),
        successPolicy={"operator": "All", "targetReplicatedJobs": ["launcher"]},
    )
    ref = (await task.submit(1, "sleep 2; echo starts mpirun; echo KTRAIN_RESULT 7", workers=1)).ref
    outcome = await task.ended(ref)
    assert (outcome.succeeded, outcome.result) == (True, 7)
    assert {"[launcher 0] starts mpirun", "[node 0] waits for the launcher"} <= set(task.log.messages)
    assert any("with 2 replicas." in line for line in task.log.messages)
    assert not await task.pods(ref)
