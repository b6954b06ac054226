"""`@task.trainjob` runs a Python function, started by torchrun, on the nodes of a TrainJob."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain.core.kinds.trainjob.runtime import TORCH
from airflow_provider_ktrain.core.manifest.program import command
from airflow_provider_ktrain.decorators.base import FUNCTION_FIELDS, FunctionOperator, function_task
from airflow_provider_ktrain.operators.training import TrainJobOperator

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.decorator import TaskDecorator

    from airflow_provider_ktrain.core.manifest.job_request import JobRequest


class _TrainJobDecoratedOperator(FunctionOperator, TrainJobOperator):
    custom_operator_name = "@task.trainjob"
    needs_image = False  # the runtime has one
    template_fields: Sequence[str] = (*FUNCTION_FIELDS, *TrainJobOperator.template_fields)

    def launch_command(self) -> list[str]:
        return command(torchrun=True)

    def _request(self, context: Context) -> JobRequest:
        return replace(super()._request(context), runtime_policy=TORCH)


def trainjob_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Run a function on the nodes of a TrainJob; rank 0's return value is the task's.

    torchrun starts the function on each node, once for each process (`nproc_per_node`), so the runtime must be one for
    torch, such as `torch-distributed`. An MPI runtime is refused, if the connection can read it. `image` and `manifest`
    may both be missing: the runtime has an image. What a function can use, and further errors: see `pytorchjob_task`.

    :param python_callable: the function.
    :param multiple_outputs: push each key of a returned dict as an XCom. Default: if the return annotation is a dict.
    :param kwargs: parameters of TrainJobOperator: `runtime`, `image`, `nodes`, `nproc_per_node`, `gpus`, ...
    :raises TrainingClusterError: when the task runs: the runtime is not one for torch.
    """
    return function_task(_TrainJobDecoratedOperator, python_callable, multiple_outputs=multiple_outputs, **kwargs)
