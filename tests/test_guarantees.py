"""Each guarantee of docs/guarantees.md names a test that runs with a TrainJob."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guarantees.md"
#: a statement that contains these words is about another kind, and gives the reason
NOT_FOR_TRAINJOBS = "Not for TrainJobs:"
TABLES_OF_EVENTS = ("When a task ends", "Crashes")  #: sections in which each row names a test
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+)(\[trainjob\])?)?`")
#: the decorators that run a test with jobs of several kinds
EACH_KIND = re.compile(r"of_each_kind|of_all_kinds")
#: a test whose code contains one of these runs with a TrainJob
TRAINJOB = re.compile(rf"{EACH_KIND.pattern}|train_?job|TrainTask", re.IGNORECASE)


def statements() -> list[tuple[str, str]]:
    """The table rows, list items and paragraphs of the page that name a test, and each event, with their section."""
    found: list[tuple[str, str]] = []
    section, continues = "", False
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if continues and line.strip() and not line.startswith(("- ", "|", "#")):
            found[-1] = (section, f"{found[-1][1]} {line.strip()}")
        elif line.strip() and not line.startswith(("#", "|-")):
            found.append((section, line.strip()))
        continues = bool(line.strip()) and not line.startswith(("|", "#"))
    rows = [row for row in found if row[1].startswith("|") and row[0] in TABLES_OF_EVENTS]
    headings = [next(row for row in rows if row[0] == name) for name in TABLES_OF_EVENTS]
    return [one for one in found if NAMED.search(one[1]) or (one in rows and one not in headings)]


@functools.cache
def functions(file: pathlib.Path) -> dict[str, str]:
    """The code of each test of a file, with its decorators."""
    text = file.read_text()
    return {
        node.name: "\n".join(
            ast.get_source_segment(text, part) or "" for part in (*node.decorator_list, node)
        )
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }  # fmt: skip


def code(path: str, name: str) -> str:
    """The code of a test, or of all tests of a file."""
    return functions(ROOT / path)[name] if name else (ROOT / path).read_text()


def runs_with_a_trainjob(path: str, name: str) -> bool:
    return bool("trainjob" in path or TRAINJOB.search(code(path, name)))


@pytest.mark.parametrize("statement", [text for _, text in statements()], ids=lambda text: text[:60])
def test_guarantee_names_a_test_with_a_trainjob(statement: str) -> None:
    if NOT_FOR_TRAINJOBS in statement:
        return
    tests = [(path, name) for path, name, _ in NAMED.findall(statement)]
    assert tests, "it names no test"
    assert any(runs_with_a_trainjob(*test) for test in tests), f"none of {tests} runs with a TrainJob"


def test_tests_that_run_with_each_kind_are_marked() -> None:
    named = [match.groups() for _, statement in statements() for match in NAMED.finditer(statement)]
    for path, name, marked in named:
        if name:
            assert bool(marked) is bool(EACH_KIND.search(code(path, name))), f"{path}::{name}"


def test_statements_are_found() -> None:
    assert len(statements()) > 80
    assert {section for section, _ in statements()} > set(TABLES_OF_EVENTS)
