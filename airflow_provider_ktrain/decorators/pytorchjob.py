"""`@task.pytorchjob` runs a Python function as the program of a PyTorchJob's replicas."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.manifest.program import (
    NOT_JSON,
    Definition,
    cannot_travel,
    command,
    environment,
    program,
)
from airflow_provider_ktrain.operators.training import PyTorchJobOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.engine.follow.messages import Outcome


QUOTES = "\"'"
_REMEDY = (
    "Decorators below @task.pytorchjob are not applied in the pod: decorate a function inside this one and call it"
)


class _PyTorchJobDecoratedOperator(DecoratedOperator, PyTorchJobOperator):
    custom_operator_name = "@task.pytorchjob"

    template_fields: Sequence[str] = ("op_args", "op_kwargs", *PyTorchJobOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **PyTorchJobOperator.template_fields_renderers,
    }

    def __init__(self, *, python_callable: Callable[..., Any], **kwargs: Any) -> None:
        if taken := {"command", "args"} & kwargs.keys():
            raise ValueError(f"@task.pytorchjob: {taken.pop()} can't be set, because the function is the program")
        super().__init__(python_callable=python_callable, **kwargs)
        self._definition = _definition(python_callable)
        problems = [*cannot_travel(self._definition, python_callable.__name__), *self._context_problems()]
        if self.do_xcom_push and _returns_nothing(self.logs):
            problems.append(
                f"logs={self.logs!r} leaves out replica 0, whose log has the return value of "
                f"{python_callable.__name__}: follow that one too, or set do_xcom_push=False"
            )
        if self.image is None and self.manifest is None:
            problems.append(f"{python_callable.__name__} has no image: set image=... or manifest=...")
        if problems:
            raise ValueError("@task.pytorchjob: " + "; ".join(problems))

    def _context_problems(self) -> Iterator[str]:
        """Parameters that an ordinary `@task` gets from Airflow's context, which is not available in a pod."""
        name, signature = self.python_callable.__name__, inspect.signature(self.python_callable)
        given = signature.bind_partial(*self.op_args, **self.op_kwargs).arguments
        for parameter in signature.parameters.values():
            if parameter.name in given:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                yield f"{name} takes **{parameter.name}, but Airflow's context is not available in the pod"
            elif parameter.name in compat.context_keys():
                yield (
                    f"{name} takes {parameter.name!r} from Airflow's context, which is not available in the pod: "
                    'rename the parameter and pass a value, as in day="{{ ds }}"'
                )

    def get_python_source(self) -> str:
        """The definition of the function as it was written, without decorators."""
        return self._definition.text

    def execute(self, context: Context) -> Any:
        from airflow_provider_ktrain.worker_host import as_airflow_errors

        with as_airflow_errors():
            name = self.python_callable.__name__
            text = program(self._definition, name, list(self.op_args), dict(self.op_kwargs))
        self.command = command(torchrun=self.nproc_per_node not in (None, 1, "1"))
        self.args = []
        self.env = {**(self.env or {}), **environment(text)}
        return PyTorchJobOperator.execute(self, context)

    def _conclude(self, outcome: Outcome, context: Context, *, stored: bool = True) -> Any:
        """Conclude as the operator does, but fail the task without a retry if the return value isn't JSON.

        A retry would train again and lose the value again. The outcome of an earlier try is treated the same.
        """
        from airflow_provider_ktrain.exceptions import TrainingConfigurationError

        returned = super()._conclude(outcome, context, stored=stored)
        if outcome.result is None and (problem := outcome.result_error.partition(NOT_JSON)[2]):
            raise TrainingConfigurationError(
                f"{self.python_callable.__name__} succeeded, but its return value is not JSON and is lost: "
                f"{problem.rstrip(QUOTES)}. Return strings, numbers, booleans, None, lists and dicts"
            )
        return returned


def _definition(function: Callable[..., Any]) -> Definition:
    """The definition of the function that is decorated.

    :raises ValueError: it isn't a plain function, its source can't be read, or it has decorators below ours.
    """
    if not isinstance(function, FunctionType):
        raise ValueError(f"@task.pytorchjob: found {type(function).__name__}, expected a function. {_REMEDY}")
    name = function.__name__
    try:
        definition = Definition(inspect.getsource(function))
    except (OSError, SyntaxError) as e:
        raise ValueError(f"@task.pytorchjob: the source of {name} can't be read ({e}): define it in a file") from None
    lost = ", ".join(f"@{text}" for text in _decorators_below_ours(definition, function))
    if lost or hasattr(function, "__wrapped__"):
        raise ValueError(f"@task.pytorchjob: {name} has other decorators below it{lost and f': {lost}'}. {_REMEDY}")
    return definition


def _decorators_below_ours(definition: Definition, function: FunctionType) -> list[str]:
    """Those between ours and `def`. The last one is ours if none can be recognized: `@mine` of a local variable."""
    decorators = definition.decorators
    ours = [i for i, (node, _) in enumerate(decorators) if _is_ours(_value(node, function.__globals__))]
    return [text for _, text in decorators[ours[-1] + 1 :]] if ours else []


def _value(decorator: ast.expr, scope: Mapping[str, Any]) -> Any:
    """What a decorator's name stands for, without its call; None if it isn't a dotted name known in the module."""
    match decorator:
        case ast.Call(func=called):
            return _value(called, scope)
        case ast.Attribute(value=owner, attr=name):
            with contextlib.suppress(Exception):
                return getattr(_value(owner, scope), name)
        case ast.Name(id=name):
            return scope.get(name)
    return None


def _is_ours(value: Any) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    return value is pytorchjob_task or value is _decorate


def _returns_nothing(logs: Any) -> bool:
    """Whether this choice of logs leaves out replica 0 of every role."""
    return logs == "none" or (isinstance(logs, Mapping) and not any(0 in indexes for indexes in logs.values()))


def pytorchjob_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> TaskDecorator:
    """Run a function in every replica of a PyTorchJob; rank 0's return value is the task's.

    Only the function's source is sent to the pod, so it imports what it needs inside. Its arguments and its return
    value are JSON. With `nproc_per_node` above 1, torchrun starts it; otherwise it runs once in each replica. A name of
    the surrounding module or of Airflow's context is an error when the DAG is parsed. Decorators above this one, such
    as `@setup` and `@task.run_if`, are applied by Airflow; decorators below it are errors.

    :param python_callable: the function.
    :param multiple_outputs: push each key of a returned dict as an XCom. Default: as the return annotation says.
    :param kwargs: parameters of PyTorchJobOperator: `image`, `workers`, `gpus`, `manifest`, `namespace`, ...
    :raises ValueError: when the DAG is parsed: the function uses something that isn't sent; it has decorators below
        this one; `command` or `args` is set; `image` and `manifest` are missing; `logs` leaves out replica 0.
    :raises TrainingConfigurationError: when the task runs: the arguments aren't JSON, or exceed 96 KiB together with
        the program; the return value isn't JSON.
    """
    decorate = functools.partial(_decorate, {"multiple_outputs": multiple_outputs, **kwargs})
    return cast("TaskDecorator", decorate if python_callable is None else decorate(python_callable))


def _decorate(options: Mapping[str, Any], python_callable: Callable[..., Any]) -> TaskDecorator:
    """Decorate the function. It is checked here, so that `.expand()` also fails when the DAG is parsed."""
    if callable(python_callable):  # otherwise Airflow reports the error
        _definition(python_callable)
    return task_decorator_factory(
        python_callable=python_callable, decorated_operator_class=_PyTorchJobDecoratedOperator, **options
    )
