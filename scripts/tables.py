"""Writes the generated tables of the reference, so that they can be read without the documentation site.

    python scripts/tables.py

A table replaces the text between two comments of its page. `tests/test_docs.py` fails if a page is out of date.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where this file is run as a script

from airflow_provider_ktrain.core.checks import rules as registered  # noqa: E402
from airflow_provider_ktrain.core.checks.rbac import RULES  # noqa: E402
from airflow_provider_ktrain.exceptions import BY_CATEGORY, TrainingJobError  # noqa: E402
from airflow_provider_ktrain.get_provider_info import get_provider_info  # noqa: E402
from scripts.pages import Pages, table  # noqa: E402


def first_line(documented: Any) -> str:
    return (documented.__doc__ or "").strip().partition("\n")[0]


def first_paragraph(documented: Any) -> str:
    return " ".join((documented.__doc__ or "").strip().partition("\n\n")[0].split())


def options() -> str:
    """The section of airflow.cfg, from the provider's metadata."""
    section: dict[str, Any] = get_provider_info()["config"]["ktrain"]["options"]
    rows = (
        (
            f"`{name}`",
            f"`{o['default']}`" if o["default"] else "",
            o["description"],
        )
        for name, o in section.items()
    )
    return table(("option", "default", "meaning"), rows)


def categories() -> str:
    """Which exception each category of cause raises."""
    rows = [(str(category), f"`{raised.__name__}`", first_line(raised)) for category, raised in BY_CATEGORY.items()]
    rows.append(("unknown", f"`{TrainingJobError.__name__}`", "No evidence says why."))
    return table(("category", "exception", "meaning"), rows)


def rules() -> str:
    """The rules of `ktrain check`: the docstrings of their functions, without the reasons."""
    ordered = sorted(registered(), key=lambda rule: (rule.level, rule.code, rule.kind.name if rule.kind else ""))
    return "\n\n".join(
        table(
            (level, "only for", "rule"),
            ((f"`{r.code}`", r.kind.name if r.kind else "", first_paragraph(r.check)) for r in same),
        )
        for level, same in itertools.groupby(ordered, key=lambda rule: rule.level)
    )


def rights() -> str:
    """The rules of the Role that `ktrain rbac` prints."""
    rows = ((f"`{g}`" if g else "core", ", ".join(r), ", ".join(v)) for g, r, v in RULES)
    return table(("API group", "resources", "verbs"), rows)


PAGES = Pages(
    "scripts/tables.py",
    {
        ROOT / "docs" / "reference" / "configuration.md": options,
        ROOT / "docs" / "reference" / "exceptions.md": categories,
        ROOT / "docs" / "reference" / "checks.md": rules,
        ROOT / "docs" / "how-to" / "rbac.md": rights,
    },
)

if __name__ == "__main__":
    PAGES.write()
