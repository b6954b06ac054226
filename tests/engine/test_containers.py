"""Which containers count: the main one and the init containers of each replica, and no sidecar."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from airflow_provider_ktrain.core.state.limits import Limits
from tests import clusters
from tests.engine.tasks import Object, Task

SIDECAR = """
trap 'exit 0' TERM
echo 'KTRAIN_RESULT {"loss": 9}'
{ i=0; while [ $i != LINES ]; do echo beside $i; i=$((i+1)); sleep 0.2; done; } & wait
"""


def container(name: str, program: str) -> Object:
    return {"name": name, "image": clusters.IMAGE, "command": ["sh", "-c", program]}


class TaskWithSidecar(Task):
    """A task whose pods have an init container and a sidecar, which is the first container."""

    lines: ClassVar = 10  # of the sidecar

    def manifest(self, *args: Any, **more: Any) -> Object:
        built = super().manifest(*args, **more)
        for replica in built["spec"]["pytorchReplicaSpecs"].values():
            pod = replica["template"]["spec"]
            sidecar = SIDECAR.replace("LINES", str(self.lines))
            pod["initContainers"] = [container("fetch", "echo fetched")]
            pod["containers"].insert(0, container("metrics", sidecar))
        return built


class TaskWithEndlessSidecar(TaskWithSidecar):
    """The same, with a sidecar that writes until it is stopped."""

    lines = -1


@pytest.mark.parametrize("task", [TaskWithSidecar], indirect=True, ids=["sidecar"])
async def test_a_sidecar_neither_fills_the_log_nor_supplies_the_result(task: Task) -> None:
    ref = (await task.submit(1, """echo trained; echo 'KTRAIN_RESULT {"loss": 1}'""")).ref
    outcome = await task.ended(ref)
    assert outcome.result == {"loss": 1}
    lines = [line for line in task.log.messages if line.startswith("[Master 0")]
    assert lines == ["[Master 0 fetch] fetched", "[Master 0] trained", """[Master 0] KTRAIN_RESULT {"loss": 1}"""]


@pytest.mark.parametrize("task", [TaskWithEndlessSidecar], indirect=True, ids=["endless"])
async def test_lines_of_a_sidecar_do_not_count_as_activity(task: Task) -> None:
    ref = (await task.submit(1, "trap 'exit 143' TERM; echo hangs; sleep 600 & wait")).ref
    outcome = await task.ended(ref, limits=Limits(log_stall=3))
    assert (outcome.cause or {})["category"] == "hang"
