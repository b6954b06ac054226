"""Prints the features that `make test` runs, what only `make test-all` tests, and which tests wait for real time.

python scripts/suites.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where this file is run as a script

from scripts.end_rules import code_of, functions, guarantees  # noqa: E402
from scripts.pages import table  # noqa: E402
from tests.waiting import LONG, WAITS  # noqa: E402

FEATURES = "tests/e2e/test_features.py"
SEPARATE = ("chaos", "browser", "horovod", "executors")  #: Marks of tests with a target of their own.
#: The fixtures of tests that a conftest.py marks as thorough, by their folder.
BY_FIXTURE = {
    "embedded_cluster/tests/conformance/": re.compile(r"\bresults\b"),
}


def is_thorough(test: str) -> bool:
    """Whether `make test` leaves a test out.

    :param test: `path` or `path::name`.
    """
    path = test.partition("::")[0]
    if path == FEATURES:
        return False
    if path.startswith("tests/e2e/"):
        return "mark.e2e" in code_of(path)
    code = code_of(test)
    marked = [bool(fixture.search(code)) for folder, fixture in BY_FIXTURE.items() if path.startswith(folder)]
    return "mark.thorough" in code or any(marked)


def features() -> str:
    """The tests of FEATURES by their names."""
    names = [name.removeprefix("test_") for name in functions(FEATURES) if name.startswith("test_")]
    return "\n".join(f"- {name.replace('_', ' ')}" for name in names)


def others() -> Iterator[tuple[str, str]]:
    """What the files show whose tests `make test` leaves out, all or some."""
    for file in sorted((*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("embedded_cluster/tests/**/test_*.py"))):
        path = str(file.relative_to(ROOT))
        if any(f"mark.{mark}" in code_of(path) for mark in SEPARATE):
            continue
        tests = [name for name in functions(path) if name.startswith("test_")]
        left_out = [name for name in tests if is_thorough(f"{path}::{name}")]
        if left_out == tests:
            yield (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0], f"`{path}`"
        elif left_out:
            names = (name.removeprefix("test_").replace("_", " ") for name in left_out)
            text = "; ".join(names)
            yield text[:1].upper() + text[1:], f"`{path}`"


def suites() -> str:
    """The features, and what has no test in `make test`."""
    only = [
        (guarantee.text, "<br>".join(guarantee.tests))
        for guarantee in guarantees()
        if all(map(is_thorough, guarantee.tests))
    ]
    return (
        f"`{FEATURES}` runs each feature once through Airflow's own processes, in one Airflow:\n\n{features()}\n\n"
        f"Only `make test-all` tests this:\n\n{table(('promise', 'tests'), (*only, *others()))}\n\n"
        f"Only these tests wait for more than {LONG} s of real time; `make waits` finds others:\n\n"
        f"{table(('tests', 'they wait for'), ((f'`{path}`', reason) for path, reason in WAITS.items()))}"
    )


if __name__ == "__main__":
    print(suites())
