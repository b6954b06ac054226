"""How many facts the scenarios compare, and how many of them differ on the embedded cluster on purpose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .scenario import Scenario

NOT_COMPARED = ("...", "<any>")  # texts that stand for anything


@dataclass(frozen=True)
class Facts:
    """:param compared: facts of the recordings that are compared: each state, reason, message, line, mark of an order.
    :param different: those that the embedded cluster does otherwise.
    """

    compared: int = 0
    different: int = 0

    def __add__(self, other: Facts) -> Facts:
        return Facts(self.compared + other.compared, self.different + other.different)

    def __str__(self) -> str:
        agree = self.compared - self.different
        return f"{agree} of {self.compared} facts agree, {100 * agree / max(self.compared, 1):.2f}%"


def facts(scenarios: Iterable[Scenario]) -> Facts:
    """The facts of all scenarios."""
    return sum((of_scenario(scenario) for scenario in scenarios), Facts())


def of_scenario(scenario: Scenario) -> Facts:
    """The facts of one scenario; a difference that is only described counts as one fact that was compared."""
    compared = leaves(scenario.expect) + sum(leaves(step.get("answer", {})) for step in scenario.steps)
    overrides = sum(leaves(step.get("embedded", {}).get("answer", {})) for step in scenario.steps)
    only_described = max(len(scenario.differs) - overrides, 0)
    return Facts(compared + only_described, overrides + only_described)


def leaves(value: Any) -> int:
    """The number of single values in an expectation."""
    if isinstance(value, dict):
        return sum(leaves(item) for item in value.values())
    if isinstance(value, list):
        return sum(leaves(item) for item in value)
    return value not in NOT_COMPARED
