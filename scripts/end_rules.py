"""Makes the tables of the rules of `core/end_rules.py` for docs/contributing/rules.md; reads `tests/guarantees.yaml`.

    python scripts/end_rules.py

prints the tables, which docs/generate.py puts into the page.
"""

from __future__ import annotations

import ast
import enum
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where this file is run as a script

from airflow_provider_ktrain.core.end_rules import LIMITS, RULES, TROUBLE, Action, Rule  # noqa: E402
from scripts.pages import table  # noqa: E402

GUARANTEES = ROOT / "tests" / "guarantees.yaml"
#: Sets of events that have a name of their own.
GROUPS: Mapping[frozenset[Any], str] = {LIMITS: "a limit", TROUBLE: "an error or a refused watch ends the try"}
#: The words before the values of a condition.
SUBJECTS = {"seen": "job", "owner": "owner", "task": "task", "successor": "next"}
#: The words of a condition that is true or false.
FLAGS = {
    ("holds", True): "the read confirms it",
    ("holds", False): "the read doesn't confirm it",
    ("may_wait", True): "time is left",
    ("hurried", True): "only seconds are left",
    ("fresh", True): "just created",
    ("cause_stored", True): "the cause is stored",
    ("suspended", True): "this try has suspended it",
    ("restarts", True): "its operator may train it again",
}
#: A test whose code contains one of these runs with a TrainJob.
TRAINJOB = re.compile("of_each_kind|of_all_kinds|train_?job|TrainTask", re.IGNORECASE)


# the rules


def end_rules() -> str:
    """The rules, and what their actions mean."""
    used = [action for action in Action if any(rule.action is action for rule in RULES)]
    actions = ((f"**{name_of(action)}**", action.value) for action in used)
    rules = (
        (number, events_of(rule), "; ".join(conditions_of(rule)), f"**{name_of(rule.action)}**", words_of(rule))
        for number, rule in enumerate(RULES, 1)
    )
    head = ("", "what happened", "and", "action", "in words")
    return f"{table(('action', 'the process'), actions)}\n\n{table(head, rules)}"


def words_of(rule: Rule) -> str:
    return rule.text.replace("\n", " ")


def name_of(action: Action) -> str:
    return action.name.lower().replace("_", " ")


def events_of(rule: Rule) -> str:
    """The events to which a rule applies, in the order of their definition; groups first."""
    rest, words = rule.event, []
    if rest is None:
        return "anything"
    for group, name in GROUPS.items():
        if group <= rest:
            words.append(name)
            rest -= group
    return "; ".join([*words, *values(rest)])


def conditions_of(rule: Rule) -> Iterator[str]:
    """The other conditions of a rule, in words."""
    for name, subject in SUBJECTS.items():
        if (wanted := getattr(rule, name)) is not None:
            yield f"{subject}: {either(values(wanted))}"
    for (name, value), words in FLAGS.items():
        if getattr(rule, name) is value:
            yield words


def values(wanted: frozenset[Any]) -> list[str]:
    """The values of a set of members of one enum, in the order of their definition."""
    kinds: set[type[enum.Enum]] = {type(member) for member in wanted}
    return [str(member.value) for kind in kinds for member in kind if member in wanted]


def either(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


# the guarantees and their tests


@dataclass(frozen=True)
class Guarantee:
    """An entry of tests/guarantees.yaml.

    :param section: its heading.
    :param text: the guarantee.
    :param tests: `path` or `path::name` of the tests that show it.
    :param not_for_trainjobs: why no test of it runs with a TrainJob. Default: one does.
    """

    section: str
    text: str
    tests: tuple[str, ...]
    not_for_trainjobs: str = ""


def guarantees() -> list[Guarantee]:
    """The entries of tests/guarantees.yaml."""
    sections: Mapping[str, list[dict[str, Any]]] = yaml.safe_load(GUARANTEES.read_text())
    return [
        Guarantee(section, entry["guarantee"], tuple(entry["tests"]), entry.get("not for TrainJobs", ""))
        for section, entries in sections.items()
        for entry in entries
    ]


@functools.cache
def functions(path: str) -> dict[str, str]:
    """The code of each function of a file, with its decorators."""
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    return {
        node.name: "\n".join(lines[min(part.lineno for part in (*node.decorator_list, node)) - 1 : node.end_lineno])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def code_of(test: str) -> str:
    """The code of a test, or of all tests of a file.

    :raises KeyError: the file has no such test.
    """
    path, _, name = test.partition("::")
    return functions(path)[name] if name else (ROOT / path).read_text()


def runs_with_a_trainjob(test: str) -> bool:
    return "trainjob" in test.partition("::")[0] or bool(TRAINJOB.search(code_of(test)))


if __name__ == "__main__":
    print(end_rules())
