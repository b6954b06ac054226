"""Writes the list of the features that `make test` runs, and the table of what only `make test-all` tests.

    python scripts/suites.py

They stand in CONTRIBUTING.md. `tests/test_guarantees.py` fails if they are out of date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where this file is run as a script

from scripts.endings import code_of, functions, guarantees  # noqa: E402
from scripts.pages import Pages, table  # noqa: E402

FEATURES = "tests/e2e/test_features.py"
#: the fixtures of tests that a conftest.py marks as thorough, by their folder
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


def suites() -> str:
    """The features, and the guarantees that have no test in `make test`."""
    names = [name.removeprefix("test_") for name in functions(FEATURES) if name.startswith("test_")]
    features = "\n".join(f"- {name.replace('_', ' ')}" for name in names)
    only = [g for g in guarantees() if all(map(is_thorough, g.tests))]
    rows = ((guarantee.text, "<br>".join(f"`{test}`" for test in guarantee.tests)) for guarantee in only)
    return (
        f"`{FEATURES}` runs each feature once through Airflow's own processes, in one Airflow:\n\n{features}\n\n"
        f"Only `make test-all` tests these guarantees:\n\n{table(('guarantee', 'tests'), rows)}"
    )


PAGES = Pages("scripts/suites.py", {ROOT / "CONTRIBUTING.md": suites})

if __name__ == "__main__":
    PAGES.write()
