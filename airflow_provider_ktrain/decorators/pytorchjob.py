"""`@task.pytorchjob` runs a Python function as the program of a PyTorchJob's replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain.core.manifest.program import command
from airflow_provider_ktrain.decorators.base import FUNCTION_FIELDS, FunctionOperator, function_task
from airflow_provider_ktrain.operators.training import PyTorchJobOperator

if TYPE_CHECKING:
    from airflow.sdk.bases.decorator import TaskDecorator


class _PyTorchJobDecoratedOperator(FunctionOperator, PyTorchJobOperator):
    """Runs a function as the program of a PyTorchJob. The function is checked when the DAG file is parsed."""

    custom_operator_name = "@task.pytorchjob"
    template_fields: Sequence[str] = (*FUNCTION_FIELDS, *PyTorchJobOperator.template_fields)

    def launch_command(self) -> list[str]:
        return command(torchrun=self.nproc_per_node not in (None, 1, "1"))


def pytorchjob_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Run a function in every replica of a PyTorchJob; rank 0's return value is the task's.

    Only the function's source is sent to the pod, so it imports what it needs inside. Its arguments and its return
    value are JSON. With `nproc_per_node` above 1, torchrun starts it; otherwise it runs once in each replica. A name of
    the surrounding module or of Airflow's context is an error when the DAG is parsed. Decorators above this one, such
    as `@setup` and `@task.run_if`, are applied by Airflow; decorators below it are errors.

    :param python_callable: the function.
    :param multiple_outputs: push each key of a returned dict as an XCom. Default: if the return annotation is a dict.
    :param kwargs: parameters of PyTorchJobOperator: `image`, `workers`, `gpus`, `manifest`, `namespace`, ...
    :raises ValueError: when the DAG is parsed: the function uses something that isn't sent; it has decorators below
        this one; `command` or `args` is set; `image` and `manifest` are missing.
    :raises TrainingConfigurationError: when the task runs: the arguments aren't JSON, or exceed 96 KiB together with
        the program; the return value isn't JSON.
    """
    return function_task(_PyTorchJobDecoratedOperator, python_callable, multiple_outputs=multiple_outputs, **kwargs)
