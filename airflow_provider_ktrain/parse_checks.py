"""Checks of literal parameters when a DAG is parsed, so that Airflow's UI shows a mistake as an import error.

A template, an XComArg and a mapped value aren't known then. They are checked when the task runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.manifest.volumes import Volume

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

JINJA = ("{{", "{%", "{#")


class ParseChecks(metaclass=compat.ChecksAfterInit):
    """Mixin of operators: their literal parameters are checked when they have been created.

    :raises ValueError: when the operator is created: a literal is invalid.
    """

    def parse_problem(self) -> str:
        """What is wrong with the literal parameters; empty if nothing is."""
        operator: BaseOperator = self  # type: ignore[assignment]
        try:
            self._check_literals(literals(operator))
        except ManifestError as e:
            return f"{e}\nTask: {operator.task_id}"
        return ""

    def _check_literals(self, given: Mapping[str, Any]) -> None:
        """Check the parameters whose values are known when the DAG is parsed."""
        raise NotImplementedError


def literals(operator: BaseOperator) -> dict[str, Any]:
    """The attributes of an operator whose values are known when the DAG is parsed, by name.

    Only template fields are rendered: in another attribute, a template is a literal text.
    """
    return {
        name: value
        for name, value in vars(operator).items()
        if name not in operator.template_fields or is_literal(value)
    }


def is_literal(value: Any) -> bool:
    """Whether a value has no template and no XComArg in it."""
    if isinstance(value, str):
        return not any(mark in value for mark in JINJA)
    if isinstance(value, Mapping):
        return all(is_literal(member) for member in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_literal(member) for member in value)
    if isinstance(value, Volume) and hasattr(value, "__dict__"):
        return is_literal(vars(value))
    return not compat.is_resolved_later(value)
