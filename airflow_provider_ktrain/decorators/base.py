"""Task decorators that run a Python function as the program of a training job."""

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
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.task_variables import PROGRAM
from airflow_provider_ktrain.core.kinds import Manifest
from airflow_provider_ktrain.core.logs.result import LEFT_OUT, UNKNOWN
from airflow_provider_ktrain.core.manifest.program import (
    NOT_JSON,
    TERMINATION_MESSAGE,
    TORCH,
    Definition,
    Runner,
    cannot_travel,
    program,
    program_variable,
)
from airflow_provider_ktrain.operators.training import TrainingJobOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.engine.follow.outcome import Outcome

QUOTES = "\"'"
_REMEDY = "Decorators below it are not applied in the pod: decorate a function inside this one and call it"


class FunctionOperator(DecoratedOperator, TrainingJobOperator):
    """Base of the operators behind the decorators: a training job whose program is a Python function.

    A subclass also inherits the operator of its kind, whose template fields it adds to `FUNCTION_FIELDS`.
    """

    custom_operator_name: str
    runner: ClassVar[Runner] = TORCH
    #: Why no return value was found.
    lost_because: ClassVar[str] = "neither the log of replica 0 nor its termination message has it"
    needs_image: ClassVar[bool] = True  #: Whether the job has no image without `image` and `manifest`.
    launch_environment: ClassVar[Mapping[str, str]] = TERMINATION_MESSAGE  #: Besides the program itself.
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **TrainingJobOperator.template_fields_renderers,
    }

    def __init__(self, *, python_callable: Callable[..., Any], **kwargs: Any) -> None:
        if taken := {"command", "args"} & kwargs.keys():
            raise ValueError(
                f"{self.custom_operator_name}: {taken.pop()} can't be set, because the function is the program"
            )
        super().__init__(python_callable=python_callable, **kwargs)
        self._definition = definition_of(python_callable, self.custom_operator_name)
        problems = [*cannot_travel(self._definition, python_callable.__name__), *self._context_problems()]
        if self.needs_image and self.image is None and self.manifest is None:
            problems.append(f"{python_callable.__name__} has no image: set image=... or manifest=...")
        if problems:
            raise ValueError(f"{self.custom_operator_name}: " + "; ".join(problems))

    def function_arguments(self) -> Mapping[str, Any]:
        """The arguments that the task gives the function, by the names of its parameters."""
        return {**inspect.signature(self.python_callable).bind_partial(*self.op_args).arguments, **self.op_kwargs}

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

    def build_manifest(self, source: Mapping[str, Any] | str | None) -> Manifest:
        """Build the manifest as the operator does; `pod_override` must not replace the function's program."""
        built = super().build_manifest(source)
        if not self.pod_override:
            return built
        for role, template in self.kind.form.templates(built):
            program = self.kind.form.program(built["spec"], template.get("spec") or {}, role)
            same = (program.get("command"), program.get("args")) == (self.command, [])
            sent = any(variable.get("name") == PROGRAM for variable in program.get("env") or ())
            if self.kind.runs_program(role) and not (same and sent):
                raise ManifestError(
                    f"the program of {role} is the function",
                    where="pod_override",
                    found=f"a change of command, args or {PROGRAM} of its main container",
                    expected="other fields",
                    remedy="remove it",
                )
        return built

    def get_python_source(self) -> str:
        """The definition of the function as it was written, without decorators."""
        return self._definition.text

    def launch_command(self) -> list[str]:
        """The command that starts the program."""
        raise NotImplementedError

    def execute(self, context: Context) -> Any:
        """Make the function the job's program, then do what the operator of its kind does."""
        from airflow_provider_ktrain.exceptions import as_airflow_errors
        from airflow_provider_ktrain.operators.summaries import explained

        with as_airflow_errors(), explained(context, self.log):
            name, args, kwargs = self.python_callable.__name__, list(self.op_args), dict(self.op_kwargs)
            text = program(self._definition, name, args, kwargs, self.runner)
        self.command = self.launch_command()
        self.args = []
        self.env = {**(self.env or {}), **program_variable(text), **self.launch_environment}
        return super(DecoratedOperator, self).execute(context)  # DecoratedOperator's would call the function

    def _returned(self, outcome: Outcome) -> Any:
        """The function's return value. The task fails if the function succeeded and its return value is lost.

        If the value isn't JSON, the task isn't retried: a retry would lose it again. The outcome of an earlier try is
        treated the same.
        """
        from airflow_provider_ktrain.exceptions import TrainingConfigurationError

        if outcome.result is not None or not self.do_xcom_push:
            return outcome.result
        why = outcome.result_error.removeprefix(LEFT_OUT)
        if why.startswith(NOT_JSON):
            raise TrainingConfigurationError(
                f"{self.python_callable.__name__} succeeded, but its return value is not JSON and is lost: "
                f"{why.removeprefix(NOT_JSON).rstrip(QUOTES)}.\n"
                "Return strings, numbers, booleans, None, lists and dicts."
            )
        if why != outcome.result_error:
            raise self._lost(why)
        if not outcome.has_result:
            raise self._lost(outcome.result_error.removeprefix(UNKNOWN) or self.lost_because)
        return None

    def _lost(self, why: str) -> Exception:
        """The error for a return value that can't be read although the function succeeded."""
        from airflow_provider_ktrain.exceptions import TrainingJobError

        return TrainingJobError(
            f"{self.python_callable.__name__} succeeded, but its return value can't be read: {why}.\n"
            "A retry doesn't train again. Clear the task to train again."
        )


FUNCTION_FIELDS: Sequence[str] = ("op_args", "op_kwargs")  #: Template fields of the function's arguments.


def function_task(
    operator: type[FunctionOperator], python_callable: Callable[..., Any] | None, **options: Any
) -> TaskDecorator:
    """The decorator with these options, or the function decorated with it.

    :param python_callable: the function; None returns the decorator.
    """

    def decorate(function: Callable[..., Any]) -> TaskDecorator:
        # it is checked here, so that `.expand()` also fails when the DAG is parsed
        if callable(function):  # otherwise Airflow reports the error
            definition_of(function, operator.custom_operator_name)
        return task_decorator_factory(python_callable=function, decorated_operator_class=operator, **options)

    return cast("TaskDecorator", decorate if python_callable is None else decorate(python_callable))


def definition_of(function: Callable[..., Any], decorator: str) -> Definition:
    """The definition of the function that is decorated.

    :param decorator: for errors: `@task.pytorchjob`.
    :raises ValueError: it isn't a plain function, its source can't be read, or it has decorators below ours.
    """
    if not isinstance(function, FunctionType):
        raise ValueError(f"{decorator}: found {type(function).__name__}, expected a function. {_REMEDY}")
    name = function.__name__
    try:
        definition = Definition(inspect.getsource(function))
    except (OSError, SyntaxError) as e:
        raise ValueError(f"{decorator}: the source of {name} can't be read ({e}): define it in a file") from None
    lost = ", ".join(f"@{text}" for text in _decorators_below_ours(definition, function))
    if lost or hasattr(function, "__wrapped__"):
        raise ValueError(f"{decorator}: {name} has other decorators below it{lost and f': {lost}'}. {_REMEDY}")
    if not definition.is_of(function):  # Python 3.13 returns the first lines of the file for a function of `exec`
        raise ValueError(f"{decorator}: the source of {name} can't be read: define it in a file")
    return definition


def _decorators_below_ours(definition: Definition, function: FunctionType) -> list[str]:
    """The decorators between this provider's and `def`.

    If none is recognized as this provider's, for example `@mine` of a local variable, the last one counts as it.
    """
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
    return isinstance(value, FunctionType) and value.__module__.startswith(f"{__package__}.")
