"""`@task.pytorchjob`: a plain Python function becomes the program of a PyTorchJob's replicas."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

from airflow_provider_ktrain.core.program import cannot_travel, command, environment, program
from airflow_provider_ktrain.operators.training import PyTorchJobOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class _PyTorchJobDecoratedOperator(DecoratedOperator, PyTorchJobOperator):
    custom_operator_name = "@task.pytorchjob"

    template_fields: Sequence[str] = ("op_args", "op_kwargs", *PyTorchJobOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **PyTorchJobOperator.template_fields_renderers,
    }

    def __init__(self, *, python_callable: Callable[..., Any], **kwargs: Any) -> None:
        if taken := {"command", "args"} & kwargs.keys():
            raise ValueError(f"@task.pytorchjob: {taken.pop()} is the function itself; leave it out")
        super().__init__(python_callable=python_callable, **kwargs)
        problems = [*cannot_travel(self.get_python_source(), python_callable.__name__), *self._of_the_context()]
        if self.image is None and self.manifest is None:
            problems.append(f"{python_callable.__name__} has no image to run in: give image=..., or a manifest")
        if problems:
            raise ValueError("@task.pytorchjob: " + "; ".join(problems))

    def _of_the_context(self) -> Iterator[str]:
        """What the function would get of Airflow's context as an ordinary `@task`, and does not get in a pod."""
        name, signature = self.python_callable.__name__, inspect.signature(self.python_callable)
        given = signature.bind_partial(*self.op_args, **self.op_kwargs).arguments
        for parameter in signature.parameters.values():
            if parameter.name in given:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                yield f"{name} takes **{parameter.name}, which stays empty, as Airflow's context does not travel"
            elif parameter.name in KNOWN_CONTEXT_KEYS:
                yield (
                    f"{name} takes {parameter.name!r} of Airflow's context, which does not travel: give the parameter "
                    'another name and pass what it needs, as in day="{{ ds }}"'
                )

    def execute(self, context: Context) -> Any:
        from airflow_provider_ktrain.hooks.worker import as_airflow_errors

        with as_airflow_errors():
            name = self.python_callable.__name__
            text = program(self.get_python_source(), name, list(self.op_args), dict(self.op_kwargs))
        self.command = command(torchrun=self.nproc_per_node not in (None, 1, "1"))
        self.args = []
        self.env = {**(self.env or {}), **environment(text)}
        return PyTorchJobOperator.execute(self, context)


def pytorchjob_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Run a function in every replica of a PyTorchJob; rank 0's return value is the task's.

    The function's source travels alone: it imports what it needs inside. Its arguments and its return value are JSON.
    With `nproc_per_node` over 1 torchrun starts it, else it runs once in each replica. What it uses of the module
    around it, or takes of Airflow's context, is an error when the DAG is parsed.

    :param python_callable: the function.
    :param multiple_outputs: unroll a returned dict into several XComs.
    :param kwargs: of PyTorchJobOperator: `image`, `workers`, `gpus`, `manifest`, `namespace`, ...
    :raises ValueError: when the DAG is parsed: the function needs what does not travel; `command` or `args` is given;
        there is neither `image` nor `manifest`.
    :raises TrainingConfigurationError: when the task runs: the arguments are no JSON, or over 96 KiB with the program.
    """
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=_PyTorchJobDecoratedOperator,
        **kwargs,
    )
